//! Which place holds a block: a hash table of four bytes a slot. The blocks themselves are in the record, so a slot is compared with that.

/// How many slots there are for three places.
const SLOTS_FOR_THREE: usize = 4;

/// Open addressing, linear probing; a removal moves what is behind it.
#[derive(Default)]
pub(super) struct Table {
    /// A place and one more; 0 for none.
    slots: Vec<u32>,
}

impl Table {
    /// For so many places.
    pub(super) fn new(places: usize) -> Self {
        Self { slots: vec![0; places / 3 * SLOTS_FOR_THREE + 2 * SLOTS_FOR_THREE] }
    }

    fn home(&self, block: u64) -> usize {
        let hash = (block ^ block >> 23).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((u128::from(hash) * self.slots.len() as u128) >> 64) as usize
    }

    fn next(&self, slot: usize) -> usize {
        if slot + 1 == self.slots.len() { 0 } else { slot + 1 }
    }

    /// The slots from the home of `block` on, up to the first empty one.
    fn probe(&self, block: u64) -> impl Iterator<Item = (usize, u32)> {
        let first = if self.slots.is_empty() { None } else { Some(self.home(block)) };
        std::iter::successors(first, |slot| Some(self.next(*slot)))
            .map_while(|slot| self.slots[slot].checked_sub(1).map(|place| (slot, place)))
    }

    /// The place of `block`. `block_of` tells the block of a place that is in the table.
    pub(super) fn find(&self, block: u64, block_of: impl Fn(u32) -> u64) -> Option<u32> {
        self.probe(block).map(|(_, place)| place).find(|place| block_of(*place) == block)
    }

    /// `place` holds `block`, which has none.
    pub(super) fn insert(&mut self, block: u64, place: u32) {
        let mut slot = self.home(block);
        while self.slots[slot] != 0 {
            slot = self.next(slot);
        }
        self.slots[slot] = place + 1;
    }

    /// `place` holds `block` no more.
    pub(super) fn remove(&mut self, block: u64, place: u32, block_of: impl Fn(u32) -> u64) {
        let found = self.probe(block).find(|(_, other)| *other == place);
        let (mut hole, _) = found.expect("it was inserted");
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

    /// All places that hold a block.
    pub(super) fn places(&self) -> impl Iterator<Item = u32> {
        self.slots.iter().filter_map(|slot| slot.checked_sub(1))
    }

    pub(super) fn memory_bytes(&self) -> usize {
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
        for _ in 0..20_000 {
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
