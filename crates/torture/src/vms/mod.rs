//! `cargo xtask torture-vms`: a whole VM goes back and forth between two real daemons, at random from a seed. The link is cut,
//! daemons and QEMUs are killed and stopped, the target's file system is full, its QEMU refuses what comes, and the move is
//! cancelled. The guest checks its disk and its memory, and a client asks it things all the time.
//!
//! ```text
//! act (a seed):  two hosts, a guest at a ──▶ cycle ──▶ cycle ──▶ ... ──▶ QEMUs ended, folder removed
//! cycle:         move to the other host ──▶ blows ──▶ move ends ──▶ all of what must hold ──▶ guest reads everything
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | `plan` | what is drawn from a seed |
//! | `act` | the hosts, the guest, one move |
//! | `strike` | how the blows are dealt |
//! | `others` | what others do to its QEMUs: its operator, another client of a monitor |
//! | `watch` | every QEMU of the VM, watched: never two that run |
//! | `check` | what must hold once a move is over |

mod act;
mod check;
mod others;
mod plan;
mod strike;
mod watch;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use transhume_guest::Side;
use transhume_guest::programs::{build_debug_programs, private_folder};

use crate::alone::{is_alone, is_root, run_alone, seed_of_clock};
use crate::testbed::{tell_log, text};
use act::Act;
use plan::{KINDS, Rng};

/// Cycles of an act.
const ACT_CYCLES: u32 = 8;
/// In fewer cycles than this a kind of blow may be left out by chance.
const ENOUGH_CYCLES: u32 = 50;

/// Arguments of `cargo xtask torture-vms`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Stop after so many cycles.
    #[arg(long, value_name = "N", default_value_t = 200)]
    cycles: u32,
    /// The first act's seed; the next acts count on from it. Taken from the clock unless given.
    #[arg(long)]
    seed: Option<u64>,
    /// No faults: moves alone.
    #[arg(long)]
    calm: bool,
    /// How many connections carry the memory. With more than one QEMU before 8.1 ends if the link or the source's daemon is lost
    /// while the state of the devices is sent.
    #[arg(long, value_name = "N", default_value_t = 1)]
    channels: u8,
    /// Who copies the memory: qemu, or parallel, the engine of crates/memory, with as many streams as channels.
    #[arg(long, value_parser = ["qemu", "parallel"], default_value = "qemu")]
    memory: String,
    /// Have this in every cycle, which the daemon does not bear yet: HoldMonitor, Stop, Resume, FillState, or Restart.
    #[arg(long, value_name = "KIND", value_parser = plan::UNMENDED.map(|(kind, _)| kind), conflicts_with = "calm")]
    with: Option<String>,
    /// The programs in this folder (transhumed, transhume), instead of building them.
    #[arg(long, value_name = "FOLDER")]
    programs: Option<PathBuf>,
}

/// What has been done.
#[derive(Default)]
struct Tally {
    acts: u32,
    cycles: u32,
    ends: BTreeMap<String, u32>,
    blows: BTreeMap<&'static str, u32>,
}

impl Tally {
    fn tell(&self, seconds: f64) {
        let listed = |counts: &mut dyn Iterator<Item = String>| counts.collect::<Vec<_>>().join(", ");
        println!("{} cycles in {} acts in {seconds:.0} s; nothing was lost", self.cycles, self.acts);
        println!("moves: {}", listed(&mut self.ends.iter().map(|(end, count)| format!("{end} {count}"))));
        println!("blows: {}", listed(&mut self.blows.iter().map(|(kind, count)| format!("{kind} {count}"))));
    }

    /// Fails if a kind of blow never occurred, in cycles enough for it.
    fn fulfilled(&self) -> anyhow::Result<()> {
        let never: Vec<&str> = KINDS.into_iter().filter(|kind| !self.blows.contains_key(kind)).collect();
        ensure!(self.cycles < ENOUGH_CYCLES || never.is_empty(), "never occurred: {}", never.join(", "));
        Ok(())
    }
}

/// Plays acts until there were enough cycles.
pub(crate) fn play_all(arguments: &Arguments) -> anyhow::Result<()> {
    if !is_root() {
        bail!("networks of their own take root");
    }
    if !is_alone() {
        return run_alone();
    }
    let programs = match &arguments.programs {
        Some(programs) => programs.clone(),
        None => build_debug_programs()?,
    };
    let begun = Instant::now();
    let mut tally = Tally::default();
    for seed in arguments.seed.unwrap_or_else(seed_of_clock).. {
        if tally.cycles >= arguments.cycles {
            break;
        }
        let cycles = ACT_CYCLES.min(arguments.cycles - tally.cycles);
        if let Err(error) = play(seed, &programs, (cycles, arguments), &mut tally) {
            let Arguments { memory, channels, .. } = arguments;
            let with = arguments.with.as_ref().map(|kind| format!(" --with {kind}")).unwrap_or_default();
            eprintln!(
                "\nagain: cargo xtask torture-vms --seed {seed} --cycles {cycles} --memory {memory} --channels {channels}{with}"
            );
            return Err(error);
        }
    }
    tally.tell(begun.elapsed().as_secs_f64());
    if arguments.calm || arguments.with.is_some() { Ok(()) } else { tally.fulfilled() }
}

/// One act, in a folder that is removed unless something is wrong.
fn play(seed: u64, programs: &Path, (cycles, arguments): (u32, &Arguments), tally: &mut Tally) -> anyhow::Result<()> {
    let folder = private_folder(programs)?;
    tally.acts += 1;
    println!("act {seed}");
    let mut rng = Rng::new(seed);
    let with = arguments.with.as_deref();
    let is_restarted = with == Some("Restart");
    let how = (arguments.memory.as_str(), arguments.channels);
    let mut act = Act::set(programs, folder.path(), how, (&mut rng, is_restarted))?;
    let Err(error) = play_cycles(&mut act, &mut rng, (cycles, arguments.calm, with), tally) else { return act.clear() };
    for side in Side::BOTH {
        eprintln!("\n{}:", side.name());
        tell_log(act.daemon(side));
    }
    let seen = act.watcher.tell();
    eprintln!("\nwhat was seen of QEMUs:\n{seen}\n{}", act.guest.last_words());
    drop(act);
    Err(error.context(format!("seed {seed}; everything but what was in memory is kept in {}", text(&folder.keep()))))
}

fn play_cycles(
    act: &mut Act,
    rng: &mut Rng,
    (cycles, is_calm, with): (u32, bool, Option<&str>),
    tally: &mut Tally,
) -> anyhow::Result<()> {
    for number in 1..=cycles {
        let blows = match with {
            Some(kind) => rng.blows_of(kind),
            None if is_calm => Vec::new(),
            None => rng.blows(),
        };
        println!("  {number}: from {}: {blows:?}", act.at.name());
        tally.cycles += 1;
        for timed in &blows {
            *tally.blows.entry(timed.blow.kind()).or_default() += 1;
        }
        if blows.is_empty() {
            *tally.blows.entry("none").or_default() += 1;
        }
        let begun = Instant::now();
        let end = act.cycle(&blows, rng.number(2) == 0).with_context(|| format!("cycle {number}: {blows:?}"))?;
        println!("     {end} after {:.1} s", begun.elapsed().as_secs_f64());
        *tally.ends.entry(end).or_default() += 1;
        if act.has_crashed {
            break;
        }
    }
    Ok(())
}
