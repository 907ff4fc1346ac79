//! Moves that skip zeroes: over holes, written zeroes and what the guest makes of both.

use std::time::Duration;

use migrate::{Phase, Strategy, Verify};

use super::common;
use super::common::{failing, killed_on_the_way, with_target_lost};
use crate::fault_event::FaultEvent;
use crate::guest::Load;
use crate::rng::Rng;
use crate::scenario::Scenario;
use crate::scenario_dsl::{expect, target};

/// Every way to copy that can skip.
const STRATEGIES: &[Strategy] = &[
    Strategy::Mirror,
    Strategy::Mirror,
    Strategy::Auto,
    Strategy::MirrorAsync,
    Strategy::Dbt,
    Strategy::IncrementalDbt,
    Strategy::Snapshot,
];

/// A guest that makes zeroes of data and data of zeroes.
fn zeroing(rng: &Rng) -> Load {
    Load {
        requests: rng.pick(&[500, 1000]),
        reads: 0.3,
        zeroes: 0.25,
        discards: 0.1,
        sectors_max: rng.pick(&[16, 64, 256]),
        outstanding: rng.pick(&[1, 8]),
        ..Load::default()
    }
}

fn skipping(rng: &Rng, scenario: Scenario, strategies: &[Strategy]) -> Scenario {
    let (strategy, chunk) = (rng.pick(strategies), rng.pick(&[4096, 4096, 16_384, 65_536]));
    scenario
        .filled(rng.pick(&[0.1, 0.4]))
        .zeroes_written()
        .dirty_target(rng.chance(0.4))
        .verify(rng.pick(&[Verify::Full, Verify::Full, Verify::Sample]))
        .options(|options| {
            (options.skip_zero, options.strategy, options.chunk_bytes) = (true, strategy, chunk);
            options.buffer_bytes = None;
        })
}

/// Nothing goes wrong, and file systems share what is left.
pub(super) fn quiet(rng: &Rng) -> Scenario {
    let load = zeroing(rng);
    let offloads = rng.chance(0.3);
    skipping(rng, common(rng).guest(load), STRATEGIES).offloads(offloads).and(expect().switched())
}

/// The target fails, is lost and comes back, and the process is killed: what was skipped is as good as what was copied, and no
/// better.
pub(super) fn trouble(rng: &Rng) -> Scenario {
    let faults = failing(rng, &[0.0, 0.002, 0.01]);
    let load = Load { requests: 1000, think: Duration::from_millis(rng.pick(&[1, 20])), ..zeroing(rng) };
    let scenario = skipping(rng, common(rng).guest(load).target(faults), STRATEGIES);
    with_target_lost(rng, scenario).with(FaultEvent::Crash, rng.below(2)).with(FaultEvent::PowerLoss, rng.below(2))
}

/// A long move is killed, and goes on with what is on record as skipped.
pub(super) fn resumed(rng: &Rng) -> Scenario {
    let load = Load { requests: 200, think: Duration::from_secs(rng.pick(&[2, 8])), ..zeroing(rng) };
    let bandwidth = rng.pick(&[100 << 10, 300 << 10]);
    let long = killed_on_the_way(rng, load, rng.within(1..=4), <_>::default());
    let strategies = [Strategy::Mirror, Strategy::Auto, Strategy::IncrementalDbt];
    let scenario = skipping(rng, long, &strategies).options(|options| options.bandwidth = Some(bandwidth));
    let scenario = scenario.and(expect().switched());
    if rng.chance(0.3) { scenario.and(target().lost_in(Phase::Copying)) } else { scenario }
}
