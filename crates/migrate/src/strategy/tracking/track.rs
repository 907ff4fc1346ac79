//! What tracking makes of guest writes, copies and comparisons: more of the tracker's plain decisions.

use std::ops::Range;

use block::{Bytes, Extent};

use filters::WriteFrequencySketch;

use super::dirty_bitmap::DirtyBitmap;
use super::hot_blocks::HotChunks;
use crate::progress_map::active_of;
use crate::strategy::mirror::tracker::{CopyState, Mode, Tracker, WritePlan};
use crate::strategy::mirror::verify_state::VerifyState;

/// So many stretches that cannot be compared now are passed under one lock of the tracker.
const PASSED_AT_ONCE: u32 = 512;

impl Tracker {
    /// Tracks guest writes from now on instead of mirroring them.
    pub(crate) fn track(&mut self, incremental: bool) {
        self.dirty_bitmap = Some(DirtyBitmap::new(self.chunks(), incremental));
    }

    /// Counts how often chunks are written, so that the copies of hot ones can be put off.
    pub(crate) fn note_write_frequency(&mut self, write_frequency: WriteFrequencySketch) {
        self.hot = Some(HotChunks::new(write_frequency));
    }

    /// What puts copies off, if anything does.
    pub(crate) const fn hot(&mut self) -> Option<&mut HotChunks> {
        self.hot.as_mut()
    }

    /// Mirrors guest writes from now on: what is dirty is copied once more, under the lock. No copy may be under way;
    /// tracked writes may be, and say at their end what they have changed.
    pub(crate) fn mirror_from_now_on(&mut self) {
        let mut from = 0;
        while let Some(run) = self.get_and_clear(from, u64::MAX, true) {
            from = run.end;
        }
        (self.dirty_bitmap, self.hot) = (None, None);
    }

    /// Whether guest writes are tracked now. While a commit is in doubt and after it, both sides are written.
    pub(crate) const fn tracks(&self) -> bool {
        self.dirty_bitmap.is_some() && matches!(self.mode(), Mode::SourceHolds | Mode::FlushBoth)
    }

    /// Decides what becomes of a guest write that is tracked; `None` if it is to be mirrored. The caller shares the
    /// extent's lock until the write has ended.
    pub(crate) fn plan_tracked(&mut self, extent: Extent) -> Option<WritePlan> {
        if !self.tracks() {
            return None;
        }
        self.mark_dirty(extent);
        if let Some(hot) = &mut self.hot {
            self.chunk.indices_of(extent).for_each(|index| hot.add(index));
        }
        let mut plan = WritePlan::of_source(extent);
        // Also where nothing was copied yet: a copy may come and go while the write is under way.
        self.activate(&mut plan);
        Some(plan)
    }

    /// A tracked write begins, or has ended and is about to be answered.
    pub(crate) fn mark_dirty(&mut self, extent: Extent) {
        for index in self.chunk.indices_of(extent) {
            self.bump_generation(index);
            let copy_state = self.copy_state.get(index);
            let Some(dirty_bitmap) = &mut self.dirty_bitmap else { return };
            if dirty_bitmap.mark(index, copy_state == CopyState::Absent) && copy_state == CopyState::Copied {
                self.mark_stale(index..index + 1);
                self.note_unsent(index..index + 1);
            }
        }
    }

    /// A write that began tracked ends under a mirror: whatever has copied its chunks may have read too early.
    pub(crate) fn end_tracked(&mut self, extent: Extent) {
        for index in self.chunk.indices_of(extent) {
            self.bump_generation(index);
            match self.copy_state.get(index) {
                CopyState::Absent => {}
                CopyState::Reading | CopyState::Writing => _ = self.redo.insert(index),
                CopyState::Copied => self.lose(index),
            }
        }
    }

    /// Takes a run of at most `chunks_max` dirty chunks at or after `from` into the pass that begins: get and clear.
    pub(crate) fn get_and_clear(&mut self, from: u64, chunks_max: u64, with_deferred: bool) -> Option<Range<u64>> {
        let run = self.dirty_bitmap.as_mut()?.get_and_clear(from, chunks_max, with_deferred)?;
        self.copy_state.set_range(run.clone(), CopyState::Absent);
        self.mark_stale(run.clone());
        self.note_unsent(run.clone());
        run.clone().for_each(|index| self.unskip(index));
        Some(run)
    }

    /// Whether the pass has copied all that it was to copy.
    pub(crate) fn is_pass_over(&self) -> bool {
        self.session().is_some() && self.copy_state.count(CopyState::Copied) == self.copy_state.len()
    }

    /// How many bytes must be copied again because the guest has changed them, and which part of them is put off.
    pub(crate) fn bytes_dirty(&self) -> (Bytes, Bytes) {
        let (dirty, deferred) = self.dirty_bitmap.as_ref().map_or((0, 0), DirtyBitmap::dirty);
        let bytes = |chunks| Bytes(chunks * self.chunk.bytes()).min(self.size());
        (bytes(dirty), bytes(deferred))
    }

    /// Whether all of these chunks are on both sides, and the guest has not changed them since.
    pub(crate) fn all_in_step(&self, run: Range<u64>) -> bool {
        let is_clean = |dirty_bitmap: &DirtyBitmap| dirty_bitmap.clean_prefix(run.clone()) == run;
        self.all_copied(run.clone()) && self.dirty_bitmap.as_ref().is_none_or(is_clean)
    }

    /// The next run of chunks to compare at or after `from` that are in step: those wanted, and those unseen if `full`.
    ///
    /// # Errors
    /// There may be some; the chunk to go on with.
    pub(crate) fn next_comparable(
        &self,
        full: bool,
        from: u64,
        chunks_max: u64,
    ) -> Result<Option<(Range<u64>, bool)>, u64> {
        let mut from = from;
        for _ in 0..PASSED_AT_ONCE {
            let wanted = self.verify_state.next_run(VerifyState::Wanted, from, chunks_max);
            let unseen =
                if full { self.verify_state.next_run(VerifyState::Unverified, from, chunks_max) } else { None };
            let (run, is_wanted) = match (wanted, unseen) {
                (Some(wanted), Some(unseen)) if unseen.start < wanted.start => (unseen, false),
                (Some(wanted), _) => (wanted, true),
                (None, Some(unseen)) => (unseen, false),
                (None, None) => return Ok(None),
            };
            let run = match &self.dirty_bitmap {
                None => run,
                Some(dirty_bitmap) => dirty_bitmap.clean_prefix(run.clone()),
            };
            if run.is_empty() {
                // A stretch that the guest has changed is left out at once.
                match self.dirty_bitmap.as_ref().and_then(|dirty_bitmap| dirty_bitmap.next_clean(run.start)) {
                    Some(clean) => from = clean,
                    None => return Ok(None),
                }
                continue;
            }
            let Some(had) = self.copy_state.next_run(CopyState::Copied, run.start, run.end - run.start) else {
                return Ok(None);
            };
            if had.start == run.start {
                return Ok(Some((run.start..had.end.min(run.end), is_wanted)));
            }
            from = had.start;
        }
        Err(from)
    }

    /// How many bytes were equal on both sides at a moment after their last copy.
    pub(crate) fn bytes_proved(&self) -> Bytes {
        Bytes(self.verify_state.count(VerifyState::Equal) * self.chunk.bytes()).min(self.size())
    }

    /// Counts a write in as active, and says which extents of the activity log are not on record yet.
    pub(crate) fn activate(&mut self, plan: &mut WritePlan) {
        plan.active = true;
        if let Some(activity) = &mut self.activity {
            for number in active_of(plan.extent) {
                let entry = activity.entry(number).or_default();
                entry.in_flight += 1;
                if !entry.on_record {
                    plan.activate.push(number);
                }
            }
        }
    }
}
