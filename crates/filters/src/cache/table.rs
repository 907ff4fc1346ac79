//! Which place holds a block: a hash table of four bytes a slot. The blocks themselves are in the record, so a slot is compared with that.

/// How many slots there are for three places.
const SLOTS_FOR_THREE: usize = 4;

/// The table. While it is made anew with another length it is two, and a place is in one of them.
pub(super) struct Table {
    slots: Slots,
    /// What is not in `slots` yet, and where those begin.
    before: Option<(Slots, usize)>,
}

impl Table {
    /// For so many places.
    pub(super) fn new(places: usize) -> Self {
        Self { slots: Slots::new(places), before: None }
    }

    /// Reads what [`insert`](Self::insert) will look at first. Several such reads go on at a time in the processor, and an insertion that has
    /// to wait for its own costs more than all else that is done with a place when a cache is opened.
    pub(super) fn glance(&self, block: u64) -> u32 {
        self.slots.slots[self.slots.home(block)]
    }

    /// The place of `block`. `block_of` tells the block of a place that is in the table.
    pub(super) fn find(&self, block: u64, block_of: impl Fn(u32) -> u64) -> Option<u32> {
        let found = self.slots.find(block, &block_of);
        found.or_else(|| self.before.as_ref().and_then(|(before, _)| before.find(block, &block_of)))
    }

    /// `place` holds `block`, which has none.
    pub(super) fn insert(&mut self, block: u64, place: u32) {
        self.slots.insert(block, place);
    }

    /// `place` holds `block` no more.
    pub(super) fn remove(&mut self, block: u64, place: u32, block_of: impl Fn(u32) -> u64) {
        let (slots, slot) = match (self.slots.slot_of(block, place), &mut self.before) {
            (Some(slot), _) => (&mut self.slots, Some(slot)),
            (None, Some((before, _))) => {
                let slot = before.slot_of(block, place);
                (before, slot)
            }
            (None, None) => (&mut self.slots, None),
        };
        slots.empty(slot.expect("it was inserted"), block_of);
    }

    /// Has room for so many places from now on, which hold what is there. [`move_some`](Self::move_some) brings that over, before this is called
    /// again.
    pub(super) fn begin_anew(&mut self, places: usize) {
        assert!(self.before.is_none(), "it is being made anew");
        self.before = Some((std::mem::replace(&mut self.slots, Slots::new(places)), 0));
    }

    /// Looks at `max` slots more of the table before, and brings over what is there. Gives its memory once it is empty, which takes long to
    /// give back; nothing if there is none.
    pub(super) fn move_some(&mut self, max: usize, block_of: impl Fn(u32) -> u64) -> Moved {
        let Some((before, next)) = &mut self.before else { return Moved::All(Vec::new()) };
        let end = before.slots.len().min(*next + max);
        while *next < end {
            match before.slots[*next].checked_sub(1) {
                None => *next += 1,
                Some(place) => {
                    // What is behind it may move to here.
                    before.empty(*next, &block_of);
                    self.slots.insert(block_of(place), place);
                }
            }
        }
        if end < before.slots.len() {
            return Moved::Some;
        }
        Moved::All(self.before.take().map(|(before, _)| before.slots).unwrap_or_default())
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.slots.memory_bytes() + self.before.as_ref().map_or(0, |(before, _)| before.memory_bytes())
    }
}

/// How far a table is made anew.
pub(super) enum Moved {
    /// There is more.
    Some,
    /// To the end: the memory of the one before.
    All(Vec<u32>),
}

/// Open addressing, linear probing; a removal moves what is behind it.
struct Slots {
    /// A place and one more; 0 for none.
    slots: Vec<u32>,
}

impl Slots {
    fn new(places: usize) -> Self {
        Self { slots: vec![0; places / 3 * SLOTS_FOR_THREE + 2 * SLOTS_FOR_THREE] }
    }

    fn home(&self, block: u64) -> usize {
        let hash = (block ^ block >> 23).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((u128::from(hash) * self.slots.len() as u128) >> 64) as usize
    }

    const fn next(&self, slot: usize) -> usize {
        if slot + 1 == self.slots.len() { 0 } else { slot + 1 }
    }

    /// The slots from the home of `block` on, up to the first empty one.
    fn probe(&self, block: u64) -> impl Iterator<Item = (usize, u32)> {
        std::iter::successors(Some(self.home(block)), |slot| Some(self.next(*slot)))
            .map_while(|slot| self.slots[slot].checked_sub(1).map(|place| (slot, place)))
    }

    fn find(&self, block: u64, block_of: impl Fn(u32) -> u64) -> Option<u32> {
        self.probe(block).map(|(_, place)| place).find(|place| block_of(*place) == block)
    }

    /// Where `place`, which holds `block`, is.
    fn slot_of(&self, block: u64, place: u32) -> Option<usize> {
        self.probe(block).find(|(_, other)| *other == place).map(|(slot, _)| slot)
    }

    fn insert(&mut self, block: u64, place: u32) {
        let mut slot = self.home(block);
        while self.slots[slot] != 0 {
            slot = self.next(slot);
        }
        self.slots[slot] = place + 1;
    }

    /// Empties a slot.
    fn empty(&mut self, mut hole: usize, block_of: impl Fn(u32) -> u64) {
        let mut slot = self.next(hole);
        while let Some(other) = self.slots[slot].checked_sub(1) {
            // It may stand anywhere from its home on: does that lie at or before the hole, around the end?
            let home = self.home(block_of(other));
            let stays = if hole < slot { hole < home && home <= slot } else { hole < home || home <= slot };
            if !stays {
                self.slots[hole] = other + 1;
                hole = slot;
            }
            slot = self.next(slot);
        }
        self.slots[hole] = 0;
    }

    fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_table_is_what_a_map_would_be() {
        const PLACES: usize = 40;
        let mut table = Table::new(PLACES);
        let mut plain: BTreeMap<u64, u32> = BTreeMap::new();
        let mut block_of = vec![0; PLACES];
        let mut free: Vec<u32> = (0..PLACES as u32).collect();
        let mut random = block::testing::Random::new(5);
        for turn in 0..20_000 {
            // It is made anew now and then, while it is used.
            if turn % 97 == 0 {
                table.begin_anew(PLACES + turn % 5);
            } else if turn % 97 < 80 {
                table.move_some(1, |place| block_of[place as usize]);
            }
            let block = random.below(80);
            match (plain.get(&block), free.pop()) {
                (Some(&place), unused) => {
                    free.extend(unused);
                    if random.one_in(2) {
                        table.remove(block, place, |place| block_of[place as usize]);
                        plain.remove(&block);
                        free.push(place);
                    }
                }
                (None, Some(place)) => {
                    block_of[place as usize] = block;
                    table.insert(block, place);
                    plain.insert(block, place);
                }
                (None, None) => {}
            }
            for block in 0..80 {
                assert_eq!(table.find(block, |place| block_of[place as usize]), plain.get(&block).copied());
            }
        }
    }
}
