//! The chunks in memory, and which of them goes first: a plain structure without waiting.
//!
//! The least alive goes first. A chunk's liveness is the age of the cache when it was last touched, and what the chunk is worth:
//!
//! ```text
//!   liveness = age + 1 + 2 x reads + 3 if it is yet to be sent        reads: the guest's, lately, at most 15
//! ```
//!
//! The age of the cache is the liveness of the last chunk that had to go (dynamic aging). So a chunk that nobody touches is overtaken by
//! those that come later, whatever it was worth. Of two with the same liveness the older goes. It grows as well when many chunks were
//! refused. The guest's reads are counted in a
//! sketch that forgets, for chunks that are not here as well. The figures say:
//!
//! - a chunk that is yet to be sent is worth more than one that was sent, all else being equal: its copy still needs it;
//! - a chunk that was sent and that the guest has read twice is worth more than one that waits for its copy alone.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use block::{Buffer, ChunkMap, Data, PackedState};

use crate::{FrequencySketch, Popularity};

/// What each recent read of the guest's adds to a chunk's liveness,
const READ_WORTH: u64 = 2;
/// up to so many.
const READS_MAX: u64 = 15;
/// What being yet to be sent adds.
const UNSENT_WORTH: u64 = 3;
/// So many counters of reads there are for each chunk of the cache,
const COUNTERS_PER_CHUNK: u64 = 4;
/// and at most so many.
const COUNTERS_MAX: u64 = 1 << 20;
/// Of so many reads for each counter the older count half.
const READS_PER_COUNTER: u64 = 2;

/// What is to be done with a chunk of the volume, here or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendState {
    /// The target lacks it.
    Unsent,
    /// The target has it.
    Sent,
    /// A write to it has failed or was abandoned, and may still reach the disk.
    Uncacheable,
}

impl PackedState for SendState {
    fn to_bits(self) -> u8 {
        self as u8
    }

    fn from_bits(bits: u8) -> Self {
        [Self::Unsent, Self::Sent, Self::Uncacheable][usize::from(bits)]
    }
}

/// A chunk in memory.
struct Entry {
    data: Data,
    /// The target has it, or it was read for a copy that is under way.
    is_sent: bool,
    rank: Rank,
}

/// Liveness, and among those with the same the order of coming.
type Rank = (u64, u64);

/// The chunks in memory.
pub(super) struct Entries {
    /// How many chunks there may be.
    room: u64,
    /// The most that there ever were.
    in_use_max: u64,
    /// How many places are given to chunks that are being copied in.
    reserved: u64,
    entries: BTreeMap<u64, Entry>,
    /// The chunks by their rank.
    order: BTreeSet<(Rank, u64)>,
    /// Those that are yet to be sent.
    unsent: BTreeSet<u64>,
    states: ChunkMap<SendState>,
    reads: FrequencySketch,
    age: u64,
    /// How many chunks were not taken in since it last grew for that.
    refused: u64,
    touches: u64,
    evictions: u64,
    evictions_unsent: u64,
}

impl Entries {
    /// No chunks of a volume of `chunks`, and room for `room`.
    pub(super) fn new(chunks: u64, room: u64) -> Self {
        let counters = (room.min(chunks) * COUNTERS_PER_CHUNK).clamp(1 << 10, COUNTERS_MAX);
        Self {
            room,
            in_use_max: 0,
            reserved: 0,
            entries: BTreeMap::new(),
            order: BTreeSet::new(),
            unsent: BTreeSet::new(),
            states: ChunkMap::new(chunks, SendState::Unsent),
            reads: FrequencySketch::new(counters as usize, u8::MAX, counters * READS_PER_COUNTER),
            age: 0,
            refused: 0,
            touches: 0,
            evictions: 0,
            evictions_unsent: 0,
        }
    }

    pub(super) const fn room(&self) -> u64 {
        self.room
    }

    /// How many chunks are here or on their way in.
    pub(super) fn in_use(&self) -> u64 {
        self.entries.len() as u64 + self.reserved
    }

    /// The most that there ever were.
    pub(super) const fn in_use_max(&self) -> u64 {
        self.in_use_max
    }

    pub(super) const fn evictions(&self) -> u64 {
        self.evictions
    }

    pub(super) const fn evictions_unsent(&self) -> u64 {
        self.evictions_unsent
    }

    pub(super) fn state(&self, chunk: u64) -> SendState {
        self.states.get(chunk)
    }

    /// How often the guest has read `chunk` lately.
    pub(super) fn reads(&self, chunk: u64) -> u64 {
        self.reads.count(chunk).into()
    }

    /// The bytes of `chunk`, if it is here.
    pub(super) fn get(&self, chunk: u64) -> Option<&Data> {
        self.entries.get(&chunk).map(|entry| &entry.data)
    }

    /// The guest reads `chunk`, which is here or not.
    pub(super) fn note_read(&mut self, chunk: u64) {
        self.reads.touch(chunk);
        self.rank_anew(chunk);
    }

    /// Makes room for `chunk`, which is not here, for a copy that is under way or not. Gives memory to reuse if another had to go.
    /// None if it would be the least alive.
    pub(super) fn reserve(&mut self, chunk: u64, for_copy: bool) -> Option<Option<Buffer>> {
        if self.state(chunk) == SendState::Uncacheable || self.entries.contains_key(&chunk) {
            return None;
        }
        if self.in_use() < self.room {
            self.reserved += 1;
            return Some(None);
        }
        let is_sent = for_copy || self.state(chunk) == SendState::Sent;
        let ((liveness, _), least) = *self.order.first()?;
        if liveness > self.liveness(chunk, is_sent) {
            self.note_refused();
            return None;
        }
        let evicted = self.remove(least)?;
        self.age = self.age.max(liveness);
        self.evictions += 1;
        self.evictions_unsent += u64::from(!evicted.is_sent);
        self.reserved += 1;
        Some(evicted.data.try_into_buffer().ok())
    }

    /// The room for a chunk is not needed after all.
    pub(super) fn give_back(&mut self) {
        self.reserved -= 1;
    }

    /// Takes `data` of `chunk` in, for which there is room.
    pub(super) fn put(&mut self, chunk: u64, data: Data, for_copy: bool) {
        self.reserved -= 1;
        let is_sent = for_copy || self.state(chunk) == SendState::Sent;
        self.entries.insert(chunk, Entry { data, is_sent, rank: (0, 0) });
        self.rank_anew(chunk);
        self.in_use_max = self.in_use_max.max(self.in_use());
    }

    /// Drops `chunks`. Gives their memory, to be freed outside a lock.
    pub(super) fn drop_range(&mut self, chunks: Range<u64>) -> Vec<Data> {
        let found: Vec<u64> = self.entries.range(chunks).map(|(chunk, _)| *chunk).collect();
        found.into_iter().filter_map(|chunk| self.remove(chunk)).map(|entry| entry.data).collect()
    }

    /// Replaces bytes of `chunk` from `at` on, if it is here. If somebody still reads it, it is dropped.
    pub(super) fn update(&mut self, chunk: u64, at: usize, bytes: &[u8]) {
        let Some(entry) = self.remove(chunk) else { return };
        let Ok(mut buffer) = entry.data.try_into_buffer() else { return };
        buffer[at..at + bytes.len()].copy_from_slice(bytes);
        self.entries.insert(chunk, Entry { data: buffer.freeze(), ..entry });
        self.rank_anew(chunk);
    }

    /// Never takes these chunks in again. Gives the memory of those that are here.
    pub(super) fn never_cache(&mut self, chunks: Range<u64>) -> Vec<Data> {
        self.states.set_range(chunks.clone(), SendState::Uncacheable);
        self.drop_range(chunks)
    }

    pub(super) fn mark_sent(&mut self, chunks: Range<u64>) {
        self.mark(chunks, SendState::Sent);
    }

    pub(super) fn mark_unsent(&mut self, chunks: Range<u64>) {
        self.mark(chunks, SendState::Unsent);
    }

    fn mark(&mut self, chunks: Range<u64>, state: SendState) {
        let mut from = chunks.start;
        while from < chunks.end {
            let (run, before) = self.states.run_at(from, chunks.end);
            from = run.end;
            if before != SendState::Uncacheable {
                self.states.set_range(run, state);
            }
        }
        let is_sent = state == SendState::Sent;
        let altered = self.entries.range_mut(chunks).filter(|(_, entry)| entry.is_sent != is_sent);
        let altered: Vec<u64> = altered
            .map(|(chunk, entry)| {
                entry.is_sent = is_sent;
                *chunk
            })
            .collect();
        altered.into_iter().for_each(|chunk| self.rank_anew(chunk));
    }

    /// The first run of chunks at or after `from` that are here and yet to be sent, of at most `chunks_max`.
    pub(super) fn next_unsent(&self, from: u64, chunks_max: u64) -> Option<Range<u64>> {
        let mut ahead = self.unsent.range(from..);
        let start = *ahead.next()?;
        let in_line = (start + 1..start.saturating_add(chunks_max)).zip(ahead).take_while(|(next, here)| next == *here);
        Some(start..start + 1 + in_line.count() as u64)
    }

    /// Drops everything. Gives it, to be freed outside a lock.
    pub(super) fn clear(&mut self) -> impl Sized + use<> {
        self.order.clear();
        self.unsent.clear();
        std::mem::take(&mut self.entries)
    }

    /// A chunk was the least alive and was not taken in. Once for as many as there is room for, all that is here gets older, so that
    /// what nobody reads any more goes in the end.
    const fn note_refused(&mut self) {
        self.refused += 1;
        if self.refused >= self.room {
            (self.age, self.refused) = (self.age + 1, 0);
        }
    }

    fn worth(&self, chunk: u64, is_sent: bool) -> u64 {
        1 + READ_WORTH * self.reads(chunk).min(READS_MAX) + if is_sent { 0 } else { UNSENT_WORTH }
    }

    fn liveness(&self, chunk: u64, is_sent: bool) -> u64 {
        self.age + self.worth(chunk, is_sent)
    }

    /// Puts `chunk`, if it is here, to its place in the order as of now.
    fn rank_anew(&mut self, chunk: u64) {
        let Some(is_sent) = self.entries.get(&chunk).map(|entry| entry.is_sent) else { return };
        self.touches += 1;
        let rank = (self.liveness(chunk, is_sent), self.touches);
        let entry = self.entries.get_mut(&chunk).expect("found just now");
        self.order.remove(&(std::mem::replace(&mut entry.rank, rank), chunk));
        self.order.insert((rank, chunk));
        match is_sent {
            true => self.unsent.remove(&chunk),
            false => self.unsent.insert(chunk),
        };
    }

    fn remove(&mut self, chunk: u64) -> Option<Entry> {
        let entry = self.entries.remove(&chunk)?;
        self.order.remove(&(entry.rank, chunk));
        self.unsent.remove(&chunk);
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::testing::Random;

    fn put(entries: &mut Entries, chunk: u64, for_copy: bool) -> bool {
        let is_taken = entries.reserve(chunk, for_copy).is_some();
        if is_taken {
            entries.put(chunk, Data::copy_of(&chunk.to_le_bytes()), for_copy);
        }
        is_taken
    }

    fn here(entries: &Entries) -> Vec<u64> {
        entries.entries.keys().copied().collect()
    }

    #[test]
    fn of_two_of_one_age_the_one_that_was_sent_goes_first() {
        let mut entries = Entries::new(100, 2);
        entries.mark_sent(7..8);
        assert!(put(&mut entries, 6, false) && put(&mut entries, 7, false));
        assert!(put(&mut entries, 8, false));
        assert_eq!((here(&entries), entries.evictions(), entries.evictions_unsent()), (vec![6, 8], 1, 0));
        // Sent by now, it is the least alive although it has come later.
        entries.mark_sent(8..9);
        assert!(put(&mut entries, 9, false));
        assert_eq!(here(&entries), [6, 9]);
        // It must be sent again: now the older one goes.
        entries.mark_sent(0..100);
        entries.mark_unsent(6..7);
        assert!(put(&mut entries, 10, false));
        assert_eq!(here(&entries), [6, 10]);
    }

    #[test]
    fn a_chunk_that_the_guest_reads_outlives_those_that_are_read_for_copies_until_it_is_old() {
        let mut entries = Entries::new(10_000, 4);
        entries.mark_sent(0..1);
        for _ in 0..3 {
            entries.note_read(0);
        }
        assert!(put(&mut entries, 0, false));
        for chunk in 1..12 {
            assert!(put(&mut entries, chunk, true), "{chunk}");
            assert!(entries.get(0).is_some(), "chunk {chunk} has driven out what the guest reads");
        }
        for chunk in 12..100 {
            put(&mut entries, chunk, true);
        }
        assert!(entries.get(0).is_none(), "what nobody reads any more stays for ever");
    }

    #[test]
    fn what_would_be_the_least_alive_is_not_taken_in_until_the_rest_is_old() {
        let mut entries = Entries::new(10_000, 4);
        for chunk in 0..4 {
            for _ in 0..15 {
                entries.note_read(chunk);
            }
            assert!(put(&mut entries, chunk, false));
        }
        assert!(!put(&mut entries, 4, true));
        assert_eq!((here(&entries), entries.evictions()), (vec![0, 1, 2, 3], 0));
        let offers = (4..10_000).take_while(|chunk| !put(&mut entries, *chunk, true)).count();
        assert!((100..200).contains(&offers), "{offers} offers");
    }

    #[test]
    fn what_may_still_be_written_is_never_taken_in() {
        let mut entries = Entries::new(10, 4);
        assert!(put(&mut entries, 3, false));
        assert_eq!(entries.never_cache(2..5).len(), 1);
        entries.mark_unsent(0..10);
        entries.mark_sent(3..4);
        assert!(!put(&mut entries, 3, false) && !put(&mut entries, 4, true) && put(&mut entries, 5, true));
    }

    #[test]
    fn runs_of_unsent_chunks_are_found_in_order() {
        let mut entries = Entries::new(100, 50);
        for chunk in [3, 4, 5, 9, 20] {
            assert!(put(&mut entries, chunk, chunk == 20));
        }
        assert_eq!(
            [0, 4, 6, 10].map(|from| entries.next_unsent(from, 10)),
            [Some(3..6), Some(4..6), Some(9..10), None]
        );
        assert_eq!((entries.next_unsent(0, 1), entries.next_unsent(0, 2)), (Some(3..4), Some(3..5)));
        entries.mark_sent(4..5);
        assert_eq!(entries.next_unsent(0, 10), Some(3..4));
        entries.mark_unsent(20..21);
        assert_eq!(entries.next_unsent(10, 10), Some(20..21), "it must be sent again");
    }

    /// Beside the slow and obvious way to find the least alive.
    #[test]
    fn the_least_alive_goes_whatever_was_done_before() {
        let mut random = Random::new(1);
        let mut entries = Entries::new(64, 8);
        for _ in 0..20_000 {
            let chunk = random.below(64);
            match random.below(6) {
                0 => entries.mark_sent(chunk..(chunk + 1 + random.below(3)).min(64)),
                1 => entries.mark_unsent(chunk..(chunk + 1 + random.below(3)).min(64)),
                2 => drop(entries.drop_range(chunk..chunk + 1)),
                3 => entries.note_read(chunk),
                _ => {
                    let ranks = entries.entries.iter().map(|(chunk, entry)| (entry.rank, *chunk));
                    let least = ranks.min().filter(|_| entries.in_use() == entries.room());
                    let was_here = entries.get(chunk).is_some();
                    if put(&mut entries, chunk, random.one_in(2)) {
                        assert!(least.is_none_or(|(_, least)| entries.get(least).is_none()), "another one went");
                        assert!(!was_here && entries.get(chunk).is_some());
                    }
                }
            }
            let ranks = entries.entries.iter().map(|(chunk, entry)| (entry.rank, *chunk));
            assert_eq!(ranks.collect::<BTreeSet<_>>(), entries.order);
            let unsent = entries.entries.iter().filter(|(_, entry)| !entry.is_sent).map(|(chunk, _)| *chunk);
            assert_eq!(unsent.collect::<BTreeSet<_>>(), entries.unsent);
            assert!(entries.in_use() <= entries.room());
        }
        assert!(entries.evictions() > 500 && entries.evictions_unsent() > 50, "{}", entries.evictions());
    }
}
