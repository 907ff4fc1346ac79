//! What a cache records of a place: which block it holds, and which of its sectors.

use std::ops::Range;

use crate::store::{BODY_BYTES, Body, Entry};

/// How many sectors a block has, whatever its size. Each has a bit of a mask.
pub(super) const SECTORS: u64 = 8;
/// How many bits the number of a block has: enough for 256 PiB of 4 KiB blocks.
const BLOCK_BITS: u32 = 46;
const VALID_AT: u32 = BLOCK_BITS;
const DIRTY_AT: u32 = VALID_AT + SECTORS as u32;
const USED: u64 = 1 << (DIRTY_AT + SECTORS as u32);
const ENTRY_BYTES: usize = 8;

/// How many blocks a volume may have.
pub(super) const BLOCKS_MAX: u64 = 1 << BLOCK_BITS;

/// What is recorded of a place, in eight bytes.
///
/// ```text
///   bit 0          46      54      62   63
///   │ block         │ valid │ dirty │ 1 │ 0 │     a free place is zero
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CacheEntry(u64);

impl CacheEntry {
    /// A place without a block.
    pub(super) const FREE: Self = Self(0);

    /// A place with these sectors of `block`. What is dirty is valid.
    pub(super) const fn new(block: u64, valid: u8, dirty: u8) -> Self {
        Self(block | (valid as u64) << VALID_AT | (dirty as u64) << DIRTY_AT | USED)
    }

    pub(super) const fn is_free(self) -> bool {
        self.0 == 0
    }

    /// The number of the block.
    pub(super) const fn block(self) -> u64 {
        self.0 & (BLOCKS_MAX - 1)
    }

    /// The sectors that the place has.
    pub(super) const fn valid(self) -> u8 {
        (self.0 >> VALID_AT) as u8
    }

    /// Those of them that the base lacks.
    pub(super) const fn dirty(self) -> u8 {
        (self.0 >> DIRTY_AT) as u8
    }

    fn is_sensible(self) -> bool {
        let is_used = self.0 & USED != 0 && self.0 < USED << 1 && self.dirty() & !self.valid() == 0;
        self.is_free() || is_used
    }
}

impl Entry for CacheEntry {
    const BITS: u32 = ENTRY_BYTES as u32 * 8;
    const NOTHING: Self = Self::FREE;
    const CLASSES: usize = 3;
    /// What was dirty, and is not valid any more, was zeroed, discarded or written over in the base.
    const LEAVES_CHANGED: bool = true;

    /// Free, clean or dirty.
    fn class(self) -> usize {
        match (self.is_free(), self.dirty()) {
            (true, _) => 0,
            (false, 0) => 1,
            (false, _) => 2,
        }
    }

    fn hides_base(self) -> bool {
        self.dirty() != 0
    }

    fn decode(body: &Body, grain: u64) -> Option<Self> {
        let start = grain as usize * ENTRY_BYTES;
        let entry = Self(u64::from_le_bytes(body[start..start + ENTRY_BYTES].try_into().ok()?));
        entry.is_sensible().then_some(entry)
    }

    fn fill(self, body: &mut Body, run: Range<u64>) {
        for grain in run {
            let start = grain as usize * ENTRY_BYTES;
            body[start..start + ENTRY_BYTES].copy_from_slice(&self.0.to_le_bytes());
        }
    }

    /// After a power loss nobody knows whether a clean place has what it should: only what is dirty was flushed before it was named.
    fn lasting(self) -> Self {
        match self.dirty() {
            0 => Self::FREE,
            dirty => Self::new(self.block(), dirty, dirty),
        }
    }

    /// What is valid and clean the base has: it was flushed before it was called so, or the place has what the base got since.
    fn taken_back(self, now: Self) -> Option<Self> {
        match self.dirty() & !now.valid() {
            0 => None,
            lost => Some(Self::new(self.block(), now.valid() | lost, now.dirty() | lost)),
        }
    }

    fn lasting_body(body: &Body) -> Body {
        let mut lasting = [0; BODY_BYTES];
        for grain in 0..Self::SECTOR_GRAINS {
            let entry = Self::of(body, grain).lasting();
            if !entry.is_free() {
                entry.fill(&mut lasting, grain..grain + 1);
            }
        }
        lasting
    }
}

/// The bits of a run of sectors.
pub(super) const fn mask_of(start: u64, end: u64) -> u8 {
    ((1u16 << end) - (1u16 << start)) as u8
}

/// The runs of set bits of `mask`.
pub(super) fn runs_of(mask: u8) -> impl Iterator<Item = Range<u64>> {
    let mut next = 0;
    std::iter::from_fn(move || {
        next += u64::from((u32::from(mask) >> next | 1 << 16).trailing_zeros());
        if next >= SECTORS {
            return None;
        }
        let length = u64::from((u32::from(mask) >> next).trailing_ones());
        let run = next..next + length;
        next += length;
        Some(run)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_comes_back_and_leaves_its_neighbours_alone() {
        let mut body = [0; BODY_BYTES];
        let entry = CacheEntry::new(BLOCKS_MAX - 1, 0b1110_0111, 0b1000_0001);
        entry.fill(&mut body, 3..4);
        assert_eq!(CacheEntry::decode(&body, 3), Some(entry));
        assert_eq!((entry.block(), entry.valid(), entry.dirty()), (BLOCKS_MAX - 1, 0b1110_0111, 0b1000_0001));
        for other in [0, 2, 4, CacheEntry::SECTOR_GRAINS - 1] {
            assert_eq!(CacheEntry::decode(&body, other), Some(CacheEntry::FREE));
        }
        let of_zero = CacheEntry::new(0, 0, 0);
        assert!(!of_zero.is_free() && of_zero.class() == 1);
        // A sector that is dirty and not valid, and bytes without the mark of a used place.
        CacheEntry::new(7, 1, 3).fill(&mut body, 0..1);
        assert_eq!(CacheEntry::decode(&body, 0), None);
        body[..8].copy_from_slice(&7u64.to_le_bytes());
        assert_eq!(CacheEntry::decode(&body, 0), None);
    }

    #[test]
    fn a_power_loss_leaves_what_is_dirty_and_nothing_else() {
        let mut body = [0; BODY_BYTES];
        CacheEntry::new(5, 0xff, 0).fill(&mut body, 0..2);
        CacheEntry::new(6, 0xff, 0b110).fill(&mut body, 61..62);
        let lasting = CacheEntry::lasting_body(&body);
        assert_eq!(CacheEntry::of(&lasting, 0), CacheEntry::FREE);
        assert_eq!(CacheEntry::of(&lasting, 61), CacheEntry::new(6, 0b110, 0b110));
    }

    #[test]
    fn what_was_dirty_and_is_not_valid_any_more_is_taken_back_and_what_was_cleaned_is_not() {
        let durable = CacheEntry::new(5, 0b1111, 0b1111);
        let taken = |valid, dirty| durable.taken_back(CacheEntry::new(5, valid, dirty));
        assert_eq!(taken(0b1111, 0), None, "the base has it");
        assert_eq!(taken(0b0011, 0b0001), Some(CacheEntry::new(5, 0b1111, 0b1101)));
        assert_eq!(durable.taken_back(CacheEntry::FREE), Some(durable));
        assert_eq!(CacheEntry::FREE.taken_back(durable), None);
    }

    #[test]
    fn sectors_come_in_runs() {
        let runs = |mask| runs_of(mask).collect::<Vec<_>>();
        assert_eq!(runs(0), []);
        assert_eq!(runs(0b1111_1110), vec![1..8; 1]);
        assert_eq!(runs(0xff), vec![0..8; 1]);
        assert_eq!(runs(0b1011_0010), [1..2, 4..6, 7..8]);
        assert_eq!((mask_of(0, 8), mask_of(2, 4), mask_of(3, 3)), (0xff, 0b1100, 0));
    }
}
