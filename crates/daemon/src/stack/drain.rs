//! Layers that hold bytes are emptied into what lies below, while the guest works: the overlay of a snapshot that is removed, a cache
//! that is, and the part of a surrogate that is, or whose move is not to be.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{self, Error, ErrorCode};
use block::Bytes;

use super::Stack;
use super::files::remove_layer_files;
use super::snapshots::{check_changeable, find_snapshot, hold_clients};
use crate::daemon::Daemon;
use crate::document::{CacheTrust, LayerDocument, LayerState};
use crate::problem::{Result, of_backend};
use crate::volume::Volume;

/// So much is moved at a time.
const STEP: Bytes = Bytes::mib(1);
/// After an error, before the removal is tried again: twice as long after each one that follows.
const RETRY_REST: Duration = Duration::from_secs(1);
const RETRY_REST_MAX: Duration = Duration::from_secs(60);

impl Daemon {
    /// Removes a snapshot: what was written since goes into what lies below. It goes on after this has returned, and after a
    /// restart.
    pub(crate) async fn remove_snapshot(self: &Arc<Self>, name: &str, snapshot: &str) -> Result<v1::Volume> {
        let volume = self.volume(name)?;
        let _operation = volume.begin_operation(&*self.env).await?;
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
            let mut rest = RETRY_REST;
            while let Err(error) = drain(&daemon, &volume, id).await {
                tracing::warn!(volume = volume.name, %error, ?rest, "a layer is not emptied yet; it is tried again");
                daemon.env.sleep(rest).await;
                rest = (2 * rest).min(RETRY_REST_MAX);
            }
        }));
    }
}

/// Goes on with what is on record as being emptied.
pub(crate) fn resume_drains(daemon: &Arc<Daemon>, volume: &Arc<Volume>) {
    for layer in volume.document().layers.iter().filter(|layer| is_leaving(layer)) {
        daemon.drain_aside(volume, layer.id);
    }
}

/// Whether a layer is on record as being taken out.
pub(super) fn is_leaving(layer: &LayerDocument) -> bool {
    layer.state == LayerState::Draining || layer.cache().is_some_and(|cache| cache.trust == CacheTrust::Gone)
}

/// Empties overlay `id` and takes it out. Every step can be done again.
async fn drain(daemon: &Arc<Daemon>, volume: &Arc<Volume>, id: uuid::Uuid) -> Result<()> {
    let document = volume.document();
    let Some(layer) = document.layers.iter().find(|layer| layer.id == id && is_leaving(layer)).cloned() else {
        // It is gone, or stays.
        return Ok(());
    };
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
        let failed =
            |error: block::Error| of_backend(&error, "the removal of a snapshot").with_hint(way_out(&volume.name));
        // What lies below must take it: what that has lost of an earlier attempt is held again.
        overlay.settle().await.map_err(failed)?;
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
            // beginning on has waited for all of them. From the settling on no crash brings anything back into it.
            if from == Bytes::ZERO && overlay.settle().await.map_err(failed)? {
                break;
            }
        }
        take_out(daemon, volume, &layer).await?;
    }
    strike(daemon, volume, &layer).await
}

/// What to do if a layer of `volume` cannot be emptied into what lies below.
pub(super) fn way_out(volume: &str) -> String {
    format!(
        "it is tried again by itself, and nothing of it is lost meanwhile; if the backend does not get well, what {volume} holds \
         can be read at its export: copy it from there, for instance with nbdcopy"
    )
}

/// Takes the overlay, which is empty, from under the guest.
async fn take_out(daemon: &Arc<Daemon>, volume: &Arc<Volume>, layer: &LayerDocument) -> Result<()> {
    let _operation = volume.operation.lock().await;
    let slot = volume.require_up()?;
    let quiesced = hold_clients(daemon, &slot).await?;
    let find = |stack: &mut Stack| stack.overlays().iter().position(|stacked| stacked.id == layer.id);
    let found = volume.with_stack(|stack| find(stack).map(|index| Arc::clone(&stack.overlays()[index].overlay)));
    let Some(overlay) = found.flatten() else { return Ok(()) };
    if !overlay.is_empty() {
        // A flush that failed meanwhile has brought something back.
        return Err(Error::new(ErrorCode::Busy, format!("a snapshot of {} is not empty any more", volume.name))
            .with_hint(way_out(&volume.name)));
    }
    if overlay.has_failed_record() {
        // Its record cannot say that it is empty: from here on nobody asks it.
        strike_record(volume, layer).await?;
    }
    let taken = volume.relayer(&quiesced, |stack| find(stack).map(|index| stack.remove(index)));
    taken.flatten().transpose().map_err(|error| of_backend(&error, "the removal of a snapshot"))?;
    Ok(())
}

async fn strike_record(volume: &Volume, layer: &LayerDocument) -> Result<()> {
    let stored = volume.journal.update(|document| document.layers.retain(|kept| kept.id != layer.id));
    stored.await.map_err(|error| of_backend(&error, "the volume's journal"))
}

/// Takes the layer off the record, and removes its file.
async fn strike(daemon: &Arc<Daemon>, volume: &Arc<Volume>, layer: &LayerDocument) -> Result<()> {
    let document = volume.document();
    strike_record(volume, layer).await?;
    let Some(image) = document.backend.local_path() else {
        return Err(Error::new(ErrorCode::Internal, "the layers of a volume that is elsewhere were changed"));
    };
    remove_layer_files(&*daemon.backends, std::slice::from_ref(layer), image);
    Ok(())
}
