//! Who holds a volume that was on its way between two hosts. The answer is what both have on record, and a person's
//! decision where nobody else can make one.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{Decision, Error, ErrorCode, Resolution, ResolveRequest};
use migrate::stream::{Ask, VolumeStatus};

use super::opened::opened_without_way_back;
use super::outgoing::remote_of;
use super::remote_volume_device::Deciding;
use super::resolve_asked::is_asked;
use super::session_authorizer::of_wire;
use crate::arbiter::{self, Ruling};
use crate::daemon::Daemon;
use crate::document::{Committed, IncomingDocument, IncomingStage, VolumeDocument};
use crate::location::{Location, RemoteVolume};
use crate::problem::Result;
use crate::volume::Volume;

/// How long somebody who decides waits for a switchover whose commit is on record, and how often it is looked at.
const TURN_LIMIT: Duration = Duration::from_secs(10);
const TURN_LOOK: Duration = Duration::from_millis(10);

/// What the other host has said of a volume, or why it has not.
pub(super) type There = Result<VolumeStatus, block::Error>;

impl Daemon {
    /// Says what both hosts have on record of a volume, and does what was decided.
    pub(crate) async fn resolve(self: &Arc<Self>, name: &str, request: ResolveRequest) -> Result<Resolution> {
        let volume = self.volume(name)?;
        let _operation = volume.begin_operation(&*self.env).await?;
        let document = volume.document();
        if request.decision == Some(Decision::Lost) {
            return refuse(format!("{name} is a volume, and only memory is given up so"));
        }
        if let (Location::Local(_), Some(incoming)) = (&document.backend, &document.incoming) {
            return self.resolve_incoming(&volume, incoming, request.decision).await;
        }
        if let Location::Remote(remote) = &document.backend {
            return match document.given_up() {
                Some(committed) => self.resolve_fenced(&volume, (remote, committed), request).await,
                None => self.resolve_taken(&volume, remote, request.decision).await,
            };
        }
        let (host, there) = match remote_of(&document) {
            Some(remote) if is_asked(&document) => return self.resolve_asked(&volume, remote, request).await,
            Some(remote) => (remote.host.clone(), Some(self.ask_volume_status(remote).await)),
            None => (String::new(), None),
        };
        let verdict = match &document.opened {
            Some(opened) => opened_without_way_back(opened),
            None => "this host holds the volume; nothing is in doubt".to_owned(),
        };
        let resolution = match &there {
            Some(there) => Resolution { verdict, ..begin(&volume, &document, &host, there) },
            None => Resolution { volume: volume.name.clone(), here: here(&document), verdict, ..Resolution::default() },
        };
        nothing_to_decide(resolution, request.decision)
    }

    /// The other host has answered that it holds the volume.
    async fn resolve_taken(
        &self,
        volume: &Volume,
        remote: &RemoteVolume,
        decision: Option<Decision>,
    ) -> Result<Resolution> {
        let (host, there) = (&remote.host, self.ask_volume_status(remote).await);
        let is_unknown = matches!(&there, Ok(status) if !matches!(status, VolumeStatus::Held { .. }));
        let verdict = match &there {
            Ok(VolumeStatus::Without) => format!(
                "{host} has answered that it holds the volume, and does not know it any more: it was let go there, or its state directory \
                 is an older one; its bytes are in a file there"
            ),
            Ok(VolumeStatus::Filling | VolumeStatus::Prepared { .. }) => format!(
                "{host} has answered that it holds the volume, and does not know that any more: its state directory is an older one"
            ),
            Ok(VolumeStatus::Held { .. }) | Err(_) => match volume.kept_out() {
                Some(why) => format!("{host} holds the volume; {why}"),
                None => format!("{host} holds the volume; nothing is in doubt"),
            },
        };
        let resolution =
            Resolution { verdict, in_doubt: is_unknown, ..begin(volume, &volume.document(), host, &there) };
        nothing_to_decide(resolution, decision)
    }

    /// This host has given the volume up, and the other one has not answered that it holds it.
    async fn resolve_fenced(
        self: &Arc<Self>,
        volume: &Arc<Volume>,
        (remote, committed): (&RemoteVolume, &Committed),
        ResolveRequest { decision, at_risk }: ResolveRequest,
    ) -> Result<Resolution> {
        let _deciding = match decision {
            Some(Decision::GiveBack) => self.stop_telling(volume).await?,
            Some(Decision::Take | Decision::Lost) | None => None,
        };
        let there = self.ask_volume_status(remote).await;
        let host = &remote.host;
        let document = volume.document();
        if document.given_up().is_none() {
            return match decision {
                None => self.resolve_taken(volume, remote, None).await,
                Some(_) => refuse(format!("{host} has taken {} meanwhile", volume.name)),
            };
        }
        let resolution = begin(volume, &document, host, &there);
        let is_held_there = matches!(there, Ok(VolumeStatus::Held { .. }));
        let is_ours = matches!(there, Ok(VolumeStatus::Held { epoch }) if epoch >= document.epoch);
        if is_ours && self.has_aborted(remote) {
            tracing::warn!(
                volume = volume.name,
                host,
                "a volume that was being given back was taken by the other host before"
            );
            self.forget_abort(remote);
        }
        let is_unknown_there = self.is_unknown_there(remote, &there);
        let resolution = Resolution {
            in_doubt: !is_held_there,
            verdict: match &there {
                Ok(VolumeStatus::Held { .. }) => format!("{host} holds the volume; this host notes that in a moment"),
                Ok(VolumeStatus::Prepared { .. }) => {
                    format!("{host} is to hold the volume, and is told so again and again")
                }
                Ok(_) if is_unknown_there => not_known_there(&volume.name, host),
                Ok(VolumeStatus::Filling | VolumeStatus::Without) => {
                    format!("{host} cannot hold the volume: --give-back lets it be used here again")
                }
                Err(_) => format!(
                    "nobody uses the volume until {host} answers; if it never will, --give-back lets it be used here again"
                ),
            },
            risk: match &there {
                Ok(_) if is_unknown_there => Some(format!(
                    "--give-back --risk: if {host} has held the volume and let it go since, what is here lacks what was written there"
                )),
                Ok(_) => None,
                Err(_) => Some(format!(
                    "--give-back: if {host} has taken the volume after all, or is told to before it hears of this, and somebody \
                     uses it there, there are two of it"
                )),
            },
            ..resolution
        };
        match decision {
            None => Ok(resolution),
            Some(Decision::Take | Decision::Lost) => {
                if let Some(remote_device) = volume.remote_device() {
                    remote_device.kick();
                }
                Ok(Resolution { done: Some(format!("{host} is told once more to hold it")), ..resolution })
            }
            Some(Decision::GiveBack) if is_held_there => refuse(format!("{host} holds {}", volume.name)),
            Some(Decision::GiveBack) => {
                self.require_known_there(&volume.name, remote, (&there, at_risk))?;
                let telling = self.have_abandoned(volume, remote, there.is_ok());
                Box::pin(self.give_back(volume, committed, telling)).await?;
                self.deliver_later(host);
                let done = format!("this host holds the volume under epoch {}", volume.document().epoch);
                Ok(Resolution { done: Some(done), in_doubt: false, ..resolution })
            }
        }
    }

    /// Whether the other host, `there`, knows nothing of a volume that it was to hold, and this host has not had it forget that.
    fn is_unknown_there(&self, remote: &RemoteVolume, there: &There) -> bool {
        matches!(there, Ok(VolumeStatus::Without)) && !self.has_aborted(remote)
    }

    /// Refuses to use what is here of a volume of which the other host, `there`, knows nothing: it may have held it and let it go since.
    ///
    /// # Errors
    /// As said, unless a person takes the risk, or this host has had it forget the volume.
    pub(super) fn require_known_there(
        &self,
        name: &str,
        remote: &RemoteVolume,
        (there, at_risk): (&There, bool),
    ) -> Result<()> {
        if at_risk || !self.is_unknown_there(remote, there) {
            return Ok(());
        }
        Err(Error::new(ErrorCode::WrongState, not_known_there(name, &remote.host)).with_hint(format!(
            "look for its file at {host}; if it has never been used there, decide with --risk",
            host = remote.host
        )))
    }

    /// Has the other host forget what it was prepared for, before anybody uses the volume here: at once if it `answers`, or as soon as it
    /// does. An arbiter hears of it before, if the other host may take the volume by its ruling.
    ///
    /// # Errors
    /// The other host has taken the volume meanwhile, or refuses; the arbiter does not answer.
    async fn have_abandoned(self: &Arc<Self>, volume: &Volume, remote: &RemoteVolume, mut answers: bool) -> Result<()> {
        let host = &remote.host;
        if !answers {
            self.revoke(remote).await?;
            // That may have taken long, and the other host have come back meanwhile, having taken it.
            let there = self.ask_volume_status(remote).await;
            if volume.document().given_up().is_none() || matches!(there, Ok(VolumeStatus::Held { .. })) {
                return refuse(format!("{host} has taken {} meanwhile", volume.name));
            }
            answers = there.is_ok();
        }
        if answers {
            let told = self.ask_host(remote, Ask::Abandon).await;
            return told.map(drop).map_err(|error| of_wire(&error, host));
        }
        self.notify_abort_later(remote);
        Ok(())
    }

    /// Nobody at this host tells the other one to hold the volume until what this gives is dropped: what is looked at
    /// meanwhile stays so. Nothing if nobody tells it anyway, because the volume is not up.
    ///
    /// # Errors
    /// The move has its commit on record and does not come to pass the guest's requests on.
    pub(super) async fn stop_telling(&self, volume: &Volume) -> Result<Option<Deciding>> {
        let began = self.env.now();
        // A commit is on record a moment before the guest's requests turn to the other host. Who decides in between would
        // decide beside the one that is going to tell it.
        while volume.with_backend(|backend| backend.remote_device().is_none()) == Some(true) {
            if self.env.now().since(began) > TURN_LIMIT {
                let message = format!("the switchover of {} is not over yet", volume.name);
                return Err(Error::new(ErrorCode::WrongState, message).with_hint("decide again when it is"));
            }
            self.env.sleep(TURN_LOOK).await;
        }
        match volume.remote_device() {
            Some(remote_device) => Ok(Some(remote_device.decide().await)),
            None => Ok(None),
        }
    }

    /// Has the arbiter, if there is one, take its ruling back. Otherwise a host that cannot be asked would take the
    /// volume by itself as soon as it reaches the arbiter.
    pub(super) async fn revoke(&self, remote: &RemoteVolume) -> Result<()> {
        let Some(arbiter) = self.hosts.arbiter() else { return Ok(()) };
        let revoked = arbiter.decide(remote.job, Ruling::Committed, Ruling::Abandoned).await;
        revoked.map(drop).map_err(|error| {
            error.with_hint(format!(
                "{} takes the volume when it asks the arbiter, which must hear of this first; if it is gone for good, take \
                 `arbiter` out of the section [hosts], restart, and decide again",
                remote.host
            ))
        })
    }

    /// A volume that comes from another host.
    async fn resolve_incoming(
        self: &Arc<Self>,
        volume: &Arc<Volume>,
        incoming: &IncomingDocument,
        decision: Option<Decision>,
    ) -> Result<Resolution> {
        let host = &incoming.host;
        let there = self.ask_volume_status(&origin_of(incoming)).await;
        let resolution = begin(volume, &volume.document(), host, &there);
        if let Some(path) = self.taken_target(incoming) {
            let name = &volume.name;
            let verdict = format!(
                "this host has held the volume since, in {path}, which its record does not say: its state directory is an older one; put \
                 the newest back, or `transhume volume detach {name}` and attach {path}"
            );
            let resolution = Resolution { verdict: verdict.clone(), in_doubt: true, ..resolution };
            return if decision.is_none() { Ok(resolution) } else { refuse(verdict) };
        }
        match incoming.stage {
            IncomingStage::Held { epoch } if matches!(there, Ok(VolumeStatus::Held { epoch: there }) if there > epoch) => {
                self.resolve_newer_there((volume, host), resolution, decision).await
            }
            IncomingStage::Held { .. } if incoming.exclusive => {
                self.resolve_held((volume, incoming), resolution, decision).await
            }
            IncomingStage::Held { .. } if volume.document().opened.is_some() => {
                self.resolve_opened((volume, incoming), resolution, decision).await
            }
            IncomingStage::Held { .. } => {
                let verdict = "this host holds the volume; nothing is in doubt".to_owned();
                nothing_to_decide(Resolution { verdict, ..resolution }, decision)
            }
            IncomingStage::Filling => {
                let is_given_up = matches!(there, Ok(VolumeStatus::Without));
                let verdict = match is_given_up {
                    false => format!("{host} holds the volume; what is here is not complete"),
                    true => format!(
                        "{host} does not hold the volume any more, and this host's record says that it has not come: its state \
                         directory is an older one"
                    ),
                };
                let resolution = Resolution { verdict, in_doubt: is_given_up, ..resolution };
                match decision {
                    None => Ok(resolution),
                    Some(_) if is_given_up => refuse(resolution.verdict),
                    Some(Decision::Take) => refuse(format!("what is here of {} is not complete", volume.name)),
                    Some(Decision::GiveBack | Decision::Lost) => self.forget(volume, resolution).await,
                }
            }
            IncomingStage::Prepared { epoch } => {
                self.resolve_prepared((volume, incoming, epoch), (resolution, &there), decision).await
            }
        }
    }

    /// Refuses to remove what is here of a volume that its origin does not hold any more: this host's record is an older one. A file that
    /// names the later record stays in any case.
    ///
    /// # Errors
    /// As said.
    pub(crate) async fn require_held_there(&self, volume: &Volume, incoming: &IncomingDocument) -> Result<()> {
        if self.taken_target(incoming).is_some() {
            return Ok(());
        }
        match self.ask_volume_status(&origin_of(incoming)).await {
            Ok(VolumeStatus::Without) => refuse(format!(
                "{} does not hold {} any more, and this host's record says that it has not come: its state directory is an older one",
                incoming.host, volume.name
            )),
            _ => Ok(()),
        }
    }

    /// A volume that this host holds and of whose name the host that it came from holds one with a later epoch.
    async fn resolve_newer_there(
        &self,
        (volume, host): (&Arc<Volume>, &str),
        resolution: Resolution,
        decision: Option<Decision>,
    ) -> Result<Resolution> {
        let verdict = format!(
            "{host} holds a volume of that name under a later epoch. If it was taken back there, what is here is older, and --give-back lets \
             it go (its file stays). If it is another one, what is here is the only copy: `transhume move` it under another name"
        );
        match decision {
            None => Ok(Resolution { verdict, in_doubt: true, ..resolution }),
            Some(Decision::Take) => refuse(verdict),
            Some(Decision::GiveBack | Decision::Lost) => {
                self.remove_volume(volume).await?;
                let done = Some("this host knows the volume no more; its file stays".to_owned());
                Ok(Resolution { verdict, done, ..resolution })
            }
        }
    }

    /// A volume that this host holds for a guest of the host that it came from.
    async fn resolve_held(
        &self,
        (volume, incoming): (&Arc<Volume>, &IncomingDocument),
        resolution: Resolution,
        decision: Option<Decision>,
    ) -> Result<Resolution> {
        let (host, origin) = (&incoming.host, &incoming.origin);
        let verdict = format!(
            "this host holds the volume for the guest of {host}: nobody else uses it until `transhume volume detach {origin}` \
             there"
        );
        match decision {
            Some(Decision::Take) if !volume.is_used_from_afar() => {
                self.open_to_others(volume).await?;
                let done = format!("clients may come to its export here, and the guest of {host} is kept out");
                Ok(Resolution { verdict, done: Some(done), ..resolution })
            }
            Some(_) => refuse(verdict),
            None => {
                let risk = format!(
                    "--take opens its export here and keeps the guest of {host} out: what that has written and not flushed may be missing"
                );
                Ok(Resolution { verdict, risk: Some(risk).filter(|_| !volume.is_used_from_afar()), ..resolution })
            }
        }
    }

    /// A volume that is ready to be taken.
    async fn resolve_prepared(
        self: &Arc<Self>,
        (volume, incoming, epoch): (&Arc<Volume>, &IncomingDocument, u64),
        (resolution, there): (Resolution, &There),
        decision: Option<Decision>,
    ) -> Result<Resolution> {
        let host = &incoming.host;
        let decided = match self.hosts.arbiter() {
            Some(arbiter) => Some(arbiter.ruling(incoming.job).await),
            None => None,
        };
        let is_committed = matches!(decided, Some(Ok(Ruling::Committed)));
        let resolution = Resolution { arbiter: decided.as_ref().map(said), ..resolution };
        let resolution = match there {
            _ if is_committed => Resolution {
                in_doubt: true,
                verdict: format!("{host} has given the volume up, and this host takes it in a moment"),
                ..resolution
            },
            Ok(VolumeStatus::Without) => Resolution {
                in_doubt: true,
                verdict: format!(
                    "{host} has given the volume up, and has this host hold it by itself; --take has it held here at once, for others than \
                     the guest of {host}"
                ),
                risk: Some(format!("--take: the guest of {host}, if it still runs, loses its disk")),
                ..resolution
            },
            Ok(_) => Resolution {
                verdict: format!("{host} holds the volume, and the move goes on; --give-back ends it"),
                ..resolution
            },
            Err(_) => Resolution {
                in_doubt: true,
                verdict: format!(
                    "nobody here knows whether {host} has given the volume up; when it is back it says so by itself"
                ),
                risk: Some(format!(
                    "--take: if {host} has not given it up, there are two of it, and what is here may lack some of what was \
                     written last; --give-back: if it has, it must be told so by `transhume resolve {} --give-back` there",
                    incoming.origin
                )),
                ..resolution
            },
        };
        if incoming.undone {
            let verdict = format!("{host} has undone the move: --give-back removes what is here");
            let resolution = Resolution { in_doubt: false, verdict, risk: None, ..resolution };
            return match decision {
                None => Ok(resolution),
                Some(Decision::Take) => refuse(resolution.verdict),
                Some(Decision::GiveBack | Decision::Lost) => self.forget(volume, resolution).await,
            };
        }
        let is_given_up = matches!(there, Ok(VolumeStatus::Without));
        match (decision, there) {
            (None, _) => Ok(resolution),
            (Some(Decision::Take), Ok(_)) if !is_committed && !is_given_up => {
                refuse(format!("{host} holds {}", incoming.origin))
            }
            (Some(Decision::Take), _) => {
                self.abandon(incoming).await?;
                self.take_incoming(volume, incoming, epoch).await?;
                self.open_to_others(volume).await?;
                let done =
                    format!("this host holds the volume under epoch {epoch}, and the guest of {host} is kept out");
                Ok(Resolution { done: Some(done), in_doubt: false, ..resolution })
            }
            (Some(Decision::GiveBack | Decision::Lost), _) => {
                if is_given_up || self.abandon(incoming).await? == Some(Ruling::Committed) {
                    return refuse(format!("{host} has given {} up: nobody would hold it", incoming.origin));
                }
                self.drop_unless_committed(volume, incoming).await?;
                Ok(forgotten(resolution))
            }
        }
    }

    /// Has the arbiter, if there is one, refuse any commit of the move from here on. Gives its ruling.
    async fn abandon(&self, incoming: &IncomingDocument) -> Result<Option<Ruling>> {
        match self.hosts.arbiter() {
            Some(arbiter) => arbiter::abandon(&*arbiter, incoming.job).await.map(Some),
            None => Ok(None),
        }
    }

    async fn forget(&self, volume: &Arc<Volume>, resolution: Resolution) -> Result<Resolution> {
        self.drop_incoming(volume).await?;
        Ok(forgotten(resolution))
    }
}

fn forgotten(resolution: Resolution) -> Resolution {
    Resolution { done: Some("what was here of it is removed".to_owned()), in_doubt: false, ..resolution }
}

fn not_known_there(name: &str, host: &str) -> String {
    format!("{host} knows nothing of {name}: it has never held it, or has held it and let it go since")
}

/// The volume as the host knows it that it comes from.
fn origin_of(incoming: &IncomingDocument) -> RemoteVolume {
    RemoteVolume {
        host: incoming.host.clone(),
        volume: incoming.origin.clone(),
        job: incoming.job,
        size: incoming.size,
        request_alignment: incoming.request_alignment,
        layers: None,
        shared: incoming.target.is_none(),
    }
}

/// What an arbiter has said, for people.
pub(super) fn said(verdict: &Result<Ruling>) -> String {
    match verdict {
        Ok(verdict) => verdict.meaning().to_owned(),
        Err(error) => error.message.clone(),
    }
}

pub(super) fn begin(volume: &Volume, document: &VolumeDocument, host: &str, there: &There) -> Resolution {
    Resolution {
        volume: volume.name.clone(),
        here: here(document),
        host: Some(host.to_owned()),
        there: Some(match there {
            Ok(VolumeStatus::Filling) => "it is being filled".to_owned(),
            Ok(VolumeStatus::Prepared { epoch }) => format!("prepared for epoch {epoch}"),
            Ok(VolumeStatus::Held { epoch }) => format!("held under epoch {epoch}"),
            Ok(VolumeStatus::Without) => "not held".to_owned(),
            Err(error) => format!("no answer: {}", error.chain()),
        }),
        ..Resolution::default()
    }
}

/// What this host has on record.
fn here(document: &VolumeDocument) -> String {
    let epoch = document.epoch;
    if let (Location::Local(_), Some(incoming)) = (&document.backend, &document.incoming) {
        return match incoming.stage {
            IncomingStage::Filling => "it is being filled".to_owned(),
            IncomingStage::Prepared { epoch } => format!("prepared for epoch {epoch}"),
            IncomingStage::Held { .. } => format!("held under epoch {epoch}"),
        };
    }
    match &document.backend {
        Location::Local(_) | Location::Foreign(_) => format!("held under epoch {epoch}"),
        Location::Remote(remote) => format!("given up to {remote} under epoch {epoch}"),
    }
}

fn nothing_to_decide(resolution: Resolution, decision: Option<Decision>) -> Result<Resolution> {
    match decision {
        None => Ok(resolution),
        Some(_) => refuse(resolution.verdict),
    }
}

pub(super) fn refuse<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorCode::WrongState, message)
        .with_hint("leave the decision out to see what both hosts have on record"))
}
