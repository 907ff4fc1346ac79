//! What a move of the cache needs: which blocks are hot, what they hold, how they get into another cache, and which the guest has changed
//! since (Firepan, sections 3.1 to 3.3).

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use block::{Buffer, Data, Error, ErrorKind, Extent, Result};
use parking_lot::Mutex;

use super::entry::CacheEntry;
use super::index::used_places;
use super::{Admission, AdmitToken, Cache, Inner, Invalidations};

/// So many places are looked at with one hold of the record.
const LOOK_STEP: u64 = 4096;

/// Who hears which blocks the guest changes.
#[derive(Default)]
pub(super) struct Watch {
    is_on: AtomicBool,
    state: Mutex<WatchState>,
}

#[derive(Default)]
struct WatchState {
    limit: usize,
    changed: Invalidations,
    /// The blocks of the last hits, and where the next one goes.
    hits: Vec<u64>,
    next_hit: usize,
}

/// So many hits are remembered.
const HITS_MAX: usize = 4096;

impl Watch {
    /// The guest is about to change `blocks`, or has done it.
    pub(super) fn note(&self, blocks: Range<u64>) {
        if !self.is_on.load(Ordering::SeqCst) {
            return;
        }
        let WatchState { limit, changed, .. } = &mut *self.state.lock();
        // What was named last need not be named again.
        let first = changed.blocks.len().saturating_sub((blocks.end - blocks.start) as usize);
        let is_named = changed.blocks[first..].iter().copied().eq(blocks.clone());
        if changed.overflowed || is_named {
            return;
        }
        if blocks.end - blocks.start > (*limit - changed.blocks.len()) as u64 {
            changed.overflowed = true;
            changed.blocks = Vec::new();
        } else {
            changed.blocks.extend(blocks);
        }
    }

    /// The flash has answered a read of `block`.
    pub(super) fn note_hit(&self, block: u64) {
        if !self.is_on.load(Ordering::SeqCst) {
            return;
        }
        let WatchState { hits, next_hit, .. } = &mut *self.state.lock();
        match hits.get_mut(*next_hit) {
            Some(hit) => *hit = block,
            None => hits.push(block),
        }
        *next_hit = (*next_hit + 1) % HITS_MAX;
    }
}

impl Cache {
    /// The numbers of at most `max` cached blocks, those first that are worth most to the policy. What changes meanwhile may be missing, or
    /// there twice.
    #[must_use]
    pub fn hottest(&self, max: usize) -> Vec<u64> {
        let record = &self.inner.record;
        let order = record.with(|_, index| index.order());
        let places = order.hottest(max);
        drop(order);
        let mut blocks = Vec::with_capacity(places.len());
        for places in places.chunks(LOOK_STEP as usize) {
            record.look(|states| {
                let entries = places.iter().map(|place| states.get(u64::from(*place)));
                blocks.extend(entries.filter(|entry| !entry.is_free()).map(CacheEntry::block));
            });
        }
        blocks
    }

    /// The numbers of all cached blocks in any order. What changes meanwhile may be missing, or there twice.
    #[must_use]
    pub fn cached(&self) -> Vec<u64> {
        let (record, mut next, mut blocks) = (&self.inner.record, 0, Vec::new());
        loop {
            let goes_on = record.look(|states| {
                let end = next + LOOK_STEP;
                let places = used_places(states, next).take_while(|place| *place < end);
                blocks.extend(places.map(|place| states.get(place).block()));
                next = end;
                end < states.len()
            });
            if !goes_on {
                return blocks;
            }
        }
    }

    /// Hands `then` the bytes of a block that is cached whole, dirty or not, while no write to it is under way and none begins. What the
    /// guest has changed in the block is therefore named by [`invalidations`](Self::invalidations) already, or after `then` has returned.
    /// Nothing is counted. `then` has an error of what only the cache has, if the partition fails.
    pub async fn peek_then<T>(&self, block: u64, then: impl FnOnce(Result<Option<Buffer>>) -> T) -> T {
        let inner = &self.inner;
        if block >= inner.block.count(inner.volume) {
            return then(Ok(None));
        }
        let _guard = inner.blocks.exclusive(inner.extent_of(block)).await;
        then(inner.read_whole(block).await)
    }

    /// Taken before the bytes of `block` are read anywhere, for [`admit`](Self::admit).
    #[must_use]
    pub fn token(&self, block: u64) -> AdmitToken {
        AdmitToken { stamp: self.inner.write_stamps.get(block) }
    }

    /// Admits `bytes` as those of the whole of `block`, unless the guest has written to it since `token` was taken.
    ///
    /// # Errors
    /// Invalid if there is no such block of so many bytes; otherwise what the partition says.
    pub async fn admit(&self, block: u64, bytes: Data, token: AdmitToken) -> Result<Admission> {
        self.inner.check_block(block, &bytes)?;
        self.inner.admit_whole(block, bytes, token.stamp).await
    }

    /// From now on the blocks that the guest changes are kept for [`invalidations`](Self::invalidations), at most `limit` of them; zero
    /// ends that. The last hits are kept, too.
    pub fn watch_invalidations(&self, limit: usize) {
        let watch = &self.inner.watch;
        *watch.state.lock() = WatchState { limit, ..WatchState::default() };
        watch.is_on.store(limit > 0, Ordering::SeqCst);
    }

    /// The blocks that the guest has changed since this was last called. A block is named before its change begins.
    #[must_use]
    pub fn invalidations(&self) -> Invalidations {
        std::mem::take(&mut self.inner.watch.state.lock().changed)
    }

    /// The blocks of the last reads that the flash has answered since [`watch_invalidations`](Self::watch_invalidations), at most 4,096, in
    /// no order. The share of them that another cache has, too, is what its hit rate would be of this one's.
    #[must_use]
    pub fn last_hits(&self) -> Vec<u64> {
        self.inner.watch.state.lock().hits.clone()
    }
}

impl Inner {
    /// The extent of `block`.
    ///
    /// # Errors
    /// Invalid if there is no such block of so many bytes.
    pub(super) fn check_block(&self, block: u64, bytes: &Data) -> Result<Extent> {
        if block < self.block.count(self.volume) && self.extent_of(block).length.as_usize() == bytes.len() {
            return Ok(self.extent_of(block));
        }
        let context = format!("the cached volume has no block {block} of {} bytes", bytes.len());
        Err(Error::new(ErrorKind::Invalid, context))
    }

    /// The bytes of a block that is cached whole, dirty or not. Who asks holds the block's lock.
    async fn read_whole(&self, block: u64) -> Result<Option<Buffer>> {
        let (extent, all) = (self.extent_of(block), self.all_sectors(block));
        let usable = |valid: u8, dirty: u8| if self.failure.has_failed() { dirty } else { valid };
        let found = self.find(block).filter(|found| all & !usable(found.valid, found.entry.dirty()) == 0);
        let Some(found) = found else { return Ok(None) };
        match self.read_place(found.place, extent, Buffer::unpooled(extent.length.as_usize())).await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) => {
                self.fail(&error);
                if found.entry.dirty() == 0 { Ok(None) } else { Err(self.lost(extent, error)) }
            }
        }
    }
}
