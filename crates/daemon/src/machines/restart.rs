//! Machines after a start of the daemon.
//!
//! | on record | its disks | what is done |
//! |---|---|---|
//! | moves away, and the record of its group is committed | any | it is run there, its QEMU here is ended |
//! | moves away, and that record is open, or none was begun | any | the move is undone: its guest goes on here |
//! | moves away, and that record cannot be read | any | nothing: `vm show` says what is missing |
//! | comes, no QEMU for it on record | any | it is given up: its source waits for the word that QEMU has started |
//! | comes | held here | it runs once its QEMU has all of it |
//! | has come, its hook may not know | held here | the hook is told that it runs |
//! | comes | being filled, or gone | its QEMU is ended once they are gone |
//! | runs, its memory follows | held here | it is looked after until all of it is here |

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::v1::{Error, ErrorCode, JobState, VmMove, VmMovePhase};
use uuid::Uuid;

use super::Machine;
use super::document::{self, OutgoingMachine};
use super::ending::{Ends, abandon_there, end_here, give_back_adopted, note_end, run_there};
use super::hooks::HookPhase;
use super::postcopy::{PostcopyTarget, lost_with_daemon};
use crate::audit::unix_ms;
use crate::daemon::Daemon;
use crate::hosts::HostName;
use crate::jobs::{CommitRecord, Committed, NotCommitted, Outcome};
use crate::problem::Result;
use crate::volume::Volume;

/// How often a volume is looked at that has not come back yet.
const LOOK: Duration = Duration::from_millis(50);
/// How long a guest is told to go on whose memory is at both hosts in part.
const LOST_LIMIT: Duration = Duration::from_secs(2);
/// How often it is asked again what became of a move.
pub(super) const REST: Duration = Duration::from_millis(500);

/// Brings every machine back that is on record. The volumes are there already.
pub(crate) fn recover(daemon: &Arc<Daemon>) -> Result<()> {
    let mut are_all_readable = true;
    for document in document::load_all(&daemon.layout)? {
        match document {
            Ok(document) => {
                let machine = Machine::new(document);
                daemon.machines.admit(Arc::clone(&machine));
                recover_one(daemon, &machine);
            }
            Err(error) => {
                are_all_readable = false;
                tracing::error!(%error, "what is on record of a VM cannot be read");
            }
        }
    }
    if are_all_readable {
        daemon.leave_groups_of_machines(|record, name| is_awaited(daemon, record, name));
    }
    Ok(())
}

/// Whether the machine `name` needs the record of a group to know what became of its move.
fn is_awaited(daemon: &Daemon, record: Uuid, name: &str) -> bool {
    let outgoing = daemon.machines.get(name).and_then(|machine| machine.document().outgoing);
    outgoing.is_some_and(|outgoing| match outgoing.commit {
        CommitRecord::Group(own) => own == record,
        CommitRecord::Unnamed => true,
        CommitRecord::NotBegun => false,
    })
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
    if document.incoming.is_none() && !document.disks.is_empty() {
        daemon.tend_exports(machine, None);
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
    // What is on record keeps others off: none of them waits for what may take long.
    let Some(outcome) = outcome_of(daemon, machine, &outgoing).await else { return };
    let told = daemon.hook_at_source_again(&machine.name, &outgoing);
    if outgoing.domain.is_some() {
        // Definitions, which may have secrets.
        daemon.hypervisors.clear(&daemon.migration_place(&machine.name));
    }
    match outcome {
        Outcome::Committed(proof) => {
            tracing::warn!(vm = machine.name, host = outgoing.host, "a restart has interrupted the end of a VM's move");
            let followed = Box::pin(finish(daemon, machine, &outgoing, &proof)).await;
            daemon.tell_hook(HookPhase::Released, told).await;
            let state = if followed.is_ok() { JobState::Done } else { JobState::Failed };
            note_end(daemon, machine, over(daemon, machine, &outgoing, (state, followed.err())), Ends::There).await;
        }
        Outcome::NotCommitted(proof) => {
            let message = format!("the daemon was restarted while {} moved", machine.name);
            let error = Error::new(ErrorCode::MoveFailed, message).with_hint("the VM runs here; move it again");
            let is_whole = !outgoing.postcopy || Box::pin(daemon.make_whole(machine, &outgoing)).await;
            let error = if is_whole { error } else { lost_with_daemon(&machine.name) };
            let undone = undo(daemon, machine, &outgoing, (&error, is_whole), &proof);
            Box::pin(undone).await;
            daemon.restore_autostart(machine).await;
            daemon.tell_hook(HookPhase::Abandoned, told).await;
            note_end(daemon, machine, over(daemon, machine, &outgoing, (JobState::Failed, Some(error))), Ends::Here)
                .await;
        }
    }
    daemon.leave_groups_of_machines(|_, name| name != machine.name);
}

/// What became of the move. Waits until that is known, or a person has the machine forgotten: nothing is done before.
async fn outcome_of(daemon: &Arc<Daemon>, machine: &Machine, outgoing: &OutgoingMachine) -> Option<Outcome> {
    while daemon.is_known(machine) {
        match daemon.outcome_of(outgoing.commit, &machine.name, &outgoing.volumes).await {
            Ok(outcome) => {
                *machine.problem.lock() = None;
                machine.may_be_forgotten.store(matches!(outcome, Outcome::Committed(_)), Ordering::Release);
                return Some(outcome);
            }
            Err(error) => {
                tracing::error!(vm = machine.name, %error, "what became of the move of a VM is not known yet");
                *machine.problem.lock() = Some(error);
                for volume in outgoing.volumes.iter().filter_map(|name| daemon.volume(name).ok()) {
                    daemon.note_doubt_after_restart(machine, &volume);
                }
                machine.may_be_forgotten.store(true, Ordering::Release);
            }
        }
        daemon.env.sleep(REST).await;
    }
    None
}

/// The machine is at the other host: what is left of the move is done.
async fn finish(daemon: &Arc<Daemon>, machine: &Machine, outgoing: &OutgoingMachine, proof: &Committed) -> Result<()> {
    if !outgoing.postcopy && outgoing.domain.is_none() {
        // Its memory is nobody's any more, whatever the other host says.
        daemon.end_machine(machine, None, proof.into()).await;
    }
    let host = HostName::new(&outgoing.host)?;
    daemon.wait_while_run_beside(machine, outgoing).await;
    let mut followed = run_there(daemon, machine, &host, outgoing.id).await;
    if outgoing.postcopy && followed.is_ok() {
        let target = PostcopyTarget { host: &host, id: outgoing.id };
        followed = Box::pin(daemon.follow(machine, &target, &|_| {})).await;
    }
    let volumes = readable_volumes(daemon, machine, outgoing).await;
    end_here(daemon, machine, volumes, proof).await;
    followed
}

/// The volumes of a move. Waits for those whose journals cannot be read: what is on record of the move is needed until they can.
async fn readable_volumes(daemon: &Daemon, machine: &Machine, outgoing: &OutgoingMachine) -> Vec<Arc<Volume>> {
    let mut volumes = Vec::new();
    for name in &outgoing.volumes {
        while daemon.is_known(machine) {
            match daemon.volume_if_any(name) {
                Ok(found) => {
                    volumes.extend(found);
                    break;
                }
                Err(error) => *machine.problem.lock() = Some(error),
            }
            machine.may_be_forgotten.store(true, Ordering::Release);
            daemon.env.sleep(REST).await;
        }
    }
    volumes
}

fn over(
    daemon: &Daemon,
    machine: &Machine,
    outgoing: &OutgoingMachine,
    (state, error): (JobState, Option<Error>),
) -> VmMove {
    VmMove {
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
    }
}

async fn undo(
    daemon: &Arc<Daemon>,
    machine: &Machine,
    outgoing: &OutgoingMachine,
    (error, is_whole): (&Error, bool),
    proof: &NotCommitted,
) {
    let goes_on = daemon.go_on_here(machine, outgoing, None, proof);
    if is_whole {
        goes_on.await;
    } else {
        // It is tried, and most likely in vain: whatever else is in the way, this is what a person must know.
        let _ = env::timeout(&*daemon.env, LOST_LIMIT, goes_on).await;
        *machine.problem.lock() = Some(error.clone());
    }
    if let Ok(host) = HostName::new(&outgoing.host) {
        abandon_there(daemon, &host, outgoing.id);
    }
    // It is not told again by a later start: somebody may have stopped it by then.
    let told = daemon.update_machine(machine, |document| {
        document.outgoing.iter_mut().for_each(|outgoing| outgoing.stopped = Some(false));
    });
    if let Err(error) = told {
        tracing::warn!(vm = machine.name, %error, "that a guest goes on could not be stored");
    }
    for volume in readable_volumes(daemon, machine, outgoing).await {
        // One that is down has its move on record, and nobody can end that before it is back.
        while volume.is_coming_back() || volume.document().job.is_some() && volume.job().is_none() {
            daemon.env.sleep(LOOK).await;
        }
        if let Some(job) = volume.job() {
            job.fail(error.clone());
            job.wait().await;
        }
    }
    give_back_adopted(daemon, machine, &outgoing.adopted).await;
}
