//! The host: the daemon's process on simulated ground, its power, and its guest's way to it.
//!
//! ```text
//!            boot                  journals read, backends opened              the guest is connected
//!   down ───────────▶ recovering ─────────────────────────────────▶ resuming ────────────────────────▶ serving
//!    ▲                   │ a volume is down: again after 100 ms       │ a job on record              │  ▲
//!    │ crash or          ▼                                            ▼                       wanted │  │ outcome
//!    └─ power loss ── any state                                   migrating ◀────────────────────────┘  │
//!                                                                     └─────────────────────────────────┘
//! ```
//!
//! What happens between those words is `daemon::Core`'s; see `daemon_harness`. Mistakes are made by the ground that it stands on
//! ([`Mistakes`]).

mod beside;
mod daemon_harness;
mod parts;
mod setup;
mod stored;

use std::sync::Arc;

use block::{BufferPool, Device, Filter, IoFuture, Mutation};
use migrate::{Control, Phase};
use nbd::Export;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::disk::Disk;
use crate::flush_error_latch::FlushErrorLatch;
use crate::guest::Guest;
use crate::occurrence::Occurrence;
use crate::overlay_disks::OverlayDisks;
use crate::port::Port;
use crate::process::Process;
use crate::rng::Rng;
use crate::world::World;

use daemon_harness::DaemonHarness;

pub(crate) use beside::{VOLUMES_MAX, names};
pub use daemon_harness::{CacheSetup, Outage};
pub(crate) use setup::SNAPSHOTS_MAX;
pub use setup::{Disks, Mistakes, Others, Role, Setup, Status, Wrap};

/// A host as one of its volumes has it. Clones are the same. The first volume's boots and kills the process that all of them have
/// in common; see `beside`.
#[derive(Clone)]
pub struct Host {
    shared: Arc<Shared>,
}

struct Shared {
    world: World,
    /// Which volume: 0 is the first.
    number: usize,
    /// The other volumes of the same process, if this is the first.
    besides: Mutex<Vec<Host>>,
    rng: Rng,
    setup: Setup,
    port: Port,
    guest: Guest,
    journal: Disk,
    map: Disk,
    sides: [Disk; 2],
    /// The overlays of snapshot moves.
    shelf: OverlayDisks,
    lives: Mutex<u32>,
    boots: Mutex<u8>,
    /// The newest epoch whose store was answered.
    epoch: Mutex<u64>,
    /// The side that held the volume when the journal was last read or stored.
    holder: Mutex<usize>,
    /// From where the last move began.
    from: Mutex<usize>,
    phase: tokio::sync::watch::Sender<Option<Phase>>,
    now: Mutex<ProcessRun>,
    wanted: Mutex<bool>,
    /// It has gone to the other host without the machine whose disk it is.
    is_gone_alone: Mutex<bool>,
    asked: Notify,
    status: Mutex<Status>,
    changed: Notify,
    daemon_harness: DaemonHarness,
    /// The process is down, or about to be: one cause at a time.
    outage: tokio::sync::Mutex<()>,
    /// Whoever holds that waits for the guest to be served.
    is_awaited: Mutex<bool>,
}

/// The life of the process that serves now.
#[derive(Clone, Default)]
struct ProcessRun {
    process: Option<Process>,
    control: Option<Control>,
    /// Which side the move under `control` goes to.
    target: usize,
    serving: Option<Arc<Export>>,
    /// Where requests and copies take their buffers from.
    pools: Vec<BufferPool>,
    flush_error_latch: FlushErrorLatch,
    core: Option<daemon::Core>,
}

impl Host {
    /// A host that is down. `sides[0]` holds the volume.
    #[must_use]
    pub fn new(world: &World, setup: Setup, port: &Port, guest: &Guest, disks: Disks) -> Self {
        let daemon_harness = DaemonHarness::new(world, &disks.map, &setup);
        Self::of(world, (0, daemon_harness), setup, (port, guest), disks)
    }

    fn of(
        world: &World,
        (number, daemon_harness): (usize, DaemonHarness),
        setup: Setup,
        (port, guest): (&Port, &Guest),
        disks: Disks,
    ) -> Self {
        let Disks { journal, map, sides } = disks;
        let shared = Shared {
            world: world.clone(),
            number,
            besides: Mutex::default(),
            rng: world.rng(beside::names(number).host),
            setup,
            port: port.clone(),
            guest: guest.clone(),
            journal,
            map,
            sides,
            shelf: OverlayDisks::default(),
            lives: Mutex::new(0),
            boots: Mutex::new(1),
            epoch: Mutex::new(0),
            holder: Mutex::new(0),
            from: Mutex::new(0),
            phase: tokio::sync::watch::Sender::new(None),
            now: Mutex::default(),
            wanted: Mutex::new(false),
            is_gone_alone: Mutex::new(false),
            asked: Notify::new(),
            status: Mutex::new(Status::Idle),
            changed: Notify::new(),
            daemon_harness,
            outage: tokio::sync::Mutex::default(),
            is_awaited: Mutex::new(false),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Starts its process.
    pub fn boot(&self) {
        self.boot_peer();
        let run = {
            let mut lives = self.shared.lives.lock();
            *lives += 1;
            *lives
        };
        if run == 1 {
            self.assemble_machine();
        }
        let process = match self.shared.setup.peer_dies_at_poll {
            true => Process::bystander(&self.shared.world, "process", run),
            false => Process::start(&self.shared.world, run),
        };
        let process = process.with_tasks_max(self.shared.setup.tasks_max);
        for volume in self.volumes() {
            *volume.shared.now.lock() = ProcessRun { process: Some(process.clone()), ..ProcessRun::default() };
        }
        let host = self.clone();
        let serving = process.clone();
        process.env().spawn(Box::pin(async move { Box::pin(host.run_daemon(&serving)).await }));
    }

    /// Whoever holds this is the one cause of an outage.
    pub async fn outage(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.shared.outage.lock().await
    }

    /// Whether the volume lies where both hosts reach it.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared.setup.is_shared
    }

    /// Whether the volume moves to another host.
    pub(crate) fn is_between_hosts(&self) -> bool {
        self.shared.setup.is_between_hosts
    }

    /// The files of its daemon are full, or have room again.
    pub fn set_files_full(&self, is_full: bool) {
        self.shared.daemon_harness.files.set_full(is_full);
    }

    /// Has the daemon leave everything as its next start is to find it, as one that is told to end does. Its guests ask for nothing; kill
    /// the process then. False if there is none that could: one that is about to start dies of being told.
    pub(crate) async fn come_to_rest(&self) -> bool {
        let (process, core) = {
            let now = self.shared.now.lock();
            (now.process.clone(), now.core.clone())
        };
        let Some((process, core)) = process.zip(core) else { return false };
        let (rests, is_at_rest) = tokio::sync::oneshot::channel();
        process.env().spawn(Box::pin(async move {
            let _at_rest = core.come_to_rest().await;
            let _ = rests.send(());
            // Whoever comes meanwhile is held until the process is gone.
            std::future::pending::<()>().await;
        }));
        // It may die before.
        is_at_rest.await.is_ok()
    }

    /// Kills its process.
    pub async fn crash(&self) {
        let run = std::mem::take(&mut *self.shared.now.lock());
        let besides = self.besides();
        besides.iter().for_each(|volume| drop(std::mem::take(&mut *volume.shared.now.lock())));
        self.volumes().iter().for_each(|volume| volume.shared.daemon_harness.note_death());
        self.shared.world.fault("crash", format_args!("the process is killed"));
        if let Some(process) = run.process {
            process.kill().await;
        }
        self.volumes().iter().for_each(|volume| volume.shared.guest.note_end_of_process());
        // Futures of a dead process that hold the slot or a device are gone; only the port may still have a lane.
        self.shared.port.hang_up();
        besides.iter().for_each(|volume| volume.shared.port.hang_up());
    }

    /// Takes the power away from everything, the guest included.
    pub async fn lose_power(&self) {
        self.crash().await;
        for volume in self.volumes() {
            let Shared { guest, port, journal, map, sides, shelf, .. } = &*volume.shared;
            guest.lose_power().await;
            port.lose_power().await;
            let own = match () {
                // It has a power of its own.
                () if volume.is_shared() => &[],
                () if self.shared.setup.is_between_hosts => &sides[..1],
                () => &sides[..],
            };
            [journal, map].into_iter().chain(own).for_each(Disk::lose_power);
            shelf.lose_power(|side| !self.shared.setup.is_between_hosts || !self.is_of_peer(side));
        }
        let boots = &self.shared.boots;
        self.shared.daemon_harness.lose_power();
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
        let Some(export) = serving else { return };
        if !self.shared.setup.mistakes.no_barrier {
            leftover.finished().await;
        }
        let process = self.shared.now.lock().process.clone();
        if let Some(process) = process.filter(|process| !process.is_dead()) {
            self.shared.port.plug(&process, export.open());
        }
    }

    /// Lets the guest come to `export`, which `process` serves.
    fn offer(&self, process: &Process, export: Arc<Export>) {
        let flush_error_latch = self.shared.now.lock().flush_error_latch.clone();
        let host = self.clone();
        let export = Arc::new(export.wrapped(move |device| host.mistaken(flush_error_latch.connection(device))));
        match self.shared.port.is_wire() {
            true => self.shared.port.offer(process, Arc::clone(&export)),
            false => self.shared.port.plug(process, export.open()),
        }
        self.shared.now.lock().serving = Some(export);
    }

    /// A guest's way to its disk, and back to the source once it has moved where that mistake is made.
    fn mistaken(&self, lower: Device) -> Device {
        match self.shared.setup.mistakes.returns_to_source {
            true => Device::new("returning", Returning { lower, host: self.clone() }),
            false => lower,
        }
    }

    /// Somebody waits until the guest is served, and keeps everybody else from bringing an outage about meanwhile.
    pub fn note_awaited(&self, is_awaited: bool) {
        *self.shared.is_awaited.lock() = is_awaited;
    }

    /// Asks for a move to the other side.
    pub fn ask_for_move(&self) {
        *self.shared.wanted.lock() = true;
        self.shared.asked.notify_one();
    }

    /// Nobody wants a move any more that was asked for and refused.
    pub(crate) fn ask_no_more(&self) {
        *self.shared.wanted.lock() = false;
    }

    /// Asks for another move after one that has ended.
    pub fn move_again(&self) {
        if self.is_gone_with_machine() {
            // Somebody else has asked for the machine's, and it has succeeded.
            self.set_status(Status::Switched(None));
            return;
        }
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

    /// The scenario is over: nobody is served any more.
    pub(crate) fn close(&self) {
        // What is served leads back to this host.
        let now = std::mem::take(&mut *self.shared.now.lock());
        drop(now);
        self.shared.port.close();
        self.shared.daemon_harness.close();
        let besides = std::mem::take(&mut *self.shared.besides.lock());
        besides.iter().for_each(Self::close);
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
        self.say(format_args!("the move is {} {why}", status.name()));
        self.shared.world.occur(Occurrence::Told(status.name()));
        *self.shared.status.lock() = status;
        self.shared.changed.notify_waiters();
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
}

/// A guest's way to its disk that leads to the source again once the volume has moved.
struct Returning {
    lower: Device,
    host: Host,
}

impl Filter for Returning {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let has_moved = matches!(self.host.status(), Status::Switched(_));
            let source = has_moved.then(|| {
                let epoch = *self.host.shared.epoch.lock();
                self.host.shared.sides[1 - self.host.holder()].open_at_once(epoch)
            });
            source.as_ref().unwrap_or(&self.lower).write(mutation).await
        })
    }
}
