//! Which chunks were skipped, and why: two bits a chunk, in pages of which those of one state take next to nothing.
//!
//! What the map says of a chunk holds while the chunk is in step. Whatever changes a chunk, or its copy, takes it out of the
//! map first.

use std::collections::BTreeMap;
use std::ops::Range;

use block::{Bytes, ChunkMap, ChunkSize, PackedState};

use super::skip::SkipReason;

/// Whether a chunk was skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Skipped(Option<SkipReason>);

impl PackedState for Skipped {
    fn to_bits(self) -> u8 {
        match self.0 {
            None => 0,
            Some(SkipReason::Hole) => 1,
            Some(SkipReason::Zero) => 2,
        }
    }
    fn from_bits(bits: u8) -> Self {
        Self(match bits {
            1 => Some(SkipReason::Hole),
            2 => Some(SkipReason::Zero),
            _ => None,
        })
    }
}

/// The chunks of a volume that were skipped.
#[derive(Debug)]
pub(crate) struct SkipMap {
    chunks: ChunkMap<Skipped>,
}

impl SkipMap {
    /// Of a volume of so many chunks, none of which was skipped.
    pub(crate) fn new(chunks: u64) -> Self {
        Self { chunks: ChunkMap::new(chunks, Skipped(None)) }
    }

    /// Why a chunk was skipped, if it was.
    pub(crate) fn reason(&self, index: u64) -> Option<SkipReason> {
        self.chunks.get(index).0
    }

    /// These chunks were skipped.
    pub(crate) fn insert_run(&mut self, run: Range<u64>, reason: SkipReason) {
        self.chunks.set_range(run, Skipped(Some(reason)));
    }

    /// A chunk is not skipped any more. Gives whether it was.
    pub(crate) fn remove(&mut self, index: u64) -> bool {
        self.chunks.set(index, Skipped(None)).0.is_some()
    }

    /// The next run of chunks within `range` that were skipped for one reason.
    pub(crate) fn next_run(&self, range: Range<u64>) -> Option<(Range<u64>, SkipReason)> {
        let length = range.end.saturating_sub(range.start);
        let runs = SkipReason::ALL.into_iter().filter_map(|reason| {
            let run = self.chunks.next_run(Skipped(Some(reason)), range.start, length)?;
            (run.start < range.end).then(|| (run.start..run.end.min(range.end), reason))
        });
        runs.min_by_key(|(run, _)| run.start)
    }

    /// Takes the next `chunks_max` that were skipped out, from chunk `from` on. Gives the chunk to go on with.
    pub(crate) fn clear_part(&mut self, from: u64, chunks_max: u64) -> Option<u64> {
        let (mut at, mut left) = (from, chunks_max);
        while left > 0 {
            let (run, _) = self.next_run(at..self.chunks.len())?;
            let run = run.start..run.end.min(run.start + left);
            (at, left) = (run.end, left - (run.end - run.start));
            self.chunks.set_range(run, Skipped(None));
        }
        Some(at)
    }

    /// How much was skipped, by the names of the reasons: bytes of a volume of `size` in chunks of `chunk`.
    pub(crate) fn bytes(&self, size: Bytes, chunk: ChunkSize) -> BTreeMap<String, u64> {
        let last = self.chunks.len().checked_sub(1);
        let short = self.chunks.len() * chunk.bytes() - size.0;
        let bytes_of = |reason| {
            let has_last = last.is_some_and(|last| self.reason(last) == Some(reason));
            self.chunks.count(Skipped(Some(reason))) * chunk.bytes() - if has_last { short } else { 0 }
        };
        let all = SkipReason::ALL.into_iter().map(|reason| (reason.name().to_owned(), bytes_of(reason)));
        all.filter(|(_, bytes)| *bytes > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_skipped_is_counted_by_its_reason_and_the_last_chunk_is_as_long_as_it_is() {
        let (chunk, size) = (ChunkSize::new(4096).expect("a chunk size"), Bytes(10 * 4096 - 100));
        let mut map = SkipMap::new(10);
        [(2, SkipReason::Zero), (3, SkipReason::Zero), (4, SkipReason::Hole), (9, SkipReason::Zero)]
            .into_iter()
            .for_each(|(index, reason)| map.insert_run(index..index + 1, reason));
        let expected = [("hole".to_owned(), 4096), ("zero".to_owned(), 3 * 4096 - 100)];
        assert_eq!(map.bytes(size, chunk), BTreeMap::from(expected));
        assert_eq!(map.next_run(0..10), Some((2..4, SkipReason::Zero)));
        assert_eq!(map.next_run(3..10), Some((3..4, SkipReason::Zero)));
        assert_eq!((map.next_run(4..9), map.next_run(5..9)), (Some((4..5, SkipReason::Hole)), None));
        assert!(map.remove(3) && !map.remove(3), "it is taken out once");
        assert_eq!((map.reason(3), map.reason(2)), (None, Some(SkipReason::Zero)));
    }
}
