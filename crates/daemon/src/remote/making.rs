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
//! Only a place where there is nothing is noted, so what is removed was made here. Without this, a daemon that died in
//! between would leave a file that keeps the volume from ever coming under its name.

use std::path::PathBuf;
use std::sync::Arc;

use backends::BackendSpec;
use serde::{Deserialize, Serialize};

use crate::daemon::Daemon;
use crate::problem::Result;
use crate::volume::Volume;

/// A file in the making.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct InTheMaking {
    volume: String,
    path: PathBuf,
}

impl Daemon {
    /// Notes, durably, that a file is about to be made for a volume, if there is none. Nobody else does the same meanwhile.
    ///
    /// # Errors
    /// It could not be noted.
    pub(super) fn note_making(&self, volume: &str, spec: &BackendSpec) -> Result<Option<InTheMaking>> {
        let note = InTheMaking { volume: volume.to_owned(), path: spec.path().to_owned() };
        if self.making().contains(&note) {
            // Whoever was at it was interrupted.
            self.remove_unless_used(&note);
        }
        if !self.backends.size(&note.path).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
            return Ok(None);
        }
        self.change_making(|making| {
            making.retain(|other| *other != note);
            making.push(note.clone());
        })?;
        Ok(Some(note))
    }

    /// The volume is on record, or its file is removed: the note is taken back.
    pub(super) fn made(&self, note: &InTheMaking) {
        if let Err(error) = self.change_making(|making| making.retain(|other| other != note)) {
            // A volume that is on record keeps its file.
            tracing::warn!(%error, path = %note.path.display(), "a note of a file in the making could not be taken back");
        }
    }

    /// After a start: removes files that were made for volumes which never got on record.
    pub(crate) fn sweep_making(&self) -> Result<()> {
        let making = self.making();
        if making.is_empty() {
            return Ok(());
        }
        making.iter().for_each(|note| self.remove_unless_used(note));
        self.change_making(Vec::clear)
    }

    fn remove_unless_used(&self, InTheMaking { volume, path }: &InTheMaking) {
        let is_its = |volume: &Arc<Volume>| volume.document().backend.local_path() == Some(path);
        let is_used = self.is_unreadable(volume) || self.volumes().iter().any(is_its);
        if !is_used && let Err(error) = self.backends.remove(path) {
            tracing::warn!(%error, path = %path.display(), "what a volume that did not arrive left could not be removed");
        }
    }

    fn making(&self) -> Vec<InTheMaking> {
        let Ok(text) = self.layout.files().read(&self.layout.arriving()) else { return Vec::new() };
        serde_json::from_slice(&text).unwrap_or_else(|error| {
            tracing::warn!(%error, "which files were in the making cannot be read");
            Vec::new()
        })
    }

    fn change_making(&self, change: impl FnOnce(&mut Vec<InTheMaking>)) -> Result<()> {
        let mut making = self.making();
        change(&mut making);
        let text = serde_json::to_string_pretty(&making).expect("plain data serialises");
        self.layout.write_atomically(&self.layout.arriving(), &text)
    }
}
