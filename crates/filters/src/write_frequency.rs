//! Which of very many blocks are written often, in little memory. It is a multi-stage filter with conservative update
//! (Estan and Varghese, "New Directions in Traffic Measurement and Accounting"; ESX paper, section 2.3.3).
//!
//! There are [`STAGES`] stages of `m` counters, each with a uniform hash function of its own. A write raises the counters
//! of its block, but only those that are the least of them: the others count somebody else as well. The least of a
//! block's counters is its count. It never is too low, and too high only where every stage has a collision.
//!
//! *Ageing*: all counters are halved once as many writes have been counted as a stage has counters. Every write that
//! follows halves a few, so that no write waits for all of them. So a count tells of the last `2 m` writes or so,
//! whatever the load is, and collisions add no more than [`WriteFrequencySketch::noise`] to it.
//!
//! Memory: a counter takes 2 bytes, and a stage has one counter for every 8 blocks, at most [`COUNTERS_MAX`]. That is
//! 32 MiB for a volume of 64 TiB in chunks of 64 KiB, 64 KiB for one of 4 GiB.

/// How many counters a block has.
pub const STAGES: usize = 4;
/// A stage never has more counters than this.
pub const COUNTERS_MAX: u64 = 1 << 22;
/// Nor fewer.
const COUNTERS_MIN: u64 = 1 << 10;
/// So many blocks share a counter of a stage.
const BLOCKS_A_COUNTER: u64 = 8;
/// So many counters are halved with a write while ageing is under way.
const HALVED_AT_ONCE: usize = 64;

/// Counts writes to blocks by their numbers.
#[derive(Clone)]
pub struct WriteFrequencySketch {
    counters: Vec<u16>,
    /// The counters of a stage are two to this power.
    bits: u32,
    hashes: [(u64, u64); STAGES],
    /// How many writes the counters stand for, as they have aged.
    weight: f64,
    /// Writes since ageing last began.
    since_ageing: u64,
    /// How many counters are halved already, while ageing is under way.
    halved: Option<usize>,
    /// How many writes there were at all.
    total: u64,
}

impl WriteFrequencySketch {
    /// For a volume of so many blocks. `random` gives the hash functions.
    #[must_use]
    pub fn new(blocks: u64, mut random: impl FnMut() -> u64) -> Self {
        let wanted = (blocks / BLOCKS_A_COUNTER).clamp(COUNTERS_MIN, COUNTERS_MAX);
        let bits = wanted.next_power_of_two().ilog2();
        Self {
            counters: vec![0; STAGES << bits],
            bits,
            // Multiply and shift: uniform for any odd factor drawn at random.
            hashes: std::array::from_fn(|_| (random() | 1, random())),
            weight: 0.0,
            since_ageing: 0,
            halved: None,
            total: 0,
        }
    }

    /// Counts a write to `block`, and gives its count.
    pub fn add(&mut self, block: u64) -> u16 {
        self.total += 1;
        self.weight += 1.0;
        self.since_ageing += 1;
        self.age();
        let slots = self.slots(block);
        let least = slots.iter().map(|slot| self.counters[*slot]).min().unwrap_or(0);
        let next = least.saturating_add(1);
        for slot in slots {
            let counter = &mut self.counters[slot];
            *counter = (*counter).max(next);
        }
        next
    }

    /// How often `block` was written, of late.
    #[must_use]
    pub fn count(&self, block: u64) -> u16 {
        self.slots(block).iter().map(|slot| self.counters[*slot]).min().unwrap_or(0)
    }

    /// How many writes all counts together stand for, as they have aged.
    #[must_use]
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// What collisions may add to a count: the share of every counter in all writes.
    #[must_use]
    pub fn noise(&self) -> f64 {
        self.weight / (1_u64 << self.bits) as f64
    }

    /// How many writes were counted since the beginning.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// How much memory it takes, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.counters.capacity() * size_of::<u16>() + size_of::<Self>()
    }

    fn slots(&self, block: u64) -> [usize; STAGES] {
        std::array::from_fn(|stage| {
            let (factor, summand) = self.hashes[stage];
            let hash = block.wrapping_mul(factor).wrapping_add(summand) >> (64 - self.bits);
            (stage << self.bits) + hash as usize
        })
    }

    fn age(&mut self) {
        if self.halved.is_none() && self.since_ageing >= 1 << self.bits {
            self.halved = Some(0);
            self.since_ageing = 0;
            self.weight /= 2.0;
        }
        let Some(from) = self.halved else { return };
        let end = (from + HALVED_AT_ONCE).min(self.counters.len());
        self.counters[from..end].iter_mut().for_each(|counter| *counter /= 2);
        self.halved = (end < self.counters.len()).then_some(end);
    }
}

impl std::fmt::Debug for WriteFrequencySketch {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Heat({} counters, {} writes)", self.counters.len(), self.total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// A generator good enough for tests.
    fn random(mut state: u64) -> impl FnMut() -> u64 {
        move || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        }
    }

    #[test]
    fn a_volume_of_64_tib_fits_64_mib() {
        let chunks = (64_u64 << 40) / (64 << 10);
        let write_frequency = WriteFrequencySketch::new(chunks, random(1));
        assert!(write_frequency.memory_bytes() <= 33 << 20, "{} bytes", write_frequency.memory_bytes());
        let small = WriteFrequencySketch::new((4_u64 << 30) / (64 << 10), random(1));
        assert!(small.memory_bytes() <= 66 << 10, "{} bytes", small.memory_bytes());
    }

    #[test]
    fn no_count_is_too_low_before_ageing() {
        let (mut write_frequency, mut draw) = (WriteFrequencySketch::new(100_000, random(2)), random(3));
        let mut model: BTreeMap<u64, u16> = BTreeMap::new();
        for _ in 0..10_000 {
            // Some blocks far more often than others.
            let block = if draw().is_multiple_of(2) { draw() % 100 } else { draw() % 100_000 };
            write_frequency.add(block);
            *model.entry(block).or_default() += 1;
        }
        assert!(write_frequency.total() < 1 << write_frequency.bits, "it has aged");
        for (block, count) in &model {
            assert!(
                write_frequency.count(*block) >= *count,
                "block {block}: {} of {count}",
                write_frequency.count(*block)
            );
        }
    }

    #[test]
    fn hot_blocks_are_told_from_cold_ones_among_a_thousand_times_as_many() {
        let (mut write_frequency, mut draw) = (WriteFrequencySketch::new(1 << 24, random(4)), random(5));
        // 200 hot blocks get a third of a million writes; the rest goes anywhere among 16 million.
        for _ in 0..1_000_000 {
            let block = if draw().is_multiple_of(3) { draw() % 200 } else { 200 + draw() % ((1 << 24) - 200) };
            write_frequency.add(block);
        }
        let threshold = 100;
        let found = (0..200).filter(|block| write_frequency.count(*block) > threshold).count();
        assert_eq!(found, 200);
        let wrong = (0..100_000)
            .map(|_| 200 + draw() % ((1 << 24) - 200))
            .filter(|block| write_frequency.count(*block) > threshold);
        assert_eq!(wrong.count(), 0, "cold blocks are taken for hot");
    }

    #[test]
    fn what_was_hot_once_cools_down() {
        let (mut write_frequency, mut draw) = (WriteFrequencySketch::new(1 << 16, random(6)), random(7));
        (0..5000).for_each(|_| _ = write_frequency.add(7));
        let hot = write_frequency.count(7);
        (0..200_000).for_each(|_| _ = write_frequency.add(100 + draw() % 60_000));
        assert!(write_frequency.count(7) < hot / 8, "{} of {hot}", write_frequency.count(7));
        assert!(write_frequency.weight() <= 3.0 * (1_u64 << write_frequency.bits) as f64, "the weight grows for ever");
    }
}
