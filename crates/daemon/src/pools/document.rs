//! What is on record of a pool: `STATE/KIND/NAME.json`, replaced as a whole.
//!
//! It says whose each partition is. What a partition holds its own header and maps say, and whether that counts the volume's
//! journal: a partition whose layer no journal names is free.

use std::path::Path;

use api::v1::{self, Error, ErrorCode};
use backends::PreparedTarget;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::PoolKind;
use crate::location::Location;
use crate::problem::{Result, of_state};
use crate::state_dir::Layout;

/// The layout of such a document.
const POOL_VERSION: u32 = 1;

/// A pool: `S` is what its kind says of it as a whole, `P` what it says of each partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PoolDocument<S, P> {
    version: u32,
    /// What it is called.
    pub(crate) name: String,
    /// Where it is.
    pub(crate) stores: Vec<StoreDocument>,
    /// How much of each store is for volumes, in bytes.
    pub(crate) bytes: u64,
    /// What its kind says of it.
    #[serde(flatten)]
    pub(crate) settings: S,
    /// Whether no further volume gets a partition.
    #[serde(default)]
    pub(crate) draining: bool,
    /// The partitions that volumes have.
    #[serde(default = "Vec::new")]
    pub(crate) partitions: Vec<Partition<P>>,
}

/// What is on record of a pool of kind `K`.
pub(crate) type DocumentOf<K> = PoolDocument<<K as PoolKind>::Settings, <K as PoolKind>::Place>;

/// A store of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoreDocument {
    /// What to open: a file or block device of this host, or an export of an NBD server.
    #[serde(rename = "spec")]
    pub(crate) place: Location,
    /// Of a file that was made for it: how to take it back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) made: Option<PreparedTarget>,
}

/// A volume's part of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Partition<P> {
    /// The layer of the volume that has it.
    pub(crate) layer: Uuid,
    /// The volume, for people.
    pub(crate) volume: String,
    /// The generation that each of its stores has that is not lost. One that an older version has made has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) generation: Option<u64>,
    /// The generation that some of its stores may have already, while the one before counts, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) next_generation: Option<u64>,
    /// Where it is, as its kind says that.
    #[serde(flatten)]
    pub(crate) place: P,
}

impl<P> Partition<P> {
    /// The part of `layer`, which nobody has opened yet.
    pub(crate) const fn new(layer: Uuid, volume: String, place: P) -> Self {
        Self { layer, volume, generation: None, next_generation: None, place }
    }
}

impl<S, P> PoolDocument<S, P> {
    /// A pool without room and without volumes.
    pub(crate) const fn new(name: String, stores: Vec<StoreDocument>, settings: S) -> Self {
        Self { version: POOL_VERSION, name, stores, bytes: 0, settings, draining: false, partitions: Vec::new() }
    }

    /// The partition of `layer`.
    pub(crate) fn find(&self, layer: Uuid) -> Option<&Partition<P>> {
        self.partitions.iter().find(|partition| partition.layer == layer)
    }

    /// The partition of `layer`, to change what is said of it.
    pub(crate) fn find_mut(&mut self, layer: Uuid) -> Option<&mut Partition<P>> {
        self.partitions.iter_mut().find(|partition| partition.layer == layer)
    }

    /// The volumes that have a partition, each once, for people.
    pub(crate) fn volumes(&self) -> Vec<&str> {
        let mut volumes: Vec<&str> = self.partitions.iter().map(|partition| partition.volume.as_str()).collect();
        volumes.sort_unstable();
        volumes.dedup();
        volumes
    }

    /// How the API shows its stores.
    pub(crate) fn show_stores(&self) -> Vec<v1::PoolStore> {
        let shown =
            |store: &StoreDocument| v1::PoolStore { place: store.place.to_string(), made: store.made.is_some() };
        self.stores.iter().map(shown).collect()
    }
}

/// Stores `document`.
pub(super) fn store<K: PoolKind>(layout: &Layout, document: &DocumentOf<K>) -> Result<()> {
    let text = serde_json::to_string_pretty(document).expect("plain data serialises");
    layout.write_atomically(&path::<K>(layout, &document.name), &text)
}

/// Forgets the pool `name`.
pub(super) fn remove<K: PoolKind>(layout: &Layout, name: &str) -> Result<()> {
    layout.remove_document(&path::<K>(layout, name))
}

fn path<K: PoolKind>(layout: &Layout, name: &str) -> std::path::PathBuf {
    K::directory(layout).join(format!("{name}.json"))
}

/// Every pool of kind `K` on record, or why it cannot be read.
pub(super) fn load_all<K: PoolKind>(layout: &Layout) -> Result<Vec<Result<DocumentOf<K>>>> {
    let directory = K::directory(layout);
    let paths = match layout.documents(&directory) {
        // An older version has made the state directory.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        paths => paths.map_err(|error| of_state(error, format!("listing {}", directory.display())))?,
    };
    Ok(paths.iter().map(|path| load::<K>(layout, path)).collect())
}

fn load<K: PoolKind>(layout: &Layout, path: &Path) -> Result<DocumentOf<K>> {
    let unreadable = |why: String| {
        Error::new(ErrorCode::JournalUnreadable, format!("{} cannot be read: {why}", path.display())).with_hint(
            format!("put back a copy of it and restart: volumes that have a part of the {} need it", K::NAME),
        )
    };
    let text = layout.files().read(path).map_err(|error| unreadable(error.to_string()))?;
    let document: DocumentOf<K> = serde_json::from_slice(&text).map_err(|error| unreadable(error.to_string()))?;
    if document.version != POOL_VERSION {
        return Err(unreadable(format!("it has the layout {}: a newer version wrote it", document.version)));
    }
    if document.stores.is_empty() || !K::is_sound(&document) {
        return Err(unreadable("it has no stores, or partitions without room".to_owned()));
    }
    Ok(document)
}
