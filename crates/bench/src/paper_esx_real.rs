//! `cargo xtask paper-esx-real`: the evaluation's moves on real files, scaled down, with the daemon and the command line.
//!
//! A volume lies in a file on the machine's disk and goes to and fro between two names there, past the page cache. Its
//! guest is either the load of the benchmarks on the export itself or a Linux guest under QEMU whose disk is adopted.
//! The load has up to 32 requests outstanding. QEMU's NBD client never has more than 16, so the rows of the Linux guest
//! end there. The ways alternate within every load, and the loads within every run. So a disk that is slow for a while
//! is slow for all of them. What was measured goes into one JSON document, of which `transhume-experiments` makes the
//! page.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::{Value, json};
use transhume_guest::{Disk, Guest, GuestSpec, Interval};

use crate::load::{NbdLoad, Offer};
use crate::server::convert_words;
use crate::server::{Endpoint, Transhumed, VOLUME, path_word};
use transhume_guest::process::output_of;
use transhume_guest::programs::{build_programs, private_folder};

/// What is outstanding at the export; the paper's loads.
const EXPORT_LOADS: [u32; 5] = [2, 4, 8, 16, 32];
/// The same in the guest.
const GUEST_LOADS: [u32; 3] = [2, 8, 16];
/// What is outstanding where the size varies; as in the simulated evaluation.
const LOAD_OF_SIZES: u32 = 8;
/// The size of the paper's disks: 32 and 6 GB.
const PAPER_BYTES: u64 = 38 << 30;
/// The downtime that the paper's tracking aims at, for disks of that size.
const PAPER_DOWNTIME_MS: u64 = 5_000;
/// The guest's load runs so long before a move, and that long is what it is compared with.
const QUIET: Duration = Duration::from_secs(2);
/// A file system goes on discarding what a deleted file has left; nobody's move is charged with that.
const SETTLE: Duration = Duration::from_millis(500);
/// What was measured, in the report's folder.
const MEASURED: &str = "measured.json";
const PATIENCE: Duration = Duration::from_secs(180);

/// What to measure, and where.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// MiB of the volume; limits of time are as much smaller than the paper's.
    #[arg(long, default_value_t = 1024)]
    mib: u64,
    /// How often each move is made; medians count.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// These strategies only.
    #[arg(long, value_delimiter = ',', value_name = "NAMES", default_values_t = STRATEGIES.map(str::to_owned))]
    strategies: Vec<String>,
    /// Only these parts: export, sizes, guest.
    #[arg(long, value_delimiter = ',', value_name = "PARTS")]
    only: Vec<String>,
    /// A folder on the machine's disk; `target/` unless said otherwise.
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Where the report goes.
    #[arg(long, value_name = "DIRECTORY", default_value = "target/paper-esx-real")]
    out: PathBuf,
}

/// What `transhume move --strategy` takes.
const STRATEGIES: [&str; 7] = ["mirror", "mirror-paper", "auto", "dbt", "incremental-dbt", "snapshot", "mirror-async"];

/// Measures, writes down what came out and has the page made.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.runs == 0 || arguments.mib < 64 {
        bail!("one run of 64 MiB is the least");
    }
    let programs = build_programs()?;
    let folder = private_folder(arguments.folder.as_ref().unwrap_or(&programs))?;
    let mut real = Real { arguments, programs, folder: folder.path().to_owned(), moves: Vec::new(), number: 0 };
    let bytes = arguments.mib << 20;
    let mut offline = Vec::new();
    for run in 0..arguments.runs {
        offline.push(real.copy_offline(bytes)?);
        eprintln!("run {}: an offline copy takes {:.2} s", run + 1, offline[run]);
        if real.is_asked_for("export") {
            for outstanding in EXPORT_LOADS {
                eprintln!("run {}: {outstanding} outstanding at the export", run + 1);
                real.measure_export(bytes, outstanding)?;
            }
        }
        if real.is_asked_for("sizes") {
            for part in [8, 4, 2] {
                eprintln!("run {}: a volume of {} MiB", run + 1, arguments.mib / part);
                real.measure_export(bytes / part, LOAD_OF_SIZES)?;
            }
        }
        if real.is_asked_for("guest") {
            for outstanding in GUEST_LOADS {
                eprintln!("run {}: {outstanding} outstanding in a guest", run + 1);
                real.measure_guest(bytes, outstanding)?;
            }
        }
        // Whoever ends this early keeps the runs that were made.
        real.write(bytes, &offline)?;
    }
    show(&arguments.out.join(MEASURED), &arguments.out)
}

/// Has the page made of what was `measured`.
fn show(measured: &Path, out: &Path) -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let experiments = "transhume-experiments";
    let mut command = Command::new(cargo);
    command.args(["run", "--locked", "--package", experiments, "--bin", experiments, "--", "paper-real", "esx"]);
    command.arg("--measured").arg(measured).arg("--out").arg(out);
    if !command.status().context("running cargo")?.success() {
        bail!("the page could not be made of {}", measured.display());
    }
    Ok(())
}

struct Real<'a> {
    arguments: &'a Arguments,
    programs: PathBuf,
    folder: PathBuf,
    moves: Vec<Value>,
    /// Of the next place.
    number: u32,
}

impl Real<'_> {
    fn is_asked_for(&self, part: &str) -> bool {
        self.arguments.only.is_empty() || self.arguments.only.iter().any(|only| only == part)
    }

    fn next_place(&mut self) -> PathBuf {
        self.number += 1;
        self.folder.join(format!("volume-{}.raw", self.number))
    }

    /// What it takes without a guest: QEMU's own copier, past the page cache.
    fn copy_offline(&mut self, bytes: u64) -> anyhow::Result<f64> {
        let (source, target) = (self.next_place(), self.next_place());
        transhume_guest::create_filled(&source, bytes)?;
        std::thread::sleep(SETTLE);
        let words = convert_words(&["-t", "none", "-T", "none"], path_word(&source), path_word(&target));
        let started = Instant::now();
        output_of(Path::new("qemu-img"), &words)?;
        let seconds = started.elapsed().as_secs_f64();
        for file in [source, target] {
            std::fs::remove_file(&file).with_context(|| format!("removing {}", file.display()))?;
        }
        Ok(seconds)
    }

    /// A move each way, under a load on the export.
    fn measure_export(&mut self, bytes: u64, outstanding: u32) -> anyhow::Result<()> {
        let state = private_folder(&self.folder)?;
        let source = self.next_place();
        transhume_guest::create_filled(&source, bytes)?;
        let daemon = Transhumed::start(&self.programs, state.path())?;
        let endpoint = Endpoint { socket: state.path().join("nbd.sock"), export: VOLUME };
        daemon.attach(VOLUME, &source, &endpoint.socket, ",cache=direct")?;
        let mut load = NbdLoad::start(&self.programs, &endpoint, Offer::Depth(outstanding))?;
        let mut place = source;
        for strategy in &self.arguments.strategies.clone() {
            std::thread::sleep(SETTLE);
            load.mark()?;
            std::thread::sleep(QUIET);
            let before = load.mark()?;
            let target = self.next_place();
            let moved = move_volume(&daemon, &target, strategy, bytes, &[])?;
            let during = load.mark()?;
            self.note("export", strategy, outstanding, bytes, &moved, [before, during]);
            if moved.refusal.is_none() {
                place = target;
            }
        }
        drop((load, daemon));
        std::fs::remove_file(&place).with_context(|| format!("removing {}", place.display()))
    }

    /// A move each way of the adopted disk of a guest, whose load checks what it reads.
    fn measure_guest(&mut self, bytes: u64, outstanding: u32) -> anyhow::Result<()> {
        let state = private_folder(&self.folder)?;
        let source = self.next_place();
        transhume_guest::create_filled(&source, bytes)?;
        let disk = Disk::raw(&source, "data").file_options(json!({ "cache": { "direct": true }, "aio": "native" }));
        let load = transhume_guest::Load {
            is_prefilled: true,
            workers: outstanding,
            interval_ms: 100,
            flush_every: 0,
            ..transhume_guest::Load::default()
        };
        let mut guest = Guest::boot(GuestSpec::new().disk(disk).load(load))?;
        guest.wait_for_load(PATIENCE)?;
        let daemon = Transhumed::start(&self.programs, state.path())?;
        let qmp = guest.qmp_socket().display().to_string();
        daemon.run(&["adopt", "--qmp", &qmp, "--node", "data", "--name", VOLUME])?;
        let mut place = source;
        for strategy in &self.arguments.strategies.clone() {
            std::thread::sleep(SETTLE);
            let quiet = Instant::now();
            std::thread::sleep(QUIET);
            let target = self.next_place();
            let began = Instant::now();
            let moved = move_volume(&daemon, &target, strategy, bytes, &["--no-persist"])?;
            let ended = Instant::now();
            // The interval in which it ended is told a moment later.
            std::thread::sleep(Duration::from_millis(200));
            let intervals = guest.intervals();
            let over = |from: Instant, to: Instant| mean_of(intervals.iter().filter(|(at, _)| (from..to).contains(at)));
            let seen = [over(quiet, began), over(began, ended)];
            self.note("qemu", strategy, outstanding, bytes, &moved, seen);
            if moved.refusal.is_none() {
                place = target;
            }
        }
        let load_result = guest.finish(PATIENCE)?;
        if !load_result.is_right() {
            bail!("the guest saw errors: {load_result:?}");
        }
        drop((guest, daemon));
        std::fs::remove_file(&place).with_context(|| format!("removing {}", place.display()))
    }

    fn note(
        &mut self,
        guest: &str,
        strategy: &str,
        outstanding: u32,
        bytes: u64,
        moved: &Moved,
        [before, during]: [Interval; 2],
    ) {
        let passes = moved.report["iterations"].as_array().into_iter().flatten();
        let dirty: Vec<u64> = passes.filter_map(|pass| pass["bytes_dirty"].as_u64()).collect();
        eprintln!(
            "  {strategy:<16} {:6.2} s, {:7.0} IOPS of {:7.0}{}",
            moved.seconds,
            during.iops(),
            before.iops(),
            moved.refusal.as_ref().map_or_else(String::new, |refusal| format!(", not moved: {refusal}"))
        );
        self.moves.push(json!({
            "guest": guest,
            "strategy": strategy,
            "outstanding": outstanding,
            "bytes": bytes,
            "seconds": moved.seconds,
            "downtime_seconds": moved.report["stall_us_max"].as_f64().unwrap_or_default() / 1e6,
            "iops_before": before.iops(),
            "iops_during": during.iops(),
            "worst_seconds": during.longest.as_secs_f64(),
            "refusal": moved.refusal,
            "dirty_after_passes": dirty,
        }));
    }

    fn write(&self, bytes: u64, offline: &[f64]) -> anyhow::Result<()> {
        let out = &self.arguments.out;
        std::fs::create_dir_all(out).with_context(|| format!("creating {}", out.display()))?;
        let path = out.join(MEASURED);
        let command = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
        let document = json!({
            "command": format!("cargo xtask {command}"),
            "kernel": std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim(),
            "cores": std::thread::available_parallelism().map_or(0, std::num::NonZero::get),
            "bytes": bytes,
            "offline_seconds": offline,
            "moves": self.moves,
        });
        let text = serde_json::to_string_pretty(&document).context("writing JSON")?;
        std::fs::write(&path, text + "\n").with_context(|| format!("writing {}", path.display()))
    }
}

/// What came of a move.
struct Moved {
    seconds: f64,
    report: Value,
    /// Why the guest stayed where it was.
    refusal: Option<String>,
}

fn move_volume(
    daemon: &Transhumed,
    target: &Path,
    strategy: &str,
    bytes: u64,
    options: &[&str],
) -> anyhow::Result<Moved> {
    let to = format!("file:{},cache=direct", target.display());
    // As much shorter as the volume is smaller than the paper's.
    let limit = (PAPER_DOWNTIME_MS * bytes / PAPER_BYTES).max(10);
    let limit = format!("{limit}ms");
    let mut words = vec!["move", VOLUME, "--to", &to, "--verify", "off", "--delete-source", "--strategy", strategy];
    words.extend(options);
    if ["dbt", "incremental-dbt", "snapshot"].contains(&strategy) {
        words.extend(["--downtime-limit", &limit]);
    }
    if ["dbt", "incremental-dbt"].contains(&strategy) {
        words.extend(["--on-no-converge", "abort"]);
    }
    let started = Instant::now();
    let report = daemon.document(&words)?;
    let seconds = started.elapsed().as_secs_f64();
    let refusal = report["error"]["message"].as_str().map(str::to_owned);
    if refusal.is_some() && report["error"]["code"] != "no-convergence" {
        bail!("the move by {strategy} could not be made: {}", report["error"]);
    }
    Ok(Moved { seconds, report, refusal })
}

/// Requests a second over several intervals, and the longest request.
fn mean_of<'a>(intervals: impl Iterator<Item = &'a (Instant, Interval)>) -> Interval {
    intervals.fold(Interval::default(), |sum, (_, interval)| Interval {
        length: sum.length + interval.length,
        reads: sum.reads + interval.reads,
        writes: sum.writes + interval.writes,
        longest: sum.longest.max(interval.longest),
        ..sum
    })
}
