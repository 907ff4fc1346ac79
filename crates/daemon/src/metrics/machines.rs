//! Metrics of whole VMs.

use api::v1::VmMove;

use super::{family, line};
use crate::daemon::Daemon;
use crate::machines::Where;

/// Where each VM is, and how its move goes.
pub(super) fn render(out: &mut String, daemon: &Daemon) {
    let machines = daemon.machines.list();
    family(out, "transhume_vm_state", "gauge", "1 for where the VM is.");
    for machine in &machines {
        let place = match machine.place() {
            Where::Here => "here",
            Where::Leaving => "moving",
            Where::Coming => "arriving",
            Where::Away => "moved",
        };
        line(out, "transhume_vm_state", &format!("{{vm=\"{}\",state=\"{place}\"}}", machine.name), 1.0);
    }
    let moves: Vec<VmMove> = machines.iter().filter_map(|machine| daemon.show_machine_move(machine).ok()).collect();
    type Figure = fn(&VmMove) -> Option<f64>;
    let figures: [(&str, &str, Figure); 5] = [
        ("transhume_vm_move_seconds", "How long the VM's move from here has taken, or took.", |moved| {
            Some(moved.elapsed_ms as f64 / 1e3)
        }),
        ("transhume_vm_move_downtime_seconds", "For how long its guest was stopped.", |moved| {
            moved.downtime_ms.map(|downtime| downtime / 1e3)
        }),
        ("transhume_vm_memory_sent_bytes", "Memory that was sent.", |moved| {
            moved.memory.map(|memory| memory.bytes_sent as f64)
        }),
        ("transhume_vm_memory_left_bytes", "Memory that is left to be sent.", |moved| {
            moved.memory.map(|memory| memory.bytes_left as f64)
        }),
        ("transhume_vm_memory_dirty_bytes_per_second", "How fast the guest writes to its memory.", |moved| {
            moved.memory.map(|memory| memory.dirty_bytes_per_second as f64)
        }),
    ];
    for (name, help, figure) in figures {
        family(out, name, "gauge", help);
        for (moved, value) in moves.iter().filter_map(|moved| Some((moved, figure(moved)?))) {
            line(out, name, &format!("{{vm=\"{}\",state=\"{}\"}}", moved.vm, moved.state.name()), value);
        }
    }
}
