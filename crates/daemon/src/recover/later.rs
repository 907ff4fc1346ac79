//! Journals that a start could not read for a reason that passes by itself: a dead process's requests hang, or file descriptors are
//! short. They are tried again.

use std::sync::Arc;
use std::time::Duration;

use super::{admit, place_of, recover_volume_aside};
use crate::daemon::Daemon;
use crate::journal::VolumeJournal;
use crate::problem::{self, of_journal};
use crate::volume::Volume;

/// How long to wait between two tries.
const REST: Duration = Duration::from_secs(2);

/// Reads the journal of the volume `name` again until that goes well, and brings the volume back then.
pub(super) fn read_journal_later(daemon: &Arc<Daemon>, name: &str) {
    let (daemon, name) = (Arc::clone(daemon), name.to_owned());
    let env = Arc::clone(&daemon.env);
    env.spawn(Box::pin(async move {
        let path = daemon.layout.journal(&name);
        let journal = loop {
            daemon.env.sleep(REST).await;
            match VolumeJournal::open(&path, &daemon.backends, &*daemon.env).await {
                Ok(journal) => break journal,
                Err(error) => {
                    daemon.admit_unreadable(&name, of_journal(&name, &path, &error));
                    if !problem::may_pass(error.kind()) {
                        return;
                    }
                }
            }
        };
        tracing::info!(volume = name, "the journal of a volume can be read now");
        let volume = admit(&daemon, &name, journal);
        let place = place_of(&daemon, &volume);
        recover_volume_aside(&daemon, &volume, place).await;
    }));
}

/// Brings `volumes` back, one after the other, once there are file descriptors for each.
pub(super) fn recover_later(daemon: &Arc<Daemon>, volumes: &[Arc<Volume>]) {
    let (daemon, volumes) = (Arc::clone(daemon), volumes.to_vec());
    let env = Arc::clone(&daemon.env);
    env.spawn(Box::pin(async move {
        for volume in volumes {
            while daemon.has(&volume) && daemon.require_descriptors().is_err() {
                daemon.env.sleep(REST).await;
            }
            if daemon.has(&volume) {
                let place = place_of(&daemon, &volume);
                // One that hangs keeps no other.
                let _ = env::timeout(&*daemon.env, REST, recover_volume_aside(&daemon, &volume, place)).await;
            }
        }
    }));
}
