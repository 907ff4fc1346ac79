//! The rounds of a copy: what each sends, and what comes after it.
//!
//! ```text
//!   new ─▶ connect ─▶ converge ─ rounds while the guest runs ─▶ (the guest is stopped) ─▶ finish ─▶ (devices) ─▶ verify_clean
//!             ▲           │                                                                │
//!             └───────────┴── a stream has failed: nothing that was not confirmed is lost ─┘
//! ```

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use env::{EnvRef, Moment, random_id, spawn_with_result};
use futures::future::{join_all, try_join_all};

use super::cutter::Round;
use super::encoder::Compression;
use super::hot_pages::HotPages;
use super::pace::Pace;
use super::progress::{Counters, Progress};
use super::stop_rules::{Decision, Judge, RoundResult, StopReason, StopRules};
use super::stream::{Lane, Shared, Stream};
use super::version_cache::VersionCache;
use crate::dirty_map::{DirtyMap, PageRun};
use crate::error::{Error, ErrorKind, Result};
use crate::guest_memory::GuestMemory;
use crate::region::Region;
use crate::wire::{FrameKind, Hello, STREAMS_MAX};

/// While little is written, so long is waited between two rounds that keep up with the guest.
const REST: Duration = Duration::from_millis(2);
/// A scan after the stop that still finds something is followed by so many more.
const SCANS_AFTER_STOP: u32 = 4;
/// Hot pages may take this part of the downtime limit.
const HOT_SHARE: f64 = 0.25;
/// A rate is told from rounds that have sent at least so many pages.
const RATE_PAGES_MIN: u64 = 256;

/// How a memory is copied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrecopyOptions {
    /// When the guest may be stopped.
    pub rules: StopRules,
    /// Whether pages are made shorter.
    pub compression: Compression,
    /// How many bytes of versions that were sent last are kept.
    pub version_cache_bytes: usize,
    /// Whether pages that change all the time wait for the last round.
    pub defers_hot_pages: bool,
}

impl Default for PrecopyOptions {
    fn default() -> Self {
        Self {
            rules: StopRules::default(),
            compression: Compression::Auto,
            version_cache_bytes: 32 << 20,
            defers_hot_pages: true,
        }
    }
}

/// A copy of a guest's memory.
pub struct Precopy {
    env: EnvRef,
    shared: Arc<Shared>,
    options: PrecopyOptions,
    session: [u8; 16],
    generation: u64,
    /// What is to be sent.
    pending: DirtyMap,
    /// What is to be sent and waits for the last round.
    deferred: DirtyMap,
    /// What was written since the last scan, before it is added to `pending`.
    fresh: DirtyMap,
    hot: HotPages,
    judge: Judge,
    streams: Vec<Stream>,
    /// Pages whose round was left before its end.
    unfinished: Option<Arc<Round>>,
    round: u32,
    scanned: Option<Moment>,
    scans: u64,
    pages_per_second: f64,
}

impl Precopy {
    /// Begins a copy of `memory`: from here on the dirty log tells what was written. Everything is to be sent.
    ///
    /// # Errors
    /// The dirty log does not work.
    pub fn new(
        env: EnvRef,
        memory: Arc<dyn GuestMemory>,
        options: PrecopyOptions,
        (session, pace): ([u8; 16], Arc<dyn Pace>),
    ) -> Result<Self> {
        let regions = memory.regions().to_vec();
        let counters = Arc::new(Counters::default());
        counters.total_pages.store(regions.iter().map(Region::pages).sum(), Ordering::Relaxed);
        let versions = VersionCache::new(options.version_cache_bytes);
        let hot = HotPages::new(&regions, || env.random());
        let mut fresh = DirtyMap::new(&regions);
        memory.take_dirty(&mut fresh)?;
        fresh.clear();
        let mut pending = DirtyMap::new(&regions);
        pending.insert_all();
        let shared = Shared { memory, versions, counters, pace, compression: options.compression };
        let this = Self {
            shared: Arc::new(shared),
            session,
            generation: 0,
            deferred: DirtyMap::new(&regions),
            pending,
            fresh,
            hot,
            judge: Judge::new(options.rules),
            streams: Vec::new(),
            unfinished: None,
            round: 0,
            scanned: None,
            scans: 0,
            pages_per_second: 0.0,
            env,
            options,
        };
        this.show();
        Ok(this)
    }

    /// A number that no other copy has.
    #[must_use]
    pub fn session_id(env: &EnvRef) -> [u8; 16] {
        random_id(&**env)
    }

    /// How it stands, for whoever looks while it runs.
    pub fn watch(&self) -> impl Fn() -> Progress + Send + Sync + use<> {
        let counters = Arc::clone(&self.shared.counters);
        move || counters.look()
    }

    /// How much memory the engine takes at most beside the guest's, with so many streams, in bytes.
    #[must_use]
    pub fn memory_bytes(&self, streams: usize) -> usize {
        // The maps of a round, of what is pending, deferred and fresh.
        let maps = self.pending.memory_bytes() * 4;
        let pages: u64 = self.shared.memory.regions().iter().map(Region::pages).sum();
        let sketch =
            (pages / 8).next_power_of_two().clamp(1 << 10, filters::COUNTERS_MAX) as usize * filters::STAGES * 2;
        maps + sketch + self.options.version_cache_bytes + streams * super::stream::CONSUMER_BYTES
    }

    /// Has streams over `lanes`, instead of those that there were.
    ///
    /// # Errors
    /// One cannot be opened.
    pub async fn connect(&mut self, lanes: Vec<Lane>) -> Result<()> {
        let streams = u16::try_from(lanes.len()).ok().filter(|count| (1..=STREAMS_MAX).contains(count));
        let streams = streams.ok_or_else(|| Error::new(ErrorKind::Invalid, format!("{} streams", lanes.len())))?;
        self.streams.clear();
        self.recover();
        // What the target has of older versions is not known for sure any more.
        self.shared.versions.clear();
        self.generation += 1;
        let hello = |stream| Hello {
            session: self.session,
            generation: self.generation,
            stream,
            streams,
            regions: self.shared.memory.regions().to_vec(),
        };
        let opening = (0..).zip(lanes).map(|(stream, lane)| {
            let hello = hello(stream);
            async move { Stream::open(lane, &hello).await }
        });
        self.streams = try_join_all(opening).await?;
        Ok(())
    }

    /// Sends rounds while the guest runs, until a rule says that it can be stopped. Called again after [`connect`](Self::connect) if a
    /// stream has failed.
    ///
    /// # Errors
    /// `Disconnected`; what the target or the dirty log says.
    pub async fn converge(&mut self) -> Result<StopReason> {
        loop {
            self.live_round().await?;
            self.scan()?;
            let decision = self.judge.after(&self.result());
            self.show();
            if let Decision::Stop(reason) = decision {
                return Ok(reason);
            }
        }
    }

    /// Sends further rounds, so that little is left when the guest is stopped, until `is_stopped`.
    ///
    /// # Errors
    /// As [`converge`](Self::converge).
    pub async fn keep_up(&mut self, is_stopped: impl Fn() -> bool + Send + Sync) -> Result<()> {
        while !is_stopped() {
            self.scan()?;
            if self.pending.is_empty() {
                self.env.sleep(REST).await;
            } else {
                self.live_round().await?;
            }
        }
        Ok(())
    }

    /// Sends all that is left. The guest is stopped, and nobody writes to its memory. The target has all of it afterwards.
    ///
    /// # Errors
    /// As [`converge`](Self::converge); `DirtyAfterStop` if somebody goes on writing.
    pub async fn finish(&mut self) -> Result<()> {
        self.scan()?;
        let deferred = std::mem::replace(&mut self.deferred, DirtyMap::new(self.shared.memory.regions()));
        self.pending.merge(&deferred);
        for _ in 0..=SCANS_AFTER_STOP {
            self.send_round(FrameKind::End).await?;
            self.scan()?;
            if self.pending.is_empty() {
                return Ok(());
            }
        }
        let context = "the memory goes on changing although the guest is stopped";
        Err(Error::new(ErrorKind::DirtyAfterStop, context))
    }

    /// Looks once more, after the devices were saved: nothing may have been written since [`finish`](Self::finish).
    ///
    /// # Errors
    /// `DirtyAfterStop`: what the target has is not what the guest had. What the dirty log says.
    pub fn verify_clean(&mut self) -> Result<()> {
        self.scan()?;
        let Some(first) = self.pending.next_run(0, 0, 1) else { return Ok(()) };
        let name = &self.shared.memory.regions()[first.region].name;
        let context = format!(
            "{} pages were written after the guest was stopped, the first is {} of {name}",
            self.pending.count(),
            first.page
        );
        Err(Error::new(ErrorKind::DirtyAfterStop, context))
    }

    /// How often the dirty log was read. Whoever asks the guest for free pages remembers it from before.
    #[must_use]
    pub const fn scans(&self) -> u64 {
        self.scans
    }

    /// Leaves pages out that the guest does not use, as it has said since the scan number `since`. Says whether that counts: a page
    /// that was written before a newer scan may be in use again.
    pub fn report_free(&mut self, since: u64, pages: &[PageRun]) -> bool {
        if since != self.scans {
            return false;
        }
        for run in pages {
            self.pending.remove(*run);
            self.deferred.remove(*run);
        }
        self.show();
        true
    }

    async fn live_round(&mut self) -> Result<()> {
        if self.options.defers_hot_pages {
            let deferred = std::mem::replace(&mut self.deferred, DirtyMap::new(self.shared.memory.regions()));
            self.pending.merge(&deferred);
            let seconds = self.options.rules.downtime_limit.as_secs_f64() * HOT_SHARE;
            let most = (self.pages_per_second * seconds) as u64;
            self.hot.defer(&mut self.pending, &mut self.deferred, most);
            self.shared.counters.deferred_pages.store(self.deferred.count(), Ordering::Relaxed);
        }
        self.send_round(FrameKind::Barrier).await
    }

    /// Sends what is pending over all streams, and waits until it is confirmed.
    async fn send_round(&mut self, kind: FrameKind) -> Result<()> {
        if self.streams.is_empty() {
            return Err(Error::new(ErrorKind::Disconnected, "the memory has no streams"));
        }
        self.recover();
        self.round += 1;
        self.shared.counters.rounds.store(self.round.into(), Ordering::Relaxed);
        let began = self.env.now();
        let before = self.shared.counters.look();
        let map = std::mem::replace(&mut self.pending, DirtyMap::new(self.shared.memory.regions()));
        let round = Arc::new(Round::new(self.round, Arc::clone(&self.shared.memory), map));
        self.unfinished = Some(Arc::clone(&round));
        let guard = EndsRound(Arc::clone(&round));
        let working = std::mem::take(&mut self.streams).into_iter().map(|stream| {
            let env = EnvRef::clone(&stream.env);
            spawn_with_result(&*env, stream.send_round(Arc::clone(&round), Arc::clone(&self.shared), kind))
        });
        let mut failed = None;
        let mut streams = Vec::new();
        for worked in join_all(working).await {
            match worked {
                Ok((stream, Ok(()))) => streams.push(stream),
                Ok((_, Err(error))) => failed = worse(failed, error),
                Err(_) => {
                    // What it had is not known any more.
                    self.pending.insert_all();
                    failed = worse(failed, Error::new(ErrorKind::Disconnected, "a worker has ended"));
                }
            }
        }
        drop(guard);
        drop(round);
        if let Some(error) = failed {
            self.recover();
            return Err(error);
        }
        self.unfinished = None;
        self.streams = streams;
        let sent = self.shared.counters.look();
        let pages = sent.data_pages + sent.delta_pages - before.data_pages - before.delta_pages;
        let seconds = self.env.now().since(began).as_secs_f64();
        let rate = pages as f64 / seconds.max(1e-6);
        // A short round tells no more than that it was no slower.
        self.pages_per_second = if pages >= RATE_PAGES_MIN { rate } else { self.pages_per_second.max(rate) };
        Ok(())
    }

    /// Takes back what a round that was not finished has left.
    fn recover(&mut self) -> bool {
        let Some(round) = self.unfinished.take() else { return false };
        round.end();
        // Consumers that still have a task may give it back too late: with them nothing is known for sure.
        if Arc::strong_count(&round) > 1 {
            self.pending.insert_all();
        }
        round.take_left(&mut self.pending);
        true
    }

    /// Adds what was written since the last time to what is pending.
    fn scan(&mut self) -> Result<()> {
        let began = self.env.now();
        self.fresh.clear();
        self.shared.memory.take_dirty(&mut self.fresh)?;
        let now = self.env.now();
        self.scans += 1;
        let counters = &self.shared.counters;
        counters.scan_nanoseconds.store(now.since(began).as_nanos() as u64, Ordering::Relaxed);
        if let Some(scanned) = self.scanned {
            let seconds = now.since(scanned).as_secs_f64().max(1e-3);
            counters.dirty_pages_per_second.store((self.fresh.count() as f64 / seconds) as u64, Ordering::Relaxed);
        }
        self.scanned = Some(now);
        if self.options.defers_hot_pages {
            self.hot.note(&self.fresh);
        }
        self.pending.merge(&self.fresh);
        self.show();
        Ok(())
    }

    fn result(&self) -> RoundResult {
        let progress = self.shared.counters.look();
        RoundResult {
            left_pages: self.pending.count() + self.deferred.count(),
            pages_per_second: self.pages_per_second,
            sent_pages: progress.data_pages + progress.delta_pages,
            total_pages: progress.total_pages,
        }
    }

    fn show(&self) {
        let left = self.pending.count() + self.deferred.count();
        self.shared.counters.left_pages.store(left, Ordering::Relaxed);
    }
}

/// Has consumers of a round end that nobody waits for any more.
struct EndsRound(Arc<Round>);

impl Drop for EndsRound {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// What is told of two errors: a lost connection may be only the consequence of the other.
fn worse(one: Option<Error>, other: Error) -> Option<Error> {
    match one {
        Some(one) if one.kind() != ErrorKind::Disconnected => Some(one),
        _ => Some(other),
    }
}
