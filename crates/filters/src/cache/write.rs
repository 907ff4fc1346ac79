//! How a cache takes changes.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{
    BlockDevice, Buffer, Bytes, Device, Extent, ExtentStatus, Geometry, IoFuture, Mutation, MutationKind, Result,
};
use futures::future::{join_all, try_join_all};

use super::entry::{CacheEntry, runs_of};
use super::index::used_places;
use super::{CacheMode, Found, Inner};
use crate::translate::moved;

/// So many blocks or places are looked at under one lock.
const LOOK_STEP: u64 = 1024;
/// With so many places whose valid sectors are not recorded, some are recorded.
const UNRECORDED_MAX: usize = 1024;
/// So many of them at once.
const RECORDED_AT_ONCE: usize = 256;

/// Blocks that change: those who read them without a lock see that, before it begins and after it has ended.
pub(super) struct Changing<'a> {
    inner: &'a Inner,
    blocks: Range<u64>,
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.inner.write_stamps.raise_all(self.blocks.clone());
        // Who has heard of it before may have read the base before it was changed.
        self.inner.watch.note(self.blocks.clone());
    }
}

impl Inner {
    pub(super) fn changing(&self, extent: Extent) -> Changing<'_> {
        let blocks = self.block.indices_of(extent);
        self.write_stamps.raise_all(blocks.clone());
        self.watch.note(blocks.clone());
        self.transfer.note(blocks.clone());
        Changing { inner: self, blocks }
    }

    pub(super) async fn write(&self, mutation: Mutation) -> Result<()> {
        let fua = mutation.fua;
        if fua {
            self.failure.check_base()?;
        }
        let extent = mutation.extent();
        self.counters.guest_written.fetch_add(extent.length.get(), Ordering::Relaxed);
        self.change_now(mutation.with_fua(false), extent).await?;
        if fua { self.flush().await } else { Ok(()) }
    }

    /// Changes the volume, where a transfer of the cache has it changed just now.
    async fn change_now(&self, mutation: Mutation, extent: Extent) -> Result<()> {
        if self.transfer.is_withheld()
            && let Some(written) = self.write_withheld(&mutation).await
        {
            return written;
        }
        if self.transfer.is_settling() {
            self.settle_all(extent).await;
        }
        self.change(mutation, extent).await
    }

    async fn change(&self, mutation: Mutation, extent: Extent) -> Result<()> {
        let is_data = matches!(mutation.kind(), MutationKind::Data(_));
        let mut has_room = true;
        if is_data && self.takes_dirty() {
            if self.is_dirty_over(extent).is_some() {
                let _guard = self.blocks.shared(extent).await;
                let _changing = self.changing(extent);
                // Before the place is written: what the base has got of it is older from here on.
                if let Some(found) = self.is_dirty_over(extent).filter(|_| self.takes_dirty()) {
                    self.record.with(|_, index| index.written.remove(&found.place));
                    self.counters.writes_back.fetch_add(1, Ordering::Relaxed);
                    return self.write_over(&mutation, found.place).await;
                }
            } else {
                has_room = self.make_room().await;
            }
        }
        let guard = self.blocks.exclusive(self.whole_blocks(extent)).await;
        let changing = self.changing(extent);
        let written = match is_data && has_room && self.takes_dirty() {
            true => self.write_back_all(mutation).await,
            false => self.write_direct(mutation).await,
        };
        drop(changing);
        drop(guard);
        if self.record.with(|_, index| index.unrecorded_count()) >= UNRECORDED_MAX {
            self.record_some().await;
        }
        written
    }

    /// The place of the one block of `extent`, if all of its sectors that are touched are dirty there.
    fn is_dirty_over(&self, extent: Extent) -> Option<Found> {
        let block = self.block_of(extent.offset);
        if !self.extent_of(block).contains(extent) {
            return None;
        }
        let (touched, _) = self.sectors_of(extent);
        self.find(block).filter(|found| touched & !found.entry.dirty() == 0)
    }

    async fn write_over(&self, part: &Mutation, place: u32) -> Result<()> {
        self.write_place(part, place).await.map_err(|error| {
            self.fail(&error);
            self.cannot_write_over(error)
        })
    }

    /// Writes data into the flash. The caller has the blocks alone.
    async fn write_back_all(&self, mutation: Mutation) -> Result<()> {
        let extent = mutation.extent();
        if self.extent_of(self.block_of(extent.offset)).contains(extent) {
            return self.write_back_part(mutation, self.block_of(extent.offset)).await;
        }
        let parts = self.parts_of(extent).map(|(block, part)| self.write_back_part(mutation.slice(part), block));
        try_all(join_all(parts).await)
    }

    async fn write_back_part(&self, part: Mutation, block: u64) -> Result<()> {
        let Some(becoming_dirty) = self.begin_dirty() else { return self.write_direct(part).await };
        let found = self.find(block);
        let place = match found {
            Some(found) => found.place,
            None => match self.claim().await {
                Some(place) => place,
                None => {
                    drop(becoming_dirty);
                    return self.write_direct(part).await;
                }
            },
        };
        let found_entry = found.map_or(CacheEntry::new(block, 0, 0), |found| found.entry);
        let (valid, dirty) = (found.map_or(0, |found| found.valid), found_entry.dirty());
        let (touched, whole) = self.sectors_of(part.extent());
        let give_up = || {
            if found.is_none() {
                self.record.with(|_, index| index.places.give_back(place.into()));
            }
        };
        let data = match self.with_whole_sectors(&part, block, touched & !whole & !valid).await {
            Ok(data) => data,
            Err(error) => {
                give_up();
                return Err(error);
            }
        };
        // Sectors that read as the base's become dirty first: a crash leaves them dirty with the base's bytes, and not valid with new ones.
        let before = CacheEntry::new(block, valid, dirty | touched & valid);
        if before.dirty() != dirty
            && let Err(error) = self.set(place, before).await
        {
            self.fail(&error);
            // Dirty or not, their bytes are the base's.
            self.doubt(block, 0);
            return Err(error);
        }
        self.record.with(|_, index| {
            index.written.remove(&place);
            index.remove_unrecorded(place, if before.dirty() == dirty { 0 } else { valid });
        });
        if let Err(error) = self.write_place(&data, place).await {
            self.fail(&error);
            give_up();
            if before.dirty() & touched != 0 {
                return Err(self.cannot_write_over(error));
            }
            drop(becoming_dirty);
            return self.write_direct(part).await;
        }
        let after = CacheEntry::new(block, valid | touched, dirty | touched);
        if (after.valid(), after.dirty()) != (valid, before.dirty()) || found.is_none() {
            // The record may have it or not: the base must not be written here, or the next process might read what is older.
            if let Err(error) = self.set(place, after).await {
                self.fail(&error);
                self.doubt(block, touched & !before.dirty());
                return Err(error);
            }
            self.record.with(|_, index| match found {
                None => index.insert(place, block),
                Some(_) => index.remove_unrecorded(place, u8::MAX),
            });
        }
        self.counters.writes_back.fetch_add(1, Ordering::Relaxed);
        if self.wants_write_back() {
            self.wake.notify_one();
        }
        Ok(())
    }

    /// `part` with the rest of those sectors of `missing` that it touches only in part: the place does not have them.
    async fn with_whole_sectors(&self, part: &Mutation, block: u64, missing: u8) -> Result<Mutation> {
        let extent = part.extent();
        let MutationKind::Data(data) = part.kind() else { unreachable!("only data is written into a place") };
        if missing == 0 {
            return Ok(part.clone());
        }
        let all = self.extent_of(block);
        let edges = runs_of(missing).flat_map(|run| run.map(|sector| sector..sector + 1));
        let edges: Vec<Extent> = edges.map(|sector| self.extent_of_sectors(block, &sector, all)).collect();
        let start = edges.iter().map(|edge| edge.offset).chain([extent.offset]).min().unwrap_or(extent.offset);
        let end = edges.iter().map(|edge| edge.end()).chain([extent.end()]).max().unwrap_or(extent.end());
        let whole = Extent::between(start, end);
        let base = self.base.device();
        let reads = edges.iter().map(|edge| base.read(edge.offset, Buffer::unpooled(edge.length.as_usize())));
        let mut buffer = Buffer::unpooled(whole.length.as_usize());
        for (edge, read) in edges.iter().zip(try_join_all(reads).await?) {
            let at = (edge.offset - whole.offset).as_usize();
            buffer[at..at + read.len()].copy_from_slice(&read);
        }
        let at = (extent.offset - whole.offset).as_usize();
        buffer[at..at + data.len()].copy_from_slice(data);
        Ok(Mutation::data(whole.offset, buffer.freeze()))
    }

    /// Changes the base, and what is cached of it. The caller has the blocks alone.
    async fn write_direct(&self, mutation: Mutation) -> Result<()> {
        let extent = mutation.extent();
        let cached = self.cached_in(extent);
        let is_discard = matches!(mutation.kind(), MutationKind::Discard);
        let mutation = if is_discard && cached.iter().any(|found| self.is_dirty_in(extent, found)) {
            // A base may keep what it has in spite of a discard, and that is older than what is forgotten here.
            Mutation::zeroes(extent, true)
        } else {
            mutation
        };
        // Asked once: the mode may change meanwhile.
        let is_data = matches!(mutation.kind(), MutationKind::Data(_));
        let updates = is_data && self.mode() != CacheMode::ReadOnly && self.admits();
        self.disbelieve(extent, &cached, updates).await?;
        let update = mutation.clone();
        let at_base = self.at_base();
        if let Err(error) = self.base.write(mutation).await {
            // Nobody knows what the base has there: what is dirty is not in it, whatever was written back before.
            let places: Vec<u32> = cached.iter().map(|found| found.place).collect();
            self.record.with(|_, index| index.written.retain(|place| !places.contains(place)));
            return Err(error);
        }
        drop(at_base);
        let counter = if updates { &self.counters.writes_through } else { &self.counters.writes_around };
        counter.fetch_add(1, Ordering::Relaxed);
        // What is forgotten may be gone here at once, and what the base had before is older. Where it is not durable there, it stays dirty.
        let is_over_dirty = !is_data && cached.iter().any(|found| self.is_dirty_in(extent, found));
        let forgets = is_over_dirty && self.flush_base().await.is_ok();
        let each = cached.into_iter().map(|found| self.update(&update, found, (updates, forgets)));
        try_all(join_all(each).await)
    }

    /// Before the base is changed: what is clean of it in the cache is not valid any more, also for whoever opens the cache after a crash.
    /// It leaves its place, unless that is updated.
    async fn disbelieve(&self, extent: Extent, cached: &[Found], updates: bool) -> Result<()> {
        let blocks = self.block.indices_of(extent);
        if self.failure.has_failed() {
            return self.revoke(blocks).await;
        }
        let each = cached.iter().copied().map(|found| async move {
            let gone = self.touched_of(extent, &found).0 & !found.entry.dirty();
            self.record.with(|_, index| index.remove_unrecorded(found.place, gone));
            let left = found.entry.valid() & !gone;
            if left == 0 && !updates && self.drops(&found) {
                return self.forget(found.place).await;
            }
            if left == found.entry.valid() {
                return Ok(());
            }
            let set = self.set(found.place, CacheEntry::new(found.entry.block(), left, found.entry.dirty())).await;
            self.place_stamps.raise(found.place.into());
            set
        });
        if let Err(error) = try_all(join_all(each).await) {
            self.fail(&error);
            return self.revoke(blocks).await;
        }
        Ok(())
    }

    /// Whether a place may leave its block: nothing of it is dirty in either map.
    pub(super) fn drops(&self, found: &Found) -> bool {
        found.entry.dirty() == 0 && self.record.with(|_, index| !index.places.is_retired(found.place.into()))
    }

    /// Takes a place from its block, of which nothing is dirty. The caller has the block.
    pub(super) async fn forget(&self, place: u32) -> Result<()> {
        self.record.with(|states, index| index.take_out(states, place, false));
        self.place_stamps.raise(place.into());
        self.set(place, CacheEntry::FREE).await?;
        self.record.with(|_, index| index.places.give_back(place.into()));
        Ok(())
    }

    /// Whether `extent` touches something that the base lacks.
    fn is_dirty_in(&self, extent: Extent, found: &Found) -> bool {
        self.touched_of(extent, found).0 & found.entry.dirty() != 0
    }

    /// The sectors of a found block that `extent` touches, and those that it has whole.
    fn touched_of(&self, extent: Extent, found: &Found) -> (u8, u8) {
        self.part_of(extent, found).map_or((0, 0), |part| self.sectors_of(part))
    }

    fn part_of(&self, extent: Extent, found: &Found) -> Option<Extent> {
        extent.intersection(self.extent_of(found.entry.block()))
    }

    /// After the base was changed: a place gets the same bytes, or forgets what was dirty there and is zeroes in the base, durably.
    async fn update(&self, mutation: &Mutation, found: Found, (updates, forgets): (bool, bool)) -> Result<()> {
        let Some(part) = self.part_of(mutation.extent(), &found) else { return Ok(()) };
        let block = found.entry.block();
        let (touched, whole) = self.sectors_of(part);
        let dirty = touched & found.entry.dirty();
        let (rewritten, cleared) = match mutation.kind() {
            // What the place has in part only and does not know stays invalid.
            MutationKind::Data(_) if updates => (touched & (whole | found.valid), 0),
            MutationKind::Data(_) => (dirty, 0),
            MutationKind::Zeroes { .. } if forgets => (dirty & !whole, dirty & whole),
            MutationKind::Zeroes { .. } => (dirty, 0),
            MutationKind::Discard => (0, 0),
        };
        let pieces = runs_of(rewritten).map(|run| mutation.slice(self.extent_of_sectors(block, &run, part)));
        let writes = pieces.map(|piece| async move { self.write_place(&piece, found.place).await });
        if let Err(error) = try_all(join_all(writes).await) {
            self.fail(&error);
            return if dirty == 0 { Ok(()) } else { Err(self.cannot_write_over(error)) };
        }
        if updates {
            let valid = rewritten & !dirty;
            self.record.with(|_, index| index.add_unrecorded(found.place, valid));
        }
        if cleared == 0 {
            return Ok(());
        }
        let now = self.record.look(|states| states.get(found.place.into()));
        let left = CacheEntry::new(block, now.valid() & !cleared, now.dirty() & !cleared);
        self.record.with(|_, index| index.written.remove(&found.place));
        let set = self.set(found.place, left).await;
        // Whoever still reads these sectors in their place might read what the next write puts there, before that is where others look.
        self.place_stamps.raise(found.place.into());
        set.inspect_err(|error| {
            self.fail(error);
            self.doubt(block, cleared);
        })
    }

    /// The places of blocks that `extent` touches.
    pub(super) fn cached_in(&self, extent: Extent) -> Vec<Found> {
        let blocks = self.block.indices_of(extent);
        let places = self.record.look(|states| states.len());
        let mut found = Vec::new();
        if blocks.end - blocks.start <= places {
            for first in blocks.clone().step_by(LOOK_STEP as usize) {
                let some = first..(first + LOOK_STEP).min(blocks.end);
                self.record.with(|states, index| found.extend(some.filter_map(|block| index.find(states, block))));
            }
            return found;
        }
        // A discard of all of a large volume touches more blocks than there are places.
        for first in (0..places).step_by(LOOK_STEP as usize) {
            self.record.with(|states, index| {
                let some = used_places(states, first).take_while(|place| *place < first + LOOK_STEP);
                let of_extent = some.filter(|place| blocks.contains(&states.get(*place).block()));
                found.extend(of_extent.filter_map(|place| index.find(states, states.get(place).block())));
            });
        }
        found
    }

    /// A place that nobody has: a free one, or that of a block which may go. It belongs to nobody in either map.
    pub(super) async fn claim(&self) -> Option<u32> {
        let random = self.env.random();
        let lock = |block| self.blocks.try_exclusive(self.extent_of(block));
        let (place, guard) = self.record.with(|states, index| match index.places.take() {
            Some(place) => Some((place as u32, None)),
            None => index.evict(states, random, lock).map(|(place, guard)| (place, Some(guard))),
        })?;
        if guard.is_none() {
            return Some(place);
        }
        // Its bytes are not the old block's from here on, for the next process either.
        self.place_stamps.raise(place.into());
        if let Err(error) = self.set(place, CacheEntry::FREE).await {
            self.fail(&error);
            return None;
        }
        self.counters.evicted.fetch_add(1, Ordering::Relaxed);
        Some(place)
    }

    /// Records of some places that their sectors are valid again.
    async fn record_some(&self) {
        let places = self.record.with(|_, index| index.unrecorded_places(RECORDED_AT_ONCE));
        let each = places.into_iter().map(|place| async move {
            let block = self.record.look(|states| states.get(place.into())).block();
            // Somebody else is at it: later, then.
            let Some(_guard) = self.blocks.try_exclusive(self.extent_of(block)) else { return Ok(()) };
            let found = self.record.with(|states, index| index.find(states, block));
            let Some(found) = found.filter(|found| found.place == place && self.admits()) else { return Ok(()) };
            self.set(place, CacheEntry::new(block, found.valid, found.entry.dirty())).await?;
            self.record.with(|_, index| index.remove_unrecorded(place, u8::MAX));
            Ok(())
        });
        if let Err(error) = try_all(join_all(each).await) {
            self.fail(&error);
        }
    }

    /// Writes a part of a block into its place.
    pub(super) async fn write_place(&self, part: &Mutation, place: u32) -> Result<()> {
        let extent = part.extent();
        let at = self.place_at(place, extent.offset);
        let length = self.in_place(extent.length);
        if length == extent.length {
            return self.flash.write(moved(part, at)).await;
        }
        // The end of the volume, which is none of the flash's.
        let MutationKind::Data(data) = part.kind() else {
            return self.flash.write(Mutation::zeroes(Extent::new(at, length), false)).await;
        };
        let mut buffer = Buffer::unpooled(length.as_usize());
        buffer[..data.len()].copy_from_slice(data);
        buffer[data.len()..].fill(0);
        self.flash.write(Mutation::data(at, buffer.freeze())).await
    }

    /// How long a request of `length` bytes is in a place: in whole units of the flash.
    pub(super) fn in_place(&self, length: Bytes) -> Bytes {
        length.align_up(self.partition.geometry().request_alignment.into())
    }
}

/// The first error of many outcomes, all of which are in.
pub(super) fn try_all(outcomes: Vec<Result<()>>) -> Result<()> {
    outcomes.into_iter().collect()
}

/// A device that counts how many bytes are written to it.
pub(super) struct Counted {
    device: Device,
    written: Arc<AtomicU64>,
    /// Grows with each answer, if somebody looks at that.
    answered: Option<Arc<AtomicU64>>,
}

impl Counted {
    pub(super) fn over(device: &Device, answered: Option<Arc<AtomicU64>>) -> (Device, Arc<AtomicU64>) {
        let written = Arc::new(AtomicU64::new(0));
        let counted = Self { device: device.clone(), written: Arc::clone(&written), answered };
        (Device::new(device.name(), counted), written)
    }

    fn note_answer(&self) {
        if let Some(answered) = &self.answered {
            answered.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl BlockDevice for Counted {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            let read = self.device.read(offset, buffer).await;
            self.note_answer();
            read
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        self.written.fetch_add(mutation.extent().length.get(), Ordering::Relaxed);
        Box::pin(async move {
            let written = self.device.write(mutation).await;
            self.note_answer();
            written
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.device.flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.device.extents(extent))
    }
}
