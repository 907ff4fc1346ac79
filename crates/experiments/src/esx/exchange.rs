//! The moves under Exchange: table 1, table 2 and figure 3.
//!
//! What the paper states: the mailbox disk has 350 GB with 2000 mailboxes of Exchange 2010. It lies on RAID-0 over 6
//! disks, and moves to other spindles of the same CX3-40. The load is 22 or 44 tasks a second. Table 1 gives times and
//! downtimes, table 2 write latencies. Not stated, and chosen: pages of 32 KiB (Exchange 2010's), 40 % reads, and
//! 3,000,000 pages that are ever asked for. Zipf's law with an exponent of 0.7 gives how often each is asked for. The
//! rate of requests, 500 a second, is fitted to the part of DBT's time that mirroring saves.

use super::load::Load;
use super::scene::{Place, Scene};
use super::way::Way;
use sim::model::ArrayFigures;

/// The mailbox disk.
pub(super) const MAILBOX_GIB: u64 = 350;
/// What it takes at the rate at which the array writes, in seconds.
pub(super) const OFFLINE_SECONDS: f64 = (MAILBOX_GIB << 30) as f64 / ArrayFigures::CX3_40.write_rate as f64;
/// It is large: it moves so many times smaller than everything else.
const PART: u64 = 4;

/// A move of the mailbox disk with the load `intensity` times the normal one.
pub(super) const fn scene(way: Way, intensity: u64, scale: u64) -> Scene {
    Scene {
        way,
        load: Load::Exchange { intensity },
        data_gib: MAILBOX_GIB,
        system_gib: 0,
        from: Place::ExchangeArray,
        to: Place::ExchangeArray,
        scale: scale * PART,
    }
}
