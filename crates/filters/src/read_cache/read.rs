//! How a volume is read through a cache.

use std::sync::atomic::Ordering;

use block::{Buffer, Bytes, Data, Extent, Result};
use futures::future::join_all;

use super::entries::SendState;
use super::write::range_within;
use super::{Inner, State};

/// A guest read of a part of an unsent chunk reads all of it, if the part is at least this part of the chunk,
const FETCH_SHARE: u64 = 4;
/// or if the guest has read the chunk so often lately, this read included,
const FETCH_READS: u64 = 2;
/// and the chunk has at most so many bytes: the guest waits for all of them.
const FETCH_BYTES_MAX: u64 = 256 << 10;

/// Who reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    Guest,
    Copy,
}

/// What is read of the device for a run of parts that are not here.
struct Plan<'a> {
    /// The run, and the rest of the chunks at its ends that are read whole.
    extent: Extent,
    fills: Vec<Fill<'a>>,
}

/// The read of a chunk that is to be kept. Dropped, it is not.
struct Fill<'a> {
    inner: &'a Inner,
    chunk: u64,
    extent: Extent,
}

impl Inner {
    pub(super) async fn read(&self, offset: Bytes, mut buffer: Buffer, reader: Reader) -> Result<Buffer> {
        let extent = Extent::new(offset, buffer.len().into());
        let (found, missed) = self.look(extent, reader);
        for (part, data) in found {
            buffer[range_within(extent, part)].copy_from_slice(&data);
        }
        match missed[..] {
            [] => Ok(buffer),
            [run] if run == extent => self.read_run(extent, buffer, reader).await,
            _ => {
                let reads = missed.iter().map(|run| {
                    let own = Buffer::unpooled(run.length.as_usize());
                    self.read_run(*run, own, reader)
                });
                for (run, read) in missed.iter().zip(join_all(reads).await) {
                    buffer[range_within(extent, *run)].copy_from_slice(&read?);
                }
                Ok(buffer)
            }
        }
    }

    /// The parts of `extent` that are here, and the runs of those that are not.
    fn look(&self, extent: Extent, reader: Reader) -> (Vec<(Extent, Data)>, Vec<Extent>) {
        let (mut found, mut missed) = (Vec::new(), Vec::<Extent>::new());
        let mut chunks_missed = 0;
        let mut state = self.state.lock();
        for part in extent.split_at_multiples(self.chunk.bytes()) {
            let chunk = self.chunk.index_of(part.offset).0;
            if reader == Reader::Guest {
                state.entries.note_read(chunk);
            }
            if let Some(data) = state.entries.get(chunk) {
                found.push((part, data.slice(range_within(self.extent_of(chunk), part))));
                continue;
            }
            chunks_missed += 1;
            match missed.last_mut() {
                Some(run) if run.end() == part.offset => run.length += part.length,
                _ => missed.push(part),
            }
        }
        drop(state);
        let (hits, misses) = match reader {
            Reader::Guest => (&self.counters.guest_hits, &self.counters.guest_misses),
            Reader::Copy => (&self.counters.copy_hits, &self.counters.copy_misses),
        };
        hits.fetch_add(found.len() as u64, Ordering::Relaxed);
        misses.fetch_add(chunks_missed, Ordering::Relaxed);
        (found, missed)
    }

    /// Reads a run of parts that were not here a moment ago.
    async fn read_run(&self, run: Extent, buffer: Buffer, reader: Reader) -> Result<Buffer> {
        let plan = self.plan(run, reader);
        let device = self.face(reader);
        let mut wide = None;
        if plan.extent != run {
            // What the guest has not asked for may be unreadable: that is not its error.
            wide = device.read(plan.extent.offset, Buffer::unpooled(plan.extent.length.as_usize())).await.ok();
        }
        let (mut buffer, read) = match &wide {
            None => (device.read(run.offset, buffer).await?, run),
            Some(wide) => {
                let mut buffer = buffer;
                buffer.copy_from_slice(&wide[range_within(plan.extent, run)]);
                (buffer, plan.extent)
            }
        };
        let mut kept = Vec::new();
        for fill in plan.fills.into_iter().filter(|fill| read.contains(fill.extent)) {
            if !run.contains(fill.extent) {
                self.counters.chunks_fetched.fetch_add(1, Ordering::Relaxed);
                self.counters.fetched_bytes.fetch_add(fill.extent.length.get(), Ordering::Relaxed);
            }
            let bytes = wide.as_deref().unwrap_or(&buffer);
            let (chunk, within) = (fill.chunk, range_within(read, fill.extent));
            if fill.keep(&bytes[within], reader) {
                kept.push(chunk);
            }
        }
        self.lay_over(run, &kept, &mut buffer);
        Ok(buffer)
    }

    /// Which chunks around `run` are read whole, and which are kept.
    fn plan(&self, run: Extent, reader: Reader) -> Plan<'_> {
        let mut state = self.state.lock();
        let mut extent = run;
        if reader == Reader::Guest {
            let parts = [run.offset, Bytes(run.end().get() - 1)].map(|at| self.extent_of(self.chunk.index_of(at).0));
            for whole in parts {
                let wider = Extent::between(extent.offset.min(whole.offset), extent.end().max(whole.end()));
                if wider != extent && self.is_worth_fetching(&state, run, whole) {
                    extent = wider;
                }
            }
            if extent.length.get() > u64::from(self.source.geometry().transfer_bytes_max) {
                extent = run;
            }
        }
        let mut fills = Vec::new();
        if !state.is_closed {
            for chunk in self.chunk.indices_of(extent) {
                let whole = self.extent_of(chunk);
                if extent.contains(whole)
                    && state.entries.state(chunk) != SendState::Uncacheable
                    && state.in_flight.begin_fill(whole)
                {
                    fills.push(Fill { inner: self, chunk, extent: whole });
                }
            }
        }
        // A chunk that would not be kept is not read whole.
        let kept = |whole: Extent| fills.iter().any(|fill| fill.extent == whole);
        let is_kept = |at: Bytes| kept(self.extent_of(self.chunk.index_of(at).0));
        let start = if is_kept(extent.offset) { extent.offset } else { run.offset };
        let end = if is_kept(Bytes(extent.end().get() - 1)) { extent.end() } else { run.end() };
        Plan { extent: Extent::between(start, end), fills }
    }

    /// Whether a guest read of `run` shall read all of the chunk `whole`, of which it reads a part: its copy must read it anyhow.
    fn is_worth_fetching(&self, state: &State, run: Extent, whole: Extent) -> bool {
        let chunk = self.chunk.index_of(whole.offset).0;
        let part = run.intersection(whole).map_or(0, |part| part.length.get());
        let is_large = part * FETCH_SHARE >= whole.length.get();
        let is_read_again = state.entries.reads(chunk) >= FETCH_READS && whole.length.get() <= FETCH_BYTES_MAX;
        state.entries.state(chunk) == SendState::Unsent && (is_large || is_read_again)
    }

    /// Lays over what the device has said whatever has come here meanwhile, but for `kept`, which is the same. Otherwise a reader that has
    /// the device's newer bytes of a write under way could be followed by one that finds the older ones here.
    fn lay_over(&self, run: Extent, kept: &[u64], buffer: &mut [u8]) {
        let state = self.state.lock();
        let parts = run.split_at_multiples(self.chunk.bytes());
        let here = parts.filter_map(|part| {
            let chunk = self.chunk.index_of(part.offset).0;
            let data = state.entries.get(chunk).filter(|_| kept.binary_search(&chunk).is_err())?;
            Some((part, data.slice(range_within(self.extent_of(chunk), part))))
        });
        let here: Vec<(Extent, Data)> = here.collect();
        drop(state);
        for (part, data) in here {
            buffer[range_within(run, part)].copy_from_slice(&data);
        }
    }
}

impl Fill<'_> {
    /// Keeps `bytes`, which were read since this began, if no write has come meanwhile and they are alive enough. Gives whether it does.
    fn keep(self, bytes: &[u8], reader: Reader) -> bool {
        let for_copy = reader == Reader::Copy;
        let mut state = self.inner.state.lock();
        if state.is_closed || !state.in_flight.is_current(self.extent) {
            self.inner.counters.outdated.fetch_add(u64::from(!state.is_closed), Ordering::Relaxed);
            return false;
        }
        let Some(memory) = state.entries.reserve(self.chunk, for_copy) else { return false };
        drop(state);
        // The last chunk of a volume is short, and so may its memory be.
        let memory = memory.filter(|memory| memory.capacity() >= bytes.len());
        let mut buffer = memory.unwrap_or_else(|| Buffer::unpooled(bytes.len()));
        buffer.set_len(bytes.len());
        buffer.copy_from_slice(bytes);
        let data = buffer.freeze();
        let mut state = self.inner.state.lock();
        let is_kept = state.in_flight.is_current(self.extent) && !state.is_closed;
        if is_kept {
            state.entries.put(self.chunk, data, for_copy);
        } else {
            state.entries.give_back();
            self.inner.counters.outdated.fetch_add(1, Ordering::Relaxed);
        }
        is_kept
    }
}

impl Drop for Fill<'_> {
    fn drop(&mut self) {
        self.inner.state.lock().in_flight.end_fill(self.extent);
    }
}
