//! Moves to another host's daemon: either process killed, either host without power, the link between them cut.

use std::time::Duration;

use block::Bytes;
use migrate::Phase;

use super::{common, small, sparse};
use crate::dice::Dice;
use crate::guest::{Load, Pattern};
use crate::happening::{Event, When};
use crate::story::{Happening, Story};

/// The phases around the switchover, where the two records change.
const AROUND: [Phase; 6] =
    [Phase::PreSwitch, Phase::Quiescing, Phase::Committing, Phase::Committed, Phase::Switched, Phase::Done];

fn around(dice: &Dice, story: Story, what: Happening) -> Story {
    let mut story = story;
    story.events.push(Event { what, when: When::In(dice.pick(&AROUND)) });
    story
}

fn between(dice: &Dice) -> Story {
    common(dice).between_hosts().within(Duration::from_millis(dice.pick(&[60, 200, 600])))
}

pub(super) fn quiet(dice: &Dice) -> Story {
    between(dice)
}

pub(super) fn crashed(dice: &Dice) -> Story {
    let story = between(dice).with(Happening::Crash, dice.below(4)).with(Happening::NeighbourCrash, dice.below(4));
    let story = around(dice, story, Happening::Crash).with(Happening::WrongEpoch, dice.below(2));
    if dice.chance(0.6) { around(dice, story, Happening::NeighbourCrash) } else { story }
}

pub(super) fn cut(dice: &Dice) -> Story {
    let story = between(dice).with(Happening::NeighbourTrouble, dice.within(1..=6));
    let story = around(dice, story, Happening::NeighbourTrouble).with(Happening::WrongEpoch, dice.below(2));
    if dice.chance(0.5) { around(dice, story, Happening::Crash) } else { story }
}

/// A guest that works for longer than the hosts are apart, and a copy that takes long.
pub(super) fn cut_beside_guest(dice: &Dice) -> Story {
    let load = Load {
        requests: 6000,
        outstanding: dice.pick(&[2, 4, 8]),
        reads: dice.pick(&[0.2, 0.5]),
        sectors_max: 16,
        think: Duration::from_millis(dice.pick(&[4, 10])),
        ..Load::default()
    };
    let rate = dice.pick(&[200 << 10, 600 << 10]);
    between(dice)
        .volume(Bytes::mib(3))
        .filled(1.0)
        .guest(load)
        .options(|options| options.bandwidth = Some(rate))
        .within(Duration::from_secs(3))
        .with(Happening::NeighbourTrouble, dice.within(1..=3))
}

/// What the other host was given is not there any more as it was, and nobody was told. The copy takes so long, and the guest
/// writes so little, that much is known to be there.
pub(super) fn meddled(dice: &Dice) -> Story {
    let story = between(dice)
        .volume(Bytes::mib(dice.pick(&[6, 9])))
        .filled(0.8)
        .guest(sparse(dice))
        .options(|options| options.bandwidth = Some(dice.pick(&[400 << 10, 600 << 10])))
        .within(Duration::from_secs(15))
        .with(Happening::NeighbourMeddled, dice.within(1..=2));
    let story = story.at(When::After(Duration::from_millis(dice.within(5500..=9000))), Happening::NeighbourMeddled);
    if dice.chance(0.6) { story.at(When::In(Phase::TargetLost), Happening::Crash) } else { story }
}

/// The other host's file system fills up, and the source's daemon dies while the move is undone.
pub(super) fn full(dice: &Dice) -> Story {
    let story = between(dice).filled(0.8).target_space(dice.fraction());
    let story = story.at(When::In(Phase::Cancelling), Happening::Crash).with(Happening::Crash, dice.below(2));
    if dice.chance(0.3) { story.with(Happening::Cancel, 1) } else { story }
}

/// Requests meet at a few sectors, and some writes are carried out long before their answers come.
pub(super) fn unheard(dice: &Dice) -> Story {
    let load = Load {
        requests: 8000,
        outstanding: 16,
        reads: 0.6,
        flushes: 0.002,
        fua: 0.0,
        zeroes: 0.0,
        discards: 0.0,
        sectors_max: 4,
        pattern: Pattern::Hot(dice.pick(&[4, 16])),
        think: Duration::from_micros(dice.pick(&[300, 800])),
        ..Load::default()
    };
    let story = common(dice).volume(Bytes::kib(256)).guest(load).between_hosts().within(Duration::from_millis(250));
    let story = story.options(|options| options.bandwidth = None).with(Happening::NeighbourUnheard, 2);
    story.at(When::In(Phase::Done), Happening::NeighbourUnheard)
}

pub(super) fn powerless(dice: &Dice) -> Story {
    let story =
        between(dice).with(Happening::PowerLoss, dice.below(2)).with(Happening::NeighbourPowerLoss, dice.within(1..=3));
    let story = around(dice, story, Happening::NeighbourPowerLoss);
    // What the daemon before has passed on, and nobody has flushed, whoever comes after it must see to.
    if dice.chance(0.4) { around(dice, story, Happening::Crash) } else { story }
}

pub(super) fn undone(dice: &Dice) -> Story {
    let story = between(dice)
        .with(Happening::Cancel, dice.within(1..=2))
        .with(Happening::NeighbourTrouble, dice.below(3))
        .with(Happening::NeighbourCrash, dice.below(2));
    if dice.chance(0.5) { around(dice, story, Happening::Cancel) } else { story }
}

/// A quiet run has about 250 polls on the source's host and 150 on the other.
fn dying_at(dice: &Dice, polls: u64) -> Story {
    let story = small(dice).between_hosts().dies_at_poll(dice.below(polls));
    if dice.chance(0.5) { story.dies_at_poll(dice.below(polls)) } else { story }
}

pub(super) fn dying(dice: &Dice) -> Story {
    dying_at(dice, 300)
}

pub(super) fn dying_there(dice: &Dice) -> Story {
    dying_at(dice, 200).neighbour_dies()
}

/// Whoever decides is hard to ask around the switchover, and anything else may happen there, too.
pub(super) fn judged(dice: &Dice) -> Story {
    let story = between(dice).with_arbiter().with(Happening::ArbiterTrouble, dice.within(1..=4));
    let mut story = around(dice, story, Happening::ArbiterTrouble);
    if dice.chance(0.4) {
        let what = dice.pick(&[Happening::Crash, Happening::Cancel, Happening::NeighbourTrouble]);
        story.events.push(Event { what, when: When::In(dice.pick(&[Phase::InDoubt, Phase::Reverting])) });
    }
    let more = [
        Happening::Crash,
        Happening::NeighbourCrash,
        Happening::NeighbourTrouble,
        Happening::NeighbourPowerLoss,
        Happening::Cancel,
    ];
    for _ in 0..dice.below(4) {
        story = around(dice, story, dice.pick(&more));
    }
    let happens_after_the_commit = |event: &Event, what: Happening| {
        event.what == what && matches!(event.when, When::In(phase) if phase.is_committed())
    };
    // What is passed on and not flushed is lost if both die at once; that is known, and no promise.
    if story.events.iter().any(|event| happens_after_the_commit(event, Happening::NeighbourPowerLoss)) {
        story.events.retain(|event| !happens_after_the_commit(event, Happening::Crash));
    }
    story
}

pub(super) fn judged_dying(dice: &Dice) -> Story {
    let story = dying_at(dice, 300).with_arbiter();
    let story = around(dice, story, Happening::ArbiterTrouble);
    if dice.chance(0.3) { story.neighbour_dies() } else { story }
}

/// A commit is decided late, after another life of the source has taken it back and gone on.
pub(super) fn judged_late(dice: &Dice) -> Story {
    let story = between(dice).with_arbiter().at(When::In(Phase::PreSwitch), Happening::ArbiterLate);
    let story = story.at(When::In(Phase::InDoubt), Happening::Crash).with(Happening::ArbiterLate, dice.below(2));
    if dice.chance(0.3) { story.at(When::In(Phase::Committing), Happening::NeighbourTrouble) } else { story }
}
