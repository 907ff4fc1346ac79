//! A move from a disk with a head while a guest uses it: by dirty block tracking alone, and with what spares the head. The disk is a
//! seek model on the machine's clock, below ext4 on a loop device ([`crate::seek_path`]).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::Value;
use transhume_guest::Interval;
use transhume_guest::process::output_of;
use transhume_guest::programs::{private_folder, target_folder};

use super::Bench;
use crate::figures::{Goal, Row, Samples};
use crate::load::{NbdLoad, Offer};
use crate::seek_path::{Disk, SeekPath};
use crate::server::{Endpoint, Transhumed, VOLUME, path_word};

/// 15 GB, and the 1 TB of the disk, in 60 parts.
const DISK: Disk = Disk { image_bytes: 256 << 20, shrink: 60, speed: 1 };
const WARM_UP: Duration = Duration::from_secs(3);
const MARK_EVERY: Duration = Duration::from_millis(100);
/// How a guest asks.
struct Guest {
    name: &'static str,
    words: &'static [&'static str],
}

/// Like Financial2 of the SPC, which reads 82 %, over a quarter of the volume.
const TRANSACTIONS: Guest =
    Guest { name: "guest", words: &["io_bytes=4096", "read_percent=82", "zones=64", "zipf_percent=85"] };
/// Like WebSearch1 of the SPC, which reads all over the volume, and writes nothing.
const SEARCH: Guest = Guest { name: "search", words: &["io_bytes=16384", "read_percent=100"] };
/// As many requests outstanding as the answers allow: who is answered sooner asks more.
const DEPTHS: [Offer; 2] = [Offer::Depth(1), Offer::Depth(4)];
/// So many a second, whoever answers: about half of what the disk does alone.
const RATE: [Offer; 1] = [Offer::Rate(50)];
const SURROGATE_MIB: u64 = 192;
const READ_CACHE: &str = "32MiB";

/// What spares the head.
struct Mover {
    name: &'static str,
    has_surrogate: bool,
    words: &'static [&'static str],
}

const PLAIN: Mover = Mover { name: "dbt", has_surrogate: false, words: &[] };
const SPARING: [Mover; 3] = [
    Mover { name: "with a surrogate", has_surrogate: true, words: &[] },
    Mover { name: "with follow", has_surrogate: false, words: &["--schedule", "follow"] },
    Mover {
        name: "with both and a read cache",
        has_surrogate: true,
        words: &["--schedule", "follow", "--read-cache", READ_CACHE],
    },
];

/// All moves of one mover.
#[derive(Default)]
struct Figures {
    megabytes_a_second: Samples,
    before_ms: Samples,
    during_ms: Samples,
    before_iops: Samples,
    during_iops: Samples,
}

impl Figures {
    fn push(&mut self, seconds: f64, before: &Answers, during: &Answers) {
        self.megabytes_a_second.push(DISK.image_bytes as f64 / 1e6 / seconds);
        self.before_ms.push(before.mean_ms);
        self.during_ms.push(during.mean_ms);
        self.before_iops.push(before.iops);
        self.during_iops.push(during.iops);
    }
}

/// A guest with a fixed number of requests outstanding.
pub(crate) fn run(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    run_under(bench, &TRANSACTIONS, &DEPTHS)
}

/// The same, and it reads all over the volume.
pub(crate) fn run_search(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    run_under(bench, &SEARCH, &DEPTHS)
}

/// A guest that asks at a fixed rate.
pub(crate) fn run_at_rate(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    run_under(bench, &TRANSACTIONS, &RATE)
}

fn run_under(bench: &Bench, guest: &Guest, offers: &[Offer]) -> anyhow::Result<Vec<Row>> {
    let folder = private_folder(bench.memory.path())?;
    let path = SeekPath::create(&seek_disk(bench)?, folder.path(), &DISK)?;
    let mut rows = Vec::new();
    for offer in offers {
        let mut plain = Figures::default();
        let mut sparing: [Figures; 3] = Default::default();
        for _ in 0..bench.runs {
            measure(bench, &path, &PLAIN, (guest, *offer), &mut plain)?;
            for (mover, figures) in SPARING.iter().zip(&mut sparing) {
                measure(bench, &path, mover, (guest, *offer), figures)?;
            }
        }
        rows.extend(rows_of((guest, *offer), &path, &plain, &sparing));
    }
    let (mean, most) = path.lateness()?;
    let [mut late, mut latest] = [(); 2].map(|()| Samples::default());
    late.push(mean);
    latest.push(most);
    rows.push(Row::new("seek disk: an answer is later than the model's, mean", "ms", late, Goal::None));
    rows.push(Row::new("seek disk: an answer is later than the model's, at most", "ms", latest, Goal::None));
    Ok(rows)
}

/// The program that is the disk. The profile of the tests builds it in a fraction of the time, and has its model optimised.
fn seek_disk(bench: &Bench) -> anyhow::Result<PathBuf> {
    if bench.is_built {
        return Ok(bench.programs.join("examples/seek_disk"));
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let words = ["build", "--locked", "--package", "transhume-sim", "--example", "seek_disk"];
    output_of(Path::new(&cargo), &words.map(str::to_owned))?;
    Ok(target_folder()?.join("debug/examples/seek_disk"))
}

fn rows_of(load: (&Guest, Offer), path: &SeekPath, plain: &Figures, sparing: &[Figures; 3]) -> Vec<Row> {
    let disk = format!("seek disk, ext4, {} extents, {}", path.pieces, told(load));
    let mut rows = vec![
        Row::new(format!("{disk}, dbt: migration"), "MB/s", plain.megabytes_a_second.clone(), Goal::None),
        Row::new(format!("{disk}, dbt: guest's mean"), "ms", plain.during_ms.clone(), Goal::None)
            .against("before the move", plain.before_ms.clone()),
        Row::new(format!("{disk}, dbt: guest"), "IOPS", plain.during_iops.clone(), Goal::None)
            .against("before the move", plain.before_iops.clone()),
    ];
    for (mover, figures) in SPARING.iter().zip(sparing) {
        let what = |figure: &str| format!("{disk}, {}: {figure}", mover.name);
        let migration = Goal::RatioAtLeast(if mover.has_surrogate { 1.3 } else { 1.0 });
        rows.push(
            Row::new(what("migration"), "MB/s", figures.megabytes_a_second.clone(), migration)
                .against(PLAIN.name, plain.megabytes_a_second.clone()),
        );
        rows.push(
            Row::new(what("guest's mean"), "ms", figures.during_ms.clone(), Goal::RatioAtMost(1.0))
                .against(PLAIN.name, plain.during_ms.clone()),
        );
        rows.push(
            Row::new(what("guest"), "IOPS", figures.during_iops.clone(), Goal::None)
                .against(PLAIN.name, plain.during_iops.clone()),
        );
    }
    rows
}

/// One move to a file in memory while the guest works; afterwards the volume is the same file again.
fn measure(
    bench: &Bench,
    path: &SeekPath,
    mover: &Mover,
    (guest, offer): (&Guest, Offer),
    figures: &mut Figures,
) -> anyhow::Result<()> {
    let folder = private_folder(bench.memory.path())?;
    let daemon = Transhumed::start(&bench.programs, folder.path())?;
    let mut words = vec!["--strategy", "dbt", "--verify", "off"];
    if mover.has_surrogate {
        let store = format!("file:{},size={SURROGATE_MIB}MiB", path_word(&folder.path().join("store")));
        let partition = format!("{}MiB", SURROGATE_MIB - 16);
        daemon.run(&["surrogate", "create", "fast", "--store", &store, "--partition", &partition])?;
        words.extend(["--surrogate", "fast", "--sole-copy"]);
    }
    words.extend(mover.words);
    let endpoint = Endpoint { socket: folder.path().join("nbd.sock"), export: VOLUME };
    daemon.attach(VOLUME, &path.image, &endpoint.socket, ",cache=direct")?;
    let mut load = NbdLoad::start_with(&bench.programs, &endpoint, offer, guest.words)?;
    std::thread::sleep(Duration::from_secs(1));
    load.mark()?;
    std::thread::sleep(WARM_UP);
    let before = load.mark()?;
    let target = folder.path().join("target.raw");
    let (report, during) = move_under(&daemon, &mut load, &target, &words)
        .with_context(|| format!("moving by {}, {}", mover.name, told((guest, offer))))?;
    drop(load);
    drop(daemon);
    let number = |name: &str| report[name].as_f64().with_context(|| format!("a report has {name}"));
    let (seconds, before) = (number("seconds")?, Answers::of(&[before]));
    eprintln!(
        "  {}, {}: {seconds:.1} s for {:.0} MB, guest {:.2} ms before, {:.2} ms meanwhile",
        told((guest, offer)),
        mover.name,
        number("bytes_copied")? / 1e6,
        before.mean_ms,
        during.mean_ms
    );
    figures.push(seconds, &before, &during);
    take_back(path)
}

fn told((guest, offer): (&Guest, Offer)) -> String {
    match offer {
        Offer::Depth(depth) => format!("{} depth {depth}", guest.name),
        Offer::Rate(rate) => format!("{} {rate} a second", guest.name),
    }
}

/// What the guest got.
struct Answers {
    mean_ms: f64,
    iops: f64,
}

impl Answers {
    fn of(intervals: &[Interval]) -> Self {
        let count = |interval: &Interval| (interval.reads + interval.writes) as f64;
        let all: f64 = intervals.iter().map(count).sum();
        let waited: f64 = intervals.iter().map(|interval| interval.mean.as_secs_f64() * count(interval)).sum();
        let seconds: f64 = intervals.iter().map(|interval| interval.length.as_secs_f64()).sum();
        Self { mean_ms: waited * 1e3 / all.max(1.0), iops: all / seconds.max(1e-3) }
    }
}

/// Moves, and gives the report and what the guest got until then. After the switchover it is answered from memory, thousands of times
/// before the client hears of the end: that is left out.
fn move_under(
    daemon: &Transhumed,
    load: &mut NbdLoad,
    target: &Path,
    words: &[&str],
) -> anyhow::Result<(Value, Answers)> {
    load.mark()?;
    let started = Instant::now();
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| daemon.move_to(VOLUME, target, words));
        let mut intervals = Vec::new();
        while !moving.is_finished() {
            std::thread::sleep(MARK_EVERY);
            let interval = load.mark()?;
            intervals.push((started.elapsed(), interval));
        }
        let Ok(report) = moving.join() else { bail!("the thread that moves has panicked") };
        let report = report?;
        // The job began after `started`, so this is not after its switchover.
        let seconds = report["seconds"].as_f64().context("a report has its seconds")?;
        let after = report["phases"]["switched"].as_f64().unwrap_or_default();
        let end = Duration::from_secs_f64((seconds - after).max(0.0));
        let until_end: Vec<Interval> =
            intervals.into_iter().take_while(|(at, _)| *at <= end).map(|(_, interval)| interval).collect();
        Ok((report, Answers::of(&until_end)))
    })
}

/// The source has got another name by the move.
fn take_back(path: &SeekPath) -> anyhow::Result<()> {
    let folder = path.image.parent().context("the volume lies in a folder")?;
    for entry in std::fs::read_dir(folder).context("looking for the old copy")? {
        let found = entry.context("looking for the old copy")?.path();
        if found.to_string_lossy().contains(".moved-") {
            std::fs::rename(&found, &path.image).context("taking the volume back")?;
        }
    }
    std::fs::File::open(folder).and_then(|folder| folder.sync_all()).context("syncing the folder")
}
