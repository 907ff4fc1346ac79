//! Where the bytes of a grain are on the device of a store.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use block::Bytes;

/// How the place of a grain's bytes is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// Where they are in the volume, counted from `start` of the device: nothing is allocated, and nothing moves.
    Identity {
        /// Where the first byte of the volume is.
        start: Bytes,
    },
    /// In places of `place_bytes` each that are given out one by one ([`PlaceAllocator`]), counted from `start` of the device.
    Allocated {
        /// Where the first place is.
        start: Bytes,
        /// How large each is.
        place_bytes: u64,
    },
}

impl Placement {
    /// Where the byte at `offset` is: of the volume, or with allocated places of all places one behind the other.
    pub(crate) fn place_of(self, offset: Bytes) -> Bytes {
        match self {
            Self::Identity { start } | Self::Allocated { start, .. } => start + offset,
        }
    }

    /// Where place `place` begins.
    pub(crate) fn start_of(self, place: u64) -> Bytes {
        match self {
            Self::Identity { .. } => unreachable!("an identity has no places to give out"),
            Self::Allocated { place_bytes, .. } => self.place_of(Bytes(place * place_bytes)),
        }
    }
}

/// The places of a store that are given out, one behind the other as long as there are such, then the next free one.
///
/// ```text
///   free ──take──▶ used ──give back──▶ free                    if the durable map never named it
///                   │
///                   └──retire, give back──▶ waits ──flushed──▶ free
/// ```
///
/// A place that a record has named is used again only after a flush that began later than the record let it go. Until
/// then a power loss may bring the record back that names it, and its bytes must still be those of that time.
pub(crate) struct PlaceAllocator {
    count: u64,
    /// Those that are free, as runs: the first of each and the one behind its last.
    free: BTreeMap<u64, u64>,
    /// How many those are: of a large store whose free places lie apart they would take seconds to count.
    free_count: u64,
    /// Where the next one is looked for.
    next: u64,
    /// Which the durable map may still name though the running one does not, and since which flush.
    retired: BTreeMap<u64, u64>,
    /// Those of the retired that nobody uses.
    waiting: BTreeSet<u64>,
    /// How many flushes have begun.
    flushes: u64,
}

impl PlaceAllocator {
    /// So many places that wait for a flush are looked at with one hold of whatever lock they are under.
    pub(crate) const FLUSHED_AT_ONCE: usize = 1024;

    /// `count` places, of which `used` are in use.
    pub(crate) fn new(count: u64, used: impl IntoIterator<Item = u64>) -> Self {
        let mut places = Self::all_used(count);
        let mut first = 0;
        let mut used: Vec<u64> = used.into_iter().collect();
        used.sort_unstable();
        for place in used {
            assert!(place < count, "place {place} of {count} was never given out");
            places.add_free(first..place);
            first = place + 1;
        }
        places.add_free(first..count);
        places
    }

    /// `count` places, all of them in use until [`add_free`](Self::add_free) says otherwise. A list of those in use would take more memory
    /// than all else that is known of them.
    pub(crate) const fn all_used(count: u64) -> Self {
        Self {
            count,
            free: BTreeMap::new(),
            free_count: 0,
            next: 0,
            retired: BTreeMap::new(),
            waiting: BTreeSet::new(),
            flushes: 0,
        }
    }

    /// All of `run` is free, as far as there are such places. None of it was.
    pub(crate) fn add_free(&mut self, run: Range<u64>) {
        let (mut first, mut end) = (run.start, run.end.min(self.count));
        if first >= end {
            return;
        }
        self.free_count += end - first;
        if let Some((&before, &before_end)) = self.free.range(..end).next_back() {
            assert!(before_end <= first, "place {first} is given back twice");
            if before_end == first {
                first = before;
            }
        }
        if let Some(behind_end) = self.free.remove(&end) {
            end = behind_end;
        }
        self.free.insert(first, end);
    }

    /// How many there are.
    pub(crate) const fn count(&self) -> u64 {
        self.count
    }

    /// How many are free now.
    pub(crate) const fn free_count(&self) -> u64 {
        self.free_count
    }

    /// Whether the durable map may name a place that the running one does not.
    pub(crate) fn has_retired(&self) -> bool {
        !self.retired.is_empty()
    }

    /// How many such places there are.
    pub(crate) fn retired_count(&self) -> usize {
        self.retired.len()
    }

    /// Whether the durable map may name this place though the running one does not.
    pub(crate) fn is_retired(&self, place: u64) -> bool {
        self.retired.contains_key(&place)
    }

    /// What it takes in memory, in bytes, but for what is retired: a run of free places is an entry of a tree.
    pub(crate) fn memory_bytes(&self) -> usize {
        4 * size_of::<u64>() * self.free.len()
    }

    /// From now on there are `count` places. With fewer, those behind are not given out, and who has one keeps it until it is given back.
    /// With more, [`add_free`](Self::add_free) says which of those are free.
    pub(crate) fn set_count(&mut self, count: u64) {
        if count < self.count {
            let gone = self.free.split_off(&count);
            self.free_count -= gone.iter().map(|(first, end)| end - first).sum::<u64>();
            if let Some((_, end)) = self.free.range_mut(..count).next_back() {
                self.free_count -= end.saturating_sub(count);
                *end = (*end).min(count);
            }
        }
        self.count = count;
        self.next %= count;
    }

    /// Gives out a place.
    pub(crate) fn take(&mut self) -> Option<u64> {
        let around = self.free.range(..=self.next).next_back().filter(|(_, end)| **end > self.next);
        let (&first, &end) =
            around.or_else(|| self.free.range(self.next..).next()).or_else(|| self.free.iter().next())?;
        let place = if (first..end).contains(&self.next) { self.next } else { first };
        self.take_this(place);
        self.next = (place + 1) % self.count;
        Some(place)
    }

    /// The running map names this place no more, while the durable one may.
    pub(crate) fn retire(&mut self, place: u64) {
        self.retired.insert(place, self.flushes + 1);
    }

    /// The same of places that were free until now, when a store is opened.
    pub(crate) fn retire_all(&mut self, places: impl IntoIterator<Item = u64>) {
        for place in places {
            self.retire(place);
            if self.take_this(place) {
                self.waiting.insert(place);
            }
        }
    }

    /// A place that waits is used again, by whom it was let go.
    pub(crate) fn reclaim(&mut self, place: u64) {
        let did_wait = self.waiting.remove(&place);
        assert!(did_wait, "place {place} was not let go, or is somebody else's");
    }

    /// Takes one place out of those that are free; false if it is not.
    fn take_this(&mut self, place: u64) -> bool {
        let around = self.free.range(..=place).next_back().map(|(first, end)| (*first, *end));
        let Some((first, end)) = around.filter(|(_, end)| *end > place) else { return false };
        self.free.remove(&first);
        self.free_count -= 1;
        for (from, to) in [(first, place), (place + 1, end)] {
            if from < to {
                self.free.insert(from, to);
            }
        }
        true
    }

    /// Takes back a place that nobody uses any more.
    pub(crate) fn give_back(&mut self, place: u64) {
        if self.retired.contains_key(&place) {
            self.waiting.insert(place);
        } else {
            self.insert_free(place);
        }
    }

    /// A flush of the record begins; [`flushed`](Self::flushed) takes the number that this gives.
    pub(crate) const fn begin_flush(&mut self) -> u64 {
        self.flushes += 1;
        self.flushes
    }

    /// The flush with this number has made the durable map what the running one was when it began. Looks at no more than `max` of the places
    /// that wait for it, those from `from` on, and gives where it is to go on: a drain may have left millions.
    pub(crate) fn flushed(&mut self, number: u64, from: u64, max: usize) -> Option<u64> {
        let some: Vec<(u64, u64)> =
            self.retired.range(from..).take(max).map(|(place, since)| (*place, *since)).collect();
        for (place, _) in some.iter().filter(|(_, since)| *since <= number) {
            self.retired.remove(place);
            if self.waiting.remove(place) {
                self.insert_free(*place);
            }
        }
        // Those behind are looked at next.
        some.last().filter(|_| some.len() == max).map(|(place, _)| place + 1)
    }

    fn insert_free(&mut self, place: u64) {
        self.add_free(place..place + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_follow_each_other_and_those_in_use_are_left_out() {
        let mut places = PlaceAllocator::new(6, [1, 4]);
        assert_eq!(places.free_count(), 4);
        let taken: Vec<u64> = std::iter::from_fn(|| places.take()).collect();
        assert_eq!(taken, [0, 2, 3, 5]);
        places.give_back(2);
        places.give_back(1);
        places.give_back(3);
        assert_eq!(places.free_count(), 3);
        // It goes on behind the last one it gave, and begins anew at the end.
        assert_eq!([places.take(), places.take(), places.take(), places.take()], [Some(1), Some(2), Some(3), None]);
    }

    #[test]
    fn a_place_that_the_durable_map_names_is_given_out_again_only_after_a_later_flush() {
        let mut places = PlaceAllocator::new(1, [0]);
        let under_way = places.begin_flush();
        places.retire(0);
        places.give_back(0);
        assert!(places.has_retired());
        places.flushed(under_way, 0, 9);
        assert_eq!(places.take(), None, "that flush may have begun before the record let it go");
        let later = places.begin_flush();
        assert_eq!(places.flushed(later, 0, 9), None, "that was all");
        assert_eq!(places.take(), Some(0));
        assert!(!places.has_retired());
    }

    #[test]
    fn a_place_that_only_the_durable_map_names_waits_for_a_flush_and_can_be_reclaimed() {
        let mut places = PlaceAllocator::new(4, [0]);
        places.retire_all([0, 2, 3]);
        assert_eq!((places.free_count(), places.take(), places.take()), (1, Some(1), None));
        places.reclaim(2);
        let flush = places.begin_flush();
        assert_eq!(places.flushed(flush, 0, 2), Some(3), "one is left");
        assert_eq!(places.flushed(flush, 3, 2), None);
        assert_eq!((places.take(), places.take()), (Some(3), None), "2 was reclaimed, and 0 is in use");
    }

    #[test]
    fn places_that_are_taken_away_are_given_out_no_more_until_they_come_back() {
        let mut places = PlaceAllocator::new(8, [1, 6]);
        places.set_count(4);
        assert_eq!(places.free_count(), 3);
        places.give_back(6);
        let taken: Vec<u64> = std::iter::from_fn(|| places.take()).collect();
        assert_eq!(taken, [0, 2, 3]);
        places.set_count(7);
        [4..5, 6..8].into_iter().for_each(|run| places.add_free(run));
        assert_eq!(places.free_count(), 2);
        assert_eq!([places.take(), places.take(), places.take()], [Some(4), Some(6), None]);
    }

    #[test]
    fn a_place_that_is_used_on_after_it_was_retired_stays_with_its_user() {
        let mut places = PlaceAllocator::new(2, [0]);
        places.retire(0);
        let flush = places.begin_flush();
        places.flushed(flush, 0, 9);
        assert_eq!((places.take(), places.take()), (Some(1), None));
        places.give_back(0);
        assert_eq!(places.take(), Some(0));
    }
}
