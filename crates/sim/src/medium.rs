//! What a simulated disk holds: the bytes that reads see. For every sector that is not yet durable it also holds all
//! that a power loss could leave there.
//!
//! This cache says what survives and takes no time. [`crate::model::PageCache`] says when, over gigabytes and without
//! bytes. docs/simulator.md says why they are two.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use block::{Bytes, Extent, ExtentState, ExtentStatus, MutationKind};

use crate::rng::Rng;

/// Power loss tears writes at this size.
pub(crate) const SECTOR_BYTES: u64 = 512;

/// Space is allocated in units of this.
const BLOCK_BYTES: u64 = block::BLOCK_BYTES;

/// A sector whose newest bytes, those that reads see, are in a volatile cache.
#[derive(Clone)]
struct Unflushed {
    /// What certainly survives.
    durable: Place,
    /// What was written since and not overwritten before a flush began, oldest first, without the newest.
    older: Vec<Version>,
    newest: Stamp,
}

#[derive(Clone)]
struct Version {
    stamp: Stamp,
    bytes: Place,
}

#[derive(Clone, Copy)]
struct Stamp {
    sequence: u64,
    /// A flush of it failed: no later flush makes it durable, though it may be so by chance.
    abandoned: bool,
}

/// Where the bytes of one sector are in the [`Attic`].
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place(u32);

impl Place {
    /// Zeroes are not kept anywhere.
    const ZEROES: Self = Self(u32::MAX);
}

/// Bytes of sectors that reads do not see any more. Its memory is used again and again.
#[derive(Clone, Default)]
struct Attic {
    bytes: Vec<u8>,
    free: Vec<Place>,
}

impl Attic {
    fn put(&mut self, bytes: &[u8]) -> Place {
        if is_zero(bytes) {
            return Place::ZEROES;
        }
        let place = self.free.pop().unwrap_or_else(|| {
            let next = self.bytes.len() / SECTOR_BYTES as usize;
            self.bytes.resize(self.bytes.len() + SECTOR_BYTES as usize, 0);
            Place(u32::try_from(next).expect("a simulated disk has no 2 TiB"))
        });
        self.put_at(place, bytes);
        place
    }

    fn replace(&mut self, place: &mut Place, bytes: &[u8]) {
        if *place == Place::ZEROES || is_zero(bytes) {
            self.take(*place);
            *place = self.put(bytes);
        } else {
            self.put_at(*place, bytes);
        }
    }

    fn put_at(&mut self, place: Place, bytes: &[u8]) {
        let start = place.0 as usize * SECTOR_BYTES as usize;
        self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
    }

    fn get(&self, place: Place, length: usize) -> &[u8] {
        if place == Place::ZEROES {
            return &[0; SECTOR_BYTES as usize][..length];
        }
        let start = place.0 as usize * SECTOR_BYTES as usize;
        &self.bytes[start..start + length]
    }

    fn take(&mut self, place: Place) {
        if place != Place::ZEROES {
            self.free.push(place);
        }
    }

    fn take_all(&mut self, sector: Unflushed) {
        self.take(sector.durable);
        sector.older.into_iter().for_each(|version| self.take(version.bytes));
    }
}

/// Bytes, allocation and durability of one disk.
#[derive(Clone)]
pub(crate) struct Medium {
    size: Bytes,
    bytes: Vec<u8>,
    allocated: Vec<bool>,
    allocated_blocks: u64,
    unflushed: BTreeMap<u64, Unflushed>,
    attic: Attic,
    sequence: u64,
    /// Flushes under way: versions written before they began must be kept apart.
    flushes: usize,
}

impl Medium {
    pub(crate) fn new(size: Bytes) -> Self {
        Self {
            size,
            bytes: vec![0; size.as_usize()],
            allocated: vec![false; size.0.div_ceil(BLOCK_BYTES) as usize],
            allocated_blocks: 0,
            unflushed: BTreeMap::new(),
            attic: Attic::default(),
            sequence: 0,
            flushes: 0,
        }
    }

    /// All bytes as reads see them.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes of `extent` as reads see them.
    pub(crate) fn read(&self, extent: Extent) -> &[u8] {
        &self.bytes[extent.offset.as_usize()..extent.end().as_usize()]
    }

    /// How many new blocks data in `extent` would allocate.
    pub(crate) fn blocks_needed(&self, extent: Extent) -> u64 {
        blocks(extent).filter(|block| !self.allocated[*block as usize]).count() as u64
    }

    pub(crate) const fn allocated(&self) -> Bytes {
        Bytes(self.allocated_blocks * BLOCK_BYTES)
    }

    fn allocate(&mut self, extent: Extent) {
        for block in blocks(extent) {
            let allocated = &mut self.allocated[block as usize];
            self.allocated_blocks += u64::from(!*allocated);
            *allocated = true;
        }
    }

    /// The part of `extent` whose blocks it covers wholly (the volume's last block may be short).
    fn whole_blocks(&self, extent: Extent) -> Option<Extent> {
        let start = extent.offset.align_up(BLOCK_BYTES);
        let end = if extent.end() == self.size { extent.end() } else { extent.end().align_down(BLOCK_BYTES) };
        (start < end).then(|| Extent::between(start, end))
    }

    /// Carries out the part `part` of a mutation of `whole`. A discard may leave what no whole block covers.
    pub(crate) fn apply(&mut self, whole: Extent, kind: &MutationKind, part: Extent, durable: bool, rng: &Rng) {
        match kind {
            MutationKind::Data(data) => {
                self.allocate(part);
                let from = (part.offset - whole.offset).as_usize();
                self.store(part, Some(&data[from..from + part.length.as_usize()]), durable, rng);
            }
            MutationKind::Zeroes { may_unmap } => {
                self.store(part, None, durable, rng);
                match may_unmap {
                    true => self.free(part),
                    false => self.allocate(part),
                }
            }
            MutationKind::Discard => {
                if let Some(inner) = self.whole_blocks(part) {
                    self.store(inner, None, durable, rng);
                    self.free(inner);
                }
            }
        }
    }

    fn free(&mut self, extent: Extent) {
        let Some(inner) = self.whole_blocks(extent) else { return };
        for block in blocks(inner) {
            let allocated = &mut self.allocated[block as usize];
            self.allocated_blocks -= u64::from(*allocated);
            *allocated = false;
        }
    }

    /// Puts `data` (or zeroes) in `extent`, remembering what a power loss could bring back.
    fn store(&mut self, extent: Extent, data: Option<&[u8]>, durable: bool, rng: &Rng) {
        self.sequence += 1;
        for sector in self.sectors(extent) {
            match durable {
                true => {
                    if let Some(gone) = self.unflushed.remove(&sector) {
                        self.attic.take_all(gone);
                    }
                }
                false => self.remember(sector, rng),
            }
        }
        let place = &mut self.bytes[extent.offset.as_usize()..extent.end().as_usize()];
        match data {
            Some(data) => place.copy_from_slice(data),
            None => place.fill(0),
        }
    }

    /// What reads see in `sector` is about to be overwritten in the cache.
    fn remember(&mut self, sector: u64, rng: &Rng) {
        let Self { unflushed, attic, bytes, .. } = self;
        let start = (sector * SECTOR_BYTES) as usize;
        let before = &bytes[start..(start + SECTOR_BYTES as usize).min(bytes.len())];
        let stamp = Stamp { sequence: self.sequence, abandoned: false };
        match unflushed.entry(sector) {
            Entry::Vacant(vacant) => {
                vacant.insert(Unflushed { durable: attic.put(before), older: Vec::new(), newest: stamp });
            }
            Entry::Occupied(entry) => {
                let entry = entry.into_mut();
                // Without a flush under way the cache keeps one version of a sector, and may have written the last one
                // back by itself.
                if self.flushes == 0 {
                    if rng.chance(0.25) {
                        attic.replace(&mut entry.durable, before);
                    }
                    entry.older.drain(..).for_each(|version| attic.take(version.bytes));
                } else {
                    entry.older.push(Version { stamp: entry.newest, bytes: attic.put(before) });
                }
                entry.newest = stamp;
            }
        }
    }

    /// Begins a flush of everything written so far.
    pub(crate) const fn begin_flush(&mut self) -> u64 {
        self.flushes += 1;
        self.sequence
    }

    /// Ends a flush that nobody waits for any more, without any effect.
    pub(crate) const fn abandon_flush(&mut self) {
        self.flushes -= 1;
    }

    /// Ends a flush that began at `cut`. After a failure nobody will ever make durable what it covered.
    pub(crate) fn end_flush(&mut self, cut: u64, success: bool) {
        self.flushes -= 1;
        let attic = &mut self.attic;
        self.unflushed.retain(|_, sector| {
            let stamps = sector.older.iter_mut().map(|version| &mut version.stamp).chain([&mut sector.newest]);
            if !success {
                stamps.filter(|stamp| stamp.sequence <= cut).for_each(|stamp| stamp.abandoned = true);
                return true;
            }
            let covered = stamps.filter(|stamp| stamp.sequence <= cut);
            let Some((last, is_abandoned)) = covered.map(|stamp| stamp.abandoned).enumerate().last() else {
                return true;
            };
            if is_abandoned {
                return true;
            }
            if last == sector.older.len() {
                attic.take(sector.durable);
                sector.older.drain(..).for_each(|version| attic.take(version.bytes));
                return false;
            }
            attic.take(std::mem::replace(&mut sector.durable, sector.older[last].bytes));
            sector.older.drain(..=last).rev().skip(1).for_each(|version| attic.take(version.bytes));
            true
        });
    }

    /// Takes the power away: every sector keeps what is durable or anything that was written to it since.
    pub(crate) fn lose_power(&mut self, rng: &Rng) -> usize {
        let unflushed = std::mem::take(&mut self.unflushed);
        let attic = std::mem::take(&mut self.attic);
        let mut lost = 0;
        for (sector, state) in unflushed {
            let choice = rng.below(state.older.len() as u64 + 2) as usize;
            let place = match choice {
                0 => state.durable,
                choice if choice <= state.older.len() => state.older[choice - 1].bytes,
                _ => continue,
            };
            lost += 1;
            let start = (sector * SECTOR_BYTES) as usize;
            let end = (start + SECTOR_BYTES as usize).min(self.bytes.len());
            let bytes = attic.get(place, end - start);
            self.bytes[start..end].copy_from_slice(bytes);
            // The allocation follows the bytes: what reads as data has space.
            if !is_zero(bytes) {
                self.allocate(Extent::new(Bytes(start as u64), Bytes(1)));
            }
        }
        self.flushes = 0;
        lost
    }

    /// Calls `visit` with everything that a power loss now could leave in each sector that is not durable yet.
    pub(crate) fn each_uncertain(&self, mut visit: impl FnMut(u64, &[u8])) {
        for (sector, state) in &self.unflushed {
            let newest = self.sector_bytes(*sector);
            visit(*sector, self.attic.get(state.durable, newest.len()));
            state.older.iter().for_each(|version| visit(*sector, self.attic.get(version.bytes, newest.len())));
            visit(*sector, newest);
        }
    }

    /// Describes `extent` in pieces of whole blocks.
    pub(crate) fn extents(&self, extent: Extent) -> Vec<ExtentStatus> {
        let mut pieces: Vec<ExtentStatus> = Vec::new();
        for piece in extent.split_at_multiples(BLOCK_BYTES) {
            let state = match self.allocated[(piece.offset.0 / BLOCK_BYTES) as usize] {
                true => ExtentState::Data,
                false => ExtentState::Hole,
            };
            match pieces.last_mut() {
                Some(last) if last.state == state => last.extent.length += piece.length,
                _ => pieces.push(ExtentStatus { extent: piece, state }),
            }
        }
        pieces
    }

    fn sectors(&self, extent: Extent) -> std::ops::Range<u64> {
        extent.offset.0 / SECTOR_BYTES..extent.end().0.div_ceil(SECTOR_BYTES)
    }

    fn sector_bytes(&self, sector: u64) -> &[u8] {
        let start = (sector * SECTOR_BYTES) as usize;
        let end = (start + SECTOR_BYTES as usize).min(self.bytes.len());
        &self.bytes[start..end]
    }
}

/// Whether all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    // By blocks, so that the compiler makes wide comparisons of it and data is told after the first one.
    bytes.chunks(64).all(|block| block.iter().fold(0, |bits, byte| bits | byte) == 0)
}

fn blocks(extent: Extent) -> std::ops::Range<u64> {
    extent.offset.0 / BLOCK_BYTES..extent.end().0.div_ceil(BLOCK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Data;

    fn write(medium: &mut Medium, offset: u64, byte: u8, durable: bool) {
        let extent = Extent::new(Bytes(offset), Bytes(512));
        let kind = MutationKind::Data(Data::copy_of(&[byte; 512]));
        medium.apply(extent, &kind, extent, durable, &Rng::new(1, "medium"));
    }

    fn after_power_loss(setup: impl Fn(&mut Medium)) -> std::collections::BTreeSet<u8> {
        let outcomes = (0..100).map(|seed| {
            let mut medium = Medium::new(Bytes(8192));
            setup(&mut medium);
            medium.lose_power(&Rng::new(seed, "power"));
            medium.bytes()[0]
        });
        outcomes.collect()
    }

    #[test]
    fn a_power_loss_keeps_what_was_flushed_and_any_part_of_the_rest() {
        let unflushed = after_power_loss(|medium| write(medium, 0, 1, false));
        assert_eq!(unflushed, [0, 1].into());
        let flushed = after_power_loss(|medium| {
            write(medium, 0, 1, false);
            let cut = medium.begin_flush();
            write(medium, 0, 2, false);
            medium.end_flush(cut, true);
        });
        assert_eq!(flushed, [1, 2].into());
        assert_eq!(after_power_loss(|medium| write(medium, 0, 3, true)), [3].into());
    }

    #[test]
    fn what_a_failed_flush_covered_is_not_saved_by_the_next_one() {
        let outcomes = after_power_loss(|medium| {
            write(medium, 0, 1, false);
            for success in [false, true] {
                let cut = medium.begin_flush();
                medium.end_flush(cut, success);
            }
        });
        assert_eq!(outcomes, [0, 1].into());
    }

    #[test]
    fn discards_free_whole_blocks_and_leave_the_rest() {
        let mut medium = Medium::new(Bytes(4096 + 700));
        for offset in [0, 512, 4096] {
            write(&mut medium, offset, 7, false);
        }
        assert_eq!(medium.allocated(), Bytes(8192));
        let rng = Rng::new(1, "medium");
        let partial = Extent::new(Bytes(0), Bytes(512));
        medium.apply(partial, &MutationKind::Discard, partial, false, &rng);
        assert_eq!(medium.bytes()[0], 7);
        let tail = Extent::new(Bytes(4096), Bytes(700));
        medium.apply(tail, &MutationKind::Discard, tail, false, &rng);
        assert_eq!((medium.bytes()[4096], medium.allocated()), (0, Bytes(4096)));
        let pieces = medium.extents(Extent::whole(Bytes(4096 + 700)));
        assert_eq!(pieces.iter().map(|piece| piece.state).collect::<Vec<_>>(), [ExtentState::Data, ExtentState::Hole]);
    }
}
