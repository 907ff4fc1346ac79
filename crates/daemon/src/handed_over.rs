//! What stands for a volume of which this host has none of the bytes.

use block::{BlockDevice, Buffer, Bytes, Device, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture, Mutation};

/// A device for a session to a volume of this geometry that has none of its bytes: nothing of it is pending, and every other
/// request is refused, finally.
pub(crate) fn handed_over(geometry: Geometry) -> Device {
    Device::new("handed over", HandedOver(geometry))
}

struct HandedOver(Geometry);

fn refuse<T: Send + 'static>() -> IoFuture<'static, T> {
    // Not as fenced: whoever hears that opens another session, and asks again.
    block::ready(Err(block::Error::new(ErrorKind::PermissionDenied, "the volume is handed over with its machine")))
}

impl BlockDevice for HandedOver {
    fn geometry(&self) -> Geometry {
        Geometry { read_only: false, ..self.0 }
    }
    fn read(&self, _: Bytes, _: Buffer) -> IoFuture<'_, Buffer> {
        refuse()
    }
    fn write(&self, _: Mutation) -> IoFuture<'_, ()> {
        refuse()
    }
    fn flush(&self) -> IoFuture<'_, ()> {
        block::ready(Ok(()))
    }
    fn extents(&self, _: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        refuse()
    }
}
