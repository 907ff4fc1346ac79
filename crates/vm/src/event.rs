//! What happens to a VM while a disk of its is adopted, and what should follow.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use crate::graph::Graph;
use crate::plan::AdoptedDisk;
use crate::qmp::{Event, LOOK_AGAIN, Qmp};
use crate::run::{DiskState, cover_of, disk_state};

/// Something that happened to a VM or to its adopted disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum VmEvent {
    /// The guest powered itself off, or QEMU was told to quit.
    Poweroff {
        /// QEMU's word: `guest-shutdown`, `host-qmp-quit`, `host-signal`, ...
        reason: String,
    },
    /// The machine was reset; it starts again with the same disks.
    Reset {
        /// Whether the guest did it.
        by_guest: bool,
    },
    /// QEMU is gone: the monitor's connection ended.
    QemuGone,
    /// The guest was stopped: by a person, by an IO error, or by a snapshot.
    Stopped,
    /// The guest goes on.
    Resumed,
    /// The adopted disk's device was unplugged.
    DiskUnplugged,
    /// A block job has begun on the adopted disk, or tells of itself.
    BlockJob {
        /// Its id.
        id: String,
        /// `mirror`, `backup`, ...; empty where QEMU does not say.
        kind: String,
    },
    /// The disk's size as the guest sees it has changed.
    Resized {
        /// Before.
        from_bytes: u64,
        /// Now.
        to_bytes: u64,
    },
    /// QEMU reports a failed request of the guest.
    IoError {
        /// `read` or `write`.
        operation: String,
        /// What QEMU does about it: `report`, `ignore` or `stop`.
        action: String,
        /// QEMU's words.
        reason: String,
    },
    /// Somebody took us out of the disk's path (or it was never finished): the graph does not lead to our export.
    NoLongerInside,
    /// Another program has put a node over the disk that keeps what the guest writes, as an external snapshot does.
    Covered {
        /// Its name.
        node: String,
        /// What it has opened.
        file: String,
    },
    /// QEMU itself is being migrated.
    VmMigration {
        /// `setup`, `active`, `completed`, ...
        status: String,
    },
    /// Events were missed: read the graph.
    Missed,
}

/// What a daemon does about an event while it moves the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing: the move goes on.
    GoOn,
    /// The guest writes no more: finish the move as a cold one, then persist the new place.
    FinishCold,
    /// Cancel the move, leave the disk as it is, and say why.
    Cancel,
    /// Read the graph and compare: [`VmEvents::compare`].
    Inspection,
}

/// What a migration of QEMU itself says when it has come to nothing.
const OVER: [&str; 4] = ["none", "cancelling", "cancelled", "failed"];

impl VmEvent {
    /// What follows from it for a move.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        match self {
            Self::Poweroff { .. } | Self::QemuGone | Self::DiskUnplugged => Outcome::FinishCold,
            // A reset, a stop and an IO error change nothing in who writes: only through us.
            Self::Reset { .. } | Self::Stopped | Self::Resumed | Self::IoError { .. } => Outcome::GoOn,
            // A qcow2 disk may grow within its container, whose bytes are what moves; a raw one cannot grow over NBD.
            Self::Resized { .. } => Outcome::GoOn,
            // A job reads or writes through us too, but may end by replacing nodes.
            Self::BlockJob { .. } | Self::NoLongerInside => Outcome::Cancel,
            // What moves is no longer what the guest has.
            Self::Covered { .. } => Outcome::Cancel,
            Self::VmMigration { status } if OVER.contains(&status.as_str()) => Outcome::Inspection,
            // Its target would open the disk by its old name.
            Self::VmMigration { .. } => Outcome::Cancel,
            Self::Missed => Outcome::Inspection,
        }
    }
}

/// The events of one adopted disk.
pub struct VmEvents {
    qmp: Qmp,
    events: Receiver<Arc<Event>>,
    disk: AdoptedDisk,
    disk_bytes: Option<u64>,
    is_over: bool,
}

impl VmEvents {
    /// Listens from now on. What has begun before is in the graph: [`Self::compare`].
    pub async fn watch(qmp: &Qmp, disk: &AdoptedDisk) -> Self {
        let watching = Self {
            qmp: qmp.clone(),
            events: qmp.events(),
            disk: disk.clone(),
            disk_bytes: disk.disk_bytes,
            is_over: false,
        };
        // QEMU tells of its own migration only if it is asked to. While one is under way it takes no such wish; the
        // graph tells of that one.
        let goal = json!({ "capabilities": [{ "capability": "events", "state": true }] });
        if let Err(error) = qmp.execute("migrate-set-capabilities", goal).await {
            tracing::debug!(%error, "QEMU does not tell of its own migration");
        }
        watching
    }

    /// The next event; `None` after [`VmEvent::QemuGone`]. May be dropped while it waits.
    pub async fn next(&mut self) -> Option<VmEvent> {
        while !self.is_over {
            let first = {
                let ended = std::pin::pin!(self.qmp.ended());
                let event = std::pin::pin!(self.events.recv());
                match futures::future::select(event, ended).await {
                    futures::future::Either::Left((received, _)) => Some(received),
                    futures::future::Either::Right(_) => None,
                }
            };
            // The last events of a QEMU that has ended are not to be lost.
            let received = first.or_else(|| self.events.try_recv().ok().map(Ok));
            match received {
                Some(Ok(event)) => {
                    if let Some(event) = understand(&event, &self.disk) {
                        return Some(event);
                    }
                }
                Some(Err(RecvError::Lagged(_))) => return Some(VmEvent::Missed),
                Some(Err(RecvError::Closed)) | None => {
                    self.is_over = true;
                    return Some(VmEvent::QemuGone);
                }
            }
        }
        None
    }

    /// What the graph shows that events do not tell: QEMU tells nothing of a resize, and events may be missed.
    pub fn compare(&mut self, graph: &Graph) -> Vec<VmEvent> {
        let mut found = Vec::new();
        match disk_state(&self.disk, graph) {
            DiskState::Inside => {}
            DiskState::DeviceGone => return vec![VmEvent::DiskUnplugged],
            DiskState::Outside | DiskState::Prepared => found.push(VmEvent::NoLongerInside),
        }
        let names = &self.disk.nodes;
        let cover = cover_of(&self.disk, graph);
        found.extend(cover.map(|node| VmEvent::Covered { node: node.name.clone(), file: node.filename.clone() }));
        let jobs = graph.jobs_on(&[names.format.as_str(), names.nbd.as_str()], &self.disk.backend);
        found.extend(graph.migration_under_way().map(|status| VmEvent::VmMigration { status: status.to_owned() }));
        found.extend(jobs.iter().map(|job| VmEvent::BlockJob { id: job.id.clone(), kind: job.kind.clone() }));
        let now = graph.node(&names.format).and_then(|node| node.virtual_bytes);
        if let (Some(from_bytes), Some(to_bytes)) = (self.disk_bytes, now)
            && from_bytes != to_bytes
        {
            found.push(VmEvent::Resized { from_bytes, to_bytes });
            self.disk_bytes = now;
        }
        found
    }
}

fn understand(event: &Event, disk: &AdoptedDisk) -> Option<VmEvent> {
    let text = |name: &str| event.data[name].as_str().unwrap_or_default().to_owned();
    let is_ours = |name: &str| {
        let nodes = [&disk.nodes.format, &disk.nodes.nbd, &disk.nodes.format_before];
        !name.is_empty() && (name == disk.backend || name == disk.device || nodes.iter().any(|node| *node == name))
    };
    match event.name.as_str() {
        "SHUTDOWN" => Some(VmEvent::Poweroff { reason: text("reason") }),
        "RESET" => Some(VmEvent::Reset { by_guest: event.data["guest"].as_bool().unwrap_or_default() }),
        "STOP" => Some(VmEvent::Stopped),
        "RESUME" => Some(VmEvent::Resumed),
        "DEVICE_DELETED" => is_device(&event.data, disk).then_some(VmEvent::DiskUnplugged),
        "BLOCK_JOB_READY" | "BLOCK_JOB_COMPLETED" | "BLOCK_JOB_CANCELLED" | "BLOCK_JOB_PENDING" => {
            is_ours(&text("device")).then(|| VmEvent::BlockJob { id: text("device"), kind: text("type") })
        }
        // Jobs by other names than the node's: whether it is ours only the graph tells.
        "JOB_STATUS_CHANGE" if text("status") == "created" => Some(VmEvent::Missed),
        LOOK_AGAIN => Some(VmEvent::Missed),
        "BLOCK_IO_ERROR" if is_ours(&text("device")) || is_ours(&text("node-name")) => {
            let (operation, action, reason) = (text("operation"), text("action"), text("reason"));
            Some(VmEvent::IoError { operation, action, reason })
        }
        "MIGRATION" => Some(VmEvent::VmMigration { status: text("status") }),
        _ => None,
    }
}

/// `DEVICE_DELETED` comes for the device and for its parts.
fn is_device(data: &Value, disk: &AdoptedDisk) -> bool {
    let path = data["path"].as_str().unwrap_or_default();
    !path.is_empty() && (disk.qom_path == path || disk.qom_path.starts_with(&format!("{path}/")))
}
