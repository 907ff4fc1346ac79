//! How a copy stands: counters that anybody may look at while it runs.

use std::sync::atomic::{AtomicU64, Ordering};

/// How a copy stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Pages of the memory.
    pub total_pages: u64,
    /// Pages that were to be sent when this was last counted.
    pub left_pages: u64,
    /// Rounds that were begun.
    pub rounds: u64,
    /// Pages that were told to be zeroes.
    pub zero_pages: u64,
    /// Pages that were sent as they are.
    pub data_pages: u64,
    /// Pages that were sent as a difference.
    pub delta_pages: u64,
    /// Pages that had been written, and were the same as when they were sent last.
    pub unchanged_pages: u64,
    /// Pages that were put off because they change all the time.
    pub deferred_pages: u64,
    /// Bytes that went to the streams.
    pub wire_bytes: u64,
    /// Pages that the guest has written in a second, of late.
    pub dirty_pages_per_second: u64,
    /// How long the last scan of the dirty log took, in nanoseconds.
    pub scan_nanoseconds: u64,
}

/// The counters behind it.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) total_pages: AtomicU64,
    pub(crate) left_pages: AtomicU64,
    pub(crate) rounds: AtomicU64,
    pub(crate) zero_pages: AtomicU64,
    pub(crate) data_pages: AtomicU64,
    pub(crate) delta_pages: AtomicU64,
    pub(crate) unchanged_pages: AtomicU64,
    pub(crate) deferred_pages: AtomicU64,
    pub(crate) wire_bytes: AtomicU64,
    pub(crate) dirty_pages_per_second: AtomicU64,
    pub(crate) scan_nanoseconds: AtomicU64,
}

impl Counters {
    pub(crate) fn look(&self) -> Progress {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Progress {
            total_pages: get(&self.total_pages),
            left_pages: get(&self.left_pages),
            rounds: get(&self.rounds),
            zero_pages: get(&self.zero_pages),
            data_pages: get(&self.data_pages),
            delta_pages: get(&self.delta_pages),
            unchanged_pages: get(&self.unchanged_pages),
            deferred_pages: get(&self.deferred_pages),
            wire_bytes: get(&self.wire_bytes),
            dirty_pages_per_second: get(&self.dirty_pages_per_second),
            scan_nanoseconds: get(&self.scan_nanoseconds),
        }
    }
}

pub(crate) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}
