//! A machine whose disks the volumes are: asking for its moves, and what must hold of them.

use std::sync::Arc;
use std::time::Duration;

use ::daemon::{Hypervisors, MachineDisk, NoHypervisors};
use api::v1::{MemoryEngine, VmMoveRequest};

use super::Host;
use crate::hypervisor::SimMachine;
use crate::occurrence::Occurrence;
use crate::process::Process;

/// What the machine is called on both hosts.
const NAME: &str = "vm";
const MONITOR: &str = "/run/vm.qmp";

impl Host {
    /// The machine, if there is one.
    pub(crate) fn machine(&self) -> Option<&SimMachine> {
        self.shared.daemon_harness.peer.as_ref().and_then(|peer| peer.machine())
    }

    /// What runs machines on host number `own`.
    pub(super) fn hypervisors(&self, own: usize) -> Arc<dyn Hypervisors> {
        self.machine().map_or_else(|| Arc::new(NoHypervisors) as _, |machine| machine.seen_from(own))
    }

    /// Gives the machine its disks.
    pub(in crate::host) fn assemble_machine(&self) {
        let Some(machine) = self.machine() else { return };
        if self.shared.setup.memory_outside {
            machine.hold_memory();
        }
        for volume in self.volumes() {
            let (held, answered) = (volume.clone(), volume.clone());
            let is_held = move || held.shared.daemon_harness.peer.as_ref().is_some_and(|peer| peer.holds());
            machine.add_disk(&volume.shared.port, is_held, move || answered.shared.guest.report().answered);
        }
    }

    /// Whether this volume has gone to the other host with its machine, and need not be here any more.
    pub(in crate::host) fn is_gone_with_machine(&self) -> bool {
        let peer = self.shared.daemon_harness.peer.as_ref();
        self.shared.setup.has_machine && peer.is_some_and(|peer| peer.holds())
    }

    /// Whether this volume is the one that asks for the machine's moves.
    pub(super) fn asks_for_machine(&self) -> bool {
        !self.shared.setup.has_machine || self.shared.number == 0
    }

    /// Asks for a move of the machine.
    pub(super) async fn move_machine(&self, process: &Process, core: &::daemon::Core) {
        let volumes = self.volumes();
        let requests: Vec<_> = volumes.iter().map(Self::request).collect();
        let disk = |(number, volume): (usize, &Self)| MachineDisk {
            volume: volume.name().to_owned(),
            node: format!("disk{number}"),
            image: format!("/images/{number}"),
            format: Some("raw".to_owned()),
            shared: None,
            grows: false,
            cache: None,
        };
        let disks = volumes.iter().enumerate().map(disk).collect();
        let request = VmMoveRequest {
            to: "b".to_owned(),
            disks: Vec::new(),
            // All disks divide it.
            bandwidth: requests[0].bandwidth.map(|bandwidth| bandwidth * volumes.len() as u64),
            verify: requests[0].verify,
            strategy: requests[0].strategy,
            channels: Some(if self.shared.setup.memory_follows { 1 } else { self.shared.rng.pick(&[1, 2]) }),
            memory: if self.shared.setup.memory_outside { MemoryEngine::Parallel } else { MemoryEngine::Qemu },
            postcopy: self.shared.setup.memory_follows,
            delete_source: requests[0].delete_source,
            ..VmMoveRequest::default()
        };
        self.begin_machine_move();
        let begun = match core.add_machine_of(NAME, MONITOR, disks).await {
            Ok(()) => core.start_machine_move(NAME, request).await,
            Err(error) => Err(error),
        };
        match begun {
            Ok(_) => {
                self.shared.world.occur(Occurrence::Told("asked together"));
                for volume in &volumes {
                    *volume.shared.wanted.lock() = false;
                    *volume.shared.daemon_harness.is_unwanted.lock() = false;
                }
            }
            Err(error) => {
                self.say(format_args!("the move of the machine is refused: {error}"));
                process.env().sleep(Duration::from_millis(20)).await;
            }
        }
        volumes.iter().for_each(|volume| volume.shared.asked.notify_one());
    }
}
