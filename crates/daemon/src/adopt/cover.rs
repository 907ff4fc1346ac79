//! What another program puts over a disk while it is adopted: an external snapshot, as image backups take.
//!
//! ```text
//!   guest ──▶ its snapshot ──▶ format node ──▶ our export
//!             has what is       what moves
//!             written since
//! ```
//!
//! Nothing is lost as long as QEMU goes through us. But the volume is no longer what the guest has, so a move of it ends. The header of
//! the snapshot may name our export as what is below it: then nobody could open it after the release.

use api::v1::{Error, ErrorCode};
use vm::{Graph, Node};

use super::disk_state::Inspection;
use super::monitor::Vm;
use crate::daemon::Daemon;
use crate::document::AdoptionDocument;
use crate::location::require_local;
use crate::problem::{Result, of_vm};
use crate::volume::Volume;

/// What to do about a node over the disk.
const WAY_OUT: &str = "commit it back, as image backups do when they are ready (`virsh blockcommit DOMAIN DISK --active --pivot`, or \
                       QMP block-commit), then do it again";

/// Says that `cover` lies over the disk `name`.
pub(super) fn is_covered(name: &str, cover: &Node) -> Error {
    let message = format!(
        "another program has taken a snapshot of {name} in QEMU: {} lies over it and has what the guest has written since",
        shown(cover)
    );
    Error::new(ErrorCode::WrongState, message).with_hint(WAY_OUT)
}

fn shown(cover: &Node) -> &str {
    if cover.filename.is_empty() { &cover.name } else { &cover.filename }
}

impl Daemon {
    /// Fails if something lies over an adopted disk. Nothing is said of one whose QEMU does not tell.
    pub(crate) async fn require_uncovered(&self, volume: &Volume) -> Result<()> {
        let document = volume.document();
        let Some(adoption) = &document.adoption else { return Ok(()) };
        match self.look(volume, adoption).await {
            Inspection::Covered(error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Has a snapshot over the disk name the image as below it, before the export that it may name goes away.
    ///
    /// # Errors
    /// It names the export, and QEMU cannot change that: a release would leave a disk that nobody can open.
    pub(super) async fn uncover(&self, volume: &Volume, adoption: &AdoptionDocument, vm: &Vm) -> Result<()> {
        let disk = &adoption.plan.disk;
        let graph = Graph::read(&vm.qmp).await.map_err(|error| of_vm(&error))?;
        let Some(cover) = vm::cover_of(disk, &graph) else { return Ok(()) };
        if disk.form != vm::Form::Reopen {
            // Only the device could be given another node, and it has somebody else's.
            return Err(is_covered(&volume.name, cover));
        }
        let socket = disk.export.socket.display().to_string();
        if !cover.backing_name.as_ref().is_none_or(|name| name.contains(&socket)) {
            return Ok(());
        }
        let document = volume.document();
        let image = require_local(&document.backend, "its disk cannot be given back to its VM")?;
        if cover.driver != adoption.format {
            // `change-backing-file` would write down the snapshot's own format as that of what is below it.
            let (file, image) = (shown(cover), image.path().display());
            let error = is_covered(&volume.name, cover);
            let message = format!("{}, and its header names this daemon's export as what is below it", error.message);
            return Err(Error::new(error.code, message).with_hint(format!(
                "{WAY_OUT}; or end the VM, `qemu-img rebase -u -F {} -b {image} {file}`, and `transhume release {}`",
                adoption.format, volume.name
            )));
        }
        tracing::info!(volume = volume.name, cover = shown(cover), "a snapshot over the disk is told the image's name");
        vm::name_image(&vm.qmp, disk, cover, image.path()).await.map_err(|error| of_vm(&error))
    }
}
