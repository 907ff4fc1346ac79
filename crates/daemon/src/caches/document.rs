//! What is on record of a cache: `STATE/caches/NAME.json`. Its partitions are as large as was asked for, first fit.

use api::v1::{self, Error, ErrorCode};
use block::{Bytes, Extent};
use filters::CachePolicy;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::document::as_text;
use crate::pools::{Partition, PoolDocument};
use crate::problem::Result;

/// What is on record of a cache. It has one store.
pub(super) type CacheDocument = PoolDocument<CacheSettings, CachePlace>;

/// What partitions begin and end at multiples of.
pub(super) const PARTITION_ALIGNMENT: u64 = 4 << 10;

/// What a cache does unless a volume says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CacheSettings {
    /// Which block goes when a place is needed.
    #[serde(with = "as_text")]
    pub(super) policy: CachePolicy,
}

/// Where a volume's part of a cache is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CachePlace {
    /// Where it begins in the store, in bytes.
    pub(super) offset: u64,
    /// How large it is, in bytes.
    pub(super) length: u64,
}

impl CachePlace {
    const fn end(&self) -> u64 {
        self.offset + self.length
    }

    /// The same as an extent of the store.
    pub(super) const fn extent(&self) -> Extent {
        Extent::new(Bytes(self.offset), Bytes(self.length))
    }
}

impl CacheDocument {
    /// Whether its partitions lie in it, one beside the other.
    pub(super) fn is_sound(&self) -> bool {
        let mut taken: Vec<&CachePlace> = self.partitions.iter().map(|partition| &partition.place).collect();
        taken.sort_by_key(|place| place.offset);
        let ends = taken.iter().map(|place| place.offset.checked_add(place.length).filter(|end| *end <= self.bytes));
        let starts = taken.iter().skip(1).map(|place| place.offset).chain([self.bytes]);
        ends.zip(starts).all(|(end, next)| end.is_some_and(|end| end <= next))
    }

    /// What is free, from the start of the store on: where it begins, and how long it is.
    fn gaps(&self) -> Vec<(u64, u64)> {
        let mut taken: Vec<&CachePlace> = self.partitions.iter().map(|partition| &partition.place).collect();
        taken.sort_by_key(|place| place.offset);
        let starts = std::iter::once(0).chain(taken.iter().map(|place| place.end()));
        let ends = taken.iter().map(|place| place.offset).chain([self.bytes]);
        starts.zip(ends).map(|(start, end)| (start, end.saturating_sub(start))).collect()
    }

    /// Where the last partition ends, and whose it is.
    pub(super) fn used(&self) -> Option<(u64, &str)> {
        let ends = self.partitions.iter().map(|partition| (partition.place.end(), partition.volume.as_str()));
        ends.max_by_key(|(end, _)| *end)
    }

    /// Gives `layer` of `volume` the first `bytes` that are free.
    ///
    /// # Errors
    /// There are none. It is being removed.
    pub(super) fn take(&mut self, layer: Uuid, volume: &str, bytes: u64) -> Result<()> {
        let name = &self.name;
        if self.draining {
            return Err(Error::new(ErrorCode::WrongState, format!("the cache {name} is being removed"))
                .with_hint("use another one, or make it anew"));
        }
        let length = bytes.next_multiple_of(PARTITION_ALIGNMENT);
        let gaps = self.gaps();
        let Some((offset, _)) = gaps.iter().find(|(_, free)| *free >= length) else {
            let largest = gaps.iter().map(|(_, free)| *free).max().unwrap_or_default();
            let message = format!(
                "the cache {name} has no room for {}: what is free in one piece is {}",
                Bytes(length),
                Bytes(largest)
            );
            return Err(Error::new(ErrorCode::NoSpace, message).with_hint(format!(
                "`transhume cache show {name}` lists whose it is; give a smaller --size, or a larger store"
            )));
        };
        let place = CachePlace { offset: *offset, length };
        self.partitions.push(Partition::new(layer, volume.to_owned(), place));
        Ok(())
    }

    /// How the API shows it; the daemon adds what the volumes do with it.
    pub(super) fn show(&self) -> v1::Cache {
        let partitions = self.partitions.iter().map(|partition| v1::CachePartition {
            volume: partition.volume.clone(),
            layer: partition.layer.to_string(),
            offset: partition.place.offset,
            bytes: partition.place.length,
            cached: None,
        });
        v1::Cache {
            name: self.name.clone(),
            stores: self.show_stores(),
            bytes: self.bytes,
            free_bytes: self.gaps().iter().map(|(_, free)| free).sum(),
            policy: super::to_api_policy(self.settings.policy),
            partitions: partitions.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pools::StoreDocument;
    use backends::BackendSpec;

    fn document() -> CacheDocument {
        let store = StoreDocument { place: BackendSpec::file("/fast/c.img").into(), made: None };
        let mut new = CacheDocument::new("ssd".to_owned(), vec![store], CacheSettings { policy: CachePolicy::Lru });
        new.bytes = 100 << 10;
        new
    }

    #[test]
    fn a_volume_gets_the_first_room_that_is_large_enough() {
        let mut document = document();
        let layers = [1, 2, 3, 4].map(Uuid::from_u128);
        document.take(layers[0], "a", 10 << 10).expect("it is empty");
        document.take(layers[1], "b", 40 << 10).expect("there is more");
        let at = |document: &CacheDocument, layer| document.find(layer).expect("it has one").place.extent();
        assert_eq!(at(&document, layers[0]), Extent::new(Bytes::ZERO, Bytes::kib(12)), "not aligned");
        assert_eq!(at(&document, layers[1]), Extent::new(Bytes::kib(12), Bytes::kib(40)));
        document.partitions.remove(0);
        document.take(layers[2], "c", 16 << 10).expect("there is room behind");
        assert_eq!(at(&document, layers[2]).offset, Bytes::kib(52), "it is laid over another");
        document.take(layers[3], "d", 8 << 10).expect("what was given back is used");
        assert_eq!(at(&document, layers[3]).offset, Bytes::ZERO);
        assert_eq!(document.take(layers[0], "e", 40 << 10).map_err(|error| error.code), Err(ErrorCode::NoSpace));
        assert_eq!(document.show().free_bytes, 36 << 10);
        assert_eq!(document.used(), Some((68 << 10, "c")));
        assert!(document.is_sound());
    }

    #[test]
    fn partitions_that_lie_over_each_other_are_not_believed() {
        let mut document = document();
        document.take(Uuid::from_u128(1), "a", 40 << 10).expect("it is empty");
        document.take(Uuid::from_u128(2), "b", 40 << 10).expect("there is more");
        document.partitions[1].place.offset = 36 << 10;
        assert!(!document.is_sound());
        document.partitions[1].place.offset = 64 << 10;
        assert!(!document.is_sound(), "one ends behind the store");
        document.partitions[1].place.offset = u64::MAX;
        assert!(!document.is_sound());
    }

    #[test]
    fn it_is_read_as_it_was_written() {
        let mut document = document();
        document.take(Uuid::nil(), "a", 4096).expect("it is empty");
        let written = serde_json::to_value(&document).expect("plain data");
        assert_eq!(written["policy"], "lru");
        assert_eq!(serde_json::from_value::<CacheDocument>(written).expect("it was just written"), document);
    }
}
