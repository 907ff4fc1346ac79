//! From a scenario that fails to a smaller one that fails in the same way.
//!
//! Every part of a scenario that can be left out or made smaller has a name. Parts are left out one after another. A
//! part stays out if the same invariant still breaks with the same seed. This repeats until no more parts can be left
//! out. The names make the smaller scenario again: `--without NAME,NAME,...`.

use block::Bytes;

use crate::disk::Timing;
use crate::guest::Pattern;
use crate::log::Keep;
use crate::scenario::{Scenario, ScenarioResult};
use crate::world::Invariant;

/// A volume is not made smaller than this.
const SIZE_MIN: Bytes = Bytes::kib(64);

/// A scenario that fails.
#[derive(Clone)]
pub struct Shrunk {
    /// What is left of it.
    pub scenario: Scenario,
    /// What was left out, in order.
    pub without: Vec<String>,
    /// How it fails.
    pub result: ScenarioResult,
    /// How many scenarios were played to find it.
    pub plays: u32,
}

/// Makes the scenario of `seed` smaller for as long as it breaks `invariant` and at most `plays_max` scenarios were played.
/// `None` if it does not break it in the first place.
#[must_use]
pub fn shrink(scenario: &Scenario, seed: u64, invariant: Invariant, plays_max: u32) -> Option<Shrunk> {
    let fails = |scenario: &Scenario| {
        let result = scenario.play(seed, Keep::Tail);
        result.violation.as_ref().is_some_and(|violation| violation.invariant == invariant).then_some(result)
    };
    let mut best = Shrunk { scenario: scenario.clone(), without: Vec::new(), result: fails(scenario)?, plays: 1 };
    loop {
        let before = best.without.len();
        for name in names(&best.scenario) {
            // Said again and again: half of the half.
            while best.plays < plays_max
                && let Some(smaller) = best.scenario.without(&name)
            {
                best.plays += 1;
                let Some(result) = fails(&smaller) else { break };
                (best.scenario, best.result) = (smaller, result);
                best.without.push(name.clone());
            }
        }
        if best.without.len() == before || best.plays >= plays_max {
            return Some(best);
        }
    }
}

/// The names of all that may be left out of `scenario`, the most telling first.
fn names(scenario: &Scenario) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    // From the end, so that the numbers of those that stay do not change while this list is worked through.
    for index in (0..scenario.events.len()).rev() {
        names.push(format!("{}#{index}", scenario.events[index].what.name()));
    }
    names.extend((0..scenario.deaths.len()).rev().map(|index| format!("death#{index}")));
    for (place, mut faults) in ["source", "target", "store", "map"].iter().zip(fault_sets(scenario)) {
        names.extend(faults.each().iter().map(|(name, _)| format!("{place}.{name}")));
    }
    let others = [
        "volumes",
        "second-connection",
        "wire",
        "space",
        "requests",
        "size",
        "bandwidth",
        "verify",
        "dirty-target",
        "data",
        "odd-end",
        "alignment",
        "flushes",
        "discards",
        "reads",
        "outstanding",
        "long-requests",
        "pattern",
        "timing",
        "think",
        "span",
    ];
    names.extend(others.map(str::to_owned));
    names
}

fn fault_sets(scenario: &Scenario) -> [crate::disk::Faults; 4] {
    [scenario.faults[0], scenario.faults[1], scenario.journal_faults, scenario.map_faults]
}

impl Scenario {
    /// The scenario without the part of this name, or with half of it; `None` if there is no such part, or nothing left of
    /// it.
    #[must_use]
    pub fn without(&self, name: &str) -> Option<Self> {
        let mut scenario = self.clone();
        if let Some((what, index)) = name.split_once('#') {
            let index: usize = index.parse().ok()?;
            if what == "death" {
                (index < scenario.deaths.len()).then(|| scenario.deaths.remove(index))?;
            } else {
                scenario.events.get(index).filter(|event| event.what.name() == what)?;
                scenario.events.remove(index);
            }
            return Some(scenario);
        }
        if let Some((place, fault)) = name.split_once('.') {
            let faults = match place {
                "source" => &mut scenario.faults[0],
                "target" => &mut scenario.faults[1],
                "store" => &mut scenario.journal_faults,
                "map" => &mut scenario.map_faults,
                _ => return None,
            };
            let (_, probability) = faults.each().into_iter().find(|(name, _)| *name == fault)?;
            return (std::mem::take(probability) > 0.0).then_some(scenario);
        }
        scenario.reduce(name).then_some(scenario)
    }

    /// Leaves out, or halves, what `name` says; false if there was nothing to it.
    fn reduce(&mut self, name: &str) -> bool {
        /// Halves a number above `least`.
        fn halve(number: &mut u64, least: u64) -> bool {
            let half = (*number / 2).max(least);
            std::mem::replace(number, half) > half
        }
        let (load, options) = (&mut self.load, &mut self.setup.options);
        match name {
            "volumes" => self.besides.pop().is_some(),
            "second-connection" => std::mem::take(&mut self.has_two_connections),
            // Guests whose disk is on its way to another host have nothing else.
            "wire" => !self.setup.is_between_hosts && self.wire.take().is_some(),
            "space" => self.space.take().is_some(),
            "requests" => halve(&mut load.requests, 1),
            "outstanding" => halve(&mut load.outstanding, 1),
            "long-requests" => halve(&mut load.sectors_max, load.granule),
            "reads" => std::mem::take(&mut load.reads) > 0.0,
            "flushes" => std::mem::take(&mut load.flushes) > 0.0,
            "discards" => std::mem::take(&mut load.discards) + std::mem::take(&mut load.zeroes) > 0.0,
            "pattern" => std::mem::replace(&mut load.pattern, Pattern::Uniform) != Pattern::Uniform,
            "think" => {
                let half = load.think / 2;
                std::mem::replace(&mut load.think, half).as_micros() > 1
            }
            "span" => {
                let half = self.span / 2;
                std::mem::replace(&mut self.span, half).as_millis() > 1
            }
            "size" => {
                let half = Bytes(self.size.0 / 2).align_up(1 << 16);
                half >= SIZE_MIN && std::mem::replace(&mut self.size, half) > half
            }
            "odd-end" => {
                let even = self.size.align_down(1 << 16).max(SIZE_MIN);
                std::mem::replace(&mut self.size, even) > even
            }
            "alignment" => {
                load.granule = 1;
                self.target_alignment = None;
                std::mem::replace(&mut self.alignment, 1) > 1
            }
            "dirty-target" => std::mem::take(&mut self.dirty_target),
            "data" => std::mem::replace(&mut self.filled, 0.0) > 0.0,
            "bandwidth" => options.bandwidth.take().is_some(),
            "verify" => std::mem::replace(&mut options.verify, migrate::Verify::Off) != migrate::Verify::Off,
            "timing" => {
                let is_slow = self.timings.iter().any(|timing| *timing != Timing::FLASH);
                self.timings = [Timing::FLASH; 2];
                is_slow
            }
            _ => false,
        }
    }

    /// The scenario in a few lines, for people.
    #[must_use]
    pub fn describe(&self) -> Vec<String> {
        let (load, options) = (&self.load, &self.setup.options);
        let mut lines = vec![
            format!(
                "volume: {} bytes, {:.0} % data, chunks of {}, alignment {}{}; moved {} times",
                self.size.0,
                self.filled * 100.0,
                Bytes(options.chunk_bytes),
                self.alignment,
                if self.dirty_target { ", the target holds something else" } else { "" },
                self.moves,
            ),
            format!(
                "guest: {} requests, {} at once, {:.0} % reads, up to {} sectors, {:?}, thinks up to {:?}",
                load.requests,
                load.outstanding,
                load.reads * 100.0,
                load.sectors_max,
                load.pattern,
                load.think,
            ),
            format!(
                "move: verify {}, bandwidth {:?}, within {:?}",
                options.verify.name(),
                options.bandwidth,
                self.span
            ),
        ];
        if !self.besides.is_empty() {
            let (volumes, at_once) = (self.volume_count(), self.setup.running_jobs_max);
            let how = if self.setup.together { ", asked for as one" } else { "" };
            lines.push(format!("{volumes} volumes in one daemon, {at_once} moves at once{how}"));
        }
        lines.extend(self.wire.map(|figures| format!("the guest speaks NBD: {figures:?}")));
        for (place, faults) in ["source", "target", "store", "map"].iter().zip(fault_sets(self)) {
            if faults != crate::disk::Faults::default() {
                lines.push(format!("{place}: {}", faults.describe()));
            }
        }
        lines.extend(self.space.map(|part| format!("target: space for {:.0} % only", part * 100.0)));
        lines.extend(self.events.iter().map(|event| format!("{}: {:?}", event.what.name(), event.when)));
        lines.extend(self.deaths.iter().map(|poll| format!("the process dies at poll {poll}")));
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Faults;
    use crate::host::Mistakes;
    use crate::scenario::FaultEvent;

    #[test]
    fn what_does_not_matter_is_left_out_and_the_names_make_the_same_story_again() {
        let mistakes = Mistakes { returns_to_source: true, ..Mistakes::default() };
        let slow = Faults { slow: 0.01, ..Faults::default() };
        let scenario =
            Scenario::new().mistakes(mistakes).source(slow).with(FaultEvent::Reconnect, 2).dirty_target(true);
        let seed = (0..50).find(|seed| scenario.play(*seed, Keep::Tail).violation.is_some()).expect("it is seen");
        let shrunk = shrink(&scenario, seed, Invariant::OneWriter, 200).expect("it fails");
        assert!(shrunk.scenario.events.is_empty(), "what happened had nothing to do with it: {:?}", shrunk.without);
        assert!(!shrunk.scenario.dirty_target && shrunk.scenario.faults[0] == Faults::default());
        assert!(shrunk.scenario.load.requests < 2000);
        let again =
            shrunk.without.iter().try_fold(scenario, |scenario, name| scenario.without(name)).expect("all are known");
        assert_eq!(again.play(seed, Keep::Tail).log_hash, shrunk.result.log_hash);
    }
}
