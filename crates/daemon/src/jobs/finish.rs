//! What comes after a migration: forward once the commit is on record, back before it.

use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode, JobState, Report};
use backends::{Retiring, TargetError};
use block::Bytes;
use futures::future::{Either, select};
use migrate::Phase;
use uuid::Uuid;

use super::put_away::put_away;
use super::{JobHandle, convert, record_of};
use crate::audit::{Peer, unix_ms};
use crate::daemon::Daemon;
use crate::document::{Committed, JobDocument, LayerDocument, RedirectLayer, VolumeDocument};
use crate::location::Location;
use crate::open_backend::OpenBackend;
use crate::problem::{of_backend, of_migration};
use crate::remote::RemoteVolumeDevice;
use crate::stack::{Stack, remove_layer_files, resume_drains};
use crate::volume::Volume;

/// How long a source that a program of QEMU's has is waited for before it is left as it is, and how often it is tried.
const RETIRE_WAIT: Duration = Duration::from_secs(2);
const RETIRE_INTERVAL: Duration = Duration::from_millis(50);
/// The end of a move that could not be stored is stored again after this.
const STRIKE_REST: Duration = Duration::from_secs(1);

/// How a migration ended.
pub(crate) enum Ending {
    /// The target holds the volume.
    Switched(migrate::Report),
    /// The source does, as somebody wished.
    Cancelled(Option<migrate::Report>),
    /// The source does, because of an error.
    Failed(block::Error, Option<migrate::Report>),
}

/// Does what is to be done after the migration, and tells who waits. What a surrogate holds that the source lacks goes back aside.
pub(crate) async fn finish(
    daemon: &Arc<Daemon>,
    volume: &Arc<Volume>,
    job: &JobHandle,
    ending: Ending,
    target: OpenBackend,
) {
    let sessions = volume.document().job.as_ref().map_or(1, |job| job.record.sessions);
    let (rates, redirection) = (job.rates(), volume.redirection());
    let convert = |report: &migrate::Report| Report {
        rates: rates.clone(),
        redirection,
        ..convert::to_api_report(report, sessions)
    };
    if !matches!(ending, Ending::Switched(_)) {
        volume.reach_source_directly();
    }
    match ending {
        Ending::Switched(report) => {
            job.finishing();
            target.serve_guest();
            let remote_device = target.remote_device().map(Arc::clone);
            // The source is let go of: nobody of us writes to it any more.
            if let Some(redirect) = volume.with_stack(Stack::take_redirect).flatten() {
                redirect.close().await;
            }
            if let Some(cache) = volume.with_stack(Stack::take_cache).flatten() {
                cache.close().await;
            }
            drop(volume.replace_backend(target));
            let again = report.bytes_again;
            let mut report = convert(&report);
            report.stream =
                remote_device.map(|remote_device| convert::to_api_stream(&remote_device.statistics(), again));
            note_report(volume, report).await;
            complete(daemon, volume, job).await;
        }
        Ending::Cancelled(report) => {
            let report = report.as_ref().map(convert);
            let (state, error) = match job.failure() {
                Some(failure) => (JobState::Failed, failure),
                None => {
                    let message = format!("the move of {} was cancelled; the guest is on the source", volume.name);
                    (JobState::Cancelled, Error::new(ErrorCode::MoveCancelled, message))
                }
            };
            undo(daemon, volume, job, target, (state, error), report).await;
        }
        Ending::Failed(error, report) => {
            let is_unequal = report.as_ref().is_some_and(|report| report.equal == Some(false));
            let error = of_migration(&volume.name, &error, is_unequal);
            undo(daemon, volume, job, target, (JobState::Failed, error), report.as_ref().map(convert)).await;
        }
    }
    resume_drains(daemon, volume);
}

/// The source holds the volume: nothing of the move stays behind.
async fn undo(
    daemon: &Arc<Daemon>,
    volume: &Arc<Volume>,
    job: &JobHandle,
    target: OpenBackend,
    (state, error): (JobState, Error),
    report: Option<Report>,
) {
    // The map first: without a target nothing that it says is true. The journal last: after a crash before it all of
    // this is done again.
    daemon.state.drop_progress(&volume.name);
    record_undo(volume, (state, &error)).await;
    drop(target);
    job.let_go_of_target();
    let error = with_rest(error, daemon.discard_target(volume).await);
    end(daemon, volume, job, state, report, Some(error)).await;
}

/// Has it on record that the job is being undone before anything of its target is: a start that finds no target then does not
/// wait for one.
async fn record_undo(volume: &Volume, (state, error): (JobState, &Error)) {
    let document = volume.document();
    let Some(job) = document.job.as_ref().filter(|job| job.target.local().is_some()) else { return };
    if job.record.phase == Phase::Cancelling || job.committed.is_some() {
        return;
    }
    if state == JobState::Failed {
        volume.journal.fail_job(error.clone());
    }
    if let Err(error) = volume.journal.note_phase(Phase::Cancelling, |_| ()).await {
        tracing::warn!(volume = volume.name, error = error.chain(), "that a move is undone could not be recorded");
    }
}

/// The error with what is left of the target.
fn with_rest(error: Error, rest: Option<String>) -> Error {
    match rest {
        Some(rest) => Error { message: format!("{}; {rest}", error.message), ..error },
        None => error,
    }
}

/// A job that a restart found and that cannot go on: the source holds the volume.
pub(crate) async fn undo_without_target(daemon: &Arc<Daemon>, volume: &Arc<Volume>, job: &JobHandle, error: Error) {
    crate::overlays::fold_back(daemon, volume).await;
    daemon.state.drop_progress(&volume.name);
    // Whoever has cancelled it hears that it is cancelled.
    let state = if error.code == ErrorCode::MoveCancelled { JobState::Cancelled } else { JobState::Failed };
    record_undo(volume, (state, &error)).await;
    let left = match daemon.left_to_others(volume).await {
        Some(left) => Some(left),
        None => daemon.discard_target(volume).await,
    };
    end(daemon, volume, job, state, None, Some(with_rest(error, left))).await;
    resume_drains(daemon, volume);
}

/// The target holds the volume: what is left is done, and done again after a crash until all of it is.
pub(crate) async fn complete(daemon: &Arc<Daemon>, volume: &Arc<Volume>, job: &JobHandle) {
    if let Some(remote_device) = volume.remote_device()
        && !taken(daemon, volume, &remote_device).await
    {
        // The source stays what it is, but for its name, until the other host has answered that it holds the volume.
        return;
    }
    let document = volume.document();
    let Some(record) = document.job.as_ref() else { return };
    let Some(committed) = record.committed.as_ref() else { return };
    let mut report = committed.report.clone().unwrap_or_else(|| Report {
        sessions: record.record.sessions,
        notes: vec!["the daemon was restarted right after the switchover: figures and digest are lost".to_owned()],
        ..Report::default()
    });
    // Before anything of the source is put away: an old copy of this record must not go on with the move.
    if let Some(target) = record.target.local()
        && let Err(error) = daemon.backends.mark(target, document.epoch, &volume.name)
    {
        tracing::warn!(volume = volume.name, %error, "the target could not be marked as the volume's");
    }
    let mut problem = None;
    match daemon.persist(volume, record).await {
        Ok(None) => {}
        Ok(Some(note)) => report.notes.push(note),
        Err(error) => problem = Some(error),
    }
    report.notes.extend(growth(daemon, record, committed));
    report.notes.extend((!record.target.is_shared()).then(|| incomplete_source(committed)).flatten());
    report.notes.extend(idle_surrogate(record, &report));
    report.notes.extend(document.adoption.as_ref().and_then(|_| room_after_release(daemon, record)));
    // A configuration that still names the source is a reason to keep it, whatever was asked for.
    let delete = record.request.delete_source && problem.is_none();
    match retire(daemon, &volume.name, (record, committed), delete).await {
        Ok(Retirement { kept, note }) => {
            report.source_kept = kept;
            report.notes.extend(note);
        }
        Err(error) => problem = problem.or(Some(error)),
    }
    daemon.state.drop_progress(&volume.name);
    // The volume is on the target whatever went wrong afterwards; the job says so and what is left to do.
    let state = if problem.is_some() { JobState::Failed } else { JobState::Done };
    end(daemon, volume, job, state, Some(report), problem).await;
}

/// Waits until the other host has taken the volume. The old image is out of the way meanwhile.
async fn taken(daemon: &Daemon, volume: &Volume, remote_device: &RemoteVolumeDevice) -> bool {
    let taken = pin!(remote_device.taken());
    match select(taken, pin!(put_away(daemon, volume))).await {
        Either::Left((taken, _)) => taken,
        Either::Right(((), taken)) => taken.await,
    }
}

/// What to say of a source that somebody has made longer while it was moved. No client could see, let alone use, what was
/// added.
fn growth(daemon: &Daemon, record: &JobDocument, committed: &Committed) -> Option<String> {
    let (size, before) = (Bytes(record.size?), Bytes(record.source_size?));
    let named = committed.source.local_path()?;
    let path = record.source_identity.as_ref().map_or(named, |identity| identity.path());
    let moved = format!("{}.moved-{}", path.display(), committed.epoch);
    let now = daemon.backends.size(path).or_else(|_| daemon.backends.size(moved.as_ref()));
    let now = now.ok().filter(|now| *now > before)?;
    let source = path.display();
    Some(format!("{source} has grown from {before} to {now} while it was moved; the volume has kept its {size}"))
}

/// What to say of a source whose guest a surrogate or a cache has served.
fn incomplete_source(committed: &Committed) -> Option<String> {
    let mut holding = committed.layers.iter().filter(|layer| layer.may_hold());
    if let Some(cache) = holding.find_map(LayerDocument::cache) {
        let cache = &cache.cache;
        return Some(format!("the old source lacks what only the cache {cache} had of what the guest has written"));
    }
    committed.layers.iter().find_map(LayerDocument::redirect).map(|redirect| {
        let RedirectLayer { surrogate, stays, .. } = redirect;
        let since = if *stays { "the surrogate was added" } else { "the move began" };
        format!("the old source lacks what the guest has written since {since}: the surrogate {surrogate} had that")
    })
}

/// What to say of a surrogate that was asked for and not used.
fn idle_surrogate(record: &JobDocument, report: &Report) -> Option<String> {
    let surrogate =
        record.request.surrogate.as_ref().filter(|_| report.redirection.is_none() && report.bytes_copied > 0)?;
    Some(format!(
        "the surrogate {surrogate} was not used: the source's disk has no head to spare; --surrogate-on-flash uses it all the same"
    ))
}

/// What to say of a target with more room than the volume: QEMU has no such limit as the daemon has.
fn room_after_release(daemon: &Daemon, record: &JobDocument) -> Option<String> {
    let size = Bytes(record.size?);
    let target = record.target.local()?.spec.path();
    let room = daemon.backends.size(target).ok().filter(|room| *room > size)?;
    Some(format!("{} has {room}: once released the guest's disk is that large, no longer {size}", target.display()))
}

/// What became of the source.
struct Retirement {
    kept: Option<String>,
    note: Option<String>,
}

/// Puts the source out of the way, and deletes it with `delete`.
async fn retire(
    daemon: &Daemon,
    name: &str,
    (record, committed): (&JobDocument, &Committed),
    delete: bool,
) -> Result<Retirement, Error> {
    if record.target.is_shared() {
        let note = format!("nothing was copied: both hosts reach {}, which stays where it is", committed.source);
        return Ok(Retirement { kept: None, note: Some(note) });
    }
    let path = match &committed.source {
        Location::Local(spec) => spec.path(),
        // What lies there is the other host's to put away.
        Location::Remote(_) => return Ok(Retirement { kept: None, note: None }),
        Location::Foreign(export) => {
            let note = format!("{} was left as it is: nothing there keeps anybody from using it", export.nbd);
            return Ok(Retirement { kept: Some(export.nbd.clone()), note: Some(note) });
        }
    };
    let identity = record.source_identity.as_deref();
    let holder = record.target.local().map(|target| target.spec.path());
    let source = Retiring { path, identity, holder, epoch: committed.epoch, volume: Some(name) };
    let unfinished = |what: &str, error: &dyn std::fmt::Display| {
        let message = format!("the volume is on {}, but the old {} {what}: {error}", record.target, path.display());
        let first = daemon
            .backends
            .obstacle(&source)
            .map_or_else(String::new, |obstacle| format!("{}, then ", obstacle.hint()));
        Error::new(ErrorCode::MoveUnfinished, message)
            .with_hint(format!("{first}put the old file out of the way yourself, so that nobody starts a VM on it"))
    };
    if delete && daemon.backends.is_deleted(&source).unwrap_or(false) {
        // A crash came right after this had been done, or somebody was faster.
        remove_layer_files(&*daemon.backends, &committed.layers, path);
        let (shown, epoch) = (path.display(), committed.epoch);
        let note = format!(
            "neither {shown} nor {shown}.moved-{epoch} is there any more: deleted, unless somebody has renamed it"
        );
        return Ok(Retirement { kept: None, note: Some(note) });
    }
    let begun = daemon.env.now();
    let retired = loop {
        match daemon.backends.retire(&source, &daemon.layout.retired()) {
            // What has been killed keeps its locks until its last request is done.
            Err(TargetError::InUse { .. }) if daemon.env.now().since(begun) < RETIRE_WAIT => {
                daemon.env.sleep(RETIRE_INTERVAL).await;
            }
            outcome => break outcome.map_err(|error| unfinished("could not be renamed", &error))?,
        }
    };
    let unproved = delete && !daemon.backends.is_proved(&source, &retired);
    if let (true, backends::Retired::File { to, .. }) = (unproved, &retired) {
        let kept = to.display().to_string();
        let note = format!(
            "{kept} was not deleted: its file system does not prove that it is what was moved; look, and delete it yourself"
        );
        return Ok(Retirement { kept: Some(kept), note: Some(note) });
    }
    if delete {
        daemon.backends.delete(&retired).map_err(|error| unfinished("could not be deleted", &error))?;
        remove_layer_files(&*daemon.backends, &committed.layers, path);
    }
    Ok(match retired {
        backends::Retired::File { .. } if delete => {
            Retirement { kept: None, note: Some("the source was deleted".to_owned()) }
        }
        backends::Retired::File { to, .. } => Retirement { kept: Some(to.display().to_string()), note: None },
        backends::Retired::BlockDevice { path, kept } => Retirement {
            kept: Some(path.display().to_string()),
            note: Some(format!(
                "{} carries a tombstone; its first and last 4 KiB are kept in {}",
                path.display(),
                kept.display()
            )),
        },
    })
}

async fn note_report(volume: &Volume, report: Report) {
    let stored = volume.journal.update_job(|job| {
        if let Some(committed) = &mut job.committed {
            committed.report = Some(report);
        }
    });
    if let Err(error) = stored.await {
        tracing::warn!(volume = volume.name, error = error.chain(), "the move's report could not be stored");
    }
}

/// Takes the job, which is over, off the journal; later, if that cannot be stored now.
pub(crate) async fn clear_job(daemon: &Arc<Daemon>, volume: &Arc<Volume>) {
    // All are folded, but one that was never used may be listed. What is not listed goes before the job does, for nobody
    // looks for it afterwards; what is, once no record can name it any more.
    let beside = overlays_beside(volume);
    let Some(id) = volume.document().job.as_ref().map(|job| job.id) else { return };
    let is_listed = volume.document().job.as_ref().is_some_and(|job| !job.overlays.is_empty());
    let sweep = async || {
        if let Some((source, target)) = &beside {
            crate::overlays::sweep(daemon, source, target).await;
        }
    };
    if !is_listed {
        sweep().await;
    }
    match strike(daemon, volume, id).await {
        Ok(()) if is_listed => sweep().await,
        Ok(()) => {}
        Err(error) => {
            tracing::error!(volume = volume.name, error = error.chain(), "the end of a move could not be stored");
            strike_later(daemon, volume, id);
        }
    }
}

/// Takes job `id`, which is over, off the record, if it is still there, and lets go what only that has named.
///
/// # Errors
/// That could not be stored.
pub(super) async fn strike(daemon: &Daemon, volume: &Volume, id: u64) -> block::Result<()> {
    let document = volume.document();
    if document.job.as_ref().is_none_or(|job| job.id != id) {
        return Ok(());
    }
    let (group, given_up) = (record_of(&document), parts_of_host(&document));
    let stored = volume.journal.update(|document| {
        document.job = document.job.take().filter(|job| job.id != id);
        if document.job.is_none() {
            document.drain_redirect();
        }
    });
    stored.await?;
    group.into_iter().for_each(|group| daemon.leave_group(group, volume));
    for part in given_up {
        daemon.surrogates.give_back(part);
        if !daemon.lent_parts.lock().contains(&part) {
            daemon.caches.give_back(part);
        }
    }
    Ok(())
}

/// The layers that a commit has put aside for good: the target has what their parts of surrogates and caches hold.
fn parts_of_host(document: &VolumeDocument) -> Vec<Uuid> {
    let committed = document.job.as_ref().and_then(|job| job.committed.as_ref());
    let layers = committed.into_iter().flat_map(|committed| &committed.layers);
    layers.filter(|layer| layer.is_of_host()).map(|layer| layer.id).collect()
}

/// Takes job `id` off the record as soon as that can be stored, unless another one is there by then. A start that finds it ends
/// it once more, or begins it again although its requester was told that it failed. Overlays are left to the next move's end:
/// they lie where those of another move may lie by now.
fn strike_later(daemon: &Arc<Daemon>, volume: &Arc<Volume>, id: u64) {
    let (env, daemon, volume) = (Arc::clone(&daemon.env), Arc::downgrade(daemon), Arc::downgrade(volume));
    Arc::clone(&env).spawn(Box::pin(async move {
        loop {
            env.sleep(STRIKE_REST).await;
            let (Some(daemon), Some(volume)) = (daemon.upgrade(), volume.upgrade()) else { return };
            if strike(&daemon, &volume, id).await.is_ok() {
                return;
            }
        }
    }));
}

/// Remembers the job, then takes it off the journal: a crash between the two finds it remembered.
pub(crate) async fn end(
    daemon: &Arc<Daemon>,
    volume: &Arc<Volume>,
    job: &JobHandle,
    state: JobState,
    report: Option<Report>,
    error: Option<Error>,
) {
    let now = daemon.env.wall_clock();
    let over = job.end(|job| {
        job.state = state;
        job.finished_unix_ms = Some(unix_ms(now));
        job.report = report;
        job.error.clone_from(&error);
    });
    if let Err(error) = daemon.history.keep(&over) {
        tracing::error!(job = job.id, %error, "the move could not be remembered");
    }
    let request = serde_json::json!({ "job": job.id, "state": state.name(), "target": over.target });
    daemon.audit.record(now, &Peer::daemon(), ("move.end", &volume.name), request, error.as_ref());
    tracing::info!(volume = volume.name, job = job.id, state = state.name(), "the move is over");
    volume.set_snapshots(None);
    volume.end_copy().await;
    let document = volume.document();
    let record = document.job.as_ref().filter(|job| state != JobState::Done && job.committed.is_none());
    if let Some(group) = record.and_then(|job| job.group.as_ref()) {
        // Once it is remembered: a daemon that dies here finds it and does this again.
        daemon.undo_others(group, &over);
    }
    clear_job(daemon, volume).await;
    volume.set_job(None);
    job.announce_end();
}

/// Beside which files the overlays of the volume's job lay, if it is a snapshot move.
fn overlays_beside(volume: &Volume) -> Option<(PathBuf, PathBuf)> {
    let document = volume.document();
    let job = document.job.as_ref().filter(|job| job.record.options.strategy == migrate::Strategy::Snapshot)?;
    let source = job.committed.as_ref().map_or(&document.backend, |committed| &committed.source);
    Some((source.local_path()?.to_owned(), job.target.local()?.spec.path().to_owned()))
}

/// An error about the target of a job that was found at a restart.
pub(crate) fn cannot_resume(volume: &Volume, error: &block::Error) -> Error {
    let error = of_backend(error, &format!("the move of {} could not be resumed after a restart", volume.name));
    Error::new(ErrorCode::MoveFailed, error.message).with_hint("the guest is on the source; move it again")
}
