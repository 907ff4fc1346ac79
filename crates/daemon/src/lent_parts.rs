//! Parts of caches that somebody works at although no volume uses them: they are being copied to another host, or opened.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use env::EnvRef;
use parking_lot::{Mutex, MutexGuard};
use uuid::Uuid;

use crate::caches::Caches;

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
pub(crate) struct Opening {
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
    pub(crate) fn begin_opening(&self, layer: Uuid) -> Option<Opening> {
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
