//! How a cache is read: without a lock but the short one of the index.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use block::{Buffer, Bytes, Error, ErrorKind, Extent, ExtentState, ExtentStatus, Result};
use futures::future::join_all;

use super::index::{Index, States};
use super::{DIRTY, Found, Inner};
use crate::translate::in_units;

/// An answer to the question for extents has so many pieces at most.
const PIECES_MAX: usize = 64;
/// It is about so many blocks at most while something is dirty.
const DESCRIBED_MAX: u64 = 16384;
/// So often a read begins again because its places were given to other blocks, before it has its blocks held.
const REPETITIONS_MAX: u32 = 4;

/// Bytes in one place.
#[derive(Clone, Copy)]
struct InPlace {
    place: u32,
    /// The number of the place when it was looked up.
    stamp: u32,
    /// Whether the base lacks some of them.
    is_dirty: bool,
}

/// Some of a read that comes from one device.
#[derive(Clone, Copy)]
struct Piece {
    extent: Extent,
    /// None for the base.
    source: Option<InPlace>,
}

/// Where the bytes of a read are.
enum Plan {
    Base,
    Place(InPlace),
    Both(Vec<Piece>),
}

impl Plan {
    /// What of `extent` is read from the base.
    fn of_base(&self, extent: Extent) -> impl Iterator<Item = Extent> {
        let (whole, pieces): (Option<Extent>, &[Piece]) = match self {
            Self::Base => (Some(extent), &[]),
            Self::Place(_) => (None, &[]),
            Self::Both(pieces) => (None, pieces),
        };
        let of_base = pieces.iter().filter(|piece| piece.source.is_none()).map(|piece| piece.extent);
        whole.into_iter().chain(of_base)
    }
}

/// What came of reading pieces.
enum Outcome {
    Read(Buffer),
    /// The places have other blocks now, or the flash has failed: once more.
    Again(Buffer),
}

/// A request that the base works at for the guest.
pub(super) struct AtBase<'a>(&'a AtomicUsize);

impl Drop for AtBase<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Inner {
    pub(super) fn at_base(&self) -> AtBase<'_> {
        self.guest_at_base.fetch_add(1, Ordering::SeqCst);
        AtBase(&self.guest_at_base)
    }

    pub(super) async fn read(self: &Arc<Self>, offset: Bytes, mut buffer: Buffer, is_guest: bool) -> Result<Buffer> {
        let extent = Extent::new(offset, buffer.len().into());
        if self.transfer.is_withheld() {
            return self.read_withheld(extent, buffer).await;
        }
        if self.transfer.is_settling() {
            self.settle_all(extent).await;
        }
        if is_guest {
            self.check_certain(extent)?;
        }
        let mut guard = None;
        for repetition in 0.. {
            if repetition == REPETITIONS_MAX {
                guard = Some(self.blocks.shared(extent).await);
            }
            let is_counted = is_guest && repetition == 0;
            let (plan, is_long, stamp) = self.record.with(|states, index| {
                let is_long = is_counted && index.streams.is_long(extent);
                let plan = self.plan(states, index, extent, is_counted);
                let may_be_overtaken = !matches!(plan, Plan::Place(_)) && guard.is_none() && self.may_hold_more(index);
                (plan, is_long, may_be_overtaken.then(|| self.changes_of(extent)))
            });
            let outcome = match &plan {
                Plan::Place(place) => self.read_in_place(extent, buffer, *place).await?,
                Plan::Base => Outcome::Read(self.read_base(extent, buffer, is_guest, is_long).await?),
                Plan::Both(pieces) => self.read_pieces(extent, buffer, pieces, is_guest, is_long).await?,
            };
            // What was dirtied meanwhile may have been discarded at the base, and still be what others read in its place. A discard waits
            // until the write before it has ended, so that has raised the number. Other blocks raise it, too: the index knows which.
            let is_overtaken =
                stamp.is_some_and(|stamp| stamp != self.changes_of(extent)) && self.is_dirtied(&plan, extent);
            let outcome = match outcome {
                Outcome::Read(read) if is_overtaken => Outcome::Again(read),
                outcome => outcome,
            };
            match outcome {
                Outcome::Read(read) => {
                    drop(guard);
                    return Ok(read);
                }
                Outcome::Again(same) => buffer = same,
            }
        }
        unreachable!("a read that holds its blocks is not repeated forever")
    }

    /// Whether the place of a block may have what the base lacks before a read is over.
    fn may_hold_more(&self, index: &Index) -> bool {
        index.dirty_sectors > 0 || self.takes_dirty()
    }

    /// Whether something that `plan` has read from the base is dirty by now, and so is read in its place by others. What was dirty
    /// meanwhile and is not any more is in the base for all.
    fn is_dirtied(&self, plan: &Plan, extent: Extent) -> bool {
        self.record.with(|states, index| {
            plan.of_base(extent).flat_map(|part| self.parts_of(part)).any(|(block, part)| {
                let dirty = index.find(states, block).map_or(0, |found| found.entry.dirty());
                self.sectors_of(part).0 & dirty != 0
            })
        })
    }

    /// A number that is another one once a change of `extent`, or of some other blocks, has begun or ended.
    fn changes_of(&self, extent: Extent) -> u64 {
        self.write_stamps.sum(self.block.indices_of(extent))
    }

    /// Finds where the bytes of `extent` are.
    fn plan(&self, states: &States, index: &mut Index, extent: Extent, is_counted: bool) -> Plan {
        let first = self.block_of(extent.offset);
        if self.extent_of(first).contains(extent) {
            let found = index.find(states, first);
            return match self.plan_block(index, found, extent, is_counted) {
                Ok(plan) => plan,
                Err(pieces) => Plan::Both(pieces),
            };
        }
        let mut pieces: Vec<Piece> = Vec::new();
        for (block, part) in self.parts_of(extent) {
            let found = index.find(states, block);
            match self.plan_block(index, found, part, is_counted) {
                Ok(Plan::Place(place)) => pieces.push(Piece { extent: part, source: Some(place) }),
                Ok(_) => push_base(&mut pieces, part),
                Err(some) => {
                    for piece in some {
                        match piece.source {
                            None => push_base(&mut pieces, piece.extent),
                            Some(_) => pieces.push(piece),
                        }
                    }
                }
            }
        }
        match &pieces[..] {
            [Piece { source: None, .. }] => Plan::Base,
            _ => Plan::Both(pieces),
        }
    }

    /// Finds where a part of a block is: in one of the two, or in pieces of both.
    fn plan_block(
        &self,
        index: &mut Index,
        found: Option<Found>,
        part: Extent,
        is_counted: bool,
    ) -> std::result::Result<Plan, Vec<Piece>> {
        let count = |counter: &std::sync::atomic::AtomicU64| {
            if is_counted {
                counter.fetch_add(1, Ordering::Relaxed);
            }
        };
        let Some(found) = found else {
            count(&self.counters.misses);
            return Ok(Plan::Base);
        };
        let (touched, _) = self.sectors_of(part);
        let usable = if self.failure.has_failed() { found.entry.dirty() } else { found.valid };
        let dirty = found.entry.dirty();
        if is_counted {
            index.touch(found.place);
        }
        let place = |sectors: u8| InPlace {
            place: found.place,
            stamp: self.place_stamps.get(found.place.into()),
            is_dirty: sectors & dirty != 0,
        };
        if touched & !usable == 0 {
            count(&self.counters.hits);
            if is_counted {
                self.watch.note_hit(found.entry.block());
            }
            return Ok(Plan::Place(place(touched)));
        }
        if touched & usable == 0 {
            count(&self.counters.misses);
            return Ok(Plan::Base);
        }
        count(&self.counters.hits_partial);
        let block = found.entry.block();
        let mut pieces: Vec<Piece> = Vec::new();
        for sector in 0..super::SECTORS {
            let mask = 1 << sector;
            if touched & mask == 0 {
                continue;
            }
            let extent = self.extent_of_sectors(block, &(sector..sector + 1), part);
            if usable & mask == 0 {
                push_base(&mut pieces, extent);
                continue;
            }
            match pieces.last_mut() {
                Some(Piece { extent: last, source: Some(source) }) => {
                    last.length += extent.length;
                    source.is_dirty |= dirty & mask != 0;
                }
                _ => pieces.push(Piece { extent, source: Some(place(mask)) }),
            }
        }
        Err(pieces)
    }

    /// Whether a place still has the block that was looked up.
    fn is_unmoved(&self, place: InPlace) -> bool {
        self.place_stamps.get(place.place.into()) == place.stamp
    }

    async fn read_in_place(&self, extent: Extent, buffer: Buffer, place: InPlace) -> Result<Outcome> {
        let length = buffer.len();
        match self.read_place(place.place, extent, buffer).await {
            Ok(buffer) if self.is_unmoved(place) => Ok(Outcome::Read(buffer)),
            Ok(buffer) => Ok(Outcome::Again(buffer)),
            Err(error) => {
                self.cannot_read(extent, error, place)?;
                Ok(Outcome::Again(Buffer::unpooled(length)))
            }
        }
    }

    /// The flash has failed: an error if the base lacks what was read, otherwise the base has it.
    fn cannot_read(&self, extent: Extent, error: Error, place: InPlace) -> Result<()> {
        self.fail(&error);
        if !place.is_dirty || !self.is_unmoved(place) {
            return Ok(());
        }
        Err(self.lost(extent, error))
    }

    /// The error of a read of what only the flash has.
    pub(super) fn lost(&self, extent: Extent, error: Error) -> Error {
        let context = format!(
            "{} of {} bytes at {} cannot be read, and only the cache has it: what the base has there is older",
            self.partition.name(),
            extent.length.get(),
            extent.offset.get()
        );
        Error::new(ErrorKind::Io, context).with_source(error)
    }

    async fn read_base(
        self: &Arc<Self>,
        extent: Extent,
        buffer: Buffer,
        is_guest: bool,
        is_long: bool,
    ) -> Result<Buffer> {
        if !is_guest {
            return self.base.device().read(extent.offset, buffer).await;
        }
        if let Some(buffer) = self.read_other(extent).await {
            return Ok(buffer);
        }
        let admission = self.begin_admission(extent, is_long);
        let at_base = self.at_base();
        let buffer = self.base.device().read(extent.offset, buffer).await?;
        drop(at_base);
        if let Some(admission) = admission {
            self.admit_aside(admission, extent.offset, &buffer);
        }
        Ok(buffer)
    }

    /// Reads each piece where it is, and lays them together.
    async fn read_pieces(
        self: &Arc<Self>,
        extent: Extent,
        mut buffer: Buffer,
        pieces: &[Piece],
        is_guest: bool,
        is_long: bool,
    ) -> Result<Outcome> {
        let each = pieces.iter().copied().map(|piece| async move {
            let part = Buffer::unpooled(piece.extent.length.as_usize());
            match piece.source {
                None => self.read_base(piece.extent, part, is_guest, is_long).await.map(Outcome::Read),
                Some(place) => self.read_in_place(piece.extent, part, place).await,
            }
        });
        let mut is_whole = true;
        for (piece, read) in pieces.iter().zip(join_all(each).await) {
            match read? {
                Outcome::Again(_) => is_whole = false,
                Outcome::Read(part) => {
                    let at = (piece.extent.offset - extent.offset).as_usize();
                    buffer[at..at + part.len()].copy_from_slice(&part);
                }
            }
        }
        Ok(if is_whole { Outcome::Read(buffer) } else { Outcome::Again(buffer) })
    }

    /// Reads some of a block from its place.
    pub(super) async fn read_place(&self, place: u32, extent: Extent, buffer: Buffer) -> Result<Buffer> {
        let at = self.place_at(place, extent.offset);
        let length = self.in_place(extent.length);
        if length == extent.length {
            return self.partition.read(at, buffer).await;
        }
        let mut buffer = self.partition.read(at, Buffer::unpooled(length.as_usize())).await?;
        buffer.set_len(extent.length.as_usize());
        Ok(buffer)
    }

    /// What a part of the volume holds: data where the base lacks something.
    pub(super) async fn describe(&self, extent: Extent) -> Result<Vec<ExtentStatus>> {
        if self.record.look(|states| states.count(DIRTY) == 0) {
            return self.describe_base(extent).await;
        }
        let first = self.block_of(extent.offset);
        let last = self.block.indices_of(extent).end.min(first + DESCRIBED_MAX);
        let extent = Extent::between(extent.offset, self.extent_of(last - 1).end().min(extent.end()));
        let mut pieces: Vec<ExtentStatus> = Vec::new();
        let mut next = extent.offset;
        while next < extent.end() && pieces.len() < PIECES_MAX {
            let (is_dirty, end) = self.record.with(|states, index| {
                let is_dirty = |block| index.find(states, block).is_some_and(|found| found.entry.dirty() != 0);
                let mut block = self.block_of(next);
                let first_is = is_dirty(block);
                while block + 1 < last && is_dirty(block + 1) == first_is {
                    block += 1;
                }
                (first_is, self.extent_of(block).end())
            });
            let part = Extent::between(next, end.min(extent.end()));
            if is_dirty {
                pieces.push(ExtentStatus { extent: part, state: ExtentState::Data });
                next = part.end();
                continue;
            }
            pieces.extend(self.describe_base(part).await?);
            match pieces.last() {
                Some(last) if last.extent.end() >= part.end() => next = part.end(),
                _ => break,
            }
        }
        Ok(pieces)
    }

    async fn describe_base(&self, part: Extent) -> Result<Vec<ExtentStatus>> {
        let below = self.base.device().extents(part).await?;
        Ok(in_units(below, self.geometry.request_alignment.into(), self.volume))
    }
}

/// Adds a piece of the base, to the one before if that is of the base, too.
fn push_base(pieces: &mut Vec<Piece>, extent: Extent) {
    match pieces.last_mut() {
        Some(Piece { extent: last, source: None }) => last.length += extent.length,
        _ => pieces.push(Piece { extent, source: None }),
    }
}
