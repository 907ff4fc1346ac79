//! All disks of a running QEMU moved together: asked for, refused, cancelled and undone as one.

use std::time::{Duration, Instant};

use crate::support::pair::{Pair, wait_until};
use crate::support::qemu::Qemu;
use crate::support::{HANG, World};
use serde_json::Value;

fn to(world: &World) -> String {
    format!("file:{}", world.text("new-{name}.img"))
}

fn backend_of(world: &World, name: &str) -> String {
    world.json(&["volume", "show", name])["backend"].as_str().expect("text").to_owned()
}

fn begin(world: &World) -> Vec<Value> {
    let arguments = ["move", "system", "--all-disks", "--to", &to(world), "--no-persist", "--detach"];
    let jobs = world.json(&[&arguments[..], &["--bandwidth", "1MiB/s"]].concat());
    jobs.as_array().expect("a list").clone()
}

/// Both disks are where they were, nothing is left of the move, and the guest can write.
fn assert_undone(world: &World, qemu: &Qemu) {
    let start = Instant::now();
    while world.json(&["jobs"]) != Value::Array(Vec::new()) {
        assert!(start.elapsed() < HANG, "the moves do not end\n{}", world.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    for (name, image, id) in [("system", "web1.img", "vda"), ("data", "web1-data.img", "vdb")] {
        assert!(backend_of(world, name).contains(&world.text(image)), "{name} is not where it was");
        qemu.write_to(id, 0x5a);
    }
    assert_eq!(world.files("new-"), Vec::<std::path::PathBuf>::new(), "targets were left behind");
    assert_eq!(world.files("."), Vec::<std::path::PathBuf>::new(), "overlays were left behind");
}

#[test]
fn all_disks_of_a_machine_move_together_by_any_strategy() {
    for strategy in ["mirror", "snapshot", "incremental-dbt"] {
        let world = World::new();
        let qemu = Qemu::with_two_disks(&world);
        let to = to(&world);
        let request = ["data", "--all-disks", "--to", &to, "--no-persist", "--strategy", strategy];
        let plans = world.json(&[&["plan"], &request[..]].concat());
        let planned: Vec<_> = plans.as_array().expect("a list").iter().map(|plan| plan["volume"].clone()).collect();
        assert_eq!(planned, ["data", "system"]);
        let reports = world.json(&[&["move"], &request[..], &["--verify", "full"]].concat());
        let reports = reports.as_array().expect("a list");
        assert_eq!(reports.len(), 2, "{reports:?}");
        for report in reports {
            assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
            assert_eq!((&report["group"], &report["strategy"]), (&reports[0]["job"], &strategy.into()), "{report}");
        }
        for (node, name, id) in [("disk0", "system", "vda"), ("disk1", "data", "vdb")] {
            qemu.write_to(id, 0x77);
            world.json(&["release", name]);
            assert_eq!(qemu.file_of(node), world.text(&format!("new-{name}.img")));
        }
    }
}

#[test]
fn when_one_disk_cannot_be_moved_none_is_and_nothing_is_left() {
    let world = World::new();
    let qemu = Qemu::with_two_disks(&world);
    // The second by name: the first is ready by then.
    std::fs::write(world.path("new-system.img"), "somebody's").expect("written");
    let arguments = ["move", "system", "--all-disks", "--to", &to(&world), "--no-persist"];
    world.refused(&arguments, 10, "system: ");
    std::fs::remove_file(world.path("new-system.img")).expect("removed");
    let one = format!("file:{}", world.text("new-one.img"));
    world.refused(&["move", "system", "--all-disks", "--to", &one, "--no-persist"], 2, "{name}");
    assert_eq!(world.json(&["jobs", "--all"]), Value::Array(Vec::new()), "a refused move is no move");
    assert_undone(&world, &qemu);
    let image = world.image("lone.img", 1 << 20, 65536);
    world.attach("lone", &image);
    world.refused(&["move", "lone", "--all-disks", "--to", &to(&world)], 2, "not adopted");
}

#[test]
fn a_cancel_of_one_disk_is_a_cancel_of_all() {
    let world = World::new();
    let qemu = Qemu::with_two_disks(&world);
    let jobs = begin(&world);
    assert_eq!(world.json(&["cancel", "data"])["state"], "cancelled");
    for job in &jobs {
        let over = world.wait_for_job(job["id"].as_u64().expect("a number"));
        assert_eq!(over["state"], "cancelled", "{over}");
    }
    assert_undone(&world, &qemu);
}

#[test]
fn when_one_disk_s_target_is_lost_the_others_are_undone_too_even_after_a_restart() {
    let mut world = World::new();
    let qemu = Qemu::with_two_disks(&world);
    // Nobody asks QEMU's monitor meanwhile: it has one client at a time, and the daemon watches it during a move.
    let jobs = begin(&world);
    world.kill();
    std::fs::remove_file(world.path("new-system.img")).expect("the target is lost");
    world.start();
    for job in &jobs {
        let over = world.wait_for_job(job["id"].as_u64().expect("a number"));
        assert_eq!(over["state"], "failed", "{over}\n{}", world.log());
    }
    let data = world.wait_for_job(jobs[0]["id"].as_u64().expect("a number"));
    let message = data["error"]["message"].as_str().expect("text").to_owned();
    assert!(message.contains("with that of system"), "{message}");
    assert_undone(&world, &qemu);
}

/// How many groups have a record.
fn records(world: &World) -> usize {
    std::fs::read_dir(world.path("state/groups")).expect("the state directory has one").count()
}

/// Where each disk is, once nothing moves any more.
fn backends(world: &World) -> [String; 2] {
    ["system", "data"].map(|name| backend_of(world, name))
}

#[test]
fn all_disks_switch_over_in_one_commit() {
    let mut world = World::without_daemon();
    std::fs::write(world.path("config.toml"), "running-jobs-max = 1\n").expect("written");
    world.daemon.arguments = vec!["--config".to_owned(), world.text("config.toml")];
    world.start();
    let qemu = Qemu::with_two_disks(&world);
    let jobs = begin(&world);
    // The smaller one is complete long before the other, which gets its place then.
    let ids: Vec<u64> = jobs.iter().map(|job| job["id"].as_u64().expect("a number")).collect();
    let start = Instant::now();
    let phase = |name: &str| {
        let jobs = world.json(&["jobs"]);
        let jobs = jobs.as_array().expect("a list").clone();
        let job = jobs.into_iter().find(|job| job["volume"] == name).expect("it moves");
        job["progress"]["phase"].as_str().unwrap_or_default().to_owned()
    };
    world.run(&["set", "data", "--bandwidth", "100MiB/s"]);
    while phase("data") != "pre-switch" {
        assert!(start.elapsed() < HANG, "the first disk is not complete\n{}", world.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(300));
    assert!(backends(&world).iter().all(|place| !place.contains("new-")), "one has gone before the other");
    qemu.write_to("vda", 0x31);
    qemu.write_to("vdb", 0x32);
    world.run(&["set", "system", "--bandwidth", "100MiB/s"]);
    for id in ids {
        assert_eq!(world.wait_for_job(id)["state"], "done");
    }
    assert!(backends(&world).iter().all(|place| place.contains("new-")), "one has stayed");
    world.wait_for_log("all disks of the machine are committed");
    assert_eq!(records(&world), 0, "the group's record was left behind");
}

#[test]
fn a_daemon_that_dies_at_the_commit_of_all_disks_has_moved_all_or_none() {
    let mut world = World::new();
    let qemu = Qemu::with_two_disks(&world);
    let mut cut_short = 0;
    for round in 0_u64..8 {
        let arguments = ["move", "system", "--all-disks", "--no-persist", "--delete-source", "--detach"];
        let to = format!("file:{}", world.text(&format!("new-{round}-{{name}}.img")));
        let jobs = world.json(&[&arguments[..], &["--to", &to]].concat());
        let ids: Vec<u64> =
            jobs.as_array().expect("a list").iter().map(|job| job["id"].as_u64().expect("a number")).collect();
        std::thread::sleep(Duration::from_millis(20 + 23 * round));
        world.kill();
        world.start();
        cut_short += u32::from(world.json(&["jobs"]) != Value::Array(Vec::new()));
        let states: Vec<Value> = ids.iter().map(|id| world.wait_for_job(*id)["state"].clone()).collect();
        assert_eq!(states[0], states[1], "{}", world.log());
        let moved = backends(&world).map(|place| place.contains(&format!("new-{round}-")));
        assert_eq!(moved[0], moved[1], "{states:?}\n{}", world.log());
        qemu.write_to("vda", round as u8);
        qemu.write_to("vdb", round as u8);
        assert_eq!(records(&world), 0, "a group's record was left behind");
    }
    assert!(cut_short > 0, "no move was cut short");
}

#[test]
fn all_disks_go_to_another_host_in_one_commit() {
    let pair = Pair::new();
    let qemu = Qemu::with_two_disks(&pair.a);
    let jobs = pair.a.json(&[
        "move",
        "system",
        "--all-disks",
        "--to",
        "b",
        "--no-persist",
        "--bandwidth",
        "4MiB/s",
        "--detach",
    ]);
    assert_eq!(jobs.as_array().map(Vec::len), Some(2), "{jobs}");
    let backends = || ["system", "data"].map(|name| backend_of(&pair.a, name));
    pair.a.json(&["set", "system", "--bandwidth", "0"]);
    wait_until("the smaller disk is complete", || {
        let jobs = pair.a.json(&["jobs"]);
        let job = jobs.as_array().expect("a list").iter().find(|job| job["volume"] == "system").cloned()?;
        (job["progress"]["phase"] == "pre-switch").then_some(())
    });
    assert!(backends().iter().all(|place| !place.starts_with("b:")), "one has gone before the other");
    // Nobody hears the other host at the commit: both volumes are given up, or none is.
    pair.network.cut();
    pair.a.json(&["set", "data", "--bandwidth", "0"]);
    std::thread::sleep(Duration::from_secs(1));
    let places = backends().map(|place| place.starts_with("b:"));
    assert_eq!(places[0], places[1], "one has gone before the other\n{}", pair.a.log());
    pair.network.mend();
    for job in jobs.as_array().expect("a list") {
        let over = pair.a.wait_for_job(job["id"].as_u64().expect("a number"));
        assert_eq!(over["state"], "done", "{over}");
    }
    assert_eq!(backends(), ["b:system", "b:data"]);
    qemu.write_to("vda", 0x61);
    qemu.write_to("vdb", 0x62);
    assert_eq!(records(&pair.a), 0, "the group's record was left behind");
}
