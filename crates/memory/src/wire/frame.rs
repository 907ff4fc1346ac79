//! A frame: pages of one region, or a mark between rounds.

use super::{checksum_of, u16_at, u32_at, u64_at};
use crate::error::{Error, Result};
use crate::region::PAGE_BYTES;

/// How long a header is.
pub const HEADER_BYTES: usize = 64;
/// How long an entry is.
pub const ENTRY_BYTES: usize = 12;
/// A frame has no more entries.
pub const ENTRIES_MAX: u32 = 2048;
/// Nor a longer body, when it is decoded.
pub const BODY_BYTES_MAX: u32 = 1 << 20;
/// What is behind a header is never longer. LZ4 adds less than 1 % to what does not get shorter, and that is sent as it is.
pub const FRAME_PAYLOAD_BYTES_MAX: u32 = BODY_BYTES_MAX + ENTRIES_MAX * ENTRY_BYTES as u32;
/// A difference: a page, and the checksum of the result.
pub(crate) const DELTA_BYTES: u64 = PAGE_BYTES + 8;

const MAGIC: u32 = u32::from_le_bytes(*b"TMF1");

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// Pages.
    Pages,
    /// The round is over on this stream.
    Barrier,
    /// The copy is over on this stream.
    End,
}

/// How the body is coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// As it is.
    Plain,
    /// One LZ4 block.
    Lz4,
}

/// What an entry says of its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// They are zeroes.
    Zero,
    /// Their bytes are in the body.
    Bytes,
    /// What differs from the version that was sent last is in the body. One page.
    Delta,
}

/// Some pages of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The first page.
    pub page: u32,
    /// How many.
    pub count: u32,
    /// What is said of them.
    pub kind: EntryKind,
}

impl Entry {
    /// How much of the body is its.
    #[must_use]
    pub const fn body_bytes(&self) -> u64 {
        match self.kind {
            EntryKind::Zero => 0,
            EntryKind::Bytes => self.count as u64 * PAGE_BYTES,
            EntryKind::Delta => DELTA_BYTES,
        }
    }
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// What it is.
    pub kind: FrameKind,
    /// How its body is coded.
    pub coding: Coding,
    /// Whose pages it has.
    pub region: u16,
    /// Its number on this stream.
    pub sequence: u64,
    /// In which round it is sent.
    pub round: u32,
    /// How many entries it has.
    pub entries: u32,
    /// How long its body is when it is decoded.
    pub body_bytes: u32,
    /// How much is behind the header.
    pub payload_bytes: u32,
    /// The checksum of that.
    pub payload_sum: u64,
}

impl FrameHeader {
    /// A mark without pages.
    #[must_use]
    pub fn mark(kind: FrameKind, sequence: u64, round: u32) -> Self {
        let payload_sum = checksum_of(&[]);
        let (coding, region, entries, body_bytes, payload_bytes) = (Coding::Plain, 0, 0, 0, 0);
        Self { kind, coding, region, sequence, round, entries, body_bytes, payload_bytes, payload_sum }
    }

    /// Its bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = match self.kind {
            FrameKind::Pages => 1,
            FrameKind::Barrier => 2,
            FrameKind::End => 3,
        };
        bytes[5] = match self.coding {
            Coding::Plain => 0,
            Coding::Lz4 => 1,
        };
        bytes[6..8].copy_from_slice(&self.region.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.round.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.entries.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.body_bytes.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.payload_sum.to_le_bytes());
        let sum = checksum_of(&bytes[..56]);
        bytes[56..64].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Understands one. Its lengths are within their bounds afterwards, and fit to each other.
    ///
    /// # Errors
    /// `Protocol`.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self> {
        if u32_at(bytes, 0) != MAGIC || u64_at(bytes, 56) != checksum_of(&bytes[..56]) {
            return Err(Error::protocol("the header of a frame is damaged"));
        }
        let kind = match bytes[4] {
            1 => FrameKind::Pages,
            2 => FrameKind::Barrier,
            3 => FrameKind::End,
            other => return Err(Error::protocol(format!("a frame of kind {other} is not known"))),
        };
        let coding = match bytes[5] {
            0 => Coding::Plain,
            1 => Coding::Lz4,
            other => return Err(Error::protocol(format!("the coding {other} is not known"))),
        };
        if bytes[32..48].iter().any(|byte| *byte != 0) {
            return Err(Error::protocol("the reserved bytes of a frame are not zero"));
        }
        let header = Self {
            kind,
            coding,
            region: u16_at(bytes, 6),
            sequence: u64_at(bytes, 8),
            round: u32_at(bytes, 16),
            entries: u32_at(bytes, 20),
            body_bytes: u32_at(bytes, 24),
            payload_bytes: u32_at(bytes, 28),
            payload_sum: u64_at(bytes, 48),
        };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<()> {
        let is_mark = self.kind != FrameKind::Pages;
        if is_mark && (self.entries, self.body_bytes, self.payload_bytes) != (0, 0, 0) {
            return Err(Error::protocol("a mark has no pages"));
        }
        if self.entries > ENTRIES_MAX || self.body_bytes > BODY_BYTES_MAX {
            return Err(Error::protocol(format!(
                "{} entries and {} bytes are too many",
                self.entries, self.body_bytes
            )));
        }
        let coded = self.payload_bytes.checked_sub(self.entries * ENTRY_BYTES as u32);
        let fits = coded.is_some_and(|coded| match self.coding {
            Coding::Plain => coded == self.body_bytes,
            Coding::Lz4 => coded <= self.body_bytes,
        });
        if !fits {
            return Err(Error::protocol("the lengths of a frame do not fit to each other"));
        }
        Ok(())
    }
}

/// Writes entries behind what is in `into`.
pub fn write_entries(entries: &[Entry], into: &mut Vec<u8>) {
    for entry in entries {
        into.extend_from_slice(&entry.page.to_le_bytes());
        into.extend_from_slice(&entry.count.to_le_bytes());
        let kind = match entry.kind {
            EntryKind::Zero => 0,
            EntryKind::Bytes => 1,
            EntryKind::Delta => 2,
        };
        into.extend_from_slice(&[kind, 0, 0, 0]);
    }
}

/// Understands the entries of a frame whose region has so many `pages`. They are in order, overlap nowhere, are within the region, and
/// take the body as it is.
///
/// # Errors
/// `Protocol`.
pub fn parse_entries(bytes: &[u8], header: &FrameHeader, pages: u64) -> Result<Vec<Entry>> {
    if bytes.len() != header.entries as usize * ENTRY_BYTES {
        return Err(Error::protocol("the entries of a frame are cut"));
    }
    let mut entries = Vec::with_capacity(header.entries as usize);
    let (mut behind, mut body) = (0_u64, 0_u64);
    for entry in bytes.chunks_exact(ENTRY_BYTES) {
        let kind = match entry[8] {
            0 => EntryKind::Zero,
            1 => EntryKind::Bytes,
            2 => EntryKind::Delta,
            other => return Err(Error::protocol(format!("an entry of kind {other} is not known"))),
        };
        let entry_is = Entry { page: u32_at(entry, 0), count: u32_at(entry, 4), kind };
        let first = u64::from(entry_is.page);
        let end = first + u64::from(entry_is.count);
        let is_right = entry_is.count > 0 && first >= behind && end <= pages && entry[9..] == [0; 3];
        if !is_right || (kind == EntryKind::Delta && entry_is.count != 1) {
            return Err(Error::protocol(format!("an entry of {} pages at {first} is wrong", entry_is.count)));
        }
        behind = end;
        body += entry_is.body_bytes();
        entries.push(entry_is);
    }
    if body != u64::from(header.body_bytes) {
        return Err(Error::protocol("the entries of a frame do not fit to its body"));
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> FrameHeader {
        FrameHeader {
            kind: FrameKind::Pages,
            coding: Coding::Lz4,
            region: 3,
            sequence: u64::MAX - 1,
            round: 7,
            entries: 2,
            body_bytes: 4096,
            payload_bytes: 24 + 100,
            payload_sum: 5,
        }
    }

    #[test]
    fn a_header_is_understood_as_it_was_written() {
        assert_eq!(FrameHeader::parse(&header().to_bytes()).expect("right"), header());
        let mark = FrameHeader::mark(FrameKind::End, 9, 2);
        assert_eq!(FrameHeader::parse(&mark.to_bytes()).expect("right"), mark);
        let bytes = header().to_bytes();
        for at in 0..HEADER_BYTES {
            let mut damaged = bytes;
            damaged[at] ^= 1;
            assert!(FrameHeader::parse(&damaged).is_err(), "byte {at}");
        }
    }

    #[test]
    fn lengths_that_are_too_long_or_do_not_fit_are_refused() {
        let wrong = [
            FrameHeader { entries: ENTRIES_MAX + 1, payload_bytes: u32::MAX, ..header() },
            FrameHeader { entries: u32::MAX, ..header() },
            FrameHeader { body_bytes: BODY_BYTES_MAX + 1, ..header() },
            FrameHeader { payload_bytes: 23, ..header() },
            FrameHeader { payload_bytes: 24 + 4097, ..header() },
            FrameHeader { coding: Coding::Plain, ..header() },
            FrameHeader { kind: FrameKind::Barrier, ..header() },
        ];
        for header in wrong {
            assert!(FrameHeader::parse(&header.to_bytes()).is_err(), "{header:?}");
        }
    }

    proptest! {
        #[test]
        fn entries_of_any_bytes_are_refused_or_right(bytes in prop::collection::vec(any::<u8>(), 0..60), pages in 0_u64..1 << 33) {
            let body = 0;
            let header = FrameHeader { entries: (bytes.len() / ENTRY_BYTES) as u32, body_bytes: body, ..header() };
            if let Ok(entries) = parse_entries(&bytes, &header, pages) {
                let mut again = Vec::new();
                write_entries(&entries, &mut again);
                prop_assert_eq!(again, bytes);
            }
        }

        #[test]
        fn entries_are_understood_as_they_were_written(parts in prop::collection::vec((0_u32..9, 1_u32..9, 0_u8..3), 0..20)) {
            let mut page = 0;
            let mut entries = Vec::new();
            for (gap, count, kind) in parts {
                let kind = [EntryKind::Zero, EntryKind::Bytes, EntryKind::Delta][usize::from(kind)];
                let count = if kind == EntryKind::Delta { 1 } else { count };
                entries.push(Entry { page: page + gap, count, kind });
                page += gap + count;
            }
            let body_bytes = entries.iter().map(Entry::body_bytes).sum::<u64>() as u32;
            let header = FrameHeader { entries: entries.len() as u32, body_bytes, ..header() };
            let mut bytes = Vec::new();
            write_entries(&entries, &mut bytes);
            prop_assert_eq!(parse_entries(&bytes, &header, u64::from(page)).expect("right"), entries.clone());
            if !entries.is_empty() {
                prop_assert!(parse_entries(&bytes, &header, u64::from(page) - 1).is_err(), "behind the end");
                let other = FrameHeader { body_bytes: body_bytes + 1, ..header };
                prop_assert!(parse_entries(&bytes, &other, u64::from(page)).is_err(), "another body");
            }
        }
    }
}
