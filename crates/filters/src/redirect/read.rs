//! How a redirection is read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{Buffer, Error, ErrorKind, Extent, ExtentState, ExtentStatus, Result};

use super::source_paths::Reader;
use super::{Found, Inner};
use crate::translate::in_units;

/// An answer to the question for extents has so many pieces at most.
const PIECES_MAX: usize = 64;

impl Inner {
    /// Reads a part that lies in one chunk.
    pub(super) async fn read_part(self: &Arc<Self>, part: Extent, buffer: Buffer, reader: Reader) -> Result<Buffer> {
        let is_guest = reader == Reader::Guest;
        let chunk = self.chunk_of(part.offset);
        let is_popular = is_guest && self.popularity.lock().touch(chunk);
        let guard = self.chunks.shared(part).await;
        let (read, counter, is_cached) = match self.find(chunk) {
            None => (self.source_of(reader).read(part.offset, buffer).await, &self.counters.reads_at_source, false),
            Some(found) => self.read_found(part, buffer, found, reader).await,
        };
        drop(guard);
        if is_guest {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        if is_popular && !is_cached {
            self.fetch_aside(chunk);
        }
        read
    }

    /// Reads a part of a chunk that has a place. Its extent is held.
    async fn read_found(
        &self,
        part: Extent,
        buffer: Buffer,
        found: Found,
        reader: Reader,
    ) -> (Result<Buffer>, &AtomicU64, bool) {
        let sectors = self.sectors_of(part);
        let length = buffer.len();
        if found.dirty.contains_all(sectors.clone()) {
            return (self.read_dirty(part, buffer, found).await, &self.counters.reads_redirected, found.is_cached);
        }
        let buffer = if found.is_cached {
            match self.read_place(part, buffer, found).await {
                Ok(buffer) => return (Ok(buffer), &self.counters.reads_redirected, true),
                Err(error) => {
                    self.fail(&error);
                    self.index.lock().set_cached(found.place, false);
                    Buffer::unpooled(length)
                }
            }
        } else {
            buffer
        };
        let is_merged = found.dirty.contains_any(sectors);
        let counter = if is_merged { &self.counters.reads_merged } else { &self.counters.reads_at_source };
        (self.read_merged(part, buffer, found, reader).await, counter, false)
    }

    /// Reads the source, and lays the dirty sectors over it.
    async fn read_merged(&self, part: Extent, buffer: Buffer, found: Found, reader: Reader) -> Result<Buffer> {
        let chunk = self.chunk_of(part.offset);
        let mut buffer = self.source_of(reader).read(part.offset, buffer).await?;
        for run in found.dirty.dirty_runs(self.sectors_of(part)) {
            let Some(piece) = self.extent_of_sectors(chunk, &run).intersection(part) else { continue };
            let read = self.read_dirty(piece, Buffer::unpooled(piece.length.as_usize()), found).await?;
            let at = (piece.offset - part.offset).as_usize();
            buffer[at..at + read.len()].copy_from_slice(&read);
        }
        Ok(buffer)
    }

    /// Reads what the source lacks.
    pub(super) async fn read_dirty(&self, part: Extent, buffer: Buffer, found: Found) -> Result<Buffer> {
        self.read_place(part, buffer, found).await.map_err(|error| {
            self.fail(&error);
            let context = format!(
                "{} of {} bytes at {} cannot be read, and only the surrogate has it: what the source has there is older",
                self.surrogate.name(),
                part.length.get(),
                part.offset.get()
            );
            Error::new(ErrorKind::Io, context).with_source(error)
        })
    }

    async fn read_place(&self, part: Extent, buffer: Buffer, found: Found) -> Result<Buffer> {
        let at = self.place_at(found.place, part.offset);
        let length = self.in_place(part.length);
        if length == part.length {
            return self.surrogate.read(at, buffer).await;
        }
        let mut buffer = self.surrogate.read(at, Buffer::unpooled(length.as_usize())).await?;
        buffer.set_len(part.length.as_usize());
        Ok(buffer)
    }

    /// What a part of the volume holds: data where the surrogate has something that the source lacks.
    pub(super) async fn describe(&self, extent: Extent) -> Result<Vec<ExtentStatus>> {
        let mut pieces: Vec<ExtentStatus> = Vec::new();
        let mut next = extent.offset;
        while next < extent.end() && pieces.len() < PIECES_MAX {
            let is_dirty = |chunk| self.find(chunk).is_some_and(|found| !found.dirty.is_empty());
            let first = self.chunk_of(next);
            let first_is_dirty = is_dirty(first);
            let mut end = self.extent_of(first).end();
            while end < extent.end() && is_dirty(self.chunk_of(end)) == first_is_dirty {
                end = self.extent_of(self.chunk_of(end)).end();
            }
            let part = Extent::between(next, end.min(extent.end()));
            if first_is_dirty {
                pieces.push(ExtentStatus { extent: part, state: ExtentState::Data });
                next = part.end();
                continue;
            }
            let below = self.base.device().extents(part).await?;
            pieces.extend(in_units(below, self.geometry.request_alignment.into(), self.header.volume));
            match pieces.last() {
                Some(last) if last.extent.end() >= part.end() => next = part.end(),
                _ => break,
            }
        }
        Ok(pieces)
    }
}
