//! Moves by snapshots on real files: under load, cancelled, killed in the middle, rescued, refused.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::load::Load;
use crate::support::{HANG, Loop, Mount, World, same, signal, target, wait};

/// Begins a move by snapshots, not faster than `bandwidth`, and gives the job's number.
fn begin(world: &World, to: &Path, bandwidth: &str) -> u64 {
    let arguments = ["move", "x", "--to", &target(to), "--strategy", "snapshot", "--bandwidth", bandwidth, "--detach"];
    world.json(&arguments)["id"].as_u64().expect("a number")
}

fn overlays(world: &World) -> Vec<std::path::PathBuf> {
    let mut all = world.files(".disk.img.overlay-");
    all.extend(world.files(".new.img.overlay-"));
    all
}

/// Waits until the guest has written to an overlay beside `image`.
fn wait_for_overlay(world: &World, load: &Load) {
    let start = Instant::now();
    let before = load.requests();
    while overlays(world).is_empty() || load.requests() < before + 200 {
        assert!(start.elapsed() < HANG, "no overlay is used\n{}", world.log());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_volume_moves_by_snapshots_under_load_and_no_overlay_is_left() {
    let world = World::new();
    // Neither a multiple of a chunk nor of a block.
    let image = world.image("disk.img", (48 << 20) + 1536, 1 << 20);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 60);
    let to = world.path("new.img");
    let arguments = ["move", "x", "--to", &target(&to), "--strategy", "snapshot", "--verify", "full"];
    let report = world.json(&[&arguments[..], &["--bandwidth", "30MiB/s"]].concat());
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}\n{}", world.log());
    assert_eq!(report["strategy"], "snapshot");
    let iterations = report["iterations"].as_array().expect("a list");
    assert!(iterations.len() >= 3, "{report}");
    assert!(iterations.iter().any(|iteration| iteration["held"] == true), "{report}");
    load.goes_on();
    same(&to, &load.finish());
    assert_eq!(overlays(&world), Vec::<std::path::PathBuf>::new());
    assert_eq!(world.json(&["volume", "show", "x"])["backend"], target(&to));
}

/// The guest's disk is the source with its overlays: what becomes of the target's file system, it does not feel.
#[test]
fn a_target_that_runs_full_fails_a_snapshot_move_and_no_request_of_the_guest() {
    let mut world = World::without_daemon();
    let small = Mount::tmpfs(&world.path("small"), "96M");
    world.start();
    let image = world.image("disk.img", 16 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 61);
    let to = small.path.join("new.img");
    begin(&world, &to, "6MiB/s");
    // The base is copied, and what the guest has written meanwhile is folded.
    let is_second = |job: &serde_json::Value| job["progress"]["iteration"].as_u64() >= Some(2);
    world.wait_until_job("no second snapshot is taken", is_second);
    let overlays = world.files(".disk.img.overlay-");
    assert!(!overlays.is_empty(), "no overlay beside the source");
    for overlay in overlays {
        let Ok(found) = std::fs::metadata(&overlay) else { continue };
        let allocated = std::os::unix::fs::MetadataExt::blocks(&found) * 512;
        assert!(allocated >= found.len(), "{} has no space of its own", overlay.display());
    }
    let filler = std::fs::File::create(small.path.join("filler")).expect("created");
    let mut zeroes = std::io::repeat(7);
    std::io::copy(&mut zeroes, &mut &filler).expect_err("it runs full");
    // Into holes of the target nothing fits any more, into its data all does: both ends are good.
    load.goes_on();
    world.run(&["cancel", "x"]);
    let over = world.wait_until_job("it does not end", |job| job["finished_unix_ms"].is_u64());
    let held_by = if over["state"] == "done" { &to } else { &image };
    load.goes_on();
    same(held_by, &load.finish());
}

#[test]
fn a_cancelled_snapshot_move_leaves_the_guest_on_a_whole_source() {
    let world = World::new();
    let image = world.image("disk.img", 32 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 70);
    let to = world.path("new.img");
    begin(&world, &to, "2MiB/s");
    wait_for_overlay(&world, &load);
    assert_eq!(world.json(&["cancel", "x"])["state"], "cancelled");
    assert_eq!(overlays(&world), Vec::<std::path::PathBuf>::new());
    assert!(!to.exists(), "the target was left behind");
    same(&image, &load.finish());
}

#[test]
fn the_daemon_is_killed_in_the_middle_of_snapshot_moves_and_every_promise_is_kept() {
    let mut world = World::new();
    let image = world.image("disk.img", 24 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 80);
    let to = world.path("new.img");
    let id = begin(&world, &to, "12MiB/s");
    let mut delay = 23_u64;
    for _ in 0..8 {
        delay = delay * 37 % 509;
        std::thread::sleep(Duration::from_millis(delay));
        world.kill();
        world.start();
    }
    let over = world.wait_for_job(id);
    assert_eq!(over["state"], "done", "{over}\n{}", world.log());
    load.goes_on();
    same(&to, &load.finish());
    assert_eq!(overlays(&world), Vec::<std::path::PathBuf>::new());
}

#[test]
fn a_killed_snapshot_move_whose_target_is_gone_is_undone_into_a_whole_source() {
    let mut world = World::new();
    let image = world.image("disk.img", 24 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 90);
    let to = world.path("new.img");
    let id = begin(&world, &to, "1MiB/s");
    wait_for_overlay(&world, &load);
    world.kill();
    std::fs::remove_file(&to).expect("the target is lost");
    world.start();
    let over = world.wait_for_job(id);
    assert_eq!(over["state"], "failed", "{over}\n{}", world.log());
    assert_eq!(overlays(&world), Vec::<std::path::PathBuf>::new());
    same(&image, &load.finish());
}

#[test]
fn rescue_serves_a_volume_with_its_overlays_and_the_move_goes_on_afterwards() {
    let mut world = World::new();
    let image = world.image("disk.img", 24 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 100);
    let to = world.path("new.img");
    let id = begin(&world, &to, "1MiB/s");
    wait_for_overlay(&world, &load);
    world.kill();
    let state = world.text("state");
    let mut rescue = world
        .command(&["rescue", "x", "--state-dir", &state])
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("it starts");
    let before = load.requests();
    let start = Instant::now();
    while load.requests() < before + 200 {
        assert!(start.elapsed() < HANG, "the rescue does not serve");
        std::thread::sleep(Duration::from_millis(5));
    }
    signal(&rescue, rustix::process::Signal::TERM);
    assert!(wait(&mut rescue).success());
    assert!(!overlays(&world).is_empty(), "a rescue folds nothing");
    world.start();
    world.json(&["set", "x", "--bandwidth", "0"]);
    let over = world.wait_for_job(id);
    assert_eq!(over["state"], "done", "{over}\n{}", world.log());
    same(&to, &load.finish());
    assert_eq!(overlays(&world), Vec::<std::path::PathBuf>::new());
}

#[test]
fn a_snapshot_move_without_room_or_place_for_overlays_is_refused_and_leaves_nothing() {
    let world = World::new();
    let small = Mount::tmpfs(&world.path("small"), "10m");
    let image = small.path.join("disk.img");
    std::fs::copy(world.image("contents.img", 4 << 20, 65536), &image).expect("copied");
    world.attach("x", &image);
    // Beside the source two overlays find no room.
    let to = target(&world.path("new.img"));
    world.refused(&["move", "x", "--to", &to, "--strategy", "snapshot"], 14, "are free");
    assert_eq!(std::fs::read_dir(&small.path).expect("listed").count(), 1);
    assert!(!world.path("new.img").exists(), "the target was left behind");
    let device = Loop::new(&world, "device.img", 8 << 20, 512);
    world.refused(&["move", "x", "--to", &device.target(), "--overwrite", "--strategy", "snapshot"], 2, "is no file");
}

#[test]
fn a_read_only_volume_is_moved_by_snapshots_without_room_for_overlays() {
    let world = World::new();
    let image = world.image("disk.img", 6 << 20, 65536);
    let uri = format!("nbd+unix:///x?socket={}", world.text("x.sock"));
    let backend = format!("file:{}", image.display());
    world.json(&["volume", "attach", "x", "--backend", &backend, "--export", &uri, "--read-only"]);
    let small = Mount::tmpfs(&world.path("small"), "8m");
    let expected = std::fs::read(&image).expect("read");
    let to = small.path.join("new.img");
    let output =
        world.run(&["move", "x", "--to", &target(&to), "--strategy", "snapshot", "--verify", "full", "--json"]);
    let moved = std::fs::read(&to);
    let volume = world.json(&["volume", "show", "x"]);
    world.json(&["volume", "detach", "x"]);
    assert!(output.status.success(), "{}\n{}", String::from_utf8_lossy(&output.stderr), world.log());
    assert!(moved.expect("it is there") == expected, "the copy is another");
    assert_eq!((&volume["backend"], &volume["read_only"]), (&target(&to).into(), &true.into()));
    assert_eq!(overlays(&world), Vec::<std::path::PathBuf>::new());
}
