//! `cargo xtask bench-vm`: whole VMs that move from one host to another, beside QEMU's own migration of the same guests. The
//! two hosts are network namespaces of this machine. See docs/benchmarks.md.

mod felt;
mod guests;
mod memory;
pub(crate) mod moment;
pub(crate) mod ours;
mod peers;
pub(crate) mod place;
mod rows;

use std::path::PathBuf;

use crate::groups::{self, Groups};
use transhume_guest::programs::{given_or_built, private_folder};

/// Arguments of `cargo xtask bench-vm`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only these groups: idle, shared, cache, total, forecast, converge, memory, links, guests. May be given again, or with commas.
    #[arg(long, value_name = "GROUP", value_delimiter = ',')]
    only: Vec<String>,
    /// How often each figure is measured; its median is what counts. `converge` is measured twice at most.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// The guest's memory, in MiB; most of it is filled with bytes that no compression shortens.
    #[arg(long, default_value_t = 1024)]
    memory_mib: u32,
    /// The guest's processors; one of `converge` has two at least.
    #[arg(long, default_value_t = 1)]
    cores: u32,
    /// How much memory the guests of `idle` and `total` rewrite, in MiB/s.
    #[arg(long, default_value_t = 0)]
    busy_mib: u32,
    /// The guest's disk, in MiB, as incompressible.
    #[arg(long, default_value_t = 2048)]
    disk_mib: u64,
    /// How many connections carry the memory, ours and QEMU's.
    #[arg(long, default_value_t = 4)]
    channels: u8,
    /// For how long QEMU may stop the guest for the rest of the memory, in milliseconds; for both. `idle` also takes a short
    /// one.
    #[arg(long, default_value_t = 300)]
    downtime_limit_ms: u64,
    /// Our strategy for the disk: mirror, dbt or snapshot.
    #[arg(long, default_value = "mirror")]
    strategy: String,
    /// Encrypt what goes between the daemons, and between the peers' QEMUs.
    #[arg(long)]
    tls: bool,
    /// How fast each link of `converge`, and the only one of `guests`, is, in Mbit/s.
    #[arg(long, default_value_t = 1000)]
    link_mbit: u64,
    /// How much memory the guest of `converge` rewrites, in MiB/s.
    #[arg(long, default_value_t = 150)]
    rewrite_mib: u32,
    /// Only guests of `guests` that run these. May be given again, or with commas.
    #[arg(long, value_name = "PROGRAM", value_delimiter = ',')]
    guest_programs: Vec<guests::Program>,
    /// A folder in memory (tmpfs), for the disks.
    #[arg(long, default_value = "/dev/shm")]
    memory_folder: PathBuf,
    /// Where the JSON goes.
    #[arg(long, default_value = "bench-results")]
    results: PathBuf,
    /// Where `transhume` and `transhumed` are; they are built if nothing is said.
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Put the table into docs/benchmarks.md.
    #[arg(long)]
    document: bool,
}

const BEGIN: &str = "<!-- vm -->\n";
const END: &str = "<!-- end of vm -->";

/// What a group needs to know.
struct VmBench {
    runs: usize,
    memory_mib: u32,
    cores: u32,
    busy_mib: u32,
    disk_mib: u64,
    channels: u8,
    downtime_limit_ms: u64,
    strategy: String,
    is_encrypted: bool,
    link_bits_per_second: u64,
    rewrite_mib: u32,
    guest_programs: Vec<guests::Program>,
    memory: tempfile::TempDir,
    programs: PathBuf,
}

const GROUPS: &Groups<VmBench> = &[
    ("idle", rows::idle),
    ("shared", rows::shared),
    ("cache", rows::cache),
    ("total", rows::total),
    ("forecast", rows::forecast),
    ("converge", rows::converge),
    ("memory", memory::memory),
    ("memory-disk", memory::memory_with_disk),
    ("memory-busy", memory::memory_of_busy),
    ("links", memory::links),
    ("guests", guests::guests),
];

/// Measures, prints a table and writes JSON.
pub(crate) fn run(arguments: Arguments) -> anyhow::Result<()> {
    groups::check(GROUPS, &arguments.only)?;
    let bench = VmBench {
        runs: arguments.runs.max(1),
        memory_mib: arguments.memory_mib.max(160),
        cores: arguments.cores.max(1),
        busy_mib: arguments.busy_mib,
        disk_mib: arguments.disk_mib.max(16),
        channels: arguments.channels.max(1),
        downtime_limit_ms: arguments.downtime_limit_ms,
        strategy: arguments.strategy,
        is_encrypted: arguments.tls,
        link_bits_per_second: arguments.link_mbit.max(1) * 1_000_000,
        rewrite_mib: arguments.rewrite_mib,
        guest_programs: arguments.guest_programs,
        memory: private_folder(&arguments.memory_folder)?,
        programs: given_or_built(arguments.programs)?,
    };
    let measured = groups::measure(GROUPS, &arguments.only, &bench);
    let page = measured.table();
    print!("{page}");
    if arguments.document {
        crate::page::write_between(BEGIN, END, &page)?;
    }
    measured.write(&arguments.results, "vm")
}
