//! How a redirection takes changes.

use std::ops::Range;
use std::sync::atomic::Ordering;

use block::{Buffer, Bytes, Error, ErrorKind, Extent, Mutation, MutationKind, Result};

use super::{Found, Inner, SurrogateEntry};
use crate::store::BelowError;
use crate::translate::moved;

impl Inner {
    /// Carries out a mutation that lies in one chunk, and forces none. A flush that fails meanwhile may pin the chunk: it is the surrogate's
    /// again then, and the mutation is tried once more.
    pub(super) async fn write_part(&self, part: Mutation) -> Result<()> {
        let chunk = self.chunk_of(part.extent().offset);
        self.popularity.lock().touch(chunk);
        loop {
            // Where that fails now, only what is recorded as the surrogate's takes no write.
            let taken_back = self.take_back().await;
            let written = match part.kind() {
                MutationKind::Data(_) => self.write_data(part.clone(), chunk).await,
                MutationKind::Zeroes { .. } | MutationKind::Discard => self.clear(part.clone(), chunk).await,
            };
            match written {
                Ok(()) => return Ok(()),
                Err(BelowError::Failed(error)) => return Err(error),
                Err(BelowError::Pinned) => taken_back?,
            }
            self.check_takes_back()?;
        }
    }

    /// Fails if the surrogate has failed: it takes nothing back any more.
    fn check_takes_back(&self) -> Result<()> {
        if self.failure.lock().is_none() {
            return Ok(());
        }
        let context =
            format!("{} has failed, and its source may have lost what was moved there", self.surrogate.name());
        Err(Error::new(ErrorKind::Io, context))
    }

    async fn write_data(&self, part: Mutation, chunk: u64) -> Result<(), BelowError> {
        self.check_known(chunk)?;
        let sectors = self.sectors_of(part.extent());
        let is_over = |found: &Found| found.dirty.contains_all(sectors.clone());
        if self.find(chunk).as_ref().is_some_and(is_over) {
            let _guard = self.chunks.shared(part.extent()).await;
            if let Some(found) = self.find(chunk).filter(is_over) {
                self.counters.writes_redirected.fetch_add(1, Ordering::Relaxed);
                return Ok(self.write_over(part, found.place).await?);
            }
        }
        let _guard = self.chunks.exclusive(self.extent_of(chunk)).await;
        if self.is_draining.load(Ordering::Acquire) {
            self.give_up(chunk).await?;
            return self.write_to_source(part).await;
        }
        let found = self.find(chunk).or_else(|| if self.takes() { self.claim(chunk) } else { None });
        match found {
            None => self.write_to_source(part).await,
            Some(found) if is_over(&found) => Ok(self.write_over(part, found.place).await?),
            Some(found) => self.write_found(part, chunk, found, sectors).await,
        }
    }

    /// Fails for a chunk of which nobody knows what the record says: a write to the source might be forgotten at the next start.
    fn check_known(&self, chunk: u64) -> Result<()> {
        if self.failure.lock().is_none() || !self.in_doubt.lock().contains(&chunk) {
            return Ok(());
        }
        let context = format!("{} has failed while it recorded a write to the same chunk", self.surrogate.name());
        Err(Error::new(ErrorKind::Io, context))
    }

    /// Writes over dirty sectors.
    async fn write_over(&self, part: Mutation, place: u64) -> Result<()> {
        self.write_place(part, place).await.map_err(|error| {
            self.fail(&error);
            self.cannot_write_over(error)
        })
    }

    fn cannot_write_over(&self, error: Error) -> Error {
        let context = format!("{} alone has what is written over, and takes no writes", self.surrogate.name());
        Error::new(ErrorKind::Io, context).with_source(error)
    }

    /// Writes into a place, and makes its sectors dirty. The caller holds the chunk alone.
    async fn write_found(
        &self,
        part: Mutation,
        chunk: u64,
        found: Found,
        sectors: Range<u64>,
    ) -> Result<(), BelowError> {
        let written = match self.with_whole_sectors(&part, chunk, found, sectors.clone()).await {
            Ok(whole) if self.failure.lock().is_none() => self.write_place(whole, found.place).await,
            Ok(_) => Err(Error::new(ErrorKind::Io, "the surrogate has failed before")),
            Err(error) => {
                self.release_if_clean(found);
                return Err(error.into());
            }
        };
        if let Err(error) = written {
            self.fail(&error);
            // What the place has of the clean sectors may be torn.
            self.forget_cached(found);
            if found.dirty.contains_any(sectors) {
                return Err(self.cannot_write_over(error).into());
            }
            return self.write_to_source(part).await;
        }
        let serial = match self.record.look(|map| map.get(found.place)) {
            SurrogateEntry::Dirty { serial, .. } => serial,
            SurrogateEntry::Clean => self.serial.fetch_add(1, Ordering::Relaxed) as u32,
        };
        let state = SurrogateEntry::Dirty { chunk: chunk as u32, serial, sectors: found.dirty.with(sectors) };
        let recorded = self.record.set(found.place..found.place + 1, state).await;
        // The record may have it or not: the source must not be written here, or the next process might read what is older.
        if let Err(error) = recorded {
            self.fail(&error);
            self.in_doubt.lock().insert(chunk);
            return Err(error.into());
        }
        self.counters.writes_redirected.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// `part` with the rest of the sectors that it touches only in part and that the place does not have.
    async fn with_whole_sectors(
        &self,
        part: &Mutation,
        chunk: u64,
        found: Found,
        sectors: Range<u64>,
    ) -> Result<Mutation> {
        let extent = part.extent();
        let whole = self.extent_of_sectors(chunk, &sectors);
        let edges = [sectors.start, sectors.end - 1].map(|sector| {
            let edge = self.extent_of_sectors(chunk, &(sector..sector + 1));
            !extent.contains(edge) && !found.is_cached && !found.dirty.contains(sector)
        });
        if edges == [false, false] {
            return Ok(part.clone());
        }
        let MutationKind::Data(data) = part.kind() else { unreachable!("only data is written into a place") };
        let mut from = extent.offset;
        let mut to = extent.end();
        let mut buffer = Buffer::unpooled(whole.length.as_usize());
        let at = (extent.offset - whole.offset).as_usize();
        let [first, last] = edges;
        if first {
            from = whole.offset;
            let head = Extent::between(whole.offset, extent.offset);
            self.read_edge(head, whole, &mut buffer).await?;
        }
        if last {
            to = whole.end();
            let tail = Extent::between(extent.end(), whole.end());
            self.read_edge(tail, whole, &mut buffer).await?;
        }
        buffer[at..at + data.len()].copy_from_slice(data);
        Ok(Mutation::data(whole.offset, buffer.freeze()).slice(Extent::between(from, to)))
    }

    /// Reads `edge` of the source into the bytes of `whole`.
    async fn read_edge(&self, edge: Extent, whole: Extent, buffer: &mut Buffer) -> Result<()> {
        if edge.is_empty() {
            return Ok(());
        }
        let read = self.base.device().read(edge.offset, Buffer::unpooled(edge.length.as_usize())).await?;
        let at = (edge.offset - whole.offset).as_usize();
        buffer[at..at + read.len()].copy_from_slice(&read);
        Ok(())
    }

    /// How long a request of `length` bytes is in a place: in whole units of the surrogate.
    pub(super) fn in_place(&self, length: Bytes) -> Bytes {
        length.align_up(self.surrogate.geometry().request_alignment.into())
    }

    pub(super) async fn write_place(&self, part: Mutation, place: u64) -> Result<()> {
        let at = self.place_at(place, part.extent().offset);
        let length = self.in_place(part.extent().length);
        if length == part.extent().length {
            return self.surrogate.write(moved(&part, at)).await;
        }
        // The end of the volume, which is none of the surrogate's.
        let padded = match part.kind() {
            MutationKind::Data(data) => {
                let mut buffer = Buffer::unpooled(length.as_usize());
                buffer[..data.len()].copy_from_slice(data);
                buffer[data.len()..].fill(0);
                Mutation::data(at, buffer.freeze())
            }
            MutationKind::Zeroes { .. } | MutationKind::Discard => Mutation::zeroes(Extent::new(at, length), false),
        };
        self.surrogate.write(padded).await
    }

    async fn write_to_source(&self, part: Mutation) -> Result<(), BelowError> {
        self.counters.writes_at_source.fetch_add(1, Ordering::Relaxed);
        self.change_source(part).await
    }

    /// Changes the source where the guest has asked for it. The caller holds the chunk.
    async fn change_source(&self, part: Mutation) -> Result<(), BelowError> {
        let part = self.keep_up(part).await?;
        Ok(self.base.write(part).await?)
    }

    /// Reads of the clean sectors go to the source from now on.
    fn forget_cached(&self, found: Found) {
        self.index.lock().set_cached(found.place, false);
        self.release_if_clean(found);
    }

    pub(super) fn release_if_clean(&self, found: Found) {
        if found.dirty.is_empty() {
            self.index.lock().release(found.place);
        }
    }

    /// Zeroes and discards go to the source, and over what the place has, in this order: in between a crash leaves the old bytes, for
    /// nothing was answered.
    async fn clear(&self, part: Mutation, chunk: u64) -> Result<(), BelowError> {
        self.check_known(chunk)?;
        let whole = self.extent_of(chunk);
        let _guard = self.chunks.exclusive(whole).await;
        if self.is_draining.load(Ordering::Acquire) {
            self.give_up(chunk).await?;
            return self.change_source(part).await;
        }
        let extent = part.extent();
        let is_discard = matches!(part.kind(), MutationKind::Discard);
        let found = self.find(chunk);
        let is_forgotten = extent == whole && found.as_ref().is_some_and(|found| !found.dirty.is_empty());
        // A source may keep what it has in spite of a discard, and that is older than what is forgotten here.
        let part = if is_discard && is_forgotten { Mutation::zeroes(extent, true) } else { part };
        self.change_source(part.clone()).await?;
        let Some(found) = found else { return Ok(()) };
        if extent == whole {
            self.forget(found).await?;
            // In the source it is not as the place has it.
            return self.keep_up(part).await.map(drop);
        }
        let is_dirty = found.dirty.contains_any(self.sectors_of(extent));
        if is_discard {
            // What the place has of them is older than what a source gives that reads as zeroes then, as most do.
            self.forget_cached(found);
        }
        if !is_dirty && (is_discard || !found.is_cached) {
            return Ok(());
        }
        match self.write_place(Mutation::zeroes(extent, false), found.place).await {
            Ok(()) => Ok(()),
            Err(error) => {
                self.fail(&error);
                self.forget_cached(found);
                if is_dirty { Err(error.into()) } else { Ok(()) }
            }
        }
    }

    /// Takes a place from its chunk, whose bytes the source has all. The caller holds the chunk alone.
    pub(super) async fn forget(&self, found: Found) -> Result<()> {
        if !found.dirty.is_empty() {
            let recorded = self.record.set(found.place..found.place + 1, SurrogateEntry::Clean).await;
            recorded.inspect_err(|error| self.fail(error))?;
            self.index.lock().places.retire(found.place);
            if let Some(chunk) = self.index.lock().owner(found.place) {
                self.left.lock().insert(chunk, found.place);
            }
        }
        self.index.lock().release(found.place);
        Ok(())
    }
}
