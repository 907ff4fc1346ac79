//! Named scenarios: the stories that are told again and again, and every regression.

use std::time::Duration;

use block::Bytes;
use migrate::Verify;

use crate::dice::Dice;
use crate::disk::{Faults, Timing};
use crate::guest::{Load, Pattern};
use crate::story::{Happening, Story};

/// A scenario by its name.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Its name.
    pub name: &'static str,
    /// What it is about.
    pub about: &'static str,
    tell: fn(&Dice) -> Story,
}

impl Scenario {
    /// The story of this scenario for `seed`.
    #[must_use]
    pub fn story(&self, seed: u64) -> Story {
        (self.tell)(&Dice::new(seed, self.name))
    }
}

/// All of them.
pub const SCENARIOS: &[Scenario] = &[
    Scenario { name: "quiet", about: "a move under load, and nothing goes wrong", tell: common },
    Scenario { name: "slow-disks", about: "source or target are slow, with slow periods", tell: slow_disks },
    Scenario { name: "hot-spot", about: "overlapping writes at one place of a small volume", tell: hot_spot },
    Scenario { name: "target-errors", about: "the target fails requests and flushes", tell: target_errors },
    Scenario {
        name: "target-flaky",
        about: "the target fails many requests and few flushes, and the mirror bears it",
        tell: target_flaky,
    },
    Scenario { name: "target-lost", about: "the target goes away and comes back", tell: target_lost },
    Scenario { name: "target-stuck", about: "the target answers after a minute", tell: target_stuck },
    Scenario { name: "no-space", about: "the target fills up midway", tell: no_space },
    Scenario { name: "source-errors", about: "the source fails requests and flushes", tell: source_errors },
    Scenario {
        name: "journal-errors",
        about: "the journal's disk fails stores: commits in doubt",
        tell: journal_errors,
    },
    Scenario { name: "crash", about: "the process is killed, again and again", tell: crash },
    Scenario { name: "resume", about: "a long move is killed, and goes on where it was", tell: resume },
    Scenario { name: "power-loss", about: "the host loses its power", tell: power_loss },
    Scenario { name: "steering", about: "pause, resume, cancel and bandwidth at any moment", tell: steering },
    Scenario {
        name: "corruption",
        about: "the target's bytes change behind our back; full comparison",
        tell: corruption,
    },
    Scenario { name: "reconnect", about: "the guest's connection is cut and comes back", tell: reconnect },
    Scenario { name: "swarm", about: "any of it together, every probability from the seed", tell: swarm },
];

/// The scenario of that name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Scenario> {
    SCENARIOS.iter().find(|scenario| scenario.name == name)
}

/// The scenario that `seed` plays when none is named: every other one is a swarm.
#[must_use]
pub fn of_seed(seed: u64) -> &'static Scenario {
    let others = SCENARIOS.len() as u64 - 1;
    let index = if seed.is_multiple_of(2) { others } else { seed / 2 % others };
    &SCENARIOS[index as usize]
}

/// A volume, a guest and options of any kind.
fn common(dice: &Dice) -> Story {
    let odd = dice.pick(&[0, 0, 512, 4096, 5 * 512, 1, 700]);
    let size = Bytes(dice.pick(&[1 << 20, 3 << 20, 8 << 20]) + odd);
    let chunk = dice.pick(&[4096, 16_384, 65_536, 65_536, 262_144]);
    let load = Load {
        requests: dice.pick(&[500, 1000, 2000]),
        outstanding: dice.pick(&[1, 4, 8, 16]),
        reads: dice.pick(&[0.2, 0.5, 0.7]),
        sectors_max: dice.pick(&[1, 16, 64, 256]),
        pattern: dice.pick(&[Pattern::Uniform, Pattern::Uniform, Pattern::Hot(256), Pattern::Sequential]),
        think: Duration::from_micros(dice.pick(&[50, 300, 1000])),
        ..Load::default()
    };
    let alignment = if size.is_multiple_of(512) { dice.pick(&[1, 512]) } else { 1 };
    let (verify, bandwidth) = (
        dice.pick(&[Verify::Off, Verify::Sample, Verify::Sample, Verify::Full]),
        dice.pick(&[None, Some(50 << 20), Some(200 << 20), Some(600 << 20)]),
    );
    let (window, target_ms) = (dice.pick(&[512 << 10, 4 << 20, 16 << 20]), dice.pick(&[50, 1000, 30_000]));
    // A move of many seconds, in which the progress map has something to say, or one of milliseconds, in which every
    // request meets a copy.
    let is_long = dice.chance(0.35);
    let (bandwidth, think, span_ms) = match is_long {
        true => (Some(dice.pick(&[100 << 10, 300 << 10, 1 << 20])), 100, dice.pick(&[10_000, 30_000])),
        false => (bandwidth, 0, dice.pick(&[10, 30, 60])),
    };
    let load = Load { think: load.think.max(Duration::from_millis(think)), ..load };
    let (filled, dirty) = (dice.pick(&[0.0, 0.3, 0.7, 1.0]), dice.chance(0.3));
    Story::new()
        .volume(size)
        .alignment(alignment)
        .filled(filled)
        .dirty_target(dirty)
        .guest(load)
        .verify(verify)
        .within(Duration::from_millis(span_ms))
        .options(|options| {
            options.chunk_bytes = chunk;
            options.bandwidth = bandwidth;
            options.window_bytes_max = window;
            options.target_ms = target_ms;
            options.sample_chunks = 16;
        })
}

fn rate(dice: &Dice) -> f64 {
    dice.pick(&[0.0005, 0.002, 0.01])
}

fn slow_disks(dice: &Dice) -> Story {
    let timing = |dice: &Dice| if dice.chance(0.5) { Timing::SLOW } else { Timing::FLASH };
    let slow = Faults { slow: rate(dice), ..Faults::default() };
    let load = Load { requests: 500, ..Load::default() };
    let timings = (timing(dice), timing(dice));
    common(dice).guest(load).timings(timings.0, timings.1).source(slow).target(slow)
}

fn hot_spot(dice: &Dice) -> Story {
    let load = Load {
        outstanding: 32,
        requests: 1000,
        pattern: Pattern::Hot(64),
        zeroes: 0.1,
        discards: 0.1,
        think: Duration::from_micros(50),
        ..Load::default()
    };
    common(dice).volume(Bytes(dice.pick(&[300_000, 1 << 20]))).alignment(1).guest(load)
}

fn target_errors(dice: &Dice) -> Story {
    let rate = rate(dice);
    let faults = Faults { read_errors: rate, write_errors: rate, flush_errors: rate * 10.0, ..Faults::default() };
    common(dice).target(faults)
}

/// Zeroes and holes beside the errors: what a failed write has left there must not be taken for what a flush has kept.
fn target_flaky(dice: &Dice) -> Story {
    let rate = dice.pick(&[0.005, 0.02, 0.05]);
    let load = Load { requests: 1000, zeroes: 0.2, discards: 0.1, reads: 0.3, flushes: 0.02, ..Load::default() };
    let faults =
        Faults { read_errors: rate, write_errors: rate, flush_errors: dice.pick(&[0.0, 0.1]), ..Faults::default() };
    common(dice).filled(0.5).guest(load).target(faults).with(Happening::Crash, dice.below(2))
}

fn target_lost(dice: &Dice) -> Story {
    let story = common(dice).with(Happening::TargetLost, dice.within(1..=3));
    if dice.chance(0.3) { story.gives_up_lost_targets() } else { story }
}

fn target_stuck(dice: &Dice) -> Story {
    common(dice).target(Faults { stuck: rate(dice), slow: rate(dice), ..Faults::default() })
}

fn no_space(dice: &Dice) -> Story {
    let story = common(dice).filled(0.8).target_space(dice.fraction());
    if dice.chance(0.5) { story.gives_up_lost_targets() } else { story }
}

fn source_errors(dice: &Dice) -> Story {
    let rate = rate(dice);
    let faults = Faults { read_errors: rate, write_errors: rate, flush_errors: rate * 10.0, ..Faults::default() };
    common(dice).source(faults)
}

fn journal_errors(dice: &Dice) -> Story {
    let rate = dice.pick(&[0.05, 0.3, 0.7]);
    let faults = Faults { write_errors: rate, read_errors: rate / 4.0, stuck: rate / 20.0, ..Faults::default() };
    common(dice).journal(faults).with(Happening::Crash, dice.below(3)).with(Happening::Cancel, dice.below(2))
}

fn crash(dice: &Dice) -> Story {
    common(dice).with(Happening::Crash, dice.within(1..=6))
}

/// So few writes to so large a volume that the activity log has idle extents and the progress map is worth reading.
fn resume(dice: &Dice) -> Story {
    let load = Load {
        requests: 200,
        outstanding: 8,
        reads: 0.2,
        think: Duration::from_secs(dice.pick(&[2, 8])),
        ..Load::default()
    };
    let crashes = dice.within(1..=6);
    common(dice)
        .volume(Bytes::mib(dice.pick(&[9, 13])))
        .guest(load)
        .options(|options| options.bandwidth = Some(dice.pick(&[300 << 10, 600 << 10])))
        .within(Duration::from_secs(40))
        .downtime(Duration::from_secs(2))
        .with(Happening::Crash, crashes)
        .with(Happening::PowerLoss, dice.below(2))
}

fn power_loss(dice: &Dice) -> Story {
    common(dice).with(Happening::PowerLoss, dice.within(1..=3)).with(Happening::Crash, dice.below(2))
}

fn steering(dice: &Dice) -> Story {
    common(dice)
        .with(Happening::Pause, dice.below(4))
        .with(Happening::Cancel, dice.below(3))
        .with(Happening::Bandwidth, dice.below(4))
}

fn corruption(dice: &Dice) -> Story {
    let lost_writes = dice.pick(&[0.0, 0.002]);
    common(dice)
        .verify(Verify::Full)
        .with(Happening::Corruption, dice.within(1..=3))
        .target(Faults { lost_writes, ..Faults::default() })
}

fn reconnect(dice: &Dice) -> Story {
    common(dice).source(Faults { slow: rate(dice), ..Faults::default() }).with(Happening::Reconnect, dice.within(1..=5))
}

fn swarm(dice: &Dice) -> Story {
    let maybe = |value: f64| if dice.chance(0.3) { value * dice.fraction() } else { 0.0 };
    let faults = || Faults {
        read_errors: maybe(0.01),
        write_errors: maybe(0.01),
        flush_errors: maybe(0.2),
        stuck: maybe(0.001),
        slow: maybe(0.01),
        lost_writes: 0.0,
    };
    let (source, target, journal) = (faults(), faults(), faults());
    let times = |limit| if dice.chance(0.3) { dice.within(1..=limit) } else { 0 };
    let mut story = common(dice).source(source).target(target).journal(journal);
    for (happening, limit) in [
        (Happening::Crash, 4),
        (Happening::PowerLoss, 2),
        (Happening::Reconnect, 3),
        (Happening::TargetLost, 2),
        (Happening::Pause, 3),
        (Happening::Cancel, 2),
        (Happening::Bandwidth, 3),
    ] {
        story = story.with(happening, times(limit));
    }
    if dice.chance(0.1) { story.target_space(dice.fraction()) } else { story }
}
