//! All disks of a running QEMU moved together: asked for, refused, cancelled and undone as one.

mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use support::qemu::Qemu;
use support::{HANG, World};

/// A QEMU with two adopted disks, `system` and `data`.
fn with_two_disks(world: &World) -> Qemu {
    let system = world.image("web1.img", 12 << 20, 65536);
    let data = world.image("web1-data.img", 20 << 20, 65536);
    let node = |number: u32, image: &Path| {
        let file = format!("driver=file,node-name=file{number},filename={},discard=unmap", image.display());
        (file, format!("driver=raw,node-name=disk{number},file=file{number}"))
    };
    let ((file0, disk0), (file1, disk1)) = (node(0, &system), node(1, &data));
    let mut arguments = Vec::new();
    for blockdev in [&file0, &disk0, &file1, &disk1] {
        arguments.extend(["-blockdev", blockdev]);
    }
    arguments.extend(["-device", "virtio-blk-pci,drive=disk0,id=vda", "-device", "virtio-blk-pci,drive=disk1,id=vdb"]);
    let qemu = Qemu::start(world, &arguments);
    for (node, name) in [("disk0", "system"), ("disk1", "data")] {
        world.json(&["adopt", "--qmp", &qemu.text(), "--node", node, "--name", name]);
    }
    qemu
}

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
        let qemu = with_two_disks(&world);
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
    let qemu = with_two_disks(&world);
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
    let qemu = with_two_disks(&world);
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
    let qemu = with_two_disks(&world);
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
