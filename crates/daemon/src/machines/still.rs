//! The guest at the source stands still from when it is stopped for the switch, also while the arbiter is asked.
//!
//! The last look before the commit is asked for finds it stopped. The arbiter may take seconds, and another client of QEMU's monitor
//! may let the guest run in that time. Nothing of what it does then counts: its disks are held, and its memory is at the target
//! already. So it is stopped again at once. After the ruling the source's QEMU is ended before the target is told to run.

use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Machine;
use super::attempt::{MachineMove, runs_in};
use super::ending::no_answer;
use crate::audit::Peer;
use crate::daemon::Daemon;
use crate::hypervisor::Hypervisor;
use crate::jobs::Committed;
use crate::problem::Result;

/// How often it is looked at, and how long QEMU may take to say what its guest does.
const LOOK: Duration = Duration::from_millis(100);
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// Stops a guest that runs. Gives whether it ran.
///
/// # Errors
/// QEMU does not say what its guest does, or does not stop it.
pub(super) async fn stop_if_it_runs(hypervisor: &dyn Hypervisor) -> Result<bool> {
    let runs = runs_in(&hypervisor.run_state().await?);
    if runs {
        hypervisor.stop().await?;
    }
    Ok(runs)
}

impl MachineMove {
    /// Whether the source's QEMU is the daemon's to stop and to end. libvirt keeps others off a domain that it migrates, and QEMU refuses
    /// to let a guest run whose memory follows it.
    pub(super) fn is_ended_at_commit(&self) -> bool {
        !self.request.postcopy && self.departure.arrival.domain.is_none()
    }

    /// Stops the guest again whenever somebody lets it run, for as long as this is awaited.
    pub(super) async fn keep_still(&self, daemon: &Daemon) -> Infallible {
        loop {
            daemon.env.sleep(LOOK).await;
            if self.is_ended_at_commit() {
                // What cannot be told is looked at again.
                let _ = self.look_still(daemon).await;
            }
        }
    }

    async fn look_still(&self, daemon: &Daemon) -> Result<()> {
        let looked = stop_if_it_runs(&*self.departure.hypervisor);
        let looked = env::timeout(&*daemon.env, ANSWER_LIMIT, looked).await;
        let ran = looked.unwrap_or_else(|| Err(no_answer(self.host())))?;
        if ran && !self.ran_again.swap(true, Ordering::AcqRel) {
            tracing::error!(
                vm = self.name(),
                "somebody has let a guest run while its move was asked for: it is stopped again"
            );
        }
        Ok(())
    }

    /// Ends the source's QEMU before the target is told to run, if its guest is not known to have stood still. Gives whether it has.
    pub(super) async fn end_if_it_ran(&self, daemon: &Daemon, machine: &Machine, proof: &Committed) -> bool {
        if !self.is_ended_at_commit() {
            return false;
        }
        let stands_still = self.look_still(daemon).await.is_ok() && !self.ran_again.load(Ordering::Acquire);
        if stands_still {
            return false;
        }
        daemon.end_machine(machine, Some(&*self.departure.hypervisor), proof.into()).await;
        if self.ran_again.load(Ordering::Acquire) {
            let what = serde_json::json!({ "host": self.host().to_string(), "move": self.id });
            daemon.note(&Peer::daemon(), ("vm.ran-beside", self.name()), what, None);
            tracing::error!(vm = self.name(), "what a guest has done here since it was stopped for the switch is lost");
        }
        true
    }
}
