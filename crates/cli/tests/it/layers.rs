//! Layers of a volume: snapshots that are taken, removed, reverted to and moved under load, and limits.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::support::load::Load;
use crate::support::{HANG, World, has_copied, same, target, tool};

/// The names of a volume's snapshots, the oldest first.
fn snapshots(world: &World) -> Vec<String> {
    let layers = world.json(&["volume", "snapshot", "ls", "x"]);
    let layers = layers.as_array().expect("a list").clone();
    layers.iter().map(|layer| layer["name"].as_str().expect("a name").to_owned()).collect()
}

fn wait_until_removed(world: &World, name: &str) {
    let start = Instant::now();
    while snapshots(world).iter().any(|found| found == name) {
        assert!(start.elapsed() < HANG, "snapshot {name} is not removed\n{}", world.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What a client reads from beginning to end.
fn contents(world: &World, uri: &str) -> Vec<u8> {
    let copy = world.path("contents");
    tool("qemu-img", &["convert", "-f", "raw", "-O", "raw", uri, copy.to_str().expect("text")]);
    std::fs::read(&copy).expect("read")
}

fn layer_files(world: &World, image: &str) -> Vec<PathBuf> {
    world.files(&format!(".{image}.layer.overlay-"))
}

#[test]
fn snapshots_come_and_go_under_load_in_any_order() {
    let world = World::new();
    // Neither a multiple of a chunk nor of a block.
    let image = world.image("disk.img", (24 << 20) + 1536, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 300);
    for name in ["first", "second", "third"] {
        load.goes_on();
        world.run(&["volume", "snapshot", "add", "x", name]);
    }
    assert_eq!(snapshots(&world), ["first", "second", "third"]);
    assert_eq!(layer_files(&world, "disk.img").len(), 3);
    load.goes_on();
    world.refused(&["volume", "snapshot", "add", "x", "second"], 6, "has a snapshot second already");
    world.refused(&["volume", "detach", "x"], 8, "has snapshots");
    // The one in the middle, the one that the guest writes to, and the last one.
    for name in ["second", "third", "first"] {
        let output = world.run(&["volume", "snapshot", "rm", "x", name]);
        assert!(output.status.success(), "{}\n{}", String::from_utf8_lossy(&output.stderr), world.log());
        assert!(!snapshots(&world).iter().any(|found| found == name));
        load.goes_on();
    }
    let expected = load.finish();
    assert_eq!(layer_files(&world, "disk.img"), Vec::<PathBuf>::new());
    world.json(&["volume", "detach", "x"]);
    same(&image, &expected);
}

#[test]
fn a_volume_is_reverted_to_what_it_was() {
    let world = World::new();
    let image = world.image("disk.img", 8 << 20, 65536);
    let before = std::fs::read(&image).expect("read");
    let elsewhere = world.path("elsewhere");
    std::fs::create_dir(&elsewhere).expect("made");
    let uri = world.attach("x", &image);
    world.json(&["volume", "snapshot", "add", "x", "first", "--at", elsewhere.to_str().expect("text")]);
    let load = Load::start(&uri, &image, 310);
    load.goes_on();
    world.refused(&["volume", "snapshot", "revert", "x"], 8, "connected to x");
    let between = load.finish();
    assert_eq!(layer_files(&world, "disk.img"), Vec::<PathBuf>::new(), "it lies elsewhere");
    assert_eq!(std::fs::read(&image).expect("read"), before, "a snapshot was written to");
    world.json(&["volume", "snapshot", "add", "x", "second"]);
    assert!(contents(&world, &uri) == between, "a snapshot has changed what the guest reads");
    let load = Load::start(&uri, &world.path("contents"), 311);
    load.goes_on();
    drop(load.finish());
    world.refused(&["volume", "snapshot", "revert", "x", "first"], 8, "newer snapshots than first: second");
    world.json(&["volume", "snapshot", "revert", "x", "second"]);
    assert!(contents(&world, &uri) == between, "not what it was at the second snapshot");
    world.json(&["volume", "snapshot", "revert", "x", "first", "--discard-newer"]);
    assert_eq!(snapshots(&world), ["first"]);
    assert!(contents(&world, &uri) == before, "not what it was at the first snapshot");
    world.refused(&["volume", "snapshot", "rm", "x", "second"], 5, "has no snapshot second");
    world.run(&["volume", "snapshot", "rm", "x", "first"]);
    assert_eq!(std::fs::read_dir(&elsewhere).expect("listed").count(), 0);
    world.json(&["volume", "detach", "x"]);
    same(&image, &before);
}

#[test]
fn a_revert_that_is_killed_leaves_what_was_or_what_is_asked_for() {
    let mut world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    let before = std::fs::read(&image).expect("read");
    let uri = world.attach("x", &image);
    world.json(&["volume", "snapshot", "add", "x", "first"]);
    let mut reverted = [0, 0];
    for round in 0..12_u64 {
        tool("qemu-io", &["-f", "raw", "-c", &format!("write -P {} 64k 128k", round + 1), "-c", "flush", &uri]);
        let written = contents(&world, &uri);
        assert!(written != before, "nothing was written");
        // It may be killed while it answers.
        let mut reverting = world.command(&["volume", "snapshot", "revert", "x"]).spawn().expect("it starts");
        std::thread::sleep(Duration::from_millis(round * 3));
        world.kill();
        let _ = reverting.wait();
        world.start();
        let found = contents(&world, &uri);
        let is_reverted = found == before;
        assert!(is_reverted || found == written, "round {round}: neither what was nor what was asked for");
        reverted[usize::from(is_reverted)] += 1;
        assert_eq!(snapshots(&world), ["first"]);
    }
    println!("{} as they were, {} reverted", reverted[0], reverted[1]);
    // What a death has left of files that nobody reads is not in the way.
    world.json(&["volume", "snapshot", "revert", "x"]);
    world.run(&["volume", "snapshot", "rm", "x", "first"]);
    world.json(&["volume", "detach", "x"]);
    same(&image, &before);
}

#[test]
fn the_daemon_is_killed_while_snapshots_come_and_go() {
    let mut world = World::new();
    let image = world.image("disk.img", 16 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 320);
    let mut delay = 41_u64;
    for round in 0..6 {
        load.goes_on();
        let name = format!("s{round}");
        // It may be killed while it answers.
        let mut adding = world.command(&["volume", "snapshot", "add", "x", &name]).spawn().expect("it starts");
        delay = delay * 37 % 97;
        std::thread::sleep(Duration::from_millis(delay));
        world.kill();
        let _ = adding.wait();
        world.start();
        let there = snapshots(&world);
        if let Some(oldest) = there.first().filter(|_| round % 2 == 1) {
            let _ = world.run(&["volume", "snapshot", "rm", "x", oldest, "--detach"]);
            std::thread::sleep(Duration::from_millis(delay));
            world.kill();
            world.start();
            wait_until_removed(&world, oldest);
        }
    }
    load.goes_on();
    for name in snapshots(&world) {
        let output = world.run(&["volume", "snapshot", "rm", "x", &name]);
        assert!(output.status.success(), "{}\n{}", String::from_utf8_lossy(&output.stderr), world.log());
    }
    load.goes_on();
    let expected = load.finish();
    world.json(&["volume", "detach", "x"]);
    same(&image, &expected);
}

#[test]
fn snapshots_move_with_their_volume() {
    let mut world = World::new();
    let image = world.image("disk.img", 16 << 20, 65536);
    let before = std::fs::read(&image).expect("read");
    let uri = world.attach("x", &image);
    world.json(&["volume", "snapshot", "add", "x", "first"]);
    let load = Load::start(&uri, &image, 330);
    load.goes_on();
    world.json(&["volume", "snapshot", "add", "x", "second"]);
    load.goes_on();
    let to = world.path("new.img");
    let begun = world.json(&["move", "x", "--to", &target(&to), "--bandwidth", "1MiB/s", "--detach"]);
    assert!(begun["id"].is_u64(), "{begun}");
    world.wait_until_job("nothing is copied", has_copied(1 << 20));
    world.refused(&["volume", "snapshot", "add", "x", "third"], 7, "is being moved");
    assert_eq!(world.json(&["cancel", "x"])["state"], "cancelled");
    assert_eq!(layer_files(&world, "new.img"), Vec::<PathBuf>::new(), "an undone move leaves nothing");
    load.goes_on();
    // Killed in the middle it goes on.
    let begun = world.json(&["move", "x", "--to", &target(&to), "--bandwidth", "12MiB/s", "--detach"]);
    world.wait_until_job("nothing is copied", has_copied(4 << 20));
    world.kill();
    world.start();
    let over = world.wait_for_job(begun["id"].as_u64().expect("a number"));
    assert_eq!(over["state"], "done", "{over}\n{}", world.log());
    load.goes_on();
    let flags = ["--strategy", "dbt", "--verify", "full", "--delete-source"];
    let third = world.path("third.img");
    let report = world.json(&[&["move", "x", "--to", &target(&third)], &flags[..]].concat());
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}\n{}", world.log());
    assert_eq!(layer_files(&world, "new.img"), Vec::<PathBuf>::new(), "they go with the source");
    assert_eq!(layer_files(&world, "third.img").len(), 2);
    assert_eq!(snapshots(&world), ["first", "second"]);
    load.goes_on();
    let after = load.finish();
    assert!(contents(&world, &uri) == after, "the guest's disk is another");
    same(&third, &before);
    world.json(&["volume", "snapshot", "revert", "x", "first", "--discard-newer"]);
    assert!(contents(&world, &uri) == before, "not what it was at the first snapshot");
}

#[test]
fn a_move_that_would_leave_snapshots_behind_is_refused() {
    let world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    world.attach("x", &image);
    world.json(&["volume", "snapshot", "add", "x", "first"]);
    let to = target(&world.path("new.img"));
    world.refused(&["move", "x", "--to", &to, "--strategy", "snapshot"], 2, "would not come along");
    world.refused(&["move", "x", "--to", "nbd://127.0.0.1:1/x"], 2, "would not come along");
    let plan = world.json(&["plan", "x", "--to", &to, "--strategy", "snapshot"]);
    assert!(plan["refusal"].to_string().contains("would not come along"), "{plan}");
    assert!(!world.path("new.img").exists());
}

#[test]
fn a_throttle_holds_the_guest_to_its_limit_and_lets_go() {
    let mut world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    let uri = world.attach("x", &image);
    world.refused(&["volume", "layer", "add", "x", "throttle"], 2, "limits nothing");
    let load = Load::start(&uri, &image, 340);
    load.goes_on();
    let layers = world.json(&["volume", "layer", "add", "x", "throttle", "--iops", "100", "--bandwidth", "50MiB/s"]);
    assert_eq!(layers["layers"][0]["iops"], 100, "{layers}");
    for _ in 0..2 {
        // What was let through before it came may still be counted at first.
        std::thread::sleep(Duration::from_millis(200));
        let (begun, before) = (Instant::now(), load.requests());
        std::thread::sleep(Duration::from_secs(2));
        let most = 100.0 * (begun.elapsed().as_secs_f64() + 0.5);
        let requests = load.requests() - before;
        assert!((requests as f64) < most, "{requests} requests, more than {most}");
        assert!(requests > 0, "nothing passes");
        // It is on record.
        world.kill();
        world.start();
    }
    world.json(&["volume", "layer", "rm", "x", "throttle"]);
    assert_eq!(world.json(&["volume", "layer", "ls", "x"]), serde_json::json!([]));
    let before = load.requests();
    let start = Instant::now();
    while load.requests() < before + 2000 {
        assert!(start.elapsed() < HANG, "the limit is still there");
        std::thread::sleep(Duration::from_millis(20));
    }
    let expected = load.finish();
    world.json(&["volume", "detach", "x"]);
    same(&image, &expected);
}
