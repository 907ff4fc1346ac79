//! Moves that are undone while requests hang: what was given up comes back late, and the process dies before the end.

use std::time::Duration;

use super::basic::sparse;
use super::common;
use crate::disk::Faults;
use crate::guest::Load;
use crate::rng::Rng;
use crate::scenario::{FaultEvent, Scenario};
use crate::scenario_dsl::{operator, process};

/// Copies of many pieces hang when the move is cancelled, and come back when the target is nobody's or another move's.
pub(super) fn target_given_up(rng: &Rng) -> Scenario {
    let load = Load {
        requests: 300,
        outstanding: rng.pick(&[1, 4]),
        reads: 0.3,
        think: Duration::from_millis(200),
        ..Load::default()
    };
    let stuck = Faults { stuck: rng.pick(&[0.01, 0.05]), ..Faults::default() };
    let scenario = common(rng).guest(load).dirty_target(true).filled(rng.pick(&[0.0, 0.5])).target(stuck);
    scenario.with(FaultEvent::Cancel, rng.within(1..=2))
}

/// A guest request that hangs keeps a long move from being undone. The guest writes on meanwhile, and nobody keeps track
/// of it any more; then the process dies. The progress map is written every five seconds: what it says of the time before
/// the cancel, it must not say of the time after.
pub(super) fn crashed(rng: &Rng) -> Scenario {
    let stuck = Faults { stuck: rng.pick(&[0.01, 0.03]), ..Faults::default() };
    let load = Load { think: Duration::from_secs(rng.pick(&[1, 3])), ..sparse(rng) };
    let cancel = Duration::from_millis(3000 + 500 * rng.below(16));
    let death = cancel + Duration::from_millis(500 * rng.below(40));
    common(rng)
        .guest(load)
        .filled(rng.pick(&[0.0, 0.5, 1.0]))
        .source(stuck)
        .and(operator().cancels_after(cancel))
        .and(process().killed_after(death))
        .within(Duration::from_secs(30))
        .options(|options| options.bandwidth = Some(300 << 10))
}
