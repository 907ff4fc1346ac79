//! What copies between two disks without the engine seeing the bytes. It models a file system that shares blocks, in a
//! world where anything may go wrong with that.

use block::{Buffer, Bytes, Data, Device, Error, ErrorKind, Extent, IoFuture, Mutation, Offload, Result};

use crate::disk::{Below, UnderWay};
use crate::medium::SECTOR_BYTES;
use crate::rng::Rng;
use crate::world::World;

/// Copies in two parts, one after the other, unless it refuses, fails or does only a part.
pub(crate) struct SimOffload {
    pub(crate) world: World,
    pub(crate) rng: Rng,
    pub(crate) source: Device,
    pub(crate) target: Below,
}

impl SimOffload {
    async fn put(&self, extent: Extent, copy: &UnderWay) -> Result<()> {
        if extent.is_empty() {
            return Ok(());
        }
        let read = self.source.read(extent.offset, Buffer::unpooled(extent.length.as_usize())).await?;
        copy.write(Mutation::data(extent.offset, Data::copy_of(&read))).await
    }

    async fn copy_parts(&self, extent: Extent) -> Result<Bytes> {
        if self.rng.chance(0.1) {
            return Ok(Bytes::ZERO);
        }
        let copy = self.target.begin(extent);
        let sectors = self.rng.below(extent.length.0 / SECTOR_BYTES + 1);
        let middle = extent.offset + Bytes(sectors * SECTOR_BYTES).min(extent.length);
        self.put(Extent::between(extent.offset, middle), &copy).await?;
        if self.rng.chance(0.1) {
            self.world.fault("offload-part", format_args!("{extent:?} up to {}", middle.0));
            return Ok(middle - extent.offset);
        }
        if self.rng.chance(0.05) {
            self.world.fault("offload-error", format_args!("{extent:?}"));
            return Err(Error::new(ErrorKind::Io, "sharing blocks: injected"));
        }
        self.put(Extent::between(middle, extent.end()), &copy).await?;
        self.world.event(format_args!("offloaded {extent:?}"));
        Ok(extent.length)
    }
}

impl Offload for SimOffload {
    fn copy(&self, extent: Extent) -> IoFuture<'_, Bytes> {
        Box::pin(self.copy_parts(extent))
    }
}
