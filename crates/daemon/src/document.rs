//! What a volume's journal holds: the only authority on which backend holds the volume, and what is being done to it.
//!
//! ```text
//!   attach           move             commit (one store)          source retired, hook run
//!  ────────▶ idle ─────────▶ moving ──────────────────▶ finishing ────────────────────────▶ idle
//!             ▲                │  cancelled, failed
//!             └────────────────┘
//! ```
//!
//! *Idle* has no job; *moving* has one whose `committed` is empty; *finishing* has one whose `committed` says what
//! became of the source. A restart reads this and goes on from there.

mod job;
mod layer;

use std::sync::Arc;

use backends::{ImageIdentity, PreparedTarget};
use block::Bytes;
use env::Env;
use migrate::Phase;
use serde::{Deserialize, Serialize};

pub use job::{Committed, GroupDocument, JobDocument};
pub(crate) use job::{Rested, TargetSeen};
pub use layer::{
    CacheLayer, CacheTrust, LayerDocument, LayerKind, LayerState, OverlayLayer, RedirectLayer, ThrottleLayer,
};
pub(crate) use layer::{as_text, layers_beside};

use crate::clients::{Clients, MachineClient, MachineGate, SocketOwner};
use crate::location::Location;

/// The layout of this document.
pub const DOCUMENT_VERSION: u32 = 1;

/// The layout of a document that lists overlays: a program that does not know them must not serve the backend alone.
pub const DOCUMENT_VERSION_OVERLAYS: u32 = 2;

/// The layout of a document that names a place which is no file of this host. A program that does not know such places
/// must not take the volume for its own.
pub const DOCUMENT_VERSION_PLACES: u32 = 3;

/// The layout of a document that an arbiter may know better than. A program that asks none must not serve the volume.
pub const DOCUMENT_VERSION_ARBITER: u32 = 4;

/// The layout of a document that lists layers: a program that does not know them would serve the backend alone.
pub const DOCUMENT_VERSION_LAYERS: u32 = 5;

/// The layout of a document that the record of a group may know better than: a program that reads none must not serve the volume.
pub const DOCUMENT_VERSION_GROUPS: u32 = 6;

/// The layout of a document of a volume whose layers are between two hosts. A program that does not know that would serve the
/// volume without them.
pub const DOCUMENT_VERSION_CARRIED: u32 = 7;

/// The layout of a document of a volume that comes, or has come, with its machine. A program that does not know that would not
/// serve it to the machine's QEMU.
pub const DOCUMENT_VERSION_MACHINES: u32 = 8;

/// The layout of a document of a volume that is handed over on storage that both hosts reach. A program that does not know that
/// would copy it onto itself, or put it away.
pub const DOCUMENT_VERSION_SHARED: u32 = 9;

/// The layout of a document that lists a surrogate: a program that does not know them would serve the backend without what the guest
/// has written last.
pub const DOCUMENT_VERSION_SURROGATE: u32 = 10;

/// The layout of a document that lists a cache: a program that does not know them would serve the backend without what only the
/// cache has, and write past what the cache would show later.
pub const DOCUMENT_VERSION_CACHE: u32 = 11;
/// The layout once a layer has been marked on the image: an earlier version would drop the number, and be refused its own image later.
pub const DOCUMENT_VERSION_MARKED: u32 = 12;
/// The layout of a document of a volume that a person has opened here: an earlier version would let the guest of its old host write
/// over what was written since.
pub const DOCUMENT_VERSION_OPENED: u32 = 13;

/// A volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VolumeDocument {
    /// The layout: [`DOCUMENT_VERSION`], or one of the following. [`DOCUMENT_VERSION_OVERLAYS`] applies while overlays
    /// are listed. [`DOCUMENT_VERSION_PLACES`] applies while a place is named that is no file, or the volume comes from
    /// another host. [`DOCUMENT_VERSION_ARBITER`] applies while an arbiter may have been asked.
    /// [`DOCUMENT_VERSION_LAYERS`] applies while the volume has layers. [`DOCUMENT_VERSION_GROUPS`] applies while a
    /// group's record may know better. [`DOCUMENT_VERSION_CARRIED`] applies while layers are between two hosts.
    /// [`DOCUMENT_VERSION_MACHINES`] applies while the volume's machine comes with it. [`DOCUMENT_VERSION_SHARED`] applies
    /// while the volume is handed over on storage that both hosts reach. [`DOCUMENT_VERSION_SURROGATE`] applies while a surrogate
    /// is listed, or was until a commit that may be taken back. [`DOCUMENT_VERSION_CACHE`] does the same for a cache.
    /// [`DOCUMENT_VERSION_OPENED`] applies while a person has opened a volume here whose guest may be at another host.
    pub version: u32,
    /// The volume's identity, which does not depend on its name. A volume has one since it had its first layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<uuid::Uuid>,
    /// What the volume is called.
    pub name: String,
    /// Counts changes of what holds it.
    pub epoch: u64,
    /// What holds it.
    pub backend: Location,
    /// Which file or block device of this host that is, whatever its name leads to later. Earlier versions kept none: the
    /// first start that finds none notes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<Box<ImageIdentity>>,
    /// Where it is served.
    pub export: String,
    /// Who may connect besides the daemon's own user: the owner of the unix socket.
    #[serde(default)]
    pub socket_owner: Option<SocketOwner>,
    /// Who of them alone, of a volume that came with its machine: that machine's QEMU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<MachineClient>,
    /// Whether writes are refused.
    #[serde(default)]
    pub read_only: bool,
    /// Where the volume ends, if what holds it may be larger: a block device that it was moved to.
    #[serde(default)]
    pub size_limit: Option<u64>,
    /// Of a container that came with its machine and stayed where both hosts reach it: how large it may become. An adopted one
    /// has that with its adoption.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_advertised: Option<u64>,
    /// Of an export of another server: a daemon that has ended could not have it make durable all that it had answered,
    /// and has told no guest. The guest's next flush is to fail.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_lost: bool,
    /// The running VM that it was adopted from.
    #[serde(default)]
    pub adoption: Option<AdoptionDocument>,
    /// What is being done to it.
    #[serde(default)]
    pub job: Option<Box<JobDocument>>,
    /// The host that moves it here, or has. Until it is held here, `backend` holds a copy that is not the volume.
    #[serde(default)]
    #[serde(rename = "arrival")]
    pub incoming: Option<IncomingDocument>,
    /// By what it came, once a person has opened its export here although its guest at the host that it came from may run on. That
    /// guest is kept out until a person says otherwise: it would write over what was written here since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opened: Option<OpenedArrival>,
    /// The machine that it came with, once it is held here: what it says of that goes when its host lets it go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub came_with: Option<String>,
    /// The layers over the backend, the lowest first. While one of them may hold bytes the backend alone is not the volume.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerDocument>,
    /// Counts how often a layer, or an overlay of a snapshot move, has begun to hold bytes that what lies below lacks. The image is
    /// marked with it: a record with a smaller number than its image is an older copy.
    #[serde(default)]
    pub layers_generation: u64,
    /// What its clients were promised that requests may be multiples of, in bytes, wherever it is later. Earlier versions kept none: the
    /// first start that finds none notes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sector: Option<u32>,
    /// The epoch of a tombstone in the first block of which somebody has said that it is the guest's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accepted_tombstone: Option<u64>,
}

/// A volume that another host moves here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IncomingDocument {
    /// The host, as this daemon's trust store calls it.
    pub host: String,
    /// What the volume is called there.
    pub origin: String,
    /// The move that brings it.
    pub job: uuid::Uuid,
    /// The epoch under which that host holds it.
    pub epoch: u64,
    /// How large it is, in bytes.
    pub size: u64,
    /// What requests are multiples of, in bytes.
    pub request_alignment: u32,
    /// Where it is put, and how to take that back. None: it stays on storage that both hosts reach, which is left as it is
    /// whatever becomes of the move.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<PreparedTarget>,
    /// How far it has come.
    pub stage: IncomingStage,
    /// Of a volume that is held: only that host's guest uses it, so it has no export here until that host lets it go. Volumes
    /// that earlier versions have taken have one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub exclusive: bool,
    /// That host has asked for its move to be forgotten, and none of the volumes that come by the same move was held. So none of them
    /// is taken any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub undone: bool,
    /// The machine that comes with it: its QEMU is the volume's guest here, from when it is held on, and is connected before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// The layers that come with it, the lowest first. Until that host lets the volume go only their bytes are here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerDocument>,
}

/// The move by which a volume came that a person has opened here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenedArrival {
    /// The host that it came from.
    pub host: String,
    /// What the volume is called there.
    pub origin: String,
    /// The move.
    pub job: uuid::Uuid,
}

/// How far a volume has come that another host moves here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IncomingStage {
    /// It is being filled.
    Filling,
    /// It is complete and flushed, and waits for the other host to give it up.
    Prepared {
        /// The epoch under which it would be held.
        epoch: u64,
    },
    /// It is held here.
    Held {
        /// The epoch under which it was taken.
        epoch: u64,
    },
}

/// How a volume came from a running VM, and all that it takes to give it back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdoptionDocument {
    /// How the VM is reached.
    pub monitor: api::v1::Monitor,
    /// The node that was named.
    pub node: String,
    /// The image's format.
    pub format: String,
    /// The size that the export shows, for a container that may grow.
    pub size_advertised: Option<u64>,
    /// Which way the adoption is going.
    pub direction: AdoptionDirection,
    /// The plan that leads there: QEMU's graph says how far it has come.
    pub plan: vm::Plan,
}

/// Which way an adoption is going.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdoptionDirection {
    /// The disk is being taken over.
    Adopting,
    /// The disk is ours.
    Adopted,
    /// The disk is being given back.
    Releasing,
}

impl IncomingDocument {
    /// Whether this host holds it.
    #[must_use]
    pub const fn is_held(&self) -> bool {
        matches!(self.stage, IncomingStage::Held { .. })
    }

    /// Whether the volume is held here for a guest of the host that it came from, and for nobody else.
    #[must_use]
    pub const fn is_for_its_origin(&self) -> bool {
        self.exclusive && self.machine.is_none() && matches!(self.stage, IncomingStage::Held { .. })
    }
}

impl AdoptionDirection {
    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Adopting => "adopting",
            Self::Adopted => "adopted",
            Self::Releasing => "releasing",
        }
    }
}

impl VolumeDocument {
    /// Who may connect to its export.
    #[must_use]
    pub fn clients(&self) -> Clients {
        let disk = self.adoption.as_ref().map(|adoption| Arc::new(adoption.plan.disk.clone()));
        let machine = self.client.clone().map(|client| MachineGate::new(move || Some(client.clone())));
        Clients { owner: self.socket_owner, disk, machine }
    }

    /// Which file or block device `place` is, as far as that is on record.
    #[must_use]
    pub fn image_of(&self, place: &Location) -> Option<&ImageIdentity> {
        let committed = self.job.as_ref().and_then(|job| job.committed.as_ref());
        match committed.filter(|committed| committed.source == *place && self.backend != *place) {
            Some(committed) => committed.image.as_deref(),
            None => self.image.as_deref().filter(|_| self.backend == *place),
        }
    }

    /// Whether `place`, if it is on record as what holds the volume or has held it, may lack what it had answered, and
    /// no guest has been told.
    #[must_use]
    pub fn has_lost_at(&self, place: &Location) -> bool {
        let committed = self.job.as_ref().and_then(|job| job.committed.as_ref());
        match committed.filter(|committed| committed.source == *place && self.backend != *place) {
            Some(committed) => committed.has_lost,
            None => self.has_lost && self.backend == *place,
        }
    }

    /// Notes that of `place`.
    pub(crate) fn note_loss_at(&mut self, place: &Location, has_lost: bool) {
        if self.backend == *place {
            self.has_lost = has_lost;
            return;
        }
        let committed = self.job.as_mut().and_then(|job| job.committed.as_mut());
        if let Some(committed) = committed.filter(|committed| committed.source == *place) {
            committed.has_lost = has_lost;
        }
    }

    /// What its clients were promised that requests may be multiples of, in bytes.
    #[must_use]
    pub fn sector_promised(&self) -> Option<u32> {
        self.sector.or_else(|| self.incoming.as_ref().map(|incoming| incoming.request_alignment))
    }

    /// How large the volume may become, if it is a container that grows.
    #[must_use]
    pub fn room_to_grow(&self) -> Option<u64> {
        self.adoption.as_ref().and_then(|adoption| adoption.size_advertised).or(self.size_advertised)
    }

    /// This document with the layout that what it says takes.
    #[must_use]
    pub fn with_version(mut self) -> Self {
        let job = self.job.as_ref();
        let is_file = |place: &Location| place.is_file();
        let names_files = is_file(&self.backend)
            && job.is_none_or(|job| is_file(&job.target.location()))
            && job.and_then(|job| job.committed.as_ref()).is_none_or(|committed| is_file(&committed.source));
        let names_layers = |place: &Location| matches!(place, Location::Remote(remote) if remote.layers.is_some());
        let are_layers_carried = self.incoming.as_ref().is_some_and(|incoming| !incoming.layers.is_empty())
            || names_layers(&self.backend)
            || job.is_some_and(|job| names_layers(&job.target.location()));
        let is_of_group = |job: &JobDocument| job.group.as_ref().is_some_and(|group| group.record.is_some());
        let is_of_machine =
            self.incoming.as_ref().is_some_and(|incoming| incoming.machine.is_some()) || self.moves_with_machine();
        let is_shared = |place: &Location| matches!(place, Location::Remote(remote) if remote.shared);
        let is_handed_over = self.incoming.as_ref().is_some_and(|incoming| incoming.target.is_none())
            || is_shared(&self.backend)
            || self.size_advertised.is_some()
            || job.is_some_and(|job| job.target.is_shared());
        let has_surrogate = self.layers_named().any(|layer| layer.redirect().is_some());
        let has_cache = self.layers_named().any(|layer| layer.cache().is_some());
        self.version = match job {
            // Without a way back to that host an earlier version does no harm.
            _ if self.opened.is_some() && self.incoming.is_some() => DOCUMENT_VERSION_OPENED,
            _ if self.layers_generation > 0 => DOCUMENT_VERSION_MARKED,
            _ if has_cache => DOCUMENT_VERSION_CACHE,
            _ if has_surrogate => DOCUMENT_VERSION_SURROGATE,
            _ if is_handed_over => DOCUMENT_VERSION_SHARED,
            _ if is_of_machine => DOCUMENT_VERSION_MACHINES,
            _ if are_layers_carried => DOCUMENT_VERSION_CARRIED,
            Some(job) if is_of_group(job) => DOCUMENT_VERSION_GROUPS,
            _ if !self.layers.is_empty() => DOCUMENT_VERSION_LAYERS,
            Some(job) if job.asked => DOCUMENT_VERSION_ARBITER,
            _ if !names_files || self.incoming.is_some() => DOCUMENT_VERSION_PLACES,
            Some(job) if !job.overlays.is_empty() => DOCUMENT_VERSION_OVERLAYS,
            _ => DOCUMENT_VERSION,
        };
        self
    }

    /// The commit of the job: the target holds the volume.
    ///
    /// # Panics
    /// If there is no job, or it is committed: what is known of the source would be lost.
    pub fn commit(&mut self) {
        let job = self.job.as_mut().expect("a commit belongs to a job");
        assert!(job.committed.is_none(), "a move is committed once");
        let source = std::mem::replace(&mut self.backend, job.target.location());
        let size = Bytes(job.size.unwrap_or_default());
        let target = job.target.local().and_then(|target| target.image(size));
        let image = std::mem::replace(&mut self.image, target.map(Box::new));
        let (epoch, size_limit) = (self.epoch, self.size_limit);
        let has_lost = std::mem::take(&mut self.has_lost);
        let redirect = take_redirect(&mut self.layers);
        let mut layers = match job.group.as_ref().is_some_and(|group| group.machine.is_some()) {
            // The guest's requests are the target's.
            true => std::mem::take(&mut self.layers),
            false => replace_layers(&mut self.layers, &job.layers),
        };
        // What the surrogate or the cache holds the target has.
        layers.splice(0..0, redirect);
        let (persisted, taken, report) = (false, false, None);
        job.committed =
            Some(Committed { source, epoch, image, size_limit, has_lost, layers, persisted, taken, report });
        job.record.phase = Phase::Committed;
        job.asked = false;
        let may_be_larger = job.target.may_be_larger();
        self.size_limit = job.size.filter(|_| may_be_larger);
        self.epoch += 1;
    }

    /// The commit in doubt does not count: the source holds the volume, as before. Its store may have ended well, which
    /// nobody was told. Where it has not there is nothing to take back.
    pub fn take_back(&mut self) {
        let Some(committed) = self.job.as_mut().and_then(|job| job.committed.take()) else { return };
        (self.backend, self.image) = (committed.source, committed.image);
        (self.epoch, self.size_limit, self.has_lost) = (committed.epoch, committed.size_limit, committed.has_lost);
        self.restore_layers(&committed.layers);
    }

    /// The host that the volume came from has let it go, or is gone: its layers are this host's. The volume is called `id` unless
    /// it has an identity.
    pub(crate) fn let_go(&mut self, id: uuid::Uuid) {
        let Some(incoming) = self.incoming.take() else { return };
        if let (None, Some(target)) = (&self.image, &incoming.target) {
            self.image = target.image(Bytes::ZERO).map(Box::new);
        }
        if !incoming.layers.is_empty() {
            self.layers = incoming.layers;
            self.id.get_or_insert(id);
        }
    }

    /// A person has opened a volume here that is held for a guest of the host that it came from. That guest is kept out from here on.
    /// The volume is called `id` unless it has an identity.
    pub(crate) fn open_to_others(&mut self, id: uuid::Uuid) {
        let Some(incoming) = &mut self.incoming else { return };
        let IncomingDocument { host, origin, job, .. } = &*incoming;
        self.opened = Some(OpenedArrival { host: host.clone(), origin: origin.clone(), job: *job });
        incoming.exclusive = false;
        if !incoming.layers.is_empty() {
            // Its guest went through layers at the other host, which know nothing of what is written here: it cannot come back.
            self.let_go(id);
        }
    }

    /// The guest of a volume that comes with its machine goes through its layers here, from when it is held.
    pub(crate) fn take_layers_of_machine(&mut self, id: uuid::Uuid) {
        let Some(incoming) = self.incoming.as_mut().filter(|incoming| incoming.machine.is_some()) else { return };
        let layers = std::mem::take(&mut incoming.layers);
        if !layers.is_empty() {
            self.layers = layers;
            self.id.get_or_insert(id);
        }
    }

    /// The layers are those of the source again.
    pub(crate) fn restore_layers(&mut self, of_source: &[LayerDocument]) {
        match self.moves_with_machine() {
            true => self.layers = of_source.to_vec(),
            false => {
                replace_layers(&mut self.layers, of_source);
                let redirect = of_source.iter().find(|layer| layer.is_of_host());
                let is_new = |layer: &&LayerDocument| self.layers.iter().all(|known| known.id != layer.id);
                let redirect = redirect.filter(is_new).cloned();
                self.layers.splice(0..0, redirect);
            }
        }
    }

    /// No move needs a surrogate any more: what it holds goes back into the backend, unless it was there before the move.
    pub(crate) fn drain_redirect(&mut self) {
        let is_of_move = |layer: &&mut LayerDocument| layer.redirect().is_some_and(|redirect| !redirect.stays);
        let redirect = self.layers.iter_mut().find(is_of_move);
        redirect.into_iter().for_each(|layer| layer.state = LayerState::Draining);
    }

    /// The redirection to a surrogate, if it has one.
    pub(crate) fn redirect_layer(&self) -> Option<(&LayerDocument, &RedirectLayer)> {
        self.layers.iter().find_map(|layer| Some((layer, layer.redirect()?)))
    }

    /// Its cache, if it has one.
    pub(crate) fn cache_layer(&self) -> Option<(&LayerDocument, &CacheLayer)> {
        self.layers.iter().find_map(|layer| Some((layer, layer.cache()?)))
    }

    /// Changes what is said of cache `id`, if it is still there.
    pub(crate) fn change_cache(&mut self, id: uuid::Uuid, change: impl FnOnce(&mut CacheLayer, &mut LayerState)) {
        let Some(layer) = self.layers.iter_mut().find(|layer| layer.id == id) else { return };
        let mut state = layer.state;
        if let Some(cache) = layer.cache_mut() {
            change(cache, &mut state);
            layer.state = state;
        }
    }

    /// The flash of cache `id` has failed: what it only caches is not believed any more, wherever it is on record.
    pub(crate) fn distrust_cache(&mut self, id: uuid::Uuid) {
        let committed = self.job.as_mut().and_then(|job| job.committed.as_mut());
        let layers = self.layers.iter_mut().chain(committed.into_iter().flat_map(|committed| &mut committed.layers));
        let caches = layers.filter(|layer| layer.id == id).filter_map(LayerDocument::cache_mut);
        caches.filter(|cache| cache.trust == CacheTrust::Whole).for_each(|cache| cache.trust = CacheTrust::Dirty);
    }

    /// The layers on record, those that a commit has put aside included.
    pub(crate) fn layers_named(&self) -> impl Iterator<Item = &LayerDocument> {
        let committed = self.job.as_ref().and_then(|job| job.committed.as_ref());
        let incoming = self.incoming.iter().flat_map(|incoming| &incoming.layers);
        self.layers.iter().chain(committed.into_iter().flat_map(|committed| &committed.layers)).chain(incoming)
    }

    /// Whether its move is one of a machine.
    fn moves_with_machine(&self) -> bool {
        let group = self.job.as_ref().and_then(|job| job.group.as_ref());
        group.is_some_and(|group| group.machine.is_some())
    }

    /// The commit of its move to another host, as long as that has not answered that it holds the volume.
    pub(crate) fn given_up(&self) -> Option<&Committed> {
        self.job.as_ref()?.committed.as_ref().filter(|committed| !committed.taken)
    }

    /// Whether snapshots of the volume were taken, and lie over its backend.
    #[must_use]
    pub fn has_overlays(&self) -> bool {
        self.layers.iter().any(|layer| layer.overlay().is_some())
    }

    /// Whether the backend alone is not the volume, because a layer may hold bytes that it lacks.
    #[must_use]
    pub fn has_holding_layers(&self) -> bool {
        self.layers.iter().any(LayerDocument::may_hold)
    }
}

/// An identity that nothing else has.
pub(crate) fn random_uuid(env: &dyn Env) -> uuid::Uuid {
    uuid::Builder::from_random_bytes(env::random_id(env)).into_uuid()
}

/// Takes the redirection to a surrogate, or the cache, out of `layers`: there is one of both at most.
fn take_redirect(layers: &mut Vec<LayerDocument>) -> Option<LayerDocument> {
    let index = layers.iter().position(LayerDocument::is_of_host)?;
    Some(layers.remove(index))
}

/// Puts `new` in the places of the layers with the same identities, and gives those back.
fn replace_layers(layers: &mut [LayerDocument], new: &[LayerDocument]) -> Vec<LayerDocument> {
    let same = layers.iter_mut().filter_map(|layer| Some((new.iter().find(|new| new.id == layer.id)?, layer)));
    same.map(|(new, layer)| std::mem::replace(layer, new.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::location::JobTarget;

    /// A document as the first version of the daemon wrote it.
    const OLD: &str = r#"{"version":1,"name":"web1","epoch":7,"backend":"file:/vm/web1.img,cache=page",
        "export":"nbd://127.0.0.1:10809/web1","job":{"id":3,"uuid":"00000000-0000-0000-0000-000000000003",
        "request":{"to":"file:/new/web1.img"},"requester":"uid 0, process 1",
        "record":{"phase":"copying","options":OPTIONS,"sessions":1,"started_unix_ms":5},
        "target":{"spec":"file:/new/web1.img","origin":"created","reads_zero":true,
        "identity":{"device":1,"inode":2,"born_ns":null}},"overlays":[],"committed":null}}"#;

    fn old() -> VolumeDocument {
        let options = serde_json::to_string(&migrate::MoveOptions::default()).expect("plain data");
        serde_json::from_str(&OLD.replace("OPTIONS", &options)).expect("a document of today is read")
    }

    #[test]
    fn a_document_from_before_there_were_hosts_is_read_and_written_as_it_was() {
        let document = old().with_version();
        assert_eq!(document.version, DOCUMENT_VERSION);
        let written = serde_json::to_value(&document).expect("plain data");
        assert_eq!(written["backend"], "file:/vm/web1.img,cache=page");
        assert_eq!(written["job"]["target"]["spec"], "file:/new/web1.img");
        assert_eq!(written["job"]["target"]["identity"]["inode"], 2);
    }

    #[test]
    fn a_commit_that_is_taken_back_leaves_everything_as_it_was() {
        let mut before = old();
        before.size_limit = Some(1 << 20);
        before.job.as_mut().expect("a job").record.phase = Phase::Reverting;
        let mut document = before.clone();
        document.take_back();
        assert_eq!(document, before, "nothing was stored: nothing is taken back");
        document.commit();
        assert_eq!((document.epoch, document.size_limit), (8, None));
        document.take_back();
        document.job.as_mut().expect("a job").record.phase = Phase::Reverting;
        assert_eq!(document, before);
    }

    #[test]
    fn a_loss_is_of_the_place_that_may_lack_something() {
        let mut document = old();
        let (source, target) = (document.backend.clone(), document.job.as_ref().expect("a job").target.location());
        document.note_loss_at(&target, true);
        assert!(!document.has_lost, "a target is no volume's before the commit");
        document.note_loss_at(&source, true);
        assert!(document.has_lost_at(&source) && !document.has_lost_at(&target));
        document.commit();
        assert!(document.has_lost_at(&source) && !document.has_lost_at(&target) && !document.has_lost);
        let text = serde_json::to_string(&document).expect("plain data");
        assert_eq!(serde_json::from_str::<VolumeDocument>(&text).expect("readable"), document);
        document.take_back();
        assert!(document.has_lost && document.has_lost_at(&source));
        document.note_loss_at(&source, false);
        assert!(!document.has_lost_at(&source));
    }

    #[test]
    fn a_document_that_names_another_host_is_one_that_older_programs_refuse() {
        let mut document = old();
        let remote = crate::location::RemoteVolume {
            host: "host2".to_owned(),
            volume: "web1".to_owned(),
            job: uuid::Uuid::nil(),
            size: 4096,
            request_alignment: 512,
            layers: None,
            shared: false,
        };
        document.job.as_mut().expect("a job").target = JobTarget::Remote(remote);
        assert_eq!(document.clone().with_version().version, DOCUMENT_VERSION_PLACES);
        document.job.as_mut().expect("a job").asked = true;
        assert_eq!(document.clone().with_version().version, DOCUMENT_VERSION_ARBITER);
        let mut after = document;
        after.commit();
        assert_eq!((after.epoch, after.backend.to_string()), (8, "host2:web1".to_owned()));
        after.job = None;
        assert_eq!(after.clone().with_version().version, DOCUMENT_VERSION_PLACES);
        let text = serde_json::to_string(&after).expect("plain data");
        assert_eq!(serde_json::from_str::<VolumeDocument>(&text).expect("readable"), after);
    }
}
