//! What happens to a VM while its disk is moved, and what follows from it.

use std::time::Duration;

use api::v1::{Error, ErrorCode};
use vm::{AdoptedDisk, Graph, Outcome, ProcessState, Qmp, VmEvent, VmEvents};

use crate::daemon::Daemon;
use crate::jobs::JobHandle;
use crate::volume::Volume;

/// How often the graph is looked at that says nothing by itself: nobody is told of a snapshot.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// How long to wait before a QEMU that lives is reached again.
const REST: Duration = Duration::from_secs(2);

/// Watches the VM of an adopted volume while `job` runs. It never ends by itself. The end of the monitor's connection is
/// not QEMU's: it is reached again, and what has happened meanwhile is in its graph.
pub(crate) async fn watch(daemon: &Daemon, volume: &Volume, job: &JobHandle) -> std::convert::Infallible {
    let mut is_told = false;
    while let Some(adoption) = &volume.document().adoption {
        let disk = &adoption.plan.disk;
        match daemon.reach(&adoption.monitor).await {
            Ok(vm) if vm.qmp.process_id().is_some_and(|pid| !disk.is_of(pid)) => break,
            Ok(vm) => {
                is_told = false;
                watch_connection(daemon, volume, job, &vm.qmp, disk).await;
            }
            Err(error) => {
                if !std::mem::replace(&mut is_told, true) {
                    tracing::warn!(volume = volume.name, %error, "the VM is not watched while its disk moves; it is reached again");
                }
            }
        }
        if disk.process_state() != ProcessState::Lives {
            break;
        }
        daemon.env.sleep(REST).await;
    }
    std::future::pending().await
}

/// The same for as long as one connection to its monitor lasts.
async fn watch_connection(daemon: &Daemon, volume: &Volume, job: &JobHandle, qmp: &Qmp, disk: &AdoptedDisk) {
    let mut events = VmEvents::watch(qmp, disk).await;
    let mut told = Vec::new();
    // What has begun before is told by no event any more.
    if let Ok(graph) = Graph::read(qmp).await {
        heed_all(daemon, volume, job, events.compare(&graph), &mut told);
    }
    loop {
        let is_due = match env::timeout(&*daemon.env, LOOK_INTERVAL, events.next()).await {
            Some(None) => return,
            Some(Some(event)) => {
                heed(daemon, volume, job, &event);
                event.outcome() == Outcome::Inspection
            }
            None => true,
        };
        if is_due && let Ok(graph) = Graph::read(qmp).await {
            heed_all(daemon, volume, job, events.compare(&graph), &mut told);
        }
    }
}

/// Heeds what a look at the graph shows, but for what the look before has shown, too.
fn heed_all(daemon: &Daemon, volume: &Volume, job: &JobHandle, events: Vec<VmEvent>, told: &mut Vec<VmEvent>) {
    events.iter().filter(|event| !told.contains(event)).for_each(|event| heed(daemon, volume, job, event));
    *told = events;
}

fn heed(daemon: &Daemon, volume: &Volume, job: &JobHandle, event: &VmEvent) {
    tracing::info!(volume = volume.name, ?event, "something happened to the VM");
    match event.outcome() {
        // It is ours.
        Outcome::Cancel if matches!(event, VmEvent::VmMigration { .. }) && daemon.moves_with_its_machine(volume) => {}
        Outcome::Cancel => {
            let why = match event {
                VmEvent::BlockJob { id, kind } => format!("a block job of QEMU's ({kind} {id}) works on the disk"),
                VmEvent::NoLongerInside => "QEMU does not go through this daemon any more".to_owned(),
                VmEvent::VmMigration { .. } => "QEMU itself is being migrated".to_owned(),
                VmEvent::Covered { node, file } => format!(
                    "another program has taken a snapshot of the disk in QEMU: {} lies over it",
                    if file.is_empty() { node } else { file }
                ),
                other => format!("{other:?}"),
            };
            let error = Error::new(ErrorCode::MoveFailed, format!("the move of {} was given up: {why}", volume.name));
            job.fail(error.with_hint("the guest is on the source; move it again when that is over"));
        }
        // A guest that writes no more lets the mirror finish by itself.
        Outcome::FinishCold | Outcome::GoOn | Outcome::Inspection => {}
    }
}
