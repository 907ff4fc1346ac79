//! The mirror and a read cache: who reads through it, what the target has, and which copies need not read the disk.

use std::ops::Range;
use std::sync::Arc;

use filters::{ReadCache, Redirect};

use super::filter::{Mirror, Shared};
use super::tracker::{CopyState, Tracker};

/// The schedule is told of no chunk in memory if so many stretches in a row do not wait for a copy.
const STRETCHES_MAX: u32 = 32;

impl Mirror {
    /// Has guest and copies reach the source through `read_cache`, and comparisons not. Below a redirection the cache is not put here,
    /// but when the mirror comes into the guest's path. Said before anybody else has the mirror.
    #[must_use]
    pub(crate) fn cached_by(mut self, read_cache: Option<ReadCache>, redirect: Option<&Redirect>) -> Self {
        let shared = Arc::get_mut(&mut self.shared).expect("nobody else has it yet");
        match (&read_cache, redirect) {
            (Some(_), Some(redirect)) => shared.comparison_face = redirect.comparison("the volume past every cache"),
            (Some(cache), None) => (shared.source, shared.copy_face) = (cache.guest(), cache.copy()),
            (None, _) => {}
        }
        shared.read_cache = read_cache;
        self
    }
}

impl Shared {
    /// Nobody reads the source any more, or nobody through the mirror: what is in memory is given back.
    pub(crate) fn close_read_cache(&self) {
        if let Some(cache) = &self.read_cache {
            cache.close();
        }
    }
}

impl Tracker {
    /// Tells `read_cache` what the target has from now on, before it has anything.
    pub(crate) fn keep_in_memory(&mut self, read_cache: Option<ReadCache>) {
        self.read_cache = read_cache;
    }

    /// The target has got these chunks. Those that the guest has changed meanwhile must be sent again.
    pub(in crate::strategy) fn note_sent(&self, run: Range<u64>) {
        let Some(cache) = &self.read_cache else { return };
        let mut at = run.start;
        while at < run.end {
            let (part, is_in_step) = self.in_step_run(at, run.end);
            at = part.end;
            match is_in_step {
                true => cache.mark_sent(part),
                false => cache.mark_unsent(part),
            }
        }
    }

    /// These chunks must be sent, for the first time or again.
    pub(in crate::strategy) fn note_unsent(&self, run: Range<u64>) {
        if let Some(cache) = &self.read_cache {
            cache.mark_unsent(run);
        }
    }

    /// The first run of chunks that wait for a copy and whose bytes are in memory, of at most `chunks_max`.
    pub(super) fn next_in_memory(&self, chunks_max: u64) -> Option<Range<u64>> {
        let cache = self.read_cache.as_ref()?;
        let mut from = 0;
        for _ in 0..STRETCHES_MAX {
            let here = cache.next_unsent(from, chunks_max)?;
            let (run, state) = self.copy_state.run_at(here.start, here.end);
            if state == CopyState::Absent {
                return self.next_absent(run.start, run.end - run.start).filter(|absent| absent.start == run.start);
            }
            // It is being copied, or the guest has changed it and another pass copies it.
            from = self.copy_state.next(CopyState::Absent, run.end)?;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Buffer, Bytes, ChunkSize, Device, Extent, MemDevice};

    const CHUNK: u64 = 64 << 10;
    const CHUNKS: u64 = 16;

    fn memory(name: &str) -> Device {
        Device::new(name, MemDevice::new(Bytes(CHUNKS * CHUNK)))
    }

    /// A tracker with a cache that has room for all.
    fn cached(incremental: Option<bool>) -> (Tracker, ReadCache) {
        let chunk = ChunkSize::default();
        let source = memory("source");
        let cache = ReadCache::new(source.clone(), source.clone(), chunk, Bytes(CHUNKS * CHUNK));
        let mut tracker = Tracker::new(source.size(), chunk, memory("target"), true);
        tracker.keep_in_memory(Some(cache.clone()));
        if let Some(incremental) = incremental {
            tracker.track(incremental);
        }
        (tracker, cache)
    }

    /// The guest reads all of these chunks.
    async fn read(cache: &ReadCache, chunks: Range<u64>) {
        let length = (chunks.end - chunks.start) * CHUNK;
        let buffer = Buffer::unpooled(Bytes(length).as_usize());
        cache.guest().read(Bytes(chunks.start * CHUNK), buffer).await.expect("memory answers");
    }

    fn copy(tracker: &mut Tracker, run: Range<u64>) {
        assert!(tracker.claim(run.clone()), "{run:?}");
        tracker.begin_writing(run.clone());
        tracker.end_copy(run, 1);
    }

    const fn extent_of(chunk: u64) -> Extent {
        Extent::new(Bytes(chunk * CHUNK), Bytes(512))
    }

    #[tokio::test]
    async fn what_is_in_memory_waits_until_it_is_claimed_and_is_sent_when_it_is_copied() {
        let (mut tracker, cache) = cached(None);
        read(&cache, 3..6).await;
        read(&cache, 8..9).await;
        assert_eq!((tracker.next_in_memory(9), tracker.next_in_memory(2)), (Some(3..6), Some(3..5)));
        assert!(tracker.claim(3..6));
        assert_eq!((tracker.next_in_memory(9), cache.next_unsent(0, 9)), (Some(8..9), Some(3..6)));
        tracker.begin_writing(3..6);
        tracker.end_copy(3..6, 1);
        assert_eq!(cache.next_unsent(0, 9), Some(8..9));
        // Given up, it waits again.
        assert!(tracker.claim(8..9));
        tracker.abort_copy(8..9, false);
        assert_eq!(tracker.next_in_memory(9), Some(8..9));
    }

    #[tokio::test]
    async fn a_chunk_that_the_guest_changes_must_be_sent_again() {
        let (mut tracker, cache) = cached(Some(false));
        copy(&mut tracker, 0..CHUNKS);
        read(&cache, 0..4).await;
        assert_eq!(cache.next_unsent(0, 9), None);
        let plan = tracker.plan_tracked(extent_of(2)).expect("it is tracked");
        tracker.finish_write(&plan, false);
        assert_eq!(cache.next_unsent(0, 9), Some(2..3));
        assert_eq!(tracker.next_in_memory(9), None, "another pass copies it");
        assert_eq!(tracker.get_and_clear(0, 9, true), Some(2..3));
        assert_eq!(tracker.next_in_memory(9), Some(2..3));
        // It is changed while it is copied.
        assert!(tracker.claim(2..3));
        let plan = tracker.plan_tracked(extent_of(2)).expect("it is tracked");
        tracker.finish_write(&plan, false);
        tracker.begin_writing(2..3);
        tracker.end_copy(2..3, 1);
        assert_eq!(cache.next_unsent(0, 9), Some(2..3));
    }

    #[tokio::test]
    async fn a_target_that_is_lost_has_nothing() {
        let (mut tracker, cache) = cached(None);
        copy(&mut tracker, 0..CHUNKS);
        read(&cache, 0..4).await;
        assert_eq!(cache.next_unsent(0, 9), None);
        drop(tracker.drop_session());
        assert_eq!(tracker.forget_unflushed(0), None);
        assert_eq!(cache.next_unsent(0, 9), Some(0..4));
    }
}
