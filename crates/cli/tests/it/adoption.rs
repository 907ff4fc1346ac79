//! Disks of running QEMUs through the daemon: adopted, moved, released, and what is in the way of that.

use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::qemu::Qemu;
use crate::support::{HANG, World, tool};
use serde_json::{Value, json};

#[test]
fn a_source_is_kept_when_the_configuration_still_names_it() {
    let world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    let qemu = Qemu::raw(&world, &image);
    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    let target = format!("file:{}", world.text("new.img"));
    let arguments = ["move", "web1", "--to", &target, "--persist-hook", "/bin/false", "--delete-source"];
    world.refused(&arguments, 26, "was not told");
    assert_eq!(qemu.file_of("disk0").split("://").next(), Some("nbd+unix"));
    let kept = world.json(&["jobs", "--all"])[0]["report"]["source_kept"].as_str().map(std::path::PathBuf::from);
    assert!(kept.as_deref().is_some_and(std::path::Path::exists), "the source was deleted: {kept:?}");
    world.json(&["release", "web1"]);
    assert_eq!(qemu.file_of("disk0"), world.text("new.img"));
}

#[test]
fn a_hook_that_points_a_link_at_the_target_has_the_source_deleted_and_not_the_target() {
    let world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    let (link, target, hook) = (world.path("link.img"), world.path("new.img"), world.path("hook"));
    std::os::unix::fs::symlink(&image, &link).expect("a symlink");
    let qemu = Qemu::raw(&world, &link);
    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    std::fs::write(&hook, "#!/bin/sh\nln -sfn \"$TRANSHUME_TARGET\" \"$TRANSHUME_SOURCE\"\n").expect("written");
    tool("chmod", &["+x", &world.text("hook")]);
    let to = crate::support::target(&target);
    let arguments = ["move", "web1", "--to", &to, "--persist-hook", &world.text("hook"), "--delete-source"];
    let report = world.json(&arguments);
    assert_eq!(report["state"], "done", "{report}");
    assert_eq!(std::fs::read_link(&link).expect("a symlink"), target);
    assert!(!image.exists(), "the source was not deleted");
    qemu.write(0x5a);
    world.json(&["release", "web1"]);
    drop(qemu);
    assert!(std::fs::read(&link).expect("the target is there")[..1 << 20].iter().all(|byte| *byte == 0x5a));
}

#[test]
fn a_running_disk_is_adopted_moved_and_released() {
    let world = World::new();
    let image = world.image("disk.img", 16 << 20, 65536);
    let qemu = Qemu::raw(&world, &image);
    let checked = world.json(&["adopt", "--check", "--qmp", &qemu.text()]);
    assert_eq!((&checked[0]["node"], &checked[0]["adoptable"]), (&"disk0".into(), &true.into()), "{checked}");
    assert_eq!(world.json(&["volume", "ls"]).as_array().map(Vec::len), Some(0), "a check changed something");

    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    assert!(qemu.file_of("disk0").starts_with("nbd+unix:"), "QEMU does not go through the daemon");
    qemu.write(0xa1);
    world.refused(&["volume", "detach", "web1"], 8, "disk of a running VM");

    let to = world.path("new.img");
    let target = format!("file:{}", to.display());
    for way in ["--no-persist", "--persist-hook"] {
        world.refused(&["move", "web1", "--to", &target], 25, way);
    }
    let hook = world.path("hook");
    std::fs::write(
        &hook,
        format!("#!/bin/sh\necho \"$TRANSHUME_SOURCE $TRANSHUME_TARGET\" > {}\n", world.text("told")),
    )
    .expect("written");
    tool("chmod", &["+x", &hook.display().to_string()]);
    let report =
        world.json(&["move", "web1", "--to", &target, "--verify", "full", "--persist-hook", &world.text("hook")]);
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
    let told = std::fs::read_to_string(world.path("told")).expect("the hook has run");
    assert_eq!(told.trim(), format!("{} {}", image.display(), to.display()));
    qemu.write(0xb2);

    world.json(&["release", "web1"]);
    assert_eq!(qemu.file_of("disk0"), to.display().to_string());
    qemu.write(0xc3);
    assert_eq!(world.json(&["volume", "ls"]).as_array().map(Vec::len), Some(0));
    assert!(!world.path("web1").exists(), "the socket was left behind");
    drop(qemu);
    let moved = std::fs::read(&to).expect("read");
    assert!(moved[..1 << 20].iter().all(|byte| *byte == 0xc3), "a write of the guest is lost");
    assert!(!image.exists(), "somebody could start the VM on the old disk");
}

#[test]
fn an_adopted_disk_survives_a_killed_daemon_and_is_moved_all_the_same() {
    let mut world = World::new();
    let image = world.image("disk.img", 24 << 20, 65536);
    let qemu = Qemu::raw(&world, &image);
    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    let to = world.path("new.img");
    let target = format!("file:{}", to.display());
    let job = world.json(&["move", "web1", "--to", &target, "--no-persist", "--bandwidth", "8MiB/s", "--detach"]);
    qemu.write(0x11);
    world.kill();
    world.start();
    qemu.write(0x22);
    let over = world.wait_for_job(job["id"].as_u64().expect("a number"));
    assert_eq!(over["state"], "done", "{over}");
    world.kill();
    world.start();
    qemu.write(0x33);
    world.json(&["release", "web1"]);
    assert_eq!(qemu.file_of("disk0"), to.display().to_string());
    drop(qemu);
    assert!(std::fs::read(&to).expect("read")[..1 << 20].iter().all(|byte| *byte == 0x33));
}

/// After a restart the daemon does not know what the one before has lost: it looks at the target again, and writes no zeroes into
/// the holes of a container that is advertised far longer than it is.
#[test]
fn an_interrupted_move_of_a_qcow2_disk_takes_no_more_room_than_the_disk_holds() {
    let mut world = World::new();
    let image = world.path("disk.qcow2");
    tool("qemu-img", &["create", "-q", "-f", "qcow2", &image.display().to_string(), "1G"]);
    tool("qemu-io", &["-c", "write -P 9 64M 12M", &image.display().to_string()]);
    let file = format!("driver=file,node-name=file0,filename={}", image.display());
    let format = "driver=qcow2,node-name=disk0,file=file0";
    let device = "virtio-blk-pci,drive=disk0,id=vda";
    let qemu = Qemu::start(&world, &["-blockdev", &file, "-blockdev", format, "-device", device]);
    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    let to = world.path("new.qcow2");
    let target = format!("file:{}", to.display());
    let job = world.json(&["move", "web1", "--to", &target, "--no-persist", "--bandwidth", "4MiB/s", "--detach"]);
    world.wait_until_job("nothing is copied", |job| job["progress"]["bytes_copied"].as_u64() > Some(2 << 20));
    world.kill();
    world.start();
    world.json(&["set", "web1", "--bandwidth", "0"]);
    let over = world.wait_for_job(job["id"].as_u64().expect("a number"));
    assert_eq!(over["state"], "done", "{over}\n{}", world.log());
    qemu.write(0x66);
    world.json(&["release", "web1"]);
    drop(qemu);
    tool("qemu-img", &["check", "-q", &to.display().to_string()]);
    let found = std::fs::metadata(&to).expect("there");
    let (length, allocated) = (found.len(), std::os::unix::fs::MetadataExt::blocks(&found) * 512);
    assert!(length < 64 << 20 && allocated < 64 << 20, "{length} bytes long, {allocated} allocated");
}

#[test]
fn a_qcow2_disk_is_adopted_below_its_format_and_grows_while_it_moves() {
    let world = World::new();
    let image = world.path("disk.qcow2");
    tool("qemu-img", &["create", "-q", "-f", "qcow2", &image.display().to_string(), "64M"]);
    let file = format!("driver=file,node-name=file0,filename={}", image.display());
    let format = "driver=qcow2,node-name=disk0,file=file0";
    let device = "virtio-blk-pci,drive=disk0,id=vda";
    let qemu = Qemu::start(&world, &["-blockdev", &file, "-blockdev", format, "-device", device]);
    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    qemu.write(0x44);
    let to = world.path("new.qcow2");
    let target = format!("file:{}", to.display());
    let report = world.json(&["move", "web1", "--to", &target, "--no-persist", "--verify", "full"]);
    assert_eq!(report["equal"], true, "{report}");
    qemu.write(0x55);
    let released = world.json(&["release", "web1"]);
    let stopped_us = released["vm"]["stopped_us"].as_u64().expect("the guest of a container is stopped");
    let audit = std::fs::read_to_string(world.path("state").join("audit.jsonl")).expect("the audit log");
    assert!(audit.contains(&format!("\"stopped_us\":{stopped_us}")), "{audit}");
    drop(qemu);
    tool("qemu-img", &["check", "-q", &to.display().to_string()]);
    let length = std::fs::metadata(&to).expect("there").len();
    assert!(length < 16 << 20, "the container was extended to {length} bytes");
}

#[test]
fn a_raw_disk_is_not_resized_while_it_moves_and_a_qcow2_disk_keeps_its_new_size() {
    for format in ["raw", "qcow2"] {
        let world = World::new();
        let raw = world.image("disk.raw", 16 << 20, 65536);
        let image = world.path(&format!("disk.{format}"));
        if format == "qcow2" {
            tool("qemu-img", &["convert", "-O", "qcow2", &raw.display().to_string(), &image.display().to_string()]);
        }
        let second = world.path("second");
        let monitor = format!("unix:{},server=on,wait=off", second.display());
        let file = format!("driver=file,node-name=file0,filename={}", image.display());
        let top = format!("driver={format},node-name=disk0,file=file0");
        let device = "virtio-blk-pci,drive=disk0,id=vda";
        let mut qemu =
            Qemu::start(&world, &["-qmp", &monitor, "-blockdev", &file, "-blockdev", &top, "-device", device]);
        world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
        // The daemon watches its monitor while the disk moves.
        qemu.monitor = second;
        let to = world.path(&format!("new.{format}"));
        let target = format!("file:{}", to.display());
        let arguments = ["move", "web1", "--to", &target, "--no-persist", "--verify", "full"];
        let job = world.json(&[&arguments[..], &["--bandwidth", "8MiB/s", "--detach"]].concat());
        let resized = qemu.ask("block_resize", json!({ "node-name": "disk0", "size": 96 << 20 }));
        assert_eq!(resized.is_object(), format == "qcow2", "{format}: {resized}");
        let over = world.wait_for_job(job["id"].as_u64().expect("a number"));
        assert_eq!((&over["state"], &over["report"]["equal"]), (&"done".into(), &true.into()), "{over}");
        qemu.write(0x66);
        world.json(&["release", "web1"]);
        drop(qemu);
        let told = tool("qemu-img", &["info", "--output=json", "-f", format, &to.display().to_string()]);
        let told: Value = serde_json::from_str(&told).expect("JSON");
        let size = if format == "raw" { 16 << 20 } else { 96 << 20 };
        assert_eq!(told["virtual-size"], size, "{format}");
    }
}

#[test]
fn monitors_that_are_dead_owned_or_of_a_disk_that_cannot_be_adopted_are_refused() {
    let world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    let adopt = |monitor: &str, node: &str, code: i32, part: &str| {
        world.refused(&["adopt", "--qmp", monitor, "--node", node, "--name", "web1"], code, part);
    };
    adopt(&world.text("nobody"), "disk0", 21, "no such socket");
    let qemu = Qemu::raw(&world, &image);
    adopt(&qemu.text(), "disk9", 23, "disk9");
    let owner = UnixStream::connect(&qemu.monitor).expect("connects");
    adopt(&qemu.text(), "disk0", 22, &format!("{}", std::process::id()));
    drop(owner);
    assert_eq!(qemu.file_of("disk0"), image.display().to_string());
    let monitor = qemu.text();
    drop(qemu);
    adopt(&monitor, "disk0", 21, "dead");
    assert_eq!(world.json(&["volume", "ls"]).as_array().map(Vec::len), Some(0));
    assert!(!world.path("web1").exists());
}

#[test]
fn a_disk_whose_vm_has_died_is_moved_and_released_cold() {
    let world = World::new();
    let image = world.image("disk.img", 16 << 20, 65536);
    let qemu = Qemu::raw(&world, &image);
    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    let to = world.path("new.img");
    let target = format!("file:{}", to.display());
    let job = world.json(&["move", "web1", "--to", &target, "--no-persist", "--bandwidth", "8MiB/s", "--detach"]);
    drop(qemu);
    let over = world.wait_for_job(job["id"].as_u64().expect("a number"));
    assert_eq!(over["state"], "done", "{over}");
    world.json(&["release", "web1"]);
    assert_eq!(world.json(&["volume", "ls"]).as_array().map(Vec::len), Some(0));
    let kept = world.files("disk.img.moved-").pop().expect("kept");
    assert!(std::fs::read(kept).expect("read") == std::fs::read(&to).expect("read"));
}

#[test]
fn the_daemon_is_killed_while_it_adopts_and_releases_and_the_vm_is_always_in_one_piece() {
    let mut world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    let qemu = Qemu::raw(&world, &image);
    let direct = image.display().to_string();
    let names = |world: &World| world.json(&["volume", "ls"]).as_array().map_or(0, Vec::len);
    for round in 0..12_u64 {
        let adopting = world.command(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
        kill_during(&mut world, adopting, round * 7 % 40);
        let is_adopted = settle(&world, &qemu, &direct);
        if !is_adopted {
            assert_eq!(names(&world), 0, "round {round}");
            world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
        }
        qemu.write(round as u8 + 1);
        let releasing = world.command(&["release", "web1"]);
        kill_during(&mut world, releasing, round * 5 % 40);
        if settle(&world, &qemu, &direct) {
            world.json(&["release", "web1"]);
        }
        assert_eq!((names(&world), qemu.file_of("disk0")), (0, direct.clone()), "round {round}");
        qemu.write(round as u8 + 101);
    }
    drop(qemu);
    assert!(std::fs::read(&image).expect("read")[..1 << 20].iter().all(|byte| *byte == 112));
}

/// Kills the daemon so many milliseconds after the command was begun, and starts it again.
fn kill_during(world: &mut World, mut command: Command, milliseconds: u64) {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("runs");
    std::thread::sleep(Duration::from_millis(milliseconds));
    world.kill();
    crate::support::wait(&mut child);
    world.start();
}

/// Waits until the volume is adopted (true) or gone (false), and QEMU's graph says the same.
fn settle(world: &World, qemu: &Qemu, direct: &str) -> bool {
    let start = Instant::now();
    loop {
        let volumes = world.json(&["volume", "ls"]);
        let is_there = volumes.as_array().is_some_and(|volumes| !volumes.is_empty());
        let is_direct = qemu.file_of("disk0") == direct;
        if !is_there && is_direct {
            return false;
        }
        if is_there && !is_direct && volumes[0]["vm"]["state"] == "adopted" {
            return true;
        }
        assert!(start.elapsed() < HANG, "nothing settles: {volumes}, direct {is_direct}\n{}", world.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_disk_is_reached_as_its_vm_reached_it_wherever_it_moves() {
    for (more, cache) in [("", ",cache=page"), (",cache.direct=on", "")] {
        let world = World::new();
        let image = world.image("disk.img", 4 << 20, 65536);
        let qemu = Qemu::raw_with(&world, &image, more);
        world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
        let backend = |world: &World| world.json(&["volume", "show", "web1"])["backend"].as_str().map(str::to_owned);
        assert_eq!(backend(&world), Some(format!("file:{}{cache}", image.display())));
        let to = format!("file:{}", world.text("new.img"));
        world.json(&["move", "web1", "--to", &to, "--no-persist"]);
        assert_eq!(backend(&world), Some(format!("{to}{cache}")));
        let to = format!("file:{}", world.text("last.img"));
        world.json(&["move", "web1", "--to", &format!("{to},cache=auto"), "--no-persist"]);
        assert_eq!(backend(&world), Some(to), "what the user said did not count");
        qemu.write(0x77);
        world.json(&["release", "web1"]);
    }
}

#[test]
fn a_check_of_several_vms_tells_of_every_disk() {
    let (world, other) = (World::new(), World::without_daemon());
    let first = Qemu::raw(&world, &world.image("disk.img", 4 << 20, 65536));
    let mut arguments = Vec::new();
    for number in 0..2 {
        let image = other.image(&format!("{number}.img"), 4 << 20, 65536);
        arguments
            .extend(["-blockdev".to_owned(), format!("driver=file,node-name=f{number},filename={}", image.display())]);
        arguments.extend(["-blockdev".to_owned(), format!("driver=raw,node-name=d{number},file=f{number}")]);
        arguments.extend(["-device".to_owned(), format!("virtio-blk-pci,drive=d{number},id=v{number}")]);
    }
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let second = Qemu::start(&other, &arguments);
    let checked = world.json(&["adopt", "--check", "--qmp", &first.text(), "--qmp", &second.text()]);
    let told: Vec<(String, &str)> = checked
        .as_array()
        .expect("a list")
        .iter()
        .map(|disk| (disk["vm"].to_string(), disk["node"].as_str().expect("text")))
        .collect();
    let is_told = |vm: &Qemu, node: &str| told.iter().any(|(of, is)| of.contains(&vm.text()) && *is == node);
    assert!(told.len() == 3, "{told:?}");
    assert!(is_told(&first, "disk0") && is_told(&second, "d0") && is_told(&second, "d1"), "{told:?}");

    // One that is dead does not keep the others from being told of.
    let dead = world.text("nobody");
    let arguments = ["adopt", "--check", "--qmp", &dead, "--qmp", &first.text()];
    world.refused(&arguments, 21, "no such socket");
    let words = String::from_utf8(world.run(&arguments).stdout).expect("text");
    assert!(words.contains("node disk0") && words.contains(&format!("{dead}\n    not looked at: ")), "{words}");
    let output = world.run(&[&arguments[..], &["--json"]].concat());
    let disks: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    assert_eq!(disks.as_array().map(Vec::len), Some(2), "{disks}");

    // Neither does one that cannot be adopted, and the exit code tells.
    world.json(&["adopt", "--qmp", &first.text(), "--node", "disk0", "--name", "web1"]);
    let arguments = ["adopt", "--check", "--qmp", &first.text(), "--qmp", &second.text()];
    world.refused(&arguments, 23, "1 of 3 disks cannot be adopted");
    world.json(&["release", "web1"]);
}

#[test]
fn the_three_commands_of_the_readme_move_a_running_disk() {
    let world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    let qemu = Qemu::raw(&world, &image);
    std::fs::create_dir(world.path("new")).expect("created");
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md");
    let readme = std::fs::read_to_string(readme).expect("the README is there");
    let commands: Vec<&str> = readme.lines().filter_map(|line| line.strip_prefix("    transhume ")).collect();
    assert_eq!(commands.len(), 3, "{commands:?}");
    for command in commands {
        let here = command.replace("/run/qemu/web1.qmp", &qemu.text()).replace("/mnt/new", &world.text("new"));
        world.json(&here.split_whitespace().collect::<Vec<_>>());
    }
    assert_eq!(qemu.file_of("disk0"), world.text("new/web1.img"));
    qemu.write(0x88);
    assert!(!image.exists() && world.files("disk.img.moved-").len() == 1);
}

#[test]
fn a_disk_is_given_back_on_the_block_device_that_it_was_moved_to() {
    let world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    let device = crate::support::Loop::new(&world, "device.img", 6 << 20, 512);
    let qemu = Qemu::raw(&world, &image);
    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    let size = || {
        let nodes = qemu.ask("query-named-block-nodes", json!({ "flat": true }));
        let disk = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == "disk0").cloned();
        disk.expect("the node")["image"]["virtual-size"].as_u64()
    };
    let report = world.json(&["move", "web1", "--to", &device.target(), "--overwrite", "--no-persist"]);
    assert!(report["notes"].to_string().contains("once released"), "{report}");
    assert_eq!(size(), Some(4 << 20), "the guest's disk changed its size");
    qemu.write(0x99);
    world.json(&["release", "web1"]);
    assert_eq!(qemu.file_of("disk0"), device.device);
    assert_eq!(size(), Some(6 << 20));
    qemu.write(0xaa);
    drop(qemu);
    assert!(device.read(0, 1 << 20).iter().all(|byte| *byte == 0xaa), "a write of the guest is lost");
}

/// A disk that moves slowly while daemon and QEMU are killed, and the VM is started on its image before the daemon is
/// back. Gives the new QEMU.
fn started_beside(world: &mut World, image: &std::path::Path, more: &str) -> Qemu {
    let qemu = Qemu::raw(world, image);
    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    let to = crate::support::target(&world.path("new.img"));
    world.json(&["move", "web1", "--to", &to, "--no-persist", "--bandwidth", "2MiB/s", "--detach"]);
    world.wait_until_job("nothing is copied", |job| job["progress"]["bytes_copied"].as_u64() > Some(1 << 20));
    world.kill();
    drop(qemu);
    let _ = std::fs::remove_file(world.path("qmp"));
    let again = Qemu::raw_with(world, image, more);
    world.start();
    again
}

#[test]
fn a_move_does_not_go_on_under_a_vm_that_was_started_on_its_image_meanwhile() {
    let mut world = World::new();
    // QEMU's locks tell of it, or, without them, what its process has open.
    for (number, more) in ["", ",locking=off"].into_iter().enumerate() {
        let image = world.image("disk.img", 16 << 20, 65536);
        let qemu = started_beside(&mut world, &image, more);
        let shown = world.json(&["volume", "show", "web1"]);
        assert_eq!(shown["state"], "down", "{number}: {shown}");
        let problem = shown["problem"].as_str().expect("it is said why");
        assert!(problem.contains("in use by a QEMU program") || problem.contains("has the image itself"), "{problem}");
        qemu.write(0x6b);
        assert!(image.exists() && world.files("disk.img.moved-").is_empty(), "{number}: the image was touched");
        drop(qemu);
        // What it has written the target lacks: all of it is copied again.
        world.terminate();
        world.start();
        let job = world.wait_until_job("the move does not go on", |job| job["state"] == "running");
        world.json(&["set", "web1", "--bandwidth", "0"]);
        let over = world.wait_for_job(job["id"].as_u64().expect("a number"));
        assert_eq!(over["state"], "done", "{over}");
        assert!(std::fs::read(world.path("new.img")).expect("read")[..1 << 20].iter().all(|byte| *byte == 0x6b));
        world.json(&["release", "web1"]);
        for file in [world.files("disk.img.moved-"), vec![world.path("new.img"), world.path("qmp")]].concat() {
            std::fs::remove_file(file).expect("removed");
        }
    }
}

#[test]
fn an_idle_disk_whose_vm_has_its_image_itself_is_not_moved_and_can_be_released() {
    let mut world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    let qemu = Qemu::raw(&world, &image);
    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    world.kill();
    drop(qemu);
    std::fs::remove_file(world.path("qmp")).expect("removed");
    let qemu = Qemu::raw_with(&world, &image, ",locking=off");
    world.start();
    let to = crate::support::target(&world.path("new.img"));
    world.refused(&["move", "web1", "--to", &to, "--no-persist"], 9, "has the image itself");
    assert!(!world.path("new.img").exists(), "a target was left behind");
    world.json(&["release", "web1"]);
    assert_eq!(world.json(&["volume", "ls"]).as_array().map(Vec::len), Some(0));
    assert_eq!(qemu.file_of("disk0"), image.display().to_string());
}

#[test]
fn a_living_vm_whose_monitor_is_away_keeps_its_disk() {
    let mut world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    let qemu = Qemu::raw(&world, &image);
    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    world.kill();
    world.start();
    // Nobody is connected: QEMU notices the end of its connection when its guest asks for something.
    let away = world.path("away");
    std::fs::rename(&qemu.monitor, &away).expect("renamed");
    world.refused(&["release", "web1"], 21, "lives");
    assert_eq!(world.json(&["volume", "show", "web1"])["vm"]["state"], "adopted");

    // Another QEMU there is not the one that has the disk.
    let other = World::without_daemon();
    let stranger = Qemu::raw(&other, &other.image("disk.img", 4 << 20, 65536));
    std::fs::rename(&stranger.monitor, &qemu.monitor).expect("renamed");
    world.refused(&["release", "web1"], 21, "another QEMU");
    drop(stranger);
    std::fs::rename(&away, &qemu.monitor).expect("renamed");
    qemu.write(0x21);
    world.json(&["release", "web1"]);
    assert_eq!(qemu.file_of("disk0"), image.display().to_string());
    qemu.write(0x22);
}

#[test]
fn nobody_but_its_own_qemu_gets_an_adopted_disk() {
    let mut world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    let qemu = Qemu::raw(&world, &image);
    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    let export = world.json(&["volume", "show", "web1"])["export"].as_str().expect("an address").to_owned();
    let stranger = |world: &World| {
        let output = Command::new("nbdinfo").args(["--size", &export]).output().expect("nbdinfo: run `make setup`");
        assert!(!output.status.success(), "another process has got the disk: {output:?}");
        world.wait_for_log("was refused its disk");
    };
    stranger(&world);
    world.terminate();
    world.start();
    stranger(&world);
    qemu.write(0x31);
    world.json(&["release", "web1"]);
    assert!(!world.path("web1").exists(), "the directory of its socket was left behind");
}

#[test]
fn an_image_that_qemu_names_and_does_not_have_open_is_refused() {
    let world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    let qemu = Qemu::raw(&world, &image);
    let secret = world.image("secret", 4 << 20, 65536);
    std::fs::rename(&secret, &image).expect("renamed");
    let arguments = ["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"];
    world.refused(&arguments, 23, "does not have that file open");
    assert_eq!(world.json(&["volume", "ls"]).as_array().map(Vec::len), Some(0));
}
