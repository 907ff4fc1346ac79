//! A commit that was asked of the arbiter and of which nobody here knows whether it counts: what is known of it, and how somebody
//! ends it who cannot wait for the arbiter.
//!
//! A target that does not hold the volume and forgets the move never takes it, whatever the arbiter has decided. So its word ends
//! the doubt. Without it a person can, at a risk.

use std::sync::Arc;

use api::v1::{Decision, Error, ErrorCode, Resolution, ResolveRequest};
use block::ErrorKind;
use migrate::stream::Ask;

use super::commit::{withdraw, withdrawals};
use super::doubt::{Awaited, OtherHost, Word};
use super::outgoing::remote_of;
use super::resolve::{begin, refuse, said};
use super::session_authorizer::of_wire;
use crate::arbiter::{self, Ruling};
use crate::daemon::Daemon;
use crate::document::{JobDocument, VolumeDocument};
use crate::jobs::record_of;
use crate::location::RemoteVolume;
use crate::problem::{Result, of_backend};
use crate::volume::Volume;

/// Whether only the arbiter knows if the move of the volume with this document counts.
pub(super) fn is_asked(document: &VolumeDocument) -> bool {
    document.job.as_deref().is_some_and(JobDocument::is_for_the_arbiter)
}

impl Daemon {
    /// What is known of a commit that the arbiter was asked for; ends the doubt if that was decided.
    pub(super) async fn resolve_asked(
        self: &Arc<Self>,
        volume: &Arc<Volume>,
        remote: &RemoteVolume,
        request: ResolveRequest,
    ) -> Result<Resolution> {
        let document = volume.document();
        let decided = match self.hosts.arbiter() {
            Some(arbiter) => Some(arbiter.ruling(remote.job).await),
            None => None,
        };
        let there = self.ask_volume_status(remote).await;
        let word = OtherHost::new(self).word_on(&self.announced_with(&document)).await;
        let host = &remote.host;
        let again = "this host asks again by itself";
        let verdict = match (&decided, &word) {
            (Some(Ok(Ruling::Committed)), _) => {
                format!("{host} holds the volume, as the arbiter has it; this host notes that soon")
            }
            (_, Word::Holds) => format!("{host} holds the volume; this host notes that soon"),
            (Some(Ok(Ruling::Unknown)) | None | Some(Err(_)), Word::Waits) => format!(
                "the commit was asked of the arbiter, which does not say what came of it, and {again}; {host} has not taken the \
                 volume: --give-back ends the move without the arbiter"
            ),
            (Some(Ok(_)), Word::Waits) => format!("this host holds the volume, as the arbiter has it; {again}"),
            (_, Word::Silent(error)) => {
                format!("the commit was asked of the arbiter, and {again} what came of it; {}", error.message)
            }
        };
        let risk = matches!(word, Word::Silent(_)).then(|| {
            format!(
                "--give-back --risk: if {host} has taken the volume, or hears from the arbiter that it is to, there are two of it"
            )
        });
        let resolution = Resolution {
            arbiter: decided.as_ref().map(said),
            in_doubt: true,
            verdict,
            risk,
            ..begin(volume, &document, host, &there)
        };
        match request.decision {
            None => Ok(resolution),
            Some(Decision::Take | Decision::Lost) => {
                refuse(format!("only {host} can take the volume, when it hears of the ruling"))
            }
            Some(Decision::GiveBack) => {
                self.end_doubt(volume, request.at_risk).await?;
                let done = "this host holds the volume; its move is over".to_owned();
                Ok(Resolution { done: Some(done), in_doubt: false, ..resolution })
            }
        }
    }

    /// Ends the doubt about the commit of `volume`, and of all that are committed with it, without the arbiter: the target has
    /// not taken them and never will. At a risk also when the target does not say so.
    ///
    /// # Errors
    /// The target has taken one of them, or does not answer. The doubt is as it was.
    pub(crate) async fn end_doubt(self: &Arc<Self>, volume: &Volume, at_risk: bool) -> Result<()> {
        let document = volume.document();
        let announced = self.announced_with(&document);
        match OtherHost::new(self).word_on(&announced).await {
            Word::Holds => {
                let host = remote_of(&document).map_or("", |remote| &remote.host);
                return refuse(format!("{host} holds {}", volume.name));
            }
            Word::Waits => self.have_forgotten(&announced).await?,
            Word::Silent(error) if !at_risk => {
                return Err(error.with_hint(
                    "when it answers this ends without a risk; if it never will, `transhume resolve --give-back --risk` has the volume \
                     used here",
                ));
            }
            Word::Silent(_) => self.abandon_at_risk(&announced).await?,
        }
        self.take_back_all(volume, &announced).await
    }

    /// The target forgets these moves, durably, before anybody goes on here.
    async fn have_forgotten(&self, announced: &[Awaited]) -> Result<()> {
        for remote in announced.iter().map(Awaited::remote) {
            match self.ask_host(remote, Ask::Abandon).await {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Fenced => {
                    return refuse(format!("{} has taken {} meanwhile", remote.host, remote.volume));
                }
                Err(error) => return Err(of_wire(&error, &remote.host)),
            }
        }
        Ok(())
    }

    /// The target is told when it answers again. An arbiter that answers rules against the move.
    async fn abandon_at_risk(self: &Arc<Self>, announced: &[Awaited]) -> Result<()> {
        let Some(job) = announced.first().map(|awaited| awaited.remote().job) else { return Ok(()) };
        if let Some(arbiter) = self.hosts.arbiter() {
            match arbiter::abandon(&*arbiter, job).await {
                Ok(Ruling::Committed) => return refuse("the arbiter has it that the volume was given up".to_owned()),
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(%job, %error, "a doubt is ended by hand, and the arbiter does not hear of it")
                }
            }
        }
        announced.iter().for_each(|awaited| self.notify_abort_later(awaited.remote()));
        Ok(())
    }

    /// Has it on record that the commit does not count, and ends the moves.
    async fn take_back_all(&self, volume: &Volume, announced: &[Awaited]) -> Result<()> {
        let group = record_of(&volume.document()).and_then(|record| self.groups.lock().get(&record).cloned());
        if let Some(group) = group {
            group.end_doubt().await.map_err(|error| of_backend(&error, "the record of the disks' commit"))?;
        }
        let error = Error::new(
            ErrorCode::MoveFailed,
            format!("the commit of {} was in doubt, and was taken back without the arbiter", volume.name),
        )
        .with_hint("see that the arbiter answers both hosts, and move it again");
        for other in self.volumes() {
            let document = other.document();
            let is_announced = Awaited::of(&document).is_some_and(|own| announced.iter().any(|one| one.is_of(&own)));
            if !is_announced || !is_asked(&document) {
                continue;
            }
            let stored = withdraw(&other.journal, withdrawals(&document) + 1).await;
            stored.map_err(|error| of_backend(&error, "the volume's journal"))?;
            match other.job() {
                Some(job) => job.fail(error.clone()),
                None => other.journal.fail_job(error.clone()),
            }
        }
        Ok(())
    }
}
