//! A journal in a file of the state directory.

use std::path::Path;
use std::sync::Arc;

use env::Env;
use migrate::Journal;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::platform::{Backends, StoreFile};

/// A journal of documents `T`, and what it takes to store again after a store that failed.
pub(crate) struct JournalFile<T> {
    journal: Journal<T>,
    /// See [`StoreFile::forget_failed_sync`].
    forget_failed_sync: Box<dyn Fn() + Send + Sync>,
}

impl<T: Serialize + DeserializeOwned> JournalFile<T> {
    /// The journal at `path`, and what it holds, if anything.
    ///
    /// # Errors
    /// What the store says.
    pub(crate) async fn open(
        path: &Path,
        backends: &Arc<dyn Backends>,
        env: &dyn Env,
    ) -> block::Result<(Self, Option<T>)> {
        let StoreFile { device, forget_failed_sync } = backends.open_store(path, env).await?;
        let (journal, found) = Journal::open(device).await?;
        Ok((Self { journal, forget_failed_sync }, found))
    }

    /// Stores `document`.
    ///
    /// # Errors
    /// Nobody knows which document counts, until a later store has ended well.
    pub(crate) async fn store(&self, document: &T) -> block::Result<()> {
        let stored = self.journal.store(document).await;
        if stored.is_err() {
            // The next store goes elsewhere and relies on nothing that this one may have lost.
            (self.forget_failed_sync)();
        }
        stored
    }
}
