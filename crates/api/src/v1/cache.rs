//! Caches: stores on the host's flash in which blocks of volumes are kept.

use serde::{Deserialize, Serialize};

use super::{PoolStore, StoreRequest};

/// Asks for a cache (`POST /v1/caches`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CacheRequest {
    /// What to call it.
    pub name: String,
    /// Where it is.
    pub store: StoreRequest,
    /// Which block goes when a place is needed, unless a volume says otherwise; S3-FIFO if nothing is said.
    pub policy: Option<CachePolicy>,
}

/// Asks for another size of a cache (`POST /v1/caches/NAME/resize`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CacheResizeRequest {
    /// How much of the store is for volumes, in bytes; all that it has by now if nothing is said.
    pub size_bytes: Option<u64>,
}

/// Asks for a change of a volume's cache (`PATCH /v1/volumes/NAME/layers/LAYER`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LayerChangeRequest {
    /// What it does with writes.
    pub mode: Option<CacheMode>,
    /// How much it caches, in bytes: no more than when it was added.
    pub size_bytes: Option<u64>,
}

/// How the cache of a shared disk goes with its VM to another host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CacheTransfer {
    /// It stays behind.
    None,
    /// The target warms its cache from the shared storage, by the list of the source.
    Cachemior,
    /// The guest waits until every block is copied.
    Firepan,
    /// The guest goes past the cache until every block is copied.
    FirepanIf,
    /// What the guest misses is read of the source's cache.
    RemoteRead,
    /// Blocks are usable one by one, hottest first, from both; the switchover waits until the most asked for are there.
    #[default]
    Hybrid,
    /// A way of a later daemon.
    #[serde(other)]
    Unknown,
}

impl CacheTransfer {
    /// Its name, as the command line has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cachemior => "cachemior",
            Self::Firepan => "firepan",
            Self::FirepanIf => "firepan-if",
            Self::RemoteRead => "remote-read",
            Self::Hybrid => "hybrid",
            Self::Unknown => "unknown",
        }
    }
}

/// When the warmer of [`CacheTransfer::Cachemior`] begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CacheWarmStart {
    /// After the switchover.
    #[default]
    Switchover,
    /// Beside the memory: only over an export of an NBD server.
    Memory,
    /// A moment of a later daemon.
    #[serde(other)]
    Unknown,
}

/// How the caches of a VM's shared disks go with it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CacheTransferRequest {
    /// The way.
    pub transfer: CacheTransfer,
    /// The cache of the other host that they go to; the one of the same name if nothing is said.
    pub at: Option<String>,
    /// How long the switchover may wait for the most asked for blocks (`hybrid`), in milliseconds; 3,000 for each GB
    /// that is cached if nothing is said, 5,000 to 60,000.
    pub wait_ms: Option<u64>,
    /// When the warmer begins (`cachemior`).
    pub warm_start: CacheWarmStart,
    /// How many requests for blocks are in flight at most; 128 if nothing is said.
    pub in_flight: Option<u32>,
    /// How long after the switchover the transfer is over at the latest, in milliseconds; 600,000 if nothing is said.
    pub time_ms: Option<u64>,
}

/// How the cache of a disk goes with its VM, as the source knows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CacheDeparture {
    /// The volume.
    pub volume: String,
    /// The way.
    pub transfer: CacheTransfer,
    /// How many blocks the source's cache has.
    pub blocks: u64,
    /// How many of them the target has.
    pub blocks_there: u64,
    /// The hit rate that the guest would have there, as a share of what it has here.
    pub hit_share: f64,
    /// How long the stopped guest has waited for the target to drop what was changed last, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal_ms: Option<f64>,
    /// Whether the target has answered that. If not, its cache may begin empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sealed: Option<bool>,
}

/// A cache that comes, or has just come, with its VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheArrival {
    /// The way.
    pub transfer: CacheTransfer,
    /// How many blocks the source's cache has.
    pub blocks: u64,
    /// Blocks that have come of the source's cache.
    pub from_source: u64,
    /// Blocks that the warmer has read of the shared storage.
    pub from_storage: u64,
    /// Blocks that the guest has missed, and that were read of the source's cache.
    pub read_remotely: u64,
    /// Blocks that came in vain: the guest had changed them, or they were there.
    pub refused: u64,
    /// Whether the guest goes past the cache.
    pub withheld: bool,
    /// Whether the transfer is over.
    pub over: bool,
}

/// What a cache does with writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CacheMode {
    /// They go to what lies below, and what is cached of them is dropped.
    ReadOnly,
    /// They go to what lies below, and then what is cached of them is updated.
    WriteThrough,
    /// They go to the flash, and later to what lies below.
    WriteBack,
    /// A mode of a later daemon.
    #[default]
    #[serde(other)]
    Unknown,
}

/// Which block of a cache goes when a place is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CachePolicy {
    /// The one that was used least recently.
    Lru,
    /// The one that has been there longest.
    Fifo,
    /// Any.
    Random,
    /// S3-FIFO: only what is asked for again gets from a small queue into the main one.
    S3Fifo,
    /// A policy of a later daemon.
    #[default]
    #[serde(other)]
    Unknown,
}

impl CacheMode {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ReadOnly => "read-only",
            Self::WriteThrough => "write-through",
            Self::WriteBack => "write-back",
            Self::Unknown => "unknown",
        }
    }
}

impl CachePolicy {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Fifo => "fifo",
            Self::Random => "random",
            Self::S3Fifo => "s3-fifo",
            Self::Unknown => "unknown",
        }
    }
}

/// A cache.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cache {
    /// What it is called.
    pub name: String,
    /// Where it is: one store.
    pub stores: Vec<PoolStore>,
    /// How much of the store is for volumes, in bytes.
    pub bytes: u64,
    /// How much of that no volume has, in bytes. It need not be in one piece.
    pub free_bytes: u64,
    /// Which block goes when a place is needed, unless a volume says otherwise.
    pub policy: CachePolicy,
    /// The volumes that have a part of it.
    pub partitions: Vec<CachePartition>,
}

/// A volume's part of a cache.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CachePartition {
    /// The volume.
    pub volume: String,
    /// The layer of that volume.
    pub layer: String,
    /// Where it begins in the store, in bytes.
    pub offset: u64,
    /// How large it is, in bytes.
    pub bytes: u64,
    /// What that has done and holds, while the volume is up and has it.
    pub cached: Option<CacheUse>,
}

/// How a volume's cache is set, what it has done since the volume came up, and what it holds. Requests are counted once for each
/// block that they touch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheUse {
    /// The cache of the host.
    pub cache: String,
    /// What it does with writes.
    pub mode: CacheMode,
    /// Which block goes when a place is needed.
    pub policy: CachePolicy,
    /// How much the volume uses of its part, in bytes.
    pub size_bytes: u64,
    /// The unit of caching, in bytes.
    pub block_bytes: u64,
    /// Reads that follow each other for more than so many bytes are not cached; 0 caches all.
    pub sequential_bytes: u64,
    /// Whether it is in the guest's path. It is not while the volume is down, and if its store could not be used.
    pub open: bool,
    /// Why it is not, or why it is of no use.
    pub problem: Option<String>,
    /// How it has come from another host, since the daemon was started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arrival: Option<CacheArrival>,
    /// Whether the flash has failed.
    pub failed: bool,
    /// Of all blocks that were read, those that the flash alone has answered, from 0 to 1; none were read if there is none.
    pub hit_ratio: Option<f64>,
    /// What was written to the flash, over what the guest has written and what was cached after reads; none if that is nothing.
    pub write_amplification: Option<f64>,
    /// Reads that the flash alone has answered.
    pub hits: u64,
    /// Reads that needed the flash and what lies below.
    pub hits_partial: u64,
    /// Reads that what lies below has answered.
    pub misses: u64,
    /// Blocks that were cached after a read.
    pub admitted: u64,
    /// Reads that were not cached: they belong to a sequential stream, or too much is being cached already.
    pub bypassed: u64,
    /// Blocks that had to go for others.
    pub evicted: u64,
    /// Writes to the flash that what lies below gets later.
    pub writes_back: u64,
    /// Writes to what lies below, after which the flash was updated.
    pub writes_through: u64,
    /// Writes to what lies below alone.
    pub writes_around: u64,
    /// What the guest has written, in bytes.
    pub guest_written_bytes: u64,
    /// What was written to the flash, in bytes.
    pub flash_written_bytes: u64,
    /// What was written from the flash to what lies below, in bytes.
    pub cleaned_bytes: u64,
    /// How much only the flash has, in bytes.
    pub dirty_bytes: u64,
    /// For how many blocks there is room now.
    pub places: u64,
    /// For how many there would be, if all of the part were used.
    pub capacity: u64,
    /// How many of those that are used are free.
    pub places_free: u64,
    /// How many hold something that what lies below lacks.
    pub places_dirty: u64,
    /// What its tables take of the daemon's memory, in bytes.
    pub memory_bytes: u64,
    /// Whether it is being emptied.
    pub draining: bool,
}
