//! `transhume-sim`: plays seeds and says what it saw. `cargo xtask sim` runs it.

mod covers;
mod tally;

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use clap::Parser;
use env::{Env, RealEnv};
use transhume_sim::cover::Cover;
use transhume_sim::log::Keep;
use transhume_sim::scenario::{Scenario, ScenarioResult};
use transhume_sim::scenarios::{self, NamedScenario, SCENARIOS, UNMENDED};
use transhume_sim::shrink::{Shrunk, shrink};
use transhume_sim::world::Violation;

use tally::Totals;

/// One seed of so many is played twice, and must give the same log. It has no factor in common with the turns of scenarios.
const TWICE_EVERY: u64 = 49;
/// With so many seeds of one scenario, everything that it must show has to occur.
const COVER_SEEDS: u64 = 50;

/// Plays migrations in a simulated world, each from one seed, and checks what must always hold.
#[derive(Parser)]
#[command(bin_name = "cargo xtask sim", after_help = "Example: cargo xtask sim --scenario crash --seeds 0..1000")]
struct Arguments {
    /// Which seeds to play, from A up to, not including, B.
    #[arg(long, value_name = "A..B", default_value = "0..500", value_parser = parse_seeds)]
    seeds: Range<u64>,
    /// Play on from A for so many minutes, whatever B is.
    #[arg(long)]
    minutes: Option<u64>,
    /// Play this scenario only; otherwise the seed chooses.
    #[arg(long, value_parser = parse_scenario)]
    scenario: Option<&'static NamedScenario>,
    /// Play the swarm only: every probability from the seed.
    #[arg(long, conflicts_with = "scenario")]
    swarm: bool,
    /// Play this seed only.
    #[arg(long)]
    seed: Option<u64>,
    /// Print every event, the virtual time first.
    #[arg(long)]
    log: bool,
    /// Leave these parts of the scenario out, as a failure's report names them.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    without: Vec<String>,
    /// Kill the process at every await of the scenario, one after another.
    #[arg(long)]
    every_await: bool,
    /// Kill the process at this await.
    #[arg(long, value_name = "POLL")]
    poll: Option<u64>,
    /// Play every seed twice and compare the logs; otherwise one of 49.
    #[arg(long)]
    twice: bool,
    /// Play each scenario (or the one named) until everything has occurred that it must show, and fail if it has not within the
    /// seeds.
    #[arg(long, conflicts_with_all = ["swarm", "seed", "minutes", "every_await"])]
    covers: bool,
    /// With `--covers`, only every Nth scenario, from number K on: K/N.
    #[arg(long, value_name = "K/N", requires = "covers", value_parser = parse_turn)]
    turn: Option<(usize, usize)>,
    /// Stop after so many failures.
    #[arg(long, default_value_t = 1)]
    failures: usize,
    /// How many scenarios may be played to make a failing one smaller.
    #[arg(long, value_name = "PLAYS", default_value_t = 300)]
    shrink: u32,
    /// How many threads play at once; otherwise one a core.
    #[arg(long)]
    jobs: Option<usize>,
    /// List the scenarios.
    #[arg(long)]
    list: bool,
    /// List each scenario, a tab, and why no mistake in crates/sim/mutations names it; nothing if one does.
    #[arg(long, hide = true)]
    unproved: bool,
}

fn parse_seeds(text: &str) -> Result<Range<u64>, String> {
    let parts = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    parts.filter(|range: &Range<u64>| range.start < range.end).ok_or_else(|| format!("`{text}` is no A..B"))
}

fn parse_turn(text: &str) -> Result<(usize, usize), String> {
    let parts = text.split_once('/').and_then(|(turn, turns)| Some((turn.parse().ok()?, turns.parse().ok()?)));
    parts.filter(|(turn, turns)| turn < turns).ok_or_else(|| format!("`{text}` is no K/N with K below N"))
}

fn parse_scenario(name: &str) -> Result<&'static NamedScenario, String> {
    scenarios::find(name).ok_or_else(|| format!("no scenario `{name}`: see --list"))
}

/// Why a run failed.
enum Failure {
    Violated(Violation, Vec<String>),
    /// Something outside the process of the scenario panicked.
    Panicked(String),
    /// Two runs of one seed were not the same.
    Differed,
}

/// What is played.
struct Player {
    arguments: Arguments,
    totals: Mutex<Totals>,
    /// What scenarios have shown, by their names.
    covers: Mutex<BTreeMap<&'static str, Cover>>,
    failed: AtomicUsize,
}

impl Player {
    fn scenario(&self, seed: u64) -> &'static NamedScenario {
        match self.arguments.scenario {
            Some(scenario) => scenario,
            None if self.arguments.swarm => scenarios::find("swarm").expect("it is listed"),
            None if self.arguments.every_await => scenarios::find("await").expect("it is listed"),
            None => scenarios::of_seed(seed),
        }
    }

    fn for_seed(&self, scenario: &NamedScenario, seed: u64, poll: Option<u64>) -> Scenario {
        let instance = scenario.for_seed(seed);
        let instance = match poll {
            Some(poll) => instance.dying_only_at_poll(poll),
            None => instance,
        };
        // What has no such part stays as it is: the names come from a report of this very scenario.
        self.arguments.without.iter().fold(instance, |instance, name| instance.without(name).unwrap_or(instance))
    }

    fn totals(&self) -> std::sync::MutexGuard<'_, Totals> {
        self.totals.lock().expect("nobody panics while counting")
    }

    fn play(
        &self,
        scenario: &'static NamedScenario,
        instance: &Scenario,
        seed: u64,
    ) -> Result<ScenarioResult, Failure> {
        let keep = if self.arguments.log { Keep::All } else { Keep::Tail };
        let result = catch_unwind(AssertUnwindSafe(|| instance.play(seed, keep))).map_err(|panic| {
            let words = panic.downcast_ref::<String>().map(String::as_str);
            let words = words.or_else(|| panic.downcast_ref::<&str>().copied());
            Failure::Panicked(words.unwrap_or("a panic without words").to_owned())
        })?;
        self.totals().add(&result);
        self.covers().entry(scenario.name).or_insert_with(|| Cover::new(scenario)).add(instance, &result);
        if self.arguments.log {
            result.log.iter().for_each(|line| println!("{line}"));
        }
        if let Some(violation) = result.violation {
            return Err(Failure::Violated(violation, result.log));
        }
        if self.arguments.twice || seed.is_multiple_of(TWICE_EVERY) {
            if instance.play(seed, Keep::Tail).log_hash != result.log_hash {
                return Err(Failure::Differed);
            }
            self.totals().repeat();
        }
        Ok(result)
    }

    fn covers(&self) -> std::sync::MutexGuard<'_, BTreeMap<&'static str, Cover>> {
        self.covers.lock().expect("nobody panics while noting")
    }

    /// Plays one seed of `scenario`; with `--every-await` once for every await it has.
    fn play_seed(&self, scenario: &'static NamedScenario, seed: u64) {
        let mut polls = match self.arguments.every_await {
            true => 0..u64::MAX,
            false => 0..1,
        };
        while let Some(poll) = polls.next()
            && !self.is_over()
        {
            let poll = self.arguments.every_await.then_some(poll).or(self.arguments.poll);
            let instance = self.for_seed(scenario, seed, poll);
            match self.play(scenario, &instance, seed) {
                // The scenario has fewer awaits than that.
                Ok(result) if self.arguments.every_await && result.deaths == 0 => return,
                Ok(_) => {}
                Err(failure) => self.report(scenario, &instance, (seed, poll), failure),
            }
        }
    }

    fn is_over(&self) -> bool {
        self.failed.load(Ordering::Relaxed) >= self.arguments.failures
    }

    fn report(
        &self,
        scenario: &NamedScenario,
        instance: &Scenario,
        (seed, poll): (u64, Option<u64>),
        failure: Failure,
    ) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        let (invariant, what) = match &failure {
            Failure::Violated(violation, _) => (violation.invariant.name(), violation.what.clone()),
            Failure::Panicked(words) => ("no-panic", words.clone()),
            Failure::Differed => ("determinism", "two runs of this seed are not the same".to_owned()),
        };
        let is_first = self.totals().fail(invariant, scenario.name, seed);
        let mut without = self.arguments.without.clone();
        if let Failure::Violated(violation, log) = failure
            && is_first
            && !self.arguments.log
        {
            let shrunk = shrink(instance, seed, violation.invariant, self.arguments.shrink);
            match &shrunk {
                Some(shrunk) => print_shrunk(shrunk),
                None => log.iter().for_each(|line| println!("{line}")),
            }
            without.extend(shrunk.into_iter().flat_map(|shrunk| shrunk.without));
        }
        println!("\nseed {seed} of {}: {invariant}: {what}", scenario.name);
        let poll = poll.map(|poll| format!(" --poll {poll}")).unwrap_or_default();
        let repeat = format!("cargo xtask sim --scenario {} --seed {seed}{poll} --log", scenario.name);
        println!("repeat it: {repeat}");
        if !without.is_empty() {
            println!("repeat what is left of it: {repeat} --without {}", without.join(","));
        }
    }
}

fn print_shrunk(shrunk: &Shrunk) {
    shrunk.result.log.iter().for_each(|line| println!("{line}"));
    println!("\nwhat is left of the story after {} plays:", shrunk.plays);
    shrunk.scenario.describe().iter().for_each(|line| println!("  {line}"));
    if let Some(violation) = &shrunk.result.violation {
        println!("  and still {violation}");
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.list {
        for NamedScenario { name, about, .. } in SCENARIOS {
            println!("{name:<16} {about}");
        }
        for (name, why) in UNMENDED {
            println!("not played unless it is named: {name}: {why}");
        }
        return ExitCode::SUCCESS;
    }
    if arguments.unproved {
        SCENARIOS
            .iter()
            .for_each(|scenario| println!("{}\t{}", scenario.name, scenario.unproved().unwrap_or_default()));
        return ExitCode::SUCCESS;
    }
    let clock = RealEnv::new();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let jobs = arguments.jobs.unwrap_or(cores).max(1);
    let seeds = arguments.seed.map_or(arguments.seeds.clone(), |seed| seed..seed + 1);
    let limit = arguments.minutes.map(|minutes| Duration::from_secs(minutes * 60));
    let is_long = arguments.scenario.is_some()
        && !arguments.every_await
        && arguments.without.is_empty()
        && (limit.is_some() || seeds.end - seeds.start >= COVER_SEEDS);
    let (totals, covers) = (Mutex::default(), Mutex::default());
    let player = Player { arguments, totals, covers, failed: AtomicUsize::new(0) };
    let is_covered = if player.arguments.covers {
        player.cover_all(&seeds, jobs)
    } else {
        let next = AtomicU64::new(seeds.start);
        let worker = || {
            while !player.is_over() {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if limit.map_or(seed >= seeds.end, |limit| clock.now().0 >= limit) {
                    return;
                }
                player.play_seed(player.scenario(seed), seed);
            }
        };
        std::thread::scope(|scope| (0..jobs).for_each(|_| drop(scope.spawn(worker))));
        // What a failure has ended early is not judged.
        !is_long || player.is_over() || player.is_covered()
    };
    let totals = player.totals();
    totals.print(clock.now().0);
    if totals.is_clean() && is_covered { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
