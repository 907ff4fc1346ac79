//! Layers that hold bytes are emptied into what lies below, while the guest works: the overlay of a snapshot that is removed, a cache
//! that is, and the part of a surrogate that is, or whose move is not to be.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{self, Error, ErrorCode};
use block::Bytes;

use super::files::remove_layer_files;
use super::snapshots::{check_changeable, find_snapshot, hold_clients};
use crate::daemon::Daemon;
use crate::document::{CacheTrust, LayerDocument, LayerState};
use crate::problem::{Result, of_backend};
use crate::volume::Volume;

/// So much is moved at a time.
const STEP: Bytes = Bytes::mib(1);
/// After an error, before the removal is tried again.
const RETRY_REST: Duration = Duration::from_secs(5);

impl Daemon {
    /// Removes a snapshot: what was written since goes into what lies below. It goes on after this has returned, and after a
    /// restart.
    pub(crate) async fn remove_snapshot(self: &Arc<Self>, name: &str, snapshot: &str) -> Result<v1::Volume> {
        let volume = self.volume(name)?;
        let _operation = volume.operation.lock().await;
        volume.require_up()?;
        let document = volume.document();
        check_changeable(&volume, &document)?;
        let (_, layer) = find_snapshot(&document, Some(snapshot))?;
        let id = layer.id;
        let stored = volume.journal.update(|document| {
            if let Some(layer) = document.layers.iter_mut().find(|layer| layer.id == id) {
                layer.state = LayerState::Draining;
            }
        });
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        self.drain_aside(&volume, id);
        Ok(volume.show())
    }

    pub(super) fn drain_aside(self: &Arc<Self>, volume: &Arc<Volume>, id: uuid::Uuid) {
        let (daemon, volume) = (Arc::clone(self), Arc::clone(volume));
        let env = Arc::clone(&self.env);
        env.spawn(Box::pin(async move {
            while let Err(error) = drain(&daemon, &volume, id).await {
                tracing::warn!(volume = volume.name, %error, "a layer is not emptied yet; it is tried again");
                daemon.env.sleep(RETRY_REST).await;
            }
        }));
    }
}

/// Goes on with what is on record as being emptied.
pub(crate) fn resume_drains(daemon: &Arc<Daemon>, volume: &Arc<Volume>) {
    let is_leaving = |layer: &&LayerDocument| {
        layer.state == LayerState::Draining || layer.cache().is_some_and(|cache| cache.trust == CacheTrust::Gone)
    };
    for layer in volume.document().layers.iter().filter(is_leaving) {
        daemon.drain_aside(volume, layer.id);
    }
}

/// Empties overlay `id` and takes it out. Every step can be done again.
async fn drain(daemon: &Arc<Daemon>, volume: &Arc<Volume>, id: uuid::Uuid) -> Result<()> {
    let document = volume.document();
    let Some(layer) = document.layers.iter().find(|layer| layer.id == id).cloned() else { return Ok(()) };
    if volume.slot().is_none() {
        // Nothing is known of what the layer holds: the next start goes on.
        return Ok(());
    }
    if layer.redirect().is_some() {
        return super::redirect_changes::drain(daemon, volume, id).await;
    }
    if layer.cache().is_some() {
        return super::cache_changes::drain(daemon, volume, id).await;
    }
    let found = volume.with_stack(|stack| stack.overlays().iter().find(|stacked| stacked.id == id).cloned()).flatten();
    if let Some(stacked) = found {
        let overlay = &stacked.overlay;
        overlay.begin_drain();
        let failed = |error: block::Error| of_backend(&error, "the removal of a snapshot");
        loop {
            let mut from = Bytes::ZERO;
            let began = daemon.env.now();
            while let Some(moved) = overlay.drain_next(from, STEP).await.map_err(failed)? {
                if volume.slot().is_none() {
                    // The volume was taken down: the next start goes on.
                    return Ok(());
                }
                from = moved.end();
                // Half of the time is the guest's.
                daemon.env.sleep(daemon.env.now().since(began).min(Duration::from_millis(5))).await;
            }
            // A write that began before the drain may fill what this pass has gone by. One that finds nothing from the
            // beginning on has waited for all of them.
            if from == Bytes::ZERO {
                break;
            }
        }
        // From here on no crash brings anything back into it.
        stacked.device.flush().await.map_err(failed)?;
        take_out(daemon, volume, id).await?;
    }
    strike(daemon, volume, &layer).await
}

/// Takes the overlay, which is empty, from under the guest.
async fn take_out(daemon: &Arc<Daemon>, volume: &Arc<Volume>, id: uuid::Uuid) -> Result<()> {
    let _operation = volume.operation.lock().await;
    let slot = volume.require_up()?;
    let quiesced = hold_clients(daemon, &slot).await?;
    let taken = volume.relayer(&quiesced, |stack| {
        let index = stack.overlays().iter().position(|stacked| stacked.id == id)?;
        assert!(stack.overlays()[index].overlay.is_empty(), "an overlay that holds something is not taken out");
        Some(stack.remove(index))
    });
    taken.flatten().transpose().map_err(|error| of_backend(&error, "the removal of a snapshot"))?;
    Ok(())
}

/// Takes the layer off the record, and removes its file.
async fn strike(daemon: &Arc<Daemon>, volume: &Arc<Volume>, layer: &LayerDocument) -> Result<()> {
    let document = volume.document();
    let stored = volume.journal.update(|document| document.layers.retain(|kept| kept.id != layer.id));
    stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
    let Some(image) = document.backend.local_path() else {
        return Err(Error::new(ErrorCode::Internal, "the layers of a volume that is elsewhere were changed"));
    };
    remove_layer_files(&*daemon.backends, std::slice::from_ref(layer), image);
    Ok(())
}
