//! The groups of `bench-vm` for the parallel memory engine, beside QEMU's own: `memory`, `memory-disk` and `memory-busy` over one link
//! without a limit, `links` over several slow ones.

use transhume_guest::{GuestSpec, Load, MemoryLoad, TwoHostsSpec};

use super::VmBench;
use super::felt::{Felt, UDP_RATE, feel_asked};
use super::ours::{self, transhume};
use super::peers::{How, shared_disk};
use super::place::{Place, RUNS_VMS, fillable_mib};
use super::rows::{DEADLINE_SECONDS, IDLE_RATE, Series, in_turns, load};
use crate::figures::{Goal, Row, Samples};

/// An idle guest is stopped for so long at most, in ms.
const STOPPED_MS_MAX: f64 = 60.0;
/// How often an idle guest is asked, each second: so often that its answers tell that it runs.
const FEW_ASKED: u32 = 20;
/// Processors of the guests of `memory`.
const CORES: u32 = 2;
/// Each link of `links`, in bits a second: 25 MB/s.
const LINK_BITS_PER_SECOND: u64 = 200_000_000;
const LINKS: usize = 4;
/// Four links are to carry so many times what QEMU sends over one.
const LINKS_RATIO_MIN: f64 = 3.5;
/// The memory of the guests of `links`, in MiB: a quarter of a minute over one link.
const LINKS_MEMORY_MIB: u32 = 384;
/// What one of them rewrites, in MiB/s: more than one link carries.
const REWRITE_MIB: u32 = 40;

/// Who copies the memory.
#[derive(Clone, Copy)]
enum Copier {
    /// The engine of `crates/memory`.
    Parallel,
    /// QEMU by itself, with so many connections.
    Qemu(u8),
}

/// The guest of one measurement.
struct Scene {
    load: Load,
    memory: MemoryLoad,
    memory_mib: u32,
    disk_mib: u64,
    links: usize,
    link_bits_per_second: Option<u64>,
    /// Whether both hosts reach its disk.
    shares_disk: bool,
    /// How often a client asks it by the network, each second.
    asked_per_second: u32,
}

impl Scene {
    fn of(bench: &VmBench, rate: u32) -> Self {
        Self {
            load: load(rate),
            memory: MemoryLoad {
                mib: fillable_mib(bench.memory_mib),
                rewrite_mib_per_second: 0,
                ..MemoryLoad::default()
            },
            memory_mib: bench.memory_mib,
            disk_mib: bench.disk_mib,
            links: 1,
            link_bits_per_second: None,
            shares_disk: true,
            asked_per_second: UDP_RATE,
        }
    }

    fn over_links(bench: &VmBench, links: usize, rewrite_mib_per_second: u32) -> Self {
        let mib = fillable_mib(LINKS_MEMORY_MIB);
        Self {
            memory: MemoryLoad { mib, rewrite_mib_per_second, hot_percent: 100 },
            memory_mib: LINKS_MEMORY_MIB,
            disk_mib: 16,
            links,
            link_bits_per_second: Some(LINK_BITS_PER_SECOND),
            ..Self::of(bench, IDLE_RATE)
        }
    }

    fn place(&self, bench: &VmBench) -> anyhow::Result<Place> {
        let guest = GuestSpec::new().cores(CORES).memory_mib(self.memory_mib);
        let guest = guest.memory_load(self.memory).load(self.load.clone());
        let shared = match self.shares_disk {
            true => format!("shared-storage = [{:?}]\n", bench.memory.path()),
            false => String::new(),
        };
        let more = format!("{RUNS_VMS}{shared}");
        let hosts = TwoHostsSpec {
            links: self.links,
            link_bits_per_second: self.link_bits_per_second,
            plaintext: !bench.is_encrypted,
            more: &more,
            more_at_b: "",
        };
        let places = (bench.programs.as_path(), bench.memory.path());
        Place::with_memory(places, hosts, (guest, true), self.disk_mib << 20)
    }

    /// Moves the guest.
    fn play(&self, bench: &VmBench, copier: Copier) -> anyhow::Result<Felt> {
        let limit_ms = bench.downtime_limit_ms;
        match copier {
            Copier::Parallel => {
                let mut place = self.place(bench)?;
                place.add()?;
                let felt = feel_asked(&mut place, self.asked_per_second, |place| {
                    transhume(place, &parallel(bench, limit_ms))
                })?;
                eprintln!("    parallel: {felt}");
                Ok(felt)
            }
            Copier::Qemu(channels) => {
                // The same guest, with its memory in a file of the same kind.
                let mut place = self.place(bench)?;
                let how = How { channels, downtime_limit_ms: limit_ms, is_encrypted: bench.is_encrypted };
                let felt = feel_asked(&mut place, self.asked_per_second, |place| shared_disk(place, how))?;
                eprintln!("    QEMU: {felt}");
                Ok(felt)
            }
        }
    }
}

/// How `transhume` moves a guest by the engine of `crates/memory`.
pub(super) fn parallel(bench: &VmBench, limit_ms: u64) -> Vec<String> {
    let mut options = ours::options(&bench.strategy, bench.channels, limit_ms);
    options.extend(["--memory", "parallel"].map(str::to_owned));
    options
}

impl VmBench {
    /// Ours and QEMU by turns, each with a guest of its own.
    fn memories(&self, ours: &Scene, peer: (&Scene, Copier)) -> anyhow::Result<[Series; 2]> {
        in_turns(self.runs, || ours.play(self, Copier::Parallel), || peer.0.play(self, peer.1))
    }
}

/// The peer, what rows call it, and what they add for encryption.
fn words(bench: &VmBench) -> (Copier, String, String) {
    let tls = if bench.is_encrypted { ", TLS" } else { "" };
    (Copier::Qemu(bench.channels), format!("QEMU, {} channels", bench.channels), tls.to_owned())
}

/// The figure of a row that is about the same guest as the row before it.
fn same(figure: &str) -> String {
    format!("the same: {figure}")
}

/// A guest whose memory is filled: how fast it goes, and for how long the guest is stopped.
pub(super) fn memory(bench: &VmBench) -> anyhow::Result<Vec<Row>> {
    let (qemu, peer, tls) = words(bench);
    let what = format!("memory of {} MiB, filled, {} streams{tls}", bench.memory_mib, bench.channels);
    let copied = |scene: &Scene, how: &str| {
        let [ours, theirs] = bench.memories(scene, (scene, qemu))?;
        let [rate, peer_rate] = [&ours, &theirs].map(|series| series.memory_rate(bench.memory_mib));
        let row = Row::new(format!("{what}, {how}: copied"), "MiB/s", rate, Goal::RatioAtLeast(1.0));
        anyhow::Ok((row.against(&peer, peer_rate), ours, theirs))
    };
    let idle = Scene { asked_per_second: FEW_ASKED, ..Scene::of(bench, IDLE_RATE) };
    let (copied_idle, ..) = copied(&idle, "idle")?;
    let asked = format!("asked {UDP_RATE} times a second");
    let (copied_asked, ours, theirs) = copied(&Scene::of(bench, IDLE_RATE), &asked)?;
    Ok(vec![
        copied_idle,
        copied_asked,
        Row::new(same("stopped, by QEMU's events"), "ms", ours.stopped, Goal::RatioAtMost(1.0))
            .against(&peer, theirs.stopped),
        Row::new(same("longest time without an answer"), "ms", ours.downtime, Goal::None)
            .against(&peer, theirs.downtime),
    ])
}

/// The same guest with a disk that moves along, where QEMU's disk is shared.
pub(super) fn memory_with_disk(bench: &VmBench) -> anyhow::Result<Vec<Row>> {
    let (qemu, peer, tls) = words(bench);
    let scene = Scene::of(bench, IDLE_RATE);
    let with_disk = Scene { shares_disk: false, ..Scene::of(bench, IDLE_RATE) };
    let [ours, theirs] = bench.memories(&with_disk, (&scene, qemu))?;
    let what = format!("{}, idle, {CORES} processors{tls}: stopped, by QEMU's events", bench.guest_words());
    Ok(vec![
        Row::new(what, "ms", ours.stopped, Goal::AtMost(STOPPED_MS_MAX))
            .against(&format!("{peer}, the disk shared"), theirs.stopped),
        Row::new(same("longest time without an answer"), "ms", ours.downtime, Goal::None)
            .against(&peer, theirs.downtime),
    ])
}

/// As many requests as the guest gets done: what the migration takes of the processor is missing there.
pub(super) fn memory_of_busy(bench: &VmBench) -> anyhow::Result<Vec<Row>> {
    let (qemu, peer, tls) = words(bench);
    let busy = Scene::of(bench, 0);
    let [ours, theirs] = bench.memories(&busy, (&busy, qemu))?;
    let what = format!("{}, as many requests as go{tls}: it keeps while it moves", bench.guest_words());
    Ok(vec![
        Row::new(what, "%", ours.kept, Goal::RatioAtLeast(1.0)).against(&peer, theirs.kept),
        Row::new(same("its memory copied"), "s", ours.memory_seconds, Goal::None).against(&peer, theirs.memory_seconds),
    ])
}

/// Several slow links against QEMU's one stream over one of them, and a guest that writes faster than that.
pub(super) fn links(bench: &VmBench) -> anyhow::Result<Vec<Row>> {
    let [over_all, over_one] = [LINKS, 1].map(|links| Scene::over_links(bench, links, 0));
    let [ours, theirs] = bench.memories(&over_all, (&over_one, Copier::Qemu(1)))?;
    let what = format!("memory of {LINKS_MEMORY_MIB} MiB, idle, over {LINKS} links of 25 MB/s: copied");
    let mut rows = vec![
        Row::new(what, "MiB/s", ours.memory_rate(LINKS_MEMORY_MIB), Goal::RatioAtLeast(LINKS_RATIO_MIN))
            .against("QEMU, one stream over one", theirs.memory_rate(LINKS_MEMORY_MIB)),
    ];
    for links in [1, LINKS] {
        let mut ended = Samples::default();
        for _ in 0..bench.runs.min(2) {
            ended.push(f64::from(u8::from(converges(bench, links)?)));
        }
        let what = format!(
            "a guest that rewrites {REWRITE_MIB} MiB/s over {links} of 25 MB/s: moves that end within {DEADLINE_SECONDS} s"
        );
        let goal = if links == 1 { Goal::None } else { Goal::AtLeast(1.0) };
        rows.push(Row::new(what, "share", ended, goal));
    }
    Ok(rows)
}

/// Whether the move of a guest that rewrites much ends.
fn converges(bench: &VmBench, links: usize) -> anyhow::Result<bool> {
    let mut place = Scene::over_links(bench, links, REWRITE_MIB).place(bench)?;
    place.add()?;
    let deadline = format!("{DEADLINE_SECONDS}s");
    let channels = LINKS.to_string();
    let options = ["--verify", "off", "--memory", "parallel", "--channels", &channels, "--deadline", &deadline];
    ours::may_end(&mut place, &options).map(|(is_done, _)| is_done)
}
