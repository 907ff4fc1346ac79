//! What has been seen over all seeds.

use std::collections::BTreeMap;
use std::time::Duration;

use transhume_sim::host::Status;
use transhume_sim::scenario::ScenarioResult;

/// Counts of many runs.
#[derive(Default)]
pub(crate) struct Totals {
    runs: u64,
    simulated: Duration,
    events: u64,
    polls: u64,
    requests: u64,
    resumed: u64,
    repeated: u64,
    faults: BTreeMap<&'static str, u64>,
    endings: BTreeMap<&'static str, u64>,
    /// What was to happen in a phase, and what of it did not.
    missed: u64,
    failures: BTreeMap<(String, &'static str), Vec<u64>>,
}

impl Totals {
    /// Counts a run.
    pub(crate) fn add(&mut self, result: &ScenarioResult) {
        self.runs += 1;
        self.simulated += result.simulated;
        self.events += result.events;
        self.polls += result.polls;
        self.requests += result.guest.answered;
        if let Status::Switched(Some(report)) = &result.status {
            self.resumed += u64::from(report.bytes_resumed > 0);
        }
        for (class, count) in &result.faults {
            *self.faults.entry(class).or_default() += count;
        }
        self.missed += result.missed.len() as u64;
        *self.endings.entry(result.status.name()).or_default() += 1;
    }

    /// Counts a run that was played twice and was the same both times.
    pub(crate) const fn repeat(&mut self) {
        self.repeated += 1;
    }

    /// Notes that `invariant` did not hold. True if that is the first time in this scenario.
    pub(crate) fn fail(&mut self, invariant: &str, scenario: &'static str, seed: u64) -> bool {
        let seeds = self.failures.entry((invariant.to_owned(), scenario)).or_default();
        seeds.push(seed);
        seeds.len() == 1
    }

    /// Whether everything has held.
    pub(crate) fn is_clean(&self) -> bool {
        self.failures.is_empty()
    }

    /// Prints all of it.
    pub(crate) fn print(&self, took: Duration) {
        let rate = self.runs as f64 / took.as_secs_f64().max(0.001);
        println!(
            "{} seeds in {:.1} s ({rate:.1} seeds/s): {:.2} simulated hours, {} guest requests, {} events, {} polls",
            self.runs,
            took.as_secs_f64(),
            self.simulated.as_secs_f64() / 3600.0,
            self.requests,
            self.events,
            self.polls,
        );
        let line = |counts: &BTreeMap<&'static str, u64>| {
            counts.iter().map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
        };
        println!("faults: {}", line(&self.faults));
        println!(
            "endings: {}; resumed from a progress map: {}; did not happen because its phase did not come: {}; \
             played twice with the same log: {}",
            line(&self.endings),
            self.resumed,
            self.missed,
            self.repeated
        );
        for ((invariant, scenario), seeds) in &self.failures {
            println!("FAILED {invariant} in {scenario}: seeds {seeds:?}");
        }
    }
}
