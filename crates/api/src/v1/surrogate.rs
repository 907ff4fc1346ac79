//! Surrogates: stores in which the popular data of volumes is kept while they are moved.

use serde::{Deserialize, Serialize};

use super::{PoolStore, StoreRequest};

/// Asks for a surrogate (`POST /v1/surrogates`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SurrogateRequest {
    /// What to call it.
    pub name: String,
    /// Where it is: one store, or two on different devices, which then hold the same.
    pub stores: Vec<StoreRequest>,
    /// How much of it a volume gets, in bytes; an eighth of it if nothing is said.
    pub partition_bytes: Option<u64>,
    /// The unit of what is popular, in bytes: a power of two from 64 KiB to 1 MiB; 1 MiB if nothing is said.
    pub chunk_bytes: Option<u64>,
}

/// A surrogate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Surrogate {
    /// What it is called.
    pub name: String,
    /// Where it is.
    pub stores: Vec<PoolStore>,
    /// How many bytes each of them has for volumes.
    pub bytes: u64,
    /// How much of it a volume gets, in bytes.
    pub partition_bytes: u64,
    /// The unit of what is popular, in bytes.
    pub chunk_bytes: u64,
    /// How many volumes it has room for.
    pub partitions_max: u64,
    /// The volumes that have a part of it.
    pub partitions: Vec<SurrogatePartition>,
    /// Whether no further volume gets one.
    pub draining: bool,
}

/// A volume's part of a surrogate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SurrogatePartition {
    /// The volume.
    pub volume: String,
    /// The layer of that volume.
    pub layer: String,
    /// What that has done and holds, while the volume is up and has it.
    pub redirection: Option<Redirection>,
    /// The store (0 or 1) that lacks something of it, and is not used for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost_store: Option<u64>,
    /// While that is repaired: how many bytes are still to be copied to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rebuild_left_bytes: Option<u64>,
}

/// Asks for the lost store of a surrogate to be repaired (`POST /v1/surrogates/NAME/repair`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SurrogateRepairRequest {
    /// Another store in its place; nothing if the same one is well again.
    pub store: Option<StoreRequest>,
}

/// What a volume's redirection to a surrogate has done, and what it holds. Requests are counted once for each chunk that they touch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Redirection {
    /// Reads that the surrogate alone has answered.
    pub reads_redirected: u64,
    /// Reads that needed source and surrogate.
    pub reads_merged: u64,
    /// Reads that the source has answered.
    pub reads_at_source: u64,
    /// Writes to the surrogate.
    pub writes_redirected: u64,
    /// Writes to the source, because there was no room, or the surrogate is given up.
    pub writes_at_source: u64,
    /// Chunks that were read whole because they were popular.
    pub chunks_fetched: u64,
    /// How many bytes those were: what the source has read beside what the guest asked for.
    pub fetched_bytes: u64,
    /// How many chunks there is room for.
    pub places: u64,
    /// How much of that is free.
    pub places_free: u64,
    /// How many chunks it has whole.
    pub places_cached: u64,
    /// How many chunks have something that the source lacks.
    pub places_dirty: u64,
    /// What its index takes of the daemon's memory, in bytes.
    pub index_bytes: u64,
    /// Whether the surrogate has failed: what it alone holds cannot be read, and it takes nothing more.
    pub has_failed: bool,
}
