//! A loss at an NBD server that is on a volume's record: it is told to one guest, and once.
//!
//! ```text
//!   an ended daemon left answered writes unflushed ──▶ on record ──▶ the next flush is to fail
//!   the guest was sent that failure                ──▶ off the record
//! ```
//!
//! Until the failure has left this process nobody was told, and a daemon that comes after a crash tells it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use env::EnvRef;
use nbd::NbdBackend;
use parking_lot::Mutex;

use crate::journal::VolumeJournal;
use crate::location::Location;

/// What could not be taken off the record is tried again after this.
const STRIKE_REST: Duration = Duration::from_secs(1);

/// The loss of a volume that this process has found on record.
pub(crate) struct LossRecord {
    journal: Arc<VolumeJournal>,
    env: EnvRef,
    /// Where it is, while it is on record.
    untold: Mutex<Option<(Location, Weak<NbdBackend>)>>,
}

impl LossRecord {
    pub(crate) fn new(journal: &Arc<VolumeJournal>, env: EnvRef) -> Arc<Self> {
        Arc::new(Self { journal: Arc::clone(journal), env, untold: Mutex::default() })
    }

    /// The next flush of `export`, which is `place`, is to fail.
    pub(crate) fn recall(&self, place: &Location, export: &Arc<NbdBackend>) {
        export.recall_loss();
        *self.untold.lock() = Some((place.clone(), Arc::downgrade(export)));
    }

    /// A guest was sent that its flush failed.
    pub(crate) fn failure_sent(self: &Arc<Self>) {
        let Some((place, export)) = self.untold.lock().clone() else { return };
        let this = Arc::clone(self);
        self.env.spawn(Box::pin(async move { this.strike(&place, &export).await }));
    }

    /// Takes the loss at `place` off the record, unless the flush that failed has told of something else.
    async fn strike(&self, place: &Location, export: &Weak<NbdBackend>) {
        while let Some(export) = export.upgrade().filter(|export| !export.has_loss_to_tell()) {
            // A process that ends meanwhile finds another one, and puts that on record.
            let stored = self.journal.update(|document| {
                if !export.has_loss_to_tell() {
                    document.note_loss_at(place, false);
                }
            });
            match stored.await {
                Ok(()) if self.journal.document().has_lost_at(place) => return,
                Ok(()) => {
                    *self.untold.lock() = None;
                    return tracing::info!(%place, "the guest was told of a loss, which is off the record");
                }
                Err(error) => {
                    tracing::warn!(%place, error = error.chain(), "that the guest was told of a loss could not be noted");
                }
            }
            drop(export);
            self.env.sleep(STRIKE_REST).await;
        }
    }
}
