//! The options of a disk's two nodes, gathered from everywhere, so that a reopen loses none.
//!
//! `blockdev-reopen` silently resets every option that it is not given to its default. QMP reports only the cache
//! flags, `detect-zeroes` and `read-only`. The others come from our record of an earlier adoption from the same
//! process, then from its command line, then from the libvirt XML. These are compared with what QMP reports. After a
//! difference the rest cannot be trusted either: somebody has changed options since.

mod command_line;
mod known;
mod libvirt;
mod probed;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::disk::{Disk, Form};
use crate::error::{Error, ErrorKind, Result};
use crate::graph::Node;
use crate::process::QemuProcess;

pub use command_line::CommandLine;
pub(crate) use command_line::{nest, split};
pub(crate) use known::flag;
pub use libvirt::{LibvirtDisk, LibvirtDomain};

pub(crate) use libvirt::attributes;
pub(crate) use probed::{FormatOrigin, is_probed, require_named};

/// Where the options of a disk are known from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// An earlier adoption of ours.
    Remembered,
    /// The command line of the QEMU process.
    CommandLine,
    /// The libvirt XML.
    Libvirt,
    /// Only what QMP tells.
    QmpOnly,
}

/// The options of a disk, in `blockdev-add`'s form without driver, names and children.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskOptions {
    /// Those of the format node; of no meaning where there is none.
    pub format: Map<String, Value>,
    /// Those of the file node.
    pub file: Map<String, Value>,
    /// Where they are known from.
    pub origin: Origin,
    /// What is not known or not understood, by name.
    pub unknown: Vec<String>,
}

/// What we gave a disk's nodes at an earlier release.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Remembered {
    /// The format node's name (the file node's, where there is no format node).
    pub node: String,
    /// The image's path.
    pub image: String,
    /// Its options.
    pub options: DiskOptions,
    /// The QEMU that it was given to: another one may have a node of that name with other options.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<QemuProcess>,
}

/// Everything that may know the options of a VM's disks.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The command line of the QEMU process.
    pub command_line: Option<CommandLine>,
    /// The libvirt domain.
    pub libvirt: Option<LibvirtDomain>,
    /// Earlier adoptions.
    pub remembered: Vec<Remembered>,
    /// QEMU's process, if it is known: what was remembered of another one does not count.
    pub process: Option<QemuProcess>,
}

type Found = (Map<String, Value>, Map<String, Value>, Vec<String>);

impl DiskOptions {
    /// Gathers the options of `disk`.
    #[must_use]
    pub fn gather(disk: &Disk, sources: &Sources) -> Self {
        let is_of_disk = |known: &&Remembered| known.node == disk.format.name && known.image == disk.file.filename;
        let is_of_process = |known: &&Remembered| known.process.is_some() && known.process == sources.process;
        let mut remembered = sources.remembered.iter().rev().filter(is_of_disk);
        if let Some(known) = remembered.find(is_of_process) {
            let options = &known.options;
            let found = (options.format.clone(), options.file.clone(), options.unknown.clone());
            return Self::reconcile(disk, found, Origin::Remembered);
        }
        if let Some(found) = sources.command_line.as_ref().and_then(|line| from_command_line(disk, line)) {
            return Self::reconcile(disk, found, Origin::CommandLine);
        }
        let libvirt = sources.libvirt.as_ref().and_then(|domain| domain.disk(&disk.file.filename));
        if let Some(found) = libvirt.map(LibvirtDisk::options) {
            return Self::reconcile(disk, direct(disk, found), Origin::Libvirt);
        }
        let is_unbound = |known: &&Remembered| known.process.is_none();
        if let Some(known) = sources.remembered.iter().rev().filter(is_of_disk).find(is_unbound) {
            let options = &known.options;
            let mut unknown = options.unknown.clone();
            unknown.push("those remembered of a disk whose VM was not noted".to_owned());
            return Self::reconcile(disk, (options.format.clone(), options.file.clone(), unknown), Origin::Remembered);
        }
        let mut unknown: Vec<String> = ["discard", "aio", "locking"].map(str::to_owned).to_vec();
        if disk.format_name() == "qcow2" {
            unknown.extend(["cache-size", "l2-cache-size", "refcount-cache-size", "pass-discard-*"].map(str::to_owned));
        }
        if disk.form == Form::Reopen && disk.format_name() == "raw" {
            unknown.extend(["offset", "size"].map(str::to_owned));
        }
        let elsewhere = sources.command_line.iter().flat_map(|line| line.elsewhere.iter().cloned());
        unknown.extend(elsewhere.map(|place| format!("what {place} says")));
        Self::reconcile(disk, (Map::new(), Map::new(), unknown), Origin::QmpOnly)
    }

    /// The options of a disk on an export, as the command line of its QEMU says. Nothing if that has it wait for an
    /// export that is away.
    ///
    /// # Errors
    /// Why the command line does not tell.
    pub(crate) fn of_unawaited_export(disk: &Disk, line: &CommandLine) -> std::result::Result<Option<Self>, String> {
        let named = |node: &str| line.blockdev(node).ok_or_else(|| format!("{node} is not on QEMU's command line"));
        let file = named(&disk.file.name)?;
        if file.contains_key("reconnect-delay") {
            return Ok(None);
        }
        let (format, unknown) = match disk.form {
            Form::Reopen => known::typed(&disk.format.driver, named(&disk.format.name)?),
            Form::Direct => (Map::new(), Vec::new()),
            Form::Replace => return Err("it has no format node with a name".to_owned()),
        };
        Ok(Some(Self::reconcile(disk, (format, file.clone(), unknown), Origin::CommandLine)))
    }

    /// Fails if something would be lost.
    ///
    /// # Errors
    /// `OptionLoss`, naming what.
    pub fn require_complete(&self) -> Result<()> {
        if self.unknown.is_empty() {
            return Ok(());
        }
        let context = format!(
            "options that a reopen would lose are not known: {} (--accept-option-loss goes on without them)",
            self.unknown.join(", ")
        );
        Err(Error::new(ErrorKind::OptionLoss, context))
    }

    fn reconcile(disk: &Disk, found: Found, origin: Origin) -> Self {
        let (mut format, mut file, mut unknown) = found;
        if disk.form != Form::Direct {
            reconcile_node(&mut format, &disk.format, &mut unknown);
        }
        reconcile_node(&mut file, &disk.file, &mut unknown);
        Self { format, file, origin, unknown }
    }
}

/// Puts what QMP tells into the options, and notes where they said something else.
fn reconcile_node(options: &mut Map<String, Value>, node: &Node, unknown: &mut Vec<String>) {
    let mut note = |name: &str, said: &Value, is: &Value| {
        if !said.is_null() && said != is {
            unknown.push(format!("those changed since the start ({}: {name} was {said}, is {is})", node.name));
        }
    };
    let cache = json!({ "direct": node.cache_direct, "no-flush": node.cache_no_flush });
    let said = options.get("cache").cloned().unwrap_or_default();
    note("cache.direct", &said["direct"], &cache["direct"]);
    note("cache.no-flush", &said["no-flush"], &cache["no-flush"]);
    let detect_zeroes = Value::from(node.detect_zeroes.clone());
    note("detect-zeroes", options.get("detect-zeroes").unwrap_or(&Value::Null), &detect_zeroes);
    options.insert("cache".to_owned(), cache);
    options.insert("detect-zeroes".to_owned(), detect_zeroes);
    options.insert("read-only".to_owned(), node.read_only.into());
}

fn from_command_line(disk: &Disk, line: &CommandLine) -> Option<Found> {
    let image = disk.file.filename.as_str();
    match disk.form {
        Form::Replace => {
            if !disk.frontend.backend.is_empty() {
                return from_drive(disk, line.drive(&disk.frontend.backend, image)?);
            }
            None
        }
        Form::Direct => {
            let given = line.blockdev(&disk.file.name)?;
            let is_same = given.get("filename").and_then(Value::as_str) == Some(image);
            let (file, unknown) = known::typed(&disk.file.driver, given);
            is_same.then_some((Map::new(), file, unknown))
        }
        Form::Reopen => {
            let given = line.blockdev(&disk.format.name)?;
            let below = match given.get("file")? {
                Value::String(name) if *name == disk.file.name => line.blockdev(name)?,
                Value::Object(inline) => &inherited(inline.clone()),
                _ => return None,
            };
            let is_same = below.get("filename").and_then(Value::as_str) == Some(image);
            let (format, mut unknown) = known::typed(&disk.format.driver, given);
            let (file, more) = known::typed(&disk.file.driver, below);
            unknown.extend(more);
            is_same.then_some((format, file, unknown))
        }
    }
}

/// A file node that is given within its format node discards unless it is told not to: QEMU leaves that to the format.
fn inherited(mut file: Map<String, Value>) -> Map<String, Value> {
    file.entry("discard").or_insert_with(|| "unmap".into());
    file
}

/// Options of `-drive` that the device's backend keeps, or that say which device it is.
const OF_THE_BACKEND: [&str; 18] = [
    "if",
    "id",
    "index",
    "bus",
    "unit",
    "media",
    "format",
    "driver",
    "werror",
    "rerror",
    "serial",
    "addr",
    "group",
    "stats-account-invalid",
    "stats-account-failed",
    "stats-intervals",
    "throttling",
    "boot",
];

fn from_drive(disk: &Disk, drive: &Map<String, Value>) -> Option<Found> {
    if command_line::drive_image(drive)? != disk.file.filename {
        return None;
    }
    let mut unknown = Vec::new();
    let mut format = Map::new();
    let mut file = inherited(drive.get("file").and_then(Value::as_object).cloned().unwrap_or_default());
    for (key, value) in drive {
        let text = value.as_str().unwrap_or_default();
        let is_throttle = ["bps", "iops"].iter().any(|name| key.starts_with(name));
        match key.as_str() {
            "file" => {}
            key if OF_THE_BACKEND.contains(&key) || is_throttle => {}
            // The short names of the cache modes; QMP tells which flags they became.
            "cache" if value.is_string() => {}
            "aio" => drop(file.insert("aio".to_owned(), value.clone())),
            "discard" => {
                let discard = if ["unmap", "on"].contains(&text) { "unmap" } else { "ignore" };
                format.insert(key.clone(), discard.into());
            }
            "readonly" => {}
            "copy-on-read" | "snapshot" if known::flag(value) == Some(false.into()) => {}
            _ => drop(format.insert(key.clone(), value.clone())),
        }
    }
    let (format, more) = known::typed(&disk.format.driver, &format);
    unknown.extend(more);
    let (file, more) = known::typed(&disk.file.driver, &file);
    unknown.extend(more);
    Some((format, file, unknown))
}

/// Without a format node its options are the file node's.
fn direct(disk: &Disk, (format, mut file, unknown): Found) -> Found {
    if disk.form == Form::Direct {
        for (key, value) in format {
            file.entry(key).or_insert(value);
        }
        return (Map::new(), file, unknown);
    }
    (format, file, unknown)
}
