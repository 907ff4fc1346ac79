//! Which chunks are popular: worth being kept in a surrogate.

/// Decides what is popular. It hears of every request of the guest's, once for each chunk, and of nothing else: what the
/// migration reads is never counted.
pub trait Popularity: Send {
    /// The guest has read or written `chunk`. Gives whether it is popular now.
    fn touch(&mut self, chunk: u64) -> bool;

    /// How much memory it takes, in bytes.
    fn memory_bytes(&self) -> usize;
}

/// Popular is what was touched often enough since the redirection was opened. It is how WAIO decides: two bytes a chunk.
pub struct AccessCounts {
    counts: Vec<u16>,
    threshold: u16,
}

impl AccessCounts {
    /// For `chunks` chunks; a chunk is popular from its `threshold`th request on, from the first one with 0 or 1.
    #[must_use]
    pub fn new(chunks: u64, threshold: u16) -> Self {
        Self { counts: vec![0; chunks as usize], threshold: threshold.max(1) }
    }
}

impl Popularity for AccessCounts {
    fn touch(&mut self, chunk: u64) -> bool {
        let count = &mut self.counts[chunk as usize];
        *count = count.saturating_add(1);
        *count >= self.threshold
    }

    fn memory_bytes(&self) -> usize {
        self.counts.len() * size_of::<u16>()
    }
}

/// Popular is what is touched again within a number of requests: what is hot now, whatever it was. Four bytes a chunk.
pub struct Recency {
    /// The number of the last request, from 1 on; 0 for none.
    last: Vec<u32>,
    requests: u32,
    window: u32,
}

impl Recency {
    /// For `chunks` chunks; a chunk is popular when its last request was one of the last `window`.
    #[must_use]
    pub fn new(chunks: u64, window: u32) -> Self {
        Self { last: vec![0; chunks as usize], requests: 0, window: window.max(1) }
    }
}

impl Popularity for Recency {
    fn touch(&mut self, chunk: u64) -> bool {
        if self.requests == u32::MAX {
            // Once in four thousand million requests everything is forgotten.
            self.last.fill(0);
            self.requests = 0;
        }
        self.requests += 1;
        let before = std::mem::replace(&mut self.last[chunk as usize], self.requests);
        before != 0 && self.requests - before <= self.window
    }

    fn memory_bytes(&self) -> usize {
        self.last.len() * size_of::<u32>()
    }
}

/// Popular is what was touched often lately, by a count-min sketch whose counters are halved now and then: memory that does
/// not grow with the volume, at the price of chunks that are taken for others.
pub struct FrequencySketch {
    rows: [Vec<u8>; 4],
    threshold: u8,
    touches: u64,
    halve_every: u64,
}

impl FrequencySketch {
    /// With rows of `counters`, rounded up to a power of two; a chunk is popular with `threshold` requests or more, and every
    /// `halve_every` requests all are halved.
    #[must_use]
    pub fn new(counters: usize, threshold: u8, halve_every: u64) -> Self {
        let row = vec![0; counters.max(16).next_power_of_two()];
        let rows = [row.clone(), row.clone(), row.clone(), row];
        Self { rows, threshold: threshold.max(1), touches: 0, halve_every: halve_every.max(1) }
    }
}

impl FrequencySketch {
    /// Where the counters of `chunk` are, one in each row.
    fn places(&self, chunk: u64) -> [usize; 4] {
        // Odd multipliers, so that the high bits depend on all of the low ones.
        let multiplier = |row: u64| 0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(2 * row + 3) | 1;
        [0, 1, 2, 3].map(|row: usize| {
            let mixed = (chunk + 1).wrapping_mul(multiplier(row as u64));
            (mixed >> 32) as usize & (self.rows[row].len() - 1)
        })
    }

    /// How often `chunk` was touched lately; perhaps more, if others share its counters.
    pub(crate) fn count(&self, chunk: u64) -> u8 {
        let counters = self.rows.iter().zip(self.places(chunk)).map(|(row, at)| row[at]);
        counters.min().unwrap_or_default()
    }
}

impl Popularity for FrequencySketch {
    fn touch(&mut self, chunk: u64) -> bool {
        self.touches += 1;
        if self.touches.is_multiple_of(self.halve_every) {
            self.rows.iter_mut().flatten().for_each(|counter| *counter /= 2);
        }
        let places = self.places(chunk);
        for (row, at) in self.rows.iter_mut().zip(places) {
            row[at] = row[at].saturating_add(1);
        }
        self.count(chunk) >= self.threshold
    }

    fn memory_bytes(&self) -> usize {
        self.rows.iter().map(Vec::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_reach_their_threshold_and_stay() {
        let mut counts = AccessCounts::new(4, 3);
        assert_eq!([(); 4].map(|()| counts.touch(2)), [false, false, true, true]);
        assert!(!counts.touch(1));
        assert!(AccessCounts::new(1, 0).touch(0), "admission at first touch");
    }

    #[test]
    fn recency_forgets_what_was_long_ago() {
        let mut recency = Recency::new(4, 2);
        assert!(!recency.touch(0));
        assert!(recency.touch(0));
        recency.touch(1);
        recency.touch(2);
        assert!(!recency.touch(0), "three requests ago");
    }

    #[test]
    fn a_sketch_knows_what_is_asked_for_often_and_forgets_it() {
        let mut sketch = FrequencySketch::new(1024, 4, 64);
        let seen = [(); 4].map(|()| sketch.touch(7));
        assert_eq!(seen, [false, false, false, true]);
        let others: usize = (100..200).filter(|chunk| sketch.touch(*chunk)).count();
        assert_eq!(others, 0, "a chunk is taken for another");
        for chunk in 1000..1200 {
            sketch.touch(chunk);
        }
        assert!(!sketch.touch(7), "nothing is forgotten");
        assert_eq!(sketch.memory_bytes(), 4096);
    }
}
