//! The bytes of an overlay on its delta device; `docs/overlay.md` draws them.

use block::{BLOCK_BYTES, Buffer, Bytes, ChunkSize, Error, ErrorKind, Result};

use super::grain::GrainState;
use crate::store::Layout;

/// The first bytes of an overlay.
const MAGIC: [u8; 8] = *b"TRANSHUO";
/// The version of the layout.
const VERSION: u32 = 1;
/// Where data may begin: at multiples of this.
const DATA_ALIGNMENT: u64 = 1 << 20;
/// Both maps together have at most so many grains that one takes 64 MiB of memory.
const GRAINS_MAX: u64 = 1 << 28;
/// What an overlay is and to what it belongs. It never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverlayHeader {
    /// The size of the volume.
    pub volume: Bytes,
    /// The unit in which the overlay hides its base.
    pub grain: ChunkSize,
    /// Its own identity.
    pub id: [u8; 16],
    /// The identity of what it lies over, as whoever creates it names that; zeroes for none.
    pub parent: [u8; 16],
}

impl OverlayHeader {
    /// The overlay `id` of a volume of `volume` bytes over `parent`. Its grain is the smallest whose map stays within
    /// 64 MiB of memory. That is 4 KiB up to a volume of 1 TiB, 64 KiB at 16 TiB.
    ///
    /// # Panics
    /// If the volume is empty or larger than 1 PiB.
    #[must_use]
    pub fn new(volume: Bytes, id: [u8; 16], parent: [u8; 16]) -> Self {
        let grain = volume.0.div_ceil(GRAINS_MAX).next_power_of_two().max(BLOCK_BYTES);
        let grain = ChunkSize::new(grain).expect("a volume has at most 1 PiB");
        assert!(!volume.is_zero(), "an overlay lies over a volume");
        Self { volume, grain, id, parent }
    }

    /// The same with another grain, for tests and measurements.
    #[must_use]
    pub const fn with_grain(mut self, grain: ChunkSize) -> Self {
        self.grain = grain;
        self
    }

    /// How large the delta device must be, exactly. Its space beyond both maps is used as the guest writes.
    #[must_use]
    pub fn delta_bytes(&self) -> Bytes {
        self.data_at() + self.volume
    }

    /// What is allocated from the beginning: all but the data.
    #[must_use]
    pub fn overhead_bytes(&self) -> Bytes {
        self.data_at()
    }

    /// Where the first byte of the volume is.
    pub(super) fn data_at(&self) -> Bytes {
        self.layout().end().align_up(DATA_ALIGNMENT)
    }

    /// Its record.
    pub(super) fn layout(&self) -> Layout {
        Layout::new::<GrainState>(self.grains(), self.id)
    }

    pub(super) fn grains(&self) -> u64 {
        self.grain.count(self.volume)
    }

    /// The header as it stands on the delta.
    pub(super) fn encode(&self) -> Buffer {
        let mut page = Buffer::unpooled(BLOCK_BYTES as usize);
        page[..8].copy_from_slice(&MAGIC);
        page[8..12].copy_from_slice(&VERSION.to_le_bytes());
        page[12..16].copy_from_slice(&(self.grain.bytes() as u32).to_le_bytes());
        page[16..24].copy_from_slice(&self.volume.0.to_le_bytes());
        page[24..40].copy_from_slice(&self.id);
        page[40..56].copy_from_slice(&self.parent);
        let crc = crc32fast::hash(&page[..64]);
        page[64..68].copy_from_slice(&crc.to_le_bytes());
        page
    }

    /// Reads the header that stands at the start of `name`.
    pub(super) fn decode(page: &[u8], name: &str) -> Result<Self> {
        let refuse = |kind, why: &str| Err(Error::new(kind, format!("{name} {why}")));
        if page.iter().all(|byte| *byte == 0) {
            return refuse(ErrorKind::Invalid, "is no overlay: its header was never written");
        }
        if page[..8] != MAGIC {
            return refuse(ErrorKind::Invalid, "is no overlay: it begins with something else");
        }
        if crc32fast::hash(&page[..64]) != number(&page[64..68]) {
            return refuse(ErrorKind::Corrupt, "is damaged: the checksum of its header does not fit");
        }
        let version = number(&page[8..12]);
        if version != VERSION {
            let why = format!("has layout {version} of overlays; this program knows layout {VERSION}");
            return refuse(ErrorKind::Unsupported, &why);
        }
        if page[56..64] != [0; 8] {
            return refuse(ErrorKind::Unsupported, "has features that this program does not know");
        }
        let volume = Bytes(u64::from_le_bytes(page[16..24].try_into().expect("eight bytes")));
        let (id, parent) = (page[24..40].try_into(), page[40..56].try_into());
        let grain = ChunkSize::new(number(&page[12..16]).into()).filter(|grain| grain.count(volume) <= GRAINS_MAX);
        match grain {
            Some(grain) if !volume.is_zero() => {
                Ok(Self { volume, grain, id: id.expect("16 bytes"), parent: parent.expect("16 bytes") })
            }
            _ => refuse(ErrorKind::Corrupt, "is damaged: its header has no sensible sizes"),
        }
    }
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().expect("four bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(volume: Bytes) -> OverlayHeader {
        OverlayHeader::new(volume, [7; 16], [9; 16])
    }

    #[test]
    fn the_map_of_a_volume_of_any_size_stays_within_its_limit() {
        for (volume, grain) in [(Bytes(1), 4096), (Bytes::gib(1024), 4096), (Bytes::gib(16 << 10), 65536)] {
            let header = header(volume);
            assert_eq!(header.grain.bytes(), grain);
            let map = header.layout().map_bytes();
            assert!(map <= Bytes::mib(70), "{map}");
            assert_eq!(header.delta_bytes(), header.overhead_bytes() + volume);
        }
    }

    #[test]
    fn a_header_comes_back_and_every_changed_byte_of_it_is_told() {
        let header = header(Bytes(1_000_001));
        let page = header.encode();
        assert_eq!(OverlayHeader::decode(&page, "delta").expect("it was just written"), header);
        for at in 0..68 {
            let mut changed = Buffer::copy_of(&page);
            changed[at] ^= 0x10;
            assert!(OverlayHeader::decode(&changed, "delta").is_err(), "byte {at} was changed");
        }
    }

    #[test]
    fn a_layout_and_features_of_tomorrow_are_refused_in_one_line() {
        for (at, what) in [(8, "layout 2"), (56, "features")] {
            let mut page = header(Bytes::mib(1)).encode();
            page[at] = 2;
            let crc = crc32fast::hash(&page[..64]);
            page[64..68].copy_from_slice(&crc.to_le_bytes());
            let error = OverlayHeader::decode(&page, "delta").expect_err("it is not known");
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.chain().contains(what) && !error.chain().contains('\n'), "{}", error.chain());
        }
    }
}
