//! Files that are made for volumes which come here, before the volumes are on record.
//!
//! ```text
//!  noted in STATE/arriving.json ──▶ the file is made ──▶ the volume is on record ──▶ noted no more
//!            │                            │                       │
//!            ╰──────────── a crash ───────┴───────────────────────╯
//!                             ▼
//!             the next start removes a file that no volume has
//! ```
//!
//! Only a place where there is nothing is noted, and then which file was made there, so what is removed was made here. What
//! somebody else has locked stays. A volume is not forgotten while there is a note of its file. Without this, a daemon that died in
//! between would leave a file that keeps the volume from ever coming under its name.

use std::path::PathBuf;
use std::sync::Arc;

use backends::{BackendSpec, PreparedTarget};
use block::ErrorKind;
use serde::{Deserialize, Serialize};

use crate::daemon::Daemon;
use crate::open_backend::BackendOpenOptions;
use crate::problem::Result;
use crate::volume::Volume;

/// A file in the making.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PendingFile {
    volume: String,
    path: PathBuf,
    /// Which file it is, from when it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    file: Option<PreparedTarget>,
}

impl PendingFile {
    fn is_of(&self, other: &Self) -> bool {
        self.volume == other.volume && self.path == other.path
    }
}

impl Daemon {
    /// Notes, durably, that a file is about to be made for a volume, if there is none. Nobody else does the same meanwhile.
    ///
    /// # Errors
    /// It could not be noted.
    pub(super) async fn note_pending_file(&self, volume: &str, spec: &BackendSpec) -> Result<Option<PendingFile>> {
        let note = PendingFile { volume: volume.to_owned(), path: spec.path().to_owned(), file: None };
        let before = self.pending_files().into_iter().find(|before| before.is_of(&note));
        if let Some(before) = before {
            // Whoever was at it was interrupted.
            self.remove_unless_used(&before).await;
        }
        if !self.backends.size(&note.path).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
            return Ok(None);
        }
        self.change_pending_files(|pending_files| {
            pending_files.retain(|other| !other.is_of(&note));
            pending_files.push(note.clone());
        })?;
        Ok(Some(note))
    }

    /// The file that was noted is there: another one under its name is none of ours.
    pub(super) fn note_made_file(&self, note: &PendingFile, file: &PreparedTarget) {
        let noted = self.change_pending_files(|pending_files| {
            let meant = pending_files.iter_mut().filter(|other| other.is_of(note));
            meant.for_each(|other| other.file = Some(file.clone()));
        });
        if let Err(error) = noted {
            tracing::warn!(%error, path = %note.path.display(), "which file was made for a volume could not be noted");
        }
    }

    /// The volume is on record, or its file is removed: the note is taken back.
    pub(super) fn made(&self, note: &PendingFile) {
        if let Err(error) = self.change_pending_files(|pending_files| pending_files.retain(|other| !other.is_of(note)))
        {
            // A volume that is on record keeps its file, and is not forgotten while the note is there.
            tracing::warn!(%error, path = %note.path.display(), "a note of a file in the making could not be taken back");
        }
    }

    /// A volume is about to be forgotten: nothing says any more that its file was only being made.
    ///
    /// # Errors
    /// The note cannot be taken back: the next start would remove the file.
    pub(crate) fn forget_pending_file(&self, volume: &str) -> Result<()> {
        if self.pending_files().iter().all(|note| note.volume != volume) {
            return Ok(());
        }
        self.change_pending_files(|pending_files| pending_files.retain(|note| note.volume != volume))
    }

    /// After a start: removes files that were made for volumes which never got on record.
    pub(crate) async fn remove_pending_files(&self) -> Result<()> {
        let pending_files = self.pending_files();
        if pending_files.is_empty() {
            return Ok(());
        }
        for note in &pending_files {
            self.remove_unless_used(note).await;
        }
        self.change_pending_files(Vec::clear)
    }

    async fn remove_unless_used(&self, PendingFile { volume, path, file }: &PendingFile) {
        let is_its = |volume: &Arc<Volume>| volume.document().backend.local_path() == Some(path);
        if self.is_unreadable(volume) || self.volumes().iter().any(is_its) {
            return;
        }
        let open_options = BackendOpenOptions::default();
        let spec = BackendSpec::file(path);
        let open_backend = self.backends.open_backend(&spec, &open_options, &*self.env).await;
        if open_backend.is_err_and(|error| error.kind() == ErrorKind::Busy) {
            tracing::warn!(path = %path.display(), "a file that was made for a volume is used by somebody else, and stays");
            return;
        }
        let removed = match file {
            // Another file that has its name by now is not touched.
            Some(file) => self.backends.discard(file, &*self.env).await,
            None => self.backends.remove_unless_used(path),
        };
        if let Err(error) = removed {
            tracing::warn!(%error, path = %path.display(), "what a volume that did not arrive left could not be removed");
        }
    }

    fn pending_files(&self) -> Vec<PendingFile> {
        let Ok(text) = self.layout.files().read(&self.layout.arriving()) else { return Vec::new() };
        serde_json::from_slice(&text).unwrap_or_else(|error| {
            tracing::warn!(%error, "which files were in the making cannot be read");
            Vec::new()
        })
    }

    fn change_pending_files(&self, change: impl FnOnce(&mut Vec<PendingFile>)) -> Result<()> {
        let mut pending_files = self.pending_files();
        change(&mut pending_files);
        let text = serde_json::to_string_pretty(&pending_files).expect("plain data serialises");
        self.layout.write_atomically(&self.layout.arriving(), &text)
    }
}
