//! Reaching a running QEMU, and all that is known of it besides.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use api::v1::Monitor;
use vm::{CommandLine, LibvirtDomain, Plan, QemuProcess, Qmp, Remembered, Sources};

use crate::clients::SocketOwner;
use crate::daemon::Daemon;
use crate::hypervisor::{connect_to_domain, domain_xml};
use crate::problem::{Result, of_vm};

/// How many released disks are remembered.
const REMEMBERED_MAX: usize = 200;

/// A QEMU that answers.
pub(crate) struct Vm {
    pub(crate) qmp: Qmp,
    pub(crate) sources: Sources,
    /// Who QEMU runs as: it must be able to connect to our export.
    pub(crate) owner: Option<SocketOwner>,
}

impl Daemon {
    /// Connects to a VM and gathers what is known of its disks' options.
    pub(crate) async fn reach(&self, monitor: &Monitor) -> Result<Vm> {
        let (qmp, libvirt) = match monitor {
            Monitor::Qmp(path) => (self.monitors.connect(Path::new(path), &self.env).await, None),
            Monitor::Libvirt(domain) => {
                let xml = domain_xml(domain).await.map_err(|error| of_vm(&error))?;
                let parsed = LibvirtDomain::parse(&xml).map_err(|error| of_vm(&error))?;
                (connect_to_domain(&xml, &parsed, (&self.monitors, &self.env)).await, Some(parsed))
            }
        };
        let qmp = qmp.map_err(|error| of_vm(&error))?;
        let pid = qmp.process_id();
        let command_line = pid.and_then(|pid| CommandLine::of_process(pid).ok().flatten());
        let owner = pid.and_then(|pid| std::fs::metadata(format!("/proc/{pid}")).ok());
        let owner = owner.map(|process| SocketOwner { uid: process.uid(), gid: process.gid() });
        let process = pid.and_then(QemuProcess::of);
        Ok(Vm { qmp, sources: Sources { command_line, libvirt, remembered: self.remembered(), process }, owner })
    }

    fn remembered(&self) -> Vec<Remembered> {
        let Ok(text) = self.layout.files().read(&self.layout.remembered()) else { return Vec::new() };
        serde_json::from_slice(&text).unwrap_or_else(|error| {
            tracing::warn!(%error, "what was remembered of released disks cannot be read");
            Vec::new()
        })
    }

    /// Keeps the options of a released disk: its node was made by us, so no command line tells them.
    pub(super) fn remember(&self, plan: &Plan) {
        let new = plan.remembered();
        let mut all = self.remembered();
        all.retain(|known| known.node != new.node || known.image != new.image);
        all.push(new);
        let surplus = all.len().saturating_sub(REMEMBERED_MAX);
        all.drain(..surplus);
        let text = serde_json::to_string_pretty(&all).expect("plain data serialises");
        if let Err(error) = self.layout.write_atomically(&self.layout.remembered(), &text) {
            tracing::warn!(%error, "the options of a released disk could not be remembered");
        }
    }
}

/// Tells libvirt's or the operator's configuration where a disk is now.
pub(crate) async fn persist(how: &vm::Persist, moved: &vm::Moved, limit: Duration) -> Result<Option<String>> {
    match vm::persist(how, moved, &vm::SystemRunner { limit, ..vm::SystemRunner::default() }).await {
        Ok(vm::PersistOutcome::Done { what }) => Ok(Some(what)),
        Ok(vm::PersistOutcome::AlreadyDone) => {
            Ok(Some("the VM's configuration names the new place already".to_owned()))
        }
        Ok(vm::PersistOutcome::Skipped) => Ok(None),
        Err(error) => Err(of_vm(&error)),
    }
}

/// Whether `path` is a block device, for whoever writes configurations.
pub(crate) fn is_block_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
}
