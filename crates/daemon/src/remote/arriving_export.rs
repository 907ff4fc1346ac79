//! The export of a volume that comes with its machine. The target's QEMU opens its disks before the machine is there, and
//! reads their first sectors while it sets its devices up. So there is an export while the volume is filled.
//!
//! ```text
//!   reads ─▶ what is there of the copy        reads ─▶ the volume
//!   writes ─▶ wait                ──taken──▶  writes ─▶ the volume
//! ```
//!
//! Nobody runs on what is read before the volume is taken: QEMU forgets it when it takes its disks over.

use std::sync::{Arc, OnceLock};

use block::{
    BlockDevice, Buffer, BufferPool, Bytes, Device, Error, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture,
    Mutation, Slot,
};
use nbd::server::Export;
use tokio::sync::Notify;

use crate::reject_all::reject_all;

const NOT_COME: &str = "the volume has not come to this host";

/// An export that is there before its volume is.
pub(crate) struct ArrivingExport {
    gate: Arc<Gate>,
    slot: Slot,
    export: Arc<Export>,
}

impl ArrivingExport {
    /// Over `copy`, which is being filled. `open` makes a way through the slot for a connection.
    pub(crate) fn new(
        name: &str,
        export: &str,
        copy: Device,
        pool: BufferPool,
        open: impl Fn(&Slot) -> Device + Send + Sync + 'static,
    ) -> Self {
        let gate = Arc::new(Gate { copy, volume: OnceLock::new(), decided: Notify::new() });
        let slot = Slot::new(Device::from_arc(name, Arc::clone(&gate) as _));
        let lanes = slot.clone();
        let export = Export::new(export, pool, move || open(&lanes)).with_description(format!("volume {name}"));
        Self { gate, slot, export: Arc::new(export) }
    }

    /// What clients come to.
    pub(crate) fn export(&self) -> Arc<Export> {
        Arc::clone(&self.export)
    }

    /// The volume is held here: everything goes to `volume` from here on. Gives the slot and the export that are its now.
    pub(crate) fn open(self, volume: Device) -> (Slot, Arc<Export>) {
        self.gate.decide(Some(volume));
        (self.slot, self.export)
    }

    /// The volume does not come. Its clients may stay connected, but nothing of theirs has the copy open any more.
    pub(crate) async fn close(self) {
        self.gate.decide(None);
        let geometry = self.gate.geometry();
        let quiesced = self.slot.quiesce().await;
        quiesced.swap(reject_all("gone", geometry, ErrorKind::Fenced, NOT_COME));
    }
}

/// Reads what is there, and keeps writes until it is known what becomes of the volume.
struct Gate {
    copy: Device,
    /// Set once: the volume, or that there is none.
    volume: OnceLock<Option<Device>>,
    decided: Notify,
}

impl Gate {
    fn decide(&self, volume: Option<Device>) {
        let first = self.volume.set(volume).is_ok();
        assert!(first, "a volume arrives once, or not at all");
        self.decided.notify_waiters();
    }

    fn outcome(&self) -> Option<Result<Device, Error>> {
        let gone = || Error::new(ErrorKind::Fenced, NOT_COME);
        self.volume.get().map(|volume| volume.clone().ok_or_else(gone))
    }

    async fn volume(&self) -> Result<Device, Error> {
        loop {
            let mut decided = std::pin::pin!(self.decided.notified());
            // Before the look: what is decided after it is not missed.
            decided.as_mut().enable();
            if let Some(outcome) = self.outcome() {
                return outcome;
            }
            decided.await;
        }
    }

    fn readable(&self) -> Result<Device, Error> {
        self.outcome().unwrap_or_else(|| Ok(self.copy.clone()))
    }
}

impl BlockDevice for Gate {
    /// The volume's, whose writes wait: what lies where both hosts reach it is only read until it is held here.
    fn geometry(&self) -> Geometry {
        Geometry { read_only: false, ..self.copy.geometry() }
    }
    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move { self.readable()?.read(offset, buffer).await })
    }
    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move { self.volume().await?.write(mutation).await })
    }
    /// Nothing was written yet that could be made durable.
    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            match self.outcome() {
                Some(volume) => volume?.flush().await,
                None => Ok(()),
            }
        })
    }
    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(async move { self.readable()?.extents(extent).await })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Data, MemDevice};
    use futures::FutureExt;

    fn arriving(copy: &Device) -> ArrivingExport {
        let pool = BufferPool::new(Bytes::mib(1));
        ArrivingExport::new("disk", "disk", copy.clone(), pool, |slot| Device::new("lane", slot.lane()))
    }

    fn write(byte: u8) -> Mutation {
        Mutation::data(Bytes(0), Data::copy_of(&[byte; 512]))
    }

    async fn first_byte(device: &Device) -> u8 {
        let read = device.read(Bytes(0), Buffer::unpooled(512)).await;
        read.expect("it is read")[0]
    }

    #[tokio::test]
    async fn reads_are_answered_from_the_copy_and_writes_wait_for_the_volume() {
        let (copy, volume) = (MemDevice::new(Bytes::kib(64)), MemDevice::new(Bytes::kib(64)));
        let (copy, volume) = (Device::new("copy", copy), Device::new("volume", volume));
        copy.write(write(7)).await.expect("filled");
        let arriving = arriving(&copy);
        let client = Device::new("client", arriving.slot.lane());
        assert_eq!(first_byte(&client).await, 7);
        client.flush().await.expect("nothing to flush");
        let written = client.write(write(9));
        futures::pin_mut!(written);
        assert!(written.as_mut().now_or_never().is_none(), "a write went through before the volume was here");
        assert_eq!(first_byte(&copy).await, 7);
        drop(arriving.open(volume.clone()));
        written.await.expect("it goes to the volume");
        assert_eq!((first_byte(&copy).await, first_byte(&volume).await), (7, 9));
    }

    #[tokio::test]
    async fn a_volume_that_does_not_come_fails_what_waits_and_leaves_its_copy_to_whoever_takes_it_back() {
        let memory = Arc::new(MemDevice::new(Bytes::kib(64)));
        let arriving = arriving(&Device::from_arc("copy", Arc::clone(&memory) as _));
        let client = Device::new("client", arriving.slot.lane());
        let (written, ()) = futures::future::join(client.write(write(9)), arriving.close()).await;
        assert_eq!(written.expect_err("it was written").kind(), ErrorKind::Fenced);
        assert_eq!(Arc::strong_count(&memory), 1, "a client that is still connected has the copy open");
        assert_eq!(client.flush().await.expect_err("it is gone").kind(), ErrorKind::Fenced);
    }
}
