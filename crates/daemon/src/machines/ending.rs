//! What is done at the end of a machine's move, also after a restart has interrupted that.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode, VmMove};
use uuid::Uuid;

use super::Machine;
use super::channel::Ask;
use super::document::MachineDocument;
use crate::audit::Peer;
use crate::daemon::Daemon;
use crate::hosts::HostName;
use crate::jobs::Committed;
use crate::problem::Result;
use crate::volume::Volume;

/// How long one answer to what becomes of a machine may take, and how often it is told again.
const TELL_LIMIT: Duration = Duration::from_secs(10);
const REST_MIN: Duration = Duration::from_millis(100);
const REST_MAX: Duration = Duration::from_secs(2);
/// For how long a host may know nothing of a machine that is there by the commit.
const UNKNOWN_LIMIT: Duration = Duration::from_secs(10);
/// How often the end of a move is stored again that could not be.
const STORE_REST: Duration = Duration::from_millis(500);
/// How often what is in the way of letting a disk go is looked at again, and how often that is tried.
const LET_GO_REST: Duration = Duration::from_millis(100);
const LET_GO_TRIES: u32 = 50;

/// Where a machine is whose move is over.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ends {
    /// Here, as before.
    Here,
    /// At the other host, by the commit.
    There,
}

/// The move of a machine is over: has that on record, and tries again until it is.
pub(super) async fn note_end(daemon: &Daemon, machine: &Machine, over: VmMove, ends: Ends) {
    let (host, id, error) = (over.to.clone(), over.id.clone(), over.error.clone());
    daemon.machines.note_shown(&over);
    store_surely(daemon, machine, |document| {
        document.outgoing = None;
        document.last_move = Some(over.clone());
        if ends == Ends::There {
            document.process = None;
            document.disks.clear();
            document.description = None;
        }
    })
    .await;
    *machine.outgoing.lock() = None;
    let what = serde_json::json!({ "host": host, "move": id });
    daemon.note(&Peer::daemon(), ("vm.move-end", &machine.name), what, error.as_ref());
}

/// Changes what is on record of a machine, and tries again until that is stored.
pub(super) async fn store_surely(daemon: &Daemon, machine: &Machine, change: impl Fn(&mut MachineDocument)) {
    let mut is_problem = false;
    // One that was forgotten meanwhile has no record.
    while daemon.is_known(machine)
        && let Err(error) = daemon.update_machine(machine, &change)
    {
        tracing::error!(vm = machine.name, %error, "what became of a VM could not be stored; it is tried again");
        *machine.problem.lock() = Some(error);
        is_problem = true;
        daemon.env.sleep(STORE_REST).await;
    }
    if is_problem {
        *machine.problem.lock() = None;
    }
}

/// Has the other host run what it holds, however long that takes to tell, unless a person has the machine forgotten.
///
/// # Errors
/// Its QEMU has ended before the guest ran, or that host knows nothing of it and goes on to say so: that is final.
pub(super) async fn run_there(daemon: &Arc<Daemon>, machine: &Machine, host: &HostName, id: Uuid) -> Result<()> {
    let is_wanted = || daemon.is_known(machine);
    let failed = |error: &Error| {
        let message =
            format!("{} is at {host} by the commit, and {host} does not say yet that it runs: {error}", machine.name);
        let name = &machine.name;
        let hint = if is_given_back(daemon, machine) {
            format!(
                "its disks were given back here; it is asked again until `transhume vm rm {name}` here frees the name"
            )
        } else {
            format!(
                "it is asked again; if {host} is gone for good, `transhume vm resolve {name} --give-back` and `transhume vm rm {name}` here"
            )
        };
        *machine.problem.lock() = Some(Error::new(error.code, message).with_hint(hint));
    };
    let told = tell(daemon, host, Ask::Run { id }, (&is_wanted, &failed)).await;
    *machine.problem.lock() = None;
    match told {
        Err(error) if error.code == ErrorCode::NotFound => Err(unknown_there(&machine.name, host)),
        told => told,
    }
}

/// Whether a person has taken a disk of a machine back here that its move had given up.
fn is_given_back(daemon: &Daemon, machine: &Machine) -> bool {
    let outgoing = machine.document().outgoing;
    let mut volumes = outgoing.iter().flat_map(|outgoing| &outgoing.volumes);
    volumes.any(|name| daemon.volume(name).is_ok_and(|volume| volume.document().job.is_none()))
}

/// It was removed there, or what was on record of it is lost. Nobody here knows whether its guest runs.
fn unknown_there(name: &str, host: &HostName) -> Error {
    let message =
        format!("{name} is at {host} by the commit, and {host} knows nothing of it: nobody here knows whether it runs");
    Error::new(ErrorCode::VmLost, message).with_hint(format!(
        "see `transhume vm ls` and its disks at {host}; if it was not removed there on purpose, start it on those disks as after a crash; \
         `transhume vm rm {name}` frees the name here"
    ))
}

/// Tells the other host that a machine does not come, until it has heard it. Before its QEMU was started nothing else there says
/// so. Nobody waits for that: the host may be away.
pub(super) fn abandon_there(daemon: &Arc<Daemon>, host: &HostName, id: Uuid) {
    let (daemon, host, env) = (Arc::clone(daemon), host.clone(), Arc::clone(&daemon.env));
    env.spawn(Box::pin(async move { _ = tell(&daemon, &host, Ask::Abandon { id }, (&|| true, &|_| ())).await }));
}

type Failing<'a> = (&'a (dyn Fn() -> bool + Send + Sync), &'a (dyn Fn(&Error) + Send + Sync));

/// Over connections of its own: the answer to an earlier question may still come over the other one.
async fn tell(daemon: &Arc<Daemon>, host: &HostName, ask: Ask, (is_wanted, failed): Failing<'_>) -> Result<()> {
    let (mut rest, mut unknown_since) = (REST_MIN, None);
    while is_wanted() {
        let asked = daemon.ask_about_machine(host, ask.clone());
        // A link that is cut says nothing.
        match env::timeout(&*daemon.env, TELL_LIMIT, asked).await.unwrap_or_else(|| Err(no_answer(host))) {
            Ok(_) => return Ok(()),
            // What is not there need not be given up.
            Err(error) if error.code == ErrorCode::NotFound && matches!(ask, Ask::Abandon { .. }) => return Ok(()),
            Err(error) if error.code == ErrorCode::VmLost => return Err(error),
            Err(error) => {
                let is_unknown = error.code == ErrorCode::NotFound;
                unknown_since = unknown_since.filter(|_| is_unknown).or_else(|| is_unknown.then(|| daemon.env.now()));
                if unknown_since.is_some_and(|since| daemon.env.now().since(since) >= UNKNOWN_LIMIT) {
                    return Err(error);
                }
                tracing::warn!(%host, %error, ?ask, "a host is told again what becomes of a VM");
                failed(&error);
            }
        }
        daemon.env.sleep(rest).await;
        rest = (rest * 2).min(REST_MAX);
    }
    Ok(())
}

pub(super) fn no_answer(host: &HostName) -> Error {
    Error::new(ErrorCode::HostUnreachable, format!("{host} does not answer in time"))
        .with_hint("see whether its transhumed runs, and whether its port can be reached from here")
}

/// Ends the QEMU of a machine that is at another host, and lets its disks go.
pub(super) async fn end_here(daemon: &Arc<Daemon>, machine: &Machine, volumes: Vec<Arc<Volume>>, proof: &Committed) {
    daemon.end_machine(machine, None, proof.into()).await;
    // Of one that had come here before. Another one of its name may have come since a person had this one forgotten, or since a record
    // that is an older one: what lives there needs its sockets.
    let folder = daemon.machine_folder(&machine.name);
    if daemon.is_known(machine) && !daemon.has_live_qemu(&folder) {
        daemon.hypervisors.clear(&folder);
    }
    for volume in volumes {
        if let Some(job) = volume.job() {
            job.wait().await;
        }
        let mut tries = 0;
        loop {
            let is_adopted = volume.document().adoption.is_some();
            let gone = if is_adopted { daemon.release(&volume.name).await } else { daemon.detach(&volume.name).await };
            match gone {
                Ok(_) => break,
                Err(error) if tries == LET_GO_TRIES => {
                    tracing::error!(volume = volume.name, %error, "a disk of a VM that has gone could not be let go");
                    break;
                }
                Err(_) => daemon.env.sleep(LET_GO_REST).await,
            }
            tries += 1;
        }
    }
}

/// Gives back the disks that were adopted for a move which does not count. One whose QEMU has ended is let go: whoever starts that
/// again finds the file unlocked.
pub(super) async fn give_back_adopted(daemon: &Arc<Daemon>, machine: &Machine, adopted: &[String]) {
    for name in adopted {
        let is_adopted = daemon.volume(name).is_ok_and(|volume| volume.document().adoption.is_some());
        if !is_adopted {
            continue;
        }
        if let Err(error) = Box::pin(daemon.release(name)).await {
            tracing::warn!(vm = machine.name, volume = name, %error, "a disk that was adopted for a move stays adopted");
        }
    }
}

/// Whole milliseconds, as the API has them.
pub(super) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
