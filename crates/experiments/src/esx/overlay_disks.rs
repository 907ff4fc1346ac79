//! Where the overlays of a move by snapshots lie.
//!
//! The first lies beside the source, "to minimize the time the virtual disk spans two volumes" (2.2). The others lie
//! beside the target, each behind the disk on the same array. Two at most exist at once, so two places are enough.

use std::collections::BTreeMap;
use std::time::Duration;

use super::allocated::{AllocatedFile, FileCosts};

use block::{Bytes, Device, Error, ErrorKind, IoFuture};
use migrate::SnapshotStore;
use parking_lot::Mutex;

use sim::model::Volume;
use sim::model::contents::Origin;
use sim::world::World;

/// What separates volumes on an array.
const GAP: u64 = 1 << 20;

/// The overlays of one move.
pub(super) struct MoveOverlays {
    world: World,
    sides: [Volume; 2],
    size: Bytes,
    /// What they cost, and at which scale, if they are files in which blocks are allocated, as the paper's.
    files: Option<(FileCosts, u64)>,
    overlays: Mutex<BTreeMap<u32, Device>>,
}

impl MoveOverlays {
    /// Nothing yet, beside two volumes of `size`.
    pub(super) fn new(world: &World, sides: [&Volume; 2], size: Bytes, files: Option<(FileCosts, u64)>) -> Self {
        Self { world: world.clone(), sides: sides.map(Clone::clone), size, files, overlays: Mutex::default() }
    }
}

impl SnapshotStore for MoveOverlays {
    fn boot(&self) -> [u8; 16] {
        [1; 16]
    }

    fn recorded(&self) -> Vec<u32> {
        Vec::new()
    }

    fn create(&self, number: u32, length: Bytes) -> IoFuture<'_, Device> {
        let side = usize::from(number > 1);
        let place = self.size.align_up(GAP).0 + u64::from(number % 2) * length.align_up(GAP).0;
        let volume = self.sides[side].beside(&format!("overlay {number}"), length, Origin::Empty, place);
        let mut device = volume.device();
        if let Some(files) = self.files {
            let file = AllocatedFile::new(&self.world, device, Bytes(length.0 - self.size.0), files);
            device = Device::new(&format!("file of overlay {number}"), file);
        }
        self.overlays.lock().insert(number, device.clone());
        block::ready(Ok(device))
    }

    fn open(&self, number: u32) -> IoFuture<'_, Device> {
        let found = self.overlays.lock().get(&number).cloned();
        block::ready(found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("there is no overlay {number}"))))
    }

    fn record(&self, _: Vec<u32>) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.world.sleep(Duration::from_millis(1)).await;
            Ok(())
        })
    }

    fn remove(&self, number: u32) -> IoFuture<'_, ()> {
        self.overlays.lock().remove(&number);
        block::ready(Ok(()))
    }
}
