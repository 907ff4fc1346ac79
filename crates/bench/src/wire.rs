//! `cargo xtask bench-wire`: volumes that move from one host to another, beside the programs that do the same. The two hosts
//! are network namespaces of this machine, joined by links that are as fast as is said. See docs/benchmarks.md.

mod guests;
mod machines;
mod pair;
mod peers;
mod quiet;
pub(crate) mod tcp;

use std::path::PathBuf;

use transhume_guest::TwoHostsSpec;

use crate::groups::{self, Groups};
use transhume_guest::programs::{given_or_built, private_folder};

/// Arguments of `cargo xtask bench-wire`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only these groups: throughput, nbdcopy, links, cores, mirror-slow, mirror-fast, reduce, cut, beside, guests. May be given again, or with commas.
    #[arg(long, value_name = "GROUP", value_delimiter = ',')]
    only: Vec<String>,
    /// How often each figure is measured; its median is what counts. The network is cut twice as often.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// MiB that are moved; the throughput of one link is measured with four times as many.
    #[arg(long, default_value_t = 1024)]
    mib: u64,
    /// A folder in memory (tmpfs).
    #[arg(long, default_value = "/dev/shm")]
    memory_folder: PathBuf,
    /// Where the JSON goes.
    #[arg(long, default_value = "bench-results")]
    results: PathBuf,
    /// Where `transhume`, `transhumed` and `nbd-load` are; they are built if nothing is said.
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Put the table into docs/benchmarks.md.
    #[arg(long)]
    document: bool,
}

const BEGIN: &str = "<!-- wire -->\n";
const END: &str = "<!-- end of wire -->";

const GBIT: u64 = 1_000_000_000;

/// What a group needs to know.
struct WireBench {
    runs: usize,
    bytes: u64,
    memory: tempfile::TempDir,
    programs: PathBuf,
}

const GROUPS: &Groups<WireBench> = &[
    ("throughput", quiet::throughput),
    ("nbdcopy", quiet::nbdcopy),
    ("links", quiet::links),
    ("cores", quiet::cores),
    ("mirror-slow", |bench| guests::mirror(bench, GBIT)),
    ("mirror-fast", |bench| guests::mirror(bench, 10 * GBIT)),
    ("reduce", quiet::reduce),
    ("cut", guests::cut),
    ("beside", quiet::beside),
    ("guests", machines::guests),
];

/// Measures, prints a table and writes JSON.
pub(crate) fn run(arguments: Arguments) -> anyhow::Result<()> {
    groups::check(GROUPS, &arguments.only)?;
    let bench = WireBench {
        runs: arguments.runs.max(1),
        bytes: arguments.mib.max(1) << 20,
        memory: private_folder(&arguments.memory_folder)?,
        programs: given_or_built(arguments.programs)?,
    };
    let measured = groups::measure(GROUPS, &arguments.only, &bench);
    let page = measured.table();
    print!("{page}");
    if arguments.document {
        crate::page::write_between(BEGIN, END, &page)?;
    }
    measured.write(&arguments.results, "wire")
}

/// One encrypted link of so many bits a second.
const fn limited(bits_per_second: u64) -> TwoHostsSpec<'static> {
    TwoHostsSpec { links: 1, link_bits_per_second: Some(bits_per_second), plaintext: false, more: "", more_at_b: "" }
}

/// Megabytes a second.
fn rate(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / 1e6 / seconds
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}
