//! `cargo xtask bench-local`: what is promised, measured beside the programs it is compared with, in one run, on the same
//! files, taking turns. See docs/benchmarks.md for what each row means.

mod adopt;
mod figures;
mod groups;
mod idle;
mod isolation;
mod large;
pub(crate) mod load;
mod machine;
mod memory;
pub(crate) mod mirror;
mod nbd;
pub(crate) mod process;
pub(crate) mod range_lock;
mod reserve;
pub(crate) mod server;
mod stall;
pub(crate) mod wire;

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde_json::{Value, json};

use groups::Groups;

/// Arguments of `cargo xtask bench-local`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only these groups: machine, nbd, idle, isolation, mirror-memory, mirror-disk, stall, adopt, memory, large. May be given again.
    #[arg(long, value_name = "GROUP")]
    only: Vec<String>,
    /// How often each figure is measured; its median is what counts.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Seconds of load for one figure of the NBD rows.
    #[arg(long, default_value_t = 3)]
    seconds: u32,
    /// Migrations or adoptions whose longest stalls are counted.
    #[arg(long, default_value_t = 100)]
    repeats: usize,
    /// MiB that the mirror rows move.
    #[arg(long, default_value_t = 2048)]
    mirror_mib: u64,
    /// A folder in memory (tmpfs).
    #[arg(long, default_value = "/dev/shm")]
    memory_folder: PathBuf,
    /// A folder on the machine's disk; `target/` unless said otherwise.
    #[arg(long)]
    disk_folder: Option<PathBuf>,
    /// Where the JSON goes.
    #[arg(long, default_value = "bench-results")]
    results: PathBuf,
    /// Put the table into docs/benchmarks.md.
    #[arg(long)]
    document: bool,
}

/// The page with the results, and what stands around them there.
const PAGE: &str = "docs/benchmarks.md";
const RESULTS_BEGIN: &str = "<!-- results -->\n";
const RESULTS_END: &str = "<!-- end of results -->";

/// What a group needs to know.
pub(crate) struct Bench {
    pub(crate) runs: usize,
    pub(crate) seconds: u32,
    pub(crate) repeats: usize,
    pub(crate) mirror_bytes: u64,
    /// A private folder in memory.
    pub(crate) memory: tempfile::TempDir,
    /// A private folder on the machine's disk.
    pub(crate) disk: tempfile::TempDir,
    /// The release builds.
    pub(crate) programs: PathBuf,
}

const GROUPS: &Groups<Bench> = &[
    ("machine", machine::run),
    ("nbd", nbd::run),
    ("idle", idle::run),
    ("isolation", isolation::run),
    ("mirror-memory", mirror::run_in_memory),
    ("mirror-disk", mirror::run_on_disk),
    ("stall", stall::run),
    ("adopt", adopt::run),
    ("memory", memory::run),
    ("large", large::run),
];

/// Measures, prints a table and writes JSON.
pub(crate) fn run(arguments: Arguments) -> anyhow::Result<()> {
    groups::check(GROUPS, &arguments.only)?;
    let programs = build_programs()?;
    let disk_folder = arguments.disk_folder.unwrap_or_else(|| programs.clone());
    let bench = Bench {
        runs: arguments.runs.max(1),
        seconds: arguments.seconds.max(1),
        repeats: arguments.repeats.max(1),
        mirror_bytes: arguments.mirror_mib << 20,
        memory: private_folder(&arguments.memory_folder)?,
        disk: private_folder(&disk_folder)?,
        programs,
    };
    let measured = groups::measure(GROUPS, &arguments.only, &bench);
    let table = measured.table();
    print!("{table}");
    if arguments.document {
        write_page(&table)?;
    }
    measured.write(&arguments.results, "bench")
}

/// Builds the release programs and returns where they are.
pub(crate) fn build_programs() -> anyhow::Result<PathBuf> {
    build("release")
}

/// The same with every assertion in them, as tests use them.
pub(crate) fn build_debug_programs() -> anyhow::Result<PathBuf> {
    build("dev")
}

fn build(profile: &str) -> anyhow::Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = std::process::Command::new(cargo)
        .args(["build", "--locked", "--profile", profile, "--bins"])
        .args(["--package", "transhume-cli", "--package", "transhume-guest"])
        .status()
        .context("running cargo")?;
    if !status.success() {
        bail!("building the programs: {status}");
    }
    Ok(target_folder()?.join(if profile == "dev" { "debug" } else { profile }))
}

/// Where cargo puts what it builds.
fn target_folder() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("asking where this program is")?;
    let target = own.parent().and_then(Path::parent).context("this program is not in a target folder")?;
    Ok(target.to_owned())
}

/// A folder that is removed at the end.
pub(crate) fn private_folder(parent: &Path) -> anyhow::Result<tempfile::TempDir> {
    tempfile::Builder::new()
        .prefix("transhume-")
        .tempdir_in(parent)
        .with_context(|| format!("creating a folder in {}", parent.display()))
}

/// Replaces the results on the page by these.
fn write_page(table: &str) -> anyhow::Result<()> {
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let heading = format!("Measured on {} on a virtual machine of {cores} cores, guests emulated.", today()?);
    write_between(RESULTS_BEGIN, RESULTS_END, &format!("{heading}\n\n{table}"))
}

fn today() -> anyhow::Result<String> {
    Ok(process::output_of(Path::new("date"), &["--utc".into(), "+%Y-%m-%d".into()])?.trim().to_owned())
}

/// Replaces what stands between two marks on the page.
fn write_between(begin: &str, end: &str, text: &str) -> anyhow::Result<()> {
    let page = std::fs::read_to_string(PAGE).with_context(|| format!("reading {PAGE}"))?;
    let (before, rest) = page.split_once(begin).with_context(|| format!("{PAGE} has no {begin}"))?;
    let (_, after) = rest.split_once(end).with_context(|| format!("{PAGE} has no {end}"))?;
    let page = format!("{before}{begin}\n{text}\n{end}{after}");
    std::fs::write(PAGE, page).with_context(|| format!("writing {PAGE}"))
}

/// Writes `figures`, with what machine they are of, to a file of its own.
fn write_json(folder: &Path, name: &str, mut figures: Value) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let now = std::time::SystemTime::now();
    let seconds = now.duration_since(std::time::UNIX_EPOCH).context("the clock is before 1970")?.as_secs();
    let path = folder.join(format!("{name}-{seconds}.json"));
    figures["unix_seconds"] = json!(seconds);
    figures["kernel"] = json!(std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim());
    figures["cores"] = json!(std::thread::available_parallelism().map_or(0, std::num::NonZero::get));
    let text = serde_json::to_string_pretty(&figures).context("writing JSON")?;
    std::fs::write(&path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
    println!("written to {}", path.display());
    Ok(())
}
