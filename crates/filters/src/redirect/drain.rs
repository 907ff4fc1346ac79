//! The reclaimer: what the surrogate alone has goes back to the source, chunk by chunk, until the redirection can be taken away.
//!
//! ```text
//!   dirty ──▶ the chunk is held ──▶ dirty sectors read ──▶ source written ──▶ running map: clean ──▶ let go
//!                                                                                 │
//!   a flush begins: what is clean now ──▶ source flushed ──▶ surrogate flushed ──▶ durable map: clean
//! ```
//!
//! Once draining has begun no chunk gets a place. A change of a chunk that has one drains that chunk first. So the redirection only
//! gets emptier, and a crash at any moment leaves each sector where its record says.

use std::sync::atomic::Ordering;

use block::{Buffer, Bytes, Mutation, Result};

use super::{Found, Inner, Redirect, SurrogateEntry};

impl Redirect {
    /// From now on nothing is taken into the surrogate. There is no way back but to open it again. Returns when no fetch is under way.
    pub async fn begin_drain(&self) {
        self.inner.is_draining.store(true, Ordering::SeqCst);
        self.inner.fetches.ended().await;
    }

    /// Whether the source has everything. After a flush that began later, it alone is the volume.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner.is_empty()
    }

    /// Moves what the next place at or after `from` has and the source lacks into the source. Gives the place behind it and how many bytes
    /// those were, or nothing if no such place is left. What was moved is durable after the next flush.
    ///
    /// # Errors
    /// What the surrogate and the source say. What was to be moved is then still in the surrogate.
    pub async fn drain_next(&self, from: u64) -> Result<Option<(u64, Bytes)>> {
        let inner = &self.inner;
        let mut next = from;
        loop {
            let found = inner.record.look(|map| map.next_stored(next).map(|place| (place, map.get(place))));
            let Some((place, SurrogateEntry::Dirty { chunk, .. })) = found else { return Ok(None) };
            let chunk = u64::from(chunk);
            let _guard = inner.chunks.exclusive(inner.extent_of(chunk)).await;
            match inner.find(chunk).filter(|found| found.place == place && !found.dirty.is_empty()) {
                Some(found) => return Ok(Some((place + 1, inner.move_to_source(chunk, found).await?))),
                // Somebody has done it meanwhile.
                None => next = place + 1,
            }
        }
    }
}

impl Inner {
    /// Takes its place from `chunk`, which is held, once the source has all of it.
    pub(super) async fn give_up(&self, chunk: u64) -> Result<()> {
        let Some(found) = self.find(chunk) else { return Ok(()) };
        if found.dirty.is_empty() {
            self.index.lock().release(found.place);
            return Ok(());
        }
        self.move_to_source(chunk, found).await.map(drop)
    }

    /// Moves the dirty sectors of `chunk`, which is held, and takes its place from it.
    async fn move_to_source(&self, chunk: u64, found: Found) -> Result<Bytes> {
        let mut moved = Bytes::ZERO;
        let all = self.sectors_of(self.extent_of(chunk));
        for run in found.dirty.dirty_runs(all) {
            let extent = self.extent_of_sectors(chunk, &run);
            let data = self.read_dirty(extent, Buffer::unpooled(extent.length.as_usize()), found).await?;
            self.base.write(Mutation::data(extent.offset, data.freeze())).await?;
            moved += extent.length;
        }
        self.forget(found).await?;
        Ok(moved)
    }
}
