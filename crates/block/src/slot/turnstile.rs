//! The lock-free core of the slot: requests count themselves in and out, and the holder of the slot waits for the
//! counts.
//!
//! A request raises its lane's count and then reads the flag; the holder raises the flag and then reads the counts. One
//! of the two must see the other. Both touch the count by read-modify-writes, which have one order. If the request's
//! comes later, it sees what the holder had published, the flag included. If the holder's comes later, it sees the
//! request. So nothing here needs a total order over all locations, and the holder's read of the counts costs the
//! requests nothing.
//!
//! `tests/models.rs` compiles this file with loom's primitives instead of those of `crate::sync` and runs every
//! interleaving that the memory model allows.

use crossbeam_utils::CachePadded;

use super::sync::{Arc, AtomicBool, AtomicUsize, Mutex, Notify, Ordering};

/// Who is inside, and whether anybody may come in.
pub(crate) struct Turnstile {
    /// New requests wait while this is set.
    held: AtomicBool,
    lanes: Mutex<Vec<Arc<Count>>>,
    /// A request was counted out while the turnstile was held.
    drained: Notify,
    opened: Notify,
}

/// How many requests of one lane are inside; on a cache line of its own.
pub(crate) struct Count(CachePadded<AtomicUsize>);

impl Turnstile {
    /// An open one without lanes.
    pub(crate) fn new() -> Self {
        Self {
            held: AtomicBool::new(false),
            lanes: Mutex::new(Vec::new()),
            drained: Notify::new(),
            opened: Notify::new(),
        }
    }

    /// A count of its own for one connection or queue.
    pub(crate) fn add_lane(&self) -> Arc<Count> {
        let count = Arc::new(Count(CachePadded::new(AtomicUsize::new(0))));
        self.lanes.lock().push(Arc::clone(&count));
        count
    }

    /// Forgets a lane; nobody of it is inside.
    pub(crate) fn remove_lane(&self, count: &Arc<Count>) {
        self.lanes.lock().retain(|lane| !Arc::ptr_eq(lane, count));
    }

    /// How many are inside, over all lanes.
    pub(crate) fn inside(&self) -> usize {
        // Adding nothing is what puts this into one order with those who come and go.
        self.lanes.lock().iter().map(|lane| lane.0.fetch_add(0, Ordering::AcqRel)).sum()
    }

    /// Lets nobody in from now on.
    pub(crate) fn hold(&self) {
        self.held.store(true, Ordering::Release);
    }

    /// Waits until nobody is inside a held turnstile.
    pub(crate) async fn drain(&self) {
        loop {
            let drained = self.drained.notified();
            if self.inside() == 0 {
                return;
            }
            drained.await;
        }
    }

    /// Lets everybody in again.
    pub(crate) fn open(&self) {
        self.held.store(false, Ordering::Release);
        self.opened.notify_waiters();
    }

    /// Counts a request in, or `None` if the turnstile is held.
    pub(crate) fn try_enter<'a>(&'a self, count: &'a Count) -> Option<Inside<'a>> {
        count.0.fetch_add(1, Ordering::AcqRel);
        let inside = Inside { turnstile: self, count };
        (!self.held.load(Ordering::Acquire)).then_some(inside)
    }

    /// Counts a request in as soon as the turnstile is open.
    pub(crate) async fn wait_to_enter<'a>(&'a self, count: &'a Count) -> Inside<'a> {
        loop {
            let opened = self.opened.notified();
            if self.held.load(Ordering::Acquire) {
                opened.await;
            }
            if let Some(inside) = self.try_enter(count) {
                return inside;
            }
        }
    }
}

/// A request that was counted in; dropping it counts it out.
pub(crate) struct Inside<'a> {
    turnstile: &'a Turnstile,
    count: &'a Count,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.count.0.fetch_sub(1, Ordering::AcqRel);
        if self.turnstile.held.load(Ordering::Acquire) {
            self.turnstile.drained.notify_one();
        }
    }
}
