//! Several volumes of one daemon, whose moves run beside each other or wait for one another.

use std::time::Duration;

use block::Bytes;
use migrate::{OnNoConverge, Phase, Strategy, Verify};

use super::nbd::any_wire;
use super::parts::failing;
use super::{common, rate};
use crate::dice::Dice;
use crate::disk::{Faults, Timing};
use crate::guest::Load;
use crate::story::{Happening, Story};
use crate::words::{expect, operator, process};

const STRATEGIES: &[Strategy] = &[
    Strategy::Mirror,
    Strategy::Mirror,
    Strategy::Dbt,
    Strategy::IncrementalDbt,
    Strategy::Snapshot,
    Strategy::MirrorAsync,
    Strategy::Auto,
    Strategy::MirrorPaper,
];

/// Two volumes or three, each of which moves by a strategy of its own, one after the other or at once.
fn several(dice: &Dice, story: Story) -> Story {
    let any = |options: &mut migrate::MoveOptions| {
        options.strategy = dice.pick(STRATEGIES);
        options.on_no_converge = OnNoConverge::Mirror;
        options.downtime_limit_ms = dice.pick(&[5, 50, 500]);
        options.verify = dice.pick(&[Verify::Off, Verify::Sample, Verify::Full]);
    };
    let count = dice.within(2..=3) as usize;
    story.moves_at_once(dice.pick(&[1, 2, 2, 3])).options(any).volumes(count, any)
}

/// Slow disks, targets that fail, and somebody who cancels or pauses one of the moves.
pub(super) fn beside(dice: &Dice) -> Story {
    let slow = Faults { slow: rate(dice), ..Faults::default() };
    let target = if dice.chance(0.5) { failing(dice, &[0.0005, 0.002, 0.01]) } else { slow };
    let timing = |dice: &Dice| if dice.chance(0.3) { Timing::SLOW } else { Timing::FLASH };
    let (source, destination) = (timing(dice), timing(dice));
    let load = Load { requests: dice.pick(&[300, 800]), ..common(dice).load };
    let story = common(dice)
        .guest(load)
        .timings(source, destination)
        .source(slow)
        .target(target)
        .with(Happening::Cancel, dice.below(3))
        .with(Happening::Pause, dice.below(2))
        .with(Happening::TargetLost, dice.below(2));
    several(dice, story)
}

/// The process dies and the host loses its power while moves of several volumes begin, wait, run and end.
pub(super) fn crashed(dice: &Dice) -> Story {
    let load = Load { requests: dice.pick(&[300, 800]), ..common(dice).load };
    let phase = dice.pick(&[Phase::Preparing, Phase::Copying, Phase::PreSwitch, Phase::Committing, Phase::Switched]);
    let story =
        common(dice).guest(load).with(Happening::Crash, dice.within(1..=4)).with(Happening::Cancel, dice.below(2));
    if dice.chance(0.2) {
        return several(dice, story.dies_at_poll(dice.below(1500)));
    }
    let story = story
        .with(Happening::PowerLoss, dice.below(2))
        .with(Happening::PowerLossAtStore, dice.below(2))
        .with(Happening::CrashAgain, dice.below(2))
        .with(Happening::FilesFail, dice.below(2));
    let story = if dice.chance(0.5) { story.and(process().killed_in(phase)) } else { story };
    several(dice, story)
}

/// Moves of all volumes that were asked for as one: one of them is cancelled or fails, and the process dies meanwhile.
pub(super) fn together(dice: &Dice) -> Story {
    let load = Load { requests: dice.pick(&[300, 800]), ..common(dice).load };
    let target = if dice.chance(0.3) { failing(dice, &[0.0005, 0.002, 0.01]) } else { Faults::default() };
    let story = common(dice).guest(load).target(target).with(Happening::Crash, dice.below(3));
    let story = if dice.chance(0.3) { story.gives_up_lost_targets() } else { story };
    let phase = dice.pick(&[Phase::Preparing, Phase::Copying, Phase::Verifying]);
    let story = match dice.below(4) {
        0 => story.and(operator().cancels_in(phase)),
        1 => story.and(operator().cancels_in(phase)).and(process().killed_in(Phase::Cancelling)),
        2 => story.with(Happening::TargetLost, dice.within(1..=2)).with(Happening::PowerLoss, dice.below(2)),
        _ => story.with(Happening::Cancel, 1).dies_at_poll(dice.below(1500)),
    };
    several(dice, story).together()
}

/// Guests over NBD and copies with few buffers between them. The first volume may answer nothing for a minute; the others'
/// guests do not wait for it.
pub(super) fn pooled(dice: &Dice) -> Story {
    let wire = any_wire(dice);
    // The largest request fits what only its own export uses of the pool, an eighth of it.
    let (pool, sectors) = dice.pick(&[(1, 64), (1, 64), (4, 600)]);
    let load = Load {
        requests: dice.pick(&[300, 800]),
        outstanding: dice.pick(&[4, 16]),
        reads: dice.pick(&[0.2, 0.7]),
        sectors_max: sectors,
        think: Duration::from_micros(dice.pick(&[50, 300])),
        ..Load::default()
    };
    let story = common(dice).volume(Bytes(dice.pick(&[1 << 20, 3 << 20]))).guest(load).wire(wire).pools_of(pool, 8);
    if dice.chance(0.5) {
        let stuck = Faults { stuck: dice.pick(&[0.01, 0.05]), ..Faults::default() };
        let story = story.source(stuck).only_first_fails().and(expect().no_wait_above(ISOLATED_WAIT_MAX));
        // None of the others waits for a place that the first one's move keeps.
        return several(dice, story).moves_at_once(3);
    }
    several(dice, story.with(Happening::PoolEmpty, dice.below(4)).with(Happening::Crash, dice.below(2)))
}

/// The longest that a request takes beside a volume that answers nothing: what the strategies hold a guest for, and its queue.
const ISOLATED_WAIT_MAX: Duration = Duration::from_secs(2);
