//! The one joint of a stack that can be changed while requests run.
//!
//! ```text
//!              quiesce()                 the last request in flight is answered
//!   open  ───────────────────▶ draining ──────────────────────────────────────▶ quiesced
//!    ▲                            │                                               │
//!    │   the deadline passes,     │                                               │  swap(device), any number
//!    └──── resume ◀───────────────┘                                               │  of times; then drop: resume
//!    ▲                                                                            │
//!    └────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Every frontend connection holds a lane of its own with its own count of requests in flight, on its own cache line.
//! In the steady state a request costs two additions that no other core touches. While the slot is draining or
//! quiesced, new requests wait in their lanes and nothing is refused. All migrations enter and leave through here.

mod turnstile;

use arc_swap::ArcSwap;

use crate::sync::{self, Arc};
use crate::{BlockDevice, Buffer, Bytes, Device, Extent, ExtentStatus, Geometry, IoFuture, Mutation, Result};
use turnstile::{Count, Inside, Turnstile};

/// The control side of a joint: who holds it may quiesce the traffic and change the device below. Clones are the same
/// slot.
#[derive(Clone)]
pub struct Slot {
    shared: Arc<Shared>,
}

struct Shared {
    device: ArcSwap<Device>,
    turnstile: Turnstile,
    /// Held from `quiesce` to resume: one at a time.
    quiescing: Arc<tokio::sync::Mutex<()>>,
}

impl Slot {
    /// A slot with `device` below.
    #[must_use]
    pub fn new(device: Device) -> Self {
        let shared =
            Shared { device: ArcSwap::from_pointee(device), turnstile: Turnstile::new(), quiescing: Arc::default() };
        Self { shared: Arc::new(shared) }
    }

    /// A way into the slot for one connection or queue.
    #[must_use]
    pub fn lane(&self) -> SlotLane {
        SlotLane { shared: Arc::clone(&self.shared), count: self.shared.turnstile.add_lane() }
    }

    /// The device below now.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::clone(&self.shared.device.load())
    }

    /// How many requests are in flight below, over all lanes.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.shared.turnstile.inside()
    }

    /// Holds new requests and waits until those in flight are answered. Dropping the wait resumes, so a caller bounds
    /// it in time by racing it against a timer.
    pub async fn quiesce(&self) -> Quiesced {
        let turn = Arc::clone(&self.shared.quiescing).lock_owned().await;
        self.shared.turnstile.hold();
        let quiesced = Quiesced { shared: Arc::clone(&self.shared), _turn: turn };
        self.shared.turnstile.drain().await;
        quiesced
    }
}

/// A slot without requests in flight. New ones wait until this is dropped.
pub struct Quiesced {
    shared: Arc<Shared>,
    _turn: tokio::sync::OwnedMutexGuard<()>,
}

impl Quiesced {
    /// Replaces the device below by `device` and returns the old one.
    ///
    /// A count may be above zero for a moment here. That request counted itself in, saw that the slot is held, and is
    /// about to count itself out without having looked at the device.
    pub fn swap(&self, device: Device) -> Device {
        Device::clone(&self.shared.device.swap(Arc::new(device)))
    }
}

impl Drop for Quiesced {
    fn drop(&mut self) {
        self.shared.turnstile.open();
    }
}

/// One connection's way into a slot.
pub struct SlotLane {
    shared: Arc<Shared>,
    count: Arc<Count>,
}

impl SlotLane {
    /// Counts a request in, waiting while the slot is held. The wait is boxed: it is rare, and would be most of every
    /// request's future.
    async fn enter(&self) -> Inside<'_> {
        match self.shared.turnstile.try_enter(&self.count) {
            Some(inside) => inside,
            None => Box::pin(self.shared.turnstile.wait_to_enter(&self.count)).await,
        }
    }
}

impl Drop for SlotLane {
    fn drop(&mut self) {
        self.shared.turnstile.remove_lane(&self.count);
    }
}

/// The verbs without a box around their futures, for what makes one layer together with its lane.
impl SlotLane {
    /// See [`BlockDevice::geometry`].
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.shared.device.load().geometry()
    }

    /// See [`BlockDevice::read`].
    ///
    /// # Errors
    /// What the device below says.
    pub async fn read(&self, offset: Bytes, buffer: Buffer) -> Result<Buffer> {
        let _in_flight = self.enter().await;
        self.shared.device.load().read(offset, buffer).await
    }

    /// See [`BlockDevice::write`].
    ///
    /// # Errors
    /// What the device below says.
    pub async fn write(&self, mutation: Mutation) -> Result<()> {
        let _in_flight = self.enter().await;
        self.shared.device.load().write(mutation).await
    }

    /// See [`BlockDevice::flush`].
    ///
    /// # Errors
    /// What the device below says.
    pub async fn flush(&self) -> Result<()> {
        let _in_flight = self.enter().await;
        self.shared.device.load().flush().await
    }

    /// See [`BlockDevice::extents`].
    ///
    /// # Errors
    /// What the device below says.
    pub async fn extents(&self, extent: Extent) -> Result<Vec<ExtentStatus>> {
        let _in_flight = self.enter().await;
        self.shared.device.load().extents(extent).await
    }
}

impl BlockDevice for SlotLane {
    fn geometry(&self) -> Geometry {
        Self::geometry(self)
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(Self::read(self, offset, buffer))
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(Self::write(self, mutation))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(Self::flush(self))
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(Self::extents(self, extent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Data, Filter, MemDevice};
    use std::time::Duration;

    /// Takes 10 ms over everything.
    struct Slow(Device);

    impl Filter for Slow {
        fn lower(&self) -> &Device {
            &self.0
        }
        fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
            Box::pin(async move {
                tokio::time::sleep(Duration::from_millis(10)).await;
                self.0.write(mutation).await
            })
        }
    }

    fn slow_mem(name: &str) -> Device {
        Device::new(name, Slow(Device::new("mem", MemDevice::new(Bytes::mib(1)))))
    }

    async fn byte_at(device: &Device, offset: u64) -> u8 {
        device.read(Bytes(offset), Buffer::unpooled(1)).await.expect("memory answers")[0]
    }

    fn write_of(offset: u64, byte: u8) -> Mutation {
        Mutation::data(Bytes(offset), Data::copy_of(&[byte]))
    }

    #[tokio::test(start_paused = true)]
    async fn a_swap_waits_for_requests_in_flight_and_later_ones_reach_the_new_device() {
        let (old, new) = (slow_mem("old"), slow_mem("new"));
        let slot = Slot::new(old.clone());
        let lane = Device::new("lane", slot.lane());

        let before = tokio::spawn({
            let lane = lane.clone();
            async move { lane.write(write_of(0, 1)).await }
        });
        tokio::task::yield_now().await;
        assert_eq!(slot.in_flight(), 1);

        let quiesced = slot.quiesce().await;
        assert_eq!(byte_at(&old, 0).await, 1, "quiesced before the request in flight was carried out");
        let during = tokio::spawn({
            let lane = lane.clone();
            async move { lane.write(write_of(1, 2)).await }
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!during.is_finished(), "a request passed a quiesced slot");

        quiesced.swap(new.clone());
        drop(quiesced);
        before.await.expect("no panic").expect("the write succeeds");
        during.await.expect("no panic").expect("the write succeeds");
        assert_eq!((byte_at(&old, 1).await, byte_at(&new, 1).await), (0, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_quiesce_that_is_given_up_lets_requests_through_again() {
        let slot = Slot::new(slow_mem("only"));
        let lane = Device::new("lane", slot.lane());
        let writing = tokio::spawn({
            let lane = lane.clone();
            async move { lane.write(write_of(0, 1)).await }
        });
        tokio::task::yield_now().await;
        let quiesce = tokio::time::timeout(Duration::from_millis(1), slot.quiesce()).await;
        assert!(quiesce.is_err(), "quiesced under a request in flight");
        lane.write(write_of(1, 1)).await.expect("the slot is open again");
        writing.await.expect("no panic").expect("the write succeeds");
        assert_eq!(slot.in_flight(), 0);
    }
}
