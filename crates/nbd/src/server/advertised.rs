//! A device that is shown larger than it is.
//!
//! A container format such as qcow2 lives below its format driver in a file that grows. The export advertises room to
//! grow without extending the file. What lies past its end reads as zeroes; zeroes and discards there do nothing. A
//! write there goes to the device, which grows or refuses.

use block::{
    Buffer, Bytes, Device, Extent, ExtentState, ExtentStatus, Filter, Geometry, IoFuture, Mutation, MutationKind,
};

/// Shows `lower` with at least `size` bytes.
pub(crate) struct Advertised {
    pub(crate) lower: Device,
    pub(crate) size: Bytes,
}

impl Advertised {
    /// The part of `extent` that the device has now.
    fn present(&self, extent: Extent) -> Option<Extent> {
        extent.intersection(Extent::whole(self.lower.size()))
    }
}

impl Filter for Advertised {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn geometry(&self) -> Geometry {
        let geometry = self.lower.geometry();
        Geometry { size: self.size.max(geometry.size), ..geometry }
    }

    fn read(&self, offset: Bytes, mut buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            let length = buffer.len();
            let present = self.present(Extent::new(offset, length.into())).map_or(0, |part| part.length.as_usize());
            if present > 0 {
                buffer.set_len(present);
                buffer = self.lower.read(offset, buffer).await?;
                buffer.set_len(length);
            }
            buffer[present..].fill(0);
            Ok(buffer)
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            match (mutation.kind(), self.present(mutation.extent())) {
                (MutationKind::Data(_), _) => self.lower.write(mutation).await,
                (_, Some(present)) => self.lower.write(mutation.slice(present)).await,
                (_, None) => Ok(()),
            }
        })
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(async move {
            match self.present(extent) {
                Some(present) => self.lower.extents(present).await,
                None => Ok(vec![ExtentStatus { extent, state: ExtentState::Hole }]),
            }
        })
    }
}
