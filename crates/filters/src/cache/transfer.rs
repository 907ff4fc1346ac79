//! A cache that is filled with what its volume's cache at another host holds, while the guest is here already (Firepan, section 3.3).
//!
//! ```text
//!              begin                     everything has come                nothing is kept any more
//!   (no transfer) ──▶ withheld ──────────────── attach ──────▶ settling ───────────────┬──▶ (no transfer)
//!          │          the guest goes to the base;              who asks for a block     │
//!          │          what it changes is kept                  that was changed has     │
//!          │                                                   it dropped first         │
//!          └────────▶ guarded ───────────────── end ────────────────────────────────────┘
//!                     the guest goes through the cache; what it changes is kept,
//!                     and no block of that is taken from the other host any more
//! ```
//!
//! *Withheld* and *settling* are `FirepanIF` with its invalidation filter. Where algorithms 1 and 2 of the paper would answer old bytes they
//! are corrected: a request has several blocks; one that was written in part is dropped as a whole; it leaves the table only once it was
//! dropped; a write goes to the base first. *Guarded* is this project's own way, in which nothing is withheld.
//!
//! The table is in memory. The owner believes nothing of the cache after a crash until the transfer is over.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use block::{Buffer, Data, Device, Error, ErrorKind, Extent, Geometry, IoFuture, Mutation, Result};
use futures::future::join_all;
use parking_lot::Mutex;

use super::changed_blocks::ChangedBlocks;
use super::entry::CacheEntry;
use super::{Admission, AdmitToken, Cache, Inner};

/// A read that misses more blocks than this goes to the base.
const BLOCKS_FROM_OTHER_MAX: u64 = 8;

const NONE: u8 = 0;
const WITHHELD: u8 = 1;
const GUARDED: u8 = 2;
const SETTLING: u8 = 3;

/// The cache that the volume had at another host, as it was when the volume came from there.
pub trait OtherCache: Send + Sync {
    /// Whether it may have `block`. It does not wait.
    fn may_have(&self, block: u64) -> bool;

    /// The bytes of `block`, if they can be had there.
    fn read(&self, block: u64) -> IoFuture<'_, Option<Buffer>>;
}

/// What a transfer has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferStatus {
    /// Whether the guest goes past the cache.
    pub is_withheld: bool,
    /// Blocks that have come and were taken.
    pub taken: u64,
    /// Blocks that have come, and that the guest had changed.
    pub outdated: u64,
    /// Blocks that have come, and that had come before or were read from the base meanwhile.
    pub present: u64,
    /// Blocks of the guest's reads that the other host has answered.
    pub read_from_other: u64,
    /// Blocks that were dropped because the guest had changed them.
    pub dropped: u64,
    /// Blocks that are kept as changed.
    pub changed: u64,
    /// What that takes in memory, in bytes.
    pub memory_bytes: u64,
}

/// What the cache knows of its transfer.
#[derive(Default)]
pub(super) struct Transfer {
    state: AtomicU8,
    changed: Mutex<Option<ChangedBlocks>>,
    other: Mutex<Option<Arc<dyn OtherCache>>>,
    taken: AtomicU64,
    outdated: AtomicU64,
    present: AtomicU64,
    read_from_other: AtomicU64,
    dropped: AtomicU64,
}

impl Transfer {
    fn is(&self, state: u8) -> bool {
        self.state.load(Ordering::SeqCst) == state
    }

    pub(super) fn is_withheld(&self) -> bool {
        self.is(WITHHELD)
    }

    pub(super) fn is_settling(&self) -> bool {
        self.is(SETTLING)
    }

    /// The guest is about to change `blocks`, which nobody else changes.
    pub(super) fn note(&self, blocks: Range<u64>) {
        if self.is(GUARDED) {
            self.keep(blocks);
        }
    }

    fn keep(&self, blocks: Range<u64>) {
        if let Some(changed) = self.changed.lock().as_mut() {
            changed.insert_all(blocks);
        }
    }

    fn has_changed(&self, blocks: Range<u64>) -> bool {
        self.changed.lock().as_ref().is_some_and(|changed| changed.contains_any(blocks))
    }

    /// The other cache, if it may have all of `blocks` as the guest has them.
    fn other_with(&self, blocks: Range<u64>) -> Option<Arc<dyn OtherCache>> {
        if !self.is(GUARDED) || blocks.end - blocks.start > BLOCKS_FROM_OTHER_MAX {
            return None;
        }
        let other = self.other.lock().clone()?;
        (!self.has_changed(blocks.clone()) && blocks.into_iter().all(|block| other.may_have(block))).then_some(other)
    }
}

impl Cache {
    /// A transfer into this cache begins. Nobody uses it yet. With `is_withheld` the guest goes past it until [`attach`](Self::attach). At
    /// most `changed_max` changed blocks are kept as such; with more it is a bit for each block of the volume.
    pub fn begin_transfer(&self, is_withheld: bool, changed_max: usize) {
        let (transfer, blocks) = (&self.inner.transfer, self.inner.block.count(self.inner.volume));
        *transfer.changed.lock() = Some(ChangedBlocks::new(blocks, changed_max));
        transfer.state.store(if is_withheld { WITHHELD } else { GUARDED }, Ordering::SeqCst);
    }

    /// What its base takes.
    #[must_use]
    pub fn base_geometry(&self) -> Geometry {
        self.inner.base.device().geometry()
    }

    /// Lets the cache reach its base, which it was opened without, by `base`; or let go of it. Nobody uses it.
    pub fn reach_base_by(&self, base: Device) {
        self.inner.base.reach_by(base);
        // Others have written to it since: the next flush is to cover that.
        self.inner.base.note_written();
    }

    /// From now on blocks that the guest misses are read from the other host, if nothing is withheld.
    pub fn reach_other_by(&self, other: Option<Arc<dyn OtherCache>>) {
        *self.inner.transfer.other.lock() = other;
    }

    /// Takes a block that has come from the other host. It goes before any other block does, and no other goes for it. Whoever calls it waits
    /// for its end.
    ///
    /// # Errors
    /// What the partition says.
    pub async fn take(&self, block: u64, bytes: Data) -> Result<Admission> {
        self.inner.check_block(block, &bytes)?;
        self.inner.take(block, bytes, false).await
    }

    /// The same of a block that the guest has asked for since the list was made: another goes for it, and it does not go first.
    ///
    /// # Errors
    /// What the partition says.
    pub async fn take_used(&self, block: u64, bytes: Data) -> Result<Admission> {
        self.inner.check_block(block, &bytes)?;
        self.inner.take(block, bytes, true).await
    }

    /// Drops a block: the guest has changed it at the other host. Nobody uses the cache yet.
    ///
    /// # Errors
    /// What the partition says.
    pub async fn invalidate(&self, block: u64) -> Result<()> {
        if block >= self.inner.block.count(self.inner.volume) {
            return Ok(());
        }
        let inner = Arc::clone(&self.inner);
        let dropped = async move {
            let _guard = inner.blocks.exclusive(inner.extent_of(block)).await;
            // What somebody has read of it meanwhile is not admitted either.
            inner.write_stamps.raise(block);
            inner.drop_held(block).await
        };
        self.to_its_end(dropped).await
    }

    /// Does `work` to its end, also if nobody waits for it any more: a place is not left between two states.
    async fn to_its_end<T: Send + 'static>(&self, work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
        let lost = |_| Error::new(ErrorKind::Disconnected, "the process ends");
        env::spawn_with_result(&*self.inner.env, work).await.map_err(lost)?
    }

    /// Whether it has the whole of `block`.
    #[must_use]
    pub fn has(&self, block: u64) -> bool {
        let inner = &self.inner;
        inner.find(block).is_some_and(|found| inner.all_sectors(block) & !found.valid == 0)
    }

    /// Whether the guest has changed `block` since the transfer began: it is not taken any more.
    #[must_use]
    pub fn has_changed(&self, block: u64) -> bool {
        self.inner.transfer.has_changed(block..block + 1)
    }

    /// Which bytes of the volume `block` is.
    #[must_use]
    pub fn extent_of(&self, block: u64) -> Extent {
        self.inner.extent_of(block)
    }

    /// Whether the base works at something for the guest.
    #[must_use]
    pub fn serves_base(&self) -> bool {
        self.inner.guest_at_base.load(Ordering::SeqCst) > 0
    }

    /// Admits the whole of `block` as [`admit`](Self::admit) does, but before no other and for no other.
    ///
    /// # Errors
    /// Invalid if there is no such block of so many bytes; otherwise what the partition says.
    pub async fn warm(&self, block: u64, bytes: Data, token: AdmitToken) -> Result<Admission> {
        let extent = self.inner.check_block(block, &bytes)?;
        let inner = Arc::clone(&self.inner);
        let warmed = async move {
            let _guard = inner.blocks.exclusive(extent).await;
            inner.admit_last(block, &Mutation::data(extent.offset, bytes), token.stamp).await
        };
        self.to_its_end(warmed).await
    }

    /// Everything has come: the guest goes through the cache from now on, and what it has changed meanwhile is dropped when it asks for it.
    pub async fn attach(&self) {
        let inner = &self.inner;
        let before = inner.transfer.state.compare_exchange(WITHHELD, SETTLING, Ordering::SeqCst, Ordering::SeqCst);
        if before.is_ok() {
            // Who began to change the base before has ended.
            inner.changes_end().await;
        }
    }

    /// The transfer is over: what the guest had changed is dropped, and nothing is kept any more.
    ///
    /// # Errors
    /// What the partition says. The cache still drops what is asked for.
    pub async fn end_transfer(&self) -> Result<()> {
        self.attach().await;
        let (inner, mut from) = (&self.inner, 0);
        while inner.transfer.is_settling() {
            let changed = inner.transfer.changed.lock().as_ref().and_then(|changed| changed.next(&mut from));
            let Some(block) = changed else { break };
            inner.settle_block(block).await?;
        }
        inner.transfer.state.store(NONE, Ordering::SeqCst);
        self.reach_other_by(None);
        *inner.transfer.changed.lock() = None;
        Ok(())
    }

    /// What the transfer has done.
    #[must_use]
    pub fn transfer_status(&self) -> TransferStatus {
        let transfer = &self.inner.transfer;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let changed = transfer.changed.lock();
        TransferStatus {
            is_withheld: transfer.is_withheld(),
            taken: read(&transfer.taken),
            outdated: read(&transfer.outdated),
            present: read(&transfer.present),
            read_from_other: read(&transfer.read_from_other),
            dropped: read(&transfer.dropped),
            changed: changed.as_ref().map_or(0, ChangedBlocks::len),
            memory_bytes: changed.as_ref().map_or(0, |changed| changed.memory_bytes() as u64),
        }
    }
}

impl Inner {
    async fn take(&self, block: u64, bytes: Data, is_used: bool) -> Result<Admission> {
        let extent = self.extent_of(block);
        let _guard = self.blocks.exclusive(extent).await;
        let transfer = &self.transfer;
        // Of what is withheld the guest's changes are dropped afterwards. Once they are, nothing may come any more.
        let is_outdated = match transfer.state.load(Ordering::SeqCst) {
            WITHHELD => false,
            GUARDED => transfer.has_changed(block..block + 1),
            _ => true,
        };
        if is_outdated {
            transfer.outdated.fetch_add(1, Ordering::Relaxed);
            return Ok(Admission::Outdated);
        }
        let stamp = self.write_stamps.get(block);
        let data = Mutation::data(extent.offset, bytes);
        let admission = match is_used {
            true => self.admit_part(block, &data, stamp).await?,
            false => self.admit_last(block, &data, stamp).await?,
        };
        let counter = match admission {
            Admission::Admitted => &transfer.taken,
            _ => &transfer.present,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        Ok(admission)
    }

    /// Drops `block`, which the caller has. What is dirty stays: that is newer than anything else.
    async fn drop_held(&self, block: u64) -> Result<()> {
        if self.is_closed.load(Ordering::SeqCst) {
            // Its partition may be another's by now.
            return Ok(());
        }
        let Some(found) = self.find(block) else { return Ok(()) };
        let dropped = match self.drops(&found) {
            true => self.forget(found.place).await,
            false => {
                self.record.with(|_, index| index.remove_unrecorded(found.place, u8::MAX));
                self.set(found.place, CacheEntry::new(block, found.entry.dirty(), found.entry.dirty())).await
            }
        };
        dropped.inspect_err(|error| self.fail(error))?;
        self.transfer.dropped.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Drops what the guest has changed of `extent` while the cache was withheld from it. Where that fails the flash has failed: nothing
    /// clean of it is read then, and whoever changes the base waits until that is on record.
    pub(super) async fn settle_all(&self, extent: Extent) {
        let blocks = self.block.indices_of(extent);
        if !self.transfer.has_changed(blocks.clone()) {
            return;
        }
        for block in blocks {
            if self.transfer.has_changed(block..block + 1)
                && let Err(error) = self.settle_block(block).await
            {
                assert!(self.failure.has_failed(), "a block that is old stays where it is read");
                tracing::debug!(block, error = error.chain(), "an old block of a cache is not dropped");
            }
        }
    }

    async fn settle_block(&self, block: u64) -> Result<()> {
        let _guard = self.blocks.exclusive(self.extent_of(block)).await;
        if self.transfer.has_changed(block..block + 1) {
            let dropped = self.drop_held(block).await;
            // What a flash that has failed still has of it the next process must not believe.
            self.revoke(block..block + 1).await.map_err(|error| dropped.err().unwrap_or(error))?;
            // Only now: until the block is dropped the table alone says that it is old.
            self.transfer.changed.lock().as_mut().into_iter().for_each(|changed| changed.remove(block));
        }
        Ok(())
    }

    /// A change while the guest goes past the cache. None if it does not any more.
    pub(super) async fn write_withheld(&self, mutation: &Mutation) -> Option<Result<()>> {
        let extent = mutation.extent();
        let _guard = self.blocks.shared(extent).await;
        if !self.transfer.is_withheld() {
            return None;
        }
        // Before the base is changed.
        let _changing = self.changing(extent);
        self.transfer.keep(self.block.indices_of(extent));
        let _at_base = self.at_base();
        Some(self.base.write(mutation.clone()).await)
    }

    /// What `extent`, of which the cache has nothing, has at the other host, if it can be had there.
    pub(super) async fn read_other(self: &Arc<Self>, extent: Extent) -> Option<Buffer> {
        let other = self.transfer.other_with(self.block.indices_of(extent))?;
        let each = self.parts_of(extent).map(|(block, part)| {
            let other = &other;
            async move { Some((block, part, other.read(block).await.ok()??)) }
        });
        let read: Option<Vec<_>> = join_all(each).await.into_iter().collect();
        let mut buffer = Buffer::unpooled(extent.length.as_usize());
        for (block, part, bytes) in read? {
            let whole = self.extent_of(block);
            if bytes.len() != whole.length.as_usize() {
                return None;
            }
            let (from, to) = ((part.offset - whole.offset).as_usize(), (part.offset - extent.offset).as_usize());
            let length = part.length.as_usize();
            buffer[to..to + length].copy_from_slice(&bytes[from..from + length]);
            self.transfer.read_from_other.fetch_add(1, Ordering::Relaxed);
            let inner = Arc::clone(self);
            self.env.spawn(Box::pin(async move {
                if let Err(error) = inner.take(block, bytes.freeze(), true).await {
                    tracing::debug!(error = error.chain(), "what was read at the other host is not cached");
                }
            }));
        }
        Some(buffer)
    }

    /// Reads past the cache.
    pub(super) async fn read_withheld(&self, extent: Extent, buffer: Buffer) -> Result<Buffer> {
        self.counters.bypassed.fetch_add(1, Ordering::Relaxed);
        let _at_base = self.at_base();
        self.base.device().read(extent.offset, buffer).await
    }
}
