//! Domains that libvirt starts with their host: not while two hosts have one.
//!
//! From the commit on the guest is the other host's. If this host loses its power then, its libvirt must not start the old disks before
//! the daemon has read its record.

use api::v1::{Error, ErrorCode};

use super::Machine;
use crate::daemon::Daemon;
use crate::hypervisor::Hypervisor;
use crate::problem::Result;

impl Daemon {
    /// Has libvirt not start a machine that goes with this host, if it would: its record says so already.
    ///
    /// # Errors
    /// libvirt refuses.
    pub(super) async fn hold_autostart(&self, machine: &Machine, hypervisor: &dyn Hypervisor) -> Result<()> {
        let is_on = machine.document().outgoing.is_some_and(|outgoing| outgoing.autostart);
        if is_on { hypervisor.set_autostart(false).await } else { Ok(()) }
    }

    /// Has libvirt start a machine with this host again that does not go after all.
    pub(super) async fn restore_autostart(&self, machine: &Machine) {
        let document = machine.document();
        if !document.outgoing.is_some_and(|outgoing| outgoing.autostart) {
            return;
        }
        let restored = async { self.hypervisors.reach(&document.monitor).await?.set_autostart(true).await };
        if let Err(error) = restored.await {
            tracing::error!(vm = machine.name, %error, "libvirt does not start a VM with this host any more");
            let message = format!("libvirt does not start {} with this host any more: {}", machine.name, error.message);
            machine.problem.lock().get_or_insert(
                Error::new(ErrorCode::WrongState, message).with_hint(format!("`virsh autostart {}`", document.monitor)),
            );
        }
    }
}
