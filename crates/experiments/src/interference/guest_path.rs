//! What stands beside the engine in a scene: the guest's way to its disk, and a tally of what the move reads.

use std::sync::Arc;
use std::time::Duration;

use block::{BlockDevice, Buffer, Bytes, Device, Extent, ExtentStatus, Geometry, IoFuture, Mutation};
use parking_lot::Mutex;
use sim::bench::Tally;
use sim::model::Verb;
use sim::world::World;

/// The guest's way to its disk through QEMU: every request costs something, and writes may have to be durable.
pub(super) struct GuestPath {
    pub(super) world: World,
    pub(super) lower: Device,
    /// What a request costs before it reaches the disk.
    pub(super) cost: Duration,
    /// The cache mode writethrough.
    pub(super) writes_through: bool,
}

impl BlockDevice for GuestPath {
    fn geometry(&self) -> Geometry {
        self.lower.geometry()
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            self.world.sleep(self.cost).await;
            self.lower.read(offset, buffer).await
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.world.sleep(self.cost).await;
            let fua = mutation.fua || self.writes_through;
            self.lower.write(mutation.with_fua(fua)).await
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.world.sleep(self.cost).await;
            self.lower.flush().await
        })
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.lower.extents(extent))
    }
}

/// The source as the move reads it, and what that took.
pub(super) struct CountedReads {
    pub(super) world: World,
    pub(super) lower: Device,
    pub(super) tally: Arc<Mutex<Tally>>,
}

impl BlockDevice for CountedReads {
    fn geometry(&self) -> Geometry {
        self.lower.geometry()
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            let (asked, length) = (self.world.now(), buffer.len() as u64);
            let read = self.lower.read(offset, buffer).await;
            self.tally.lock().add(Verb::Read, length, self.world.now() - asked);
            read
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(self.lower.write(mutation))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.lower.flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.lower.extents(extent))
    }
}
