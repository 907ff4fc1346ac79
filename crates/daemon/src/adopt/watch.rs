//! What happens to a VM while its disk is moved, and what follows from it.

use api::v1::{Error, ErrorCode};
use vm::{Graph, Outcome, VmEvent, VmEvents};

use crate::daemon::Daemon;
use crate::jobs::JobHandle;
use crate::volume::Volume;

/// Watches the VM of an adopted volume while `job` runs. It never ends by itself.
pub(crate) async fn watch(daemon: &Daemon, volume: &Volume, job: &JobHandle) -> std::convert::Infallible {
    if let Some(adoption) = &volume.document().adoption {
        match daemon.reach(&adoption.monitor).await {
            Ok(vm) => {
                let mut events = VmEvents::watch(&vm.qmp, &adoption.plan.disk).await;
                // What has begun before is told by no event any more.
                if let Ok(graph) = Graph::read(&vm.qmp).await {
                    for event in events.compare(&graph) {
                        heed(daemon, volume, job, &event);
                    }
                }
                while let Some(event) = events.next().await {
                    heed(daemon, volume, job, &event);
                    if event.outcome() == Outcome::Inspection
                        && let Ok(graph) = Graph::read(&vm.qmp).await
                    {
                        for event in events.compare(&graph) {
                            heed(daemon, volume, job, &event);
                        }
                    }
                }
            }
            Err(error) => {
                tracing::warn!(volume = volume.name, %error, "the VM is not watched while its disk moves");
            }
        }
    }
    std::future::pending().await
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
                other => format!("{other:?}"),
            };
            let error = Error::new(ErrorCode::MoveFailed, format!("the move of {} was given up: {why}", volume.name));
            job.fail(error.with_hint("the guest is on the source; move it again when that is over"));
        }
        // A guest that writes no more lets the mirror finish by itself.
        Outcome::FinishCold | Outcome::GoOn | Outcome::Inspection => {}
    }
}
