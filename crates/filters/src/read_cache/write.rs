//! How the source is changed under a cache.

use block::{Bytes, Extent, Mutation, MutationKind, Result};

use super::Inner;

impl Inner {
    pub(super) async fn write(&self, mutation: Mutation) -> Result<()> {
        let number = self.state.lock().in_flight.begin_write(mutation.extent());
        let mut under_way = WriteUnderWay { inner: self, number, mutation, is_answered: false };
        let answer = self.source.write(under_way.mutation.clone()).await;
        under_way.is_answered = answer.is_ok();
        answer
    }

    /// The source has answered a write, which nobody has been told of yet.
    fn answered(&self, number: u64, mutation: &Mutation) {
        let chunks = self.chunk.indices_of(mutation.extent());
        let mut state = self.state.lock();
        let is_alone = state.in_flight.end_write(number);
        let dropped = match mutation.kind() {
            MutationKind::Data(data) if is_alone => {
                for part in mutation.extent().split_at_multiples(self.chunk.bytes()) {
                    let chunk = self.chunk.index_of(part.offset).0;
                    let within = (part.offset - self.extent_of(chunk).offset).as_usize();
                    state.entries.update(chunk, within, &data[range_within(mutation.extent(), part)]);
                }
                Vec::new()
            }
            _ => state.entries.drop_range(chunks),
        };
        drop(state);
        // Outside the lock: it may be a lot of memory.
        drop(dropped);
    }

    /// A write has failed or was abandoned: it may still reach the disk, or a part of it.
    fn abandoned(&self, number: u64, extent: Extent) {
        let chunks = self.chunk.indices_of(extent);
        let mut state = self.state.lock();
        state.in_flight.end_write(number);
        let dropped = state.entries.never_cache(chunks);
        drop(state);
        drop(dropped);
    }
}

/// Which bytes of a buffer that holds `whole` are those of `part`.
pub(super) fn range_within(whole: Extent, part: Extent) -> std::ops::Range<usize> {
    let start: Bytes = part.offset - whole.offset;
    start.as_usize()..(start + part.length).as_usize()
}

/// A write, until it has ended in whichever way.
struct WriteUnderWay<'a> {
    inner: &'a Inner,
    number: u64,
    mutation: Mutation,
    is_answered: bool,
}

impl Drop for WriteUnderWay<'_> {
    fn drop(&mut self) {
        match self.is_answered {
            true => self.inner.answered(self.number, &self.mutation),
            false => self.inner.abandoned(self.number, self.mutation.extent()),
        }
    }
}
