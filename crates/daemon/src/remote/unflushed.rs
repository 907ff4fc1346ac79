//! What was passed on to another host and not flushed there yet.
//!
//! A write is kept from its answer to the end of a flush that began after its answer. It is written again in the order in
//! which the guest asked: of writes that overlap, the guest has waited for the earlier before it asked for the later, or
//! does not care.

use std::collections::BTreeMap;

use block::{Bytes, Data, Mutation, MutationKind};

/// What a write counts for beside its data.
const OVERHEAD: u64 = 128;

/// Writes in the order in which they were asked for.
#[derive(Default)]
pub(crate) struct Unflushed {
    writes: BTreeMap<u64, Kept>,
    bytes: u64,
    /// The number of the next write.
    next: u64,
    /// How many answers there were.
    answers: u64,
}

struct Kept {
    /// Which answer it was.
    answer: u64,
    mutation: Mutation,
}

impl Unflushed {
    /// A write begins: its number.
    pub(crate) fn begin(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// A write was answered and is kept; gives how much is.
    pub(crate) fn keep(&mut self, number: u64, mutation: Mutation) -> Bytes {
        self.answers += 1;
        self.bytes += weight(&mutation);
        self.writes.insert(number, Kept { answer: self.answers, mutation: own(mutation) });
        Bytes(self.bytes)
    }

    /// A flush begins: what it covers.
    pub(crate) const fn mark(&self) -> u64 {
        self.answers
    }

    /// A flush has succeeded, which began at `mark`.
    pub(crate) fn forget(&mut self, mark: u64) {
        let bytes = &mut self.bytes;
        self.writes.retain(|_, kept| {
            let stays = kept.answer > mark;
            if !stays {
                *bytes -= weight(&kept.mutation);
            }
            stays
        });
    }

    /// They need not be kept any more.
    pub(crate) fn clear(&mut self) {
        self.writes.clear();
        self.bytes = 0;
    }

    /// All of them, in order.
    pub(crate) fn all(&self) -> Vec<Mutation> {
        self.writes.values().map(|kept| kept.mutation.clone()).collect()
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
    fn a_flush_forgets_what_was_answered_before_it_began_and_nothing_else() {
        let mut unflushed = Unflushed::default();
        let (first, second) = (unflushed.begin(), unflushed.begin());
        // The later one is answered first.
        unflushed.keep(second, zeroes(512));
        let mark = unflushed.mark();
        unflushed.keep(first, zeroes(0));
        let places = |unflushed: &Unflushed| -> Vec<u64> {
            unflushed.all().iter().map(|mutation| mutation.extent().offset.0).collect()
        };
        assert_eq!(places(&unflushed), [0, 512]);
        unflushed.forget(mark);
        assert_eq!(places(&unflushed), [0]);
        let third = unflushed.begin();
        assert_eq!(unflushed.keep(third, zeroes(1024)), Bytes(2 * OVERHEAD));
        unflushed.forget(unflushed.mark());
        assert!(unflushed.all().is_empty() && unflushed.bytes == 0);
    }
}
