//! What stories of several strategies have in common.

use std::time::Duration;

use block::Bytes;
use migrate::Phase;

use super::common;
use crate::dice::Dice;
use crate::disk::Faults;
use crate::guest::{Load, Pattern};
use crate::story::{Happening, Story};
use crate::words::target;

/// Both sides are slow at times.
pub(super) fn slow_sides(dice: &Dice) -> [Faults; 2] {
    let slow = || Faults { slow: dice.pick(&[0.002, 0.01, 0.03]), ..Faults::default() };
    [slow(), slow()]
}

/// What `writer` does, at one place and in small pieces.
pub(super) fn at_one_place(dice: &Dice, writer: fn(&Dice) -> Load) -> Load {
    Load { pattern: Pattern::Hot(dice.pick(&[64, 512])), sectors_max: 32, ..writer(dice) }
}

/// A side that fails requests at one of these rates, and flushes, and is slow and stuck at times.
pub(super) fn failing(dice: &Dice, rates: &[f64; 3]) -> Faults {
    let rate = dice.pick(rates);
    Faults {
        read_errors: rate,
        write_errors: rate,
        flush_errors: dice.pick(&[0.0, 0.1, 0.4]),
        stuck: dice.pick(&[0.0, 0.0, rate / 10.0]),
        slow: rate,
        ..Faults::default()
    }
}

/// The target is gone for a while, now and then, and the process is killed.
pub(super) fn with_target_lost(dice: &Dice, story: Story) -> Story {
    let story = story.with(Happening::TargetLost, dice.below(3)).with(Happening::Crash, dice.below(2));
    let phase = dice.pick(&[Phase::Copying, Phase::Verifying, Phase::PreSwitch]);
    if dice.chance(0.4) { story.and(target().lost_in(phase)) } else { story }
}

/// A long move under sparse writes, killed `crashes` times: the progress map has something to say each time.
pub(super) fn killed_on_the_way(dice: &Dice, load: Load, crashes: u64, faults: Faults) -> Story {
    common(dice)
        .target(faults)
        .volume(Bytes::mib(dice.pick(&[9, 13])))
        .guest(load)
        .within(Duration::from_secs(40))
        .downtime(Duration::from_secs(2))
        .with(Happening::Crash, crashes)
        .with(Happening::PowerLoss, dice.below(2))
        .with(Happening::TargetLost, dice.below(3))
}
