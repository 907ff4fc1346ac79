//! Whether what a guest writes comes to the exports of its disks, as QEMU's graph has it now.

use std::path::PathBuf;

use api::v1::{Error, ErrorCode};
use vm::{Graph, GuestPath, Qmp};

use crate::problem::{Result, of_vm};

/// A disk of a machine, by the volume and the socket of its export.
#[derive(Clone, Debug)]
pub struct ServedDisk {
    /// The volume.
    pub volume: String,
    /// The socket, as QEMU sees it.
    pub socket: PathBuf,
}

/// Refuses a disk to which the guest's writes do not come.
///
/// # Errors
/// The first such disk, and what is in the way; QEMU does not answer.
pub(super) async fn require_straight(qmp: &Qmp, disks: &[ServedDisk]) -> Result<()> {
    let graph = Graph::read(qmp).await.map_err(|error| of_vm(&error))?;
    disks.iter().try_for_each(|disk| judge(&graph, disk))
}

fn judge(graph: &Graph, disk: &ServedDisk) -> Result<()> {
    let volume = &disk.volume;
    let cover = match graph.path_to(&disk.socket) {
        GuestPath::Straight => return Ok(()),
        GuestPath::Covered(cover) => cover,
        GuestPath::Elsewhere => {
            let message =
                format!("no device of the guest comes to {volume} in QEMU: somebody has given it another disk");
            return Err(Error::new(ErrorCode::WrongState, message)
                .with_hint("see `query-block` of its QEMU; plug the disk in again, or start the VM anew"));
        }
    };
    let shown = if cover.filename.is_empty() { &cover.name } else { &cover.filename };
    let is_snapshot = cover.driver == "qcow2";
    let what = if is_snapshot { "a snapshot" } else { cover.driver.as_str() };
    let message = format!(
        "another program has put {what} over {volume} in QEMU: {shown} may have what the guest has written since"
    );
    Err(Error::new(ErrorCode::WrongState, message).with_hint(match is_snapshot {
        true => {
            "commit it back, as image backups do when they are ready (`virsh blockcommit DOMAIN DISK --active --pivot`, or QMP \
             block-commit), then move it again"
        }
        false => "wait for the end of its job, or take the node out, then move it again",
    }))
}
