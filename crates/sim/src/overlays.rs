//! Overlays of snapshot moves on simulated disks: they outlive the process, and the power takes from them what it takes.

use std::collections::BTreeMap;
use std::sync::Arc;

use block::{Bytes, Device, IoFuture};
use migrate::SnapshotStore;
use parking_lot::Mutex;

use crate::disk::{Disk, Timing};
use crate::record::Record;
use crate::world::{Invariant, World};

/// The disks that hold overlays, by number.
#[derive(Clone, Default)]
pub(crate) struct Shelf {
    disks: Arc<Mutex<BTreeMap<u32, Disk>>>,
}

impl Shelf {
    /// Takes the power from all of them.
    pub(crate) fn lose_power(&self) {
        self.disks.lock().values().for_each(Disk::lose_power);
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
        let disk = Disk::new(&self.world, "overlay", length, self.alignment, Timing::FLASH);
        self.shelf.disks.lock().insert(number, disk.clone());
        Box::pin(async move { Ok(disk.open(0).await) })
    }

    fn open(&self, number: u32) -> IoFuture<'_, Device> {
        Box::pin(async move {
            let disk = self.shelf.disks.lock().get(&number).cloned();
            match disk {
                Some(disk) => Ok(disk.open(0).await),
                None => {
                    let what = format!("overlay {number} is on record and was removed");
                    self.world.violate(Invariant::CrashResume, what.clone());
                    Err(block::Error::new(block::ErrorKind::NotFound, what))
                }
            }
        })
    }

    fn record(&self, numbers: Vec<u32>) -> IoFuture<'_, ()> {
        Box::pin(async move { self.record.set_overlays(numbers).await })
    }

    fn remove(&self, number: u32) -> IoFuture<'_, ()> {
        self.shelf.disks.lock().remove(&number);
        block::ready(Ok(()))
    }
}
