//! After a start: every volume's journal is read, and what it says is made true again.
//!
//! ```text
//!  journal ──▶ locks, waiting for a dead process's ──▶ stack ──▶ mirror, if a move was under way ──▶ socket
//!                                                                  │ commit on record
//!                                                                  └──▶ finished forward, after the socket is back
//! ```
//!
//! A guest waits meanwhile, so volumes come back beside each other and none waits for another's trouble.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use futures::future::join_all;

use crate::daemon::Daemon;
use crate::document::ArrivalStage;
use crate::held::Held;
use crate::jobs::{self, JobHandle};
use crate::journal::VolumeJournal;
use crate::problem::{Result, of_backend};
use crate::volume::Volume;

/// How often an arbiter that cannot be asked is asked again.
const ARBITER_REST: Duration = Duration::from_secs(2);

/// Brings back every volume. One that cannot be brought back is shown as down, with the reason.
pub(crate) async fn recover(daemon: &Arc<Daemon>) -> Result<()> {
    let names = daemon.state.volume_names()?;
    join_all(names.iter().map(|name| recover_volume(daemon, name))).await;
    if let Err(error) = daemon.sweep_making() {
        tracing::warn!(%error, "what was in the making is looked at again by the next start");
    }
    daemon.settle_groups();
    daemon.say_farewells_again();
    Ok(())
}

async fn recover_volume(daemon: &Arc<Daemon>, name: &str) {
    let path = daemon.layout.journal(name);
    let journal = match VolumeJournal::open(&path, &daemon.backends, &*daemon.env).await {
        Ok(journal) => journal,
        Err(error) => {
            let what = format!("the journal of {name}, {}, cannot be read: {}", path.display(), error.chain());
            let error = Error::new(ErrorCode::JournalUnreadable, what)
                .with_hint("put back a copy of it and restart; the volume's bytes are untouched");
            tracing::error!(volume = name, %error, "a volume cannot be brought back");
            daemon.admit_unreadable(name, error);
            return;
        }
    };
    let volume = Arc::new(Volume::new(name, journal, Arc::clone(&daemon.env)));
    daemon.admit(Arc::clone(&volume));
    if let Some(job) = &volume.document().job {
        daemon.history.note(job.id);
    }
    let _operation = volume.operation.lock().await;
    match daemon.settle_asked(&volume).await {
        Ok(()) => bring_back_or_say_why(daemon, &volume).await,
        Err(error) => {
            volume.set_problem(error);
            let (daemon, volume) = (Arc::clone(daemon), Arc::clone(&volume));
            let env = Arc::clone(&daemon.env);
            env.spawn(Box::pin(async move { bring_back_once_settled(&daemon, &volume).await }));
        }
    }
}

/// Who holds the volume nobody knows here: its guest waits until the arbiter says so.
async fn bring_back_once_settled(daemon: &Arc<Daemon>, volume: &Arc<Volume>) {
    loop {
        daemon.env.sleep(ARBITER_REST).await;
        let _operation = volume.operation.lock().await;
        match daemon.settle_asked(volume).await {
            Ok(()) => return bring_back_or_say_why(daemon, volume).await,
            Err(error) => tracing::info!(volume = volume.name, %error, "a volume waits for the arbiter"),
        }
    }
}

async fn bring_back_or_say_why(daemon: &Arc<Daemon>, volume: &Arc<Volume>) {
    if let Err(error) = bring_back(daemon, volume).await {
        volume.set_problem(error);
    }
}

async fn bring_back(daemon: &Arc<Daemon>, volume: &Arc<Volume>) -> Result<()> {
    if let Some(job) = &volume.document().job
        && daemon.history.find(job.id).is_some()
    {
        // It was over, and only this was left to be done.
        jobs::clear_job(daemon, volume).await;
    }
    let document = volume.document();
    let hold = volume.hold_options(daemon.config.lock_wait());
    if document.arrival.as_ref().is_some_and(|arrival| !matches!(arrival.stage, ArrivalStage::Held { .. })) {
        // Another host holds it, as far as is known here: it is filled on, or taken, when that host asks for it.
        return daemon.hold_arrival(volume).await;
    }
    let held = daemon.hold(volume, &document.backend, &hold).await;
    let held = held.map_err(|error| of_backend(&error, "the backend"))?;
    if let Some(relay) = held.relay() {
        // Another host holds it, and takes it now if it has not yet.
        relay.turn(document.epoch);
    }
    let (_, export) = volume.bring_up_whole(held, daemon.pool.clone(), &daemon.footing(), &hold).await?;

    let handle = document.job.as_ref().map(|job| {
        let handle = Arc::new(JobHandle::new(jobs::show(volume, job), job.paused, &volume.journal));
        volume.set_job(Some(Arc::clone(&handle)));
        handle
    });
    let next = match (&document.job, &handle) {
        (Some(job), Some(handle)) => resume(daemon, volume, job, handle).await,
        _ => Next::Nothing,
    };
    let offered = daemon.network.offer(&volume.uri()?, export, document.socket_owner).await;
    if offered.is_ok() {
        tracing::info!(volume = volume.name, backend = %document.backend, "the volume is back");
    }
    if let (Some(handle), next) = (handle, next) {
        let (daemon, volume) = (Arc::clone(daemon), Arc::clone(volume));
        let env = Arc::clone(&daemon.env);
        env.spawn(Box::pin(async move { next.carry_out(daemon, volume, handle).await }));
    }
    offered?;
    if document.adoption.is_some() {
        // QEMU reaches the export in its own time; nobody else waits for that.
        let (daemon, volume) = (Arc::clone(daemon), Arc::clone(volume));
        tokio::spawn(async move { crate::adopt::recover(&daemon, &volume).await });
    }
    Ok(())
}

/// What is left to be done for a volume's job once the volume is served.
enum Next {
    Nothing,
    /// It is in the queue, as it was.
    Queue(Held),
    /// The mirror is in place.
    Drive(Held, jobs::Started),
    /// It was committed.
    Complete,
    /// It cannot go on.
    Undo(Error),
}

async fn resume(daemon: &Daemon, volume: &Volume, job: &crate::document::JobDocument, handle: &JobHandle) -> Next {
    if job.committed.is_some() {
        handle.finishing();
        return Next::Complete;
    }
    let hold = volume.hold_options(daemon.config.lock_wait()).for_target();
    let target = match daemon.hold(volume, &job.target.location(), &hold).await {
        Ok(target) => target,
        Err(error) => return Next::Undo(jobs::cannot_resume(volume, &error)),
    };
    if job.record.sessions == 0 {
        return Next::Queue(target);
    }
    match jobs::start_migration(daemon, volume, &target, None).await {
        Ok(started) => Next::Drive(target, started),
        Err(error) => Next::Undo(jobs::cannot_resume(volume, &error)),
    }
}

impl Next {
    async fn carry_out(self, daemon: Arc<Daemon>, volume: Arc<Volume>, handle: Arc<JobHandle>) {
        match self {
            Self::Nothing => {}
            Self::Queue(target) => jobs::run(daemon, volume, handle, target).await,
            Self::Drive(target, started) => {
                // It had its place before the restart; others wait until there is one again.
                let _place = Arc::clone(&daemon.places).try_acquire_owned();
                jobs::drive(daemon, volume, handle, target, started).await;
            }
            Self::Complete => jobs::complete(&daemon, &volume, &handle).await,
            Self::Undo(error) => {
                let error = handle.failure().unwrap_or(error);
                jobs::undo_without_target(&daemon, &volume, &handle, error).await;
            }
        }
    }
}
