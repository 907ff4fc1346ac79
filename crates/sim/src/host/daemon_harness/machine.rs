//! A machine whose disks the volumes are: asking for its moves, and what must hold of them.

use std::sync::Arc;
use std::time::Duration;

use ::daemon::{Hypervisors, MachineDisk, NoHypervisors};
use api::v1::{MemoryEngine, VmMovePhase, VmMoveRequest};

use super::Host;
use crate::hypervisor::SimMachine;
use crate::occurrence::Occurrence;
use crate::process::Process;

/// What the machine is called on both hosts.
pub(super) const NAME: &str = "vm";
const MONITOR: &str = "/run/vm.qmp";
/// What each host has on record of it.
pub(super) const MACHINE_FILE: &str = "/state/machines/vm.json";
/// How often somebody looks at its move: while its disks are copied, which may take long, or after a start; and from then on.
const LOOK: Duration = Duration::from_millis(2);
const LOOK_SOON: Duration = Duration::from_micros(200);
/// So long after a refusal it is asked for again.
const ASK_AGAIN: Duration = Duration::from_millis(100);

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
            let is_held = move || held.is_gone_with_machine();
            machine.add_disk(&volume.shared.port, is_held, move || answered.shared.guest.report().answered);
        }
        self.judge_machine();
        let others = self.shared.setup.others;
        if others.are_supervisors {
            machine.be_supervised();
        }
        if others.have_namesake {
            machine.have_namesake();
        }
    }

    /// Whether this volume has gone to the other host with its machine, and need not be here any more.
    pub(in crate::host) fn is_gone_with_machine(&self) -> bool {
        let peer = self.shared.daemon_harness.peer.as_ref();
        let is_its = self.shared.setup.has_machine && !self.is_gone_alone();
        is_its && peer.is_some_and(|peer| peer.holds())
    }

    /// Whether this volume has gone to the other host without its machine.
    pub(in crate::host) fn is_gone_alone(&self) -> bool {
        *self.shared.is_gone_alone.lock()
    }

    /// Moves this volume to the other host, and leaves its machine here.
    pub(crate) async fn move_disk_alone(&self) {
        *self.shared.is_gone_alone.lock() = true;
        while self.holder() == 0 {
            let (process, core) = {
                let now = self.shared.now.lock();
                (now.process.clone(), now.core.clone())
            };
            if let Some((process, core)) = process.zip(core) {
                let (name, request) = (self.name(), self.request());
                let moved = process.run(async move {
                    // One that is under way is awaited.
                    let _ = core.start_move(name, request).await;
                    core.job_over(name).await;
                });
                // Its daemon may die meanwhile.
                let _ = moved.await;
            }
            self.shared.world.sleep(LOOK).await;
        }
        self.shared.world.occur(Occurrence::Told("a disk moved alone"));
    }

    /// Whether this volume is the one that asks for the machine's moves.
    pub(super) fn asks_for_machine(&self) -> bool {
        !self.shared.setup.has_machine || self.shared.number == 0
    }

    /// Makes the machine known to the daemon, unless it is. What it is then is not looked at again before it moves.
    pub(super) async fn add_machine(&self, core: &::daemon::Core) -> Result<(), api::v1::Error> {
        if self.machine().is_none() {
            return Ok(());
        }
        let disk = |(number, volume): (usize, &Self)| MachineDisk {
            volume: volume.name().to_owned(),
            node: format!("disk{number}"),
            image: format!("/images/{number}"),
            format: Some("raw".to_owned()),
            shared: None,
            grows: false,
            cache: None,
        };
        let disks = self.volumes().iter().enumerate().map(disk).collect();
        core.add_machine_of(NAME, MONITOR, disks).await
    }

    /// Asks for a move of the machine.
    pub(super) async fn move_machine(&self, process: &Process, core: &::daemon::Core) {
        let volumes = self.volumes();
        let requests: Vec<_> = volumes.iter().map(Self::request).collect();
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
        if let Some(machine) = self.machine() {
            machine.note_phase(Some(VmMovePhase::Preparing));
        }
        let begun = match self.add_machine(core).await {
            Ok(()) => core.start_machine_move(NAME, request).await,
            Err(error) => Err(error),
        };
        match begun {
            Ok(_) => {
                self.watch_machine(process, core, true);
                self.shared.world.occur(Occurrence::Told("asked together"));
                for volume in &volumes {
                    *volume.shared.wanted.lock() = false;
                    *volume.shared.daemon_harness.is_unwanted.lock() = false;
                }
            }
            Err(error) => {
                self.machine().into_iter().for_each(|machine| machine.note_phase(None));
                self.say(format_args!("the move of the machine is refused: {error}"));
                process.env().sleep(ASK_AGAIN).await;
            }
        }
        volumes.iter().for_each(|volume| volume.shared.asked.notify_one());
    }

    /// Notes the phases of a move that is under way in this life of the daemon, or was in the one before (`!is_live`).
    pub(super) fn watch_machine(&self, process: &Process, core: &::daemon::Core, is_live: bool) {
        let Some(machine) = self.machine().filter(|machine| machine.is_moving()).cloned() else { return };
        let (host, watched, core) = (self.clone(), process.clone(), core.clone());
        process.look_on(async move {
            let mut is_live = is_live;
            loop {
                let is_short = machine.phase().is_some_and(|phase| phase > VmMovePhase::Disks);
                watched.env().sleep(if is_live && is_short { LOOK_SOON } else { LOOK }).await;
                let phase = core.machine_move(NAME).map_or(VmMovePhase::Over, |shown| shown.phase);
                is_live |= phase != VmMovePhase::Over;
                match phase {
                    // Of the move before, as long as this one is to be ended after a restart.
                    VmMovePhase::Over if !is_live && host.is_machine_leaving() => {}
                    VmMovePhase::Over => return machine.note_phase(None),
                    phase => machine.note_phase(Some(phase)),
                }
            }
        });
    }
}
