//! Who starts a machine the next time, if its disks stay where they are.
//!
//! A disk that was copied has another name at the source afterwards, so what starts the machine there again finds none. A block device that
//! both hosts reach keeps its name, and no lock goes from host to host: a unit that systemd starts again, an HA agent or a boot would run a
//! second guest on it. So somebody says who starts the machine from then on, as for the move of a disk.

use std::path::Path;
use std::sync::Arc;

use api::v1::{Error, ErrorCode, Monitor, VmDisk, VmMoveRequest};

use super::document::MachineDocument;
use super::shared::Handling;
use crate::daemon::Daemon;
use crate::hosts::HostName;
use crate::problem::Result;

impl Daemon {
    /// Refuses a move after which this host could start the machine again on a block device that the other one uses.
    pub(super) fn require_next_start(
        &self,
        document: &MachineDocument,
        request: &VmMoveRequest,
        (disks, handled): (&[VmDisk], &[Handling]),
    ) -> Result<()> {
        if self.says_who_starts(document, request) {
            return Ok(());
        }
        let stays =
            |handling: &Handling| handling.place.as_ref().and_then(|place| place.local_path()).map(Path::to_owned);
        let mut staying = disks.iter().zip(handled).filter_map(|(disk, handling)| Some((disk, stays(handling)?)));
        let Some((disk, path)) = staying.find(|(_, path)| self.is_block_device(path)) else {
            return Ok(());
        };
        let (name, node, path) = (&document.name, &disk.node, path.display());
        let message = format!(
            "the disk {node} of {name} stays at {path}, and nobody says what starts {name} from then on: a unit, an HA agent or a boot of \
             this host could start it on the same disk"
        );
        Err(Error::new(ErrorCode::PersistMissing, message).with_hint(
            "see that nothing starts it here any more and say --no-persist, or configure a `vm-hook` that sees to it (its phase `released`)",
        ))
    }

    /// The same before disks are adopted for the move.
    pub(super) async fn require_next_start_early(
        self: &Arc<Self>,
        document: &MachineDocument,
        (host, request): (&HostName, &VmMoveRequest),
        disks: &[VmDisk],
    ) -> Result<()> {
        let is_device = |disk: &VmDisk| {
            let path = disk.file.strip_prefix("file:").unwrap_or(&disk.file);
            self.is_block_device(Path::new(path.split(',').next().unwrap_or(path)))
        };
        if self.says_who_starts(document, request) || !disks.iter().any(is_device) {
            return Ok(());
        }
        let handled = self.handle_disks(host, disks, request).await?;
        self.require_next_start(document, request, (disks, &handled))
    }

    /// Whether somebody has said it; libvirt forgets a domain that it has migrated.
    fn says_who_starts(&self, document: &MachineDocument, request: &VmMoveRequest) -> bool {
        let has_hook = self.config.hosts.as_ref().is_some_and(|hosts| hosts.vm_hook.is_some());
        request.no_persist || has_hook || matches!(document.monitor, Monitor::Libvirt(_))
    }

    fn is_block_device(&self, path: &Path) -> bool {
        self.backends.device_identity(path).ok().flatten().is_some()
    }
}
