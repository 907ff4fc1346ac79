//! Guests: loads that know what they wrote and check what they read.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use block::{BufferPool, Bytes, Extent, Mutation, Result};
use env::Moment;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::disk::Disk;
use crate::failures::{EVERYTHING, Failures, Verb};
use crate::medium::SECTOR_BYTES;
use crate::occurrence::Occurrence;
use crate::pattern::{self, Content};
use crate::port::Port;
use crate::register_history::RegisterHistory;
use crate::rng::Rng;
use crate::world::{Invariant, World};

/// Where a load goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Anywhere.
    Uniform,
    /// Nine of ten requests within this many sectors at one place.
    Hot(u64),
    /// From the start to the end, again and again.
    Sequential,
}

/// What a guest does.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// How many requests it makes.
    pub requests: u64,
    /// How many it has outstanding at most.
    pub outstanding: u64,
    /// Which part of them reads.
    pub reads: f64,
    /// Which part flushes.
    pub flushes: f64,
    /// Which part of the writes are zeroes.
    pub zeroes: f64,
    /// Which part of the writes are discards.
    pub discards: f64,
    /// Which part of the writes is durable when answered.
    pub fua: f64,
    /// The longest request in sectors.
    pub sectors_max: u64,
    /// Where it goes.
    pub pattern: Pattern,
    /// Offsets and lengths are multiples of this many sectors.
    pub granule: u64,
    /// It waits up to this between two requests of one of its workers.
    pub think: Duration,
    /// It goes on until the volume has moved, however many requests that takes.
    pub endless: bool,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            requests: 2000,
            outstanding: 8,
            reads: 0.5,
            flushes: 0.02,
            zeroes: 0.06,
            discards: 0.04,
            fua: 0.05,
            sectors_max: 64,
            pattern: Pattern::Uniform,
            granule: 1,
            think: Duration::from_micros(300),
            endless: false,
        }
    }
}

/// A guest. Clones are the same guest.
#[derive(Clone)]
pub struct Guest {
    shared: Arc<Shared>,
}

struct Shared {
    world: World,
    name: &'static str,
    rng: Rng,
    port: Port,
    pool: BufferPool,
    load: Load,
    history: Mutex<RegisterHistory>,
    asked: AtomicU64,
    /// The volume has moved: an endless guest comes to its end.
    is_over: AtomicBool,
    answered: AtomicU64,
    errors: AtomicU64,
    cursor: AtomicU64,
    /// What of its disk has failed.
    failures: Failures,
    flushes: Mutex<Flushes>,
    longest: Mutex<Duration>,
    waits: Mutex<Waits>,
    /// A write was asked, or answered.
    wrote: Notify,
    workers: Mutex<Vec<JoinHandle<()>>>,
}

/// Flushes: when those were asked that are not answered, and when the newest was that is.
#[derive(Default)]
struct Flushes {
    begun: u64,
    open: BTreeMap<u64, Moment>,
    answered: Moment,
    /// When the newest was asked that has failed, and how many connections there were when that was told.
    failed: Option<(Moment, usize)>,
}

/// Requests of the workers: those that are not answered, and those that took long.
#[derive(Default)]
struct Waits {
    begun: u64,
    ended: u64,
    open: BTreeMap<u64, Moment>,
    slow: Vec<(Moment, Duration)>,
}

/// So often a part of the disk is read when all of it is looked at.
const READ_TRIES_MAX: u32 = 20;
/// So often the disk is flushed at the end.
const FLUSH_TRIES_MAX: u32 = 3;

/// A request that takes longer is remembered.
const SLOW: Duration = Duration::from_millis(100);

/// How far a guest's workers have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestProgress {
    /// So many requests they have begun,
    pub begun: u64,
    /// and of those so many were answered.
    pub ended: u64,
}

impl GuestProgress {
    /// How many requests were waiting at `before` or begun since, and how many of those were answered.
    #[must_use]
    pub const fn since(&self, before: &Self) -> (u64, u64) {
        (self.begun - before.ended, self.ended - before.ended)
    }
}

/// What a guest has to say at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestReport {
    /// Requests answered.
    pub answered: u64,
    /// Of those, the ones that failed.
    pub errors: u64,
    /// The longest of them.
    pub longest: Duration,
}

impl Guest {
    /// A guest with a disk behind `port` whose contents are known to `history`. No request of it may fail.
    #[must_use]
    pub fn new(world: &World, port: &Port, load: Load, history: RegisterHistory) -> Self {
        Self::excusing(world, "guest", port, (load, history), Failures::default())
    }

    /// The same of `name`, whose requests may fail as `failures` say.
    #[must_use]
    pub(crate) fn excusing(
        world: &World,
        name: &'static str,
        port: &Port,
        (load, history): (Load, RegisterHistory),
        failures: Failures,
    ) -> Self {
        let shared = Shared {
            world: world.clone(),
            name,
            rng: world.rng(name),
            port: port.clone(),
            pool: BufferPool::new(Bytes::mib(64)),
            load,
            history: Mutex::new(history),
            asked: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            answered: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            cursor: AtomicU64::new(0),
            failures,
            flushes: Mutex::default(),
            longest: Mutex::default(),
            waits: Mutex::default(),
            wrote: Notify::new(),
            workers: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// What it knows of its disk.
    pub fn history(&self) -> MutexGuard<'_, RegisterHistory> {
        self.shared.history.lock()
    }

    /// Starts its workers.
    pub fn start(&self) {
        let mut workers = self.shared.workers.lock();
        for _ in 0..self.shared.load.outstanding {
            let guest = self.clone();
            workers.push(self.shared.world.spawn(async move { guest.work().await }));
        }
    }

    /// Tells it that the volume has moved.
    pub fn let_end(&self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
    }

    /// Waits until it has made all its requests.
    pub async fn finish(&self) {
        loop {
            let worker = self.shared.workers.lock().pop();
            let Some(worker) = worker else { return };
            // A worker that was aborted by a power loss has been replaced by another, and one that panicked has said so.
            let _ = worker.await;
        }
    }

    /// Its host has lost its power.
    pub async fn lose_power(&self) {
        let workers = std::mem::take(&mut *self.shared.workers.lock());
        workers.iter().for_each(JoinHandle::abort);
        for worker in workers {
            // It was aborted, or has said that it panicked.
            let _ = worker.await;
        }
        // Nobody will answer those.
        let mut waits = self.shared.waits.lock();
        waits.ended = waits.begun;
        waits.open.clear();
        drop(waits);
        self.shared.flushes.lock().open.clear();
        self.history().lose_power();
    }

    /// How far its workers have come.
    #[must_use]
    pub fn progress(&self) -> GuestProgress {
        let waits = self.shared.waits.lock();
        GuestProgress { begun: waits.begun, ended: waits.ended }
    }

    /// Requests of its workers that are not answered, and those that took more than 100 ms: when each was asked, and how long
    /// it took.
    #[must_use]
    pub fn waits(&self) -> Vec<(Moment, Option<Duration>)> {
        let waits = self.shared.waits.lock();
        let slow = waits.slow.iter().map(|(asked, took)| (*asked, Some(*took)));
        slow.chain(waits.open.values().map(|asked| (*asked, None))).collect()
    }

    /// Somebody writes to a few places of `disk`, which holds it, while nobody serves it: durably.
    pub(crate) fn change_behind(&self, disk: &Disk) {
        for _ in 0..self.shared.rng.within(1..=4) {
            let sectors = self.choose();
            let mut history = self.history();
            let bytes = history.bytes_of(&sectors);
            let number = history.next_write();
            let mut content = vec![0; (bytes.end - bytes.start) as usize];
            pattern::fill(number, sectors.start, &mut content);
            self.shared.world.fault("changed-behind", format_args!("write {number} of sectors {sectors:?}"));
            let ticket = history.ask_write(sectors, Content::Written(number), false);
            disk.fill(Bytes(bytes.start), &content);
            history.write_done(&ticket, true);
        }
    }

    /// A process that has served it has ended.
    pub(crate) fn note_end_of_process(&self) {
        self.history().take_back();
    }

    /// Waits until a write of it is asked or answered.
    pub async fn wrote(&self) {
        self.shared.wrote.notified().await;
    }

    /// What it has seen.
    #[must_use]
    pub fn report(&self) -> GuestReport {
        let shared = &self.shared;
        GuestReport {
            answered: shared.answered.load(Ordering::Relaxed),
            errors: shared.errors.load(Ordering::Relaxed),
            longest: *shared.longest.lock(),
        }
    }

    /// Reads all of its disk and checks it.
    pub async fn read_all(&self) {
        let count = self.history().sector_count();
        let mut first = 0;
        while first < count {
            let last = (first + 256).min(count);
            // A read that fails where it may is tried again: the disk has to be looked at.
            let mut tries = 1;
            while !self.read(first..last).await {
                if tries == READ_TRIES_MAX {
                    let what = format!("sectors {first}..{last} cannot be read: {tries} reads of them have failed");
                    self.shared.world.violate(Invariant::Converges, what);
                    return;
                }
                if self.shared.world.absences().now == 0 {
                    tries += 1;
                }
                // A disk that is lost comes back within 10 ms.
                self.shared.world.sleep(Duration::from_millis(1)).await;
            }
            first = last;
        }
    }

    /// Flushes its disk, until that succeeds: the first time it may be told of a flush that has failed before.
    pub async fn flush_at_last(&self) {
        for _ in 0..FLUSH_TRIES_MAX {
            if self.flush().await {
                return;
            }
        }
        let what = format!("nothing is wrong any more, and {FLUSH_TRIES_MAX} flushes have failed");
        self.shared.world.violate(Invariant::Converges, what);
    }

    /// Flushes its disk. True if that succeeded.
    pub async fn flush(&self) -> bool {
        let ticket = self.history().ask_flush();
        let (number, since) = self.begin_flush();
        let first = Mutex::new(None);
        let answer = self.shared.port.request(|device| {
            let count = ["crash", "flush-error"].map(|class| self.shared.world.count(class));
            // Asked again for the third time or more, it may have failed the first time, and the news of that have died later.
            let first = *first.lock().get_or_insert(count);
            if first[0] < count[0] && first[1] < count[1] {
                self.history().flush_lost();
            }
            Box::pin(async move { device.flush().await })
        });
        let answer = answer.await;
        self.end_flush(number, answer.is_err());
        self.note("flush", (Verb::Flush, EVERYTHING), since, &answer);
        self.shared.world.event(format_args!("{} flush answered", self.shared.name));
        match answer.is_ok() || self.shared.failures.has_lost() {
            true => self.history().flush_done(&ticket, answer.is_ok()),
            false => self.history().flush_refused(&ticket),
        }
        answer.is_ok()
    }

    async fn work(&self) {
        let (load, rng) = (&self.shared.load, &self.shared.rng);
        while self.goes_on() {
            self.shared.world.sleep(rng.up_to(load.think)).await;
            let began = self.shared.world.now();
            let number = self.begin_request(began);
            if rng.chance(load.flushes) {
                self.flush().await;
            } else if rng.chance(load.reads) {
                self.read(self.choose()).await;
            } else {
                self.write(self.choose()).await;
            }
            let took = self.shared.world.now() - began;
            self.end_request(number, began, took);
            let mut longest = self.shared.longest.lock();
            *longest = took.max(*longest);
        }
    }

    /// Its number, and the moment since which failed flushes of the disk may be reported to it. If the answer of a
    /// failed flush was lost with a connection, whoever asks next gets it. The server cannot know whether an answer was
    /// lost, so the next connection gets it in any case.
    fn begin_flush(&self) -> (u64, Moment) {
        let mut flushes = self.shared.flushes.lock();
        let now = self.shared.world.now();
        let oldest = flushes.open.values().next().copied().unwrap_or(now);
        let connections = self.shared.port.connections();
        let told_again = flushes.failed.filter(|(_, before)| *before < connections).map(|(asked, _)| asked);
        let since = oldest.min(flushes.answered).min(told_again.unwrap_or(now));
        flushes.begun += 1;
        let number = flushes.begun;
        flushes.open.insert(number, now);
        (number, since)
    }

    fn end_flush(&self, number: u64, has_failed: bool) {
        let mut flushes = self.shared.flushes.lock();
        if let Some(asked) = flushes.open.remove(&number) {
            flushes.answered = flushes.answered.max(asked);
            if has_failed {
                flushes.failed = Some((asked, self.shared.port.connections()));
            }
        }
    }

    fn begin_request(&self, now: Moment) -> u64 {
        let mut waits = self.shared.waits.lock();
        waits.begun += 1;
        let number = waits.begun;
        waits.open.insert(number, now);
        number
    }

    fn end_request(&self, number: u64, began: Moment, took: Duration) {
        let mut waits = self.shared.waits.lock();
        waits.ended += 1;
        waits.open.remove(&number);
        if took > SLOW {
            waits.slow.push((began, took));
        }
    }

    fn goes_on(&self) -> bool {
        let asked = self.shared.asked.fetch_add(1, Ordering::Relaxed);
        asked < self.shared.load.requests || (self.shared.load.endless && !self.shared.is_over.load(Ordering::Relaxed))
    }

    fn choose(&self) -> std::ops::Range<u64> {
        let (load, rng) = (&self.shared.load, &self.shared.rng);
        let count = self.history().sector_count();
        let granules = count.div_ceil(load.granule);
        let longest = (load.sectors_max / load.granule).clamp(1, granules);
        // Short requests are the most common ones.
        let length = rng.within(1..=rng.within(1..=longest));
        let last_start = granules - length;
        let start = match load.pattern {
            Pattern::Uniform => rng.within(0..=last_start),
            Pattern::Hot(sectors) if rng.chance(0.9) => {
                let place = granules / 3;
                (place + rng.below((sectors / load.granule).max(1))).min(last_start)
            }
            Pattern::Hot(_) => rng.within(0..=last_start),
            Pattern::Sequential => {
                let next = self.shared.cursor.fetch_add(length, Ordering::Relaxed);
                if next > last_start {
                    self.shared.cursor.store(length, Ordering::Relaxed);
                    0
                } else {
                    next
                }
            }
        };
        start * load.granule..((start + length) * load.granule).min(count)
    }

    async fn read(&self, sectors: std::ops::Range<u64>) -> bool {
        let bytes = self.history().bytes_of(&sectors);
        let ticket = self.history().ask_read(sectors.clone());
        let (extent, since) = (Extent::between(Bytes(bytes.start), Bytes(bytes.end)), self.shared.world.now());
        let pool = &self.shared.pool;
        let answer = self.shared.port.request(|device| {
            let (pool, bytes) = (pool.clone(), bytes.clone());
            Box::pin(async move {
                let buffer = pool.acquire((bytes.end - bytes.start) as usize).await;
                device.read(Bytes(bytes.start), buffer).await
            })
        });
        let answer = answer.await;
        self.note("read", (Verb::Read, extent), since, &answer);
        self.shared.world.event(format_args!("{} read of sectors {sectors:?} answered", self.shared.name));
        let mut history = self.history();
        match answer {
            Ok(buffer) => {
                if let Err(violation) = history.read_done(&ticket, &buffer) {
                    self.shared.world.violate(violation.invariant, violation.what);
                }
                true
            }
            Err(_) => {
                history.read_failed(&ticket);
                false
            }
        }
    }

    async fn write(&self, sectors: std::ops::Range<u64>) {
        let (load, rng) = (&self.shared.load, &self.shared.rng);
        let bytes = self.history().bytes_of(&sectors);
        let extent = Extent::between(Bytes(bytes.start), Bytes(bytes.end));
        let fua = rng.chance(load.fua);
        let (zeroes, discard, may_unmap) = (rng.chance(load.zeroes), rng.chance(load.discards), rng.chance(0.5));
        let (mutation, ticket) = if discard {
            self.shared.world.event(format_args!("{} discard of sectors {sectors:?}", self.shared.name));
            let ticket = self.history().ask_write(sectors, Content::Zero, true);
            (Mutation::discard(extent), ticket)
        } else if zeroes {
            self.shared.world.event(format_args!("{} zeroes of sectors {sectors:?}", self.shared.name));
            let ticket = self.history().ask_write(sectors, Content::Zero, false);
            (Mutation::zeroes(extent, may_unmap), ticket)
        } else {
            let mut buffer = self.shared.pool.acquire(extent.length.as_usize()).await;
            let mut history = self.history();
            let number = history.next_write();
            pattern::fill(number, bytes.start / SECTOR_BYTES, &mut buffer);
            let ticket = history.ask_write(sectors.clone(), Content::Written(number), false);
            self.shared.world.event(format_args!("{} write {number} of sectors {sectors:?}", self.shared.name));
            (Mutation::data(extent.offset, buffer.freeze()), ticket)
        };
        let mutation = mutation.with_fua(fua);
        self.shared.wrote.notify_waiters();
        let since = self.shared.world.now();
        let again = AtomicBool::new(false);
        let answer = self.shared.port.request(|device| {
            if again.swap(true, Ordering::Relaxed) {
                self.history().ask_again(&ticket);
            }
            let mutation = mutation.clone();
            Box::pin(async move { device.write(mutation).await })
        });
        let answer = answer.await;
        // A forced write is a write and a flush: it fails for what a flush fails for.
        let is_flush_failed = mutation.fua && self.shared.failures.explain(Verb::Flush, EVERYTHING, since);
        let cause = if is_flush_failed { (Verb::Flush, EVERYTHING) } else { (Verb::Write, extent) };
        self.note("write", cause, since, &answer);
        self.shared.world.event(format_args!("{} write to {extent:?} answered", self.shared.name));
        match answer {
            Ok(()) => self.history().write_done(&ticket, fua),
            Err(_) => self.history().write_failed(&ticket),
        }
        self.shared.wrote.notify_waiters();
    }

    /// What was asked at `since` is answered.
    fn note<T>(&self, what: &str, (verb, extent): (Verb, Extent), since: Moment, answer: &Result<T>) {
        self.shared.answered.fetch_add(1, Ordering::Relaxed);
        let Err(error) = answer else { return };
        self.shared.errors.fetch_add(1, Ordering::Relaxed);
        self.shared.world.event(format_args!("{} {what} failed: {}", self.shared.name, error.chain()));
        self.shared.world.occur(Occurrence::Told("a failure"));
        if !self.shared.failures.explain(verb, extent, since) {
            let what = format!("a guest's {what} failed though its disk did not: {}", error.chain());
            self.shared.world.violate(Invariant::CancelSafe, what);
        }
    }
}
