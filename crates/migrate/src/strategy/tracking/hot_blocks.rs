//! Which dirty chunks are worth putting off (ESX paper, section 2.3.1 to 2.3.5). The threshold follows from what is
//! measured and is no option.
//!
//! A chunk is put off if it is expected to be written [`AGAIN`] in the next pass, once or more. A copy of it now would
//! most likely be in vain. Of all writes counted, a chunk has the share `count / weight`. The next pass sees
//! `rate * seconds` writes. Both follow from the last pass. So a uniform load of any rate puts nothing off until its
//! passes are so long that every chunk is written anew in each. A pass that gets shorter puts off less.
//!
//! To put off a chunk that should have been copied costs only its place in the order: it is copied later and once.

use std::time::Duration;

use filters::WriteFrequencySketch;

/// How many more writes in a pass make a chunk hot. By chance one with this expectation is spared in four passes of ten,
/// and nothing is lost by that. If writes follow Zipf's law, a larger number finds too few chunks to gain anything.
/// With a smaller one the pass over all that was put off becomes so long that what is not hot is written anew in it.
const AGAIN: f64 = 1.0;
/// Fewer writes than this say nothing of a chunk.
const COUNT_MIN: f64 = 4.0;
/// A count must be so many times what collisions make of it.
const NOISE_FACTOR: f64 = 3.0;

/// How often a volume's chunks are written, and what counts as hot.
pub(crate) struct HotChunks {
    write_frequency: WriteFrequencySketch,
    /// Counts from here on are hot; `None` while nothing is put off.
    threshold: Option<u16>,
}

impl HotChunks {
    pub(crate) const fn new(write_frequency: WriteFrequencySketch) -> Self {
        Self { write_frequency, threshold: None }
    }

    /// The guest writes to a chunk.
    pub(crate) fn add(&mut self, index: u64) {
        self.write_frequency.add(index);
    }

    /// How many writes to chunks there were.
    pub(crate) const fn total(&self) -> u64 {
        self.write_frequency.total()
    }

    /// The next pass is expected to take `pass`, with `writes_per_second` to chunks. Says from which count on they are
    /// hot.
    pub(crate) fn tune(&mut self, pass: Duration, writes_per_second: f64) -> Option<u16> {
        self.tune_beyond(pass, writes_per_second, 0.0)
    }

    /// The same, of chunks that have more than `share` of all writes.
    pub(crate) fn tune_beyond(&mut self, pass: Duration, writes_per_second: f64, share: f64) -> Option<u16> {
        let writes = pass.as_secs_f64() * writes_per_second;
        let wanted = (AGAIN * self.write_frequency.weight() / writes.max(1e-9))
            .max(COUNT_MIN)
            .max(NOISE_FACTOR * self.write_frequency.noise());
        let wanted = wanted.max(share * self.write_frequency.weight());
        // What does not fit a counter cannot be told from what is hotter.
        self.threshold = (wanted < f64::from(u16::MAX)).then(|| wanted.ceil() as u16);
        self.threshold
    }

    /// Nothing is put off from now on.
    pub(crate) const fn stop(&mut self) {
        self.threshold = None;
    }

    /// Whether anything is put off now.
    pub(crate) const fn is_on(&self) -> bool {
        self.threshold.is_some()
    }

    /// Whether the copy of a chunk is to be put off.
    pub(crate) fn is_hot(&self, index: u64) -> bool {
        self.threshold.is_some_and(|threshold| self.write_frequency.count(index) >= threshold)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNKS: u64 = 65_536;

    fn hot() -> HotChunks {
        let mut state = 9_u64;
        HotChunks::new(WriteFrequencySketch::new(CHUNKS, || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state ^ (state >> 29)
        }))
    }

    /// A minute of writes, each to the chunk that `place` says, and then a pass of 10 s.
    fn after_a_minute(writes_per_second: u64, place: impl Fn(u64) -> u64) -> HotChunks {
        let mut hot = hot();
        for number in 0..60 * writes_per_second {
            hot.add(place(number));
        }
        hot.tune(Duration::from_secs(10), writes_per_second as f64);
        hot
    }

    fn scattered(number: u64) -> u64 {
        (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) % CHUNKS
    }

    #[test]
    fn chunks_that_take_most_of_the_writes_are_hot_and_others_are_not() {
        let hot = after_a_minute(200, |number| if number.is_multiple_of(4) { scattered(number) } else { number % 101 });
        assert_eq!((0..101).filter(|index| hot.is_hot(*index)).count(), 101);
        assert!((1000..CHUNKS).filter(|index| hot.is_hot(*index)).count() < 10);
    }

    #[test]
    fn a_uniform_load_has_no_hot_chunks() {
        for writes_per_second in [50, 500, 3000] {
            let hot = after_a_minute(writes_per_second, scattered);
            let count = (0..CHUNKS).filter(|index| hot.is_hot(*index)).count();
            assert!(count < 20, "{count} of {CHUNKS} at {writes_per_second} a second");
        }
    }

    #[test]
    fn a_shorter_pass_puts_off_less() {
        let mut hot = after_a_minute(500, |number| number % 2000);
        let long = hot.tune(Duration::from_secs(60), 500.0);
        let short = hot.tune(Duration::from_secs(1), 500.0);
        assert!(long < short, "{long:?} and {short:?}");
        hot.stop();
        assert!(!hot.is_hot(5) && !hot.is_on());
    }
}
