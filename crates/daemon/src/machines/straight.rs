//! The block graph of a machine that moves: each of its disks is what its guest writes to.
//!
//! Disks that were adopted are watched while they move, those that have come with their machine are not. So all are looked at when the
//! move begins, and again when the guest is stopped and before the commit: nothing is written after that look.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use nbd::Transport;

use super::attempt::MachineMove;
use crate::daemon::Daemon;
use crate::hypervisor::{Hypervisor, ServedDisk};
use crate::problem::Result;
use crate::volume::Volume;

/// How long QEMU may take to tell its graph: its guest is stopped.
const LOOK_LIMIT: Duration = Duration::from_secs(10);

impl MachineMove {
    /// Refuses the switchover if something lies between the stopped guest and one of its disks.
    pub(super) async fn require_straight(&self, daemon: &Daemon) -> Result<()> {
        let volumes: Vec<_> = self.disks.iter().map(|disk| Arc::clone(&disk.volume)).collect();
        let asked = require_straight(&*self.departure.hypervisor, &volumes);
        env::timeout(&*daemon.env, LOOK_LIMIT, asked).await.unwrap_or_else(|| {
            let message = format!("QEMU did not tell in time where the disks of {} are", self.name());
            Err(Error::new(ErrorCode::QmpBusy, message).with_hint("move it again when its monitor is free"))
        })
    }
}

/// Refuses volumes whose guest does not write straight to them.
pub(super) async fn require_straight(hypervisor: &dyn Hypervisor, volumes: &[Arc<Volume>]) -> Result<()> {
    let mut disks = Vec::with_capacity(volumes.len());
    for volume in volumes {
        if let Transport::Unix(socket) = volume.uri()?.transport {
            disks.push(ServedDisk { volume: volume.name.clone(), socket });
        }
    }
    hypervisor.require_straight(&disks).await
}
