//! Counts down at every poll of a process's tasks, and so kills the process at one chosen await.
//!
//! Everything that a process does happens between two polls of its tasks. Killing it before poll `k`, for every `k` of a
//! run, is killing it at every await that the run has.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::sync::Notify;

/// Never reaches zero.
const ENDLESS: u64 = u64::MAX;

/// Counts polls down to a death.
pub struct CrashPoint {
    left: AtomicU64,
    polls: AtomicU64,
    /// Somebody has died of it, and it was not renewed.
    is_down: AtomicBool,
    is_over: AtomicBool,
    changed: Notify,
}

impl Default for CrashPoint {
    fn default() -> Self {
        Self {
            left: AtomicU64::new(ENDLESS),
            polls: AtomicU64::new(0),
            is_down: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            changed: Notify::new(),
        }
    }
}

impl CrashPoint {
    /// From now on `polls` polls of tasks happen, and then the process that would run next is dead.
    pub fn arm(&self, polls: u64) {
        if !self.is_over.load(Ordering::Relaxed) {
            self.left.store(polls, Ordering::Relaxed);
        }
    }

    /// It has done its work, and counts nothing down until it is armed again.
    pub fn renew(&self) {
        self.is_down.store(false, Ordering::Relaxed);
        self.left.store(ENDLESS, Ordering::Relaxed);
    }

    /// It counts nothing down any more, and cannot be armed again.
    pub fn disarm(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.left.store(ENDLESS, Ordering::Relaxed);
        self.changed.notify_waiters();
    }

    /// Counts a step; false if it is reached.
    pub(crate) fn step(&self) -> bool {
        match self.left.load(Ordering::Relaxed) {
            0 => {
                self.is_down.store(true, Ordering::Relaxed);
                self.changed.notify_waiters();
                return false;
            }
            ENDLESS => {}
            left => self.left.store(left - 1, Ordering::Relaxed),
        }
        self.polls.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Waits until it is reached. False if it was disarmed before.
    pub async fn reached(&self) -> bool {
        loop {
            let changed = self.changed.notified();
            // A process that dies of its last step may disarm it in the same poll.
            if self.is_down.load(Ordering::Relaxed) {
                return true;
            }
            match self.left.load(Ordering::Relaxed) {
                0 => return true,
                ENDLESS => return false,
                _ => changed.await,
            }
        }
    }

    /// How many polls there were.
    #[must_use]
    pub fn polls(&self) -> u64 {
        self.polls.load(Ordering::Relaxed)
    }
}
