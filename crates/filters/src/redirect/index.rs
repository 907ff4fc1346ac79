//! What a redirection knows in memory: the place of each chunk, and whose each place is.

use crate::store::PlaceAllocator;

/// How many places are looked at for one that can be given up.
pub(super) const LOOKS_MAX: u32 = 64;

/// Which chunk has which place. Four bytes a chunk and some five a place.
pub(super) struct Index {
    /// The place of each chunk, and one more; 0 for none.
    place_of: Vec<u32>,
    /// The chunk of each place, and one more; 0 for none.
    owner_of: Vec<u32>,
    /// Whether a place has all of its chunk.
    is_cached: Vec<bool>,
    /// Whether it was asked for since the hand last went by.
    was_used: Vec<bool>,
    /// Where the search for a place to give up goes on.
    hand: u64,
    cached: u64,
    pub(super) places: PlaceAllocator,
}

impl Index {
    /// Of `chunks` chunks and `places` places, where some places have their chunks already.
    pub(super) fn new(chunks: u64, places: u64, owned: &[(u64, u64)]) -> Self {
        let mut index = Self {
            place_of: vec![0; chunks as usize],
            owner_of: vec![0; places as usize],
            is_cached: vec![false; places as usize],
            was_used: vec![false; places as usize],
            hand: 0,
            cached: 0,
            places: PlaceAllocator::new(places, owned.iter().map(|(place, _)| *place)),
        };
        owned.iter().for_each(|(place, chunk)| index.own(*place, *chunk));
        index
    }

    fn own(&mut self, place: u64, chunk: u64) {
        assert_eq!(self.place_of[chunk as usize], 0, "chunk {chunk} has a place already");
        self.place_of[chunk as usize] = place as u32 + 1;
        self.owner_of[place as usize] = chunk as u32 + 1;
    }

    /// The place of `chunk`, which is used now, and whether it has all of it.
    pub(super) fn find(&mut self, chunk: u64) -> Option<(u64, bool)> {
        let place = u64::from(self.place_of[chunk as usize].checked_sub(1)?);
        self.was_used[place as usize] = true;
        Some((place, self.is_cached[place as usize]))
    }

    /// Whose `place` is.
    pub(super) fn owner(&self, place: u64) -> Option<u64> {
        self.owner_of[place as usize].checked_sub(1).map(u64::from)
    }

    /// Gives `chunk`, which has none, a free place.
    pub(super) fn claim(&mut self, chunk: u64) -> Option<u64> {
        let place = self.places.take()?;
        self.own(place, chunk);
        self.was_used[place as usize] = true;
        Some(place)
    }

    /// Gives `chunk`, which has none, the place back that it has let go since the last flush.
    pub(super) fn reclaim(&mut self, place: u64, chunk: u64) {
        self.places.reclaim(place);
        self.own(place, chunk);
    }

    /// Whether `place` has all of its chunk, from now on.
    pub(super) fn set_cached(&mut self, place: u64, is_cached: bool) {
        let was = std::mem::replace(&mut self.is_cached[place as usize], is_cached);
        self.cached = self.cached + u64::from(is_cached) - u64::from(was);
    }

    /// Takes `place` from its chunk. The record names it no more.
    pub(super) fn release(&mut self, place: u64) {
        self.set_cached(place, false);
        let owner = std::mem::take(&mut self.owner_of[place as usize]);
        assert_ne!(owner, 0, "place {place} is nobody's");
        self.place_of[owner as usize - 1] = 0;
        self.places.give_back(place);
    }

    /// The next place that was not used of late, and its chunk: the hand of a clock.
    pub(super) fn candidate(&mut self) -> Option<(u64, u64)> {
        for _ in 0..2 * self.places.count() {
            let place = self.hand;
            self.hand = (self.hand + 1) % self.places.count();
            let was_used = std::mem::take(&mut self.was_used[place as usize]);
            if let Some(chunk) = self.owner(place)
                && !was_used
            {
                return Some((place, chunk));
            }
        }
        None
    }

    /// How many places have all of their chunks.
    pub(super) const fn cached(&self) -> u64 {
        self.cached
    }

    /// How much memory it takes, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        (self.place_of.len() + self.owner_of.len()) * size_of::<u32>() + self.is_cached.len() + self.was_used.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_claim_places_and_leave_them() {
        let mut index = Index::new(100, 3, &[(1, 50)]);
        assert_eq!(index.find(50), Some((1, false)));
        assert_eq!([index.claim(7), index.claim(8), index.claim(9)], [Some(0), Some(2), None]);
        index.set_cached(0, true);
        assert_eq!((index.find(7), index.cached()), (Some((0, true)), 1));
        index.release(0);
        assert_eq!((index.find(7), index.owner(0), index.cached()), (None, None, 0));
        assert_eq!(index.claim(9), Some(0));
    }

    #[test]
    fn the_hand_leaves_out_what_was_just_used() {
        let mut index = Index::new(10, 3, &[(0, 4), (1, 5), (2, 6)]);
        assert!(index.find(4).is_some());
        assert_eq!(index.candidate(), Some((1, 5)));
        assert!(index.find(6).is_some());
        assert_eq!(index.candidate(), Some((0, 4)), "one round later it may go");
        assert_eq!(Index::new(10, 2, &[]).candidate(), None);
    }
}
