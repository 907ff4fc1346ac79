//! A device that rejects every request.

use block::{
    BlockDevice, Buffer, Bytes, Device, Error, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture, Mutation, ready,
};

/// Refuses everything, and says why.
struct RejectAll {
    geometry: Geometry,
    kind: ErrorKind,
    why: &'static str,
}

/// A device of `geometry` that refuses everything as `kind`, because of `why`.
pub(crate) fn reject_all(name: &str, geometry: Geometry, kind: ErrorKind, why: &'static str) -> Device {
    Device::new(name, RejectAll { geometry, kind, why })
}

impl RejectAll {
    fn refuse<T: Send + 'static>(&self) -> IoFuture<'_, T> {
        ready(Err(Error::new(self.kind, self.why)))
    }
}

impl BlockDevice for RejectAll {
    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn read(&self, _: Bytes, _: Buffer) -> IoFuture<'_, Buffer> {
        self.refuse()
    }
    fn write(&self, _: Mutation) -> IoFuture<'_, ()> {
        self.refuse()
    }
    fn flush(&self) -> IoFuture<'_, ()> {
        self.refuse()
    }
    fn extents(&self, _: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        self.refuse()
    }
}
