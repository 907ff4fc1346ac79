//! Domains of libvirt whose disks stay exports of this daemon: each QEMU of one is made to wait for them.
//!
//! libvirt 9 cannot say that a disk waits for its export while the daemon is away. A QEMU that libvirt has started is told so by the
//! daemon, as an adoption does it. That is a property of the process: after a shutdown and a start there is another one.

use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, Monitor};
use vm::QemuProcess;

use super::Machine;
use super::document::MachineDocument;
use crate::daemon::Daemon;
use crate::problem::Result;

/// How often the connections to the exports are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// How often it is tried again at most.
const REST_MAX: Duration = Duration::from_secs(15);

/// What a look at the QEMU of a domain says.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// Nothing is connected, or its QEMU waits for its exports.
    Nothing,
    /// A QEMU is connected that was not told yet.
    Tell,
    /// It is no domain with exports here any more.
    Leave,
}

/// `told` is the process that waits for its exports, if one does.
fn next(
    document: &MachineDocument,
    is_connected: bool,
    told: Option<&QemuProcess>,
    lives: impl Fn(&QemuProcess) -> bool,
) -> Next {
    if !matches!(document.monitor, Monitor::Libvirt(_)) || document.disks.is_empty() {
        return Next::Leave;
    }
    // One that comes is told when it runs, and one that goes is told at the other host.
    let is_still = document.incoming.is_none() && document.outgoing.is_none();
    match is_still && is_connected && !told.is_some_and(lives) {
        true => Next::Tell,
        false => Next::Nothing,
    }
}

impl Daemon {
    /// Has every QEMU of a domain that has come wait for the exports of its disks, for as long as those are exports. `told` is the process
    /// that does already.
    pub(super) fn tend_exports(self: &Arc<Self>, machine: &Arc<Machine>, told: Option<QemuProcess>) {
        if !matches!(machine.document().monitor, Monitor::Libvirt(_)) {
            return;
        }
        let (daemon, machine) = (Arc::clone(self), Arc::clone(machine));
        let env = Arc::clone(&self.env);
        env.spawn(Box::pin(async move {
            let (mut told, mut rest) = (told, LOOK);
            let mut problem: Option<Error> = None;
            while daemon.is_known(&machine) {
                let document = machine.document();
                let is_connected = document.disks.iter().any(|disk| {
                    daemon.volume(&disk.volume).is_ok_and(|volume| volume.connections() > 0)
                });
                match next(&document, is_connected, told.as_ref(), |process| daemon.hypervisors.lives(process)) {
                    Next::Leave => return,
                    Next::Nothing => rest = LOOK,
                    Next::Tell => match daemon.tell_of_exports(&machine, &document).await {
                        Ok(process) => {
                            tracing::info!(vm = machine.name, "its QEMU waits for its disks while this daemon is away");
                            replace_problem(&machine, problem.take(), None);
                            (told, rest) = (process, LOOK);
                        }
                        Err(error) => {
                            tracing::warn!(vm = machine.name, %error, "a restart of this daemon would be errors of disks for the guest");
                            replace_problem(&machine, problem.replace(error.clone()), Some(error));
                            rest = (rest * 2).min(REST_MAX);
                        }
                    },
                }
                daemon.env.sleep(rest).await;
            }
        }));
    }

    async fn tell_of_exports(&self, machine: &Machine, document: &MachineDocument) -> Result<Option<QemuProcess>> {
        let hypervisor = self.hypervisors.reach(&document.monitor).await?;
        hypervisor.await_exports(&self.exports_of_machine(machine)).await?;
        let process = hypervisor.process();
        if process.is_some() && process != document.process {
            self.update_machine(machine, |document| document.process.clone_from(&process))?;
        }
        Ok(process)
    }
}

/// Says what is wrong now, unless something else is said meanwhile.
fn replace_problem(machine: &Machine, before: Option<Error>, now: Option<Error>) {
    let mut problem = machine.problem.lock();
    if problem.is_none() || *problem == before {
        *problem = now;
    }
}

#[cfg(test)]
mod tests {
    use super::super::document::MachineDisk;
    use super::*;

    fn document() -> MachineDocument {
        let disk = MachineDisk {
            volume: "web1-vda".to_owned(),
            node: "vda".to_owned(),
            image: "/images/a".to_owned(),
            shared: None,
            grows: false,
            cache: None,
            format: None,
        };
        MachineDocument { disks: vec![disk], ..MachineDocument::new("web1", Monitor::Libvirt("web1".to_owned())) }
    }

    fn process(pid: u32) -> QemuProcess {
        QemuProcess { pid, started: 1, boot: "boot".to_owned() }
    }

    #[test]
    fn every_process_of_a_domain_is_told_once() {
        let (document, first) = (document(), process(7));
        assert_eq!(next(&document, true, None, |_| true), Next::Tell);
        assert_eq!(next(&document, true, Some(&first), |_| true), Next::Nothing);
        // It was shut down, and started again.
        assert_eq!(next(&document, false, Some(&first), |_| false), Next::Nothing);
        assert_eq!(next(&document, true, Some(&first), |_| false), Next::Tell);
    }

    #[test]
    fn a_domain_without_exports_is_left_alone() {
        let gone = MachineDocument { disks: Vec::new(), ..document() };
        assert_eq!(next(&gone, true, None, |_| true), Next::Leave);
        let other = MachineDocument { monitor: Monitor::Qmp("/run/qmp".into()), ..document() };
        assert_eq!(next(&other, true, None, |_| true), Next::Leave);
    }
}
