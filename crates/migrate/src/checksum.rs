//! The one checksum of everything that is copied and sent: xxh3 with 64 bits and seed 0.

use twox_hash::XxHash3_64;

/// Of `bytes`. It uses the widest instructions that this processor has.
pub(crate) fn checksum_of(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_the_xxh3_of_everybody_else(bytes in prop::collection::vec(any::<u8>(), 0..5000), more in 0_usize..300) {
            let bytes = bytes.repeat(1 + more / bytes.len().max(1));
            prop_assert_eq!(checksum_of(&bytes), xxhash_rust::xxh3::xxh3_64(&bytes));
        }
    }
}
