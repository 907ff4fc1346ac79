//! The layers of a volume: snapshots, caches and limits.

use serde::{Deserialize, Serialize};

use super::{CacheMode, CachePolicy, CacheUse};

/// What a layer of a volume does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LayerKind {
    /// A snapshot: it holds what was written since it was taken.
    Overlay,
    /// Limits what clients may ask for.
    Throttle,
    /// Has a surrogate serve what is popular; it holds what was written since.
    Redirect,
    /// Keeps blocks on the host's flash.
    Cache,
    /// A kind of a later daemon.
    #[default]
    #[serde(other)]
    Unknown,
}

/// Whether a layer may hold bytes that what lies below lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LayerState {
    /// It holds none.
    Clean,
    /// It may.
    MayHold,
    /// It may, and is being emptied into what lies below.
    Draining,
    /// A state of a later daemon.
    #[default]
    #[serde(other)]
    Unknown,
}

/// A layer of a volume (`GET /v1/volumes/NAME/layers`), the lowest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Layer {
    /// What it is, wherever the volume is.
    pub id: String,
    /// What it does.
    pub kind: LayerKind,
    /// What the user calls it.
    pub name: String,
    /// Whether it may hold bytes.
    pub state: LayerState,
    /// Of a snapshot: when it was taken, in milliseconds since 1970.
    pub created_unix_ms: Option<u64>,
    /// Of a snapshot and of a surrogate: how much was written since, as far as it is not in what lies below. Of a cache: how much
    /// only the flash has.
    pub held_bytes: Option<u64>,
    /// Of a throttle: requests a second.
    pub iops: Option<u64>,
    /// Of a throttle: bytes read and written a second.
    pub bytes_per_second: Option<u64>,
    /// Of a cache: how it is set, and what it has done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached: Option<CacheUse>,
}

/// Asks for a layer (`POST /v1/volumes/NAME/layers`). Another throttle is changed to this; a cache or a surrogate is there once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum LayerRequest {
    /// Limits what clients may ask for.
    Throttle {
        /// Requests a second.
        #[serde(default)]
        iops: Option<u64>,
        /// Bytes read and written a second.
        #[serde(default)]
        bytes_per_second: Option<u64>,
    },
    /// Keeps blocks on the host's flash.
    Cache {
        /// The cache of the host.
        cache: String,
        /// How much of it the volume gets, in bytes.
        size_bytes: u64,
        /// What it does with writes; write-through if nothing is said.
        #[serde(default)]
        mode: Option<CacheMode>,
        /// Which block goes when a place is needed; what the cache says if nothing is said.
        #[serde(default)]
        policy: Option<CachePolicy>,
        /// The unit of caching, in bytes: a power of two from 4 to 64 KiB; 4 KiB if nothing is said.
        #[serde(default)]
        block_bytes: Option<u64>,
        /// Reads that follow each other for more than so many bytes are not cached; 0 caches all; 4 MiB if nothing is said.
        #[serde(default)]
        sequential_bytes: Option<u64>,
    },
    /// Has a surrogate serve what is popular, and take what the guest writes, also while the volume does not move.
    Surrogate {
        /// The surrogate.
        surrogate: String,
        /// From which request on a chunk is popular; 1, at the first, if nothing is said.
        #[serde(default)]
        popular_threshold: Option<u16>,
        /// Serve the guest also of a disk without a head.
        #[serde(default)]
        surrogate_on_flash: bool,
        /// A surrogate with one store may hold the only copy of what the guest has written.
        #[serde(default)]
        sole_copy: bool,
    },
}

/// Asks for a snapshot (`POST /v1/volumes/NAME/snapshots`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SnapshotRequest {
    /// What to call it; otherwise after the time.
    pub snapshot: Option<String>,
    /// The directory for what is written from then on, if that is not to lie beside the image.
    pub at: Option<String>,
}

/// Asks for what was written since a snapshot to be thrown away (`POST /v1/volumes/NAME/revert`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RevertRequest {
    /// The snapshot; the newest if none is named.
    pub snapshot: Option<String>,
    /// Throw newer snapshots away, too.
    pub discard_newer: bool,
}
