//! A move is asked for: everything that can be wrong with it is found here, before anything counts.

use std::sync::Arc;

use api::v1::{Error, ErrorCode, Job, JobState, MoveRequest};
use backends::{BackendSpec, PreparedTarget, TargetError, TargetRequest, prepare_target};
use block::Bytes;
use migrate::{JobRecord, MoveOptions, Phase};

use super::{JobHandle, of_api_verify};
use crate::audit::{Peer, unix_ms};
use crate::daemon::Daemon;
use crate::document::JobDocument;
use crate::held::Held;
use crate::problem::{Result, invalid, of_backend};
use crate::volume::Volume;

/// Guests send multiples of this, whatever finer requests a file in memory would take.
const GUEST_SECTOR: u32 = 512;

impl Daemon {
    /// Starts or queues a move. When this returns an error, nothing was left behind.
    pub(crate) async fn start_move(self: &Arc<Self>, peer: &Peer, name: &str, request: MoveRequest) -> Result<Job> {
        let volume = self.volume(name)?;
        let _operation = volume.operation.lock().await;
        volume.require_up()?;
        refuse_second(&volume)?;
        self.check_persistence(&volume, &request)?;
        let spec = parse_backend(&request.to)?;
        let target = self.prepare(&volume, spec, request.overwrite).await?;
        let outcome = self.accept(peer, &volume, request, target.clone()).await;
        if outcome.is_err() {
            discard(&target);
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
            Some(_) => std::fs::metadata(&source).map_or(geometry.size, |found| Bytes(found.len())),
            None => geometry.size,
        };
        let guest_alignment = geometry.request_alignment.max(GUEST_SECTOR);
        let request = TargetRequest { spec: &spec, source: Some(&*source), size, guest_alignment, overwrite };
        prepare_target(&request, &*self.env).await.map_err(|error| of_target(&error))
    }

    async fn accept(
        self: &Arc<Self>,
        peer: &Peer,
        volume: &Arc<Volume>,
        request: MoveRequest,
        target: PreparedTarget,
    ) -> Result<Job> {
        let held = Held::open(&target.spec, &volume.hold_options(self.config.lock_wait()).for_target(), &*self.env)
            .await
            .map_err(|error| of_backend(&error, "the target"))?;
        let options = MoveOptions {
            verify: of_api_verify(request.verify),
            bandwidth: request.bandwidth.filter(|rate| *rate > 0),
            ..MoveOptions::default()
        };
        let started_unix_ms = unix_ms(self.env.wall_clock());
        let document = JobDocument {
            id: self.history.next_id(),
            uuid: uuid::Uuid::new_v4(),
            request,
            requester: peer.to_string(),
            record: JobRecord { phase: Phase::Preparing, options, sessions: 0, started_unix_ms },
            target,
            paused: false,
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
        tokio::spawn(async move { super::run::run(daemon, volume, handle, held).await });
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

/// Takes back a target that nothing came of.
pub(crate) fn discard(target: &PreparedTarget) {
    if let Err(error) = target.discard() {
        tracing::warn!(%error, target = %target.spec, "what an undone move left could not be removed");
    }
}

/// A backend as a user writes it.
pub(crate) fn parse_backend(text: &str) -> Result<BackendSpec> {
    let spec: BackendSpec = text
        .parse()
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
