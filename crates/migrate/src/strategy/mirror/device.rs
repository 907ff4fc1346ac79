//! The mirror as a device: the guest's, and the job's own.

use std::sync::atomic::Ordering;

use block::{BlockDevice, Buffer, Bytes, Device, Extent, ExtentStatus, Geometry, IoFuture, Mutation};

use super::filter::{Mirror, Writer};

impl BlockDevice for Mirror {
    fn geometry(&self) -> Geometry {
        // The size is the one that the copy began with: a volume does not grow while it is moved.
        Geometry { size: self.shared.size, ..self.shared.source.geometry() }
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        let heard = self.hear(Extent::new(offset, Bytes::from(buffer.len())), false);
        match (self.read_from(), heard) {
            (None, None) => Box::pin(self.shared.source.read(offset, buffer)),
            (target, heard) => Box::pin(async move {
                let _heard = heard;
                target.as_ref().unwrap_or(&self.shared.source).read(offset, buffer).await
            }),
        }
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        match self.hear(mutation.extent(), true) {
            None => Box::pin(self.shared.write(mutation, Writer::Guest)),
            Some(heard) => Box::pin(async move {
                let _heard = heard;
                self.shared.write(mutation, Writer::Guest).await
            }),
        }
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.shared.guest_flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        // Of whom the data is read, the holes are asked.
        match self.read_from() {
            Some(target) => Box::pin(async move { target.extents(extent).await }),
            None => Box::pin(self.shared.source.extents(extent)),
        }
    }
}

impl Mirror {
    /// The target, if it answers reads.
    fn read_from(&self) -> Option<Device> {
        let reads_target = self.shared.reads_target.load(Ordering::Acquire);
        reads_target
            .then(|| self.shared.tracker(|tracker| tracker.session().map(|session| session.target.clone())))
            .flatten()
    }
}

/// The mirror as the job itself writes to it, to fold a snapshot. Where a guest's write would wait for the end of the
/// job, the job's write is refused before it has reached either side.
pub(crate) struct JobEntry(pub(crate) Mirror);

impl BlockDevice for JobEntry {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        // Not the guest's: nobody is told of it.
        match self.0.read_from() {
            Some(target) => Box::pin(async move { target.read(offset, buffer).await }),
            None => Box::pin(self.0.shared.source.read(offset, buffer)),
        }
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(self.0.shared.write(mutation, Writer::Job))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        self.0.flush()
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        self.0.extents(extent)
    }
}
