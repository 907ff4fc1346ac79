//! loom's primitives with the faces of those that the crate uses, and some that are too weak.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use loom::sync::atomic::Ordering;

pub(crate) use loom::sync::Arc;
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicUsize};

/// A mutex as parking_lot's: its lock cannot be poisoned.
#[derive(Debug)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
        self.0.lock().expect("no holder panics")
    }
}

/// What tokio's `Notify` promises: `notify_one` wakes a waiter or lets the next one pass; `notify_waiters` wakes every
/// wait that has been made before it, polled or not.
pub(crate) struct Notify(Mutex<Notices>);

#[derive(Default)]
struct Notices {
    has_permit: bool,
    rounds: usize,
    waiting: Vec<Waker>,
}

pub(crate) struct Notified<'a> {
    notices: &'a Mutex<Notices>,
    round: usize,
}

impl Notify {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Notices::default()))
    }

    pub(crate) fn notified(&self) -> Notified<'_> {
        Notified { notices: &self.0, round: self.0.lock().rounds }
    }

    pub(crate) fn notify_one(&self) {
        let woken = {
            let mut notices = self.0.lock();
            notices.has_permit = true;
            notices.waiting.pop()
        };
        woken.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn notify_waiters(&self) {
        let woken = {
            let mut notices = self.0.lock();
            notices.rounds += 1;
            std::mem::take(&mut notices.waiting)
        };
        woken.into_iter().for_each(Waker::wake);
    }
}

impl Future for Notified<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut notices = self.notices.lock();
        if notices.rounds != self.round {
            return Poll::Ready(());
        }
        if std::mem::take(&mut notices.has_permit) {
            return Poll::Ready(());
        }
        notices.waiting.push(context.waker().clone());
        Poll::Pending
    }
}

/// A `Notify` that keeps no permit: who comes later waits for ever.
pub(crate) struct Forgetful(Notify);

impl Forgetful {
    pub(crate) fn new() -> Self {
        Self(Notify::new())
    }

    pub(crate) fn notified(&self) -> Notified<'_> {
        self.0.notified()
    }

    pub(crate) fn notify_one(&self) {
        if !self.0.0.lock().waiting.is_empty() {
            self.0.notify_one();
        }
    }

    pub(crate) fn notify_waiters(&self) {
        self.0.notify_waiters();
    }
}

/// Orderings that order nothing, under the names of those that do.
pub(crate) struct Relaxed;

#[allow(non_upper_case_globals, reason = "the names of the standard library's variants")]
impl Relaxed {
    pub(crate) const Acquire: Ordering = Ordering::Relaxed;
    pub(crate) const Release: Ordering = Ordering::Relaxed;
    pub(crate) const AcqRel: Ordering = Ordering::Relaxed;
}

/// A count where adding nothing is a plain load.
pub(crate) struct Loaded(AtomicUsize);

impl Loaded {
    pub(crate) fn new(value: usize) -> Self {
        Self(AtomicUsize::new(value))
    }

    pub(crate) fn fetch_add(&self, count: usize, ordering: Ordering) -> usize {
        if count == 0 { self.0.load(Ordering::Acquire) } else { self.0.fetch_add(count, ordering) }
    }

    pub(crate) fn fetch_sub(&self, count: usize, ordering: Ordering) -> usize {
        self.0.fetch_sub(count, ordering)
    }
}
