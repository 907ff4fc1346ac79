//! Moves whose journal and progress map are on a disk that fails, is full, hangs, or loses its power.

use std::time::Duration;

use migrate::Phase;

use super::common;
use crate::disk::Faults;
use crate::rng::Rng;
use crate::scenario::{FaultEvent, Scenario, When};
use crate::scenario_dsl::{operator, process, store, target};

pub(super) fn journal_errors(rng: &Rng) -> Scenario {
    let rate = rng.pick(&[0.05, 0.3, 0.7]);
    let faults = Faults { write_errors: rate, read_errors: rate / 4.0, stuck: rate / 20.0, ..Faults::default() };
    common(rng).journal(faults).with(FaultEvent::Crash, rng.below(3)).with(FaultEvent::Cancel, rng.below(2))
}

/// Stores follow every boot, so every loss may tear one.
pub(super) fn journal_torn(rng: &Rng) -> Scenario {
    let phase = rng.pick(&[Phase::Copying, Phase::PreSwitch, Phase::Switched]);
    common(rng)
        .and(process().powerless_at_store_in(phase))
        .at(When::After(Duration::ZERO), FaultEvent::PowerLossAtStore)
        .with(FaultEvent::PowerLossAtStore, rng.within(1..=4))
}

/// Whoever waits for a stuck disk comes back to a move that is over, and to a target that is nobody's any more.
pub(super) fn map_stuck(rng: &Rng) -> Scenario {
    let phase = rng.pick(&[Phase::Copying, Phase::Verifying, Phase::PreSwitch]);
    common(rng)
        .and(store().stuck(rng.pick(&[0.1, 0.4])))
        .and(operator().cancels_in(phase))
        .with(FaultEvent::Cancel, rng.below(3))
}

pub(super) fn in_doubt(rng: &Rng) -> Scenario {
    let then = match rng.below(9) {
        0 => process().killed_in(Phase::InDoubt),
        1 => operator().cancels_in(Phase::InDoubt).killed_in(Phase::Reverting),
        2 => process().powerless_in(Phase::InDoubt),
        // A crash soon after shows whether an in-doubt record was treated as durable.
        3 => process().killed_in(Phase::Switched),
        4 => process().killed_at_write_in(Phase::Switched),
        5 => process().killed_recovering_in(Phase::InDoubt),
        6 => operator().cancels_in(Phase::InDoubt).killed_at_write_in(Phase::Cancelling),
        // A doubt that a lost target has settled for the source.
        7 => process().killed_at_write_in(Phase::TargetLost),
        // What is answered while the target is lost and the doubt not settled may be answered by neither alone.
        _ => process().killed_at_write_in(Phase::InDoubt),
    };
    let rate = rng.pick(&[0.3, 0.7]);
    let is_after = then.is_in(Phase::Switched);
    // A store that fails all the time seldom lets a move come as far as its commit.
    let doubtful = match rng.below(3) {
        // From before the last phases, which take no time.
        _ if is_after => store().fails_in(Phase::Copying),
        0 => store().write_errors(rate).stuck(0.05),
        1 => store().fails_in(Phase::PreSwitch).stuck(0.02),
        _ => store().fails_in(Phase::Verifying),
    };
    let scenario = common(rng).and(doubtful).and(then);
    let is_lost = scenario.events.iter().any(|event| {
        event.when == When::In(Phase::TargetLost)
            || event.what == FaultEvent::CrashAtWrite && event.when == When::In(Phase::InDoubt)
    });
    // What ends well when nobody waits for it any more is taken back all the same.
    let scenario = if rng.chance(0.3) { scenario.and(store().slow_in(Phase::PreSwitch)) } else { scenario };
    if is_lost || rng.chance(0.3) { scenario.and(target().lost_in(Phase::InDoubt)) } else { scenario }
}

pub(super) fn store_full(rng: &Rng) -> Scenario {
    let phases = [Phase::Preparing, Phase::Copying, Phase::PreSwitch, Phase::Committing, Phase::Cancelling];
    let phase = rng.pick(&phases);
    let scenario = common(rng).and(store().full_in(phase)).with(FaultEvent::StoreFull, rng.within(1..=3));
    scenario.with(FaultEvent::Crash, rng.below(3)).with(FaultEvent::Cancel, rng.below(2))
}
