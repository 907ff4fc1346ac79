//! The commit of a move to another host: two phases, and the arbiter's word if there is one.
//!
//! ```text
//!   prepare ──▶ the target is ready ──▶ asked, on record ──▶ guest held ──▶ flush ──▶ the arbiter decides ──▶ fence, on record
//!                                        └────────── only with an arbiter ───────────────────┘
//! ```
//!
//! Without an arbiter the fence in the source's journal is the commit point. With one it is the arbiter's verdict, and the
//! fence says that it has been heard. *Asked* on record says that the verdict may be other than what the journal says: whoever
//! finds it after a crash asks the arbiter before anybody is let in. How a doubt ends is said in [`doubt`](super::doubt).

use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use block::{BlockDevice, ErrorKind, IoFuture};
use env::{Env, EnvRef};
use migrate::{JobJournal, Phase};

use super::doubt::{Awaited, OtherHost, are_abandoning, settle_ruling};
use super::remote_volume_device::RemoteVolumeDevice;
use crate::arbiter::{Arbiter, Ruling};
use crate::daemon::Daemon;
use crate::document::{JobDocument, VolumeDocument};
use crate::jobs::{JobHandle, record_of};
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
            other: OtherHost::new(daemon),
            // Of a group the arbiter decides as one.
            arbiter: daemon.hosts.arbiter().filter(|_| record_of(&volume.document()).is_none()),
            journal,
            remote_device: Arc::clone(remote_device),
            job: volume.job(),
        }),
        None => journal,
    }
}

/// The journal of a volume whose job goes to another host.
struct TwoPhases {
    env: EnvRef,
    /// Whoever the target is asked of.
    other: OtherHost,
    journal: Arc<VolumeJournal>,
    remote_device: Arc<RemoteVolumeDevice>,
    arbiter: Option<Arc<dyn Arbiter>>,
    job: Option<Arc<JobHandle>>,
}

fn gone(host: &str) -> block::Error {
    let context = format!("{host} has given up waiting for the volume, as the arbiter has it");
    block::Error::new(ErrorKind::Fenced, context)
}

/// A move of which the target has said that it never takes the volume.
pub(super) fn taken_back(name: &str) -> Error {
    Error::new(
        ErrorCode::MoveFailed,
        format!("the commit of {name} was in doubt, and was taken back without the arbiter"),
    )
    .with_hint("see that the arbiter answers both hosts, and move it again")
}

/// The ruling was asked for before it was on record that it does not count any more.
fn overtaken(name: &str) -> block::Error {
    block::Error::new(ErrorKind::TimedOut, format!("the move of {name} is being taken back: its target is asked"))
}

/// Asks the arbiter to decide that the moves `announced` count, whose ruling was `expected`. Gives *committed*, or the ruling that is to
/// be followed instead: what was there was forgotten, and the target has not taken the volumes.
///
/// # Errors
/// Fenced: they never can. Any other: nobody knows whether they do.
async fn ask_to_commit(
    arbiter: &dyn Arbiter,
    other: &OtherHost,
    (remote, announced): (&RemoteVolume, &[Awaited]),
    expected: Ruling,
) -> block::Result<Ruling> {
    let unknown = |error: Error| block::Error::new(ErrorKind::TimedOut, error.to_string());
    if are_abandoning(announced) {
        return Err(overtaken(&remote.volume));
    }
    match arbiter.decide(remote.job, expected, Ruling::Committed).await.map_err(unknown)? {
        Ruling::Committed => Ok(Ruling::Committed),
        Ruling::Unknown => match settle_ruling(arbiter, other, announced, expected).await.map_err(unknown)? {
            next @ (Ruling::Committed | Ruling::Withdrawn(_)) => Ok(next),
            Ruling::Unknown | Ruling::Open | Ruling::Abandoned => Err(gone(&remote.host)),
        },
        Ruling::Open | Ruling::Withdrawn(_) | Ruling::Abandoned => Err(gone(&remote.host)),
    }
}

/// Waits until the arbiter has the move to `remote`, and has it on record that it is going to be asked to decide on it. Gives
/// what it says now: `new` if it did not know the move before. Nothing is in doubt where this is called.
async fn announce(
    env: &dyn Env,
    arbiter: &dyn Arbiter,
    (remote, new): (&RemoteVolume, Ruling),
    (journal, job): (&VolumeJournal, Option<&JobHandle>),
) -> block::Result<Ruling> {
    let began = env.now();
    let ruling = loop {
        let announced = match arbiter.ruling(remote.job).await {
            Ok(Ruling::Unknown) => arbiter.decide(remote.job, Ruling::Unknown, new).await,
            known => known,
        };
        match announced {
            Ok(ruling) => break ruling,
            Err(error) if env.now().since(began) < ARBITER_PATIENCE => {
                tracing::info!(%error, "the switchover waits for the arbiter");
                job.inspect(|job| job.waits_for(Some(error)));
                env.sleep(ARBITER_REST).await;
            }
            Err(error) => return Err(block::Error::new(ErrorKind::TimedOut, error.to_string())),
        }
    };
    let has_waited =
        |job: &&JobHandle| job.show().error.is_some_and(|error| error.code == ErrorCode::ArbiterUnreachable);
    job.filter(has_waited).inspect(|job| job.waits_for(None));
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
    other: OtherHost,
    remote: RemoteVolume,
    /// The ruling that a commit would follow.
    last: parking_lot::Mutex<Ruling>,
    /// The moves that were announced, each once.
    announced: parking_lot::Mutex<Vec<Awaited>>,
}

impl GroupRuling {
    /// Of the moves to where `remote` is one of.
    pub(crate) fn new(daemon: &Daemon, arbiter: Arc<dyn Arbiter>, remote: RemoteVolume) -> Self {
        Self {
            env: Arc::clone(&daemon.env),
            arbiter,
            other: OtherHost::new(daemon),
            remote,
            last: parking_lot::Mutex::new(Ruling::Open),
            announced: parking_lot::Mutex::default(),
        }
    }

    /// The same after a start, of the moves that `documents` have on record. What was decided since their last store is not known.
    pub(crate) fn found(
        daemon: &Daemon,
        arbiter: Arc<dyn Arbiter>,
        remote: RemoteVolume,
        documents: &[Arc<VolumeDocument>],
    ) -> Self {
        let found = Self::new(daemon, arbiter, remote);
        let known = documents.iter().map(|document| withdrawals(document)).max().unwrap_or_default();
        *found.last.lock() = Ruling::after(known);
        *found.announced.lock() = documents.iter().filter_map(|document| Awaited::of(document)).collect();
        found
    }

    /// Has it on record in a member's journal that the arbiter is going to be asked.
    pub(crate) async fn announce(&self, journal: &VolumeJournal, job: Option<&JobHandle>) -> block::Result<()> {
        let document = journal.document();
        let known = self.last.lock().withdrawals().max(withdrawals(&document));
        let about = (&self.remote, Ruling::after(known));
        let ruling = announce(&*self.env, &*self.arbiter, about, (journal, job)).await?;
        *self.last.lock() = ruling;
        if let Some(awaited) = Awaited::of(&document) {
            let mut announced = self.announced.lock();
            announced.retain(|other| !other.is_of(&awaited));
            announced.push(awaited);
        }
        Ok(())
    }

    /// Asks for the commit of all.
    ///
    /// # Errors
    /// Fenced: it can never be. Any other: nobody knows whether it counts.
    pub(crate) async fn commit(&self) -> block::Result<()> {
        let announced = self.announced.lock().clone();
        loop {
            let expected = *self.last.lock();
            match ask_to_commit(&*self.arbiter, &self.other, (&self.remote, &announced), expected).await? {
                Ruling::Committed => return Ok(()),
                next => *self.last.lock() = next,
            }
        }
    }

    /// The journals of the moves have it on record that they are taken back.
    pub(crate) fn note_abandoning(&self) {
        self.announced.lock().iter_mut().for_each(Awaited::note_abandoning);
    }

    /// Settles what was asked, against the commit if that is possible still. Gives whether it counts.
    pub(crate) async fn settle(&self) -> block::Result<bool> {
        let before = *self.last.lock();
        let announced = self.announced.lock().clone();
        let ruling = match settle_ruling(&*self.arbiter, &self.other, &announced, before).await {
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

impl TwoPhases {
    /// A move that was taken back ends: its target has forgotten it.
    fn end_abandoned(&self) {
        let document = self.journal.document();
        if document.job.as_ref().is_none_or(|job| !job.abandoning) {
            return;
        }
        match &self.job {
            Some(job) => job.fail(taken_back(&document.name)),
            None => self.journal.fail_job(taken_back(&document.name)),
        }
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
            let Some(arbiter) = &self.arbiter else { return self.journal.commit().await };
            let announced = Awaited::of(&self.journal.document()).into_iter().collect::<Vec<_>>();
            loop {
                let expected = Ruling::after(withdrawals(&self.journal.document()));
                let about = (self.remote_device.place(), announced.as_slice());
                match ask_to_commit(&**arbiter, &self.other, about, expected).await? {
                    Ruling::Committed => return commit_by_ruling(&self.journal).await,
                    next => self.journal.update_job(|job| job.withdrawals = next.withdrawals()).await?,
                }
            }
        })
    }

    fn revert(&self) -> IoFuture<'_, bool> {
        Box::pin(async {
            let Some(arbiter) = &self.arbiter else {
                self.record(Phase::Reverting).await?;
                self.end_abandoned();
                return Ok(true);
            };
            let announced = Awaited::of(&self.journal.document()).into_iter().collect::<Vec<_>>();
            let error = match settle(&**arbiter, &self.other, &announced, &self.journal).await {
                Ok(true) => return Ok(false),
                Ok(false) => {
                    self.end_abandoned();
                    return Ok(true);
                }
                Err(error) => error,
            };
            // Asked again and again, and the guest's writes wait meanwhile.
            self.env.sleep(ARBITER_REST).await;
            Err(block::Error::new(ErrorKind::TimedOut, error.to_string()))
        })
    }

    fn may_commit(&self) -> IoFuture<'_, ()> {
        Box::pin(async {
            let document = self.journal.document();
            if document.job.as_ref().is_some_and(|job| job.abandoning) {
                // An arbiter that has ruled for the commit before has the target take whatever is prepared under this identity.
                return Err(gone(&self.remote_device.place().host));
            }
            self.remote_device.prepare(document.epoch + 1).await?;
            match &self.arbiter {
                Some(arbiter) => {
                    let new = Ruling::after(withdrawals(&self.journal.document()));
                    let about = (self.remote_device.place(), new);
                    let job = (&*self.journal, self.job.as_deref());
                    announce(&*self.env, &**arbiter, about, job).await.map(drop)
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
/// Gives whether the commit counts. `announced` are the moves that the ruling is on.
///
/// # Errors
/// Nobody can be asked who knows, or the outcome cannot be stored: it is as unknown as before.
async fn settle(
    arbiter: &dyn Arbiter,
    other: &OtherHost,
    announced: &[Awaited],
    journal: &VolumeJournal,
) -> Result<bool> {
    let document = journal.document();
    if document.job.as_ref().is_some_and(|job| job.committed.is_some()) {
        // It has been heard and stored while nobody waited for it any more.
        return Ok(true);
    }
    if document.job.as_ref().is_none_or(|job| !job.asked) || announced.is_empty() {
        // A person has ended the doubt meanwhile.
        return Ok(false);
    }
    let before = withdrawals(&document);
    let ruling = settle_ruling(arbiter, other, announced, Ruling::after(before)).await?;
    let stored = match ruling {
        // By the target's word.
        Ruling::Committed if are_abandoning(announced) => journal.update(VolumeDocument::commit).await,
        Ruling::Committed => commit_by_ruling(journal).await,
        Ruling::Unknown | Ruling::Open | Ruling::Abandoned => withdraw(journal, before).await,
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

/// Has it on record that the commit does not count, and how many of them were taken back by now. A move that the target has forgotten
/// ends.
pub(super) async fn withdraw(journal: &VolumeJournal, withdrawals: u32) -> block::Result<()> {
    let document = journal.document();
    if document.job.as_ref().is_some_and(|job| job.abandoning) {
        journal.fail_job(taken_back(&document.name));
    }
    let failure = journal.failure();
    let withdrawn = |job: &mut JobDocument| {
        job.record.phase = if job.abandoning { Phase::Cancelling } else { Phase::Reverting };
        job.failure = failure.filter(|_| job.abandoning);
        (job.asked, job.withdrawals) = (false, withdrawals);
    };
    journal.update_job(withdrawn).await
}

/// Has it on record that the target holds the volume, by the arbiter's ruling.
///
/// # Errors
/// The move was taken back meanwhile: the ruling does not count any more.
async fn commit_by_ruling(journal: &VolumeJournal) -> block::Result<()> {
    let mut is_overtaken = false;
    let stored = journal.update(|document| {
        is_overtaken = document.job.as_ref().is_some_and(|job| job.abandoning);
        if !is_overtaken {
            document.commit();
        }
    });
    stored.await?;
    if is_overtaken { Err(overtaken(&journal.document().name)) } else { Ok(()) }
}

/// Has it on record that the target is to forget the move, unless the commit is. Gives whether that is on record.
pub(super) async fn begin_abandoning(journal: &VolumeJournal) -> block::Result<bool> {
    let mut is_noted = false;
    let noted = journal.update_job(|job| {
        // One that has withdrawn already had it on record before.
        is_noted = job.committed.is_none() && (job.asked || job.abandoning);
        job.abandoning |= is_noted;
    });
    noted.await?;
    Ok(is_noted)
}

pub(super) fn withdrawals(document: &VolumeDocument) -> u32 {
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
        let announced = self.announced_with(&document);
        let is_committed = settle(&*arbiter, &OtherHost::new(self), &announced, &volume.journal).await?;
        tracing::info!(volume = volume.name, is_committed, "the arbiter has said who holds a volume");
        Ok(())
    }
}
