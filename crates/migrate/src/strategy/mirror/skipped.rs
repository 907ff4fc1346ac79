//! What the tracker knows of chunks that were not sent.

use std::collections::BTreeMap;
use std::ops::Range;

use block::Extent;

use super::map_pages::CHUNKS_AT_ONCE;
use super::tracker::{CopyState, Tracker};
use crate::reduce::skip::SkipReason;
use crate::reduce::skip_map::SkipMap;

impl Tracker {
    /// Records what is skipped from now on.
    pub(crate) fn record_skips(&mut self) {
        self.skip_map = Some(SkipMap::new(self.chunks()));
    }

    /// The copy of these chunks has ended, and they were skipped. What the guest has written meanwhile was not.
    pub(crate) fn note_skipped(&mut self, run: Range<u64>, reason: SkipReason) {
        let Some(map) = &mut self.skip_map else { return };
        let mut from = run.start;
        while let Some(copied) = self.copy_state.next_run(CopyState::Copied, from, run.end.saturating_sub(from)) {
            if copied.start >= run.end {
                return;
            }
            let copied = copied.start..copied.end.min(run.end);
            from = copied.end;
            match &self.dirty_bitmap {
                None => map.insert_run(copied, reason),
                Some(dirty_bitmap) => copied
                    .filter(|index| dirty_bitmap.is_clean_at(*index))
                    .for_each(|index| map.insert_run(index..index + 1, reason)),
            }
        }
    }

    /// A chunk, or its copy, is about to change: whatever was skipped is like any other chunk from now on.
    pub(in crate::strategy) fn unskip(&mut self, index: u64) {
        if self.skip_map.as_mut().is_some_and(|map| map.remove(index)) {
            self.counts.unskipped += self.chunk_extent(index).length.0;
            // The record must say so before it may rely on the chunk again.
            self.mark_stale(index..index + 1);
        }
    }

    /// Nothing was skipped.
    pub(super) fn forget_skips(&mut self) {
        let mut from = Some(0);
        while let Some(at) = from {
            from = self.forget_skips_from(at);
        }
    }

    /// The same of a part of the volume from chunk `from` on. Gives the chunk to go on with.
    pub(super) fn forget_skips_from(&mut self, from: u64) -> Option<u64> {
        self.skip_map.as_mut()?.clear_part(from, CHUNKS_AT_ONCE)
    }

    /// The parts of `extent` that were skipped: they read as zeroes on both sides.
    pub(crate) fn skipped_in(&self, extent: Extent) -> Vec<Extent> {
        let Some(map) = &self.skip_map else { return Vec::new() };
        let chunks = self.chunk.indices_of(extent);
        let (mut from, mut parts) = (chunks.start, Vec::new());
        while let Some((run, _)) = map.next_run(from..chunks.end) {
            from = run.end;
            let in_step = run.filter(|index| self.is_in_step(*index));
            parts.extend(in_step.filter_map(|index| self.chunk_extent(index).intersection(extent)));
        }
        parts
    }

    /// How much is skipped now, in bytes, by the names of the reasons.
    pub(crate) fn bytes_skipped(&self) -> BTreeMap<String, u64> {
        self.skip_map.as_ref().map_or_else(BTreeMap::new, |map| map.bytes(self.size(), self.chunk))
    }
}

/// The first part of `extent` that was skipped and is not zeroes in what was read of it.
pub(crate) fn first_not_zero(extent: Extent, skipped: &[Extent], data: &[u8]) -> Option<usize> {
    skipped.iter().find_map(|part| {
        let start = (part.offset - extent.offset).as_usize();
        let bytes = &data[start..start + part.length.as_usize()];
        bytes.iter().position(|byte| *byte != 0).map(|at| start + at)
    })
}
