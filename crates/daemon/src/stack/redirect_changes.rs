//! A surrogate comes into the path of a volume's guest, and goes, while the guest works.
//!
//! ```text
//!   add, or a move with a surrogate begins:  part taken ──▶ layer on record ──▶ clients held, redirection in, clients go on
//!   the commit of a move:   the layer is off the volume's record with it ──▶ the move is over ──▶ part given back
//!   any other end of one:   the job is off the record ──▶ a layer that the move has brought drains; one that was added stays
//!   rm:       on record: draining
//!   draining: emptied ──▶ flushed ──▶ clients held, redirection out ──▶ layer off the record ──▶ part given back
//!   discard:  no client is connected ──▶ layer off the record ──▶ redirection out ──▶ part given back
//! ```

use std::sync::Arc;
use std::time::Duration;

use api::v1::{self, Error, ErrorCode};
use block::{Device, Slot};
use uuid::Uuid;

use super::redirect::{StackedRedirect, make_header, spares_head};
use super::snapshots::hold_clients;
use crate::daemon::Daemon;
use crate::document::{
    AdoptionDirection, AdoptionDocument, JobDocument, LayerDocument, LayerKind, LayerState, RedirectLayer,
    VolumeDocument, random_uuid,
};
use crate::problem::{Result, invalid, of_backend};
use crate::surrogates::Surrogate;
use crate::volume::Volume;

/// A chunk is popular from this request on if nothing is said.
const THRESHOLD_DEFAULT: u16 = 1;
/// A guest of a volume that is drained gets half of the time, but waits no longer than this for its turn.
const YIELD_MAX: Duration = Duration::from_millis(5);
/// Said to who would take from a guest what it has written.
const CONNECTED_HINT: &str = "stop the guest first: it would find older bytes than it has written";

/// A surrogate that is asked for.
pub(super) struct AskedRedirect {
    pub(super) surrogate: String,
    pub(super) threshold: Option<u16>,
    pub(super) on_flash: bool,
    pub(super) sole_copy: bool,
}

/// That `surrogate` cannot serve the guest of `volume`.
pub(crate) fn cannot_serve(surrogate: &Surrogate, volume: &str, why: &str, hint: &str) -> Error {
    invalid(format!("{} cannot serve {volume}: {why}", surrogate.name()), hint)
}

/// Refuses what cannot be done while a surrogate serves the guest.
pub(super) fn refuse_redirected(document: &VolumeDocument) -> Result<()> {
    super::refuse_draining(document)?;
    let Some((_, redirect)) = document.redirect_layer() else { return Ok(()) };
    let name = &document.name;
    Err(Error::new(ErrorCode::InUse, format!("the surrogate {} serves {name}", redirect.surrogate)).with_hint(format!(
        "`transhume volume layer rm {name} surrogate` brings what it holds to {}",
        document.backend
    )))
}

impl Volume {
    /// Redirection `id`, if it is in the guest's path.
    fn stacked_redirect(&self, id: Uuid) -> Option<StackedRedirect> {
        self.with_stack(|stack| stack.redirect().filter(|stacked| stacked.id == id).cloned()).flatten()
    }

    /// Takes redirection `id` out of the path of a guest that is held.
    fn take_redirect_out(&self, quiesced: &block::Quiesced, id: Uuid) {
        self.relayer(quiesced, |stack| {
            if stack.redirect.as_ref().is_some_and(|stacked| stacked.id == id) {
                stack.redirect = None;
            }
        });
    }
}

impl Daemon {
    /// Has the surrogate that was asked for serve the guest of a volume whose move begins, unless it does.
    ///
    /// # Errors
    /// It has no room, or its stores cannot be used. The guest goes on as before.
    pub(crate) async fn begin_redirect(&self, volume: &Volume, job: &JobDocument) -> Result<()> {
        let Some(surrogate) = job.request.surrogate.clone() else { return Ok(()) };
        let is_redirected = volume.document().redirect_layer().is_some();
        if is_redirected || !spares_head(job.request.surrogate_on_flash, self.is_rotational(volume)) {
            return Ok(());
        }
        let threshold = job.request.popular_threshold.unwrap_or(THRESHOLD_DEFAULT);
        self.put_redirect(volume, RedirectLayer { surrogate, threshold, stays: false }).await
    }

    /// Has a surrogate serve the guest of a volume from now on.
    pub(super) async fn add_redirect(self: &Arc<Self>, name: &str, asked: AskedRedirect) -> Result<v1::Volume> {
        let volume = self.volume(name)?;
        let _operation = volume.begin_operation(&*self.env).await?;
        volume.require_up()?;
        volume.refuse_moving()?;
        let document = volume.document();
        super::refuse_draining(&document)?;
        if let Some((_, redirect)) = document.redirect_layer() {
            let message = format!("{name} has the surrogate {} already", redirect.surrogate);
            return Err(Error::new(ErrorCode::AlreadyExists, message)
                .with_hint(format!("`transhume volume layer rm {name} surrogate` takes it out first")));
        }
        let surrogate = self.surrogates.get(&asked.surrogate)?;
        let refuse = |why: &str, hint: &str| Err(cannot_serve(&surrogate, name, why, hint));
        self.check_redirectable(&surrogate, &document)?;
        if document.incoming.is_some() {
            return refuse("the host that it came from has not let go of it", "wait until that host lets it go");
        }
        let is_ours = |adoption: &AdoptionDocument| adoption.direction == AdoptionDirection::Adopted;
        if !document.adoption.as_ref().is_none_or(is_ours) {
            return refuse("it is on its way from or to its VM", "wait until its adoption or release is over");
        }
        self.check_surrogate_stores(&surrogate, (name, document.backend.local_path()), asked.sole_copy)?;
        if !spares_head(asked.on_flash, self.is_rotational(&volume)) {
            return refuse("its disk has no head that could be spared", "leave it out, or say --surrogate-on-flash");
        }
        let threshold = asked.threshold.unwrap_or(THRESHOLD_DEFAULT);
        Box::pin(self.put_redirect(&volume, RedirectLayer { surrogate: asked.surrogate, threshold, stays: true }))
            .await?;
        Ok(volume.show())
    }

    /// Refuses a surrogate for a volume that cannot have one, whichever it is.
    pub(crate) fn check_redirectable(&self, surrogate: &Surrogate, document: &VolumeDocument) -> Result<()> {
        let refuse = |why: &str, hint: &str| Err(cannot_serve(surrogate, &document.name, why, hint));
        if document.cache_layer().is_some() {
            return refuse("it has a cache, which is in the same place", "remove the cache, or do without a surrogate");
        }
        if document.has_overlays() {
            return refuse("it has snapshots", "remove them first, or do without a surrogate");
        }
        if document.room_to_grow().is_some() {
            return refuse("it is a container that grows", "a surrogate needs an image in the format raw");
        }
        if document.read_only {
            return refuse("it is read-only, so nobody is in the way of a copy", "do without a surrogate");
        }
        if document.backend.local_path().is_none() {
            return refuse("it is no file or block device of this host", "surrogates are beside the source");
        }
        Ok(())
    }

    /// Refuses a surrogate with one store without `sole_copy`, and one on the head that reads `image`.
    pub(crate) fn check_surrogate_stores(
        &self,
        surrogate: &Surrogate,
        (name, image): (&str, Option<&std::path::Path>),
        sole_copy: bool,
    ) -> Result<()> {
        if surrogate.is_sole() && !sole_copy {
            let hint = "make the surrogate with two stores on different devices, or say --sole-copy: a store that fails takes \
                        with it what the guest has written since";
            let why = "it has one store, which would hold the only copy of what the guest writes";
            return Err(cannot_serve(surrogate, name, why, hint));
        }
        let disk = image.and_then(|image| self.backends.disk_of(image)).filter(|disk| disk.is_rotational == Some(true));
        let Some(disk) = disk else { return Ok(()) };
        let is_there = |spec: &backends::BackendSpec| {
            self.backends.disk_of(spec.path()).is_some_and(|other| other.name == disk.name)
        };
        match surrogate.specs().into_iter().find(is_there) {
            Some(spec) => Err(invalid(
                format!("{spec} is on {}, the disk that holds the volume", disk.name),
                "a surrogate is to spare that disk's head: put its stores on another device",
            )),
            None => Ok(()),
        }
    }

    /// Makes an empty redirection, and puts it on record and into the guest's path.
    async fn put_redirect(&self, volume: &Volume, redirect: RedirectLayer) -> Result<()> {
        let surrogate = self.surrogates.get(&redirect.surrogate)?;
        let id = random_uuid(&*self.env);
        let layer = LayerDocument { id, kind: LayerKind::Redirect(redirect.clone()), state: LayerState::MayHold };
        surrogate.take(id, &volume.name)?;
        let made = async {
            let part = surrogate.new_partition(id).await.map_err(|error| of_backend(&error, "the surrogate"))?;
            let base = volume.with_backend(|open_backend| open_backend.device.clone());
            let base = base.ok_or_else(|| Error::new(ErrorCode::WrongState, format!("{} is down", volume.name)))?;
            make_header(&base, &part, (id, surrogate.chunk_bytes())).await?;
            let stacked = StackedRedirect::open(base.clone(), &layer, &redirect, &self.overlay_context()).await?;
            check_geometry(&stacked, &base)?;
            Ok((stacked, volume.require_up()?))
        };
        match made.await {
            Ok((stacked, slot)) => self.insert_redirect(volume, &slot, layer, stacked).await,
            Err(error) => {
                self.surrogates.give_back(id);
                Err(error)
            }
        }
    }

    /// Puts an empty redirection on record and into the guest's path.
    async fn insert_redirect(
        &self,
        volume: &Volume,
        slot: &Slot,
        layer: LayerDocument,
        stacked: StackedRedirect,
    ) -> Result<()> {
        let (id, new_volume_id) = (layer.id, random_uuid(&*self.env));
        let stored = volume.journal.begin_holding(|document| {
            document.id.get_or_insert(new_volume_id);
            document.layers.insert(0, layer);
        });
        // Whether it is on record then the next start finds out; nothing is in it.
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        match hold_clients(self, slot).await {
            Ok(quiesced) => {
                // The guest has written past it since it was opened.
                stacked.redirect.note_source_written();
                volume.relayer(&quiesced, |stack| {
                    assert!(
                        stack.overlays.is_empty() && stack.copy.is_none(),
                        "a surrogate is directly over the backend"
                    );
                    stack.redirect = Some(stacked);
                });
                Ok(())
            }
            Err(error) => {
                strike(self, volume, id).await?;
                Err(error)
            }
        }
    }

    /// Begins to take a surrogate out that somebody has added. What it holds goes to the backend first: that goes on after this has
    /// returned, and after a restart.
    pub(super) async fn remove_redirect(
        self: &Arc<Self>,
        volume: &Arc<Volume>,
        (layer, redirect): (&LayerDocument, &RedirectLayer),
    ) -> Result<()> {
        let name = &volume.name;
        if !redirect.stays {
            return Err(invalid(
                format!("layer {} is the surrogate {} of a move", layer.id, redirect.surrogate),
                format!("it goes when the move ends: `transhume cancel {name}`"),
            ));
        }
        volume.refuse_moving()?;
        if layer.state == LayerState::Draining {
            return Ok(());
        }
        if volume.require_up().is_err() {
            let message = format!("{name} is down, and its surrogate holds what its backend lacks");
            return Err(Error::new(ErrorCode::WrongState, message)
                .with_hint(format!("`transhume volume show {name}` says why, and what to do")));
        }
        let id = layer.id;
        let stored = volume.journal.update(|document| {
            if let Some(layer) = document.layers.iter_mut().find(|layer| layer.id == id) {
                layer.state = LayerState::Draining;
            }
        });
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        self.drain_aside(volume, id);
        Ok(())
    }

    /// Takes a surrogate out with all that only it has, which is lost. No client is connected: it would find older bytes than it has
    /// written.
    pub(super) async fn discard_redirect(&self, volume: &Volume, id: Uuid) -> Result<()> {
        volume.refuse_moving()?;
        volume.refuse_connected(CONNECTED_HINT)?;
        let stacked = volume.stacked_redirect(id);
        let held: Option<(block::Quiesced, Slot)> = match &stacked {
            Some(_) => {
                let slot = volume.require_up()?;
                Some((hold_clients(self, &slot).await?, slot))
            }
            None => None,
        };
        // Who came meanwhile has been answered nothing yet, or is refused here.
        volume.refuse_connected(CONNECTED_HINT)?;
        let turn = stacked.as_ref().map(|stacked| Arc::clone(&stacked.is_discarded));
        let turn = match turn {
            // Nothing goes back to the backend from here on: it would come over what clients write next.
            Some(turn) => Some(turn.lock_owned().await),
            None => None,
        };
        if volume.document().job.is_some() {
            // A move that a start could not go on with has a target that may have what is lost here: it is copied anew.
            self.state.drop_progress(&volume.name);
        }
        let stored = volume.journal.update(|document| document.layers.retain(|kept| kept.id != id));
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        if let Some(mut turn) = turn {
            *turn = true;
        }
        if let Some((quiesced, _)) = &held {
            volume.take_redirect_out(quiesced, id);
        }
        drop(held);
        if let Some(stacked) = &stacked {
            stacked.close().await;
        }
        self.surrogates.give_back(id);
        Ok(())
    }
}

/// Refuses what the guest could not do any more with a surrogate in its path: it has been told what requests it may ask.
fn check_geometry(stacked: &StackedRedirect, base: &Device) -> Result<()> {
    let (needed, taken) = (stacked.device.geometry(), base.geometry());
    if needed.request_alignment > taken.request_alignment {
        let (needed, taken) = (needed.request_alignment, taken.request_alignment);
        let message = format!("the surrogate takes requests of {needed} bytes, and the guest's are of {taken}");
        return Err(Error::new(ErrorCode::BackendUnusable, message).with_hint("make its stores with cache=page"));
    }
    if needed.transfer_bytes_max < taken.transfer_bytes_max || needed.read_only {
        let message = "the stores of the surrogate take no requests as large as the guest's, or are read-only";
        return Err(Error::new(ErrorCode::BackendUnusable, message).with_hint("use other stores"));
    }
    Ok(())
}

/// Moves what redirection `id` holds into the backend, and takes it out. Every step can be done again.
pub(super) async fn drain(daemon: &Arc<Daemon>, volume: &Arc<Volume>, id: Uuid) -> Result<()> {
    let failed = |error: block::Error| {
        of_backend(&error, "emptying the surrogate's part").with_hint(super::drain::way_out(&volume.name))
    };
    if let Some(stacked) = volume.stacked_redirect(id) {
        let redirect = &stacked.redirect;
        redirect.begin_drain().await;
        {
            let _operation = volume.operation.lock().await;
            // Writes that began before have ended then: it only gets emptier.
            drop(hold_clients(daemon, &volume.require_up()?).await?);
        }
        // The backend must take it: what that has lost of an earlier attempt is held again.
        while !redirect.settle().await.map_err(failed)? {
            let mut from = 0;
            let mut began = daemon.env.now();
            while let Some(next) = drain_next(&stacked, from).await.map_err(failed)? {
                if volume.slot().is_none() {
                    // The volume was taken down: the next start goes on.
                    return Ok(());
                }
                from = next;
                daemon.env.sleep(daemon.env.now().since(began).min(YIELD_MAX)).await;
                began = daemon.env.now();
            }
            if *stacked.is_discarded.lock().await {
                return Ok(());
            }
        }
        // From here on no crash brings anything back into it.
        let _operation = volume.operation.lock().await;
        let quiesced = hold_clients(daemon, &volume.require_up()?).await?;
        if !redirect.is_empty() {
            // A flush that failed meanwhile has brought something back.
            return Err(Error::new(ErrorCode::Busy, format!("the surrogate of {} is not empty any more", volume.name))
                .with_hint(super::drain::way_out(&volume.name)));
        }
        if redirect.has_failed_record() {
            // Its record cannot say that it is empty: from here on nobody asks it.
            strike_record(volume, id).await?;
        }
        volume.take_redirect_out(&quiesced, id);
        drop(quiesced);
        stacked.close().await;
    }
    strike(daemon, volume, id).await
}

/// Moves what the next place at or after `from` holds, and gives the place behind it. Nothing once it is discarded.
async fn drain_next(stacked: &StackedRedirect, from: u64) -> block::Result<Option<u64>> {
    let is_discarded = stacked.is_discarded.lock().await;
    if *is_discarded {
        return Ok(None);
    }
    Ok(stacked.redirect.drain_next(from).await?.map(|(next, _)| next))
}

/// Takes the layer, which is out of the guest's path, off the record, and gives its part back.
async fn strike(daemon: &Daemon, volume: &Volume, id: Uuid) -> Result<()> {
    strike_record(volume, id).await?;
    daemon.surrogates.give_back(id);
    Ok(())
}

async fn strike_record(volume: &Volume, id: Uuid) -> Result<()> {
    let stored = volume.journal.update(|document| document.layers.retain(|kept| kept.id != id));
    stored.await.map_err(|error| of_backend(&error, "the volume's journal"))
}
