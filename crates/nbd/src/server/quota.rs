//! What the connections of one export may use together, so that no export's clients can keep another's from working.
//!
//! ```text
//!   a request ──▶ the export's share of the pool that all exports use ──▶ a reserve that is the export's alone ──▶ waits for either
//!                  (at most a quarter of the pool)      is used up          (so there is always some)
//! ```
//!
//! A client that fetches no replies keeps buffers until its connection's deadline. It takes them from its own export's
//! share and reserve. The reserves of others stay whatever happens to the pool.

use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};

use block::{Buffer, BufferPool, Bytes, PAGE_BYTES};
use futures::future::{Either, select};

/// An export has at most one of so many parts of the pool in use.
const SHARE_PART: u64 = 4;

/// A share is large enough for the largest request, if the pool is.
const SHARE_MIN: Bytes = Bytes::mib(32);

/// What only one export uses: one of so many parts of the pool, and no more than this.
const RESERVE_PART: u64 = 8;
const RESERVE_MAX: Bytes = Bytes::mib(8);

/// How many requests of all its connections are served at once, replies not yet fetched included. A connection without
/// any may always begin one.
const REQUESTS_MAX: usize = 1024;

/// The buffers and requests of one export.
pub(crate) struct Quota {
    share: BufferPool,
    reserve: BufferPool,
    requests: AtomicUsize,
}

impl Quota {
    /// An export's part of `pool`.
    pub(super) fn of(pool: &BufferPool) -> Self {
        let limit = pool.limit();
        let share = Bytes(limit.get() / SHARE_PART).max(SHARE_MIN.min(limit));
        let reserve = Bytes(limit.get() / RESERVE_PART).min(RESERVE_MAX).max(PAGE_BYTES.into());
        Self { share: pool.share(share), reserve: BufferPool::new(reserve), requests: AtomicUsize::new(0) }
    }

    /// The largest buffer that there can be: a power of two.
    pub(super) fn buffer_bytes_max(&self) -> u64 {
        1 << self.share.limit().get().max(1).ilog2()
    }

    /// A buffer, if there is one at once.
    pub(super) fn try_acquire(&self, length: usize) -> Option<Buffer> {
        let reserve = || if self.reserves(length) { self.reserve.try_acquire(length) } else { None };
        self.share.try_acquire(length).or_else(reserve)
    }

    /// A buffer, as soon as there is one.
    pub(super) async fn acquire(&self, length: usize) -> Buffer {
        if let Some(buffer) = self.try_acquire(length) {
            return buffer;
        }
        if !self.reserves(length) {
            return self.share.acquire(length).await;
        }
        match select(pin!(self.reserve.acquire(length)), pin!(self.share.acquire(length))).await {
            Either::Left((buffer, _)) | Either::Right((buffer, _)) => buffer,
        }
    }

    fn reserves(&self, length: usize) -> bool {
        Bytes::from(length.next_power_of_two()) <= self.reserve.limit()
    }

    /// Whether a connection that has a request may begin another.
    pub(super) fn has_room(&self) -> bool {
        self.requests.load(Ordering::Relaxed) < REQUESTS_MAX
    }

    pub(super) fn begin_request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn end_requests(&self, count: usize) {
        self.requests.fetch_sub(count, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_export_that_keeps_all_it_can_get_leaves_others_a_share_or_at_least_their_reserve() {
        let pool = BufferPool::new(Bytes::mib(256));
        let greedy: Vec<_> = (0..5).map(|_| Quota::of(&pool)).collect();
        let honest = Quota::of(&pool);
        let mut replay_log = Vec::new();
        for export in &greedy {
            replay_log.extend(std::iter::from_fn(|| export.try_acquire(4 << 20)));
            assert!(export.try_acquire(4 << 20).is_none());
        }
        assert!(replay_log.len() <= (256 + 5 * 8) / 4, "{} buffers of 4 MiB", replay_log.len());
        assert_eq!(pool.in_use(), pool.limit(), "four of them have a quarter each");
        let first = honest.acquire(4 << 20).await;
        let second = honest.acquire(4 << 20).await;
        assert!(honest.try_acquire(4096).is_none(), "its reserve is used up by itself");
        drop(first);
        assert_eq!(honest.acquire(4096).await.len(), 4096);
        drop(second);
    }

    #[test]
    fn small_pools_have_a_share_and_a_reserve_too() {
        for limit in [Bytes::kib(4), Bytes::kib(64), Bytes::mib(64)] {
            let quota = Quota::of(&BufferPool::new(limit));
            assert_eq!(quota.buffer_bytes_max(), limit.get().min(32 << 20));
            assert!(quota.try_acquire(limit.as_usize().min(32 << 20)).is_some());
        }
    }
}
