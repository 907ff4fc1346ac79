//! What only one of two hosts may do with a machine, each by the proof that this is the one.
//!
//! | what | proof | made from |
//! |---|---|---|
//! | the source's QEMU is ended, its disks are let go | [`Committed`] | the record of the group |
//! | the source's guest goes on | [`NotCommitted`] | the record of the group |
//! | the target's QEMU is ended, the machine is forgotten | [`NeverRan`] | the journals of the disks here |
//! | the target's QEMU is ended whose memory never comes | | a person's word |
//!
//! A process is ended that the record of the move names: the one behind the monitor's connection when the move began, or the one
//! that was started for it. What must be done is tried until it is done, and `vm show` says what that waits for.

#![expect(clippy::disallowed_methods, reason = "here the proof is asked for")]

use std::time::Duration;

use api::v1::{Error, ErrorCode, Monitor};
use vm::QemuProcess;

use super::Machine;
use super::document::{MachineDocument, OutgoingMachine};
use super::tending::NeverRan;
use crate::daemon::Daemon;
use crate::hypervisor::Hypervisor;
use crate::jobs::{Committed, NotCommitted};
use crate::problem::Result;

/// How long a QEMU may take to end by itself, and how often that is looked at.
const QUIT_LIMIT: Duration = Duration::from_secs(3);
const QUIT_LOOK: Duration = Duration::from_millis(1);
/// How often what must be done is tried again.
const REST_MIN: Duration = Duration::from_millis(100);
const REST_MAX: Duration = Duration::from_secs(2);

/// Leave to end the QEMU of a machine. Only a proof gives it.
#[derive(Clone, Copy)]
pub(super) struct MayEnd {
    /// It has had a guest, and is asked to end before it is killed.
    asks_first: bool,
}

impl From<&Committed> for MayEnd {
    fn from(_: &Committed) -> Self {
        Self { asks_first: true }
    }
}

impl From<&NeverRan> for MayEnd {
    fn from(_: &NeverRan) -> Self {
        Self { asks_first: false }
    }
}

impl Daemon {
    /// Ends the QEMU that the record of a machine's move names, and tries again until it has ended. `reached` is the connection to it,
    /// if there is one.
    pub(super) async fn end_machine(&self, machine: &Machine, reached: Option<&dyn Hypervisor>, may: MayEnd) {
        let document = machine.document();
        if !matches!(document.monitor, Monitor::Qmp(_)) {
            self.end_domain(&document).await;
            return;
        }
        let Some(process) = &document.process else {
            self.end_unnamed(machine, reached, may).await;
            return;
        };
        let mut rest = REST_MIN;
        while self.hypervisors.lives(process) {
            if may.asks_first {
                self.ask_to_end(&document, reached).await;
            }
            if self.hypervisors.lives(process) {
                self.hypervisors.end(process).await;
            }
            if !self.hypervisors.lives(process) {
                break;
            }
            let message = format!("the QEMU of {} (process {}) cannot be ended here", machine.name, process.pid);
            let error = Error::new(ErrorCode::MoveUnfinished, message)
                .with_hint("its guest must not go on here: end it yourself; it is tried again");
            tracing::error!(vm = machine.name, %error, "a QEMU lives on whose guest is at another host");
            *machine.problem.lock() = Some(error);
            self.env.sleep(rest).await;
            rest = (rest * 2).min(REST_MAX);
        }
    }

    /// Ends a process that was started for a machine and is on no record.
    pub(super) async fn end_started(&self, machine: &Machine, process: &QemuProcess, _: &NeverRan) {
        self.hypervisors.end(process).await;
        if self.hypervisors.lives(process) {
            tracing::error!(vm = machine.name, pid = process.pid, "a QEMU that nobody needs cannot be ended");
        }
    }

    /// Ends the QEMU of a machine whose guest runs here without some of its memory: a person has said that this never comes.
    pub(super) async fn end_without_memory(&self, document: &MachineDocument) {
        assert!(document.following.is_some(), "only memory that follows its guest can be given up");
        if let Some(process) = &document.process {
            self.hypervisors.end(process).await;
        }
    }

    /// A QEMU whose process the kernel has not told can only be asked to end.
    async fn end_unnamed(&self, machine: &Machine, reached: Option<&dyn Hypervisor>, may: MayEnd) {
        let Some(hypervisor) = reached.filter(|_| may.asks_first) else { return };
        if let Err(error) = hypervisor.quit().await {
            tracing::warn!(vm = machine.name, %error, "a QEMU of which no process is known does not end");
        }
        let _ = env::timeout(&*self.env, QUIT_LIMIT, hypervisor.ended()).await;
    }

    /// Asks a QEMU to end, which leaves nothing that its supervisor takes for a crash.
    async fn ask_to_end(&self, document: &MachineDocument, reached: Option<&dyn Hypervisor>) {
        let Some(process) = &document.process else { return };
        let asked = async {
            if let Some(hypervisor) = reached {
                return hypervisor.quit().await;
            }
            let hypervisor = self.hypervisors.reach(&document.monitor).await?;
            match hypervisor.process().as_ref() == Some(process) {
                true => hypervisor.quit().await,
                // It was started since, on the same socket.
                false => Ok(()),
            }
        };
        let began = self.env.now();
        match env::timeout(&*self.env, QUIT_LIMIT, asked).await {
            Some(Ok(())) => {
                while self.hypervisors.lives(process) && self.env.now().since(began) < QUIT_LIMIT {
                    self.env.sleep(QUIT_LOOK).await;
                }
            }
            Some(Err(error)) => tracing::info!(vm = document.name, %error, "a QEMU is not asked to end"),
            None => {}
        }
    }

    /// Has the guest of a machine go on here, and tries again until its QEMU has heard it, or has ended.
    pub(super) async fn go_on_here(
        &self,
        machine: &Machine,
        outgoing: &OutgoingMachine,
        reached: Option<&dyn Hypervisor>,
        _: &NotCommitted,
    ) {
        let mut rest = REST_MIN;
        let mut reached = reached;
        loop {
            let document = machine.document();
            let told = match reached.take() {
                Some(hypervisor) => tell_to_go_on(hypervisor, outgoing).await,
                None => self.reach_to_go_on(&document, outgoing).await,
            };
            let error = match told {
                Ok(()) => {
                    *machine.problem.lock() = None;
                    return;
                }
                Err(error) => error,
            };
            let has_ended = match &document.process {
                Some(process) => !self.hypervisors.lives(process),
                // Nothing is done then that only one host may do.
                None => error.code == ErrorCode::QmpUnreachable,
            };
            if has_ended {
                tracing::warn!(vm = machine.name, "its QEMU has ended meanwhile");
                *machine.problem.lock() = None;
                return;
            }
            tracing::error!(vm = machine.name, %error, "the guest could not be let go on yet");
            *machine.problem.lock() = Some(stopped_still(machine, &error));
            self.env.sleep(rest).await;
            rest = (rest * 2).min(REST_MAX);
        }
    }

    async fn reach_to_go_on(&self, document: &MachineDocument, outgoing: &OutgoingMachine) -> Result<()> {
        let hypervisor = self.hypervisors.reach(&document.monitor).await?;
        if document.process.is_some() && hypervisor.process() != document.process {
            // The one that was to move has ended.
            let message = format!("another QEMU answers on the monitor of {}", document.name);
            return Err(Error::new(ErrorCode::QmpUnreachable, message).with_hint("it is left as it is"));
        }
        tell_to_go_on(&*hypervisor, outgoing).await
    }
}

/// A guest that was not stopped for the switch is left as it is: whoever has stopped it since had a reason.
async fn tell_to_go_on(hypervisor: &dyn Hypervisor, outgoing: &OutgoingMachine) -> Result<()> {
    let was_stopped = match outgoing.stopped {
        // If QEMU stops it after this look, it lets it go on by itself when its migration is cancelled.
        Some(false) => vm::machine::is_stopped_for_switch(&hypervisor.run_state().await?),
        Some(true) | None => true,
    };
    hypervisor.go_on(outgoing.ran && was_stopped).await
}

fn stopped_still(machine: &Machine, error: &Error) -> Error {
    let message = format!("the guest of {} is stopped here, and cannot be told to go on yet: {error}", machine.name);
    Error::new(error.code, message).with_hint("free its QMP monitor, if somebody has it; it is tried again")
}
