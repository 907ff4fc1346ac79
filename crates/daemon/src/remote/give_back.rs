//! A volume that this host has given up is used here again: its old image, with the layers that it had.

use std::sync::Arc;

use api::v1::{Error, ErrorCode, JobState};
use block::Device;

use crate::daemon::Daemon;
use crate::document::Committed;
use crate::jobs::record_of;
use crate::open_backend::{BackendOpenOptions, OpenBackend};
use crate::problem::{Result, of_backend};
use crate::stack::{FoundCache, StackedRedirect, open_cache, open_layer_files, reopen_redirect, resume_drains};
use crate::volume::Volume;

/// What a volume that was given up was here, opened again.
pub(super) struct GivenUp {
    source: OpenBackend,
    redirect: Option<StackedRedirect>,
    cache: FoundCache,
    ground: Device,
}

impl Daemon {
    /// This host holds the volume again, which it had given up. The other one is told so by `telling`, which cannot be taken back: not
    /// before all that may fail here is done.
    pub(super) async fn give_back(
        self: &Arc<Self>,
        volume: &Arc<Volume>,
        committed: &Committed,
        telling: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        let opening = async {
            let opened = self.open_given_up(volume, committed).await?;
            telling.await?;
            Ok(opened)
        };
        // The old image gets out of the way again if it is not the volume.
        let opened = opening.await.inspect_err(|_: &Error| self.put_away_again(volume));
        let GivenUp { source, redirect, cache, ground } = opened?;
        let trust = cache.trust;
        let remote_device = volume.remote_device();
        let group = record_of(&volume.document());
        let stored = volume.journal.update(|document| {
            document.epoch += 1;
            document.backend = committed.source.clone();
            document.size_limit = committed.size_limit;
            document.image.clone_from(&committed.image);
            document.restore_layers(&committed.layers);
            if let Some((id, trust)) = trust {
                document.change_cache(id, |cache, _| cache.trust = trust);
            }
            document.job = None;
            document.drain_redirect();
        });
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        group.into_iter().for_each(|group| self.leave_group(group, volume));
        if let Some(remote_device) = remote_device {
            remote_device.give_back(ground);
        }
        drop(volume.replace_backend(source));
        cache.stacked.iter().for_each(|stacked| stacked.begin(&self.env));
        volume.with_stack(|stack| {
            stack.restore_redirect(redirect);
            stack.put_cache(cache);
        });
        if let Some(job) = volume.job() {
            let message = format!("the move of {} was taken back by hand: this host holds it", volume.name);
            let error = Error::new(ErrorCode::MoveFailed, message);
            crate::jobs::end(self, volume, &job, JobState::Failed, None, Some(error)).await;
        }
        resume_drains(self, volume);
        Ok(())
    }

    /// Opens all that the volume was here before it was given up.
    ///
    /// # Errors
    /// What is in the way; the old image may have its name again then.
    pub(super) async fn open_given_up(
        self: &Arc<Self>,
        volume: &Arc<Volume>,
        committed: &Committed,
    ) -> Result<GivenUp> {
        let open_options = volume.open_options(self.config.lock_wait());
        self.bring_old_image_back(volume, committed)?;
        let source = self.open_source(volume, committed, &open_options).await;
        let source = source.map_err(|error| of_backend(&error, "the old source"))?;
        let (layers, context) = (&committed.layers, self.overlay_context());
        let redirect = Box::pin(reopen_redirect(&source.device, layers, &context)).await?;
        let cache = Box::pin(open_cache(&source.device, layers, &volume.journal, &context)).await?;
        let redirected = redirect.as_ref().map(|stacked| stacked.device.clone());
        let cached = cache.stacked.as_ref().map(|stacked| stacked.device.clone());
        let ground = match redirected.or(cached) {
            // The source alone lacks what its surrogate or its cache holds.
            Some(device) => device,
            None => source.ground().map_err(|error| of_backend(&error, "the old source"))?,
        };
        Ok(GivenUp { source, redirect, cache, ground })
    }

    /// What held the volume before it was given up, with the files of its layers.
    async fn open_source(
        self: &Arc<Self>,
        volume: &Volume,
        committed: &Committed,
        open_options: &BackendOpenOptions,
    ) -> block::Result<OpenBackend> {
        let mut source = self.open_backend(volume, &committed.source, open_options).await?;
        if let Some(image) = committed.source.local_path() {
            let context = self.overlay_context();
            let files = open_layer_files(&committed.layers, image, &context, open_options.lock_wait).await?;
            files.into_iter().for_each(|file| source.add_file(file));
        }
        Ok(source)
    }
}
