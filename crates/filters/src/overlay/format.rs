//! The bytes of an overlay on its delta device; `docs/overlay.md` draws them.

use block::{BLOCK_BYTES, Buffer, Bytes, ChunkSize, Error, ErrorKind, Result};

use super::map::{BODY_BYTES, Body, SECTOR_GRAINS};

/// The first bytes of an overlay.
const MAGIC: [u8; 8] = *b"TRANSHUO";
/// The first bytes of the boot page.
const BOOT_MAGIC: [u8; 8] = *b"TRANSHUB";
/// The version of the layout.
const VERSION: u32 = 1;
/// What power loss keeps whole: the header, the boot record and every piece of a map are one each.
pub(super) const SECTOR_BYTES: usize = 512;
/// Where the boot record is.
pub(super) const BOOT_AT: Bytes = Bytes(BLOCK_BYTES);
/// Where the first map is.
const MAPS_AT: Bytes = Bytes(2 * BLOCK_BYTES);
/// Where data may begin: at multiples of this.
const DATA_ALIGNMENT: u64 = 1 << 20;
/// Both maps together have at most so many grains that one takes 64 MiB of memory.
const GRAINS_MAX: u64 = 1 << 28;
/// What a map sector has before its states: checksum, number, a part of the overlay's identity.
const SECTOR_HEAD_BYTES: usize = SECTOR_BYTES - BODY_BYTES;

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
    /// The overlay `id` of a volume of `volume` bytes over `parent`, with the smallest grain whose map stays within
    /// 64 MiB of memory: 4 KiB up to a volume of 1 TiB, 64 KiB at 16 TiB.
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
        (self.map_at(Map::Running) + self.map_bytes()).align_up(DATA_ALIGNMENT)
    }

    pub(super) fn map_at(&self, map: Map) -> Bytes {
        match map {
            Map::Durable => MAPS_AT,
            Map::Running => MAPS_AT + self.map_bytes(),
        }
    }

    pub(super) fn map_bytes(&self) -> Bytes {
        Bytes(self.sectors() * SECTOR_BYTES as u64).align_up(BLOCK_BYTES)
    }

    /// How many sectors a map has.
    pub(super) fn sectors(&self) -> u64 {
        self.grains().div_ceil(SECTOR_GRAINS)
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

    /// The record of the boot in which the running map holds.
    pub(super) fn encode_boot(&self, boot: [u8; 16]) -> Buffer {
        let mut page = Buffer::unpooled(BLOCK_BYTES as usize);
        page[..8].copy_from_slice(&BOOT_MAGIC);
        page[8..24].copy_from_slice(&boot);
        page[24..40].copy_from_slice(&self.id);
        let crc = crc32fast::hash(&page[..40]);
        page[40..44].copy_from_slice(&crc.to_le_bytes());
        page
    }

    /// A sector of a map with these states.
    pub(super) fn encode_sector(&self, index: u64, body: &Body, sector: &mut [u8]) {
        sector[4..8].copy_from_slice(&(index as u32).to_le_bytes());
        sector[8..SECTOR_HEAD_BYTES].copy_from_slice(&self.id[..8]);
        sector[SECTOR_HEAD_BYTES..].copy_from_slice(body);
        let crc = crc32fast::hash(&sector[4..]);
        sector[..4].copy_from_slice(&crc.to_le_bytes());
    }

    /// The states of a sector of a map; one that was never written has none.
    pub(super) fn decode_sector(&self, index: u64, sector: &[u8], name: &str) -> Result<Option<Body>> {
        if sector.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let is_right = number(&sector[..4]) == crc32fast::hash(&sector[4..])
            && number(&sector[4..8]) == index as u32
            && sector[8..SECTOR_HEAD_BYTES] == self.id[..8];
        if !is_right {
            let context = format!("{name} is damaged: sector {index} of its map is not what was written");
            return Err(Error::new(ErrorKind::Corrupt, context));
        }
        Ok(Some(sector[SECTOR_HEAD_BYTES..].try_into().expect("a sector is its head and its body")))
    }
}

/// Which of the two maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Map {
    /// What a power loss leaves: written after a flush of the data that it speaks of.
    Durable,
    /// What a crash of the process leaves: written before a write is answered, never flushed, true in one boot.
    Running,
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
            assert!(header.map_bytes() <= Bytes::mib(70), "{}", header.map_bytes());
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
