//! Write-back: what is dirty goes to the base.
//!
//! ```text
//!   dirty ──▶ neighbours held ──▶ read from the flash ──▶ base written ──▶ let go, noted as written
//!               base flushed ──▶ nobody wrote to it meanwhile ──▶ running map: clean, retired
//!               record flushed ──▶ durable map: nothing ──▶ the place may be given to another block
//! ```
//!
//! The base is flushed before the running map calls a place clean. So a flush of the guest's need not wait for what was cleaned beside it:
//! until then the durable map names the place, whose bytes are still those.
//!
//! Blocks go in the order of the base, neighbours in one write. Only one such write is under way while the base works for the guest, and many
//! while it does not. While the guest asks the cache for anything, they are the more the nearer the dirty limit is: each takes a read of the
//! flash from the guest, and a block that the guest writes again meanwhile need not go twice. Nobody runs it but its owner, and the guest's
//! writes that wait for it at the dirty limit.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use block::{Buffer, Bytes, Error, ErrorKind, Extent, Mutation, Result};
use futures::future::join_all;

use super::entry::{CacheEntry, runs_of};
use super::write::try_all;
use super::{Cache, DIRTY, Found, Inner, WriteBackStep};

/// So many dirty blocks are sorted at a time.
const SORTED_MAX: usize = 65536;
/// So many places are looked at under one lock.
const LOOK_STEP: u64 = 4096;
/// So many are looked at before others may use the thread.
const YIELD_STEP: u64 = 16 * LOOK_STEP;
/// A write to the base has so many bytes at most.
const RUN_BYTES_MAX: u64 = 1 << 20;
/// The record is flushed when so great a share of the places waits for that.
const RETIRED_SHARE: u64 = 16;
/// How long background write-back waits after an error: twice as long after each one that follows.
const RETRY_AFTER: Duration = Duration::from_secs(1);
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// Where write-back has got to.
#[derive(Default)]
pub(super) struct Cleaner {
    /// Dirty blocks, the first one last.
    queue: Vec<u64>,
    /// The place where the search for more goes on.
    next_place: u64,
    /// How many requests the guest had made at the last step.
    requests_before: u64,
    /// Whether there was one.
    has_begun: bool,
}

/// A place whose dirty sectors were written to the base.
struct Written {
    place: u32,
    block: u64,
}

impl Cache {
    /// One step of background write-back, which yields to the guest: some neighbouring dirty blocks go to the base, which is flushed.
    ///
    /// # Errors
    /// What base and partition say.
    pub async fn write_back(&self) -> Result<WriteBackStep> {
        let inner = &self.inner;
        let mut cleaner = inner.cleaner.lock().await;
        if inner.is_closed.load(Ordering::SeqCst) || !inner.wants_write_back() {
            return Ok(WriteBackStep::Idle);
        }
        let is_alone = inner.guest_at_base.load(Ordering::SeqCst) == 0;
        let runs = if is_alone { inner.runs_at_once(&mut cleaner) } else { 1 };
        let written = inner.clean_some(&mut cleaner, runs).await?;
        Ok(if written.is_zero() { WriteBackStep::Idle } else { WriteBackStep::Wrote(written) })
    }

    /// Background write-back until the cache is closed: the owner spawns it. It waits while there is nothing to do, and after an error.
    pub async fn run_write_back(self) {
        let (inner, mut rest) = (&self.inner, RETRY_AFTER);
        while !inner.is_closed.load(Ordering::SeqCst) {
            let woken = inner.wake.notified();
            match self.write_back().await {
                Ok(WriteBackStep::Wrote(_)) => rest = RETRY_AFTER,
                Ok(WriteBackStep::Idle) => woken.await,
                Err(error) => {
                    tracing::warn!(cache = inner.partition.name(), error = error.chain(), "write-back is tried again");
                    inner.env.sleep(rest).await;
                    rest = (2 * rest).min(RETRY_AFTER_MAX);
                }
            }
        }
    }
}

impl Inner {
    /// So many places are `percent` of all, at least one.
    fn share(&self, percent: u8) -> u64 {
        let places = self.header.lock().places;
        (places * u64::from(percent.min(100)) / 100).max(1)
    }

    /// How many runs go to the base at a time while it does nothing for the guest.
    fn runs_at_once(&self, cleaner: &mut Cleaner) -> usize {
        let depth = self.options.write_back_depth.max(1);
        let requests = self.counters.requests();
        let is_idle = std::mem::replace(&mut cleaner.requests_before, requests) == requests;
        // At the first step nobody knows yet.
        let is_first = !std::mem::replace(&mut cleaner.has_begun, true);
        if is_first || is_idle || !self.takes_dirty() {
            return depth;
        }
        let low = self.share(self.options.dirty_low_percent);
        let span = self.share(self.options.dirty_max_percent).saturating_sub(low).max(1);
        let share = self.dirty_places().saturating_sub(low) as f64 / span as f64;
        ((depth as f64 * share.powi(4)) as usize).clamp(1, depth)
    }

    fn dirty_places(&self) -> u64 {
        self.record.look(|states| states.count(DIRTY))
    }

    /// Whether more is dirty than may stay so.
    pub(super) fn wants_write_back(&self) -> bool {
        let dirty = self.dirty_places();
        dirty > 0 && (!self.takes_dirty() || dirty > self.share(self.options.dirty_low_percent))
    }

    /// Waits at the dirty limit until there is room, and makes it if nobody else does. False if none can be made.
    pub(super) async fn make_room(&self) -> bool {
        while self.takes_dirty() && self.dirty_places() >= self.share(self.options.dirty_max_percent) {
            let mut cleaner = self.cleaner.lock().await;
            if self.dirty_places() < self.share(self.options.dirty_max_percent) {
                return true;
            }
            match self.clean_some(&mut cleaner, self.options.write_back_depth.max(1)).await {
                Ok(written) if !written.is_zero() => {}
                _ => return false,
            }
        }
        true
    }

    /// Writes everything that is dirty to the base, while nothing becomes dirty.
    pub(super) async fn clean_all(&self, cleaner: &mut Cleaner) -> Result<()> {
        while !self.is_clean() {
            self.check_emptying()?;
            if self.clean_some(cleaner, self.options.write_back_depth.max(1)).await?.is_zero() {
                self.changes_end().await;
            }
        }
        Ok(())
    }

    /// Fails once the cache is not to be emptied any more: it is closed, and its partition may be another's by now, or writes back again.
    pub(super) fn check_emptying(&self) -> Result<()> {
        if !self.is_closed.load(Ordering::SeqCst) && !self.is_to_hold() {
            return Ok(());
        }
        let context = format!("{} is not to be emptied any more", self.partition.name());
        Err(Error::new(ErrorKind::Cancelled, context))
    }

    /// Waits until all changes have ended that are under way.
    pub(super) async fn changes_end(&self) {
        drop(self.blocks.exclusive(Extent::whole(self.volume)).await);
    }

    /// Writes at most so many runs of dirty blocks to the base. Gives how many bytes those were: none if nothing is dirty.
    pub(super) async fn clean_some(&self, cleaner: &mut Cleaner, runs_max: usize) -> Result<Bytes> {
        let mut runs = Vec::new();
        while runs.len() < runs_max
            && let Some(run) = self.next_run(cleaner, runs.is_empty()).await
        {
            runs.push(run);
        }
        self.clean_runs(runs).await
    }

    pub(super) async fn clean_runs(&self, runs: Vec<Range<u64>>) -> Result<Bytes> {
        if runs.is_empty() {
            return Ok(Bytes::ZERO);
        }
        let outcomes = join_all(runs.into_iter().map(|run| self.write_run(run))).await;
        let (mut written, mut bytes, mut failed) = (Vec::new(), Bytes::ZERO, None);
        for outcome in outcomes {
            match outcome {
                Ok((places, some)) => {
                    written.extend(places);
                    bytes += some;
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if !written.is_empty()
            && let Err(error) = self.flush_base().await
        {
            let places: Vec<u32> = written.iter().map(|one| one.place).collect();
            self.record.with(|_, index| index.written.retain(|place| !places.contains(place)));
            return Err(error);
        }
        try_all(join_all(written.into_iter().map(|one| self.settle(one))).await)?;
        self.counters.cleaned.fetch_add(bytes.get(), Ordering::Relaxed);
        let (retired, places) = self.record.with(|_, index| (index.places.retired_count(), index.places.count()));
        if retired as u64 * RETIRED_SHARE > places
            && let Err(error) = self.flush_record().await
        {
            // What was written back is in the base. Its places are given to other blocks later.
            tracing::debug!(cache = self.partition.name(), error = error.chain(), "places wait for a flush");
        }
        match failed {
            Some(error) => Err(error),
            None => Ok(bytes),
        }
    }

    /// The next dirty blocks that are neighbours, in the order of the base. What was found before is searched for again only if `searches`:
    /// runs of which the caller has not made anything yet would be found twice.
    async fn next_run(&self, cleaner: &mut Cleaner, searches: bool) -> Option<Range<u64>> {
        for round in 0..2 {
            while let Some(block) = cleaner.queue.pop() {
                let run = self.record.with(|states, index| {
                    let is_dirty = |block| index.find(states, block).is_some_and(|found| found.entry.dirty() != 0);
                    let longest = RUN_BYTES_MAX / self.block.bytes();
                    let length = (block..block + longest).take_while(|block| is_dirty(*block)).count() as u64;
                    block..block + length
                });
                while cleaner.queue.last().is_some_and(|next| *next < run.end) {
                    cleaner.queue.pop();
                }
                if !run.is_empty() {
                    return Some(run);
                }
            }
            if round == 0 && searches {
                self.find_dirty(cleaner).await;
            }
        }
        None
    }

    /// Fills the queue with dirty blocks, in the order of the base: all, or as many as are sorted at a time.
    async fn find_dirty(&self, cleaner: &mut Cleaner) {
        let places = self.record.look(|states| states.len());
        let mut looked = 0;
        while looked < places && cleaner.queue.len() < SORTED_MAX {
            let first = cleaner.next_place % places;
            let end = (first + LOOK_STEP).min(places);
            self.record.look(|states| {
                let entries = (first..end).map(|place| states.get(place));
                cleaner.queue.extend(entries.filter(|entry| entry.dirty() != 0).map(CacheEntry::block));
            });
            looked += end - first;
            cleaner.next_place = end % places;
            if looked.is_multiple_of(YIELD_STEP) {
                // With few of many places dirty, this takes a second or more.
                self.rest().await;
            }
        }
        cleaner.queue.sort_unstable_by(|one, other| other.cmp(one));
    }

    /// Writes what is dirty of a block to the base, durably. The caller has the block alone.
    pub(super) async fn clean_held(&self, block: u64, found: &Found) -> Result<()> {
        let (_, bytes) = self.write_held(block..block + 1).await?;
        self.flush_base().await?;
        self.counters.cleaned.fetch_add(bytes.get(), Ordering::Relaxed);
        self.set(found.place, CacheEntry::new(block, found.valid, 0)).await.inspect_err(|error| self.fail(error))
    }

    /// Writes what is dirty of some neighbouring blocks to the base.
    async fn write_run(&self, run: Range<u64>) -> Result<(Vec<Written>, Bytes)> {
        let extent = Extent::between(self.extent_of(run.start).offset, self.extent_of(run.end - 1).end());
        let _guard = self.blocks.exclusive(extent).await;
        let (written, bytes) = self.write_held(run).await?;
        self.record.with(|_, index| index.written.extend(written.iter().map(|one| one.place)));
        Ok((written, bytes))
    }

    async fn write_held(&self, run: Range<u64>) -> Result<(Vec<Written>, Bytes)> {
        let extent = Extent::between(self.extent_of(run.start).offset, self.extent_of(run.end - 1).end());
        let found: Vec<Found> = self.record.with(|states, index| {
            run.filter_map(|block| index.find(states, block)).filter(|found| found.entry.dirty() != 0).collect()
        });
        // Dirty sectors that follow each other, over the borders of blocks, too.
        let mut writes: Vec<Vec<(Extent, u32)>> = Vec::new();
        for found in &found {
            let block = found.entry.block();
            for sectors in runs_of(found.entry.dirty() & self.all_sectors(block)) {
                let piece = self.extent_of_sectors(block, &sectors, extent);
                match writes.last_mut() {
                    Some(write) if write.last().is_some_and(|(last, _)| last.end() == piece.offset) => {
                        write.push((piece, found.place));
                    }
                    _ => writes.push(vec![(piece, found.place)]),
                }
            }
        }
        let outcomes = join_all(writes.into_iter().map(|pieces| self.write_pieces(pieces))).await;
        let bytes = outcomes.into_iter().sum::<Result<Bytes>>()?;
        let written = found.iter().map(|found| Written { place: found.place, block: found.entry.block() }).collect();
        Ok((written, bytes))
    }

    /// Writes dirty sectors that follow each other in the volume to the base. Their blocks are held.
    async fn write_pieces(&self, pieces: Vec<(Extent, u32)>) -> Result<Bytes> {
        let start = pieces[0].0.offset;
        let reads = pieces.iter().copied().map(|(piece, place)| async move {
            let buffer = Buffer::unpooled(piece.length.as_usize());
            self.read_place(place, piece, buffer).await.map_err(|error| {
                self.fail(&error);
                self.lost(piece, error)
            })
        });
        let mut read = join_all(reads).await;
        let data = if read.len() == 1 {
            read.swap_remove(0)?
        } else {
            let length = pieces.iter().map(|(piece, _)| piece.length).sum::<Bytes>();
            let mut whole = Buffer::unpooled(length.as_usize());
            for ((piece, _), part) in pieces.iter().zip(read) {
                let at = (piece.offset - start).as_usize();
                whole[at..at + piece.length.as_usize()].copy_from_slice(&part?);
            }
            whole
        };
        let length = Bytes::from(data.len());
        self.base.device().write(Mutation::data(start, data.freeze())).await?;
        Ok(length)
    }

    /// The base was flushed: what nobody has written to since is clean.
    async fn settle(&self, written: Written) -> Result<()> {
        let Written { place, block } = written;
        let _guard = self.blocks.exclusive(self.extent_of(block)).await;
        let found = self.record.with(|states, index| match index.written.remove(&place) {
            true => index.find(states, block).filter(|found| found.place == place),
            false => None,
        });
        let Some(found) = found else { return Ok(()) };
        self.set(place, CacheEntry::new(block, found.valid, 0)).await.inspect_err(|error| self.fail(error))?;
        self.record.with(|_, index| index.remove_unrecorded(place, u8::MAX));
        Ok(())
    }
}
