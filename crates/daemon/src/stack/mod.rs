//! A volume's stack: its layers over one backend.
//!
//! ```text
//!   connection ─▶ limits ─▶ Meter ─▶ slot ─▶ overlay 2 ─▶ overlay 1 ─▶ joint 0 ─▶ backend     guest()
//!                                               │             └──────▶ joint 1 ─▶ file 1
//!                                               └────────────────────▶ joint 2 ─▶ file 2
//!
//!   while it is copied:   joint n ─▶ region n of [ slot ─▶ mirror ─▶ backend, file 1, file 2 ]     copy()
//! ```
//!
//! The guest reads and writes the top. A migration copies what lies below all layers: the backend and the files of the
//! layers, one behind the other as one device. So one migration moves a volume with everything that its layers hold, one
//! commit switches all of it, and no layer knows of it. A volume without layers that hold bytes has one joint, its slot.
//!
//! A layer is on record before the first byte that the backend lacks, and off it after the last one is durable below.
//!
//! A cache, or a surrogate, lies directly over the backend, below joint 0. A migration reads by it what it
//! alone has; it stays behind at the commit.

mod cache;
mod cache_arrival;
mod cache_changes;
mod carried;
mod drain;
mod files;
mod holding;
mod image_note;
mod medium;
mod opening;
mod redirect;
mod redirect_changes;
mod repair;
mod snapshots;
mod throttle;

use std::path::Path;
use std::sync::Arc;

use api::v1::{Error, ErrorCode};
use block::{Bytes, Device, Quiesced, Slot};
use filters::{Overlay, OverlayHeader, Region, layout};
use migrate::stream::protocol::PART_ALIGNMENT;
use uuid::Uuid;

pub(crate) use cache::{FoundCache, StackedCache, open_cache};
pub use cache_arrival::ArrivingCache;
pub(crate) use cache_arrival::{VolumeArrival, to_api_way};
pub(crate) use carried::{carried, layers_of};
pub(crate) use drain::resume_drains;
pub(crate) use files::{
    free_number, layers_elsewhere, make_layer_files, note_layer_files, open_layer_files, remove_layer_files,
    target_layers,
};
pub(crate) use holding::{require_complete_backend, require_no_cache};
pub(crate) use redirect::{StackedRedirect, reopen_redirect};
pub(crate) use redirect_changes::cannot_serve;
pub(crate) use snapshots::{SNAPSHOTS_MAX, refuse_draining};

use crate::document::{LayerDocument, LayerState};
use crate::journal::VolumeJournal;
use crate::open_backend::{BackendOpenOptions, OpenBackend};
use crate::overlays::OverlayContext;
use crate::problem::{Result, of_backend};

/// A volume's layers over its backend, while it is up.
pub(crate) struct Stack {
    open_backend: OpenBackend,
    /// The lowest first.
    overlays: Vec<StackedOverlay>,
    /// Below the overlays: one joint for the backend and one for the file of each overlay. Empty without overlays.
    joints: Vec<Slot>,
    /// The joint of a migration, below all others, while one is under way.
    copy: Option<Slot>,
    /// Over the backend of a volume without overlays: a surrogate that serves what is popular while the volume is moved.
    redirect: Option<StackedRedirect>,
    /// In the same place: the volume's cache.
    cache: Option<StackedCache>,
    /// Why the cache that is on record is not in the guest's path.
    cache_problem: Option<String>,
}

/// An overlay in its place.
#[derive(Clone)]
pub(crate) struct StackedOverlay {
    /// What the record calls it.
    pub(crate) id: Uuid,
    /// The overlay.
    pub(crate) overlay: Arc<Overlay>,
    /// The same as what lies above sees it.
    pub(crate) device: Device,
}

/// Where the next overlay would lie.
pub(crate) struct NextBase {
    base: Device,
    /// The identity of the overlay below, as headers have it; zeroes if there is none.
    parent: [u8; 16],
    /// The joint over the backend, which the first overlay brings along.
    lowest_joint: Option<Slot>,
}

/// An overlay that is open and not in the stack yet.
pub(crate) struct NextOverlay {
    stacked: StackedOverlay,
    joint: Slot,
    file: Device,
    lowest_joint: Option<Slot>,
}

impl NextBase {
    /// What the file of overlay `id` says of itself.
    fn header(&self, id: Uuid) -> OverlayHeader {
        OverlayHeader::new(self.base.size(), *id.as_bytes(), self.parent)
    }

    /// Opens the overlay in `file` over this.
    async fn open(self, id: Uuid, file: Device, boot: [u8; 16]) -> block::Result<NextOverlay> {
        let joint = Slot::new(file.clone());
        let overlay = Arc::new(Overlay::open(self.base, through(&joint, file.name()), boot).await?);
        let device = Device::from_arc(&format!("snapshot {id}"), Arc::clone(&overlay) as _);
        Ok(NextOverlay {
            stacked: StackedOverlay { id, overlay, device },
            joint,
            file,
            lowest_joint: self.lowest_joint,
        })
    }
}

/// Joints, and what is to lie below each.
type Moves = Vec<(Slot, Device)>;

/// A joint of the stack, as a device.
fn through(joint: &Slot, name: &str) -> Device {
    Device::new(name, joint.lane())
}

impl Stack {
    /// A stack without layers that hold bytes.
    pub(crate) const fn bare(open_backend: OpenBackend) -> Self {
        Self {
            open_backend,
            overlays: Vec::new(),
            joints: Vec::new(),
            copy: None,
            redirect: None,
            cache: None,
            cache_problem: None,
        }
    }

    /// The stack that `layers`, the lowest first, make over `open_backend`, with the cache that has `arrived` from another host, if one has.
    ///
    /// # Errors
    /// A layer that may hold bytes cannot be opened, or is not what it was.
    pub(crate) async fn build(
        open_backend: OpenBackend,
        layers: &[LayerDocument],
        arrived: Option<StackedCache>,
        journal: &Arc<VolumeJournal>,
        context: &OverlayContext,
        open_options: &BackendOpenOptions,
    ) -> Result<Self> {
        let mut stack = Self::bare(open_backend);
        Box::pin(stack.open_cache(layers, arrived, journal, context)).await?;
        Box::pin(stack.open_redirect(layers, context)).await?;
        if !layers.iter().any(|layer| layer.overlay().is_some()) {
            return Ok(stack);
        }
        let files = match stack.open_backend.take_files() {
            // Those of another host come with it, and so do those of a volume that has come from one.
            files if !files.is_empty() => files,
            _ => {
                let place = &stack.open_backend.place;
                let image = place.local_path().ok_or_else(|| {
                    let message = format!("{place} is no file of this host, and the volume has snapshots");
                    Error::new(ErrorCode::BackendUnusable, message)
                })?;
                let files = open_layer_files(layers, image, context, open_options.lock_wait).await;
                let files = files.map_err(|error| {
                    Error::new(ErrorCode::BackendUnusable, of_backend(&error, "a snapshot's file").message).with_hint(
                        "the volume is its backend with the snapshots over it: put back the files that were served",
                    )
                })?;
                note_files(journal, image, context).await;
                files
            }
        };
        for (layer, file) in layers.iter().filter(|layer| layer.overlay().is_some()).zip(files) {
            let next =
                stack.next_at(stack.overlays.len()).open(layer.id, file, context.boot).await.map_err(|error| {
                    let message = of_backend(&error, "a snapshot").message;
                    Error::new(ErrorCode::BackendUnusable, message).with_hint("put back the snapshot's file as it was")
                })?;
            if layer.state == LayerState::Draining {
                next.stacked.overlay.begin_drain();
            }
            stack.push(next);
        }
        Ok(stack)
    }

    /// Where an overlay in the place of overlay `index` would lie.
    fn next_at(&self, index: usize) -> NextBase {
        let below = index.checked_sub(1).map(|lower| &self.overlays[lower]);
        let ground = self.ground();
        let over = |joint: &Slot| through(joint, ground.name());
        let (base, lowest_joint) = match (below, self.joints.first()) {
            (Some(below), _) => (below.device.clone(), None),
            (None, Some(joint)) => (over(joint), None),
            (None, None) => {
                let joint = Slot::new(ground.clone());
                (over(&joint), Some(joint))
            }
        };
        let parent = below.map_or([0; 16], |below| below.overlay.header().id);
        NextBase { base, parent, lowest_joint }
    }

    /// Lays an overlay on the top. The guest does not see it before it is in the slot.
    fn push(&mut self, next: NextOverlay) {
        assert!(self.copy.is_none(), "layers do not change while a migration copies them");
        self.joints.extend(next.lowest_joint);
        self.joints.push(next.joint);
        self.open_backend.add_file(next.file);
        self.overlays.push(next.stacked);
    }

    /// Takes overlay `index`, which is empty, from between what lies above and below. The clients are held.
    fn remove(&mut self, index: usize) -> block::Result<()> {
        assert!(self.copy.is_none(), "layers do not change while a migration copies them");
        if let Some(above) = self.overlays.get(index + 1) {
            above.overlay.rebase(self.next_at(index).base)?;
        }
        self.overlays.remove(index);
        self.joints.remove(index + 1);
        self.open_backend.remove_file(index);
        if self.overlays.is_empty() {
            // Without overlays there is nothing between the slot and the backend.
            self.joints.clear();
        }
        Ok(())
    }

    /// What the guest reads and writes.
    pub(crate) fn guest(&self) -> Device {
        self.overlays.last().map_or_else(|| self.ground(), |top| top.device.clone())
    }

    /// What lies below all overlays: the backend, or the surrogate or the cache over it.
    fn ground(&self) -> Device {
        let redirect = self.redirect.as_ref().map(|stacked| &stacked.device);
        let cache = self.cache.as_ref().map(|stacked| &stacked.device);
        redirect.or(cache).unwrap_or(&self.open_backend.device).clone()
    }

    /// The overlays, the lowest first.
    pub(crate) fn overlays(&self) -> &[StackedOverlay] {
        &self.overlays
    }

    /// What holds the volume, with its locks.
    pub(crate) const fn backend(&mut self) -> &mut OpenBackend {
        &mut self.open_backend
    }

    /// What holds the volume, if that alone is the volume: no layer holds bytes that it lacks. What offloads a copy, or reads
    /// past the page cache, takes this.
    pub(crate) fn bypass(&self) -> Option<&OpenBackend> {
        let is_direct = self.redirect.is_none() && self.cache.is_none();
        let holds_all = self.overlays.is_empty() && is_direct && !self.open_backend.has_files();
        holds_all.then_some(&self.open_backend)
    }

    /// Takes it apart: what held the volume, with the files of its layers, and the cache, which is to be closed.
    pub(crate) fn into_backend(self) -> (OpenBackend, Option<StackedCache>) {
        (self.open_backend, self.cache)
    }

    /// Puts `open_backend` in the place of what held the volume, and gives that back.
    pub(crate) const fn replace_backend(&mut self, open_backend: OpenBackend) -> OpenBackend {
        std::mem::replace(&mut self.open_backend, open_backend)
    }

    /// What it takes to put a migration below all layers; none if there are none and it stands in the slot itself.
    fn begin_copy(&mut self) -> block::Result<Option<(Slot, Moves)>> {
        if self.joints.is_empty() {
            return Ok(None);
        }
        if let Some(copy) = &self.copy {
            return Ok(Some((copy.clone(), Vec::new())));
        }
        let copy = Slot::new(self.open_backend.ground()?);
        let parts = self.open_backend.parts();
        let sizes: Vec<Bytes> = parts.iter().map(Device::size).collect();
        let mut moves = Vec::new();
        for (joint, extent) in self.joints.iter().zip(layout(&sizes, PART_ALIGNMENT)) {
            let region = Region::new(through(&copy, "the ground of a copy"), extent)?;
            moves.push((joint.clone(), Device::new("a region of a copy", region)));
        }
        self.copy = Some(copy.clone());
        Ok(Some((copy, moves)))
    }

    /// What it takes to put every joint back over what holds its part now.
    fn end_copy(&mut self) -> Moves {
        match self.copy.take() {
            Some(_) => self.joints.iter().cloned().zip(self.open_backend.parts()).collect(),
            None => Vec::new(),
        }
    }
}

/// Has it on record which files the snapshots are that are open over `image`, where an earlier version has noted none.
async fn note_files(journal: &VolumeJournal, image: &Path, context: &OverlayContext) {
    let is_unknown = |layer: &LayerDocument| layer.overlay().is_some_and(|overlay| overlay.file.is_none());
    let before = journal.document();
    if !before.layers.iter().any(is_unknown) {
        return;
    }
    let mut layers = before.layers.clone();
    note_layer_files(&*context.backends, &mut layers, image);
    if layers == before.layers {
        return;
    }
    let stored = journal.update(|document| {
        for layer in &mut document.layers {
            let noted = layers.iter().find(|noted| noted.id == layer.id).and_then(LayerDocument::overlay);
            if let Some((overlay, noted)) = layer.overlay_mut().zip(noted) {
                overlay.file.clone_from(&noted.file);
            }
        }
    });
    if let Err(error) = stored.await {
        let volume = &before.name;
        tracing::warn!(volume, error = error.chain(), "which files the snapshots are could not be noted");
    }
}

/// Changes what lies below some joints, which hold the same bytes before and after.
async fn repoint(moves: Moves) {
    for (joint, device) in moves {
        joint.quiesce().await.swap(device);
    }
}

impl crate::volume::Volume {
    /// The joint and the device for a migration: below all layers.
    ///
    /// # Errors
    /// The volume is down, or the parts of its stack make no device.
    pub(crate) async fn copy_face(&self) -> block::Result<(Slot, Device)> {
        let down = || block::Error::new(block::ErrorKind::Internal, "a volume that is down was to be moved");
        let slot = self.slot().ok_or_else(down)?;
        match self.with_stack(Stack::begin_copy).ok_or_else(down)?? {
            Some((copy, moves)) => {
                repoint(moves).await;
                let device = copy.device();
                Ok((copy, device))
            }
            None => {
                let device = slot.device();
                Ok((slot, device))
            }
        }
    }

    /// Changes the layers while the clients are held, and lets them go on with what they make then.
    fn relayer<T>(&self, quiesced: &Quiesced, change: impl FnOnce(&mut Stack) -> T) -> Option<T> {
        let (changed, guest) = self.with_stack(|stack| (change(stack), stack.guest()))?;
        quiesced.swap(guest);
        Some(changed)
    }

    /// The migration below all layers has ended.
    pub(crate) async fn end_copy(&self) {
        if let Some(moves) = self.with_stack(Stack::end_copy) {
            repoint(moves).await;
        }
    }
}
