//! Disks of running VMs: looking at them, adopting them, releasing them.

use serde::{Deserialize, Serialize};

/// How to reach a running QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Monitor {
    /// The unix socket of a QMP monitor that nobody else uses.
    Qmp(String),
    /// The name of a libvirt domain.
    Libvirt(String),
}

impl std::fmt::Display for Monitor {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Qmp(path) => write!(out, "qmp:{path}"),
            Self::Libvirt(domain) => write!(out, "libvirt:{domain}"),
        }
    }
}

/// Asks which disks can be adopted (`POST /v1/adoptions/check`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckRequest {
    /// The VM.
    pub monitor: Monitor,
}

/// One disk of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckedDisk {
    /// The VM, as it was asked for.
    pub vm: String,
    /// The node to name to `adopt --node`.
    pub node: String,
    /// The guest's device.
    pub device: String,
    /// The image's format.
    pub format: String,
    /// The image file or block device.
    pub file: String,
    /// The size that the guest sees.
    pub size_bytes: u64,
    /// Whether it can be adopted.
    pub adoptable: bool,
    /// If not, why; one line each.
    pub reasons: Vec<String>,
    /// What is worth knowing before adopting it.
    pub notes: Vec<String>,
}

impl CheckedDisk {
    /// What there is to say of a VM that could not be asked for its disks: it has no node.
    #[must_use]
    pub fn of_silent_vm(vm: &str, error: &super::Error) -> Self {
        Self {
            vm: vm.to_owned(),
            node: String::new(),
            device: String::new(),
            format: String::new(),
            file: String::new(),
            size_bytes: 0,
            adoptable: false,
            reasons: vec![error.to_string()],
            notes: Vec::new(),
        }
    }
}

/// Asks for a running VM's disk to be adopted (`POST /v1/adoptions`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdoptRequest {
    /// The VM.
    pub monitor: Monitor,
    /// The block node (or the guest's device) that shall be ours.
    pub node: String,
    /// What the volume shall be called.
    pub name: String,
    /// Go on although options of the disk are not known and fall back to QEMU's defaults.
    #[serde(default)]
    pub accept_option_loss: bool,
    /// Adopt a disk whose first block says that a volume was moved away from some device: it is the guest's own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accept_tombstone: bool,
    /// The disk's format (`raw` or `qcow2`), of one whose format QEMU has found out by its bytes: a raw disk whose `-drive` has no
    /// `format=` is adopted with it only. The VM's configuration must name the format from then on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
}

/// Asks for a disk to be given back to its VM (`POST /v1/adoptions/NAME/release`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleaseRequest {}

/// The VM that a volume was adopted from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptedVm {
    /// How it is reached.
    pub monitor: Monitor,
    /// The node that was adopted.
    pub node: String,
    /// The image's format.
    pub format: String,
    /// How far it has come: `adopting`, `adopted` or `releasing`.
    #[serde(default)]
    pub state: String,
    /// In the answer to an adoption or a release: for how long the guest was stopped for it, in microseconds, if it
    /// was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped_us: Option<u64>,
}
