//! A device over a device.

use crate::{BlockDevice, Buffer, Bytes, Device, Extent, ExtentStatus, Geometry, IoFuture, Mutation};

/// A device over a device. It implements what it alters and nothing else: every verb passes through to
/// [`lower`](Self::lower) unless it is overridden. A verb added later has no such default here, so that its author
/// visits every filter.
pub trait Filter: Send + Sync {
    /// The device below.
    fn lower(&self) -> &Device;

    /// See [`BlockDevice::geometry`].
    fn geometry(&self) -> Geometry {
        self.lower().geometry()
    }

    /// See [`BlockDevice::read`].
    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.lower().read(offset, buffer))
    }

    /// See [`BlockDevice::write`].
    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(self.lower().write(mutation))
    }

    /// See [`BlockDevice::flush`].
    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.lower().flush())
    }

    /// See [`BlockDevice::extents`].
    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.lower().extents(extent))
    }
}

impl<F: Filter> BlockDevice for F {
    fn geometry(&self) -> Geometry {
        Filter::geometry(self)
    }
    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Filter::read(self, offset, buffer)
    }
    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Filter::write(self, mutation)
    }
    fn flush(&self) -> IoFuture<'_, ()> {
        Filter::flush(self)
    }
    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Filter::extents(self, extent)
    }
}
