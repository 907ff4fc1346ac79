//! Scenarios of the strategy that chooses between mirroring and tracking, chunk by chunk.

use std::time::Duration;

use block::Bytes;
use migrate::{Phase, Strategy, Verify};

use super::basic::{sparse, swarm};
use super::common;
use super::common::{at_one_place, failing, slow_sides, with_target_lost};
use crate::disk::{Faults, Timing};
use crate::fault_event::FaultEvent;
use crate::guest::{Load, Pattern};
use crate::rng::Rng;
use crate::scenario::Scenario;
use crate::scenario_dsl::{expect, guest, operator, process, store};

/// With copies slow enough, at times, for chunks to become hot and for sweeps to follow each other.
fn chosen(rng: &Rng, scenario: Scenario) -> Scenario {
    let bandwidth = rng.pick(&[None, Some(2 << 20), Some(10 << 20), Some(40 << 20)]);
    scenario.options(|options| {
        options.strategy = Strategy::Auto;
        if bandwidth.is_some() {
            options.bandwidth = bandwidth;
        }
    })
}

/// A guest that writes again and again to some places, and mostly in parts of blocks.
fn writer(rng: &Rng) -> Load {
    Load {
        requests: rng.pick(&[1000, 3000]),
        outstanding: rng.pick(&[4, 16]),
        reads: 0.1,
        zeroes: 0.1,
        discards: 0.05,
        sectors_max: rng.pick(&[4, 16, 64, 600]),
        pattern: rng.pick(&[Pattern::Uniform, Pattern::Hot(256), Pattern::Hot(2048), Pattern::Sequential]),
        think: Duration::from_micros(rng.pick(&[50, 300, 3000])),
        ..Load::default()
    }
}

/// A target for which the guest waits, or not.
fn any_timing(rng: &Rng, scenario: Scenario) -> Scenario {
    let target = if rng.chance(0.5) { Timing::SLOW } else { Timing::FLASH };
    scenario.timings(Timing::FLASH, target)
}

/// Nothing goes wrong.
pub(super) fn quiet(rng: &Rng) -> Scenario {
    let load = writer(rng);
    chosen(rng, any_timing(rng, common(rng).guest(load)))
}

/// The target is ten times slower. The guest is held for no more than a mirror's switchover.
pub(super) fn slow_target(rng: &Rng) -> Scenario {
    let load = Load { sectors_max: 16, zeroes: 0.0, discards: 0.0, ..writer(rng) };
    let verify = rng.pick(&[Verify::Off, Verify::Sample, Verify::Full]);
    chosen(rng, Scenario::new())
        .volume(Bytes::mib(rng.pick(&[1, 3, 8])))
        .guest(load)
        .timings(Timing::FLASH, Timing::SLOW)
        .verify(verify)
        .and(expect().switched())
        .options(|options| options.chunk_bytes = rng.pick(&[4096, 16_384, 65_536]))
}

/// A guest that never rests, on a target that is as fast or slow.
pub(super) fn never_rests(rng: &Rng) -> Scenario {
    let sectors = rng.pick(&[8, 64, 512]);
    let hot = guest().asks(1000).never_rests().at_once(16).writes(0.9).at_one_place(sectors).sectors(8);
    let hot = hot.thinks(Duration::from_micros(rng.pick(&[5, 40])));
    let scenario = Scenario::new().volume(Bytes(rng.pick(&[1 << 20, 3 << 20]))).and(hot);
    // A mirror's comparison on a slow disk under such a guest takes longer than the world waits.
    let scenario = match rng.chance(0.5) {
        true => scenario.timings(Timing::FLASH, Timing::SLOW).verify(Verify::Off),
        false => scenario,
    };
    scenario.options(|options| {
        options.strategy = Strategy::Auto;
        options.chunk_bytes = rng.pick(&[4096, 16_384, 65_536]);
    })
}

/// Everybody is slow at times, so that copies, mirrored writes and writes that are left meet in every order.
pub(super) fn races(rng: &Rng) -> Scenario {
    let [source, target] = slow_sides(rng);
    let load = at_one_place(rng, writer);
    let verify = rng.pick(&[Verify::Sample, Verify::Full]);
    let scenario = any_timing(rng, common(rng).volume(Bytes(1 << 20)).guest(load));
    chosen(rng, scenario.source(source).target(target).verify(verify))
}

/// Either side fails requests and flushes, or the target is gone for a while.
pub(super) fn errors(rng: &Rng) -> Scenario {
    let faults = failing(rng, &[0.002, 0.01, 0.05]);
    let source = Faults { write_errors: rng.pick(&[0.0, 0.002]), ..Faults::default() };
    let load = writer(rng);
    let scenario = any_timing(rng, common(rng).guest(load).source(source).target(faults));
    let scenario = chosen(rng, scenario);
    with_target_lost(rng, scenario)
}

/// The process is killed.
pub(super) fn crashed(rng: &Rng) -> Scenario {
    let load = writer(rng);
    let scenario = any_timing(rng, common(rng).guest(load));
    let scenario = chosen(rng, scenario).with(FaultEvent::Crash, rng.within(1..=5));
    let phase = rng.pick(&[Phase::Copying, Phase::Verifying, Phase::PreSwitch, Phase::Quiescing, Phase::Committing]);
    if rng.chance(0.5) { scenario.and(process().killed_in(phase)) } else { scenario }
}

/// A long move, with a progress map that has something to say about chunks that were had and were left.
pub(super) fn resumed(rng: &Rng) -> Scenario {
    // Enough writes to one place to make it hot, and long pauses in which the map follows.
    let load = match rng.chance(0.5) {
        true => sparse(rng),
        false => Load { pattern: Pattern::Hot(rng.pick(&[16, 256])), think: Duration::from_millis(300), ..sparse(rng) },
    };
    let load = Load { requests: rng.pick(&[200, 1000]), ..load };
    let faults = Faults { flush_errors: rng.pick(&[0.0, 0.0, 0.4]), slow: rng.pick(&[0.0, 0.05]), ..Faults::default() };
    let scenario = any_timing(rng, common(rng).target(faults))
        .volume(Bytes::mib(rng.pick(&[9, 13])))
        .guest(load)
        .within(Duration::from_secs(40))
        .downtime(Duration::from_secs(2))
        .with(FaultEvent::Crash, rng.within(1..=6))
        .with(FaultEvent::PowerLoss, rng.below(2))
        .with(FaultEvent::TargetLost, rng.below(3))
        .with(FaultEvent::CrashAtWrite, rng.below(3));
    chosen(rng, scenario).options(|options| options.bandwidth = Some(rng.pick(&[300 << 10, 600 << 10])))
}

/// The host loses its power.
pub(super) fn powerless(rng: &Rng) -> Scenario {
    let load = Load { flushes: 0.05, fua: 0.1, ..writer(rng) };
    let scenario = any_timing(rng, common(rng).guest(load));
    chosen(rng, scenario).with(FaultEvent::PowerLoss, rng.within(1..=3)).with(FaultEvent::Crash, rng.below(2))
}

/// Somebody pauses, resumes, cancels, limits; the store of journal and map is stuck at times.
pub(super) fn steered(rng: &Rng) -> Scenario {
    let load = writer(rng);
    let scenario = chosen(rng, any_timing(rng, common(rng).guest(load)))
        .with(FaultEvent::Pause, rng.below(4))
        .with(FaultEvent::Cancel, rng.below(3))
        .with(FaultEvent::Bandwidth, rng.below(4));
    match rng.below(4) {
        0 => scenario.and(operator().cancels_in(rng.pick(&[Phase::Copying, Phase::Verifying, Phase::PreSwitch]))),
        1 => scenario.and(store().stuck(0.1)),
        _ => scenario,
    }
}

/// Any of it together.
pub(super) fn any(rng: &Rng) -> Scenario {
    chosen(rng, swarm(rng))
}
