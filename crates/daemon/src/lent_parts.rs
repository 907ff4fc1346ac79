//! Parts of caches that somebody works at although no volume uses them: they are being copied to another host, or opened.
//!
//! Nobody waits longer than [`OPENING_LIMIT`] for the opening of a cache that holds nothing: its volume comes up without it, as it
//! does if that fails. An opening cannot be called back. What it has asked the flash for may be done whenever that answers, and so
//! it goes on then, to its end. What it writes are the part's generation, its boot, and, where it begins anew, its header and maps.
//! Nobody believes that by mistake:
//!
//! | who opens the same place later | |
//! |---|---|
//! | the same layer, in this process | it is refused until the first opening has ended |
//! | another layer, in this process | the part is not given back before |
//! | the next process | nothing of this one is under way any more, since the store was locked; it is on record that nothing cached is believed, and the part is made anew |

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use block::{Error, ErrorKind, Result};
use env::EnvRef;
use parking_lot::{Mutex, MutexGuard};
use uuid::Uuid;

use crate::caches::Caches;
use crate::journal::VolumeJournal;
use crate::overlays::OverlayContext;

/// How long a volume waits for a cache that holds nothing.
const OPENING_LIMIT: Duration = Duration::from_secs(10);
/// How often it is looked whether a part that is due can be given back.
const LOOK: Duration = Duration::from_secs(1);

/// The parts, by their layers. Clones are the same.
#[derive(Clone, Default)]
pub(crate) struct LentParts {
    lent: Arc<Mutex<BTreeSet<Uuid>>>,
    /// Those of them that are being opened.
    opening: Arc<Mutex<BTreeSet<Uuid>>>,
}

/// A part is being opened until this is dropped.
struct Opening {
    parts: LentParts,
    layer: Uuid,
}

impl LentParts {
    /// All of them.
    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeSet<Uuid>> {
        self.lent.lock()
    }

    /// Gives back the part of `layer`, which no record names any more, once nobody works at it.
    pub(crate) fn give_back(&self, caches: &Arc<Caches>, env: &EnvRef, layer: Uuid) {
        if !self.lock().contains(&layer) {
            return caches.give_back(layer);
        }
        let (parts, caches, clock) = (self.clone(), Arc::clone(caches), Arc::clone(env));
        env.spawn(Box::pin(async move {
            while parts.lock().contains(&layer) {
                clock.sleep(LOOK).await;
            }
            caches.give_back(layer);
        }));
    }

    /// Begins an opening of the part of `layer`; none if an earlier one has not ended.
    fn begin_opening(&self, layer: Uuid) -> Option<Opening> {
        if !self.opening.lock().insert(layer) {
            return None;
        }
        self.lock().insert(layer);
        Some(Opening { parts: self.clone(), layer })
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.parts.lock().remove(&self.layer);
        self.parts.opening.lock().remove(&self.layer);
    }
}

/// What `opening` gives, which opens the cache of `layer`.
///
/// # Errors
/// Timed out if that takes too long: it goes on aside, and what it gives is dropped. Busy if an earlier one has not ended.
pub(super) async fn open_in_time<T: Send + 'static>(
    layer: Uuid,
    journal: &Arc<VolumeJournal>,
    context: &OverlayContext,
    opening: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let Some(turn) = context.lent_parts.begin_opening(layer) else {
        return Err(Error::new(ErrorKind::Busy, "its store has not answered an earlier opening yet"));
    };
    let (caches, journal) = (Arc::clone(&context.caches), Arc::clone(journal));
    let opened = env::spawn_with_result(&*context.env, async move {
        let opened = opening.await;
        drop(turn);
        if !journal.document().layers_named().any(|named| named.id == layer) {
            // The volume has moved away from it meanwhile.
            caches.give_back(layer);
        }
        opened
    });
    match env::timeout(&*context.env, OPENING_LIMIT, opened).await {
        Some(Ok(opened)) => opened,
        Some(Err(_)) => Err(Error::new(ErrorKind::Internal, "whoever was to open it is gone")),
        None => {
            let context = format!("its store has not answered within {OPENING_LIMIT:?}");
            Err(Error::new(ErrorKind::TimedOut, context))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_opened_by_one_at_a_time_and_lent_meanwhile() {
        let (parts, layer) = (LentParts::default(), Uuid::from_u128(7));
        let first = parts.begin_opening(layer).expect("nobody opens it");
        assert!(parts.begin_opening(layer).is_none() && parts.lock().contains(&layer));
        assert!(parts.begin_opening(Uuid::nil()).is_some(), "another part");
        drop(first);
        assert!(!parts.lock().contains(&layer) && parts.begin_opening(layer).is_some());
    }
}
