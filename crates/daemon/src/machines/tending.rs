//! A machine that comes is looked after until it runs here, or does not come.
//!
//! It runs once this host holds all of its disks, and is given up once one of them is gone: `incoming.rs` draws the states.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::v1::{Error, ErrorCode, Monitor};

use super::Machine;
use super::document::{IncomingMachine, LastWord, MachineDocument, MemoryFate};
use super::hooks::HookPhase;
use crate::audit::Peer;
use crate::daemon::Daemon;
use crate::document::IncomingStage;
use crate::hypervisor::MemoryFlow;
use crate::problem::Result;

/// How often the disks are looked at while nobody waits for them.
const LOOK: Duration = Duration::from_millis(250);
/// How long a QEMU may take to say whether its guest runs.
const RUN_STATE_LIMIT: Duration = Duration::from_secs(5);

/// What a QEMU says of itself into which no guest has come.
const EMPTY: [&str; 2] = ["inmigrate", "prelaunch"];

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
                    Ok(Found::Runs | Found::GivenUp | Found::Lost) => return,
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
        if machine.document().incoming.is_some() && matches!(self.holdings(machine)?, Holdings::Some) {
            return Ok(Found::Waits);
        }
        let _operation = machine.operation.lock().await;
        if !self.is_known(machine) {
            return Ok(Found::GivenUp);
        }
        let document = machine.document();
        let Some(incoming) = document.incoming.clone() else {
            return Ok(if document.lost.is_some() { Found::Lost } else { Found::Runs });
        };
        match self.holdings(machine)? {
            Holdings::Some => return Ok(Found::Waits),
            Holdings::Gone(never_ran) => {
                self.give_up(machine, &never_ran).await?;
                return Ok(Found::GivenUp);
            }
            Holdings::All if !self.are_up(&document) => return Ok(Found::Waits),
            Holdings::All => {}
        }
        if !machine.has_run.load(Ordering::Acquire) {
            match self.run_here(machine, &incoming).await {
                Ok(()) => machine.has_run.store(true, Ordering::Release),
                Err(error) if self.has_lost(&document) => {
                    self.note_lost(machine, &incoming, &error)?;
                    return Ok(Found::Lost);
                }
                Err(error) => return Err(error),
            }
        }
        self.note_running(machine, &incoming).await?;
        Ok(Found::Runs)
    }

    /// Whether all disks of a machine are served through their layers. One is held before it is: until then its QEMU, which is connected
    /// already, reads and writes what lies below them.
    fn are_up(&self, document: &MachineDocument) -> bool {
        document.disks.iter().all(|disk| self.volume(&disk.volume).is_ok_and(|volume| volume.require_up().is_ok()))
    }

    /// Lets the guest run, once for each start of this daemon: an operator may stop it from then on.
    async fn run_here(&self, machine: &Machine, incoming: &IncomingMachine) -> Result<()> {
        let hypervisor = self.hypervisor_of(machine).await?;
        if !hypervisor.is_loaded().await? {
            let message =
                format!("this host holds the disks of {}, and its QEMU does not have its memory", machine.name);
            return Err(Error::new(ErrorCode::WrongState, message)
                .with_hint("the disks are whole: end that QEMU yourself, and start the VM on them as after a crash"));
        }
        if incoming.runs {
            hypervisor.run().await?;
        }
        Ok(())
    }

    /// Has it on record that the machine runs here.
    async fn note_running(self: &Arc<Self>, machine: &Arc<Machine>, incoming: &IncomingMachine) -> Result<()> {
        let (mut process, mut is_following) = (None, false);
        let asked = async {
            let hypervisor = self.hypervisor_of(machine).await?;
            process = hypervisor.process();
            // Asked after it runs: the guest waits for nothing that can be asked later.
            is_following = !matches!(hypervisor.memory_flow(&|_| {}).await, Ok(MemoryFlow::Complete));
            hypervisor.await_exports(&self.exports_of_machine(machine)).await
        };
        // It may have ended since: it has run.
        let unawaited = asked.await.err();
        if let Some(error) = &unawaited {
            tracing::warn!(vm = machine.name, %error, "a restart of this daemon would be errors of disks for the guest");
        }
        // QEMU has it mapped, and it goes with QEMU.
        self.release_memory(machine, incoming);
        *machine.arrived.lock() = Some((incoming.host.clone(), incoming.id));
        let due = self.due_of(incoming.clone());
        self.update_machine(machine, |document| {
            (document.incoming, document.arrived) = (None, due);
            document.following = is_following.then(|| incoming.clone());
            document.last_word = (!is_following).then(|| LastWord {
                id: incoming.id,
                host: incoming.host.clone(),
                memory: MemoryFate::Whole,
            });
            document.release_due = !incoming.keeps_volumes && matches!(document.monitor, Monitor::Qmp(_));
            document.process = process.or(document.process.take());
        })?;
        self.tell_running(machine, incoming);
        *machine.problem.lock() = unawaited;
        if is_following {
            self.tend_memory(machine);
        }
        let told = machine.document().process.filter(|_| machine.problem.lock().is_none());
        self.tend_exports(machine, told);
        self.release_when_let_go(machine);
        let what = serde_json::json!({ "host": incoming.host, "move": incoming.id });
        self.note(&Peer::daemon(), ("vm.run", &machine.name), what, None);
        tracing::info!(vm = machine.name, host = incoming.host, "a VM has come and runs here");
        Ok(())
    }

    /// Whether the QEMU that was started for a machine has ended. One of which no process is known may live.
    fn has_lost(&self, document: &MachineDocument) -> bool {
        document.process.as_ref().is_some_and(|process| !self.hypervisors.lives(process))
    }

    /// The machine has come, and its QEMU has ended before its guest ran: the move is over, and the disks are here.
    fn note_lost(&self, machine: &Machine, incoming: &IncomingMachine, error: &Error) -> Result<()> {
        tracing::error!(vm = machine.name, %error, "the QEMU of a VM has ended after its disks had come, and before its guest ran");
        self.release_memory(machine, incoming);
        self.update_machine(machine, |document| {
            (document.incoming, document.process) = (None, None);
            document.lost = Some(incoming.clone());
        })?;
        self.hypervisors.clear(&incoming.folder);
        let error = lost(&machine.name);
        let what = serde_json::json!({ "host": incoming.host, "move": incoming.id });
        self.note(&Peer::daemon(), ("vm.lost", &machine.name), what, Some(&error));
        *machine.problem.lock() = Some(error);
        Ok(())
    }

    /// Whether a machine was not given up meanwhile.
    pub(super) fn is_known(&self, machine: &Machine) -> bool {
        self.machines.get(&machine.name).is_some_and(|known| std::ptr::eq(&*known, machine))
    }

    /// After a start: gives a machine up whose QEMU was not on record yet. Its source waits for the answer that it has started.
    pub(super) async fn give_up_unstarted(self: &Arc<Self>, machine: &Arc<Machine>) {
        while self.is_known(machine) {
            let Err(error) = self.try_to_give_up(machine).await else { return };
            tracing::error!(vm = machine.name, %error, "a VM that does not come could not be forgotten");
            *machine.problem.lock() = Some(error);
            self.env.sleep(LOOK).await;
        }
    }

    async fn try_to_give_up(&self, machine: &Machine) -> Result<()> {
        let _operation = machine.operation.lock().await;
        let document = machine.document();
        let never_ran = self.never_ran(&document)?.ok_or_else(|| torn(&document))?;
        // It may have been started just before this daemon's predecessor died.
        let started = self.hypervisors.started_for(&document.monitor);
        if !started.is_empty() && !self.waits_for_a_guest(&document.monitor).await {
            return Err(runs_unrecorded(&document.name));
        }
        for process in started {
            self.end_started(machine, &process, &never_ran).await;
        }
        self.give_up(machine, &never_ran).await
    }

    /// Whether the QEMU at a monitor says that no guest was ever in it, whatever a record says. One that does not answer, or whose guest is
    /// stopped, may have the only one.
    async fn waits_for_a_guest(&self, monitor: &Monitor) -> bool {
        let asked = async { self.hypervisors.reach(monitor).await?.run_state().await };
        let state = env::timeout(&*self.env, RUN_STATE_LIMIT, asked).await;
        state.is_some_and(|state| state.is_ok_and(|state| EMPTY.contains(&state.as_str())))
    }

    /// What is here of the disks of a machine that comes.
    ///
    /// # Errors
    /// A journal cannot be read, or some are held and others gone: nothing follows from that.
    pub(super) fn holdings(&self, machine: &Machine) -> Result<Holdings> {
        let document = machine.document();
        let mut here = Vec::new();
        for disk in &document.disks {
            here.push(self.disk_here(&document, &disk.volume)?);
        }
        match judge(&here, document.is_begun()) {
            Some(Judged::All) => Ok(Holdings::All),
            Some(Judged::Some) => Ok(Holdings::Some),
            Some(Judged::Gone) => Ok(Holdings::Gone(NeverRan(()))),
            None => Err(torn(&document)),
        }
    }

    /// Proof that the guest of a machine that comes has not run here; none if a disk of it is held here.
    ///
    /// # Errors
    /// A journal cannot be read: nothing follows from that.
    pub(super) fn never_ran(&self, document: &MachineDocument) -> Result<Option<NeverRan>> {
        let mut is_held = document.incoming.is_none();
        for disk in &document.disks {
            is_held |= self.disk_here(document, &disk.volume)? == DiskHere::Held;
        }
        Ok((!is_held).then_some(NeverRan(())))
    }

    /// What the journal of a disk says. A volume of that name that came otherwise is none of the machine's.
    fn disk_here(&self, document: &MachineDocument, name: &str) -> Result<DiskHere> {
        let Some(volume) = self.volume_if_any(name)? else { return Ok(DiskHere::Missing) };
        let found = volume.document();
        let name = Some(document.name.as_str());
        Ok(match &found.incoming {
            // The record is older than the disk, whose guest may run here.
            Some(incoming) if self.taken_target(incoming).is_some() => DiskHere::Held,
            Some(incoming) if incoming.machine.as_deref() == name => match incoming.stage {
                IncomingStage::Held { .. } => DiskHere::Held,
                IncomingStage::Filling | IncomingStage::Prepared { .. } => DiskHere::Coming,
            },
            // Its host has let it go, after it was held.
            None if found.came_with.as_deref() == name => DiskHere::Held,
            _ => DiskHere::Foreign,
        })
    }

    /// Ends the QEMU of a machine that does not come, and forgets it.
    pub(super) async fn give_up(&self, machine: &Machine, never_ran: &NeverRan) -> Result<()> {
        if !self.is_known(machine) {
            // Another one of its name may come by now.
            return Ok(());
        }
        let document = machine.document();
        self.end_machine(machine, None, never_ran.into()).await;
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

/// Proof that no disk of a machine that comes is held here: its guest has not run, for it runs only once all are.
#[derive(Debug)]
pub(super) struct NeverRan(());

/// What is here of the disks of a machine.
#[derive(Debug)]
pub(super) enum Holdings {
    /// This host holds them.
    All,
    /// They are coming.
    Some,
    /// None is held, and one of them does not come.
    Gone(NeverRan),
}

/// What a journal says of one disk of a machine that comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DiskHere {
    /// It is held here, with this machine.
    Held,
    /// It is being filled, or waits for the commit.
    Coming,
    /// There is no volume of its name.
    Missing,
    /// There is one that did not come with the machine, or is not known to yet.
    Foreign,
}

/// What follows from its disks for a machine that comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Judged {
    All,
    Some,
    Gone,
}

/// Nothing follows if some are held and others are not here. Before the machine `is_begun`, no disk is missed.
pub(super) fn judge(disks: &[DiskHere], is_begun: bool) -> Option<Judged> {
    let is_held = disks.contains(&DiskHere::Held);
    let is_absent = disks.iter().any(|disk| matches!(disk, DiskHere::Missing | DiskHere::Foreign));
    match (is_held, is_absent) {
        (true, true) => None,
        (true, false) if disks.iter().all(|disk| *disk == DiskHere::Held) => Some(Judged::All),
        (false, true) if is_begun => Some(Judged::Gone),
        _ => Some(Judged::Some),
    }
}

fn torn(document: &MachineDocument) -> Error {
    let message = format!("this host holds some disks of {}, and others are not here", document.name);
    Error::new(ErrorCode::WrongState, message).with_hint(format!(
        "`transhume vm resolve {name}` says what both hosts have, and nothing is ended or started; if the others never come, end its \
         QEMU yourself, and `transhume vm rm {name}` frees the name: the disks that are here stay",
        name = document.name
    ))
}

fn runs_unrecorded(name: &str) -> Error {
    let message = format!(
        "the guest of {name} runs here, and this host's record says that it has not come: its state directory is an older one"
    );
    Error::new(ErrorCode::WrongState, message).with_hint(format!(
        "put the newest state directory back; nothing is ended here. Without one, shut the guest down: `transhume vm rm {name}` frees the \
         name then, and the disks stay"
    ))
}

/// What both hosts say of a machine whose QEMU has ended between the commit and its first step.
pub(super) fn lost(name: &str) -> Error {
    let message = format!("the QEMU of {name} has ended after its disks had come, and before its guest ran");
    Error::new(ErrorCode::VmLost, message).with_hint(format!(
        "the disks are whole: start the VM on them as after a crash; `transhume vm rm {name}` frees the name"
    ))
}

/// What came of a look at a machine that comes.
pub(super) enum Found {
    Runs,
    Waits,
    GivenUp,
    /// Its QEMU has ended after the commit.
    Lost,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_runs_on_disks_that_came_with_it_and_is_given_up_only_while_none_is_held() {
        use DiskHere::{Coming, Foreign, Held, Missing};
        let every = [Held, Coming, Missing, Foreign];
        for one in every {
            for other in every {
                for is_begun in [false, true] {
                    let judged = judge(&[one, other], is_begun);
                    let held = [one, other].iter().filter(|disk| **disk == Held).count();
                    assert_eq!(judged == Some(Judged::All), held == 2, "{one:?} {other:?}");
                    if judged == Some(Judged::Gone) {
                        assert!(held == 0 && is_begun, "{one:?} {other:?} is given up");
                        assert!([one, other].iter().any(|disk| matches!(disk, Missing | Foreign)));
                    }
                }
            }
        }
        assert_eq!(judge(&[Held, Missing], true), None, "nothing follows from half of it");
        assert_eq!(judge(&[Foreign, Foreign], false), Some(Judged::Some), "volumes of that name are not the machine's");
        assert_eq!(judge(&[Held, Coming], true), Some(Judged::Some));
    }
}
