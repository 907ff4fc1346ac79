//! What a surrogate takes back after the source may have lost it.
//!
//! ```text
//!   a place was let go ──▶ its sectors are in the source, not flushed ──▶ a flush of the source fails: perhaps lost
//!                                                                          │ the place has what was flushed of them still
//!                                                                          ▼
//!                           the chunk has the place again ◀── or another one, into which they are copied
//! ```
//!
//! On record they are the surrogate's from the failure on. What the guest changes in the source until the flush is changed in the place that
//! was let go as well, and there first: so that never has less than the source.

use std::ops::Range;

use block::{Buffer, Mutation, MutationKind, Result};

use super::entry::DirtySectors;
use super::{Found, Inner, Redirect, SurrogateEntry};
use crate::store::{BelowError, PlaceAllocator};

impl Redirect {
    /// Whether all that was moved to the source is durable there: it alone is the volume. False if the surrogate has taken something back,
    /// because the source may have lost it: it is to be moved once more.
    ///
    /// # Errors
    /// What the source says, or the surrogate, if that is well.
    pub async fn settle(&self) -> Result<bool> {
        let inner = &self.inner;
        inner.take_back().await?;
        let number = inner.index.lock().places.begin_flush();
        match inner.record.settle().await {
            Ok(()) => {
                let mut from = Some(0);
                while let Some(next) = from {
                    from = inner.index.lock().places.flushed(number, next, PlaceAllocator::FLUSHED_AT_ONCE);
                }
                inner.forget_left();
            }
            // Its record stays as it is, and whoever takes it out has that on record first.
            Err(_) if self.has_failed_record() => inner.base.flush().await?,
            Err(failed) => {
                inner.take_back().await?;
                return Err(failed.error);
            }
        }
        Ok(self.is_empty())
    }

    /// Whether the surrogate has failed: its durable map stays as it is, whatever was moved.
    #[must_use]
    pub fn has_failed_record(&self) -> bool {
        self.inner.record.has_failed_store()
    }
}

impl Inner {
    /// Takes everything back that the source may have lost. Nothing is locked by the caller.
    pub(super) async fn take_back(&self) -> Result<()> {
        // A surrogate that has failed takes nothing: who would change the source there is refused.
        while self.record.has_pins() && self.failure.lock().is_none() {
            let Some((place, state)) = self.record.first_pinned() else { return Ok(()) };
            self.take_place_back(place, state).await?;
        }
        Ok(())
    }

    async fn take_place_back(&self, place: u64, state: SurrogateEntry) -> Result<()> {
        let SurrogateEntry::Dirty { chunk, sectors, .. } = state else { return Ok(()) };
        let chunk = u64::from(chunk);
        let _guard = self.chunks.exclusive(self.extent_of(chunk)).await;
        if self.record.pinned_state(place).is_none() {
            // Somebody has done it meanwhile.
            return Ok(());
        }
        let old = Found { place, is_cached: false, dirty: sectors };
        match self.find(chunk) {
            Some(found) if !found.dirty.is_empty() => {
                let lacks = found.dirty.clean_runs(self.sectors_of(self.extent_of(chunk)));
                let copied = self.copy_into(chunk, old, found.place, lacks).await?;
                let SurrogateEntry::Dirty { serial, .. } = self.record.look(|map| map.get(found.place)) else {
                    return Ok(());
                };
                let sectors = copied.into_iter().fold(found.dirty, DirtySectors::with);
                let both = SurrogateEntry::Dirty { chunk: chunk as u32, serial, sectors };
                self.record.set(found.place..found.place + 1, both).await?;
                self.record.unpin(place);
                // It is nobody's on record, too.
                return self.record.set(place..place + 1, SurrogateEntry::Clean).await;
            }
            // What is only cached goes.
            Some(found) => self.index.lock().release(found.place),
            None => {}
        }
        self.index.lock().reclaim(place, chunk);
        self.record.restore(place..place + 1, state).await
    }

    /// Copies what `old` has of some sectors of its chunk into `place`. Gives which those were.
    async fn copy_into(&self, chunk: u64, old: Found, place: u64, sectors: Vec<Range<u64>>) -> Result<Vec<Range<u64>>> {
        let runs: Vec<Range<u64>> = sectors.into_iter().flat_map(|run| old.dirty.dirty_runs(run)).collect();
        for run in &runs {
            let extent = self.extent_of_sectors(chunk, run);
            let data = self.read_dirty(extent, Buffer::unpooled(extent.length.as_usize()), old).await?;
            let written = self.write_place(Mutation::data(extent.offset, data.freeze()), place).await;
            written.inspect_err(|error| self.fail(error))?;
        }
        Ok(runs)
    }

    /// The guest is about to change the source, and has changed it or is changing it in a chunk that the caller holds: the place that the
    /// chunk has left since the last flush keeps up with it. Gives the change as both are to take it.
    pub(super) async fn keep_up(&self, part: Mutation) -> Result<Mutation, BelowError> {
        let chunk = self.chunk_of(part.extent().offset);
        let Some(place) = self.left.lock().get(&chunk).copied() else { return Ok(part) };
        self.record.change_below(place..place + 1)?;
        if self.record.left(place..place + 1).is_empty() {
            return Ok(part);
        }
        // What a discard leaves must not depend on which of both is read.
        let part = match part.kind() {
            MutationKind::Discard => Mutation::zeroes(part.extent(), true),
            MutationKind::Data(_) | MutationKind::Zeroes { .. } => part,
        };
        if let Err(error) = self.write_place(part.clone(), place).await {
            // It is needed only if the source loses what it has taken.
            self.fail(&error);
        }
        Ok(part)
    }

    /// A flush has made durable in the source what has left some places: nobody asks for them any more.
    pub(super) fn forget_left(&self) {
        let index = self.index.lock();
        self.left.lock().retain(|_, place| index.places.is_retired(*place));
    }
}
