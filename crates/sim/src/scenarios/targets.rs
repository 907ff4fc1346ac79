//! Moves to a target that fails, is full, hangs or goes away.

use std::time::Duration;

use migrate::{Phase, Strategy, Verify};

use super::{common, rate};
use crate::dice::Dice;
use crate::disk::{Faults, Timing};
use crate::guest::Load;
use crate::story::{Happening, Story};
use crate::words::{expect, target};

pub(super) fn target_errors(dice: &Dice) -> Story {
    let rate = rate(dice);
    let faults = Faults { read_errors: rate, write_errors: rate, flush_errors: rate * 10.0, ..Faults::default() };
    common(dice).target(faults)
}

/// Zeroes and holes beside the errors: what a failed write has left there must not be taken for what a flush has kept.
pub(super) fn target_flaky(dice: &Dice) -> Story {
    let rate = dice.pick(&[0.005, 0.02, 0.05]);
    let load = Load { requests: 1000, zeroes: 0.2, discards: 0.1, reads: 0.3, flushes: 0.02, ..Load::default() };
    let faults =
        Faults { read_errors: rate, write_errors: rate, flush_errors: dice.pick(&[0.0, 0.1]), ..Faults::default() };
    common(dice).filled(0.5).guest(load).target(faults).with(Happening::Crash, dice.below(2))
}

pub(super) fn target_lost(dice: &Dice) -> Story {
    let story = common(dice).with(Happening::TargetLost, dice.within(1..=3));
    if dice.chance(0.3) { story.gives_up_lost_targets() } else { story }
}

pub(super) fn target_stuck(dice: &Dice) -> Story {
    common(dice).target(Faults { stuck: rate(dice), slow: rate(dice), ..Faults::default() })
}

/// Writes that nobody waits for any more land late, beside copies of what the guest has written since.
pub(super) fn target_silent(dice: &Dice) -> Story {
    let faults = Faults {
        stuck: dice.pick(&[0.0, 0.002, 0.01]),
        slow: dice.pick(&[0.002, 0.01, 0.05]),
        write_errors: dice.pick(&[0.0, 0.0, 0.002]),
        ..Faults::default()
    };
    let timing = if dice.chance(0.5) { Timing::SLOW } else { Timing::FLASH };
    let (silence, strategy) =
        (dice.pick(&[1, 3, 10, 50]), dice.pick(&[Strategy::Mirror, Strategy::Mirror, Strategy::Auto]));
    common(dice)
        .timings(Timing::FLASH, timing)
        .target(faults)
        .options(|options| (options.silence_ms, options.strategy) = (Some(silence), strategy))
        .with(Happening::TargetLost, dice.below(2))
        .with(Happening::Crash, dice.below(2))
        .with(Happening::Cancel, dice.below(2))
}

/// The longest that a request of the guest's takes beside a target that is stopped once.
const STOPPED_WAIT_MAX: Duration = Duration::from_millis(500);
/// The same where a write cannot be left to the source: the target is lost after three quarters of a second.
const STOPPED_WAIT_MAX_LOSING: Duration = Duration::from_millis(1_000);

/// A target that answers neither reads nor writes nor flushes holds nobody up: a server below it is stopped, and goes on.
pub(super) fn target_stopped(dice: &Dice) -> Story {
    let strategies = [Strategy::Mirror, Strategy::Mirror, Strategy::Auto, Strategy::Dbt, Strategy::MirrorAsync];
    let strategy = dice.pick(&[&strategies[..], &[Strategy::MirrorPaper, Strategy::IncrementalDbt]].concat());
    let phase = dice.pick(&[Phase::Copying, Phase::Copying, Phase::Verifying, Phase::PreSwitch, Phase::LastCopy]);
    let span_ms = dice.pick(&[200, 200, 600, 600, 3_000, 20_000, 45_000]);
    let load = Load {
        outstanding: dice.pick(&[1, 4, 8]),
        reads: 0.3,
        flushes: dice.pick(&[0.02, 0.2]),
        fua: dice.pick(&[0.05, 0.3]),
        // Some hundred requests of each while the target is stopped.
        think: Duration::from_millis(u64::from(span_ms) / dice.pick(&[50, 200])).max(Duration::from_millis(1)),
        endless: true,
        ..Load::default()
    };
    let (silence, bandwidth) = (250, dice.pick(&[None, Some(4 << 20), Some(50 << 20)]));
    let story = common(dice)
        .filled(0.7)
        .guest(load)
        .verify(dice.pick(&[Verify::Full, Verify::Full, Verify::Sample]))
        .within(Duration::from_millis(dice.pick(&[100, 1_000])))
        .options(|options| {
            (options.silence_ms, options.strategy, options.bandwidth) = (Some(silence), strategy, bandwidth);
            (options.target_ms, options.buffer_bytes) = (30_000, None);
        });
    let story = match dice.chance(0.3) {
        true => story.with(Happening::TargetSilent(span_ms), 1),
        false => story.and(target().silent_in(phase, span_ms)),
    };
    let limit = match strategy {
        Strategy::MirrorAsync | Strategy::MirrorPaper => STOPPED_WAIT_MAX_LOSING,
        _ => STOPPED_WAIT_MAX,
    };
    story.and(expect().switched().no_wait_above(limit))
}

pub(super) fn no_space(dice: &Dice) -> Story {
    let story = common(dice).filled(0.8).target_space(dice.fraction());
    if dice.chance(0.5) { story.gives_up_lost_targets() } else { story }
}

pub(super) fn target_trouble(dice: &Dice) -> Story {
    let rate = rate(dice);
    let story = common(dice).target(Faults { read_errors: rate, write_errors: rate, ..Faults::default() });
    let lost = dice.below(3);
    let story = story.with(Happening::TargetLost, lost).with(Happening::Cancel, dice.below(2));
    let story = if dice.chance(0.3) { story.target_space(dice.fraction()) } else { story };
    story.with(Happening::Crash, dice.below(3))
}
