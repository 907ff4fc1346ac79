//! Snapshots that users take: each is an overlay over what the volume was then.
//!
//! ```text
//!   add     file made, empty ─▶ on record: may hold ─▶ in the slot, under the guest
//!   revert  new file made, empty ─▶ one record: it replaces the snapshot's overlay and all above ─▶ in the slot ─▶ old files go
//!   rm      on record: draining ─▶ emptied into what lies below ─▶ flushed ─▶ out of the slot ─▶ off the record ─▶ file goes
//! ```
//!
//! A crash at any of the arrows leaves a volume that reads as before the arrow or as after it: an empty overlay changes
//! nothing, whether it is on record or not, and one that is draining is drained on. `rm` is in [`drain`](super::drain).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::v1::{self, Error, ErrorCode, RevertRequest, SnapshotRequest};
use block::{Device, Quiesced, Slot};
use filters::Overlay;

use super::files::{free_number, make_layer_files, note_layer_files, remove_layer_files};
use super::redirect_changes::refuse_redirected;
use super::{NextBase, NextOverlay, Stack};
use crate::audit::unix_ms;
use crate::daemon::Daemon;
use crate::document::{
    CacheLayer, CacheTrust, LayerDocument, LayerKind, LayerState, OverlayLayer, VolumeDocument, random_uuid,
};
use crate::problem::{Result, invalid, of_backend};
use crate::state_dir::check_name;
use crate::volume::Volume;

/// So many snapshots a volume has at most: a read goes through all of them.
pub(crate) const SNAPSHOTS_MAX: usize = 32;
/// The guest is held for no longer than this in one try, and let go for [`HOLD_REST`] between two.
const HOLD_MAX: Duration = Duration::from_millis(20);
const HOLD_REST: Duration = Duration::from_millis(20);
/// Said to who would revert a volume under a guest.
const CONNECTED_HINT: &str = "stop the guest first: what it holds in memory is not of the snapshot";
/// So long the change of a layer is tried under a guest whose requests do not end in time.
const HOLD_TRIED: Duration = Duration::from_secs(20);

/// Holds the clients of `slot` with none of their requests under way, for [`HOLD_MAX`] at a time.
///
/// # Errors
/// Their requests do not end in time, however often it is tried.
pub(super) async fn hold_clients(daemon: &Daemon, slot: &Slot) -> Result<Quiesced> {
    let until = daemon.env.now() + HOLD_TRIED;
    loop {
        if let Some(quiesced) = env::timeout(&*daemon.env, HOLD_MAX, slot.quiesce()).await {
            return Ok(quiesced);
        }
        if daemon.env.now() >= until {
            let message = format!("the guest's requests took longer than {HOLD_MAX:?} for {HOLD_TRIED:?}");
            return Err(Error::new(ErrorCode::Busy, message)
                .with_hint("nothing was changed; try again when what holds the volume answers faster"));
        }
        daemon.env.sleep(HOLD_REST).await;
    }
}

/// Refuses what would change the layers of a volume at a time, or of a kind, at which that is not possible.
pub(super) fn check_changeable(volume: &Volume, document: &VolumeDocument) -> Result<()> {
    let name = &volume.name;
    volume.refuse_moving()?;
    if document.read_only {
        let message = format!("{name} is read-only");
        return Err(Error::new(ErrorCode::ReadOnly, message).with_hint("nothing is written that a snapshot would hold"));
    }
    if document.backend.local_path().is_none() {
        let message = format!("{} is no file or block device of this host", document.backend);
        return Err(
            Error::new(ErrorCode::WrongState, message).with_hint("take snapshots on the host that holds the volume")
        );
    }
    if document.incoming.as_ref().is_some_and(|incoming| incoming.exclusive) {
        let message = format!("a guest of another host uses {name}");
        return Err(Error::new(ErrorCode::InUse, message).with_hint("wait until that host lets it go"));
    }
    if document.room_to_grow().is_some() {
        let message = format!("{name} is a container that grows, and a snapshot has a fixed size");
        return Err(invalid(message, "snapshots need an image in the format raw"));
    }
    refuse_redirected(document)
}

/// Refuses what cannot be done while a layer is being emptied: a snapshot, a cache, or the part of a surrogate.
pub(crate) fn refuse_draining(document: &VolumeDocument) -> Result<()> {
    let name = &document.name;
    let redirect = document.redirect_layer().filter(|(layer, _)| layer.state == LayerState::Draining);
    if let Some((_, redirect)) = redirect {
        let message = format!("what {name} has written to the surrogate {} goes back", redirect.surrogate);
        return Err(Error::new(ErrorCode::Busy, message)
            .with_hint(format!("wait for it: `transhume volume show {name}` says how much is left")));
    }
    let leaving = |(layer, cache): &(&LayerDocument, &CacheLayer)| {
        layer.state == LayerState::Draining || cache.trust == CacheTrust::Gone
    };
    if let Some((_, cache)) = document.cache_layer().filter(leaving) {
        let message = format!("what {name} has written to the cache {} goes to its backend", cache.cache);
        return Err(Error::new(ErrorCode::Busy, message)
            .with_hint(format!("wait for it: `transhume volume show {name}` says how much is left")));
    }
    let mut draining = document.layers.iter().filter(|layer| layer.state == LayerState::Draining);
    let Some(snapshot) = draining.find_map(LayerDocument::overlay) else { return Ok(()) };
    Err(Error::new(ErrorCode::Busy, format!("snapshot {} of {name} is being removed", snapshot.name))
        .with_hint(format!("wait for it: `transhume volume snapshot ls {name}` says how far it is")))
}

/// The place of snapshot `wanted` among the layers of `document`, or of the newest if none is named.
pub(super) fn find_snapshot<'a>(
    document: &'a VolumeDocument,
    wanted: Option<&str>,
) -> Result<(usize, &'a LayerDocument)> {
    let name = &document.name;
    let mut overlays = document.layers.iter().filter(|layer| layer.overlay().is_some()).enumerate();
    let found = match wanted {
        Some(wanted) => overlays.find(|(_, layer)| layer.overlay().is_some_and(|overlay| overlay.name == wanted)),
        None => overlays.last(),
    };
    found.ok_or_else(|| {
        let message = match wanted {
            Some(wanted) => format!("{name} has no snapshot {wanted}"),
            None => format!("{name} has no snapshot"),
        };
        Error::new(ErrorCode::NotFound, message)
            .with_hint(format!("`transhume volume snapshot ls {name}` lists its snapshots"))
    })
}

impl Daemon {
    /// Makes the file of an overlay, notes in `layer` which it is, and opens it over `base`. When this fails the file is removed.
    async fn make_overlay(&self, base: NextBase, layer: &mut LayerDocument, image: &Path) -> Result<NextOverlay> {
        let header = base.header(layer.id);
        let id = layer.id;
        let (layers, context) = (std::slice::from_mut(layer), self.overlay_context());
        let sizes = [header.delta_bytes()];
        let made = make_layer_files(layers, &sizes, image, &context, self.config.lock_wait()).await;
        let mut files = made.map_err(|error| of_backend(&error, "the snapshot's file"))?;
        let file: Device = files.pop().expect("one was asked for");
        note_layer_files(&*self.backends, layers, image);
        let opened = async {
            Overlay::create(&file, &header).await?;
            base.open(id, file, self.boot).await
        };
        opened.await.map_err(|error| {
            remove_layer_files(&*self.backends, layers, image);
            of_backend(&error, "the snapshot's file")
        })
    }

    /// Takes a snapshot: from here on what is written goes to an overlay.
    pub(crate) async fn add_snapshot(self: &Arc<Self>, name: &str, request: SnapshotRequest) -> Result<v1::Volume> {
        let volume = self.volume(name)?;
        let _operation = volume.begin_operation(&*self.env).await?;
        let slot = volume.require_up()?;
        let document = volume.document();
        check_changeable(&volume, &document)?;
        let taken: Vec<&OverlayLayer> = document.layers.iter().filter_map(LayerDocument::overlay).collect();
        if taken.len() >= SNAPSHOTS_MAX {
            let message = format!("{name} has {SNAPSHOTS_MAX} snapshots, and no volume has more");
            return Err(invalid(message, format!("remove one: `transhume volume snapshot rm {name} SNAPSHOT`")));
        }
        let created_unix_ms = unix_ms(self.env.wall_clock());
        let snapshot = request.snapshot.unwrap_or_else(|| format!("at-{created_unix_ms}"));
        check_name(&snapshot)?;
        if taken.iter().any(|overlay| overlay.name == snapshot) {
            let message = format!("{name} has a snapshot {snapshot} already");
            return Err(Error::new(ErrorCode::AlreadyExists, message).with_hint("choose another name"));
        }
        let directory = request.at.map(PathBuf::from);
        if directory.as_deref().is_some_and(|directory| !directory.is_absolute()) {
            return Err(invalid("the directory is no absolute path", "write it beginning with a slash"));
        }
        let image = document.backend.local_path().expect("checked above").to_owned();
        if directory.is_none() && self.backends.free_space(&image).is_ok_and(|space| space.is_none()) {
            let message = format!("{} is no file, and a snapshot lies beside the image", image.display());
            return Err(invalid(message, "name a directory for it with --at"));
        }
        let number = free_number(&*self.backends, &image, directory.as_deref())?;
        let base = volume.with_stack(|stack| stack.next_at(taken.len())).expect("it is up");
        let id = random_uuid(&*self.env);
        let overlay = OverlayLayer { name: snapshot, number, directory, created_unix_ms, file: None };
        let mut layer = LayerDocument { id, kind: LayerKind::Overlay(overlay), state: LayerState::MayHold };
        let next = self.make_overlay(base, &mut layer, &image).await?;
        let volume_id = random_uuid(&*self.env);
        let stored = volume.journal.begin_holding(|document| {
            document.id.get_or_insert(volume_id);
            document.layers.push(layer.clone());
        });
        // In doubt the file stays: a record that counts after all names it, and it is empty.
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        match hold_clients(self, &slot).await {
            Ok(quiesced) => {
                volume.relayer(&quiesced, |stack| stack.push(next)).expect("it is up");
                Ok(volume.show())
            }
            Err(error) => {
                drop(next);
                let stored = volume.journal.update(|document| document.layers.retain(|kept| kept.id != id)).await;
                if stored.is_ok() {
                    remove_layer_files(&*self.backends, std::slice::from_ref(&layer), &image);
                }
                Err(error)
            }
        }
    }

    /// Throws away what was written since a snapshot was taken. The snapshot stays; newer ones go, if that is asked for.
    pub(crate) async fn revert(self: &Arc<Self>, name: &str, request: RevertRequest) -> Result<v1::Volume> {
        let volume = self.volume(name)?;
        let _operation = volume.begin_operation(&*self.env).await?;
        let slot = volume.require_up()?;
        let document = volume.document();
        check_changeable(&volume, &document)?;
        let (index, found) = find_snapshot(&document, request.snapshot.as_deref())?;
        let snapshot = found.overlay().expect("a snapshot is an overlay").clone();
        let newer: Vec<&str> =
            document.layers.iter().filter_map(LayerDocument::overlay).skip(index + 1).map(|one| &*one.name).collect();
        if !newer.is_empty() && !request.discard_newer {
            let message = format!("{name} has newer snapshots than {}: {}", snapshot.name, newer.join(", "));
            return Err(Error::new(ErrorCode::InUse, message)
                .with_hint("--discard-newer throws them away, too, with all that was written since"));
        }
        volume.refuse_connected(CONNECTED_HINT)?;
        let image = document.backend.local_path().expect("checked above").to_owned();
        let number = free_number(&*self.backends, &image, snapshot.directory.as_deref())?;
        let base = volume.with_stack(|stack| stack.next_at(index)).expect("it is up");
        let id = random_uuid(&*self.env);
        let kind = LayerKind::Overlay(OverlayLayer { number, file: None, ..snapshot });
        let mut layer = LayerDocument { id, kind, state: LayerState::MayHold };
        let next = self.make_overlay(base, &mut layer, &image).await?;
        let held = hold_clients(self, &slot).await;
        // Who came meanwhile has been answered nothing yet, or is refused here.
        let quiesced = match held.and_then(|held| volume.refuse_connected(CONNECTED_HINT).map(|()| held)) {
            Ok(quiesced) => quiesced,
            Err(error) => {
                drop(next);
                remove_layer_files(&*self.backends, std::slice::from_ref(&layer), &image);
                return Err(error);
            }
        };
        let discarded: Vec<LayerDocument> =
            document.layers.iter().filter(|layer| layer.overlay().is_some()).skip(index).cloned().collect();
        let stored = volume.journal.begin_holding(|document| {
            let is_discarded = |layer: &LayerDocument| discarded.iter().any(|gone| gone.id == layer.id);
            document.layers.retain(|layer| !is_discarded(layer));
            document.layers.push(layer);
        });
        if let Err(error) = stored.await {
            // Which of the two counts nobody knows before the next start: until then nobody may write.
            let error = of_backend(&error, "the volume's journal");
            volume.bring_down_held(&slot, quiesced);
            volume.set_problem(error.clone());
            return Err(error.with_hint("restart the daemon: it finds which of both states is on record"));
        }
        let relayered = volume.relayer(&quiesced, |stack| {
            stack.truncate(index);
            stack.push(next);
        });
        relayered.expect("it is up");
        drop(quiesced);
        remove_layer_files(&*self.backends, &discarded, &image);
        Ok(volume.show())
    }
}

impl Stack {
    /// Takes out overlay `index` and all above. Their joint over the backend stays, for the one that comes.
    fn truncate(&mut self, index: usize) {
        assert!(self.copy.is_none(), "layers do not change while a migration copies them");
        self.joints.truncate(index + 1);
        self.overlays.truncate(index);
        self.open_backend.truncate_files(index);
    }
}
