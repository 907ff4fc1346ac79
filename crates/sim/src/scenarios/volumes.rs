//! Several volumes of one daemon, whose moves run beside each other or wait for one another.

use std::time::Duration;

use block::Bytes;
use migrate::{OnNoConverge, Phase, Strategy, Verify};

use super::basic::rate;
use super::common;
use super::common::failing;
use super::nbd::any_wire;
use crate::disk::{Faults, Timing};
use crate::fault_event::When;
use crate::guest::Load;
use crate::rng::Rng;
use crate::scenario::{FaultEvent, Scenario};
use crate::scenario_dsl::{expect, operator, process};

const STRATEGIES: &[Strategy] = &[
    Strategy::Mirror,
    Strategy::Mirror,
    Strategy::Dbt,
    Strategy::IncrementalDbt,
    Strategy::Snapshot,
    Strategy::MirrorAsync,
    Strategy::Auto,
    Strategy::MirrorPaper,
];

/// Two volumes or three, each of which moves by a strategy of its own, one after the other or at once.
fn several(rng: &Rng, scenario: Scenario) -> Scenario {
    let any = |options: &mut migrate::MoveOptions| {
        options.strategy = rng.pick(STRATEGIES);
        options.on_no_converge = OnNoConverge::Mirror;
        options.downtime_limit_ms = rng.pick(&[5, 50, 500]);
        options.verify = rng.pick(&[Verify::Off, Verify::Sample, Verify::Full]);
    };
    let count = rng.within(2..=3) as usize;
    scenario.moves_at_once(rng.pick(&[1, 2, 2, 3])).options(any).volumes(count, any)
}

/// Slow disks, targets that fail, and somebody who cancels or pauses one of the moves.
pub(super) fn beside(rng: &Rng) -> Scenario {
    let slow = Faults { slow: rate(rng), ..Faults::default() };
    let target = if rng.chance(0.5) { failing(rng, &[0.0005, 0.002, 0.01]) } else { slow };
    let timing = |rng: &Rng| if rng.chance(0.3) { Timing::SLOW } else { Timing::FLASH };
    let (source, destination) = (timing(rng), timing(rng));
    let load = Load { requests: rng.pick(&[300, 800]), ..common(rng).load };
    let scenario = common(rng)
        .guest(load)
        .timings(source, destination)
        .source(slow)
        .target(target)
        .with(FaultEvent::Cancel, rng.below(3))
        .with(FaultEvent::Pause, rng.below(2))
        .with(FaultEvent::TargetLost, rng.below(2));
    several(rng, scenario)
}

/// The process dies and the host loses its power while moves of several volumes begin, wait, run and end.
pub(super) fn crashed(rng: &Rng) -> Scenario {
    let load = Load { requests: rng.pick(&[300, 800]), ..common(rng).load };
    let phase = rng.pick(&[Phase::Preparing, Phase::Copying, Phase::PreSwitch, Phase::Committing, Phase::Switched]);
    let scenario =
        common(rng).guest(load).with(FaultEvent::Crash, rng.within(1..=4)).with(FaultEvent::Cancel, rng.below(2));
    if rng.chance(0.2) {
        return several(rng, scenario.dies_at_poll(rng.below(1500)));
    }
    let scenario = scenario
        .with(FaultEvent::PowerLoss, rng.below(2))
        .with(FaultEvent::PowerLossAtStore, rng.below(2))
        .with(FaultEvent::CrashAgain, rng.below(2))
        .with(FaultEvent::FilesFail, rng.below(2));
    let scenario = if rng.chance(0.5) { scenario.and(process().killed_in(phase)) } else { scenario };
    several(rng, scenario)
}

/// Moves of all volumes that were asked for as one: one of them is cancelled or fails, and the process dies meanwhile.
pub(super) fn together(rng: &Rng) -> Scenario {
    let load = Load { requests: rng.pick(&[300, 800]), ..common(rng).load };
    let target = if rng.chance(0.3) { failing(rng, &[0.0005, 0.002, 0.01]) } else { Faults::default() };
    let scenario = common(rng).guest(load).target(target).with(FaultEvent::Crash, rng.below(3));
    let scenario = if rng.chance(0.3) { scenario.gives_up_lost_targets() } else { scenario };
    let phase = rng.pick(&[Phase::Preparing, Phase::Copying, Phase::Verifying]);
    let scenario = match rng.below(4) {
        0 => scenario.and(operator().cancels_in(phase)),
        1 => scenario.and(operator().cancels_in(phase)).and(process().killed_in(Phase::Cancelling)),
        2 => scenario.with(FaultEvent::TargetLost, rng.within(1..=2)).with(FaultEvent::PowerLoss, rng.below(2)),
        _ => scenario.with(FaultEvent::Cancel, 1).dies_at_poll(rng.below(1500)),
    };
    several(rng, scenario).together()
}

/// Around the one commit of all: its record fails or is slow, the process dies, the host loses its power, a target is lost.
pub(super) fn committed(rng: &Rng) -> Scenario {
    let around =
        [Phase::PreSwitch, Phase::Quiescing, Phase::Committing, Phase::InDoubt, Phase::Committed, Phase::Switched];
    let load = Load { requests: rng.pick(&[300, 1500]), ..common(rng).load };
    let scenario = common(rng).guest(load).with(FaultEvent::Crash, rng.below(2));
    if rng.chance(0.2) {
        return several(rng, scenario.dies_at_poll(rng.below(3000))).together();
    }
    let mut scenario = scenario;
    let faults = [
        FaultEvent::StoreFails,
        FaultEvent::StoreSlow,
        FaultEvent::Crash,
        FaultEvent::PowerLoss,
        FaultEvent::TargetLost,
        FaultEvent::Cancel,
        FaultEvent::Pause,
    ];
    if rng.chance(0.4) {
        // The record is in doubt when something else happens.
        let what = rng.pick(&[FaultEvent::Crash, FaultEvent::PowerLoss, FaultEvent::Cancel, FaultEvent::TargetLost]);
        let fails = [Phase::PreSwitch, Phase::Quiescing, Phase::Committing].map(When::In);
        scenario = fails.into_iter().fold(scenario, |scenario, when| scenario.at(when, FaultEvent::StoreFails));
        let after = rng.pick(&[Phase::Reverting, Phase::Cancelling, Phase::TargetLost]);
        scenario = scenario.at(When::In(Phase::InDoubt), what).at(When::In(after), FaultEvent::Crash);
    }
    for _ in 0..rng.within(1..=4) {
        scenario = scenario.at(When::In(rng.pick(&around)), rng.pick(&faults));
    }
    several(rng, scenario).together()
}

/// Guests over NBD and copies with few buffers between them. The first volume may answer nothing for a minute; the others'
/// guests do not wait for it.
pub(super) fn pooled(rng: &Rng) -> Scenario {
    let wire = any_wire(rng);
    // The largest request fits what only its own export uses of the pool, an eighth of it.
    let (pool, sectors) = rng.pick(&[(1, 64), (1, 64), (4, 600)]);
    let load = Load {
        requests: rng.pick(&[300, 800]),
        outstanding: rng.pick(&[4, 16]),
        reads: rng.pick(&[0.2, 0.7]),
        sectors_max: sectors,
        think: Duration::from_micros(rng.pick(&[50, 300])),
        ..Load::default()
    };
    let scenario = common(rng).volume(Bytes(rng.pick(&[1 << 20, 3 << 20]))).guest(load).wire(wire).pools_of(pool, 8);
    if rng.chance(0.5) {
        let stuck = Faults { stuck: rng.pick(&[0.01, 0.05]), ..Faults::default() };
        let scenario = scenario.source(stuck).only_first_fails().and(expect().no_wait_above(ISOLATED_WAIT_MAX));
        // None of the others waits for a place that the first one's move keeps.
        return several(rng, scenario).moves_at_once(3);
    }
    several(rng, scenario.with(FaultEvent::PoolEmpty, rng.below(4)).with(FaultEvent::Crash, rng.below(2)))
}

/// The longest that a request takes beside a volume that answers nothing: what the strategies hold a guest for, and its queue.
const ISOLATED_WAIT_MAX: Duration = Duration::from_secs(2);
