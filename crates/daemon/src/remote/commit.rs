//! The commit of a move to another host: two phases, and the arbiter's word if there is one.
//!
//! ```text
//!   prepare ──▶ the target is ready ──▶ asked, on record ──▶ guest held ──▶ flush ──▶ the arbiter decides ──▶ fence, on record
//!                                        └────────── only with an arbiter ───────────────────┘
//! ```
//!
//! Without an arbiter the fence in the source's journal is the commit point. With one it is the arbiter's verdict, and the
//! fence says that it has been heard. *Asked* on record says that the verdict may be other than what the journal says: whoever
//! finds it after a crash asks the arbiter before anybody is let in.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use block::{BlockDevice, ErrorKind, IoFuture};
use env::{Env, EnvRef};
use migrate::{JobJournal, Phase};

use super::remote_volume_device::RemoteVolumeDevice;
use crate::arbiter::{Arbiter, Ruling};
use crate::daemon::Daemon;
use crate::document::{JobDocument, VolumeDocument};
use crate::jobs::record_of;
use crate::journal::VolumeJournal;
use crate::location::RemoteVolume;
use crate::open_backend::OpenBackend;
use crate::platform::Hosts;
use crate::problem::{Result, of_backend};
use crate::volume::Volume;

/// How long a switchover waits for an arbiter that does not answer before it is put off.
const ARBITER_PATIENCE: Duration = Duration::from_secs(10);
/// How often it is asked again.
const ARBITER_REST: Duration = Duration::from_secs(1);

/// The durable memory of a job: of one to another host with the two phases of the commit.
pub(crate) fn job_journal(daemon: &Daemon, volume: &Volume, target: &OpenBackend) -> Arc<dyn JobJournal> {
    let journal = Arc::clone(&volume.journal);
    match target.remote_device() {
        Some(remote_device) => Arc::new(TwoPhases {
            env: Arc::clone(&daemon.env),
            // Of a group the arbiter decides as one.
            arbiter: daemon.hosts.arbiter().filter(|_| record_of(&volume.document()).is_none()),
            journal,
            remote_device: Arc::clone(remote_device),
        }),
        None => journal,
    }
}

/// The journal of a volume whose job goes to another host.
struct TwoPhases {
    env: EnvRef,
    journal: Arc<VolumeJournal>,
    remote_device: Arc<RemoteVolumeDevice>,
    arbiter: Option<Arc<dyn Arbiter>>,
}

fn gone(host: &str) -> block::Error {
    let context = format!("{host} has given up waiting for the volume, as the arbiter has it");
    block::Error::new(ErrorKind::Fenced, context)
}

/// Asks the arbiter to decide that the move to `remote` counts.
///
/// # Errors
/// Fenced: it never can. Any other: nobody knows whether it does.
async fn ask_to_commit(arbiter: &dyn Arbiter, remote: &RemoteVolume, expected: Ruling) -> block::Result<()> {
    match arbiter.decide(remote.job, expected, Ruling::Committed).await {
        Ok(Ruling::Committed) => Ok(()),
        Ok(_) => Err(gone(&remote.host)),
        Err(error) => Err(block::Error::new(ErrorKind::TimedOut, error.to_string())),
    }
}

/// Waits until the arbiter answers, and has it on record that it is going to be asked to decide on the move to `remote`. Gives
/// what it says now.
async fn announce(
    env: &dyn Env,
    arbiter: &dyn Arbiter,
    remote: &RemoteVolume,
    journal: &VolumeJournal,
) -> block::Result<Ruling> {
    let began = env.now();
    let ruling = loop {
        match arbiter.ruling(remote.job).await {
            Ok(ruling) => break ruling,
            Err(error) if env.now().since(began) < ARBITER_PATIENCE => {
                tracing::info!(%error, "the switchover waits for the arbiter");
                env.sleep(ARBITER_REST).await;
            }
            Err(error) => return Err(block::Error::new(ErrorKind::TimedOut, error.to_string())),
        }
    };
    if ruling == Ruling::Abandoned {
        return Err(gone(&remote.host));
    }
    journal.update_job(|job| job.asked = true).await?;
    Ok(ruling)
}

/// The arbiter's ruling on a group: the moves of all its volumes have one identity, so there is one ruling on them.
pub(crate) struct GroupRuling {
    env: EnvRef,
    arbiter: Arc<dyn Arbiter>,
    remote: RemoteVolume,
    /// The ruling that a commit would follow.
    last: parking_lot::Mutex<Ruling>,
}

impl GroupRuling {
    /// Of the moves to where `remote` is one of.
    pub(crate) fn new(env: &EnvRef, arbiter: Arc<dyn Arbiter>, remote: RemoteVolume) -> Self {
        Self { env: Arc::clone(env), arbiter, remote, last: parking_lot::Mutex::new(Ruling::Open) }
    }

    /// Has it on record in a member's journal that the arbiter is going to be asked.
    pub(crate) async fn announce(&self, journal: &VolumeJournal) -> block::Result<()> {
        let ruling = announce(&*self.env, &*self.arbiter, &self.remote, journal).await?;
        *self.last.lock() = ruling;
        Ok(())
    }

    /// Asks for the commit of all.
    ///
    /// # Errors
    /// Fenced: it can never be. Any other: nobody knows whether it counts.
    pub(crate) async fn commit(&self) -> block::Result<()> {
        let expected = *self.last.lock();
        ask_to_commit(&*self.arbiter, &self.remote, expected).await
    }

    /// Settles what was asked, against the commit if that is possible still. Gives whether it counts.
    pub(crate) async fn settle(&self) -> block::Result<bool> {
        let before = *self.last.lock();
        let wanted = Ruling::after(before.withdrawals() + 1);
        let ruling = match self.arbiter.decide(self.remote.job, before, wanted).await {
            Ok(ruling) => ruling,
            Err(error) => {
                // Asked again and again, and the guests' writes wait meanwhile.
                self.env.sleep(ARBITER_REST).await;
                return Err(block::Error::new(ErrorKind::TimedOut, error.to_string()));
            }
        };
        *self.last.lock() = ruling;
        Ok(ruling == Ruling::Committed)
    }

    /// Both hosts have on record what has become of all: the arbiter need not know any more.
    pub(crate) async fn forget(&self) {
        forget(&*self.arbiter, self.remote.job).await;
    }
}

impl JobJournal for TwoPhases {
    fn record(&self, phase: Phase) -> IoFuture<'_, ()> {
        // Nothing is in doubt where this is called, so nothing was asked, or it has been answered.
        Box::pin(self.journal.note_phase(phase, |job| job.asked = false))
    }

    fn failed(&self, error: &block::Error, is_unequal: bool) {
        self.journal.failed(error, is_unequal);
    }

    /// What the guest was answered since the target's last flush is made durable there: that host may lose its power before
    /// it takes the volume, and this one may not look at its old copy after the fence.
    fn before_commit(&self) -> IoFuture<'_, ()> {
        self.remote_device.flush()
    }

    /// The fence: from here on this host does not hold the volume, whether the other one has heard of it or not.
    fn commit(&self) -> IoFuture<'_, ()> {
        Box::pin(async {
            if let Some(arbiter) = &self.arbiter {
                let expected = Ruling::after(withdrawals(&self.journal.document()));
                ask_to_commit(&**arbiter, self.remote_device.place(), expected).await?;
            }
            self.journal.commit().await
        })
    }

    fn revert(&self) -> IoFuture<'_, bool> {
        Box::pin(async {
            let Some(arbiter) = &self.arbiter else { return self.record(Phase::Reverting).await.map(|()| true) };
            let error = match settle(&**arbiter, &self.journal).await {
                Ok(is_committed) => return Ok(!is_committed),
                Err(error) => error,
            };
            // Asked again and again, and the guest's writes wait meanwhile.
            self.env.sleep(ARBITER_REST).await;
            Err(block::Error::new(ErrorKind::TimedOut, error.to_string()))
        })
    }

    fn may_commit(&self) -> IoFuture<'_, ()> {
        Box::pin(async {
            self.remote_device.prepare(self.journal.document().epoch + 1).await?;
            match &self.arbiter {
                Some(arbiter) => {
                    let announced = announce(&*self.env, &**arbiter, self.remote_device.place(), &self.journal);
                    announced.await.map(drop)
                }
                None => Ok(()),
            }
        })
    }

    fn committed(&self) {
        self.remote_device.turn(self.journal.document().epoch);
    }
}

/// Settles what the arbiter may have been asked, against the commit if that is possible still, and has the outcome on record.
/// Gives whether the commit counts.
///
/// # Errors
/// The arbiter cannot be asked, or the outcome not stored: it is as unknown as before.
async fn settle(arbiter: &dyn Arbiter, journal: &VolumeJournal) -> Result<bool> {
    let document = journal.document();
    if document.job.as_ref().is_some_and(|job| job.committed.is_some()) {
        // It has been heard and stored while nobody waited for it any more.
        return Ok(true);
    }
    let Some(remote) = super::outgoing::remote_of(&document) else { return Ok(false) };
    let before = withdrawals(&document);
    let ruling = arbiter.decide(remote.job, Ruling::after(before), Ruling::after(before + 1)).await?;
    let stored = match ruling {
        Ruling::Committed => journal.update(VolumeDocument::commit).await,
        Ruling::Open | Ruling::Abandoned => withdraw(journal, before).await,
        Ruling::Withdrawn(withdrawals) => withdraw(journal, withdrawals).await,
    };
    stored.map_err(|error| of_backend(&error, "the volume's journal"))?;
    Ok(ruling == Ruling::Committed)
}

/// Both hosts have on record what has become of the move `job`: the arbiter need not know any more.
pub(super) async fn forget_ruling(hosts: &dyn Hosts, job: uuid::Uuid) {
    if let Some(arbiter) = hosts.arbiter() {
        forget(&*arbiter, job).await;
    }
}

async fn forget(arbiter: &dyn Arbiter, job: uuid::Uuid) {
    if let Err(error) = arbiter.forget(job).await {
        tracing::info!(%job, %error, "the verdict on a move that is over stays at the arbiter");
    }
}

/// Has it on record that the commit does not count, and how many of them were taken back by now.
async fn withdraw(journal: &VolumeJournal, withdrawals: u32) -> block::Result<()> {
    let withdrawn = |job: &mut JobDocument| {
        job.record.phase = Phase::Reverting;
        (job.asked, job.withdrawals) = (false, withdrawals);
    };
    journal.update_job(withdrawn).await
}

fn withdrawals(document: &VolumeDocument) -> u32 {
    document.job.as_ref().map_or(0, |job| job.withdrawals)
}

impl Daemon {
    /// After a start, before anybody is let in: settles what the arbiter may have been asked about a volume.
    ///
    /// # Errors
    /// It cannot be asked, or nobody knows whom to ask. Who holds the volume is not known.
    pub(crate) async fn settle_asked(&self, volume: &Volume) -> Result<()> {
        let document = volume.document();
        if !document.job.as_deref().is_some_and(JobDocument::is_for_the_arbiter) {
            return Ok(());
        }
        let Some(arbiter) = self.hosts.arbiter() else {
            let message =
                format!("whether {} was given up only the arbiter knows, and none is configured", volume.name);
            return Err(Error::new(ErrorCode::ArbiterUnreachable, message)
                .with_hint("put `arbiter` back into the section [hosts] and restart"));
        };
        let is_committed = settle(&*arbiter, &volume.journal).await?;
        tracing::info!(volume = volume.name, is_committed, "the arbiter has said who holds a volume");
        Ok(())
    }
}
