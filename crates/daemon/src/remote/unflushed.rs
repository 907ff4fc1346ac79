//! What was passed on to another host and not flushed there yet.
//!
//! A write is kept from its answer to the end of a flush that began after its answer. Writes are written again in the order
//! of their answers: of those that overlap, the later one was not sent before the earlier one was kept. One that is durable
//! by itself is kept if anything is: what is written again may lie below it.

use std::collections::VecDeque;

use block::{Bytes, Data, Mutation, MutationKind};

/// What a write counts for beside its data.
const OVERHEAD: u64 = 128;

/// Writes in the order in which they were answered.
#[derive(Default)]
pub(crate) struct Unflushed {
    writes: VecDeque<Kept>,
    bytes: u64,
    /// How many answers there were.
    answers: u64,
}

struct Kept {
    /// Which answer it was.
    answer: u64,
    mutation: Mutation,
}

impl Unflushed {
    /// A write was answered and is kept, if it need be; gives how much is.
    pub(crate) fn keep(&mut self, mutation: Mutation) -> Bytes {
        if mutation.fua && self.writes.is_empty() {
            return Bytes(self.bytes);
        }
        self.answers += 1;
        self.bytes += weight(&mutation);
        self.writes.push_back(Kept { answer: self.answers, mutation: own(mutation) });
        Bytes(self.bytes)
    }

    /// A flush begins: what it covers.
    pub(crate) const fn mark(&self) -> u64 {
        self.answers
    }

    /// A flush has succeeded, which began at `mark`.
    pub(crate) fn forget(&mut self, mark: u64) {
        while let Some(kept) = self.writes.pop_front_if(|kept| kept.answer <= mark) {
            self.bytes -= weight(&kept.mutation);
        }
    }

    /// They need not be kept any more.
    pub(crate) fn clear(&mut self) {
        self.writes.clear();
        self.bytes = 0;
    }

    /// All of them, in order.
    pub(crate) fn all(&self) -> Vec<Mutation> {
        self.writes.iter().map(|kept| kept.mutation.clone()).collect()
    }
}

/// The mutation with bytes of its own: those of requests in flight are in a pool that others wait for.
fn own(mutation: Mutation) -> Mutation {
    match mutation.kind() {
        MutationKind::Data(data) => Mutation::data(mutation.extent().offset, Data::copy_of(data)),
        MutationKind::Zeroes { .. } | MutationKind::Discard => mutation,
    }
}

fn weight(mutation: &Mutation) -> u64 {
    match mutation.kind() {
        MutationKind::Data(data) => OVERHEAD + data.len() as u64,
        MutationKind::Zeroes { .. } | MutationKind::Discard => OVERHEAD,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Extent;

    fn zeroes(at: u64) -> Mutation {
        Mutation::zeroes(Extent::new(Bytes(at), Bytes(512)), true)
    }

    #[test]
    fn a_durable_write_is_kept_above_those_that_are_not() {
        let mut unflushed = Unflushed::default();
        assert_eq!(unflushed.keep(zeroes(0).with_fua(true)), Bytes::ZERO);
        unflushed.keep(zeroes(0));
        unflushed.keep(zeroes(512).with_fua(true));
        assert_eq!(unflushed.all().len(), 2);
    }

    #[test]
    fn a_flush_forgets_what_was_answered_before_it_began_and_nothing_else() {
        let mut unflushed = Unflushed::default();
        unflushed.keep(zeroes(512));
        let mark = unflushed.mark();
        unflushed.keep(zeroes(0));
        let places = |unflushed: &Unflushed| -> Vec<u64> {
            unflushed.all().iter().map(|mutation| mutation.extent().offset.0).collect()
        };
        assert_eq!(places(&unflushed), [512, 0]);
        unflushed.forget(mark);
        assert_eq!(places(&unflushed), [0]);
        assert_eq!(unflushed.keep(zeroes(1024)), Bytes(2 * OVERHEAD));
        unflushed.forget(unflushed.mark());
        assert!(unflushed.all().is_empty() && unflushed.bytes == 0);
    }
}
