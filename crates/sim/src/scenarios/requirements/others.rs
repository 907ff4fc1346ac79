//! What scenarios must show in which others have to do with a machine.

use super::{Requirement, SWITCHED, requirement};
use crate::fault_event::{FaultEvent, MachineEvent};
use crate::occurrence::Occurrence::{self, Fault, Happens, Told};

const MOVED: Occurrence = Told("machine moved");

pub(super) const RESTARTED: Requirement = requirement("machine-restarted", &[SWITCHED, MOVED, Fault("qemu-restarted")]);
pub(super) const STOPPED: Requirement = requirement(
    "machine-stopped",
    &[SWITCHED, MOVED, Fault("guest-stopped"), Fault("guest-resumed"), Told("stopped at the end")],
);
pub(super) const SENT_RESUMED: Requirement =
    requirement("machine-sent-resumed", &[SWITCHED, MOVED, Fault("sent-resumed")]);
pub(super) const MONITOR_HELD: Requirement =
    requirement("machine-monitor-held", &[SWITCHED, MOVED, Fault("monitor-held"), Fault("crash")]);
pub(super) const LAYERS_AGAIN: Requirement =
    requirement("machine-layers-again", &[SWITCHED, MOVED, Told("snapshot"), Fault("neighbour-crash")]);
pub(super) const SUPERVISED: Requirement = requirement("machine-supervised", &[SWITCHED, MOVED, Told("handed over")]);
pub(super) const QEMU_KILLED: Requirement =
    requirement("machine-qemu-killed", &[SWITCHED, MOVED, Fault("qemu-killed"), Told("started as after a crash")]);
pub(super) const NAMESAKE: Requirement = requirement("machine-namesake", &[SWITCHED, MOVED, Fault("neighbour-crash")]);
pub(super) const DISK_ALONE: Requirement = requirement(
    "machine-disk-alone",
    &[Told("a disk moved alone"), Fault("crash"), Happens(FaultEvent::Machine(MachineEvent::Asked))],
);
pub(super) const LEFTOVER: Requirement = requirement("machine-leftover", &[SWITCHED, MOVED]);
