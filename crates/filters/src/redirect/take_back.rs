//! What a surrogate takes back after the source may have lost it.
//!
//! ```text
//!   a place was let go ──▶ its sectors are in the source, not flushed ──▶ a flush of the source fails: perhaps lost
//!                                                                          │ the place has what was flushed of them still
//!                                                                          ▼
//!                           the chunk has the place again ◀── or another one, into which they are copied
//! ```
//!
//! On record they are the surrogate's from the failure on. A change of the source that meets the failure is not answered.

use block::{Buffer, Error, Mutation, Result};

use super::{Found, Inner, Redirect, SurrogateEntry};

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
            Ok(()) => inner.index.lock().places.flushed(number),
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
            self.take_place_back(place, state).await.inspect_err(|error| self.fail(error))?;
        }
        Ok(())
    }

    async fn take_place_back(&self, place: u64, state: SurrogateEntry) -> Result<()> {
        let SurrogateEntry::Dirty { chunk, sectors, .. } = state else { return Ok(()) };
        let chunk = u64::from(chunk);
        let _guard = self.chunks.exclusive(self.extent_of(chunk)).await;
        if self.record.first_pinned() != Some((place, state)) {
            // Somebody has done it meanwhile.
            return Ok(());
        }
        match self.find(chunk) {
            Some(found) if !found.dirty.is_empty() => {
                let old = Found { place, is_cached: false, dirty: sectors };
                self.copy_over(chunk, old, found).await?;
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

    /// Copies what `old` has and the newer place of the same chunk lacks into that.
    async fn copy_over(&self, chunk: u64, old: Found, newer: Found) -> Result<()> {
        let lacks = newer.dirty.clean_runs(self.sectors_of(self.extent_of(chunk)));
        let runs = lacks.into_iter().flat_map(|run| old.dirty.dirty_runs(run));
        let mut sectors = newer.dirty;
        for run in runs {
            let extent = self.extent_of_sectors(chunk, &run);
            let data = self.read_dirty(extent, Buffer::unpooled(extent.length.as_usize()), old).await?;
            self.write_place(Mutation::data(extent.offset, data.freeze()), newer.place).await?;
            sectors = sectors.with(run);
        }
        let SurrogateEntry::Dirty { serial, .. } = self.record.look(|map| map.get(newer.place)) else { return Ok(()) };
        let state = SurrogateEntry::Dirty { chunk: chunk as u32, serial, sectors };
        self.record.set(newer.place..newer.place + 1, state).await
    }

    /// Fails for a change of the source in `chunk` that a failed flush may have undone. The caller holds the chunk.
    pub(super) fn check_kept(&self, chunk: u64) -> Result<(), Error> {
        let is_of_chunk =
            |state| matches!(state, SurrogateEntry::Dirty { chunk: pinned, .. } if u64::from(pinned) == chunk);
        match self.record.has_pinned(is_of_chunk) {
            true => Err(self.record.may_be_undone()),
            false => Ok(()),
        }
    }
}
