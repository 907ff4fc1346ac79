//! What of the tracker's knowledge goes to the progress map: copied bits, and the extents of the activity log.
//!
//! The map is brought up to date a page at a time, under the map's lock. Idle extents are cleared a few at a time, also
//! under it. What a page says is true of the moment when it was filled, or its number is among the stale ones again. An
//! extent is cleared only while no page that it touches is stale. So neither lock is held for longer than a page takes,
//! whatever the size of the volume.

use std::ops::Range;

use block::{Bytes, ChunkMap, Extent, PackedState};

use super::plan::Activity;
use super::states::{CopyState, Durability};
use super::tracker::Tracker;
use super::verify_state::VerifyState;
use crate::progress_map::{ACTIVE_EXTENT, Found, PAGE_BYTES, bit, set_bits};
use crate::reduce::skip::SkipReason;

/// So many chunks are looked at under one lock of the tracker.
pub(crate) const CHUNKS_AT_ONCE: u64 = 4096;

/// Where a walk over the volume goes on that is made a part at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Part {
    /// Which of its changes is made.
    step: usize,
    /// From which chunk on.
    at: u64,
}

impl Part {
    /// Sets the chunks that are in the first state of each change to the second state. One change after the other goes
    /// over the whole map, a part of it at a time.
    fn replace<S: PackedState, const N: usize>(self, map: &mut ChunkMap<S>, changes: [(S, S); N]) -> Option<Self> {
        match self.replace_of(map, changes[self.step]) {
            None if self.step + 1 < N => Some(Self { step: self.step + 1, at: 0 }),
            next => next,
        }
    }

    /// The same of one change.
    fn replace_of<S: PackedState>(self, map: &mut ChunkMap<S>, (from, to): (S, S)) -> Option<Self> {
        let (mut at, mut left) = (self.at, CHUNKS_AT_ONCE);
        while left > 0 {
            let run = map.next_run(from, at, left)?;
            (at, left) = (run.end, left - (run.end - run.start));
            map.set_range(run, to);
        }
        Some(Self { at, ..self })
    }
}

impl Tracker {
    /// Takes over what an earlier session of the job has left on record: what it has copied counts. What it has copied and
    /// does not count, because it may have been written since, is taken off the record before its extent is.
    pub(crate) fn adopt_record(&mut self, found: &Found) {
        self.adopt(&found.copied);
        found.skipped.iter().for_each(|(run, reason)| self.note_skipped(run.clone(), *reason));
        self.stale_pages.extend(&found.stale_pages);
        if let Some(activity) = &mut self.activity {
            activity.extend(found.active.iter().map(|number| (*number, Activity { in_flight: 0, on_record: true })));
        }
    }

    /// The copied bits of these chunks are not up to date.
    pub(in crate::strategy) fn mark_stale(&mut self, run: Range<u64>) {
        if !run.is_empty() {
            self.stale_pages.extend(run.start / self.page_chunks..=(run.end - 1) / self.page_chunks);
        }
    }

    /// The same of a page of the progress map.
    pub(crate) fn mark_stale_page(&mut self, number: u64) {
        self.stale_pages.insert(number);
    }

    /// The first page of the progress map at or after `from` that is not up to date. The caller has the map's lock and
    /// brings the page up to date.
    pub(crate) fn take_stale_page(&mut self, from: u64) -> Option<u64> {
        let number = *self.stale_pages.range(from..).next()?;
        self.stale_pages.remove(&number);
        Some(number)
    }

    /// Whether a chunk is on both sides, and the guest has not changed it since.
    pub(super) fn is_in_step(&self, index: u64) -> bool {
        self.in_step_run(index, index + 1).1
    }

    /// A run of chunks from `from` on, not past `limit`, and whether that is true of them.
    pub(super) fn in_step_run(&self, from: u64, limit: u64) -> (Range<u64>, bool) {
        let (run, state) = self.copy_state.run_at(from, limit);
        match &self.dirty_bitmap {
            Some(dirty_bitmap) if state == CopyState::Copied => dirty_bitmap.run_at(from, run.end),
            _ => (run, state == CopyState::Copied),
        }
    }

    /// Brings a part of a page of copied bits up to date, from the bit `from` on. A chunk that waits for its first flush keeps
    /// the page stale. Gives the bit to go on with.
    pub(crate) fn fill_copied_page(&mut self, number: u64, from: u64, page: &mut [u8; PAGE_BYTES]) -> Option<u64> {
        let (first, part, page_end) = self.part_of_page(number, from);
        let mut at = part.start;
        while at < part.end {
            let (run, is_in_step) = self.in_step_run(at, part.end);
            let (run, durability) = self.durability.run_at(at, run.end);
            let bits = run.start - first..run.end - first;
            at = run.end;
            if !is_in_step {
                set_bits(page, bits, false);
            } else if durability == Durability::Clean {
                set_bits(page, bits, true);
            } else if bits.into_iter().any(|number| !bit(page, number)) {
                self.stale_pages.insert(number);
            }
        }
        (part.end < page_end).then_some(part.end - first)
    }

    /// The same part of the pages that say what was skipped, one for each reason.
    pub(crate) fn fill_skipped_pages(&self, number: u64, from: u64, pages: &mut [Box<[u8; PAGE_BYTES]>]) {
        let Some(map) = &self.skip_map else { return };
        let (first, part, _) = self.part_of_page(number, from);
        for page in &mut *pages {
            set_bits(&mut page[..], part.start - first..part.end - first, false);
        }
        let mut at = part.start;
        while let Some((run, reason)) = map.next_run(at..part.end) {
            at = run.end;
            let page = SkipReason::ALL.into_iter().zip(&mut *pages).find(|(other, _)| *other == reason);
            let (_, page) = page.expect("each reason has its page");
            let mut next = run.start;
            while next < run.end {
                let (part, is_in_step) = self.in_step_run(next, run.end);
                set_bits(&mut page[..], part.start - first..part.end - first, is_in_step);
                next = part.end;
            }
        }
    }

    /// The chunks of a page of the progress map that are looked at under one lock, from its bit `from` on. Gives the page's
    /// first chunk before them and its end behind them.
    fn part_of_page(&self, number: u64, from: u64) -> (u64, Range<u64>, u64) {
        let first = number * self.page_chunks;
        let page_end = (first + self.page_chunks).min(self.copy_state.len());
        (first, first + from..page_end.min(first + from + CHUNKS_AT_ONCE), page_end)
    }

    /// The extents of the activity log, from number `from` on, that need not be there any more. Nothing in them is in
    /// flight or unflushed, and their copied bits are up to date. They are forgotten here. The caller has the map's
    /// lock and clears them on record before anybody else may set them. Gives the number to go on with, too.
    pub(crate) fn take_idle(&mut self, from: u64) -> (Vec<u64>, Option<u64>) {
        let extents_max = (CHUNKS_AT_ONCE / self.chunk.count(ACTIVE_EXTENT)).max(1) as usize;
        let Some(activity) = &self.activity else { return (Vec::new(), None) };
        let mut next = None;
        let mut idle = Vec::new();
        for (looked_at, (number, entry)) in activity.range(from..).enumerate() {
            if looked_at == extents_max {
                next = Some(*number);
                break;
            }
            if entry.in_flight == 0 && entry.on_record && self.is_on_record(*number) {
                idle.push(*number);
            }
        }
        let activity = self.activity.as_mut().expect("looked at above");
        idle.iter().for_each(|number| _ = activity.remove(number));
        (idle, next)
    }

    /// A flush of the target begins: what was written until now is what it makes durable. Each call marks a part of the
    /// volume, and all parts are marked before the flush is issued. What is written meanwhile waits for the next flush.
    /// Gives where to go on.
    pub(crate) fn begin_flush(&mut self, from: Part) -> Option<Part> {
        let from_to =
            [(Durability::FlushingAndUnflushed, Durability::Flushing), (Durability::Unflushed, Durability::Flushing)];
        from.replace(&mut self.durability, from_to)
    }

    /// The flush that began has succeeded, in the same way.
    pub(crate) fn end_flush(&mut self, from: Part) -> Option<Part> {
        let from_to =
            [(Durability::Flushing, Durability::Clean), (Durability::FlushingAndUnflushed, Durability::Unflushed)];
        from.replace(&mut self.durability, from_to)
    }

    /// The session is over: what was not flushed must be copied again, and looked at, from chunk `from` on. Gives the chunk
    /// to go on with. Until all is lost no other session begins, and without one nobody relies on what is copied.
    pub(crate) fn forget_unflushed(&mut self, from: u64) -> Option<u64> {
        let (mut at, mut left) = (from, CHUNKS_AT_ONCE);
        while left > 0 {
            let states = [Durability::Unflushed, Durability::Flushing, Durability::FlushingAndUnflushed];
            let first = states.into_iter().filter_map(|state| Some((self.durability.next(state, at)?, state)));
            let (start, state) = first.min_by_key(|(start, _)| *start)?;
            let run = self.durability.next_run(state, start, left)?;
            for index in run.clone() {
                if self.copy_state.get(index) == CopyState::Copied {
                    self.mark_suspect(index..index + 1);
                    self.count_again(index..index + 1);
                    self.lose(index);
                }
            }
            self.durability.set_range(run.clone(), Durability::Clean);
            (at, left) = (run.end, left - (run.end - run.start));
        }
        Some(at)
    }

    /// Another target is going to have nothing of the copy, and nothing is known of it. Said of a part of the volume at a
    /// time, while there is no session. Gives where to go on.
    pub(crate) fn forget_copies(&mut self, from: Part) -> Option<Part> {
        match from.step {
            0 => {
                let next = from.replace_of(&mut self.copy_state, (CopyState::Copied, CopyState::Absent));
                self.note_unsent(from.at..next.as_ref().map_or(self.chunks(), |next| next.at));
                next.or(Some(Part { step: 1, at: 0 }))
            }
            1 => {
                let next = from.replace_of(&mut self.verify_state, (VerifyState::Equal, VerifyState::Wanted));
                next.or(Some(Part { step: 2, at: 0 }))
            }
            2 => {
                let next = self.forget_skips_from(from.at).map(|at| Part { step: 2, at });
                next.or(Some(Part { step: 3, at: 0 }))
            }
            _ => {
                let at = self.dirty_bitmap.as_mut()?.clear_part(from.at, CHUNKS_AT_ONCE)?;
                Some(Part { step: 3, at })
            }
        }
    }

    /// The target has nothing of what it is thought to have from chunk `from` on: a part of it at a time. Gives the chunk to
    /// go on with.
    pub(crate) fn forget_all_copied(&mut self, from: u64) -> Option<u64> {
        let run = self.next_copied(from, CHUNKS_AT_ONCE)?;
        run.clone().for_each(|index| _ = self.forget_copied(index));
        Some(run.end)
    }

    /// Whether the copied bits say what is of the chunks of an extent of the activity log, and nothing there is unflushed.
    fn is_on_record(&self, extent: u64) -> bool {
        let start = Bytes(extent * ACTIVE_EXTENT.0);
        let chunks = self.chunk.indices_of(Extent::between(start, (start + ACTIVE_EXTENT).min(self.size())));
        let pages = chunks.start / self.page_chunks..=(chunks.end - 1) / self.page_chunks;
        let clean = self.durability.next_run(Durability::Clean, chunks.start, chunks.end - chunks.start);
        clean == Some(chunks) && self.stale_pages.range(pages).next().is_none()
    }
}
