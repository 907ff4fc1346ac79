//! Random numbers from a seed, without a crate: SplitMix64.

/// Random numbers from a seed.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// The numbers of `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next number.
    pub const fn number(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `limit`.
    ///
    /// # Panics
    /// If `limit` is zero.
    pub const fn below(&mut self, limit: u64) -> u64 {
        self.number() % limit
    }

    /// True once in `count` times.
    pub const fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    /// `length` bytes of which none is zero, so that lost ones show.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        let words = std::iter::repeat_with(|| (self.number() | 0x0101_0101_0101_0101).to_le_bytes());
        let mut bytes = words.take(length.div_ceil(8)).collect::<Vec<_>>().concat();
        bytes.truncate(length);
        bytes
    }
}
