//! A machine whose commit is in doubt, or that two hosts hold: what is said of it, and what is done.
//!
//! While the commit is in doubt its guest is stopped at both hosts. So the doubt ends here without the arbiter, after some patience,
//! if the target says that it has not taken the disks and forgets them. Otherwise a person may end it.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode, Resolution, ResolveRequest};
use env::Moment;
use futures::future::{Either, select};
use uuid::Uuid;

use super::Machine;
use super::attempt::MachineMove;
use crate::daemon::Daemon;
use crate::location::RemoteVolume;
use crate::problem::Result;
use crate::volume::Volume;

/// How often it is asked again whether a move counts.
const DOUBT_REST: Duration = Duration::from_millis(100);
/// How long a stopped guest waits for an arbiter that does not answer.
const ARBITER_PATIENCE: Duration = Duration::from_secs(10);

fn in_doubt(name: &str, host: &str, why: &str) -> Error {
    let message = format!("the guest of {name} is stopped: whether {host} is to run it is in doubt; {why}");
    Error::new(ErrorCode::WrongState, message).with_hint(format!(
        "it waits for the arbiter and for {host}; `transhume vm resolve {name}` says what is known, and can end it"
    ))
}

impl MachineMove {
    /// Whether the move counts is not known: says so, and ends that if the target can.
    pub(super) async fn wait_in_doubt(&self, daemon: &Arc<Daemon>, since: Moment, why: &block::Error) {
        let error = in_doubt(self.name(), self.host().as_str(), &why.chain());
        tracing::error!(vm = self.name(), %error, "whether the move of a VM counts is not known yet");
        self.note_doubt(daemon, Some(error));
        if daemon.env.now().since(since) >= ARBITER_PATIENCE
            && let Some(disk) = self.disks.first()
        {
            daemon.end_machine_doubt(self.name(), &disk.volume).await;
        }
        daemon.env.sleep(DOUBT_REST).await;
    }

    /// Waits until a cancelled move is over.
    ///
    /// # Errors
    /// It has come into doubt, and nobody knows for how long.
    pub(super) async fn over_or_in_doubt(&self, daemon: &Daemon) -> Result<()> {
        let doubted = pin!(async {
            loop {
                daemon.env.sleep(DOUBT_REST).await;
                if let Some(doubt) = self.doubt() {
                    return doubt;
                }
            }
        });
        match select(pin!(self.wait()), doubted).await {
            Either::Left(_) => Ok(()),
            Either::Right((doubt, _)) => Err(doubt),
        }
    }

    /// The cause of the doubt, or that there is none any more.
    pub(super) fn note_doubt(&self, daemon: &Daemon, doubt: Option<Error>) {
        if let Ok(machine) = daemon.machine(self.name()) {
            *machine.problem.lock() = doubt.clone();
        }
        self.set_doubt(doubt);
    }
}

impl Daemon {
    /// Ends the doubt about the disks of a machine whose guest is stopped, if the target has not taken them.
    pub(crate) async fn end_machine_doubt(self: &Arc<Self>, name: &str, volume: &Volume) {
        match self.end_doubt(volume, false).await {
            Ok(()) => tracing::warn!(vm = name, "the target has not taken the disks: the guest goes on here"),
            Err(error) => tracing::info!(vm = name, %error, "a doubt goes on"),
        }
    }

    /// Says of a machine that was being moved before a restart that nobody knows yet whether that counts.
    pub(super) fn note_doubt_after_restart(&self, machine: &Machine, volume: &Volume) {
        let document = volume.document();
        let Some(job) = document.job.as_deref().filter(|job| job.is_for_the_arbiter()) else { return };
        let host = job.target.to_string();
        let why =
            volume.problem().map_or_else(|| "the arbiter does not answer yet".to_owned(), |problem| problem.message);
        *machine.problem.lock() = Some(in_doubt(&machine.name, &host, &why));
    }

    /// Fails if this host has an arbiter that does not answer: no move to another host would end.
    pub(crate) async fn check_arbiter(&self) -> Result<()> {
        match self.hosts.arbiter() {
            Some(arbiter) => arbiter.ruling(Uuid::nil()).await.map(drop),
            None => Ok(()),
        }
    }

    /// Says what both hosts have on record of one volume, and does what was decided about it.
    ///
    /// # Errors
    /// It is a disk of a machine that is on its way: what is decided is decided about all of its disks.
    pub(crate) async fn resolve_volume(self: &Arc<Self>, name: &str, request: ResolveRequest) -> Result<Resolution> {
        let goes_with = |machine: &Arc<Machine>| {
            let document = machine.document();
            let goes = document.outgoing.iter().flat_map(|outgoing| &outgoing.volumes).any(|volume| volume == name);
            goes || document.incoming.is_some() && document.disks.iter().any(|disk| disk.volume == name)
        };
        match self.machines.list().into_iter().find(goes_with).filter(|_| request.decision.is_some()) {
            None => self.resolve(name, request).await,
            Some(machine) => {
                let vm = &machine.name;
                let message = format!("{name} is a disk of {vm}, whose disks stay together while it is on its way");
                Err(Error::new(ErrorCode::WrongState, message)
                    .with_hint(format!("`transhume vm resolve {vm}` decides about all of them")))
            }
        }
    }

    /// The machine whose disk the volume `name` is.
    fn machine_with(&self, name: &str) -> Option<Arc<Machine>> {
        let adoption = self.volume(name).ok().and_then(|volume| volume.document().adoption.clone());
        self.machines.list().into_iter().find(|machine| {
            let document = machine.document();
            let is_adopted = adoption.as_ref().is_some_and(|adoption| adoption.monitor == document.monitor);
            is_adopted || document.disks.iter().any(|disk| disk.volume == name)
        })
    }

    /// Another host has taken a disk whose move was undone here: its guest must not go on beside the one there.
    pub(crate) async fn stop_beside(&self, remote: &RemoteVolume) {
        let Some(machine) = self.machine_with(&remote.volume) else { return };
        let document = machine.document();
        let went = document.outgoing.as_ref().map(|outgoing| &outgoing.host);
        if went.or(document.last_move.as_ref().map(|last| &last.to)) != Some(&remote.host) {
            // The disk was moved alone: its guest runs nowhere else.
            return;
        }
        let stopped = async { self.hypervisors.reach(&document.monitor).await?.stop().await };
        let how = match stopped.await {
            Ok(()) => "the guest is stopped here".to_owned(),
            Err(error) => format!("the guest could not be stopped here: {error}"),
        };
        let message = format!(
            "{} has taken {} of {}, whose move was undone here; {how}",
            remote.host, remote.volume, machine.name
        );
        tracing::error!(vm = machine.name, message, "two hosts hold a VM");
        *machine.problem.lock() = Some(Error::new(ErrorCode::WrongState, message).with_hint(
            "two guests may have run, each with a disk of its own: look at both disks, end the QEMU of the one that is not to stay, and \
             `transhume vm rm` it",
        ));
    }

    /// Another host says that the move of a disk was undone which this host has taken.
    pub(crate) fn note_held_beside(&self, host: &str, volume: &str) {
        let Some(machine) = self.machine_with(volume) else { return };
        let message =
            format!("{host} has undone the move of {}, whose disk {volume} this host has taken", machine.name);
        tracing::error!(vm = machine.name, message, "two hosts hold a VM");
        *machine.problem.lock() = Some(Error::new(ErrorCode::WrongState, message).with_hint(format!(
            "two guests may have run, and {host} has stopped its own: look at both disks, end the QEMU of the one that is not to stay, \
             and `transhume vm rm` it",
        )));
    }
}
