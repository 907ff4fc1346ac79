//! What an overlay records of a grain: two bits.

use std::ops::Range;

use crate::store::{Body, Entry};

/// Where a grain's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GrainState {
    /// In the base.
    Absent = 0,
    /// Nowhere: it reads as zeroes, whatever the base holds.
    Zero = 1,
    /// In the delta.
    Data = 2,
}

impl Entry for GrainState {
    const BITS: u32 = 2;
    const NOTHING: Self = Self::Absent;
    const CLASSES: usize = 3;

    fn class(self) -> usize {
        self as usize
    }

    fn hides_base(self) -> bool {
        self != Self::Absent
    }

    fn decode(body: &Body, grain: u64) -> Option<Self> {
        match body[(grain / 4) as usize] >> (grain % 4 * 2) & 3 {
            0 => Some(Self::Absent),
            1 => Some(Self::Zero),
            2 => Some(Self::Data),
            _ => None,
        }
    }

    fn fill(self, body: &mut Body, run: Range<u64>) {
        let bits = self as u8;
        let mut next = run.start;
        while next < run.end {
            let byte = &mut body[(next / 4) as usize];
            if next.is_multiple_of(4) && run.end - next >= 4 {
                *byte = bits * 0b0101_0101;
                next += 4;
                continue;
            }
            let shift = next % 4 * 2;
            *byte = *byte & !(3 << shift) | bits << shift;
            next += 1;
        }
    }
}

#[cfg(test)]
mod tests;
