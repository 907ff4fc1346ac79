//! Volumes that are ready to be taken and whose hosts are silent: the arbiter is asked whether they were given up.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::arbiter::{Arbiter, Ruling};
use crate::daemon::Daemon;
use crate::document::{IncomingDocument, IncomingStage};
use crate::volume::Volume;

/// How often it is asked. A switchover that nothing comes in between of is over sooner.
const INTERVAL: Duration = Duration::from_secs(3);

/// Asks the arbiter from now on, if there is one.
pub(super) fn begin(daemon: &Arc<Daemon>) {
    let Some(arbiter) = daemon.hosts.arbiter() else { return };
    let daemon = Arc::clone(daemon);
    let env = Arc::clone(&daemon.env);
    env.spawn(Box::pin(async move {
        let looking = Arc::<Mutex<BTreeSet<String>>>::default();
        loop {
            daemon.env.sleep(INTERVAL).await;
            for volume in daemon.volumes() {
                // Each by itself: a disk or an arbiter that hangs at one keeps nobody from the others.
                if let Some((incoming, _)) = prepared(&volume)
                    && looking.lock().insert(volume.name.clone())
                {
                    let (daemon, arbiter, looking) = (Arc::clone(&daemon), Arc::clone(&arbiter), Arc::clone(&looking));
                    let env = Arc::clone(&daemon.env);
                    env.spawn(Box::pin(async move {
                        look(&daemon, &*arbiter, &volume, &incoming).await;
                        looking.lock().remove(&volume.name);
                    }));
                }
            }
        }
    }));
}

/// What is on record of a volume that is ready to be taken, and under which epoch.
fn prepared(volume: &Volume) -> Option<(IncomingDocument, u64)> {
    let incoming = volume.document().incoming.clone().filter(|incoming| !incoming.undone)?;
    match incoming.stage {
        IncomingStage::Prepared { epoch } => Some((incoming, epoch)),
        IncomingStage::Filling | IncomingStage::Held { .. } => None,
    }
}

async fn look(daemon: &Arc<Daemon>, arbiter: &dyn Arbiter, volume: &Arc<Volume>, incoming: &IncomingDocument) {
    match arbiter.ruling(incoming.job).await {
        Ok(Ruling::Committed) => {}
        Ok(Ruling::Unknown | Ruling::Open | Ruling::Withdrawn(_) | Ruling::Abandoned) => return,
        Err(error) => {
            tracing::info!(volume = volume.name, %error, "nobody says whether a volume was given up");
            return;
        }
    }
    let _operation = volume.operation.lock().await;
    // Its host may have asked for it meanwhile. What was committed is what was prepared last.
    let Some((incoming, epoch)) = prepared(volume) else { return };
    match daemon.take_incoming(volume, &incoming, epoch).await {
        Ok(()) => tracing::info!(volume = volume.name, host = incoming.host, "taken, as the arbiter has it"),
        Err(error) => tracing::error!(volume = volume.name, %error, "a volume that was given up cannot be taken"),
    }
}
