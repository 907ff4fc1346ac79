//! Moves: asked for, queued, run, finished, remembered.
//!
//! ```text
//!            a place is free           every chunk is on both sides, the commit record is durable
//!  queued ───────────────────▶ running ─────────────────────────────────────────────────────────▶ finishing
//!    │                          ▲  │ pause, or the target was lost                                    │
//!    │                   resume │  ▼                                                                  │
//!    │ cancel                  paused                                   source retired, hook run       │
//!    ▼                          │ cancel, failure                                                      ▼
//!  cancelled ◀──────────────────┴──▶ failed                                            done, or failed (unfinished)
//! ```

mod convert;
mod finish;
mod forecast;
mod group;
mod history;
mod plan;
mod put_away;
mod rate_history;
mod rest;
mod run;
mod start;
mod surrogate;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::v1::{self, Error, ErrorCode, JobState};
use backends::{FileBackend, ImageTimes};
use block::BufferPool;
use env::EnvRef;
use migrate::{Control, Digests, Phase};
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, watch};

pub(crate) use finish::{cannot_resume, clear_job, complete, end, undo_without_target};
pub(crate) use forecast::Planned;
pub use group::CommitRecord;
pub use group::record::{GroupRecord, GroupState};
pub(crate) use group::{
    Committed, Group, MachineMember, NotCommitted, Outcome, commit_with_group, machine_member, record_of,
    undecided_record_of,
};
pub(crate) use history::History;
pub(crate) use run::{Started, drive, run, start_migration};
pub(crate) use start::{refuse_reserve_above, show};

use crate::journal::VolumeJournal;
use crate::open_backend::{OpenBackend, TimesOfImage};
use crate::problem::Result;
use crate::remote::RemoteVolumeDevice;
use convert::to_options;

/// A job that is not over, as the daemon holds it.
pub(crate) struct JobHandle {
    pub(crate) id: u64,
    inner: Mutex<Inner>,
    /// Becomes true when the job is over.
    over: watch::Sender<bool>,
    /// Becomes true when it shall not begin, or end.
    cancel: watch::Sender<bool>,
    /// Its place among the running moves, while it has one.
    place: Mutex<Option<OwnedSemaphorePermit>>,
    /// It was given a deadline.
    pressed: Notify,
    /// Remembers why the daemon itself ends it, for a daemon that comes after this one, too.
    journal: Arc<VolumeJournal>,
}

struct Inner {
    /// What does not change, and what is known at the end.
    job: v1::Job,
    /// What it came to, until its volume is free for the next.
    ended: Option<v1::Job>,
    control: Option<Control>,
    /// Where its copies take their buffers from.
    pool: Option<BufferPool>,
    /// Where to, while it runs.
    target: Goal,
    /// The file that it copies to, while this daemon has that open and nobody else can use it.
    open_target: Option<PathBuf>,
    paused: bool,
    /// What its target has is to be compared when it goes on.
    unverified: Option<Arc<dyn Digests>>,
    /// Somebody has changed how long it takes.
    is_steered: bool,
    /// What it may take of network and processors, if anybody looks after that.
    rates: Option<v1::Rates>,
}

/// How often a move that waits for a word looks for it.
const WORD_INTERVAL: Duration = Duration::from_millis(100);

/// Where a migration goes to, for whoever brings it back when it was lost.
#[derive(Clone)]
pub(crate) enum Goal {
    /// Something that needs no help; whoever made it may tell when it was changed last.
    Plain(Option<TimesOfImage>),
    /// A file or block device, which remembers that a sync has failed.
    File(Arc<FileBackend>),
    /// A volume of another host.
    Remote(Arc<RemoteVolumeDevice>),
}

impl Goal {
    pub(crate) fn of(open_backend: &OpenBackend) -> Self {
        match (open_backend.backend(), open_backend.remote_device()) {
            (Some(backend), _) => Self::File(Arc::clone(backend)),
            (None, Some(remote_device)) => Self::Remote(Arc::clone(remote_device)),
            (None, None) => Self::Plain(open_backend.times_without_lock()),
        }
    }
}

impl Inner {
    fn progress(&self, control: &Control) -> v1::Progress {
        let snapshot = control.snapshot();
        let mut progress = convert::to_api_progress(&snapshot);
        if let Goal::Remote(remote_device) = &self.target {
            progress.stream = Some(convert::to_api_stream(&remote_device.statistics(), snapshot.bytes_again));
            progress.last_error = remote_device.problem().or(progress.last_error);
        }
        progress.rates = self.rates.clone();
        progress
    }

    fn go_on(&mut self) {
        let Some(control) = &self.control else { return };
        if let (Goal::File(target), Phase::TargetLost) = (&self.target, control.snapshot().phase) {
            // The migration has given up what was not flushed there, and copies it again.
            target.forget_failed_sync();
        }
        match self.unverified.take() {
            Some(unverified) => control.resume_after_comparing(unverified),
            None => control.resume(),
        }
    }
}

impl JobHandle {
    pub(crate) fn new(job: v1::Job, paused: bool, journal: &Arc<VolumeJournal>) -> Self {
        let inner = Inner {
            ended: None,
            control: None,
            pool: None,
            target: Goal::Plain(None),
            open_target: None,
            paused,
            unverified: None,
            is_steered: paused,
            rates: None,
            job,
        };
        Self {
            id: inner.job.id,
            inner: Mutex::new(inner),
            over: watch::Sender::new(false),
            cancel: watch::Sender::new(false),
            place: Mutex::default(),
            pressed: Notify::new(),
            journal: Arc::clone(journal),
        }
    }

    /// How the API shows it.
    pub(crate) fn show(&self) -> v1::Job {
        let inner = self.inner.lock();
        let mut job = inner.job.clone();
        let Some(control) = inner.control.as_ref().filter(|_| !job.state.is_over()) else { return job };
        let progress = control.snapshot();
        if job.state == JobState::Running {
            job.state = match progress.phase {
                _ if inner.paused || progress.paused => JobState::Paused,
                Phase::TargetLost => JobState::Paused,
                phase if phase.is_committed() => JobState::Finishing,
                _ => JobState::Running,
            };
        }
        job.progress = Some(inner.progress(control));
        job
    }

    /// What is expected of it.
    pub(crate) fn predicted(&self, prediction: Option<v1::Prediction>) {
        self.inner.lock().job.prediction = prediction;
    }

    /// What it waits for before it can go on after a restart, or that it waits no more.
    pub(crate) fn waits_for(&self, error: Option<Error>) {
        self.inner.lock().job.error = error;
    }

    /// It waits for somebody to say that it goes on, because of `error`.
    pub(crate) fn stop_for(&self, error: Error) {
        let mut inner = self.inner.lock();
        (inner.paused, inner.job.state, inner.job.error) = (true, JobState::Paused, Some(error));
    }

    /// Waits until somebody says that it goes on.
    pub(crate) async fn told_to_go_on(&self, env: &EnvRef) {
        while self.is_paused() {
            env.sleep(WORD_INTERVAL).await;
        }
        let mut inner = self.inner.lock();
        (inner.job.state, inner.job.error) = (JobState::Queued, None);
    }

    /// It has a place among the running moves.
    pub(crate) fn keep_place(&self, place: OwnedSemaphorePermit) {
        *self.place.lock() = Some(place);
    }

    /// It needs its place no more.
    pub(crate) fn give_place_back(&self) {
        drop(self.place.lock().take());
    }

    /// Whether it has left the queue.
    pub(crate) fn has_begun(&self) -> bool {
        self.inner.lock().job.state != JobState::Queued
    }

    /// The migration to `target` has begun, steered by `control`.
    pub(crate) fn begin(&self, control: Control, pool: BufferPool, target: Goal) {
        let mut inner = self.inner.lock();
        if inner.paused {
            control.pause();
        }
        if inner.is_steered {
            // The limit of somebody who spoke while it waited for its place.
            control.set_bandwidth(inner.job.request.bandwidth.filter(|limit| *limit > 0).map(block::Bytes));
        }
        inner.job.state = JobState::Running;
        if *self.cancel.borrow() {
            // Somebody cancelled it while the mirror came into the guest's path.
            let _ = control.cancel();
        }
        (inner.control, inner.pool) = (Some(control), Some(pool));
        inner.target = target;
    }

    /// What steers its migration, once it has begun.
    pub(crate) fn control(&self) -> Option<Control> {
        self.inner.lock().control.clone()
    }

    /// Where its copies take their buffers from, once it has begun.
    pub(crate) fn pool(&self) -> Option<BufferPool> {
        self.inner.lock().pool.clone()
    }

    /// The target holds the volume; what is left is to tidy up.
    pub(crate) fn finishing(&self) {
        self.inner.lock().job.state = JobState::Finishing;
    }

    /// It is over; `change` says how. Nobody is shown that before [`announce_end`](Self::announce_end): whoever sees a move end may
    /// begin the next.
    pub(crate) fn end(&self, change: impl FnOnce(&mut v1::Job)) -> v1::Job {
        let mut inner = self.inner.lock();
        let mut job = inner.job.clone();
        if let Some(control) = &inner.control {
            job.progress = Some(inner.progress(control));
        }
        change(&mut job);
        if let (Some(prediction), Some(report), JobState::Done) = (&mut job.prediction, &job.report, job.state) {
            forecast::score(prediction, report, !inner.is_steered);
        }
        inner.ended = Some(job.clone());
        job
    }

    /// Shows that it is over, and tells those who wait.
    pub(crate) fn announce_end(&self) {
        let mut inner = self.inner.lock();
        if let Some(job) = inner.ended.take() {
            inner.job = job;
        }
        drop(inner);
        self.over.send_replace(true);
    }

    /// Waits until it is over.
    pub(crate) async fn wait(&self) {
        // The sender lives as long as this handle.
        let _ = self.over.subscribe().wait_for(|over| *over).await;
    }

    /// Waits until somebody cancels it.
    pub(crate) async fn cancelled(&self) {
        let _ = self.cancel.subscribe().wait_for(|cancel| *cancel).await;
    }

    pub(crate) fn pause(&self) -> Result<()> {
        self.refuse_when_committed("paused")?;
        let mut inner = self.inner.lock();
        (inner.paused, inner.is_steered) = (true, true);
        if let Some(control) = &inner.control {
            control.pause();
        }
        drop(inner);
        Ok(())
    }

    pub(crate) fn resume(&self) {
        let mut inner = self.inner.lock();
        let was_paused = std::mem::take(&mut inner.paused);
        match &inner.target {
            // Its host is tried at once, and the migration goes on when that answers.
            Goal::Remote(remote_device) if !was_paused => remote_device.kick(),
            Goal::Remote(_) | Goal::File(_) | Goal::Plain(_) => inner.go_on(),
        }
    }

    /// Whether it was told to wait.
    pub(crate) fn is_paused(&self) -> bool {
        self.inner.lock().paused
    }

    /// Tries a lost target again, after what it has was compared if there are doubts; if the job was told to wait, when it is
    /// told to go on.
    pub(crate) fn retry_target(&self, unverified: Option<Arc<dyn Digests>>) {
        let mut inner = self.inner.lock();
        inner.unverified = unverified;
        if !inner.paused {
            inner.go_on();
        }
    }

    pub(crate) fn cancel(&self) -> Result<()> {
        self.refuse_when_committed("cancelled")?;
        // First, so that a migration that begins at this moment sees it.
        self.cancel.send_replace(true);
        let control = self.inner.lock().control.clone();
        match control {
            Some(control) => control.cancel().map_err(|error| Error::new(ErrorCode::WrongState, error.chain())),
            None => Ok(()),
        }
    }

    /// Cancels it because of `error`, which it then ends with.
    pub(crate) fn fail(&self, error: Error) {
        self.journal.fail_job(error);
        // If it is too late for that, the commit has won and there is nothing to fail.
        let _ = self.cancel();
    }

    /// Why it ends or has ended, if nobody has cancelled it.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.journal.failure()
    }

    pub(crate) fn set_bandwidth(&self, bandwidth: Option<u64>) {
        let mut inner = self.inner.lock();
        inner.job.request.bandwidth = bandwidth;
        inner.is_steered = true;
        if let Some(control) = &inner.control {
            control.set_bandwidth(bandwidth.map(block::Bytes));
        }
    }

    /// How it was asked for, with what was changed since.
    pub(crate) fn request(&self) -> v1::MoveRequest {
        self.inner.lock().job.request.clone()
    }

    /// This daemon has its target open.
    pub(crate) fn has_target(&self, target: &OpenBackend) {
        self.inner.lock().open_target = target.place.local_path().map(Path::to_owned);
    }

    /// The file that it copies to, while this daemon has that open.
    pub(crate) fn open_target(&self) -> Option<PathBuf> {
        self.inner.lock().open_target.clone()
    }

    /// Its target is to be taken back: the lock on it goes with the last who has it open.
    pub(crate) fn let_go_of_target(&self) {
        let mut inner = self.inner.lock();
        inner.open_target = None;
        if let Goal::File(_) = inner.target {
            inner.target = Goal::Plain(None);
        }
    }

    /// When its target was changed last, if that is a file.
    fn target_times(&self) -> Option<ImageTimes> {
        match &self.inner.lock().target {
            Goal::File(backend) => backend.times(),
            Goal::Plain(times) => times.as_ref().and_then(|times| times()),
            Goal::Remote(_) => None,
        }
    }

    /// Whether it is under way to another host's daemon.
    pub(crate) fn goes_to_host(&self) -> bool {
        matches!(self.inner.lock().target, Goal::Remote(_))
    }

    /// It may take so much of the network whatever others want, in bytes a second.
    pub(crate) fn set_reserve(&self, reserve: Option<u64>) {
        self.inner.lock().job.request.reserve = reserve;
    }

    /// It shall be over so long after its start, or whenever it is.
    pub(crate) fn set_deadline(&self, deadline_ms: Option<u64>) {
        let mut inner = self.inner.lock();
        inner.job.request.deadline_ms = deadline_ms;
        inner.is_steered = true;
        if let Some(control) = &inner.control {
            control.set_deadline(deadline_ms.map(Duration::from_millis));
        }
        drop(inner);
        self.pressed.notify_one();
    }

    /// Waits until it has a deadline.
    pub(crate) async fn pressed(&self) {
        while self.request().deadline_ms.is_none() {
            self.pressed.notified().await;
        }
    }

    /// What it may take now.
    pub(crate) fn agreed(&self, rates: v1::Rates) {
        self.inner.lock().rates = Some(rates);
    }

    /// What it took beside others.
    pub(crate) fn rates(&self) -> Option<v1::Rates> {
        self.inner.lock().rates.clone()
    }

    /// It was switched over so long after its start.
    pub(crate) fn switched_after(&self, age: Duration) {
        let mut inner = self.inner.lock();
        let deadline_ms = inner.job.request.deadline_ms;
        // The last look may have been before it was changed.
        inner.rates.iter_mut().for_each(|rates| rates.deadline_ms = deadline_ms);
        let Some(deadline) = deadline_ms else { return };
        let rates = inner.rates.get_or_insert_default();
        rates.deadline_ms = deadline_ms;
        rates.deadline_kept = Some(age <= Duration::from_millis(deadline));
    }

    fn refuse_when_committed(&self, what: &str) -> Result<()> {
        match self.show().state {
            JobState::Queued | JobState::Running | JobState::Paused => Ok(()),
            _ => Err(Error::new(
                ErrorCode::WrongState,
                format!("the volume is on its target: it cannot be {what} any more"),
            )
            .with_hint("to go back, move it again once this is done")),
        }
    }
}
