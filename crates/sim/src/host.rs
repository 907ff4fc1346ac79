//! The host: what the daemon is on a real machine, in the least code that assembles the same stack over simulated disks.
//!
//! ```text
//!            boot                      journal read, locks taken          the guest is connected
//!   down ───────────▶ opening ────────────────────────────────▶ resuming ────────────────────────▶ serving
//!    ▲                   │ a disk fails: again after 100 ms       │ a job on record                 │  ▲
//!    │ crash or          ▼                                        ▼                          wanted │  │ outcome
//!    └─ power loss ── any state                               migrating ◀───────────────────────────┘  │
//!                                                                 └─────────────────────────────────────┘
//! ```

mod estate;
mod setup;
mod stored;

use std::sync::Arc;
use std::time::Duration;

use block::{BufferPool, Bytes, Device, Result, Slot};
use env::Moment;
use filters::MeterState;
use migrate::{
    Control, JobRecord, Journal, MapIdentity, Migration, Outcome, Parts, Phase, ProgressMap, Snapshots, UnderWay,
};
use nbd::Export;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::checks;
use crate::debt::Debt;
use crate::dice::Dice;
use crate::disk::Disk;
use crate::guest::Guest;
use crate::offload::SimOffload;
use crate::overlays::{Overlays, Shelf};
use crate::port::Port;
use crate::process::Process;
use crate::record::{Document, Job, Record, StallMeter};
use crate::world::{Invariant, World};

use estate::Estate;

pub use estate::Outage;
pub use setup::{Disks, Mistakes, Role, Setup, Status, Wrap};

/// Where the payloads of NBD connections live.
const EXPORT_POOL: Bytes = Bytes::mib(64);

/// A host with one volume. Clones are the same host.
#[derive(Clone)]
pub struct Host {
    shared: Arc<Shared>,
}

struct Shared {
    world: World,
    dice: Dice,
    setup: Setup,
    port: Port,
    guest: Guest,
    journal: Disk,
    map: Disk,
    sides: [Disk; 2],
    /// The overlays of snapshot moves.
    shelf: Shelf,
    lives: Mutex<u32>,
    boots: Mutex<u8>,
    /// The newest epoch whose store was answered.
    epoch: Mutex<u64>,
    /// The number of the newest document whose store was answered.
    stores: Mutex<u64>,
    /// The side that held the volume when the journal was last read or stored.
    holder: Mutex<usize>,
    /// From where the last move began.
    from: Mutex<usize>,
    phase: tokio::sync::watch::Sender<Option<Phase>>,
    now: Mutex<Life>,
    wanted: Mutex<bool>,
    asked: Notify,
    status: Mutex<Status>,
    changed: Notify,
    /// The daemon's, if it is the real one.
    estate: Estate,
    /// The process is down, or about to be: one cause at a time.
    outage: tokio::sync::Mutex<()>,
}

/// The life of the process that serves now.
#[derive(Clone, Default)]
struct Life {
    process: Option<Process>,
    control: Option<Control>,
    /// Which side the move under `control` goes to.
    target: usize,
    serving: Option<(Slot, MeterState)>,
    debt: Debt,
}

/// What the process serves.
struct Serving<'a> {
    slot: &'a Slot,
    meter: &'a MeterState,
    holder: &'a Device,
    snapshots: &'a Arc<tokio::sync::Mutex<Snapshots>>,
}

impl Host {
    /// A host that is down. `sides[0]` holds the volume.
    #[must_use]
    pub fn new(world: &World, setup: Setup, port: &Port, guest: &Guest, disks: Disks) -> Self {
        let Disks { journal, map, sides } = disks;
        let estate = Estate::new(world, &map, (setup.is_between_hosts, setup.has_arbiter));
        let shared = Shared {
            world: world.clone(),
            dice: world.dice("host"),
            setup,
            port: port.clone(),
            guest: guest.clone(),
            journal,
            map,
            sides,
            shelf: Shelf::default(),
            lives: Mutex::new(0),
            boots: Mutex::new(1),
            epoch: Mutex::new(0),
            stores: Mutex::new(0),
            holder: Mutex::new(0),
            from: Mutex::new(0),
            phase: tokio::sync::watch::Sender::new(None),
            now: Mutex::default(),
            wanted: Mutex::new(false),
            asked: Notify::new(),
            status: Mutex::new(Status::Idle),
            changed: Notify::new(),
            estate,
            outage: tokio::sync::Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Starts its process.
    pub fn boot(&self) {
        self.boot_neighbour();
        let life = {
            let mut lives = self.shared.lives.lock();
            *lives += 1;
            *lives
        };
        let process = match self.shared.setup.neighbour_burns {
            true => Process::bystander(&self.shared.world, "process", life),
            false => Process::start(&self.shared.world, life),
        };
        let process = process.with_tasks_max(self.shared.setup.tasks_max);
        *self.shared.now.lock() = Life { process: Some(process.clone()), ..Life::default() };
        let host = self.clone();
        let serving = process.clone();
        process.env().spawn(Box::pin(async move {
            match host.shared.setup.is_daemon {
                true => host.run_daemon(&serving).await,
                false => host.live(&serving).await,
            }
        }));
    }

    /// Whoever holds this is the one cause of an outage.
    pub async fn outage(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.shared.outage.lock().await
    }

    /// The files of its daemon are full, or have room again.
    pub fn set_files_full(&self, is_full: bool) {
        self.shared.estate.files.set_full(is_full);
    }

    /// Kills its process.
    pub async fn crash(&self) {
        let life = std::mem::take(&mut *self.shared.now.lock());
        self.shared.estate.note_death();
        self.shared.world.fault("crash", format_args!("the process is killed"));
        if let Some(process) = life.process {
            process.kill().await;
        }
        // Futures of a dead process that hold the slot or a device are gone; only the port may still have a lane.
        self.shared.port.hang_up();
    }

    /// Takes the power away from everything, the guest included.
    pub async fn lose_power(&self) {
        self.crash().await;
        self.shared.guest.lose_power().await;
        self.shared.port.lose_power().await;
        let Shared { journal, map, sides, boots, .. } = &*self.shared;
        let own = if self.shared.setup.is_between_hosts { &sides[..1] } else { &sides[..] };
        [journal, map].into_iter().chain(own).for_each(Disk::lose_power);
        self.shared.shelf.lose_power();
        self.shared.estate.files.lose_power();
        if !self.shared.setup.mistakes.trusts_old_maps {
            *boots.lock() += 1;
        }
    }

    /// Cuts the guest's connection and lets it come back.
    pub async fn reconnect(&self) {
        self.shared.world.fault("reconnect", format_args!("the guest's connection is cut"));
        let serving = self.shared.now.lock().serving.clone();
        // A guest that speaks NBD connects again by itself.
        let Some(leftover) = self.shared.port.cut() else { return };
        let Some((slot, meter)) = serving else { return };
        if !self.shared.setup.mistakes.no_barrier {
            leftover.finished().await;
        }
        let process = self.shared.now.lock().process.clone();
        if let Some(process) = process.filter(|process| !process.is_dead()) {
            self.plug(&process, &slot, &meter);
        }
    }

    /// Asks for a move to the other side.
    pub fn ask_for_move(&self) {
        *self.shared.wanted.lock() = true;
        self.shared.asked.notify_one();
    }

    /// Asks for another move after one that has ended.
    pub fn move_again(&self) {
        self.set_status(Status::Idle);
        self.ask_for_move();
    }

    /// Steers the move that runs, if one does.
    #[must_use]
    pub fn control(&self) -> Option<Control> {
        self.shared.now.lock().control.clone()
    }

    /// The side that is a target now, while it can still be given up.
    #[must_use]
    pub fn target(&self) -> Option<usize> {
        let now = self.shared.now.lock();
        let phase = now.control.as_ref()?.snapshot().phase;
        (!phase.is_committed() && !phase.is_final()).then_some(now.target)
    }

    /// Where the volume is, as far as anybody was told.
    #[must_use]
    pub fn holder(&self) -> usize {
        *self.shared.holder.lock()
    }

    /// The phases that a move has been seen in, the newest last.
    #[must_use]
    pub fn phases(&self) -> tokio::sync::watch::Receiver<Option<Phase>> {
        self.shared.phase.subscribe()
    }

    /// How the last move that was asked for stands.
    #[must_use]
    pub fn status(&self) -> Status {
        self.shared.status.lock().clone()
    }

    /// The story is over: nobody is served any more.
    pub(crate) fn close(&self) {
        self.shared.estate.close();
    }

    /// Waits until a move has ended.
    pub async fn ended(&self) -> Status {
        loop {
            let changed = self.shared.changed.notified();
            let status = self.status();
            if !matches!(status, Status::Idle | Status::Running) {
                return status;
            }
            changed.await;
        }
    }

    /// The two sides.
    #[must_use]
    pub fn sides(&self) -> &[Disk; 2] {
        &self.shared.sides
    }

    fn set_status(&self, status: Status) {
        let why = if let Status::Failed(why) = &status { why } else { "" };
        self.shared.world.event(format_args!("the move is {} {why}", status.name()));
        *self.shared.status.lock() = status;
        self.shared.changed.notify_waiters();
    }

    async fn live(&self, process: &Process) {
        loop {
            let Err(error) = self.serve(process).await;
            self.shared.world.event(format_args!("the host cannot serve: {}", error.chain()));
            process.env().sleep(Duration::from_millis(100)).await;
        }
    }

    async fn open(&self, disk: &Disk, role: Role, epoch: u64) -> Device {
        let device = match self.shared.setup.mistakes.opens_at_once {
            true => disk.open_at_once(epoch),
            false => disk.open(epoch).await,
        };
        match &self.shared.setup.mistakes.wrap {
            Some(wrap) => wrap(&self.shared.world, role, device),
            None => device,
        }
    }

    fn plug(&self, process: &Process, slot: &Slot, meter: &MeterState) {
        let debt = self.shared.now.lock().debt.clone();
        let (lanes, meters) = (slot.clone(), meter.clone());
        let open = move || debt.connection(Device::new("meter", meters.metered(lanes.lane())));
        match self.shared.port.is_wire() {
            true => {
                let pool = BufferPool::new(EXPORT_POOL);
                self.shared.port.offer(process, Arc::new(Export::new("volume", pool, open)));
            }
            false => self.shared.port.plug(process, open()),
        }
        self.shared.now.lock().serving = Some((slot.clone(), meter.clone()));
    }

    async fn serve(&self, process: &Process) -> Result<std::convert::Infallible> {
        let shared = &self.shared;
        let journal = self.open(&shared.journal, Role::Journal, 0).await;
        let (journal, document) = Journal::open(journal).await?;
        let record = Arc::new(Record::new(&shared.world, journal, document, self.clone())?);
        let mut document: Document = record.document();
        shared.sides[document.holder].admit();
        let holder = self.open(&shared.sides[document.holder], Role::Source, document.epoch).await;
        if document.job.as_ref().is_some_and(|job| job.from != document.holder) {
            // The commit was durable and the process died before it could say so.
            record.end_job().await;
            self.set_status(Status::Switched(None));
            document = record.document();
        }
        self.note_stored(&document);
        if document.job.is_none() {
            shared.sides[1 - document.holder].revoke("the other side holds the volume");
        }
        self.recall(&document);
        let mut holder = holder;
        let found = self.snapshots(process, &record, &holder).await?;
        let slot = Slot::new(found.top().unwrap_or_else(|| holder.clone()));
        let mut snapshots = Arc::new(tokio::sync::Mutex::new(found));
        let meter = MeterState::new(process.env());
        let mut plugged = false;
        if document.job.is_none() || shared.setup.mistakes.serves_before_resuming {
            self.plug(process, &slot, &meter);
            plugged = true;
        }
        loop {
            let Some(job) = record.document().job else {
                self.next_job(&record).await;
                continue;
            };
            self.set_status(Status::Running);
            let serving = Serving { slot: &slot, meter: &meter, holder: &holder, snapshots: &snapshots };
            match self.begin(process, &record, &job, &serving).await {
                Ok((control, work)) => {
                    if !plugged {
                        self.plug(process, &slot, &meter);
                        plugged = true;
                    }
                    {
                        let mut now = shared.now.lock();
                        (now.control, now.target) = (Some(control.clone()), 1 - job.from);
                    }
                    self.watch_over(process, &control, 1 - job.from);
                    let outcome = work.await;
                    shared.now.lock().control = None;
                    if !snapshots.lock().await.is_empty() {
                        shared.world.violate(Invariant::CancelSafe, "the move is over and the guest is on an overlay");
                    }
                    self.conclude(&record, &job, &slot, outcome).await;
                    // What holds the volume now.
                    holder = slot.device();
                    snapshots = Arc::new(tokio::sync::Mutex::new(self.snapshots(process, &record, &holder).await?));
                }
                Err(error) => {
                    shared.world.event(format_args!("the move cannot begin: {}", error.chain()));
                    // What the guest writes without the mirror is not tracked: the map is worth nothing then.
                    record.forget_map().await;
                    if !plugged {
                        self.plug(process, &slot, &meter);
                        plugged = true;
                    }
                    process.env().sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    /// The overlays over `holder` that are on record.
    async fn snapshots(&self, process: &Process, record: &Arc<Record>, holder: &Device) -> Result<Snapshots> {
        let shared = &self.shared;
        let store = Arc::new(Overlays {
            world: shared.world.clone(),
            shelf: shared.shelf.clone(),
            record: Arc::clone(record),
            boot: *shared.boots.lock(),
            alignment: holder.geometry().request_alignment,
        });
        Snapshots::open(store, process.env(), holder.clone()).await
    }

    async fn next_job(&self, record: &Record) {
        loop {
            let asked = self.shared.asked.notified();
            if *self.shared.wanted.lock() {
                break;
            }
            asked.await;
        }
        *self.shared.from.lock() = record.document().holder;
        // The first target is as the story has it; what an undone move has left behind is prepared again, or used as it
        // is, as a block device is.
        let document = record.document();
        let is_first = document.jobs == 0;
        let is_replaced = !is_first && self.shared.dice.chance(0.5);
        if is_replaced {
            self.shared.sides[1 - document.holder].replace();
        }
        let target_is_fresh = is_first || is_replaced || self.shared.setup.mistakes.trusts_used_targets;
        record
            .begin_job(
                JobRecord {
                    phase: Phase::Preparing,
                    options: self.shared.setup.options.clone(),
                    sessions: 0,
                    // When its turn comes, too, in the world's time.
                    started_unix_ms: self.shared.world.now().0.as_millis() as u64,
                },
                target_is_fresh,
            )
            .await;
        *self.shared.wanted.lock() = false;
    }

    /// Takes up where the process before has died: what was asked for is done, what was done is known.
    fn recall(&self, document: &Document) {
        if document.job.is_some() {
            *self.shared.wanted.lock() = false;
        } else if self.status() == Status::Running {
            let has_moved = document.holder != *self.shared.from.lock();
            self.set_status(if has_moved { Status::Switched(None) } else { Status::Cancelled });
        }
    }

    async fn begin(
        &self,
        process: &Process,
        record: &Arc<Record>,
        job: &Job,
        serving: &Serving<'_>,
    ) -> Result<(Control, std::pin::Pin<Box<dyn Future<Output = Outcome> + Send>>)> {
        let shared = &self.shared;
        let target_disk = &shared.sides[1 - job.from];
        target_disk.admit();
        // The move before may have given up requests that still hang.
        target_disk.let_go().await;
        let target = self.open(target_disk, Role::Target, record.document().epoch).await;
        let options = job.record.options.clone();
        let source = serving.holder.clone();
        let identity = MapIdentity {
            boot: [*shared.boots.lock(); 16],
            job: job.identity.to_le_bytes().repeat(2).try_into().expect("twice eight bytes"),
            volume: source.size(),
            chunk: options.chunk_size()?,
        };
        let map = ProgressMap::open(self.open(&shared.map, Role::Map, 0).await, identity).await?;
        let pool = BufferPool::new(shared.setup.pool);
        let offload = shared.setup.offloads.then(|| {
            let (world, dice) = (shared.world.clone(), shared.world.dice("offload"));
            let below = target_disk.open_below(record.document().epoch);
            Arc::new(SimOffload { world, dice, source: source.clone(), target: below }) as _
        });
        let (begun, now) = (Moment(Duration::from_millis(job.record.started_unix_ms)), process.env().now());
        let parts = Parts {
            env: process.env(),
            slot: serving.slot.clone(),
            source,
            target,
            target_is_fresh: job.target_is_fresh,
            phase: job.record.phase,
            under_way: UnderWay::new(now.since(begun), now),
            journal: Arc::clone(record) as _,
            progress_map: Some(map),
            meter: Some(Arc::new(StallMeter::new(serving.meter.clone()))),
            comparison: None,
            offload,
            pool,
            snapshots: Some(Arc::clone(serving.snapshots)),
        };
        let (control, work) = Migration::start(parts, options).await?;
        Ok((control, Box::pin(work)))
    }

    /// What an operator does: looks at the progress, and brings a lost target back or gives up.
    fn watch_over(&self, process: &Process, control: &Control, target: usize) {
        let (host, control, env) = (self.clone(), control.clone(), process.env());
        let watching = async move {
            let mut watch = control.watch();
            let mut last = watch.borrow_and_update().clone();
            let mut losses = 0;
            loop {
                let progress = watch.borrow_and_update().clone();
                checks::monotonic(&host.shared.world, &last, &progress);
                if progress.phase != last.phase {
                    host.shared.world.event(format_args!("the move is {}", progress.phase));
                    host.shared.phase.send_replace(Some(progress.phase));
                }
                if !matches!(progress.phase, Phase::Preparing | Phase::Copying) {
                    host.shared.sides[target].stop_lying();
                }
                let lost = progress.phase == Phase::TargetLost && last.phase != Phase::TargetLost;
                last = progress;
                if lost {
                    losses += 1;
                    env.sleep(host.shared.dice.up_to(Duration::from_millis(300))).await;
                    host.after_loss(&control, target, losses).await;
                }
                if last.phase.is_final() || watch.changed().await.is_err() {
                    return;
                }
            }
        };
        process.env().spawn(Box::pin(watching));
    }

    async fn after_loss(&self, control: &Control, target: usize, losses: u32) {
        let shared = &self.shared;
        if losses > 20 || !shared.setup.resumes_lost_targets {
            // It may have ended meanwhile.
            let _ = control.cancel();
            return;
        }
        if shared.dice.chance(0.5) {
            control.resume();
            return;
        }
        let epoch = *shared.epoch.lock();
        control.resume_session(self.open(&shared.sides[target], Role::Target, epoch).await, None);
    }

    async fn conclude(&self, record: &Record, job: &Job, slot: &Slot, outcome: Outcome) {
        let shared = &self.shared;
        let (source, target) = (&shared.sides[job.from], &shared.sides[1 - job.from]);
        let world = &shared.world;
        let holder = record.document().holder;
        match outcome {
            Outcome::Switched(report) => {
                if holder == job.from || slot.device().name() != target.name() {
                    world.violate(Invariant::OneWriter, "switched, but the guest or the journal is on the source");
                }
                if report.equal == Some(false) {
                    world.violate(Invariant::EqualAtSwitch, "switched although a comparison found a difference");
                }
                source.revoke("the volume has moved away from it");
                record.end_job().await;
                if shared.setup.mistakes.returns_to_source {
                    slot.quiesce().await.swap(source.open_at_once(record.document().epoch));
                }
                self.set_status(Status::Switched(Some(Box::new(report))));
            }
            Outcome::Cancelled(_) | Outcome::Failed { .. } => {
                // Where requests did not drain in time, the idle mirror may still be there; the next move goes through it.
                if holder != job.from || slot.device().name() == target.name() {
                    world.violate(Invariant::CancelSafe, "undone, but the guest or the journal is not on the source");
                }
                target.revoke("the move to it was undone");
                record.end_job().await;
                self.set_status(match outcome {
                    Outcome::Failed { error, .. } => Status::Failed(error.chain()),
                    _ => Status::Cancelled,
                });
            }
        }
    }
}
