//! Adopted disks whose QEMU has ended: they are let go, with the image's locks, so that whoever manages the VM can start it again.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, Monitor};
use vm::{AdoptedDisk, ProcessState};

use crate::audit::Peer;
use crate::daemon::Daemon;
use crate::document::{AdoptionDirection, VolumeDocument};
use crate::volume::Volume;

/// How often the process is looked at: a VM may be started again right after it has ended.
const LOOK: Duration = Duration::from_millis(200);
/// How often that is tried again which something stands against.
const REST: Duration = Duration::from_secs(5);

/// Lets an adopted volume go once its QEMU has ended, nobody is connected, and no job works on it.
pub(crate) fn watch_end(daemon: &Arc<Daemon>, volume: &Arc<Volume>) {
    let is_known = |disk: &AdoptedDisk| disk.process_state() != ProcessState::Unknown;
    if !volume.document().adoption.as_ref().is_some_and(|adoption| is_known(&adoption.plan.disk)) {
        // Whether it has ended would not be seen.
        return;
    }
    let (daemon, volume) = (Arc::clone(daemon), Arc::clone(volume));
    let env = Arc::clone(&daemon.env);
    env.spawn(Box::pin(async move {
        let mut told: Option<Error> = None;
        loop {
            daemon.env.sleep(LOOK).await;
            let document = volume.document();
            if !daemon.has(&volume) || document.adoption.is_none() {
                return;
            }
            if volume.connections() > 0 || !has_ended(&document) {
                continue;
            }
            match Box::pin(daemon.release(&volume.name)).await {
                Ok(_) => {
                    tracing::info!(volume = volume.name, "the QEMU of an adopted disk has ended: the disk is let go");
                    let what = serde_json::json!({ "why": "its QEMU has ended" });
                    daemon.note(&Peer::daemon(), ("volume.release", &volume.name), what, None);
                    return;
                }
                Err(error) => {
                    if told.as_ref() != Some(&error) {
                        tracing::warn!(volume = volume.name, %error, "the QEMU of an adopted disk has ended, and the disk stays");
                    }
                    told = Some(error);
                    daemon.env.sleep(REST).await;
                }
            }
        }
    }));
}

/// Whether nothing but the record keeps the image from its next QEMU.
fn has_ended(document: &VolumeDocument) -> bool {
    let Some(adoption) = &document.adoption else { return false };
    // A person who starts a QEMU again can release the disk first; libvirt, and what manages it, know of no release.
    matches!(adoption.monitor, Monitor::Libvirt(_))
        && adoption.direction == AdoptionDirection::Adopted
        && document.job.is_none()
        && document.backend.local_path().is_some()
        && adoption.plan.disk.process_state() == ProcessState::Ended
}
