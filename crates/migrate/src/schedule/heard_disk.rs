//! The disk below a redirection or a read cache, where a schedule that follows its head hears of what reaches it.
//!
//! What a surrogate or memory answers moves no head of the source's disk. Above them a listener would be told of all of it.

use std::sync::Arc;

use block::{BlockDevice, Buffer, Bytes, Device, Extent, ExtentStatus, Geometry, IoFuture, Mutation};

use super::{GuestListener, GuestRequest, HeardRequest};

/// A device whose reads and changes a listener is told of.
pub(crate) struct HeardDisk {
    disk: Device,
    listener: Arc<dyn GuestListener>,
}

impl HeardDisk {
    /// `disk`, of whose requests `listener` hears.
    pub(crate) fn over(disk: Device, listener: Arc<dyn GuestListener>) -> Device {
        let name = disk.name().to_owned();
        Device::new(&name, Self { disk, listener })
    }

    fn hear(&self, extent: Extent, is_write: bool) -> HeardRequest {
        HeardRequest::begin(&self.listener, GuestRequest { extent, is_write })
    }
}

impl BlockDevice for HeardDisk {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        let heard = self.hear(Extent::new(offset, buffer.len().into()), false);
        Box::pin(async move {
            let read = self.disk.read(offset, buffer).await;
            drop(heard);
            read
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        let heard = self.hear(mutation.extent(), true);
        Box::pin(async move {
            let written = self.disk.write(mutation).await;
            drop(heard);
            written
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.disk.flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.disk.extents(extent))
    }

    fn compares_checks(&self) -> bool {
        self.disk.compares_checks()
    }

    fn keeps_holes(&self) -> bool {
        self.disk.keeps_holes()
    }
}
