//! What happens to a whole machine while its scenario is played, and what must hold of it at the end.

use std::time::Duration;

use futures::future::join_all;

use super::{JOB_LIMIT, MACHINE_LIMIT, ScenarioRunner};
use crate::fault_event::{MachineEvent, When};
use crate::host::Status;
use crate::occurrence::Occurrence;
use crate::world::Invariant;

/// So often a move of a machine that was undone is asked for again while something is still to happen to it.
const AGAIN_MAX: u32 = 4;
/// And so soon at most.
const AGAIN_SPAN: Duration = Duration::from_millis(40);
/// So long after its end nothing of a move is seen any more.
const OVER_SPAN: Duration = Duration::from_millis(500);
/// How often the machine is looked at, and how long the daemon may take to know it.
const LOOK: Duration = Duration::from_millis(10);
const KNOWN_LIMIT: Duration = Duration::from_secs(5);
/// A host forgets a machine that does not come within this.
const FORGOTTEN_LIMIT: Duration = Duration::from_secs(15);

impl ScenarioRunner<'_> {
    /// What happens before the machine's move is asked for, once the daemon knows it.
    pub(super) async fn happen_before(&self) {
        let events: Vec<_> = self.scenario.events.iter().filter(|event| event.when == When::Before).collect();
        if events.is_empty() {
            return;
        }
        let known = async {
            while !self.first().host.is_machine_known() {
                self.world.sleep(LOOK).await;
            }
        };
        if self.limited(KNOWN_LIMIT, known).await.is_some() {
            for event in events {
                self.happen(self.one(), event.what).await;
            }
        }
    }

    /// Has something happen to the machine, if there is one.
    pub(super) async fn happen_to_machine(&self, what: MachineEvent) -> bool {
        let Some(machine) = self.first().host.machine() else { return false };
        match what {
            MachineEvent::Restarted => machine.restart_qemu().await,
            MachineEvent::Stopped => machine.stop_guest(),
            MachineEvent::Resumed => machine.resume_guest().await,
            MachineEvent::SentResumed => machine.resume_sent().await,
            MachineEvent::MonitorHeld => machine.hold_monitor(),
            MachineEvent::SourceKilled => machine.kill_source().await,
            MachineEvent::TargetKilled => machine.kill_target().await,
            MachineEvent::DiskMoved => self.limited(JOB_LIMIT, self.first().host.move_disk_alone()).await.is_some(),
            MachineEvent::Asked => {
                self.first().host.ask_for_move();
                true
            }
        }
    }

    /// Waits until a machine has moved, and no phase of that comes any more. Never ends where there is none.
    pub(super) async fn moved_for_good(&self) {
        loop {
            let ends = join_all(self.seats.iter().map(|seat| seat.host.ended())).await;
            self.world.sleep(OVER_SPAN).await;
            let machine = self.first().host.machine();
            let is_over = machine.is_some_and(|machine| !machine.is_moving());
            if is_over && ends.iter().all(|status| matches!(status, Status::Switched(_))) {
                return;
            }
        }
    }

    /// Asks for the machine's move again when it was undone: what waits for a later phase of it would never happen otherwise. Never
    /// ends.
    pub(super) async fn move_machine_again(&self) {
        for _ in 0..AGAIN_MAX {
            if !self.scenario.setup.others.are_impatient {
                break;
            }
            let ends = join_all(self.seats.iter().map(|seat| seat.host.ended())).await;
            self.world.sleep(self.rng.up_to(AGAIN_SPAN)).await;
            if ends.iter().all(|status| matches!(status, Status::Switched(_))) {
                break;
            }
            self.seats.iter().for_each(|seat| seat.host.move_again());
        }
        std::future::pending().await
    }

    /// A machine whose move cannot succeed, because the other host has a volume of a disk's name, is forgotten there while that is
    /// so. Then the volume is taken away.
    pub(super) async fn clear_leftover(&self) {
        if !self.scenario.setup.others.have_leftover {
            return;
        }
        let host = &self.first().host;
        let over = async {
            join_all(self.seats.iter().map(|seat| seat.host.ended())).await;
        };
        // One that is refused for good never ends.
        let _ = self.limited(FORGOTTEN_LIMIT, over).await;
        let forgotten = async {
            while host.is_machine_arriving() {
                self.world.sleep(LOOK).await;
            }
        };
        if self.limited(FORGOTTEN_LIMIT, forgotten).await.is_none() {
            let what = "the other host still awaits a machine whose move was undone";
            self.world.violate(Invariant::Converges, what);
        }
        host.clear_leftover().await;
    }

    /// With faults over both hosts have the machine at rest, or somebody gets it there. Then one QEMU is left of it, whose guest runs
    /// unless its operator has stopped it, who lets it go on.
    pub(super) async fn settle_machine(&self) -> Option<()> {
        let host = &self.first().host;
        let Some(machine) = host.machine() else { return Some(()) };
        let (mut until, mut tried) = (self.world.now() + MACHINE_LIMIT, None);
        loop {
            let (unrest, disorder) = (host.machine_unrest(), machine.disorder());
            if unrest.is_none() && disorder.is_none() {
                break;
            }
            if unrest.is_none() && machine.is_dead() {
                machine.start_anew().await;
            }
            if self.world.now() >= until {
                match (unrest, &tried) {
                    (Some(_), None) => {
                        tried = Some(host.try_ways_out().await);
                        // A connection that is half open is noticed after as long: both disks of a machine may meet one.
                        until = self.world.now() + MACHINE_LIMIT * 2;
                    }
                    (Some(unrest), Some(tried)) => {
                        let what = format!("{unrest}, and nothing gets it out of that: {}", tried.join("; "));
                        self.world.violate(Invariant::Converges, what);
                        return None;
                    }
                    (None, _) => {
                        let what = disorder.unwrap_or_else(|| "the machine is not in order".to_owned());
                        self.world.violate(Invariant::OneWriter, what);
                        return None;
                    }
                }
            }
            self.world.sleep(LOOK).await;
        }
        if machine.resume_guest().await {
            self.world.occur(Occurrence::Told("stopped at the end"));
        }
        Some(())
    }
}
