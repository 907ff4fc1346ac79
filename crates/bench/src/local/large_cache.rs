//! A flash cache of 1 TiB, full: how long the daemon takes until its volume serves, what guests feel while something walks over all of
//! the cache, and what it takes of memory.
//!
//! The store is a sparse file, and so is the volume, which is twice as large. The cache is made by the daemon and filled by
//! crates/filters/examples/fill_cache.rs: a map that names a block in each place, all of them zeroes. Both volumes are served by one
//! worker, so that whatever holds it shows at the other one, which has no cache.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;
use transhume_guest::Daemon;
use transhume_guest::process::{memory_now_of, memory_peak_of, output_of};
use transhume_guest::programs::private_folder;

use super::Bench;
use super::isolation::connect;
use crate::figures::{Goal, Row, Samples};
use crate::load::{NbdLoad, Offer};
use crate::server::{Endpoint, VOLUME, path_word};

const GIB: u64 = 1 << 30;
const BLOCK_BYTES: u64 = 4 << 10;
/// A volume without a cache, on the same worker.
const OTHER: &str = "other";
const OTHER_BYTES: u64 = 256 << 20;
const CACHE: &str = "flash";
/// So much of the cache is taken away and given back.
const RESIZED_BYTES: u64 = GIB / 4;
/// Requests a second to each volume. Half of those that read the cached one miss, and have a block evicted.
const RATE: u32 = 200;
/// After so many writes there is a flush, which writes the durable map.
const FLUSH: &str = "flush_every=20";
const MIX: &[&str] = &["read_percent=70", "io_bytes=4096", FLUSH, "reconnect_seconds=600"];
/// So long the load runs alone.
const QUIET: Duration = Duration::from_secs(15);
const SCRAPES: u32 = 20;
const SCRAPE_EVERY: Duration = Duration::from_millis(200);
/// What is asked for.
const START_SECONDS_MAX: f64 = 30.0;
const HOLD_MS_MAX: f64 = 5.0;
/// What docs/caches.md states, in bytes for each place: of all policies at most, and with the one that is the default.
const STATED_MAX: f64 = 32.0;
const STATED: f64 = 27.0;
/// A volume is given up after so long.
const PATIENCE: Duration = Duration::from_secs(900);

/// What was felt while one thing went on: the longest wait at the cached volume and at the other one.
#[derive(Default)]
struct Felt {
    cached_ms: Samples,
    other_ms: Samples,
    seconds: Samples,
}

#[derive(Default)]
struct Figures {
    start_seconds: Samples,
    peak: Samples,
    resident: Samples,
    told: Samples,
    quiet: Felt,
    metrics: Felt,
    drain: Felt,
    resize: Felt,
    stop: Felt,
    removal: Felt,
}

pub(crate) fn run(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let mut figures = Figures::default();
    for _ in 0..bench.large_cache_runs {
        measure(bench, &mut figures)?;
    }
    let size = format!("a full cache of {} GiB", bench.large_cache_gib);
    let what = |figure: &str| format!("{size}: {figure}");
    let Figures { start_seconds, peak, resident, told, quiet, metrics, drain, resize, stop, removal } = figures;
    let bytes = "bytes a place";
    let mut rows = vec![
        Row::new(
            what("from the daemon's start until the volume serves"),
            "s",
            start_seconds,
            Goal::AtMost(START_SECONDS_MAX),
        ),
        Row::new(what("resident memory of the daemon"), bytes, resident, Goal::AtMost(STATED)),
        Row::new(what("the same at its highest"), bytes, peak, Goal::AtMost(STATED_MAX)),
        Row::new(what("memory of its tables, as the API tells it"), bytes, told, Goal::AtMost(STATED)),
    ];
    let during = [
        ("20 scrapes of the metrics", metrics),
        ("drained (`layer set --mode write-through`)", drain),
        ("made smaller by 256 MiB and larger again", resize),
        ("taken out (`layer rm`)", removal),
    ];
    for (name, felt) in during {
        let goal = Goal::AtMost(HOLD_MS_MAX);
        let longer = |of: &str| format!("{size}, {name}: by how much longer a request of {of} waits at most");
        let cached = felt.cached_ms.more_than(&quiet.cached_ms);
        rows.push(Row::new(longer("its volume"), "ms", cached, goal));
        rows.push(Row::new(longer("another volume"), "ms", felt.other_ms.more_than(&quiet.other_ms), goal));
        rows.push(Row::new(format!("{size}, {name}: time"), "s", felt.seconds, Goal::None));
    }
    // A cache that is full has something evicted for each block that is read, and a flush writes its durable map.
    let quietly = "evictions and flushes: longest wait of a request of";
    rows.push(
        Row::new(format!("{size}, {quietly} its volume"), "ms", quiet.cached_ms, Goal::None)
            .against("another volume", quiet.other_ms),
    );
    let over = "a clean stop and a start: longest wait of a request of";
    rows.push(
        Row::new(format!("{size}, {over} its volume"), "ms", stop.cached_ms, Goal::None)
            .against("another volume", stop.other_ms),
    );
    rows.push(Row::new(what("a clean stop"), "s", stop.seconds, Goal::None));
    Ok(rows)
}

/// What is measured once.
struct Stage {
    daemon: Daemon,
    store: PathBuf,
    cached: Endpoint,
    other: Endpoint,
}

fn measure(bench: &Bench, figures: &mut Figures) -> anyhow::Result<()> {
    let folder = private_folder(bench.disk.path())?;
    let mut stage = Stage::make(bench, folder.path())?;
    stage.fill(bench)?;
    let places = stage.start(&mut figures.start_seconds)?;
    let pid = stage.daemon.pid().context("it runs")?;
    let each = |bytes: u64| bytes as f64 / places;
    figures.resident.push(each(memory_now_of(pid)?));
    figures.peak.push(each(memory_peak_of(pid)?));
    figures.told.push(stage.show()?["memory_bytes"].as_f64().context("the API tells the memory")? / places);

    let mut loads = Loads::start(bench, &stage)?;
    loads.during(&mut figures.quiet, || {
        std::thread::sleep(QUIET);
        Ok(())
    })?;
    let daemon = &stage.daemon;
    loads.during(&mut figures.metrics, || {
        for _ in 0..SCRAPES {
            scrape(&daemon.api())?;
            std::thread::sleep(SCRAPE_EVERY);
        }
        Ok(())
    })?;
    let layer = ["volume", "layer", "set", VOLUME, "cache"];
    loads.during(&mut figures.drain, || daemon.json(&[&layer[..], &["--mode", "write-through"]].concat()).map(drop))?;
    let bytes = places as u64 * BLOCK_BYTES;
    loads.during(&mut figures.resize, || {
        for bytes in [bytes - RESIZED_BYTES, bytes] {
            daemon.json(&[&layer[..], &["--size", &bytes.to_string()]].concat())?;
        }
        Ok(())
    })?;
    let (daemon, seconds) = (&mut stage.daemon, &mut figures.stop.seconds);
    let mut felt = Felt::default();
    loads.during(&mut felt, || {
        let began = Instant::now();
        daemon.terminate()?;
        seconds.push(began.elapsed().as_secs_f64());
        daemon.launch()?;
        wait_until_served(&stage.cached).map(drop)
    })?;
    figures.stop.cached_ms.extend(&felt.cached_ms);
    figures.stop.other_ms.extend(&felt.other_ms);
    // It is there, and whole, after the start.
    stage.show()?;
    let daemon = &stage.daemon;
    loads.during(&mut figures.removal, || daemon.json(&["volume", "layer", "rm", VOLUME, "cache"]).map(drop))
}

impl Stage {
    /// A daemon with an empty cache, which has ended.
    fn make(bench: &Bench, folder: &Path) -> anyhow::Result<Self> {
        let [store, image, other_image, config] =
            ["store", "volume.raw", "other.raw", "config.toml"].map(|name| folder.join(name));
        for (path, bytes) in [(&store, bench.large_cache_gib * GIB), (&image, 2 * bench.large_cache_gib * GIB)] {
            let file = File::create(path).context("creating a sparse file")?;
            file.set_len(bytes).with_context(|| format!("sizing {}", path.display()))?;
        }
        transhume_guest::create_filled(&other_image, OTHER_BYTES)?;
        std::fs::write(&config, "workers = 1\n").context("writing the daemon's configuration")?;
        let mut daemon = Daemon::new(&bench.programs, folder);
        daemon.arguments = vec!["--config".into(), path_word(&config)];
        daemon.start()?;
        daemon.json(&["cache", "create", CACHE, "--store", &format!("file:{}", path_word(&store))])?;
        let mut endpoints = Vec::new();
        for (name, image) in [(VOLUME, &image), (OTHER, &other_image)] {
            let socket = folder.join(format!("{name}.sock"));
            let (backend, export) =
                (format!("file:{}", path_word(image)), format!("nbd+unix:///{name}?socket={}", path_word(&socket)));
            daemon.json(&["volume", "attach", name, "--backend", &backend, "--export", &export])?;
            endpoints.push(Endpoint { socket, export: name });
        }
        let size = format!("{}GiB", bench.large_cache_gib);
        let add = ["volume", "layer", "add", VOLUME, "cache", "--cache", CACHE, "--size", &size];
        // It is filled with what is clean, so what it holds is on record as if it were write-through.
        daemon.json(&add)?;
        let other = endpoints.pop().context("there are two")?;
        let cached = endpoints.pop().context("there are two")?;
        Ok(Self { daemon, store, cached, other })
    }

    /// Has a block in each place of the cache, and leaves the daemon ended.
    fn fill(&mut self, bench: &Bench) -> anyhow::Result<()> {
        let shown = self.daemon.json(&["cache", "show", CACHE])?;
        let part = &shown["partitions"][0];
        let number = |name: &str| part[name].as_u64().with_context(|| format!("{shown} has no {name}"));
        let words = [path_word(&self.store), number("offset")?.to_string(), number("bytes")?.to_string()];
        self.daemon.terminate()?;
        if !bench.is_built {
            build_filler()?;
        }
        output_of(&bench.programs.join("examples/fill_cache"), &words).map(drop)
    }

    /// Starts the daemon, and gives how many places the cache has: all of them are full.
    fn start(&mut self, seconds: &mut Samples) -> anyhow::Result<f64> {
        let began = Instant::now();
        self.daemon.launch()?;
        wait_until_served(&self.cached)?;
        seconds.push(began.elapsed().as_secs_f64());
        let shown = self.show()?;
        let number = |name: &str| shown[name].as_f64().with_context(|| format!("{shown} has no {name}"));
        ensure!(number("places_free")? == 0.0, "the cache is not full: {shown}");
        // Something becomes dirty from here on.
        self.daemon.json(&["volume", "layer", "set", VOLUME, "cache", "--mode", "write-back"])?;
        number("places")
    }

    /// What the daemon tells of the cache, which is in the guest's path.
    fn show(&self) -> anyhow::Result<Value> {
        let shown = self.daemon.json(&["volume", "show", VOLUME])?;
        let layers = shown["layers"].as_array().context("a volume shows its layers")?;
        let cached = layers.iter().map(|layer| &layer["cached"]).find(|cached| !cached.is_null());
        let cached = cached.with_context(|| format!("{shown} has no cache"))?;
        ensure!(cached["open"] == true, "the volume has come up without its cache: {cached}");
        Ok(cached.clone())
    }
}

/// A load on each of the volumes.
struct Loads {
    cached: NbdLoad,
    other: NbdLoad,
}

impl Loads {
    fn start(bench: &Bench, stage: &Stage) -> anyhow::Result<Self> {
        let [cached, other] = [&stage.cached, &stage.other]
            .map(|endpoint| NbdLoad::start_with(&bench.programs, endpoint, Offer::Rate(RATE), MIX));
        let mut loads = Self { cached: cached?, other: other? };
        std::thread::sleep(Duration::from_secs(1));
        loads.mark()?;
        Ok(loads)
    }

    /// The longest waits since the last mark, in milliseconds.
    fn mark(&mut self) -> anyhow::Result<[f64; 2]> {
        let ms = |span: Duration| span.as_secs_f64() * 1e3;
        Ok([ms(self.cached.mark()?.longest), ms(self.other.mark()?.longest)])
    }

    /// What guests feel while `work` is done.
    fn during(&mut self, felt: &mut Felt, work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
        self.mark()?;
        let began = Instant::now();
        work()?;
        felt.seconds.push(began.elapsed().as_secs_f64());
        // Requests that wait are counted when they are answered.
        std::thread::sleep(Duration::from_secs(1));
        let [cached, other] = self.mark()?;
        felt.cached_ms.push(cached);
        felt.other_ms.push(other);
        Ok(())
    }
}

/// Waits until a volume answers a read.
fn wait_until_served(endpoint: &Endpoint) -> anyhow::Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        match read_once(endpoint) {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() > end => return Err(error.context("the volume is not served")),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn read_once(endpoint: &Endpoint) -> anyhow::Result<()> {
    let mut stream = connect(&endpoint.socket, endpoint.export)?;
    // No flags, NBD_CMD_READ, of the first block.
    let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
    request.extend_from_slice(&[0; 20]);
    request.extend_from_slice(&(BLOCK_BYTES as u32).to_be_bytes());
    stream.write_all(&request)?;
    let mut answer = [0; 16 + BLOCK_BYTES as usize];
    stream.read_exact(&mut answer).context("reading a block")?;
    ensure!(answer[4..8] == [0; 4], "the read fails");
    Ok(())
}

/// Asks for the metrics.
fn scrape(api: &Path) -> anyhow::Result<()> {
    let mut stream = UnixStream::connect(api).context("connecting to the API")?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: transhumed\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("reading the metrics")?;
    ensure!(answer.contains("transhume_cache_places"), "the metrics tell nothing of caches: {answer}");
    Ok(())
}

fn build_filler() -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let what = ["--package", "transhume-filters", "--features", "testing", "--example", "fill_cache"];
    let words: Vec<String> = ["build", "--locked", "--release"].into_iter().chain(what).map(str::to_owned).collect();
    output_of(Path::new(&cargo), &words).map(drop)
}
