//! `cargo xtask torture-hosts`: moves between two real daemons in networks of their own, at random from a seed. Their
//! links are cut, their daemons are killed, stopped and restarted, and their disks are full. The client knows what it
//! was promised.
//!
//! ```text
//! act (a seed):  two hosts, paired ──▶ cycle ──▶ cycle ──▶ ... ──▶ folder removed
//! cycle:         volume and client at a ──▶ move to b begins ──▶ blows ──▶ move ends ──▶ client reads everything
//!                 ──▶ blows while a passes its requests on ──▶ client reads everything ──▶ both hosts forget the volume
//! ```

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha12Rng;
use rustix::process::Signal;
use serde_json::Value;
use transhume_guest::{Daemon, Guest, Side, TwoHosts, TwoHostsSpec};

use crate::alone::{is_alone, is_root, run_alone, seed_of_clock};
use crate::client::{NbdLoad, PATIENCE, RATE, VOLUME, adopt, attach, boot_guest, detach, finish_guest, verify_guest};
use crate::cycle::steer;
use crate::tally::Tally;
use crate::testbed::{run, tell_log, text};
use transhume_guest::programs::{build_debug_programs, private_folder};

/// Arguments of `cargo xtask torture-hosts`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Stop after so many cycles.
    #[arg(long, value_name = "N", default_value_t = 200)]
    cycles: u32,
    /// The first act's seed; the next acts count on from it. Taken from the clock unless given.
    #[arg(long)]
    seed: Option<u64>,
    /// Only guests under QEMU, whose disks are adopted.
    #[arg(long)]
    guests: bool,
    /// The programs in this folder (transhumed, transhume, nbd-load), instead of building them.
    #[arg(long, value_name = "FOLDER")]
    programs: Option<PathBuf>,
}

/// How many links join the hosts.
const LINKS: usize = 2;
/// What each of them carries.
const LINK_BITS_PER_SECOND: u64 = 400_000_000;
/// Cycles of an act.
const ACT_CYCLES: u32 = 8;
/// A volume's size: a multiple of a chunk and a bit.
const VOLUME_BYTES: u64 = (24 << 20) + (8 << 10);
/// Room for incoming volumes: one, and some for what fills it.
const ROOM_BYTES: u64 = VOLUME_BYTES + (8 << 20);
const FILLER: &str = "filler";

/// What is done to the hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InjectedFault {
    /// Nothing comes through some links for a while, and nobody is told.
    Cut(usize, Duration),
    /// `kill -9` of a daemon, and a new one after a while.
    Kill(Side, Duration),
    /// The same of both.
    KillBoth,
    /// SIGTERM and a new daemon: an upgrade.
    Restart(Side),
    /// A daemon is stopped for a while.
    Freeze(Side, Duration),
    /// The move's bandwidth is set, in MiB/s.
    Bandwidth(u32),
    /// The move is paused for a while.
    Pause(Duration),
    /// The move is cancelled.
    Cancel,
    /// The target's file system is filled, and has room again when the move is over.
    Fill,
}

impl InjectedFault {
    /// Whether a volume that has moved feels it.
    const fn is_of_hosts(self) -> bool {
        matches!(self, Self::Cut(..) | Self::Kill(..) | Self::KillBoth | Self::Restart(_) | Self::Freeze(..))
    }
}

/// A blow, and how long after the one before it comes.
type Timed = (Duration, InjectedFault);

/// The random numbers of one act.
struct Rng(ChaCha12Rng);

impl Rng {
    fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.0.random_range(from..=to))
    }

    fn side(&mut self) -> Side {
        Side::BOTH[self.0.random_range(0..2)]
    }

    fn fault(&mut self) -> InjectedFault {
        match self.0.random_range(0..28) {
            0..=8 => InjectedFault::Cut(self.0.random_range(1..=LINKS), self.millis(50, 3000)),
            9..=14 => InjectedFault::Kill(self.side(), self.millis(0, 400)),
            15 | 16 => InjectedFault::KillBoth,
            17 | 18 => InjectedFault::Restart(self.side()),
            19..=21 => InjectedFault::Freeze(self.side(), self.millis(20, 800)),
            22..=24 => InjectedFault::Bandwidth([0, 4, 16, 64][self.0.random_range(0..4)]),
            25 => InjectedFault::Pause(self.millis(20, 300)),
            26 => InjectedFault::Cancel,
            _ => InjectedFault::Fill,
        }
    }

    /// Up to `count_max` blows, and how long after the one before each comes.
    fn faults(&mut self, count_max: usize, suits: impl Fn(InjectedFault) -> bool) -> Vec<Timed> {
        let count = self.0.random_range(0..=count_max);
        let drawn = (0..count).map(|_| (self.millis(0, 1200 / count as u64), self.fault()));
        drawn.collect::<Vec<_>>().into_iter().filter(|(_, fault)| suits(*fault)).collect()
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
        if let Err(error) = act(seed, &programs, (cycles, arguments.guests), &mut tally) {
            let more = if arguments.guests { " --guests" } else { "" };
            eprintln!("\nagain: cargo xtask torture-hosts --seed {seed} --cycles {cycles}{more}");
            return Err(error);
        }
    }
    tally.tell(begun.elapsed());
    Ok(())
}

/// One act, in a folder that is removed unless something is wrong.
fn act(seed: u64, programs: &Path, (cycles, guests): (u32, bool), tally: &mut Tally) -> anyhow::Result<()> {
    let folder = private_folder(programs)?;
    tally.acts += 1;
    println!("act {seed}");
    let mut act = Act::set(programs, folder.path())?;
    let outcome = act.play(&mut Rng(ChaCha12Rng::seed_from_u64(seed)), (cycles, guests), tally);
    let Err(error) = outcome else { return act.clear() };
    for side in Side::BOTH {
        eprintln!("\n{}:", side.name());
        tell_log(act.hosts.daemon(side));
    }
    drop(act);
    Err(error.context(format!("seed {seed}; everything but what was in memory is kept in {}", text(&folder.keep()))))
}

/// Two hosts.
struct Act {
    hosts: TwoHosts,
    folder: PathBuf,
    programs: PathBuf,
    /// Where `b` puts volumes.
    incoming: PathBuf,
}

/// How a move went.
struct Outcome {
    job: Value,
    was_cancelled: bool,
    was_filled: bool,
}

impl Act {
    fn set(programs: &Path, folder: &Path) -> anyhow::Result<Self> {
        let spec =
            TwoHostsSpec { links: LINKS, link_bits_per_second: Some(LINK_BITS_PER_SECOND), ..TwoHostsSpec::default() };
        let mut hosts = TwoHosts::new(programs, folder, spec)?;
        let incoming = hosts.incoming(Side::B);
        run("mount", &["-t", "tmpfs", "-o", &format!("size={ROOM_BYTES}"), "none", &text(&incoming)])?;
        hosts.start()?;
        hosts.pair()?;
        Ok(Self { hosts, folder: folder.into(), programs: programs.into(), incoming })
    }

    fn clear(self) -> anyhow::Result<()> {
        let incoming = self.incoming.clone();
        drop(self);
        run("umount", &["-l", &text(&incoming)])
    }

    fn a(&self) -> &Daemon {
        self.hosts.daemon(Side::A)
    }

    fn b(&self) -> &Daemon {
        self.hosts.daemon(Side::B)
    }

    fn play(&mut self, rng: &mut Rng, (cycles, guests): (u32, bool), tally: &mut Tally) -> anyhow::Result<()> {
        for number in 1..=cycles {
            let is_guest = guests || rng.0.random_range(0..8) == 0;
            let faults = rng.faults(4, |_| true);
            let later = rng.faults(2, InjectedFault::is_of_hosts);
            let verify = ["off", "sample", "full"][rng.0.random_range(0..3)];
            println!(
                "  {number}: {}, verify {verify}: {faults:?}, then {later:?}",
                if is_guest { "guest" } else { "load" }
            );
            tally.cycles += 1;
            for (_, fault) in faults.iter().chain(&later) {
                let name = format!("{fault:?}");
                *tally.faults.entry(name.split('(').next().unwrap_or_default().to_owned()).or_default() += 1;
            }
            let begun = Instant::now();
            let state = self
                .cycle((number, rng.0.random()), is_guest, verify, (&faults, &later))
                .with_context(|| format!("cycle {number}: {faults:?}, then {later:?}"))?;
            println!("     {state} after {:.1} s", begun.elapsed().as_secs_f64());
            tally.moved += u32::from(state == "done");
        }
        Ok(())
    }

    /// One volume from its beginning to its end. Gives how its move ended.
    fn cycle(
        &mut self,
        (number, seed): (u32, u64),
        is_guest: bool,
        verify: &str,
        (faults, later): (&[Timed], &[Timed]),
    ) -> anyhow::Result<String> {
        let file = self.folder.join(format!("{number}.raw"));
        transhume_guest::create_filled(&file, VOLUME_BYTES)?;
        let mut client = Client::start(self, &file, is_guest, seed)?;
        let mut words = vec!["move", VOLUME, "--to", "b", "--detach", "--verify", verify, "--bandwidth", "16MiB/s"];
        words.extend(is_guest.then_some("--no-persist"));
        let id = self.a().json(&words)?["id"].as_u64().context("a job has a number")?;
        let mut outcome = Outcome { job: Value::Null, was_cancelled: false, was_filled: false };
        for (pause, fault) in faults {
            std::thread::sleep(*pause);
            self.strike(*fault, &mut outcome).with_context(|| format!("{fault:?}"))?;
        }
        steer(self.a(), &["set", VOLUME, "--bandwidth", "0"])?;
        steer(self.a(), &["resume", VOLUME])?;
        outcome.job = self.a().wait_for_job(id)?;
        // Whoever has filled it has gone.
        let _ = std::fs::remove_file(self.incoming.join(FILLER));
        client.verify()?;
        let state = self.check(&file, &outcome)?;
        for (pause, fault) in later {
            std::thread::sleep(*pause);
            self.strike(*fault, &mut outcome).with_context(|| format!("afterwards {fault:?}"))?;
        }
        client.finish()?;
        self.forget(is_guest, &state)?;
        Ok(state)
    }

    fn strike(&mut self, fault: InjectedFault, outcome: &mut Outcome) -> anyhow::Result<()> {
        match fault {
            InjectedFault::Cut(links, length) => {
                (0..links).try_for_each(|link| self.hosts.cut(link))?;
                std::thread::sleep(length);
                (0..links).try_for_each(|link| self.hosts.mend(link))?;
            }
            InjectedFault::Kill(side, length) => {
                self.hosts.daemon_mut(side).kill();
                std::thread::sleep(length);
                self.hosts.daemon_mut(side).start()?;
            }
            InjectedFault::KillBoth => {
                Side::BOTH.into_iter().for_each(|side| self.hosts.daemon_mut(side).kill());
                Side::BOTH.into_iter().try_for_each(|side| self.hosts.daemon_mut(side).start())?;
            }
            InjectedFault::Restart(side) => {
                self.hosts.daemon_mut(side).terminate()?;
                self.hosts.daemon_mut(side).start()?;
            }
            InjectedFault::Freeze(side, length) => {
                self.hosts.daemon(side).signal(Signal::STOP)?;
                std::thread::sleep(length);
                self.hosts.daemon(side).signal(Signal::CONT)?;
            }
            InjectedFault::Bandwidth(mib) => {
                steer(self.a(), &["set", VOLUME, "--bandwidth", &format!("{mib}MiB/s")])?;
            }
            InjectedFault::Pause(length) => {
                steer(self.a(), &["pause", VOLUME])?;
                std::thread::sleep(length);
                steer(self.a(), &["resume", VOLUME])?;
            }
            InjectedFault::Cancel => outcome.was_cancelled |= steer(self.a(), &["cancel", VOLUME])?,
            InjectedFault::Fill => {
                crate::testbed::fill(&self.incoming.join(FILLER))?;
                outcome.was_filled = true;
            }
        }
        Ok(())
    }

    /// The move ended as it may, and both hosts say the same of it.
    fn check(&self, file: &Path, outcome: &Outcome) -> anyhow::Result<String> {
        let job = &outcome.job;
        let state = job["state"].as_str().unwrap_or_default().to_owned();
        let arrived = self.incoming.join(format!("{VOLUME}.raw"));
        let here = self.a().json(&["volume", "show", VOLUME])?;
        match state.as_str() {
            "done" => {
                let there = self.b().json(&["volume", "show", VOLUME])?;
                ensure!(here["backend"] == format!("b:{VOLUME}"), "a says that it is elsewhere: {here}");
                ensure!(here["epoch"] == there["epoch"], "they have different epochs: {here} {there}");
                ensure!(!file.exists(), "the old disk is where it was");
            }
            "cancelled" | "failed" => {
                let had_no_room = outcome.was_filled && job["error"]["code"] == "no-space";
                ensure!(outcome.was_cancelled || had_no_room, "nobody wanted that: {job}");
                ensure!(here["backend"].as_str().is_some_and(|text| text.contains("file:")), "it is elsewhere: {here}");
                let end = Instant::now() + PATIENCE;
                // A host that could not be told is told later.
                while arrived.exists() || self.b().json(&["volume", "ls"])? != Value::Array(Vec::new()) {
                    ensure!(Instant::now() < end, "something is left at b");
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
            _ => bail!("the move is not over: {job}"),
        }
        Ok(state)
    }

    /// Both hosts forget the volume.
    fn forget(&self, is_guest: bool, state: &str) -> anyhow::Result<()> {
        match is_guest {
            true => self.a().json(&["release", VOLUME]).map(drop)?,
            false => detach(self.a(), VOLUME)?,
        }
        if state == "done" {
            detach(self.b(), VOLUME)?;
            let arrived = self.incoming.join(format!("{VOLUME}.raw"));
            std::fs::remove_file(&arrived).with_context(|| format!("removing {}", arrived.display()))?;
        }
        Ok(())
    }
}

/// Who uses the volume at `a`.
enum Client {
    Load(NbdLoad),
    Guest(Box<Guest>),
}

impl Client {
    fn start(act: &Act, file: &Path, is_guest: bool, seed: u64) -> anyhow::Result<Self> {
        if is_guest {
            let guest = boot_guest(file, seed)?;
            adopt(&guest, act.a())?;
            return Ok(Self::Guest(Box::new(guest)));
        }
        let socket = act.folder.join("nbd");
        attach(act.a(), VOLUME, file, &socket)?;
        Ok(Self::Load(NbdLoad::start(&act.programs, &socket, (VOLUME, RATE), seed)?))
    }

    /// Reads everything, and fails if anything is not what it was acknowledged to be.
    fn verify(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Load(load) => load.verify(),
            Self::Guest(guest) => verify_guest(guest),
        }
    }

    /// Reads everything once more, and ends.
    fn finish(mut self) -> anyhow::Result<()> {
        self.verify()?;
        match self {
            Self::Load(load) => load.finish().map(drop),
            Self::Guest(guest) => finish_guest(*guest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_draws_the_same_blows_again_and_every_blow_is_drawn() {
        let draw = |seed| {
            let mut rng = Rng(ChaCha12Rng::seed_from_u64(seed));
            (0..20).flat_map(|_| rng.faults(4, |_| true)).collect::<Vec<_>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
        let name = |fault: InjectedFault| format!("{fault:?}").split('(').next().unwrap_or_default().to_owned();
        let names: std::collections::BTreeSet<String> = (0..30).flat_map(draw).map(|(_, fault)| name(fault)).collect();
        assert_eq!(names.len(), 9, "{names:?}");
    }
}
