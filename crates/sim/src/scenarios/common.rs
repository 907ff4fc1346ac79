//! What stories of several strategies have in common.

use std::time::Duration;

use block::Bytes;
use migrate::Phase;

use super::common;
use crate::disk::Faults;
use crate::guest::{Load, Pattern};
use crate::rng::Rng;
use crate::scenario::{FaultEvent, Scenario};
use crate::scenario_dsl::target;

/// Both sides are slow at times.
pub(super) fn slow_sides(rng: &Rng) -> [Faults; 2] {
    let slow = || Faults { slow: rng.pick(&[0.002, 0.01, 0.03]), ..Faults::default() };
    [slow(), slow()]
}

/// What `writer` does, at one place and in small pieces.
pub(super) fn at_one_place(rng: &Rng, writer: fn(&Rng) -> Load) -> Load {
    Load { pattern: Pattern::Hot(rng.pick(&[64, 512])), sectors_max: 32, ..writer(rng) }
}

/// A side that fails requests at one of these rates, and flushes, and is slow and stuck at times.
pub(super) fn failing(rng: &Rng, rates: &[f64; 3]) -> Faults {
    let rate = rng.pick(rates);
    Faults {
        read_errors: rate,
        write_errors: rate,
        flush_errors: rng.pick(&[0.0, 0.1, 0.4]),
        stuck: rng.pick(&[0.0, 0.0, rate / 10.0]),
        slow: rate,
        ..Faults::default()
    }
}

/// The target is gone for a while, now and then, and the process is killed.
pub(super) fn with_target_lost(rng: &Rng, scenario: Scenario) -> Scenario {
    let scenario = scenario.with(FaultEvent::TargetLost, rng.below(3)).with(FaultEvent::Crash, rng.below(2));
    let phase = rng.pick(&[Phase::Copying, Phase::Verifying, Phase::PreSwitch]);
    if rng.chance(0.4) { scenario.and(target().lost_in(phase)) } else { scenario }
}

/// A long move under sparse writes, killed `crashes` times: the progress map has something to say each time.
pub(super) fn killed_on_the_way(rng: &Rng, load: Load, crashes: u64, faults: Faults) -> Scenario {
    common(rng)
        .target(faults)
        .volume(Bytes::mib(rng.pick(&[9, 13])))
        .guest(load)
        .within(Duration::from_secs(40))
        .downtime(Duration::from_secs(2))
        .with(FaultEvent::Crash, crashes)
        .with(FaultEvent::PowerLoss, rng.below(2))
        .with(FaultEvent::TargetLost, rng.below(3))
}
