//! The places of what this host makes, before they are on a record.
//!
//! ```text
//!   free ──looked at, one place after another──▶ taken ──its user is on record──▶ on record
//!     ▲                                            │                                  │
//!     └──────────────── undone ────────────────────┴──────── off the record ──────────┘
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

/// The places of what is being made, and on no record yet.
#[derive(Default)]
pub(crate) struct Places {
    /// Held from the look at what there is until a place is taken: of two that come at once the second sees the first.
    looking: tokio::sync::Mutex<()>,
    taken: Arc<Mutex<Vec<Arc<Place>>>>,
}

/// A place that somebody uses.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) path: PathBuf,
    pub(crate) user: User,
    /// Whether every other name of its file is told by a lock, or by the number of the file.
    pub(crate) is_locked: bool,
}

/// Whose place it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum User {
    /// A volume is in it, or moves to it.
    Volume(String),
    /// It is a store of a pool of this kind.
    Store(&'static str),
}

/// How a place is to be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// What it holds stays.
    Kept,
    /// What it holds is written over.
    Overwritten,
}

/// A place that is nobody else's for as long as a clone of this is kept.
#[derive(Clone)]
pub(crate) struct TakenPlace {
    _claim: Arc<Claim>,
}

struct Claim {
    place: Arc<Place>,
    taken: Arc<Mutex<Vec<Arc<Place>>>>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.taken.lock().retain(|taken| !Arc::ptr_eq(taken, &self.place));
    }
}

impl Places {
    /// Keeps everybody else from taking a place until what is given goes.
    pub(crate) async fn look(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.looking.lock().await
    }

    /// Those that are taken.
    pub(crate) fn taken(&self) -> Vec<Place> {
        self.taken.lock().iter().map(|taken| Place::clone(taken)).collect()
    }

    /// Takes `path` for `user`, who has looked whether it is free.
    pub(crate) fn take(&self, path: &Path, user: User) -> TakenPlace {
        let place = Arc::new(Place { path: path.to_owned(), user, is_locked: false });
        self.taken.lock().push(Arc::clone(&place));
        TakenPlace { _claim: Arc::new(Claim { place, taken: Arc::clone(&self.taken) }) }
    }
}

impl User {
    pub(crate) const fn is_store(&self) -> bool {
        matches!(self, Self::Store(_))
    }

    /// What it has to do with the place, and how it goes from there.
    pub(crate) fn words(&self) -> (String, String) {
        match self {
            Self::Volume(name) => {
                (format!("where the volume {name} is"), format!("`transhume volume detach {name}` first"))
            }
            Self::Store(kind) => (format!("a store of a {kind}"), format!("remove that {kind} first")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_taken_until_the_last_who_keeps_it_lets_go() {
        let places = Places::default();
        let one = places.take(Path::new("/images/a"), User::Volume("a".to_owned()));
        let again = places.take(Path::new("/images/a"), User::Volume("a".to_owned()));
        let kept = one.clone();
        drop(one);
        assert_eq!(places.taken.lock().len(), 2, "it is kept");
        drop(kept);
        assert_eq!(places.taken.lock().len(), 1, "another one's was let go");
        drop(again);
        assert!(places.taken.lock().is_empty());
    }
}
