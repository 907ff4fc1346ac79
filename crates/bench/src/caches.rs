//! `cargo xtask bench-caches`: the Firepan paper's section 4.2 on real programs, scaled down. A VM whose disk lies on an NBD store moves
//! between two hosts with its flash cache, by every way, under the paper's load. See docs/paper-firepan.md.

mod figures;
mod load;
mod moved;
mod path;
mod rows;
mod store;
mod watch;

use std::path::{Path, PathBuf};

use anyhow::bail;
use serde_json::{Value, json};
use transhume_guest::programs::{given_or_built, private_folder};
use transhume_guest::{GuestSpec, Load, TwoHostsSpec};

use crate::figures::Row;
use crate::page::write_json;
use crate::vm::place::{Place, RUNS_VMS};
use figures::Figures;

/// The disk's volume.
const VOLUME: &str = "web1-disk";
/// The cache of either host.
const CACHE: &str = "flash";
/// The part of the disk that the guest itself reads and checks, in MiB. The load's areas follow.
const GUEST_MIB: u64 = 16;
/// The guest's memory, in MiB.
const MEMORY_MIB: u32 = 256;
/// What the guest itself asks of its disk, in requests a second: it shows that it lives.
const GUEST_RATE: u32 = 1;
/// The paper's 400 and 800 s of table 1, divided by 16 as its sizes are.
const SPANS: [f64; 2] = [25.0, 50.0];
/// What its store answers, in reads a second. One that is slower takes as much longer to fill a cache.
const PAPER_IOPS: f64 = 8000.0;
/// What its VM gets with a warm cache, in the same unit.
const PAPER_WARM_IOPS: f64 = 15_000.0;
/// For how long the load is watched beyond the last span, in seconds.
const BEYOND: f64 = 5.0;

/// The ways of a cache, in the order of the table.
pub(crate) const WAYS: [&str; 6] = ["none", "cachemior", "firepan", "firepan-if", "remote-read", "hybrid"];

/// Arguments of `cargo xtask bench-caches`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only these ways. The first is what others are compared with.
    #[arg(long, value_delimiter = ',', value_name = "WAYS", default_values_t = WAYS.map(str::to_owned))]
    ways: Vec<String>,
    /// How often the VM moves by each way.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// What the load reads and writes, in MiB; the paper's 20 GB divided by 16. The cache is half of it.
    #[arg(long, default_value_t = 1280)]
    mib: u64,
    /// How many reads of 4 KiB the store answers a second, and as many writes.
    #[arg(long, default_value_t = 4000)]
    store_iops: u64,
    /// How many reads of 4 KiB the path of a host lets through a second, and as many writes; 0 is as many as the machine can. The paper's
    /// part of what the store answers if nothing is said.
    #[arg(long)]
    path_iops: Option<u64>,
    /// A folder in memory (tmpfs), for the store and the caches.
    #[arg(long, default_value = "/dev/shm")]
    memory_folder: PathBuf,
    /// Where the JSON goes.
    #[arg(long, default_value = "bench-results")]
    results: PathBuf,
    /// Where `transhume` and `transhumed` are; they are built if nothing is said.
    #[arg(long)]
    programs: Option<PathBuf>,
}

/// What the run needs to know.
struct CachesBench {
    mib: u64,
    store_iops: u64,
    path_iops: Option<u64>,
    programs: PathBuf,
}

impl CachesBench {
    /// The spans after a switchover that are looked at, in seconds: the paper's divided by 16, and those as much longer as this store is
    /// slower.
    fn spans(&self) -> Vec<f64> {
        let slower = PAPER_IOPS / self.store_iops as f64;
        let mut spans: Vec<f64> = SPANS.into_iter().chain(SPANS.map(|span| span * slower)).collect();
        spans.sort_by(f64::total_cmp);
        spans.dedup();
        spans
    }

    /// For how long the load is watched after a switchover, in seconds.
    fn after_seconds(&self) -> u64 {
        (self.spans().into_iter().fold(0.0, f64::max) + BEYOND) as u64
    }

    fn disk_bytes(&self) -> u64 {
        (GUEST_MIB + self.mib) << 20
    }

    /// Two hosts, and the guest at the first.
    fn place(&self, memory: &Path) -> anyhow::Result<Place> {
        let load =
            Load { is_prefilled: true, rate: GUEST_RATE, workers: 1, region_bytes: GUEST_MIB << 20, ..Load::default() };
        let guest = GuestSpec::new().memory_mib(MEMORY_MIB).load(load);
        let more = format!("{RUNS_VMS}shared-storage = [{:?}]\n", store::uri());
        let hosts = TwoHostsSpec { more: &more, ..TwoHostsSpec::default() };
        Place::new((&self.programs, memory), hosts, guest, self.disk_bytes())
    }
}

/// Measures, prints tables and writes JSON.
pub(crate) fn run(arguments: Arguments) -> anyhow::Result<()> {
    if let Some(unknown) = arguments.ways.iter().find(|way| !WAYS.contains(&way.as_str())) {
        bail!("there is no way {unknown}; there are {}", WAYS.join(", "));
    }
    let memory = private_folder(&arguments.memory_folder)?;
    let store_iops = arguments.store_iops.max(100);
    let of_paper = store_iops as f64 * PAPER_WARM_IOPS / PAPER_IOPS;
    let path_iops = arguments.path_iops.unwrap_or(of_paper as u64);
    let bench = CachesBench {
        mib: arguments.mib.max(64),
        store_iops,
        path_iops: Some(path_iops).filter(|reads| *reads > 0),
        programs: given_or_built(arguments.programs)?,
    };
    let mut stage = moved::set_up(&bench, memory.path())?;
    let mut measured: Vec<(String, Figures)> = Vec::new();
    let mut series: Vec<Value> = Vec::new();
    let (ways, runs, spans) = (&arguments.ways, arguments.runs.max(1), bench.spans());
    let write = |measured: &[(String, Figures)], series: &[Value], failure: Option<String>| {
        let rows = rows::rows(ways, &spans, measured);
        let document = json!({
            "store_reads_a_second": bench.store_iops, "path_reads_a_second": bench.path_iops,
            "spans_seconds": spans, "load_mib": bench.mib, "cache_mib": bench.mib / 2,
            "rows": rows.iter().map(Row::json).collect::<Vec<_>>(), "moves": series, "not_measured": failure,
        });
        write_json(&arguments.results, "caches", document)
    };
    for number in 0..runs * ways.len() {
        // Each run begins with another way.
        let way = &ways[(number + number / ways.len()) % ways.len()];
        eprintln!("run {} of {runs}: {way}", number / ways.len() + 1);
        match stage.go(way) {
            Ok(seen) => {
                let figures = Figures::of(&seen, &spans);
                eprintln!("    {figures:.2?}");
                series.push(seen.json());
                measured.push((way.clone(), figures));
            }
            Err(error) => {
                write(&measured, &series, Some(format!("{way}: {error:#}")))?;
                return Err(error);
            }
        }
    }
    print!("{}", rows::page(ways, &spans, &measured));
    write(&measured, &series, None)
}
