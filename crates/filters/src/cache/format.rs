//! The bytes of a cache on its partition; `docs/caches.md` draws them.
//!
//! ```text
//!   header │ boot record │ durable map │ running map │ the owner's pages │ place 0 │ place 1 │ ...
//! ```

use block::{BLOCK_BYTES, Buffer, Bytes, ChunkSize, Error, ErrorKind, Extent, Result};

use super::entry::{BLOCKS_MAX, CacheEntry};
use super::options::{CacheHeader, CacheIdentity};
use crate::store::{Layout, OWNER_BYTES, Placement};

/// The first bytes of a cache.
const MAGIC: [u8; 8] = *b"TRANSHUC";
/// The version of the layout.
const VERSION: u32 = 1;
/// Where the first place may begin: at multiples of this.
const PLACES_ALIGNMENT: u64 = 64 << 10;
/// The largest block; the smallest is 4 KiB.
const BLOCK_BYTES_MAX: u64 = 64 << 10;
/// What the checksum covers.
const CHECKED_BYTES: usize = 104;

impl CacheHeader {
    /// The cache `id` of a volume of `volume` bytes, that fills a partition of `partition` bytes. None if not one place fits, or the
    /// block is none of 4 to 64 KiB.
    #[must_use]
    pub fn new(
        volume: Bytes,
        block: ChunkSize,
        partition: Bytes,
        id: [u8; 16],
        identity: CacheIdentity,
    ) -> Option<Self> {
        let with = |places| Self { volume, block, capacity: places, places, id, identity };
        let mut places = partition.get() / block.bytes();
        // The maps grow with the places, by far less than the places themselves.
        while places > 0 && with(places).partition_bytes() > partition {
            let over = with(places).partition_bytes() - partition;
            places -= over.get().div_ceil(block.bytes()).min(places);
        }
        // A few places less may make room for the owner's pages.
        while places > 1 && with(places).owner_pages().is_none() {
            places -= 1;
        }
        Some(with(places)).filter(Self::is_sensible)
    }

    /// Two pages of the partition that the cache leaves to its owner, whatever is in them. Few caches of an older version have none.
    #[must_use]
    pub fn owner_pages(&self) -> Option<Extent> {
        let pages = Extent::new(self.layout().end(), Bytes(OWNER_BYTES));
        (pages.end() <= self.start()).then_some(pages)
    }

    /// How large its partition is at least.
    #[must_use]
    pub fn partition_bytes(&self) -> Bytes {
        self.start() + Bytes(self.capacity * self.block.bytes())
    }

    /// How many places a cache of `cached` bytes of data has: at least one, and its capacity at most.
    #[must_use]
    pub fn places_of(&self, cached: Bytes) -> u64 {
        (cached.get() / self.block.bytes()).clamp(1, self.capacity)
    }

    fn is_sensible(&self) -> bool {
        (BLOCK_BYTES..=BLOCK_BYTES_MAX).contains(&self.block.bytes())
            && !self.volume.is_zero()
            && self.block.count(self.volume) <= BLOCKS_MAX
            && (1..=self.capacity).contains(&self.places)
            && self.capacity < u64::from(u32::MAX)
    }

    /// Its record, of which each grain is a place.
    pub(super) fn layout(&self) -> Layout {
        Layout::new::<CacheEntry>(self.capacity, self.id)
    }

    /// Where its places are.
    pub(super) fn placement(&self) -> Placement {
        Placement::Allocated { start: self.start(), place_bytes: self.block.bytes() }
    }

    fn start(&self) -> Bytes {
        self.layout().end().align_up(PLACES_ALIGNMENT)
    }

    /// The header as it stands on the partition.
    pub(super) fn encode(&self) -> Buffer {
        let mut page = Buffer::unpooled(BLOCK_BYTES as usize);
        page[..8].copy_from_slice(&MAGIC);
        page[8..12].copy_from_slice(&VERSION.to_le_bytes());
        page[16..24].copy_from_slice(&self.block.bytes().to_le_bytes());
        page[24..32].copy_from_slice(&self.volume.get().to_le_bytes());
        page[32..40].copy_from_slice(&self.capacity.to_le_bytes());
        page[40..48].copy_from_slice(&self.places.to_le_bytes());
        page[48..64].copy_from_slice(&self.id);
        page[64..80].copy_from_slice(&self.identity.volume);
        page[80..96].copy_from_slice(&self.identity.layer);
        page[96..104].copy_from_slice(&self.identity.epoch.to_le_bytes());
        let crc = crc32fast::hash(&page[..CHECKED_BYTES]);
        page[CHECKED_BYTES..CHECKED_BYTES + 4].copy_from_slice(&crc.to_le_bytes());
        page
    }

    /// Reads the header that stands at the start of `name`.
    pub(super) fn decode(page: &[u8], name: &str) -> Result<Self> {
        let refuse = |kind, why: &str| Err(Error::new(kind, format!("{name} {why}")));
        let word = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().expect("eight bytes"));
        let half = |at: usize| u32::from_le_bytes(page[at..at + 4].try_into().expect("four bytes"));
        let id = |at: usize| page[at..at + 16].try_into().expect("16 bytes");
        if page[..8] != MAGIC {
            return refuse(ErrorKind::Invalid, "is no partition of a cache: it begins with something else");
        }
        if crc32fast::hash(&page[..CHECKED_BYTES]) != half(CHECKED_BYTES) {
            return refuse(ErrorKind::Corrupt, "is damaged: the checksum of its header does not fit");
        }
        if half(8) != VERSION {
            let why = format!("has layout {} of caches; this program knows layout {VERSION}", half(8));
            return refuse(ErrorKind::Unsupported, &why);
        }
        let identity = CacheIdentity { volume: id(64), layer: id(80), epoch: word(96) };
        let header = ChunkSize::new(word(16)).map(|block| Self {
            volume: Bytes(word(24)),
            block,
            capacity: word(32),
            places: word(40),
            id: id(48),
            identity,
        });
        match header.filter(Self::is_sensible) {
            Some(header) => Ok(header),
            None => refuse(ErrorKind::Corrupt, "is damaged: its header has no sensible sizes"),
        }
    }

    /// Refuses a cache that is another's, or was left in another epoch.
    pub(super) fn check_identity(&self, expected: &CacheIdentity, name: &str) -> Result<()> {
        let own = &self.identity;
        if own.volume != expected.volume || own.layer != expected.layer {
            let what = if own.volume == expected.volume { "layer" } else { "volume" };
            let context = format!("{name} is the cache of another {what}: what it holds is not believed");
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        if own.epoch != expected.epoch {
            let context = format!(
                "{name} was left in epoch {} of its volume, which is in epoch {}: what it holds is not believed",
                own.epoch, expected.epoch
            );
            return Err(Error::new(ErrorKind::Fenced, context));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: CacheIdentity = CacheIdentity { volume: [1; 16], layer: [2; 16], epoch: 3 };

    fn block(kib: u64) -> ChunkSize {
        ChunkSize::new(kib << 10).expect("a block size")
    }

    #[test]
    fn a_partition_has_as_many_places_as_fit_beside_their_maps() {
        let new = |partition| CacheHeader::new(Bytes::gib(1024), block(4), partition, [7; 16], IDENTITY);
        let header = new(Bytes::gib(10)).expect("it fits");
        assert!(header.partition_bytes() <= Bytes::gib(10));
        let more = CacheHeader { capacity: header.capacity + 200, ..header };
        assert!(more.partition_bytes() > Bytes::gib(10), "far more would fit");
        for kib in (64..10_000).step_by(4) {
            if let Some(header) = new(Bytes::kib(kib)) {
                let page = header.owner_pages().expect("there is room for them");
                assert!(page.offset >= header.layout().end() && page.end() <= header.placement().start_of(0), "{kib}");
            }
        }
        // Two maps of 512 bytes for 62 places.
        assert!(header.capacity > 2_600_000, "{}", header.capacity);
        assert_eq!(header.places_of(Bytes::gib(1)), 1 << 18);
        assert_eq!(new(Bytes::kib(16)), None);
        assert_eq!(CacheHeader::new(Bytes::gib(1), block(128), Bytes::gib(1), [0; 16], IDENTITY), None);
    }

    #[test]
    fn a_header_comes_back_and_every_changed_byte_of_it_is_told() {
        let header = CacheHeader::new(Bytes(1_000_001), block(16), Bytes::mib(8), [9; 16], IDENTITY).expect("it fits");
        let header = CacheHeader { places: 5, ..header };
        let page = header.encode();
        assert_eq!(CacheHeader::decode(&page, "s").expect("it was just written"), header);
        for at in 0..CHECKED_BYTES + 4 {
            let mut changed = Buffer::copy_of(&page);
            changed[at] ^= 0x10;
            assert!(CacheHeader::decode(&changed, "s").is_err(), "byte {at} was changed");
        }
    }

    #[test]
    fn a_cache_of_another_volume_layer_or_epoch_is_refused_and_told_apart() {
        let header = CacheHeader::new(Bytes::mib(1), block(4), Bytes::mib(8), [9; 16], IDENTITY).expect("it fits");
        let told = |expected: CacheIdentity| {
            header.check_identity(&expected, "ssd").err().map(|error| (error.kind(), error.context().to_owned()))
        };
        assert_eq!(told(IDENTITY), None);
        let other = told(CacheIdentity { volume: [9; 16], ..IDENTITY }).expect("it is another volume's");
        assert!(other.0 == ErrorKind::Invalid && other.1.contains("another volume"), "{other:?}");
        let other = told(CacheIdentity { layer: [9; 16], ..IDENTITY }).expect("it is another layer's");
        assert!(other.0 == ErrorKind::Invalid && other.1.contains("another layer"), "{other:?}");
        for epoch in [2, 4] {
            let other = told(CacheIdentity { epoch, ..IDENTITY }).expect("it is of another epoch");
            assert!(other.0 == ErrorKind::Fenced && other.1.contains("epoch 3"), "{other:?}");
        }
    }
}
