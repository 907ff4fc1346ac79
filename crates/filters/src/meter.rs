//! What passes and how long it takes: what the guest feels.
//!
//! Every connection has a [`Meter`] with counters of its own, which only the connection's worker changes; the volume's
//! [`MeterState`] adds them up when somebody asks. A request costs two looks at the clock and a few additions without a
//! locked instruction.
//!
//! A volume's [`RateLimit`] stands before its meters. A request that waits for it has not begun. So the wait is neither
//! the guest's latency nor a request in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use block::{BlockDevice, Buffer, Bytes, Extent, ExtentStatus, Geometry, IoFuture, Mutation, MutationKind, SlotLane};
use crossbeam_utils::CachePadded;
use env::{EnvRef, Moment, Task};
use parking_lot::Mutex;

use crate::histogram::{AtomicHistogram, bump};
use crate::{LatencyHistogram, RateLimit};

/// How many requests in flight a connection can tell apart; the age of further ones is not watched.
const WATCHED: usize = 128;

/// The meters of one volume, over all its connections, those gone included.
#[derive(Clone)]
pub struct MeterState {
    shared: Arc<Shared>,
}

struct Shared {
    env: EnvRef,
    limit: RateLimit,
    lanes: Mutex<Vec<Arc<Lane>>>,
    /// What connections that are gone have counted.
    gone: Mutex<MeterSnapshot>,
    /// The longest request that a connection now gone answered since the stall was last watched, in nanoseconds.
    gone_longest_ns: AtomicU64,
}

/// The counters of one connection.
struct Lane {
    read: Direction,
    write: Direction,
    flush: Direction,
    /// When each watched request began, in nanoseconds of the clock plus one; zero where there is none.
    began: Box<[AtomicU64]>,
    /// Where to look first for a free place in `began`.
    hint: CachePadded<AtomicU64>,
    /// The longest request answered since this was last taken, in nanoseconds.
    longest_ns: AtomicU64,
}

struct Direction {
    bytes: AtomicU64,
    errors: AtomicU64,
    latency: AtomicHistogram,
}

/// All that was counted up to one moment.
#[derive(Clone, Debug, Default)]
pub struct MeterSnapshot {
    /// When.
    pub at: Moment,
    /// Reads.
    pub read: DirectionWindow,
    /// Mutations of every kind.
    pub write: DirectionWindow,
    /// Flushes.
    pub flush: DirectionWindow,
    /// How many requests are in flight, held ones included.
    pub in_flight: u64,
}

/// What was counted for one kind of request.
#[derive(Clone, Debug, Default)]
pub struct DirectionWindow {
    /// Bytes asked for.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// How long each took, failed ones included.
    pub latency: LatencyHistogram,
}

impl DirectionWindow {
    /// How many requests were answered.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.latency.count()
    }

    fn since(&self, earlier: &Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(earlier.bytes),
            errors: self.errors.saturating_sub(earlier.errors),
            latency: self.latency.since(&earlier.latency),
        }
    }

    fn merge(&mut self, other: &Self) {
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.latency.merge(&other.latency);
    }
}

/// What was counted between two moments.
#[derive(Clone, Debug, Default)]
pub struct MeterWindow {
    /// How long the window was.
    pub span: Duration,
    /// Reads.
    pub read: DirectionWindow,
    /// Mutations of every kind.
    pub write: DirectionWindow,
    /// Flushes.
    pub flush: DirectionWindow,
}

impl MeterWindow {
    /// How many reads and writes were answered a second.
    #[must_use]
    pub fn iops(&self) -> f64 {
        let requests = self.read.requests() + self.write.requests();
        requests as f64 / self.span.as_secs_f64().max(1e-9)
    }

    /// The latencies of reads and writes together.
    #[must_use]
    pub fn latency(&self) -> LatencyHistogram {
        let mut latency = self.read.latency.clone();
        latency.merge(&self.write.latency);
        latency
    }
}

impl MeterSnapshot {
    /// What was counted after `earlier`, an older snapshot of the same meters.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> MeterWindow {
        MeterWindow {
            span: self.at.since(earlier.at),
            read: self.read.since(&earlier.read),
            write: self.write.since(&earlier.write),
            flush: self.flush.since(&earlier.flush),
        }
    }
}

impl MeterState {
    /// The meters of a volume, at zero.
    #[must_use]
    pub fn new(env: EnvRef) -> Self {
        let limit = RateLimit::new(Arc::clone(&env));
        let (lanes, gone, gone_longest_ns) = (Mutex::default(), Mutex::default(), AtomicU64::new(0));
        let shared = Shared { env, limit, lanes, gone, gone_longest_ns };
        Self { shared: Arc::new(shared) }
    }

    /// What the volume's requests are held to before they are counted. Flushes and questions for extents always pass.
    #[must_use]
    pub fn rate_limit(&self) -> &RateLimit {
        &self.shared.limit
    }

    /// One connection's way into a slot, metered.
    #[must_use]
    pub fn metered(&self, lower: SlotLane) -> Meter {
        let lane = Arc::new(Lane::new());
        self.shared.lanes.lock().push(Arc::clone(&lane));
        Meter { lower, lane, shared: Arc::clone(&self.shared) }
    }

    /// All that was counted so far.
    #[must_use]
    pub fn snapshot(&self) -> MeterSnapshot {
        // Both locks are held so that a connection that goes away meanwhile is counted once.
        let lanes = self.shared.lanes.lock();
        let mut total = self.shared.gone.lock().clone();
        for lane in lanes.iter() {
            lane.add_to(&mut total);
        }
        total.at = self.shared.env.now();
        total
    }

    /// Begins to watch for the longest request. One watch at a time: a second one takes over the counters of the first.
    #[must_use]
    pub fn watch_stall(&self) -> StallWatch {
        self.shared.gone_longest_ns.store(0, Ordering::Relaxed);
        for lane in self.shared.lanes.lock().iter() {
            lane.longest_ns.store(0, Ordering::Relaxed);
        }
        StallWatch { state: self.clone() }
    }
}

/// Watches for the longest request since it was begun.
pub struct StallWatch {
    state: MeterState,
}

impl StallWatch {
    /// The longest request that was answered since the watch began or that is in flight now, from when it was asked.
    #[must_use]
    pub fn longest(&self) -> Duration {
        let now = nanoseconds(self.state.shared.env.now());
        let lanes = self.state.shared.lanes.lock();
        let longest = lanes.iter().map(|lane| {
            let began = lane.began.iter().map(|began| began.load(Ordering::Relaxed));
            let oldest = began.filter(|began| *began != 0).min();
            let waiting = oldest.map_or(0, |began| now.saturating_sub(began - 1));
            waiting.max(lane.longest_ns.load(Ordering::Relaxed))
        });
        let gone = self.state.shared.gone_longest_ns.load(Ordering::Relaxed);
        Duration::from_nanos(longest.max().unwrap_or(0).max(gone))
    }
}

fn nanoseconds(moment: Moment) -> u64 {
    u64::try_from(moment.0.as_nanos()).unwrap_or(u64::MAX - 1)
}

impl Direction {
    fn new() -> Self {
        Self { bytes: AtomicU64::new(0), errors: AtomicU64::new(0), latency: AtomicHistogram::new() }
    }

    fn add_to(&self, total: &mut DirectionWindow) {
        total.bytes += self.bytes.load(Ordering::Relaxed);
        total.errors += self.errors.load(Ordering::Relaxed);
        self.latency.add_to(&mut total.latency);
    }
}

impl Lane {
    fn new() -> Self {
        Self {
            read: Direction::new(),
            write: Direction::new(),
            flush: Direction::new(),
            began: (0..WATCHED).map(|_| AtomicU64::new(0)).collect(),
            hint: CachePadded::new(AtomicU64::new(0)),
            longest_ns: AtomicU64::new(0),
        }
    }

    fn add_to(&self, total: &mut MeterSnapshot) {
        self.read.add_to(&mut total.read);
        self.write.add_to(&mut total.write);
        self.flush.add_to(&mut total.flush);
        total.in_flight += self.began.iter().filter(|began| began.load(Ordering::Relaxed) != 0).count() as u64;
    }

    /// Notes that a request began; `None` if too many are in flight to tell them apart.
    fn begin(&self, now: u64) -> Option<usize> {
        let hint = self.hint.load(Ordering::Relaxed) as usize;
        bump(&self.hint, 1);
        let mut places = (0..4).map(|step| (hint + step) % WATCHED);
        let place = places.find(|place| self.began[*place].load(Ordering::Relaxed) == 0)?;
        self.began[place].store(now + 1, Ordering::Relaxed);
        Some(place)
    }
}

/// Counts one connection's requests and how long each takes, on their way into a slot. One thread at a time drives it:
/// used by two at once it miscounts.
///
/// It forms one layer with its lane, because every request of every guest pays for it. There is one box for the future
/// of both, and no check in between, because nothing is altered there.
pub struct Meter {
    lower: SlotLane,
    lane: Arc<Lane>,
    shared: Arc<Shared>,
}

/// A request under way; dropping it without an answer (the connection's task was torn down) frees its place.
struct Watched<'a> {
    lane: &'a Lane,
    place: Option<usize>,
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.lane.began[place].store(0, Ordering::Relaxed);
        }
    }
}

impl Meter {
    /// Counts a request, which begins after `wait`.
    async fn count<T>(
        &self,
        direction: &Direction,
        bytes: u64,
        wait: Option<Task>,
        request: impl Future<Output = block::Result<T>>,
    ) -> block::Result<T> {
        if let Some(wait) = wait {
            wait.await;
        }
        let began = nanoseconds(self.shared.env.now());
        let watched = Watched { lane: &self.lane, place: self.lane.begin(began) };
        let answer = request.await;
        let took = nanoseconds(self.shared.env.now()).saturating_sub(began);
        bump(&direction.bytes, bytes);
        direction.latency.add(took);
        if answer.is_err() {
            bump(&direction.errors, 1);
        }
        if took > self.lane.longest_ns.load(Ordering::Relaxed) {
            self.lane.longest_ns.store(took, Ordering::Relaxed);
        }
        drop(watched);
        answer
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        let mut lanes = self.shared.lanes.lock();
        lanes.retain(|lane| !Arc::ptr_eq(lane, &self.lane));
        self.shared.gone_longest_ns.fetch_max(self.lane.longest_ns.load(Ordering::Relaxed), Ordering::Relaxed);
        let mut last = MeterSnapshot::default();
        self.lane.add_to(&mut last);
        let mut gone = self.shared.gone.lock();
        gone.read.merge(&last.read);
        gone.write.merge(&last.write);
        gone.flush.merge(&last.flush);
    }
}

impl BlockDevice for Meter {
    fn geometry(&self) -> Geometry {
        self.lower.geometry()
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        let bytes = buffer.len() as u64;
        let wait = self.shared.limit.admit(bytes);
        Box::pin(self.count(&self.lane.read, bytes, wait, self.lower.read(offset, buffer)))
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        let bytes = match mutation.kind() {
            MutationKind::Data(data) => data.len() as u64,
            MutationKind::Zeroes { .. } | MutationKind::Discard => 0,
        };
        let wait = self.shared.limit.admit(bytes);
        Box::pin(self.count(&self.lane.write, bytes, wait, self.lower.write(mutation)))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.count(&self.lane.flush, 0, None, self.lower.flush()))
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.lower.extents(extent))
    }
}

#[cfg(test)]
mod tests;
