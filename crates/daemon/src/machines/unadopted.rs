//! Disks of a machine that no volume is yet, and that its move would have to adopt.

use api::v1::{Error, ErrorCode};

use crate::hypervisor::Hypervisor;
use crate::problem::Result;

/// Why disks of the machine `name` would not be adopted whose format QEMU has found out by their bytes.
///
/// # Errors
/// The hypervisor does not answer.
pub(super) async fn refuse_probed(name: &str, hypervisor: &dyn Hypervisor) -> Result<Vec<Error>> {
    let probed = hypervisor.own_disks().await?.into_iter().filter(|report| report.is_probed);
    let refusal = |report: vm::DiskReport| {
        let node = report.node;
        let message =
            format!("QEMU has found out that {node} of {name} is raw by its first bytes: its -drive has no format=");
        Error::new(ErrorCode::NotAdoptable, message).with_hint(format!(
            "start the VM with format=raw there; or `transhume adopt --node \'{node}\' --format raw` with its monitor, and name the format \
             before the VM is started again"
        ))
    };
    Ok(probed.map(refusal).collect())
}
