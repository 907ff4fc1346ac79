//! Which chunks have been written since they were copied.

use std::ops::Range;

use block::{ChunkMap, PackedState};

/// What is known of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// Nothing that its copy does not or will not have.
    Clean,
    /// Written before the pass has come to it. Only a strategy that is not incremental keeps this.
    Ahead,
    /// Written since it was claimed for a copy.
    Dirty,
    /// Dirty, and written so often that its copy is put off.
    Deferred,
}

impl PackedState for Mark {
    fn to_bits(self) -> u8 {
        self as u8
    }
    fn from_bits(bits: u8) -> Self {
        [Self::Clean, Self::Ahead, Self::Dirty, Self::Deferred][usize::from(bits)]
    }
}

/// The dirty bitmap of one volume.
pub(crate) struct DirtyBitmap {
    marks: ChunkMap<Mark>,
    /// Writes ahead of the copy are not marked.
    incremental: bool,
}

impl DirtyBitmap {
    /// A clean volume of so many chunks.
    pub(crate) fn new(chunks: u64, incremental: bool) -> Self {
        Self { marks: ChunkMap::new(chunks, Mark::Clean), incremental }
    }

    /// A chunk is written; `is_ahead` says whether this pass will still come to it. Gives whether the chunk was in step
    /// as far as this map knows.
    pub(crate) fn mark(&mut self, index: u64, is_ahead: bool) -> bool {
        let before = self.marks.get(index);
        let next = match (before, is_ahead) {
            (Mark::Clean, true) if self.incremental => return false,
            (Mark::Clean, true) => Mark::Ahead,
            (Mark::Clean | Mark::Ahead, false) => Mark::Dirty,
            _ => return false,
        };
        self.marks.set(index, next);
        before == Mark::Clean && !is_ahead
    }

    /// A copy claims these chunks: what was written ahead of it is tracked from now on like anything else.
    pub(crate) fn claim(&mut self, run: Range<u64>) {
        let mut from = run.start;
        while let Some(ahead) = self.marks.next_run(Mark::Ahead, from, run.end.saturating_sub(from)) {
            if ahead.start >= run.end {
                return;
            }
            from = ahead.end;
            self.marks.set_range(ahead, Mark::Dirty);
        }
    }

    /// Takes the next run of dirty chunks at or after `from`, of at most `chunks_max`, and makes it clean: get and clear.
    /// Deferred ones are taken only if `with_deferred`.
    pub(crate) fn get_and_clear(&mut self, from: u64, chunks_max: u64, with_deferred: bool) -> Option<Range<u64>> {
        let next = |mark| self.marks.next_run(mark, from, chunks_max);
        let dirty = next(Mark::Dirty);
        let deferred = if with_deferred { next(Mark::Deferred) } else { None };
        let run = match (dirty, deferred) {
            (Some(dirty), Some(deferred)) => {
                if dirty.start < deferred.start {
                    dirty
                } else {
                    deferred
                }
            }
            (dirty, deferred) => dirty.or(deferred)?,
        };
        self.marks.set_range(run.clone(), Mark::Clean);
        Some(run)
    }

    /// Puts the copy of a chunk off.
    pub(crate) fn defer(&mut self, index: u64) {
        self.marks.set(index, Mark::Deferred);
    }

    /// Forgets everything: all chunks are going to be copied.
    pub(crate) fn clear(&mut self) {
        for mark in [Mark::Ahead, Mark::Dirty, Mark::Deferred] {
            self.marks.replace(mark, Mark::Clean);
        }
    }

    /// The same of the next `chunks_max` that have a mark, from chunk `from` on. Gives the chunk to go on with.
    pub(crate) fn clear_part(&mut self, from: u64, chunks_max: u64) -> Option<u64> {
        let (mut at, mut left) = (from, chunks_max);
        while left > 0 {
            let first = [Mark::Ahead, Mark::Dirty, Mark::Deferred].map(|mark| Some((self.marks.next(mark, at)?, mark)));
            let (start, mark) = first.into_iter().flatten().min_by_key(|(start, _)| *start)?;
            let run = self.marks.next_run(mark, start, left)?;
            (at, left) = (run.end, left - (run.end - run.start));
            self.marks.set_range(run, Mark::Clean);
        }
        Some(at)
    }

    /// How many chunks must be copied again: all of them, and those that are put off.
    pub(crate) fn dirty(&self) -> (u64, u64) {
        let deferred = self.marks.count(Mark::Deferred);
        (self.marks.count(Mark::Dirty) + deferred, deferred)
    }

    /// Whether no chunk has any mark.
    pub(crate) fn is_clean(&self) -> bool {
        self.marks.count(Mark::Clean) == self.marks.len()
    }

    /// The part of `run`, from its start, that has no mark.
    pub(crate) fn clean_prefix(&self, run: Range<u64>) -> Range<u64> {
        match self.marks.next_run(Mark::Clean, run.start, run.end - run.start) {
            Some(clean) if clean.start == run.start => clean,
            _ => run.start..run.start,
        }
    }

    /// Whether a chunk has no mark.
    pub(crate) fn is_clean_at(&self, index: u64) -> bool {
        self.marks.get(index) == Mark::Clean
    }

    /// A run of chunks from `from` on, not past `limit`, and whether they have no mark.
    pub(crate) fn run_at(&self, from: u64, limit: u64) -> (Range<u64>, bool) {
        let (run, mark) = self.marks.run_at(from, limit);
        (run, mark == Mark::Clean)
    }

    /// The first chunk without a mark at or after `from`.
    pub(crate) fn next_clean(&self, from: u64) -> Option<u64> {
        self.marks.next(Mark::Clean, from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Write(u64),
        Claim(u64),
        GetAndClear,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0_u64..40).prop_map(Step::Write),
            2 => (0_u64..40).prop_map(Step::Claim),
            1 => Just(Step::GetAndClear),
        ]
    }

    proptest! {
        /// Beside a model that keeps, for each chunk, whether it was written since it was last claimed.
        #[test]
        fn nothing_that_was_written_after_its_claim_is_forgotten(
            steps in prop::collection::vec(step(), 1..200),
            incremental: bool,
        ) {
            let mut dirty_bitmap = DirtyBitmap::new(40, incremental);
            let mut to_copy: BTreeSet<u64> = (0..40).collect();
            let (mut written, mut ahead) = (BTreeSet::new(), BTreeSet::new());
            for step in steps {
                match step {
                    Step::Write(index) => {
                        let is_ahead = to_copy.contains(&index);
                        dirty_bitmap.mark(index, is_ahead);
                        if is_ahead { ahead.insert(index) } else { written.insert(index) };
                    }
                    Step::Claim(index) => {
                        to_copy.remove(&index);
                        dirty_bitmap.claim(index..index + 1);
                        if ahead.remove(&index) && !incremental {
                            written.insert(index);
                        }
                    }
                    Step::GetAndClear => {
                        let mut taken = BTreeSet::new();
                        while let Some(run) = dirty_bitmap.get_and_clear(0, 3, false) {
                            taken.extend(run);
                        }
                        prop_assert_eq!(&taken, &written);
                        written.clear();
                        to_copy.extend(taken);
                    }
                }
                prop_assert_eq!(dirty_bitmap.dirty().0, written.len() as u64);
            }
        }
    }

    #[test]
    fn what_is_put_off_is_taken_only_when_it_is_asked_for() {
        let mut dirty_bitmap = DirtyBitmap::new(100, true);
        for index in [3, 4, 50] {
            assert!(dirty_bitmap.mark(index, false), "it was in step");
        }
        assert!(!dirty_bitmap.mark(3, false), "it was dirty already");
        dirty_bitmap.defer(4);
        assert_eq!((dirty_bitmap.dirty(), dirty_bitmap.is_clean()), ((3, 1), false));
        assert_eq!(dirty_bitmap.get_and_clear(0, 9, false), Some(3..4));
        assert!(!dirty_bitmap.mark(4, false), "a chunk that is put off stays so");
        assert_eq!(dirty_bitmap.get_and_clear(0, 9, true), Some(4..5));
        assert_eq!(dirty_bitmap.clean_prefix(40..60), 40..50);
        dirty_bitmap.clear();
        assert!(dirty_bitmap.is_clean());
    }
}
