//! Bytes, chunks and extents as distinct types, so that none is ever taken for another.

use std::fmt;
use std::ops::{Add, AddAssign, Range, Sub, SubAssign};

/// The unit of reduction: 4096 bytes.
pub const BLOCK_BYTES: u64 = 4096;

/// A number of bytes: an offset into a volume, or a length.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// `count` KiB.
    #[must_use]
    pub const fn kib(count: u64) -> Self {
        Self(count << 10)
    }

    /// `count` MiB.
    #[must_use]
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }

    /// `count` GiB.
    #[must_use]
    pub const fn gib(count: u64) -> Self {
        Self(count << 30)
    }

    /// The plain number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The plain number as an index into memory.
    ///
    /// # Panics
    /// If it does not fit the address space.
    #[must_use]
    pub fn as_usize(self) -> usize {
        usize::try_from(self.0).expect("a byte count that is used as an index fits the address space")
    }

    /// True for no bytes.
    #[must_use]
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// True if this is a multiple of `unit` bytes.
    #[must_use]
    pub const fn is_multiple_of(self, unit: u64) -> bool {
        self.0.is_multiple_of(unit)
    }

    /// The next multiple of `unit` at or below this.
    #[must_use]
    pub const fn align_down(self, unit: u64) -> Self {
        Self(self.0 - self.0 % unit)
    }

    /// The next multiple of `unit` at or above this.
    #[must_use]
    pub const fn align_up(self, unit: u64) -> Self {
        Self(self.0.next_multiple_of(unit))
    }

    /// The difference, or zero if `other` is larger.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl From<usize> for Bytes {
    fn from(count: usize) -> Self {
        Self(count as u64)
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.checked_add(other.0).expect("byte counts stay below 2^64"))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Bytes {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0.checked_sub(other.0).expect("a byte count is never negative"))
    }
}

impl SubAssign for Bytes {
    fn sub_assign(&mut self, other: Self) {
        *self = *self - other;
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}B", self.0)
    }
}

impl fmt::Display for Bytes {
    /// A count that a person reads: `1.5 GiB`, `64 KiB`, `512 B`.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return write!(out, "{} B", self.0);
        }
        let power = (self.0.ilog2() / 10) as usize;
        let unit = 1_u64 << (10 * power);
        if self.0.is_multiple_of(unit) {
            write!(out, "{} {}", self.0 / unit, UNITS[power - 1])
        } else {
            write!(out, "{:.1} {}", self.0 as f64 / unit as f64, UNITS[power - 1])
        }
    }
}

/// A range of bytes of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Extent {
    /// Where it starts.
    pub offset: Bytes,
    /// How long it is.
    pub length: Bytes,
}

impl Extent {
    /// The extent of `length` bytes at `offset`.
    #[must_use]
    pub const fn new(offset: Bytes, length: Bytes) -> Self {
        Self { offset, length }
    }

    /// The extent from `start` up to, not including, `end`.
    #[must_use]
    pub fn between(start: Bytes, end: Bytes) -> Self {
        Self { offset: start, length: end - start }
    }

    /// The whole of a volume of `size` bytes.
    #[must_use]
    pub const fn whole(size: Bytes) -> Self {
        Self { offset: Bytes::ZERO, length: size }
    }

    /// The first byte after it.
    #[must_use]
    pub fn end(self) -> Bytes {
        self.offset + self.length
    }

    /// True if it has no bytes.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.length.is_zero()
    }

    /// True if the two share a byte.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }

    /// True if every byte of `other` is in this one.
    #[must_use]
    pub fn contains(self, other: Self) -> bool {
        self.offset <= other.offset && other.end() <= self.end()
    }

    /// The bytes that both have, if any.
    #[must_use]
    pub fn intersection(self, other: Self) -> Option<Self> {
        let start = self.offset.max(other.offset);
        let end = self.end().min(other.end());
        (start < end).then(|| Self::between(start, end))
    }

    /// This extent cut at every multiple of `unit` bytes, in order.
    pub fn split_at_multiples(self, unit: u64) -> impl Iterator<Item = Self> {
        let mut next = self.offset;
        std::iter::from_fn(move || {
            if next >= self.end() {
                return None;
            }
            // The last multiple may be the last that there is.
            let end = Bytes(next.align_down(unit).0.saturating_add(unit)).min(self.end());
            let piece = Self::between(next, end);
            next = end;
            Some(piece)
        })
    }
}

impl fmt::Debug for Extent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}+{}", self.offset.0, self.length.0)
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} bytes at {}", self.length.0, self.offset.0)
    }
}

/// The number of a chunk of a volume, counted from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkIndex(pub u64);

/// The size of a chunk: a power of two between 4 KiB and 4 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkSize {
    log2: u8,
}

impl Default for ChunkSize {
    /// 64 KiB.
    fn default() -> Self {
        Self { log2: 16 }
    }
}

impl ChunkSize {
    /// The chunk size of `bytes`, or `None` if it is not a power of two between 4 KiB and 4 MiB.
    #[must_use]
    pub fn new(bytes: u64) -> Option<Self> {
        let valid = bytes.is_power_of_two() && (BLOCK_BYTES..=4 << 20).contains(&bytes);
        valid.then(|| Self { log2: bytes.ilog2() as u8 })
    }

    /// The size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        1 << self.log2
    }

    /// How many chunks a volume of `size` has; the last one may be short.
    #[must_use]
    pub const fn count(self, size: Bytes) -> u64 {
        size.0.div_ceil(self.bytes())
    }

    /// The chunk that holds the byte at `offset`.
    #[must_use]
    pub const fn index_of(self, offset: Bytes) -> ChunkIndex {
        ChunkIndex(offset.0 >> self.log2)
    }

    /// The numbers of the chunks that `extent` touches.
    #[must_use]
    pub fn indices_of(self, extent: Extent) -> Range<u64> {
        if extent.is_empty() {
            return 0..0;
        }
        let first = extent.offset.0 >> self.log2;
        let last = (extent.end().0 - 1) >> self.log2;
        first..last + 1
    }

    /// The bytes of chunk `index` in a volume of `size`.
    #[must_use]
    pub fn extent_of(self, index: ChunkIndex, size: Bytes) -> Extent {
        let start = Bytes(index.0 << self.log2);
        let end = (start + Bytes(self.bytes())).min(size);
        Extent::between(start, end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_chunk_of_an_odd_volume_is_short() {
        let chunk = ChunkSize::default();
        let size = Bytes(3 * 65536 + 513);
        assert_eq!(chunk.count(size), 4);
        assert_eq!(chunk.extent_of(ChunkIndex(3), size), Extent::new(Bytes(3 * 65536), Bytes(513)));
        assert_eq!(chunk.indices_of(Extent::new(Bytes(65535), Bytes(2))), 0..2);
        assert_eq!(chunk.indices_of(Extent::new(Bytes(65536), Bytes(65536))), 1..2);
        assert_eq!(chunk.indices_of(Extent::new(Bytes(65536), Bytes(0))), 0..0);
    }

    #[test]
    fn chunk_sizes_that_are_no_power_of_two_or_out_of_range_are_refused() {
        assert!(ChunkSize::new(65536).is_some());
        for bytes in [0, 1, 512, 4095, 65535, 8 << 20] {
            assert!(ChunkSize::new(bytes).is_none(), "{bytes} was accepted");
        }
    }

    #[test]
    fn extents_meet_as_half_open_ranges() {
        let a = Extent::new(Bytes(10), Bytes(10));
        assert!(!a.overlaps(Extent::new(Bytes(20), Bytes(5))));
        assert!(a.overlaps(Extent::new(Bytes(19), Bytes(5))));
        assert_eq!(a.intersection(Extent::new(Bytes(15), Bytes(50))), Some(Extent::new(Bytes(15), Bytes(5))));
        assert_eq!(a.intersection(Extent::new(Bytes(20), Bytes(5))), None);
        let pieces: Vec<_> = a.split_at_multiples(8).map(|piece| (piece.offset.0, piece.length.0)).collect();
        assert_eq!(pieces, [(10, 6), (16, 4)]);
        let last = Extent::new(Bytes(u64::MAX - 300), Bytes(300));
        let pieces: Vec<_> = last.split_at_multiples(256).map(|piece| piece.length.0).collect();
        assert_eq!(pieces, [45, 255]);
    }

    #[test]
    fn counts_are_printed_for_people() {
        assert_eq!(Bytes(0).to_string(), "0 B");
        assert_eq!(Bytes(1023).to_string(), "1023 B");
        assert_eq!(Bytes::gib(2).to_string(), "2 GiB");
        assert_eq!(Bytes(1536).to_string(), "1.5 KiB");
    }
}
