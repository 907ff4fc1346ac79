//! Moves by snapshots, with what goes wrong with other moves, too.

use migrate::{Phase, Strategy};

use super::stores::journal_errors;
use super::{at_await, common, crash, power_loss, recovery, source_errors, steering, target_errors};
use crate::dice::Dice;
use crate::happening::When;
use crate::story::{Happening, Story};

fn by_snapshots(story: Story, dice: &Dice) -> Story {
    let (limit, bandwidth) = (dice.pick(&[5, 50, 500]), dice.pick(&[4 << 20, 20 << 20, 300 << 20]));
    story.options(|options| {
        options.strategy = Strategy::Snapshot;
        options.downtime_limit_ms = limit;
        options.bandwidth = Some(bandwidth);
    })
}

pub(super) fn quiet(dice: &Dice) -> Story {
    by_snapshots(common(dice), dice)
}

pub(super) fn crashed(dice: &Dice) -> Story {
    by_snapshots(crash(dice), dice).with(Happening::Cancel, dice.below(2))
}

pub(super) fn powerless(dice: &Dice) -> Story {
    by_snapshots(power_loss(dice), dice).with(Happening::Cancel, dice.below(2))
}

pub(super) fn steered(dice: &Dice) -> Story {
    by_snapshots(steering(dice), dice)
}

/// Files cannot be written, synced or removed for a while, overlays included.
pub(super) fn on_failing_files(dice: &Dice) -> Story {
    let phases = [Phase::PreSwitch, Phase::Switched];
    let mut story = common(dice).with(Happening::FilesFail, dice.within(1..=4)).with(Happening::Crash, dice.below(2));
    for phase in phases {
        story = story.at(When::In(phase), Happening::FilesFail);
    }
    by_snapshots(story, dice)
}

/// The process dies while it recovers, or at one await or step of its files.
pub(super) fn dying(dice: &Dice) -> Story {
    let story = if dice.chance(0.5) { recovery(dice) } else { at_await(dice) };
    by_snapshots(story, dice)
}

pub(super) fn on_failing_disks(dice: &Dice) -> Story {
    let story = match dice.below(3) {
        0 => target_errors(dice),
        1 => source_errors(dice),
        _ => journal_errors(dice),
    };
    by_snapshots(story, dice).with(Happening::Crash, dice.below(2))
}
