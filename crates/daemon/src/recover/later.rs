//! Journals that a start could not read for a reason that passes by itself: a dead process's requests hang, or file descriptors are
//! short. They are tried again.

use std::sync::Arc;
use std::time::Duration;

use super::{admit, place_of, recover_volume_aside};
use crate::daemon::Daemon;
use crate::journal::VolumeJournal;
use crate::problem::{self, of_journal};

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
