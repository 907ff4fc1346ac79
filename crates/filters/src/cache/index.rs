//! What a cache knows in memory beside the states of its places: where each block is, which goes next, and what is under way. All of it,
//! and the states, are under one lock.

use std::collections::{BTreeMap, BTreeSet};

use block::{Bytes, Error, ErrorKind, RangeGuard, Result};

use super::entry::CacheEntry;
use super::options::CachePolicy;
use super::policy::{Order, Policy, policy_of};
use super::streams::Streams;
use super::table::Table;
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
    /// Of what is recorded. The states name no block twice.
    ///
    /// # Errors
    /// Corrupt if they do, or name a block that does not exist, or a place that is not in use.
    pub(super) fn new(
        states: &States,
        policy: CachePolicy,
        places: u64,
        blocks: u64,
        sequential: Bytes,
        name: &str,
    ) -> Result<Self> {
        let damaged = |what: String| Error::new(ErrorKind::Corrupt, format!("{name} is damaged: {what}"));
        let mut index = Self {
            table: Table::new(places as usize),
            policy: policy_of(policy, places as usize),
            places: PlaceAllocator::new(places, []),
            streams: Streams::new(sequential),
            unrecorded: BTreeMap::new(),
            written: BTreeSet::new(),
            dirty_sectors: 0,
        };
        let mut used = Vec::new();
        for place in used_places(states, 0) {
            let entry = states.get(place);
            if place >= places || entry.block() >= blocks {
                let block = entry.block();
                return Err(damaged(format!("place {place} is of block {block}, and one of them does not exist")));
            }
            if index.find(states, entry.block()).is_some() {
                return Err(damaged(format!("block {} is in two places", entry.block())));
            }
            index.insert(place as u32, entry.block());
            index.dirty_sectors += u64::from(entry.dirty().count_ones());
            used.push(place);
        }
        index.places = PlaceAllocator::new(places, used);
        Ok(index)
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

    /// Uses `places` places from now on, where those that are taken away hold nothing.
    pub(super) fn resize(&mut self, states: &States, places: u64) {
        let before = self.places.count();
        if places > before {
            self.policy.resize(places as usize);
            self.places.set_count(places, |place| !states.get(place).is_free());
        } else {
            self.places.set_count(places, |_| false);
        }
    }

    /// Gives back the memory of places that were taken away, or has enough for those that were added.
    pub(super) fn rebuild(&mut self, states: &States) {
        let places = self.places.count() as usize;
        self.policy.resize(places);
        // Not from the states: one may change just now, and its place is not in the table then.
        let before = std::mem::replace(&mut self.table, Table::new(places));
        before.places().for_each(|place| self.table.insert(states.get(place.into()).block(), place));
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
