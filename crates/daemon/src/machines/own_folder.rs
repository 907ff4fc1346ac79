//! Where the sockets of a machine are, and that nobody else's are there.
//!
//! ```text
//!   SOCKETS/vm/NAME        the sockets and the log of the machine's QEMU, of one that has come
//!   SOCKETS/vm/.out/NAME   where the connections of its migration leave this host
//! ```
//!
//! A machine that was removed from the record runs on, with its sockets where they were. Another one of its name may not come then: the
//! folder is made anew for it.

use std::path::{Path, PathBuf};

use api::v1::{Error, ErrorCode, Monitor};
use vm::QemuProcess;

use crate::daemon::Daemon;
use crate::problem::Result;

/// No machine is called so: a name begins with a letter or a digit.
const OUTGOING: &str = ".out";
/// The monitor in the folder.
const MONITOR: &str = "transhume.qmp";

impl Daemon {
    /// Where the sockets of the machine `name` are.
    pub(super) fn machine_folder(&self, name: &str) -> PathBuf {
        self.socket_dir.join("vm").join(name)
    }

    /// Where the connections of a migration of the machine `name` leave this host.
    pub(super) fn migration_place(&self, name: &str) -> PathBuf {
        self.machine_folder(OUTGOING).join(name)
    }

    /// Whether a QEMU has its monitor in `folder`, on record or not.
    pub(super) fn has_live_qemu(&self, folder: &Path) -> bool {
        !self.hypervisors.started_for(&monitor_in(folder)).is_empty()
    }

    /// Refuses a machine in whose folder another QEMU has its monitor than `own`, which is about to be ended.
    ///
    /// # Errors
    /// Who it is, and what to do.
    pub(super) fn require_own_folder(&self, name: &str, own: Option<&QemuProcess>) -> Result<()> {
        let folder = self.machine_folder(name);
        let holders = self.hypervisors.started_for(&monitor_in(&folder));
        let Some(holder) = holders.iter().find(|holder| Some(*holder) != own) else { return Ok(()) };
        let (pid, folder) = (holder.pid, folder.display());
        let message = format!("a QEMU that is not on record (process {pid}) runs here with its sockets in {folder}");
        Err(Error::new(ErrorCode::AlreadyExists, message).with_hint(format!(
            "it came here as {name} earlier: end it, or give the VM that moves another name (`vm rm` and `vm add` there)"
        )))
    }
}

fn monitor_in(folder: &Path) -> Monitor {
    Monitor::Qmp(folder.join(MONITOR).display().to_string())
}
