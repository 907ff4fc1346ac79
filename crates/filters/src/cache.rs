//! A host's flash cache of a volume: what Firepan moves (sections 2 and 3 of its paper).
//!
//! ```text
//!   guest ──▶ block of 4 to 64 KiB, eight sectors each
//!     read     all its sectors are valid in a place ──▶ flash
//!              some are ──▶ base and flash, laid together
//!              none is ──▶ base, and admitted aside, unless the read belongs to a long sequential stream
//!     write    read-only      ──▶ noted as not valid ──▶ base
//!              write-through  ──▶ noted as not valid ──▶ base ──▶ flash, valid again
//!              write-back     ──▶ flash, noted as dirty; the base gets it later
//!     zeroes, discards ──▶ noted as not valid ──▶ base; what was dirty there is forgotten afterwards
//!   migration ──▶ copy(): the same bytes; nothing is counted, and nothing admitted
//! ```
//!
//! The interface is settled before the rest, so that the daemon's part can be built against it.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use block::{
    BlockDevice, Buffer, Bytes, ChunkSize, Data, Device, Error, Extent, ExtentStatus, Geometry, IoFuture, Mutation,
    Result,
};
use env::EnvRef;

/// Under which a cache is believed: whose it is, and in which epoch of its volume it was last in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheIdentity {
    /// The volume.
    pub volume: [u8; 16],
    /// The layer of the volume's stack.
    pub layer: [u8; 16],
    /// The epoch of the volume. It grows at every change of ownership, and the cache follows with [`Cache::set_epoch`].
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
    /// How many of them are used: at least one, and `capacity` at most. [`Cache::resize`] changes it.
    pub places: u64,
    /// The cache's own identity: another one each time that a cache is made.
    pub id: [u8; 16],
    /// Under which it is believed.
    pub identity: CacheIdentity,
}

impl CacheHeader {
    /// The cache `id` of a volume of `volume` bytes, that fills a partition of `partition` bytes. None if not one place fits, or the
    /// block is none of 4 to 64 KiB.
    #[must_use]
    pub fn new(
        volume: Bytes,
        block: ChunkSize,
        partition: Bytes,
        id: [u8; 16],
        identity: CacheIdentity,
    ) -> Option<Self> {
        let _ = (volume, block, partition, id, identity);
        todo!()
    }

    /// How large its partition is at least.
    #[must_use]
    pub fn partition_bytes(&self) -> Bytes {
        todo!()
    }

    /// How many places a cache of `cached` bytes of data has, within its capacity.
    #[must_use]
    pub fn places_of(&self, cached: Bytes) -> u64 {
        let _ = cached;
        todo!()
    }
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
    /// Blocks that were admitted after a read, or by [`Cache::admit`].
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

/// A moment before a block was read, for [`Cache::admit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmitToken {
    stamp: u32,
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

/// A volume with a cache on flash. Clones are the same cache.
#[derive(Clone)]
pub struct Cache {
    inner: Arc<Inner>,
}

struct Inner;

impl Cache {
    /// Makes an empty cache of `partition`, whatever that held before. Done means durable.
    ///
    /// # Errors
    /// Invalid if the partition is smaller than the header says; otherwise what it says.
    pub async fn create(partition: &Device, header: &CacheHeader) -> Result<()> {
        let _ = (partition, header);
        todo!()
    }

    /// What the cache on `partition` is.
    ///
    /// # Errors
    /// Invalid if it is none, unsupported if it is of a later version, corrupt if it is damaged.
    pub async fn inspect(partition: &Device) -> Result<CacheHeader> {
        let _ = partition;
        todo!()
    }

    /// Opens the cache on `partition` of the volume that `base` holds, in the machine's boot `boot`. After a crash of the process within
    /// that boot it has all that was answered, and what it cached. After a power loss it has all that was flushed, and caches nothing else.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect). Invalid if it is another volume's or layer's, or does not fit `base`; fenced if it was left in
    /// another epoch than `expected`: what it holds may be older than the base.
    pub async fn open(
        env: EnvRef,
        base: Device,
        partition: Device,
        boot: [u8; 16],
        options: CacheOptions,
        expected: CacheIdentity,
    ) -> Result<Self> {
        let _ = (env, base, partition, boot, options, expected);
        todo!()
    }

    /// What it is.
    #[must_use]
    pub fn header(&self) -> CacheHeader {
        todo!()
    }

    /// From now on it is believed in this epoch, and in no other. Done means durable. The owner calls it when the volume gets a new epoch
    /// and stays here, before the epoch is on record: a crash in between costs the cache, unless it is told both epochs.
    ///
    /// # Errors
    /// Invalid if the epoch is an older one; otherwise what the partition says.
    pub async fn set_epoch(&self, epoch: u64) -> Result<()> {
        let _ = epoch;
        todo!()
    }

    /// The same volume as a migration reads it: what is dirty is seen, nothing is counted, and nothing admitted. It takes no writes.
    #[must_use]
    pub fn copy(&self, name: &str) -> Device {
        let _ = name;
        todo!()
    }

    /// The base was written to since the cache was opened, by whoever used it until now: the next flush covers that, too. Whoever puts
    /// the cache into a guest's path says so while nothing is under way. It must have been opened empty, then.
    pub fn note_base_written(&self) {
        todo!()
    }

    /// Changes what it does with writes. From write-back it returns once all that was dirty is durable in the base.
    ///
    /// # Errors
    /// What base and partition say. Then the new mode holds, and something is still dirty: [`drain`](Self::drain) tries again.
    pub async fn set_mode(&self, mode: CacheMode) -> Result<()> {
        let _ = mode;
        todo!()
    }

    /// Uses `places` places from now on. With fewer, what the others hold goes to the base first, if it is dirty, and is dropped.
    ///
    /// # Errors
    /// Invalid if it is none or more than the capacity; otherwise what base and partition say. Then the old number holds.
    pub async fn resize(&self, places: u64) -> Result<()> {
        let _ = places;
        todo!()
    }

    /// Writes all that is dirty to the base, and flushes until neither map names any of it. From the beginning on nothing becomes dirty,
    /// until [`set_mode`](Self::set_mode) says so again. Afterwards the base alone is the volume, and the cache may be taken away.
    ///
    /// # Errors
    /// What base and partition say. What could not be written is still in the cache.
    pub async fn drain(&self) -> Result<()> {
        todo!()
    }

    /// Whether the base has everything, durably or not.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        todo!()
    }

    /// Whether neither map names anything dirty: the base alone is the volume, whatever becomes of the partition.
    #[must_use]
    pub fn holds_nothing(&self) -> bool {
        todo!()
    }

    /// Stops all that works in the background and waits for its end. Afterwards nothing is admitted. The guest has left.
    pub async fn close(&self) {
        todo!()
    }

    /// One step of background write-back, which yields to the guest: some neighbouring dirty blocks go to the base, which is flushed.
    ///
    /// # Errors
    /// What base and partition say.
    pub async fn write_back(&self) -> Result<WriteBackStep> {
        todo!()
    }

    /// Background write-back until the cache is closed: the owner spawns it. It waits while there is nothing to do, and for a second after
    /// an error.
    pub async fn run_write_back(self) {
        todo!()
    }

    /// What it has done and what it holds.
    #[must_use]
    pub fn status(&self) -> CacheStatus {
        todo!()
    }

    /// What all its tables take in memory, in bytes: at most 32 for each place.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        todo!()
    }

    /// The numbers of at most `max` cached blocks, those first that are worth most.
    #[must_use]
    pub fn hottest(&self, max: usize) -> Vec<u64> {
        let _ = max;
        todo!()
    }

    /// The bytes of a block that is cached whole, dirty or not. Nothing is counted.
    ///
    /// # Errors
    /// What the partition says.
    pub async fn peek(&self, block: u64) -> Result<Option<Buffer>> {
        let _ = block;
        todo!()
    }

    /// Taken before the bytes of `block` are read anywhere, for [`admit`](Self::admit).
    #[must_use]
    pub fn token(&self, block: u64) -> AdmitToken {
        let _ = block;
        todo!()
    }

    /// Admits `bytes` as those of the whole of `block`, unless the guest has written to it since `token` was taken.
    ///
    /// # Errors
    /// Invalid if there is no such block of so many bytes; otherwise what the partition says.
    pub async fn admit(&self, block: u64, bytes: Data, token: AdmitToken) -> Result<Admission> {
        let _ = (block, bytes, token);
        todo!()
    }

    /// From now on the blocks that the guest changes are kept for [`invalidations`](Self::invalidations), at most `limit` of them; zero
    /// ends that.
    pub fn watch_invalidations(&self, limit: usize) {
        let _ = limit;
        todo!()
    }

    /// The blocks that the guest has changed since this was last called. A block is named before its write is answered.
    #[must_use]
    pub fn invalidations(&self) -> Invalidations {
        todo!()
    }
}

impl BlockDevice for Cache {
    fn geometry(&self) -> Geometry {
        todo!()
    }

    fn read(&self, _offset: Bytes, _buffer: Buffer) -> IoFuture<'_, Buffer> {
        todo!()
    }

    fn write(&self, _mutation: Mutation) -> IoFuture<'_, ()> {
        todo!()
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        todo!()
    }

    fn extents(&self, _extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        todo!()
    }
}
