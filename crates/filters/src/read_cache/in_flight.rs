//! Writes and fills that are under way: a plain structure, which decides what may be kept.
//!
//! A fill is the read of a whole chunk that is to be kept. What it has read may be kept if no write to the chunk was under way at any
//! moment of it. There are no more writes than requests of the guest, so each question looks at all of them.

use std::collections::BTreeMap;

use block::{Bytes, Extent};

#[derive(Default)]
pub(super) struct InFlight {
    next: u64,
    writes: BTreeMap<u64, Write>,
    /// By the start of the chunk, which has one at most.
    fills: BTreeMap<Bytes, Fill>,
}

struct Write {
    extent: Extent,
    /// Another write that overlaps it was under way.
    is_contested: bool,
}

struct Fill {
    chunk: Extent,
    /// A write to the chunk has begun since.
    is_outdated: bool,
}

impl InFlight {
    /// A write to `extent` begins. Gives its number.
    pub(super) fn begin_write(&mut self, extent: Extent) -> u64 {
        let mut is_contested = false;
        for other in self.writes.values_mut().filter(|other| other.extent.overlaps(extent)) {
            (other.is_contested, is_contested) = (true, true);
        }
        let before_its_end = self.fills.range_mut(..extent.end()).rev().map(|(_, fill)| fill);
        for fill in before_its_end.take_while(|fill| fill.chunk.overlaps(extent)) {
            fill.is_outdated = true;
        }
        self.next += 1;
        self.writes.insert(self.next, Write { extent, is_contested });
        self.next
    }

    /// A write has ended, in whichever way. Gives whether it had its bytes for itself.
    pub(super) fn end_write(&mut self, number: u64) -> bool {
        self.writes.remove(&number).is_some_and(|write| !write.is_contested)
    }

    /// A fill of `chunk` begins. Gives whether it does: not if it could not be kept, or another one is under way.
    pub(super) fn begin_fill(&mut self, chunk: Extent) -> bool {
        let is_written = self.writes.values().any(|write| write.extent.overlaps(chunk));
        if is_written || self.fills.contains_key(&chunk.offset) {
            return false;
        }
        self.fills.insert(chunk.offset, Fill { chunk, is_outdated: false });
        true
    }

    /// Whether what the fill of `chunk` has read may still be kept.
    pub(super) fn is_current(&self, chunk: Extent) -> bool {
        self.fills.get(&chunk.offset).is_some_and(|fill| !fill.is_outdated)
    }

    /// The fill of `chunk` has ended.
    pub(super) fn end_fill(&mut self, chunk: Extent) {
        self.fills.remove(&chunk.offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(offset: u64, length: u64) -> Extent {
        Extent::new(Bytes(offset), Bytes(length))
    }

    #[test]
    fn a_write_at_any_moment_of_a_fill_keeps_it_from_being_kept() {
        let mut in_flight = InFlight::default();
        let chunk = extent(100, 100);
        assert!(in_flight.begin_fill(chunk) && !in_flight.begin_fill(chunk), "it is being filled");
        let beside = [in_flight.begin_write(extent(90, 10)), in_flight.begin_write(extent(200, 10))];
        assert!(in_flight.is_current(chunk));
        let write = in_flight.begin_write(extent(199, 1));
        assert!(!in_flight.begin_fill(extent(190, 10)));
        assert!(
            in_flight.end_write(write) && beside.into_iter().all(|one| in_flight.end_write(one)),
            "they do not overlap"
        );
        assert!(!in_flight.is_current(chunk), "the write may have come before the read or after it");
        in_flight.end_fill(chunk);
        assert!(in_flight.begin_fill(chunk) && in_flight.is_current(chunk));
    }

    #[test]
    fn a_write_over_many_chunks_outdates_the_fills_of_all_of_them() {
        let mut in_flight = InFlight::default();
        let chunks = [0, 100, 200, 300, 400].map(|offset| extent(offset, 100));
        assert!(chunks.into_iter().all(|chunk| in_flight.begin_fill(chunk)));
        in_flight.begin_write(extent(150, 160));
        assert_eq!(chunks.map(|chunk| in_flight.is_current(chunk)), [true, false, false, false, true]);
    }

    #[test]
    fn writes_that_overlap_are_contested_both_of_them() {
        let mut in_flight = InFlight::default();
        let [a, b, c] =
            [(0, 10), (5, 10), (15, 10)].map(|(offset, length)| in_flight.begin_write(extent(offset, length)));
        assert_eq!([a, b, c].map(|number| in_flight.end_write(number)), [false, false, true]);
        let later = in_flight.begin_write(extent(0, 10));
        assert!(in_flight.end_write(later));
    }
}
