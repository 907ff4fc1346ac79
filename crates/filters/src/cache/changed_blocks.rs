//! Which blocks a guest has changed since its volume came to this host: Firepan's invalidation table (section 3.3, algorithm 1).
//!
//! A hash table with separate chaining, as in the paper, with what the paper leaves out: a block that is changed again adds no entry, and a
//! table that has as many entries as it may becomes a bitmap. So it takes a bounded amount of memory, whatever the guest does. A look-up
//! takes O(1 + n / buckets); the paper says O(log n).

use std::ops::Range;

/// The end of a chain.
const NONE: u32 = u32::MAX;
/// There is a bucket for so many entries that the table may have.
const ENTRIES_A_BUCKET: usize = 2;

/// A set of block numbers.
pub(super) enum ChangedBlocks {
    Chains(Chains),
    /// A bit for each block of the volume.
    Bitmap {
        words: Vec<u64>,
        count: u64,
    },
}

pub(super) struct Chains {
    /// The first entry of each chain.
    buckets: Vec<u32>,
    /// A block and the next entry of its chain. Free entries are a chain, too.
    entries: Vec<(u64, u32)>,
    free: u32,
    count: usize,
    entries_max: usize,
    /// How many blocks the volume has.
    blocks: u64,
}

impl ChangedBlocks {
    /// None of `blocks` blocks. It becomes a bitmap with more than `entries_max`.
    pub(super) fn new(blocks: u64, entries_max: usize) -> Self {
        let buckets = (entries_max / ENTRIES_A_BUCKET).next_power_of_two().min(1 << 16);
        Self::Chains(Chains {
            buckets: vec![NONE; buckets],
            entries: Vec::new(),
            free: NONE,
            count: 0,
            entries_max,
            blocks,
        })
    }

    /// Adds blocks of the volume.
    pub(super) fn insert_all(&mut self, blocks: Range<u64>) {
        for block in blocks {
            match self {
                Self::Chains(chains) if chains.count < chains.entries_max || chains.contains(block) => {
                    chains.insert(block);
                }
                Self::Chains(chains) => {
                    *self = chains.to_bitmap();
                    self.insert_all(block..block + 1);
                }
                Self::Bitmap { words, count } => {
                    let word = &mut words[block as usize / 64];
                    *count += u64::from(*word >> (block % 64) & 1 == 0);
                    *word |= 1 << (block % 64);
                }
            }
        }
    }

    pub(super) fn contains(&self, block: u64) -> bool {
        match self {
            Self::Chains(chains) => chains.contains(block),
            Self::Bitmap { words, .. } => words[block as usize / 64] >> (block % 64) & 1 == 1,
        }
    }

    /// Whether it has one of `blocks`.
    pub(super) fn contains_any(&self, blocks: Range<u64>) -> bool {
        !self.is_empty() && blocks.into_iter().any(|block| self.contains(block))
    }

    pub(super) fn remove(&mut self, block: u64) {
        match self {
            Self::Chains(chains) => chains.remove(block),
            Self::Bitmap { words, count } => {
                let word = &mut words[block as usize / 64];
                *count -= *word >> (block % 64) & 1;
                *word &= !(1 << (block % 64));
            }
        }
    }

    /// Any of them. Whoever takes them out one after the other keeps `from`, zero at first: where the last one was found. Then the whole
    /// table is gone through once, however many there are.
    pub(super) fn next(&self, from: &mut usize) -> Option<u64> {
        let places = match self {
            Self::Chains(chains) => chains.buckets.len(),
            Self::Bitmap { words, .. } => words.len(),
        };
        let start = (*from).min(places);
        // What was added behind comes last.
        let found = (start..places).chain(0..start).find(|at| self.is_used(*at))?;
        *from = found;
        Some(match self {
            Self::Chains(chains) => chains.entries[chains.buckets[found] as usize].0,
            Self::Bitmap { words, .. } => found as u64 * 64 + u64::from(words[found].trailing_zeros()),
        })
    }

    fn is_used(&self, at: usize) -> bool {
        match self {
            Self::Chains(chains) => chains.buckets[at] != NONE,
            Self::Bitmap { words, .. } => words[at] != 0,
        }
    }

    pub(super) const fn len(&self) -> u64 {
        match self {
            Self::Chains(chains) => chains.count as u64,
            Self::Bitmap { count, .. } => *count,
        }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What it takes in memory, in bytes.
    pub(super) const fn memory_bytes(&self) -> usize {
        match self {
            Self::Chains(chains) => {
                chains.buckets.capacity() * size_of::<u32>() + chains.entries.capacity() * size_of::<(u64, u32)>()
            }
            Self::Bitmap { words, .. } => words.capacity() * size_of::<u64>(),
        }
    }
}

impl Chains {
    const fn bucket_of(&self, block: u64) -> usize {
        (block.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize & (self.buckets.len() - 1)
    }

    /// The entries of the chain of `block`.
    fn chain(&self, block: u64) -> impl Iterator<Item = u32> {
        let behind = |entry: u32| (entry != NONE).then_some(entry);
        std::iter::successors(behind(self.buckets[self.bucket_of(block)]), move |entry| {
            behind(self.entries[*entry as usize].1)
        })
    }

    fn contains(&self, block: u64) -> bool {
        self.chain(block).any(|entry| self.entries[entry as usize].0 == block)
    }

    fn insert(&mut self, block: u64) {
        if self.contains(block) {
            return;
        }
        let bucket = self.bucket_of(block);
        let entry = (block, self.buckets[bucket]);
        let at = if self.free == NONE {
            self.entries.push(entry);
            self.entries.len() as u32 - 1
        } else {
            let at = self.free;
            self.free = self.entries[at as usize].1;
            self.entries[at as usize] = entry;
            at
        };
        self.buckets[bucket] = at;
        self.count += 1;
    }

    fn remove(&mut self, block: u64) {
        let found = self.chain(block).find(|entry| self.entries[*entry as usize].0 == block);
        let Some(entry) = found else { return };
        let before = self.chain(block).find(|before| self.entries[*before as usize].1 == entry);
        let behind = self.entries[entry as usize].1;
        match before {
            Some(before) => self.entries[before as usize].1 = behind,
            None => {
                let bucket = self.bucket_of(block);
                self.buckets[bucket] = behind;
            }
        }
        self.entries[entry as usize].1 = self.free;
        self.free = entry;
        self.count -= 1;
    }

    fn to_bitmap(&self) -> ChangedBlocks {
        let mut words = vec![0_u64; self.blocks.div_ceil(64) as usize];
        let chained = self.buckets.iter().flat_map(|first| {
            let behind = |entry: u32| (entry != NONE).then_some(entry);
            std::iter::successors(behind(*first), move |entry| behind(self.entries[*entry as usize].1))
        });
        for block in chained.map(|entry| self.entries[entry as usize].0) {
            words[block as usize / 64] |= 1 << (block % 64);
        }
        ChangedBlocks::Bitmap { words, count: self.count as u64 }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn it_is_what_a_set_would_be_also_once_it_is_a_bitmap() {
        let mut random = block::testing::Random::new(9);
        for entries_max in [0, 5, 40, 1000] {
            let mut changed = ChangedBlocks::new(200, entries_max);
            let (mut plain, mut from) = (BTreeSet::new(), 0);
            for _ in 0..5000 {
                let first = random.below(195);
                let blocks = first..first + 1 + random.below(5);
                if random.one_in(3) {
                    changed.insert_all(blocks.clone());
                    plain.extend(blocks);
                } else {
                    blocks.for_each(|block| {
                        changed.remove(block);
                        plain.remove(&block);
                    });
                }
                assert_eq!(changed.len(), plain.len() as u64);
                let next = changed.next(&mut from);
                assert_ne!(next.is_some(), plain.is_empty());
                assert!(next.is_none_or(|block| plain.contains(&block)));
                let one = random.below(200);
                assert_eq!(changed.contains(one), plain.contains(&one), "{one}");
                assert_eq!(changed.contains_any(one..one + 3), plain.range(one..one + 3).next().is_some());
            }
            assert_eq!(matches!(changed, ChangedBlocks::Bitmap { .. }), entries_max < 50, "{entries_max}");
        }
    }

    #[test]
    fn the_whole_table_is_gone_through_once_however_many_there_are() {
        for (blocks, entries_max) in [(1 << 22, 0), (1 << 18, 1 << 20)] {
            let mut changed = ChangedBlocks::new(blocks, entries_max);
            changed.insert_all(blocks / 2..blocks);
            let (mut from, mut count, mut last) = (0, 0, 0);
            while let Some(block) = changed.next(&mut from) {
                changed.remove(block);
                assert!(from >= last, "the search begins anew");
                (count, last) = (count + 1, from);
            }
            assert_eq!(count, blocks / 2);
        }
    }

    #[test]
    fn a_guest_that_writes_the_same_blocks_again_and_again_takes_no_more_memory() {
        let mut changed = ChangedBlocks::new(1 << 28, 1 << 16);
        (0..100).for_each(|_| changed.insert_all(7..1007));
        assert_eq!(changed.len(), 1000);
        let few = changed.memory_bytes();
        assert!(few < 300 << 10, "{few}");
        // A bitmap of the volume is the most that it takes.
        changed.insert_all(0..1 << 20);
        assert_eq!((changed.len(), changed.memory_bytes()), (1 << 20, (1 << 28) / 8));
    }
}
