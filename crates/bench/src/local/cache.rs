//! A host's flash cache, with tmpfs for the flash: what a hit costs, and what write-back spares on a slow store.

use std::path::Path;
use std::time::{Duration, Instant};

use transhume_guest::process::{Process, output_of};
use transhume_guest::programs::private_folder;

use super::Bench;
use crate::figures::{Goal, Row, Samples};
use crate::server::{Endpoint, Transhumed, path_word};

/// What is read by hits, and what is cached of it: all.
const READ_MIB: u64 = 256;
/// The volume on the slow store, and its cache. The dirty limit is a share of the cache.
const STORE_MIB: u64 = 64;
const CACHE_MIB: u64 = 32;
/// Four times what may be dirty at once.
const WRITTEN_MIB: u64 = 64;
/// What each request of the slow store takes, in milliseconds.
const STORE_DELAY_MS: u64 = 5;
/// The guest syncs after so many writes.
const SYNC_EVERY: u32 = 32;
/// A hit reaches this part of the bare file's IOPS at least.
const HIT_RATIO_MIN: f64 = 0.9;
/// Write-back is so much faster at least, its drain included.
const WRITE_BACK_RATIO_MIN: f64 = 3.0;

pub(crate) fn run(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let mut rows = hits(bench)?;
    rows.extend(writes(bench)?);
    Ok(rows)
}

/// A daemon with a cache `flash` of so many MiB in memory.
fn daemon(bench: &Bench, folder: &Path, mib: u64) -> anyhow::Result<Transhumed> {
    let daemon = Transhumed::start(&bench.programs, folder)?;
    let store = format!("file:{},size={mib}MiB", path_word(&folder.join("flash")));
    daemon.run(&["cache", "create", "flash", "--store", &store])?;
    Ok(daemon)
}

/// Reads of what is cached, of the same file without the layer by the same daemon, and through nbdkit's own cache.
fn hits(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let folder = private_folder(bench.memory.path())?;
    let daemon = daemon(bench, folder.path(), 2 * READ_MIB)?;
    let served = |name: &'static str| -> anyhow::Result<Endpoint> {
        let file = folder.path().join(format!("{name}.raw"));
        transhume_guest::create_filled(&file, READ_MIB << 20)?;
        let endpoint = Endpoint { socket: folder.path().join(format!("{name}.sock")), export: name };
        daemon.attach(name, &file, &endpoint.socket, "")?;
        Ok(endpoint)
    };
    let (bare, cached) = (served("bare")?, served("cached")?);
    let size = format!("{READ_MIB}MiB");
    daemon.run(&[
        "volume",
        "layer",
        "add",
        "cached",
        "cache",
        "--cache",
        "flash",
        "--size",
        &size,
        "--sequential",
        "none",
    ])?;
    let (_nbdkit, peer) = nbdkit_cache(folder.path(), &folder.path().join("bare.raw"))?;
    for endpoint in [&cached, &peer] {
        fio(endpoint, &["--rw=read", "--bs=256k", "--iodepth=4"], READ_MIB)?;
    }
    let [mut ours, mut without, mut theirs] = [(); 3].map(|()| Samples::default());
    for _ in 0..bench.runs {
        for (endpoint, samples) in [(&cached, &mut ours), (&bare, &mut without), (&peer, &mut theirs)] {
            samples.push(super::nbd::load(bench, endpoint, "randread", 16, READ_MIB << 20)?.0);
        }
    }
    let what = "cache hits, randread 4 KiB depth 16, the flash on tmpfs";
    Ok(vec![
        Row::new(what, "IOPS", ours.clone(), Goal::RatioAtLeast(HIT_RATIO_MIN))
            .against("the same without a cache", without),
        Row::new(what, "IOPS", ours, Goal::RatioAtLeast(1.0)).against("nbdkit's cache filter", theirs),
    ])
}

/// nbdkit with its cache over `file`, which keeps what it has read.
fn nbdkit_cache(folder: &Path, file: &Path) -> anyhow::Result<(Process, Endpoint)> {
    let (socket, log) = (folder.join("peer.sock"), folder.join("peer.log"));
    let words = [
        "-f".to_owned(),
        "-U".into(),
        path_word(&socket),
        "--filter=cache".into(),
        "file".into(),
        path_word(file),
        "cache-on-read=true".into(),
    ];
    // Its cache is a file in TMPDIR.
    let tmpdir = format!("TMPDIR={}", path_word(folder));
    let words: Vec<String> = [tmpdir, "nbdkit".into()].into_iter().chain(words).collect();
    let mut process = Process::start(Path::new("env"), &words, &log)?;
    process.wait_for(&socket, &log)?;
    Ok((process, Endpoint { socket, export: "" }))
}

/// Random writes over a slow store, by write-back until it is drained and by write-through.
fn writes(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let [mut back, mut through] = [(); 2].map(|()| Samples::default());
    for _ in 0..bench.runs {
        back.push(written(bench, "write-back")?.as_secs_f64());
        through.push(written(bench, "write-through")?.as_secs_f64());
    }
    let what = format!(
        "{WRITTEN_MIB} MiB of 4 KiB randwrite, sync every {SYNC_EVERY}, a store with {STORE_DELAY_MS} ms: write-back with its drain"
    );
    Ok(vec![Row::new(what, "s", back, Goal::RatioAtMost(1.0 / WRITE_BACK_RATIO_MIN)).against("write-through", through)])
}

fn written(bench: &Bench, mode: &str) -> anyhow::Result<Duration> {
    let folder = private_folder(bench.memory.path())?;
    let daemon = daemon(bench, folder.path(), 2 * CACHE_MIB)?;
    let (image, store) = (folder.path().join("volume.raw"), folder.path().join("store.raw"));
    for file in [&image, &store] {
        transhume_guest::create_filled(file, STORE_MIB << 20)?;
    }
    let endpoint = Endpoint { socket: folder.path().join("volume.sock"), export: "volume" };
    daemon.attach("volume", &image, &endpoint.socket, "")?;
    let (_slow, uri) = slow_store(folder.path(), &store)?;
    daemon.run(&["move", "volume", "--to", &uri, "--overwrite", "--verify", "off"])?;
    let size = format!("{CACHE_MIB}MiB");
    daemon.run(&["volume", "layer", "add", "volume", "cache", "--cache", "flash", "--size", &size, "--mode", mode])?;
    let began = Instant::now();
    let words = ["--rw=randwrite", "--bs=4k", "--iodepth=16", "--norandommap"];
    let (sync, written) = (format!("--fsync={SYNC_EVERY}"), format!("--io_size={WRITTEN_MIB}m"));
    fio(&endpoint, &[&words[..], &[&sync, &written]].concat(), STORE_MIB)?;
    if mode == "write-back" {
        daemon.run(&["volume", "layer", "set", "volume", "cache", "--mode", "write-through"])?;
    }
    Ok(began.elapsed())
}

/// nbdkit over `file`, each of whose requests takes its time.
fn slow_store(folder: &Path, file: &Path) -> anyhow::Result<(Process, String)> {
    let (socket, log) = (folder.join("store.sock"), folder.join("store.log"));
    let words = ["-f", "-U", &path_word(&socket), "--filter=delay", "file", &path_word(file)].map(str::to_owned);
    let delays = ["rdelay", "wdelay"].map(|name| format!("{name}={STORE_DELAY_MS}ms"));
    let words: Vec<String> = words.into_iter().chain(delays).collect();
    let mut process = Process::start(Path::new("nbdkit"), &words, &log)?;
    process.wait_for(&socket, &log)?;
    Ok((process, format!("nbd+unix:///?socket={}", path_word(&socket))))
}

/// Has fio ask the first `mib` of an export.
fn fio(endpoint: &Endpoint, words: &[&str], mib: u64) -> anyhow::Result<()> {
    let fixed = ["--name=bench".to_owned(), "--ioengine=nbd".into(), format!("--uri={}", endpoint.uri())];
    let size = format!("--size={mib}m");
    let words: Vec<String> =
        fixed.into_iter().chain([size]).chain(words.iter().map(|word| (*word).to_owned())).collect();
    output_of(Path::new("fio"), &words).map(drop)
}
