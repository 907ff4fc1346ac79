//! What is on record of a surrogate: `STATE/surrogates/NAME.json`. Its partitions are slots of one size.

use std::collections::BTreeSet;

use api::v1::{self, Error, ErrorCode};
use block::{Bytes, Extent};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::pools::{Partition, PoolDocument};
use crate::problem::Result;

/// What is on record of a surrogate. It has one store, or two that hold the same.
pub(super) type SurrogateDocument = PoolDocument<SurrogateSettings, SurrogatePlace>;

/// How a surrogate is divided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SurrogateSettings {
    /// How much of it a volume gets, in bytes.
    pub(super) partition_bytes: u64,
    /// The unit of what is popular, in bytes.
    pub(super) chunk_bytes: u64,
}

/// Where a volume's part of a surrogate is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SurrogatePlace {
    /// Which one it is, from the start of the stores.
    pub(super) index: u64,
    /// The store that lacks something of it, and is read no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) lost: Option<usize>,
}

impl SurrogatePlace {
    /// Whether store `number` lacks something of it.
    pub(crate) fn has_lost(&self, number: usize) -> bool {
        self.lost == Some(number)
    }
}

impl SurrogateDocument {
    /// How many volumes it has room for.
    pub(super) const fn partitions_max(&self) -> u64 {
        self.bytes / self.settings.partition_bytes
    }

    /// Gives `layer` of `volume` the first free partition.
    ///
    /// # Errors
    /// It is being drained, or there is none.
    pub(super) fn take(&mut self, layer: Uuid, volume: &str) -> Result<()> {
        let name = &self.name;
        self.refuse_drained()?;
        let is_free = |index: &u64| self.partitions.iter().all(|taken| taken.place.index != *index);
        let Some(index) = (0..self.partitions_max()).find(is_free) else {
            let message = format!("each of the {} parts of the surrogate {name} is in use", self.partitions_max());
            return Err(Error::new(ErrorCode::NoSpace, message)
                .with_hint(format!("`transhume surrogate show {name}` lists whose they are")));
        };
        let place = SurrogatePlace { index, lost: None };
        self.partitions.push(Partition::new(layer, volume.to_owned(), place));
        Ok(())
    }

    /// Refuses what would need partitions for so many more volumes, if there are fewer.
    pub(super) fn check_room(&self, volumes: usize) -> Result<()> {
        if volumes == 0 {
            return Ok(());
        }
        self.refuse_drained()?;
        let free = self.partitions_max().saturating_sub(self.partitions.len() as u64);
        if free >= volumes as u64 {
            return Ok(());
        }
        let name = &self.name;
        let message =
            format!("the surrogate {name} lacks room: parts that are needed: {volumes}, that are left: {free}");
        Err(Error::new(ErrorCode::NoSpace, message).with_hint(format!(
            "`transhume surrogate show {name}` lists whose they are; smaller parts are more of them"
        )))
    }

    /// Which of its two stores is lost for some volume.
    pub(super) fn lost_store(&self) -> Result<usize> {
        let name = &self.name;
        let refuse = |why: String, hint: &str| Err(Error::new(ErrorCode::WrongState, why).with_hint(hint));
        if self.stores.len() < 2 {
            let hint = "what a lost one held is lost: take it out with --discard-dirty, and make another surrogate";
            return refuse(format!("the surrogate {name} has one store"), hint);
        }
        let lost: BTreeSet<usize> = self.partitions.iter().filter_map(|partition| partition.place.lost).collect();
        match lost.into_iter().collect::<Vec<_>>()[..] {
            [number] => Ok(number),
            [] => refuse(format!("no store of the surrogate {name} is lost"), "nothing is to be repaired"),
            _ => refuse(
                format!("each store of the surrogate {name} has something that the other one lacks"),
                "take it out of its volumes' stacks, and make it anew",
            ),
        }
    }

    fn refuse_drained(&self) -> Result<()> {
        if !self.draining {
            return Ok(());
        }
        Err(Error::new(ErrorCode::WrongState, format!("the surrogate {} is being drained", self.name))
            .with_hint("use another one, or make it anew"))
    }

    /// Where a partition is in each store.
    pub(super) const fn extent_of(&self, partition: &Partition<SurrogatePlace>) -> Extent {
        let bytes = self.settings.partition_bytes;
        Extent::new(Bytes(partition.place.index * bytes), Bytes(bytes))
    }

    /// How the API shows it; the daemon adds what the volumes do with it.
    pub(super) fn show(&self) -> v1::Surrogate {
        let partitions = self.partitions.iter().map(|partition| v1::SurrogatePartition {
            volume: partition.volume.clone(),
            layer: partition.layer.to_string(),
            redirection: None,
            lost_store: partition.place.lost.map(|number| number as u64),
            rebuild_left_bytes: None,
        });
        v1::Surrogate {
            name: self.name.clone(),
            stores: self.show_stores(),
            bytes: self.bytes,
            partition_bytes: self.settings.partition_bytes,
            chunk_bytes: self.settings.chunk_bytes,
            partitions_max: self.partitions_max(),
            partitions: partitions.collect(),
            draining: self.draining,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pools::StoreDocument;
    use backends::BackendSpec;

    fn document() -> SurrogateDocument {
        let store = StoreDocument { place: BackendSpec::file("/fast/s.img").into(), made: None };
        let settings = SurrogateSettings { partition_bytes: 4 << 20, chunk_bytes: 1 << 20 };
        let mut new = SurrogateDocument::new("fast".to_owned(), vec![store], settings);
        new.bytes = 10 << 20;
        new
    }

    #[test]
    fn a_volume_gets_the_first_free_partition_and_none_when_all_are_taken() {
        let mut document = document();
        let layers = [1, 2, 3].map(Uuid::from_u128);
        document.take(layers[0], "a").expect("it is empty");
        assert_eq!(document.check_room(2).map_err(|error| error.code), Err(ErrorCode::NoSpace));
        document.check_room(1).expect("there is one more");
        document.take(layers[1], "b").expect("there is one more");
        let second = document.find(layers[1]).expect("it has one");
        assert_eq!(document.extent_of(second), Extent::new(Bytes::mib(4), Bytes::mib(4)));
        assert_eq!(document.take(layers[2], "c").map_err(|error| error.code), Err(ErrorCode::NoSpace));
        document.partitions.retain(|partition| partition.layer != layers[0]);
        document.take(layers[2], "c").expect("one was given back");
        assert_eq!(document.find(layers[2]).expect("it has one").place.index, 0);
    }

    #[test]
    fn one_that_is_drained_takes_no_further_volume() {
        let mut document = document();
        document.draining = true;
        assert_eq!(document.take(Uuid::nil(), "a").map_err(|error| error.code), Err(ErrorCode::WrongState));
        assert_eq!(document.check_room(1).map_err(|error| error.code), Err(ErrorCode::WrongState));
        assert_eq!(document.check_room(0), Ok(()), "nobody asks it for anything");
    }

    #[test]
    fn one_store_is_repaired_and_never_both_nor_the_only_one() {
        let mut document = document();
        let code = |document: &SurrogateDocument| document.lost_store().map_err(|error| error.code);
        assert_eq!(code(&document), Err(ErrorCode::WrongState), "it is the only one");
        document.stores.push(StoreDocument { place: BackendSpec::file("/fast/t.img").into(), made: None });
        document.take(Uuid::from_u128(1), "a").expect("there is room");
        document.take(Uuid::from_u128(2), "b").expect("there is room");
        assert_eq!(code(&document), Err(ErrorCode::WrongState), "none is lost");
        document.partitions[1].place.lost = Some(1);
        assert_eq!(code(&document), Ok(1));
        document.partitions[0].place.lost = Some(0);
        assert_eq!(code(&document), Err(ErrorCode::WrongState), "both are");
    }

    #[test]
    fn it_is_read_as_it_was_written_before_there_were_pools() {
        let written = serde_json::json!({
            "version": 1, "name": "fast", "stores": [{"spec": "file:/fast/s.img"}], "bytes": 10 << 20,
            "partition_bytes": 4 << 20, "chunk_bytes": 1 << 20, "draining": false,
            "partitions": [
                {"layer": "00000000-0000-0000-0000-000000000000", "volume": "a", "index": 0},
                {"layer": "00000000-0000-0000-0000-000000000001", "volume": "b", "index": 1, "lost": 1},
            ],
        });
        let mut expected = document();
        for (number, volume) in ["a", "b"].into_iter().enumerate() {
            expected.take(Uuid::from_u128(number as u128), volume).expect("there is room");
        }
        expected.partitions[1].place.lost = Some(1);
        assert_eq!(serde_json::from_value::<SurrogateDocument>(written.clone()).expect("readable"), expected);
        assert_eq!(serde_json::to_value(&expected).expect("plain data"), written, "an older version could not read it");
    }
}
