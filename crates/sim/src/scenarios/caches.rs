//! A volume with a flash cache: nothing moves, and everything else happens.

use std::time::Duration;

use block::Bytes;
use filters::CacheMode;

use super::common;
use crate::disk::{Faults, Timing};
use crate::fault_event::FaultEvent;
use crate::guest::{Load, Pattern};
use crate::host::CacheSetup;
use crate::rng::Rng;
use crate::scenario::Scenario;
use crate::scenario_dsl::source;

const MODES: &[&[CacheMode]] = &[
    &[CacheMode::WriteBack],
    &[CacheMode::WriteBack],
    &[CacheMode::WriteThrough],
    &[CacheMode::ReadOnly],
    &[CacheMode::ReadOnly, CacheMode::WriteThrough, CacheMode::WriteBack],
];
/// Those in which the flash alone never has anything.
pub(super) const CLEAN_MODES: &[&[CacheMode]] =
    &[&[CacheMode::WriteThrough], &[CacheMode::ReadOnly], &[CacheMode::ReadOnly, CacheMode::WriteThrough]];

/// A guest that comes back to some places, on a volume larger than its cache.
pub(super) fn cached(rng: &Rng, modes: &'static [CacheMode], faults: Faults) -> Scenario {
    let load = Load {
        requests: rng.pick(&[500, 1500]),
        outstanding: rng.pick(&[1, 4, 16]),
        reads: rng.pick(&[0.3, 0.5, 0.8]),
        discards: 0.05,
        zeroes: 0.05,
        fua: rng.pick(&[0.0, 0.05]),
        sectors_max: rng.pick(&[8, 16, 64, 256]),
        pattern: rng.pick(&[Pattern::Uniform, Pattern::Hot(256), Pattern::Hot(2048), Pattern::Sequential]),
        think: Duration::from_micros(rng.pick(&[50, 300])),
        ..Load::default()
    };
    let timing = if rng.chance(0.3) { Timing::SLOW } else { Timing::FLASH };
    let size = Bytes(rng.pick(&[700 << 10, 3 << 20]) + rng.pick(&[0, 0, 512, 700]));
    let alignment = if size.is_multiple_of(512) { rng.pick(&[1, 512]) } else { 1 };
    common(rng)
        .without_move()
        .volume(size)
        .alignment(alignment)
        .guest(load)
        .timings(timing, Timing::FLASH)
        .within(Duration::from_millis(rng.pick(&[30, 100])))
        .cache(CacheSetup { modes, places: rng.pick(&[20, 100, 400]), faults, moves: false, is_layer: false })
}

/// The process is killed and the power is lost, while mode and size change and the cache is drained.
pub(super) fn crashed(rng: &Rng) -> Scenario {
    cached(rng, rng.pick(MODES), Faults::default())
        .with(FaultEvent::Crash, rng.within(1..=4))
        .with(FaultEvent::CrashAtWrite, rng.below(4))
        .with(FaultEvent::PowerLoss, rng.below(3))
}

/// The flash fails, and the guest sees nothing of it, now or after a crash.
pub(super) fn failing(rng: &Rng) -> Scenario {
    let rate = rng.pick(&[0.002, 0.02, 0.1]);
    let write_errors = rng.pick(&[0.0, rate, rate]);
    let faults = Faults { read_errors: rate, write_errors, flush_errors: rate, ..Faults::default() };
    cached(rng, rng.pick(CLEAN_MODES), faults)
        .with(FaultEvent::Crash, rng.within(1..=4))
        .with(FaultEvent::CrashAtWrite, rng.below(4))
        .with(FaultEvent::PowerLoss, rng.below(2))
}

/// The cache goes to other flash by every way, over a link that is cut, while everything else happens to it.
pub(super) fn moved(rng: &Rng) -> Scenario {
    moving(crashed(rng), rng)
}

/// The same with flash that fails at both ends.
pub(super) fn moved_failing(rng: &Rng) -> Scenario {
    moving(failing(rng), rng)
}

fn moving(scenario: Scenario, rng: &Rng) -> Scenario {
    let scenario = scenario.cache_moves().within(Duration::from_millis(rng.pick(&[60, 200])));
    // So slow that a write is still under way when the other host is told of it.
    scenario.and(source().slow(rng.pick(&[0.0, 0.002, 0.01])))
}
