//! A cache in memory of a volume that is being copied, which knows what the copy still needs: `IOFollow`'s.
//!
//! ```text
//!   guest ──▶ guest()                                    migration ──▶ copy()
//!     read    all of its chunks are here ──▶ memory        read    here ──▶ memory
//!             otherwise ──▶ source                                 otherwise ──▶ copy face, and kept
//!             (an unsent chunk may be read whole and kept)
//!     write   ──▶ source; then the bytes here are replaced
//!     zeroes, discards ──▶ source; then the chunk is dropped
//! ```
//!
//! It is the migration-aware block cache manager of *IOFollow* (dissertation, section 5.2.4, algorithm 2). An entry is a chunk of the
//! source. Nothing is in memory alone: losing it costs time and no data. Two reads of one chunk become one read of the disk:
//!
//! - What the migration has read is kept, so that the guest may find it.
//! - A guest read that misses a chunk that is yet to be sent may read all of it, so that the copy finds it. The copy must read that chunk
//!   anyhow, and the head of the disk is there. But the guest waits for the larger read. So it is done for a read of a quarter
//!   of the chunk, or for a chunk that was read before and has at most 256 KiB. One small read predicts nothing.
//!   A chunk that was sent is never read whole: no copy would be spared. Such reads are counted.
//! - [`next_unsent`](ReadCache::next_unsent) tells which chunks are here and yet to be sent. Their copies take nothing from the disk.
//!
//! When the cache is full, the chunk with the least liveness goes first (`entries.rs`). It is made of the paper's three answers: whether
//! the chunk was sent, its age, and how often the guest has read it lately. What would be the least alive is not taken in.
//!
//! Reads never see older bytes than others have seen before (`in_flight.rs`):
//!
//! - A chunk that is here answers every read that ends while it is here, also one that went to the disk.
//! - A chunk is taken in only if no write to it was under way from before its read to after it. A write that comes meanwhile wins.
//! - A write replaces bytes here when the source has answered it, and before the guest hears of that. If it overlaps another one, nobody
//!   knows which the disk has: the chunks of both are dropped.
//! - After a write that has failed or was abandoned, its chunks are never cached again: it may still reach the disk.
//!
//! A read that is answered from memory takes one short lock. No lock is held while a device works.

mod entries;
mod in_flight;
mod read;
mod write;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{
    BlockDevice, Buffer, Bytes, ChunkIndex, ChunkSize, Device, Error, ErrorKind, Extent, ExtentStatus, Geometry,
    IoFuture, Mutation, ready,
};
use parking_lot::Mutex;

use entries::Entries;
use in_flight::InFlight;
use read::Reader;

/// A cache of the chunks of one volume while it is copied. Clones are the same cache.
///
/// All that changes the source while the cache lives must go through [`guest`](Self::guest).
#[derive(Clone)]
pub struct ReadCache {
    inner: Arc<Inner>,
}

struct Inner {
    source: Device,
    copy_face: Device,
    chunk: ChunkSize,
    /// The source's when this was made.
    size: Bytes,
    state: Mutex<State>,
    counters: Counters,
}

struct State {
    entries: Entries,
    in_flight: InFlight,
    /// Everything passes through from now on.
    is_closed: bool,
}

#[derive(Default)]
struct Counters {
    guest_hits: AtomicU64,
    guest_misses: AtomicU64,
    copy_hits: AtomicU64,
    copy_misses: AtomicU64,
    chunks_fetched: AtomicU64,
    fetched_bytes: AtomicU64,
    outdated: AtomicU64,
}

/// What a cache has done, and what it holds. Reads are counted once for each chunk that they touch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadCacheStatus {
    /// Reads of the guest's that memory has answered.
    pub guest_hits: u64,
    /// Those that the source has answered.
    pub guest_misses: u64,
    /// Reads of the migration's that memory has answered.
    pub copy_hits: u64,
    /// Those that the source has answered.
    pub copy_misses: u64,
    /// Chunks that were read whole although the guest has asked for a part.
    pub chunks_fetched: u64,
    /// How many bytes those chunks have.
    pub fetched_bytes: u64,
    /// Chunks that were read and not kept, because a write came meanwhile.
    pub outdated: u64,
    /// Chunks that had to go because others came.
    pub evictions: u64,
    /// How many of them were yet to be sent.
    pub evictions_unsent: u64,
    /// How many bytes of memory the chunks here take. The last chunk of a volume counts as a whole one.
    pub bytes: u64,
    /// The most that they ever took.
    pub bytes_used_max: u64,
    /// How many they may take.
    pub bytes_max: u64,
}

impl ReadCache {
    /// An empty cache of `source` with room for `bytes_max`, which is rounded down to whole chunks, of which nothing was sent. The
    /// migration reads by `copy_face`: the same bytes, perhaps by another face.
    ///
    /// # Panics
    /// If there is no room for a chunk.
    #[must_use]
    pub fn new(source: Device, copy_face: Device, chunk: ChunkSize, bytes_max: Bytes) -> Self {
        let room = bytes_max.get() / chunk.bytes();
        assert!(room > 0, "a cache of {bytes_max} has no room for a chunk of {}", Bytes(chunk.bytes()));
        let size = source.size();
        let entries = Entries::new(chunk.count(size), room);
        let state = State { entries, in_flight: InFlight::default(), is_closed: false };
        let inner = Inner { source, copy_face, chunk, size, state: Mutex::new(state), counters: Counters::default() };
        Self { inner: Arc::new(inner) }
    }

    /// The source as the guest reads and changes it.
    #[must_use]
    pub fn guest(&self) -> Device {
        Device::new("read-cache", GuestFace(Arc::clone(&self.inner)))
    }

    /// The source as the migration reads it: what it reads is not counted as the guest's interest. It takes no writes.
    #[must_use]
    pub fn copy(&self) -> Device {
        Device::new("read-cache, copy", CopyFace(Arc::clone(&self.inner)))
    }

    /// These chunks were sent: the target has them.
    pub fn mark_sent(&self, chunks: Range<u64>) {
        self.inner.state.lock().entries.mark_sent(chunks);
    }

    /// These chunks must be sent, for the first time or again.
    pub fn mark_unsent(&self, chunks: Range<u64>) {
        self.inner.state.lock().entries.mark_unsent(chunks);
    }

    /// The first run of chunks at or after `from` that are here and yet to be sent, of at most `chunks_max`.
    #[must_use]
    pub fn next_unsent(&self, from: u64, chunks_max: u64) -> Option<Range<u64>> {
        self.inner.state.lock().entries.next_unsent(from, chunks_max)
    }

    /// Gives the memory back. Everything passes through from now on.
    pub fn close(&self) {
        let mut state = self.inner.state.lock();
        state.is_closed = true;
        let dropped = state.entries.clear();
        drop(state);
        // Outside the lock: it may be a lot of memory.
        drop(dropped);
    }

    /// What it has done and what it holds.
    #[must_use]
    pub fn status(&self) -> ReadCacheStatus {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (counters, state) = (&self.inner.counters, self.inner.state.lock());
        let entries = &state.entries;
        let bytes_of = |count: u64| count * self.inner.chunk.bytes();
        ReadCacheStatus {
            guest_hits: read(&counters.guest_hits),
            guest_misses: read(&counters.guest_misses),
            copy_hits: read(&counters.copy_hits),
            copy_misses: read(&counters.copy_misses),
            chunks_fetched: read(&counters.chunks_fetched),
            fetched_bytes: read(&counters.fetched_bytes),
            outdated: read(&counters.outdated),
            evictions: entries.evictions(),
            evictions_unsent: entries.evictions_unsent(),
            bytes: bytes_of(entries.in_use()),
            bytes_used_max: bytes_of(entries.in_use_max()),
            bytes_max: bytes_of(entries.room()),
        }
    }
}

impl Inner {
    fn geometry(&self) -> Geometry {
        // A volume does not grow while it is copied.
        Geometry { size: self.size, ..self.source.geometry() }
    }

    fn extent_of(&self, chunk: u64) -> Extent {
        self.chunk.extent_of(ChunkIndex(chunk), self.size)
    }

    fn face(&self, reader: Reader) -> &Device {
        match reader {
            Reader::Guest => &self.source,
            Reader::Copy => &self.copy_face,
        }
    }
}

impl std::fmt::Debug for ReadCache {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "ReadCache(over {})", self.inner.source.name())
    }
}

/// What the guest reads and changes.
struct GuestFace(Arc<Inner>);

impl BlockDevice for GuestFace {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.0.read(offset, buffer, Reader::Guest))
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(self.0.write(mutation))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.0.source.flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.0.source.extents(extent))
    }

    fn compares_checks(&self) -> bool {
        self.0.source.compares_checks()
    }

    fn keeps_holes(&self) -> bool {
        self.0.source.keeps_holes()
    }
}

/// What a migration reads.
struct CopyFace(Arc<Inner>);

impl BlockDevice for CopyFace {
    fn geometry(&self) -> Geometry {
        Geometry { read_only: true, size: self.0.size, ..self.0.copy_face.geometry() }
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.0.read(offset, buffer, Reader::Copy))
    }

    fn write(&self, _mutation: Mutation) -> IoFuture<'_, ()> {
        ready(Err(Error::new(ErrorKind::ReadOnly, "a migration does not write to its source")))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.0.copy_face.flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.0.copy_face.extents(extent))
    }

    fn keeps_holes(&self) -> bool {
        self.0.copy_face.keeps_holes()
    }
}

#[cfg(test)]
mod tests;
