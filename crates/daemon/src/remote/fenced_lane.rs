//! The way of one session into a volume. Another session closes it. What the old session has in flight is over before
//! the new one begins. Later requests of the old session are refused.

use std::sync::{Arc, Weak};

use block::{
    BlockDevice, Buffer, Bytes, Device, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture, Mutation, Slot, SlotLane,
};

use crate::reject_all::reject_all;

/// The way of one session.
pub(crate) struct FencedLane {
    slot: Slot,
    /// What the session has.
    lane: Weak<SessionLane>,
}

/// One session's lane.
struct SessionLane(SlotLane);

impl FencedLane {
    /// A way to `device`, and what the session is to use.
    pub(crate) fn open(device: Device) -> (Self, Device) {
        let name = device.name().to_owned();
        let slot = Slot::new(device);
        let lane = Arc::new(SessionLane(slot.lane()));
        (Self { slot, lane: Arc::downgrade(&lane) }, Device::from_arc(&name, lane))
    }

    /// Whether its session is not over.
    pub(crate) fn is_used(&self) -> bool {
        self.lane.strong_count() > 0
    }

    /// Waits until what came this way is answered; the rest is refused.
    pub(crate) async fn close(&self) {
        let geometry = self.slot.device().geometry();
        self.slot.quiesce().await.swap(reject_all(
            "closed",
            geometry,
            ErrorKind::Fenced,
            "another session has taken its place",
        ));
    }
}

impl BlockDevice for SessionLane {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.0.read(offset, buffer))
    }
    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(self.0.write(mutation))
    }
    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.0.flush())
    }
    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.0.extents(extent))
    }
}

/// A device for a session that only asks.
pub(crate) fn without_bytes(size: Bytes, request_alignment: u32) -> Device {
    let geometry = Geometry { request_alignment, ..Geometry::of_size(size) };
    reject_all("asking", geometry, ErrorKind::Fenced, "this session only asks")
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Data, MemDevice};

    #[tokio::test]
    async fn a_session_that_another_has_replaced_reaches_nothing_any_more() {
        let memory = Device::new("memory", MemDevice::new(Bytes::kib(64)));
        let write = || Mutation::data(Bytes(0), Data::copy_of(&[7; 512]));
        let (fenced_lane, session) = FencedLane::open(memory.clone());
        session.write(write()).await.expect("the way is open");
        fenced_lane.close().await;
        let error = session.write(write()).await.expect_err("a session that is over wrote");
        assert_eq!(error.kind(), ErrorKind::Fenced);
        let (_entrance, session) = FencedLane::open(memory);
        session.write(write()).await.expect("the next one's way is open");
    }
}
