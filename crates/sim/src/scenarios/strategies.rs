//! Scenarios of strategies other than the mirror.

use std::time::Duration;

use block::Bytes;
use migrate::{OnNoConverge, Phase, Strategy, Verify};

use super::basic::{sparse, steering, swarm};
use super::common;
use super::common::{at_one_place, failing, killed_on_the_way, slow_sides, with_target_lost};
use crate::disk::{Faults, Timing};
use crate::fault_event::FaultEvent;
use crate::guest::{Load, Pattern};
use crate::rng::Rng;
use crate::scenario::Scenario;
use crate::scenario_dsl::{expect, guest, operator, process, target};

/// Any way to track, with any end.
fn tracked(rng: &Rng, scenario: Scenario) -> Scenario {
    let strategy = rng.pick(&[Strategy::Dbt, Strategy::IncrementalDbt]);
    let choice = rng.pick(&[OnNoConverge::Mirror, OnNoConverge::Mirror, OnNoConverge::Force, OnNoConverge::Abort]);
    let limit = rng.pick(&[1, 5, 20, 200]);
    let deadline = rng.pick(&[None, None, None, Some(20), Some(500)]);
    let hot_blocks = rng.chance(0.5);
    scenario.options(|options| {
        options.strategy = strategy;
        options.on_no_converge = choice;
        options.downtime_limit_ms = limit;
        options.deadline_ms = deadline;
        options.hot_blocks = hot_blocks;
    })
}

/// A move in passes under any load, and nothing goes wrong.
pub(super) fn dbt(rng: &Rng) -> Scenario {
    let sectors = rng.pick(&[1, 16, 64]);
    let load = Load {
        requests: rng.pick(&[1000, 2000, 4000]),
        outstanding: rng.pick(&[1, 8, 16]),
        reads: rng.pick(&[0.2, 0.5]),
        sectors_max: sectors,
        pattern: rng.pick(&[Pattern::Uniform, Pattern::Hot(256), Pattern::Sequential]),
        think: Duration::from_micros(rng.pick(&[50, 300, 1000])),
        ..Load::default()
    };
    tracked(rng, common(rng).guest(load))
}

/// The guest is held no longer than was asked for. What is in flight when it is held, and what the commit takes, comes on
/// top.
pub(super) fn dbt_downtime(rng: &Rng) -> Scenario {
    let load = Load { requests: 2000, outstanding: 8, reads: 0.3, sectors_max: 16, ..Load::default() };
    let limit = rng.pick(&[5, 20, 50]);
    Scenario::new()
        .guest(load)
        .verify(rng.pick(&[Verify::Off, Verify::Sample, Verify::Full]))
        .and(expect().switched().no_wait_above(Duration::from_millis(limit + 15)))
        .options(|options| {
            options.strategy = rng.pick(&[Strategy::Dbt, Strategy::IncrementalDbt]);
            options.downtime_limit_ms = limit;
            options.chunk_bytes = 16_384;
            options.bandwidth = rng.pick(&[Some(20 << 20), Some(300 << 20)]);
        })
}

/// A target that streams and copies scattered chunks thirty times more slowly: what the first pass shows is not believed of
/// the last copy. The guest's requests wait there for one another, and that comes on top of the limit.
pub(super) fn dbt_scattered(rng: &Rng) -> Scenario {
    let load = Load { requests: 1000, outstanding: 2, reads: 0.5, sectors_max: 8, ..Load::default() };
    let think = Duration::from_millis(rng.pick(&[20, 40]));
    let limit = rng.pick(&[100, 200]);
    Scenario::new()
        .volume(Bytes::mib(rng.pick(&[16, 32])))
        .guest(Load { think, ..load })
        .verify(Verify::Off)
        .timings(Timing::FLASH, Timing::MOVING_HEAD)
        .and(expect().switched().no_wait_above(Duration::from_millis(limit + 60)).holds_at_most(1))
        .options(|options| {
            options.strategy = rng.pick(&[Strategy::Dbt, Strategy::IncrementalDbt]);
            options.downtime_limit_ms = limit;
            options.chunk_bytes = 16_384;
        })
}

/// A target that becomes slow for a while now and then, also in the middle of a last copy: the guest is let go in time,
/// and what is under way ends beside it.
pub(super) fn dbt_slows_down(rng: &Rng) -> Scenario {
    let limit = rng.pick(&[40, 80, 150]);
    let load = Load { requests: 600, outstanding: 2, reads: 0.3, sectors_max: 16, ..Load::default() };
    let think = Duration::from_millis(rng.pick(&[20, 60]));
    Scenario::new()
        .volume(Bytes::mib(rng.pick(&[4, 8])))
        .guest(Load { think, ..load })
        .within(Duration::from_secs(3))
        .verify(Verify::Off)
        .timings(Timing::FLASH, Timing::SLOW)
        .and(target().slow(rng.pick(&[0.01, 0.05])))
        .and(expect().switched().no_hold_above(Duration::from_millis(limit)))
        .options(|options| {
            options.strategy = rng.pick(&[Strategy::Dbt, Strategy::IncrementalDbt]);
            options.downtime_limit_ms = limit;
            options.chunk_bytes = rng.pick(&[16_384, 65_536]);
        })
}

/// A guest that never rests, on strategies that go on as a mirror then.
pub(super) fn dbt_never_rests(rng: &Rng) -> Scenario {
    let sectors = rng.pick(&[64, 512]);
    let hot = guest().asks(1000).never_rests().at_once(16).writes(0.9).at_one_place(sectors).sectors(8);
    let hot = hot.thinks(Duration::from_micros(rng.pick(&[5, 40])));
    Scenario::new().volume(Bytes(rng.pick(&[1 << 20, 3 << 20]))).and(hot).options(|options| {
        options.strategy = rng.pick(&[Strategy::Dbt, Strategy::IncrementalDbt]);
        options.downtime_limit_ms = rng.pick(&[1, 5, 200]);
        options.chunk_bytes = rng.pick(&[16_384, 65_536]);
    })
}

/// Passes long enough for some chunks to be written many times in each, so that their copies are put off.
pub(super) fn dbt_hot(rng: &Rng) -> Scenario {
    let load = Load {
        requests: 6000,
        outstanding: 16,
        reads: 0.1,
        sectors_max: 4,
        pattern: Pattern::Hot(rng.pick(&[256, 1024])),
        think: Duration::from_micros(rng.pick(&[500, 2000])),
        ..Load::default()
    };
    let crashes = rng.below(2);
    tracked(rng, common(rng)).guest(load).with(FaultEvent::Crash, crashes).options(|options| {
        options.chunk_bytes = 16_384;
        options.bandwidth = Some(rng.pick(&[8 << 20, 30 << 20]));
        options.hot_blocks = true;
        options.downtime_limit_ms = rng.pick(&[1, 3, 20]);
    })
}

/// Source and target are slow, so that guest writes and copies meet in every order.
pub(super) fn dbt_races(rng: &Rng) -> Scenario {
    let slow = Faults { slow: rng.pick(&[0.002, 0.01, 0.03]), ..Faults::default() };
    let load = Load {
        requests: 1500,
        outstanding: 16,
        reads: 0.1,
        sectors_max: 32,
        pattern: rng.pick(&[Pattern::Uniform, Pattern::Hot(512)]),
        think: Duration::from_micros(50),
        ..Load::default()
    };
    let timing = if rng.chance(0.3) { Timing::SLOW } else { Timing::FLASH };
    let scenario = common(rng).volume(Bytes(1 << 20)).guest(load).timings(timing, Timing::FLASH);
    tracked(rng, scenario.source(slow).target(slow))
}

/// What goes wrong in the middle of a last copy.
pub(super) fn dbt_last_copy(rng: &Rng) -> Scenario {
    let then = match rng.below(5) {
        0 => process().killed_in(Phase::LastCopy),
        1 => process().powerless_in(Phase::LastCopy),
        2 => operator().cancels_in(Phase::LastCopy),
        3 => process().killed_recovering_in(Phase::LastCopy),
        _ => process().killed_in(Phase::Committing),
    };
    let faults = target().slow(0.05).flush_errors(rng.pick(&[0.0, 0.2])).write_errors(rng.pick(&[0.0, 0.01]));
    let faults = if rng.chance(0.3) { faults.lost_in(Phase::LastCopy) } else { faults };
    let load = Load { requests: 2000, outstanding: 8, reads: 0.2, ..Load::default() };
    tracked(rng, common(rng).guest(load)).and(faults).and(then)
}

/// Crashes between passes, with a progress map that has something to say.
pub(super) fn dbt_resume(rng: &Rng) -> Scenario {
    let load = sparse(rng);
    let crashes = rng.within(1..=6);
    let scenario = common(rng)
        .and(target().flush_errors(rng.pick(&[0.0, 0.0, 0.4])))
        .volume(Bytes::mib(rng.pick(&[9, 13])))
        .guest(load)
        .within(Duration::from_secs(40))
        .downtime(Duration::from_secs(2))
        .with(FaultEvent::Crash, crashes)
        .with(FaultEvent::PowerLoss, rng.below(2));
    tracked(rng, scenario).options(|options| {
        options.bandwidth = Some(rng.pick(&[300 << 10, 600 << 10]));
        options.deadline_ms = None;
    })
}

/// Any of it together.
pub(super) fn dbt_swarm(rng: &Rng) -> Scenario {
    tracked(rng, swarm(rng))
}

/// By two offsets, with windows of any size.
fn by_offsets(rng: &Rng, scenario: Scenario) -> Scenario {
    let window = rng.pick(&[64 << 10, 256 << 10, 1 << 20, 16 << 20]);
    scenario.options(|options| {
        options.strategy = Strategy::MirrorPaper;
        options.window_bytes_max = window;
    })
}

/// A guest that writes to all of the volume or beside the window all the time.
fn writer(rng: &Rng) -> Load {
    Load {
        requests: rng.pick(&[1000, 2000]),
        outstanding: rng.pick(&[4, 16]),
        reads: 0.2,
        zeroes: 0.1,
        discards: 0.05,
        sectors_max: rng.pick(&[8, 64, 600]),
        pattern: rng.pick(&[Pattern::Uniform, Pattern::Hot(512), Pattern::Sequential]),
        think: Duration::from_micros(rng.pick(&[5, 50, 300])),
        ..Load::default()
    }
}

/// The paper's mirror under any load, and nothing goes wrong.
pub(super) fn paper(rng: &Rng) -> Scenario {
    let load = writer(rng);
    by_offsets(rng, common(rng).guest(load))
}

/// Everybody is slow at times, so that writes meet the window's two ends in every order.
pub(super) fn paper_races(rng: &Rng) -> Scenario {
    let [source, target] = slow_sides(rng);
    let load = at_one_place(rng, writer);
    let verify = rng.pick(&[Verify::Sample, Verify::Full]);
    by_offsets(rng, common(rng).volume(Bytes(1 << 20)).guest(load).source(source).target(target).verify(verify))
}

/// The target fails requests and flushes, or is gone for a while: the copy goes back.
pub(super) fn paper_errors(rng: &Rng) -> Scenario {
    let faults = failing(rng, &[0.0005, 0.002, 0.01]);
    let load = writer(rng);
    let scenario = by_offsets(rng, common(rng).guest(load).target(faults));
    with_target_lost(rng, scenario)
}

/// A long move that goes back and is killed, with a progress map that says more than two offsets can.
pub(super) fn paper_resume(rng: &Rng) -> Scenario {
    let load = sparse(rng);
    let crashes = rng.within(1..=6);
    let faults = Faults {
        write_errors: rng.pick(&[0.0, 0.05, 0.2]),
        flush_errors: rng.pick(&[0.0, 0.0, 0.4]),
        slow: rng.pick(&[0.0, 0.05]),
        ..Faults::default()
    };
    let scenario = killed_on_the_way(rng, load, crashes, faults);
    by_offsets(rng, scenario).options(|options| options.bandwidth = Some(rng.pick(&[300 << 10, 600 << 10])))
}

/// Somebody pauses, resumes, cancels, limits, and the process is killed.
pub(super) fn paper_steering(rng: &Rng) -> Scenario {
    let load = writer(rng);
    by_offsets(rng, steering(rng).guest(load)).with(FaultEvent::Crash, rng.below(2))
}

/// Any of it together.
pub(super) fn paper_swarm(rng: &Rng) -> Scenario {
    by_offsets(rng, swarm(rng))
}
