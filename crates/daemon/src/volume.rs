//! A volume while the daemon runs: its journal, its stack, and its export.
//!
//! ```text
//!  connection ─▶ Meter ─▶ lane ─┐
//!  connection ─▶ Meter ─▶ lane ─┴▶ Slot ─▶ [mirror, while a move runs] ─▶ FileBackend
//! ```
//!
//! With layers the stack is deeper: see [`stack`](crate::stack).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use api::v1::{self, Error, ErrorCode, VolumeState};
use block::{BufferPool, Bytes, Device, Quiesced, Slot};
use env::{Env, EnvRef};
use filters::MeterState;
use nbd::NbdUri;
use nbd::server::Export;
use parking_lot::Mutex;
use tokio::sync::MutexGuard;

use crate::clients::{Clients, MachineGate};
use crate::document::{AdoptionDirection, IncomingDocument, IncomingStage, VolumeDocument};
use crate::gauge::Gauge;
use crate::handed_over::handed_over;
use crate::jobs::{JobHandle, Planned};
use crate::journal::VolumeJournal;
use crate::listeners::certificates_of;
use crate::loss_record::LossRecord;
use crate::open_backend::{BackendOpenOptions, MovedRule, OpenBackend, QemuRule};
use crate::overlays::{OverlayContext, SharedSnapshots};
use crate::problem::{Result, of_backend};
use crate::reject_all::reject_all;
use crate::remote::{ArrivingExport, FencedLane, Incoming, RemoteVolumeDevice, size_on_record};
use crate::stack::{Stack, StackedCache, VolumeArrival};

/// How long a request waits for what is under way with its volume. After that nobody may be there any more who wants it.
const OPERATION_LIMIT: Duration = Duration::from_secs(5);

/// A volume.
pub(crate) struct Volume {
    pub(crate) name: String,
    pub(crate) journal: Arc<VolumeJournal>,
    /// What its guest is to be told of an earlier process.
    loss_record: Arc<LossRecord>,
    pub(crate) meter: MeterState,
    pub(crate) gauge: Gauge,
    /// One thing that changes the volume at a time: a move being started, a detach, an adoption. The daemon's own tasks wait
    /// for it as long as it takes; a request begins with `begin_operation`.
    pub(crate) operation: tokio::sync::Mutex<()>,
    live: Mutex<Option<Live>>,
    job: Mutex<Option<Arc<JobHandle>>>,
    problem: Mutex<Option<Error>>,
    /// A start is bringing it back.
    is_coming_back: AtomicBool,
    /// The overlays of a snapshot move, while it runs.
    snapshots: Mutex<Option<SharedSnapshots>>,
    /// What another host fills, before this one holds the volume.
    pub(crate) incoming: Mutex<Option<Incoming>>,
    /// What the QEMU of a machine is connected to whose disk it becomes, before this host holds the volume.
    pub(crate) arriving: Mutex<Option<ArrivingExport>>,
    /// Its cache that comes from another host, or has since the daemon was started.
    pub(crate) cache_arrival: Mutex<Option<VolumeArrival>>,
    /// The way of another host's guest into it.
    pub(crate) forward: Mutex<Option<FencedLane>>,
    /// What the last plan has said, until a move begins.
    pub(crate) planned: Mutex<Option<Planned>>,
}

/// What a volume has while it is up.
struct Live {
    slot: Slot,
    stack: Stack,
    export: Arc<Export>,
}

impl Volume {
    /// A volume that is not up yet.
    pub(crate) fn new(name: &str, journal: VolumeJournal, env: EnvRef) -> Self {
        let (journal, meter) = (Arc::new(journal), MeterState::new(Arc::clone(&env)));
        Self {
            name: name.to_owned(),
            loss_record: LossRecord::new(&journal, env),
            journal,
            gauge: Gauge::new(meter.clone()),
            meter,
            operation: tokio::sync::Mutex::default(),
            live: Mutex::new(None),
            job: Mutex::new(None),
            problem: Mutex::new(None),
            is_coming_back: AtomicBool::new(false),
            snapshots: Mutex::new(None),
            incoming: Mutex::new(None),
            arriving: Mutex::new(None),
            cache_arrival: Mutex::new(None),
            forward: Mutex::new(None),
            planned: Mutex::new(None),
        }
    }

    /// Who may connect to its export, as its journal says at the moment when somebody does.
    pub(crate) fn clients(&self) -> Clients {
        let document = self.document();
        let journal = Arc::clone(&self.journal);
        let machine = document.client.as_ref().map(|_| MachineGate::new(move || journal.document().client.clone()));
        Clients { machine, ..document.clients() }
    }

    /// No machine's QEMU is the only one that may connect to it any more.
    pub(crate) async fn free_of_machine(&self) -> Result<()> {
        if self.document().client.is_none() {
            return Ok(());
        }
        let stored = self.journal.update(|document| document.client = None).await;
        stored.map_err(|error| of_backend(&error, "the volume's journal"))
    }

    /// What its journal says.
    pub(crate) fn document(&self) -> Arc<VolumeDocument> {
        self.journal.document()
    }

    /// Where it is served.
    pub(crate) fn uri(&self) -> Result<NbdUri> {
        let document = self.document();
        parse_export(&document.export)
    }

    /// How its backends are opened.
    pub(crate) fn open_options(&self, lock_wait: Duration) -> BackendOpenOptions {
        let document = self.document();
        let size_advertised = document.room_to_grow().map(Bytes);
        let qemu = match document.adoption.as_ref().map(|adoption| adoption.direction) {
            // A QEMU that goes through us has no locks; one that has them was started on the image itself.
            None | Some(AdoptionDirection::Adopted) => QemuRule::Exclude,
            Some(AdoptionDirection::Adopting | AdoptionDirection::Releasing) => QemuRule::Later,
        };
        // While it moves a volume keeps its size, whatever becomes of the file below it.
        let size_limit = document.job.as_ref().and_then(|job| job.size).or(document.size_limit).map(Bytes);
        BackendOpenOptions {
            read_only: document.read_only,
            size_advertised,
            size_limit,
            lock_wait,
            qemu,
            unlocked: false,
            sector: document.sector_promised(),
            moved: MovedRule::Since {
                volume: Arc::from(&*self.name),
                accepted: document.accepted_tombstone,
                epoch: document.epoch,
                layers: document.layers_generation,
            },
        }
    }

    /// If its record says that `open_backend` may lack what it had answered, the next flush is to fail.
    pub(crate) fn recall_loss(&self, open_backend: &OpenBackend) {
        let place = &open_backend.place;
        if let Some(export) = open_backend.export().filter(|_| self.document().has_lost_at(place)) {
            self.loss_record.recall(place, export);
        }
    }

    /// A flush that no guest has asked for has told of a loss: the guest's next one fails. A file does that by itself.
    pub(crate) fn fail_next_flush(&self) {
        self.with_backend(|open_backend| open_backend.export().iter().for_each(|export| export.recall_loss()));
    }

    /// Builds the stack that is on record over `open_backend`, with the overlays of a snapshot move that was
    /// interrupted. Gives its slot and its export, which is not offered to anybody yet.
    ///
    /// # Errors
    /// A layer or an overlay without which `open_backend` is not the volume cannot be opened.
    pub(crate) async fn bring_up(
        &self,
        open_backend: OpenBackend,
        pool: BufferPool,
        overlay_context: &OverlayContext,
        open_options: &BackendOpenOptions,
    ) -> Result<(Slot, Arc<Export>)> {
        self.bring_up_with(open_backend, None, pool, overlay_context, open_options).await
    }

    /// The same with the cache that has `arrived` from another host.
    pub(crate) async fn bring_up_with(
        &self,
        open_backend: OpenBackend,
        arrived: Option<StackedCache>,
        pool: BufferPool,
        overlay_context: &OverlayContext,
        open_options: &BackendOpenOptions,
    ) -> Result<(Slot, Arc<Export>)> {
        let document = self.document();
        let stack =
            Stack::build(open_backend, &document.layers, arrived, &self.journal, overlay_context, open_options).await?;
        let guest = stack.guest();
        let overlays = crate::overlays::over(self, &guest, overlay_context, open_options).await?;
        let (snapshots, top) = overlays.unzip();
        self.set_snapshots(snapshots);
        Ok(self.serve(stack, top.unwrap_or(guest), pool))
    }

    /// The same for a volume without layers of its own, which reads as `top`: its backend, or that with the bytes of the layers
    /// that the host has from which it came.
    pub(crate) fn bring_up_bare(
        &self,
        open_backend: OpenBackend,
        top: Device,
        pool: BufferPool,
    ) -> (Slot, Arc<Export>) {
        self.serve(Stack::bare(open_backend), top, pool)
    }

    fn serve(&self, mut stack: Stack, top: Device, pool: BufferPool) -> (Slot, Arc<Export>) {
        let document = self.document();
        stack.backend().serve_guest();
        self.apply_limits(&document.layers);
        let arriving = self.arriving.lock().take();
        if let Some(arriving) = arriving {
            // Its guest's QEMU is connected already.
            let (slot, export) = arriving.open(top);
            *self.live.lock() = Some(Live { slot: slot.clone(), stack, export: Arc::clone(&export) });
            *self.problem.lock() = None;
            return (slot, export);
        }
        let slot = Slot::new(top);
        let (lanes, meter, name) = (slot.clone(), self.meter.clone(), self.name.clone());
        let losses = Arc::clone(&self.loss_record);
        let open = move || metered(&name, &meter, &lanes);
        let size = document.room_to_grow().map(Bytes);
        let export_name = parse_export(&document.export).map_or_else(|_| self.name.clone(), |uri| uri.export);
        let export = Export::new(export_name, pool, open)
            .with_description(format!("volume {}", self.name))
            .with_read_only(document.read_only)
            .with_size_advertised(size)
            .with_failed_flushes(move || losses.failure_sent());
        let export = Arc::new(export);
        *self.live.lock() = Some(Live { slot: slot.clone(), stack, export: Arc::clone(&export) });
        *self.problem.lock() = None;
        (slot, export)
    }

    /// An export over `copy`, which is being filled, for the QEMU of the machine that comes with the volume.
    pub(crate) fn begin_arriving(&self, copy: Device, pool: BufferPool) -> Arc<Export> {
        let (meter, name) = (self.meter.clone(), self.name.clone());
        let open = move |slot: &Slot| metered(&name, &meter, slot);
        let export = parse_export(&self.document().export).map_or_else(|_| self.name.clone(), |uri| uri.export);
        let arriving = ArrivingExport::new(&self.name, &export, copy, pool, open);
        let export = arriving.export();
        *self.arriving.lock() = Some(arriving);
        export
    }

    /// The volume does not come: what waits for it fails, and its clients let go of the copy.
    pub(crate) async fn end_arriving(&self) {
        let arriving = self.arriving.lock().take();
        if let Some(arriving) = arriving {
            arriving.close().await;
        }
    }

    /// A way into the stack over `slot` whose requests are measured as clients' are.
    pub(crate) fn metered(&self, slot: &Slot) -> Device {
        metered(&self.name, &self.meter, slot)
    }

    /// Takes the stack down: requests that still come are refused, and the backend is let go once those in flight are
    /// done.
    pub(crate) async fn bring_down(&self) {
        let Some(slot) = self.slot() else { return };
        let quiesced = slot.quiesce().await;
        let cache = self.with_stack(Stack::take_cache).flatten();
        self.bring_down_held(&slot, quiesced);
        if let Some(cache) = cache {
            cache.close().await;
        }
    }

    /// The same, with its clients held already.
    pub(crate) fn bring_down_held(&self, slot: &Slot, quiesced: Quiesced) {
        // A client that came too late is refused.
        let geometry = slot.device().geometry();
        quiesced.swap(reject_all("gone", geometry, block::ErrorKind::Disconnected, "the volume was detached"));
        *self.live.lock() = None;
    }

    /// Takes the stack down, and gives what held the volume, with the files of its layers.
    pub(crate) async fn take_down(&self) -> Option<OpenBackend> {
        let slot = self.slot()?;
        let quiesced = slot.quiesce().await;
        let live = self.live.lock().take()?;
        let geometry = slot.device().geometry();
        quiesced.swap(reject_all("gone", geometry, block::ErrorKind::Disconnected, "the volume is opened again"));
        drop(quiesced);
        let (open_backend, cache) = live.stack.into_backend();
        if let Some(cache) = cache {
            cache.close().await;
        }
        Some(open_backend)
    }

    /// The joint of its stack, while it is up.
    pub(crate) fn slot(&self) -> Option<Slot> {
        self.live.lock().as_ref().map(|live| live.slot.clone())
    }

    /// Does something with the backend that holds it, while it is up.
    pub(crate) fn with_backend<T>(&self, work: impl FnOnce(&mut OpenBackend) -> T) -> Option<T> {
        self.with_stack(|stack| work(stack.backend()))
    }

    /// Does something with its layers, while it is up.
    pub(crate) fn with_stack<T>(&self, work: impl FnOnce(&mut Stack) -> T) -> Option<T> {
        self.live.lock().as_mut().map(|live| work(&mut live.stack))
    }

    /// Puts `open_backend` in the place of the backend that held it, and gives that back.
    pub(crate) fn replace_backend(&self, open_backend: OpenBackend) -> Option<OpenBackend> {
        self.with_stack(|stack| stack.replace_backend(open_backend))
    }

    /// Closes what holds the volume, with its locks. The slot has another device by then.
    pub(crate) fn let_go_of_backend(&self) {
        if let Some(cache) = self.with_stack(|stack| stack.cache().map(StackedCache::filter)).flatten() {
            // It holds the backend, too. What it has may still be read.
            let geometry = cache.base_geometry();
            cache.reach_base_by(handed_over(geometry));
        }
        self.with_backend(OpenBackend::close);
    }

    /// What clients come to, while it is up.
    pub(crate) fn export(&self) -> Option<Arc<Export>> {
        self.live.lock().as_ref().map(|live| Arc::clone(&live.export))
    }

    /// How many clients are connected.
    pub(crate) fn connections(&self) -> usize {
        self.live.lock().as_ref().map_or(0, |live| live.export.connections())
    }

    /// The overlays of a snapshot move under way.
    pub(crate) fn snapshots(&self) -> Option<SharedSnapshots> {
        self.snapshots.lock().clone()
    }

    /// Notes the overlays of a snapshot move under way, or that there is none.
    pub(crate) fn set_snapshots(&self, snapshots: Option<SharedSnapshots>) {
        *self.snapshots.lock() = snapshots;
    }

    /// The job under way or waiting.
    pub(crate) fn job(&self) -> Option<Arc<JobHandle>> {
        self.job.lock().clone()
    }

    /// Notes the job under way or waiting, or that there is none.
    pub(crate) fn set_job(&self, job: Option<Arc<JobHandle>>) {
        *self.job.lock() = job;
    }

    /// Whether a start is bringing it back.
    pub(crate) fn is_coming_back(&self) -> bool {
        self.is_coming_back.load(Ordering::Acquire)
    }

    /// Why it is not up.
    pub(crate) fn problem(&self) -> Option<Error> {
        let late = || {
            let message = format!("what holds {} has not answered yet", self.name);
            let hint = "it is served as soon as it does; see whether its file system or its server is there";
            Error::new(ErrorCode::BackendUnusable, message).with_hint(hint)
        };
        let noted = self.problem.lock().clone();
        noted.or_else(|| (self.is_coming_back() && self.slot().is_none()).then(late))
    }

    /// A start begins to bring it back, or has.
    pub(crate) fn set_coming_back(&self, is_coming_back: bool) {
        self.is_coming_back.store(is_coming_back, Ordering::Release);
    }

    /// Notes why it could not be brought up.
    pub(crate) fn set_problem(&self, problem: Error) {
        tracing::error!(volume = self.name, problem = %problem, "the volume is down");
        *self.problem.lock() = Some(problem);
    }

    /// Whether `problem` is what is known to be wrong.
    pub(crate) fn has_problem(&self, problem: &Error) -> bool {
        self.problem.lock().as_ref() == Some(problem)
    }

    /// What was wrong is right again.
    pub(crate) fn forget_problem(&self) {
        *self.problem.lock() = None;
    }

    /// Begins what a request asks for, once nothing else that changes the volume is under way.
    ///
    /// # Errors
    /// Something else is for too long. Nothing has changed then, and nothing will.
    pub(crate) async fn begin_operation(&self, env: &dyn Env) -> Result<MutexGuard<'_, ()>> {
        let begun = env::timeout(env, OPERATION_LIMIT, self.operation.lock()).await;
        begun.ok_or_else(|| self.held_up())
    }

    /// That something else is under way with it, which does not end.
    fn held_up(&self) -> Error {
        let name = &self.name;
        let is_there = self.slot().is_some() || self.incoming.lock().is_some();
        if is_there {
            return Error::new(ErrorCode::Busy, format!("another operation on {name} is under way"))
                .with_hint("nothing was changed; try again when it is over");
        }
        Error::new(ErrorCode::Busy, format!("{name} is being brought up, and what holds it does not answer"))
            .with_hint("nothing was changed; see whether its file system or its server is there, and try again")
    }

    /// Refuses what needs a volume that is up.
    pub(crate) fn require_up(&self) -> Result<Slot> {
        self.slot().ok_or_else(|| {
            let problem = self.problem().map_or_else(String::new, |problem| format!(": {problem}"));
            Error::new(ErrorCode::WrongState, format!("the volume {} is down{problem}", self.name))
                .with_hint("remove the cause: it is tried again by itself")
        })
    }

    /// Refuses what cannot be done while it moves.
    pub(crate) fn refuse_moving(&self) -> Result<()> {
        self.refuse_cache_arriving()?;
        let Some(job) = self.job() else { return Ok(()) };
        let name = &self.name;
        Err(Error::new(ErrorCode::Busy, format!("{name} is being moved (job {})", job.id))
            .with_hint(format!("wait for it, or `transhume cancel {name}` first")))
    }

    /// Refuses what cannot be done while a client is connected; `hint` says what to do.
    pub(crate) fn refuse_connected(&self, hint: &str) -> Result<()> {
        let connections = self.connections();
        if connections == 0 {
            return Ok(());
        }
        let clients = if connections == 1 { "client is" } else { "clients are" };
        let message = format!("{connections} {clients} connected to {}", self.name);
        Err(Error::new(ErrorCode::InUse, message).with_hint(hint))
    }

    /// How the API shows it.
    pub(crate) fn show(&self) -> v1::Volume {
        let document = self.document();
        let job = self.job();
        let size = self.slot().map_or_else(|| size_on_record(&document), |slot| slot.device().size());
        let remote_device = self.remote_device();
        let problem = self.problem().as_ref().map(ToString::to_string);
        let problem = problem.or_else(|| remote_device.as_ref().and_then(|remote_device| remote_device.problem()));
        let problem = problem.or_else(|| self.with_backend(|open_backend| open_backend.sync_failure()).flatten());
        let state = match (&problem, &job) {
            _ if self.slot().is_none() && self.incoming.lock().is_some() => VolumeState::Incoming,
            _ if self.slot().is_none() => VolumeState::Down,
            (_, Some(job)) if job.has_begun() => VolumeState::Moving,
            _ if remote_device.is_some() => VolumeState::Forwarding,
            _ => VolumeState::Serving,
        };
        v1::Volume {
            name: self.name.clone(),
            state,
            backend: document.backend.to_string(),
            export: document.export.clone(),
            size_bytes: size.get(),
            read_only: document.read_only,
            epoch: document.epoch,
            connections: self.connections() as u64,
            guest: self.gauge.guest_io(),
            vm: document.adoption.as_ref().map(|adoption| v1::AdoptedVm {
                monitor: adoption.monitor.clone(),
                node: adoption.node.clone(),
                format: adoption.format.clone(),
                state: adoption.direction.name().to_owned(),
                stopped_us: None,
            }),
            job: job.map(|job| job.id),
            arrival: document.incoming.as_ref().map(|incoming| self.show_incoming(incoming)),
            layers: self.show_layers(),
            problem,
        }
    }

    fn show_incoming(&self, incoming: &IncomingDocument) -> v1::Arrival {
        let (stage, epoch) = match incoming.stage {
            IncomingStage::Filling => (v1::ArrivalStage::Filling, incoming.epoch),
            IncomingStage::Prepared { epoch } => (v1::ArrivalStage::Prepared, epoch),
            IncomingStage::Held { epoch } => (v1::ArrivalStage::Held, epoch),
        };
        v1::Arrival {
            host: incoming.host.clone(),
            volume: incoming.origin.clone(),
            job: incoming.job.to_string(),
            stage,
            epoch,
            used: self.is_used_from_afar(),
        }
    }

    /// Whether another host's guest has a way into it now.
    pub(crate) fn is_used_from_afar(&self) -> bool {
        self.forward.lock().as_ref().is_some_and(FencedLane::is_used)
    }

    /// Why the host that holds it lets nobody from here in, if that is so.
    pub(crate) fn kept_out(&self) -> Option<String> {
        self.remote_device().filter(|remote_device| remote_device.is_kept_out()).map(|remote_device| {
            remote_device.problem().unwrap_or_else(|| "it lets nobody from this host in".to_owned())
        })
    }

    /// What its requests are passed on by, if another host holds it.
    pub(crate) fn remote_device(&self) -> Option<Arc<RemoteVolumeDevice>> {
        self.with_backend(|open_backend| open_backend.remote_device().map(Arc::clone)).flatten()
    }
}

fn metered(name: &str, meter: &MeterState, slot: &Slot) -> Device {
    Device::new(name, meter.metered(slot.lane()))
}

/// An address of an export of ours as a user writes it.
pub(crate) fn parse_export(text: &str) -> Result<NbdUri> {
    let uri = text.parse::<NbdUri>().map_err(|error| {
        Error::new(ErrorCode::Invalid, format!("\"{text}\" is no address of an export: {error}")).with_hint(
            "write nbd+unix:///NAME?socket=/PATH or nbd://HOST:PORT/NAME; for TLS nbds, and ?tls-certificates=/DIR",
        )
    })?;
    certificates_of(&uri)?;
    Ok(uri)
}
