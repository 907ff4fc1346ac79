//! A volume that is moved under load, by us, by QEMU's `blockdev-mirror`, and offline. The load generator is one and the
//! same, and so is the file. Figures are from the migration's own window: from the order to its end.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use transhume_guest::Interval;

use crate::figures::{Goal, Row, Samples};
use crate::load::{NbdLoad, Offer};
use crate::reserve::Reserve;
use crate::server::{Endpoint, StorageDaemon, Transhumed, VOLUME, convert_words, path_word};
use transhume_guest::process::output_of;
use transhume_guest::programs::private_folder;

use super::Bench;

const WARM_UP: Duration = Duration::from_secs(1);
/// A file system that discards what a deleted file has left goes on with that in the background (ext4 since Linux 6.5), and
/// holds every request on the disk for up to 70 ms: whoever is measured next shall not pay for it.
const SETTLE: Duration = Duration::from_secs(4);
const MEMORY_RATE: u32 = 20_000;
const DISK_RATE: u32 = 2_000;
const DEPTH: u32 = 16;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mover {
    Ours,
    QemuBackground,
    QemuWriteBlocking,
}

const MOVERS: [Mover; 3] = [Mover::Ours, Mover::QemuBackground, Mover::QemuWriteBlocking];

impl Mover {
    fn name(self) -> &'static str {
        match self {
            Self::Ours => "transhume",
            Self::QemuBackground => "qemu mirror background",
            Self::QemuWriteBlocking => "qemu mirror write-blocking",
        }
    }
}

/// Where the volume lies and how it is opened.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Medium {
    Memory,
    Disk,
}

/// The file that moves, and its other name.
struct Volume {
    source: PathBuf,
    target: PathBuf,
    bytes: u64,
}

/// One migration under load.
struct Run {
    seconds: f64,
    before: Interval,
    during: Interval,
}

/// All migrations of one mover.
#[derive(Default)]
struct Figures {
    seconds: Samples,
    iops: Samples,
    kept: Samples,
    p99_ms: Samples,
    worst_ms: Samples,
    cost_seconds: Samples,
}

impl Figures {
    fn push(&mut self, run: &Run, offered: Option<u32>) {
        let reference = offered.map_or_else(|| run.before.iops(), f64::from);
        let kept = run.during.iops() / reference.max(1.0);
        self.seconds.push(run.seconds);
        self.iops.push(run.during.iops());
        self.kept.push(kept);
        self.p99_ms.push(run.during.p99.as_secs_f64() * 1e3);
        self.worst_ms.push(run.during.longest.as_secs_f64() * 1e3);
        // Figure 9 of the ESX paper: seconds for which the load might as well not have run.
        self.cost_seconds.push(run.seconds * (1.0 - kept).max(0.0));
    }
}

pub(crate) fn run_in_memory(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let volume = Volume::create(bench.memory.path(), bench.mirror_bytes)?;
    let _reserve = Reserve::create(bench.memory.path(), bench.mirror_bytes * 5 / 4)?;
    let mut rows = Vec::new();
    for (name, offer) in [("20,000 offered", Offer::Rate(MEMORY_RATE)), ("closed loop 16", Offer::Depth(DEPTH))] {
        let figures = measure_all(bench, &volume, Medium::Memory, offer)?;
        rows.extend(memory_rows(name, offer, &figures));
    }
    let copies = [("cp", Copier::Cp), ("qemu-img convert", Copier::QemuImg)];
    for (name, copier) in copies {
        let mut seconds = Samples::default();
        for _ in 0..bench.runs {
            seconds.push(volume.copy_offline(copier)?);
        }
        rows.push(Row::new(format!("offline copy in memory, {name}"), "s", seconds, Goal::None));
    }
    Ok(rows)
}

fn memory_rows(name: &str, offer: Offer, figures: &[Figures; 3]) -> Vec<Row> {
    let [ours, background, blocking] = figures;
    let what = |figure: &str| format!("mirror in memory, {name}: {figure}");
    let is_closed = matches!(offer, Offer::Depth(_));
    let mut rows = Vec::new();
    for (peer_name, peer, is_first) in
        [(Mover::QemuBackground.name(), background, true), (Mover::QemuWriteBlocking.name(), blocking, false)]
    {
        let mut row = |figure: &str, unit, get: fn(&Figures) -> &Samples, goal| {
            rows.push(Row::new(what(figure), unit, get(ours).clone(), goal).against(peer_name, get(peer).clone()));
        };
        let once = |goal| if is_first { goal } else { Goal::None };
        if is_closed {
            row("time", "s", |f| &f.seconds, once(Goal::AtMost(3.0)));
            row("IOPS in the window", "IOPS", |f| &f.iops, Goal::RatioAtLeast(3.0));
            row("p99", "ms", |f| &f.p99_ms, Goal::RatioAtMost(0.2));
        } else {
            row("time", "s", |f| &f.seconds, Goal::None);
            row("delivered", "share", |f| &f.kept, once(Goal::AtLeast(0.95)));
            row("p99", "ms", |f| &f.p99_ms, once(Goal::AtMost(3.0)));
            row("p99 against the peer", "ms", |f| &f.p99_ms, Goal::RatioAtMost(0.2));
        }
        row("worst", "ms", |f| &f.worst_ms, Goal::None);
        row("aggregate cost", "s", |f| &f.cost_seconds, Goal::None);
    }
    rows
}

pub(crate) fn run_on_disk(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let volume = Volume::create(bench.disk.path(), bench.mirror_bytes)?;
    let offer = Offer::Rate(DISK_RATE);
    let mut figures: [Figures; 3] = Default::default();
    let mut offline = Samples::default();
    for _ in 0..bench.runs {
        // The offline copy takes its turn among the others: a disk's speed changes from minute to minute.
        std::thread::sleep(SETTLE);
        offline.push(volume.copy_offline(Copier::QemuImgDirect)?);
        for (mover, figures) in MOVERS.iter().zip(&mut figures) {
            figures.push(&measure(bench, &volume, Medium::Disk, *mover, offer)?, Some(DISK_RATE));
        }
    }
    let [ours, background, blocking] = &figures;
    let what = |figure: &str| format!("mirror on disk, 2,000 offered: {figure}");
    let mut rows = vec![
        Row::new(what("time"), "s", ours.seconds.clone(), Goal::RatioAtMost(1.15))
            .against("qemu-img convert, direct", offline),
        Row::new(what("IOPS kept"), "share", ours.kept.clone(), Goal::AtLeast(0.99))
            .against(Mover::QemuBackground.name(), background.kept.clone()),
        Row::new(what("p99"), "ms", ours.p99_ms.clone(), Goal::AtMost(3.0))
            .against(Mover::QemuBackground.name(), background.p99_ms.clone()),
        Row::new(what("worst"), "ms", ours.worst_ms.clone(), Goal::AtMost(15.0))
            .against(Mover::QemuBackground.name(), background.worst_ms.clone()),
    ];
    for (peer_name, peer) in [(Mover::QemuBackground.name(), background), (Mover::QemuWriteBlocking.name(), blocking)] {
        let row = |figure: &str, unit, get: fn(&Figures) -> &Samples| {
            Row::new(what(figure), unit, get(ours).clone(), Goal::None).against(peer_name, get(peer).clone())
        };
        rows.push(row("time", "s", |f| &f.seconds));
        rows.push(row("aggregate cost", "s", |f| &f.cost_seconds));
    }
    let row = |figure: &str, unit, get: fn(&Figures) -> &Samples| {
        Row::new(what(figure), unit, get(ours).clone(), Goal::None)
            .against(Mover::QemuWriteBlocking.name(), get(blocking).clone())
    };
    rows.push(row("IOPS kept", "share", |f| &f.kept));
    rows.push(row("p99", "ms", |f| &f.p99_ms));
    rows.push(row("worst", "ms", |f| &f.worst_ms));
    Ok(rows)
}

fn measure_all(bench: &Bench, volume: &Volume, medium: Medium, offer: Offer) -> anyhow::Result<[Figures; 3]> {
    let offered = match offer {
        Offer::Rate(rate) => Some(rate),
        Offer::Depth(_) => None,
    };
    let mut figures: [Figures; 3] = Default::default();
    for _ in 0..bench.runs {
        for (mover, figures) in MOVERS.iter().zip(&mut figures) {
            figures.push(&measure(bench, volume, medium, *mover, offer)?, offered);
        }
    }
    Ok(figures)
}

/// One migration under load; afterwards the volume is the same file again.
fn measure(bench: &Bench, volume: &Volume, medium: Medium, mover: Mover, offer: Offer) -> anyhow::Result<Run> {
    let folder = private_folder(bench.memory.path())?;
    let is_direct = medium == Medium::Disk;
    if is_direct {
        std::thread::sleep(SETTLE);
    }
    let run = match mover {
        Mover::Ours => {
            let daemon = Transhumed::start(&bench.programs, folder.path())?;
            let socket = folder.path().join("nbd.sock");
            let options = if is_direct { ",cache=direct" } else { "" };
            daemon.attach(VOLUME, &volume.source, &socket, options)?;
            let endpoint = Endpoint { socket, export: VOLUME };
            let target = format!("{}{options}", path_word(&volume.target));
            let verify = if is_direct { "sample" } else { "off" };
            under_load(bench, &endpoint, offer, || {
                daemon.move_to(VOLUME, Path::new(&target), &["--verify", verify]).map(drop)
            })
        }
        Mover::QemuBackground | Mover::QemuWriteBlocking => {
            let mode = if mover == Mover::QemuBackground { "background" } else { "write-blocking" };
            let StorageDaemon { server, mut qmp } = StorageDaemon::start(&volume.source, folder.path(), is_direct)?;
            under_load(bench, &server.endpoint, offer, || {
                StorageDaemon::mirror(&mut qmp, &volume.target, volume.bytes, mode, is_direct)
            })
        }
    };
    let run = run.with_context(|| format!("measuring {}", mover.name()))?;
    volume.take_back()?;
    Ok(run)
}

fn under_load(
    bench: &Bench,
    server: &Endpoint,
    offer: Offer,
    migrate: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Run> {
    let mut load = NbdLoad::start(&bench.programs, server, offer)?;
    load.mark()?;
    std::thread::sleep(WARM_UP);
    let before = load.mark()?;
    let started = Instant::now();
    migrate()?;
    let seconds = started.elapsed().as_secs_f64();
    let during = load.mark()?;
    Ok(Run { seconds, before, during })
}

#[derive(Clone, Copy)]
enum Copier {
    Cp,
    QemuImg,
    QemuImgDirect,
}

impl Volume {
    fn create(folder: &Path, bytes: u64) -> anyhow::Result<Self> {
        let (source, target) = (folder.join("source.raw"), folder.join("target.raw"));
        transhume_guest::create_filled(&source, bytes)?;
        Ok(Self { source, target, bytes })
    }

    /// What was moved lies at the target; the source is an old copy, which we have given another name and QEMU has not.
    /// Nobody's migration is charged with deleting it.
    fn take_back(&self) -> anyhow::Result<()> {
        let folder = self.source.parent().context("the volume lies in a folder")?;
        for entry in std::fs::read_dir(folder).context("looking for the old copy")? {
            let path = entry.context("looking for the old copy")?.path();
            if path.to_string_lossy().contains(".moved-") {
                std::fs::remove_file(path).context("removing the old copy")?;
            }
        }
        std::fs::rename(&self.target, &self.source).context("taking the moved volume back")?;
        std::fs::File::open(folder).and_then(|folder| folder.sync_all()).context("syncing the folder")
    }

    fn copy_offline(&self, copier: Copier) -> anyhow::Result<f64> {
        let (source, target) = (path_word(&self.source), path_word(&self.target));
        let (program, words) = match copier {
            Copier::Cp => ("cp", vec!["--sparse=never".into(), "--reflink=never".into(), source, target]),
            Copier::QemuImg => ("qemu-img", convert_words(&[], source, target)),
            Copier::QemuImgDirect => ("qemu-img", convert_words(&["-t", "none", "-T", "none"], source, target)),
        };
        let started = Instant::now();
        output_of(Path::new(program), &words)?;
        let seconds = started.elapsed().as_secs_f64();
        let copied = std::fs::metadata(&self.target).context("looking at the copy")?.len();
        std::fs::remove_file(&self.target).context("removing the copy")?;
        let folder = self.target.parent().context("the copy lies in a folder")?;
        std::fs::File::open(folder).and_then(|folder| folder.sync_all()).context("syncing the folder")?;
        if copied != self.bytes {
            bail!("{program} copied {copied} of {} bytes", self.bytes);
        }
        Ok(seconds)
    }
}
