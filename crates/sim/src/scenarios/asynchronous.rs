//! Scenarios of the asynchronous mirror.

use std::time::Duration;

use block::Bytes;
use migrate::{Phase, Strategy, Verify};

use super::parts::{at_one_place, failing, killed_on_the_way, slow_sides, with_target_lost};
use super::{common, sparse, swarm};
use crate::dice::Dice;
use crate::disk::{Faults, Timing};
use crate::guest::{Load, Pattern};
use crate::happening::Happening;
use crate::story::Story;
use crate::words::{expect, process};

/// With a buffer that is full now and then.
fn buffered(dice: &Dice, story: Story) -> Story {
    let buffer = dice.pick(&[Some(1 << 20), Some(1 << 20), Some(3 << 20), None]);
    story.options(|options| {
        options.strategy = Strategy::MirrorAsync;
        options.buffer_bytes = buffer;
    })
}

/// A guest that writes more than anything else.
fn writer(dice: &Dice) -> Load {
    Load {
        requests: dice.pick(&[1000, 2000]),
        outstanding: dice.pick(&[4, 16]),
        reads: 0.1,
        zeroes: 0.1,
        discards: 0.05,
        sectors_max: dice.pick(&[8, 64, 600]),
        pattern: dice.pick(&[Pattern::Uniform, Pattern::Hot(256), Pattern::Hot(2048), Pattern::Sequential]),
        think: Duration::from_micros(dice.pick(&[5, 50, 300])),
        ..Load::default()
    }
}

/// Nothing goes wrong.
pub(super) fn quiet(dice: &Dice) -> Story {
    let load = writer(dice);
    buffered(dice, common(dice).guest(load))
}

/// The guest writes faster than the target, and no request of it waits for more than a part of the buffer.
pub(super) fn slow_target(dice: &Dice) -> Story {
    let load = Load { sectors_max: 16, zeroes: 0.0, discards: 0.0, ..writer(dice) };
    let verify = dice.pick(&[Verify::Off, Verify::Sample]);
    buffered(dice, Story::new())
        .volume(Bytes::mib(dice.pick(&[1, 3])))
        .guest(load)
        .timings(Timing::FLASH, Timing::SLOW)
        .verify(verify)
        .and(expect().switched())
        .options(|options| {
            options.buffer_bytes = Some(1 << 20);
            options.chunk_bytes = dice.pick(&[4096, 65_536]);
        })
}

/// Everybody is slow at times, so that copies, landings and comparisons meet in every order.
pub(super) fn races(dice: &Dice) -> Story {
    let [source, target] = slow_sides(dice);
    let load = at_one_place(dice, writer);
    let verify = dice.pick(&[Verify::Sample, Verify::Full]);
    buffered(dice, common(dice).volume(Bytes(1 << 20)).guest(load).source(source).target(target).verify(verify))
}

/// The target fails requests and flushes, or is gone for a while.
pub(super) fn errors(dice: &Dice) -> Story {
    let faults = failing(dice, &[0.002, 0.01, 0.05]);
    let load = writer(dice);
    let story = buffered(dice, common(dice).guest(load).target(faults));
    with_target_lost(dice, story)
}

/// The process is killed.
pub(super) fn crashed(dice: &Dice) -> Story {
    let load = writer(dice);
    let slow = Faults { slow: dice.pick(&[0.0, 0.01]), ..Faults::default() };
    let story = buffered(dice, common(dice).guest(load).target(slow)).with(Happening::Crash, dice.within(1..=5));
    let phase = dice.pick(&[Phase::Copying, Phase::Verifying, Phase::PreSwitch, Phase::Quiescing, Phase::Committing]);
    if dice.chance(0.5) { story.and(process().killed_in(phase)) } else { story }
}

/// A long move, with a progress map that has something to say.
pub(super) fn resumed(dice: &Dice) -> Story {
    let load = sparse(dice);
    let crashes = dice.within(1..=6);
    let faults = Faults {
        flush_errors: dice.pick(&[0.0, 0.0, 0.4]),
        slow: dice.pick(&[0.0, 0.05]),
        stuck: dice.pick(&[0.0, 0.01]),
        ..Faults::default()
    };
    let story = killed_on_the_way(dice, load, crashes, faults);
    buffered(dice, story).options(|options| options.bandwidth = Some(dice.pick(&[300 << 10, 600 << 10])))
}

/// The host loses its power.
pub(super) fn powerless(dice: &Dice) -> Story {
    let load = Load { flushes: 0.05, fua: 0.1, ..writer(dice) };
    let losses = dice.within(1..=3);
    buffered(dice, common(dice).guest(load)).with(Happening::PowerLoss, losses).with(Happening::Crash, dice.below(2))
}

/// Somebody pauses, resumes, cancels, limits.
pub(super) fn steered(dice: &Dice) -> Story {
    let load = writer(dice);
    let slow = Faults { slow: 0.01, ..Faults::default() };
    buffered(dice, common(dice).guest(load).target(slow))
        .with(Happening::Pause, dice.below(4))
        .with(Happening::Cancel, dice.below(3))
        .with(Happening::Bandwidth, dice.below(4))
}

/// Any of it together.
pub(super) fn any(dice: &Dice) -> Story {
    buffered(dice, swarm(dice))
}
