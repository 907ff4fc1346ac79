//! Volumes that a start could not bring back for a reason that passes by itself: a dead process's requests hang, or file
//! descriptors are short. They are tried again.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode};

use super::{admit, bring_back, place_of, recover_volume_aside};
use crate::daemon::Daemon;
use crate::journal::VolumeJournal;
use crate::problem::{self, of_journal};
use crate::volume::Volume;

/// How long to wait between two tries.
const REST: Duration = Duration::from_secs(2);

/// Whether `volume`, which is down because of `error`, may come up without anybody's doing.
pub(super) fn may_pass(volume: &Volume, error: &Error) -> bool {
    matches!(error.code, ErrorCode::DescriptorsShort | ErrorCode::Io) && volume.slot().is_none()
}

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

/// Brings `volume` back once what is in its way has passed.
pub(super) fn bring_back_later(daemon: &Arc<Daemon>, volume: &Arc<Volume>) {
    let (daemon, volume) = (Arc::clone(daemon), Arc::clone(volume));
    let env = Arc::clone(&daemon.env);
    env.spawn(Box::pin(async move {
        loop {
            daemon.env.sleep(REST).await;
            let _operation = volume.operation.lock().await;
            if !daemon.has(&volume) || volume.slot().is_some() {
                return;
            }
            let place = place_of(&daemon, &volume);
            let Err(error) = bring_back(&daemon, &volume, place).await else { return };
            let passes = may_pass(&volume, &error);
            volume.set_problem(error);
            if !passes {
                return;
            }
        }
    }));
}
