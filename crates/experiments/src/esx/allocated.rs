//! An overlay's device as the paper's snapshots have it: a file in which blocks are allocated as they are first written.
//!
//! "IOs issued to new blocks require allocation and maintenance of indirection data structures" (3.3), and snapshots
//! fragment as they grow (3.2). So the first write to a block takes the next place at the end of the file, wherever the
//! block is in the volume, and allocations are made one after another. The overlay's header and maps, which the file
//! begins with, have their places from the beginning.
//!
//! What an allocation and a lookup take is not stated: [`FileCosts`] are assumed, one cost for each control.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use block::{
    BLOCK_BYTES, BlockDevice, Buffer, Bytes, Device, Extent, ExtentState, ExtentStatus, Geometry, IoFuture, Mutation,
    MutationKind, Result,
};
use parking_lot::Mutex;
use sim::world::World;

/// What a file's overheads take. One request has them at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileCosts {
    /// To allocate what a write needs.
    allocation: Duration,
    /// To look up where a read goes, for a file of [`LOOKUP_BYTES`] at the paper's scale. It grows with the file.
    lookup: Duration,
}

/// See [`FileCosts`].
const LOOKUP_BYTES: u64 = 1 << 30;

impl FileCosts {
    /// Half a turn of a disk and a command for an allocation.
    pub(super) const ALLOCATES: Self = Self { allocation: Duration::from_micros(2150), lookup: Duration::ZERO };
    /// A millisecond to look up a block of a GiB.
    pub(super) const LOOKS_UP: Self = Self { allocation: Duration::ZERO, lookup: Duration::from_millis(1) };
}

/// A file in which blocks are allocated.
pub(super) struct AllocatedFile {
    world: World,
    file: Device,
    /// Where blocks are allocated from: header and maps end here.
    start: u64,
    /// Where the block with this number behind `start` is.
    places: Mutex<BTreeMap<u64, u64>>,
    costs: FileCosts,
    scale: u64,
    /// One allocation or lookup at a time.
    turn: tokio::sync::Mutex<()>,
}

impl AllocatedFile {
    /// Over `file`, whose first `overhead` bytes are allocated, in a world that is `scale` times smaller.
    pub(super) fn new(world: &World, file: Device, overhead: Bytes, (costs, scale): (FileCosts, u64)) -> Self {
        let (places, turn) = (Mutex::default(), tokio::sync::Mutex::default());
        Self { world: world.clone(), file, start: overhead.0, places, costs, scale, turn }
    }

    /// Takes a turn of `span`.
    async fn spend(&self, span: Duration) {
        if !span.is_zero() {
            self.world.sleep(span).await;
        }
    }

    async fn look_up(&self) {
        let bytes = self.places.lock().len() as u64 * BLOCK_BYTES * self.scale;
        let span = self.costs.lookup.mul_f64(bytes as f64 / LOOKUP_BYTES as f64);
        if !span.is_zero() {
            let _turn = self.turn.lock().await;
            self.spend(span).await;
        }
    }

    fn blocks_of(&self, extent: Extent) -> Range<u64> {
        let first = (extent.offset.0 - self.start) / BLOCK_BYTES;
        first..(extent.end().0 - self.start).div_ceil(BLOCK_BYTES)
    }

    /// Gives a place to what has none.
    async fn allocate(&self, extent: Extent) {
        let is_allocated = || {
            let places = self.places.lock();
            self.blocks_of(extent).all(|block| places.contains_key(&block))
        };
        if is_allocated() {
            return;
        }
        let _turn = self.turn.lock().await;
        if is_allocated() {
            return;
        }
        self.spend(self.costs.allocation).await;
        let mut places = self.places.lock();
        for block in self.blocks_of(extent) {
            let next = places.len() as u64;
            places.entry(block).or_insert(next);
        }
    }

    /// The parts of `extent`, and where in the file each of them is, if anywhere.
    fn parts(&self, extent: Extent) -> Vec<(Extent, Option<Bytes>)> {
        let places = self.places.lock();
        let mut parts: Vec<(Extent, Option<Bytes>)> = Vec::new();
        for block in self.blocks_of(extent) {
            let whole = Extent::new(Bytes(self.start + block * BLOCK_BYTES), Bytes(BLOCK_BYTES));
            let Some(part) = whole.intersection(extent) else { continue };
            let within = part.offset.0 - whole.offset.0;
            let at = places.get(&block).map(|place| Bytes(self.start + place * BLOCK_BYTES + within));
            match parts.last_mut() {
                Some((last, Some(place))) if at == Some(Bytes(place.0 + last.length.0)) => last.length += part.length,
                Some((last, None)) if at.is_none() => last.length += part.length,
                _ => parts.push((part, at)),
            }
        }
        parts
    }
}

impl BlockDevice for AllocatedFile {
    fn geometry(&self) -> Geometry {
        self.file.geometry()
    }

    fn read(&self, offset: Bytes, mut buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            let extent = Extent::new(offset, buffer.len().into());
            if extent.offset.0 < self.start {
                return self.file.read(offset, buffer).await;
            }
            self.look_up().await;
            for (part, at) in self.parts(extent) {
                let within = (part.offset - offset).as_usize();
                let place = within..within + part.length.as_usize();
                match at {
                    None => buffer[place].fill(0),
                    Some(at) => {
                        let bytes = self.file.read(at, Buffer::unpooled(part.length.as_usize())).await?;
                        buffer[place].copy_from_slice(&bytes);
                    }
                }
            }
            Ok(buffer)
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let extent = mutation.extent();
            if extent.offset.0 < self.start {
                return self.file.write(mutation).await;
            }
            let data = match mutation.kind() {
                MutationKind::Data(data) => Some(data.clone()),
                MutationKind::Zeroes { .. } | MutationKind::Discard => None,
            };
            if data.is_some() {
                self.allocate(extent).await;
            }
            for (part, at) in self.parts(extent) {
                // What has no place reads as zeroes.
                let Some(at) = at else { continue };
                let within = (part.offset - extent.offset).as_usize();
                let moved = match &data {
                    Some(data) => Mutation::data(at, data.slice(within..within + part.length.as_usize())),
                    None => Mutation::zeroes(Extent::new(at, part.length), false),
                };
                self.file.write(moved.with_fua(mutation.fua)).await?;
            }
            Ok(())
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.file.flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        let whole: Result<_> = Ok(vec![ExtentStatus { extent, state: ExtentState::Data }]);
        block::ready(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::MemDevice;
    use sim::clock;
    use sim::log::Keep;

    const OVERHEAD: u64 = 1 << 20;

    #[test]
    fn a_block_is_read_where_it_was_allocated_and_each_allocation_takes_its_turn() {
        clock::run(async {
            let world = World::new(1, Keep::Tail);
            let memory = Device::new("memory", MemDevice::new(Bytes(8 << 20)));
            let file = AllocatedFile::new(&world, memory.clone(), Bytes(OVERHEAD), (FileCosts::ALLOCATES, 1));
            let file = Device::new("file", file);
            let data = |fill| {
                let mut buffer = Buffer::unpooled(8192);
                buffer.fill(fill);
                buffer.freeze()
            };
            let began = world.now();
            let [far, near] = [Bytes(OVERHEAD + (4 << 20)), Bytes(OVERHEAD)];
            for (at, fill) in [(far, 1), (near, 2), (far, 3)] {
                file.write(Mutation::data(at, data(fill))).await.expect("memory does not fail");
            }
            assert_eq!(
                world.now() - began,
                Duration::from_micros(4300),
                "two allocations, and one write over the first"
            );
            let first = memory.read(Bytes(OVERHEAD), Buffer::unpooled(4096)).await.expect("memory does not fail");
            assert_eq!(first[0], 3, "what was written first is the first of the file");
            let read = file.read(Bytes(far.0 - 4096), Buffer::unpooled(16 << 10)).await.expect("memory does not fail");
            assert_eq!([read[0], read[4096], read[12_287], read[12_288]], [0, 3, 3, 0]);
        });
    }
}
