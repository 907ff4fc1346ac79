//! The tracker as a schedule sees it: what waits for a copy, and what is better put off.

use std::ops::Range;

use crate::schedule::Candidates;

use super::tracker::{CopyState, Tracker};

impl Candidates for Tracker {
    fn next_absent(&self, from: u64, chunks_max: u64) -> Option<Range<u64>> {
        Self::next_absent(self, from, chunks_max)
    }

    fn puts_off(&self) -> bool {
        match self.auto_passes() {
            true => self.auto_hot().is_some(),
            false => self.hot.as_ref().is_some_and(|hot| hot.is_on()),
        }
    }

    fn is_hot(&self, index: u64) -> bool {
        let hot = if self.auto_passes() { self.auto_hot() } else { self.hot.as_ref() };
        hot.is_some_and(|hot| hot.is_hot(index))
    }

    /// Of a strategy that iterates, the chunk is dirty for a later pass. Of one that chooses for itself it stays absent, and
    /// this pass goes by.
    fn put_off(&mut self, index: u64) {
        if self.auto_passes() {
            return self.pass_hot();
        }
        self.copy_state.set(index, CopyState::Copied);
        if let Some(dirty_bitmap) = &mut self.dirty_bitmap {
            dirty_bitmap.defer(index);
        }
    }

    fn passes_once(&self) -> bool {
        self.auto_passes()
    }

    fn nearest_absent(&self, at: u64) -> Option<u64> {
        if self.is_window_open() {
            return None;
        }
        self.copy_state.nearest(CopyState::Absent, at)
    }

    fn chunks(&self) -> u64 {
        Self::chunks(self)
    }

    fn absent(&self) -> u64 {
        self.copy_state.count(CopyState::Absent)
    }

    /// Of a mirror by two offsets never. Of a strategy that chooses for itself not while all writes are left to the source, nor
    /// once the pass has copied as much as it began with.
    fn is_order_free(&self) -> bool {
        self.offsets.is_none() && self.is_auto_order_free()
    }

    fn in_memory(&self, chunks_max: u64) -> Option<Range<u64>> {
        self.next_in_memory(chunks_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Bytes, ChunkSize, Device, MemDevice};

    #[test]
    fn the_nearest_chunk_that_waits_is_found_both_ways_and_is_none_that_is_copied_or_under_way() {
        let size = Bytes::mib(64);
        let mut tracker = Tracker::new(size, ChunkSize::default(), Device::new("target", MemDevice::new(size)), true);
        let chunks = Candidates::chunks(&tracker);
        let mut draw = 1_u64;
        for _ in 0..400 {
            draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let index = (draw >> 33) % chunks;
            match draw >> 62 {
                0 => tracker.copy_state.set(index, CopyState::Absent),
                1 => tracker.copy_state.set(index, CopyState::Reading),
                _ => tracker.copy_state.set(index, CopyState::Copied),
            };
            let waits = |index: &u64| tracker.copy_state.get(*index) == CopyState::Absent;
            let at = (draw >> 20) % chunks;
            let expected =
                (0..chunks).filter(waits).min_by_key(|found| (found.abs_diff(at), std::cmp::Reverse(*found)));
            assert_eq!(tracker.nearest_absent(at), expected, "nearest to {at}");
            assert_eq!(tracker.absent(), (0..chunks).filter(waits).count() as u64);
        }
    }
}
