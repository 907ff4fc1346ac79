//! Moves to a target that fails, is full, hangs or goes away.

use std::time::Duration;

use migrate::{Phase, Strategy, Verify};

use super::basic::rate;
use super::common;
use crate::disk::{Faults, Timing};
use crate::guest::Load;
use crate::rng::Rng;
use crate::scenario::{FaultEvent, Scenario};
use crate::scenario_dsl::{expect, target};

pub(super) fn target_errors(rng: &Rng) -> Scenario {
    let rate = rate(rng);
    let faults = Faults { read_errors: rate, write_errors: rate, flush_errors: rate * 10.0, ..Faults::default() };
    common(rng).target(faults)
}

/// Zeroes and holes beside the errors: what a failed write has left there must not be taken for what a flush has kept.
pub(super) fn target_flaky(rng: &Rng) -> Scenario {
    let rate = rng.pick(&[0.005, 0.02, 0.05]);
    let load = Load { requests: 1000, zeroes: 0.2, discards: 0.1, reads: 0.3, flushes: 0.02, ..Load::default() };
    let faults =
        Faults { read_errors: rate, write_errors: rate, flush_errors: rng.pick(&[0.0, 0.1]), ..Faults::default() };
    common(rng).filled(0.5).guest(load).target(faults).with(FaultEvent::Crash, rng.below(2))
}

pub(super) fn target_lost(rng: &Rng) -> Scenario {
    let scenario = common(rng).with(FaultEvent::TargetLost, rng.within(1..=3));
    if rng.chance(0.3) { scenario.gives_up_lost_targets() } else { scenario }
}

pub(super) fn target_stuck(rng: &Rng) -> Scenario {
    common(rng).target(Faults { stuck: rate(rng), slow: rate(rng), ..Faults::default() })
}

/// Writes that nobody waits for any more land late, beside copies of what the guest has written since.
pub(super) fn target_silent(rng: &Rng) -> Scenario {
    let faults = Faults {
        stuck: rng.pick(&[0.0, 0.002, 0.01]),
        slow: rng.pick(&[0.002, 0.01, 0.05]),
        write_errors: rng.pick(&[0.0, 0.0, 0.002]),
        ..Faults::default()
    };
    let timing = if rng.chance(0.5) { Timing::SLOW } else { Timing::FLASH };
    let (silence, strategy) =
        (rng.pick(&[1, 3, 10, 50]), rng.pick(&[Strategy::Mirror, Strategy::Mirror, Strategy::Auto]));
    common(rng)
        .timings(Timing::FLASH, timing)
        .target(faults)
        .options(|options| (options.silence_ms, options.strategy) = (Some(silence), strategy))
        .with(FaultEvent::TargetLost, rng.below(2))
        .with(FaultEvent::Crash, rng.below(2))
        .with(FaultEvent::Cancel, rng.below(2))
}

/// The longest that a request of the guest's takes beside a target that is stopped once.
const STOPPED_WAIT_MAX: Duration = Duration::from_millis(500);
/// The same where a write cannot be left to the source: the target is lost after three quarters of a second.
const STOPPED_WAIT_MAX_LOSING: Duration = Duration::from_millis(1_000);

/// A target that answers neither reads nor writes nor flushes holds nobody up: a server below it is stopped, and goes on.
pub(super) fn target_stopped(rng: &Rng) -> Scenario {
    let strategies = [Strategy::Mirror, Strategy::Mirror, Strategy::Auto, Strategy::Dbt, Strategy::MirrorAsync];
    let strategy = rng.pick(&[&strategies[..], &[Strategy::MirrorPaper, Strategy::IncrementalDbt]].concat());
    let phase = rng.pick(&[Phase::Copying, Phase::Copying, Phase::Verifying, Phase::PreSwitch, Phase::LastCopy]);
    let span_ms = rng.pick(&[200, 200, 600, 600, 3_000, 20_000, 45_000]);
    let load = Load {
        outstanding: rng.pick(&[1, 4, 8]),
        reads: 0.3,
        flushes: rng.pick(&[0.02, 0.2]),
        fua: rng.pick(&[0.05, 0.3]),
        // Some hundred requests of each while the target is stopped.
        think: Duration::from_millis(u64::from(span_ms) / rng.pick(&[50, 200])).max(Duration::from_millis(1)),
        endless: true,
        ..Load::default()
    };
    let (silence, bandwidth) = (250, rng.pick(&[None, Some(4 << 20), Some(50 << 20)]));
    let scenario = common(rng)
        .filled(0.7)
        .guest(load)
        .verify(rng.pick(&[Verify::Full, Verify::Full, Verify::Sample]))
        .within(Duration::from_millis(rng.pick(&[100, 1_000])))
        .options(|options| {
            (options.silence_ms, options.strategy, options.bandwidth) = (Some(silence), strategy, bandwidth);
            (options.target_ms, options.buffer_bytes) = (30_000, None);
        });
    let scenario = match rng.chance(0.3) {
        true => scenario.with(FaultEvent::TargetSilent(span_ms), 1),
        false => scenario.and(target().silent_in(phase, span_ms)),
    };
    let limit = match strategy {
        Strategy::MirrorAsync | Strategy::MirrorPaper => STOPPED_WAIT_MAX_LOSING,
        _ => STOPPED_WAIT_MAX,
    };
    scenario.and(expect().switched().no_wait_above(limit))
}

pub(super) fn no_space(rng: &Rng) -> Scenario {
    let scenario = common(rng).filled(0.8).target_space(rng.fraction());
    if rng.chance(0.5) { scenario.gives_up_lost_targets() } else { scenario }
}

pub(super) fn target_trouble(rng: &Rng) -> Scenario {
    let rate = rate(rng);
    let scenario = common(rng).target(Faults { read_errors: rate, write_errors: rate, ..Faults::default() });
    let lost = rng.below(3);
    let scenario = scenario.with(FaultEvent::TargetLost, lost).with(FaultEvent::Cancel, rng.below(2));
    let scenario = if rng.chance(0.3) { scenario.target_space(rng.fraction()) } else { scenario };
    scenario.with(FaultEvent::Crash, rng.below(3))
}
