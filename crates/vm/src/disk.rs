//! One disk of a VM: from the guest's device through the format down to the file, and whether it can be adopted.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::descriptor;
use crate::error::{Error, Result};
use crate::graph::{Frontend, Graph, Node, device_type, has_queue_mapping, iothread_of, no_such_disk, shares_writes};
use crate::qmp::Qmp;

/// How we get into the path of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// The format node has a name (`-blockdev`, libvirt): it is reopened over our node.
    Reopen,
    /// The format node has none (`-drive`): the device is given a new format node over ours.
    Replace,
    /// There is no format node (libvirt 10 for raw disks): the device is given our node.
    Direct,
}

impl fmt::Display for Form {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Reopen => "reopening its format node",
            Self::Replace => "giving the device a new format node",
            Self::Direct => "giving the device our node",
        })
    }
}

/// A disk as found in the graph.
#[derive(Clone, Debug)]
pub struct Disk {
    /// The guest's device.
    pub frontend: Frontend,
    /// The device's type.
    pub device_type: String,
    /// The iothread that serves it, if one does.
    pub iothread: Option<String>,
    /// The node that understands the image; the same as `file` where there is no format node.
    pub format: Node,
    /// The node that holds the image's bytes.
    pub file: Node,
    /// The nodes between device and format, top first: throttle, copy-on-read, ...
    pub filters: Vec<Node>,
    /// How it would be adopted.
    pub form: Form,
    has_queue_mapping: bool,
    shares_writes: bool,
}

/// Drivers that hold bytes themselves.
const PROTOCOLS: [&str; 2] = ["file", "host_device"];
/// Drivers that understand a container. Adoption is below them.
const FORMATS: [&str; 2] = ["raw", "qcow2"];
/// Devices that pass the guest's SCSI commands to the block device; an export takes none.
const PASS_THROUGH: [&str; 2] = ["scsi-block", "scsi-generic"];
/// Drivers that stand above a format and change nothing in it.
const FILTERS: [&str; 8] = [
    "throttle",
    "copy-on-read",
    "copy-before-write",
    "compress",
    "preallocate",
    "mirror_top",
    "commit_top",
    "backup-top",
];

impl Disk {
    /// Finds the disk `wanted`. That is the name of its format or file node, the id of its device or of its `-drive`,
    /// or the device's QOM path.
    ///
    /// # Errors
    /// `NotFound`, naming the disks that there are; and what QMP says.
    pub async fn find(qmp: &Qmp, graph: &Graph, wanted: &str) -> Result<Self> {
        let frontend = graph.frontends.iter().find(|frontend| goes_by(frontend, graph, wanted));
        let frontend = frontend.ok_or_else(|| no_such_disk(wanted, graph))?;
        Self::of_frontend(qmp, graph, frontend).await
    }

    /// The disk behind a device.
    ///
    /// # Errors
    /// `Refused` if there is nothing in the drive; and what QMP says.
    pub async fn of_frontend(qmp: &Qmp, graph: &Graph, frontend: &Frontend) -> Result<Self> {
        let empty = || Error::refused(format!("{} is empty", name_of(frontend)));
        let chain = graph.chain(frontend.root.as_deref().ok_or_else(empty)?);
        let mut file = (*chain.last().ok_or_else(empty)?).clone();
        if let Some(image) = descriptor::image_of(qmp, &file.filename).await? {
            file.filename = image.display().to_string();
        }
        let file = &file;
        let format_index = chain.iter().position(|node| FORMATS.contains(&node.driver.as_str()));
        let format = format_index.map_or(file, |index| chain[index]);
        let filters_end = format_index.unwrap_or(chain.len() - 1);
        let form = match format_index {
            None => Form::Direct,
            Some(_) if format.is_implicit() => Form::Replace,
            Some(_) => Form::Reopen,
        };
        let has_device = !frontend.qom_path.is_empty();
        let (iothread, kind, has_queue_mapping, shares_writes) = if has_device {
            let path = &frontend.qom_path;
            let (iothread, kind) = (iothread_of(qmp, path).await?, device_type(qmp, path).await?);
            (iothread, kind, has_queue_mapping(qmp, path).await?, shares_writes(qmp, path).await?)
        } else {
            (None, String::new(), false, false)
        };
        Ok(Self {
            frontend: frontend.clone(),
            device_type: kind,
            iothread,
            format: format.clone(),
            file: file.clone(),
            filters: chain[..filters_end].iter().map(|node| (*node).clone()).collect(),
            form,
            has_queue_mapping,
            shares_writes,
        })
    }

    /// A disk of two nodes, for tests of what is decided from them.
    #[cfg(test)]
    pub(crate) fn of_nodes(frontend: Frontend, format: Node, file: Node) -> Self {
        let form = if format.is_implicit() { Form::Replace } else { Form::Reopen };
        let (device_type, filters) = (String::new(), Vec::new());
        let (has_queue_mapping, shares_writes) = (false, false);
        Self { frontend, device_type, iothread: None, format, file, filters, form, has_queue_mapping, shares_writes }
    }

    /// What to call it: its format node's name, which `--node` takes.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.format.name
    }

    /// The image's path.
    #[must_use]
    pub fn image(&self) -> PathBuf {
        PathBuf::from(&self.file.filename)
    }

    /// The image's format: `raw` or `qcow2`.
    #[must_use]
    pub fn format_name(&self) -> &str {
        if self.form == Form::Direct { "raw" } else { &self.format.driver }
    }

    /// Why it is not adopted, if it is not: every reason but unknown options.
    ///
    /// # Errors
    /// `Refused`, with the reason and what to do.
    pub fn check(&self, graph: &Graph) -> Result<()> {
        let refuse = |reason: String| Err(Error::refused(reason));
        let (format, file) = (&self.format, &self.file);
        if self.frontend.qom_path.is_empty() {
            return refuse("no device of the guest uses it".to_owned());
        }
        if self.has_queue_mapping {
            return refuse("its queues are spread over several iothreads (iothread-vq-mapping)".to_owned());
        }
        if self.shares_writes {
            return refuse("its device lets others write beside it (share-rw=on), whom nobody would see".to_owned());
        }
        if PASS_THROUGH.contains(&self.device_type.as_str()) {
            return refuse(format!("its device {} passes SCSI commands through to the image", self.device_type));
        }
        if self.frontend.is_removable {
            return refuse("it is a removable medium".to_owned());
        }
        if file.driver == "nbd" {
            return refuse(format!("it is an NBD disk already ({})", file.filename));
        }
        if !PROTOCOLS.contains(&file.driver.as_str()) {
            return refuse(format!(
                "its bytes come through the driver {}; only files and block devices do",
                file.driver
            ));
        }
        if file.filename.starts_with("json:") || !file.filename.starts_with('/') {
            return refuse(format!("its image's path is not plain and absolute: {}", file.filename));
        }
        if file.filename.starts_with("/dev/fdset/") {
            return refuse("its image was passed to QEMU as an open file, whose path is not known".to_owned());
        }
        if let Some(other) = self.filters.iter().find(|node| !FILTERS.contains(&node.driver.as_str())) {
            return refuse(format!("its format is {}; only raw and qcow2 are understood", other.driver));
        }
        let expected = if self.form == Form::Direct { 1 } else { 2 };
        let depth = graph.chain(&format.name).len();
        if depth != expected {
            return refuse(format!("{depth} nodes are stacked below {}, {expected} are understood", format.name));
        }
        self.check_container(graph)?;
        if format.read_only || file.read_only {
            return refuse("it is read-only: nothing can change it, copy it".to_owned());
        }
        if self.form != Form::Reopen && !self.filters.is_empty() {
            let names: Vec<&str> = self.filters.iter().map(|node| node.driver.as_str()).collect();
            return refuse(format!("filters stand above a node without a name: {}", names.join(", ")));
        }
        if let Some(filter) = self.filters.iter().find(|node| node.driver != "throttle") {
            return refuse(format!("a filter {} stands above it: end what put it there first", filter.driver));
        }
        self.check_holders(graph)
    }

    fn check_container(&self, graph: &Graph) -> Result<()> {
        let format = &self.format;
        let backing = graph.child(&format.name, "backing");
        if format.backing_depth > 0 || backing.is_some() {
            let below = backing.map(|node| format!(" ({})", node.filename)).unwrap_or_default();
            return Err(Error::refused(format!(
                "it has a backing chain{below}, which is not moved yet: flatten it first (blockdev-stream, virsh blockpull)"
            )));
        }
        if format.is_encrypted {
            return Err(Error::refused("it is encrypted by QEMU, and its secret cannot be replayed"));
        }
        let specific = &format.format_specific;
        if specific["data-file"].is_string() {
            return Err(Error::refused("its data is in an external data file"));
        }
        if specific["corrupt"].as_bool() == Some(true) {
            return Err(Error::refused("its qcow2 container is marked corrupt: run qemu-img check"));
        }
        // A second open of the container happens only where the format node has no name.
        if self.form == Form::Replace && format.driver == "qcow2" {
            if specific["lazy-refcounts"].as_bool() == Some(true) {
                return Err(Error::refused(
                    "qcow2 with lazy refcounts behind -drive: a second open would repair it; start the VM with -blockdev",
                ));
            }
            if !format.bitmaps.is_empty() {
                return Err(Error::refused(
                    "qcow2 with persistent bitmaps behind -drive: a second open would spoil them; start with -blockdev",
                ));
            }
        }
        Ok(())
    }

    fn check_holders(&self, graph: &Graph) -> Result<()> {
        let mut own: Vec<&str> = self.filters.iter().map(|node| node.name.as_str()).collect();
        own.extend([self.format.name.as_str(), self.file.name.as_str()]);
        let jobs = graph.jobs_on(&own, &self.frontend.backend);
        if let Some(job) = jobs.first() {
            return Err(Error::refused(format!("a block job runs on it ({} {}): wait for its end", job.kind, job.id)));
        }
        let device = [self.frontend.backend.as_str(), self.frontend.qom_path.as_str()];
        for node in &own {
            let mut others = graph.holders(node).filter(|edge| {
                let is_own_node = edge.parent_type == "block-driver" && own.contains(&edge.parent.as_str());
                let id = self.frontend.device_id();
                let is_device = edge.parent_type == "block-backend"
                    && (device.contains(&edge.parent.as_str()) || id == Some(edge.parent.as_str()));
                !is_own_node && !is_device
            });
            if let Some(other) = others.next() {
                let kind = &other.parent_type;
                return Err(Error::refused(format!(
                    "something else uses {node}: {kind} {} ({})",
                    other.parent, other.name
                )));
            }
        }
        Ok(())
    }
}

fn goes_by(frontend: &Frontend, graph: &Graph, wanted: &str) -> bool {
    let is_named = frontend.backend == wanted || frontend.qom_path == wanted || frontend.device_id() == Some(wanted);
    let chain = frontend.root.as_deref().map(|root| graph.chain(root)).unwrap_or_default();
    !wanted.is_empty() && (is_named || chain.iter().any(|node| node.name == wanted))
}

/// What to call a device.
pub(crate) fn name_of(frontend: &Frontend) -> String {
    let id = frontend.device_id().map(str::to_owned);
    let backend = (!frontend.backend.is_empty()).then(|| frontend.backend.clone());
    backend.or(id).unwrap_or_else(|| frontend.qom_path.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_passes_scsi_commands_through_is_refused() {
        let node = |name: &str, driver: &str| Node {
            name: name.to_owned(),
            driver: driver.to_owned(),
            filename: "/dev/sdx".to_owned(),
            ..Node::default()
        };
        let disk = |device_type: &str| Disk {
            frontend: Frontend { qom_path: "/machine/peripheral/sda".to_owned(), ..Frontend::default() },
            device_type: device_type.to_owned(),
            iothread: None,
            format: node("sda", "host_device"),
            file: node("sda", "host_device"),
            filters: Vec::new(),
            form: Form::Direct,
            has_queue_mapping: false,
            shares_writes: false,
        };
        let graph = Graph { nodes: vec![node("sda", "host_device")], ..Graph::default() };
        disk("scsi-hd").check(&graph).expect("an ordinary disk");
        for kind in ["scsi-block", "scsi-generic"] {
            let error = disk(kind).check(&graph).expect_err(kind);
            assert!(error.to_string().contains("SCSI"), "{error}");
        }
    }
}
