//! Scenarios of moves that copy in another order than the volume's.

use std::time::Duration;

use migrate::{ScheduleKind, Strategy};

use super::common;
use super::common::{failing, with_target_lost};
use crate::fault_event::FaultEvent;
use crate::guest::{Load, Pattern};
use crate::rng::Rng;
use crate::scenario::Scenario;

/// All that have an order to choose, the mirror most often.
const STRATEGIES: &[Strategy] = &[
    Strategy::Mirror,
    Strategy::Mirror,
    Strategy::MirrorAsync,
    Strategy::Dbt,
    Strategy::IncrementalDbt,
    Strategy::Auto,
];

/// Any strategy in this order, beside a guest that is here and there, while the target fails, is lost and comes back, and the
/// process is killed.
fn trouble(rng: &Rng, schedule: ScheduleKind) -> Scenario {
    let (strategy, hot_blocks) = (rng.pick(STRATEGIES), rng.chance(0.5));
    let (ratio, run) = (rng.within(1..=4) as u8, rng.pick(&[128 << 10, 512 << 10, 1 << 20]));
    let load = Load {
        requests: rng.pick(&[1000, 2000]),
        outstanding: rng.pick(&[1, 4, 16]),
        reads: rng.pick(&[0.2, 0.6]),
        sectors_max: rng.pick(&[16, 64]),
        pattern: rng.pick(&[Pattern::Uniform, Pattern::Hot(256), Pattern::Hot(2048), Pattern::Sequential]),
        think: Duration::from_micros(rng.pick(&[50, 300, 3000])),
        ..Load::default()
    };
    let faults = failing(rng, &[0.0, 0.002, 0.01]);
    let scenario = common(rng).guest(load).target(faults).options(|options| {
        (options.strategy, options.schedule) = (strategy, schedule);
        (options.follow_ratio, options.follow_run_bytes) = (ratio, run);
        options.hot_blocks = hot_blocks && strategy.iterates();
    });
    let power_losses = u64::from(rng.chance(0.2));
    let scenario = with_target_lost(rng, scenario).with(FaultEvent::Pause, rng.below(2));
    scenario.with(FaultEvent::Crash, rng.below(2)).with(FaultEvent::PowerLoss, power_losses)
}

/// The copy follows the head.
pub(super) fn follow(rng: &Rng) -> Scenario {
    trouble(rng, ScheduleKind::Follow)
}

/// What the guest touches least is copied first.
pub(super) fn cold_first(rng: &Rng) -> Scenario {
    trouble(rng, ScheduleKind::ColdFirst)
}
