//! What is done at the end of a machine's move, also after a restart has interrupted that.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode, JobState, VmMove};
use uuid::Uuid;

use super::Machine;
use super::channel::Ask;
use crate::audit::Peer;
use crate::daemon::Daemon;
use crate::hosts::HostName;
use crate::volume::Volume;

/// How long one answer to what becomes of a machine may take, and how often it is told again.
const TELL_LIMIT: Duration = Duration::from_secs(10);
const REST_MIN: Duration = Duration::from_millis(100);
const REST_MAX: Duration = Duration::from_secs(2);
/// How often what is in the way of letting a disk go is looked at again, and how often that is tried.
const LET_GO_REST: Duration = Duration::from_millis(100);
const LET_GO_TRIES: u32 = 50;

/// The move of a machine is over: has that on record.
pub(super) fn note_end(daemon: &Daemon, machine: &Machine, over: VmMove) {
    let (host, id, error) = (over.to.clone(), over.id.clone(), over.error.clone());
    let is_done = over.state == JobState::Done;
    daemon.machines.note_shown(&over);
    let stored = daemon.update_machine(machine, |document| {
        document.outgoing = None;
        document.last_move = Some(over);
        if is_done {
            document.process = None;
            document.disks.clear();
            document.description = None;
        }
    });
    if let Err(error) = stored {
        tracing::error!(vm = machine.name, %error, "the end of a VM's move could not be stored; the next start finds out");
    }
    *machine.outgoing.lock() = None;
    let what = serde_json::json!({ "host": host, "move": id });
    daemon.note(&Peer::daemon(), ("vm.move-end", &machine.name), what, error.as_ref());
}

/// Has the other host run what it holds, however long that takes to tell.
pub(super) async fn run_there(daemon: &Arc<Daemon>, host: &HostName, id: Uuid) {
    tell(daemon, host, Ask::Run { id }).await;
}

/// Tells the other host that a machine does not come, until it has heard it. Before its QEMU was started nothing else there says
/// so. Nobody waits for that: the host may be away.
pub(super) fn abandon_there(daemon: &Arc<Daemon>, host: &HostName, id: Uuid) {
    let (daemon, host, env) = (Arc::clone(daemon), host.clone(), Arc::clone(&daemon.env));
    env.spawn(Box::pin(async move { tell(&daemon, &host, Ask::Abandon { id }).await }));
}

/// Over connections of its own: the answer to an earlier question may still come over the other one.
async fn tell(daemon: &Arc<Daemon>, host: &HostName, ask: Ask) {
    let mut rest = REST_MIN;
    loop {
        let asked = daemon.ask_about_machine(host, ask.clone());
        // A link that is cut says nothing.
        match env::timeout(&*daemon.env, TELL_LIMIT, asked).await.unwrap_or_else(|| Err(no_answer(host))) {
            Ok(_) => return,
            // It has run there, or was given up by a person.
            Err(error) if error.code == ErrorCode::NotFound => return,
            Err(error) => tracing::warn!(%host, %error, ?ask, "a host is told again what becomes of a VM"),
        }
        daemon.env.sleep(rest).await;
        rest = (rest * 2).min(REST_MAX);
    }
}

pub(super) fn no_answer(host: &HostName) -> Error {
    Error::new(ErrorCode::HostUnreachable, format!("{host} does not answer in time"))
        .with_hint("see whether its transhumed runs, and whether its port can be reached from here")
}

/// Ends the QEMU of a machine that is at another host, and lets its disks go.
pub(super) async fn end_here(daemon: &Arc<Daemon>, machine: &Machine, volumes: Vec<Arc<Volume>>) {
    daemon.end_machine(&machine.document()).await;
    // Of one that had come here before.
    daemon.hypervisors.clear(&daemon.machine_folder(&machine.name));
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

/// Whole milliseconds, as the API has them.
pub(super) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
