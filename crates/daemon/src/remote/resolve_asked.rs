//! A commit that was asked of the arbiter and of which nobody here knows whether it counts: what is known of it, and how somebody
//! ends it who cannot wait for the arbiter.
//!
//! A target that does not hold the volume and forgets the move never takes it, whatever the arbiter has decided. So its word ends
//! the doubt. Before it is asked it is on record here that the move is taken back: from then on its word alone counts. Without it a
//! person can end the doubt, at a risk.

use std::sync::Arc;

use api::v1::{Decision, Resolution, ResolveRequest};
use block::ErrorKind;

use super::commit::{begin_abandoning, taken_back, withdraw, withdrawals};
use super::doubt::{Awaited, OtherHost, Word, are_abandoning};
use super::outgoing::remote_of;
use super::resolve::{begin, refuse, said};
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
        let announced = self.announced_with(&document);
        let word = OtherHost::new(self).word_on(&announced).await;
        let host = &remote.host;
        let again = "this host asks again by itself";
        let verdict = match (&decided, &word) {
            (_, word) if are_abandoning(&announced) && !matches!(word, Word::Holds) => {
                format!("the move is taken back, once {host} says that it has forgotten it; {again}")
            }
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
            Word::Waits => {
                self.begin_abandoning(volume, &announced).await?;
                if !OtherHost::new(self).has_forgotten(&announced).await? {
                    return refuse(format!("the other host has taken {} meanwhile", volume.name));
                }
            }
            Word::Silent(error) if !at_risk => {
                return Err(error.with_hint(
                    "when it answers this ends without a risk; if it never will, `transhume resolve --give-back --risk` has the volume \
                     used here",
                ));
            }
            Word::Silent(_) => {
                self.begin_abandoning(volume, &announced).await?;
                self.abandon_at_risk(&announced).await?;
            }
        }
        self.take_back_all(volume, &announced).await
    }

    /// Has it on record, in each journal, that the moves `announced` are taken back.
    ///
    /// # Errors
    /// The commit is on record of one of them, or the record cannot be stored. The target is not to be asked.
    async fn begin_abandoning(&self, volume: &Volume, announced: &[Awaited]) -> Result<()> {
        let group = record_of(&volume.document()).and_then(|record| self.groups.lock().get(&record).cloned());
        let note = self.note_abandoning(announced);
        let noted = match group {
            Some(group) => Box::pin(group.begin_abandoning(note)).await,
            None => note.await,
        };
        match noted {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == ErrorKind::Fenced => refuse(format!("{}: {}", volume.name, error.chain())),
            Err(error) => Err(of_backend(&error, "the volume's journal")),
        }
    }

    async fn note_abandoning(&self, announced: &[Awaited]) -> block::Result<()> {
        for other in self.volumes() {
            let is_announced =
                Awaited::of(&other.document()).is_some_and(|own| announced.iter().any(|one| one.is_of(&own)));
            if is_announced && !begin_abandoning(&other.journal).await? {
                let context = format!("the doubt about {} has ended meanwhile", other.name);
                return Err(block::Error::new(ErrorKind::Fenced, context));
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
        let error = taken_back(&volume.name);
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
