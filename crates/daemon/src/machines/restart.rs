//! Machines after a start of the daemon.
//!
//! | on record | its disks | what is done |
//! |---|---|---|
//! | moves away | all at the other host | it is run there, its QEMU here is ended |
//! | moves away | here | the move is undone: its guest goes on here |
//! | comes, no QEMU for it on record | any | it is given up: its source waits for the word that QEMU has started |
//! | comes | held here | it runs once its QEMU has all of it |
//! | has come, its hook may not know | held here | the hook is told that it runs |
//! | comes | being filled, or gone | its QEMU is ended once they are gone |
//! | runs, its memory follows | held here | it is looked after until all of it is here |

use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode, JobState, VmMove, VmMovePhase};

use super::Machine;
use super::document::{self, OutgoingMachine};
use super::ending::{abandon_there, end_here, note_end, run_there};
use super::hooks::HookPhase;
use super::postcopy::PostcopyTarget;
use crate::audit::unix_ms;
use crate::daemon::Daemon;
use crate::hosts::HostName;
use crate::jobs::{machine_member, record_of};
use crate::location::Location;
use crate::problem::Result;
use crate::volume::Volume;

/// How often a volume is looked at that has not come back yet, or of which nobody knows who holds it.
const LOOK: Duration = Duration::from_millis(50);

/// Brings every machine back that is on record. The volumes are there already.
pub(crate) fn recover(daemon: &Arc<Daemon>) -> Result<()> {
    for document in document::load_all(&daemon.layout)? {
        match document {
            Ok(document) => {
                let machine = Machine::new(document);
                daemon.machines.admit(Arc::clone(&machine));
                recover_one(daemon, &machine);
            }
            Err(error) => tracing::error!(%error, "what is on record of a VM cannot be read"),
        }
    }
    Ok(())
}

fn recover_one(daemon: &Arc<Daemon>, machine: &Arc<Machine>) {
    let document = machine.document();
    if document.incoming.is_some() && document.is_begun() {
        daemon.tend(machine);
    } else if document.incoming.is_some() {
        let (daemon, machine) = (Arc::clone(daemon), Arc::clone(machine));
        let env = Arc::clone(&daemon.env);
        env.spawn(Box::pin(async move { daemon.give_up_unstarted(&machine).await }));
    }
    if document.following.is_some() {
        daemon.tend_memory(machine);
    }
    daemon.release_when_let_go(machine);
    if let Some(arrived) = &document.arrived {
        daemon.tell_running(machine, arrived);
    }
    if let Some(outgoing) = document.outgoing {
        let (daemon, machine) = (Arc::clone(daemon), Arc::clone(machine));
        let env = Arc::clone(&daemon.env);
        env.spawn(Box::pin(async move { settle(&daemon, &machine, outgoing).await }));
    }
}

/// A move that a restart has interrupted is undone, or was committed.
async fn settle(daemon: &Arc<Daemon>, machine: &Machine, outgoing: OutgoingMachine) {
    let _operation = machine.operation.lock().await;
    let volumes: Vec<Arc<Volume>> = outgoing.volumes.iter().filter_map(|name| daemon.volume(name).ok()).collect();
    let record = volumes.iter().find_map(|volume| record_of(&volume.document()));
    let is_committed = is_committed(daemon, machine, &volumes).await;
    let Ok(host) = HostName::new(&outgoing.host) else { return };
    let told = daemon.hook_at_source_again(&machine.name, &outgoing);
    let over = |state, error| VmMove {
        id: outgoing.id.to_string(),
        vm: machine.name.clone(),
        to: outgoing.host.clone(),
        state,
        phase: VmMovePhase::Over,
        started_unix_ms: outgoing.started_unix_ms,
        elapsed_ms: unix_ms(daemon.env.wall_clock()).saturating_sub(outgoing.started_unix_ms),
        forecast_seconds: None,
        forecast_downtime_ms: None,
        memory: None,
        memory_bytes_per_second: None,
        memory_rates: None,
        connections: None,
        memory_engine: None,
        not_parallel: None,
        caches: Vec::new(),
        cache_wait_ms: None,
        disks: Vec::new(),
        downtime_ms: None,
        error,
    };
    if outgoing.domain.is_some() {
        // Definitions, which may have secrets.
        daemon.hypervisors.clear(&daemon.migration_place(&machine.name));
    }
    if is_committed {
        tracing::warn!(vm = machine.name, %host, "a restart has interrupted the end of a VM's move");
        run_there(daemon, &host, outgoing.id).await;
        let target = PostcopyTarget { host: &host, id: outgoing.id };
        let followed =
            if outgoing.postcopy { Box::pin(daemon.follow(machine, &target, &|_| {})).await } else { Ok(()) };
        end_here(daemon, machine, volumes).await;
        daemon.tell_hook(HookPhase::Released, told).await;
        let state = if followed.is_ok() { JobState::Done } else { JobState::Failed };
        note_end(daemon, machine, over(state, followed.err()));
    } else {
        let error = Error::new(ErrorCode::MoveFailed, format!("the daemon was restarted while {} moved", machine.name))
            .with_hint("the VM runs here; move it again");
        if outgoing.postcopy {
            Box::pin(daemon.make_whole(machine, &outgoing)).await;
        }
        undo(daemon, machine, &outgoing, &volumes, &error).await;
        abandon_there(daemon, &host, outgoing.id);
        daemon.tell_hook(HookPhase::Abandoned, told).await;
        note_end(daemon, machine, over(JobState::Failed, Some(error)));
    }
    if let Some(record) = record {
        daemon.leave_group_as(record, &machine_member(&machine.name));
    }
}

/// Whether the other host holds the disks of a machine. Waits until that is known of all of them.
async fn is_committed(daemon: &Arc<Daemon>, machine: &Machine, volumes: &[Arc<Volume>]) -> bool {
    for volume in volumes {
        loop {
            if !volume.is_coming_back() && !is_in_doubt(daemon, machine, volume) {
                break;
            }
            daemon.env.sleep(LOOK).await;
        }
    }
    // They have one commit. One that is let go already is not here any more.
    volumes.is_empty() || volumes.iter().any(|volume| matches!(volume.document().backend, Location::Remote(_)))
}

/// Whether nobody has said yet who holds a volume.
fn is_in_doubt(daemon: &Daemon, machine: &Machine, volume: &Volume) -> bool {
    let document = volume.document();
    if document.job.is_some() && volume.job().is_none() {
        // It is down: its move is on record, and nobody can end it before it is back.
        return true;
    }
    let Some(record) = record_of(&document) else { return false };
    let is_asked = document.job.as_deref().is_some_and(crate::document::JobDocument::is_for_the_arbiter);
    is_asked && !daemon.machine_in_group(record, &machine.name).is_some_and(|member| member.is_committed())
}

async fn undo(
    daemon: &Arc<Daemon>,
    machine: &Machine,
    outgoing: &OutgoingMachine,
    volumes: &[Arc<Volume>],
    error: &Error,
) {
    let document = machine.document();
    let resumed = async { daemon.hypervisors.reach(&document.monitor).await?.go_on(outgoing.ran).await };
    match resumed.await {
        Ok(()) => {}
        Err(_) if !document.process.as_ref().is_some_and(|process| daemon.hypervisors.lives(process)) => {
            tracing::warn!(vm = machine.name, "its QEMU has ended meanwhile");
        }
        Err(error) => {
            tracing::error!(vm = machine.name, %error, "the guest could not be let go on");
            *machine.problem.lock() = Some(error);
        }
    }
    for job in volumes.iter().filter_map(|volume| volume.job()) {
        job.fail(error.clone());
        job.wait().await;
    }
}
