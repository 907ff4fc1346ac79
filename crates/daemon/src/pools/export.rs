//! A store that is an export of an NBD server.
//!
//! Daemon and server die each on its own, and nobody is told of a server's death while the daemon is down. What the server had answered
//! and not made durable would then be missing although it was answered, and the partition's running map would say so. So every write
//! is durable at the server before it is answered. A server that is lost is connected to again, and requests wait for that.

use std::time::Duration;

use block::{BlockDevice, Buffer, Bytes, Device, Extent, ExtentStatus, Geometry, IoFuture, Mutation};
use env::EnvRef;

use crate::location::Location;
use crate::open_backend::{BackendOpenOptions, OpenBackend};

/// Uses the export at `place`, if it is one. Its server need not be there yet: the first request waits for it, for `limit` at most.
pub(super) fn open(place: &Location, limit: Duration, env: &EnvRef) -> Option<block::Result<OpenBackend>> {
    let Location::Foreign(export) = place else { return None };
    let opened = OpenBackend::foreign(export, &BackendOpenOptions::default(), limit, env);
    Some(opened.map(|mut open_backend| {
        // A store must not fail because its server is away for a moment.
        open_backend.serve_guest();
        let inner = open_backend.device.clone();
        open_backend.device = Device::new(inner.name(), DurableWrites { inner: inner.clone() });
        open_backend
    }))
}

/// A device on which every write is durable when it is answered.
struct DurableWrites {
    inner: Device,
}

impl BlockDevice for DurableWrites {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.inner.read(offset, buffer))
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(self.inner.write(mutation.with_fua(true)))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.inner.flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.inner.extents(extent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Counts writes that are not to be durable at once.
    struct Counting {
        inner: block::MemDevice,
        lazy: Arc<AtomicUsize>,
    }

    impl BlockDevice for Counting {
        fn geometry(&self) -> Geometry {
            self.inner.geometry()
        }

        fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
            self.inner.read(offset, buffer)
        }

        fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
            self.lazy.fetch_add(usize::from(!mutation.fua), Ordering::Relaxed);
            self.inner.write(mutation)
        }

        fn flush(&self) -> IoFuture<'_, ()> {
            self.inner.flush()
        }

        fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
            self.inner.extents(extent)
        }
    }

    #[tokio::test]
    async fn every_write_is_durable_when_it_is_answered() {
        let lazy = Arc::new(AtomicUsize::new(0));
        let counting = Counting { inner: block::MemDevice::new(Bytes::mib(1)), lazy: Arc::clone(&lazy) };
        let device = Device::new("store", DurableWrites { inner: Device::new("server", counting) });
        let data = Buffer::unpooled(512).freeze();
        device.write(Mutation::data(Bytes::ZERO, data)).await.expect("written");
        device.write(Mutation::discard(Extent::whole(Bytes(4096)))).await.expect("discarded");
        assert_eq!(lazy.load(Ordering::Relaxed), 0, "an answered write may be lost with the server");
    }
}
