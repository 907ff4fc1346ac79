//! What is away, or is not what it was, when the daemon starts; and flushes that are lost for good.
//!
//! *Away* excuses nothing: what a disk holds that is away for a while is there when it is back. A guest's request may fail meanwhile,
//! and a volume may be down for as long as it needs that disk. Only a flush that is lost excuses what was not flushed before, and
//! only that.

use std::time::Duration;

use block::Bytes;
use filters::CacheMode;
use migrate::Verify;

use super::basic::sparse;
use super::caches::{CLEAN_MODES, cached as cached_below};
use super::common;
use super::layers::layered;
use super::surrogates::served;
use crate::disk::Faults;
use crate::fault_event::{Exchange, FaultEvent, Part, When};
use crate::rng::Rng;
use crate::scenario::Scenario;

const WRITE_BACK: &[CacheMode] = &[CacheMode::WriteBack];

/// A volume with a cache that the daemon itself opens: what it checks of it is what these scenarios are about.
fn cached(rng: &Rng, modes: &'static [CacheMode], faults: Faults) -> Scenario {
    cached_below(rng, modes, faults).cache_is_layer()
}

/// A move of a second or some, on whose way something happens.
fn long_move(rng: &Rng, scenario: Scenario) -> Scenario {
    let rate = rng.pick(&[600 << 10, 1 << 20, 2 << 20]);
    scenario
        .volume(Bytes(rng.pick(&[1 << 20, 3 << 20])))
        .options(|options| options.bandwidth = Some(rate))
        .within(Duration::from_millis(rng.pick(&[300, 800])))
}

/// The disk that holds the volume is away.
pub(super) fn without_disk(rng: &Rng) -> Scenario {
    common(rng)
        .with(FaultEvent::StartWithout(Part::Source), rng.within(1..=3))
        .with(FaultEvent::Crash, rng.below(2))
        .with(FaultEvent::PowerLoss, rng.below(2))
}

/// The disk under a cache that has what that disk lacks.
pub(super) fn without_base(rng: &Rng) -> Scenario {
    cached(rng, WRITE_BACK, Faults::default())
        .with(FaultEvent::StartWithout(Part::Source), rng.within(1..=3))
        .with(FaultEvent::Crash, rng.below(3))
        .with(FaultEvent::CrashAtWrite, rng.below(3))
}

/// The flash of a cache.
pub(super) fn without_flash(rng: &Rng) -> Scenario {
    cached(rng, rng.pick(&[WRITE_BACK, CLEAN_MODES[0]]), Faults::default())
        .with(FaultEvent::StartWithout(Part::Cache), rng.within(1..=2))
        .with(FaultEvent::Crash, rng.below(3))
}

/// The file of a snapshot, or the disk below it.
pub(super) fn without_layer(rng: &Rng) -> Scenario {
    layered(rng)
        .within(Duration::from_millis(rng.pick(&[60, 200])))
        .with(FaultEvent::StartWithout(Part::Layer), rng.within(1..=2))
        .with(FaultEvent::StartWithout(Part::Source), rng.below(2))
        .with(FaultEvent::Crash, rng.below(2))
}

/// One store of two.
pub(super) fn without_store(rng: &Rng) -> Scenario {
    long_move(rng, served(rng))
        .surrogate(2, Faults::default())
        .with(FaultEvent::StartWithout(Part::Store(rng.below(2) as u32)), rng.within(1..=2))
        .with(FaultEvent::Crash, rng.below(2))
}

/// The target of a move under way.
pub(super) fn without_target(rng: &Rng) -> Scenario {
    long_move(rng, common(rng).guest(sparse(rng)))
        .with(FaultEvent::StartWithout(Part::Target), rng.within(1..=2))
        .with(FaultEvent::Crash, rng.below(2))
}

/// The flash of a cache is an older one, or empty; then the right one is put back.
pub(super) fn exchanged_flash(rng: &Rng) -> Scenario {
    let exchange = rng.pick(&[Exchange::RolledBack, Exchange::RolledBack, Exchange::Blank]);
    cached(rng, rng.pick(&[WRITE_BACK, CLEAN_MODES[0]]), Faults::default())
        .with(FaultEvent::StartExchanged(Part::Cache, exchange), rng.within(1..=2))
        .with(FaultEvent::Crash, rng.below(3))
}

/// One store of two is an older one, or empty.
pub(super) fn exchanged_store(rng: &Rng) -> Scenario {
    let exchange = rng.pick(&[Exchange::RolledBack, Exchange::Blank]);
    long_move(rng, served(rng))
        .surrogate(2, Faults::default())
        .with(FaultEvent::StartExchanged(Part::Store(rng.below(2) as u32), exchange), 1)
        .with(FaultEvent::Crash, rng.below(2))
}

/// Somebody writes to the disk under a cache that has nothing that this lacks.
pub(super) fn changed_base(rng: &Rng) -> Scenario {
    cached(rng, rng.pick(CLEAN_MODES), Faults::default())
        .with(FaultEvent::ChangedBehind, rng.within(1..=2))
        .with(FaultEvent::Crash, rng.below(2))
}

/// Somebody writes to the disk of a volume that moves.
pub(super) fn changed_source(rng: &Rng) -> Scenario {
    // So long that the progress map has something to say.
    let moment = Duration::from_millis(rng.within(5500..=9000));
    common(rng)
        .volume(Bytes::mib(rng.pick(&[6, 9])))
        .filled(0.8)
        .guest(sparse(rng))
        .verify(rng.pick(&[Verify::Off, Verify::Sample]))
        .options(|options| options.bandwidth = Some(rng.pick(&[400 << 10, 600 << 10])))
        .within(Duration::from_secs(15))
        .at(When::After(moment), FaultEvent::ChangedBehind)
        .with(FaultEvent::ChangedBehind, rng.below(2))
        .with(FaultEvent::Crash, rng.below(2))
}

/// The disk under a cache that has what that disk lacks is away while the daemon runs.
pub(super) fn base_away(rng: &Rng) -> Scenario {
    cached(rng, WRITE_BACK, Faults::default())
        .with(FaultEvent::Away(Part::Source), rng.within(1..=3))
        .with(FaultEvent::Crash, rng.below(2))
}

/// The same disk loses a flush for good.
pub(super) fn base_loses(rng: &Rng) -> Scenario {
    cached(rng, WRITE_BACK, Faults::default())
        .with(FaultEvent::FlushLost(Part::Source), 1)
        .with(FaultEvent::Crash, rng.below(2))
}

/// The disk under snapshots loses a flush for good.
pub(super) fn image_loses(rng: &Rng) -> Scenario {
    layered(rng)
        .without_move()
        .within(Duration::from_millis(rng.pick(&[60, 200])))
        .with(FaultEvent::FlushLost(Part::Source), 1)
        .with(FaultEvent::Crash, rng.below(2))
}

/// The flash of a cache that may alone have something fails requests.
pub(super) fn failing_flash(rng: &Rng) -> Scenario {
    let rate = rng.pick(&[0.002, 0.02]);
    let faults =
        Faults { read_errors: rate, write_errors: rate, flush_errors: rng.pick(&[0.0, rate]), ..Faults::default() };
    cached(rng, WRITE_BACK, faults).with(FaultEvent::Crash, rng.below(3)).with(FaultEvent::CrashAtWrite, rng.below(2))
}
