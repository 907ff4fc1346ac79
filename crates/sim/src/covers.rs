//! `--covers`: whether scenarios show what they must.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use transhume_sim::cover::{Phased, PhasedCount, comes_always};
use transhume_sim::scenarios::{NamedScenario, SCENARIOS};

use super::Player;

impl Player {
    /// Plays seeds of each scenario, or of the one that was named, until it has shown what it must, and no more than `seeds`.
    /// False if one has not.
    pub(super) fn cover_all(&self, seeds: &Range<u64>, jobs: usize) -> bool {
        let named = self.arguments.scenario;
        let (turn, turns) = self.arguments.turn.unwrap_or((0, 1));
        let scenarios = || {
            let in_turn = SCENARIOS.iter().skip(turn).step_by(turns);
            let is_meant = |scenario: &&NamedScenario| match named {
                Some(named) => named.name == scenario.name,
                None => scenario.unmended().is_none(),
            };
            in_turn.filter(is_meant)
        };
        let next = AtomicUsize::new(0);
        let worker = || {
            while let Some(scenario) = scenarios().nth(next.fetch_add(1, Ordering::Relaxed))
                && !self.is_over()
            {
                self.cover(scenario, seeds.clone());
            }
        };
        std::thread::scope(|scope| (0..jobs).for_each(|_| drop(scope.spawn(worker))));
        self.is_over() || self.is_covered()
    }

    fn cover(&self, scenario: &'static NamedScenario, seeds: Range<u64>) {
        for seed in seeds {
            if self.is_over() || self.covers().get(scenario.name).is_some_and(|cover| cover.is_whole()) {
                return;
            }
            self.play_seed(scenario, seed);
        }
    }

    /// Whether what was played has shown all that it must; says what it has not.
    pub(super) fn is_covered(&self) -> bool {
        let mut is_whole = self.are_phases_met();
        for (name, cover) in &*self.covers() {
            let (missing, untrue) = (cover.missing(), cover.untrue());
            is_whole &= missing.is_empty() && untrue.is_empty();
            for what in missing {
                println!("MISSING {what} in {} seeds of {name}, which must show it", cover.seeds());
            }
            for (what, times) in untrue {
                println!("MISSING {what} in {} seeds of {name}, {times} of which tell it", cover.seeds());
            }
            if self.arguments.log {
                let occurred: Vec<_> = cover.occurred().iter().map(ToString::to_string).collect();
                println!("{name}: {} seeds: {}", cover.seeds(), occurred.join(", "));
            }
        }
        is_whole
    }

    /// Says of everything that was told to happen in a phase how often it did. False if too little of something has, or too little
    /// after the commit of machines. A part of the scenarios tells too little of a phase to be judged.
    fn are_phases_met(&self) -> bool {
        let [mut others, mut machines] = [Phased::default(), Phased::default()];
        for cover in self.covers().values() {
            let all = if cover.scenario().is_about_machines() { &mut machines } else { &mut others };
            all.add_all(cover.phased());
        }
        for (whose, phased) in [("", &others), (" of machines", &machines)] {
            for (aim, what, count) in phased.each() {
                println!("{what} in {aim}{whose}: {count}");
            }
        }
        let after_commit = machines.after_commit();
        println!("anything after the commit of machines: {after_commit}");
        if self.arguments.turn.is_some() {
            return true;
        }
        let mut is_met = !after_commit.misses_too_often();
        if !is_met {
            println!("MISSING what was told to happen after the commit of machines: {after_commit}");
        }
        let is_amiss = |(aim, _, count): &(_, _, PhasedCount)| comes_always(*aim) && count.misses_too_often();
        for (aim, what, count) in others.each().filter(is_amiss) {
            println!("MISSING {what} in {aim}: {count}");
            is_met = false;
        }
        is_met
    }
}
