//! What was answered and is not known to be durable: written again when a server comes back that may have lost it.

use std::collections::BTreeMap;

use block::{Data, Mutation, MutationKind};

/// What an entry without contents counts for.
const ENTRY_BYTES: u64 = 128;

/// The writes since the last flush, in the order of asking.
#[derive(Default)]
pub(super) struct Kept {
    entries: BTreeMap<u64, Entry>,
    next: u64,
    bytes: u64,
    /// How many writes were answered, kept or not.
    answered: u64,
    /// How many of them a flush has made durable.
    flushed: u64,
    /// The number of the last answer to a write that was not kept.
    last_unkept: u64,
}

struct Entry {
    mutation: Mutation,
    /// The number of its answer, once there is one.
    answered: Option<u64>,
}

impl Kept {
    /// A write is about to be sent. Its bytes are copied: they are kept for longer than a guest's buffer may be.
    pub(super) fn add(&mut self, mutation: &Mutation) -> u64 {
        let own = match mutation.kind() {
            MutationKind::Data(data) => Mutation::data(mutation.extent().offset, Data::copy_of(data)),
            MutationKind::Zeroes { may_unmap } => Mutation::zeroes(mutation.extent(), *may_unmap),
            MutationKind::Discard => Mutation::discard(mutation.extent()),
        };
        let number = self.next;
        self.next += 1;
        self.bytes += bytes_of(&own);
        self.entries.insert(number, Entry { mutation: own, answered: None });
        number
    }

    /// A write was answered; `number` if it was kept.
    pub(super) fn answer(&mut self, number: Option<u64>) {
        self.answered += 1;
        match number.and_then(|number| self.entries.get_mut(&number)) {
            Some(entry) => entry.answered = Some(self.answered),
            None => self.last_unkept = self.answered,
        }
    }

    /// A write is durable, or nobody relies on it.
    pub(super) fn forget(&mut self, number: u64) {
        if let Some(entry) = self.entries.remove(&number) {
            self.bytes -= bytes_of(&entry.mutation);
        }
    }

    /// What a flush that begins now covers.
    pub(super) const fn mark(&self) -> u64 {
        self.answered
    }

    /// The flush that began at `mark` has succeeded.
    pub(super) fn flushed(&mut self, mark: u64) {
        self.flushed = self.flushed.max(mark);
        let flushed = self.flushed;
        self.entries.retain(|_, entry| entry.answered.is_none_or(|number| number > flushed));
        self.bytes = self.entries.values().map(|entry| bytes_of(&entry.mutation)).sum();
    }

    /// Nothing of what was answered can be written again: whoever flushes next must hear of it.
    pub(super) fn give_up(&mut self) {
        let answered = self.answered;
        self.flushed(answered);
    }

    /// Whether a server that is lost may have lost something that is not here.
    pub(super) const fn misses_something(&self) -> bool {
        self.last_unkept > self.flushed
    }

    /// What is to be written again, in order. What has no answer is left to whoever waits for one.
    pub(super) fn to_replay(&self) -> Vec<Mutation> {
        let answered = self.entries.values().filter(|entry| entry.answered.is_some());
        answered.map(|entry| entry.mutation.clone()).collect()
    }

    /// How much memory that takes.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }
}

fn bytes_of(mutation: &Mutation) -> u64 {
    match mutation.kind() {
        MutationKind::Data(data) => ENTRY_BYTES + data.len() as u64,
        MutationKind::Zeroes { .. } | MutationKind::Discard => ENTRY_BYTES,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Bytes;

    fn write(at: u64) -> Mutation {
        Mutation::data(Bytes(at), Data::copy_of(&[at as u8; 512]))
    }

    #[test]
    fn what_was_answered_after_a_flush_began_is_still_kept_and_what_has_no_answer_is_not_replayed() {
        let mut kept = Kept::default();
        let (first, second, third) = (kept.add(&write(0)), kept.add(&write(512)), kept.add(&write(1024)));
        kept.answer(Some(second));
        let mark = kept.mark();
        kept.answer(Some(first));
        kept.flushed(mark);
        let offsets: Vec<_> = kept.to_replay().iter().map(|mutation| mutation.extent().offset.get()).collect();
        assert_eq!(offsets, [0]);
        assert_eq!(kept.bytes(), 2 * (ENTRY_BYTES + 512));
        kept.forget(third);
        kept.flushed(kept.mark());
        assert_eq!((kept.bytes(), kept.to_replay().len()), (0, 0));
    }

    #[test]
    fn a_write_that_was_not_kept_is_missed_until_a_flush_that_began_after_it() {
        let mut kept = Kept::default();
        let mark = kept.mark();
        kept.answer(None);
        kept.flushed(mark);
        assert!(kept.misses_something());
        kept.flushed(kept.mark());
        assert!(!kept.misses_something());
    }
}
