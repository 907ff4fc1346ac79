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
//! Every frontend connection holds a lane of its own with its own count of requests in flight, on its own cache line:
//! in the steady state a request costs two additions that no other core touches. While the slot is draining or
//! quiesced, new requests wait in their lanes and nothing is refused. All migrations enter and leave through here.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use crossbeam_utils::CachePadded;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{BlockDevice, Buffer, Bytes, Device, Extent, ExtentStatus, Geometry, IoFuture, Mutation, Result};

/// The control side of a joint: who holds it may quiesce the traffic and change the device below. Clones are the same
/// slot.
#[derive(Clone)]
pub struct Slot {
    shared: Arc<Shared>,
}

struct Shared {
    device: ArcSwap<Device>,
    /// New requests wait while this is set.
    held: AtomicBool,
    lanes: Mutex<Vec<Arc<LaneState>>>,
    /// A request in flight was answered while the slot was held.
    drained: Notify,
    resumed: Notify,
    /// Held from `quiesce` to resume: one at a time.
    quiescing: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Default)]
struct LaneState {
    in_flight: CachePadded<AtomicUsize>,
}

impl Slot {
    /// A slot with `device` below.
    #[must_use]
    pub fn new(device: Device) -> Self {
        let shared = Shared {
            device: ArcSwap::from_pointee(device),
            held: AtomicBool::new(false),
            lanes: Mutex::new(Vec::new()),
            drained: Notify::new(),
            resumed: Notify::new(),
            quiescing: Arc::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// A way into the slot for one connection or queue.
    #[must_use]
    pub fn lane(&self) -> SlotLane {
        let state = Arc::new(LaneState::default());
        self.shared.lanes.lock().push(Arc::clone(&state));
        SlotLane { shared: Arc::clone(&self.shared), state }
    }

    /// The device below now.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::clone(&self.shared.device.load())
    }

    /// How many requests are in flight below, over all lanes.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.shared.in_flight()
    }

    /// Holds new requests and waits until those in flight are answered. Dropping the wait resumes, so a caller bounds
    /// it in time by racing it against a timer.
    pub async fn quiesce(&self) -> Quiesced {
        let turn = Arc::clone(&self.shared.quiescing).lock_owned().await;
        self.shared.held.store(true, Ordering::SeqCst);
        let quiesced = Quiesced { shared: Arc::clone(&self.shared), _turn: turn };
        loop {
            let drained = self.shared.drained.notified();
            if self.shared.in_flight() == 0 {
                return quiesced;
            }
            drained.await;
        }
    }
}

impl Shared {
    fn in_flight(&self) -> usize {
        self.lanes.lock().iter().map(|lane| lane.in_flight.load(Ordering::SeqCst)).sum()
    }
}

/// A slot without requests in flight. New ones wait until this is dropped.
pub struct Quiesced {
    shared: Arc<Shared>,
    _turn: tokio::sync::OwnedMutexGuard<()>,
}

impl Quiesced {
    /// Puts `device` in the place of the one below and gives that back.
    ///
    /// A count may be above zero for a moment here: a request that counted itself in, saw that the slot is held, and
    /// is about to count itself out again without having looked at the device.
    pub fn swap(&self, device: Device) -> Device {
        Device::clone(&self.shared.device.swap(Arc::new(device)))
    }
}

impl Drop for Quiesced {
    fn drop(&mut self) {
        self.shared.held.store(false, Ordering::SeqCst);
        self.shared.resumed.notify_waiters();
    }
}

/// One connection's way into a slot.
pub struct SlotLane {
    shared: Arc<Shared>,
    state: Arc<LaneState>,
}

/// A request in flight; dropping it counts it as answered.
struct InFlight<'a> {
    lane: &'a SlotLane,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.lane.state.in_flight.fetch_sub(1, Ordering::SeqCst);
        if self.lane.shared.held.load(Ordering::SeqCst) {
            self.lane.shared.drained.notify_one();
        }
    }
}

impl SlotLane {
    /// Counts a request in, or `None` if the slot is held. The count goes up before the flag is looked at, and the
    /// quiescing side sets the flag before it looks at the counts: one of the two always sees the other.
    fn try_enter(&self) -> Option<InFlight<'_>> {
        self.state.in_flight.fetch_add(1, Ordering::SeqCst);
        let entered = InFlight { lane: self };
        (!self.shared.held.load(Ordering::SeqCst)).then_some(entered)
    }

    /// Counts a request in, waiting while the slot is held. The wait is boxed: it is rare, and as a part of every
    /// request's future it would be most of its size.
    async fn enter(&self) -> InFlight<'_> {
        match self.try_enter() {
            Some(entered) => entered,
            None => Box::pin(self.wait_to_enter()).await,
        }
    }

    async fn wait_to_enter(&self) -> InFlight<'_> {
        loop {
            let resumed = self.shared.resumed.notified();
            if self.shared.held.load(Ordering::SeqCst) {
                resumed.await;
            }
            if let Some(entered) = self.try_enter() {
                return entered;
            }
        }
    }
}

impl Drop for SlotLane {
    fn drop(&mut self) {
        self.shared.lanes.lock().retain(|lane| !Arc::ptr_eq(lane, &self.state));
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
