//! A machine that comes is looked after until it runs here, or does not come.
//!
//! It runs once this host holds all of its disks, and is given up once one of them is gone: `incoming.rs` draws the states.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode, Monitor};

use super::Machine;
use super::hooks::HookPhase;
use crate::audit::Peer;
use crate::daemon::Daemon;
use crate::document::IncomingStage;
use crate::hypervisor::MemoryFlow;
use crate::problem::Result;

/// How often the disks are looked at while nobody waits for them.
const LOOK: Duration = Duration::from_millis(250);

impl Daemon {
    /// Looks after a machine that comes until it runs, or does not come.
    pub(super) fn tend(self: &Arc<Self>, machine: &Arc<Machine>) {
        let (daemon, machine) = (Arc::clone(self), Arc::clone(machine));
        let env = Arc::clone(&self.env);
        env.spawn(Box::pin(async move {
            loop {
                daemon.env.sleep(LOOK).await;
                match daemon.look_after(&machine).await {
                    Ok(Found::Waits) => {}
                    Ok(Found::Runs | Found::GivenUp) => return,
                    Err(error) => {
                        tracing::error!(vm = machine.name, %error, "a VM that has come does not run");
                        *machine.problem.lock() = Some(error);
                    }
                }
            }
        }));
    }

    /// Runs the machine if its disks are held here, and gives it up if one of them is gone.
    pub(super) async fn look_after(self: &Arc<Self>, machine: &Arc<Machine>) -> Result<Found> {
        let holdings = self.holdings(machine);
        if matches!(holdings, Holdings::Some) && machine.document().incoming.is_some() {
            return Ok(Found::Waits);
        }
        let _operation = machine.operation.lock().await;
        if !self.is_known(machine) {
            return Ok(Found::GivenUp);
        }
        let Some(incoming) = machine.document().incoming else { return Ok(Found::Runs) };
        match holdings {
            Holdings::Some => return Ok(Found::Waits),
            Holdings::Gone => {
                self.give_up(machine).await?;
                return Ok(Found::GivenUp);
            }
            Holdings::All => {}
        }
        let hypervisor = self.hypervisor_of(machine).await?;
        if !hypervisor.is_loaded().await? {
            let message =
                format!("this host holds the disks of {}, and its QEMU does not have its memory", machine.name);
            return Err(Error::new(ErrorCode::WrongState, message)
                .with_hint("the disks are whole: start the VM on them as after a crash"));
        }
        if incoming.runs {
            hypervisor.run().await?;
        }
        let unawaited = hypervisor.await_exports(&self.exports_of_machine(machine)).await.err();
        if let Some(error) = &unawaited {
            tracing::warn!(vm = machine.name, %error, "a restart of this daemon would be errors of disks for the guest");
        }
        // QEMU has it mapped, and it goes with QEMU.
        self.release_memory(machine, &incoming);
        *machine.arrived.lock() = Some((incoming.host.clone(), incoming.id));
        let process = hypervisor.process();
        // Asked after it runs: the guest waits for nothing that can be asked later.
        let is_following = !matches!(hypervisor.memory_flow(&|_| {}).await, Ok(MemoryFlow::Complete));
        let due = self.due_of(incoming.clone());
        self.update_machine(machine, |document| {
            (document.incoming, document.arrived) = (None, due);
            document.following = is_following.then(|| incoming.clone());
            document.release_due = !incoming.keeps_volumes && matches!(document.monitor, Monitor::Qmp(_));
            document.process = process.or(document.process.take());
        })?;
        self.tell_running(machine, &incoming);
        *machine.problem.lock() = unawaited;
        if is_following {
            self.tend_memory(machine);
        }
        self.release_when_let_go(machine);
        let what = serde_json::json!({ "host": incoming.host, "move": incoming.id });
        self.note(&Peer::daemon(), ("vm.run", &machine.name), what, None);
        tracing::info!(vm = machine.name, host = incoming.host, "a VM has come and runs here");
        Ok(Found::Runs)
    }

    /// Whether a machine was not given up meanwhile.
    pub(super) fn is_known(&self, machine: &Machine) -> bool {
        self.machines.get(&machine.name).is_some_and(|known| std::ptr::eq(&*known, machine))
    }

    /// After a start: gives a machine up whose QEMU was not on record yet. Its source waits for the answer that it has started.
    pub(super) async fn give_up_unstarted(&self, machine: &Machine) {
        let _operation = machine.operation.lock().await;
        // It may have been started just before this daemon's predecessor died.
        for process in self.hypervisors.started_for(&machine.document().monitor) {
            self.hypervisors.end(&process).await;
        }
        if let Err(error) = self.give_up(machine).await {
            tracing::error!(vm = machine.name, %error, "a VM that does not come could not be forgotten");
        }
    }

    /// What is here of the disks of a machine.
    pub(super) fn holdings(&self, machine: &Machine) -> Holdings {
        let document = machine.document();
        let mut all = true;
        for disk in &document.disks {
            let Ok(Some(volume)) = self.volume_if_any(&disk.volume) else {
                // Before its own move has made it, it is not missed.
                if !document.is_begun() {
                    return Holdings::Some;
                }
                return Holdings::Gone;
            };
            let stage = volume.document().incoming.as_ref().map(|incoming| incoming.stage);
            all &= matches!(stage, Some(IncomingStage::Held { .. }) | None);
        }
        if all { Holdings::All } else { Holdings::Some }
    }

    /// Ends the QEMU of a machine that does not come, and forgets it.
    pub(super) async fn give_up(&self, machine: &Machine) -> Result<()> {
        if !self.is_known(machine) {
            // Another one of its name may come by now.
            return Ok(());
        }
        let document = machine.document();
        self.end_machine(&document).await;
        if let Some(incoming) = &document.incoming {
            self.hypervisors.clear(&incoming.folder);
            self.release_memory(machine, incoming);
            self.tell_hook(HookPhase::Abandoned, self.hook_at_target(machine, incoming)).await;
        }
        tracing::info!(vm = machine.name, "a VM does not come");
        self.note(&Peer::daemon(), ("vm.drop", &machine.name), serde_json::json!({}), None);
        self.forget_machine(machine)
    }
}

/// What is here of the disks of a machine.
pub(super) enum Holdings {
    /// This host holds them.
    All,
    /// They are coming.
    Some,
    /// One of them does not come.
    Gone,
}

/// What came of a look at a machine that comes.
pub(super) enum Found {
    Runs,
    Waits,
    GivenUp,
}
