//! Scenarios of the asynchronous mirror.

use std::time::Duration;

use block::Bytes;
use migrate::{Phase, Strategy, Verify};

use super::basic::{sparse, swarm};
use super::common;
use super::common::{at_one_place, failing, killed_on_the_way, slow_sides, with_target_lost};
use crate::disk::{Faults, Timing};
use crate::fault_event::FaultEvent;
use crate::guest::{Load, Pattern};
use crate::rng::Rng;
use crate::scenario::Scenario;
use crate::scenario_dsl::{expect, process};

/// With a buffer that is full now and then.
fn buffered(rng: &Rng, scenario: Scenario) -> Scenario {
    let buffer = rng.pick(&[Some(1 << 20), Some(1 << 20), Some(3 << 20), None]);
    scenario.options(|options| {
        options.strategy = Strategy::MirrorAsync;
        options.buffer_bytes = buffer;
    })
}

/// A guest that writes more than anything else.
fn writer(rng: &Rng) -> Load {
    Load {
        requests: rng.pick(&[1000, 2000]),
        outstanding: rng.pick(&[4, 16]),
        reads: 0.1,
        zeroes: 0.1,
        discards: 0.05,
        sectors_max: rng.pick(&[8, 64, 600]),
        pattern: rng.pick(&[Pattern::Uniform, Pattern::Hot(256), Pattern::Hot(2048), Pattern::Sequential]),
        think: Duration::from_micros(rng.pick(&[5, 50, 300])),
        ..Load::default()
    }
}

/// Nothing goes wrong.
pub(super) fn quiet(rng: &Rng) -> Scenario {
    let load = writer(rng);
    buffered(rng, common(rng).guest(load))
}

/// The guest writes faster than the target, and no request of it waits for more than a part of the buffer.
pub(super) fn slow_target(rng: &Rng) -> Scenario {
    let load = Load { sectors_max: 16, zeroes: 0.0, discards: 0.0, ..writer(rng) };
    let verify = rng.pick(&[Verify::Off, Verify::Sample]);
    buffered(rng, Scenario::new())
        .volume(Bytes::mib(rng.pick(&[1, 3])))
        .guest(load)
        .timings(Timing::FLASH, Timing::SLOW)
        .verify(verify)
        .and(expect().switched())
        .options(|options| {
            options.buffer_bytes = Some(1 << 20);
            options.chunk_bytes = rng.pick(&[4096, 65_536]);
        })
}

/// Everybody is slow at times, so that copies, landings and comparisons meet in every order.
pub(super) fn races(rng: &Rng) -> Scenario {
    let [source, target] = slow_sides(rng);
    let load = at_one_place(rng, writer);
    let verify = rng.pick(&[Verify::Sample, Verify::Full]);
    buffered(rng, common(rng).volume(Bytes(1 << 20)).guest(load).source(source).target(target).verify(verify))
}

/// The target fails requests and flushes, or is gone for a while.
pub(super) fn errors(rng: &Rng) -> Scenario {
    let faults = failing(rng, &[0.002, 0.01, 0.05]);
    let load = writer(rng);
    let scenario = buffered(rng, common(rng).guest(load).target(faults));
    with_target_lost(rng, scenario)
}

/// The process is killed.
pub(super) fn crashed(rng: &Rng) -> Scenario {
    let load = writer(rng);
    let slow = Faults { slow: rng.pick(&[0.0, 0.01]), ..Faults::default() };
    let scenario = buffered(rng, common(rng).guest(load).target(slow)).with(FaultEvent::Crash, rng.within(1..=5));
    let phase = rng.pick(&[Phase::Copying, Phase::Verifying, Phase::PreSwitch, Phase::Quiescing, Phase::Committing]);
    if rng.chance(0.5) { scenario.and(process().killed_in(phase)) } else { scenario }
}

/// A long move, with a progress map that has something to say.
pub(super) fn resumed(rng: &Rng) -> Scenario {
    let load = sparse(rng);
    let crashes = rng.within(1..=6);
    let faults = Faults {
        flush_errors: rng.pick(&[0.0, 0.0, 0.4]),
        slow: rng.pick(&[0.0, 0.05]),
        stuck: rng.pick(&[0.0, 0.01]),
        ..Faults::default()
    };
    let scenario = killed_on_the_way(rng, load, crashes, faults);
    buffered(rng, scenario).options(|options| options.bandwidth = Some(rng.pick(&[300 << 10, 600 << 10])))
}

/// The host loses its power.
pub(super) fn powerless(rng: &Rng) -> Scenario {
    let load = Load { flushes: 0.05, fua: 0.1, ..writer(rng) };
    let losses = rng.within(1..=3);
    buffered(rng, common(rng).guest(load)).with(FaultEvent::PowerLoss, losses).with(FaultEvent::Crash, rng.below(2))
}

/// Somebody pauses, resumes, cancels, limits.
pub(super) fn steered(rng: &Rng) -> Scenario {
    let load = writer(rng);
    let slow = Faults { slow: 0.01, ..Faults::default() };
    buffered(rng, common(rng).guest(load).target(slow))
        .with(FaultEvent::Pause, rng.below(4))
        .with(FaultEvent::Cancel, rng.below(3))
        .with(FaultEvent::Bandwidth, rng.below(4))
}

/// Any of it together.
pub(super) fn any(rng: &Rng) -> Scenario {
    buffered(rng, swarm(rng))
}
