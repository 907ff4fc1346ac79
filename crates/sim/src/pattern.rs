//! What guests write: every sector of every write is unlike all others, so a sector tells which write it is from.

use crate::medium::{SECTOR_BYTES, is_zero};

/// What a sector holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Content {
    /// Zeroes.
    Zero,
    /// What write number so-and-so put there. Number 0 is what was there before the scenario began.
    Written(u64),
}

const fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    word = (word ^ (word >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    word ^ (word >> 32)
}

/// The first of a sector's words; each further one is [`STEP`] more.
const fn first_word(write: u64, sector: u64) -> u64 {
    mix((write + 1) ^ (sector << 40))
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Content {
    /// Puts it into `bytes`, the whole of `sector`.
    pub fn fill(self, sector: u64, bytes: &mut [u8]) {
        match self {
            Self::Zero => bytes.fill(0),
            Self::Written(write) => {
                let mut word = first_word(write, sector);
                let (words, tail) = bytes.as_chunks_mut::<8>();
                for place in words {
                    *place = word.to_le_bytes();
                    word = word.wrapping_add(STEP);
                }
                tail.copy_from_slice(&word.to_le_bytes()[..tail.len()]);
            }
        }
    }

    /// Whether `bytes`, the whole of `sector`, is this.
    #[must_use]
    pub fn matches(self, sector: u64, bytes: &[u8]) -> bool {
        match self {
            Self::Zero => is_zero(bytes),
            Self::Written(write) => {
                let mut word = first_word(write, sector);
                let (words, tail) = bytes.as_chunks::<8>();
                let all = words.iter().all(|found| {
                    let expected = word;
                    word = word.wrapping_add(STEP);
                    u64::from_le_bytes(*found) == expected
                });
                all && *tail == word.to_le_bytes()[..tail.len()]
            }
        }
    }
}

/// The bytes of write `write` over the sectors from `first` on.
pub fn fill(write: u64, first: u64, bytes: &mut [u8]) {
    for (index, piece) in bytes.chunks_mut(SECTOR_BYTES as usize).enumerate() {
        Content::Written(write).fill(first + index as u64, piece);
    }
}

/// Names what `bytes` of `sector` are, given that there were `writes` writes.
#[must_use]
pub fn describe(writes: u64, sector: u64, bytes: &[u8]) -> String {
    if Content::Zero.matches(sector, bytes) {
        return "zeroes".to_owned();
    }
    let found = (0..=writes).find(|write| Content::Written(*write).matches(sector, bytes));
    found.map_or_else(|| "bytes that nobody wrote there".to_owned(), |write| format!("write {write}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_tells_its_write_and_its_place() {
        let mut bytes = [0; 1024];
        fill(5, 100, &mut bytes);
        assert!(Content::Written(5).matches(101, &bytes[512..]));
        assert_eq!(describe(10, 101, &bytes[512..]), "write 5");
        assert_eq!(describe(10, 100, &bytes[512..]), "bytes that nobody wrote there");
        bytes[600] ^= 1;
        assert_eq!(describe(10, 101, &bytes[512..]), "bytes that nobody wrote there");
        assert_eq!(describe(10, 7, &[0; 100]), "zeroes");
    }
}
