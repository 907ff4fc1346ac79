//! The machine's disks: each is opened through an export at the target, and none is left behind.

use serde_json::{Value, json};

use super::blocks::{Drive, Node, Nodes, blockdev, drive_pieces};
use super::description::{Change, TargetDisk};
use super::words::{Item, flatten, json_object};
use crate::error::{Error, ErrorKind, Result};
use crate::plan::RECONNECT_SECONDS;

/// Options that mean the same on every node.
const GENERIC: [&str; 7] =
    ["node-name", "cache", "discard", "detect-zeroes", "read-only", "auto-read-only", "force-share"];

/// Bytes of a node's name, without the zero that ends it.
const NODE_NAME_BYTES_MAX: usize = 31;

const HINT: &str = "name it among the machine's disks, or start the target with a hook of your own";

/// Has every disk opened through its export, in the place of its file.
pub(super) fn point_to_exports(items: &mut [Item], disks: &[TargetDisk]) -> Result<Vec<Change>> {
    let nodes = Nodes::of(items);
    let drives = Drive::all(items);
    let (mut of_nodes, mut of_drives) = (vec![None; nodes.0.len()], vec![None; drives.len()]);
    for disk in disks {
        let (some_nodes, some_drives) = places_of(disk, &nodes, &drives);
        if some_nodes.is_empty() && some_drives.is_empty() {
            let context = format!(
                "the command line has no disk {} with the image {}: it may have come later; start the target with a \
                 hook or a description of your own",
                disk.node, disk.image
            );
            return Err(Error::new(ErrorKind::NotFound, context));
        }
        let mut is_taken = false;
        for place in some_nodes {
            is_taken |= of_nodes[place].replace(disk).is_some();
        }
        for place in some_drives {
            is_taken |= of_drives[place].replace(disk).is_some();
        }
        if is_taken {
            let context = format!("two of the machine's disks are {} on its command line", disk.node);
            return Err(Error::new(ErrorKind::Invalid, context));
        }
    }
    refuse_left_behind(&nodes, &of_nodes, &drives, &of_drives)?;
    let mut changes = Vec::new();
    for (node, disk) in nodes.0.iter().zip(of_nodes).filter_map(|(node, disk)| Some((node, disk?))) {
        changes.push(point_node(&mut items[node.item], node, disk));
    }
    for (drive, disk) in drives.iter().zip(of_drives).filter_map(|(drive, disk)| Some((drive, disk?))) {
        changes.push(point_drive(&mut items[drive.item], disk)?);
    }
    Ok(changes)
}

/// Where a disk is on the command line: by its node's or drive's name, otherwise by its image.
fn places_of(disk: &TargetDisk, nodes: &Nodes, drives: &[Drive]) -> (Vec<usize>, Vec<usize>) {
    let is_named = !disk.node.is_empty();
    let local = || (0..nodes.0.len()).filter(|place| nodes.0[*place].is_local());
    let named: Vec<usize> = local().filter(|place| is_named && nodes.is_below(*place, &disk.node)).collect();
    let drive = drives.iter().position(|drive| is_named && [&drive.id, &drive.node].contains(&&disk.node));
    if !named.is_empty() || drive.is_some() {
        return (named, drive.into_iter().collect());
    }
    let is_image = |image: &str| !disk.image.is_empty() && image == disk.image;
    let nodes = local().filter(|place| is_image(nodes.0[*place].image()) && !nodes.is_read_only(*place)).collect();
    let drives = drives.iter().enumerate().filter(|(_, drive)| is_image(&drive.image)).map(|(place, _)| place);
    (nodes, drives.collect())
}

fn refuse_left_behind(
    nodes: &Nodes,
    of_nodes: &[Option<&TargetDisk>],
    drives: &[Drive],
    of_drives: &[Option<&TargetDisk>],
) -> Result<()> {
    for (place, node) in nodes.0.iter().enumerate().filter(|(place, _)| of_nodes[*place].is_none()) {
        // An export over a unix socket is not at the target, even if it is only read.
        if node.is_local() && (node.is_nbd() || !nodes.is_read_only(place)) {
            return Err(Error::refused(format!("-blockdev {} would be left behind: {HINT}", node.show())));
        }
    }
    for (drive, disk) in drives.iter().zip(of_drives) {
        if drive.is_snapshot {
            let context = format!("-drive {}: snapshot=on writes to a temporary file of this host", drive.image);
            return Err(Error::refused(context));
        }
        if disk.is_none() && drive.writes_here() {
            return Err(Error::refused(format!("-drive {} {} would be left behind: {HINT}", drive.id, drive.image)));
        }
    }
    Ok(())
}

fn why(dropped: &[String]) -> String {
    let why = "the disk is reached through its export";
    if dropped.is_empty() { why.to_owned() } else { format!("{why}; only a file has {}", dropped.join(", ")) }
}

fn point_node(item: &mut Item, node: &Node, disk: &TargetDisk) -> Change {
    let from = item.value().to_owned();
    let is_json = json_object(&from).is_some();
    let mut root = blockdev(&from);
    let mut place = &mut root;
    for key in &node.path {
        place = place.get_mut(key).and_then(Value::as_object_mut).expect("the node was found there");
    }
    let of_file = |key: &&String| !GENERIC.contains(&key.as_str());
    let is_told = |key: &&String| {
        let identity = ["driver", "filename", "server", "export", "reconnect-delay", "path"];
        of_file(key) && !identity.contains(&key.as_str())
    };
    let dropped: Vec<String> = place.keys().filter(is_told).cloned().collect();
    place.retain(|key, _| !of_file(&key));
    let reconnect = if is_json { json!(RECONNECT_SECONDS) } else { json!(RECONNECT_SECONDS.to_string()) };
    let export = json!({
        "driver": "nbd",
        "server": { "type": "unix", "path": disk.export.socket },
        "export": disk.export.name,
        "reconnect-delay": reconnect,
    });
    place.extend(export.as_object().cloned().unwrap_or_default());
    let to = if is_json { Value::Object(root).to_string() } else { flatten(&root) };
    item.value = Some(to.clone());
    Change { option: "-blockdev".to_owned(), from, to, why: why(&dropped) }
}

fn point_drive(item: &mut Item, disk: &TargetDisk) -> Result<Change> {
    let from = item.show();
    let mut pieces = drive_pieces(item).expect("a drive was found there");
    if pieces.get("format").or_else(|| pieces.get("driver")).is_none() {
        // The target's QEMU would look for it in bytes that the guest has written.
        let format = disk.format.as_deref().ok_or_else(|| {
            Error::refused(format!(
                "{from}: its format is not named; start the VM with format= there, and move it then"
            ))
        })?;
        pieces.set("format", format);
    }
    if pieces.first().is_some() {
        pieces.remove_first();
    }
    let is_of_file = |key: &str| {
        let kept =
            key.strip_prefix("file.").and_then(|key| key.split('.').next()).is_some_and(|key| GENERIC.contains(&key));
        (key == "file" || key.starts_with("file.") || key == "aio") && !kept
    };
    let mut dropped = pieces.remove(is_of_file);
    dropped.retain(|key| {
        let identity = ["file", "file.driver", "file.filename", "file.export", "file.reconnect-delay"];
        !identity.contains(&key.as_str()) && !key.starts_with("file.server.")
    });
    // By this name the disk is on record. A node that QEMU names has another name in each QEMU.
    let has_name = pieces.get("node-name").is_some() || pieces.get("id") == Some(&disk.node);
    if !has_name && is_node_name(&disk.node) {
        pieces.set("node-name", &disk.node);
    }
    pieces.set("file.driver", "nbd");
    pieces.set("file.server.type", "unix");
    pieces.set("file.server.path", &disk.export.socket.display().to_string());
    pieces.set("file.export", &disk.export.name);
    pieces.set("file.reconnect-delay", &RECONNECT_SECONDS.to_string());
    *item = Item::new("-drive", Some(&pieces.join()));
    let from = from.strip_prefix("-drive ").unwrap_or(&from).to_owned();
    Ok(Change { option: "-drive".to_owned(), from, to: item.value().to_owned(), why: why(&dropped) })
}

/// Whether a person or a daemon may give a node this name: QEMU's own begin with `#`.
fn is_node_name(name: &str) -> bool {
    name.len() <= NODE_NAME_BYTES_MAX
        && name.starts_with(|first: char| first.is_ascii_alphabetic())
        && name.chars().all(|letter| letter.is_ascii_alphanumeric() || "-._".contains(letter))
}
