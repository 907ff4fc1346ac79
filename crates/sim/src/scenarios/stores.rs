//! Moves whose journal and progress map are on a disk that fails, is full, hangs, or loses its power.

use std::time::Duration;

use migrate::Phase;

use super::common;
use crate::dice::Dice;
use crate::disk::Faults;
use crate::story::{Happening, Story, When};
use crate::words::{operator, process, store, target};

pub(super) fn journal_errors(dice: &Dice) -> Story {
    let rate = dice.pick(&[0.05, 0.3, 0.7]);
    let faults = Faults { write_errors: rate, read_errors: rate / 4.0, stuck: rate / 20.0, ..Faults::default() };
    common(dice).journal(faults).with(Happening::Crash, dice.below(3)).with(Happening::Cancel, dice.below(2))
}

/// Stores follow every boot, so every loss may tear one.
pub(super) fn journal_torn(dice: &Dice) -> Story {
    let phase = dice.pick(&[Phase::Copying, Phase::PreSwitch, Phase::Switched]);
    common(dice)
        .and(process().powerless_at_store_in(phase))
        .at(When::After(Duration::ZERO), Happening::PowerLossAtStore)
        .with(Happening::PowerLossAtStore, dice.within(1..=4))
}

/// Whoever waits for a stuck disk comes back to a move that is over, and to a target that is nobody's any more.
pub(super) fn map_stuck(dice: &Dice) -> Story {
    let phase = dice.pick(&[Phase::Copying, Phase::Verifying, Phase::PreSwitch]);
    common(dice)
        .and(store().stuck(dice.pick(&[0.1, 0.4])))
        .and(operator().cancels_in(phase))
        .with(Happening::Cancel, dice.below(3))
}

pub(super) fn in_doubt(dice: &Dice) -> Story {
    let then = match dice.below(9) {
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
    let rate = dice.pick(&[0.3, 0.7]);
    let is_after = then.is_in(Phase::Switched);
    // A store that fails all the time seldom lets a move come as far as its commit.
    let doubtful = match dice.below(3) {
        // From before the last phases, which take no time.
        _ if is_after => store().fails_in(Phase::Copying),
        0 => store().write_errors(rate).stuck(0.05),
        1 => store().fails_in(Phase::PreSwitch).stuck(0.02),
        _ => store().fails_in(Phase::Verifying),
    };
    let story = common(dice).and(doubtful).and(then);
    let is_lost = story.events.iter().any(|event| {
        event.when == When::In(Phase::TargetLost)
            || event.what == Happening::CrashAtWrite && event.when == When::In(Phase::InDoubt)
    });
    // What ends well when nobody waits for it any more is taken back all the same.
    let story = if dice.chance(0.3) { story.and(store().slow_in(Phase::PreSwitch)) } else { story };
    if is_lost || dice.chance(0.3) { story.and(target().lost_in(Phase::InDoubt)) } else { story }
}

pub(super) fn store_full(dice: &Dice) -> Story {
    let phases = [Phase::Preparing, Phase::Copying, Phase::PreSwitch, Phase::Committing, Phase::Cancelling];
    let phase = dice.pick(&phases);
    let story = common(dice).and(store().full_in(phase)).with(Happening::StoreFull, dice.within(1..=3));
    story.with(Happening::Crash, dice.below(3)).with(Happening::Cancel, dice.below(2))
}
