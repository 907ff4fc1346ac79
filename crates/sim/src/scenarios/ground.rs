//! What is under the engine: files, buffers, clocks, sectors and connections of other kinds, or in trouble.

use std::time::Duration;

use block::Bytes;
use migrate::Phase;

use super::nbd::any_wire;
use super::{common, rate, sparse};
use crate::dice::Dice;
use crate::disk::Faults;
use crate::guest::{Load, Pattern};
use crate::happening::When;
use crate::story::{Happening, Story};
use crate::words::{process, progress_map};

/// A move long enough for the progress map to be written while its disk fails writes, and then a death. (Neither the map nor the
/// journal is ever flushed: what they write is forced.)
pub(super) fn map_errors(dice: &Dice) -> Story {
    let rate = dice.pick(&[0.02, 0.2, 0.6]);
    let map = progress_map().write_errors(rate).read_errors(rate / 10.0).stuck(rate / 20.0);
    let story = common(dice)
        .volume(Bytes::mib(dice.pick(&[3, 9])))
        .guest(sparse(dice))
        .and(map)
        .options(|options| options.bandwidth = Some(dice.pick(&[300 << 10, 600 << 10])))
        .within(Duration::from_secs(25))
        .with(Happening::Crash, dice.below(3))
        .with(Happening::PowerLoss, dice.below(2));
    if dice.chance(0.5) { story.and(process().killed_at_write_in(Phase::Copying)) } else { story }
}

/// Writes and reads of journal and progress map fail together, under a guest whose writes the map has to record.
pub(super) fn stores_errors(dice: &Dice) -> Story {
    let rate = dice.pick(&[0.02, 0.2, 0.5]);
    let faults = Faults { write_errors: rate, read_errors: rate / 4.0, ..Faults::default() };
    common(dice)
        .volume(Bytes::mib(dice.pick(&[1, 9])))
        .journal(faults)
        .with(Happening::Crash, dice.below(3))
        .with(Happening::PowerLoss, dice.below(2))
        .with(Happening::Cancel, dice.below(2))
}

/// The daemon's small files fail while jobs begin, end and are undone, and its process dies.
pub(super) fn files_fail(dice: &Dice) -> Story {
    let phase = dice.pick(&[Phase::Preparing, Phase::Copying, Phase::Switched]);
    common(dice)
        .with(Happening::FilesFail, dice.within(1..=4))
        .at(When::After(Duration::ZERO), Happening::FilesFail)
        .at(When::In(phase), Happening::FilesFail)
        .with(Happening::Crash, dice.below(3))
        .with(Happening::PowerLoss, dice.below(2))
        .with(Happening::Cancel, dice.below(2))
}

/// Somebody else has the buffers that copies, comparisons and the guest's requests need.
pub(super) fn pool_empty(dice: &Dice) -> Story {
    let phase = dice.pick(&[Phase::Copying, Phase::Verifying, Phase::PreSwitch]);
    let wire = any_wire(dice);
    common(dice)
        .wire(wire)
        .with(Happening::PoolEmpty, dice.within(1..=4))
        .at(When::In(phase), Happening::PoolEmpty)
        .with(Happening::Crash, dice.below(2))
}

/// The wall clocks jump while the daemon moves and dies.
pub(super) fn clock_jumps(dice: &Dice) -> Story {
    let phase = dice.pick(&[Phase::Copying, Phase::PreSwitch, Phase::Committing]);
    common(dice)
        .with(Happening::ClockJump, dice.within(1..=5))
        .at(When::In(phase), Happening::ClockJump)
        .with(Happening::Crash, dice.below(3))
}

/// The source answers after up to a minute and a half, while copies read it and the guest waits for it.
pub(super) fn source_late(dice: &Dice) -> Story {
    let late = Faults { stuck: dice.pick(&[0.002, 0.01]), slow: rate(dice), ..Faults::default() };
    common(dice)
        .source(late)
        .with(Happening::Crash, dice.below(3))
        .with(Happening::Cancel, dice.below(2))
        .with(Happening::TargetLost, dice.below(2))
}

/// Disks and guests of sectors of 4096 bytes, to a target of the same or of smaller ones.
pub(super) fn large_sectors(dice: &Dice) -> Story {
    let size = Bytes(dice.pick(&[1 << 20, 3 << 20]) + dice.pick(&[0, 4096, 5 * 4096]));
    let story = common(dice)
        .volume(size)
        .alignment(4096)
        .with(Happening::Crash, dice.below(3))
        .with(Happening::PowerLoss, dice.below(2))
        .with(Happening::TargetLost, dice.below(2));
    if dice.chance(0.3) { story.target_alignment(512) } else { story }
}

/// A guest with two connections to one export, whose writes meet at one place. Each is cut, and half open, by itself.
pub(super) fn two_connections(dice: &Dice) -> Story {
    let load = Load { requests: 1500, outstanding: 16, reads: 0.4, pattern: Pattern::Hot(64), ..Load::default() };
    let slow = Faults { slow: rate(dice), ..Faults::default() };
    let wire = any_wire(dice);
    common(dice)
        .guest(load)
        .source(slow)
        .target(slow)
        .wire(wire)
        .two_connections()
        .with(Happening::Reconnect, dice.below(5))
        .with(Happening::HalfOpen, dice.below(4))
        .with(Happening::LinkDown, dice.below(3))
        .with(Happening::Crash, dice.below(3))
        .with(Happening::PowerLoss, dice.below(2))
}
