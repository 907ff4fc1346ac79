//! Maps from numbers that nobody chooses to do harm: the models ask them millions of times a second.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// A map whose keys are, or are made of, one number.
pub(crate) type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;
/// A set of numbers.
pub(crate) type NumberSet<K> = HashSet<K, BuildHasherDefault<NumberHasher>>;

/// One multiplication, folded: enough for numbers that follow one another.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        let product = u128::from(self.0 ^ number) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_follow_one_another_fall_into_places_of_their_own() {
        let hash = |number: u64| {
            let mut hasher = NumberHasher::default();
            hasher.write_u64(number);
            hasher.finish()
        };
        for stride in [1, 16, 1024, 1 << 20] {
            let low: NumberSet<u64> = (0..4096).map(|index| hash(index * stride) % 65536).collect();
            let high: NumberSet<u64> = (0..4096).map(|index| hash(index * stride) >> 48).collect();
            // 4096 balls in 65536 places fall into 3968 of them.
            assert!(low.len() > 3400 && high.len() > 3400, "{} and {} at {stride}", low.len(), high.len());
        }
    }
}
