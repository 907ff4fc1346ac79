//! Locks on extents of a volume: one for every place where two parties touch the same bytes.
//!
//! The rule is first come, first served, per byte: a request waits for every earlier one that it overlaps, held or
//! waiting, unless both are shared. So a request over many chunks takes its whole range at once, nothing starves, and
//! two requests that meet in two places cannot wait for each other. [`RangeQueue`] is that rule as a plain structure
//! without synchronisation; [`RangeLock`] puts waiting around it.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use crate::Extent;

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
#[derive(Clone, Default)]
pub struct RangeLock {
    shared: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    queue: RangeQueue,
    /// Who is to be woken when a request is granted.
    wakers: HashMap<Ticket, Waker>,
}

impl RangeLock {
    /// A lock that nobody holds.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bytes;
    use proptest::prelude::*;

    fn extent(offset: u64, length: u64) -> Extent {
        Extent::new(Bytes(offset), Bytes(length))
    }

    /// The rule, said again in the slowest way.
    #[derive(Default)]
    struct Model {
        requests: Vec<(Ticket, Extent, RangeMode)>,
    }

    impl Model {
        fn is_granted(&self, ticket: Ticket) -> bool {
            let mine = self.requests.iter().find(|(other, ..)| *other == ticket).expect("it is there");
            !self.requests.iter().any(|(other, extent, mode)| {
                *other < ticket
                    && extent.overlaps(mine.1)
                    && (*mode == RangeMode::Exclusive || mine.2 == RangeMode::Exclusive)
            })
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Push(u64, u64, bool),
        Remove(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let push = (0_u64..40, 1_u64..12, any::<bool>())
            .prop_map(|(offset, length, exclusive)| Step::Push(offset, length, exclusive));
        prop::collection::vec(prop_oneof![3 => push, 2 => (0_usize..64).prop_map(Step::Remove)], 0..120)
    }

    proptest! {
        #[test]
        fn the_queue_grants_what_the_model_grants(steps in steps()) {
            let mut queue = RangeQueue::default();
            let mut model = Model::default();
            let mut granted = std::collections::BTreeSet::new();
            for step in steps {
                match step {
                    Step::Push(offset, length, exclusive) => {
                        let mode = if exclusive { RangeMode::Exclusive } else { RangeMode::Shared };
                        let free = queue.is_free(extent(offset, length), mode);
                        let ticket = queue.push(extent(offset, length), mode);
                        prop_assert_eq!(free, queue.is_granted(ticket));
                        if free {
                            granted.insert(ticket);
                        }
                        model.requests.push((ticket, extent(offset, length), mode));
                    }
                    Step::Remove(at) if !model.requests.is_empty() => {
                        let (ticket, ..) = model.requests.remove(at % model.requests.len());
                        granted.remove(&ticket);
                        queue.remove(ticket, |ticket| assert!(granted.insert(ticket), "granted twice"));
                    }
                    Step::Remove(_) => {}
                }
                for (ticket, ..) in &model.requests {
                    prop_assert_eq!(queue.is_granted(*ticket), model.is_granted(*ticket));
                    prop_assert_eq!(granted.contains(ticket), model.is_granted(*ticket), "a grant was not told");
                }
                prop_assert_eq!(queue.len(), model.requests.len());
            }
        }
    }

    fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
        Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_later_request_does_not_overtake_an_earlier_one_that_waits() {
        let lock = RangeLock::new();
        let first = lock.try_exclusive(extent(0, 10)).expect("nobody holds it");
        let mut wide = lock.exclusive(extent(5, 10));
        let mut behind = lock.shared(extent(12, 4));
        assert!(poll(&mut wide).is_pending());
        assert!(poll(&mut behind).is_pending(), "a request overtook one that waits for the same bytes");
        assert!(lock.try_exclusive(extent(12, 1)).is_none());
        drop(first);
        let Poll::Ready(guard) = poll(&mut wide) else { panic!("not granted") };
        assert!(poll(&mut behind).is_pending());
        drop(guard);
        assert!(poll(&mut behind).is_ready());
    }

    #[test]
    fn a_wait_that_is_given_up_lets_others_pass() {
        let lock = RangeLock::new();
        let first = lock.try_exclusive(extent(0, 10)).expect("nobody holds it");
        let mut given_up = lock.exclusive(extent(0, 20));
        let mut behind = lock.exclusive(extent(15, 1));
        assert!(poll(&mut given_up).is_pending());
        assert!(poll(&mut behind).is_pending());
        drop(given_up);
        assert!(poll(&mut behind).is_ready());
        drop(first);
        assert!(lock.is_free(extent(0, 100)));
        assert!(lock.shared.lock().wakers.is_empty());
    }

    #[tokio::test]
    async fn waiters_are_woken_and_exclusive_means_alone() {
        let lock = RangeLock::new();
        let inside = Arc::new(Mutex::new(0));
        let tasks: Vec<_> = (0..50)
            .map(|number| {
                let (lock, inside) = (lock.clone(), Arc::clone(&inside));
                tokio::spawn(async move {
                    let _guard = lock.exclusive(extent(number % 7, 10)).await;
                    *inside.lock() += 1;
                    assert_eq!(*inside.lock(), 1, "two hold the same bytes");
                    tokio::task::yield_now().await;
                    *inside.lock() -= 1;
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("no panic");
        }
        assert!(lock.is_free(extent(0, 100)));
    }
}
