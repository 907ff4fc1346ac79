//! `cargo xtask demo`: a running guest's disk is moved, and a person can read what happened.
//!
//! With QEMU and a kernel it is a real Linux guest whose disk is a plain file; without, a load over our own export. Either
//! load knows what every block must hold, so what is reported as unharmed was read and compared.

mod embedded;
mod guest;
mod report;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::Value;

use report::{DemoSummary, Feeling};
use transhume_guest::process::output_of;
use transhume_guest::programs::{build_programs, private_folder};

/// Arguments of `cargo xtask demo`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The size of the disk that moves, in MiB.
    #[arg(long, default_value_t = 512)]
    mib: u64,
    /// Seconds of load before and after the move.
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Requests per second that the guest offers.
    #[arg(long)]
    rate: Option<u32>,
    /// A load over our own export instead of a guest.
    #[arg(long)]
    embedded: bool,
    /// The folder for the volume that the disk moves from; `target/` unless said otherwise.
    #[arg(long)]
    from: Option<PathBuf>,
    /// The folder for the volume that the disk moves to; memory (/dev/shm) if it has room, otherwise as the source's.
    #[arg(long)]
    to: Option<PathBuf>,
    /// The folder of the programs; they are built as they are installed unless it is given.
    #[arg(long)]
    programs: Option<PathBuf>,
}

/// Where everything is, for one run of the demo.
pub(crate) struct Scene {
    programs: PathBuf,
    source: tempfile::TempDir,
    target: tempfile::TempDir,
    bytes: u64,
    rate: Option<u32>,
    calm: Duration,
}

impl Scene {
    fn source_disk(&self) -> PathBuf {
        self.source.path().join("disk.raw")
    }

    fn target_disk(&self) -> PathBuf {
        self.target.path().join("disk.raw")
    }
}

/// Sets the scene, lets the guest or its stand-in play, and prints the report.
pub(crate) fn run(arguments: Arguments) -> anyhow::Result<()> {
    let missing = if arguments.embedded { Some("--embedded was given".into()) } else { what_a_guest_lacks() };
    let programs = match arguments.programs {
        Some(folder) => folder,
        None => build_programs()?,
    };
    let begun = Instant::now();
    let bytes = arguments.mib.max(16) << 20;
    let from = arguments.from.unwrap_or_else(|| programs.clone());
    let to = arguments.to.unwrap_or_else(|| roomy_memory(bytes).unwrap_or_else(|| from.clone()));
    let scene = Scene {
        programs,
        source: private_folder(&from)?,
        target: private_folder(&to)?,
        bytes,
        rate: arguments.rate,
        calm: Duration::from_secs(arguments.seconds.max(1)),
    };
    transhume_guest::create_filled(&scene.source_disk(), bytes)?;
    let mut summary = match &missing {
        None => guest::play(&scene)?,
        Some(reason) => {
            println!("No guest: {reason}. A load over our own export stands in for it.\n");
            embedded::play(&scene)?
        }
    };
    summary.plain_copy = copy_plainly(&scene)?;
    summary.whole = begun.elapsed();
    println!("{}", summary.tell());
    if summary.is_right() {
        return Ok(());
    }
    bail!("the demo did not show what it should: see above")
}

/// What is missing for a real guest, if anything.
fn what_a_guest_lacks() -> Option<String> {
    let has = |program: &str| Command::new("which").arg(program).output().is_ok_and(|found| found.status.success());
    if let Some(program) = ["qemu-system-x86_64", "setpriv"].into_iter().find(|program| !has(program)) {
        return Some(format!("{program} is not installed (`make setup` as root installs it)"));
    }
    if !["/bin/busybox", "/usr/bin/busybox"].iter().any(|path| Path::new(path).exists()) {
        return Some("busybox is not installed (`make setup` as root installs it)".into());
    }
    let (kernel, _) = match transhume_guest::kernel() {
        Ok(found) => found,
        Err(error) => return Some(error.to_string()),
    };
    match std::fs::File::open(&kernel) {
        Ok(_) => None,
        Err(error) => Some(format!("{}: {error}", kernel.display())),
    }
}

/// `/dev/shm`, if it can hold the disk twice.
fn roomy_memory(bytes: u64) -> Option<PathBuf> {
    let shared = Path::new("/dev/shm");
    let printed = output_of(Path::new("df"), &["--output=avail".into(), "-B1".into(), shared.display().to_string()]);
    let free: u64 = printed.ok()?.lines().nth(1)?.trim().parse().ok()?;
    (free > 2 * bytes + (64 << 20)).then(|| shared.to_owned())
}

/// How long the same bytes take between the same volumes when nobody uses them.
fn copy_plainly(scene: &Scene) -> anyhow::Result<Duration> {
    let copy = scene.target.path().join("plain-copy.raw");
    let kept = scene.source.path().join("plain-source.raw");
    output_of(Path::new("cp"), &[path_word(&scene.target_disk()), path_word(&kept)])?;
    output_of(Path::new("sync"), &[path_word(&kept)])?;
    // Out of the page cache again, where it has just been put: the move had to fetch its bytes from the volume, too.
    output_of(Path::new("dd"), &[format!("if={}", kept.display()), "iflag=nocache".into(), "count=0".into()])?;
    let started = Instant::now();
    output_of(
        Path::new("cp"),
        &["--sparse=never".into(), "--reflink=never".into(), path_word(&kept), path_word(&copy)],
    )?;
    output_of(Path::new("sync"), &[path_word(&copy)])?;
    let took = started.elapsed();
    std::fs::remove_file(&copy).context("removing the plain copy")?;
    Ok(took)
}

fn path_word(path: &Path) -> String {
    path.display().to_string()
}

/// The frozen source's digest as `b3sum` prints it, and where the source is kept.
fn digest_of_kept_source(scene: &Scene) -> anyhow::Result<(PathBuf, Option<String>)> {
    let entries = std::fs::read_dir(scene.source.path()).context("looking for the kept source")?;
    let kept = entries.flatten().map(|entry| entry.path()).find(|path| path.to_string_lossy().contains(".moved-"));
    let kept = kept.context("the source was not kept as *.moved-EPOCH")?;
    let printed = output_of(Path::new("b3sum"), &["--no-names".into(), path_word(&kept)]);
    Ok((kept, printed.ok().map(|printed| printed.trim().to_owned())))
}

/// The report within what `transhume move --json` printed: the report itself, or a job that has it.
fn report_within(printed: Value) -> Value {
    match printed.get("report") {
        Some(report) if report.is_object() => report.clone(),
        _ => printed,
    }
}

/// What the load felt from one moment to another.
fn felt(intervals: &[(Instant, transhume_guest::Interval)], from: Instant, to: Instant) -> Feeling {
    let within = intervals.iter().filter(|(at, _)| *at >= from && *at <= to).map(|(_, interval)| interval);
    let mut feeling = Feeling::default();
    let mut p99s = Vec::new();
    for interval in within {
        feeling.requests += interval.reads + interval.writes;
        feeling.length += interval.length;
        feeling.longest = feeling.longest.max(interval.longest);
        p99s.push(interval.p99);
    }
    p99s.sort();
    feeling.p99 = p99s.get(p99s.len() / 2).copied().unwrap_or_default();
    feeling
}

/// What both plays need of the move.
fn moved(scene: &Scene, summary: &mut DemoSummary, report: Value) -> anyhow::Result<()> {
    summary.report = report_within(report);
    let (kept, digest) = digest_of_kept_source(scene)?;
    summary.kept = kept;
    summary.b3sum = digest;
    Ok(())
}
