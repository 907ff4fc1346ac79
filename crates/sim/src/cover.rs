//! Whether the seeds of a scenario have shown what it is about.
//!
//! What must occur is what the scenario names, and what its instances contain. An instance contains faults with a
//! probability, events, and events in a phase. What only a few seeds contain is given more seeds.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use api::v1::VmMovePhase;
use migrate::Phase;

use crate::fault_event::{Aim, When};
use crate::occurrence::Occurrence;
use crate::scenario::{Scenario, ScenarioResult};
use crate::scenarios::NamedScenario;

/// What was told in so many seeds must have occurred in one of them.
const TOLD_MIN: u64 = 30;
/// So many seeds are played at least.
pub const SEEDS_MIN: u64 = 4;

/// So many are too few to say how many were missed.
const PHASED_MIN: u64 = 20;
/// More of 100 are missed where their phase hardly ever comes.
const MISSED_MAX_PERCENT: u64 = 40;

/// Whether every move that goes well comes to `phase`. To the others only some come: what is told of those may be missed.
#[must_use]
pub const fn comes_always(aim: Aim) -> bool {
    use Phase::{Committed, Committing, Copying, Done, PreSwitch, Preparing, Quiescing, Switched};
    match aim {
        Aim::Machine(phase) => !matches!(phase, VmMovePhase::Postcopy),
        Aim::Disk(phase) => {
            matches!(phase, Preparing | Copying | PreSwitch | Quiescing | Committing | Committed | Switched | Done)
        }
    }
}

/// How often something was told to happen in a phase, and how often it did not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhasedCount {
    told: u64,
    missed: u64,
}

impl PhasedCount {
    /// Whether so much was missed that what it was told for is not shown.
    #[must_use]
    pub const fn misses_too_often(&self) -> bool {
        self.told >= PHASED_MIN && self.missed * 100 > self.told * MISSED_MAX_PERCENT
    }
}

impl fmt::Display for PhasedCount {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "told {}, happened {}", self.told, self.told - self.missed)
    }
}

/// What was told to happen in phases.
#[derive(Clone, Debug, Default)]
pub struct Phased {
    counts: BTreeMap<(Aim, &'static str), PhasedCount>,
}

impl Phased {
    fn add(&mut self, instance: &Scenario, result: &ScenarioResult) {
        if result.violation.is_some() {
            // It has ended before its time.
            return;
        }
        for event in &instance.events {
            if let Some(aim) = event.when.aim() {
                self.counts.entry((aim, event.what.name())).or_default().told += 1;
            }
        }
        for (aim, what) in &result.missed {
            self.counts.entry((*aim, what.name())).or_default().missed += 1;
        }
    }

    /// Adds what another has counted.
    pub fn add_all(&mut self, other: &Self) {
        for (key, count) in &other.counts {
            let sum = self.counts.entry(*key).or_default();
            (sum.told, sum.missed) = (sum.told + count.told, sum.missed + count.missed);
        }
    }

    /// Each phase, what was told of it, and how often.
    pub fn each(&self) -> impl Iterator<Item = (Aim, &'static str, PhasedCount)> {
        self.counts.iter().map(|((aim, what), count)| (*aim, *what, *count))
    }

    /// How often anything was told to happen after the commit.
    #[must_use]
    pub fn after_commit(&self) -> PhasedCount {
        let counts = self.counts.iter().filter(|((aim, _), _)| aim.is_after_commit()).map(|(_, count)| *count);
        counts.fold(PhasedCount::default(), |sum, count| PhasedCount {
            told: sum.told + count.told,
            missed: sum.missed + count.missed,
        })
    }
}

/// What has occurred over some seeds of a scenario.
pub struct Cover {
    scenario: &'static NamedScenario,
    seeds: u64,
    told: BTreeMap<Occurrence, u64>,
    occurred: BTreeSet<Occurrence>,
    phased: Phased,
}

impl Cover {
    /// Of no seeds yet.
    #[must_use]
    pub const fn new(scenario: &'static NamedScenario) -> Self {
        let phased = Phased { counts: BTreeMap::new() };
        Self { scenario, seeds: 0, told: BTreeMap::new(), occurred: BTreeSet::new(), phased }
    }

    /// Whose seeds they are.
    #[must_use]
    pub const fn scenario(&self) -> &'static NamedScenario {
        self.scenario
    }

    /// What was told to happen in phases.
    #[must_use]
    pub const fn phased(&self) -> &Phased {
        &self.phased
    }

    /// Of one more.
    pub fn add(&mut self, instance: &Scenario, result: &ScenarioResult) {
        self.seeds += 1;
        for what in instance.told() {
            *self.told.entry(what).or_default() += 1;
        }
        self.occurred.extend(result.occurred.iter().copied());
        self.phased.add(instance, result);
    }

    /// How many seeds there were.
    #[must_use]
    pub const fn seeds(&self) -> u64 {
        self.seeds
    }

    /// What the scenario names and no seed has shown.
    #[must_use]
    pub fn missing(&self) -> Vec<Occurrence> {
        self.scenario.occurs().iter().copied().filter(|what| !self.occurred.contains(what)).collect()
    }

    /// What was told in many seeds and has occurred in none, and in how many it was told.
    #[must_use]
    pub fn untrue(&self) -> Vec<(Occurrence, u64)> {
        let often = self.told.iter().filter(|(what, times)| **times >= TOLD_MIN && !self.occurred.contains(what));
        often.map(|(what, times)| (*what, *times)).collect()
    }

    /// Whether more seeds could show something more that must occur.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.seeds >= SEEDS_MIN && self.missing().is_empty() && self.untrue().is_empty()
    }

    /// All that has occurred, for people.
    #[must_use]
    pub const fn occurred(&self) -> &BTreeSet<Occurrence> {
        &self.occurred
    }
}

impl Scenario {
    /// What it tells, and what therefore should occur if it is told often enough.
    #[must_use]
    pub fn told(&self) -> BTreeSet<Occurrence> {
        let events = self.events.iter().map(|event| match event.when {
            When::In(phase) => Occurrence::In(phase, event.what),
            When::InMachine(phase) => Occurrence::InMachine(phase, event.what),
            When::Before | When::Sometime | When::After(_) => Occurrence::Happens(event.what),
        });
        let mut told: BTreeSet<_> = events.collect();
        let classes = [
            ("read-errors", "read-error"),
            ("short-reads", "short-read"),
            ("write-errors", "write-error"),
            ("flush-errors", "flush-error"),
            ("stuck", "stuck"),
            ("slow", "slow"),
            ("lost-writes", "lost-write"),
            ("misdirected-writes", "misdirected-write"),
            ("flipped-bits", "flipped-bit"),
        ];
        for mut faults in [self.faults[0], self.faults[1], self.journal_faults, self.map_faults] {
            let some = faults.each().into_iter().filter(|(_, probability)| **probability > 0.0);
            for (name, _) in some {
                let class = classes.iter().find(|(known, _)| *known == name).map(|(_, class)| *class);
                told.insert(Occurrence::Fault(class.expect("every fault has a class")));
            }
        }
        if self.space.is_some() {
            told.insert(Occurrence::Fault("no-space"));
        }
        told
    }
}
