//! The device in memory passes the body that every device passes, and the body notices devices that do not.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::testing::conformance;
use crate::{Bytes, Device, Extent, Filter, IoFuture, MemDevice, Mutation, MutationKind, ready};
use futures::FutureExt;

#[tokio::test]
async fn the_device_in_memory_conforms() {
    for seed in 0..4 {
        conformance(seed, async |size| Device::new("memory", MemDevice::new(size))).await;
        for unit in [512, 4096] {
            let make = async |size| Device::new("memory", MemDevice::new(size).with_request_alignment(unit));
            conformance(seed, make).await;
        }
    }
}

#[tokio::test]
async fn a_slot_that_is_held_again_and_again_conforms() {
    let holding = std::cell::RefCell::new(Vec::new());
    let make = async |size| {
        let slot = crate::Slot::new(Device::new("memory", MemDevice::new(size)));
        let lane = Device::new("lane", slot.lane());
        holding.borrow_mut().push(tokio::spawn(async move {
            loop {
                let quiesced = slot.quiesce().await;
                tokio::task::yield_now().await;
                drop(quiesced);
                tokio::task::yield_now().await;
            }
        }));
        lane
    };
    conformance(3, make).await;
    holding.into_inner().iter().for_each(tokio::task::JoinHandle::abort);
}

/// What is wrong with a device.
#[derive(Clone, Copy)]
enum Defect {
    /// One write in fifty is acknowledged and lost.
    LosesWrites,
    /// Zeroes leave the first byte as it was.
    ZeroesTooLittle,
    /// A write at the very end loses its last byte.
    ForgetsTheLastByte,
}

struct Defective {
    lower: Device,
    defect: Defect,
    count: AtomicU64,
}

impl Filter for Defective {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        let extent = mutation.extent();
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        let kept = match (self.defect, mutation.kind()) {
            (Defect::LosesWrites, _) if count % 50 == 49 => return ready(Ok(())),
            (Defect::ZeroesTooLittle, MutationKind::Zeroes { .. }) => {
                Extent::between(extent.offset + Bytes(1), extent.end())
            }
            (Defect::ForgetsTheLastByte, _) if extent.end() == self.lower.size() => {
                Extent::between(extent.offset, extent.end() - Bytes(1))
            }
            _ => extent,
        };
        if kept.is_empty() {
            return ready(Ok(()));
        }
        let mutation = mutation.slice(kept);
        Box::pin(async move { self.lower.write(mutation).await })
    }
}

#[tokio::test]
async fn defective_devices_are_found_out() {
    for defect in [Defect::LosesWrites, Defect::ZeroesTooLittle, Defect::ForgetsTheLastByte] {
        let make = async |size| {
            let lower = Device::new("memory", MemDevice::new(size));
            Device::from_arc("defective", Arc::new(Defective { lower, defect, count: AtomicU64::new(0) }))
        };
        let outcome = std::panic::AssertUnwindSafe(conformance(1, make)).catch_unwind().await;
        assert!(outcome.is_err(), "a device that is defective passed");
    }
}
