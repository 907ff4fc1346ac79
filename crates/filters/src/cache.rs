//! A host's flash cache of a volume: what Firepan moves (sections 2 and 3 of its paper).
//!
//! ```text
//!   guest ──▶ block of 4 to 64 KiB, eight sectors each
//!     read     all its sectors are valid in a place ──▶ flash
//!              some are ──▶ base and flash, laid together
//!              none is ──▶ base, and admitted aside, unless the read belongs to a long sequential stream
//!     write    read-only      ──▶ noted as not valid ──▶ base
//!              write-through  ──▶ noted as not valid ──▶ base ──▶ flash, valid again
//!              write-back     ──▶ flash, noted as dirty; the base gets it later (`clean.rs`)
//!     zeroes, discards ──▶ noted as not valid ──▶ base; what was dirty there is forgotten afterwards
//!   migration ──▶ copy(): the same bytes; nothing is counted, and nothing admitted
//! ```
//!
//! | a place is | its record says | a read finds | after a crash | after a power loss |
//! |---|---|---|---|---|
//! | free | nothing | the base | free | free |
//! | clean | its block and the valid sectors | those in the place | the same | free |
//! | dirty | and which of them the base lacks | the same | the same | dirty, and valid only where it is |
//!
//! The record is that of the extent store, with an entry of eight bytes for each place. Its running map is written before a request is
//! answered, so what is cached outlives the process. Its durable map names only what is dirty ([`CacheEntry::lasting`](entry::CacheEntry)).
//! So a cache that holds nothing dirty never flushes its flash.
//!
//! **Never stale after a crash.** A write to the base of a cached block is noted before: the running map says that its sectors are not
//! valid. Otherwise a process that dies between the write and the update would leave a cache that answers old bytes. Later, when the block
//! has to go, the guest would read new ones. The running map is used for that and not a log of regions, since what is not cached then costs
//! nothing, and nothing that was not written is dropped after a crash. That the sectors are valid again is recorded later, many at a time.
//! So a block that is written again and again costs one note.
//!
//! **Who changes what.** Whoever changes a block, its place or its bytes in the base has its extent of the range lock. Readers take no lock
//! but the short one of the index. They look afterwards whether their places have been given to other blocks ([`Stamps`]), and begin again
//! if so. What was read of the base is admitted only if nobody has written to the block since before that read.
//!
//! **A place is used again** only if the flushed durable map names nothing dirty in it. Until then it keeps its block. So no two places are
//! ever recorded as dirty with one block.
//!
//! **At the dirty limit** a write waits for the cleaning, and does it itself if nobody else does. To send it to the base instead would have
//! it wait as long, one request at a time, and would hold up the cleaning, which writes many at a time.
//!
//! **A flash that fails** takes nothing more. What it only cached is read from the base. What it alone held is an error, and never the older
//! bytes of the base. Before the base is changed, it is put on record that nothing clean is believed any more (`failure.rs`).

mod admit;
mod changed_blocks;
mod clean;
mod control;
mod entry;
mod failure;
#[cfg(any(test, feature = "testing"))]
mod fill;
mod format;
mod index;
mod options;
mod policy;
mod read;
mod stamps;
mod streams;
mod table;
mod transfer;
mod warm;
mod write;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use block::{
    BlockDevice, Buffer, Bytes, ChunkIndex, ChunkSize, Device, Error, ErrorKind, Extent, ExtentStatus, Geometry,
    IoFuture, Mutation, RangeLock, Result,
};
use env::EnvRef;
use parking_lot::Mutex;

pub use self::options::{
    Admission, AdmitToken, CacheHeader, CacheIdentity, CacheLoss, CacheMode, CacheOptions, CachePolicy, CacheStatus,
    Invalidations, WriteBackStep,
};
pub use self::transfer::{OtherCache, TransferStatus};
use crate::store::{
    Base, FlushError, Layout, PlaceAllocator, Placement, Record, STEP_BYTES, geometry_of_both, may_have_lost,
};
use admit::Admissions;
use clean::Cleaner;
use entry::{CacheEntry, SECTORS, mask_of};
use failure::Failure;
use index::{Filling, Found, Index};
use stamps::Stamps;
use transfer::Transfer;
use warm::Watch;
use write::Counted;

/// The durable map is written at the latest when this share of it is behind: then what is remembered of it takes a byte a place.
const BEHIND_SHARE: u64 = 10;

/// So many places are told to the index before others may use the thread.
const FILLED_AT_ONCE: u64 = 16 << 10;

/// A volume with a cache on flash. Clones are the same cache.
#[derive(Clone)]
pub struct Cache {
    inner: Arc<Inner>,
}

struct Inner {
    env: EnvRef,
    base: Arc<Base>,
    /// For reads.
    partition: Device,
    /// The same for writes, which are counted.
    flash: Device,
    flash_written: Arc<AtomicU64>,
    options: CacheOptions,
    header: Mutex<CacheHeader>,
    /// Held by who changes the header.
    header_turn: tokio::sync::Mutex<()>,
    volume: Bytes,
    block: ChunkSize,
    placement: Placement,
    geometry: Geometry,
    record: Record<CacheEntry, Index>,
    /// Held by whoever changes a block.
    blocks: RangeLock,
    mode: AtomicU8,
    is_draining: AtomicBool,
    /// Whether the base has got everything since then, durably.
    is_drained: AtomicBool,
    is_closed: AtomicBool,
    /// Raised when a place leaves its block.
    place_stamps: Stamps,
    /// Raised before and after the guest changes a block.
    write_stamps: Stamps,
    failure: Failure,
    cleaner: tokio::sync::Mutex<Cleaner>,
    /// Told when background write-back may have something to do.
    wake: tokio::sync::Notify,
    /// How many requests of the guest the base is working at.
    guest_at_base: AtomicUsize,
    admissions: Admissions,
    watch: Watch,
    transfer: Transfer,
    counters: Counters,
}

#[derive(Default)]
struct Counters {
    hits: AtomicU64,
    hits_partial: AtomicU64,
    misses: AtomicU64,
    admitted: AtomicU64,
    bypassed: AtomicU64,
    evicted: AtomicU64,
    writes_back: AtomicU64,
    writes_through: AtomicU64,
    writes_around: AtomicU64,
    guest_written: AtomicU64,
    cleaned: AtomicU64,
}

impl Counters {
    /// How many requests of the guest's were counted, whatever became of them.
    fn requests(&self) -> u64 {
        let Self { hits, hits_partial, misses, writes_back, writes_through, writes_around, .. } = self;
        let all = [hits, hits_partial, misses, writes_back, writes_through, writes_around];
        all.into_iter().map(|counter| counter.load(Ordering::Relaxed)).sum()
    }
}

impl Cache {
    /// Makes an empty cache of `partition`, whatever that held before. Done means durable.
    ///
    /// # Errors
    /// Invalid if the partition is smaller than the header says; otherwise what it says.
    pub async fn create(partition: &Device, header: &CacheHeader) -> Result<()> {
        check_partition(partition, header)?;
        header.layout().create(partition, header.layout().end(), header.encode()).await
    }

    /// What the cache on `partition` is.
    ///
    /// # Errors
    /// Invalid if it is none, unsupported if it is of a later version, corrupt if it is damaged.
    pub async fn inspect(partition: &Device) -> Result<CacheHeader> {
        if partition.size() < Layout::BOOT_AT {
            let context = format!("{} is no partition of a cache: it is too small", partition.name());
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        let page = partition.read(Bytes::ZERO, Buffer::unpooled(Layout::BOOT_AT.as_usize())).await?;
        let header = CacheHeader::decode(&page, partition.name())?;
        check_partition(partition, &header)?;
        Ok(header)
    }

    /// The same, if it is believed as `expected`.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect). Invalid if it is another volume's or layer's; fenced if it was left in another epoch.
    pub async fn inspect_as(partition: &Device, expected: &CacheIdentity) -> Result<CacheHeader> {
        let header = Self::inspect(partition).await?;
        header.check_identity(expected, partition.name())?;
        Ok(header)
    }

    /// Opens the cache on `partition` of the volume that `base` holds, in the machine's boot `boot`. After a crash of the process within
    /// that boot it has all that was answered, and what it cached. After a power loss it has all that was flushed, and caches nothing else.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect). Invalid if it is another volume's or layer's, or does not fit `base`; fenced if it was left in
    /// another epoch than `expected`: what it holds may be older than the base. The base is asked for nothing, so it need not be there.
    pub async fn open(
        env: EnvRef,
        base: Device,
        partition: Device,
        boot: [u8; 16],
        options: CacheOptions,
        expected: CacheIdentity,
    ) -> Result<Self> {
        let header = Self::inspect_as(&partition, &expected).await?;
        let geometry = geometry_over(&base, &partition, &header)?;
        let base = Arc::new(Base::new(base));
        let (flash, flash_written) = Counted::over(&partition, options.progress.clone());
        let record = Record::<CacheEntry>::open(flash.clone(), header.layout(), boot, Arc::clone(&base)).await?;
        let record = record.with_behind_share(BEHIND_SHARE);
        if !options.believes_clean && !geometry.read_only {
            control::forget_clean(&record).await?;
        }
        let blocks = header.block.count(header.volume);
        let only_durable = record.only_durable();
        let record = record.beside(Index::new(options.policy, header.places, options.sequential_bytes));
        let mut filling = Filling::new(header.places, blocks, partition.name());
        while record.with(|states, index| filling.step(states, index, FILLED_AT_ONCE))? {
            options.note_progress();
            // Others have work for this thread.
            tokio::task::yield_now().await;
        }
        drop(filling);
        // The first flush lets them go, once the base has what has left them.
        record.with(|_, index| index.places.retire_all(only_durable));
        let inner = Inner {
            env,
            base,
            partition,
            flash,
            flash_written,
            mode: AtomicU8::new(options.mode as u8),
            options,
            header_turn: tokio::sync::Mutex::default(),
            volume: header.volume,
            block: header.block,
            placement: header.placement(),
            geometry,
            record,
            blocks: RangeLock::new(),
            is_draining: AtomicBool::new(false),
            is_drained: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            place_stamps: Stamps::new(header.places),
            write_stamps: Stamps::new(blocks),
            failure: Failure::default(),
            cleaner: tokio::sync::Mutex::default(),
            wake: tokio::sync::Notify::new(),
            guest_at_base: AtomicUsize::new(0),
            admissions: Admissions::default(),
            watch: Watch::default(),
            transfer: Transfer::default(),
            counters: Counters::default(),
            header: Mutex::new(header),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// What it is.
    #[must_use]
    pub fn header(&self) -> CacheHeader {
        *self.inner.header.lock()
    }

    /// The same volume as a migration reads it: what is dirty is seen, nothing is counted, and nothing admitted. It takes no writes.
    #[must_use]
    pub fn copy(&self, name: &str) -> Device {
        Device::new(name, CopyFace(Arc::clone(&self.inner)))
    }

    /// The base was written to since the cache was opened, by whoever used it until now: the next flush covers that, too. Whoever puts
    /// the cache into a guest's path says so while nothing is under way. It must have been opened empty, then.
    pub fn note_base_written(&self) {
        self.inner.base.note_written();
    }

    /// What it has done and what it holds.
    #[must_use]
    pub fn status(&self) -> CacheStatus {
        self.inner.status()
    }

    /// What all its tables take in memory, in bytes: at most 32 for each place.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.inner.memory_bytes()
    }
}

impl Inner {
    fn memory_bytes(&self) -> u64 {
        let tables = self.record.memory_bytes() + self.record.with(|_, index| index.memory_bytes());
        let stamps = self.place_stamps.memory_bytes() + self.write_stamps.memory_bytes();
        (tables + stamps + size_of::<Self>()) as u64
    }

    fn status(&self) -> CacheStatus {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        let (places, places_free, places_dirty, dirty_sectors) = self.record.with(|states, index| {
            (index.places.count(), index.places.free_count(), states.count(DIRTY), index.dirty_sectors)
        });
        CacheStatus {
            mode: self.mode(),
            policy: self.options.policy,
            hits: read(&counters.hits),
            hits_partial: read(&counters.hits_partial),
            misses: read(&counters.misses),
            admitted: read(&counters.admitted),
            bypassed: read(&counters.bypassed),
            evicted: read(&counters.evicted),
            writes_back: read(&counters.writes_back),
            writes_through: read(&counters.writes_through),
            writes_around: read(&counters.writes_around),
            guest_written_bytes: read(&counters.guest_written),
            flash_written_bytes: read(&self.flash_written),
            cleaned_bytes: read(&counters.cleaned),
            dirty_bytes: dirty_sectors * self.sector_bytes(),
            block_bytes: self.block.bytes(),
            places,
            capacity: self.header.lock().capacity,
            places_free,
            places_dirty,
            memory_bytes: self.memory_bytes(),
            has_failed: self.failure.has_failed(),
            is_draining: self.is_draining.load(Ordering::Acquire),
        }
    }

    fn mode(&self) -> CacheMode {
        match self.mode.load(Ordering::SeqCst) {
            mode if mode == CacheMode::ReadOnly as u8 => CacheMode::ReadOnly,
            mode if mode == CacheMode::WriteThrough as u8 => CacheMode::WriteThrough,
            _ => CacheMode::WriteBack,
        }
    }

    /// Whether blocks may be taken in.
    fn admits(&self) -> bool {
        !self.failure.has_failed() && !self.is_closed.load(Ordering::SeqCst) && !self.geometry.read_only
    }

    /// Whether blocks may become dirty.
    fn takes_dirty(&self) -> bool {
        // What nobody can make durable any more goes to the base: a restart loses none of that.
        self.is_to_hold() && self.admits() && self.record.is_well() && !self.failure.has_failed_base()
    }

    /// Whether it is to hold what the base gets later.
    fn is_to_hold(&self) -> bool {
        self.mode() == CacheMode::WriteBack && !self.is_draining.load(Ordering::SeqCst)
    }

    const fn sector_bytes(&self) -> u64 {
        self.block.bytes() / SECTORS
    }

    fn block_of(&self, offset: Bytes) -> u64 {
        self.block.index_of(offset).0
    }

    fn extent_of(&self, block: u64) -> Extent {
        self.block.extent_of(ChunkIndex(block), self.volume)
    }

    /// `extent` with the rest of the blocks that it touches.
    fn whole_blocks(&self, extent: Extent) -> Extent {
        let end = extent.end().align_up(self.block.bytes()).min(self.volume);
        Extent::between(extent.offset.align_down(self.block.bytes()), end)
    }

    /// The parts of `extent`, one for each block.
    fn parts_of(&self, extent: Extent) -> impl Iterator<Item = (u64, Extent)> {
        extent.split_at_multiples(self.block.bytes()).map(|part| (self.block_of(part.offset), part))
    }

    /// The sectors that a part of a block touches, and those of them that it has whole.
    fn sectors_of(&self, part: Extent) -> (u8, u8) {
        let unit = self.sector_bytes();
        let start = part.offset.get() % self.block.bytes();
        let end = start + part.length.get();
        let whole_end = if part.end() == self.volume { end.div_ceil(unit) } else { end / unit };
        let touched = mask_of(start / unit, end.div_ceil(unit));
        let whole_start = start.div_ceil(unit);
        (touched, if whole_start < whole_end { mask_of(whole_start, whole_end) } else { 0 })
    }

    /// The bytes of a run of sectors of a block, cut off where `within` ends.
    fn extent_of_sectors(&self, block: u64, run: &std::ops::Range<u64>, within: Extent) -> Extent {
        let start = Bytes(block * self.block.bytes());
        let at = |sector: u64| (start + Bytes(sector * self.sector_bytes())).max(within.offset).min(within.end());
        Extent::between(at(run.start), at(run.end))
    }

    /// Where `offset` of the volume is in its block's place.
    fn place_at(&self, place: u32, offset: Bytes) -> Bytes {
        self.placement.start_of(place.into()) + Bytes(offset.get() % self.block.bytes())
    }

    /// The place of a block.
    fn find(&self, block: u64) -> Option<Found> {
        self.record.with(|states, index| index.find(states, block))
    }

    /// Records a place's state. The caller has the block. What becomes or ceases to be dirty is counted.
    async fn set(&self, place: u32, entry: CacheEntry) -> Result<()> {
        let place = u64::from(place);
        let before = self.record.look(|states| states.get(place));
        self.record.set(place..place + 1, entry).await?;
        self.record.with(|_, index| {
            let dirty = |entry: CacheEntry| u64::from(entry.dirty().count_ones());
            index.dirty_sectors = index.dirty_sectors + dirty(entry) - dirty(before);
            if dirty(before) > 0 && dirty(entry) == 0 {
                index.places.retire(place);
            }
        });
        Ok(())
    }

    /// Whether the base has everything, durably or not.
    fn is_clean(&self) -> bool {
        self.record.look(|states| states.count(DIRTY) == 0)
    }

    /// Whether neither map names anything dirty.
    fn holds_nothing(&self) -> bool {
        self.record.with(|states, index| states.count(DIRTY) == 0 && !index.places.has_retired())
    }

    async fn flush(&self) -> Result<()> {
        self.failure.check_base()?;
        if self.holds_nothing() {
            // The flash has nothing that the base lacks.
            if !self.failure.has_failed() {
                self.record.check()?;
            }
            return self.base.flush().await;
        }
        self.record.check()?;
        self.take_back().await?;
        let flushed = self.flush_record().await;
        if flushed.is_err() {
            self.take_back().await?;
        }
        flushed
    }

    /// Makes base, flash and the durable map what they are now. That promises nothing of what was lost before.
    async fn flush_record(&self) -> Result<()> {
        let number = self.record.with(|_, index| index.places.begin_flush());
        if let Err(FlushError { error, is_base }) = self.record.settle().await {
            if may_have_lost(&error) {
                match is_base {
                    true => self.failure.fail_base(&error),
                    false => self.fail(&error),
                }
            }
            return Err(error);
        }
        let mut from = Some(0);
        while let Some(next) = from {
            from = self.record.with(|_, index| index.places.flushed(number, next, PlaceAllocator::FLUSHED_AT_ONCE));
        }
        Ok(())
    }

    /// Flushes the base for what was written back. What else is not durable there may be lost with a flush that fails, and nobody but this
    /// one hears of it.
    async fn flush_base(&self) -> Result<()> {
        let was_durable = self.base.is_durable();
        let Err(error) = self.base.device().flush().await else { return Ok(()) };
        if may_have_lost(&error) {
            if !(was_durable && self.base.is_durable()) {
                self.failure.fail_base(&error);
            }
            self.record.note_base_failure(&error).await;
        }
        Err(error)
    }
}

/// Of the class of what is dirty.
const DIRTY: CacheEntry = CacheEntry::new(0, 1, 1);

impl BlockDevice for Cache {
    fn geometry(&self) -> Geometry {
        self.inner.geometry
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.inner.read(offset, buffer, true))
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(self.inner.write(mutation))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.inner.flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.inner.describe(extent))
    }
}

/// What a migration reads.
struct CopyFace(Arc<Inner>);

impl BlockDevice for CopyFace {
    fn geometry(&self) -> Geometry {
        Geometry { read_only: true, ..self.0.geometry }
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.0.read(offset, buffer, false))
    }

    fn write(&self, _mutation: Mutation) -> IoFuture<'_, ()> {
        block::ready(Err(Error::new(ErrorKind::ReadOnly, "a migration does not write to its source")))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.0.flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.0.describe(extent))
    }
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Cache({} over {})", self.inner.partition.name(), self.inner.base.device().name())
    }
}

/// What the cached volume takes: what both take.
fn geometry_over(base: &Device, partition: &Device, header: &CacheHeader) -> Result<Geometry> {
    if base.size() != header.volume {
        let (is, should) = (base.size().0, header.volume.0);
        let context = format!("the cache is of a volume of {should} bytes, and {} has {is}", base.name());
        return Err(Error::new(ErrorKind::Invalid, context));
    }
    let both = geometry_of_both(header.volume, base, partition);
    let geometry = Geometry { read_only: both.read_only || base.geometry().read_only, ..both };
    if u64::from(geometry.transfer_bytes_max) < STEP_BYTES {
        let context = format!(
            "a cache needs requests of {STEP_BYTES} bytes; {} or {} takes none so large",
            partition.name(),
            base.name()
        );
        return Err(Error::new(ErrorKind::Invalid, context));
    }
    Ok(geometry)
}

fn check_partition(partition: &Device, header: &CacheHeader) -> Result<()> {
    if partition.size() >= header.partition_bytes() {
        return Ok(());
    }
    let (is, should) = (partition.size().0, header.partition_bytes().0);
    let context = format!("{} has {is} bytes; the cache needs {should}", partition.name());
    Err(Error::new(ErrorKind::Invalid, context))
}

#[cfg(test)]
mod tests;
