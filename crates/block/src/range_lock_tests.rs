//! The range lock. Beside it and not in it, because the models compile its file with primitives of their own.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use proptest::prelude::*;

use crate::range_lock::{RangeGuard, RangeLock, RangeWait};
use crate::range_queue::{RangeMode, RangeQueue, Ticket};
use crate::{Bytes, Extent};

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
    let push = (0_u64..40, 0_u64..12, any::<bool>())
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
                    let (ticket, is_granted) = queue.push(extent(offset, length), mode);
                    prop_assert_eq!(free, is_granted);
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

/// A request of the lock beside its ticket in the one queue that says what is right.
struct Asked {
    ticket: Ticket,
    wait: Option<RangeWait>,
    guard: Option<RangeGuard>,
}

/// Writes down whom it wakes.
struct Told {
    ticket: Ticket,
    woken: Arc<Mutex<Vec<Ticket>>>,
}

impl std::task::Wake for Told {
    fn wake(self: Arc<Self>) {
        self.woken.lock().push(self.ticket);
    }
}

impl Asked {
    /// Whether it holds its extent, once it has been looked at.
    fn is_granted(&mut self, woken: &Arc<Mutex<Vec<Ticket>>>) -> bool {
        let waker = Waker::from(Arc::new(Told { ticket: self.ticket, woken: Arc::clone(woken) }));
        if let Some(wait) = &mut self.wait
            && let Poll::Ready(guard) = Pin::new(wait).poll(&mut Context::from_waker(&waker))
        {
            self.guard = Some(guard);
            self.wait = None;
        }
        self.guard.is_some()
    }
}

proptest! {
    #[test]
    fn a_lock_of_many_queues_grants_and_wakes_as_one_queue_does(
        steps in steps(),
        region_log2 in 0..5,
        shards_log2 in 0..4,
    ) {
        let lock = RangeLock::with_regions(Bytes(1_u64 << region_log2), 1_usize << shards_log2);
        let mut rule = RangeQueue::default();
        let mut asked: Vec<Asked> = Vec::new();
        let woken: Arc<Mutex<Vec<Ticket>>> = Arc::default();
        for step in steps {
            let mut granted = Vec::new();
            match step {
                Step::Push(offset, length, exclusive) => {
                    let extent = extent(offset, length);
                    prop_assert_eq!(lock.is_free(extent), rule.is_free(extent, RangeMode::Exclusive));
                    let mode = if exclusive { RangeMode::Exclusive } else { RangeMode::Shared };
                    // Half of those who could have it at once ask as the mirror does.
                    let guard = if exclusive && length % 2 == 0 { lock.try_exclusive(extent) } else { None };
                    let wait = match (&guard, exclusive) {
                        (Some(_), _) => None,
                        (None, true) => Some(lock.exclusive(extent)),
                        (None, false) => Some(lock.shared(extent)),
                    };
                    let (ticket, _) = rule.push(extent, mode);
                    asked.push(Asked { ticket, wait, guard });
                }
                Step::Remove(at) if !asked.is_empty() => {
                    let gone = asked.remove(at % asked.len());
                    rule.remove(gone.ticket, |ticket| granted.push(ticket));
                }
                Step::Remove(_) => {}
            }
            prop_assert_eq!(std::mem::take(&mut *woken.lock()), granted, "others are woken, or in another order");
            for asked in &mut asked {
                prop_assert_eq!(asked.is_granted(&woken), rule.is_granted(asked.ticket));
            }
        }
        asked.clear();
        prop_assert!(lock.is_free(extent(0, 100)));
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

struct Counted;

impl std::task::Wake for Counted {
    fn wake(self: Arc<Self>) {}
}

#[test]
fn a_wait_that_is_given_up_lets_others_pass_and_leaves_nothing_behind() {
    let lock = RangeLock::new();
    let first = lock.try_exclusive(extent(0, 10)).expect("nobody holds it");
    let mut given_up = lock.exclusive(extent(0, 20));
    let mut behind = lock.exclusive(extent(15, 1));
    let counted = Arc::new(Counted);
    let waker = Waker::from(Arc::clone(&counted));
    assert!(Pin::new(&mut given_up).poll(&mut Context::from_waker(&waker)).is_pending());
    assert!(poll(&mut behind).is_pending());
    drop(given_up);
    assert!(poll(&mut behind).is_ready());
    drop((first, waker));
    assert!(lock.is_free(extent(0, 100)));
    assert_eq!(Arc::strong_count(&counted), 1, "the waker of a wait that was given up is still kept");
}

#[test]
fn a_wide_request_is_not_passed_for_ever_by_small_ones() {
    let lock = RangeLock::with_regions(Bytes(8), 4);
    let mut held: std::collections::VecDeque<_> =
        (0..32).map(|at| lock.try_exclusive(extent(at, 1)).expect("nobody holds it")).collect();
    let mut wide = lock.exclusive(extent(0, 32));
    assert!(poll(&mut wide).is_pending());
    // Each that lets go asks again at once, as a guest with a full queue does.
    let mut again = Vec::new();
    for at in 0..32 {
        assert!(poll(&mut wide).is_pending(), "granted while others hold parts of it");
        drop(held.pop_front());
        let mut wait = lock.exclusive(extent(at, 1));
        assert!(poll(&mut wait).is_pending(), "a later request overtook the wide one");
        again.push(wait);
    }
    let Poll::Ready(guard) = poll(&mut wide) else { panic!("the wide request starves") };
    drop(guard);
    assert!(again.iter_mut().all(|wait| poll(wait).is_ready()));
}

#[tokio::test]
async fn waiters_are_woken_and_exclusive_means_alone() {
    let lock = RangeLock::with_regions(Bytes(8), 2);
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
