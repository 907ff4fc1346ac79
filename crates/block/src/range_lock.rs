//! Locks on extents of a volume: one for every place where two parties touch the same bytes.
//!
//! The rule is first come, first served, per byte: a request waits for every earlier one that it overlaps, held or
//! waiting, unless both are shared. So a request over many chunks takes its whole range at once, nothing starves, and
//! two requests that meet in two places cannot wait for each other. [`RangeQueue`] is that rule as a plain structure
//! without synchronisation; [`RangeLock`] puts waiting around it.
//!
//! `tests/models.rs` compiles this file with a model checker's primitives, too.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use super::Extent;
use super::sync::{Arc, Mutex};

/// Whether others may hold the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeMode {
    /// Others that are shared may hold the same bytes.
    Shared,
    /// Nobody else may.
    Exclusive,
}

/// The number of a request, in the order of asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

#[derive(Debug)]
struct Request {
    ticket: Ticket,
    extent: Extent,
    mode: RangeMode,
    /// How many earlier requests it still waits for; none means granted.
    blockers: usize,
}

impl Request {
    fn conflicts(&self, extent: Extent, mode: RangeMode) -> bool {
        let exclusive = self.mode == RangeMode::Exclusive || mode == RangeMode::Exclusive;
        exclusive && self.extent.overlaps(extent)
    }
}

/// Who holds which bytes and who waits for whom, in the order of asking.
#[derive(Debug, Default)]
pub struct RangeQueue {
    requests: Vec<Request>,
    next: u64,
}

impl RangeQueue {
    /// Adds a request at the end; it is granted at once if it need not wait for any before it.
    pub fn push(&mut self, extent: Extent, mode: RangeMode) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        let blockers = self.requests.iter().filter(|earlier| earlier.conflicts(extent, mode)).count();
        self.requests.push(Request { ticket, extent, mode, blockers });
        ticket
    }

    /// Whether a request would be granted at once.
    #[must_use]
    pub fn is_free(&self, extent: Extent, mode: RangeMode) -> bool {
        !self.requests.iter().any(|earlier| earlier.conflicts(extent, mode))
    }

    /// Whether the request is granted.
    ///
    /// # Panics
    /// If it has been removed.
    #[must_use]
    pub fn is_granted(&self, ticket: Ticket) -> bool {
        self.requests[self.position(ticket)].blockers == 0
    }

    /// Takes a request out, held or waiting, and hands those that need not wait any more to `granted`.
    ///
    /// # Panics
    /// If it has been removed before.
    pub fn remove(&mut self, ticket: Ticket, mut granted: impl FnMut(Ticket)) {
        let at = self.position(ticket);
        let gone = self.requests.remove(at);
        for later in &mut self.requests[at..] {
            if later.blockers > 0 && later.conflicts(gone.extent, gone.mode) {
                later.blockers -= 1;
                if later.blockers == 0 {
                    granted(later.ticket);
                }
            }
        }
    }

    /// How many requests are held or wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether nobody holds or wants anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    fn position(&self, ticket: Ticket) -> usize {
        self.requests.binary_search_by_key(&ticket, |request| request.ticket).expect("the ticket is in the queue")
    }
}

/// Locks on extents, granted in the order of asking. Clones are the same lock.
#[derive(Clone)]
pub struct RangeLock {
    shared: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    queue: RangeQueue,
    /// Who is to be woken when a request is granted.
    wakers: HashMap<Ticket, Waker>,
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
        Self { shared: Arc::new(Mutex::new(State::default())) }
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
        let mut state = self.shared.lock();
        if !state.queue.is_free(extent, RangeMode::Exclusive) {
            return None;
        }
        let ticket = state.queue.push(extent, RangeMode::Exclusive);
        drop(state);
        Some(RangeGuard { lock: self.clone(), ticket })
    }

    /// Whether nobody holds or waits for a byte of `extent`.
    #[must_use]
    pub fn is_free(&self, extent: Extent) -> bool {
        self.shared.lock().queue.is_free(extent, RangeMode::Exclusive)
    }

    fn ask(&self, extent: Extent, mode: RangeMode) -> RangeWait {
        let ticket = self.shared.lock().queue.push(extent, mode);
        RangeWait { guard: Some(RangeGuard { lock: self.clone(), ticket }) }
    }
}

/// The wait for an extent. Dropping it gives the place in the queue up.
#[must_use = "an extent is held once this has been awaited"]
pub struct RangeWait {
    /// Taken when the wait is over.
    guard: Option<RangeGuard>,
}

impl Future for RangeWait {
    type Output = RangeGuard;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<RangeGuard> {
        let guard = self.guard.as_ref().expect("a wait that is over is not polled again");
        let ticket = guard.ticket;
        let mut state = guard.lock.shared.lock();
        if !state.queue.is_granted(ticket) {
            state.wakers.insert(ticket, context.waker().clone());
            return Poll::Pending;
        }
        drop(state);
        Poll::Ready(self.guard.take().expect("looked at above"))
    }
}

/// An extent that is held until this is dropped.
pub struct RangeGuard {
    lock: RangeLock,
    ticket: Ticket,
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        let mut state = self.lock.shared.lock();
        let State { queue, wakers } = &mut *state;
        // Only those who wait and have been polled have a waker; the usual guard has none to remove.
        if !wakers.is_empty() {
            wakers.remove(&self.ticket);
        }
        let mut woken = Vec::new();
        queue.remove(self.ticket, |granted| woken.extend(wakers.remove(&granted)));
        drop(state);
        woken.into_iter().for_each(Waker::wake);
    }
}
