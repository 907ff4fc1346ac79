//! `adopt --check`: every disk of a VM, and whether it can be adopted.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::disk::{Disk, Form, name_of};
use crate::error::Result;
use crate::graph::Graph;
use crate::options::{DiskOptions, FormatOrigin, Origin, Sources, is_probed};
use crate::process::require_open;
use crate::qmp::Qmp;

/// Whether a disk can be adopted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "kebab-case")]
pub enum Adoptability {
    /// It can.
    Adoptable {
        /// How.
        form: Form,
        /// Where its options are known from.
        options_from: Origin,
    },
    /// It can, with `--accept-option-loss`.
    LosesOptions {
        /// How.
        form: Form,
        /// What would be lost.
        unknown: Vec<String>,
    },
    /// It cannot.
    Refused {
        /// Why, and what to do.
        reason: String,
    },
    /// It goes through Transhume already.
    Adopted,
}

/// One disk of a VM. Its `Display` is one line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskReport {
    /// What `--node` takes.
    pub node: String,
    /// The guest's device, as a person calls it.
    pub device: String,
    /// The device's type.
    pub device_type: String,
    /// The image, or what QEMU shows instead.
    pub image: PathBuf,
    /// Its format.
    pub format: String,
    /// The disk's size, as the guest sees it.
    pub bytes: Option<u64>,
    /// The iothread that serves it.
    pub iothread: Option<String>,
    /// The throttle group that it is in.
    pub throttle_group: Option<String>,
    /// Whether QEMU has found out its format by its bytes, which the guest writes.
    pub is_probed: bool,
    /// Whether it can be adopted.
    pub verdict: Adoptability,
}

impl fmt::Display for DiskReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} ({}, {} {}): ", self.node, self.device, self.format, self.image.display())?;
        match &self.verdict {
            Adoptability::Adoptable { form, .. } => write!(out, "can be adopted, by {form}"),
            Adoptability::LosesOptions { unknown, .. } => {
                write!(out, "can be adopted with --accept-option-loss only; not known: {}", unknown.join(", "))
            }
            Adoptability::Refused { reason } => write!(out, "cannot be adopted: {reason}"),
            Adoptability::Adopted => write!(out, "is adopted already"),
        }
    }
}

/// Reports every disk of a VM. Changes nothing.
///
/// # Errors
/// What QMP says; a disk that cannot be adopted is no error.
pub async fn inventory(qmp: &Qmp, sources: &Sources) -> Result<Vec<DiskReport>> {
    let graph = Graph::read(qmp).await?;
    let mut reports = Vec::new();
    for frontend in graph.frontends.iter().filter(|frontend| frontend.root.is_some()) {
        let disk = Disk::of_frontend(qmp, &graph, frontend).await?;
        let verdict = adoptability(&disk, &graph, sources, qmp.process_id());
        reports.push(DiskReport {
            node: disk.name().to_owned(),
            device: name_of(frontend),
            device_type: disk.device_type.clone(),
            image: disk.image(),
            format: disk.format_name().to_owned(),
            bytes: disk.format.virtual_bytes,
            iothread: disk.iothread.clone(),
            throttle_group: frontend.throttle_group.clone(),
            is_probed: FormatOrigin::of(&disk, sources) == FormatOrigin::Probed,
            verdict,
        });
    }
    Ok(reports)
}

fn adoptability(disk: &Disk, graph: &Graph, sources: &Sources, pid: Option<u32>) -> Adoptability {
    if disk.file.driver == "nbd" && disk.file.name.starts_with("th-") {
        return Adoptability::Adopted;
    }
    if let Err(error) = disk.check(graph).and_then(|()| require_open(pid, &disk.image())) {
        return Adoptability::Refused { reason: error.to_string() };
    }
    if FormatOrigin::of(disk, sources) == FormatOrigin::Probed {
        return Adoptability::Refused { reason: is_probed(disk).to_string() };
    }
    let options = DiskOptions::gather(disk, sources);
    if options.unknown.is_empty() {
        Adoptability::Adoptable { form: disk.form, options_from: options.origin }
    } else {
        Adoptability::LosesOptions { form: disk.form, unknown: options.unknown }
    }
}
