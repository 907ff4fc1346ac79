//! One move of the VM and its cache under the load, and what became of the load.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};
use transhume_guest::{Qmp, Side, TwoHosts};

use super::figures::Moments;
use super::load::{AREAS, Answered, Load};
use super::path::HostPath;
use super::store::Store;
use super::watch::{Seen, Watch, cached};
use super::{CACHE, CachesBench, GUEST_MIB, VOLUME};
use crate::vm::moment::{now_unix_ms, unix_ms};
use crate::vm::place::{NAME, PATIENCE, Place};

/// The cache is warm once its hit rates over two such spans differ by less than this.
const WARM_SPAN: Duration = Duration::from_secs(8);
const WARM_DIFFERENCE: f64 = 0.01;
const WARM_LIMIT: Duration = Duration::from_secs(240);
/// What the store owes from before it was limited, and what was in flight.
const SETTLE: Duration = Duration::from_secs(5);
/// The load before the move, with which it is compared.
pub(super) const PLATEAU: Duration = Duration::from_secs(20);
/// How long the part of the source may take to be given back: a transfer ends by time after ten minutes.
const END_LIMIT: Duration = Duration::from_secs(660);
const POLL: Duration = Duration::from_millis(20);

/// The VM, its store, and where it is now.
pub(super) struct Stage<'a> {
    pub(super) bench: &'a CachesBench,
    pub(super) place: Place,
    pub(super) store: Store,
    pub(super) at: Side,
    /// How many moves there were under the load.
    pub(super) count: u32,
}

/// What was seen of one move.
pub(super) struct MoveSeen {
    pub(super) way: String,
    pub(super) from: Side,
    pub(super) moments: Moments,
    /// At the source, and at the target.
    pub(super) answered: [Vec<Answered>; 2],
    pub(super) watched: [Vec<Seen>; 2],
    /// What the daemon says of it.
    pub(super) shown: Value,
}

impl MoveSeen {
    pub(super) fn json(&self) -> Value {
        let answered =
            |of: &[Answered]| -> Vec<Value> { of.iter().map(|at| json!([at.unix_ms, at.reads, at.writes])).collect() };
        let watched = |of: &[Seen]| -> Vec<Value> { of.iter().map(Seen::json).collect() };
        json!({
            "way": self.way, "from": self.from.name(), "ordered_unix_ms": self.moments.ordered,
            "stopped_unix_ms": self.moments.stopped, "ran_unix_ms": self.moments.ran, "move": self.shown,
            "answered_unix_ms_reads_writes": self.answered.each_ref().map(|of| answered(of)),
            "watched": self.watched.each_ref().map(|of| watched(of)),
        })
    }
}

impl Stage<'_> {
    /// Where a host serves the volume: any client may connect, because no QEMU was made to give it up there.
    fn socket(&self, side: Side) -> anyhow::Result<PathBuf> {
        let api = self.place.hosts.daemon(side).api();
        Ok(api.parent().context("the API is in a folder")?.join(format!("{VOLUME}.sock")))
    }

    fn export(&self, side: Side) -> anyhow::Result<String> {
        Ok(format!("nbd+unix:///{VOLUME}?socket={}", self.socket(side)?.display()))
    }

    /// A host's path to the volume, if those are limited.
    fn path(&self, side: Side) -> anyhow::Result<Option<HostPath>> {
        let Some(reads) = self.bench.path_iops else { return Ok(None) };
        let name = format!("{}-{}", self.count, side.name());
        HostPath::start(self.socket(side)?, reads, self.place.folder(), &name).map(Some)
    }

    /// The load at one host, by its path if that is limited.
    fn load(&self, side: Side, path: Option<&HostPath>) -> anyhow::Result<Load> {
        let areas = (GUEST_MIB, self.bench.mib / AREAS);
        let name = format!("load-{}-{}-{}", self.count, side.name(), if path.is_some() { "path" } else { "export" });
        let uri = path.map_or_else(|| self.export(side), |path| Ok(path.uri(VOLUME)))?;
        Load::start(&uri, areas, self.place.folder(), &name)
    }

    /// Gives the volume a cache where it is, if it came without one.
    fn ensure_cache(&self) -> anyhow::Result<()> {
        let daemon = self.place.hosts.daemon(self.at);
        if cached(daemon).is_null() {
            let size = format!("{}MiB", self.bench.mib / 2);
            let words = ["volume", "layer", "add", VOLUME, "cache", "--cache", CACHE, "--size", &size];
            daemon.json(&[&words[..], &["--mode", "read-only", "--policy", "lru"]].concat())?;
        }
        Ok(())
    }

    /// Warms the cache, moves the VM by `way` while the load goes on where its guest runs, and compares what the volume reads as afterwards.
    pub(super) fn go(&mut self, way: &str) -> anyhow::Result<MoveSeen> {
        self.count += 1;
        self.ensure_cache()?;
        let watch = Watch::default();
        let (from, to) = (self.at, self.at.other());
        let measured = std::thread::scope(|scope| {
            let hosts = &self.place.hosts;
            let watchers = Side::BOTH.map(|side| {
                scope.spawn({
                    let watch = &watch;
                    move || watch.follow(hosts, side)
                })
            });
            let measured = self.measure(way, &watch);
            watch.end();
            for watcher in watchers {
                watcher.join().expect("it does not panic")?;
            }
            measured
        });
        let (moments, answered, shown) = measured.with_context(|| format!("{way}\n{}", self.place.logs()))?;
        self.at = to;
        self.settle(from)?;
        let watched = [from, to].map(|side| watch.of(side));
        Ok(MoveSeen { way: way.to_owned(), from, moments, answered, watched, shown })
    }

    fn measure(&self, way: &str, watch: &Watch) -> anyhow::Result<(Moments, [Vec<Answered>; 2], Value)> {
        let (from, to) = (self.at, self.at.other());
        self.store.limit(None)?;
        let mut load = self.load(from, None)?;
        self.warm(watch)?;
        self.store.limit(Some(self.bench.store_iops))?;
        let [path, path_there] = [self.path(from)?, self.path(to)?];
        if path.is_some() {
            load.stop()?;
            load.finish()?;
            load = self.load(from, path.as_ref())?;
        }
        std::thread::sleep(SETTLE + PLATEAU);
        let mut source = Qmp::connect(&self.place.folder_at(from)?.join("qmp2.sock"), PATIENCE)?;
        let ordered = now_unix_ms();
        let folder = self.place.folder_at(to)?;
        let (hosts, seconds) = (&self.place.hosts, self.bench.after_seconds());
        std::thread::scope(|scope| {
            let moving = scope.spawn(|| order(hosts, from, way, seconds));
            while !folder.join("qmp2.sock").exists() {
                ensure!(!moving.is_finished(), "the move has come to nothing: {:?}", moving.join());
                std::thread::sleep(POLL);
            }
            let mut target = Qmp::connect(&folder.join("qmp2.sock"), PATIENCE)?;
            let stopped = unix_ms(&source.wait_for_event("STOP", PATIENCE)?)?;
            // The load is the guest's: it stands still with it.
            load.stop()?;
            let ran = unix_ms(&target.wait_for_event("RESUME", PATIENCE)?)?;
            let there = self.load(to, path_there.as_ref())?;
            let before = load.finish()?;
            let shown = moving.join().expect("it does not panic")?;
            let end = Duration::from_secs(self.bench.after_seconds()).as_secs_f64() * 1e3 + ran;
            std::thread::sleep(Duration::from_secs_f64((end - now_unix_ms()).max(0.0) / 1e3));
            there.stop()?;
            let after = there.finish()?;
            Ok((Moments { ordered, stopped, ran }, [before, after], shown))
        })
    }

    /// Waits until the hit rate does not grow any more.
    fn warm(&self, watch: &Watch) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let seen = watch.of(self.at);
            let now = now_unix_ms();
            let span = WARM_SPAN.as_secs_f64() * 1e3;
            let rate = |from: f64, to: f64| hit_rate(&seen, from, to);
            let rates = [rate(now - 2.0 * span, now - span), rate(now - span, now)];
            if let [Some(before), Some(later)] = rates
                && (later - before).abs() < WARM_DIFFERENCE
                && later > 2.0 * WARM_DIFFERENCE
            {
                eprintln!("    warm after {:.0} s: {:.3} of the reads hit", began.elapsed().as_secs_f64(), later);
                return Ok(());
            }
            ensure!(began.elapsed() < WARM_LIMIT, "the cache does not get warm: {rates:?}");
        }
    }

    /// Waits until the transfer is over, and checks the guest's part of the disk and all of the volume.
    fn settle(&mut self, from: Side) -> anyhow::Result<()> {
        self.store.limit(None)?;
        let end = Instant::now() + END_LIMIT;
        let parts = |side| -> anyhow::Result<usize> {
            let shown = self.place.hosts.daemon(side).json(&["cache", "show", CACHE])?;
            Ok(shown["partitions"].as_array().map_or(0, Vec::len))
        };
        while parts(from)? > 0 {
            if Instant::now() > end {
                let cached = cached(self.place.hosts.daemon(self.at));
                bail!("the part of the source is not given back: {cached}\n{}", self.place.logs());
            }
            std::thread::sleep(POLL);
        }
        let folder = self.place.folder_at(self.at)?;
        self.place.guest.leave();
        self.place.guest.follow(&folder)?;
        self.place.verify()?;
        self.store.compare(&self.export(self.at)?)
    }
}

/// Of the reads between two moments, the share that hit; `None` if that was not seen.
pub(super) fn hit_rate(seen: &[Seen], from: f64, to: f64) -> Option<f64> {
    let first = seen.iter().find(|seen| seen.unix_ms >= from)?;
    let before = seen.first().is_some_and(|seen| seen.unix_ms <= from);
    let last = seen.iter().rev().find(|seen| seen.unix_ms <= to)?;
    let (hits, misses) = (last.hits.checked_sub(first.hits)?, last.misses.checked_sub(first.misses)?);
    (before && hits + misses > 0).then(|| hits as f64 / (hits + misses) as f64)
}

/// Orders the move of the VM from one host to the other, and waits for it. What is only read when it is asked for comes for so many seconds.
fn order(hosts: &TwoHosts, from: Side, way: &str, seconds: u64) -> anyhow::Result<Value> {
    let (to, time) = (from.other(), format!("{seconds}s"));
    let words =
        ["vm", "move", NAME, "--to", to.name(), "--verify", "off", "--cache-transfer", way, "--cache-at", CACHE];
    let limit = if way == "remote-read" { vec!["--cache-time", &time] } else { Vec::new() };
    let shown = hosts.daemon(from).json(&[&words[..], &limit[..]].concat())?;
    ensure!(shown["state"] == "done", "the move has come to nothing: {shown}");
    Ok(shown)
}

/// Puts the VM's disk on the store and moves the VM to the other host: there any client may connect to the volume.
pub(super) fn set_up<'a>(bench: &'a CachesBench, memory: &Path) -> anyhow::Result<Stage<'a>> {
    let place = bench.place(memory)?;
    let store = Store::start(&place, bench.disk_bytes())?;
    place.add()?;
    place.adopt()?;
    let a = place.hosts.daemon(Side::A);
    a.json(&[
        "move",
        VOLUME,
        "--to",
        &super::store::uri(),
        "--no-persist",
        "--overwrite",
        "--verify",
        "off",
        "--delete-source",
    ])?;
    for side in Side::BOTH {
        let store = place.folder().join(format!("flash-{}", side.name()));
        let store = format!("file:{},size={}MiB", store.display(), bench.mib);
        place.hosts.daemon(side).json(&["cache", "create", CACHE, "--store", &store, "--policy", "lru"])?;
    }
    let mut stage = Stage { bench, place, store, at: Side::A, count: 0 };
    let moved = order(&stage.place.hosts, Side::A, "none", bench.after_seconds())?;
    eprintln!("  the VM is on the store and at host b, after {} ms", moved["elapsed_ms"]);
    stage.at = Side::B;
    let folder = stage.place.folder_at(Side::B)?;
    stage.place.guest.leave();
    stage.place.guest.follow(&folder)?;
    stage.place.verify()?;
    Ok(stage)
}
