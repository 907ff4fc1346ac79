//! `cargo xtask bench-local`: what is promised, measured beside the programs it is compared with, in one run, on the same
//! files, taking turns. See docs/benchmarks.md for what each row means.

mod adopt;
mod cache;
mod idle;
mod isolation;
mod large;
mod large_cache;
mod layers;
mod machine;
mod memory;
mod mirror;
mod nbd;
mod seek;
mod stall;
mod together;

use std::path::PathBuf;

use transhume_guest::programs::{given_or_built, private_folder};

use crate::groups::{self, Groups};
use crate::page::{today, write_between};

/// Arguments of `cargo xtask bench-local`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only these groups: machine, nbd, idle, surrogate, cache, isolation, mirror-memory, mirror-disk, stall, together, layers, adopt, memory, large, large-cache, seek, seek-search, seek-rate. May be given again, or with commas.
    #[arg(long, value_name = "GROUP", value_delimiter = ',')]
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
    /// GiB of the large cache. A full one takes 27 bytes of memory for each 4 KiB: 7.3 GB for 1024.
    #[arg(long, default_value_t = 1024)]
    large_cache_gib: u64,
    /// How often the large cache is measured: minutes each time.
    #[arg(long, default_value_t = 1)]
    large_cache_runs: usize,
    /// A folder in memory (tmpfs).
    #[arg(long, default_value = "/dev/shm")]
    memory_folder: PathBuf,
    /// A folder on the machine's disk; `target/` unless said otherwise.
    #[arg(long)]
    disk_folder: Option<PathBuf>,
    /// The programs in this folder (with their examples), instead of building them.
    #[arg(long, value_name = "FOLDER")]
    programs: Option<PathBuf>,
    /// Where the JSON goes.
    #[arg(long, default_value = "bench-results")]
    results: PathBuf,
    /// Put the table into docs/benchmarks.md.
    #[arg(long)]
    document: bool,
}

/// What stands around the results on the page.
const RESULTS_BEGIN: &str = "<!-- results -->\n";
const RESULTS_END: &str = "<!-- end of results -->";

/// What a group needs to know.
struct Bench {
    runs: usize,
    seconds: u32,
    repeats: usize,
    mirror_bytes: u64,
    large_cache_gib: u64,
    large_cache_runs: usize,
    /// A private folder in memory.
    memory: tempfile::TempDir,
    /// A private folder on the machine's disk.
    disk: tempfile::TempDir,
    /// The release builds.
    programs: PathBuf,
    /// Whether they were given, and their examples with them.
    is_built: bool,
}

const GROUPS: &Groups<Bench> = &[
    ("machine", machine::run),
    ("nbd", nbd::run),
    ("idle", idle::run),
    ("surrogate", idle::surrogate),
    ("cache", cache::run),
    ("isolation", isolation::run),
    ("mirror-memory", mirror::run_in_memory),
    ("mirror-disk", mirror::run_on_disk),
    ("stall", stall::run),
    ("together", together::run),
    ("layers", layers::run),
    ("adopt", adopt::run),
    ("memory", memory::run),
    ("large", large::run),
    ("large-cache", large_cache::run),
    ("seek", seek::run),
    ("seek-search", seek::run_search),
    ("seek-rate", seek::run_at_rate),
];

/// Measures, prints a table and writes JSON.
pub(crate) fn run(arguments: Arguments) -> anyhow::Result<()> {
    groups::check(GROUPS, &arguments.only)?;
    let is_built = arguments.programs.is_some();
    let programs = given_or_built(arguments.programs)?;
    let disk_folder = arguments.disk_folder.unwrap_or_else(|| programs.clone());
    let bench = Bench {
        runs: arguments.runs.max(1),
        seconds: arguments.seconds.max(1),
        repeats: arguments.repeats.max(1),
        mirror_bytes: arguments.mirror_mib << 20,
        large_cache_gib: arguments.large_cache_gib.max(1),
        large_cache_runs: arguments.large_cache_runs.max(1),
        memory: private_folder(&arguments.memory_folder)?,
        disk: private_folder(&disk_folder)?,
        programs,
        is_built,
    };
    let measured = groups::measure(GROUPS, &arguments.only, &bench);
    let table = measured.table();
    print!("{table}");
    if arguments.document {
        write_page(&table)?;
    }
    measured.write(&arguments.results, "bench")
}

/// Replaces the results on the page by these.
fn write_page(table: &str) -> anyhow::Result<()> {
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let heading = format!("Measured on {} on a virtual machine of {cores} cores, guests emulated.", today()?);
    write_between(RESULTS_BEGIN, RESULTS_END, &format!("{heading}\n\n{table}"))
}
