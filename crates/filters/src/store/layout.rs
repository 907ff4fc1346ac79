//! The bytes of a record on its device; `docs/overlay.md` draws them.

use block::{BLOCK_BYTES, Buffer, Bytes, Device, Error, ErrorKind, Extent, Mutation, Result};

use super::entry::{BODY_BYTES, Body, Entry};

/// The first bytes of the boot page.
const BOOT_MAGIC: [u8; 8] = *b"TRANSHUB";
/// What power loss keeps whole: every piece of a map is one, and the boot record.
pub(super) const SECTOR_BYTES: usize = 512;
/// What a map sector has before its states: checksum, number, a part of the store's identity.
const SECTOR_HEAD_BYTES: usize = SECTOR_BYTES - BODY_BYTES;

/// Where a record lies on its device, behind the one page that belongs to the policy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// How many sectors a map has.
    sectors: u64,
    grains: u64,
    /// The store's identity.
    id: [u8; 16],
}

impl Layout {
    /// Where the boot record is.
    pub(crate) const BOOT_AT: Bytes = Bytes(BLOCK_BYTES);
    /// Where the first map is.
    const MAPS_AT: Bytes = Bytes(2 * BLOCK_BYTES);

    /// The record of `grains` grains in the store `id`.
    pub(crate) const fn new<E: Entry>(grains: u64, id: [u8; 16]) -> Self {
        Self { sectors: grains.div_ceil(E::SECTOR_GRAINS), grains, id }
    }

    /// How many grains it speaks of.
    pub(crate) const fn grains(&self) -> u64 {
        self.grains
    }

    pub(super) const fn sectors(&self) -> u64 {
        self.sectors
    }

    pub(crate) fn map_at(&self, map: Map) -> Bytes {
        match map {
            Map::Durable => Self::MAPS_AT,
            Map::Running => Self::MAPS_AT + self.map_bytes(),
        }
    }

    pub(crate) fn map_bytes(&self) -> Bytes {
        Bytes(self.sectors * SECTOR_BYTES as u64).align_up(BLOCK_BYTES)
    }

    /// Where it ends.
    pub(crate) fn end(&self) -> Bytes {
        self.map_at(Map::Running) + self.map_bytes()
    }

    /// Makes an empty record of `device` with `header` for its first page, whatever it held before, and zeroes up to `end`. Done means
    /// durable.
    pub(crate) async fn create(&self, device: &Device, end: Bytes, header: Buffer) -> Result<()> {
        // The old header goes first and the new one comes last, so that no crash leaves it over another's maps.
        let first = Extent::new(Bytes::ZERO, self.map_at(Map::Durable));
        device.write(Mutation::zeroes(first, false).with_fua(true)).await?;
        let maps = Extent::between(self.map_at(Map::Durable), end);
        for piece in maps.split_at_multiples(4 << 20) {
            device.write(Mutation::zeroes(piece, false)).await?;
        }
        device.flush().await?;
        device.write(Mutation::data(Bytes::ZERO, header.freeze()).with_fua(true)).await
    }

    /// Has the running map of an empty record say `state_of` of every grain, states that the durable map need not name. Done means durable.
    /// False if the record is not empty.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) async fn fill<E: Entry>(&self, device: &Device, state_of: impl Fn(u64) -> E) -> Result<bool> {
        const AT_ONCE: u64 = 8192;
        for first in (0..self.sectors).step_by(AT_ONCE as usize) {
            let end = (first + AT_ONCE).min(self.sectors);
            let offset = |map| self.map_at(map) + Bytes(first * SECTOR_BYTES as u64);
            let length = Bytes((end - first) * SECTOR_BYTES as u64).align_up(BLOCK_BYTES).as_usize();
            for map in [Map::Durable, Map::Running] {
                let found = device.read(offset(map), Buffer::unpooled(length)).await?;
                if found.iter().any(|byte| *byte != 0) {
                    return Ok(false);
                }
            }
            let mut buffer = Buffer::unpooled(length);
            for (index, sector) in (first..end).zip(buffer.chunks_exact_mut(SECTOR_BYTES)) {
                let grains = index * E::SECTOR_GRAINS..((index + 1) * E::SECTOR_GRAINS).min(self.grains);
                let mut body = [0; BODY_BYTES];
                for (grain, state) in (0..).zip(grains.map(&state_of)) {
                    state.fill(&mut body, grain..grain + 1);
                }
                self.encode_sector(index, &body, sector);
            }
            device.write(Mutation::data(offset(Map::Running), buffer.freeze())).await?;
        }
        device.flush().await?;
        Ok(true)
    }

    /// Whether the record on `device` was last open in `boot`.
    pub(crate) async fn is_of_boot(&self, device: &Device, boot: [u8; 16]) -> Result<bool> {
        let expected = self.encode_boot(boot);
        let found = device.read(Self::BOOT_AT, Buffer::unpooled(expected.len())).await?;
        Ok(found[..] == expected[..])
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
pub(crate) enum Map {
    /// What a power loss leaves: written after a flush of the data that it speaks of.
    Durable,
    /// What a crash of the process leaves: written before a write is answered, never flushed, true in one boot.
    Running,
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().expect("four bytes"))
}
