//! Who has named a disk's format: the command line, or QEMU by a look at the disk's first bytes.
//!
//! A `-drive` without `format=` is probed. QEMU guards a disk that it has found to be raw: its guest cannot write the header of another
//! format. No node that is added later has that guard, and the next start of the VM looks again. A guest that has written a header by
//! then has QEMU open what the header names, such as another guest's image as its backing file.

use serde_json::Value;

use super::{CommandLine, Sources};
use crate::disk::{Disk, Form};
use crate::error::{Error, ErrorKind, Result};

/// Who has named the format of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FormatOrigin {
    /// The command line, whoever has added the node, or a container whose header no guest can write.
    Named,
    /// QEMU, by looking at the bytes of a raw disk.
    Probed,
    /// Nobody can say.
    Unknown,
}

impl FormatOrigin {
    /// That of `disk`.
    pub(crate) fn of(disk: &Disk, sources: &Sources) -> Self {
        // Only a `-drive` may leave the format out, and its backend has a name.
        if disk.form == Form::Direct || disk.format_name() != "raw" || disk.frontend.backend.is_empty() {
            return Self::Named;
        }
        match (&sources.command_line, disk.form) {
            (Some(line), Form::Reopen) => match named_drive(line, disk) {
                Some(drive) => Self::of_drive(drive),
                // Another node than the drive's was added to the device since.
                None => Self::Named,
            },
            (Some(line), _) => match line.drive(&disk.frontend.backend, &disk.file.filename) {
                Some(drive) => Self::of_drive(drive),
                None => Self::Unknown,
            },
            // libvirt names the format of each disk.
            (None, _) if sources.libvirt.is_some() => Self::Named,
            (None, Form::Reopen) => Self::Named,
            (None, _) => Self::Unknown,
        }
    }

    fn of_drive(drive: &serde_json::Map<String, Value>) -> Self {
        if drive.contains_key("format") || drive.contains_key("driver") { Self::Named } else { Self::Probed }
    }
}

/// The `-drive` that names the disk's format node.
fn named_drive<'a>(line: &'a CommandLine, disk: &Disk) -> Option<&'a serde_json::Map<String, Value>> {
    line.drives.iter().find(|drive| drive.get("node-name").and_then(Value::as_str) == Some(&disk.format.name))
}

/// Why a disk whose format was probed is not adopted.
pub(crate) fn is_probed(disk: &Disk) -> Error {
    let name = disk.name();
    Error::refused(format!(
        "QEMU has found out that {name} is raw by its first bytes, which the guest writes: its -drive has no format=. Start the VM \
         with format=raw there. Or adopt {name} with --format raw, and add format=raw to the drive before the VM is started again: \
         a guest could write a header that has QEMU open other files of the host"
    ))
}

/// Refuses a disk whose format nobody has named, neither its VM's configuration nor whoever asks for the adoption.
pub(crate) fn require_named(disk: &Disk, sources: &Sources, told: Option<&str>) -> Result<()> {
    let format = disk.format_name();
    match told {
        Some(told) if told != format => {
            let context = format!("QEMU has {} open as {format}, not as {told}", disk.name());
            Err(Error::new(ErrorKind::Invalid, context))
        }
        Some(_) => Ok(()),
        None if FormatOrigin::of(disk, sources) == FormatOrigin::Named => Ok(()),
        None => Err(is_probed(disk)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Frontend, Node};

    fn disk(format_node: &str, driver: &str, backend: &str) -> Disk {
        let node = |name: &str, driver: &str| Node {
            name: name.to_owned(),
            driver: driver.to_owned(),
            filename: "/img/a".to_owned(),
            ..Node::default()
        };
        let frontend = Frontend { backend: backend.to_owned(), ..Frontend::default() };
        Disk::of_nodes(frontend, node(format_node, driver), node("#block1", "file"))
    }

    fn sources(words: &[&str]) -> Sources {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        Sources { command_line: Some(CommandLine::parse(&words)), ..Sources::default() }
    }

    #[test]
    fn a_drive_without_a_format_is_probed_and_one_that_names_it_is_not() {
        let probed: [(&[&str], &str); 5] = [
            (&["-drive", "file=/img/a,if=virtio"], "virtio0"),
            (&["-drive", "file=/img/a,if=none,id=d0"], "d0"),
            (&["-hda", "/img/a"], "ide0-hd0"),
            (&["/img/a"], "ide0-hd0"),
            (&["-drive", "file.driver=file,file.filename=/img/a,id=d0"], "d0"),
        ];
        for (words, backend) in probed {
            let error = require_named(&disk("#block0", "raw", backend), &sources(words), None).expect_err("it was not");
            assert!(error.to_string().contains("--format raw"), "{words:?}: {error}");
            require_named(&disk("#block0", "raw", backend), &sources(words), Some("raw")).expect("it was told");
            // No guest writes the header of the container that it is in.
            require_named(&disk("#block0", "qcow2", backend), &sources(words), None).expect("a container");
        }
        for words in [
            &["-drive", "file=/img/a,if=none,id=d0,format=raw"],
            &["-drive", "driver=raw,file.driver=file,file.filename=/img/a,id=d0"],
        ] {
            require_named(&disk("#block0", "raw", "d0"), &sources(words), None).expect("it is named");
        }
    }

    #[test]
    fn what_no_command_line_tells_is_taken_for_probed_unless_a_node_was_added_under_a_name() {
        let hot_plugged = disk("#block0", "raw", "d1");
        require_named(&hot_plugged, &sources(&["-drive", "file=/img/b,id=d0,format=raw"]), None)
            .expect_err("who knows");
        require_named(&hot_plugged, &Sources::default(), None).expect_err("who knows");
        require_named(&disk("th-web-fmt", "raw", "d0"), &sources(&["-drive", "file=/img/a,id=d0"]), None)
            .expect("ours");
        let own_name = sources(&["-drive", "file=/img/a,id=d0,node-name=n0"]);
        require_named(&disk("n0", "raw", "d0"), &own_name, None)
            .expect_err("a drive with a node's name is probed, too");
    }

    #[test]
    fn another_format_than_qemus_is_refused() {
        let error = require_named(&disk("n0", "raw", ""), &sources(&[]), Some("qcow2")).expect_err("it was taken");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
}
