//! WAIO's redirection: what is popular, and all that the guest writes, goes to a surrogate while the volume is copied.
//!
//! ```text
//!   guest ──▶ cut at chunk borders ──▶ popularity: counted, for each chunk
//!     read     the place has all of it, or its sectors are dirty ──▶ surrogate
//!              some of its sectors are dirty ──▶ source, and the dirty sectors laid over it
//!              otherwise ──▶ source             (a popular chunk is then fetched whole, aside)
//!     write    ──▶ a place of the surrogate; its sectors become dirty, before the write is answered
//!              no place is free ──▶ source
//!     zeroes, discards ──▶ source, and zeroes over what the place has
//!   migration ──▶ copy(): the same bytes, never counted and never fetched for
//! ```
//!
//! It is the system of *Data migration with outsourced popular data* (WAIO, chapter 3 of the dissertation): [`Popularity`] is its
//! popularity identifier, this module the redirector, the index and the places are the surrogate space manager, and `drain.rs`
//! is the reclaimer. Its NVRAM is the record of the extent store: what is dirty outlives a crash of the process and what was flushed
//! a power loss. What is only cached is forgotten at a crash.
//!
//! | a place is | its record says | a read finds | after a crash |
//! |---|---|---|---|
//! | free | clean | the source | free |
//! | cached | clean | the place | free |
//! | dirty | its chunk and the dirty sectors | the dirty sectors in the place, the rest in the source | the same |
//! | cached and dirty | the same | the place | dirty |
//!
//! Whoever changes a chunk has its whole extent of the range lock. So a write of the guest's that meets the fetch of its chunk goes
//! before or after it, and is never lost under what the fetch has read.
//!
//! A surrogate that fails takes nothing more. What it only cached is read from the source. What it alone held is an error, and
//! never the older bytes of the source.

mod drain;
mod entry;
mod fetch;
mod format;
mod index;
mod popularity;
mod read;
mod source_paths;
mod take_back;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use block::{
    BlockDevice, Buffer, Bytes, ChunkIndex, Device, Error, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture,
    Mutation, RangeLock, Result,
};
use env::EnvRef;
use futures::future::join_all;
use parking_lot::{Mutex, RwLock};

pub use self::format::RedirectHeader;
pub use self::popularity::{AccessCounts, FrequencySketch, Popularity, Recency};
use crate::store::{Base, Layout, PlaceAllocator, Placement, Record, STEP_BYTES, geometry_of_both};
use entry::{DirtySectors, SurrogateEntry};
use fetch::Fetches;
use index::Index;
use source_paths::Reader;

/// A volume whose popular chunks, and whose changes, are in a surrogate. Clones are the same redirection.
#[derive(Clone)]
pub struct Redirect {
    inner: Arc<Inner>,
}

struct Inner {
    env: EnvRef,
    base: Arc<Base>,
    /// The source itself, past every read cache.
    source: Device,
    /// By what a migration's copies read the source, if a read cache is in between.
    copy_source: RwLock<Option<Device>>,
    surrogate: Device,
    header: RedirectHeader,
    geometry: Geometry,
    record: Record<SurrogateEntry>,
    placement: Placement,
    /// Held by whoever changes a chunk, whole; shared by whoever reads some of it.
    chunks: RangeLock,
    index: Mutex<Index>,
    popularity: Mutex<Box<dyn Popularity>>,
    /// The number of the next place that becomes dirty.
    serial: AtomicU64,
    is_draining: AtomicBool,
    /// Why the surrogate takes nothing more.
    failure: Mutex<Option<String>>,
    /// Chunks whose record may be what memory says, or what it should have become when the surrogate failed.
    in_doubt: Mutex<BTreeSet<u64>>,
    /// The places that chunks have left since the last flush.
    left: Mutex<BTreeMap<u64, u64>>,
    fetches: Fetches,
    counters: Counters,
}

#[derive(Default)]
struct Counters {
    reads_redirected: AtomicU64,
    reads_merged: AtomicU64,
    reads_at_source: AtomicU64,
    writes_redirected: AtomicU64,
    writes_at_source: AtomicU64,
    chunks_fetched: AtomicU64,
    fetched_bytes: AtomicU64,
}

/// What a redirection has done, and what it holds. Requests are counted once for each chunk that they touch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RedirectStatus {
    /// Reads of the guest's that the surrogate alone has answered.
    pub reads_redirected: u64,
    /// Those that needed source and surrogate.
    pub reads_merged: u64,
    /// Those that the source has answered.
    pub reads_at_source: u64,
    /// Writes to the surrogate.
    pub writes_redirected: u64,
    /// Writes to the source, because no place was free, or the redirection is being drained.
    pub writes_at_source: u64,
    /// Chunks that were fetched whole because they were popular: reads that the guest did not ask for.
    pub chunks_fetched: u64,
    /// How many bytes those were.
    pub fetched_bytes: u64,
    /// How many places there are.
    pub places: u64,
    /// How many of them are free.
    pub places_free: u64,
    /// How many have all of their chunk.
    pub places_cached: u64,
    /// How many have something that the source lacks.
    pub places_dirty: u64,
    /// What the index takes in memory, in bytes.
    pub index_bytes: u64,
    /// Whether the surrogate has failed.
    pub has_failed: bool,
}

impl Redirect {
    /// Makes an empty redirection of `partition`, whatever that held before. Done means durable.
    ///
    /// # Errors
    /// Invalid if the partition is smaller than the header says; otherwise what it says.
    pub async fn create(partition: &Device, header: &RedirectHeader) -> Result<()> {
        check_partition(partition, header)?;
        header.layout().create(partition, header.layout().end(), header.encode()).await
    }

    /// What the redirection on `partition` is.
    ///
    /// # Errors
    /// Invalid if it is none, unsupported if it is of a later version, corrupt if it is damaged.
    pub async fn inspect(partition: &Device) -> Result<RedirectHeader> {
        if partition.size() < Layout::BOOT_AT {
            let context = format!("{} is no partition of a surrogate: it is too small", partition.name());
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        let page = partition.read(Bytes::ZERO, Buffer::unpooled(Layout::BOOT_AT.as_usize())).await?;
        let header = RedirectHeader::decode(&page, partition.name())?;
        check_partition(partition, &header)?;
        Ok(header)
    }

    /// Whether the redirection `header` on `partition` was last open in the machine's boot `boot`.
    ///
    /// # Errors
    /// What the partition says.
    pub async fn is_of_boot(partition: &Device, header: &RedirectHeader, boot: [u8; 16]) -> Result<bool> {
        header.layout().is_of_boot(partition, boot).await
    }

    /// What the partition has of the volume that the source lacks, as extents of it.
    #[must_use]
    pub fn held_extents(&self) -> Vec<Extent> {
        let inner = &self.inner;
        let held = inner.record.look(|map| {
            let stored = std::iter::successors(map.next_stored(0), |place| map.next_stored(place + 1));
            stored.collect::<Vec<u64>>()
        });
        let runs = held.chunk_by(|one, next| *next == one + 1);
        let start = |place: u64| inner.placement.start_of(place);
        runs.map(|run| Extent::between(start(run[0]), start(run[run.len() - 1] + 1))).collect()
    }

    /// Opens the redirection on `partition` of the volume that `base` holds, in the machine's boot `boot`. After a crash of the
    /// process within that boot it has all that was answered, after a power loss all that was flushed.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect), and invalid if it does not fit `base`. The base is asked for nothing, so it need not be there.
    pub async fn open(
        env: EnvRef,
        base: Device,
        partition: Device,
        boot: [u8; 16],
        popularity: Box<dyn Popularity>,
    ) -> Result<Self> {
        let header = Self::inspect(&partition).await?;
        let geometry = geometry_over(&base, &partition, &header)?;
        let (source, base) = (base.clone(), Arc::new(Base::new(base)));
        let record = Record::open(partition.clone(), header.layout(), boot, Arc::clone(&base)).await?;
        let (owned, stale, serial) = owners(&record, &header, partition.name())?;
        if !geometry.read_only {
            for place in stale {
                record.set(place..place + 1, SurrogateEntry::Clean).await?;
            }
        }
        let mut index = Index::new(header.chunks(), header.places, &owned);
        // The first flush lets them go, once the base has what has left them.
        let only_durable = record.only_durable();
        let chunk_of = |place: &u64| match record.durable_state(*place) {
            SurrogateEntry::Dirty { chunk, .. } => Some((u64::from(chunk), *place)),
            SurrogateEntry::Clean => None,
        };
        let left = only_durable.iter().filter_map(chunk_of).collect();
        index.places.retire_all(only_durable);
        let inner = Inner {
            env,
            base,
            source,
            copy_source: RwLock::new(None),
            surrogate: partition,
            geometry,
            record,
            placement: header.placement(),
            header,
            chunks: RangeLock::new(),
            index: Mutex::new(index),
            popularity: Mutex::new(popularity),
            serial: AtomicU64::new(serial),
            is_draining: AtomicBool::new(false),
            failure: Mutex::new(None),
            in_doubt: Mutex::default(),
            left: Mutex::new(left),
            fetches: Fetches::default(),
            counters: Counters::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// What it is.
    #[must_use]
    pub fn header(&self) -> &RedirectHeader {
        &self.inner.header
    }

    /// The same volume as a migration reads it: what is read is not counted, and nothing is fetched for it. It takes no writes.
    #[must_use]
    pub fn copy(&self, name: &str) -> Device {
        Device::new(name, CopyFace { inner: Arc::clone(&self.inner), reader: Reader::Copy })
    }

    /// The same past a read cache: what comparisons read, which must see the disk.
    #[must_use]
    pub fn comparison(&self, name: &str) -> Device {
        Device::new(name, CopyFace { inner: Arc::clone(&self.inner), reader: Reader::Comparison })
    }

    /// The source was written to since the redirection was opened, by whoever used it until now: the next flush covers that, too.
    /// Whoever puts it into a guest's path says so while nothing is under way.
    pub fn note_source_written(&self) {
        self.inner.base.note_written();
    }

    /// What it has done and what it holds.
    #[must_use]
    pub fn status(&self) -> RedirectStatus {
        self.inner.status()
    }
}

impl Inner {
    fn status(&self) -> RedirectStatus {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (counters, popularity) = (&self.counters, self.popularity.lock().memory_bytes());
        let (dirty, record_bytes) =
            self.record.look(|map| (map.len() - map.count(SurrogateEntry::Clean), map.memory_bytes()));
        let index = self.index.lock();
        RedirectStatus {
            reads_redirected: read(&counters.reads_redirected),
            reads_merged: read(&counters.reads_merged),
            reads_at_source: read(&counters.reads_at_source),
            writes_redirected: read(&counters.writes_redirected),
            writes_at_source: read(&counters.writes_at_source),
            chunks_fetched: read(&counters.chunks_fetched),
            fetched_bytes: read(&counters.fetched_bytes),
            places: index.places.count(),
            places_free: index.places.free_count(),
            places_cached: index.cached(),
            places_dirty: dirty,
            index_bytes: (index.memory_bytes() + popularity + record_bytes) as u64,
            has_failed: self.failure.lock().is_some(),
        }
    }

    fn chunk_of(&self, offset: Bytes) -> u64 {
        self.header.chunk.index_of(offset).0
    }

    fn is_in_one_chunk(&self, extent: Extent) -> bool {
        extent.is_empty() || self.chunk_of(extent.offset) == self.chunk_of(Bytes(extent.end().get() - 1))
    }

    fn extent_of(&self, chunk: u64) -> Extent {
        self.header.chunk.extent_of(ChunkIndex(chunk), self.header.volume)
    }

    /// The sectors of its chunk that `part` touches.
    fn sectors_of(&self, part: Extent) -> Range<u64> {
        let start = self.extent_of(self.chunk_of(part.offset)).offset;
        let unit = self.header.sector_bytes();
        (part.offset - start).get() / unit..(part.end() - start).get().div_ceil(unit)
    }

    /// The bytes of some sectors of `chunk`; the last one of the volume may be short.
    fn extent_of_sectors(&self, chunk: u64, sectors: &Range<u64>) -> Extent {
        let whole = self.extent_of(chunk);
        let at = |sector: u64| (whole.offset + Bytes(sector * self.header.sector_bytes())).min(whole.end());
        Extent::between(at(sectors.start), at(sectors.end))
    }

    /// Where `offset` of the volume is in its chunk's place.
    fn place_at(&self, place: u64, offset: Bytes) -> Bytes {
        let start = self.extent_of(self.chunk_of(offset)).offset;
        self.placement.start_of(place) + (offset - start)
    }

    /// The place of `chunk`, whether it has all of it, and which of its sectors the source lacks.
    fn find(&self, chunk: u64) -> Option<Found> {
        let (place, is_cached) = self.index.lock().find(chunk)?;
        let dirty = self.record.look(|map| map.get(place)).sectors();
        Some(Found { place, is_cached, dirty })
    }

    /// Takes nothing more into the surrogate.
    fn fail(&self, error: &Error) {
        let mut failure = self.failure.lock();
        if failure.is_none() {
            tracing::error!(surrogate = self.surrogate.name(), error = error.chain(), "the surrogate has failed");
            *failure = Some(error.chain());
        }
    }

    /// Whether new chunks may be taken into the surrogate.
    fn takes(&self) -> bool {
        let has_failed = || self.failure.lock().is_some() || !self.record.is_well();
        !self.is_draining.load(Ordering::Acquire) && !has_failed()
    }

    /// Whether the source lacks nothing.
    fn is_empty(&self) -> bool {
        self.record.look(|map| map.count(SurrogateEntry::Clean) == map.len())
    }

    /// Whether neither map names a place: then the source alone is the volume, whatever becomes of the surrogate.
    fn names_nothing(&self) -> bool {
        self.is_empty() && !self.index.lock().places.has_retired()
    }

    async fn flush(&self) -> Result<()> {
        if self.failure.lock().is_some() && self.names_nothing() {
            return self.base.flush().await;
        }
        self.take_back().await?;
        let number = self.index.lock().places.begin_flush();
        if let Err(error) = self.record.flush().await {
            self.take_back().await?;
            return Err(error);
        }
        let mut from = Some(0);
        while let Some(next) = from {
            from = self.index.lock().places.flushed(number, next, PlaceAllocator::FLUSHED_AT_ONCE);
        }
        self.forget_left();
        Ok(())
    }

    async fn read(self: &Arc<Self>, offset: Bytes, buffer: Buffer, reader: Reader) -> Result<Buffer> {
        let extent = Extent::new(offset, buffer.len().into());
        match self.is_in_one_chunk(extent) {
            true => self.read_part(extent, buffer, reader).await,
            false => self.read_parts(extent, buffer, reader).await,
        }
    }

    /// Reads each chunk's part beside the others.
    async fn read_parts(self: &Arc<Self>, extent: Extent, mut buffer: Buffer, reader: Reader) -> Result<Buffer> {
        let parts: Vec<Extent> = extent.split_at_multiples(self.header.chunk.bytes()).collect();
        let each = parts.iter().map(|part| self.read_part(*part, Buffer::unpooled(part.length.as_usize()), reader));
        for (part, read) in parts.iter().zip(join_all(each).await) {
            let at = (part.offset - extent.offset).as_usize();
            buffer[at..at + part.length.as_usize()].copy_from_slice(&read?);
        }
        Ok(buffer)
    }

    async fn write(&self, mutation: Mutation) -> Result<()> {
        let fua = mutation.fua;
        if fua {
            self.record.check()?;
        }
        if self.is_in_one_chunk(mutation.extent()) {
            self.write_part(mutation.with_fua(false)).await?;
        } else {
            let parts = mutation.extent().split_at_multiples(self.header.chunk.bytes());
            let each = parts.map(|part| self.write_part(mutation.slice(part).with_fua(false)));
            join_all(each).await.into_iter().collect::<Result<()>>()?;
        }
        if fua { self.flush().await } else { Ok(()) }
    }
}

/// The place of a chunk.
#[derive(Clone, Copy)]
struct Found {
    place: u64,
    is_cached: bool,
    dirty: DirtySectors,
}

impl BlockDevice for Redirect {
    fn geometry(&self) -> Geometry {
        self.inner.geometry
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.inner.read(offset, buffer, Reader::Guest))
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
struct CopyFace {
    inner: Arc<Inner>,
    reader: Reader,
}

impl BlockDevice for CopyFace {
    fn geometry(&self) -> Geometry {
        Geometry { read_only: true, ..self.inner.geometry }
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.inner.read(offset, buffer, self.reader))
    }

    fn write(&self, _mutation: Mutation) -> IoFuture<'_, ()> {
        block::ready(Err(Error::new(ErrorKind::ReadOnly, "a migration does not write to its source")))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.inner.flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.inner.describe(extent))
    }
}

impl std::fmt::Debug for Redirect {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Redirect({} over {})", self.inner.surrogate.name(), self.inner.base.device().name())
    }
}

/// The places on record that have a chunk, those whose chunk has a newer one, and the next serial.
type Owners = (Vec<(u64, u64)>, Vec<u64>, u64);

fn owners(record: &Record<SurrogateEntry>, header: &RedirectHeader, name: &str) -> Result<Owners> {
    let mut of_chunk: BTreeMap<u64, (u32, u64)> = BTreeMap::new();
    let (mut stale, mut next) = (Vec::new(), 0);
    let states: Vec<(u64, SurrogateEntry)> = record.look(|map| {
        let stored = std::iter::successors(map.next_stored(0), |place| map.next_stored(place + 1));
        stored.map(|place| (place, map.get(place))).collect()
    });
    for (place, state) in states {
        let SurrogateEntry::Dirty { chunk, serial, .. } = state else { continue };
        if u64::from(chunk) >= header.chunks() {
            let context = format!("{name} is damaged: place {place} is of chunk {chunk}, which does not exist");
            return Err(Error::new(ErrorKind::Corrupt, context));
        }
        next = next.max(u64::from(serial) + 1);
        let newest = of_chunk.entry(chunk.into()).or_insert((serial, place));
        if newest.1 != place {
            let (older, newer) = if newest.0 < serial { (newest.1, (serial, place)) } else { (place, *newest) };
            stale.push(older);
            *newest = newer;
        }
    }
    let owned = of_chunk.into_iter().map(|(chunk, (_, place))| (place, chunk)).collect();
    Ok((owned, stale, next.max(1)))
}

/// What the redirection takes: requests as large as the base does, because the partition is asked for a chunk at most.
fn geometry_over(base: &Device, partition: &Device, header: &RedirectHeader) -> Result<Geometry> {
    if base.size() != header.volume {
        let (is, should) = (base.size().0, header.volume.0);
        let context = format!("the surrogate is of a volume of {should} bytes, and {} has {is}", base.name());
        return Err(Error::new(ErrorKind::Invalid, context));
    }
    let both = geometry_of_both(header.volume, base, partition);
    let geometry = Geometry { read_only: both.read_only || base.geometry().read_only, ..both };
    let least = header.chunk.bytes().max(STEP_BYTES);
    if u64::from(geometry.transfer_bytes_max) < least || u64::from(geometry.request_alignment) > header.sector_bytes() {
        let context =
            format!("a redirection needs requests of {least} bytes; {} or its source takes none", partition.name());
        return Err(Error::new(ErrorKind::Invalid, context));
    }
    Ok(Geometry { transfer_bytes_max: base.geometry().transfer_bytes_max, ..geometry })
}

fn check_partition(partition: &Device, header: &RedirectHeader) -> Result<()> {
    if partition.size() >= header.partition_bytes() {
        return Ok(());
    }
    let (is, should) = (partition.size().0, header.partition_bytes().0);
    let context = format!("{} has {is} bytes; the redirection needs {should}", partition.name());
    Err(Error::new(ErrorKind::Invalid, context))
}

#[cfg(test)]
mod tests;
