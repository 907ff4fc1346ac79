//! Moves whose guest is served by a surrogate while its disk is copied.

use std::time::Duration;

use block::Bytes;
use migrate::{OnNoConverge, Phase, Strategy, Verify};

use super::common;
use super::common::{failing, with_target_lost};
use crate::disk::Faults;
use crate::fault_event::{FaultEvent, When};
use crate::guest::{Load, Pattern};
use crate::rng::Rng;
use crate::scenario::Scenario;

const STRATEGIES: &[Strategy] = &[
    Strategy::Mirror,
    Strategy::Mirror,
    Strategy::Dbt,
    Strategy::IncrementalDbt,
    Strategy::MirrorAsync,
    Strategy::Auto,
];

/// A guest that comes back to some places, on a volume of which a surrogate has room for a part only.
pub(super) fn served(rng: &Rng) -> Scenario {
    let load = Load {
        requests: rng.pick(&[500, 1500]),
        outstanding: rng.pick(&[1, 4, 16]),
        reads: rng.pick(&[0.3, 0.5, 0.8]),
        discards: 0.05,
        zeroes: 0.05,
        sectors_max: rng.pick(&[8, 64, 256]),
        pattern: rng.pick(&[Pattern::Uniform, Pattern::Hot(256), Pattern::Hot(2048), Pattern::Sequential]),
        think: Duration::from_micros(rng.pick(&[50, 300, 10_000])),
        ..Load::default()
    };
    common(rng).guest(load).volume(Bytes(rng.pick(&[700 << 10, 3 << 20]))).options(|options| {
        options.strategy = rng.pick(STRATEGIES);
        options.on_no_converge = OnNoConverge::Mirror;
        options.verify = rng.pick(&[Verify::Off, Verify::Sample, Verify::Full]);
        options.buffer_bytes = None;
    })
}

/// The process is killed, the power is lost, and moves are cancelled: what only the surrogate has is lost never.
pub(super) fn crashed(rng: &Rng) -> Scenario {
    let phase = rng.pick(&[Phase::Copying, Phase::PreSwitch, Phase::Committing, Phase::Cancelling, Phase::Switched]);
    served(rng)
        .surrogate(rng.pick(&[1, 2]), Faults::default())
        .with(FaultEvent::Crash, rng.within(1..=5))
        .with(FaultEvent::PowerLoss, rng.below(3))
        .with(FaultEvent::PowerLossAtStore, rng.below(2))
        .with(FaultEvent::Cancel, rng.below(3))
        .at(When::In(phase), FaultEvent::Crash)
}

/// The same, and the daemon's small files fail, or there is no room for them.
pub(super) fn files(rng: &Rng) -> Scenario {
    crashed(rng).with(FaultEvent::FilesFail, rng.within(1..=3)).with(FaultEvent::StoreFull, rng.below(3))
}

/// The process dies at one of its awaits.
pub(super) fn dying(rng: &Rng) -> Scenario {
    served(rng)
        .surrogate(rng.pick(&[1, 2]), Faults::default())
        .dies_at_poll(rng.below(3000))
        .with(FaultEvent::Cancel, rng.below(2))
}

/// The same with a read cache between the surrogate and the source.
pub(super) fn cached(rng: &Rng) -> Scenario {
    let (chunk, room) = (rng.pick(&[4096, 16_384, 65_536]), rng.pick(&[16, 64, 4096]));
    crashed(rng).options(|options| {
        (options.chunk_bytes, options.read_cache_bytes) = (chunk, room * chunk);
    })
}

/// One store of two fails, the target is lost and comes back: the guest sees nothing of it.
pub(super) fn failing_store(rng: &Rng) -> Scenario {
    let rate = rng.pick(&[0.002, 0.02]);
    let faults = Faults { read_errors: rate, write_errors: rate, flush_errors: rate, ..Faults::default() };
    let scenario = served(rng).target(failing(rng, &[0.0, 0.002, 0.01])).surrogate(2, faults);
    with_target_lost(rng, scenario).with(FaultEvent::Crash, rng.below(3)).with(FaultEvent::Cancel, rng.below(2))
}

/// The volume goes to another host.
pub(super) fn to_other_host(rng: &Rng) -> Scenario {
    served(rng)
        .between_hosts()
        .surrogate(rng.pick(&[1, 2]), Faults::default())
        .within(Duration::from_millis(rng.pick(&[60, 200])))
        .with(FaultEvent::PeerTrouble, rng.below(3))
        .with(FaultEvent::Cancel, rng.below(2))
        .with(FaultEvent::Crash, rng.below(3))
        .with(FaultEvent::PeerCrash, rng.below(3))
}
