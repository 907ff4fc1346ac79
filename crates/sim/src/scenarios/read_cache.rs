//! Moves with a cache in memory that the guest and the copy read from.

use std::time::Duration;

use migrate::{Strategy, Verify};

use super::common;
use super::common::{failing, with_target_lost};
use crate::disk::Faults;
use crate::fault_event::FaultEvent;
use crate::guest::{Load, Pattern};
use crate::rng::Rng;
use crate::scenario::Scenario;

/// Every way to copy that can have a cache.
const STRATEGIES: &[Strategy] = &[
    Strategy::Mirror,
    Strategy::Mirror,
    Strategy::Auto,
    Strategy::MirrorAsync,
    Strategy::Dbt,
    Strategy::IncrementalDbt,
];

/// A guest that reads and writes the same places, in small and in large pieces.
fn rereading(rng: &Rng) -> Load {
    Load {
        requests: rng.pick(&[500, 1000, 2000]),
        outstanding: rng.pick(&[1, 4, 8, 16]),
        reads: rng.pick(&[0.4, 0.6, 0.8]),
        sectors_max: rng.pick(&[8, 64, 256]),
        pattern: rng.pick(&[Pattern::Uniform, Pattern::Hot(256), Pattern::Hot(2048), Pattern::Sequential]),
        think: Duration::from_micros(rng.pick(&[50, 300, 10_000])),
        ..Load::default()
    }
}

/// Both sides fail requests, the target is lost and comes back, and the process is killed.
pub(super) fn trouble(rng: &Rng) -> Scenario {
    let rate = rng.pick(&[0.0, 0.001, 0.01]);
    let source = Faults { read_errors: rate, write_errors: rate, slow: rng.pick(&[0.0, 0.01]), ..Faults::default() };
    let (strategy, chunk) = (rng.pick(STRATEGIES), rng.pick(&[4096, 16_384, 65_536, 65_536]));
    let room = rng.pick(&[16, 16, 64, 4096]);
    let scenario = common(rng).guest(rereading(rng)).source(source).target(failing(rng, &[0.0, 0.0, 0.002]));
    let scenario = scenario.verify(rng.pick(&[Verify::Full, Verify::Sample, Verify::Off])).options(|options| {
        (options.strategy, options.chunk_bytes, options.read_cache_bytes) = (strategy, chunk, room * chunk);
        options.buffer_bytes = None;
    });
    with_target_lost(rng, scenario).with(FaultEvent::PowerLoss, rng.below(2)).with(FaultEvent::Cancel, rng.below(2))
}
