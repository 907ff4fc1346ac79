//! What every block of a verified disk holds: who it is and how often it was written.
//!
//! A block of 4096 bytes names its number and its generation in its first words and fills the rest with words that
//! follow from both. So lost, stale and misplaced blocks can be told from right ones and from each other. The program
//! in the guest and the host share this file. So the host can fill a disk before the guest boots and check it after the
//! guest is gone.

/// Bytes of a block.
pub const BLOCK_BYTES: usize = 4096;

const MAGIC: u64 = u64::from_le_bytes(*b"trnshume");
const WORD_BYTES: usize = 8;
const HEADER_WORDS: usize = 3;

/// What is wrong with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It holds an older write of its own: a later, acknowledged one is missing.
    Stale {
        /// The generation that was found.
        found: u64,
    },
    /// It holds a write of its own that should not exist yet.
    Newer {
        /// The generation that was found.
        found: u64,
    },
    /// It holds another block's bytes.
    Misplaced {
        /// Whose bytes they are.
        owner: u64,
    },
    /// It holds zeroes.
    Zeroes,
    /// Its header is right, its body is not: a torn or corrupted write.
    Torn {
        /// The first word that differs.
        word: usize,
    },
    /// It holds something that was never written.
    Foreign,
}

/// The words of a body follow from their block's number and generation by one multiplication and an addition a word.
/// The guest runs emulated and spends its time here.
fn body_seed(block: u64, generation: u64) -> (u64, u64) {
    let first = (block ^ generation.rotate_left(40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let step = (first ^ (first >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) | 1;
    (first, step)
}

/// Fills the bytes of one block, or of what there is of it at a volume's end.
pub fn fill(bytes: &mut [u8], block: u64, generation: u64) {
    let (first, step) = body_seed(block, generation);
    let mut word = first;
    let header = [MAGIC, block, generation];
    for (index, cell) in bytes.chunks_exact_mut(WORD_BYTES).enumerate() {
        let value = header.get(index).copied().unwrap_or(word);
        cell.copy_from_slice(&value.to_le_bytes());
        word = word.wrapping_add(step);
    }
}

/// Checks one block's bytes against what its last acknowledged write left there.
pub fn check(bytes: &[u8], block: u64, generation: u64) -> Result<(), Fault> {
    let word_at = |index: usize| {
        let cell = &bytes[index * WORD_BYTES..(index + 1) * WORD_BYTES];
        u64::from_le_bytes(cell.try_into().expect("a cell is as long as a word"))
    };
    if word_at(0) != MAGIC {
        let zeroes = bytes.iter().all(|byte| *byte == 0);
        return Err(if zeroes { Fault::Zeroes } else { Fault::Foreign });
    }
    if word_at(1) != block {
        return Err(Fault::Misplaced { owner: word_at(1) });
    }
    match word_at(2) {
        found if found < generation => return Err(Fault::Stale { found }),
        found if found > generation => return Err(Fault::Newer { found }),
        _ => {}
    }
    let (first, step) = body_seed(block, generation);
    let mut word = first.wrapping_add(step.wrapping_mul(HEADER_WORDS as u64));
    for (index, cell) in bytes.chunks_exact(WORD_BYTES).enumerate().skip(HEADER_WORDS) {
        if cell != word.to_le_bytes() {
            return Err(Fault::Torn { word: index });
        }
        word = word.wrapping_add(step);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u64, generation: u64) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK_BYTES];
        fill(&mut bytes, number, generation);
        bytes
    }

    #[test]
    fn a_filled_block_is_right_for_its_number_and_generation_only() {
        let bytes = block(7, 3);
        assert_eq!(check(&bytes, 7, 3), Ok(()));
        assert_eq!(check(&bytes, 7, 4), Err(Fault::Stale { found: 3 }));
        assert_eq!(check(&bytes, 7, 2), Err(Fault::Newer { found: 3 }));
        assert_eq!(check(&bytes, 8, 3), Err(Fault::Misplaced { owner: 7 }));
    }

    #[test]
    fn a_flipped_bit_a_torn_write_and_zeroes_are_told_apart() {
        let mut flipped = block(7, 3);
        flipped[4000] ^= 1;
        assert_eq!(check(&flipped, 7, 3), Err(Fault::Torn { word: 500 }));

        let mut torn = block(7, 3);
        torn[512..].copy_from_slice(&block(7, 2)[512..]);
        assert_eq!(check(&torn, 7, 3), Err(Fault::Torn { word: 64 }));

        assert_eq!(check(&vec![0; BLOCK_BYTES], 7, 3), Err(Fault::Zeroes));
        assert_eq!(check(&vec![9; BLOCK_BYTES], 7, 3), Err(Fault::Foreign));
    }
}
