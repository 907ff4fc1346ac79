//! Whether the seeds of a scenario have shown what it is about.
//!
//! What must occur is what the scenario names, and what its instances contain. An instance contains faults with a
//! probability, events, and events in a phase. What only a few seeds contain is given more seeds.

use std::collections::{BTreeMap, BTreeSet};

use crate::fault_event::When;
use crate::occurrence::Occurrence;
use crate::scenario::{Scenario, ScenarioResult};
use crate::scenarios::NamedScenario;

/// What was told in so many seeds must have occurred in one of them.
const TOLD_MIN: u64 = 30;
/// So many seeds are played at least.
pub const SEEDS_MIN: u64 = 4;

/// What has occurred over some seeds of a scenario.
pub struct Cover {
    scenario: &'static NamedScenario,
    seeds: u64,
    told: BTreeMap<Occurrence, u64>,
    occurred: BTreeSet<Occurrence>,
}

impl Cover {
    /// Of no seeds yet.
    #[must_use]
    pub const fn new(scenario: &'static NamedScenario) -> Self {
        Self { scenario, seeds: 0, told: BTreeMap::new(), occurred: BTreeSet::new() }
    }

    /// Of one more.
    pub fn add(&mut self, instance: &Scenario, result: &ScenarioResult) {
        self.seeds += 1;
        for what in instance.told() {
            *self.told.entry(what).or_default() += 1;
        }
        self.occurred.extend(result.occurred.iter().copied());
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
            When::Sometime | When::After(_) => Occurrence::Happens(event.what),
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
