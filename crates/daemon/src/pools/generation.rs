//! Which store is that of a part, and whether it is the newest: a page in each store, and the part's record.
//!
//! ```text
//!   record        5 ──▶ 5, next 6 ─────────────────────▶ 6
//!   each store    5 ────────────────▶ 6, with FUA ───────────▶ written to
//! ```
//!
//! A part gets a generation of its own each time that it is opened, now and then while it is open, and when it is left
//! ([`renewal`](super::renewal)). It is on record before it is in a store, and the one before counts until it is in all of them. So a store
//! is believed in the generation on record and in the next one, and in no other: an older copy, an empty file, or another store in its place
//! is told apart. A part that an older version has made has no generation until it is opened.
//!
//! ```text
//! offset  0       8        12       16       32           40       44
//!         +-------+--------+--------+--------+------------+--------+------
//!         | magic | layout | store  | layer  | generation | CRC-32 | 0 ...
//!         | 8     | u32    | u32    | 16     | u64        | u32    |
//!         +-------+--------+--------+--------+------------+--------+------
//! ```

use block::{BLOCK_BYTES, Buffer, Device, Error, ErrorKind, Extent, Mutation, Result};
use uuid::Uuid;

use super::document::Partition;
use super::{Pool, PoolKind};

/// The first bytes of the page.
const MAGIC: [u8; 8] = *b"TRANSHUG";
/// The version of its layout.
const VERSION: u32 = 1;
/// What the checksum covers.
const CHECKED_BYTES: usize = 40;

/// What the page of a store says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// Which store of its pool it is.
    pub(crate) store: u32,
    /// Whose part it holds.
    pub(crate) layer: Uuid,
    /// The one that was begun last.
    pub(crate) generation: u64,
}

impl Stamp {
    fn encode(&self) -> Buffer {
        let mut page = Buffer::unpooled(BLOCK_BYTES as usize);
        page[..8].copy_from_slice(&MAGIC);
        page[8..12].copy_from_slice(&VERSION.to_le_bytes());
        page[12..16].copy_from_slice(&self.store.to_le_bytes());
        page[16..32].copy_from_slice(self.layer.as_bytes());
        page[32..CHECKED_BYTES].copy_from_slice(&self.generation.to_le_bytes());
        let crc = crc32fast::hash(&page[..CHECKED_BYTES]);
        page[CHECKED_BYTES..CHECKED_BYTES + 4].copy_from_slice(&crc.to_le_bytes());
        page
    }

    /// What a page says; none if it says nothing that this version reads.
    fn decode(page: &[u8]) -> Option<Self> {
        let word = |at: usize| page[at..at + 4].try_into().map(u32::from_le_bytes).ok();
        let is_sound = page[..8] == MAGIC
            && word(8) == Some(VERSION)
            && word(CHECKED_BYTES) == Some(crc32fast::hash(&page[..CHECKED_BYTES]));
        let layer = Uuid::from_bytes(page[16..32].try_into().ok()?);
        let generation = u64::from_le_bytes(page[32..CHECKED_BYTES].try_into().ok()?);
        is_sound.then_some(Self { store: word(12)?, layer, generation })
    }

    /// Writes it into the first of `pages` of `part`. Done means durable.
    async fn write(&self, part: &Device, pages: Extent) -> Result<()> {
        part.write(Mutation::data(pages.offset, self.encode().freeze()).with_fua(true)).await
    }
}

impl<P> Partition<P> {
    /// The newest generation, which may not be in all of its stores yet.
    pub(crate) fn newest_generation(&self) -> Option<u64> {
        self.next_generation.or(self.generation)
    }

    /// Refuses the store `number` that says `found` of itself, unless it is that of this part, as it was left.
    fn check_stamp(&self, number: usize, found: Option<Stamp>, name: &str) -> Result<()> {
        let Some(on_record) = self.generation else { return Ok(()) };
        let refuse = |why: String| Err(Error::new(ErrorKind::Fenced, format!("{name} {why}: it is not believed")));
        match found {
            None => refuse(format!("is not what was left there: it is of no generation, and {on_record} is on record")),
            Some(stamp) if stamp.layer != self.layer => refuse("is of another volume's layer".to_owned()),
            Some(stamp) if stamp.store as usize != number => refuse(format!("is store {} of it", stamp.store)),
            Some(Stamp { generation, .. }) if [self.generation, self.next_generation].contains(&Some(generation)) => {
                Ok(())
            }
            Some(Stamp { generation, .. }) => {
                let what = if generation < on_record { "an older copy" } else { "newer than its record" };
                refuse(format!("is {what}: it is of generation {generation}, and {on_record} is on record"))
            }
        }
    }
}

impl<K: PoolKind> Pool<K> {
    /// Refuses `part` as what store `number` has of the part of `layer`, unless it is of the last generation.
    ///
    /// # Errors
    /// Fenced if it was not; what the store says.
    pub(crate) async fn check_generation(
        &self,
        layer: Uuid,
        number: usize,
        part: &Device,
        pages: Option<Extent>,
    ) -> Result<()> {
        let Some(pages) = pages else { return Ok(()) };
        let read = part.read(pages.offset, Buffer::unpooled(BLOCK_BYTES as usize)).await?;
        match self.document().find(layer) {
            Some(partition) => partition.check_stamp(number, Stamp::decode(&read), part.name()),
            None => Err(self.given_back(layer)),
        }
    }

    /// Begins a generation of the part of `layer`: gives it for [`stamp`](Self::stamp). It is on record when this returns.
    pub(crate) fn begin_generation(&self, layer: Uuid) -> Result<u64> {
        let mut begun = 0;
        self.change_part(layer, |partition| {
            // One that was begun and never came into use is used now.
            let next = partition.next_generation.unwrap_or(partition.generation.unwrap_or(0) + 1);
            (begun, partition.next_generation) = (next, Some(next));
        })?;
        Ok(begun)
    }

    /// Has store `number` say that it is of `generation`. Done means durable.
    pub(crate) async fn stamp(
        &self,
        (layer, generation): (Uuid, u64),
        number: usize,
        part: &Device,
        pages: Extent,
    ) -> Result<()> {
        Stamp { store: number as u32, layer, generation }.write(part, pages).await
    }

    /// Every store that is not lost says `generation`: from here on no older one is believed.
    pub(crate) fn end_generation(&self, layer: Uuid, generation: u64) -> Result<()> {
        self.change_part(layer, |partition| {
            // Whoever has begun the same one may have ended it, and others may have begun more.
            if partition.next_generation == Some(generation) {
                (partition.generation, partition.next_generation) = (Some(generation), None);
            }
        })
    }

    /// The newest generation of the part of `layer`, which may not be in all of its stores yet.
    pub(crate) fn newest_generation(&self, layer: Uuid) -> Option<u64> {
        self.document().find(layer).and_then(Partition::newest_generation)
    }

    /// The generation that all stores of the part of `layer` have which are not lost.
    #[cfg(test)]
    pub(crate) fn generation(&self, layer: Uuid) -> Option<u64> {
        self.document().find(layer).and_then(|partition| partition.generation)
    }

    fn change_part(&self, layer: Uuid, change: impl FnOnce(&mut Partition<K::Place>)) -> Result<()> {
        let mut is_there = false;
        let stored = self.update(|document| {
            if let Some(partition) = document.find_mut(layer) {
                change(partition);
                is_there = true;
            }
            Ok(())
        });
        stored.map_err(|error| Error::new(ErrorKind::Io, error.message))?;
        if is_there { Ok(()) } else { Err(self.given_back(layer)) }
    }

    fn given_back(&self, layer: Uuid) -> Error {
        let context = format!("the {} {} has no part of layer {layer}", K::NAME, self.name());
        Error::new(ErrorKind::NotFound, context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYER: Uuid = Uuid::from_u128(7);

    fn partition(generation: Option<u64>, next_generation: Option<u64>) -> Partition<()> {
        Partition { generation, next_generation, ..Partition::new(LAYER, "a".to_owned(), ()) }
    }

    #[test]
    fn a_page_comes_back_and_every_changed_byte_of_it_is_told() {
        let stamp = Stamp { store: 1, layer: LAYER, generation: 1 << 40 };
        let page = stamp.encode();
        assert_eq!(Stamp::decode(&page), Some(stamp));
        for at in 0..CHECKED_BYTES + 4 {
            let mut changed = Buffer::copy_of(&page);
            changed[at] ^= 0x10;
            assert_eq!(Stamp::decode(&changed), None, "byte {at} was changed");
        }
        assert_eq!(Stamp::decode(&[0; BLOCK_BYTES as usize]), None);
    }

    #[test]
    fn a_store_is_believed_in_its_generation_and_in_the_one_that_was_begun_and_in_no_other() {
        let of = |generation| Some(Stamp { store: 1, layer: LAYER, generation });
        let believed = |partition: &Partition<()>, found| partition.check_stamp(1, found, "s").is_ok();
        let settled = partition(Some(5), None);
        assert_eq!([4, 5, 6].map(|number| believed(&settled, of(number))), [false, true, false]);
        let begun = partition(Some(5), Some(6));
        assert_eq!([4, 5, 6, 7].map(|number| believed(&begun, of(number))), [false, true, true, false]);
        assert!(!believed(&settled, None), "an empty store was taken for the part");
        let other = Stamp { store: 1, layer: Uuid::nil(), generation: 5 };
        assert!(!believed(&settled, Some(other)) && settled.check_stamp(0, of(5), "s").is_err());
        assert!(believed(&partition(None, None), None), "an older version has made it");
        let told = settled.check_stamp(1, of(4), "s").expect_err("it is older");
        assert!(told.kind() == ErrorKind::Fenced && told.context().contains("an older copy"), "{told:?}");
    }
}
