//! One move of one guest.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use transhume_guest::{ClientSpec, GuestSpec, ProbeSeries, Side, TwoHostsSpec};

use super::memcached;
use super::processors::Watch;
use super::programs::Program;
use super::system::{self, System};
use crate::vm::VmBench;
use crate::vm::felt::{Ended, ms};
use crate::vm::memory::parallel;
use crate::vm::ours::transhume;
use crate::vm::peers::{How, recipe, shared_disk};
use crate::vm::place::{Place, RUNS_VMS};

/// The guests' memory, in MiB. They have one processor: QEMU 7.2 loses writes to memory of emulated guests that have two.
pub(super) const MEMORY_MIB: u32 = 512;
/// A client's requests by UDP a second.
const UDP_RATE: u32 = 200;
/// How long the guest works before it is looked at, so that an emulator has translated what it does.
const WARM: Duration = Duration::from_secs(5);
/// How long it is looked at before the move.
const CALM: Duration = Duration::from_secs(6);
/// And how long it goes on after it.
const SETTLE: Duration = Duration::from_secs(3);

/// Who moves it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mover {
    /// `transhume`, with the parallel memory engine.
    Parallel,
    /// QEMU, with so many connections.
    Qemu(u8),
}

/// What was seen of one move.
pub(super) struct Seen {
    pub(super) seconds: f64,
    pub(super) rounds: u64,
    /// From host to host, everything: memory, devices, disk, headers.
    pub(super) sent_bytes: u64,
    pub(super) stopped_ms: f64,
    /// The longest time without an answer by UDP.
    pub(super) unanswered_ms: f64,
    /// The longest time without an answer of the guest's program, if a client asks it.
    pub(super) client_gap_ms: Option<f64>,
    pub(super) processor_seconds: f64,
    pub(super) throughput: Option<Throughput>,
}

/// What the guest got done a second.
#[derive(Clone, Copy)]
pub(super) struct Throughput {
    pub(super) before: f64,
    pub(super) during: f64,
}

impl Mover {
    /// Ours, QEMU's usual one, and QEMU's with as many connections as ours.
    pub(super) const fn all(channels: u8) -> [Self; 3] {
        [Self::Parallel, Self::Qemu(1), Self::Qemu(channels)]
    }

    pub(super) fn name(self) -> String {
        match self {
            Self::Parallel => "parallel".to_owned(),
            Self::Qemu(1) => "QEMU, one stream".to_owned(),
            Self::Qemu(channels) => format!("QEMU, multifd with {channels}"),
        }
    }

    fn carry_out(self, bench: &VmBench, program: Program, place: &mut Place) -> anyhow::Result<Ended> {
        let limit_ms = bench.downtime_limit_ms;
        match self {
            Self::Parallel => transhume(place, &parallel(bench, limit_ms)),
            Self::Qemu(channels) => {
                let how = How { channels, downtime_limit_ms: limit_ms, is_encrypted: bench.is_encrypted };
                if program.moves_disk() { recipe(place, how) } else { shared_disk(place, how) }
            }
        }
    }
}

/// Boots a guest that runs `program`, moves it, has it end what it does, and looks whether all of it was right.
pub(super) fn play(bench: &VmBench, system: &System, program: Program, mover: Mover) -> anyhow::Result<Seen> {
    let mut place = place(bench, system, program)?;
    if mover == Mover::Parallel {
        place.add()?;
    }
    let client = match program {
        Program::Memcached => Some(memcached::Client::start(&place.network)?),
        _ => None,
    };
    let _reserve = place.reserve()?;
    let udp = place.client(ClientSpec { udp_per_second: UDP_RATE, http_per_second: 0, tcp_per_second: 0 })?;
    std::thread::sleep(WARM);
    let calm = Instant::now();
    std::thread::sleep(CALM);
    let watch = Watch::start(&place)?;
    let sent_before = place.hosts.sent_bytes(Side::A)?;
    let began = Instant::now();
    let ended = mover.carry_out(bench, program, &mut place)?;
    let over = Instant::now();
    let sent_bytes = place.hosts.sent_bytes(Side::A)? - sent_before;
    let (pid, folder) = target(&place, &ended)?;
    let used = watch.finish(pid, &folder)?;
    std::thread::sleep(SETTLE);
    let report = udp.finish();
    let seen = client.map(memcached::Client::finish).transpose().with_context(|| place.guest.last_words())?;
    let made_since = |from: Instant| {
        let made = report.udp.probes().iter().filter(|probe| report.started + probe.at >= from);
        ProbeSeries::new(made.copied().collect())
    };
    ensure!(made_since(over).answered() > 0, "the moved guest does not answer");
    let told = program.end(&mut place)?;
    system::check(&disk_there(&place, program, mover)?)?;
    let counter = seen.as_ref().map_or(&told, |seen| &seen.answers);
    let throughput = program.unit().map(|unit| {
        let rates = counter.rate(calm, began).zip(counter.rate(began, over));
        let (before, during) = rates.with_context(|| format!("{unit} are not told until after the move"))?;
        ensure!(before > 0.0, "the guest did nothing before the move");
        anyhow::Ok(Throughput { before, during })
    });
    Ok(Seen {
        seconds: ended.seconds,
        rounds: ended.rounds,
        sent_bytes,
        stopped_ms: ended.stopped_ms,
        unanswered_ms: ms(made_since(calm).longest_gap().length),
        client_gap_ms: seen.map(|seen| ms(seen.longest_gap(calm))),
        processor_seconds: used.as_secs_f64(),
        throughput: throughput.transpose()?,
    })
}

fn place(bench: &VmBench, system: &System, program: Program) -> anyhow::Result<Place> {
    let guest = GuestSpec::new().memory_mib(MEMORY_MIB).script(&program.script());
    let shared = match program.moves_disk() {
        true => String::new(),
        false => format!("shared-storage = [{:?}]\n", bench.memory.path()),
    };
    let hosts = TwoHostsSpec {
        link_bits_per_second: Some(bench.link_bits_per_second),
        plaintext: !bench.is_encrypted,
        more: &format!("{RUNS_VMS}{shared}"),
        ..TwoHostsSpec::default()
    };
    let places = (bench.programs.as_path(), bench.memory.path());
    Place::with_disk(places, hosts, (guest, true), |disk| system.copy_to(disk))
}

/// The QEMU that has the guest now, and where its sockets are.
fn target(place: &Place, ended: &Ended) -> anyhow::Result<(u32, PathBuf)> {
    if let Some(peer) = &ended.keeps {
        return Ok((peer.pid(), place.folder().join("peer")));
    }
    let shown = place.hosts.daemon(Side::B).json(&["vm", "ls"])?;
    let pid = shown[0]["pid"].as_u64().context("the other host has the guest")?;
    Ok((u32::try_from(pid).context("processes have small numbers")?, place.folder_there()?))
}

/// The file that is the guest's disk now.
fn disk_there(place: &Place, program: Program, mover: Mover) -> anyhow::Result<PathBuf> {
    match mover {
        _ if !program.moves_disk() => Ok(place.disk.clone()),
        Mover::Qemu(_) => Ok(place.folder().join("peer.raw")),
        Mover::Parallel => {
            let incoming = std::fs::read_dir(place.hosts.incoming(Side::B)).context("looking for the moved disk")?;
            let files = incoming.flatten().map(|entry| entry.path()).filter(|path| path.is_file());
            files.max_by_key(|path| path.metadata().map_or(0, |file| file.len())).context("there is no moved disk")
        }
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seconds, rounds, sent_bytes, stopped_ms, unanswered_ms, processor_seconds, .. } = self;
        write!(out, "{seconds:.2} s, {rounds} rounds, {} MiB, stopped for {stopped_ms:.0} ms, ", sent_bytes >> 20)?;
        write!(out, "without an answer for {unanswered_ms:.0} ms, processors {processor_seconds:.2} s")?;
        if let Some(gap) = self.client_gap_ms {
            write!(out, ", its program for {gap:.0} ms")?;
        }
        match self.throughput {
            Some(Throughput { before, during }) => write!(out, ", {during:.1} of {before:.1} a second"),
            None => Ok(()),
        }
    }
}
