//! Volumes that will not arrive where they were to go, and those that are used from here no more: their hosts are told,
//! however long that takes.
//!
//! What is owed is in `STATE/abandoned.json`, from before a move ends to when the other host has answered. Nothing waits for
//! it: the volume that was not moved is here and works. One task a host pays all that is owed there.

use std::sync::Arc;
use std::time::Duration;

use block::Bytes;
use migrate::stream::{Answer, Ask, Dialer, Remote, Role, SessionRequest, Standing, StreamOptions};
use serde::{Deserialize, Serialize};

use super::commit::forget_verdict;
use super::gate::ASKING_EPOCH;
use crate::daemon::Daemon;
use crate::hosts::HostName;
use crate::jobs::random_uuid;
use crate::location::RemoteVolume;
use crate::problem::Result;
use crate::rates::capacity;

/// How long the end of a move waits for the other host's answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long the other streams of a session may take to be there, when the first one is, and how often somebody looks.
const OTHERS_WAIT: Duration = Duration::from_millis(250);
const LOOK: Duration = Duration::from_millis(5);

/// How often a host that does not answer is told again, at first and at last.
const REST_MIN: Duration = Duration::from_secs(1);
const REST_MAX: Duration = Duration::from_secs(60);

/// What a host is to be told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Debt {
    #[serde(flatten)]
    remote: RemoteVolume,
    /// The volume is there, and this host's guest uses it no more. Otherwise it will not arrive.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    released: bool,
}

impl Debt {
    fn ask(&self) -> Ask {
        if self.released { Ask::Release } else { Ask::Abandon }
    }
}

impl Daemon {
    /// Connections to the host of a volume.
    ///
    /// # Errors
    /// It is not trusted here.
    pub(super) fn dialer_of(&self, remote: &RemoteVolume) -> Result<Arc<dyn Dialer>> {
        HostName::new(&remote.host).and_then(|host| self.hosts.dialer(&host))
    }

    /// A session with the daemon of another host that only asks about a volume.
    async fn asking(&self, remote: &RemoteVolume, options: StreamOptions) -> block::Result<Arc<Remote>> {
        let dialer = self.dialer_of(remote);
        let dialer =
            dialer.map_err(|error| block::Error::new(block::ErrorKind::PermissionDenied, error.to_string()))?;
        let request = SessionRequest {
            volume: remote.volume.clone(),
            job: random_uuid(&*self.env),
            role: Role::Forward,
            epoch: ASKING_EPOCH,
            size: Bytes(remote.size),
            request_alignment: remote.request_alignment,
            origin: remote.job.to_string(),
        };
        Remote::connect(Arc::clone(&self.env), dialer, request, options).await
    }

    /// Asks the daemon of another host about a volume, without using it.
    pub(super) async fn ask_host(&self, remote: &RemoteVolume, ask: Ask) -> block::Result<Answer> {
        let options = StreamOptions { streams: 1, ..StreamOptions::default() };
        let asking = async { self.asking(remote, options).await?.call(ask).await };
        env::timeout(&*self.env, 2 * PATIENCE, asking).await.unwrap_or_else(|| {
            Err(block::Error::new(block::ErrorKind::TimedOut, format!("{} does not answer", remote.host)))
        })
    }

    /// What the network to another host carries at most, in bytes a second, over the streams that a move there would have.
    /// Nothing if that is not known soon.
    pub(crate) async fn capacity_to(&self, remote: &RemoteVolume) -> Option<u64> {
        let looking = async {
            let session = self.asking(remote, self.stream_options(remote)).await.ok()?;
            // The other streams come soon after the first, or not at all.
            let until = self.env.now() + OTHERS_WAIT;
            while session.paths().iter().any(Option::is_none) && self.env.now() < until {
                self.env.sleep(LOOK).await;
            }
            capacity(self, &session).await
        };
        env::timeout(&*self.env, PATIENCE, looking).await.flatten()
    }

    /// Where the volume stands on another host.
    pub(super) async fn ask_standing(&self, remote: &RemoteVolume) -> block::Result<Standing> {
        match self.ask_host(remote, Ask::Status).await? {
            Answer::Status(standing) => Ok(standing),
            other => Err(block::Error::new(block::ErrorKind::Invalid, format!("{} answered {other:?}", remote.host))),
        }
    }

    /// Tells a host that a volume will not arrive there: now if it answers soon, otherwise as soon as it does.
    pub(crate) async fn say_farewell(self: &Arc<Self>, remote: &RemoteVolume) {
        self.pay_soon(Debt { remote: remote.clone(), released: false }).await;
    }

    /// Tells the host that holds a volume that this host's guest uses it no more: as with a [farewell](Self::say_farewell).
    pub(crate) async fn say_released(self: &Arc<Self>, remote: &RemoteVolume) {
        self.pay_soon(Debt { remote: remote.clone(), released: true }).await;
    }

    async fn pay_soon(self: &Arc<Self>, debt: Debt) {
        self.owe(&debt);
        if env::timeout(&*self.env, PATIENCE, self.pay(&debt)).await != Some(true) {
            self.pay_later(&debt.remote.host);
        }
    }

    /// The same, without waiting for any answer.
    pub(crate) fn say_farewell_later(self: &Arc<Self>, remote: &RemoteVolume) {
        self.owe(&Debt { remote: remote.clone(), released: false });
        self.pay_later(&remote.host);
    }

    fn owe(&self, debt: &Debt) {
        self.change_owed(|owed| {
            if !owed.contains(debt) {
                owed.push(debt.clone());
            }
        });
    }

    /// After a start: tells those who have not answered yet.
    pub(crate) fn say_farewells_again(self: &Arc<Self>) {
        self.owed().iter().for_each(|debt| self.pay_later(&debt.remote.host));
    }

    /// Somebody sees to it that `host` is told all that it is owed.
    fn pay_later(self: &Arc<Self>, host: &str) {
        if !self.payers.lock().insert(host.to_owned()) {
            return;
        }
        let (daemon, host) = (Arc::clone(self), host.to_owned());
        self.env.spawn(Box::pin(async move {
            let mut rest = REST_MIN;
            while let Some(debt) = daemon.next_owed(&host) {
                if daemon.pay(&debt).await {
                    rest = REST_MIN;
                    continue;
                }
                daemon.env.sleep(rest).await;
                rest = (rest * 2).min(REST_MAX);
            }
        }));
    }

    /// What the host's payer pays next; without anything there is no payer any more.
    fn next_owed(&self, host: &str) -> Option<Debt> {
        let mut payers = self.payers.lock();
        let next = self.owed().into_iter().find(|debt| debt.remote.host == host);
        if next.is_none() {
            payers.remove(host);
        }
        next
    }

    /// Whether the host was told, or need not be.
    async fn pay(&self, debt: &Debt) -> bool {
        let Debt { remote, released } = debt;
        // A host that has it, or that nobody here knows any more, need not be told.
        match self.ask_host(remote, debt.ask()).await {
            Ok(_) => {}
            Err(error) if *released && error.kind() == block::ErrorKind::Unsupported => {
                tracing::info!(%remote, "a host of an older version cannot be told that a volume is not used from here");
            }
            Err(error) if error.kind() == block::ErrorKind::Fenced => {
                tracing::error!(%remote, error = error.chain(), "a host has taken a volume that was not to arrive there");
            }
            Err(error) if self.dialer_of(remote).is_ok() => {
                tracing::info!(%remote, released, error = error.chain(), "a host could not be told of a volume");
                return false;
            }
            Err(_) => {}
        }
        self.change_owed(|owed| owed.retain(|other| other != debt));
        forget_verdict(&*self.hosts, remote.job).await;
        true
    }

    /// Whether the move `job` was undone, and its target has not been told yet.
    pub(super) fn has_undone(&self, job: uuid::Uuid) -> bool {
        self.owed().iter().any(|debt| debt.remote.job == job && !debt.released)
    }

    fn owed(&self) -> Vec<Debt> {
        self.with_owed(|owed| owed.clone())
    }

    /// What cannot be noted is known as long as this daemon runs; the next one does too much rather than too little.
    fn change_owed(&self, change: impl FnOnce(&mut Vec<Debt>)) {
        self.with_owed(|owed| {
            change(owed);
            let text = serde_json::to_string_pretty(owed).expect("plain data serialises");
            if let Err(error) = self.layout.write_atomically(&self.layout.abandoned(), &text) {
                tracing::warn!(%error, "which hosts are to be told of volumes that do not arrive could not be noted");
            }
        });
    }

    fn with_owed<T>(&self, act: impl FnOnce(&mut Vec<Debt>) -> T) -> T {
        let mut owing = self.owing.lock();
        act(owing.get_or_insert_with(|| {
            let Ok(text) = self.layout.files().read(&self.layout.abandoned()) else { return Vec::new() };
            serde_json::from_slice(&text).unwrap_or_else(|error| {
                tracing::warn!(%error, "which hosts are to be told of volumes that do not arrive cannot be read");
                Vec::new()
            })
        }))
    }
}
