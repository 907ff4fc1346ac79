//! What is known of the grains in memory: what is true of them, and what the device says instead.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use block::{Error, ErrorKind, Result};

use super::Change;
use crate::store::entry::{BODY_BYTES, Body, Entry};
use crate::store::layout::{Layout, SECTOR_BYTES};
use crate::store::map::StateMap;

/// So many sectors are looked at with one hold of the lock, which every request takes: some tenths of a millisecond.
pub(super) const SECTORS_AT_ONCE: usize = 512;

/// What is true of the grains now, and how the durable map differs.
pub(super) struct Live<E, X> {
    pub(super) map: StateMap<E>,
    /// What the policy keeps beside the map, under the same lock.
    pub(super) beside: X,
    /// The sectors in which the durable map differs, and what stands there.
    pub(super) behind: BTreeMap<u64, Box<Body>>,
    /// What the flush under way is going to write there.
    pub(super) coming: BTreeMap<u64, Box<Body>>,
    /// What was true of the grains that have left the store since the last flush, as the store has them still: it may be more than the
    /// durable map says. Of those that an earlier process has let go nobody knows.
    pub(super) last_held: BTreeMap<u64, E>,
    /// What the durable map says of the grains that are pinned, in sectors that have some.
    pub(super) pinned: BTreeMap<u64, Box<Body>>,
}

impl<E: Entry, X> Live<E, X> {
    pub(super) fn load_durable(&mut self, layout: &Layout, name: &str, first: u64, durable: &[u8]) -> Result<()> {
        for (index, sector) in
            (first..).zip(durable.chunks_exact(SECTOR_BYTES)).take_while(|(index, _)| *index < layout.sectors())
        {
            if let Some(body) = layout.decode_sector(index, sector, name)? {
                self.take(index, &body, name)?;
            }
        }
        Ok(())
    }

    pub(super) fn load_both(
        &mut self,
        layout: &Layout,
        name: &str,
        first: u64,
        durable: &[u8],
        running: &[u8],
    ) -> Result<()> {
        self.load_durable(layout, name, first, durable)?;
        let sectors = durable.chunks_exact(SECTOR_BYTES).zip(running.chunks_exact(SECTOR_BYTES));
        for (index, (durable, running)) in (first..layout.sectors()).zip(sectors) {
            if durable == running {
                continue;
            }
            let before = self.map.body(index);
            let body = layout.decode_sector(index, running, name)?.unwrap_or([0; BODY_BYTES]);
            self.take(index, &body, name)?;
            if before != self.map.lasting_body(index) {
                self.behind.insert(index, Box::new(before));
            }
        }
        Ok(())
    }

    fn take(&mut self, index: u64, body: &Body, name: &str) -> Result<()> {
        if self.map.set_body(index, body) {
            return Ok(());
        }
        let context = format!("{name} is damaged: sector {index} of its map has states that do not exist");
        Err(Error::new(ErrorKind::Corrupt, context))
    }

    pub(super) fn apply(&mut self, changes: &[Arc<Change<E>>]) {
        let Self { map, behind, last_held, .. } = self;
        for change in changes {
            // A run that is held may be as long as the volume, one that leaves is what one request has drained.
            if change.state.hides_base() {
                let again: Vec<u64> = last_held.range(change.run.clone()).map(|(grain, _)| *grain).collect();
                again.iter().for_each(|grain| _ = last_held.remove(grain));
            } else if !E::LEAVES_CHANGED {
                let held = change.run.clone().map(|grain| (grain, map.get(grain)));
                last_held.extend(held.filter(|(_, before)| before.hides_base()));
            }
            let known = E::sectors_of(&change.run).filter(|index| !behind.contains_key(index));
            let before: Vec<(u64, Body)> = known.map(|index| (index, map.lasting_body(index))).collect();
            map.fill(change.run.clone(), change.state);
            for (index, body) in before {
                if body != map.lasting_body(index) {
                    behind.insert(index, Box::new(body));
                }
            }
        }
    }

    /// Adds to `wanted` what the durable map should say, where it does not, of some sectors from `from` on; gives where it goes on. The
    /// sectors need not be of one moment, if all of them are of one before the flush.
    pub(super) fn begin_flush(&mut self, from: u64, wanted: &mut BTreeMap<u64, Box<Body>>) -> Option<u64> {
        let some: Vec<u64> = self.behind.range(from..).take(SECTORS_AT_ONCE).map(|(index, _)| *index).collect();
        for index in &some {
            let lasting = self.map.lasting_body(*index);
            if self.behind.get(index).is_some_and(|durable| **durable == lasting) {
                self.behind.remove(index);
            } else {
                self.coming.insert(*index, Box::new(lasting));
                wanted.insert(*index, Box::new(lasting));
            }
        }
        some.last().filter(|_| some.len() == SECTORS_AT_ONCE).map(|last| last + 1)
    }

    /// Pins what has left the store since the durable map was written, and gives the sectors that are recorded otherwise by that.
    pub(super) fn pin(&mut self) -> BTreeSet<u64> {
        let mut sectors = BTreeSet::new();
        for (index, durable) in &self.behind {
            let now = self.map.body(*index);
            for grain in 0..E::SECTOR_GRAINS {
                let state = E::of(durable, grain);
                if state.taken_back(E::of(&now, grain)).is_some() {
                    let state = self.last_held.get(&(*index * E::SECTOR_GRAINS + grain)).copied().unwrap_or(state);
                    let pinned = self.pinned.entry(*index).or_insert_with(|| Box::new([0; BODY_BYTES]));
                    state.fill(pinned, grain..grain + 1);
                    if !E::LEAVES_CHANGED {
                        sectors.insert(*index);
                    }
                }
            }
        }
        sectors
    }

    /// The grains of `run` that have left the store since the durable map was written, and what that says of them.
    pub(super) fn left(&self, run: Range<u64>) -> Vec<(u64, E)> {
        let durable = |grain: u64| Some(E::of(self.behind.get(&(grain / E::SECTOR_GRAINS))?, grain % E::SECTOR_GRAINS));
        let has_left = |grain: u64, state: &E| state.taken_back(self.map.get(grain)).is_some();
        let left = run.filter_map(|grain| Some((grain, durable(grain)?)).filter(|(_, state)| has_left(grain, state)));
        left.map(|(grain, state)| (grain, self.last_held.get(&grain).copied().unwrap_or(state))).collect()
    }

    /// What becomes of a pinned grain.
    pub(super) fn pinned_state(&self, grain: u64) -> Option<E> {
        let pinned = self.pinned.get(&(grain / E::SECTOR_GRAINS))?;
        E::of(pinned, grain % E::SECTOR_GRAINS).taken_back(self.map.get(grain))
    }

    pub(super) fn all_pinned(&self) -> impl Iterator<Item = (u64, E)> {
        let first = |index: u64| index * E::SECTOR_GRAINS;
        let grains = self.pinned.keys().flat_map(move |index| first(*index)..first(*index + 1));
        grains.filter(|grain| *grain < self.map.len()).filter_map(|grain| Some((grain, self.pinned_state(grain)?)))
    }

    pub(super) fn first_pinned(&self) -> Option<(u64, E)> {
        self.all_pinned().next()
    }

    /// The first grains that are pinned, one behind the other, in one map sector and all with one state.
    pub(super) fn first_pinned_run(&self) -> Option<(Range<u64>, E)> {
        let (first, state) = self.first_pinned()?;
        let sector_end = ((first / E::SECTOR_GRAINS + 1) * E::SECTOR_GRAINS).min(self.map.len());
        let is_alike = |grain: &u64| self.pinned_state(*grain) == Some(state);
        let count = (first..sector_end).take_while(is_alike).count() as u64;
        Some((first..first + count, state))
    }

    pub(super) fn unpin(&mut self, grain: u64) {
        let index = grain / E::SECTOR_GRAINS;
        let Some(pinned) = self.pinned.get_mut(&index) else { return };
        let at = grain % E::SECTOR_GRAINS;
        E::NOTHING.fill(pinned, at..at + 1);
        if pinned.iter().all(|byte| *byte == 0) {
            self.pinned.remove(&index);
        }
    }

    /// The grains that only the durable map says the store has.
    pub(super) fn only_durable(&self) -> Vec<u64> {
        let mut grains = Vec::new();
        for (index, durable) in &self.behind {
            let (first, now) = (index * E::SECTOR_GRAINS, self.map.body(*index));
            let left = |grain: &u64| E::of(durable, *grain).hides_base() && !E::of(&now, *grain).hides_base();
            grains.extend((0..E::SECTOR_GRAINS).filter(left).map(|grain| first + grain));
        }
        grains
    }

    pub(super) fn durable_body(&self, index: u64) -> Body {
        self.behind.get(&index).map_or_else(|| self.map.lasting_body(index), |body| **body)
    }

    /// The durable map says `written`, of some sectors of those that were coming.
    pub(super) fn note_durable(&mut self, written: impl Iterator<Item = (u64, Box<Body>)>) {
        for (index, body) in written {
            self.coming.remove(&index);
            if *body == self.map.lasting_body(index) {
                self.behind.remove(&index);
            } else {
                self.behind.insert(index, body);
            }
        }
    }

    /// A flush has ended.
    pub(super) fn forget_held(&mut self) {
        let behind = &self.behind;
        self.last_held.retain(|grain, _| behind.contains_key(&(grain / E::SECTOR_GRAINS)));
    }
}
