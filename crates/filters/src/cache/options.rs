//! What a cache is told, and what it tells.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{Bytes, ChunkSize, Error, IoFuture, Result};

/// Under which a cache is believed: whose it is, and in which epoch of its volume it was last in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheIdentity {
    /// The volume.
    pub volume: [u8; 16],
    /// The layer of the volume's stack.
    pub layer: [u8; 16],
    /// The epoch of the volume. It grows at every change of ownership, and the cache follows with [`Cache::set_epoch`](super::Cache::set_epoch).
    pub epoch: u64,
}

/// What a cache is and to what it belongs, as it stands at the start of its partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheHeader {
    /// The size of the volume.
    pub volume: Bytes,
    /// The unit of caching, 4 to 64 KiB. Each has eight sectors.
    pub block: ChunkSize,
    /// How many places the partition has room for. It never changes.
    pub capacity: u64,
    /// How many of them are used: at least one, and `capacity` at most. [`Cache::resize`](super::Cache::resize) changes it.
    pub places: u64,
    /// The cache's own identity: another one each time that a cache is made.
    pub id: [u8; 16],
    /// Under which it is believed.
    pub identity: CacheIdentity,
}

/// What a cache does with writes. The mode is the owner's to remember.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// Writes go to the base, and what is cached of them is dropped.
    ReadOnly,
    /// Writes go to the base, and then what is cached of them is updated.
    #[default]
    WriteThrough,
    /// Writes go to the flash, and later to the base.
    WriteBack,
}

impl CacheMode {
    /// Its name: `read-only`, `write-through` or `write-back`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ReadOnly => "read-only",
            Self::WriteThrough => "write-through",
            Self::WriteBack => "write-back",
        }
    }
}

impl fmt::Display for CacheMode {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

impl FromStr for CacheMode {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        [Self::ReadOnly, Self::WriteThrough, Self::WriteBack]
            .into_iter()
            .find(|mode| mode.name() == name)
            .ok_or_else(|| format!("{name} is no mode of a cache: read-only, write-through and write-back are"))
    }
}

/// Which block goes when a place is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CachePolicy {
    /// The one that was used least recently.
    Lru,
    /// The one that has been there longest.
    Fifo,
    /// Any.
    Random,
    /// S3-FIFO: new blocks pass through a small queue of a tenth, and only what is asked for again gets into the main one.
    #[default]
    S3Fifo,
}

impl CachePolicy {
    /// Its name: `lru`, `fifo`, `random` or `s3-fifo`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Fifo => "fifo",
            Self::Random => "random",
            Self::S3Fifo => "s3-fifo",
        }
    }
}

impl fmt::Display for CachePolicy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

impl FromStr for CachePolicy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        [Self::Lru, Self::Fifo, Self::Random, Self::S3Fifo]
            .into_iter()
            .find(|policy| policy.name() == name)
            .ok_or_else(|| format!("{name} is no policy of a cache: lru, fifo, random and s3-fifo are"))
    }
}

/// Where it is put on record that what a cache only caches is not believed any more, because its flash has failed.
pub trait CacheLoss: Send + Sync {
    /// Notes that the cache has failed with `error`. Done means durable. From then on the cache is opened, if at all, with
    /// [`CacheOptions::believes_clean`] off. If it fails, it is asked again, by the next write.
    fn note<'a>(&'a self, error: &'a Error) -> IoFuture<'a, ()>;
}

/// How a cache works.
#[derive(Clone)]
pub struct CacheOptions {
    /// What it does with writes.
    pub mode: CacheMode,
    /// Which block goes when a place is needed.
    pub policy: CachePolicy,
    /// Reads that follow each other for more than so many bytes are not admitted; none means that all are.
    pub sequential_bytes: Bytes,
    /// At most so many percent of the places are dirty (1 to 90), but for the requests in flight.
    pub dirty_max_percent: u8,
    /// Background write-back begins when more than so many percent are dirty.
    pub dirty_low_percent: u8,
    /// So many writes to the base are in flight at a time while the guest asks nothing of the base.
    pub write_back_depth: usize,
    /// Whether what is only cached is believed when the cache is opened in the boot that wrote it. Off after a [`CacheLoss`].
    pub believes_clean: bool,
    /// Where a failure of the flash is put on record. Without it, writes fail after a failure that the flash cannot record itself.
    pub loss: Option<Arc<dyn CacheLoss>>,
    /// Grows while the cache is being opened and gets on, so that whoever waits can tell a large cache from a store that does not answer.
    pub progress: Option<Arc<AtomicU64>>,
}

impl CacheOptions {
    /// The opening has got on.
    pub(super) fn note_progress(&self) {
        if let Some(progress) = &self.progress {
            progress.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self {
            mode: CacheMode::default(),
            policy: CachePolicy::default(),
            sequential_bytes: Bytes::mib(4),
            dirty_max_percent: 50,
            dirty_low_percent: 10,
            write_back_depth: 64,
            believes_clean: true,
            loss: None,
            progress: None,
        }
    }
}

/// What a cache has done, and what it holds. Requests of the guest are counted once for each block that they touch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatus {
    /// What it does with writes.
    pub mode: CacheMode,
    /// Which block goes when a place is needed.
    pub policy: CachePolicy,
    /// Reads that the flash alone has answered.
    pub hits: u64,
    /// Reads that needed base and flash.
    pub hits_partial: u64,
    /// Reads that the base has answered.
    pub misses: u64,
    /// Blocks that were admitted after a read, or by [`Cache::admit`](super::Cache::admit).
    pub admitted: u64,
    /// Reads that were not admitted: they belong to a sequential stream, or too much is being admitted already.
    pub bypassed: u64,
    /// Blocks that had to go for others.
    pub evicted: u64,
    /// Writes of blocks to the flash that the base gets later.
    pub writes_back: u64,
    /// Writes of blocks to the base after which the flash was updated.
    pub writes_through: u64,
    /// Writes of blocks to the base alone.
    pub writes_around: u64,
    /// What the guest has written, in bytes.
    pub guest_written_bytes: u64,
    /// What was written to the flash, in bytes: data and maps. Over what was admitted and written it is the write amplification.
    pub flash_written_bytes: u64,
    /// What background write-back and draining have written to the base, in bytes.
    pub cleaned_bytes: u64,
    /// How many bytes only the flash has.
    pub dirty_bytes: u64,
    /// How many bytes of data a block has.
    pub block_bytes: u64,
    /// How many places are used.
    pub places: u64,
    /// How many places the partition has room for.
    pub capacity: u64,
    /// How many of the used places hold no block.
    pub places_free: u64,
    /// How many hold something that the base lacks.
    pub places_dirty: u64,
    /// What all its tables take in memory, in bytes.
    pub memory_bytes: u64,
    /// Whether the flash has failed.
    pub has_failed: bool,
    /// Whether it is being drained.
    pub is_draining: bool,
}

/// What a step of write-back has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteBackStep {
    /// It has written so many bytes to the base.
    Wrote(Bytes),
    /// There was nothing to do.
    Idle,
}

/// A moment before a block was read, for [`Cache::admit`](super::Cache::admit).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmitToken {
    pub(super) stamp: u32,
}

/// What came of an attempt to admit a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It is cached now.
    Admitted,
    /// It was cached already, whole.
    Present,
    /// It was written since the token was taken.
    Outdated,
    /// No place could be had, or the cache admits nothing now.
    Full,
}

/// What the guest has changed since it was last asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Invalidations {
    /// The numbers of the blocks, in the order of the writes; a block may be named more than once.
    pub blocks: Vec<u64>,
    /// Whether more were changed than are kept: then any block may have been.
    pub overflowed: bool,
}
