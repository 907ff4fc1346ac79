//! A commit in doubt, and how that ends: the arbiter may have been asked, and what it has decided is not known here.
//!
//! ```text
//!   the arbiter answers ─┬─ committed ──────────────────────────────────────────────────────▶ the target holds it
//!                        ├─ anything else ──▶ the target is asked ─┬─ it holds the volume ──────────┘
//!                        │                                         ├─ it does not ────────────▶ the source holds it
//!                        │                                         ╰─ silent ─▶ the ruling counts (the same)
//!                        ├─ nothing is kept ▶ the target is asked ─── silent ─▶ still in doubt
//!   it does not answer ──┴──────────────────▶ the target is asked ─┬─ it holds the volume ─▶ the target holds it
//!                                                                  ╰─ anything else ─▶ still in doubt
//!
//!   it is taken back here, on record ──▶ the target is to forget it ─┬─ it has forgotten ────▶ the source holds it
//!                                                                    ├─ it holds the volume ─▶ the target holds it
//!                                                                    ╰─ silent ─▶ still in doubt, whatever the arbiter says
//! ```
//!
//! An arbiter that was restored from an older state has forgotten what it has decided. Its ruling is then older than the target,
//! which has taken the volume. So the target's word comes before any ruling but *committed*, and a move that the arbiter does not
//! know is settled by nobody else.
//!
//! A doubt can be ended without the arbiter: the target forgets the move. Its answer may be lost, and the arbiter say *committed*
//! later. So it is on record first, in the journal of each volume of the commit, that the move is taken back. From then on the
//! ruling does not count any more, and the target is asked again until it answers. It forgets all volumes of a commit or none.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use block::ErrorKind;
use env::EnvRef;
use migrate::stream::{Answer, Ask, VolumeStatus};

use super::abort_notices::ask_host;
use super::outgoing::remote_of;
use crate::arbiter::{Arbiter, Ruling};
use crate::daemon::Daemon;
use crate::document::VolumeDocument;
use crate::location::RemoteVolume;
use crate::platform::Hosts;
use crate::problem::Result;

/// How long the target may take for its word.
const WORD_LIMIT: Duration = Duration::from_secs(3);
/// How long it may take to forget a move, which removes a file.
const FORGET_LIMIT: Duration = Duration::from_secs(10);

/// A volume whose move was announced to the arbiter.
#[derive(Clone, Debug)]
pub(crate) struct Awaited {
    remote: RemoteVolume,
    /// The epoch under which its target holds it once that has taken it.
    epoch: u64,
    /// It is on record here that the target holds it.
    is_committed: bool,
    /// It is on record here that the target may have been asked to forget it.
    is_abandoning: bool,
}

impl Awaited {
    /// The move of the volume with this document, if it goes to another host.
    pub(super) fn of(document: &VolumeDocument) -> Option<Self> {
        let is_committed = document.job.as_ref().is_some_and(|job| job.committed.is_some());
        let is_abandoning = document.job.as_ref().is_some_and(|job| job.abandoning);
        let epoch = if is_committed { document.epoch } else { document.epoch + 1 };
        remote_of(document).map(|remote| Self { remote: remote.clone(), epoch, is_committed, is_abandoning })
    }

    /// It is on record now.
    pub(super) const fn note_abandoning(&mut self) {
        self.is_abandoning = true;
    }

    pub(super) const fn remote(&self) -> &RemoteVolume {
        &self.remote
    }

    /// Whether both are of the same volume.
    pub(super) fn is_of(&self, other: &Self) -> bool {
        self.remote.volume == other.remote.volume
    }
}

/// Whether the target's word alone ends the doubt about these moves: it may have forgotten them. Nobody has asked it to while one of
/// them is on record as committed, for all have it on record first.
pub(super) fn are_abandoning(announced: &[Awaited]) -> bool {
    announced.iter().any(|one| one.is_abandoning) && !announced.iter().any(|one| one.is_committed)
}

/// What the target has to say of the volumes of one commit.
#[derive(Debug)]
pub(super) enum Word {
    /// It has taken one of them, which it does by the commit of all.
    Holds,
    /// It has taken none.
    Waits,
    /// It does not say, or says what cannot be.
    Silent(Error),
}

/// The daemons of other hosts, as they are asked about a commit.
#[derive(Clone)]
pub(super) struct OtherHost {
    env: EnvRef,
    hosts: Arc<dyn Hosts>,
}

impl OtherHost {
    pub(super) fn new(daemon: &Daemon) -> Self {
        Self { env: Arc::clone(&daemon.env), hosts: Arc::clone(&daemon.hosts) }
    }

    /// What the target has to say of `awaited`.
    pub(super) async fn word_on(&self, awaited: &[Awaited]) -> Word {
        let (mut held, mut gone) = (None, None);
        for Awaited { remote, epoch, .. } in awaited {
            match ask_host((&self.env, &*self.hosts), remote, Ask::Status, WORD_LIMIT).await {
                Ok(Answer::Status(VolumeStatus::Held { epoch: there })) if there == *epoch => held = Some(remote),
                Ok(Answer::Status(VolumeStatus::Prepared { .. })) => {}
                Ok(Answer::Status(_)) => gone = Some(remote),
                Ok(other) => return Word::Silent(silent(remote, &format!("{other:?}"))),
                Err(error) => return Word::Silent(silent(remote, &error.chain())),
            }
        }
        match (held, gone) {
            (Some(held), Some(gone)) => Word::Silent(differs(held, gone)),
            (Some(_), None) => Word::Holds,
            (None, _) => Word::Waits,
        }
    }
}

impl OtherHost {
    /// Has the target forget these moves, durably. Gives whether it has; otherwise it holds the volumes.
    ///
    /// # Errors
    /// It does not say, or has forgotten some and holds others.
    pub(super) async fn has_forgotten(&self, announced: &[Awaited]) -> Result<bool> {
        let (mut held, mut gone) = (None, None);
        for remote in announced.iter().map(Awaited::remote) {
            match ask_host((&self.env, &*self.hosts), remote, Ask::Abandon, FORGET_LIMIT).await {
                Ok(_) => gone = Some(remote),
                Err(error) if error.kind() == ErrorKind::Fenced => held = Some(remote),
                Err(error) => return Err(silent(remote, &error.chain())),
            }
        }
        match (held, gone) {
            (Some(held), Some(gone)) => Err(differs(held, gone)),
            (held, _) => Ok(held.is_none()),
        }
    }
}

fn differs(held: &RemoteVolume, gone: &RemoteVolume) -> Error {
    let message = format!("{} holds {}, and has nothing of {}", held.host, held.volume, gone.volume);
    Error::new(ErrorCode::WrongState, message)
        .with_hint("`transhume resolve` at both hosts says what they have on record")
}

fn silent(remote: &RemoteVolume, why: &str) -> Error {
    let message = format!("whether {} has taken {} is not known: {why}", remote.host, remote.volume);
    Error::new(ErrorCode::HostUnreachable, message)
        .with_hint("see whether its transhumed runs, and whether its port can be reached from here")
}

/// Settles the ruling on `announced`, which was `before`, against the commit if that is possible still. Gives what counts now. Of
/// moves that are being taken back the target alone says that.
///
/// # Errors
/// Nobody can be asked who knows.
pub(super) async fn settle_ruling(
    arbiter: &dyn Arbiter,
    other: &OtherHost,
    announced: &[Awaited],
    before: Ruling,
) -> Result<Ruling> {
    let Some(job) = announced.first().map(|awaited| awaited.remote.job) else {
        return Err(Error::new(ErrorCode::JournalUnreadable, "which disks the arbiter was asked for cannot be read"));
    };
    if are_abandoning(announced) {
        let has_forgotten = match other.word_on(announced).await {
            Word::Holds => false,
            Word::Waits => other.has_forgotten(announced).await?,
            Word::Silent(error) => return Err(error),
        };
        tracing::warn!(%job, has_forgotten, "the target has said what became of a move that is taken back");
        return Ok(if has_forgotten { Ruling::Abandoned } else { Ruling::Committed });
    }
    let mut wanted = Ruling::after(before.withdrawals() + 1);
    let mut ruling = arbiter.decide(job, before, wanted).await;
    if let Ok(other @ (Ruling::Open | Ruling::Withdrawn(_))) = ruling
        && other != wanted
    {
        // The record of this host is behind: a commit that follows the other ruling may still be on its way.
        wanted = Ruling::after(other.withdrawals() + 1);
        ruling = arbiter.decide(job, other, wanted).await;
    }
    if matches!(ruling, Ok(Ruling::Committed)) {
        return ruling;
    }
    let word = other.word_on(announced).await;
    tracing::debug!(%job, ?ruling, ?word, "the arbiter and the target have said what became of a move");
    if matches!(word, Word::Holds) {
        tracing::warn!(%job, ?ruling, "the target has taken the volume: the commit counts, whatever the arbiter says");
        return Ok(Ruling::Committed);
    }
    match (word, ruling?) {
        // Under another ruling than a commit follows that was asked for before it was forgotten.
        (Word::Waits, Ruling::Unknown) => arbiter.decide(job, Ruling::Unknown, wanted).await,
        (Word::Silent(error), Ruling::Unknown) => Err(Error::new(
            ErrorCode::ArbiterUnreachable,
            format!("the arbiter has forgotten the move; {}", error.message),
        )
        .with_hint("it was restored from an older state; once the other host answers, its word counts")),
        (_, ruling) => Ok(ruling),
    }
}

impl Daemon {
    /// The moves that are committed together with that of the volume with this document.
    pub(super) fn announced_with(&self, document: &VolumeDocument) -> Vec<Awaited> {
        let Some(own) = Awaited::of(document) else { return Vec::new() };
        let job = own.remote.job;
        let documents = self.volumes().into_iter().map(|volume| volume.document());
        let others = documents.filter_map(|other| Awaited::of(&other)).filter(|other| other.remote.job == job);
        std::iter::once(own.clone()).chain(others.filter(|other| !other.is_of(&own))).collect()
    }
}
