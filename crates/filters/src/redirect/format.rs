//! The bytes of a redirection on its partition of a surrogate.
//!
//! ```text
//!   header │ boot record │ durable map │ running map │ the owner's pages │ place 0 │ place 1 │ ...
//! ```

use block::{BLOCK_BYTES, Buffer, Bytes, ChunkSize, Error, ErrorKind, Extent, Result};

use super::entry::{SECTORS, SurrogateEntry};
use crate::store::{Layout, OWNER_BYTES, Placement};

/// The first bytes of a redirection.
const MAGIC: [u8; 8] = *b"TRANSHUR";
/// The version of the layout.
const VERSION: u32 = 1;
/// Where the first place may begin: at multiples of this.
const PLACES_ALIGNMENT: u64 = 1 << 20;
/// A chunk has sectors of at least a block.
const CHUNK_BYTES_MIN: u64 = 64 << 10;

/// What a redirection is and to what it belongs. It never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RedirectHeader {
    /// The size of the volume.
    pub volume: Bytes,
    /// The unit that is popular or not, and that a place has room for: 64 KiB or more.
    pub chunk: ChunkSize,
    /// How many places the partition has.
    pub places: u64,
    /// Its own identity.
    pub id: [u8; 16],
}

impl RedirectHeader {
    /// The redirection `id` of a volume of `volume` bytes, on a partition of `partition` bytes. None if not one place fits, or the
    /// chunk is too small.
    #[must_use]
    pub fn new(volume: Bytes, chunk: ChunkSize, partition: Bytes, id: [u8; 16]) -> Option<Self> {
        let with = |places| Self { volume, chunk, places, id };
        let mut places = partition.get() / chunk.bytes();
        // The maps grow with the places, by far less than the places themselves.
        while places > 0 && with(places).partition_bytes() > partition {
            let over = with(places).partition_bytes() - partition;
            places -= over.get().div_ceil(chunk.bytes()).min(places);
        }
        // A few places less may make room for the owner's pages.
        while places > 1 && with(places).owner_pages().is_none() {
            places -= 1;
        }
        let is_fit = places > 0 && chunk.bytes() >= CHUNK_BYTES_MIN && !volume.is_zero();
        is_fit.then(|| with(places)).filter(|header| header.chunks() < u64::from(u32::MAX))
    }

    /// How large its partition is at least.
    #[must_use]
    pub fn partition_bytes(&self) -> Bytes {
        self.start() + Bytes(self.places * self.chunk.bytes())
    }

    /// Where the header and its maps are: all that must read the same whichever store of two is read.
    #[must_use]
    pub fn maps(&self) -> Extent {
        Extent::new(Bytes::ZERO, self.layout().end())
    }

    /// Two pages of the partition that the redirection leaves to its owner, whatever is in them. Few of an older version have none.
    #[must_use]
    pub fn owner_pages(&self) -> Option<Extent> {
        let pages = Extent::new(self.layout().end(), Bytes(OWNER_BYTES));
        (pages.end() <= self.start()).then_some(pages)
    }

    /// How many chunks the volume has.
    pub(super) fn chunks(&self) -> u64 {
        self.chunk.count(self.volume)
    }

    /// The unit of what is dirty.
    pub(super) const fn sector_bytes(&self) -> u64 {
        let part = self.chunk.bytes() / SECTORS;
        if part > BLOCK_BYTES { part } else { BLOCK_BYTES }
    }

    /// Its record, of which each grain is a place.
    pub(super) fn layout(&self) -> Layout {
        Layout::new::<SurrogateEntry>(self.places, self.id)
    }

    /// Where its places are.
    pub(super) fn placement(&self) -> Placement {
        Placement::Allocated { start: self.start(), place_bytes: self.chunk.bytes() }
    }

    fn start(&self) -> Bytes {
        self.layout().end().align_up(PLACES_ALIGNMENT)
    }

    /// The header as it stands on the partition.
    pub(super) fn encode(&self) -> Buffer {
        let mut page = Buffer::unpooled(BLOCK_BYTES as usize);
        page[..8].copy_from_slice(&MAGIC);
        page[8..12].copy_from_slice(&VERSION.to_le_bytes());
        page[16..24].copy_from_slice(&self.chunk.bytes().to_le_bytes());
        page[24..32].copy_from_slice(&self.volume.get().to_le_bytes());
        page[32..40].copy_from_slice(&self.places.to_le_bytes());
        page[40..56].copy_from_slice(&self.id);
        let crc = crc32fast::hash(&page[..64]);
        page[64..68].copy_from_slice(&crc.to_le_bytes());
        page
    }

    /// Reads the header that stands at the start of `name`.
    pub(super) fn decode(page: &[u8], name: &str) -> Result<Self> {
        let refuse = |kind, why: &str| Err(Error::new(kind, format!("{name} {why}")));
        let word = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().expect("eight bytes"));
        let half = |at: usize| u32::from_le_bytes(page[at..at + 4].try_into().expect("four bytes"));
        if page[..8] != MAGIC {
            return refuse(ErrorKind::Invalid, "is no partition of a surrogate: it begins with something else");
        }
        if crc32fast::hash(&page[..64]) != half(64) {
            return refuse(ErrorKind::Corrupt, "is damaged: the checksum of its header does not fit");
        }
        if half(8) != VERSION {
            let why = format!("has layout {} of surrogates; this program knows layout {VERSION}", half(8));
            return refuse(ErrorKind::Unsupported, &why);
        }
        let id = page[40..56].try_into().expect("16 bytes");
        let header =
            ChunkSize::new(word(16)).map(|chunk| Self { volume: Bytes(word(24)), chunk, places: word(32), id });
        let is_sensible = |header: &Self| {
            header.chunk.bytes() >= CHUNK_BYTES_MIN
                && !header.volume.is_zero()
                && header.places > 0
                && header.chunks() < u64::from(u32::MAX)
        };
        match header.filter(is_sensible) {
            Some(header) => Ok(header),
            None => refuse(ErrorKind::Corrupt, "is damaged: its header has no sensible sizes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_has_as_many_places_as_fit_beside_their_maps() {
        let chunk = ChunkSize::new(1 << 20).expect("a chunk size");
        let new = |partition| RedirectHeader::new(Bytes::gib(1024), chunk, partition, [7; 16]);
        let header = new(Bytes::gib(40)).expect("it fits");
        assert!(header.partition_bytes() <= Bytes::gib(40));
        let more = RedirectHeader { places: header.places + 1, ..header };
        assert!(more.partition_bytes() > Bytes::gib(40), "one more would fit");
        assert!(header.places > 40_940, "{}", header.places);
        assert_eq!(new(Bytes::mib(1)), None);
        let small = ChunkSize::new(32 << 10).expect("a chunk size");
        assert_eq!(RedirectHeader::new(Bytes::gib(1), small, Bytes::gib(1), [0; 16]), None);
    }

    #[test]
    fn a_header_comes_back_and_every_changed_byte_of_it_is_told() {
        let chunk = ChunkSize::new(256 << 10).expect("a chunk size");
        let header = RedirectHeader::new(Bytes(1_000_001), chunk, Bytes::mib(8), [9; 16]).expect("it fits");
        let page = header.encode();
        assert_eq!(RedirectHeader::decode(&page, "s").expect("it was just written"), header);
        for at in 0..68 {
            let mut changed = Buffer::copy_of(&page);
            changed[at] ^= 0x10;
            assert!(RedirectHeader::decode(&changed, "s").is_err(), "byte {at} was changed");
        }
    }
}
