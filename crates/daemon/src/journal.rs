//! A volume's journal, with the document that it holds at hand.

use std::path::Path;
use std::sync::Arc;

use api::v1::Error;
use block::IoFuture;
use env::Env;
use migrate::{JobJournal, Phase};
use parking_lot::Mutex;

use crate::document::{DOCUMENT_VERSION, DOCUMENT_VERSION_OPENED, JobDocument, VolumeDocument};
use crate::journal_file::JournalFile;
use crate::location::JobTarget;
use crate::platform::Backends;
use crate::problem::of_migration;

/// The journal and its document. What is at hand is always what was last stored with success.
pub(crate) struct VolumeJournal {
    file: JournalFile<VolumeDocument>,
    backends: Arc<dyn Backends>,
    current: Mutex<Arc<VolumeDocument>>,
    /// Why the job is being ended, if not because somebody wishes that: on record from when it is being undone.
    failure: Mutex<Option<Error>>,
    /// Held over a whole change, so that no change is built on a document that another is about to replace.
    turn: tokio::sync::Mutex<()>,
}

impl VolumeJournal {
    /// The journal at `path`, which holds nothing yet and begins with `document`.
    pub(crate) async fn create(
        path: &Path,
        document: VolumeDocument,
        backends: &Arc<dyn Backends>,
        env: &dyn Env,
    ) -> block::Result<Self> {
        let (file, _) = JournalFile::open(path, backends, env).await?;
        let document = document.with_version();
        file.store(&document).await?;
        Ok(Self::over(file, document, backends))
    }

    /// The journal at `path`.
    pub(crate) async fn open(path: &Path, backends: &Arc<dyn Backends>, env: &dyn Env) -> block::Result<Self> {
        let (file, document) = JournalFile::open(path, backends, env).await?;
        Ok(Self::over(file, check(path, document)?, backends))
    }

    fn over(file: JournalFile<VolumeDocument>, document: VolumeDocument, backends: &Arc<dyn Backends>) -> Self {
        let failure = Mutex::new(document.job.as_ref().and_then(|job| job.failure.clone()));
        let (current, turn) = (Mutex::new(Arc::new(document)), tokio::sync::Mutex::default());
        Self { file, backends: Arc::clone(backends), current, failure, turn }
    }

    /// A job begins: nothing has failed.
    pub(crate) fn begin_job(&self) {
        *self.failure.lock() = None;
    }

    /// The job ends because of `error`. The first one counts, and is on record before anything is undone.
    pub(crate) fn fail_job(&self, error: Error) {
        self.failure.lock().get_or_insert(error);
    }

    /// Why the job ends or has ended, if it was not cancelled by somebody.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.failure.lock().clone()
    }

    /// Records that the source holds the volume and its job is in `phase`, and whatever else `change` says.
    pub(crate) async fn note_phase(
        &self,
        phase: Phase,
        change: impl FnOnce(&mut JobDocument) + Send,
    ) -> block::Result<()> {
        let failure = self.failure().filter(|_| phase == Phase::Cancelling);
        self.update(|document| {
            document.take_back();
            let Some(job) = &mut document.job else { return };
            job.record.phase = phase;
            // Until then a daemon that comes after this one goes on with the job, and may see it end well.
            job.failure = failure;
            change(job);
        })
        .await
    }

    /// What was last stored.
    pub(crate) fn document(&self) -> Arc<VolumeDocument> {
        Arc::clone(&self.current.lock())
    }

    /// Stores what `change` makes of the document; it is at hand once it is durable.
    pub(crate) async fn update(&self, change: impl FnOnce(&mut VolumeDocument) + Send) -> block::Result<()> {
        let _turn = self.turn.lock().await;
        let mut document = VolumeDocument::clone(&self.document());
        change(&mut document);
        let document = document.with_version();
        self.file.store(&document).await?;
        *self.current.lock() = Arc::new(document);
        Ok(())
    }

    /// The same for a change after which a layer may hold bytes that what lies below lacks. Before it holds any, the image is marked,
    /// too: an older record is refused from then on. What fails here has changed nothing, unless even that cannot be stored.
    pub(crate) async fn begin_holding(&self, change: impl FnOnce(&mut VolumeDocument) + Send) -> block::Result<()> {
        let _turn = self.turn.lock().await;
        let before = self.document();
        let mut document = VolumeDocument::clone(&before);
        change(&mut document);
        document.layers_generation += 1;
        let document = document.with_version();
        self.file.store(&document).await?;
        if let Err(error) = self.mark_as(&document) {
            self.file.store(&before).await?;
            return Err(error);
        }
        *self.current.lock() = Arc::new(document);
        Ok(())
    }

    /// Marks the image with what is on record of the layers, unless it is: after a crash, or when it is in a new place.
    pub(crate) fn mark_image(&self) {
        let document = self.document();
        if document.layers_generation > 0
            && let Err(error) = self.mark_as(&document)
        {
            tracing::warn!(
                volume = document.name,
                error = error.chain(),
                "the image could not be marked with its layers"
            );
        }
    }

    fn mark_as(&self, document: &VolumeDocument) -> block::Result<()> {
        let Some(image) = document.backend.local_path() else { return Ok(()) };
        self.backends.mark_layers(image, document.image_of(&document.backend), document.layers_generation)
    }

    /// Stores what `change` makes of what is being done to the volume. Without a job there is nothing to change.
    pub(crate) async fn update_job(&self, change: impl FnOnce(&mut JobDocument) + Send) -> block::Result<()> {
        self.update(|document| _ = document.job.as_deref_mut().map(change)).await
    }
}

fn check(path: &Path, document: Option<VolumeDocument>) -> block::Result<VolumeDocument> {
    let document = document.ok_or_else(|| {
        let context = format!("the journal {} is empty", path.display());
        block::Error::new(block::ErrorKind::Corrupt, context)
    })?;
    if !(DOCUMENT_VERSION..=DOCUMENT_VERSION_OPENED).contains(&document.version) {
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
        Box::pin(self.note_phase(phase, |_| ()))
    }

    fn failed(&self, error: &block::Error, is_unequal: bool) {
        self.fail_job(of_migration(&self.document().name, error, is_unequal));
    }

    fn commit(&self) -> IoFuture<'_, ()> {
        Box::pin(self.update(VolumeDocument::commit))
    }

    fn may_commit(&self) -> IoFuture<'_, ()> {
        // The record names a path. If somebody has deleted or replaced the file there, the bytes are in a file without
        // a name. The next start of the daemon or of the VM would then find nothing, or something else.
        let document = self.document();
        let checked = match document.job.as_ref().map(|job| &job.target) {
            Some(JobTarget::Local(target)) => self.backends.check(target),
            Some(JobTarget::Remote(_) | JobTarget::Foreign(_)) | None => Ok(()),
        };
        block::ready(checked.map_err(|error| block::Error::new(block::ErrorKind::Invalid, error.to_string())))
    }
}
