//! Scenarios of the strategy that chooses between mirroring and tracking, chunk by chunk.

use std::time::Duration;

use block::Bytes;
use migrate::{Phase, Strategy, Verify};

use super::parts::{at_one_place, failing, slow_sides, with_target_lost};
use super::{common, sparse, swarm};
use crate::dice::Dice;
use crate::disk::{Faults, Timing};
use crate::guest::{Load, Pattern};
use crate::happening::Happening;
use crate::story::Story;
use crate::words::{expect, guest, operator, process, store};

/// With copies slow enough, at times, for chunks to become hot and for sweeps to follow each other.
fn chosen(dice: &Dice, story: Story) -> Story {
    let bandwidth = dice.pick(&[None, Some(2 << 20), Some(10 << 20), Some(40 << 20)]);
    story.options(|options| {
        options.strategy = Strategy::Auto;
        if bandwidth.is_some() {
            options.bandwidth = bandwidth;
        }
    })
}

/// A guest that writes again and again to some places, and mostly in parts of blocks.
fn writer(dice: &Dice) -> Load {
    Load {
        requests: dice.pick(&[1000, 3000]),
        outstanding: dice.pick(&[4, 16]),
        reads: 0.1,
        zeroes: 0.1,
        discards: 0.05,
        sectors_max: dice.pick(&[4, 16, 64, 600]),
        pattern: dice.pick(&[Pattern::Uniform, Pattern::Hot(256), Pattern::Hot(2048), Pattern::Sequential]),
        think: Duration::from_micros(dice.pick(&[50, 300, 3000])),
        ..Load::default()
    }
}

/// A target for which the guest waits, or not.
fn any_timing(dice: &Dice, story: Story) -> Story {
    let target = if dice.chance(0.5) { Timing::SLOW } else { Timing::FLASH };
    story.timings(Timing::FLASH, target)
}

/// Nothing goes wrong.
pub(super) fn quiet(dice: &Dice) -> Story {
    let load = writer(dice);
    chosen(dice, any_timing(dice, common(dice).guest(load)))
}

/// The target is ten times slower. The guest is held for no more than a mirror's switchover.
pub(super) fn slow_target(dice: &Dice) -> Story {
    let load = Load { sectors_max: 16, zeroes: 0.0, discards: 0.0, ..writer(dice) };
    let verify = dice.pick(&[Verify::Off, Verify::Sample, Verify::Full]);
    chosen(dice, Story::new())
        .volume(Bytes::mib(dice.pick(&[1, 3, 8])))
        .guest(load)
        .timings(Timing::FLASH, Timing::SLOW)
        .verify(verify)
        .and(expect().switched())
        .options(|options| options.chunk_bytes = dice.pick(&[4096, 16_384, 65_536]))
}

/// A guest that never rests, on a target that is as fast or slow.
pub(super) fn never_rests(dice: &Dice) -> Story {
    let sectors = dice.pick(&[8, 64, 512]);
    let hot = guest().asks(1000).never_rests().at_once(16).writes(0.9).at_one_place(sectors).sectors(8);
    let hot = hot.thinks(Duration::from_micros(dice.pick(&[5, 40])));
    let story = Story::new().volume(Bytes(dice.pick(&[1 << 20, 3 << 20]))).and(hot);
    // A mirror's comparison on a slow disk under such a guest takes longer than the world waits.
    let story = match dice.chance(0.5) {
        true => story.timings(Timing::FLASH, Timing::SLOW).verify(Verify::Off),
        false => story,
    };
    story.options(|options| {
        options.strategy = Strategy::Auto;
        options.chunk_bytes = dice.pick(&[4096, 16_384, 65_536]);
    })
}

/// Everybody is slow at times, so that copies, mirrored writes and writes that are left meet in every order.
pub(super) fn races(dice: &Dice) -> Story {
    let [source, target] = slow_sides(dice);
    let load = at_one_place(dice, writer);
    let verify = dice.pick(&[Verify::Sample, Verify::Full]);
    let story = any_timing(dice, common(dice).volume(Bytes(1 << 20)).guest(load));
    chosen(dice, story.source(source).target(target).verify(verify))
}

/// Either side fails requests and flushes, or the target is gone for a while.
pub(super) fn errors(dice: &Dice) -> Story {
    let faults = failing(dice, &[0.002, 0.01, 0.05]);
    let source = Faults { write_errors: dice.pick(&[0.0, 0.002]), ..Faults::default() };
    let load = writer(dice);
    let story = any_timing(dice, common(dice).guest(load).source(source).target(faults));
    let story = chosen(dice, story);
    with_target_lost(dice, story)
}

/// The process is killed.
pub(super) fn crashed(dice: &Dice) -> Story {
    let load = writer(dice);
    let story = any_timing(dice, common(dice).guest(load));
    let story = chosen(dice, story).with(Happening::Crash, dice.within(1..=5));
    let phase = dice.pick(&[Phase::Copying, Phase::Verifying, Phase::PreSwitch, Phase::Quiescing, Phase::Committing]);
    if dice.chance(0.5) { story.and(process().killed_in(phase)) } else { story }
}

/// A long move, with a progress map that has something to say about chunks that were had and were left.
pub(super) fn resumed(dice: &Dice) -> Story {
    // Enough writes to one place to make it hot, and long pauses in which the map follows.
    let load = match dice.chance(0.5) {
        true => sparse(dice),
        false => {
            Load { pattern: Pattern::Hot(dice.pick(&[16, 256])), think: Duration::from_millis(300), ..sparse(dice) }
        }
    };
    let load = Load { requests: dice.pick(&[200, 1000]), ..load };
    let faults =
        Faults { flush_errors: dice.pick(&[0.0, 0.0, 0.4]), slow: dice.pick(&[0.0, 0.05]), ..Faults::default() };
    let story = any_timing(dice, common(dice).target(faults))
        .volume(Bytes::mib(dice.pick(&[9, 13])))
        .guest(load)
        .within(Duration::from_secs(40))
        .downtime(Duration::from_secs(2))
        .with(Happening::Crash, dice.within(1..=6))
        .with(Happening::PowerLoss, dice.below(2))
        .with(Happening::TargetLost, dice.below(3))
        .with(Happening::CrashAtWrite, dice.below(3));
    chosen(dice, story).options(|options| options.bandwidth = Some(dice.pick(&[300 << 10, 600 << 10])))
}

/// The host loses its power.
pub(super) fn powerless(dice: &Dice) -> Story {
    let load = Load { flushes: 0.05, fua: 0.1, ..writer(dice) };
    let story = any_timing(dice, common(dice).guest(load));
    chosen(dice, story).with(Happening::PowerLoss, dice.within(1..=3)).with(Happening::Crash, dice.below(2))
}

/// Somebody pauses, resumes, cancels, limits; the store of journal and map is stuck at times.
pub(super) fn steered(dice: &Dice) -> Story {
    let load = writer(dice);
    let story = chosen(dice, any_timing(dice, common(dice).guest(load)))
        .with(Happening::Pause, dice.below(4))
        .with(Happening::Cancel, dice.below(3))
        .with(Happening::Bandwidth, dice.below(4));
    match dice.below(4) {
        0 => story.and(operator().cancels_in(dice.pick(&[Phase::Copying, Phase::Verifying, Phase::PreSwitch]))),
        1 => story.and(store().stuck(0.1)),
        _ => story,
    }
}

/// Any of it together.
pub(super) fn any(dice: &Dice) -> Story {
    chosen(dice, swarm(dice))
}
