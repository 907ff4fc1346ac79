//! What the owner changes while the guest runs: mode, size and epoch; and how the cache is emptied and left.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use block::{Buffer, Bytes, Error, ErrorKind, Mutation, Result};
use futures::future::join_all;

use super::entry::{CacheEntry, runs_of};
use super::index::used_places;
use super::table::Moved;
use super::write::try_all;
use super::{Cache, CacheHeader, CacheMode, Inner};
use crate::store::{Entry, Record};

/// So many dirty places of those that are taken away are cleaned at once.
const CLEANED_AT_ONCE: usize = 64;
/// With one hold of the record so many places are looked at,
const LOOK_STEP: u64 = 4096;
/// so many are added or taken away,
const RESIZED_AT_ONCE: usize = 64 << 10;
/// and so many slots of a table that is made anew are brought over.
const MOVED_AT_ONCE: usize = 8192;
/// So long whoever walks over all places leaves the record alone between two holds.
const REST: Duration = Duration::from_millis(1);

impl Cache {
    /// From now on it is believed in this epoch, and in no other. Done means durable. The owner calls it when the volume gets a new epoch
    /// and stays here.
    ///
    /// # Errors
    /// Fenced if the epoch is an older one; otherwise what the partition says.
    pub async fn set_epoch(&self, epoch: u64) -> Result<()> {
        let now = self.inner.header.lock().identity.epoch;
        if epoch < now {
            let context = format!("{} is in epoch {now}, not {epoch}", self.inner.partition.name());
            return Err(Error::new(ErrorKind::Fenced, context));
        }
        self.inner.store_header(|header| header.identity.epoch = epoch).await
    }

    /// Changes what it does with writes. From write-back it returns once all that was dirty is durable in the base.
    ///
    /// # Errors
    /// What base and partition say. Then the new mode holds, and something is still dirty: [`drain`](Self::drain) tries again.
    pub async fn set_mode(&self, mode: CacheMode) -> Result<()> {
        let inner = &self.inner;
        inner.mode.store(mode as u8, Ordering::SeqCst);
        inner.is_drained.store(false, Ordering::SeqCst);
        inner.is_draining.store(false, Ordering::SeqCst);
        if mode == CacheMode::WriteBack {
            return Ok(());
        }
        inner.empty().await
    }

    /// Writes all that is dirty to the base, and flushes until neither map names any of it. From the beginning on nothing becomes dirty,
    /// until [`set_mode`](Self::set_mode) says so again. Afterwards the base alone is the volume, and the cache may be taken away.
    ///
    /// # Errors
    /// What base and partition say. What could not be written is still in the cache.
    pub async fn drain(&self) -> Result<()> {
        self.inner.is_drained.store(false, Ordering::SeqCst);
        self.inner.is_draining.store(true, Ordering::SeqCst);
        self.inner.empty().await?;
        self.inner.is_drained.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Whether the base has everything, durably or not.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.inner.is_clean()
    }

    /// Whether neither map names anything dirty: the base alone is the volume, whatever becomes of the partition.
    #[must_use]
    pub fn holds_nothing(&self) -> bool {
        self.inner.holds_nothing()
    }

    /// Whether the cache may be taken away: it holds nothing, or everything went to the base since it is drained, and its flash has failed.
    /// Whoever takes it away then has it on record first that nothing of it counts.
    #[must_use]
    pub fn may_be_taken_away(&self) -> bool {
        self.inner.holds_nothing() || self.inner.is_drained.load(Ordering::SeqCst)
    }

    /// Stops all that works in the background and waits for its end. Afterwards nothing is admitted. The guest has left.
    pub async fn close(&self) {
        let inner = &self.inner;
        inner.is_closed.store(true, Ordering::SeqCst);
        inner.wake.notify_one();
        inner.admissions.ended().await;
        // Of a transfer something may still be dropped or taken.
        inner.changes_end().await;
        drop(inner.cleaner.lock().await);
    }

    /// Uses `places` places from now on. With fewer, what the others hold goes to the base first, if it is dirty, and is dropped. The tables
    /// are made anew in steps, none of which a request waits for longer than for a write of the flash.
    ///
    /// # Errors
    /// Invalid if it is none or more than the capacity; otherwise what base and partition say. Then the old number holds.
    pub async fn resize(&self, places: u64) -> Result<()> {
        let inner = &self.inner;
        let header = self.header();
        if !(1..=header.capacity).contains(&places) {
            let context = format!("a cache with room for {} places cannot have {places}", header.capacity);
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        inner.failure.check(inner.partition.name())?;
        // Nobody else changes the number meanwhile.
        let _cleaner = inner.cleaner.lock().await;
        let before = inner.header.lock().places;
        // One that was called off has left two tables.
        inner.move_table().await;
        if places < before {
            let shrunk = inner.shrink(places).await;
            if shrunk.is_err() {
                inner.resize_index(before).await;
                return shrunk;
            }
        }
        // Before a place is used that the old header does not know.
        inner.store_header(|header| header.places = places).await?;
        inner.record.with(|_, index| index.begin_table(places));
        inner.resize_index(places).await;
        while !inner.record.with(|_, index| index.trim_some(RESIZED_AT_ONCE)) {
            inner.rest().await;
        }
        inner.move_table().await;
        Ok(())
    }
}

impl Inner {
    async fn empty(&self) -> Result<()> {
        // Who began before may still make something dirty.
        self.changes_end().await;
        loop {
            // Whoever closes the cache waits for this, and gives its partition away afterwards.
            let mut cleaner = self.cleaner.lock().await;
            if self.holds_nothing() && !self.record.has_pins() {
                return Ok(());
            }
            self.check_emptying()?;
            self.take_back().await?;
            self.clean_all(&mut cleaner).await?;
            if self.holds_nothing() {
                return Ok(());
            }
            match self.flush_record().await {
                Ok(()) => {}
                // Its durable map stays as it is. What it names is in the base.
                Err(_) if self.record.has_failed_store() => {
                    self.base.flush().await?;
                    if self.is_clean() {
                        return Ok(());
                    }
                }
                Err(_) if self.record.has_pins() && !self.failure.has_failed() => {
                    // The base may have lost something: that is dirty again, and is written back once the base takes it.
                    self.flush_base().await?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes back what the base may have lost, as it reads now: it is dirty again. Nothing is locked by the caller.
    pub(super) async fn take_back(&self) -> Result<()> {
        // A flash that has failed takes nothing.
        while self.record.has_pins() && !self.failure.has_failed() {
            let Some((place, entry)) = self.record.first_pinned() else { return Ok(()) };
            let block = entry.block();
            let all = self.extent_of(block);
            let _guard = self.blocks.exclusive(all).await;
            // Somebody may have done it meanwhile.
            let Some(entry) = self.record.pinned_state(place) else { continue };
            if let Some(found) = self.find(block).filter(|found| u64::from(found.place) == place) {
                for run in runs_of(entry.dirty() & !found.valid & self.all_sectors(block)) {
                    let part = self.extent_of_sectors(block, &run, all);
                    let read = self.base.device().read(part.offset, Buffer::unpooled(part.length.as_usize())).await?;
                    let written = self.write_place(&Mutation::data(part.offset, read.freeze()), found.place).await;
                    written.inspect_err(|error| self.fail(error))?;
                }
                let entry = CacheEntry::new(block, found.valid | entry.valid(), entry.dirty());
                self.set(found.place, entry).await.inspect_err(|error| self.fail(error))?;
                self.record.with(|_, index| index.remove_unrecorded(found.place, u8::MAX));
                self.place_stamps.raise(place);
            }
            self.record.unpin(place);
        }
        Ok(())
    }

    async fn store_header(&self, change: impl FnOnce(&mut CacheHeader)) -> Result<()> {
        let _turn = self.header_turn.lock().await;
        let mut header = *self.header.lock();
        change(&mut header);
        self.flash.write(Mutation::data(Bytes::ZERO, header.encode().freeze()).with_fua(true)).await?;
        *self.header.lock() = header;
        Ok(())
    }

    /// Lets the guest have the record. Who takes it again and again and only yields between has it most of the time: a request takes it many
    /// times, and waits each time until whoever has it is suspended.
    pub(super) async fn rest(&self) {
        self.env.sleep(REST).await;
    }

    /// The index has so many places from now on.
    async fn resize_index(&self, places: u64) {
        while !self.record.with(|states, index| index.resize_some(states, places, RESIZED_AT_ONCE as u64)) {
            self.rest().await;
        }
    }

    /// Brings the table of blocks to its end that is being made anew.
    async fn move_table(&self) {
        loop {
            let moved = self.record.with(|states, index| index.move_table(states, MOVED_AT_ONCE));
            // Its memory is given back when nobody is held up.
            if let Moved::All(_memory) = moved {
                return;
            }
            self.rest().await;
        }
    }

    /// The places from `from` on that hold a block, some at a time, and where it goes on.
    fn some_used(&self, from: u64) -> (Vec<u64>, u64) {
        self.record.look(|states| {
            let end = (from + LOOK_STEP).min(states.len());
            (used_places(states, from).take_while(|place| *place < end).collect(), end)
        })
    }

    /// Empties the places from `places` on. Nobody cleans meanwhile.
    async fn shrink(&self, places: u64) -> Result<()> {
        self.resize_index(places).await;
        // Who has got one of them before has recorded it afterwards.
        self.changes_end().await;
        let all = self.record.look(|states| states.len());
        let mut next = places;
        while next < all {
            let (some, end) = self.some_used(next);
            next = end;
            for some in some.chunks(CLEANED_AT_ONCE) {
                let dirty = |place: &u64| {
                    let entry = self.record.look(|states| states.get(*place));
                    (entry.dirty() != 0).then(|| entry.block()..entry.block() + 1)
                };
                self.clean_runs(some.iter().filter_map(dirty).collect()).await?;
            }
            self.rest().await;
        }
        if !self.holds_nothing() {
            self.flush_record().await?;
        }
        let mut next = places;
        while next < all {
            let (some, end) = self.some_used(next);
            next = end;
            for some in some.chunks(CLEANED_AT_ONCE) {
                // Neighbours are in one sector of the map, which is written once for all of them.
                try_all(join_all(some.iter().map(|place| self.empty_place(*place as u32))).await)?;
            }
            self.rest().await;
        }
        Ok(())
    }

    /// Takes a place from its block, whatever the guest does meanwhile.
    async fn empty_place(&self, place: u32) -> Result<()> {
        loop {
            // A place whose record could not be written may be nobody's for good.
            self.failure.check(self.partition.name())?;
            let entry = self.record.look(|states| states.get(place.into()));
            if entry.is_free() {
                return Ok(());
            }
            let block = entry.block();
            let guard = self.blocks.exclusive(self.extent_of(block)).await;
            let found = self.record.with(|states, index| index.find(states, block));
            let Some(found) = found.filter(|found| found.place == place) else {
                drop(guard);
                self.changes_end().await;
                continue;
            };
            if found.entry.dirty() == 0 && self.drops(&found) {
                return self.forget(place).await.inspect_err(|error| self.fail(error));
            }
            // The guest has written to it since: once more, and with its writes held up.
            if found.entry.dirty() != 0 {
                self.clean_held(block, &found).await?;
            }
            self.flush_record().await?;
            return self.forget(place).await.inspect_err(|error| self.fail(error));
        }
    }
}

/// Forgets what is only cached, in the record. A place in which the durable map has something dirty keeps its block until the next flush.
pub(super) async fn forget_clean(record: &Record<CacheEntry>) -> Result<()> {
    let kept: BTreeSet<u64> = record.only_durable().into_iter().collect();
    let mut next = 0;
    while let Some(place) = record.look(|states| used_places(states, next).next()) {
        let (run, entry) = record.look(|states| {
            let entry = states.get(place);
            if entry.dirty() != 0 {
                return (place..place + 1, entry.lasting());
            }
            if kept.contains(&place) {
                return (place..place + 1, CacheEntry::new(entry.block(), 0, 0));
            }
            let is_clean =
                |place: &u64| *place < states.len() && states.get(*place).dirty() == 0 && !kept.contains(place);
            (place..place + (place..).take_while(is_clean).count() as u64, CacheEntry::FREE)
        });
        next = run.end;
        record.set(run, entry).await?;
    }
    Ok(())
}
