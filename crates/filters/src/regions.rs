//! Several devices one behind the other as one device, and a part of a device as a device.
//!
//! ```text
//!   Regions   0            a            2a           3a           4a        end
//!             ├─ part 0 ─┤··├─ part 1 ───────────┤····├─ part 2 ──────────────┤     ·· gap: reads as zeroes, takes
//!                        ╰ gap                                                         writes and keeps nothing
//!   Region                  ├──── extent ─────────┤   the bytes of an extent, counted from its start
//! ```
//!
//! A request within one part is passed on as it is, with the same bytes at another offset. One over several parts is split.

mod region;

use block::{
    BlockDevice, Buffer, Bytes, Device, Error, ErrorKind, Extent, ExtentState, ExtentStatus, Geometry, IoFuture,
    Mutation, Result, ready,
};
use futures::future::join_all;

pub use region::Region;

use crate::translate::{in_units, moved};

/// An answer to the question for extents has so many pieces at most.
const PIECES_MAX: usize = 64;

/// Where devices of these sizes lie one behind the other, each at the next multiple of `alignment` bytes.
///
/// # Panics
/// If `alignment` is zero.
#[must_use]
pub fn layout(sizes: &[Bytes], alignment: Bytes) -> Vec<Extent> {
    let mut end = Bytes::ZERO;
    let places = sizes.iter().map(|size| {
        let place = Extent::new(end.align_up(alignment.0), *size);
        end = place.end();
        place
    });
    places.collect()
}

/// Several devices as one: as large as where the last one ends, and taking what every one of them takes. A part that grows
/// later does not make it larger.
#[derive(Debug)]
pub struct Regions {
    parts: Vec<Part>,
    geometry: Geometry,
}

#[derive(Debug)]
struct Part {
    /// Where it lies.
    extent: Extent,
    device: Device,
}

impl Regions {
    /// `parts` as [`layout`] lays them out.
    ///
    /// # Errors
    /// Invalid if there are none, or if `alignment` is no multiple of what a part's requests are aligned to.
    pub fn new(parts: Vec<Device>, alignment: Bytes) -> Result<Self> {
        let refuse = |context: String| Err(Error::new(ErrorKind::Invalid, context));
        let geometries: Vec<Geometry> = parts.iter().map(Device::geometry).collect();
        let Some(common) = geometries.iter().copied().reduce(common) else {
            return refuse("no devices make no device".into());
        };
        let unit = common.request_alignment;
        if alignment.is_zero() || !alignment.is_multiple_of(unit.into()) {
            return refuse(format!(
                "devices that take multiples of {unit} bytes cannot lie at multiples of {alignment}"
            ));
        }
        let sizes: Vec<Bytes> = geometries.iter().map(|geometry| geometry.size).collect();
        let places = layout(&sizes, alignment);
        let size = places.last().map_or(Bytes::ZERO, |last| last.end());
        let parts = places.into_iter().zip(parts).map(|(extent, device)| Part { extent, device }).collect();
        Ok(Self { parts, geometry: Geometry { size, ..common } })
    }

    /// Where each part lies.
    pub fn extents_of_parts(&self) -> impl Iterator<Item = Extent> {
        self.parts.iter().map(|part| part.extent)
    }

    /// `extent` cut at the edges of parts, each piece with the part that has it, or with none in a gap.
    fn pieces(&self, extent: Extent) -> impl Iterator<Item = (Extent, Option<&Part>)> {
        let mut index = self.parts.partition_point(|part| part.extent.end() <= extent.offset);
        let mut next = extent.offset;
        std::iter::from_fn(move || {
            while self.parts.get(index).is_some_and(|part| part.extent.end() <= next) {
                index += 1;
            }
            if next >= extent.end() {
                return None;
            }
            let part = self.parts.get(index);
            let (end, part) = match part {
                Some(part) if part.extent.offset <= next => (part.extent.end(), Some(part)),
                Some(part) => (part.extent.offset, None),
                None => (extent.end(), None),
            };
            let piece = Extent::between(next, end.min(extent.end()));
            next = piece.end();
            Some((piece, part))
        })
    }

    /// The part that has all of `extent`.
    fn part_of(&self, extent: Extent) -> Option<&Part> {
        match self.pieces(extent).next() {
            Some((piece, Some(part))) if piece == extent => Some(part),
            _ => None,
        }
    }

    async fn read_pieces(&self, extent: Extent, mut buffer: Buffer) -> Result<Buffer> {
        for (piece, part) in self.pieces(extent) {
            let at = (piece.offset - extent.offset).as_usize();
            let place = &mut buffer[at..at + piece.length.as_usize()];
            match part {
                Some(part) => {
                    let own = Buffer::unpooled(piece.length.as_usize());
                    place.copy_from_slice(&part.device.read(piece.offset - part.extent.offset, own).await?);
                }
                None => place.fill(0),
            }
        }
        Ok(buffer)
    }

    async fn write_pieces(&self, mutation: &Mutation) -> Result<()> {
        for (piece, part) in self.pieces(mutation.extent()) {
            if let Some(part) = part {
                part.device.write(moved(&mutation.slice(piece), piece.offset - part.extent.offset)).await?;
            }
        }
        Ok(())
    }

    async fn describe(&self, extent: Extent) -> Result<Vec<ExtentStatus>> {
        let mut found: Vec<ExtentStatus> = Vec::new();
        let mut push = |extent: Extent, state| match found.last_mut() {
            Some(last) if last.state == state => last.extent.length += extent.length,
            _ => found.push(ExtentStatus { extent, state }),
        };
        let mut count = 0;
        for (piece, part) in self.pieces(extent) {
            let Some(part) = part else {
                push(piece, ExtentState::Hole);
                continue;
            };
            let start = part.extent.offset;
            let own = part.device.extents(Extent::new(piece.offset - start, piece.length)).await?;
            count += own.len();
            let mut end = start;
            for ExtentStatus { extent, state } in own {
                end = start + extent.end();
                push(Extent::new(start + extent.offset, extent.length), state);
            }
            if end < piece.end() || count >= PIECES_MAX {
                break;
            }
        }
        // A part of an odd size ends within a unit.
        Ok(in_units(found, self.geometry.request_alignment.into(), self.geometry.size))
    }
}

/// What both take.
fn common(one: Geometry, other: Geometry) -> Geometry {
    Geometry {
        size: Bytes::ZERO,
        request_alignment: one.request_alignment.max(other.request_alignment),
        preferred_bytes: one.preferred_bytes.max(other.preferred_bytes),
        transfer_bytes_max: one.transfer_bytes_max.min(other.transfer_bytes_max),
        read_only: one.read_only || other.read_only,
    }
}

impl BlockDevice for Regions {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        let extent = Extent::new(offset, buffer.len().into());
        match self.part_of(extent) {
            Some(part) => Box::pin(part.device.read(offset - part.extent.offset, buffer)),
            None => Box::pin(self.read_pieces(extent, buffer)),
        }
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        let extent = mutation.extent();
        match self.part_of(extent) {
            Some(part) => Box::pin(part.device.write(moved(&mutation, extent.offset - part.extent.offset))),
            None => Box::pin(async move { self.write_pieces(&mutation).await }),
        }
    }

    /// Every part is flushed, whatever becomes of the others.
    fn flush(&self) -> IoFuture<'_, ()> {
        if let [only] = &*self.parts {
            return Box::pin(only.device.flush());
        }
        Box::pin(async move {
            let flushed = join_all(self.parts.iter().map(|part| part.device.flush())).await;
            flushed.into_iter().collect()
        })
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        if self.pieces(extent).all(|(_, part)| part.is_none()) {
            return ready(Ok(vec![ExtentStatus { extent, state: ExtentState::Hole }]));
        }
        Box::pin(self.describe(extent))
    }

    fn keeps_holes(&self) -> bool {
        self.parts.iter().all(|part| part.device.keeps_holes())
    }
}

#[cfg(test)]
mod tests;
