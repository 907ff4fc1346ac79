//! What is on record of a surrogate: `STATE/surrogates/NAME.json`, replaced as a whole.
//!
//! It says whose each partition is. What a partition holds its own header and maps say, and whether that counts the volume's
//! journal: a partition whose layer no journal names is free.

use std::path::Path;

use api::v1::{self, Error, ErrorCode};
use backends::{BackendSpec, PreparedTarget};
use block::{Bytes, Extent};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::problem::{Result, of_state};
use crate::state_dir::Layout;

/// The layout of this document.
const SURROGATE_VERSION: u32 = 1;

/// A surrogate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SurrogateDocument {
    version: u32,
    /// What it is called.
    pub(crate) name: String,
    /// Where it is: one store, or two that hold the same.
    pub(super) stores: Vec<StoreDocument>,
    /// How much of each store is for volumes, in bytes.
    pub(super) bytes: u64,
    /// How much of it a volume gets, in bytes.
    pub(super) partition_bytes: u64,
    /// The unit of what is popular, in bytes.
    pub(super) chunk_bytes: u64,
    /// Whether no further volume gets a partition.
    #[serde(default)]
    pub(super) draining: bool,
    /// The partitions that volumes have.
    #[serde(default)]
    pub(super) partitions: Vec<Partition>,
}

/// A store of a surrogate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StoreDocument {
    /// What to open.
    pub(super) spec: BackendSpec,
    /// Of a file that was made for it: how to take it back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) made: Option<PreparedTarget>,
}

/// A volume's part of a surrogate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Partition {
    /// The layer of the volume that has it.
    pub(super) layer: Uuid,
    /// The volume, for people.
    pub(super) volume: String,
    /// Which one it is, from the start of the stores.
    pub(super) index: u64,
    /// The store that lacks something of it, and is read no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) lost: Option<usize>,
}

impl SurrogateDocument {
    /// A surrogate without volumes.
    pub(super) fn new(name: String, stores: Vec<StoreDocument>, chunk_bytes: u64) -> Self {
        let (bytes, partition_bytes, partitions) = (0, 1, Vec::new());
        let version = SURROGATE_VERSION;
        Self { version, name, stores, bytes, partition_bytes, chunk_bytes, draining: false, partitions }
    }

    /// How many volumes it has room for.
    pub(super) const fn partitions_max(&self) -> u64 {
        self.bytes / self.partition_bytes
    }

    /// The partition of `layer`.
    pub(super) fn find(&self, layer: Uuid) -> Option<&Partition> {
        self.partitions.iter().find(|partition| partition.layer == layer)
    }

    /// Gives `layer` of `volume` the first free partition.
    ///
    /// # Errors
    /// It is being drained, or there is none.
    pub(super) fn take(&mut self, layer: Uuid, volume: &str) -> Result<()> {
        let name = &self.name;
        if self.draining {
            return Err(Error::new(ErrorCode::WrongState, format!("the surrogate {name} is being drained"))
                .with_hint("use another one, or make it anew"));
        }
        let is_free = |index: &u64| self.partitions.iter().all(|taken| taken.index != *index);
        let Some(index) = (0..self.partitions_max()).find(is_free) else {
            let message = format!("each of the {} parts of the surrogate {name} is in use", self.partitions_max());
            return Err(Error::new(ErrorCode::NoSpace, message)
                .with_hint(format!("`transhume surrogate show {name}` lists whose they are")));
        };
        self.partitions.push(Partition { layer, volume: volume.to_owned(), index, lost: None });
        Ok(())
    }

    /// Where a partition is in each store.
    pub(super) const fn extent_of(&self, partition: &Partition) -> Extent {
        Extent::new(Bytes(partition.index * self.partition_bytes), Bytes(self.partition_bytes))
    }

    /// How the API shows it; the daemon adds what the volumes do with it.
    pub(super) fn show(&self) -> v1::Surrogate {
        let stores = self
            .stores
            .iter()
            .map(|store| v1::SurrogateStore { place: store.spec.to_string(), made: store.made.is_some() });
        let partitions = self.partitions.iter().map(|partition| v1::SurrogatePartition {
            volume: partition.volume.clone(),
            layer: partition.layer.to_string(),
            redirection: None,
        });
        v1::Surrogate {
            name: self.name.clone(),
            stores: stores.collect(),
            bytes: self.bytes,
            partition_bytes: self.partition_bytes,
            chunk_bytes: self.chunk_bytes,
            partitions_max: self.partitions_max(),
            partitions: partitions.collect(),
            draining: self.draining,
        }
    }
}

/// Stores `document`.
pub(super) fn store(layout: &Layout, document: &SurrogateDocument) -> Result<()> {
    let text = serde_json::to_string_pretty(document).expect("plain data serialises");
    layout.write_atomically(&layout.surrogate(&document.name), &text)
}

/// Forgets the surrogate `name`.
pub(super) fn remove(layout: &Layout, name: &str) -> Result<()> {
    layout.remove_document(&layout.surrogate(name))
}

/// Every surrogate on record, or why it cannot be read.
pub(super) fn load_all(layout: &Layout) -> Result<Vec<Result<SurrogateDocument>>> {
    let paths = match layout.documents(&layout.surrogates()) {
        // An older version has made the state directory.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        paths => paths.map_err(|error| of_state(error, format!("listing {}", layout.surrogates().display())))?,
    };
    Ok(paths.iter().map(|path| load(layout, path)).collect())
}

fn load(layout: &Layout, path: &Path) -> Result<SurrogateDocument> {
    let unreadable = |why: String| {
        Error::new(ErrorCode::JournalUnreadable, format!("{} cannot be read: {why}", path.display()))
            .with_hint("put back a copy of it and restart: volumes that have a part of the surrogate need it")
    };
    let text = layout.files().read(path).map_err(|error| unreadable(error.to_string()))?;
    let document: SurrogateDocument = serde_json::from_slice(&text).map_err(|error| unreadable(error.to_string()))?;
    if document.version != SURROGATE_VERSION {
        return Err(unreadable(format!("it has the layout {}: a newer version wrote it", document.version)));
    }
    if document.partition_bytes == 0 || document.stores.is_empty() {
        return Err(unreadable("it has no stores, or partitions without room".to_owned()));
    }
    Ok(document)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> SurrogateDocument {
        let store = StoreDocument { spec: BackendSpec::file("/fast/s.img"), made: None };
        let new = SurrogateDocument::new("fast".to_owned(), vec![store], 1 << 20);
        SurrogateDocument { bytes: 10 << 20, partition_bytes: 4 << 20, ..new }
    }

    #[test]
    fn a_volume_gets_the_first_free_partition_and_none_when_all_are_taken() {
        let mut document = document();
        let layers = [1, 2, 3].map(Uuid::from_u128);
        document.take(layers[0], "a").expect("it is empty");
        document.take(layers[1], "b").expect("there is one more");
        let second = document.find(layers[1]).expect("it has one");
        assert_eq!(document.extent_of(second), Extent::new(Bytes::mib(4), Bytes::mib(4)));
        assert_eq!(document.take(layers[2], "c").map_err(|error| error.code), Err(ErrorCode::NoSpace));
        document.partitions.retain(|partition| partition.layer != layers[0]);
        document.take(layers[2], "c").expect("one was given back");
        assert_eq!(document.find(layers[2]).expect("it has one").index, 0);
    }

    #[test]
    fn one_that_is_drained_takes_no_further_volume() {
        let mut document = document();
        document.draining = true;
        assert_eq!(document.take(Uuid::nil(), "a").map_err(|error| error.code), Err(ErrorCode::WrongState));
    }

    #[test]
    fn it_is_read_as_it_was_written() {
        let mut document = document();
        document.take(Uuid::nil(), "a").expect("it is empty");
        let text = serde_json::to_string(&document).expect("plain data");
        assert_eq!(serde_json::from_str::<SurrogateDocument>(&text).expect("it was just written"), document);
    }
}
