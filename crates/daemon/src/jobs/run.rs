//! A job's life from its place in the queue to the migration's outcome.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode, Prediction};
use block::{BufferPool, Bytes, ErrorKind};
use migrate::{
    Comparison, Control, DeviceDigests, Handover, HandoverContext, MapIdentity, Migration, MigrationContext,
    MoveOptions, Outcome, Phase, Progress, ProgressMap, UnderWay,
};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tracing::Instrument;

use super::finish::{Ending, finish};
use super::rest;
use super::{Goal, JobHandle};
use crate::audit::unix_ms;
use crate::daemon::Daemon;
use crate::document::JobDocument;
use crate::gauge::MigrationMeter;
use crate::open_backend::OpenBackend;
use crate::rates::{ControllerContext, keep};
use crate::remote::RemoteVolumeDevice;
use crate::stack::{StackedCache, StackedRedirect};
use crate::volume::Volume;
use crate::workers::Worker;

/// How long a lost target is left alone before the copy tries it again; after the last one somebody must say so.
const LOST_TARGET_RESTS: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(5), Duration::from_secs(20)];
/// A guest does not wait longer for a target that answers nothing: a file, a block device, an export, another host.
const TARGET_SILENCE_MS: u64 = 250;
/// A target that has been there for so long since its last loss is tried as often as at first.
const LOSSES_FORGOTTEN: Duration = Duration::from_secs(120);

/// A migration whose mirror is in the guest's path.
pub(crate) struct Started {
    control: Control,
    work: Pin<Box<dyn Future<Output = Outcome> + Send>>,
    /// Where its copies take their buffers from.
    pool: BufferPool,
    under_way: UnderWay,
    /// Copies run on a worker of their own.
    worker: Worker,
}

/// Waits for the job's turn unless it has a place, runs it, and tidies up.
pub(crate) async fn run(
    daemon: Arc<Daemon>,
    volume: Arc<Volume>,
    job: Arc<JobHandle>,
    target: OpenBackend,
    place: Option<OwnedSemaphorePermit>,
) {
    job.has_target(&target);
    let turn = tokio::select! {
        biased;
        () = job.cancelled() => Err(Ending::Cancelled(None)),
        turn = wait_for_turn(&daemon, &volume, &target, place) => turn.map_err(|error| Ending::Failed(error, None)),
    };
    match turn {
        Ok(place) => job.keep_place(place),
        Err(ending) => return finish(&daemon, &volume, &job, ending, target).await,
    };
    let prediction = daemon.predict(&volume, &job, &target).await;
    job.predicted(prediction.clone());
    match start_migration(&daemon, &volume, &target, prediction).await {
        Ok(started) => Box::pin(drive(daemon, volume, Arc::clone(&job), target, started)).await,
        Err(error) => finish(&daemon, &volume, &job, Ending::Failed(error, None), target).await,
    }
    job.give_place_back();
}

/// Waits for a place in the queue, and for the target's host if that is another one. Whoever waits for a host takes nobody's
/// place.
async fn wait_for_turn(
    daemon: &Daemon,
    volume: &Volume,
    target: &OpenBackend,
    mut place: Option<OwnedSemaphorePermit>,
) -> block::Result<OwnedSemaphorePermit> {
    loop {
        daemon.wait_for_host(volume, target).await?;
        let place = match place.take() {
            Some(place) => place,
            None => Arc::clone(&daemon.running_jobs).acquire_owned().await.expect("the queue is never closed"),
        };
        if target.remote_device().is_none_or(|remote_device| remote_device.is_connected()) {
            return Ok(place);
        }
    }
}

/// Puts the mirror into the guest's path; what is expected of the move goes on record with that. When this fails nothing has
/// changed.
pub(crate) async fn start_migration(
    daemon: &Daemon,
    volume: &Arc<Volume>,
    target: &OpenBackend,
    prediction: Option<Prediction>,
) -> block::Result<Started> {
    let now = unix_ms(daemon.env.wall_clock());
    let rested = volume.document().job.as_ref().and_then(|job| job.rested);
    let is_undisturbed = volume.with_backend(|source| rest::is_undisturbed(rested, source, target)).unwrap_or_default();
    volume
        .journal
        .update_job(|job| {
            job.rested = None;
            (job.disturbed, job.goes_on_disturbed) = (false, false);
            (job.left_unix_ms, job.left_target, job.target_was_in_use) = (None, None, false);
            job.record.sessions += 1;
            job.begun_unix_ms = job.begun_unix_ms.or(Some(now));
            job.prediction = prediction.or(job.prediction.take());
        })
        .await?;
    let document = volume.document();
    let Some(job) = &document.job else {
        return Err(block::Error::new(block::ErrorKind::Internal, "a job that nobody asked for was to be run"));
    };
    if job.target.is_shared() {
        return start_handover(daemon, volume, job, target).await;
    }
    let redirected = Box::pin(daemon.begin_redirect(volume, job)).await;
    redirected.map_err(|error| block::Error::new(block::ErrorKind::Invalid, error.message))?;
    let redirect = volume.with_stack(|stack| stack.redirect().map(StackedRedirect::redirect)).flatten();
    let (slot, below) = Box::pin(volume.copy_face()).await?;
    // With overlays that a restart has found the slot shows the highest of them.
    let backend = volume.snapshots().and_then(|_| volume.with_backend(|open_backend| open_backend.device.clone()));
    let source = backend.unwrap_or(below);
    let snapshots = match (job.record.options.strategy, volume.snapshots()) {
        (migrate::Strategy::Snapshot, None) => {
            let lock_wait = daemon.config.lock_wait();
            let opened = crate::overlays::open(volume, job, &source, &daemon.overlay_context(), lock_wait).await;
            let opened = opened.map_err(|error| block::Error::new(block::ErrorKind::Invalid, error.message))?;
            volume.set_snapshots(Some(Arc::clone(&opened)));
            Some(opened)
        }
        (_, snapshots) => snapshots,
    };
    let cache_face = volume.with_stack(|stack| stack.cache().map(StackedCache::copy_face)).flatten();
    let open_options = volume.open_options(daemon.config.lock_wait());
    let comparison = comparison(daemon, volume, target, &open_options).await;
    let offload = match volume.with_stack(|stack| stack.bypass().map(OpenBackend::end)).flatten() {
        Some(source) => daemon.backends.offload(source, target.end()).await,
        None => None,
    };
    let under_way = under_way(daemon, job);
    let mut progress_map = Box::pin(open_progress(daemon, volume, job, source.size())).await?;
    let pool = BufferPool::new(Bytes::mib(daemon.config.copy_pool_mib));
    if !is_undisturbed {
        // What it reads of the medium proves more than what the page cache has.
        let device = match &comparison {
            Some(comparison) => comparison.target.clone(),
            None => target.ground()?,
        };
        progress_map = progress_map.compared_by(Arc::new(DeviceDigests::new(device, pool.clone())));
    }
    let context = MigrationContext {
        env: Arc::clone(&daemon.env),
        slot,
        source,
        target: target.ground()?,
        copy_face: redirect.as_ref().map(|redirect| redirect.copy("the volume without its popularity")).or(cache_face),
        redirect,
        medium: daemon.medium_of(volume, job.request.schedule == api::v1::Schedule::Follow),
        // What an earlier process wrote there may be lost although it reads as it was written.
        target_is_fresh: job.record.sessions == 1 && job.target.reads_zero(),
        phase: job.record.phase,
        under_way,
        journal: daemon.job_journal(volume, crate::remote::job_journal(daemon, volume, target))?,
        progress_map: Some(progress_map),
        meter: Some(Arc::new(MigrationMeter::new(volume.meter.clone()))),
        comparison,
        offload,
        pool: pool.clone(),
        snapshots,
    };
    let (worker, options) = worker_for(daemon, job)?;
    let span = span_of(volume, job.id);
    let (control, work) =
        worker.run(async move { Box::pin(Migration::start(context, options).instrument(span)).await }).await?;
    Ok(Started { control, work: Box::pin(work), pool, under_way, worker })
}

/// Where the work of a job is done, and how it was asked for.
fn worker_for(daemon: &Daemon, job: &JobDocument) -> block::Result<(Worker, MoveOptions)> {
    // A job that an older program has recorded has no limit.
    let silence_ms = Some(job.record.options.silence_ms.unwrap_or(TARGET_SILENCE_MS));
    let options = MoveOptions { silence_ms, ..job.record.options.clone() };
    let worker = daemon.spawner.spawn_worker(&format!("copy-{}", job.id));
    let worker = worker.map_err(|error| block::Error::new(ErrorKind::Internal, error.to_string()))?;
    Ok((worker, options))
}

/// Hands a volume over that lies where the other host reaches it, too.
async fn start_handover(
    daemon: &Daemon,
    volume: &Arc<Volume>,
    job: &JobDocument,
    target: &OpenBackend,
) -> block::Result<Started> {
    let gone = || block::Error::new(ErrorKind::Disconnected, "the volume is not served");
    let slot = volume.slot().ok_or_else(gone)?;
    let under_way = under_way(daemon, job);
    let (source, flushed) = (Arc::clone(volume), Arc::downgrade(volume));
    let context = HandoverContext {
        env: Arc::clone(&daemon.env),
        source: slot.device(),
        slot,
        target: target.ground()?,
        phase: job.record.phase,
        under_way,
        journal: daemon.job_journal(volume, crate::remote::job_journal(daemon, volume, target))?,
        meter: Some(Arc::new(MigrationMeter::new(volume.meter.clone()))),
        let_go: Box::new(move || source.let_go_of_backend()),
        flush_failed: Arc::new(move || _ = flushed.upgrade().map(|source| source.fail_next_flush())),
    };
    let (worker, options) = worker_for(daemon, job)?;
    let (control, work) = Handover::start(context, options)?;
    let pool = BufferPool::new(Bytes::mib(daemon.config.copy_pool_mib));
    Ok(Started { control, work: Box::pin(work), pool, under_way, worker })
}

async fn comparison(
    daemon: &Daemon,
    volume: &Volume,
    target: &OpenBackend,
    open_options: &crate::open_backend::BackendOpenOptions,
) -> Option<Comparison> {
    let source = volume.with_stack(|stack| stack.bypass().map(OpenBackend::comparison_spec)).flatten()?;
    let source = source.open(open_options, &*daemon.env).await?;
    let target = target.comparison_spec().open(open_options, &*daemon.env).await?;
    Some(Comparison { source, target })
}

async fn open_progress(daemon: &Daemon, volume: &Volume, job: &JobDocument, size: Bytes) -> block::Result<ProgressMap> {
    let (chunk, page_chunks) = (job.record.options.chunk_size()?, daemon.map_page_chunks);
    let skips = job.record.options.skip_zero;
    let bytes_needed = if skips { ProgressMap::bytes_needed_with_skips } else { ProgressMap::bytes_needed };
    let path = daemon
        .state
        .make_progress(&volume.name, bytes_needed(size, chunk, page_chunks))
        .map_err(|error| block::Error::new(block::ErrorKind::Io, error.message))?;
    let store = daemon.backends.open_store(&path, &*daemon.env).await?;
    let identity =
        MapIdentity { boot: daemon.boot, job: *job.uuid.as_bytes(), volume: size, chunk, page_chunks, skips };
    ProgressMap::open(store.device, identity).await
}

/// Drives a migration to its end and tidies up.
pub(crate) async fn drive(
    daemon: Arc<Daemon>,
    volume: Arc<Volume>,
    job: Arc<JobHandle>,
    target: OpenBackend,
    started: Started,
) {
    let Started { control, work, pool, under_way, worker } = started;
    job.has_target(&target);
    job.begin(control.clone(), pool, Goal::of(&target));
    let verify = volume.document().job.as_ref().map_or_else(migrate::Verify::default, |job| job.record.options.verify);
    let mut driving = worker.spawn(work.instrument(span_of(&volume, job.id)));
    let outcome = {
        tokio::select! {
            biased;
            outcome = &mut driving => outcome,
            never = watch(&daemon, &volume, &job, &control, target.remote_device()) => match never {},
            never = crate::adopt::watch(&daemon, &volume, &job) => match never {},
            never = keep(ControllerContext {
                daemon: &daemon,
                job: &job,
                control: &control,
                remote_device: target.remote_device(),
                worker: &worker,
                under_way,
                verify,
            }) => match never {},
        }
    };
    let Ok(outcome) = outcome else {
        // The mirror is in the guest's path and nobody drives it any more. A new process resumes what a half-dead one
        // cannot.
        tracing::error!(volume = volume.name, "the migration panicked; the daemon ends, and resumes it when it starts");
        daemon.spawner.abort_process();
        return;
    };
    let ending = match outcome {
        Outcome::Switched(report) => {
            job.switched_after(Duration::from_secs_f64(report.age_seconds.max(0.0)));
            Ending::Switched(report)
        }
        Outcome::Cancelled(report) => Ending::Cancelled(Some(report)),
        Outcome::Failed { error, report } => Ending::Failed(error, Some(report)),
    };
    finish(&daemon, &volume, &job, ending, target).await;
}

/// Whose move it is, before every line that the engine logs of it.
fn span_of(volume: &Volume, job: u64) -> tracing::Span {
    tracing::error_span!("move", volume = volume.name, job)
}

/// Since when the move has been under way: its record says when its turn came.
fn under_way(daemon: &Daemon, job: &JobDocument) -> UnderWay {
    let now = unix_ms(daemon.env.wall_clock());
    let age = Duration::from_millis(job.begun_unix_ms.map_or(0, |begun| now.saturating_sub(begun)));
    UnderWay::new(age, daemon.env.now())
}

/// Sees to a target that is lost: a full one ends the job, another one is tried again a few times.
async fn watch(
    daemon: &Daemon,
    volume: &Volume,
    job: &JobHandle,
    control: &Control,
    remote_device: Option<&Arc<RemoteVolumeDevice>>,
) -> std::convert::Infallible {
    let mut progress = control.watch();
    let mut rests = LOST_TARGET_RESTS.iter();
    let (mut seen, mut seen_to) = (0, daemon.env.now());
    loop {
        let Some(lost) = next_loss(&mut progress, seen).await else { return std::future::pending().await };
        seen = lost.target_losses;
        if daemon.env.now().since(seen_to) >= LOSSES_FORGOTTEN {
            rests = LOST_TARGET_RESTS.iter();
        }
        let failure = lost.error.clone();
        let message =
            failure.as_ref().map_or_else(|| "the target was lost".to_owned(), |failure| failure.message.clone());
        tracing::warn!(job = job.id, message, "the target is lost; the guest goes on with the source");
        if failure.is_some_and(|failure| failure.kind == block::ErrorKind::NoSpace.name()) {
            let error = Error::new(ErrorCode::NoSpace, format!("the target ran out of space: {message}"));
            job.fail(error.with_hint("the guest is on the source; free some space there, or choose another target"));
        } else if let Some(remote_device) = remote_device {
            daemon.bring_host_back(volume, job, control, remote_device).await;
        } else if let Some(rest) = rests.next() {
            daemon.env.sleep(*rest).await;
            if control.snapshot().phase == Phase::TargetLost {
                job.retry_target(None);
            }
        }
        seen_to = daemon.env.now();
    }
}

/// The next time that the target is lost after `seen` losses. A target that came back and was lost again while nobody looked
/// shows in their number alone. None once the migration is over.
async fn next_loss(progress: &mut watch::Receiver<Progress>, seen: u64) -> Option<Progress> {
    let is_new = |now: &Progress| now.phase == Phase::TargetLost && now.target_losses > seen;
    progress.wait_for(is_new).await.ok().map(|lost| lost.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(phase: Phase, target_losses: u64) -> Progress {
        Progress { phase, target_losses, ..Progress::default() }
    }

    #[tokio::test]
    async fn a_target_that_is_lost_again_before_anybody_looks_is_seen_to_again() {
        let (sender, mut receiver) = watch::channel(progress(Phase::Copying, 0));
        sender.send_replace(progress(Phase::TargetLost, 1));
        let lost = next_loss(&mut receiver, 0).await.expect("it is lost");
        assert_eq!(lost.target_losses, 1);
        sender.send_replace(progress(Phase::Copying, 1));
        sender.send_replace(progress(Phase::TargetLost, 2));
        let again = tokio::time::timeout(Duration::from_secs(10), next_loss(&mut receiver, 1)).await;
        assert_eq!(again.expect("nobody sees to it").expect("it is lost").target_losses, 2);
        let never = tokio::time::timeout(Duration::from_millis(20), next_loss(&mut receiver, 2)).await;
        assert!(never.is_err(), "one loss is seen to twice");
    }
}
