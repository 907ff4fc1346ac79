//! The words of QEMU's command line.

use std::path::Path;

use crate::network::Network;
use crate::spec::GuestSpec;

/// The socket of the workload's line in a guest's folder.
pub(crate) const WORKLOAD_SOCKET: &str = "workload.sock";

/// The kernel's command line.
pub(crate) const KERNEL_WORDS: &str = "console=ttyS0 quiet panic=-1 nokaslr mitigations=off random.trust_cpu=on";

/// The words for a guest whose files and sockets are in `folder`.
pub(crate) fn arguments_of(spec: &GuestSpec, kernel: &Path, folder: &Path) -> Vec<String> {
    let socket = |name: &str| format!("unix:{},server=on,wait=off", folder.join(name).display());
    let workload = if spec.has_workload_socket {
        format!("socket,id=workload,path={},server=on,wait=off", folder.join(WORKLOAD_SOCKET).display())
    } else {
        "stdio,id=workload,signal=off".to_owned()
    };
    let mut words: Vec<String> = [
        ("-machine", spec.machine.clone()),
        ("-accel", spec.acceleration.name().into()),
        ("-m", spec.memory_mib.to_string()),
        ("-smp", spec.cores.to_string()),
        ("-display", "none".into()),
        ("-kernel", kernel.display().to_string()),
        ("-initrd", folder.join("initramfs").display().to_string()),
        ("-append", KERNEL_WORDS.into()),
        ("-chardev", workload),
        ("-serial", format!("file:{}", folder.join("console.log").display())),
        ("-serial", "chardev:workload".into()),
        ("-qmp", socket("qmp.sock")),
        ("-qmp", socket("qmp2.sock")),
    ]
    .into_iter()
    .flat_map(|(name, value)| [name.to_owned(), value])
    .collect();
    words.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(str::to_owned));
    if spec.has_iothread {
        words.extend(["-object", "iothread,id=iothread0"].map(str::to_owned));
    }
    words.extend(spec.disks.iter().flat_map(|disk| disk.words(spec.has_iothread)));
    words.extend(spec.network.iter().flat_map(Network::words));
    words.extend(spec.tracked_memory.iter().flat_map(|memory| memory.words(spec.memory_mib)));
    words.extend(spec.arguments.iter().cloned());
    words
}
