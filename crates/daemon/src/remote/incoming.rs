//! Volumes that other hosts move here: made, filled, prepared, taken, or removed again.

use std::sync::Arc;

use api::v1::{Error, ErrorCode};
use block::{Bytes, Device, ErrorKind, Geometry, Slot};
use migrate::stream::{SessionRequest, VolumeStatus};

use super::fenced_lane::FencedLane;
use super::opened::require_origin_admitted;
use super::session_authorizer::ASKING_EPOCH;
use crate::audit::Peer;
use vm::QemuProcess;

use crate::clients::{MachineClient, SocketOwner};
use crate::daemon::Daemon;
use crate::document::{IncomingDocument, IncomingStage, VolumeDocument, random_uuid};
use crate::handed_over::handed_over;
use crate::location::{JobTarget, Location};
use crate::open_backend::{BackendOpenOptions, OpenBackend};
use crate::problem::{Result, invalid, of_backend, of_target};
use crate::stack::{ArrivingCache, remove_layer_files};
use crate::volume::Volume;

/// What is held of a volume that another host fills.
pub(crate) struct Incoming {
    pub(crate) open_backend: OpenBackend,
    /// What is filled: the backend and the files of layers as one device.
    ground: Device,
    /// The way of the session that fills it.
    fenced_lane: Option<FencedLane>,
}

impl Incoming {
    /// # Errors
    /// The files of the layers make no device with the backend.
    pub(crate) fn new(open_backend: OpenBackend) -> block::Result<Self> {
        let ground = open_backend.ground()?;
        Ok(Self { open_backend, ground, fenced_lane: None })
    }

    /// What the volume takes.
    pub(crate) fn geometry(&self) -> Geometry {
        self.ground.geometry()
    }
}

impl Daemon {
    /// Whether [`open_incoming`](Self::open_incoming) would find on record what it needs. Changes nothing, and waits for nobody.
    pub(super) fn may_open_incoming(&self, host: &str, request: &SessionRequest) -> Result<()> {
        match self.volume(&request.volume) {
            Ok(volume) => may_fill(&volume.name, &incoming_of(&volume, host, request)?, request),
            Err(error) if error.code == ErrorCode::NotFound => self.may_arrive(host, request).map(drop),
            Err(error) => Err(error),
        }
    }

    /// The same of [`open_forward`](Self::open_forward).
    pub(super) fn may_open_forward(&self, host: &str, request: &SessionRequest) -> Result<()> {
        let volume = self.volume(&request.volume)?;
        may_take(&volume.name, &incoming_of(&volume, host, request)?, request.epoch)
    }

    /// A way for a session of `host` that fills a volume, and whether there is anything of it from before. What an earlier
    /// session has under way is over then.
    pub(super) async fn open_incoming(
        self: &Arc<Self>,
        host: &str,
        request: &SessionRequest,
    ) -> Result<(Device, bool)> {
        let (volume, is_new) = match self.volume(&request.volume) {
            Ok(volume) => (volume, false),
            Err(error) if error.code == ErrorCode::NotFound => (self.make_incoming(host, request).await?, true),
            Err(error) => return Err(error),
        };
        let _operation = volume.operation.lock().await;
        let incoming = incoming_of(&volume, host, request)?;
        may_fill(&volume.name, &incoming, request)?;
        if let IncomingStage::Prepared { .. } = incoming.stage {
            // Whoever fills it holds it: what was prepared is not what it will be.
            set_stage(&volume, IncomingStage::Filling).await?;
        }
        close_lane(&volume).await;
        let is_shared = incoming.target.is_none();
        let mut incoming = volume.incoming.lock();
        let Some(incoming) = incoming.as_mut() else {
            volume.require_up()?;
            return Err(invalid("the volume is not to be filled", "look at it on its host"));
        };
        if let Some(backend) = incoming.open_backend.backend() {
            // Whoever fills it has given up what was not flushed, and writes it again.
            backend.forget_failed_sync();
        }
        // Nothing is copied of what both hosts reach.
        let ground = if is_shared { handed_over(incoming.ground.geometry()) } else { incoming.ground.clone() };
        let (fenced_lane, device) = FencedLane::open(ground);
        incoming.fenced_lane = Some(fenced_lane);
        Ok((device, is_new))
    }

    /// Locks what a volume that arrives is written to, or opens what stays where the other host still writes it: to be read,
    /// without locks.
    pub(crate) async fn open_backend_of_incoming(self: &Arc<Self>, volume: &Volume) -> Result<()> {
        let document = volume.document();
        let (lock_wait, sector) = (self.config.lock_wait(), document.sector_promised());
        let open_options = BackendOpenOptions { lock_wait, sector, ..BackendOpenOptions::default() };
        let arrival = document.incoming.as_ref();
        let open_backend = match arrival.map(|incoming| (incoming, incoming.target.clone())) {
            Some((incoming, Some(target))) => {
                let target = JobTarget::Local(target);
                self.open_prepared(volume, &target, &incoming.layers, &open_options.for_target()).await
            }
            Some((incoming, None)) => {
                let size_advertised = document.room_to_grow().map(Bytes);
                let options = BackendOpenOptions { read_only: true, unlocked: true, size_advertised, ..open_options };
                let opened = self.open_at_other_host(volume, &document.backend, &options).await;
                opened.and_then(|open_backend| has_size(open_backend, incoming))
            }
            None => self.open_backend(volume, &document.backend, &open_options.for_target()).await,
        };
        let incoming = open_backend.and_then(Incoming::new).map_err(|error| of_backend(&error, "the backend"))?;
        *volume.incoming.lock() = Some(incoming);
        Ok(())
    }

    /// Brings up a volume that is held here for a guest of the host that has its layers.
    pub(crate) async fn reopen_incoming(self: &Arc<Self>, volume: &Volume) -> Result<()> {
        self.open_backend_of_incoming(volume).await?;
        let Some(Incoming { open_backend, ground, .. }) = volume.incoming.lock().take() else { return Ok(()) };
        drop(volume.bring_up_bare(open_backend, ground, self.pool.clone()));
        Ok(())
    }

    /// Is durably ready to hold the volume under `epoch`.
    pub(super) async fn prepare_incoming(&self, host: &str, request: &SessionRequest, epoch: u64) -> Result<()> {
        let volume = self.volume(&request.volume)?;
        let _operation = volume.operation.lock().await;
        let incoming = incoming_of(&volume, host, request)?;
        match incoming.stage {
            IncomingStage::Prepared { epoch: prepared } if prepared == epoch => Ok(()),
            IncomingStage::Filling | IncomingStage::Prepared { .. } if incoming.undone => {
                Err(fenced(format!("the move of {} was undone", volume.name)))
            }
            IncomingStage::Filling | IncomingStage::Prepared { .. } if epoch > incoming.epoch => {
                if let Some(target) = &incoming.target {
                    self.backends.check(target).map_err(|error| of_target(&error))?;
                }
                set_stage(&volume, IncomingStage::Prepared { epoch }).await
            }
            _ => Err(fenced(format!("{} cannot be prepared for epoch {epoch} here", volume.name))),
        }
    }

    /// Holds the volume under `epoch`, durably, and serves it.
    pub(super) async fn take_incoming(
        self: &Arc<Self>,
        volume: &Arc<Volume>,
        incoming: &IncomingDocument,
        epoch: u64,
    ) -> Result<()> {
        may_take(&volume.name, incoming, epoch)?;
        if let IncomingStage::Held { .. } = incoming.stage {
            return Ok(());
        }
        // Nothing of the copy lands from here on.
        close_lane(volume).await;
        if incoming.target.is_none() {
            self.open_shared(volume, incoming).await?;
        }
        let device = volume.incoming.lock().as_ref().map(|incoming| incoming.ground.clone());
        let Some(device) = device else { return volume.require_up().map(drop) };
        // The guest does not end with this host's power: what it was answered must be there when that comes back.
        device.flush().await.map_err(|error| of_backend(&error, "the volume's backend"))?;
        let id = random_uuid(&*self.env);
        // What both hosts reach may have had layers at the other one.
        let marked = volume.incoming.lock().as_ref().and_then(|incoming| incoming.open_backend.marked_layers());
        // Once the volume is held its VM may run, and its record says no more how the cache comes.
        let asked = self.shared_place_of(&incoming.host, &volume.name).and_then(|(_, _, cache)| cache);
        let deciding = self.arrivals_decided.lock().await;
        self.require_wanted(volume, incoming)?;
        let stored = volume.journal.update(|document| {
            document.epoch = epoch;
            document.layers_generation = document.layers_generation.max(marked.unwrap_or_default());
            document.take_layers_of_machine(id);
            if let Some(incoming) = &mut document.incoming {
                document.came_with.clone_from(&incoming.machine);
                // Its guest comes through the other host. Whoever came to an export here would write beside that.
                (incoming.stage, incoming.exclusive) = (IncomingStage::Held { epoch }, true);
                incoming.undone = false;
            }
        });
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        drop(deciding);
        // An older copy of this record must not remove the volume with what did not arrive.
        if let Some(target) = &incoming.target
            && let Err(error) = self.backends.mark(target, epoch, &volume.name)
        {
            tracing::warn!(volume = volume.name, %error, "the target could not be marked as the volume's");
        }
        let Some(arrived) = volume.incoming.lock().take() else { return Ok(()) };
        let served = self.serve_held(volume, arrived, asked).await;
        served.inspect_err(|error| volume.set_problem(error.clone()))?;
        let what = serde_json::json!({ "host": incoming.host, "epoch": epoch });
        self.note(&Peer::daemon(), ("arrival.take", &volume.name), what, None);
        Ok(())
    }

    /// All volumes that come by the same move as `incoming`, which is one ruling of the arbiter.
    fn come_together(&self, incoming: &IncomingDocument) -> Vec<Arc<Volume>> {
        let mut volumes = self.volumes();
        volumes.retain(|volume| {
            let document = volume.document();
            let found = document.incoming.as_ref();
            found.is_some_and(|found| (&found.host, found.job) == (&incoming.host, incoming.job))
        });
        volumes
    }

    /// Refuses a volume that is about to be taken if its move was undone before any volume of that was held.
    fn require_wanted(&self, volume: &Volume, incoming: &IncomingDocument) -> Result<()> {
        let documents: Vec<_> = self.come_together(incoming).iter().map(|volume| volume.document()).collect();
        let arrivals = || documents.iter().filter_map(|document| document.incoming.as_ref());
        if arrivals().any(|other| other.undone) && !arrivals().any(IncomingDocument::is_held) {
            return Err(fenced(format!("the move of {} was undone", volume.name)));
        }
        Ok(())
    }

    /// Removes what is here of a volume that comes, as a person has decided, unless another one is held that comes by the same move: that
    /// proves the commit of all.
    ///
    /// # Errors
    /// One is held.
    pub(super) async fn drop_unless_committed(&self, volume: &Arc<Volume>, incoming: &IncomingDocument) -> Result<()> {
        let _deciding = self.arrivals_decided.lock().await;
        let is_held =
            |volume: &&Arc<Volume>| volume.document().incoming.as_ref().is_some_and(IncomingDocument::is_held);
        if let Some(held) = self.come_together(incoming).iter().find(is_held) {
            let message = format!("this host holds {}, which was committed with {}", held.name, volume.name);
            return Err(fenced(message));
        }
        self.drop_incoming(volume).await
    }

    /// Has it on record that none of the volumes which come by the same move as `incoming` is taken any more. The first record that
    /// says so decides on all of them.
    ///
    /// # Errors
    /// One of them is held here.
    pub(super) async fn undo_arrivals(&self, incoming: &IncomingDocument) -> Result<()> {
        let _deciding = self.arrivals_decided.lock().await;
        let volumes = self.come_together(incoming);
        let is_held =
            |volume: &&Arc<Volume>| volume.document().incoming.as_ref().is_some_and(IncomingDocument::is_held);
        if let Some(held) = volumes.iter().find(is_held) {
            self.note_held_beside(&incoming.host, &held.name);
            return Err(fenced(format!("this host holds {} under epoch {}", held.name, held.document().epoch)));
        }
        for volume in volumes {
            let stored = volume.journal.update(|document| {
                document.incoming.iter_mut().for_each(|incoming| incoming.undone = true);
            });
            stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        }
        Ok(())
    }

    /// Serves what is held here now: to the guest of the other host as it lies here, to a guest that has come along through its
    /// layers. A cache was `asked` for that comes, or begins empty.
    async fn serve_held(&self, volume: &Arc<Volume>, arrived: Incoming, asked: Option<ArrivingCache>) -> Result<()> {
        let Incoming { open_backend, ground, .. } = arrived;
        let document = volume.document();
        if document.incoming.as_ref().is_none_or(|incoming| incoming.machine.is_none()) {
            drop(volume.bring_up_bare(open_backend, ground, self.pool.clone()));
            return Ok(());
        }
        let options = volume.open_options(self.config.lock_wait());
        let (context, base) = (self.overlay_context(), open_backend.device.clone());
        let cache = self.arrived_cache(volume).await;
        let has_cache = cache.is_some();
        let up = volume.bring_up_with(open_backend, cache, self.pool.clone(), &context, &options);
        let (slot, _) = Box::pin(up).await?;
        if has_cache {
            // Before the guest comes to it.
            self.finish_cache_arrival(volume, base);
        } else if let Some(asked) = asked {
            self.begin_empty_cache(volume, &asked);
        }
        if let Some(guest) = volume.with_stack(|stack| stack.guest()) {
            // What its machine's QEMU was connected to stands in the way no more.
            slot.quiesce().await.swap(guest);
        }
        Ok(())
    }

    /// The other host has let go of what both reach: opens and locks it here.
    async fn open_shared(self: &Arc<Self>, volume: &Volume, incoming: &IncomingDocument) -> Result<()> {
        if volume.incoming.lock().is_none() {
            return Ok(());
        }
        let size_advertised = volume.document().room_to_grow().map(Bytes);
        let lock_wait = self.config.lock_wait();
        let options = BackendOpenOptions { lock_wait, size_advertised, ..BackendOpenOptions::default() };
        let place = volume.document().backend.clone();
        let opened = self.open_backend(volume, &place, &options.for_target()).await;
        let opened = opened.and_then(|open_backend| has_size(open_backend, incoming)).and_then(Incoming::new);
        let opened = opened.map_err(|error| of_backend(&error, "the storage that both hosts reach"))?;
        self.forget_cached(&place).await?;
        *volume.incoming.lock() = Some(opened);
        Ok(())
    }

    /// The guest of the host that a volume came from uses it no more: it is this host's like any other.
    pub(super) async fn release_incoming(&self, volume: &Arc<Volume>) -> Result<()> {
        close_forward(volume).await;
        let id = random_uuid(&*self.env);
        // To its machine, since before it was held here, with its layers; or to others, since a person has opened it.
        let is_served = |incoming: &IncomingDocument| incoming.machine.is_some() || !incoming.exclusive;
        let is_served = volume.document().incoming.as_ref().is_some_and(is_served);
        let stored = volume.journal.update(|document| document.let_go(id));
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        self.note(&Peer::daemon(), ("arrival.release", &volume.name), serde_json::json!({}), None);
        if is_served {
            return Ok(());
        }
        if let Err(error) = self.build_layers(volume).await {
            volume.set_problem(error.clone());
            return Err(error);
        }
        self.open_export(volume).await
    }

    /// Lets the QEMU of `machine`, which `host` moves here with its disk `name`, come to that before this host holds it. The
    /// processes of `owner` may, or `client` of them alone.
    pub(crate) async fn serve_arriving(
        &self,
        (host, name): (&str, &str),
        machine: &str,
        (owner, client): (Option<SocketOwner>, Option<MachineClient>),
    ) -> Result<()> {
        let volume = self.volume(name)?;
        let _operation = volume.operation.lock().await;
        let incoming = volume.document().incoming.clone();
        let Some(incoming) = incoming.filter(|incoming| incoming.host == host) else {
            return Err(fenced(format!("{name} does not come from {host} with a machine")));
        };
        if incoming.machine.is_some() {
            return if incoming.machine.as_deref() == Some(machine) {
                Ok(())
            } else {
                Err(fenced(format!("{name} comes with another machine")))
            };
        }
        let stored = volume.journal.update(|document| {
            (document.socket_owner, document.client) = (owner, client);
            if let Some(incoming) = &mut document.incoming {
                incoming.machine = Some(machine.to_owned());
            }
        });
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        self.offer_arriving(&volume).await
    }

    /// The QEMU of a volume's machine was started as `process`: it is let in, and nobody else.
    pub(crate) async fn admit_machine(&self, name: &str, process: &QemuProcess) -> Result<()> {
        let volume = self.volume(name)?;
        let client = MachineClient::Started(process.clone());
        let stored = volume.journal.update(|document| document.client = document.client.take().map(|_| client)).await;
        stored.map_err(|error| of_backend(&error, "the volume's journal"))
    }

    /// The same, of what is on record.
    pub(crate) async fn offer_arriving(&self, volume: &Volume) -> Result<()> {
        // Without the bytes of its layers: nobody runs on what is read before they are over it.
        let copy = volume.incoming.lock().as_ref().map(|incoming| incoming.open_backend.device.clone());
        let Some(copy) = copy else { return volume.require_up().map(drop) };
        let export = volume.begin_arriving(copy, self.pool.clone());
        self.network.offer(&volume.uri()?, export, volume.clients()).await
    }

    /// Puts the layers of a volume over its bytes, which its host has let go. Nobody uses it.
    pub(super) async fn build_layers(&self, volume: &Arc<Volume>) -> Result<()> {
        if volume.document().layers.is_empty() {
            return Ok(());
        }
        let Some(open_backend) = volume.take_down().await else { return volume.require_up().map(drop) };
        let open_options = volume.open_options(self.config.lock_wait());
        volume.bring_up(open_backend, self.pool.clone(), &self.overlay_context(), &open_options).await.map(drop)
    }

    pub(super) async fn open_export(&self, volume: &Volume) -> Result<()> {
        match volume.export() {
            Some(export) => {
                // What was served there before is not what is there now, or is the same.
                let uri = volume.uri()?;
                self.network.withdraw(&uri).await;
                self.network.offer(&uri, export, volume.clients()).await
            }
            None => Ok(()),
        }
    }

    /// The file of a volume that this host has held under an epoch of which its record does not know: that comes from a backup.
    pub(crate) fn taken_target(&self, incoming: &IncomingDocument) -> Option<String> {
        let target = incoming.target.as_ref().filter(|_| !incoming.is_held())?;
        self.backends.is_taken(target).then(|| target.spec.path().display().to_string())
    }

    /// Forgets a volume that does not arrive, and removes what there is of it. A file that a later record made the volume stays.
    pub(crate) async fn drop_incoming(&self, volume: &Arc<Volume>) -> Result<()> {
        let Some(incoming) = volume.document().incoming.clone() else { return Ok(()) };
        if let IncomingStage::Held { epoch } = incoming.stage {
            let message = format!("this host holds {} under epoch {epoch}", volume.name);
            return Err(fenced(message));
        }
        close_lane(volume).await;
        volume.end_arriving().await;
        self.drop_arriving_cache(volume, &incoming.layers).await;
        drop(volume.incoming.lock().take());
        if let Some(target) = &incoming.target {
            self.backends.discard(target, &*self.env).await.map_err(|error| of_target(&error))?;
            remove_layer_files(&*self.backends, &incoming.layers, target.spec.path());
        }
        self.remove_volume(volume).await?;
        let what = serde_json::json!({ "host": incoming.host, "job": incoming.job });
        self.note(&Peer::daemon(), ("arrival.drop", &volume.name), what, None);
        Ok(())
    }

    /// Where the volume of a request stands here.
    ///
    /// # Errors
    /// There is one of that name, and its journal cannot be read: nobody knows.
    pub(super) fn volume_status(&self, request: &SessionRequest) -> Result<VolumeStatus> {
        let Some(volume) = self.volume_if_any(&request.volume)? else {
            // Of a move that was undone nothing was given up, also when the volume was detached since.
            let was_kept = self.has_aborted_job(request.job);
            return Ok(if was_kept { VolumeStatus::Held { epoch: ASKING_EPOCH } } else { VolumeStatus::Without });
        };
        let document = volume.document();
        Ok(match (document.incoming.as_ref().map(|incoming| incoming.stage), &document.backend) {
            (Some(IncomingStage::Filling), _) => VolumeStatus::Filling,
            (Some(IncomingStage::Prepared { epoch }), _) => VolumeStatus::Prepared { epoch },
            // What was given up by another move than the one that is asked about is somebody else's.
            // One that is being given back is nobody else's any more.
            (_, Location::Remote(remote)) if remote.job == request.job => match self.has_aborted(remote) {
                true => VolumeStatus::Held { epoch: ASKING_EPOCH },
                false => VolumeStatus::Without,
            },
            // Not the epoch that it has by now: a move here has raised that.
            (Some(IncomingStage::Held { epoch }), _) => VolumeStatus::Held { epoch },
            _ => VolumeStatus::Held { epoch: document.epoch },
        })
    }

    /// A way for a session of `host` that uses a volume which this host holds, or takes by this.
    pub(super) async fn open_forward(self: &Arc<Self>, host: &str, request: &SessionRequest) -> Result<Device> {
        let volume = self.volume(&request.volume)?;
        let _operation = volume.operation.lock().await;
        require_origin_admitted(&volume, host, request)?;
        let incoming = incoming_of(&volume, host, request)?;
        self.take_incoming(&volume, &incoming, request.epoch).await?;
        self.close_to_others(&volume, &incoming_of(&volume, host, request)?).await?;
        close_forward(&volume).await;
        let slot = volume.require_up()?;
        let (fenced_lane, device) = FencedLane::open(forwarded(&volume, &slot, request));
        *volume.forward.lock() = Some(fenced_lane);
        Ok(device)
    }
}

/// What the host reaches that a volume came from.
fn forwarded(volume: &Volume, slot: &Slot, request: &SessionRequest) -> Device {
    let document = volume.document();
    if document.incoming.as_ref().is_some_and(|incoming| incoming.machine.is_some()) {
        // Its guest is here. What comes from there is nobody's: a QEMU that was let run again after the commit, or layers that
        // would write over the records of those here.
        return handed_over(Geometry { size: request.size, ..slot.device().geometry() });
    }
    volume.metered(slot)
}

/// Refuses storage that is not as large as the volume that is said to be there.
fn has_size(open_backend: OpenBackend, incoming: &IncomingDocument) -> block::Result<OpenBackend> {
    let size = open_backend.device.size();
    if size.get() == incoming.size {
        return Ok(open_backend);
    }
    let context = format!("{} has {size} here and {} there", open_backend.place, Bytes(incoming.size));
    Err(block::Error::new(ErrorKind::Invalid, context))
}

/// What is on record of a volume that `host` moves here by the job of `request`.
pub(super) fn incoming_of(volume: &Volume, host: &str, request: &SessionRequest) -> Result<IncomingDocument> {
    let document = volume.document();
    let Some(incoming) = &document.incoming else {
        return Err(Error::new(ErrorCode::AlreadyExists, format!("there is a volume {} already", volume.name))
            .with_hint("move it under another name: --to HOST:VOLUME"));
    };
    if incoming.host == host && incoming.job == request.job {
        return Ok(incoming.clone());
    }
    let (code, what) = match incoming.stage {
        IncomingStage::Held { .. } => (ErrorCode::AlreadyExists, "has come"),
        IncomingStage::Filling | IncomingStage::Prepared { .. } => (ErrorCode::Busy, "is coming"),
    };
    let message =
        format!("a volume {} {what} from {} already, as {} there", volume.name, incoming.host, incoming.origin);
    Err(Error::new(code, message).with_hint("move it under another name: --to HOST:VOLUME"))
}

/// Whether what is on record of a volume lets a session fill it.
fn may_fill(name: &str, incoming: &IncomingDocument, request: &SessionRequest) -> Result<()> {
    match incoming.stage {
        IncomingStage::Held { epoch } => {
            Err(fenced(format!("this host holds {name} under epoch {epoch}: it is filled no more")))
        }
        _ if incoming.undone => Err(fenced(format!("the move of {name} was undone"))),
        _ if incoming.epoch != request.epoch => {
            Err(fenced(format!("{name} comes under epoch {}, not {}", incoming.epoch, request.epoch)))
        }
        _ if incoming.size != request.size.get() => {
            let message = format!("{name} has {} bytes here, not {}", incoming.size, request.size.get());
            Err(invalid(message, "cancel that move and begin another"))
        }
        IncomingStage::Prepared { .. } | IncomingStage::Filling => Ok(()),
    }
}

/// Whether it lets this host hold the volume under `epoch`, if it does not already.
fn may_take(name: &str, incoming: &IncomingDocument, epoch: u64) -> Result<()> {
    match incoming.stage {
        IncomingStage::Held { epoch: ready } | IncomingStage::Prepared { epoch: ready } if ready == epoch => Ok(()),
        _ => Err(fenced(format!("{name} was not prepared for epoch {epoch}"))),
    }
}

/// Lets nothing through any more of the session that fills the volume.
async fn close_lane(volume: &Volume) {
    let fenced_lane = volume.incoming.lock().as_mut().and_then(|incoming| incoming.fenced_lane.take());
    if let Some(fenced_lane) = fenced_lane {
        fenced_lane.close().await;
    }
}

/// Lets nothing through any more of the session by which another host's guest uses a volume.
pub(super) async fn close_forward(volume: &Volume) {
    let session = volume.forward.lock().take();
    if let Some(session) = session {
        session.close().await;
    }
}

async fn set_stage(volume: &Volume, stage: IncomingStage) -> Result<()> {
    let stored = volume.journal.update(|document| {
        if let Some(incoming) = &mut document.incoming {
            incoming.stage = stage;
        }
    });
    stored.await.map_err(|error| of_backend(&error, "the volume's journal"))
}

/// Somebody else holds the volume, or under another epoch.
pub(super) fn fenced(message: String) -> Error {
    Error::new(ErrorCode::WrongState, message).with_hint("`transhume resolve` says what both hosts have on record")
}

/// The bytes that a document's volume has, while it is not up.
pub(crate) fn size_on_record(document: &VolumeDocument) -> Bytes {
    match (&document.backend, &document.incoming) {
        (Location::Remote(remote), _) => Bytes(remote.size),
        (Location::Foreign(export), _) => Bytes(export.size),
        (Location::Local(_), Some(incoming)) => Bytes(incoming.size),
        (Location::Local(_), None) => Bytes::ZERO,
    }
}
