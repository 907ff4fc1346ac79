//! After a start: every volume's journal is read, and what it says is made true again.
//!
//! ```text
//!  journal ──▶ group, arbiter ──▶ locks, waiting for a dead process's ──▶ stack ──▶ mirror, if a move was under way ──▶ socket
//!                                                                  │ commit on record
//!                                                                  └──▶ finished forward, after the socket is back
//! ```
//!
//! A guest waits meanwhile, so volumes come back beside each other and none waits for another's trouble: a file system that does
//! not answer, or an arbiter, holds up what lies on it. Everything else is told of the start after [`START_LIMIT`].

mod later;
mod waiting;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use api::v1::Error;
use backends::{ImageError, TargetError};
use futures::future::join_all;
use migrate::Phase;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::daemon::Daemon;
use crate::descriptors::{self, Usage};
use crate::document::{IncomingStage, JobDocument};
use crate::jobs::{self, JobHandle};
use crate::journal::VolumeJournal;
use crate::last_life::{LifeNotes, Moving, is_target_disturbed};
use crate::open_backend::OpenBackend;
use crate::problem::{Result, may_pass, of_backend, of_journal};
use crate::volume::Volume;
use waiting::{cancelled, note_left, note_use, say_what_it_waits_for, stop_for_word};

/// How long the start waits for volumes to come back. Those that take longer come back when they can.
const START_LIMIT: Duration = Duration::from_secs(5);
/// How long a volume with a move under way is kept from its guest for the sake of the target. One that takes longer gets the
/// whole of it again.
const TARGET_LIMIT: Duration = Duration::from_secs(3);
/// How often an arbiter that cannot be asked is asked again.
const ARBITER_REST: Duration = Duration::from_secs(2);
/// How long the stopped guest of a whole machine waits for an arbiter that does not answer.
const ARBITER_PATIENCE: Duration = Duration::from_secs(10);
/// What cannot be opened is tried again after this at first, and after twice as long each time, up to the limit.
const OPEN_REST: Duration = Duration::from_secs(1);
const OPEN_REST_MAX: Duration = Duration::from_secs(30);

/// Brings back every volume. One that cannot be brought back is shown as down, with the reason.
pub(crate) async fn recover(daemon: &Arc<Daemon>) -> Result<()> {
    let names = daemon.state.volume_names()?;
    // First all journals, which are the daemon's own files: whoever asks finds every volume.
    let volumes: Vec<Arc<Volume>> =
        join_all(names.iter().map(|name| read_journal(daemon, name))).await.into_iter().flatten().collect();
    daemon.recover_groups(&volumes).await?;
    let moves = volumes.iter().filter_map(|volume| volume.document().job.as_ref().map(|job| job.id)).collect();
    give_back_parts(daemon, &volumes);
    let (back, is_back) = oneshot::channel();
    // Before any that waited can take one: volumes come back in no order.
    let running_jobs: Vec<_> = volumes.iter().map(|volume| place_of(daemon, volume)).collect();
    let usage = Usage::now();
    let places: Vec<_> =
        volumes.iter().map(|volume| volume.document().backend.local_path().map(Path::to_owned)).collect();
    let of_a_device = daemon.backends.descriptors_of_a_device(daemon.config.worker_count());
    let (now, later) = volumes.split_at(usage.volumes(&places, of_a_device as u64));
    later.iter().for_each(|volume| volume.set_problem(descriptors::shortage(usage)));
    if !later.is_empty() {
        later::recover_later(daemon, later);
    }
    let all = join_all(now.iter().zip(running_jobs).map(|(volume, place)| recover_volume_aside(daemon, volume, place)));
    {
        let (daemon, env) = (Arc::clone(daemon), Arc::clone(&daemon.env));
        env.spawn(Box::pin(async move {
            all.await;
            daemon.settle_groups(&moves);
            // Whoever has waited long enough is gone.
            let _ = back.send(());
        }));
    }
    let this = Arc::downgrade(daemon);
    let moves = move || Some(this.upgrade()?.volumes().iter().filter_map(|volume| moving(volume)).collect());
    let notes = LifeNotes::new(daemon.layout.clone(), daemon.boot, Arc::clone(&daemon.backends), &daemon.last_life);
    daemon.env.spawn(Box::pin(notes.keep(Arc::clone(&daemon.env), moves)));
    if env::timeout(&*daemon.env, START_LIMIT, is_back).await.is_none() {
        for volume in volumes.iter().filter(|volume| volume.is_coming_back()) {
            tracing::error!(
                volume = volume.name,
                "what holds a volume has not answered yet; nobody waits for it any more"
            );
        }
    }
    // Before other hosts come, and have files made again.
    match env::timeout(&*daemon.env, START_LIMIT, daemon.remove_pending_files()).await {
        Some(Ok(())) => {}
        Some(Err(error)) => tracing::warn!(%error, "what was in the making is looked at again by the next start"),
        None => tracing::warn!("what was in the making does not answer, and is looked at again by the next start"),
    }
    daemon.resume_notices();
    Ok(())
}

/// What is to be noted of the move of `volume`, if it is moved.
fn moving(volume: &Volume) -> Option<Moving> {
    let document = volume.document();
    let job = document.job.as_ref()?;
    // After the commit the target is the volume, and is not compared.
    let handle = volume.job().filter(|_| job.committed.is_none());
    Some(Moving { job: job.uuid, target: handle.and_then(|handle| handle.open_target()) })
}

/// Gives back those parts of surrogates and caches that no volume's journal names. One that cannot be read may name any.
fn give_back_parts(daemon: &Daemon, volumes: &[Arc<Volume>]) {
    if !daemon.unreadable.read().is_empty() {
        return;
    }
    let documents: Vec<_> = volumes.iter().map(|volume| volume.document()).collect();
    let named = documents.iter().flat_map(|document| document.layers_named().map(|layer| layer.id));
    let named = named.collect();
    daemon.surrogates.keep_only(&named);
    daemon.caches.keep_only(&named);
}

/// The volume `name` with its journal; none if that cannot be read.
async fn read_journal(daemon: &Arc<Daemon>, name: &str) -> Option<Arc<Volume>> {
    let path = daemon.layout.journal(name);
    let journal = match VolumeJournal::open(&path, &daemon.backends, &*daemon.env).await {
        Ok(journal) => journal,
        Err(error) => {
            let passes = may_pass(error.kind());
            let error = of_journal(name, &path, &error);
            tracing::error!(volume = name, %error, "a volume cannot be brought back");
            daemon.admit_unreadable(name, error);
            if passes {
                later::read_journal_later(daemon, name);
            }
            return None;
        }
    };
    Some(admit(daemon, name, journal))
}

/// Makes a volume known whose journal was read.
fn admit(daemon: &Daemon, name: &str, journal: VolumeJournal) -> Arc<Volume> {
    let volume = Arc::new(Volume::new(name, journal, Arc::clone(&daemon.env)));
    daemon.admit(Arc::clone(&volume));
    if let Some(job) = &volume.document().job {
        daemon.history.note(job.id);
    }
    volume
}

/// The place among running moves that the move of `volume` had before the restart, if it had begun.
fn place_of(daemon: &Daemon, volume: &Volume) -> Option<OwnedSemaphorePermit> {
    let document = volume.document();
    let job = document.job.as_ref().filter(|job| job.record.sessions > 0 && job.committed.is_none());
    // There may be fewer than before: it goes on without one, and others wait until there is one again.
    job.and_then(|_| Arc::clone(&daemon.running_jobs).try_acquire_owned().ok())
}

/// Brings a volume back on a task of its own, and gives what ends when that has.
fn recover_volume_aside(
    daemon: &Arc<Daemon>,
    volume: &Arc<Volume>,
    place: Option<OwnedSemaphorePermit>,
) -> impl Future<Output = ()> + Send + use<> {
    let (done, is_done) = oneshot::channel();
    volume.set_coming_back(true);
    let (daemon, volume) = (Arc::clone(daemon), Arc::clone(volume));
    let env = Arc::clone(&daemon.env);
    env.spawn(Box::pin(async move {
        recover_volume(&daemon, &volume, place).await;
        volume.set_coming_back(false);
        // The start may be over.
        let _ = done.send(());
    }));
    async move { _ = is_done.await }
}

async fn recover_volume(daemon: &Arc<Daemon>, volume: &Arc<Volume>, place: Option<OwnedSemaphorePermit>) {
    let _operation = volume.operation.lock().await;
    match settle(daemon, volume).await {
        Ok(()) => {
            if !bring_back_or_say_why(daemon, volume, place).await {
                let (daemon, volume) = (Arc::clone(daemon), Arc::clone(volume));
                let env = Arc::clone(&daemon.env);
                env.spawn(Box::pin(async move { bring_back_later(&daemon, &volume).await }));
            }
        }
        Err(error) => {
            volume.set_problem(error);
            let (daemon, volume) = (Arc::clone(daemon), Arc::clone(volume));
            let env = Arc::clone(&daemon.env);
            env.spawn(Box::pin(async move { bring_back_once_settled(&daemon, &volume).await }));
        }
    }
}

/// Has it on record who holds the volume, if its own journal alone does not say that.
async fn settle(daemon: &Arc<Daemon>, volume: &Arc<Volume>) -> Result<()> {
    daemon.settle_group(volume).await?;
    daemon.settle_asked(volume).await
}

/// Who holds the volume nobody knows here: its guest waits until somebody says so.
async fn bring_back_once_settled(daemon: &Arc<Daemon>, volume: &Arc<Volume>) {
    let began = daemon.env.now();
    loop {
        daemon.env.sleep(ARBITER_REST).await;
        let _operation = volume.operation.lock().await;
        match settle(daemon, volume).await {
            Ok(()) => {
                let is_settled = bring_back_or_say_why(daemon, volume, place_of(daemon, volume)).await;
                drop(_operation);
                if !is_settled {
                    bring_back_later(daemon, volume).await;
                }
                return;
            }
            Err(error) => tracing::info!(volume = volume.name, %error, "a volume waits for whoever knows who holds it"),
        }
        let document = volume.document();
        let group = document.job.as_deref().filter(|job| job.is_for_the_arbiter()).and_then(|job| job.group.as_ref());
        if let Some(machine) = group.and_then(|group| group.machine.as_ref())
            && daemon.env.now().since(began) >= ARBITER_PATIENCE
        {
            // Its guest is stopped at both hosts.
            Box::pin(daemon.end_machine_doubt(machine, volume)).await;
        }
    }
}

/// Gives whether there is nothing to be tried again. A volume that is up is left to whoever said why something else failed.
async fn bring_back_or_say_why(
    daemon: &Arc<Daemon>,
    volume: &Arc<Volume>,
    place: Option<OwnedSemaphorePermit>,
) -> bool {
    let Err(error) = bring_back(daemon, volume, place).await else { return true };
    if !volume.has_problem(&error) {
        volume.set_problem(error);
    }
    volume.slot().is_some()
}

/// Brings back a volume that is down, at once.
pub(crate) async fn bring_back_now(daemon: &Arc<Daemon>, volume: &Arc<Volume>) -> Result<()> {
    let outcome = bring_back(daemon, volume, place_of(daemon, volume)).await;
    if let Err(error) = &outcome {
        volume.set_problem(error.clone());
    }
    outcome
}

/// What stood in the way of a volume may pass: a file system that is mounted late, a program that has its image, a limit. An
/// attempt that fails has changed nothing. In between the volume can be detached.
async fn bring_back_later(daemon: &Arc<Daemon>, volume: &Arc<Volume>) {
    let mut rest = OPEN_REST;
    loop {
        daemon.env.sleep(rest).await;
        rest = (rest * 2).min(OPEN_REST_MAX);
        let _operation = volume.operation.lock().await;
        if !daemon.has(volume) || volume.slot().is_some() || volume.incoming.lock().is_some() {
            return;
        }
        if bring_back_or_say_why(daemon, volume, place_of(daemon, volume)).await {
            return;
        }
    }
}

async fn bring_back(daemon: &Arc<Daemon>, volume: &Arc<Volume>, place: Option<OwnedSemaphorePermit>) -> Result<()> {
    if let Some(job) = &volume.document().job
        && daemon.history.find_of(&volume.name, job).is_some()
    {
        // It was over, and only this was left to be done.
        jobs::clear_job(daemon, volume).await;
    }
    let document = volume.document();
    let open_options = volume.open_options(daemon.config.lock_wait());
    refuse_older_record(daemon, volume).await?;
    if document.incoming.as_ref().is_some_and(|incoming| !matches!(incoming.stage, IncomingStage::Held { .. })) {
        // Another host holds it, as far as is known here: it is filled on, or taken, when that host asks for it.
        daemon.open_backend_of_incoming(volume).await?;
        let comes_with_machine = document.incoming.as_ref().is_some_and(|incoming| incoming.machine.is_some());
        // The machine's QEMU waits for its disk.
        return if comes_with_machine { daemon.offer_arriving(volume).await } else { Ok(()) };
    }
    daemon.look_before_resuming(volume).await?;
    daemon.refuse_beside(volume)?;
    if document.incoming.as_ref().is_some_and(|incoming| !incoming.layers.is_empty()) {
        // Its guest comes through the layers at the other host: here are their bytes.
        return daemon.reopen_incoming(volume).await;
    }
    let open_backend = daemon.open_backend(volume, &document.backend, &open_options).await;
    let open_backend = open_backend.map_err(|error| daemon.of_open(volume, &error))?;
    note_image(volume, &open_backend).await;
    if let Some(remote_device) = open_backend.remote_device() {
        // Another host holds it, and takes it now if it has not yet.
        remote_device.turn(document.epoch);
    }
    let (_, export) =
        volume.bring_up(open_backend, daemon.pool.clone(), &daemon.overlay_context(), &open_options).await?;

    let handle = document.job.as_ref().map(|job| {
        let handle = Arc::new(JobHandle::new(jobs::show(volume, job), job.paused, &volume.journal));
        volume.set_job(Some(Arc::clone(&handle)));
        handle
    });
    let next = match (&document.job, &handle) {
        (Some(job), Some(handle)) => resume(daemon, volume, job, handle).await,
        _ => Next::Nothing,
    };
    let offered = match &document.incoming {
        Some(incoming) if incoming.is_for_its_origin() => Ok(()),
        _ => daemon.network.offer(&volume.uri()?, export, volume.clients()).await,
    };
    if offered.is_ok() {
        tracing::info!(volume = volume.name, backend = %document.backend, "the volume is back");
    }
    if let (Some(handle), next) = (handle, next) {
        let (daemon, volume) = (Arc::clone(daemon), Arc::clone(volume));
        let env = Arc::clone(&daemon.env);
        env.spawn(Box::pin(next.carry_out(daemon, volume, handle, place)));
    }
    offered?;
    crate::stack::resume_drains(daemon, volume);
    if document.adoption.is_some() {
        // QEMU reaches the export in its own time; nobody else waits for that.
        let (daemon, volume) = (Arc::clone(daemon), Arc::clone(volume));
        tokio::spawn(async move { crate::adopt::recover(&daemon, &volume).await });
    }
    Ok(())
}

/// Refuses a record whose move was committed after it: it comes from a backup, and its source is not the volume any more.
async fn refuse_older_record(daemon: &Daemon, volume: &Volume) -> Result<()> {
    let document = volume.document();
    let job = document.job.as_ref().filter(|job| job.committed.is_none());
    let coming = document.incoming.as_ref().filter(|incoming| !incoming.is_held());
    let target = job.and_then(|job| job.target.local()).or_else(|| coming.and_then(|coming| coming.target.as_ref()));
    let Some(target) = target else { return Ok(()) };
    let committed = daemon.backends.committed_epoch(target).await;
    let Some(epoch) = committed.filter(|epoch| *epoch > document.epoch) else { return Ok(()) };
    Err(of_backend(&ImageError::Newer { epoch }.about(target.spec.path()), "the target of its move"))
}

/// Has it on record which file or block device holds the volume, as it is now, and what its clients may count on.
async fn note_image(volume: &Volume, open_backend: &OpenBackend) {
    let Some(image) = open_backend.image().map(Box::new) else { return };
    let document = volume.document();
    let sector = document.sector_promised().unwrap_or(open_backend.device.geometry().request_alignment);
    if document.image.as_ref() == Some(&image) && document.sector == Some(sector) {
        return;
    }
    let stored = volume.journal.update(|document| (document.image, document.sector) = (Some(image), Some(sector)));
    if let Err(error) = stored.await {
        tracing::warn!(volume = volume.name, error = error.chain(), "which file it is could not be noted");
    }
}

/// Why a target could not be opened.
struct CannotOpen {
    error: block::Error,
    why: CannotGoOn,
}

/// What follows from that.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CannotGoOn {
    /// It is tried again.
    Yet,
    /// It is there no more: somebody has deleted or replaced it.
    Ever,
    /// Another program has used it while no daemon ran: somebody must say what becomes of it.
    Unasked,
}

type Opening = oneshot::Receiver<std::result::Result<OpenBackend, CannotOpen>>;

/// Opens the target of a move that goes on, on a task of its own.
fn begin_opening(daemon: &Arc<Daemon>, volume: &Arc<Volume>, job: &JobDocument) -> Opening {
    let (opened, opening) = oneshot::channel();
    let open_options = volume.open_options(daemon.config.lock_wait()).for_target();
    let (daemon, volume, target) = (Arc::clone(daemon), Arc::clone(volume), job.target.clone());
    let job = job.clone();
    let env = Arc::clone(&daemon.env);
    env.spawn(Box::pin(async move {
        let result = daemon.open_prepared(&volume, &target, &job.layers, &open_options).await;
        let is_replaced = || {
            target
                .local()
                .is_some_and(|target| matches!(daemon.backends.check(target), Err(TargetError::Replaced { .. })))
        };
        let result = match result {
            Ok(open_backend) => require_untouched(&daemon, &volume, &job, open_backend),
            Err(error) => {
                Err(CannotOpen { why: if is_replaced() { CannotGoOn::Ever } else { CannotGoOn::Yet }, error })
            }
        };
        // Whoever does not wait any more has ended.
        let _ = opened.send(result);
    }));
    opening
}

/// Refuses a target that a later record made its volume's, or that another program has used while no daemon ran.
fn require_untouched(
    daemon: &Daemon,
    volume: &Volume,
    job: &JobDocument,
    target: OpenBackend,
) -> std::result::Result<OpenBackend, CannotOpen> {
    let path = target.place.local_path().map(Path::to_owned).unwrap_or_default();
    if let Some(epoch) = target.marked_epoch().filter(|epoch| *epoch > volume.document().epoch) {
        return Err(CannotOpen { why: CannotGoOn::Yet, error: ImageError::Newer { epoch }.about(&path) });
    }
    let is_vouched_for = target.is_vouched_for() || target.remote_device().is_some();
    if job.goes_on_disturbed || is_vouched_for || !is_target_disturbed(&daemon.last_life, job, target.image_times()) {
        return Ok(target);
    }
    let context = format!("{} was changed by another program while no daemon ran", path.display());
    Err(CannotOpen { why: CannotGoOn::Unasked, error: block::Error::new(block::ErrorKind::Fenced, context) })
}

/// What is left to be done for a volume's job once the volume is served.
enum Next {
    Nothing,
    /// It is in the queue, as it was.
    Queue(OpenBackend),
    /// The target cannot be opened yet, or does not answer: the guest goes on without a mirror, and the copy begins anew when
    /// it is there.
    Later(Option<Opening>),
    /// The mirror is in place.
    Drive(OpenBackend, jobs::Started),
    /// It was committed.
    Complete,
    /// It cannot go on.
    Undo(Error),
}

async fn resume(daemon: &Arc<Daemon>, volume: &Arc<Volume>, job: &JobDocument, handle: &JobHandle) -> Next {
    if job.committed.is_some() {
        handle.finishing();
        return Next::Complete;
    }
    note_left(daemon, volume).await;
    // A move that was being undone is not waited for: its target may be gone because of that.
    let is_undone = job.record.phase == Phase::Cancelling;
    let mut opening = begin_opening(daemon, volume, job);
    let target = match env::timeout(&*daemon.env, TARGET_LIMIT, &mut opening).await {
        Some(Ok(Ok(target))) => target,
        Some(Ok(Err(_))) if is_undone => return Next::Undo(cancelled(volume)),
        Some(Ok(Err(CannotOpen { error, why: CannotGoOn::Ever }))) => {
            return Next::Undo(jobs::cannot_resume(volume, &error));
        }
        Some(Ok(Err(refused))) if refused.why == CannotGoOn::Unasked => {
            daemon.state.drop_progress(&volume.name);
            return Next::Later(Some(opening_that_ended(refused)));
        }
        Some(Ok(Err(CannotOpen { error, .. }))) => return wait_for_target(daemon, volume, handle, error).await,
        Some(Err(_)) => return wait_for_target(daemon, volume, handle, nobody_opens()).await,
        None => {
            tracing::error!(volume = volume.name, target = %job.target, "the target does not answer; its copy begins anew");
            // From here on nobody keeps track of what the guest writes.
            daemon.state.drop_progress(&volume.name);
            return Next::Later(Some(opening));
        }
    };
    if job.record.sessions == 0 {
        return Next::Queue(target);
    }
    match jobs::start_migration(daemon, volume, &target, None).await {
        Ok(started) => Next::Drive(target, started),
        Err(_) if is_undone => Next::Undo(cancelled(volume)),
        Err(error) => wait_for_target(daemon, volume, handle, error).await,
    }
}

/// What stands in the way may pass, and nothing is undone for it. The copy begins anew then: from here on nobody keeps track of
/// what the guest writes.
async fn wait_for_target(daemon: &Daemon, volume: &Volume, handle: &JobHandle, error: block::Error) -> Next {
    daemon.state.drop_progress(&volume.name);
    let is_noted = note_use(volume, &error).await;
    say_what_it_waits_for(volume, handle, &error);
    // Whoever waits for the target notes it before that is tried again.
    let unnoted = (!is_noted).then(|| opening_that_ended(CannotOpen { error, why: CannotGoOn::Yet }));
    Next::Later(unnoted)
}

fn opening_that_ended(refused: CannotOpen) -> Opening {
    let (opened, opening) = oneshot::channel();
    // Its other end is here.
    let _ = opened.send(Err(refused));
    opening
}

/// Opens the target again and again until it is there or the move is cancelled, and goes on with it.
async fn resume_once_open(
    daemon: Arc<Daemon>,
    volume: Arc<Volume>,
    handle: Arc<JobHandle>,
    mut opening: Option<Opening>,
    mut place: Option<OwnedSemaphorePermit>,
) {
    let mut rest = OPEN_REST;
    let error = 'waiting: loop {
        let next = async {
            match &mut opening {
                Some(opening) => Some(opening.await),
                None => {
                    daemon.env.sleep(rest).await;
                    None
                }
            }
        };
        let opened = tokio::select! {
            biased;
            () = handle.cancelled() => break cancelled(&volume),
            opened = next => opened,
        };
        let error = match opened {
            None => {
                let document = volume.document();
                let Some(job) = &document.job else { return };
                rest = (rest * 2).clamp(OPEN_REST, OPEN_REST_MAX);
                opening = Some(begin_opening(&daemon, &volume, job));
                continue;
            }
            Some(Ok(Ok(target))) => {
                handle.waits_for(None);
                // Who was waited for keeps its place: after one more restart it would go on beside whoever had taken that.
                return jobs::run(daemon, volume, handle, target, place).await;
            }
            Some(Ok(Err(CannotOpen { error, why: CannotGoOn::Ever }))) => break jobs::cannot_resume(&volume, &error),
            Some(Ok(Err(CannotOpen { error, why: CannotGoOn::Unasked }))) => {
                (opening, place) = (None, None);
                stop_for_word(&volume, &handle, &error).await;
                tokio::select! {
                    biased;
                    () = handle.cancelled() => break cancelled(&volume),
                    () = handle.told_to_go_on(&daemon.env) => {}
                }
                rest = Duration::ZERO;
                continue;
            }
            Some(Ok(Err(CannotOpen { error, .. }))) => error,
            Some(Err(_)) => nobody_opens(),
        };
        say_what_it_waits_for(&volume, &handle, &error);
        // Others may move meanwhile.
        (opening, place) = (None, None);
        while !note_use(&volume, &error).await {
            tokio::select! {
                biased;
                () = handle.cancelled() => break 'waiting cancelled(&volume),
                () = daemon.env.sleep(OPEN_REST) => {}
            }
        }
    };
    undo(&daemon, &volume, &handle, error).await;
}

impl Next {
    async fn carry_out(
        self,
        daemon: Arc<Daemon>,
        volume: Arc<Volume>,
        handle: Arc<JobHandle>,
        place: Option<OwnedSemaphorePermit>,
    ) {
        match self {
            Self::Nothing => {}
            Self::Queue(target) => jobs::run(daemon, volume, handle, target, None).await,
            Self::Later(opening) => resume_once_open(daemon, volume, handle, opening, place).await,
            Self::Drive(target, started) => {
                place.into_iter().for_each(|place| handle.keep_place(place));
                jobs::drive(daemon, volume, Arc::clone(&handle), target, started).await;
                handle.give_place_back();
            }
            Self::Complete => jobs::complete(&daemon, &volume, &handle).await,
            Self::Undo(error) => undo(&daemon, &volume, &handle, error).await,
        }
    }
}

async fn undo(daemon: &Arc<Daemon>, volume: &Arc<Volume>, handle: &JobHandle, error: Error) {
    let error = handle.failure().unwrap_or(error);
    jobs::undo_without_target(daemon, volume, handle, error).await;
}

fn nobody_opens() -> block::Error {
    block::Error::new(block::ErrorKind::Internal, "whoever was to open the target is gone")
}
