//! What is under the engine: files, buffers, clocks, sectors and connections of other kinds, or in trouble.

use std::time::Duration;

use block::Bytes;
use migrate::Phase;

use super::basic::{rate, sparse};
use super::common;
use super::nbd::any_wire;
use crate::disk::Faults;
use crate::fault_event::When;
use crate::guest::{Load, Pattern};
use crate::rng::Rng;
use crate::scenario::{FaultEvent, Scenario};
use crate::scenario_dsl::{process, progress_map};

/// A move long enough for the progress map to be written while its disk fails writes, and then a death. (Neither the map nor the
/// journal is ever flushed: what they write is forced.)
pub(super) fn map_errors(rng: &Rng) -> Scenario {
    let rate = rng.pick(&[0.02, 0.2, 0.6]);
    let map = progress_map().write_errors(rate).read_errors(rate / 10.0).stuck(rate / 20.0);
    let scenario = common(rng)
        .volume(Bytes::mib(rng.pick(&[3, 9])))
        .guest(sparse(rng))
        .and(map)
        .options(|options| options.bandwidth = Some(rng.pick(&[300 << 10, 600 << 10])))
        .within(Duration::from_secs(25))
        .with(FaultEvent::Crash, rng.below(3))
        .with(FaultEvent::PowerLoss, rng.below(2));
    if rng.chance(0.5) { scenario.and(process().killed_at_write_in(Phase::Copying)) } else { scenario }
}

/// Writes and reads of journal and progress map fail together, under a guest whose writes the map has to record.
pub(super) fn stores_errors(rng: &Rng) -> Scenario {
    let rate = rng.pick(&[0.02, 0.2, 0.5]);
    let faults = Faults { write_errors: rate, read_errors: rate / 4.0, ..Faults::default() };
    common(rng)
        .volume(Bytes::mib(rng.pick(&[1, 9])))
        .journal(faults)
        .with(FaultEvent::Crash, rng.below(3))
        .with(FaultEvent::PowerLoss, rng.below(2))
        .with(FaultEvent::Cancel, rng.below(2))
}

/// The daemon's small files fail while jobs begin, end and are undone, and its process dies.
pub(super) fn files_fail(rng: &Rng) -> Scenario {
    let phase = rng.pick(&[Phase::Preparing, Phase::Copying, Phase::Switched]);
    common(rng)
        .with(FaultEvent::FilesFail, rng.within(1..=4))
        .at(When::After(Duration::ZERO), FaultEvent::FilesFail)
        .at(When::In(phase), FaultEvent::FilesFail)
        .with(FaultEvent::Crash, rng.below(3))
        .with(FaultEvent::PowerLoss, rng.below(2))
        .with(FaultEvent::Cancel, rng.below(2))
}

/// Somebody else has the buffers that copies, comparisons and the guest's requests need.
pub(super) fn pool_empty(rng: &Rng) -> Scenario {
    let phase = rng.pick(&[Phase::Copying, Phase::Verifying, Phase::PreSwitch]);
    let wire = any_wire(rng);
    common(rng)
        .wire(wire)
        .with(FaultEvent::PoolEmpty, rng.within(1..=4))
        .at(When::In(phase), FaultEvent::PoolEmpty)
        .with(FaultEvent::Crash, rng.below(2))
}

/// The wall clocks jump while the daemon moves and dies.
pub(super) fn clock_jumps(rng: &Rng) -> Scenario {
    let phase = rng.pick(&[Phase::Copying, Phase::PreSwitch, Phase::Committing]);
    common(rng)
        .with(FaultEvent::ClockJump, rng.within(1..=5))
        .at(When::In(phase), FaultEvent::ClockJump)
        .with(FaultEvent::Crash, rng.below(3))
}

/// The source answers after up to a minute and a half, while copies read it and the guest waits for it.
pub(super) fn source_late(rng: &Rng) -> Scenario {
    let late = Faults { stuck: rng.pick(&[0.002, 0.01]), slow: rate(rng), ..Faults::default() };
    common(rng)
        .source(late)
        .with(FaultEvent::Crash, rng.below(3))
        .with(FaultEvent::Cancel, rng.below(2))
        .with(FaultEvent::TargetLost, rng.below(2))
}

/// Disks and guests of sectors of 4096 bytes, to a target of the same or of smaller ones.
pub(super) fn large_sectors(rng: &Rng) -> Scenario {
    let size = Bytes(rng.pick(&[1 << 20, 3 << 20]) + rng.pick(&[0, 4096, 5 * 4096]));
    let scenario = common(rng)
        .volume(size)
        .alignment(4096)
        .with(FaultEvent::Crash, rng.below(3))
        .with(FaultEvent::PowerLoss, rng.below(2))
        .with(FaultEvent::TargetLost, rng.below(2));
    if rng.chance(0.3) { scenario.target_alignment(512) } else { scenario }
}

/// A guest with two connections to one export, whose writes meet at one place. Each is cut, and half open, by itself.
pub(super) fn two_connections(rng: &Rng) -> Scenario {
    let load = Load { requests: 1500, outstanding: 16, reads: 0.4, pattern: Pattern::Hot(64), ..Load::default() };
    let slow = Faults { slow: rate(rng), ..Faults::default() };
    let wire = any_wire(rng);
    common(rng)
        .guest(load)
        .source(slow)
        .target(slow)
        .wire(wire)
        .two_connections()
        .with(FaultEvent::Reconnect, rng.below(5))
        .with(FaultEvent::HalfOpen, rng.below(4))
        .with(FaultEvent::LinkDown, rng.below(3))
        .with(FaultEvent::Crash, rng.below(3))
        .with(FaultEvent::PowerLoss, rng.below(2))
}
