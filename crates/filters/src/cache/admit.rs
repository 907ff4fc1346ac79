//! What the guest has read of the base is admitted: aside from the read, and only if nobody has written to the block meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{Bytes, Data, Extent, Mutation, Result};
use futures::future::join_all;
use tokio::sync::Notify;

use super::entry::{CacheEntry, runs_of};
use super::options::Admission;
use super::write::try_all;
use super::{Inner, mask_of};

/// So many bytes are being admitted at a time; more are not admitted.
const BYTES_AT_ONCE: u64 = 8 << 20;
/// A smaller admission counts as so many bytes: then there are 64 at a time at most.
const BYTES_EACH: u64 = BYTES_AT_ONCE / 64;

/// Admissions under way.
#[derive(Default)]
pub(super) struct Admissions {
    bytes: AtomicU64,
    ended: Notify,
}

impl Admissions {
    /// Waits until none is under way. Nobody begins one meanwhile.
    pub(super) async fn ended(&self) {
        loop {
            let ended = self.ended.notified();
            if self.bytes.load(Ordering::SeqCst) == 0 {
                return;
            }
            ended.await;
        }
    }
}

/// An admission that was begun before its bytes were read.
pub(super) struct UnderWay {
    inner: Arc<Inner>,
    bytes: u64,
    /// The stamps of the blocks at that time.
    stamps: Vec<u32>,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.inner.admissions.bytes.fetch_sub(self.bytes, Ordering::SeqCst);
        self.inner.admissions.ended.notify_waiters();
    }
}

impl Inner {
    /// Before `extent` of the base is read: how what is read will be admitted, if it will.
    pub(super) fn begin_admission(self: &Arc<Self>, extent: Extent, is_long: bool) -> Option<UnderWay> {
        let bytes = extent.length.get().max(BYTES_EACH);
        let has_room = |now: u64| (now + bytes <= BYTES_AT_ONCE).then_some(now + bytes);
        if is_long || self.admissions.bytes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, has_room).is_err() {
            self.counters.bypassed.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let mut under_way = UnderWay { inner: Arc::clone(self), bytes, stamps: Vec::new() };
        if !self.admits() {
            return None;
        }
        under_way.stamps.extend(self.block.indices_of(extent).map(|block| self.write_stamps.get(block)));
        Some(under_way)
    }

    /// Admits what was read, beside the caller.
    pub(super) fn admit_aside(&self, under_way: UnderWay, offset: Bytes, bytes: &[u8]) {
        let read = Mutation::data(offset, Data::copy_of(bytes));
        self.env.spawn(Box::pin(async move {
            let inner = &under_way.inner;
            let parts = inner.parts_of(read.extent()).map(|(block, part)| (block, read.slice(part)));
            let each = parts.zip(under_way.stamps.iter().copied()).map(|((block, part), stamp)| async move {
                let _guard = inner.blocks.exclusive(inner.extent_of(block)).await;
                inner.admit_part(block, &part, stamp).await.map(drop)
            });
            if let Err(error) = try_all(join_all(each).await) {
                tracing::debug!(error = error.chain(), "what was read is not cached");
            }
        }));
    }

    /// Admits the sectors of `block`, which the caller has alone, that `read` has whole. `stamp` is of before it was read.
    pub(super) async fn admit_part(&self, block: u64, read: &Mutation, stamp: u32) -> Result<Admission> {
        self.admit_as(block, read, stamp, false).await
    }

    /// The same of a block for which no other goes, and that goes before all others.
    pub(super) async fn admit_last(&self, block: u64, read: &Mutation, stamp: u32) -> Result<Admission> {
        self.admit_as(block, read, stamp, true).await
    }

    async fn admit_as(&self, block: u64, read: &Mutation, stamp: u32, is_last: bool) -> Result<Admission> {
        if !self.admits() {
            return Ok(Admission::Full);
        }
        if self.write_stamps.get(block) != stamp {
            return Ok(Admission::Outdated);
        }
        let found = self.find(block);
        let (_, whole) = self.sectors_of(read.extent());
        let missing = whole & !found.map_or(0, |found| found.valid);
        if missing == 0 {
            return Ok(Admission::Present);
        }
        let claimed = match found {
            Some(found) => Some(found.place),
            None if is_last => self.record.with(|_, index| index.places.take()).map(|place| place as u32),
            None => self.claim().await,
        };
        let Some(place) = claimed else { return Ok(Admission::Full) };
        let pieces = runs_of(missing).map(|run| read.slice(self.extent_of_sectors(block, &run, read.extent())));
        let writes = pieces.map(|piece| async move { self.write_place(&piece, place).await });
        if let Err(error) = try_all(join_all(writes).await) {
            self.fail(&error);
            return Err(error);
        }
        let entry = found.map_or(CacheEntry::new(block, missing, 0), |found| {
            CacheEntry::new(block, found.valid | missing, found.entry.dirty())
        });
        self.set(place, entry).await.inspect_err(|error| self.fail(error))?;
        self.record.with(|_, index| match found {
            None if is_last => index.insert_last(place, block),
            None => index.insert(place, block),
            Some(_) => index.remove_unrecorded(place, u8::MAX),
        });
        self.counters.admitted.fetch_add(1, Ordering::Relaxed);
        Ok(Admission::Admitted)
    }

    /// The mask of all sectors of a block; the last one of the volume may have fewer.
    pub(super) fn all_sectors(&self, block: u64) -> u8 {
        mask_of(0, self.extent_of(block).length.get().div_ceil(self.sector_bytes()))
    }

    /// Admits the whole of a block.
    pub(super) async fn admit_whole(&self, block: u64, bytes: Data, stamp: u32) -> Result<Admission> {
        let extent = self.extent_of(block);
        let _guard = self.blocks.exclusive(extent).await;
        self.admit_part(block, &Mutation::data(extent.offset, bytes), stamp).await
    }
}
