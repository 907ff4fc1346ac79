//! Notices about volumes that will not arrive at their target, and about those that this host no longer uses. The other
//! hosts are told, however long that takes.
//!
//! Pending notices are in `STATE/abandoned.json`, from before a move ends to when the other host has answered. Nothing
//! waits for them: the volume that was not moved is here and works. One task a host delivers all notices for that host.

use std::sync::Arc;
use std::time::Duration;

use block::Bytes;
use env::EnvRef;
use migrate::stream::{Answer, Ask, Dialer, Remote, Role, SessionRequest, StreamOptions, VolumeStatus};
use serde::{Deserialize, Serialize};

use super::commit::forget_ruling;
use super::session_authorizer::ASKING_EPOCH;
use crate::daemon::Daemon;
use crate::document::{VolumeDocument, random_uuid};
use crate::hosts::HostName;
use crate::location::{Location, RemoteVolume};
use crate::platform::Hosts;
use crate::problem::Result;
use crate::rates::capacity;

/// How long the end of a move waits for the other host's answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);
/// How long the other streams of a session may take to be there, when the first one is, and how often somebody looks.
const OTHERS_WAIT: Duration = Duration::from_millis(250);
const LOOK: Duration = Duration::from_millis(5);

/// How often a host that does not answer is told again, at first and at last.
const REST_MIN: Duration = Duration::from_secs(1);
const REST_MAX: Duration = Duration::from_secs(60);

/// What a host is to be told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PendingNotice {
    #[serde(flatten)]
    remote: RemoteVolume,
    /// The volume is there, and this host's guest uses it no more. Otherwise it will not arrive.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    released: bool,
}

impl PendingNotice {
    fn ask(&self) -> Ask {
        if self.released { Ask::Release } else { Ask::Abandon }
    }
}

/// A session with the daemon of another host that only asks about a volume.
async fn asking(
    (env, hosts): (&EnvRef, &dyn Hosts),
    remote: &RemoteVolume,
    options: StreamOptions,
) -> block::Result<Arc<Remote>> {
    let dialer = HostName::new(&remote.host).and_then(|host| hosts.dialer(&host));
    let dialer = dialer.map_err(|error| block::Error::new(block::ErrorKind::PermissionDenied, error.to_string()))?;
    let request = SessionRequest {
        volume: remote.volume.clone(),
        job: random_uuid(&**env),
        role: Role::Forward,
        epoch: ASKING_EPOCH,
        size: Bytes(remote.size),
        request_alignment: remote.request_alignment,
        origin: remote.job.to_string(),
        layers: remote.layers.clone(),
        stays: remote.shared,
    };
    Remote::connect(Arc::clone(env), dialer, request, options).await
}

/// What the daemon of another host answers about a volume within `limit`.
pub(super) async fn ask_host(
    platform: (&EnvRef, &dyn Hosts),
    remote: &RemoteVolume,
    ask: Ask,
    limit: Duration,
) -> block::Result<Answer> {
    let options = StreamOptions { streams: 1, ..StreamOptions::default() };
    let asking = async { asking(platform, remote, options).await?.call(ask).await };
    env::timeout(&**platform.0, limit, asking).await.unwrap_or_else(|| {
        Err(block::Error::new(block::ErrorKind::TimedOut, format!("{} does not answer", remote.host)))
    })
}

impl Daemon {
    /// Connections to the host of a volume.
    ///
    /// # Errors
    /// It is not trusted here.
    pub(super) fn dialer_of(&self, remote: &RemoteVolume) -> Result<Arc<dyn Dialer>> {
        HostName::new(&remote.host).and_then(|host| self.hosts.dialer(&host))
    }

    /// Asks the daemon of another host about a volume, without using it.
    pub(super) async fn ask_host(&self, remote: &RemoteVolume, ask: Ask) -> block::Result<Answer> {
        ask_host((&self.env, &*self.hosts), remote, ask, 2 * ANSWER_LIMIT).await
    }

    /// What the network to another host carries at most, in bytes a second, over the streams that a move there would have.
    /// Nothing if that is not known soon.
    pub(crate) async fn capacity_to(&self, remote: &RemoteVolume) -> Option<u64> {
        let looking = async {
            let options = self.stream_options(remote);
            let session = asking((&self.env, &*self.hosts), remote, options).await.ok()?;
            // The other streams come soon after the first, or not at all.
            let until = self.env.now() + OTHERS_WAIT;
            while session.paths().iter().any(Option::is_none) && self.env.now() < until {
                self.env.sleep(LOOK).await;
            }
            capacity(self, &session).await
        };
        env::timeout(&*self.env, ANSWER_LIMIT, looking).await.flatten()
    }

    /// Where the volume stands on another host.
    pub(super) async fn ask_volume_status(&self, remote: &RemoteVolume) -> block::Result<VolumeStatus> {
        match self.ask_host(remote, Ask::Status).await? {
            Answer::Status(volume_status) => Ok(volume_status),
            other => Err(block::Error::new(block::ErrorKind::Invalid, format!("{} answered {other:?}", remote.host))),
        }
    }

    /// Tells a host that a volume will not arrive there: now if it answers soon, otherwise as soon as it does.
    pub(crate) async fn notify_abort(self: &Arc<Self>, remote: &RemoteVolume) {
        self.deliver_soon(PendingNotice { remote: remote.clone(), released: false }).await;
    }

    /// Tells the host that holds a volume that this host's guest uses it no more: as with
    /// [`notify_abort`](Self::notify_abort).
    pub(crate) async fn notify_release(self: &Arc<Self>, remote: &RemoteVolume) {
        self.deliver_soon(PendingNotice { remote: remote.clone(), released: true }).await;
    }

    /// Puts on record that this is to be told, once the volume is not on record here any more.
    pub(crate) fn note_release(&self, remote: &RemoteVolume) {
        self.add_notice(&PendingNotice { remote: remote.clone(), released: true });
    }

    /// The volume is still here, after all.
    pub(crate) fn forget_release(&self, remote: &RemoteVolume) {
        self.remove_notice(&PendingNotice { remote: remote.clone(), released: true });
    }

    async fn deliver_soon(self: &Arc<Self>, notice: PendingNotice) {
        self.add_notice(&notice);
        if env::timeout(&*self.env, ANSWER_LIMIT, self.deliver(&notice)).await != Some(true) {
            self.deliver_later(&notice.remote.host);
        }
    }

    /// The same, without waiting for any answer.
    pub(crate) fn notify_abort_later(self: &Arc<Self>, remote: &RemoteVolume) {
        self.add_notice(&PendingNotice { remote: remote.clone(), released: false });
        self.deliver_later(&remote.host);
    }

    /// Puts on record, at once and durably, that none of these volumes is to arrive at its host. From here on none of them is told to
    /// hold it.
    ///
    /// # Errors
    /// It could not be stored: nothing is decided.
    pub(super) fn decide_abort(&self, remotes: &[RemoteVolume]) -> Result<()> {
        self.with_notices(|pending_notices| {
            let mut decided = pending_notices.clone();
            let wanted = remotes.iter().map(|remote| PendingNotice { remote: remote.clone(), released: false });
            decided.extend(wanted.filter(|notice| !pending_notices.contains(notice)));
            self.store_notices(&decided)?;
            *pending_notices = decided;
            Ok(())
        })
    }

    fn store_notices(&self, pending_notices: &[PendingNotice]) -> Result<()> {
        let text = serde_json::to_string_pretty(pending_notices).expect("plain data serialises");
        self.layout.write_atomically(&self.layout.abandoned(), &text)
    }

    fn add_notice(&self, notice: &PendingNotice) {
        self.change_notices(|pending_notices| {
            if !pending_notices.contains(notice) {
                pending_notices.push(notice.clone());
            }
        });
    }

    /// After a start: tells those who have not answered yet.
    pub(crate) fn resume_notices(self: &Arc<Self>) {
        // Of a volume that is on record here its guest was not told either that it is gone.
        let here: Vec<Location> = self.volumes().iter().map(|volume| volume.document().backend.clone()).collect();
        let is_here =
            |notice: &PendingNotice| notice.released && here.contains(&Location::Remote(notice.remote.clone()));
        if self.pending_notices().iter().any(is_here) {
            self.change_notices(|pending_notices| pending_notices.retain(|notice| !is_here(notice)));
        }
        self.pending_notices().iter().for_each(|notice| self.deliver_later(&notice.remote.host));
    }

    /// Makes sure that one task delivers all pending notices to `host`.
    pub(super) fn deliver_later(self: &Arc<Self>, host: &str) {
        if !self.notifiers.lock().insert(host.to_owned()) {
            return;
        }
        let (daemon, host) = (Arc::clone(self), host.to_owned());
        self.env.spawn(Box::pin(async move {
            let mut rest = REST_MIN;
            while let Some(notice) = daemon.next_notice(&host) {
                if daemon.deliver(&notice).await {
                    rest = REST_MIN;
                    continue;
                }
                daemon.env.sleep(rest).await;
                rest = (rest * 2).min(REST_MAX);
            }
        }));
    }

    /// What the host's task delivers next; without anything there is no task any more.
    fn next_notice(&self, host: &str) -> Option<PendingNotice> {
        let given_up = self.given_up();
        let mut notifiers = self.notifiers.lock();
        // A volume that is to be given back has it on record by its notice until it is back.
        let is_due = |notice: &PendingNotice| notice.released || !given_up.contains(&notice.remote);
        let next = self.pending_notices().into_iter().find(|notice| notice.remote.host == host && is_due(notice));
        if next.is_none() {
            notifiers.remove(host);
        }
        next
    }

    /// Whether the host was told, or need not be.
    async fn deliver(&self, notice: &PendingNotice) -> bool {
        let PendingNotice { remote, released } = notice;
        // A host that has it, or that nobody here knows any more, need not be told.
        match self.ask_host(remote, notice.ask()).await {
            Ok(_) => {}
            Err(error) if *released && error.kind() == block::ErrorKind::Unsupported => {
                tracing::info!(%remote, "a host of an older version cannot be told that a volume is not used from here");
            }
            Err(error) if error.kind() == block::ErrorKind::Fenced => {
                tracing::error!(%remote, error = error.chain(), "a host has taken a volume that was not to arrive there");
                self.stop_beside(remote).await;
            }
            Err(error) if self.dialer_of(remote).is_ok() => {
                tracing::info!(%remote, released, error = error.chain(), "a host could not be told of a volume");
                return false;
            }
            Err(_) => {}
        }
        self.remove_notice(notice);
        forget_ruling(&*self.hosts, remote.job).await;
        true
    }

    /// Where the volumes are to be that this host has given up and no other one has taken, as far as is known here.
    fn given_up(&self) -> Vec<RemoteVolume> {
        let volumes = self.volumes();
        let documents = volumes.iter().map(|volume| volume.document()).filter(|document| document.given_up().is_some());
        let remote_of = |document: Arc<VolumeDocument>| match &document.backend {
            Location::Remote(remote) => Some(remote.clone()),
            _ => None,
        };
        documents.filter_map(remote_of).collect()
    }

    /// Whether the move of a volume was undone, and its target has not been told yet.
    pub(super) fn has_aborted(&self, remote: &RemoteVolume) -> bool {
        self.pending_notices().iter().any(|notice| notice.remote == *remote && !notice.released)
    }

    /// The same of any volume of the move `job`.
    pub(super) fn has_aborted_job(&self, job: uuid::Uuid) -> bool {
        self.pending_notices().iter().any(|notice| notice.remote.job == job && !notice.released)
    }

    /// The other host has taken a volume although that was undone here: it need not be told any more that the volume does not come.
    pub(super) fn forget_abort(&self, remote: &RemoteVolume) {
        self.remove_notice(&PendingNotice { remote: remote.clone(), released: false });
    }

    fn remove_notice(&self, notice: &PendingNotice) {
        self.change_notices(|pending_notices| pending_notices.retain(|other| other != notice));
    }

    fn pending_notices(&self) -> Vec<PendingNotice> {
        self.with_notices(|pending_notices| pending_notices.clone())
    }

    /// What cannot be noted is known as long as this daemon runs; the next one does too much rather than too little.
    fn change_notices(&self, change: impl FnOnce(&mut Vec<PendingNotice>)) {
        self.with_notices(|pending_notices| {
            change(pending_notices);
            if let Err(error) = self.store_notices(pending_notices) {
                tracing::warn!(%error, "which hosts are to be told of volumes that do not arrive could not be noted");
            }
        });
    }

    fn with_notices<T>(&self, act: impl FnOnce(&mut Vec<PendingNotice>) -> T) -> T {
        let mut notices = self.notices.lock();
        act(notices.get_or_insert_with(|| {
            let Ok(text) = self.layout.files().read(&self.layout.abandoned()) else { return Vec::new() };
            serde_json::from_slice(&text).unwrap_or_else(|error| {
                tracing::warn!(%error, "which hosts are to be told of volumes that do not arrive cannot be read");
                Vec::new()
            })
        }))
    }
}
