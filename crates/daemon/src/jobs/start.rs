//! A move is asked for: everything that can be wrong with it is found here, before anything counts.

use std::sync::Arc;

use api::v1::{Error, ErrorCode, Job, JobState, MoveRequest};
use backends::{BackendSpec, CacheMode, PreparedTarget, TargetError, TargetRequest};
use block::Bytes;
use env::Env;
use migrate::{JobRecord, MoveOptions, Phase, Strategy};

use super::{JobHandle, to_options};
use crate::adopt::cache_of;
use crate::audit::{Peer, unix_ms};
use crate::daemon::Daemon;
use crate::document::JobDocument;
use crate::held::{CLIENT_SECTOR, HoldOptions};
use crate::problem::{Result, invalid, of_backend};
use crate::volume::Volume;

impl Daemon {
    /// Starts or queues a move. When this returns an error, nothing was left behind.
    pub(crate) async fn start_move(self: &Arc<Self>, peer: &Peer, name: &str, request: MoveRequest) -> Result<Job> {
        let volume = self.volume(name)?;
        let _operation = volume.operation.lock().await;
        volume.require_up()?;
        refuse_second(&volume)?;
        self.check_persistence(&volume, &request)?;
        let options = to_options(&request)?;
        let spec = target_spec(&volume, &request.to)?;
        let target = self.prepare(&volume, spec, request.overwrite).await?;
        if options.strategy == Strategy::Snapshot {
            let slot = volume.require_up()?;
            let (places, needed) = (&*self.backends, slot.device().size());
            let room = crate::overlays::check_room(places, &volume.document(), &slot, target.spec.path(), needed);
            if let Err(error) = room {
                self.discard(&target);
                return Err(error);
            }
        }
        let outcome = self.accept(peer, &volume, request, options, target.clone()).await;
        if outcome.is_err() {
            self.discard(&target);
        }
        outcome
    }

    /// Makes the target ready and looks whether it suits the volume.
    pub(super) async fn prepare(&self, volume: &Volume, spec: BackendSpec, overwrite: bool) -> Result<PreparedTarget> {
        let slot = volume.require_up()?;
        let geometry = slot.device().geometry();
        let source = volume.document().backend.path().to_owned();
        let size = match volume.document().adoption.as_ref().and_then(|adoption| adoption.size_advertised) {
            // A container is as long as it is now; it grows as it is written.
            Some(_) => self.backends.size(&source).unwrap_or(geometry.size),
            None => geometry.size,
        };
        let request = TargetRequest {
            spec: &spec,
            source: Some(&*source),
            size,
            guest_alignment: geometry.request_alignment,
            overwrite,
        };
        self.backends.prepare(&request, &*self.env).await.map_err(|error| of_target(&error))
    }

    /// Takes back a target that nothing came of.
    pub(super) fn discard(&self, target: &PreparedTarget) {
        if let Err(error) = self.backends.discard(target) {
            tracing::warn!(%error, target = %target.spec, "what an undone move left could not be removed");
        }
    }

    async fn accept(
        self: &Arc<Self>,
        peer: &Peer,
        volume: &Arc<Volume>,
        request: MoveRequest,
        options: MoveOptions,
        target: PreparedTarget,
    ) -> Result<Job> {
        let size_limit = volume_size(volume);
        let hold = HoldOptions { size_limit, ..volume.hold_options(self.config.lock_wait()).for_target() };
        let held = self.backends.hold(&target.spec, &hold, &*self.env).await;
        let held = held.map_err(|error| of_backend(&error, "the target"))?;
        let started_unix_ms = unix_ms(self.env.wall_clock());
        let document = JobDocument {
            id: self.history.next_id(),
            uuid: random_uuid(&*self.env),
            request,
            requester: peer.to_string(),
            record: JobRecord { phase: Phase::Preparing, options, sessions: 0, started_unix_ms },
            target,
            size: size_limit.map(Bytes::get),
            source_size: size_limit
                .and_then(|_| self.backends.size(volume.document().backend.path()).ok())
                .map(Bytes::get),
            paused: false,
            overlays: Vec::new(),
            committed: None,
        };
        let job = show(volume, &document);
        let handle = Arc::new(JobHandle::new(job.clone(), false));
        let stored = volume.journal.update(|volume| {
            let mut volume = volume.clone();
            volume.job = Some(document);
            volume
        });
        stored.await.map_err(|error| of_backend(&error, "the volume's journal"))?;
        volume.set_job(Some(Arc::clone(&handle)));
        let (daemon, volume) = (Arc::clone(self), Arc::clone(volume));
        self.env.spawn(Box::pin(async move { super::run::run(daemon, volume, handle, held).await }));
        Ok(job)
    }
}

/// How the API shows a job that its document tells of.
pub(crate) fn show(volume: &Volume, document: &JobDocument) -> Job {
    let source = match &document.committed {
        Some(committed) => committed.source.to_string(),
        None => volume.document().backend.to_string(),
    };
    Job {
        id: document.id,
        volume: volume.name.clone(),
        state: JobState::Queued,
        source,
        target: document.target.spec.to_string(),
        request: document.request.clone(),
        requester: document.requester.clone(),
        started_unix_ms: document.record.started_unix_ms,
        finished_unix_ms: None,
        progress: None,
        guest: None,
        report: None,
        error: None,
    }
}

/// A number that nobody else has.
fn random_uuid(env: &dyn Env) -> uuid::Uuid {
    let [first, second] = [env.random(), env.random()].map(u64::to_le_bytes);
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&first);
    bytes[8..].copy_from_slice(&second);
    uuid::Builder::from_random_bytes(bytes).into_uuid()
}

/// How large the volume is and stays, unless it is a container that grows.
fn volume_size(volume: &Volume) -> Option<Bytes> {
    let grows = volume.document().adoption.as_ref().is_some_and(|adoption| adoption.size_advertised.is_some());
    volume.slot().filter(|_| !grows).map(|slot| slot.device().size())
}

/// Where a volume is to go, as a user writes it. What is not said of the page cache follows from the volume.
pub(super) fn target_spec(volume: &Volume, text: &str) -> Result<BackendSpec> {
    let adoption = &volume.document().adoption;
    let cache = match volume_size(volume) {
        Some(size) if !size.is_multiple_of(CLIENT_SECTOR.into()) => CacheMode::Page,
        _ => adoption.as_ref().map_or(CacheMode::Auto, |adoption| cache_of(&adoption.plan.disk)),
    };
    parse_backend(text, cache)
}

/// A backend as a user writes it, reached in the way of `cache` if nothing is said of that.
pub(crate) fn parse_backend(text: &str, cache: CacheMode) -> Result<BackendSpec> {
    let spec = BackendSpec::parse_with_cache(text, cache)
        .map_err(|error| invalid(format!("{error}"), "write file:PATH[,format=raw][,cache=auto|direct|page]"))?;
    if !spec.path().is_absolute() {
        let hint = "write the whole path, beginning with a slash: the daemon runs in another directory";
        return Err(invalid(format!("{} is no absolute path", spec.path().display()), hint));
    }
    Ok(spec)
}

fn refuse_second(volume: &Volume) -> Result<()> {
    let Some(job) = volume.job() else { return Ok(()) };
    let job = job.show();
    let message =
        format!("{} is being moved to {} already (job {}, {})", volume.name, job.target, job.id, job.state.name());
    let hint = format!("wait for it (`transhume watch {0}`), or `transhume cancel {0}` first", volume.name);
    Err(Error::new(ErrorCode::Busy, message).with_hint(hint))
}

/// Why a target cannot be used, as users see it. The lines of the backends say what to do themselves.
pub(crate) fn of_target(error: &TargetError) -> Error {
    let code = match error {
        TargetError::SameAsSource { .. } => ErrorCode::TargetSame,
        TargetError::NotEmpty { .. } => ErrorCode::TargetExists,
        TargetError::TooSmall { .. } => ErrorCode::TargetTooSmall,
        TargetError::ReadOnly { .. } => ErrorCode::ReadOnly,
        TargetError::NoSpace { .. } => ErrorCode::NoSpace,
        TargetError::InUse { .. } => ErrorCode::BackendLocked,
        TargetError::NoDirectory { .. } => ErrorCode::BackendMissing,
        TargetError::Os(error) => return of_backend(error, "the target"),
        _ => ErrorCode::BackendUnusable,
    };
    let line = error.to_string();
    match line.rsplit_once(": ") {
        Some((what, hint)) => Error::new(code, what).with_hint(hint),
        None => Error::new(code, line),
    }
}
