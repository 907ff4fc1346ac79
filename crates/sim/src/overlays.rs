//! Overlays of snapshot moves on simulated disks: they outlive the process, and the power takes from them what it takes.

use std::collections::BTreeMap;
use std::sync::Arc;

use block::{Bytes, Device, Error, ErrorKind, IoFuture, Result};
use migrate::SnapshotStore;
use parking_lot::Mutex;

use crate::disk::{Disk, Timing};
use crate::record::Record;
use crate::world::{Invariant, World};

/// The disks that hold overlays, by the side that they lie beside, and their number.
#[derive(Clone, Default)]
pub(crate) struct Shelf {
    disks: Arc<Mutex<BTreeMap<(usize, u32), Disk>>>,
}

impl Shelf {
    /// Takes the power from all of them.
    pub(crate) fn lose_power(&self) {
        self.disks.lock().values().for_each(Disk::lose_power);
    }

    /// Makes an overlay, in the place of any that was there.
    pub(crate) async fn make(&self, world: &World, key: (usize, u32), length: Bytes, alignment: u32) -> Device {
        let disk = Disk::new(world, "overlay", length, alignment, Timing::FLASH);
        self.disks.lock().insert(key, disk.clone());
        disk.open(0).await
    }

    /// Opens an overlay, which must be there: whoever asks for it has it on record.
    pub(crate) async fn open(&self, world: &World, key: (usize, u32)) -> Result<Device> {
        let disk = self.disks.lock().get(&key).cloned();
        match disk {
            Some(disk) => Ok(disk.open(0).await),
            None => {
                let what = format!("overlay {} beside side {} is on record and was removed", key.1, key.0);
                world.violate(Invariant::CrashResume, what.clone());
                Err(Error::new(ErrorKind::NotFound, what))
            }
        }
    }

    /// Removes an overlay.
    pub(crate) fn remove(&self, key: (usize, u32)) {
        self.disks.lock().remove(&key);
    }

    /// The numbers of the overlays beside `side`.
    pub(crate) fn numbers(&self, side: usize) -> Vec<u32> {
        self.disks.lock().keys().filter(|(found, _)| *found == side).map(|(_, number)| *number).collect()
    }
}

/// The overlays of one life of the process.
pub(crate) struct Overlays {
    pub(crate) world: World,
    pub(crate) shelf: Shelf,
    pub(crate) record: Arc<Record>,
    pub(crate) boot: u8,
    /// What requests are multiples of at least.
    pub(crate) alignment: u32,
}

impl SnapshotStore for Overlays {
    fn boot(&self) -> [u8; 16] {
        [self.boot; 16]
    }

    fn recorded(&self) -> Vec<u32> {
        self.record.document().job.map_or_else(Vec::new, |job| job.overlays)
    }

    fn create(&self, number: u32, length: Bytes) -> IoFuture<'_, Device> {
        Box::pin(async move { Ok(self.shelf.make(&self.world, (0, number), length, self.alignment).await) })
    }

    fn open(&self, number: u32) -> IoFuture<'_, Device> {
        Box::pin(self.shelf.open(&self.world, (0, number)))
    }

    fn record(&self, numbers: Vec<u32>) -> IoFuture<'_, ()> {
        Box::pin(async move { self.record.set_overlays(numbers).await })
    }

    fn remove(&self, number: u32) -> IoFuture<'_, ()> {
        self.shelf.remove((0, number));
        block::ready(Ok(()))
    }
}
