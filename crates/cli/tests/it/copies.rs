//! `transhume copy`: cold disks between files and NBD servers, without a daemon.

use std::time::{Duration, Instant};

use crate::support::server::{Server, empty, text};
use crate::support::{HANG, World, same, signal, target, tool, wait};

const MIB: u64 = 1 << 20;

#[test]
fn a_disk_goes_from_a_file_to_a_server_and_comes_back_sparse_and_equal() {
    let world = World::without_daemon();
    let image = world.image("disk.img", 20 * MIB + 512, 4 << 20);
    let far = empty(&world, "far.img", 32 * MIB);
    let server = Server::nbdkit(&world, &["file", text(&far)]);
    let report = world.json(&["copy", &target(&image), "--to", &server.uri(), "--verify", "full"]);
    assert_eq!((&report["verified"], &report["bytes_total"]), (&true.into(), &(20 * MIB + 512).into()), "{report}");
    let (data, zero) = (report["bytes_copied"].as_u64().expect("a number"), report["bytes_zero"].as_u64());
    assert!(data <= 6 * MIB, "holes were copied: {report}");
    assert_eq!(zero.map(|zero| zero + data), Some(20 * MIB + 512), "{report}");

    let expected = std::fs::read(&image).expect("read");
    same_start(&std::fs::read(&far).expect("read"), &expected);
    let back = world.path("back.img");
    world.json(&["copy", &server.uri(), "--to", &target(&back), "--verify", "full"]);
    let found = std::fs::read(&back).expect("read");
    assert_eq!(found.len() as u64, 32 * MIB, "an export is copied whole");
    same_start(&found, &expected);
    let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&back).expect("it is there"));
    assert!(blocks * 512 < 12 * MIB, "holes were written");
}

fn same_start(found: &[u8], expected: &[u8]) {
    assert!(found.starts_with(expected), "what arrived is not what was sent");
    assert!(found[expected.len()..].iter().all(|byte| *byte == 0));
}

#[test]
fn between_two_servers_what_arrives_is_what_nbdcopy_brings() {
    let world = World::without_daemon();
    let source = Server::nbdkit_at(&world, "source.sock", &["--filter=delay", "pattern", "8M", "rdelay=1ms"]);
    let (ours, theirs) = (empty(&world, "ours.img", 8 * MIB), world.path("theirs.img"));
    let server = Server::nbdkit(&world, &["file", text(&ours)]);
    let report = world.json(&["copy", &source.uri(), "--to", &server.uri(), "--verify", "full"]);
    assert_eq!(report["verified"], true);
    tool("nbdcopy", &[&source.uri(), text(&theirs)]);
    same(&ours, &std::fs::read(&theirs).expect("read"));
}

#[test]
fn what_cannot_be_copied_is_refused_with_its_code_and_nothing_is_left_behind() {
    let world = World::new();
    let image = world.image("disk.img", 4 * MIB, 65536);
    let to = target(&world.path("new.img"));
    let refused = |from: &str, to: &str, code, part| world.refused(&["copy", from, "--to", to], code, part);
    refused("nbd://127.0.0.1:1/x", &to, 19, "the source");
    refused("/vm/web1.img", &to, 2, "names no backend");
    refused(&target(&image), &target(&image), 12, "");
    let full = world.image("full.img", 4 * MIB, 65536);
    refused(&target(&image), &target(&full), 10, "--overwrite");
    let server = Server::nbdkit(&world, &["memory", "1M"]);
    refused(&target(&image), &server.uri(), 11, "has 1 MiB");
    refused(&server.uri(), &server.uri(), 12, "one and the same");
    world.attach("x", &image);
    refused(&target(&image), &to, 15, "the source");
    assert!(!world.path("new.img").exists(), "a target was left behind");
    world.json(&["copy", &target(&full), "--to", &to]);
    same(&world.path("new.img"), &std::fs::read(&full).expect("read"));
}

#[test]
fn a_server_that_is_killed_in_the_middle_is_waited_for() {
    let world = World::without_daemon();
    let image = world.image("disk.img", 24 * MIB, 65536);
    let far = empty(&world, "far.img", 24 * MIB);
    let server = Server::nbdkit(&world, &["file", text(&far)]);
    let mut copying = world
        .command(&[
            "copy",
            &target(&image),
            "--to",
            &server.uri(),
            "--bandwidth",
            "8MiB/s",
            "--verify",
            "full",
            "--json",
        ])
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("runs");
    wait_until_written(&far, 4 * MIB);
    drop(server);
    std::thread::sleep(Duration::from_millis(400));
    let _server = Server::nbdkit(&world, &["file", text(&far)]);
    assert!(wait(&mut copying).success(), "the copy did not go on");
    same(&far, &std::fs::read(&image).expect("read"));
}

fn wait_until_written(file: &std::path::Path, bytes: u64) {
    let start = Instant::now();
    let written = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(file).expect("it is there")) * 512;
    while !file.exists() || written() < bytes {
        assert!(start.elapsed() < HANG, "nothing is copied");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn an_interrupted_copy_takes_back_the_file_that_it_made() {
    let world = World::without_daemon();
    let image = world.image("disk.img", 24 * MIB, 65536);
    let to = world.path("new.img");
    let mut copying = world
        .command(&["copy", &target(&image), "--to", &target(&to), "--bandwidth", "2MiB/s"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("runs");
    wait_until_written(&to, MIB);
    let said = interrupted(&mut copying);
    assert!(said.contains("new.img is removed"), "{said}");
    assert!(!to.exists(), "half of a disk was left behind");
}

/// Interrupts a copy, and gives what it says.
fn interrupted(copying: &mut std::process::Child) -> String {
    signal(copying, rustix::process::Signal::INT);
    assert_eq!(wait(copying).code(), Some(130));
    let said = copying.stderr.take().map(std::io::read_to_string);
    said.expect("it is heard").expect("it is text")
}

#[test]
fn an_interrupted_copy_says_what_it_leaves_where_nothing_can_be_taken_back() {
    let world = World::without_daemon();
    let image = world.image("disk.img", 24 * MIB, 65536);
    let begin = |to: &str, more: &[&str]| {
        let slow = ["copy", &target(&image), "--to", to, "--bandwidth", "2MiB/s"];
        let copying = world.command(&[&slow[..], more].concat()).stderr(std::process::Stdio::piped()).spawn();
        copying.expect("runs")
    };
    // Its file system is gone, for all that can be told.
    let (there, away) = (world.path("there"), world.path("away"));
    std::fs::create_dir(&there).expect("made");
    let mut copying = begin(&target(&there.join("new.img")), &[]);
    wait_until_written(&there.join("new.img"), MIB);
    std::fs::rename(&there, &away).expect("renamed");
    let said = interrupted(&mut copying);
    assert!(said.contains("is left as it is") && said.contains("is not there"), "{said}");
    assert!(away.join("new.img").exists(), "what is away was taken back");
    // Another file has its name.
    let to = world.path("new.img");
    let mut copying = begin(&target(&to), &[]);
    wait_until_written(&to, MIB);
    std::fs::rename(&image, &to).expect("renamed");
    let said = interrupted(&mut copying);
    assert!(said.contains("somebody has deleted or replaced it"), "{said}");
    std::fs::rename(&to, &image).expect("renamed");
    // One that was there before, and an export.
    std::fs::write(&to, [7; 4096]).expect("written");
    let mut copying = begin(&target(&to), &["--overwrite"]);
    wait_until_written(&to, MIB);
    let said = interrupted(&mut copying);
    assert!(said.contains("new.img is left empty"), "{said}");
    assert_eq!(std::fs::metadata(&to).expect("it is there").len(), 0);
    let far = empty(&world, "far.img", 24 * MIB);
    let server = Server::nbdkit(&world, &["file", text(&far)]);
    let mut copying = begin(&server.uri(), &[]);
    wait_until_written(&far, MIB);
    let said = interrupted(&mut copying);
    assert!(said.contains("is left as far as the copy came"), "{said}");
}
