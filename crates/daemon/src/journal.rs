//! A volume's journal, with the document that it holds at hand.

use std::path::Path;
use std::sync::Arc;

use backends::{BackendSpec, CacheMode, FileBackend, OpenOptions};
use block::{Device, IoFuture};
use env::Env;
use migrate::{JobJournal, Journal, Phase};
use parking_lot::Mutex;

use crate::document::{DOCUMENT_VERSION, VolumeDocument};

/// The journal and its document. What is at hand is always what was last stored with success.
pub(crate) struct VolumeJournal {
    journal: Journal<VolumeDocument>,
    backend: Arc<FileBackend>,
    current: Mutex<Arc<VolumeDocument>>,
    /// Held over a whole change, so that no change is built on a document that another is about to replace.
    turn: tokio::sync::Mutex<()>,
}

fn device_over(path: &Path, backend: &Arc<FileBackend>) -> Device {
    Device::from_arc(&path.display().to_string(), Arc::clone(backend) as _)
}

async fn open_backend(path: &Path, env: &dyn Env) -> block::Result<Arc<FileBackend>> {
    // Through the page cache: a forced write of a few KiB, on every file system.
    let spec = BackendSpec::file(path).with_cache(CacheMode::Page);
    Ok(Arc::new(FileBackend::open(&spec, &OpenOptions::default(), env).await?))
}

impl VolumeJournal {
    /// The journal at `path`, which holds nothing yet and begins with `document`.
    pub(crate) async fn create(path: &Path, document: VolumeDocument, env: &dyn Env) -> block::Result<Self> {
        let backend = open_backend(path, env).await?;
        let (journal, _) = Journal::open(device_over(path, &backend)).await?;
        journal.store(&document).await?;
        Ok(Self { journal, backend, current: Mutex::new(Arc::new(document)), turn: tokio::sync::Mutex::default() })
    }

    /// The journal at `path`.
    pub(crate) async fn open(path: &Path, env: &dyn Env) -> block::Result<Self> {
        let backend = open_backend(path, env).await?;
        let (journal, document) = Journal::<VolumeDocument>::open(device_over(path, &backend)).await?;
        let document = check(path, document)?;
        Ok(Self { journal, backend, current: Mutex::new(Arc::new(document)), turn: tokio::sync::Mutex::default() })
    }

    /// What was last stored.
    pub(crate) fn document(&self) -> Arc<VolumeDocument> {
        Arc::clone(&self.current.lock())
    }

    /// Stores what `change` makes of the document; it is at hand once it is durable.
    pub(crate) async fn update(
        &self,
        change: impl FnOnce(&VolumeDocument) -> VolumeDocument + Send,
    ) -> block::Result<()> {
        let _turn = self.turn.lock().await;
        let document = change(&self.document());
        if let Err(error) = self.journal.store(&document).await {
            // The next store goes elsewhere and relies on nothing that this one may have lost.
            self.backend.forget_failed_sync();
            return Err(error);
        }
        *self.current.lock() = Arc::new(document);
        Ok(())
    }
}

fn check(path: &Path, document: Option<VolumeDocument>) -> block::Result<VolumeDocument> {
    let document = document.ok_or_else(|| {
        let context = format!("the journal {} is empty", path.display());
        block::Error::new(block::ErrorKind::Corrupt, context)
    })?;
    if document.version != DOCUMENT_VERSION {
        let context = format!(
            "the journal {} was written by a newer version (document {}): start that one",
            path.display(),
            document.version
        );
        return Err(block::Error::new(block::ErrorKind::Unsupported, context));
    }
    Ok(document)
}

/// The durable memory of a volume's job, as its migration uses it.
impl JobJournal for VolumeJournal {
    fn record(&self, phase: Phase) -> IoFuture<'_, ()> {
        Box::pin(self.update(move |document| {
            let mut document = document.clone();
            if let Some(job) = &mut document.job {
                job.record.phase = phase;
            }
            document
        }))
    }

    fn commit(&self) -> IoFuture<'_, ()> {
        Box::pin(self.update(VolumeDocument::after_commit))
    }

    fn may_commit(&self) -> block::Result<()> {
        // The record names a path. If somebody has deleted or replaced the file there, the bytes are in one without a
        // name, and the next start of the daemon or of the VM would find nothing, or something else.
        let document = self.document();
        let Some(job) = &document.job else { return Ok(()) };
        job.target.check().map_err(|error| block::Error::new(block::ErrorKind::Invalid, error.to_string()))
    }
}
