//! What a cache knows in memory beside the states of its places: where each block is, which goes next, and what is under way. All of it,
//! and the states, are under one lock.

use std::collections::{BTreeMap, BTreeSet};

use block::{Bytes, Error, ErrorKind, RangeGuard, Result};

use super::entry::CacheEntry;
use super::options::CachePolicy;
use super::policy::{Order, Policy, policy_of};
use super::streams::Streams;
use super::table::{Moved, Table};
use crate::store::{PlaceAllocator, StateMap};

pub(super) type States = StateMap<CacheEntry>;

/// What is looked up. A place is in the table if, and only if, its state names a block, but for the moment in which that changes under the
/// block's range lock.
pub(super) struct Index {
    table: Table,
    policy: Box<dyn Policy>,
    pub(super) places: PlaceAllocator,
    pub(super) streams: Streams,
    /// Sectors that are valid though the record does not say so: they were written again, and are recorded later.
    unrecorded: BTreeMap<u32, u8>,
    /// Places whose dirty sectors are in the base, which was not flushed since, and that nobody wrote to since.
    pub(super) written: BTreeSet<u32>,
    /// How many sectors are dirty.
    pub(super) dirty_sectors: u64,
}

/// The place of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) place: u32,
    /// What is recorded of it.
    pub(super) entry: CacheEntry,
    /// The sectors that it has, recorded or not.
    pub(super) valid: u8,
}

impl Index {
    /// Over so many places, none of which it knows anything of yet: [`Filling`] tells it what is recorded.
    pub(super) fn new(policy: CachePolicy, places: u64, sequential: Bytes) -> Self {
        Self {
            table: Table::new(places as usize),
            policy: policy_of(policy, places as usize),
            places: PlaceAllocator::all_used(places),
            streams: Streams::new(sequential),
            unrecorded: BTreeMap::new(),
            written: BTreeSet::new(),
            dirty_sectors: 0,
        }
    }

    /// The place of a block.
    pub(super) fn find(&self, states: &States, block: u64) -> Option<Found> {
        let place = self.table.find(block, |place| states.get(place.into()).block())?;
        Some(self.found(states, place))
    }

    /// What is known of a place that holds a block.
    pub(super) fn found(&self, states: &States, place: u32) -> Found {
        let entry = states.get(place.into());
        let unrecorded = if self.unrecorded.is_empty() { None } else { self.unrecorded.get(&place) };
        Found { place, entry, valid: entry.valid() | unrecorded.copied().unwrap_or(0) }
    }

    /// `place` holds `block` now, and its state says so.
    pub(super) fn insert(&mut self, place: u32, block: u64) {
        self.table.insert(block, place);
        self.policy.insert(place, block);
    }

    /// The same of a block that goes before all others.
    pub(super) fn insert_last(&mut self, place: u32, block: u64) {
        self.table.insert(block, place);
        self.policy.insert_last(place, block);
    }

    /// `place` is about to hold its block no more. Its state still says so.
    pub(super) fn take_out(&mut self, states: &States, place: u32, was_evicted: bool) {
        let block = states.get(place.into()).block();
        self.table.remove(block, place, |place| states.get(place.into()).block());
        self.policy.remove(place, block, was_evicted);
        self.unrecorded.remove(&place);
        self.written.remove(&place);
    }

    /// The guest has asked for what is in `place`.
    pub(super) fn touch(&mut self, place: u32) {
        self.policy.touch(place);
    }

    /// Takes the next block out that may go: nothing of it is dirty in either map, and `lock` gives it to the caller alone.
    pub(super) fn evict(
        &mut self,
        states: &States,
        random: u64,
        lock: impl Fn(u64) -> Option<RangeGuard>,
    ) -> Option<(u32, RangeGuard)> {
        let Self { policy, places, .. } = self;
        let mut guard = None;
        let place = policy.choose(random, &mut |place| {
            let entry = states.get(place.into());
            // What is being taken away is emptied, and not used again.
            if entry.dirty() == 0 && !places.is_retired(place.into()) && u64::from(place) < places.count() {
                guard = lock(entry.block());
            }
            guard.is_some()
        })?;
        self.take_out(states, place, true);
        Some((place, guard?))
    }

    /// Sectors of a place become valid; the record is told later.
    pub(super) fn add_unrecorded(&mut self, place: u32, sectors: u8) {
        if sectors != 0 {
            *self.unrecorded.entry(place).or_default() |= sectors;
        }
    }

    /// Sectors of a place are valid no more, or recorded.
    pub(super) fn remove_unrecorded(&mut self, place: u32, sectors: u8) {
        if let Some(mask) = self.unrecorded.get_mut(&place) {
            *mask &= !sectors;
            if *mask == 0 {
                self.unrecorded.remove(&place);
            }
        }
    }

    /// How many places have such sectors.
    pub(super) fn unrecorded_count(&self) -> usize {
        self.unrecorded.len()
    }

    /// Those places, at most `max`, neighbours together.
    pub(super) fn unrecorded_places(&self, max: usize) -> Vec<u32> {
        self.unrecorded.keys().take(max).copied().collect()
    }

    /// Goes on towards `places` places, by `max` at most; whether it is there. Those that are taken away are given out no more, and may hold
    /// something still. Before there are more, [`begin_table`](Self::begin_table) makes room for what they will hold.
    pub(super) fn resize_some(&mut self, states: &States, places: u64, max: u64) -> bool {
        let before = self.places.count();
        let next = places.clamp(before.saturating_sub(max), before + max);
        if next > before {
            self.policy.resize(next as usize);
        }
        self.places.set_count(next);
        let mut place = before;
        while place < next {
            let (run, entry) = states.run_at(place, next);
            place = run.end;
            if entry.is_free() {
                self.places.add_free(run);
            }
        }
        next == places
    }

    /// Gives back what the policy needs for places that were taken away and hold nothing, of `max` of them at most; whether that is all.
    pub(super) fn trim_some(&mut self, max: usize) -> bool {
        let (known, places) = (self.policy.places(), self.places.count() as usize);
        let next = places.max(known.saturating_sub(max));
        if next < known {
            self.policy.resize(next);
        }
        next == places
    }

    /// The table of blocks is made anew, for so many places.
    pub(super) fn begin_table(&mut self, places: u64) {
        self.table.begin_anew(places as usize);
    }

    /// The next part of that.
    pub(super) fn move_table(&mut self, states: &States, max: usize) -> Moved {
        // What is in the table has a state that names its block, whatever changes just now.
        self.table.move_some(max, |place| states.get(place.into()).block())
    }

    /// The places that hold a block, as they stand.
    pub(super) fn order(&self) -> Order {
        self.policy.order()
    }

    /// What it takes in memory, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        // An entry of a tree takes twice its size at most, and what is retired or free one of them.
        let trees = 4 * self.unrecorded.len() + 2 * self.written.len() + 8 * self.places.retired_count();
        self.table.memory_bytes()
            + self.policy.memory_bytes()
            + self.places.memory_bytes()
            + trees * size_of::<u32>()
            + size_of::<Self>()
    }
}

/// So many places are told to an index at a time.
const FILLED_AT_ONCE: usize = 256;
/// So many bits for each place say which blocks were seen: a block that finds its bit set is looked for in the index.
const SEEN_BITS: u64 = 8;

/// What is recorded is told to an index, some places at a time: it takes half a minute for a cache of 1 TiB.
///
/// Each place goes to another part of each table. So what is about to be touched is read first, for many places together, and a bitmap tells
/// that a block is not there yet: to look it up would touch the states of others as well.
pub(super) struct Filling<'a> {
    places: u64,
    blocks: u64,
    /// The place that is next.
    next: u64,
    some: Vec<(u32, CacheEntry)>,
    seen: Vec<u64>,
    /// What the cache is called.
    name: &'a str,
}

impl<'a> Filling<'a> {
    /// Of so many places of a volume of so many blocks.
    pub(super) fn new(places: u64, blocks: u64, name: &'a str) -> Self {
        let bits = blocks.min(places * SEEN_BITS);
        let seen = vec![0; bits.div_ceil(64) as usize];
        Self { places, blocks, next: 0, some: Vec::with_capacity(FILLED_AT_ONCE), seen, name }
    }

    /// Tells `index` of `max` places more; whether there are more.
    ///
    /// # Errors
    /// Corrupt if the states name a block twice, or one that does not exist, or a place that is not in use.
    pub(super) fn step(&mut self, states: &States, index: &mut Index, max: u64) -> Result<bool> {
        let end = (self.next + max).min(states.len());
        while self.next < end {
            let (place, entry) = (self.next, states.get(self.next));
            if entry.is_free() {
                let (run, _) = states.run_at(place, end);
                self.next = run.end;
                index.places.add_free(run);
                continue;
            }
            if place >= self.places || entry.block() >= self.blocks {
                let block = entry.block();
                return Err(self.damaged(&format!("place {place} is of block {block}, and one of them does not exist")));
            }
            self.some.push((place as u32, entry));
            self.next += 1;
            if self.some.len() == FILLED_AT_ONCE {
                self.tell(states, index)?;
            }
        }
        self.tell(states, index)?;
        Ok(self.next < states.len())
    }

    fn tell(&mut self, states: &States, index: &mut Index) -> Result<()> {
        let mut glanced = 0;
        for (_, entry) in &self.some {
            let (word, _) = self.bit_of(entry.block());
            glanced ^= self.seen[word] ^ u64::from(index.table.glance(entry.block()));
        }
        // Otherwise the compiler would leave the reads out.
        std::hint::black_box(glanced);
        for number in 0..self.some.len() {
            let (place, entry) = self.some[number];
            let (word, bit) = self.bit_of(entry.block());
            // Two blocks of a large volume may share a bit.
            if self.seen[word] & bit != 0 && index.find(states, entry.block()).is_some() {
                return Err(self.damaged(&format!("block {} is in two places", entry.block())));
            }
            self.seen[word] |= bit;
            index.insert(place, entry.block());
            index.dirty_sectors += u64::from(entry.dirty().count_ones());
        }
        self.some.clear();
        Ok(())
    }

    /// The bit of a block: the word in which it is, and which one of it.
    const fn bit_of(&self, block: u64) -> (usize, u64) {
        let bit = block % (self.seen.len() as u64 * 64);
        ((bit / 64) as usize, 1 << (bit % 64))
    }

    fn damaged(&self, what: &str) -> Error {
        Error::new(ErrorKind::Corrupt, format!("{} is damaged: {what}", self.name))
    }
}

/// The places at or behind `from` that hold a block.
pub(super) fn used_places(states: &States, from: u64) -> impl Iterator<Item = u64> {
    let mut next = from;
    std::iter::from_fn(move || {
        while next < states.len() {
            let (run, entry) = states.run_at(next, states.len());
            if entry.is_free() {
                next = run.end;
            } else {
                next += 1;
                return Some(next - 1);
            }
        }
        None
    })
}
