//! Randomness from one seed. Every part of the world has a generator of its own. So one more draw in one place does not
//! change what happens in all others.

use std::ops::RangeInclusive;
use std::time::Duration;

use parking_lot::Mutex;
use rand::{Rng as _, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A source of random numbers that is named after who draws from it.
pub struct Rng {
    source: Mutex<ChaCha8Rng>,
}

impl Rng {
    /// The generator of `label` in the world of `seed`.
    #[must_use]
    pub fn new(seed: u64, label: &str) -> Self {
        // FNV-1a: stable over releases of everything, unlike the standard library's hashers.
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in label.bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        Self { source: Mutex::new(ChaCha8Rng::seed_from_u64(seed ^ hash)) }
    }

    /// Any number.
    pub fn any(&self) -> u64 {
        self.source.lock().next_u64()
    }

    /// A number below `limit`.
    ///
    /// # Panics
    /// If `limit` is zero.
    pub fn below(&self, limit: u64) -> u64 {
        assert!(limit > 0, "dice without faces");
        // The bias of the remainder is far below what any probability here is stated to.
        self.any() % limit
    }

    /// A number within `range`.
    pub fn within(&self, range: RangeInclusive<u64>) -> u64 {
        range.start() + self.below(range.end() - range.start() + 1)
    }

    /// A number from 0 up to, not including, 1.
    pub fn fraction(&self) -> f64 {
        (self.any() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// True with the given probability. Certainties cost no throw.
    pub fn chance(&self, probability: f64) -> bool {
        probability > 0.0 && (probability >= 1.0 || self.fraction() < probability)
    }

    /// One of `choices`.
    ///
    /// # Panics
    /// If there is none.
    pub fn pick<T: Copy>(&self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    /// A span of whole microseconds up to `longest`.
    pub fn up_to(&self, longest: Duration) -> Duration {
        Duration::from_micros(self.within(0..=longest.as_micros() as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dice_are_repeated_by_seed_and_differ_by_label() {
        let throws = |seed, label| {
            let rng = Rng::new(seed, label);
            [rng.any(), rng.any(), rng.below(1000)]
        };
        assert_eq!(throws(1, "disk"), throws(1, "disk"));
        assert_ne!(throws(1, "disk"), throws(2, "disk"));
        assert_ne!(throws(1, "disk"), throws(1, "guest"));
    }

    #[test]
    fn chances_come_out_as_often_as_stated() {
        let rng = Rng::new(7, "coin");
        let heads = (0..10_000).filter(|_| rng.chance(0.2)).count();
        assert!((1800..2200).contains(&heads), "{heads} of 10000 at 0.2");
        assert!(!rng.chance(0.0) && rng.chance(1.0));
    }
}
