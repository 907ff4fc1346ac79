//! The host's process as the real daemon: `daemon::Core`, its job code unchanged, on simulated ground.
//!
//! ```text
//!   daemon::{jobs, recover, journal, state_dir, volume}
//!      │ Files        │ Backends                  │ Network      │ WorkerSpawner
//!   SimFiles     Platform: disks as files    Port: the wire    the process itself
//! ```
//!
//! The volume is `/pool/0` or `/pool/1` (that of another volume is in a directory of its own), a file on the disk of that number: a target is made anew where there is none, a
//! source that was moved from gets another name. With a neighbour the second place is another host's (`b:1`), whose daemon
//! is a second process. What the daemon stores in its journal is read on its way to the disk, and
//! the checks of the commit are made there. Not in this world: HTTP, adoption, configuration,
//! worker threads, the locks and the page cache of real files (the disks' own rules stand for them).

mod authority;
mod cache;
mod cache_moves;
mod fake_arbiter;
mod group;
mod layered_cache;
mod layers;
mod machine;
mod peer_host;
mod platform;
mod records;
mod returning;
mod slow_hooks;
mod surrogate;
mod together;
mod watched;
mod ways_out;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ::daemon::{Location, VolumeDocument};
use api::v1::{
    AttachRequest, ErrorCode, Job, JobState, MoveRequest, OnNoConverge, Prediction, Report, Schedule, Strategy, Verify,
};
use migrate::{Control, Phase};
use parking_lot::Mutex;

use super::beside::names;
use super::{Host, Setup, Status};
use crate::checks;
use crate::disk::Disk;
use crate::files::SimFiles;
use crate::occurrence::Occurrence;
use crate::process::Process;
use crate::world::{Invariant, World};

pub(super) use cache::CACHE;
use cache::CacheHarness;
pub use cache::CacheSetup;
use group::GroupStore;
pub use peer_host::Outage;
use peer_host::PeerHost;
use returning::Returning;
use together::Together;
use watched::Watched;

/// The files of the layers over an image are kept beside a place of their own: this, and the image's number.
pub(super) const LAYERS_OF: usize = 2;
/// The stores of the surrogate are kept beside this place.
pub(super) const SURROGATE: usize = 4;
/// Where the daemon's files are.
const STATE_DIR: &str = "/state";

/// What of the daemon outlives its process, beside the disks.
pub(super) struct DaemonHarness {
    pub(super) files: SimFiles,
    /// The files that hold, held, or will hold the volume.
    pub(super) places: Mutex<[Place; 2]>,
    slots: Mutex<Slots>,
    /// The host that the volume moves to, if that is another one.
    peer: Option<PeerHost>,
    /// Somebody has wished the move away.
    is_unwanted: Mutex<bool>,
    /// Of the moves of all volumes, which all of them know.
    together: Arc<Mutex<Together>>,
    /// The record of those that switch over together.
    groups: Arc<GroupStore>,
    /// The daemon has said, or shown, that it has the volume.
    is_attached: Mutex<bool>,
    /// The newest job of the volume whose end was seen.
    job_seen: Mutex<u64>,
    /// Which files of layers were beside the target before a move, and in which life of the process.
    layers_before: Mutex<Option<(u32, Vec<u32>)>>,
    cache: CacheHarness,
    returning: Returning,
}

/// What may be found in the daemon's journal.
#[derive(Default)]
struct Slots {
    /// The newest document that was acknowledged.
    acknowledged: Option<Vec<u8>>,
    /// Those after it that were not.
    doubtful: Vec<Vec<u8>>,
}

/// A place for the volume.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// There is a file of its name.
    pub(super) exists: bool,
    /// Which file: another one each time that it is made.
    pub(super) number: u64,
}

impl DaemonHarness {
    pub(super) fn new(world: &World, map: &Disk, setup: &Setup) -> Self {
        let is_between_hosts = setup.is_between_hosts;
        // What the target holds at the start is in a file, too; another host has none.
        let places = [1, 2].map(|number| Place { exists: number == 1 || !is_between_hosts, number });
        let peer = is_between_hosts.then(|| PeerHost::new(world, setup));
        Self::with(SimFiles::new(world, map), places, peer, (Arc::default(), GroupStore::new(world)))
    }

    /// That of one more volume of the same process.
    pub(super) fn beside(first: &Self, volume: usize, map: &Disk) -> Self {
        let files = first.files.clone();
        files.add_map(names(volume).volume, map);
        let peer = first.peer.as_ref().map(|peer| peer.beside(volume));
        // No two files of the world have one number.
        let places = [1, 2]
            .map(|number| Place { exists: number == 1 || peer.is_none(), number: number + 1_000_000 * volume as u64 });
        Self::with(files, places, peer, (Arc::clone(&first.together), Arc::clone(&first.groups)))
    }

    fn with(
        files: SimFiles,
        places: [Place; 2],
        peer: Option<PeerHost>,
        (together, groups): (Arc<Mutex<Together>>, Arc<GroupStore>),
    ) -> Self {
        let [is_unwanted, is_attached] = [false; 2].map(Mutex::new);
        let (places, slots, layers_before) = (Mutex::new(places), Mutex::default(), Mutex::default());
        let (job_seen, cache, returning) = (Mutex::new(0), <_>::default(), <_>::default());
        Self {
            files,
            places,
            slots,
            peer,
            is_unwanted,
            together,
            groups,
            is_attached,
            job_seen,
            layers_before,
            cache,
            returning,
        }
    }

    /// The other host, if there is one.
    pub(super) const fn peer(&self) -> Option<&PeerHost> {
        self.peer.as_ref()
    }

    /// The power of the host is gone.
    pub(super) fn lose_power(&self) {
        self.files.lose_power();
        self.groups.lose_power();
    }

    /// The process has died.
    pub(super) fn note_death(&self) {
        if let Some(peer) = &self.peer {
            peer.note_death();
        }
    }

    /// The story is over.
    pub(super) fn close(&self) {
        self.files.unwatch();
        if let Some(peer) = &self.peer {
            peer.files().unwatch();
            peer.close();
        }
    }
}

/// The number of the place at `path`.
fn side_of(path: &Path) -> usize {
    if path.extension().is_some_and(|extension| extension == "raw") {
        return 1;
    }
    // The other host's is called like the volume there and has an extension, and what lies beside it one more.
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    usize::from(name.split(['.', '-']).next() == Some("1"))
}

/// The number of the place at `path` among those that have files beside them: the two images, and then the layers of each.
fn shelf_side_of(path: &Path) -> usize {
    match path.extension() {
        Some(extension) if extension == "layer" => LAYERS_OF + side_of(&path.with_extension("")),
        _ => side_of(path),
    }
}

/// The number of the place that holds the volume; on another host that is the second.
fn side_held_by(document: &VolumeDocument) -> usize {
    match &document.backend {
        Location::Local(spec) => side_of(spec.path()),
        Location::Remote(_) => 1,
        // Nobody moves to one here.
        Location::Foreign(_) => 0,
    }
}

/// What a job's report says of its end.
fn is_over(job: &Job) -> bool {
    matches!(job.state, JobState::Done | JobState::Failed | JobState::Cancelled)
}

impl Host {
    /// One life of the daemon.
    pub(super) async fn run_daemon(&self, process: &Process) {
        let env = process.env();
        self.begin_life();
        let core = match self.start_core(process).await {
            Ok(core) => core,
            Err(error) => {
                self.shared.world.event(format_args!("the daemon cannot serve: {error}"));
                env.sleep(Duration::from_millis(100)).await;
                self.restart(process);
                return;
            }
        };
        self.watch_machine(process, &core, false);
        if let Err(error) = self.add_machine(&core).await {
            self.say(format_args!("the machine is not known: {error}"));
        }
        for volume in self.besides() {
            let (process, core) = (process.clone(), core.clone());
            env.spawn(Box::pin(async move { Box::pin(volume.see_to_moves(&process, &core)).await }));
        }
        if self.shared.setup.changes_layers {
            if self.shared.setup.is_between_hosts {
                self.take_first_snapshot(&core).await;
            }
            for volume in self.volumes() {
                let (process, core) = (process.clone(), core.clone());
                env.spawn(Box::pin(async move { volume.change_layers(&process, &core).await }));
            }
        }
        Box::pin(self.see_to_moves(process, &core)).await;
    }

    /// Asks for the moves of this volume, and sees each to its end.
    async fn see_to_moves(&self, process: &Process, core: &::daemon::Core) {
        self.shared.now.lock().pools = core.pools(self.name());
        self.recall_job(core);
        loop {
            if let Some(job) = self.jobs(core).find(|job| !is_over(job)) {
                self.set_status(Status::Running);
                self.follow(process, core, &job).await;
            } else {
                Box::pin(self.next_move(process, core)).await;
            }
        }
    }

    /// The moves of this volume, the newest first.
    fn jobs(&self, core: &::daemon::Core) -> impl Iterator<Item = Job> {
        let name = self.name();
        core.jobs().into_iter().filter(move |job| job.volume == name)
    }

    async fn start_core(&self, process: &Process) -> Result<::daemon::Core, api::v1::Error> {
        let (ground, config) = self.platform(process);
        let core = ::daemon::Core::start(ground, config, Path::new(STATE_DIR)).await?;
        self.shared.now.lock().core = Some(core.clone());
        for volume in self.volumes() {
            volume.attach(&core).await?;
        }
        self.make_surrogate(&core).await?;
        self.see_up(process, &core).await?;
        self.make_cache(process, &core).await?;
        Ok(core)
    }

    /// Gives the volume to the daemon, unless it has it. One that it has had it must not forget.
    async fn attach(&self, core: &::daemon::Core) -> Result<(), api::v1::Error> {
        if self.is_gone_with_machine() {
            return Ok(());
        }
        let is_there = core.volumes().iter().any(|volume| volume.name == self.name());
        if !is_there && *self.shared.daemon_harness.is_attached.lock() {
            let what = format!("the daemon has forgotten {}", self.name());
            self.shared.world.violate(Invariant::CrashResume, what);
        }
        if !is_there {
            // A life before this may have begun to make it, and has told nobody.
            *self.shared.daemon_harness.slots.lock() = Slots::default();
            // Through the page cache, as QEMU does by default, or past it: that is the same but for another host of the disk.
            let cache = if self.is_shared() { self.shared.rng.pick(&["", ",cache=page"]) } else { "" };
            let backend = format!("file:{}{cache}", self.path_of(0));
            let (name, export) = (self.name().to_owned(), self.export());
            core.attach(AttachRequest { name, backend, export, read_only: false, accept_tombstone: false }).await?;
        }
        *self.shared.daemon_harness.is_attached.lock() = true;
        Ok(())
    }

    /// What came of a move that was under way when the process before died, if it is not under way any more.
    fn recall_job(&self, core: &::daemon::Core) {
        if self.jobs(core).any(|job| !is_over(&job)) {
            *self.shared.wanted.lock() = false;
            return;
        }
        let newest = self.jobs(core).next();
        // The life before may have died before anybody saw it run, and this one may have ended it already.
        let is_unseen = newest.as_ref().is_some_and(|job| job.id > *self.shared.daemon_harness.job_seen.lock());
        if self.status() == Status::Running || self.status() == Status::Idle && is_unseen {
            if let Some(job) = &newest {
                self.note_seen(job);
                self.check_wished(job);
                self.note_if_undone(job);
            }
            *self.shared.wanted.lock() = false;
            self.settle("the process died", None);
        }
    }

    fn note_seen(&self, job: &Job) {
        *self.shared.daemon_harness.job_seen.lock() = job.id;
    }

    /// Somebody has wished the move away.
    pub fn note_wish(&self) {
        *self.shared.daemon_harness.is_unwanted.lock() = true;
        self.note_wish_of_all();
    }

    /// A move that nobody has cancelled does not end as if somebody had.
    fn check_wished(&self, job: &Job) {
        if job.state == JobState::Cancelled && !self.is_wished_away(job) {
            let what = format!("job {} is told as cancelled, and nobody has cancelled it", job.id);
            self.shared.world.violate(Invariant::CancelSafe, what);
        }
    }

    fn note_if_undone(&self, job: &Job) {
        self.check_not_given_up(job);
        if self.holder() == *self.shared.from.lock() {
            self.note_undone(job);
        }
    }

    /// A move is over: where is the volume?
    fn settle(&self, why: &str, report: Option<Report>) {
        self.check_swept();
        let has_moved = self.holder() != *self.shared.from.lock();
        if !has_moved && !self.is_gone_alone() && self.shared.daemon_harness.peer.as_ref().is_some_and(PeerHost::holds)
        {
            let what = "the move is over, this host holds the volume, and so does the neighbour";
            self.shared.world.violate(Invariant::OneWriter, what);
        }
        self.set_status(match has_moved {
            true => Status::Switched(report.map(Box::new)),
            false => Status::Failed(why.to_owned()),
        });
    }

    async fn next_move(&self, process: &Process, core: &::daemon::Core) {
        loop {
            let asked = self.shared.asked.notified();
            if *self.shared.wanted.lock() && self.asks_itself() && self.asks_for_machine() {
                break;
            }
            if self.jobs(core).any(|job| !is_over(&job)) {
                // It has begun with those of others.
                return;
            }
            asked.await;
        }
        if self.shared.setup.has_machine {
            return self.move_machine(process, core).await;
        }
        if self.moved_together(process, core).await {
            return;
        }
        let request = self.request();
        self.plan(core, &request);
        let (is_between_hosts, options) = (self.shared.setup.is_between_hosts, &self.shared.setup.options);
        let started = core.start_tuned_move(self.name(), request, |tuned| {
            // What a move to another host needs, the daemon knows better.
            if !is_between_hosts {
                tuned.clone_from(options);
            }
        });
        match Box::pin(started).await {
            Ok(_) => {
                *self.shared.wanted.lock() = false;
                *self.shared.daemon_harness.is_unwanted.lock() = false;
            }
            Err(error) => {
                self.say(format_args!("the move is refused: {error}"));
                process.env().sleep(Duration::from_millis(20)).await;
            }
        }
    }

    /// What is asked for: a move to the other place.
    fn request(&self) -> MoveRequest {
        let from = self.holder();
        *self.shared.from.lock() = from;
        self.note_layers_before(1 - from);
        let options = &self.shared.setup.options;
        MoveRequest {
            to: match self.shared.setup.is_between_hosts {
                true => format!("b:{}", names(self.shared.number).there),
                false => format!("file:{}", self.path_of(1 - from)),
            },
            bandwidth: options.bandwidth,
            verify: match options.verify {
                migrate::Verify::Off => Verify::Off,
                migrate::Verify::Sample => Verify::Sample,
                migrate::Verify::Full => Verify::Full,
            },
            strategy: match options.strategy {
                migrate::Strategy::Mirror => Strategy::Mirror,
                migrate::Strategy::Dbt => Strategy::Dbt,
                migrate::Strategy::IncrementalDbt => Strategy::IncrementalDbt,
                migrate::Strategy::Snapshot => Strategy::Snapshot,
                migrate::Strategy::MirrorAsync => Strategy::MirrorAsync,
                migrate::Strategy::Auto => Strategy::Auto,
                migrate::Strategy::MirrorPaper => Strategy::MirrorPaper,
            },
            schedule: match options.schedule {
                migrate::ScheduleKind::Sequential => Schedule::Sequential,
                migrate::ScheduleKind::Follow => Schedule::Follow,
                migrate::ScheduleKind::ColdFirst => Schedule::ColdFirst,
            },
            follow_ratio: (options.schedule == migrate::ScheduleKind::Follow).then_some(options.follow_ratio),
            hot_blocks: options.hot_blocks,
            skip_zero: options.skip_zero,
            // As large as the daemon's own chunks ask for; the options of the scenario count in the end.
            read_cache: (options.read_cache_bytes > 0).then_some(options.read_cache_bytes.max(1 << 20)),
            deadline_ms: options.deadline_ms,
            on_no_converge: options.strategy.iterates().then_some(match options.on_no_converge {
                migrate::OnNoConverge::Abort => OnNoConverge::Abort,
                migrate::OnNoConverge::Force => OnNoConverge::Force,
                migrate::OnNoConverge::Mirror => OnNoConverge::Mirror,
            }),
            downtime_limit_ms: (options.strategy != migrate::Strategy::Mirror).then_some(options.downtime_limit_ms),
            buffer: options.buffer_bytes,
            surrogate: self.surrogate(),
            popular_threshold: self.surrogate().map(|_| self.shared.rng.pick(&[1, 1, 2, 4])),
            sole_copy: self.shared.setup.surrogate_stores == 1,
            overwrite: !self.shared.setup.is_between_hosts,
            delete_source: self.shared.rng.chance(0.3),
            ..MoveRequest::default()
        }
    }

    /// Most moves were planned a moment ago. Others begin with a look at their source, which takes 50 to 200 ms.
    fn plan(&self, core: &::daemon::Core, request: &MoveRequest) {
        let part = if self.shared.setup.is_between_hosts { 0.5 } else { 0.85 };
        if self.shared.rng.chance(part) {
            // It is refused where the volume is unknown, and so is the move.
            let _ = core.note_plan(self.name(), request, Prediction::default());
        }
    }

    /// Sees a job to its end.
    async fn follow(&self, process: &Process, core: &::daemon::Core, job: &Job) {
        let target = 1 - *self.shared.from.lock();
        let over = core.job_over(self.name());
        let is_over = Arc::new(AtomicBool::new(false));
        let looking = (self.clone(), process.clone(), core.clone(), Arc::clone(&is_over));
        process.look_on(async move {
            let (host, process, core, is_over) = looking;
            host.look_on(&process, &core, target, &is_over).await;
        });
        let (host, process_core, told) = (self.clone(), core.clone(), Arc::clone(&is_over));
        process.look_on(async move { host.give_the_word(&process_core, target, &told).await });
        over.await;
        is_over.store(true, Ordering::Relaxed);
        self.shared.now.lock().control = None;
        let ended = core.jobs().into_iter().find(|over| over.id == job.id);
        let state = ended.as_ref().map_or("forgotten", |job| job.state.name());
        let why = ended.as_ref().and_then(|job| job.error.as_ref()).map_or_else(String::new, ToString::to_string);
        self.shared.world.event(format_args!("job {} is {state}: {why}", job.id));
        self.note_draining(core);
        self.note_seen(job);
        if let Some(job) = &ended {
            self.check_wished(job);
            self.note_if_undone(job);
        }
        if ended.as_ref().is_some_and(|job| job.state == JobState::Done) && self.holder() != target {
            self.shared.world.violate(Invariant::OneWriter, "the job is done, but the journal is on the source");
        }
        if ended.as_ref().is_some_and(|job| job.state == JobState::Cancelled) {
            self.shared.world.occur(Occurrence::Told("cancelled"));
        }
        let report = ended.and_then(|job| job.report);
        if report.as_ref().is_some_and(|report| report.bytes_resumed > 0) {
            self.shared.world.occur(Occurrence::Told("resumed"));
        }
        report.iter().flat_map(Occurrence::of_skips).for_each(|what| self.shared.world.occur(what));
        report.iter().flat_map(Occurrence::of_redirection).for_each(|what| self.shared.world.occur(what));
        report.iter().flat_map(Occurrence::of_read_cache).for_each(|what| self.shared.world.occur(what));
        if self.holder() == target && report.as_ref().is_some_and(|report| report.equal == Some(false)) {
            let what = "switched although a comparison found a difference";
            self.shared.world.violate(Invariant::EqualAtSwitch, what);
        }
        self.settle(&why, report);
    }

    /// Looks at a job until `is_over`.
    /// An operator, who says that a move goes on that waits for a word. That is only asked for where a write of a dead daemon has landed
    /// late: otherwise the move waits for ever, and the run fails.
    async fn give_the_word(&self, core: &::daemon::Core, target: usize, is_over: &AtomicBool) {
        while !is_over.load(Ordering::Relaxed) {
            self.shared.world.sleep(Duration::from_secs(1)).await;
            let waits = core.jobs().iter().any(|job| {
                job.state == JobState::Paused
                    && job.error.as_ref().is_some_and(|error| error.code == ErrorCode::WrongState)
            });
            if waits && self.shared.sides[target].has_landed_late() {
                self.shared.world.event(format_args!("the operator says that the move goes on"));
                // The daemon may be about to end.
                let _ = core.steer(self.name(), "resume").await;
            }
        }
    }

    async fn look_on(&self, process: &Process, core: &::daemon::Core, target: usize, is_over: &AtomicBool) {
        let mut pause = Duration::from_micros(50);
        let control = loop {
            if is_over.load(Ordering::Relaxed) {
                return;
            }
            if let Some(control) = core.control(self.name()) {
                break control;
            }
            process.env().sleep(pause).await;
            // A journal that is stuck keeps a move from beginning for a minute.
            pause = (pause * 2).min(Duration::from_millis(5));
        };
        {
            let mut now = self.shared.now.lock();
            (now.control, now.target) = (Some(control.clone()), target);
            now.pools = core.pools(self.name());
        }
        self.check_running(core);
        self.watch_job(process, core, &control, (target, is_over)).await;
    }

    /// A job is over, and the journal says so: nothing of it is left beside source and target.
    fn check_swept(&self) {
        let shared = &self.shared;
        self.check_layers_swept();
        let is_certain = shared.daemon_harness.slots.lock().doubtful.is_empty();
        let left = [0, 1].map(|side| shared.shelf.numbers(side));
        if is_certain && left.iter().any(|numbers| !numbers.is_empty()) {
            shared.world.violate(Invariant::CancelSafe, format!("the job is over and overlays are left: {left:?}"));
        }
    }

    fn note_phase(&self, phase: Phase) {
        self.say(format_args!("the move is {phase}"));
        self.shared.world.occur(Occurrence::Comes(phase));
        self.shared.phase.send_replace(Some(phase));
    }

    /// Looks at a migration, and sees to a lost target, as an operator does.
    async fn watch_job(
        &self,
        process: &Process,
        core: &::daemon::Core,
        control: &Control,
        (target, is_over): (usize, &AtomicBool),
    ) {
        let mut watch = control.watch();
        let mut last = watch.borrow_and_update().clone();
        // It may be further than its beginning when it is first looked at.
        self.note_phase(last.phase);
        let mut losses = 0;
        loop {
            let progress = watch.borrow_and_update().clone();
            checks::monotonic(&self.shared.world, &last, &progress);
            if progress.phase != last.phase {
                self.note_phase(progress.phase);
                self.check_running(core);
            }
            if !matches!(progress.phase, Phase::Preparing | Phase::Copying) {
                self.shared.sides[target].stop_lying();
            }
            let is_lost = progress.phase == Phase::TargetLost && last.phase != Phase::TargetLost;
            let is_back = progress.phase == Phase::Copying && last.phase == Phase::TargetLost;
            if is_back && self.shared.daemon_harness.peer.as_ref().is_some_and(PeerHost::is_prepared) {
                let what = "the neighbour is filled further, and says that it is ready to hold the volume";
                self.shared.world.violate(Invariant::OneWriter, what);
            }
            last = progress;
            if is_lost {
                losses += 1;
                process.env().sleep(self.shared.rng.up_to(Duration::from_millis(300))).await;
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                if losses > 20 || !self.shared.setup.resumes_lost_targets {
                    self.note_wish();
                    // It may have ended meanwhile.
                    let _ = control.cancel();
                } else if !self.shared.setup.is_between_hosts {
                    control.resume();
                } else if self.shared.rng.chance(0.3) {
                    // Otherwise the daemon does by itself. It may be over meanwhile.
                    drop(core.steer(self.name(), "resume").await);
                }
            }
            if last.phase.is_final() || watch.changed().await.is_err() {
                return;
            }
            // The channel wakes this and the daemon's own watcher in an order that no seed repeats: not at this moment.
            process.env().sleep(Duration::from_micros(1)).await;
        }
    }
}
