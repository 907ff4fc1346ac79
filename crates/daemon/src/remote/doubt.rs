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
//! ```
//!
//! An arbiter that was restored from an older state has forgotten what it has decided. Its ruling is then older than the target,
//! which has taken the volume. So the target's word comes before any ruling but *committed*, and a move that the arbiter does not
//! know is settled by nobody else.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode};
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

/// A volume whose move was announced to the arbiter.
#[derive(Clone, Debug)]
pub(crate) struct Awaited {
    remote: RemoteVolume,
    /// The epoch under which its target holds it once that has taken it.
    epoch: u64,
}

impl Awaited {
    /// The move of the volume with this document, if it goes to another host.
    pub(super) fn of(document: &VolumeDocument) -> Option<Self> {
        let is_committed = document.job.as_ref().is_some_and(|job| job.committed.is_some());
        let epoch = if is_committed { document.epoch } else { document.epoch + 1 };
        remote_of(document).map(|remote| Self { remote: remote.clone(), epoch })
    }

    pub(super) const fn remote(&self) -> &RemoteVolume {
        &self.remote
    }

    /// Whether both are of the same volume.
    pub(super) fn is_of(&self, other: &Self) -> bool {
        self.remote.volume == other.remote.volume
    }
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
        for Awaited { remote, epoch } in awaited {
            match ask_host((&self.env, &*self.hosts), remote, Ask::Status, WORD_LIMIT).await {
                Ok(Answer::Status(VolumeStatus::Held { epoch: there })) if there == *epoch => held = Some(remote),
                Ok(Answer::Status(VolumeStatus::Prepared { .. })) => {}
                Ok(Answer::Status(_)) => gone = Some(remote),
                Ok(other) => return Word::Silent(silent(remote, &format!("{other:?}"))),
                Err(error) => return Word::Silent(silent(remote, &error.chain())),
            }
        }
        match (held, gone) {
            (Some(held), Some(gone)) => Word::Silent(
                Error::new(
                    ErrorCode::WrongState,
                    format!("{} holds {}, and has nothing of {}", held.host, held.volume, gone.volume),
                )
                .with_hint("`transhume resolve` at both hosts says what they have on record"),
            ),
            (Some(_), None) => Word::Holds,
            (None, _) => Word::Waits,
        }
    }
}

fn silent(remote: &RemoteVolume, why: &str) -> Error {
    let message = format!("whether {} has taken {} is not known: {why}", remote.host, remote.volume);
    Error::new(ErrorCode::HostUnreachable, message)
        .with_hint("see whether its transhumed runs, and whether its port can be reached from here")
}

/// Settles the ruling on `announced`, which was `before`, against the commit if that is possible still. Gives what counts now.
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
