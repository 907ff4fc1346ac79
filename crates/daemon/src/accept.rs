//! A person's word that what has the name of a volume's image now is the volume's own, where nothing else can tell.
//!
//! A file system that says of no file when it was made may come back under another number: its files are taken for copies then. And a
//! tombstone that does not say to which device it was written may be the guest's own. The word is on record only if the volume comes up with
//! it. What an image says of itself is stronger: a newer epoch, a layer that the record does not know, a tombstone of this very device.

use std::sync::Arc;

use api::v1::{self, Error, ErrorCode};

use crate::daemon::Daemon;
use crate::document::{IncomingStage, LayerDocument, VolumeDocument};
use crate::location::{Location, require_local};
use crate::open_backend::{BackendOpenOptions, OpenBackend};
use crate::problem::{Result, of_backend};
use crate::recover::bring_back_now;
use crate::stack::note_layer_files;
use crate::volume::Volume;

impl Daemon {
    /// Takes what has the name of a volume's image, and the files of its layers, for the volume's own, and brings the volume up.
    pub(crate) async fn accept(self: &Arc<Self>, name: &str) -> Result<v1::Volume> {
        let volume = self.volume(name)?;
        let _operation = volume.begin_operation(&*self.env).await?;
        let before = volume.document();
        refuse_accepting(&volume, &before)?;
        let accepted = self.accepted(&before).await?;
        self.note_accepted(&volume, accepted).await?;
        if let Err(error) = bring_back_now(self, &volume).await {
            if volume.slot().is_none() {
                self.note_accepted(&volume, before.as_ref().clone()).await?;
            }
            return Err(error);
        }
        Ok(volume.show())
    }

    /// The document once what is there is taken for the volume's own.
    async fn accepted(&self, document: &VolumeDocument) -> Result<VolumeDocument> {
        let Location::Local(spec) = &document.backend else { return Ok(document.clone()) };
        let options = BackendOpenOptions { read_only: true, unlocked: true, ..BackendOpenOptions::default() };
        let failed = |error: block::Error| of_backend(&error, "the backend");
        let found = self.backends.open_backend(spec, &options, &*self.env).await.map_err(failed)?;
        let image = found.image();
        if let (Some(known), Some(image)) = (&document.image, &image) {
            known.check_length(image).map_err(|error| failed(error.about(spec.path())))?;
        }
        let mut accepted = VolumeDocument { image: image.map(Box::new), ..document.clone() };
        accepted.accepted_tombstone = found.tombstone_epoch().await.map_err(failed)?.or(document.accepted_tombstone);
        for overlay in accepted.layers.iter_mut().filter_map(LayerDocument::overlay_mut) {
            overlay.file = None;
        }
        note_layer_files(&*self.backends, &mut accepted.layers, spec.path());
        if let Some(job) = accepted.job.as_mut().filter(|job| job.committed.is_none()) {
            job.source_identity = OpenBackend::identity(&found).map(Box::new);
            // The overlays of a snapshot move lie beside the image, too.
            for (number, known) in &mut job.overlay_files {
                *known = self.backends.overlay_identity(spec.path(), *number).unwrap_or_else(|| known.clone());
            }
        }
        Ok(accepted)
    }

    /// Has on record what `accepted` says of the image and the files of the layers.
    async fn note_accepted(&self, volume: &Volume, accepted: VolumeDocument) -> Result<()> {
        let stored = volume.journal.update(|document| {
            document.image = accepted.image;
            document.accepted_tombstone = accepted.accepted_tombstone;
            document.layers = accepted.layers;
            if let (Some(job), Some(accepted)) = (&mut document.job, accepted.job) {
                (job.source_identity, job.overlay_files) = (accepted.source_identity, accepted.overlay_files);
            }
        });
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))
    }
}

fn refuse_accepting(volume: &Volume, document: &VolumeDocument) -> Result<()> {
    let name = &volume.name;
    if volume.slot().is_some() {
        let message = format!("{name} is served: there is nothing to accept");
        return Err(Error::new(ErrorCode::WrongState, message).with_hint(format!("see `transhume volume show {name}`")));
    }
    let is_held = |stage: IncomingStage| matches!(stage, IncomingStage::Held { .. });
    if let Some(incoming) = document.incoming.as_ref().filter(|incoming| !is_held(incoming.stage)) {
        let message = format!("{name} comes from {}, which may have given it up already", incoming.host);
        return Err(Error::new(ErrorCode::WrongState, message)
            .with_hint(format!("`transhume resolve {name}` says what both hosts have on record")));
    }
    require_local(&document.backend, "no file of this host is its image").map(drop)
}
