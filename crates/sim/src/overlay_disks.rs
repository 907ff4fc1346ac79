//! Overlays of snapshot moves on simulated disks: they outlive the process, and the power takes from them what it takes.

use std::collections::BTreeMap;
use std::sync::Arc;

use block::{Bytes, Device, Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::disk::{Disk, Faults, Timing};
use crate::failures::Reporter;
use crate::world::{Invariant, World};

/// The disks that hold overlays, by the side that they lie beside, and their number.
#[derive(Clone, Default)]
pub(crate) struct OverlayDisks {
    disks: Arc<Mutex<BTreeMap<(usize, u32), Disk>>>,
    /// Who hears of requests to them that fail.
    reporter: Arc<Mutex<Option<Reporter>>>,
}

impl OverlayDisks {
    /// Takes the power from those that lie beside the sides that `is_meant` names.
    pub(crate) fn lose_power(&self, is_meant: impl Fn(usize) -> bool) {
        self.disks.lock().iter().filter(|((side, _), _)| is_meant(*side)).for_each(|(_, disk)| disk.lose_power());
    }

    /// From now on `reporter` hears of every request that fails to one of those that are made.
    pub(crate) fn report_to(&self, reporter: Reporter) {
        *self.reporter.lock() = Some(reporter);
    }

    /// Makes an overlay, in the place of any that was there.
    pub(crate) async fn make(&self, world: &World, key: (usize, u32), length: Bytes, alignment: u32) -> Device {
        let disk = Disk::new(world, "overlay", length, alignment, Timing::FLASH);
        if let Some(reporter) = &*self.reporter.lock() {
            disk.report_to(reporter.clone());
        }
        self.disks.lock().insert(key, disk.clone());
        disk.open(0).await
    }

    /// Has `faults` happen to one.
    pub(crate) fn set_faults(&self, key: (usize, u32), faults: Faults) {
        if let Some(disk) = self.disks.lock().get(&key) {
            disk.set_faults(faults);
        }
    }

    /// Opens an overlay, which must be there: whoever asks for it has it on record.
    pub(crate) async fn open(&self, world: &World, key: (usize, u32)) -> Result<Device> {
        let disk = self.disks.lock().get(&key).cloned();
        match disk {
            Some(disk) => {
                disk.require_there()?;
                Ok(disk.open(0).await)
            }
            None => {
                let what = format!("overlay {} beside side {} is on record and was removed", key.1, key.0);
                world.violate(Invariant::CrashResume, what.clone());
                Err(Error::new(ErrorKind::NotFound, what))
            }
        }
    }

    /// One of them.
    pub(crate) fn disk(&self, key: (usize, u32)) -> Option<Disk> {
        self.disks.lock().get(&key).cloned()
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<Disk> {
        self.disks.lock().values().cloned().collect()
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
