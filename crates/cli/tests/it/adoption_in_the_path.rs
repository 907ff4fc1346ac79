//! Being in a disk's path changes nothing: its guest's last sector is written as before, and a snapshot that another program takes
//! meanwhile can be opened afterwards.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::qemu::Qemu;
use crate::support::{World, tool};
use serde_json::{Value, json};

/// How long the odd image is: no whole sectors.
const ODD_BYTES: u64 = (4 << 20) + 100;
/// The same as QEMU shows it to a guest.
const SHOWN_BYTES: u64 = (4 << 20) + 512;

/// Has the guest of `qemu` do what `qemu-io` understands, and gives what went wrong.
fn guest_does(qemu: &Qemu, what: &str) -> Value {
    let command = format!("qemu-io -d /machine/peripheral/vda/virtio-backend \"{what}\"");
    qemu.ask("human-monitor-command", json!({ "command-line": command }))
}

/// Another program takes an external snapshot of the disk into the file `over`.
fn snapshot(qemu: &Qemu, over: &Path) {
    let arguments = json!({
        "node-name": "disk0", "snapshot-file": over, "snapshot-node-name": "over0", "format": "qcow2"
    });
    qemu.ask("blockdev-snapshot-sync", arguments);
    let nodes = qemu.ask("query-named-block-nodes", json!({ "flat": true }));
    assert!(nodes.as_array().is_some_and(|nodes| nodes.iter().any(|node| node["node-name"] == "over0")), "{nodes}");
}

/// Whether somebody who opens the qcow2 file `image` reads `byte` all over its first MiB.
fn holds(image: &Path, byte: u8) -> bool {
    let read = format!("read -P {byte} 0 1M");
    let output = Command::new("qemu-io")
        .args(["-r", "-f", "qcow2", "-c", &read])
        .arg(image)
        .stdin(Stdio::null())
        .output()
        .expect("qemu-io is there: run `make setup`");
    output.status.success() && !String::from_utf8_lossy(&output.stdout).contains("failed")
}

#[test]
fn the_last_sector_of_an_odd_image_is_written_as_before_it_was_adopted() {
    let world = World::new();
    let image = world.image("disk.img", ODD_BYTES, 65536);
    let before = std::fs::read(&image).expect("read");
    let qemu = Qemu::raw(&world, &image);
    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    assert_eq!(world.json(&["volume", "show", "web1"])["size_bytes"], SHOWN_BYTES);
    assert_eq!(guest_does(&qemu, &format!("read -P 0 {ODD_BYTES} {}", SHOWN_BYTES - ODD_BYTES)), "");
    assert_eq!(guest_does(&qemu, &format!("write -P 7 {} 512", 4 << 20)), "");
    let target = world.path("new.img");
    world.json(&["move", "web1", "--to", &crate::support::target(&target), "--no-persist"]);
    assert_eq!(guest_does(&qemu, &format!("write -P 8 {} 512", 4 << 20)), "");
    world.json(&["release", "web1"]);
    assert_eq!(guest_does(&qemu, &format!("read -P 8 {} 512", 4 << 20)), "");
    drop(qemu);
    let bytes = std::fs::read(&target).expect("read");
    assert_eq!(bytes.len() as u64, SHOWN_BYTES);
    assert!(bytes[..4 << 20] == before[..4 << 20] && bytes[4 << 20..].iter().all(|byte| *byte == 8));
}

#[test]
fn an_image_of_whole_sectors_and_a_refused_one_keep_their_length() {
    let world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    let odd = world.image("odd.img", ODD_BYTES, 65536);
    let qemu = Qemu::raw(&world, &image);
    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    assert_eq!(std::fs::metadata(&image).expect("there").len(), 4 << 20);
    world.json(&["release", "web1"]);
    drop(qemu);
    world.attach("taken", &image);
    let qemu = Qemu::raw(&world, &odd);
    world.refused(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "taken"], 6, "taken");
    assert_eq!(std::fs::metadata(&odd).expect("there").len(), ODD_BYTES);
}

#[test]
fn a_snapshot_that_another_program_takes_ends_a_move_and_keeps_its_disk_until_it_is_committed() {
    let world = World::new();
    let image = world.image("disk.img", 16 << 20, 65536);
    let (over, told) = (world.path("over.qcow2"), world.path("told"));
    let hook = world.path("hook");
    std::fs::write(&hook, format!("#!/bin/sh\necho told > {}\n", told.display())).expect("written");
    tool("chmod", &["+x", &world.text("hook")]);
    let qemu = Qemu::raw(&world, &image);
    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    let to = crate::support::target(&world.path("new.img"));
    let arguments =
        ["move", "web1", "--to", &to, "--bandwidth", "4MiB/s", "--persist-hook", &world.text("hook"), "--detach"];
    let id = world.json(&arguments)["id"].as_u64().expect("a number");
    snapshot(&qemu, &over);
    qemu.write(0x77);
    let over_job = world.wait_for_job(id);
    assert_eq!(over_job["state"], "failed", "{over_job}");
    assert!(over_job["error"]["message"].as_str().is_some_and(|text| text.contains("over.qcow2")), "{over_job}");
    assert!(!told.exists(), "the configuration was told of a disk without the guest's last writes");

    // As long as it lies there nothing that relies on the volume being the disk begins, and the export that it names stays.
    world.refused(&["move", "web1", "--to", &to, "--no-persist"], 9, "over.qcow2");
    world.refused(&["release", "web1"], 9, "qemu-img rebase");
    qemu.write(0x78);
    let commit = json!({ "job-id": "back", "device": "over0" });
    qemu.ask("block-commit", commit);
    crate::support::pair::wait_until("the commit is not ready", || {
        let jobs = qemu.ask("query-block-jobs", json!({}));
        jobs[0]["ready"].as_bool().filter(|ready| *ready)
    });
    qemu.ask("job-complete", json!({ "id": "back" }));
    crate::support::pair::wait_until("the commit does not end", || {
        qemu.ask("query-block-jobs", json!({})).as_array().filter(|jobs| jobs.is_empty()).map(drop)
    });
    world.json(&["move", "web1", "--to", &to, "--no-persist"]);
    world.json(&["release", "web1"]);
    drop(qemu);
    assert!(std::fs::read(world.path("new.img")).expect("read")[..1 << 20].iter().all(|byte| *byte == 0x78));
}

#[test]
fn a_snapshot_over_a_qcow2_disk_names_the_image_after_the_release() {
    let world = World::new();
    let (image, over) = (world.path("disk.qcow2"), world.path("over.qcow2"));
    tool("qemu-img", &["create", "-q", "-f", "qcow2", &world.text("disk.qcow2"), "16M"]);
    let file = format!("driver=file,node-name=file0,filename={}", image.display());
    let format = "driver=qcow2,node-name=disk0,file=file0";
    let arguments = ["-blockdev", &file, "-blockdev", format, "-device", "virtio-blk-pci,drive=disk0,id=vda"];
    let qemu = Qemu::start(&world, &arguments);
    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    qemu.write(0x41);
    snapshot(&qemu, &over);
    assert_eq!(guest_does(&qemu, "write -P 0x42 1M 1M"), "");
    world.json(&["release", "web1"]);
    assert_eq!(guest_does(&qemu, "write -P 0x43 2M 1M"), "");
    drop(qemu);
    assert!(holds(&over, 0x41), "the snapshot cannot be opened, or lacks what is below it");
}
