//! Which blocks of a cache are still to come, in their order.

use std::collections::{BTreeMap, BTreeSet};

use env::Moment;

use super::Blocks;
use super::window::Window;

/// What is to come.
pub(super) struct List {
    pub(super) blocks: Vec<u64>,
    pub(super) next: usize,
    pub(super) is_complete: bool,
    /// Blocks that the source has, or had.
    pub(super) known: Blocks,
    /// Blocks of them that the guest has changed or asked for at the source since the list was made.
    pub(super) changed: Blocks,
    /// Of these and of what was asked for in vain, those that are to come once more.
    pub(super) again: BTreeSet<u64>,
    /// When the copier has asked for a block that has not come.
    pub(super) asked: BTreeMap<u64, Moment>,
    pub(super) window: Window,
}

impl List {
    /// None of so many blocks, of which so many are asked for at a time at most.
    pub(super) fn new(blocks: u64, in_flight_max: u32) -> Self {
        Self {
            blocks: Vec::new(),
            next: 0,
            is_complete: false,
            known: Blocks::new(blocks),
            changed: Blocks::new(blocks),
            again: BTreeSet::new(),
            asked: BTreeMap::new(),
            window: Window::new(in_flight_max),
        }
    }

    /// The next block to come, of `blocks` there are; `with_changed` those at last that were changed at the source.
    pub(super) fn next(&mut self, blocks: u64, with_changed: bool) -> Option<u64> {
        while let Some(block) = self.blocks.get(self.next).copied() {
            self.next += 1;
            if block < blocks && !self.asked.contains_key(&block) && (with_changed || !self.changed.contains(block)) {
                return Some(block);
            }
        }
        let next = self.again.iter().find(|block| with_changed && !self.asked.contains_key(block)).copied()?;
        self.again.remove(&next);
        Some(next)
    }

    /// Whether all of it has come.
    pub(super) fn is_through(&self) -> bool {
        self.is_complete && self.next >= self.blocks.len() && self.again.is_empty() && self.asked.is_empty()
    }

    /// What was asked for over a connection that is gone does not come.
    pub(super) fn give_up_asked(&mut self) {
        let asked = std::mem::take(&mut self.asked);
        self.again.extend(asked.into_keys());
    }

    /// More that the source has.
    pub(super) fn add(&mut self, blocks: &[u64]) {
        blocks.iter().for_each(|block| self.known.set(*block, true));
        if self.is_complete {
            // It has all of the list: these are more.
            blocks.iter().for_each(|block| self.changed.set(*block, true));
        }
        self.blocks.extend_from_slice(blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_the_guest_changes_at_the_source_waits_until_it_is_here() {
        let mut list = List::new(4, 128);
        list.add(&[3, 1, 2]);
        list.is_complete = true;
        list.changed.set(1, true);
        list.again.insert(1);
        let early: Vec<_> = std::iter::from_fn(|| list.next(4, false)).collect();
        assert_eq!(early, [3, 2], "its write may be under way");
        assert_eq!((list.next(4, true), list.next(4, true)), (Some(1), None));
        assert!(list.is_through());
    }
}
