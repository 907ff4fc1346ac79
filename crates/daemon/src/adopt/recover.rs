//! Finding out what an adoption or a release has come to whose end is in doubt.

use std::sync::Arc;

use api::v1::{Error, ErrorCode};
use vm::{DiskState, RecoveryGoal};

use super::disk_state::Reached;
use super::ended::watch_end;
use super::surroundings::VolumeSurroundings;
use super::{INTERVAL, RECONNECT_LIMIT, force_reconnect, set_state};
use crate::daemon::Daemon;
use crate::document::{AdoptionDirection, AdoptionDocument};
use crate::problem::{Result, of_vm};
use crate::volume::Volume;

/// Looks where an adopted disk stands and finishes what was begun. An adoption is undone if QEMU does not go through us
/// yet. A release is finished. An operator may do either by hand between two tries.
pub(crate) async fn recover(daemon: &Arc<Daemon>, volume: &Arc<Volume>) {
    let start = daemon.env.now();
    let mut is_told = false;
    loop {
        let _operation = volume.operation.lock().await;
        let Some(adoption) = volume.document().adoption.clone() else { return };
        if !daemon.has(volume) {
            return;
        }
        if adoption.direction == AdoptionDirection::Adopted {
            watch_end(daemon, volume);
            return if is_told { volume.forget_problem() } else { daemon.warn_if_elsewhere(volume, &adoption).await };
        }
        match settle(daemon, volume, &adoption).await {
            Ok(words) => {
                volume.forget_problem();
                tracing::info!(volume = volume.name, "{words}");
                return;
            }
            Err(error) if is_passing(&error) => {
                let is_late = daemon.env.now().since(start) >= RECONNECT_LIMIT;
                if is_late && !is_told {
                    volume.set_problem(error.clone());
                    is_told = true;
                }
                // A guest that stands still because of the plan is not left so, however long QEMU takes.
                if is_late && !adoption.plan.pauses() {
                    return;
                }
            }
            Err(error) => return volume.set_problem(error),
        }
        drop(_operation);
        daemon.env.sleep(INTERVAL * 10).await;
    }
}

/// One try. Gives in words what has become of the disk.
async fn settle(daemon: &Arc<Daemon>, volume: &Arc<Volume>, adoption: &AdoptionDocument) -> Result<&'static str> {
    let (goal, settled) = match adoption.direction {
        AdoptionDirection::Releasing => (RecoveryGoal::Forward, "the release is finished"),
        AdoptionDirection::Adopting | AdoptionDirection::Adopted => (RecoveryGoal::Back, "the adoption is undone"),
    };
    let vm = match daemon.reach_adopted(volume, adoption).await? {
        Reached::Adopted(vm) => vm,
        // QEMU is gone, and with it the question.
        Reached::Successor(_) | Reached::Nobody => {
            return daemon.drop_volume(volume).await.map(|()| "its VM is gone");
        }
    };
    force_reconnect(volume, &vm, adoption).await;
    let mut surroundings = VolumeSurroundings::new(volume);
    let disk_state = vm::recover(&vm.qmp, &adoption.plan, goal, &mut surroundings).await;
    match disk_state.map_err(|error| of_vm(&error))? {
        DiskState::Inside => {
            watch_end(daemon, volume);
            set_state(volume, AdoptionDirection::Adopted, None).await.map(|()| "the disk is adopted")
        }
        DiskState::Outside | DiskState::Prepared | DiskState::DeviceGone => {
            if adoption.direction == AdoptionDirection::Releasing {
                daemon.remember(&adoption.plan);
            }
            daemon.drop_volume(volume).await.map(|()| settled)
        }
    }
}

/// Whether it may be otherwise soon: QEMU has yet to connect, its monitor is another's, away, or does not answer.
fn is_passing(error: &Error) -> bool {
    matches!(error.code, ErrorCode::WrongState | ErrorCode::QmpBusy | ErrorCode::QmpUnreachable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qemu_that_does_not_answer_in_time_is_asked_again() {
        for kind in [vm::ErrorKind::TimedOut, vm::ErrorKind::Disconnected, vm::ErrorKind::MonitorBusy] {
            assert!(is_passing(&of_vm(&vm::Error::new(kind, "stop"))), "{kind:?}");
        }
        assert!(!is_passing(&of_vm(&vm::Error::new(vm::ErrorKind::UnexpectedGraph, "reopen"))));
    }
}
