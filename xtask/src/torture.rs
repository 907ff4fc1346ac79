//! `cargo xtask torture`: the real counterpart of the simulator. The real daemon with real clients is killed, cut,
//! throttled, frozen and filled, at random from a seed, while it moves a volume again and again; after each cycle nothing
//! may be lost, left behind or untold.
//!
//! ```text
//! act (a seed):  folder, places, daemon, client ──▶ cycle ──▶ cycle ──▶ ... ──▶ client finishes ──▶ folder removed
//! cycle:         move begins ──▶ blows ──▶ move ends ──▶ client reads everything ──▶ checks
//! ```
//!
//! The order of what is done follows from the seed; how it meets the machine's own timing does not. So a seed that has
//! failed fails again often, not always, and a failure keeps its folder.

mod checks;
mod client;
mod cycle;
pub(crate) mod hosts;
mod plan;
mod proxy;
mod stage;
mod stall;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use transhume_guest::Daemon;

use crate::bench::{build_debug_programs, private_folder};
use client::Client;
use cycle::Whereabouts;
use plan::{ClientKind, Dice, Place};
use stage::{Stage, VOLUME_BYTES, text};

/// Arguments of `cargo xtask torture`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Stop after so many minutes.
    #[arg(long, value_name = "M")]
    minutes: Option<f64>,
    /// Stop after so many cycles; 200 unless minutes are given.
    #[arg(long, value_name = "N")]
    cycles: Option<u32>,
    /// At most so many cycles of an act, for more acts in fewer cycles.
    #[arg(long, value_name = "N", default_value_t = u32::MAX, hide_default_value = true)]
    act_cycles: u32,
    /// The first act's seed; the next acts count on from it. Taken from the clock unless given.
    #[arg(long)]
    seed: Option<u64>,
    /// Only this client: load, fio or guest.
    #[arg(long, value_parser = parse_kind)]
    client: Option<ClientKind>,
    /// The programs in this folder (transhumed, transhume, nbd-load), instead of building them.
    #[arg(long, value_name = "FOLDER")]
    programs: Option<PathBuf>,
    /// Where the volumes' folder is made, on a file system with direct IO; `target/` unless said otherwise.
    #[arg(long)]
    folder: Option<PathBuf>,
}

fn parse_kind(text: &str) -> Result<ClientKind, String> {
    match text {
        "load" => Ok(ClientKind::Load),
        "fio" => Ok(ClientKind::Fio),
        "guest" => Ok(ClientKind::Guest),
        _ => Err("it is load, fio or guest".into()),
    }
}

/// Set for the process that has mounts of its own.
const ALONE: &str = "TRANSHUME_TORTURE_ALONE";
const CYCLES: u32 = 200;
const LOG_LINES_TOLD: usize = 25;

/// What has been done.
#[derive(Default)]
struct Tally {
    acts: u32,
    cycles: u32,
    moved: u32,
    blows: std::collections::BTreeMap<String, u32>,
    strategies: std::collections::BTreeMap<&'static str, u32>,
}

/// Plays acts until there were enough.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if is_root() && std::env::var_os(ALONE).is_none() {
        return run_alone();
    }
    if !is_root() {
        println!("not root: no file systems of its own and no block devices");
    }
    let programs = match &arguments.programs {
        Some(programs) => programs.clone(),
        None => build_debug_programs()?,
    };
    let first = arguments.seed.unwrap_or_else(seed_of_clock);
    let end = arguments.minutes.map(|minutes| Instant::now() + Duration::from_secs_f64(minutes * 60.0));
    let cycles = arguments.cycles.unwrap_or(if end.is_some() { u32::MAX } else { CYCLES });
    let begun = Instant::now();
    let mut tally = Tally::default();
    for seed in first.. {
        let is_time_over = end.is_some_and(|end| Instant::now() >= end);
        if tally.cycles >= cycles || is_time_over {
            break;
        }
        let limits = Limits { cycles: arguments.act_cycles.min(cycles - tally.cycles), end };
        let parent = arguments.folder.as_deref().unwrap_or(&programs);
        let before = tally.cycles;
        if let Err(error) = act(seed, &programs, parent, arguments.client, &limits, &mut tally) {
            let client = arguments.client.map_or(String::new(), |kind| format!(" --client {kind:?}").to_lowercase());
            eprintln!("\nagain: cargo xtask torture --seed {seed} --cycles {}{client}", tally.cycles - before);
            return Err(error);
        }
    }
    tally.tell(begun.elapsed());
    Ok(())
}

impl Tally {
    fn tell(&self, took: Duration) {
        println!(
            "{} cycles in {} acts in {:.0} s, {} moves done; nothing was lost",
            self.cycles,
            self.acts,
            took.as_secs_f64(),
            self.moved
        );
        let blows: Vec<String> = self.blows.iter().map(|(blow, count)| format!("{blow} {count}")).collect();
        println!("blows: {}", blows.join(", "));
        let strategies: Vec<String> = self.strategies.iter().map(|(name, count)| format!("{name} {count}")).collect();
        println!("strategies: {}", strategies.join(", "));
    }
}

/// A first seed for whoever has said none.
fn seed_of_clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Runs this program once more with mounts of its own, so that nothing stays mounted whatever ends it.
fn run_alone() -> anyhow::Result<()> {
    let own = std::env::current_exe().context("asking where this program is")?;
    let status = Command::new("unshare")
        .args(["--mount", "--"])
        .arg(own)
        .args(std::env::args_os().skip(1))
        .env(ALONE, "1")
        .status()
        .context("running unshare")?;
    if !status.success() {
        bail!("the torture has found something");
    }
    Ok(())
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// When to stop.
struct Limits {
    cycles: u32,
    end: Option<Instant>,
}

/// One act, in a folder that is removed unless something is wrong.
fn act(
    seed: u64,
    programs: &Path,
    parent: &Path,
    client: Option<ClientKind>,
    limits: &Limits,
    tally: &mut Tally,
) -> anyhow::Result<()> {
    let folder = private_folder(parent)?;
    let mut stage = Stage::set(programs, folder.path())?;
    tally.acts += 1;
    let outcome = play(seed, programs, &mut stage, client, limits, tally);
    let Err(error) = outcome else { return Ok(()) };
    tell_log(&stage.daemon);
    stage.keep()?;
    drop(stage);
    let kept = folder.keep();
    Err(error.context(format!("seed {seed}; everything is kept in {}", text(&kept))))
}

/// The end of what a daemon has logged.
fn tell_log(daemon: &Daemon) {
    let log = daemon.log();
    let lines: Vec<&str> = log.lines().collect();
    eprintln!("\n{}", lines[lines.len().saturating_sub(LOG_LINES_TOLD)..].join("\n"));
}

fn play(
    seed: u64,
    programs: &Path,
    stage: &mut Stage,
    client: Option<ClientKind>,
    limits: &Limits,
    tally: &mut Tally,
) -> anyhow::Result<()> {
    let mut dice = Dice::new(seed);
    let (drawn, cycles) = dice.act();
    let kind = client.unwrap_or(drawn);
    let file = stage.path(Place::Disk, "0.raw");
    transhume_guest::create_filled(&file, VOLUME_BYTES)?;
    let mut here = Whereabouts { place: Place::Disk, path: file.clone(), kept: None };
    println!("act {seed}: {kind:?}");
    let mut client = Client::start(kind, stage, programs, &file, dice.seed())?;
    for number in 1..=cycles.min(limits.cycles) {
        if limits.end.is_some_and(|end| Instant::now() >= end) {
            break;
        }
        // Two do not fit on the small file system, and the block device is only one.
        let is_free = |place: &Place| *place != here.place || !matches!(place, Place::Small | Place::Device);
        let places: Vec<Place> = stage.places().into_iter().filter(is_free).collect();
        let plan = dice.plan(kind, &places);
        let blows: Vec<String> = plan.blows.iter().map(|(_, blow)| format!("{blow:?}")).collect();
        let strategy = plan.strategy_from(here.place);
        println!(
            "  {number}: to {:?} by {strategy}, verify {}, {} MiB/s: {}",
            plan.place,
            plan.verify,
            plan.bandwidth,
            blows.join(", ")
        );
        tally.cycles += 1;
        *tally.strategies.entry(strategy).or_default() += 1;
        for blow in blows {
            *tally.blows.entry(blow.split('(').next().unwrap_or_default().to_owned()).or_default() += 1;
        }
        let begun = Instant::now();
        let context = || format!("cycle {number}, {plan:?}");
        client.begin_cycle(stage, dice.seed())?;
        let outcome = cycle::play(stage, &client, &plan, &here, number).with_context(context)?;
        client.verify().with_context(context)?;
        let now = checks::check(stage, &plan, &outcome).with_context(context)?;
        let state = outcome.job["state"].as_str().unwrap_or_default();
        println!("     {state} after {:.1} s", begun.elapsed().as_secs_f64());
        tally.moved += u32::from(now.path != here.path);
        here = now;
        if plan.readopt {
            client.readopt(stage).with_context(context)?;
        }
    }
    client.finish(stage)
}
