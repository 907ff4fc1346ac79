//! Disks that have come with a machine are its QEMU's alone, as long as that one is meant.

use super::document::MachineDocument;
use crate::daemon::Daemon;
use crate::problem::Result;

impl Daemon {
    /// The machine is forgotten: if its QEMU has ended, its disks are for whoever may connect to them.
    pub(super) async fn free_disks(&self, document: &MachineDocument) -> Result<()> {
        if document.process.as_ref().is_some_and(|process| self.hypervisors.lives(process)) {
            return Ok(());
        }
        for volume in document.disks.iter().filter_map(|disk| self.volume(&disk.volume).ok()) {
            let _operation = volume.begin_operation(&*self.env).await?;
            volume.free_of_machine().await?;
        }
        Ok(())
    }
}
