//! What other hosts may do here: the wire's questions, answered from the volumes' journals.
//!
//! A session whose epoch is 0 only asks: it opens for every host that is trusted, and its device refuses every request. It
//! is of a job of its own, so that it ends nobody's session; which job it asks about its origin says.

use std::sync::Arc;

use api::v1::{Error, ErrorCode};
use block::ErrorKind;
use futures::future::BoxFuture;
use migrate::stream::protocol::USAGE_ADDRESSES_MAX;
use migrate::stream::{Answer, Ask, MapSummary, Opened, PeerName, Role, SessionHandler, SessionRequest};

use super::fenced_lane::without_bytes;
use crate::daemon::Daemon;
use crate::document::IncomingStage;
use crate::problem::{Result, invalid};
use crate::workers::Worker;

/// The epoch of a session that only asks.
pub(crate) const ASKING_EPOCH: u64 = 0;

/// What says that there is something of an earlier session. Which chunks, the source knows.
const SOMETHING: MapSummary = MapSummary { chunk_bytes: 0, chunks_had: 0, digest: [0; 32] };

/// What answers the requests of other hosts to this daemon. Their requests are carried out on threads other than the
/// streams' own. Files are made, opened and removed for them, which takes a disk's time. Guests' requests go through
/// the streams' threads.
pub(crate) struct SessionAuthorizer {
    records: Arc<Records>,
    /// Where volumes are made, prepared and removed,
    filling: Worker,
    /// and where everything else is answered: a guest that comes back does not wait for a large file's end.
    answering: Worker,
}

impl SessionAuthorizer {
    /// The authorizer of one process of the daemon.
    ///
    /// # Errors
    /// There are no threads to be had.
    pub(crate) fn new(daemon: &Arc<Daemon>) -> Result<Self> {
        let (filling, answering) = (daemon.spawner.spawn_worker("arrivals")?, daemon.spawner.spawn_worker("answers")?);
        Ok(Self { records: Arc::new(Records::new(daemon)), filling, answering })
    }
}

/// What the answers are taken from.
struct Records {
    daemon: Arc<Daemon>,
    /// This process of the daemon.
    instance: [u8; 16],
}

impl Records {
    fn new(daemon: &Arc<Daemon>) -> Self {
        let [first, second] = [daemon.env.random(), daemon.env.random()].map(u64::to_le_bytes);
        let mut instance = [0; 16];
        instance[..8].copy_from_slice(&first);
        instance[8..].copy_from_slice(&second);
        Self { daemon: Arc::clone(daemon), instance }
    }

    /// What [`admit`](Self::admit) refuses for what is on record.
    fn may_admit(&self, peer: &str, request: &SessionRequest) -> Result<()> {
        match request.role {
            _ if request.epoch == ASKING_EPOCH => Ok(()),
            Role::Copy => self.daemon.may_open_incoming(peer, request),
            Role::Forward => self.daemon.may_open_forward(peer, request),
        }
    }

    /// Refuses the guest of a host whose volume a person has opened here, in a way that tells it apart from all other refusals: that
    /// host may conclude that the volume is held here.
    fn require_admitted(&self, peer: &str, request: &SessionRequest) -> block::Result<()> {
        if request.role != Role::Forward || request.epoch == ASKING_EPOCH {
            return Ok(());
        }
        let Ok(Some(volume)) = self.daemon.volume_if_any(&request.volume) else { return Ok(()) };
        super::opened::require_origin_admitted(&volume, peer, request)
            .map_err(|error| block::Error::new(ErrorKind::KeptOut, error.to_string()))
    }

    async fn admit(&self, peer: &str, request: &SessionRequest) -> Result<Opened> {
        let (device, is_known) = match request.role {
            _ if request.epoch == ASKING_EPOCH => (without_bytes(request.size, request.request_alignment), false),
            Role::Copy => {
                let (device, is_new) = Box::pin(self.daemon.open_incoming(peer, request)).await?;
                (device, !is_new)
            }
            Role::Forward => (self.daemon.open_forward(peer, request).await?, true),
        };
        tracing::info!(peer, volume = request.volume, role = ?request.role, epoch = request.epoch, "a session begins");
        let earlier = is_known.then_some(SOMETHING);
        Ok(Opened { device, instance: self.instance, boot: self.daemon.boot, earlier })
    }

    async fn answer(&self, peer: &str, request: &SessionRequest, ask: Ask) -> Result<Answer> {
        let daemon = &self.daemon;
        match ask {
            Ask::Prepare { epoch } => daemon.prepare_incoming(peer, request, epoch).await.map(|()| Answer::Done),
            Ask::Take { epoch } => {
                let volume = daemon.volume(&request.volume)?;
                let _operation = volume.operation.lock().await;
                let incoming = super::incoming::incoming_of(&volume, peer, request)?;
                daemon.take_incoming(&volume, &incoming, epoch).await.map(|()| Answer::Done)
            }
            Ask::Abandon => {
                {
                    // Whoever makes a place for it holds this, too: it is made before, and found here, or never.
                    let _membership = daemon.membership.lock().await;
                    daemon.aborted_jobs.note(request.job);
                }
                // What there is not, or is another's, need not be forgotten.
                let Some(volume) = daemon.volume_if_any(&request.volume)? else { return Ok(Answer::Done) };
                let _operation = volume.operation.lock().await;
                match super::incoming::incoming_of(&volume, peer, request) {
                    Ok(incoming) => {
                        daemon.undo_arrivals(&incoming).await?;
                        daemon.drop_incoming(&volume).await.map(|()| Answer::Done)
                    }
                    Err(_) => Ok(Answer::Done),
                }
            }
            Ask::Offer => {
                let offered = SessionRequest { role: Role::Copy, ..request.clone() };
                daemon.may_open_incoming(peer, &offered).map(|()| Answer::Done)
            }
            Ask::Release => {
                // What there is not, or is another's by now, is used by nobody there.
                let Some(volume) = daemon.volume_if_any(&request.volume)? else { return Ok(Answer::Done) };
                let _operation = volume.operation.lock().await;
                daemon.end_opened(&volume, peer, request).await?;
                match super::incoming::incoming_of(&volume, peer, request) {
                    Ok(incoming) if matches!(incoming.stage, IncomingStage::Held { .. }) => {
                        daemon.release_incoming(&volume).await.map(|()| Answer::Done)
                    }
                    _ => Ok(Answer::Done),
                }
            }
            Ask::Status => daemon.volume_status(request).map(Answer::Status),
            // Which chunks there are the source knows, and tells nobody.
            Ask::MapDigest { .. } => Ok(Answer::MapDigest(None)),
            Ask::KeepMap { .. } => Ok(Answer::Done),
            Ask::Digests { .. } => {
                Err(invalid("digests are of a session's device", "this is a defect of the other host"))
            }
            Ask::Usage { mut addresses } => {
                addresses.truncate(USAGE_ADDRESSES_MAX);
                let unknown = vec![None; addresses.len()];
                let seen = daemon.hosts.interfaces().map(|interfaces| interfaces.look(&addresses));
                Ok(Answer::Usage(seen.unwrap_or(unknown)))
            }
        }
    }
}

impl SessionHandler for SessionAuthorizer {
    fn check(&self, peer: &PeerName, request: &SessionRequest) -> block::Result<()> {
        self.records.require_admitted(&peer.0, request)?;
        self.records.may_admit(&peer.0, request).map_err(|error| to_wire(&error))
    }

    fn open(&self, peer: &PeerName, request: &SessionRequest) -> BoxFuture<'_, block::Result<Opened>> {
        let (records, peer, request) = (Arc::clone(&self.records), peer.clone(), request.clone());
        let worker = if request.role == Role::Copy { &self.filling } else { &self.answering };
        let kept_out = records.require_admitted(&peer.0, &request);
        let admitted = done_on(worker, async move { Box::pin(records.admit(&peer.0, &request)).await });
        Box::pin(async move {
            kept_out?;
            admitted.await
        })
    }

    fn ask(&self, peer: &PeerName, request: &SessionRequest, ask: Ask) -> BoxFuture<'_, block::Result<Answer>> {
        let (records, peer, request) = (Arc::clone(&self.records), peer.clone(), meant(request));
        let worker = if matches!(ask, Ask::Prepare { .. } | Ask::Abandon) { &self.filling } else { &self.answering };
        Box::pin(done_on(worker, async move { records.answer(&peer.0, &request, ask).await }))
    }
}

/// What comes of `work` that is done on `worker`.
async fn done_on<T: Send + 'static>(
    worker: &Worker,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> block::Result<T> {
    let outcome = worker.spawn(work).await;
    let outcome = outcome.map_err(|_| block::Error::new(ErrorKind::Disconnected, "this daemon ends"))?;
    outcome.map_err(|error| to_wire(&error))
}

/// What a session is about: one that only asks says it in another place.
fn meant(request: &SessionRequest) -> SessionRequest {
    let job = request.origin.parse().ok().filter(|_| request.epoch == ASKING_EPOCH);
    SessionRequest { job: job.unwrap_or(request.job), ..request.clone() }
}

/// An error of this daemon as the other host gets it: a kind and words.
pub(super) fn to_wire(error: &Error) -> block::Error {
    let kind = match error.code {
        ErrorCode::AlreadyExists | ErrorCode::TargetExists | ErrorCode::Busy | ErrorCode::BackendLocked => {
            ErrorKind::Busy
        }
        ErrorCode::NotFound | ErrorCode::BackendMissing => ErrorKind::NotFound,
        ErrorCode::NoSpace => ErrorKind::NoSpace,
        ErrorCode::ReadOnly => ErrorKind::ReadOnly,
        ErrorCode::PermissionDenied | ErrorCode::HostRefused | ErrorCode::HostUnknown => ErrorKind::PermissionDenied,
        ErrorCode::WrongState => ErrorKind::Fenced,
        ErrorCode::BackendUnusable => ErrorKind::Unsupported,
        ErrorCode::Invalid => ErrorKind::Invalid,
        ErrorCode::Io => ErrorKind::Io,
        _ => ErrorKind::Internal,
    };
    block::Error::new(kind, error.to_string())
}

/// What another host, or the way to it, has answered, as users see it.
pub(crate) fn of_wire(error: &block::Error, host: &str) -> Error {
    // What this side has found while it dialled says it all.
    if let Some(known) = std::error::Error::source(error).and_then(|source| source.downcast_ref::<Error>()) {
        return known.clone();
    }
    let chain = error.chain();
    let (code, hint) = match error.kind() {
        ErrorKind::Disconnected | ErrorKind::TimedOut => (
            ErrorCode::HostUnreachable,
            "see whether its transhumed runs, and whether its port can be reached from here",
        ),
        ErrorKind::Busy => (ErrorCode::TargetExists, "move it under another name: --to HOST:VOLUME"),
        ErrorKind::NoSpace => (ErrorCode::NoSpace, "free some space there, or choose another host"),
        ErrorKind::PermissionDenied => (ErrorCode::HostRefused, "see to the other host's configuration and trust"),
        ErrorKind::Unsupported => (ErrorCode::VersionMismatch, "install the same version of transhumed on both hosts"),
        ErrorKind::Fenced => (ErrorCode::WrongState, "`transhume resolve` says what both hosts have on record"),
        ErrorKind::ReadOnly => (ErrorCode::ReadOnly, "see to the directory for incoming volumes there"),
        ErrorKind::NotFound => (ErrorCode::BackendMissing, "see to the directory for incoming volumes there"),
        ErrorKind::Invalid | ErrorKind::Misaligned => (ErrorCode::Invalid, "choose another name or host"),
        _ => (ErrorCode::Io, "see the log of that host's daemon"),
    };
    // What the other daemon says has its own hint.
    let error = Error::new(code, format!("{host}: {chain}"));
    if chain.contains(" - ") { error } else { error.with_hint(hint) }
}
