//! Locks on extents of a volume: one for every place where two parties touch the same bytes.
//!
//! The rule is first come, first served, per byte; [`RangeQueue`] is that rule as a plain structure. [`RangeLock`] puts
//! waiting around it, and spreads it so that those who want different bytes seldom meet:
//!
//! ```text
//!  volume   │ region 0 │ region 1 │ region 2 │ region 3 │ region 4 │ ...      1 MiB each
//!  shard          0         39         15         54         30       ...      queue + mutex each, 64 of them
//!                    ╰── a request ──╯
//! ```
//!
//! Each shard has the queue of its regions' requests. Regions are scattered over shards, so that copiers that walk
//! through parts of a volume in step do not meet at each step. A request stands, with its whole extent, in the queue of
//! every shard whose regions it touches. It is granted once it is granted in all of them. It enters them at one moment,
//! with all their mutexes held, taken in the order of the shards, so no deadlock is possible. Two requests that share a
//! byte share its shard, and the first to enter is first in every queue that they share. So the order per byte is that
//! of one queue. `range_lock_tests.rs` compares the grants and their order with those of one queue.
//!
//! A request that has to wait has a [`Turn`], which counts the queues in which it is blocked. A request that is granted
//! at once, as nearly all are, needs none and is not looked up again until its release.
//!
//! `tests/models.rs` compiles this file with a model checker's primitives, too.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use super::range_queue::{RangeMode, RangeQueue, Ticket};
use super::sync::{Arc, AtomicUsize, Mutex, Ordering};
use super::{Bytes, Extent};

/// How many queues a lock has: a power of two.
const SHARDS: usize = 64;
/// The size of a region, a power of two: larger than nearly every request, so that nearly every request touches one or
/// two.
const REGION: Bytes = Bytes::mib(1);
/// Scatters the numbers of regions: 2^64 divided by the golden ratio.
const SCATTER: u64 = 0x9e37_79b9_7f4a_7c15;

/// Locks on extents, granted in the order of asking. Clones are the same lock.
#[derive(Clone)]
pub struct RangeLock {
    shards: Arc<Shards>,
}

struct Shards {
    /// Each is reached through a pointer of its own, so that a guard keeps only its own alive. All threads would
    /// contend for a shared count of guards.
    shards: Vec<Arc<Shard>>,
    region_log2: u32,
    /// How many requests have had to wait until now.
    waited: AtomicUsize,
}

/// Alone in its cache lines.
#[repr(align(128))]
struct Shard {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    queue: RangeQueue,
    /// The turns of those who wait, in the order of their tickets.
    turns: Vec<(Ticket, Arc<Turn>)>,
}

/// What a request that has to wait is woken by.
struct Turn {
    /// Its place among all that had to wait.
    number: usize,
    blocked: Mutex<Blocked>,
}

struct Blocked {
    /// In how many queues it is not granted yet.
    queues: usize,
    waker: Option<Waker>,
}

/// Where a request stands.
enum Places {
    One(Arc<Shard>, Ticket),
    Many(Vec<(Arc<Shard>, Ticket)>),
}

impl Default for RangeLock {
    fn default() -> Self {
        Self::new()
    }
}

impl RangeLock {
    /// A lock that nobody holds.
    #[must_use]
    pub fn new() -> Self {
        Self::with_regions(REGION, SHARDS)
    }

    /// A lock whose regions have `region` bytes each and share `shards` queues, both powers of two.
    pub(crate) fn with_regions(region: Bytes, shards: usize) -> Self {
        debug_assert!(shards.is_power_of_two() && region.get().is_power_of_two());
        let shards = (0..shards).map(|_| Arc::new(Shard { state: Mutex::new(State::default()) })).collect();
        let region_log2 = region.get().trailing_zeros();
        Self { shards: Arc::new(Shards { shards, region_log2, waited: AtomicUsize::new(0) }) }
    }

    /// Waits for `extent`, to share it with others who share it. The place in the queue is taken now, not when the
    /// wait is first polled.
    pub fn shared(&self, extent: Extent) -> RangeWait {
        self.ask(extent, RangeMode::Shared)
    }

    /// Waits for `extent`, to have it alone. The place in the queue is taken now, not when the wait is first polled.
    pub fn exclusive(&self, extent: Extent) -> RangeWait {
        self.ask(extent, RangeMode::Exclusive)
    }

    /// `extent` alone, if nobody holds or waits for a byte of it.
    #[must_use]
    pub fn try_exclusive(&self, extent: Extent) -> Option<RangeGuard> {
        self.enter(extent, RangeMode::Exclusive, false).map(|(guard, _)| guard)
    }

    /// Whether nobody holds or waits for a byte of `extent`.
    #[must_use]
    pub fn is_free(&self, extent: Extent) -> bool {
        let touched = self.shards.touched_by(extent);
        let states: Vec<_> = touched.iter().map(|shard| shard.state.lock()).collect();
        states.iter().all(|state| state.queue.is_free(extent, RangeMode::Exclusive))
    }

    fn ask(&self, extent: Extent, mode: RangeMode) -> RangeWait {
        let (guard, turn) = self.enter(extent, mode, true).expect("who may wait is let in");
        RangeWait { guard: Some(guard), turn }
    }

    /// Takes a place in every queue that `extent` belongs to, at one moment; none if it would have to wait and may not.
    fn enter(&self, extent: Extent, mode: RangeMode, may_wait: bool) -> Option<(RangeGuard, Option<Arc<Turn>>)> {
        if let Some(shard) = self.shards.only(extent) {
            let mut state = shard.state.lock();
            if !may_wait && !state.queue.is_free(extent, mode) {
                return None;
            }
            let (ticket, is_granted) = state.queue.push(extent, mode);
            let turn = (!is_granted).then(|| self.shards.turn(1));
            state.turns.extend(turn.iter().map(|turn| (ticket, Arc::clone(turn))));
            drop(state);
            return Some((RangeGuard { places: Places::One(Arc::clone(shard), ticket) }, turn));
        }
        let touched = self.shards.touched_by(extent);
        let mut states: Vec<_> = touched.iter().map(|shard| shard.state.lock()).collect();
        if !may_wait && !states.iter().all(|state| state.queue.is_free(extent, mode)) {
            return None;
        }
        let entered: Vec<_> = states.iter_mut().map(|state| state.queue.push(extent, mode)).collect();
        let blocked = entered.iter().filter(|(_, is_granted)| !is_granted).count();
        let turn = (blocked > 0).then(|| self.shards.turn(blocked));
        for ((ticket, is_granted), state) in entered.iter().zip(&mut states) {
            if !is_granted {
                state.turns.extend(turn.iter().map(|turn| (*ticket, Arc::clone(turn))));
            }
        }
        drop(states);
        let places = touched.into_iter().cloned().zip(entered.into_iter().map(|(ticket, _)| ticket)).collect();
        Some((RangeGuard { places: Places::Many(places) }, turn))
    }
}

impl Shards {
    /// The numbers of the first and the last region of `extent`. An empty one is where its offset is.
    fn regions(&self, extent: Extent) -> (u64, u64) {
        let last = extent.offset.max(extent.end().saturating_sub(Bytes(1)));
        (extent.offset.get() >> self.region_log2, last.get() >> self.region_log2)
    }

    /// The shard of `extent`, if it is in one region.
    fn only(&self, extent: Extent) -> Option<&Arc<Shard>> {
        let (first, last) = self.regions(extent);
        (first == last).then(|| &self.shards[self.shard_of(first)])
    }

    /// All shards of `extent`, in order, each once.
    fn touched_by(&self, extent: Extent) -> Vec<&Arc<Shard>> {
        let (first, last) = self.regions(extent);
        if last - first >= self.shards.len() as u64 {
            return self.shards.iter().collect();
        }
        let mut touched: Vec<_> = (first..=last).map(|region| self.shard_of(region)).collect();
        touched.sort_unstable();
        touched.dedup();
        touched.into_iter().map(|at| &self.shards[at]).collect()
    }

    fn shard_of(&self, region: u64) -> usize {
        (region.wrapping_mul(SCATTER) >> 32) as usize & (self.shards.len() - 1)
    }

    /// The turn of the next who has to wait, in so many queues. The caller holds their mutexes, so of two that meet in
    /// one the earlier has the smaller number.
    fn turn(&self, queues: usize) -> Arc<Turn> {
        let number = self.waited.fetch_add(1, Ordering::Relaxed);
        Arc::new(Turn { number, blocked: Mutex::new(Blocked { queues, waker: None }) })
    }
}

impl State {
    /// Takes a request out, and puts the turns of those that it does not block any more into `granted`.
    fn leave(&mut self, ticket: Ticket, granted: &mut Vec<Arc<Turn>>) {
        let Self { queue, turns } = self;
        take_turn(turns, ticket);
        queue.remove(ticket, |ticket| granted.extend(take_turn(turns, ticket)));
    }
}

fn take_turn(turns: &mut Vec<(Ticket, Arc<Turn>)>, ticket: Ticket) -> Option<Arc<Turn>> {
    let at = turns.binary_search_by_key(&ticket, |(ticket, _)| *ticket).ok()?;
    Some(turns.remove(at).1)
}

impl Turn {
    /// Whether it has come. If not, `context` is woken when it does.
    fn has_come(&self, context: &Context<'_>) -> bool {
        let mut blocked = self.blocked.lock();
        if blocked.queues > 0 {
            blocked.waker = Some(context.waker().clone());
        }
        blocked.queues == 0
    }

    /// Granted in one more queue; returns whom to wake if it was the last.
    fn unblock(&self) -> Option<(usize, Waker)> {
        let mut blocked = self.blocked.lock();
        blocked.queues -= 1;
        if blocked.queues > 0 {
            return None;
        }
        blocked.waker.take().map(|waker| (self.number, waker))
    }
}

/// The wait for an extent. Dropping it gives the place in the queue up.
#[must_use = "an extent is held once this has been awaited"]
pub struct RangeWait {
    /// Taken when the wait is over.
    guard: Option<RangeGuard>,
    /// None if it was granted at once.
    turn: Option<Arc<Turn>>,
}

impl Future for RangeWait {
    type Output = RangeGuard;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<RangeGuard> {
        if self.turn.as_ref().is_some_and(|turn| !turn.has_come(context)) {
            return Poll::Pending;
        }
        Poll::Ready(self.guard.take().expect("a wait that is over is not polled again"))
    }
}

/// An extent that is held until this is dropped.
pub struct RangeGuard {
    places: Places,
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        let mut granted = Vec::new();
        match &self.places {
            Places::One(shard, ticket) => shard.state.lock().leave(*ticket, &mut granted),
            // One after the other: who enters meanwhile waits for those queues that this is still in.
            Places::Many(places) => {
                places.iter().for_each(|(shard, ticket)| shard.state.lock().leave(*ticket, &mut granted));
            }
        }
        if granted.is_empty() {
            return;
        }
        let mut woken: Vec<_> = granted.iter().filter_map(|turn| turn.unblock()).collect();
        woken.sort_unstable_by_key(|(number, _)| *number);
        woken.into_iter().for_each(|(_, waker)| waker.wake());
    }
}
