//! `transhume-sim`: plays seeds and says what it saw. `cargo xtask sim` runs it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::catch_unwind;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use clap::Parser;
use env::{Env, RealEnv};
use transhume_sim::host::Status;
use transhume_sim::log::Keep;
use transhume_sim::scenarios::{self, SCENARIOS, Scenario};
use transhume_sim::story::Verdict;

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
    scenario: Option<&'static str>,
    /// Play this seed only.
    #[arg(long)]
    seed: Option<u64>,
    /// Print every event, the virtual time first.
    #[arg(long)]
    log: bool,
    /// Stop after so many failures.
    #[arg(long, default_value_t = 1)]
    failures: usize,
    /// How many threads play at once.
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// List the scenarios.
    #[arg(long)]
    list: bool,
}

fn parse_seeds(text: &str) -> Result<Range<u64>, String> {
    let parts = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    parts.filter(|range: &Range<u64>| range.start < range.end).ok_or_else(|| format!("`{text}` is no A..B"))
}

fn parse_scenario(name: &str) -> Result<&'static str, String> {
    scenarios::find(name).map(|scenario| scenario.name).ok_or_else(|| format!("no scenario `{name}`: see --list"))
}

/// What has been seen over all seeds.
#[derive(Default)]
struct Totals {
    seeds: u64,
    simulated: Duration,
    events: u64,
    requests: u64,
    resumed: u64,
    faults: BTreeMap<&'static str, u64>,
    endings: BTreeMap<&'static str, u64>,
    failures: BTreeMap<(String, &'static str), Vec<u64>>,
}

impl Totals {
    fn add(&mut self, verdict: &Verdict) {
        self.seeds += 1;
        self.simulated += verdict.simulated;
        self.events += verdict.events;
        self.requests += verdict.guest.answered;
        if let Status::Switched(Some(report)) = &verdict.status {
            self.resumed += u64::from(report.bytes_resumed > 0);
        }
        for (class, count) in &verdict.faults {
            *self.faults.entry(class).or_default() += count;
        }
        *self.endings.entry(verdict.status.name()).or_default() += 1;
    }

    fn print(&self, took: Duration) {
        let rate = self.seeds as f64 / took.as_secs_f64().max(0.001);
        println!(
            "{} seeds in {:.1} s ({rate:.1} seeds/s): {:.1} simulated minutes, {} guest requests, {} events",
            self.seeds,
            took.as_secs_f64(),
            self.simulated.as_secs_f64() / 60.0,
            self.requests,
            self.events,
        );
        let line = |counts: &BTreeMap<&'static str, u64>| {
            counts.iter().map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
        };
        println!("faults: {}", line(&self.faults));
        println!("endings: {}; resumed from a progress map: {}", line(&self.endings), self.resumed);
    }
}

fn play(arguments: &Arguments, scenario: &Scenario, seed: u64) -> Result<Verdict, String> {
    let keep = if arguments.log { Keep::All } else { Keep::Tail };
    catch_unwind(|| scenario.story(seed).play(seed, keep)).map_err(|panic| {
        let words = panic.downcast_ref::<String>().map(String::as_str);
        words.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words").to_owned()
    })
}

/// Plays one seed; false if something did not hold.
fn judge(arguments: &Arguments, seed: u64, totals: &Mutex<Totals>) -> bool {
    let scenario = match arguments.scenario {
        Some(name) => scenarios::find(name).expect("the argument was checked"),
        None => scenarios::of_seed(seed),
    };
    let played = play(arguments, scenario, seed);
    let mut totals = totals.lock().expect("nobody panics while counting");
    let (what, log) = match played {
        Ok(verdict) => {
            totals.add(&verdict);
            if arguments.log {
                verdict.log.iter().for_each(|line| println!("{line}"));
            }
            let Some(violation) = verdict.violation else { return true };
            (violation.to_string(), if arguments.log { Vec::new() } else { verdict.log })
        }
        Err(panic) => (format!("no-panic: {panic}"), Vec::new()),
    };
    let invariant = what.split(':').next().unwrap_or_default().to_owned();
    totals.failures.entry((invariant, scenario.name)).or_default().push(seed);
    let is_quiet = arguments.failures > 1;
    if !is_quiet {
        log.iter().for_each(|line| println!("{line}"));
    }
    println!("\nseed {seed} of {}: {what}", scenario.name);
    println!("repeat it: cargo xtask sim --scenario {} --seed {seed} --log", scenario.name);
    false
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.list {
        SCENARIOS.iter().for_each(|scenario| println!("{:<16} {}", scenario.name, scenario.about));
        return ExitCode::SUCCESS;
    }
    let clock = RealEnv::new();
    let seeds = arguments.seed.map_or(arguments.seeds.clone(), |seed| seed..seed + 1);
    let (next, failed, totals) = (AtomicU64::new(seeds.start), AtomicUsize::new(0), Mutex::new(Totals::default()));
    let limit = arguments.minutes.map(|minutes| Duration::from_secs(minutes * 60));
    let worker = || {
        while failed.load(Ordering::Relaxed) < arguments.failures {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            let is_over = limit.map_or(seed >= seeds.end, |limit| clock.now().0 >= limit);
            if is_over {
                return;
            }
            if !judge(&arguments, seed, &totals) {
                failed.fetch_add(1, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| (0..arguments.jobs.max(1)).for_each(|_| drop(scope.spawn(worker))));
    let totals = totals.into_inner().expect("nobody panics while counting");
    totals.print(clock.now().0);
    for ((invariant, scenario), seeds) in &totals.failures {
        println!("FAILED {invariant} in {scenario}: seeds {seeds:?}");
    }
    if totals.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
