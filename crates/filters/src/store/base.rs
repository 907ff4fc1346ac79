//! What a store lies over, and how much of what was written there is durable.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use block::{Bytes, Device, Error, ErrorKind, Geometry, Mutation, Result};
use parking_lot::RwLock;

/// What a volume of `size` takes that is partly in `base` and partly in `own`: what both take. It is written to `own`.
pub(crate) fn geometry_of_both(size: Bytes, base: &Device, own: &Device) -> Geometry {
    let (below, own) = (base.geometry(), own.geometry());
    Geometry {
        size,
        request_alignment: below.request_alignment.max(own.request_alignment),
        preferred_bytes: below.preferred_bytes.max(own.preferred_bytes),
        transfer_bytes_max: below.transfer_bytes_max.min(own.transfer_bytes_max),
        read_only: own.read_only,
    }
}

/// The device below a store.
pub(crate) struct Base {
    device: RwLock<Device>,
    /// How many changes of it were answered. What came before the store was opened counts as one.
    answered: AtomicU64,
    /// How many of these are durable.
    durable: AtomicU64,
    /// Whether the store has written to it.
    is_written: AtomicBool,
}

impl Base {
    pub(crate) fn new(device: Device) -> Self {
        let (answered, durable) = (AtomicU64::new(1), AtomicU64::new(0));
        Self { device: RwLock::new(device), answered, durable, is_written: AtomicBool::new(false) }
    }

    /// What it is now.
    pub(crate) fn device(&self) -> Device {
        self.device.read().clone()
    }

    /// Takes another device for it.
    ///
    /// # Errors
    /// Busy if the store has written to the one that is there.
    pub(crate) fn replace(&self, device: Device) -> Result<()> {
        let mut now = self.device.write();
        if self.is_written.load(Ordering::Acquire) {
            let context = format!("an overlay is being drained into {}", now.name());
            return Err(Error::new(ErrorKind::Busy, context));
        }
        *now = device;
        self.answered.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Reaches the same device another way from now on.
    pub(crate) fn reach_by(&self, device: Device) {
        *self.device.write() = device;
    }

    /// Writes to it what the volume is to have there.
    pub(crate) async fn write(&self, mutation: Mutation) -> Result<()> {
        let is_durable = mutation.fua;
        let device = {
            // Under the lock, so that the device that is written to is never replaced.
            let device = self.device.read();
            self.is_written.store(true, Ordering::Release);
            device.clone()
        };
        device.write(mutation).await?;
        if !is_durable {
            self.answered.fetch_add(1, Ordering::Release);
        }
        Ok(())
    }

    /// Counts what others have written to it meanwhile as a change that is not durable.
    pub(crate) fn note_written(&self) {
        self.answered.fetch_add(1, Ordering::Release);
    }

    /// Whether all that was answered is durable.
    pub(crate) fn is_durable(&self) -> bool {
        self.durable.load(Ordering::Acquire) >= self.answered.load(Ordering::Acquire)
    }

    /// Makes durable all that was answered before this was called. One at a time.
    pub(crate) async fn flush(&self) -> Result<()> {
        let (device, answered) = {
            let device = self.device.read();
            (device.clone(), self.answered.load(Ordering::Acquire))
        };
        if self.durable.load(Ordering::Acquire) >= answered || device.geometry().read_only {
            return Ok(());
        }
        device.flush().await?;
        self.durable.store(answered, Ordering::Release);
        Ok(())
    }
}
