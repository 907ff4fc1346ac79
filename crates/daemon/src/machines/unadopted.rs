//! Disks of a machine that no volume is yet, and that its move would have to adopt.

use api::v1::{Error, ErrorCode, VmDisk};
use vm::{Adoptability, DiskReport};

use crate::hypervisor::Hypervisor;
use crate::problem::Result;

/// Why those of `disks` of the machine `name` that are no volumes would not be adopted when it moves. Its plan says it before.
///
/// # Errors
/// The hypervisor does not answer.
pub(super) async fn adoption_obstacles(
    name: &str,
    hypervisor: &dyn Hypervisor,
    disks: &[VmDisk],
) -> Result<Vec<Error>> {
    let reports = hypervisor.own_disks().await?;
    // A volume may have another name for its node than adopted ones have.
    let is_volume = |report: &&DiskReport| disks.iter().any(|disk| disk.node == report.node && disk.volume.is_some());
    Ok(reports.iter().filter(|report| !is_volume(report)).filter_map(|report| refusal(name, report)).collect())
}

fn refusal(name: &str, report: &DiskReport) -> Option<Error> {
    let DiskReport { node, image, .. } = report;
    if report.is_probed {
        let message =
            format!("QEMU has found out that {node} of {name} is raw by its first bytes: its -drive has no format=");
        return Some(Error::new(ErrorCode::NotAdoptable, message).with_hint(format!(
            "start the VM with format=raw there; or `transhume adopt --node \'{node}\' --format raw` with its monitor, and name the format \
             before the VM is started again"
        )));
    }
    match &report.verdict {
        // What an earlier adoption has noted of its options only the next one looks up.
        Adoptability::Adoptable { .. } | Adoptability::LosesOptions { .. } | Adoptability::Adopted => None,
        Adoptability::Refused { reason } => {
            let message = format!("{node} of {name} ({}): {reason}", image.display());
            Some(
                Error::new(ErrorCode::NotAdoptable, message).with_hint(
                    "change that, or take the disk or medium out of the VM; the move adopts each disk first",
                ),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm::{Form, Origin};

    fn report(verdict: Adoptability) -> DiskReport {
        DiskReport {
            node: "disk0".to_owned(),
            device: "/machine/peripheral/disk0".to_owned(),
            device_type: "virtio-blk-pci".to_owned(),
            image: "/vm/web1.qcow2".into(),
            format: "qcow2".to_owned(),
            bytes: None,
            iothread: None,
            throttle_group: None,
            is_probed: false,
            verdict,
        }
    }

    #[test]
    fn a_plan_lists_disks_that_cannot_be_adopted() {
        let said = |report: &DiskReport| refusal("web1", report).map(|error| error.to_string());
        assert_eq!(said(&report(Adoptability::Adopted)), None);
        let adoptable = Adoptability::Adoptable { form: Form::Reopen, options_from: Origin::CommandLine };
        assert_eq!(said(&report(adoptable.clone())), None);
        let refused = said(&report(Adoptability::Refused { reason: "it has a backing chain".to_owned() }));
        let refused = refused.expect("it is refused");
        assert!(refused.contains("backing chain") && refused.contains("/vm/web1.qcow2"), "{refused}");
        let probed = DiskReport { is_probed: true, ..report(adoptable) };
        assert!(said(&probed).expect("it is refused").contains("format=raw"));
    }
}
