//! Numbers that grow when something changes, for those who work without a lock and look afterwards whether it has.

use std::sync::atomic::{AtomicU32, Ordering};

/// So many of them, at most: a number that stands for several things costs a repetition now and then.
const STAMPS_MAX: usize = 1 << 16;

/// A number for each of many things, some of which share one.
pub(super) struct Stamps(Vec<AtomicU32>);

impl Stamps {
    /// For so many things.
    pub(super) fn new(things: u64) -> Self {
        let count = things.clamp(1, STAMPS_MAX as u64).next_power_of_two() as usize;
        Self((0..count).map(|_| AtomicU32::new(0)).collect())
    }

    fn of(&self, thing: u64) -> &AtomicU32 {
        &self.0[thing as usize & (self.0.len() - 1)]
    }

    pub(super) fn get(&self, thing: u64) -> u32 {
        self.of(thing).load(Ordering::SeqCst)
    }

    /// A number that grows when one of `things` changes.
    pub(super) fn sum(&self, things: std::ops::Range<u64>) -> u64 {
        let count = (things.end - things.start).min(self.0.len() as u64);
        (things.start..things.start + count).map(|thing| u64::from(self.get(thing))).sum()
    }

    /// `thing` changes.
    pub(super) fn raise(&self, thing: u64) {
        self.of(thing).fetch_add(1, Ordering::SeqCst);
    }

    /// All of `things` change.
    pub(super) fn raise_all(&self, things: std::ops::Range<u64>) {
        let count = (things.end - things.start).min(self.0.len() as u64);
        (things.start..things.start + count).for_each(|thing| self.raise(thing));
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.0.len() * size_of::<AtomicU32>()
    }
}
