//! Adoption and release as data: the commands, their order, and how each is recognised as done.
//!
//! ```text
//!            adopt ─────────────────────────────▶
//!  Outside ── our nodes added ──▶ Prepared ── reopen or qom-set ──▶ Inside
//!            ◀───────────────────────────── release
//! ```
//!
//! A plan is written to the journal before its first step. Every step can be recognised as done in QEMU's graph, so a
//! plan can be begun again from its start at any time. Steps that are done are skipped.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::disk::{Disk, Form, name_of};
use crate::error::{Error, ErrorKind, Result};
use crate::graph::Graph;
use crate::options::{DiskOptions, Remembered, Sources, require_named};
use crate::process::{self, ProcessState, QemuProcess, looks_alive};
use crate::qmp::Qmp;

/// How long QEMU's NBD client tries to reach us again before it fails the guest's requests.
///
/// It is long, because a failed request is worse for a guest than one that waits. Linux' virtio-blk waits for ever. Its
/// SCSI and ATA layers reset a device that has not answered for 30 s and go on waiting; Windows does after 60 s. A
/// daemon that cannot start is repaired within minutes, or `rescue` serves the export without it. It is not infinite: a
/// draining command (`stop`, `quit` by signal) waits for it too.
pub const RECONNECT_SECONDS: u32 = 900;

/// The longest name that QEMU gives a node.
const NODE_NAME_BYTES_MAX: usize = 31;

/// Where our export is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportAddress {
    /// The unix socket that the daemon serves it on, as QEMU sees it.
    pub socket: PathBuf,
    /// Its name.
    pub name: String,
}

/// One step of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "kebab-case")]
pub enum Step {
    /// `blockdev-add`. Done if the node is there.
    AddNode {
        /// Its name.
        node: String,
        /// What `blockdev-add` takes.
        options: Value,
        /// The image's size that it must show, so that a wrong export is never put below a guest.
        size: Option<ExpectedSize>,
    },
    /// `x-blockdev-set-iothread`, so that a new node runs where the node runs that it comes beside. Done if the node
    /// has a parent already.
    SetIothread {
        /// The node.
        node: String,
        /// The iothread that serves the device.
        iothread: String,
        /// The node that is in the device's path now. It runs in the iothread while the guest's driver runs, and in the
        /// main loop otherwise.
        like: String,
    },
    /// `blockdev-reopen` of the format node over another file node. Done if `to` is its child.
    Reopen {
        /// The format node.
        format: String,
        /// Its child before.
        from: String,
        /// Its child afterwards.
        to: String,
        /// What `blockdev-reopen` takes, with `to` as `file`.
        options: Value,
    },
    /// `qom-set` of the device's `drive`. Done if `to` is the device's root.
    SetDrive {
        /// The device.
        qom_path: String,
        /// Its root before.
        from: String,
        /// Its root afterwards.
        to: String,
    },
    /// `blockdev-del`. Done if the node is gone.
    DeleteNode {
        /// Its name.
        node: String,
    },
    /// `stop`. Done if the guest does not run.
    Pause,
    /// `cont`. Done if the guest runs, and not done at all to a guest that somebody else has stopped.
    Resume,
    /// Our locks on the image are taken.
    TakeLocks,
    /// Our locks on the image are dropped: QEMU takes its own in the next step.
    DropLocks,
}

impl Step {
    /// A few words for logs: the command and what it is about.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::AddNode { node, .. } => format!("blockdev-add {node}"),
            Self::SetIothread { node, iothread, .. } => format!("x-blockdev-set-iothread {node} {iothread}"),
            Self::Reopen { format, to, .. } => format!("blockdev-reopen {format} over {to}"),
            Self::SetDrive { qom_path, to, .. } => format!("qom-set {qom_path} drive {to}"),
            Self::DeleteNode { node } => format!("blockdev-del {node}"),
            Self::Pause => "stop".to_owned(),
            Self::Resume => "cont".to_owned(),
            Self::TakeLocks => "take the image's locks".to_owned(),
            Self::DropLocks => "drop the image's locks".to_owned(),
        }
    }
}

/// What size a node must show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExpectedSize {
    /// So many bytes: a raw image.
    Exactly(u64),
    /// At least so many: a container, whose export lets it grow.
    AtLeast(u64),
}

/// Which way a plan leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// Into the disk's path.
    Adopt,
    /// Out of it.
    Release,
}

/// The names of the nodes that a plan is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeNames {
    /// Our node: QEMU's NBD client.
    pub nbd: String,
    /// The format node while adopted; the same as `nbd` where there is none.
    pub format: String,
    /// The format node before; differs where it had no name and is replaced.
    pub format_before: String,
    /// The file node before.
    pub file_before: String,
    /// The file node after release: as before, if it had a name.
    pub file_after: String,
}

/// All that must be remembered of an adopted disk in order to release it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdoptedDisk {
    /// The volume's name.
    pub volume: String,
    /// How we get in.
    pub form: Form,
    /// `raw` or `qcow2`.
    pub format: String,
    /// The driver of the file node: `file` or `host_device`.
    pub file_driver: String,
    /// The image when it was adopted.
    pub image: PathBuf,
    /// The image's size then: of the container, not of the disk in it.
    pub image_bytes: Option<u64>,
    /// The disk's size, as the guest sees it.
    pub disk_bytes: Option<u64>,
    /// The guest's device.
    pub qom_path: String,
    /// What to call the device.
    pub device: String,
    /// The name of its block backend, or empty.
    pub backend: String,
    /// The iothread that serves it.
    pub iothread: Option<String>,
    /// The nodes.
    pub nodes: NodeNames,
    /// The options that are replayed.
    pub options: DiskOptions,
    /// Where our export is.
    pub export: ExportAddress,
    /// QEMU's process, where known.
    pub process_id: Option<u32>,
    /// The same, told from others that come to have its number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<QemuProcess>,
}

impl AdoptedDisk {
    /// Whether QEMU's process is still there.
    #[must_use]
    pub fn process_state(&self) -> ProcessState {
        match (&self.process, self.process_id) {
            (Some(process), _) if process.lives() => ProcessState::Lives,
            (Some(_), _) => ProcessState::Ended,
            (None, Some(pid)) if looks_alive(pid) => ProcessState::Lives,
            (None, Some(_)) => ProcessState::Ended,
            (None, None) => ProcessState::Unknown,
        }
    }

    /// Whether the process `pid`, which runs, is QEMU's.
    #[must_use]
    pub fn is_of(&self, pid: u32) -> bool {
        match (&self.process, self.process_id) {
            (Some(process), _) => QemuProcess::of(pid).as_ref() == Some(process),
            (None, known) => known.is_none_or(|known| known == pid),
        }
    }

    /// Whether the disk lies in a container, a file that grows and that no second node may open while it is changed.
    fn is_container(&self) -> bool {
        self.format != "raw"
    }
}

/// A plan: what is to be done to one disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Which way it leads.
    pub direction: Direction,
    /// The disk.
    pub disk: AdoptedDisk,
    /// The image that a release gives back to QEMU: where the volume is now.
    pub image: PathBuf,
    /// What is done, in order.
    pub steps: Vec<Step>,
    /// What is done instead, in order, when it cannot be finished before the decisive step.
    pub undo: Vec<Step>,
    /// Whether a guest that is found stopped is one that this plan has stopped: it ran when the plan was made.
    pub resumes: bool,
}

/// A plan that leads into a disk's path.
pub type AdoptionPlan = Plan;

/// What an adoption is asked for.
#[derive(Clone, Debug)]
pub struct AdoptionRequest {
    /// The disk: a node, a device's id, a `-drive`'s id or a QOM path; for a libvirt domain also its name there
    /// (`vda`).
    pub node: String,
    /// The volume's name.
    pub volume: String,
    /// Where our export is, or will be before the plan is run.
    pub export: ExportAddress,
    /// Go on although options are lost.
    pub accept_option_loss: bool,
    /// The disk's format as whoever asks for the adoption knows it, of one whose format QEMU has probed.
    pub format: Option<String>,
    /// See [`RECONNECT_SECONDS`].
    pub reconnect_seconds: u32,
}

impl Plan {
    /// Plans the adoption of a disk. Changes nothing.
    ///
    /// # Errors
    /// `NotFound`, `Refused` and `OptionLoss` with the reason; what QMP says.
    pub async fn adopt(qmp: &Qmp, sources: &Sources, request: &AdoptionRequest) -> Result<Self> {
        let graph = Graph::read(qmp).await?;
        let by_libvirt = sources.libvirt.as_ref().and_then(|domain| domain.alias_of(&request.node));
        let disk = Disk::find(qmp, &graph, by_libvirt.unwrap_or(&request.node)).await?;
        disk.check(&graph)?;
        process::require_open(qmp.process_id(), &disk.image())?;
        let options = DiskOptions::gather(&disk, sources);
        if !request.accept_option_loss {
            options.require_complete()?;
        }
        require_named(&disk, sources, request.format.as_deref())?;
        let adopted = describe(&disk, options, request, &graph, qmp.process_id())?;
        let (steps, undo) = adoption_steps(&adopted, request.reconnect_seconds);
        let image = adopted.image.clone();
        Ok(Self { direction: Direction::Adopt, disk: adopted, image, steps, undo, resumes: graph.is_running })
    }

    /// Plans the way out of a disk's path, back to a file of QEMU's own: `image` is where the volume is now.
    /// `image_driver` is `file` or `host_device`, if it may differ from what the disk was adopted with. `guest_runs`
    /// says whether the guest runs now: one that somebody else has stopped is not resumed.
    #[must_use]
    pub fn release(disk: &AdoptedDisk, image: &Path, image_driver: Option<&str>, guest_runs: bool) -> Self {
        let (steps, undo) = release_steps(disk, image, image_driver.unwrap_or(&disk.file_driver));
        let (disk, image) = (disk.clone(), image.to_owned());
        Self { direction: Direction::Release, disk, image, steps, undo, resumes: guest_runs }
    }

    /// Whether the guest must be stopped for the decisive step.
    #[must_use]
    pub fn pauses(&self) -> bool {
        self.steps.contains(&Step::Pause)
    }

    /// What to remember after a release, so that the next adoption knows the options.
    #[must_use]
    pub fn remembered(&self) -> Remembered {
        let node = if self.disk.form == Form::Direct { &self.disk.nodes.file_after } else { &self.disk.nodes.format };
        Remembered {
            node: node.clone(),
            image: self.image.display().to_string(),
            options: self.disk.options.clone(),
            process: self.disk.process.clone(),
        }
    }
}

pub(crate) fn describe(
    disk: &Disk,
    options: DiskOptions,
    request: &AdoptionRequest,
    graph: &Graph,
    process_id: Option<u32>,
) -> Result<AdoptedDisk> {
    if request.volume.is_empty() {
        return Err(Error::new(ErrorKind::Invalid, "a volume needs a name"));
    }
    let nbd = node_name(&request.volume, "");
    let new_format = node_name(&request.volume, "-fmt");
    let new_file = node_name(&request.volume, "-file");
    let is_taken = |name: &&String| graph.node(name).is_some();
    let own = [&nbd].into_iter().chain((disk.form == Form::Replace).then_some(&new_format));
    if let Some(taken) = own.into_iter().find(is_taken) {
        let context = format!("this VM has a node {taken} already: recover or release it, or choose another name");
        return Err(Error::refused(context));
    }
    let nodes = NodeNames {
        format: match disk.form {
            Form::Reopen => disk.format.name.clone(),
            Form::Replace => new_format,
            Form::Direct => nbd.clone(),
        },
        nbd,
        format_before: disk.format.name.clone(),
        file_before: disk.file.name.clone(),
        file_after: if disk.file.is_implicit() { new_file } else { disk.file.name.clone() },
    };
    Ok(adopted(disk, nodes, options, request, process_id))
}

fn adopted(
    disk: &Disk,
    nodes: NodeNames,
    options: DiskOptions,
    request: &AdoptionRequest,
    process_id: Option<u32>,
) -> AdoptedDisk {
    AdoptedDisk {
        volume: request.volume.clone(),
        form: disk.form,
        format: disk.format_name().to_owned(),
        file_driver: disk.file.driver.clone(),
        image: disk.image(),
        image_bytes: disk.file.virtual_bytes,
        disk_bytes: disk.format.virtual_bytes,
        qom_path: disk.frontend.qom_path.clone(),
        device: name_of(&disk.frontend),
        backend: disk.frontend.backend.clone(),
        iothread: disk.iothread.clone(),
        nodes,
        options,
        export: request.export.clone(),
        process_id,
        process: process_id.and_then(QemuProcess::of),
    }
}

/// A disk that is reached through the node `nbd`, which its QEMU was started with.
pub(crate) fn arrived(
    disk: &Disk,
    nbd: &str,
    options: DiskOptions,
    request: &AdoptionRequest,
    process_id: Option<u32>,
) -> AdoptedDisk {
    let file = node_name(&request.volume, "-file");
    let nodes = NodeNames {
        nbd: nbd.to_owned(),
        format: disk.format.name.clone(),
        format_before: disk.format.name.clone(),
        file_before: file.clone(),
        file_after: file,
    };
    adopted(disk, nodes, options, request, process_id)
}

/// A node's name from a volume's: `th-NAME` and a suffix, within QEMU's limit and letters. Names that are too long or
/// have other letters are told apart by a hash.
#[must_use]
pub fn node_name(volume: &str, suffix: &str) -> String {
    const PREFIX: &str = "th-";
    // The longest suffix is "-file"; all nodes of a volume are cut alike.
    let room = NODE_NAME_BYTES_MAX - PREFIX.len() - 5;
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-._".contains(letter);
    if volume.len() <= room && volume.chars().all(is_plain) {
        return format!("{PREFIX}{volume}{suffix}");
    }
    let kept: String =
        volume.chars().map(|letter| if is_plain(letter) { letter } else { '_' }).take(room - 9).collect();
    let hash = volume.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    format!("{PREFIX}{kept}-{hash:08x}{suffix}")
}

fn node(driver: &str, name: &str, options: &Map<String, Value>, more: &Value) -> Value {
    let mut object = options.clone();
    object.insert("driver".to_owned(), driver.into());
    object.insert("node-name".to_owned(), name.into());
    object.extend(more.as_object().cloned().unwrap_or_default());
    Value::Object(object)
}

/// The options that mean the same on every node.
fn generic_only(options: &Map<String, Value>) -> Map<String, Value> {
    const GENERIC: [&str; 4] = ["cache", "discard", "detect-zeroes", "read-only"];
    options.iter().filter(|(key, _)| GENERIC.contains(&key.as_str())).map(|(k, v)| (k.clone(), v.clone())).collect()
}

fn format_node(disk: &AdoptedDisk, file: &str) -> Value {
    // Given explicitly: no backing file, whatever the container's header says by now.
    let more = if disk.format == "qcow2" { json!({ "file": file, "backing": null }) } else { json!({ "file": file }) };
    node(&disk.format, &disk.nodes.format, &disk.options.format, &more)
}

fn set_iothread(disk: &AdoptedDisk, node: &str, like: &str) -> Option<Step> {
    // QEMU 7.2 unlocks contexts that it has not locked, and dies, in two cases. A reopen brings two contexts together
    // and fails, or it meets a child in an iothread below a parent in the main loop.
    disk.iothread.clone().map(|iothread| Step::SetIothread { node: node.to_owned(), iothread, like: like.to_owned() })
}

pub(crate) fn adoption_steps(disk: &AdoptedDisk, reconnect_seconds: u32) -> (Vec<Step>, Vec<Step>) {
    let names = &disk.nodes;
    let server = json!({
        "server": { "type": "unix", "path": disk.export.socket },
        "export": disk.export.name,
        "reconnect-delay": reconnect_seconds,
    });
    // The export's size is in bytes, QEMU's in sectors of 512.
    let size = disk.image_bytes.map(|bytes| match disk.format.as_str() {
        "raw" => ExpectedSize::Exactly(bytes),
        _ => ExpectedSize::AtLeast(bytes),
    });
    let mut steps = vec![Step::AddNode {
        node: names.nbd.clone(),
        options: node("nbd", &names.nbd, &generic_only(&disk.options.file), &server),
        size,
    }];
    let mut undo = Vec::new();
    let delete = |node: &String| Step::DeleteNode { node: node.clone() };
    match disk.form {
        Form::Reopen => {
            steps.extend(set_iothread(disk, &names.nbd, &names.format));
            steps.push(Step::TakeLocks);
            steps.push(Step::Reopen {
                format: names.format.clone(),
                from: names.file_before.clone(),
                to: names.nbd.clone(),
                options: format_node(disk, &names.nbd),
            });
        }
        Form::Replace | Form::Direct => {
            // While a second node of the same container is opened the guest must not change it: `stop` also writes out
            // the first node's caches, and the first node is gone before `cont`.
            let pauses = disk.is_container();
            if pauses {
                steps.push(Step::Pause);
            }
            if disk.form == Form::Replace {
                let options = format_node(disk, &names.nbd);
                steps.push(Step::AddNode { node: names.format.clone(), options, size: None });
                undo.push(delete(&names.format));
            }
            steps.extend(set_iothread(disk, &names.format, &names.format_before));
            steps.push(Step::TakeLocks);
            let (from, to) = (names.format_before.clone(), names.format.clone());
            steps.push(Step::SetDrive { qom_path: disk.qom_path.clone(), from, to });
            if pauses {
                steps.push(Step::Resume);
                undo.push(Step::Resume);
            }
        }
    }
    if !names.file_before.starts_with('#') {
        steps.push(delete(&names.file_before));
    }
    undo.extend([delete(&names.nbd), Step::DropLocks]);
    (steps, undo)
}

fn release_steps(disk: &AdoptedDisk, image: &Path, driver: &str) -> (Vec<Step>, Vec<Step>) {
    let names = &disk.nodes;
    let more = json!({ "filename": image });
    let options = node(driver, &names.file_after, &disk.options.file, &more);
    // QEMU looks at a file's size when it opens it and reads zeroes past that. A container that grew between the
    // opening and the reopen would lose what was written there. With the guest stopped nothing grows.
    let pauses = disk.is_container();
    let mut steps = Vec::new();
    if pauses {
        steps.push(Step::Pause);
    }
    steps.push(Step::AddNode { node: names.file_after.clone(), options, size: None });
    let inside = if disk.form == Form::Direct { &names.nbd } else { &names.format };
    steps.extend(set_iothread(disk, &names.file_after, inside));
    steps.push(Step::DropLocks);
    if disk.form == Form::Direct {
        let (from, to) = (names.nbd.clone(), names.file_after.clone());
        steps.push(Step::SetDrive { qom_path: disk.qom_path.clone(), from, to });
    } else {
        steps.push(Step::Reopen {
            format: names.format.clone(),
            from: names.nbd.clone(),
            to: names.file_after.clone(),
            options: format_node(disk, &names.file_after),
        });
    }
    let mut undo = vec![Step::TakeLocks];
    if pauses {
        steps.push(Step::Resume);
        // Nobody reads through the old file node afterwards: the guest need not wait for that.
        undo.push(Step::Resume);
    }
    undo.push(Step::DeleteNode { node: names.file_after.clone() });
    // One without a name of its own goes with its parent.
    if !names.nbd.starts_with('#') {
        steps.push(Step::DeleteNode { node: names.nbd.clone() });
    }
    (steps, undo)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_names_keep_within_what_qemu_takes() {
        assert_eq!(node_name("db", "-file"), "th-db-file");
        let names =
            ["a-volume-with-a-very-long-name-1", "a-volume-with-a-very-long-name-2", "d\u{e4}tenbank", "a/b", "a b"];
        let mut seen = std::collections::HashSet::new();
        for volume in names {
            for suffix in ["", "-fmt", "-file"] {
                let name = node_name(volume, suffix);
                assert!(name.len() <= NODE_NAME_BYTES_MAX, "{name} is too long");
                assert!(name.chars().all(|letter| letter.is_ascii_alphanumeric() || "-._".contains(letter)), "{name}");
                assert!(seen.insert(name.clone()), "{name} was given twice");
            }
        }
    }
}
