//! What another device has answered and not yet made durable, kept so that it can be written again.
//!
//! A write is kept from its answer to the end of a flush that began after its answer. The caller serialises overlapping
//! requests, so that answers to writes of the same bytes come in the order of execution.
//!
//! ```text
//!   answered, not durable            ──▶ replaces the contents that are kept of its bytes, and is kept
//!   answered, durable by itself      ──▶ removes the contents that are kept of its bytes: nothing older is written over it
//!                                        again; is kept itself only above a kept discard, which would discard it again
//!   discard                          ──▶ is kept whole, above the contents that it may leave readable
//!   flush that began at mark m, done ──▶ removes all answers up to m
//! ```
//!
//! So at most one write is kept of any byte. A discard is never cut: which bytes it changes depends on where it ends.
//! Data is kept in pieces with memory of their own. A request's buffer belongs to a pool that others wait for, and an
//! overwritten piece must not keep a large buffer alive.

use std::collections::BTreeMap;

use super::{Bytes, Data, Extent, Mutation, MutationKind, PAGE_BYTES};

/// What an entry counts for beside its data.
const ENTRY_BYTES: u64 = 128;

/// The size of a discard in the accounts: every forced write searches those that are kept.
const DISCARD_BYTES: u64 = 4096;

/// Data is kept in pieces of at most this size.
const PIECE_BYTES_MAX: u64 = 64 << 10;

/// Writes that were answered and that no flush covers yet.
#[derive(Debug, Default)]
pub struct Unflushed {
    /// Data and zeroes.
    contents: Contents,
    /// In the order of their answers.
    discards: Vec<Entry>,
    /// How many answers there were.
    answers: u64,
}

/// Mutations of different bytes, by their offset.
#[derive(Debug, Default)]
struct Contents {
    entries: BTreeMap<Bytes, Entry>,
    bytes: u64,
}

#[derive(Debug)]
struct Entry {
    /// Which answer it was.
    answer: u64,
    mutation: Mutation,
}

impl Unflushed {
    /// A write was answered, and was durable then if `is_durable`. Gives how much memory is used.
    pub fn answered(&mut self, mutation: &Mutation, is_durable: bool) -> Bytes {
        let extent = mutation.extent();
        self.answers += 1;
        match mutation.kind() {
            // What it discards may stay readable, and must then be the same again.
            MutationKind::Discard if !is_durable || !self.is_empty() => {
                self.discards.push(Entry { answer: self.answers, mutation: Mutation::discard(extent) });
            }
            MutationKind::Discard => {}
            MutationKind::Data(_) | MutationKind::Zeroes { .. } => {
                self.contents.remove(extent);
                let is_discarded = || self.discards.iter().any(|entry| entry.mutation.extent().overlaps(extent));
                if !is_durable || is_discarded() {
                    self.contents.keep(self.answers, mutation);
                }
            }
        }
        self.bytes()
    }

    /// A flush begins: what it covers.
    #[must_use]
    pub const fn mark(&self) -> u64 {
        self.answers
    }

    /// A flush has succeeded, which began at `mark`.
    pub fn flushed(&mut self, mark: u64) {
        self.contents.forget(mark);
        self.discards.retain(|entry| entry.answer > mark);
    }

    /// They need not be kept any more.
    pub fn clear(&mut self) {
        self.flushed(self.answers);
    }

    /// Whether nothing is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.contents.entries.is_empty() && self.discards.is_empty()
    }

    /// How much memory is used.
    #[must_use]
    pub const fn bytes(&self) -> Bytes {
        Bytes(self.contents.bytes + self.discards.len() as u64 * DISCARD_BYTES)
    }

    /// What is to be written again, in the order of the answers.
    #[must_use]
    pub fn to_replay(&self) -> Vec<Mutation> {
        let mut all: Vec<_> = self.contents.entries.values().chain(&self.discards).collect();
        all.sort_by_key(|entry| entry.answer);
        all.into_iter().map(|entry| entry.mutation.clone()).collect()
    }
}

impl Contents {
    /// Keeps `mutation`, of whose bytes nothing is kept, in pieces.
    fn keep(&mut self, answer: u64, mutation: &Mutation) {
        match mutation.kind() {
            MutationKind::Data(_) => {
                for piece in mutation.extent().split_at_multiples(PIECE_BYTES_MAX) {
                    self.insert(answer, own(&mutation.slice(piece)));
                }
            }
            MutationKind::Zeroes { .. } | MutationKind::Discard => self.insert(answer, own(mutation)),
        }
    }

    fn insert(&mut self, answer: u64, mutation: Mutation) {
        self.bytes += weight(&mutation);
        self.entries.insert(mutation.extent().offset, Entry { answer, mutation });
    }

    /// Removes `extent` from all that is kept.
    fn remove(&mut self, extent: Extent) {
        // Entries do not overlap, so at most one that begins before the extent reaches into it.
        let before = self.entries.range(..extent.offset).next_back();
        let first = before.filter(|(_, entry)| entry.mutation.extent().overlaps(extent)).map(|(offset, _)| *offset);
        let within = self.entries.range(extent.offset..extent.end()).map(|(offset, _)| *offset);
        let touched: Vec<_> = first.into_iter().chain(within).collect();
        for offset in touched {
            let Some(Entry { answer, mutation }) = self.entries.remove(&offset) else { continue };
            self.bytes -= weight(&mutation);
            let whole = mutation.extent();
            if whole.offset < extent.offset {
                self.insert(answer, own(&mutation.slice(Extent::between(whole.offset, extent.offset))));
            }
            if extent.end() < whole.end() {
                self.insert(answer, own(&mutation.slice(Extent::between(extent.end(), whole.end()))));
            }
        }
    }

    fn forget(&mut self, mark: u64) {
        let bytes = &mut self.bytes;
        self.entries.retain(|_, entry| {
            let is_kept = entry.answer > mark;
            if !is_kept {
                *bytes -= weight(&entry.mutation);
            }
            is_kept
        });
    }
}

/// The mutation with memory of its own. A forced write that is written again is covered by the flush that follows.
fn own(mutation: &Mutation) -> Mutation {
    match mutation.kind() {
        MutationKind::Data(data) => Mutation::data(mutation.extent().offset, Data::copy_of(data)),
        MutationKind::Zeroes { may_unmap } => Mutation::zeroes(mutation.extent(), *may_unmap),
        MutationKind::Discard => Mutation::discard(mutation.extent()),
    }
}

fn weight(mutation: &Mutation) -> u64 {
    match mutation.kind() {
        // A buffer takes whole pages.
        MutationKind::Data(data) => ENTRY_BYTES + (data.len() as u64).next_multiple_of(PAGE_BYTES as u64),
        MutationKind::Zeroes { .. } | MutationKind::Discard => ENTRY_BYTES,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SIZE: usize = 64;

    fn extent(offset: u64, length: u64) -> Extent {
        Extent::new(Bytes(offset), Bytes(length))
    }

    fn data(offset: u64, length: usize, value: u8) -> Mutation {
        Mutation::data(Bytes(offset), Data::copy_of(&vec![value; length]))
    }

    fn places(unflushed: &Unflushed) -> Vec<(u64, u64)> {
        let all = unflushed.to_replay();
        all.iter().map(|mutation| (mutation.extent().offset.0, mutation.extent().length.0)).collect()
    }

    #[test]
    fn a_durable_write_removes_what_is_kept_below_it_and_is_not_kept_itself() {
        let mut unflushed = Unflushed::default();
        unflushed.answered(&data(0, 16, 1), false);
        unflushed.answered(&data(4, 4, 2), true);
        assert_eq!(places(&unflushed), [(0, 4), (8, 8)]);
        unflushed.answered(&Mutation::zeroes(extent(0, 32), true), true);
        assert!(unflushed.is_empty() && unflushed.bytes() == Bytes::ZERO);
    }

    #[test]
    fn a_flush_forgets_what_was_answered_before_it_began_and_nothing_else() {
        let mut unflushed = Unflushed::default();
        unflushed.answered(&data(16, 8, 1), false);
        let mark = unflushed.mark();
        unflushed.answered(&data(0, 8, 2), false);
        unflushed.answered(&data(20, 4, 3), false);
        unflushed.flushed(mark);
        assert_eq!(places(&unflushed), [(0, 8), (20, 4)]);
        unflushed.clear();
        assert!(unflushed.is_empty() && unflushed.bytes() == Bytes::ZERO);
    }

    #[test]
    fn large_data_is_kept_in_pieces_so_that_little_left_of_it_takes_little_memory() {
        let mut unflushed = Unflushed::default();
        unflushed.answered(&data(4096, 1 << 20, 1), false);
        assert!(unflushed.bytes() >= Bytes::mib(1));
        unflushed.answered(&data(4096, (1 << 20) - 512, 2), true);
        assert_eq!(places(&unflushed), [(4096 + (1 << 20) - 512, 512)]);
        assert!(unflushed.bytes() <= Bytes::kib(8));
    }

    #[test]
    fn overwriting_the_same_bytes_takes_no_more_memory() {
        let mut unflushed = Unflushed::default();
        let once = unflushed.answered(&data(0, 4096, 1), false);
        for value in 0..100 {
            assert_eq!(unflushed.answered(&data(0, 4096, value), false), once);
        }
    }

    /// A server with a volatile cache: what survives its death is what was flushed or forced, and any part of the rest.
    #[derive(Clone)]
    struct Server {
        cached: [u8; SIZE],
        durable: [u8; SIZE],
        /// Which bytes may have become durable in the meantime, each with all values that it has had since.
        volatile: Vec<(usize, u8)>,
    }

    impl Server {
        /// A discard frees whole blocks of eight bytes and leaves the rest.
        fn write(&mut self, mutation: &Mutation) {
            let mut extent = mutation.extent();
            let value = match mutation.kind() {
                MutationKind::Data(data) => data[0],
                MutationKind::Zeroes { .. } => 0,
                MutationKind::Discard => {
                    let (start, end) = (extent.offset.align_up(8), extent.end().align_down(8));
                    extent = Extent::between(start, end.max(start));
                    0
                }
            };
            for at in extent.offset.as_usize()..extent.end().as_usize() {
                self.cached[at] = value;
                match mutation.fua {
                    true => {
                        self.volatile.retain(|(other, _)| *other != at);
                        self.durable[at] = value;
                    }
                    false => self.volatile.push((at, value)),
                }
            }
        }

        fn flush(&mut self) {
            self.durable = self.cached;
            self.volatile.clear();
        }

        /// Dies; `luck` says which of the volatile bytes survive.
        fn crash(&mut self, luck: u64) {
            for (number, (at, value)) in std::mem::take(&mut self.volatile).into_iter().enumerate() {
                if luck.rotate_left(number as u32 % 64) & 1 == 1 {
                    self.durable[at] = value;
                }
            }
            self.cached = self.durable;
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Write { offset: u64, length: u64, value: u8, fua: bool },
        Discard { offset: u64, length: u64, fua: bool },
        BeginFlush,
        EndFlush,
        Crash { luck: u64, replayed: usize, again: bool },
    }

    fn step() -> impl Strategy<Value = Step> {
        let place = || (0..SIZE as u64).prop_flat_map(|offset| (Just(offset), 1..=SIZE as u64 - offset));
        prop_oneof![
            6 => (place(), 0..4_u8, any::<bool>())
                .prop_map(|((offset, length), value, fua)| Step::Write { offset, length, value, fua }),
            1 => (place(), any::<bool>()).prop_map(|((offset, length), fua)| Step::Discard { offset, length, fua }),
            1 => Just(Step::BeginFlush),
            1 => Just(Step::EndFlush),
            2 => (any::<u64>(), 0..8_usize, any::<bool>())
                .prop_map(|(luck, replayed, again)| Step::Crash { luck, replayed, again }),
        ]
    }

    proptest! {
        #[test]
        fn what_was_answered_is_there_after_every_replay_and_what_was_durable_in_the_middle_of_one(
            steps in prop::collection::vec(step(), 1..40),
        ) {
            let mut server = Server { cached: [9; SIZE], durable: [9; SIZE], volatile: Vec::new() };
            let mut unflushed = Unflushed::default();
            // When each byte was written last, and whether that was answered as durable and no discard is written again
            // there.
            let mut written = [0; SIZE];
            let mut forced = [true; SIZE];
            let mut discarded = [false; SIZE];
            let mut flushing: Option<(u64, usize)> = None;
            for (now, step) in (1..).zip(steps) {
                match step {
                    Step::Write { offset, length, value, fua } => {
                        let mutation = match value {
                            0 => Mutation::zeroes(extent(offset, length), true),
                            value => data(offset, length as usize, value),
                        }.with_fua(fua);
                        server.write(&mutation);
                        unflushed.answered(&mutation, fua);
                        let range = offset as usize..(offset + length) as usize;
                        written[range.clone()].fill(now);
                        range.for_each(|at| forced[at] = fua && !discarded[at]);
                    }
                    Step::Discard { offset, length, fua } => {
                        let mutation = Mutation::discard(extent(offset, length)).with_fua(fua);
                        server.write(&mutation);
                        unflushed.answered(&mutation, fua);
                        let range = offset as usize..(offset + length) as usize;
                        written[range.clone()].fill(now);
                        forced[range.clone()].fill(false);
                        discarded[range].fill(true);
                    }
                    Step::BeginFlush => flushing = Some((unflushed.mark(), now)),
                    Step::EndFlush => {
                        if let Some((mark, then)) = flushing.take() {
                            server.flush();
                            unflushed.flushed(mark);
                            for at in 0..SIZE {
                                let is_covered = written[at] <= then;
                                forced[at] |= is_covered;
                                discarded[at] &= !is_covered;
                            }
                        }
                    }
                    Step::Crash { luck, replayed, again } => {
                        flushing = None;
                        let answered = server.cached;
                        server.crash(luck);
                        let replay = unflushed.to_replay();
                        if again {
                            replay.iter().take(replayed).for_each(|mutation| server.write(mutation));
                            server.crash(luck.reverse_bits());
                            for at in 0..SIZE {
                                prop_assert!(!forced[at] || server.cached[at] == answered[at], "byte {at} was undone");
                            }
                        }
                        replay.iter().for_each(|mutation| server.write(mutation));
                        prop_assert_eq!(server.cached, answered);
                    }
                }
            }
        }
    }
}
