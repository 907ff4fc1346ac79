//! Moves to another host's daemon: either process killed, either host without power, the link between them cut.

use std::time::Duration;

use migrate::Phase;

use super::{common, small};
use crate::dice::Dice;
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
    let story = around(dice, story, Happening::Crash);
    if dice.chance(0.6) { around(dice, story, Happening::NeighbourCrash) } else { story }
}

pub(super) fn cut(dice: &Dice) -> Story {
    let story = between(dice).with(Happening::NeighbourTrouble, dice.within(1..=6));
    let story = around(dice, story, Happening::NeighbourTrouble);
    if dice.chance(0.5) { around(dice, story, Happening::Crash) } else { story }
}

pub(super) fn powerless(dice: &Dice) -> Story {
    let story =
        between(dice).with(Happening::PowerLoss, dice.below(2)).with(Happening::NeighbourPowerLoss, dice.within(1..=3));
    around(dice, story, Happening::NeighbourPowerLoss)
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
    story
}

pub(super) fn judged_dying(dice: &Dice) -> Story {
    let story = dying_at(dice, 300).with_arbiter();
    let story = around(dice, story, Happening::ArbiterTrouble);
    if dice.chance(0.3) { story.neighbour_dies() } else { story }
}
