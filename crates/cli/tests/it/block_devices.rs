//! Block devices and sizes that are no round numbers: moved to and from, limited to the volume, put out of the way.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::load::Load;
use crate::support::{HANG, Loop, OLD, World, tool};

fn wait_until_copied(world: &World, bytes: u64) {
    let start = Instant::now();
    while world.json(&["jobs"])[0]["progress"]["bytes_copied"].as_u64() < Some(bytes) {
        assert!(start.elapsed() < HANG, "nothing is copied:\n{}", world.log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn has_size(world: &World, uri: &str, size: u64) {
    assert_eq!(world.json(&["volume", "show", "x"])["size_bytes"], size);
    assert_eq!(tool("nbdinfo", &["--size", uri]).trim(), size.to_string());
}

fn minimum_of(uri: &str) -> u64 {
    let info: serde_json::Value = serde_json::from_str(&tool("nbdinfo", &["--json", uri])).expect("JSON");
    info["exports"][0]["block_size_minimum"].as_u64().expect("a number")
}

/// From a file to a block device with more room, with a crash on the way, and on to a file.
fn there_and_back(size: u64) {
    const DEVICE_BYTES: usize = (16 << 20) + 512;
    let mut world = World::new();
    let image = world.image("disk.img", size, 300_000);
    let uri = world.attach("x", &image);
    let device = Loop::new(&world, "device.img", DEVICE_BYTES, 512);
    let load = Load::start(&uri, &image, size);
    let arguments = ["move", "x", "--to", &device.target(), "--verify", "full"];
    world.refused(&arguments, 10, "--overwrite");
    let id =
        world.json(&[&arguments[..], &["--overwrite", "--bandwidth", "4MiB/s", "--detach"]].concat())["id"].as_u64();
    wait_until_copied(&world, 1 << 20);
    world.kill();
    world.start();
    has_size(&world, &uri, size);
    world.json(&["set", "x", "--bandwidth", "0"]);
    let over = world.wait_for_job(id.expect("a number"));
    assert_eq!((&over["state"], &over["report"]["equal"]), (&"done".into(), &true.into()), "{over}\n{}", world.log());
    assert!(!image.exists(), "the source was not put out of the way");
    has_size(&world, &uri, size);
    world.kill();
    world.start();
    has_size(&world, &uri, size);
    load.answers(50);
    let expected = load.finish();
    assert!(device.read(0, expected.len()) == expected, "the block device does not hold what was written");
    let past = size.next_multiple_of(512);
    let rest = device.read(past, DEVICE_BYTES - past as usize);
    assert!(rest.iter().all(|byte| *byte == OLD), "something was written past the volume's end");

    let to = world.path("new.img");
    let report = world.json(&["move", "x", "--to", &format!("file:{}", to.display()), "--verify", "full"]);
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
    assert_eq!(report["source_kept"], device.device);
    assert!(std::fs::read(&to).expect("read") == expected);
    has_size(&world, &uri, size);

    for offset in [0, DEVICE_BYTES as u64 - 4096] {
        assert_eq!(&device.read(offset, 16), b"TRANSHUME MOVED\n", "no tombstone at {offset}");
    }
    let kept = std::fs::read_dir(world.path("state/retired")).expect("listed").flatten();
    let kept: Vec<_> = kept.map(|entry| entry.path()).collect();
    let [kept] = &kept[..] else { panic!("what the tombstone has overwritten is not kept once: {kept:?}") };
    undo_as_documented(&device.device, kept);
    assert!(device.read(0, expected.len()) == expected, "the start did not come back");
    assert!(device.read(DEVICE_BYTES as u64 - 4096, 4096) == [OLD; 4096], "the end did not come back");
}

/// Carries out what the documentation says of undoing a tombstone.
fn undo_as_documented(device: &str, kept: &Path) {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations.md");
    let page = std::fs::read_to_string(page).expect("the page is there");
    let commands: Vec<&str> = page.lines().map(str::trim).filter(|line| line.starts_with("dd if=NAME")).collect();
    assert_eq!(commands.len(), 2, "{commands:?}");
    for command in commands {
        let kept = kept.display().to_string();
        tool("sh", &["-c", &command.replace("NAME.moved-EPOCH.blocks", &kept).replace("/dev/OLD", device)]);
    }
}

#[test]
fn a_volume_keeps_its_size_on_a_larger_block_device_and_on_the_way_back() {
    there_and_back((12 << 20) + 3 * 512);
}

#[test]
fn a_volume_that_ends_within_a_sector_moves_to_a_block_device_and_back() {
    there_and_back((9 << 20) + 100);
}

#[test]
fn a_source_that_grows_while_it_moves_is_moved_as_it_was_and_the_report_says_so() {
    let mut world = World::new();
    let image = world.image("disk.img", 16 << 20, 65536);
    let uri = world.attach("x", &image);
    let to = world.path("new.img");
    let target = format!("file:{}", to.display());
    let id = world.json(&["move", "x", "--to", &target, "--bandwidth", "4MiB/s", "--detach"])["id"].as_u64();
    wait_until_copied(&world, 1 << 20);
    File::options().write(true).open(&image).expect("opened").set_len(20 << 20).expect("made longer");
    world.kill();
    world.start();
    world.json(&["set", "x", "--bandwidth", "0"]);
    let over = world.wait_for_job(id.expect("a number"));
    assert_eq!(over["state"], "done", "{over}");
    let notes = over["report"]["notes"].to_string();
    assert!(notes.contains("has grown from 16"), "{notes}");
    assert_eq!(std::fs::metadata(&to).expect("there").len(), 16 << 20);
    has_size(&world, &uri, 16 << 20);
}

/// What took the target's name while no daemon ran is not written to, and the guest stays on the source.
#[test]
fn a_restart_does_not_write_to_another_file_or_block_device_under_the_name_of_the_target() {
    const SIZE: u64 = 8 << 20;
    let mut world = World::new();
    let device = Loop::new(&world, "device.img", SIZE as usize, 512);
    let other = world.path("other.img");
    std::fs::write(&other, vec![OLD; SIZE as usize]).expect("written");
    let file = world.path("new.img");
    for (name, target) in [("x", device.target()), ("y", format!("file:{}", file.display()))] {
        let image = world.image(&format!("{name}.img"), SIZE, 65536);
        world.attach(name, &image);
        let before = std::fs::read(&image).expect("read");
        let move_it = ["move", name, "--to", &target, "--overwrite", "--bandwidth", "1MiB/s", "--detach"];
        let id = world.json(&move_it)["id"].as_u64().expect("a number");
        wait_until_copied(&world, 1 << 20);
        world.kill();
        match name {
            "x" => {
                tool("losetup", &["--detach", &device.device]);
                tool("losetup", &[&device.device, &world.text("other.img")]);
            }
            _ => {
                std::fs::rename(&file, world.path("aside.img")).expect("renamed");
                std::fs::copy(&other, &file).expect("another file");
            }
        }
        world.start();
        let over = world.wait_for_job(id);
        assert_eq!(over["state"], "failed", "{over}");
        assert!(over["error"].to_string().contains("deleted or replaced"), "{over}");
        let found = if name == "x" { device.read(0, SIZE as usize) } else { std::fs::read(&file).expect("read") };
        assert!(found.iter().all(|byte| *byte == OLD), "what took the target's name was overwritten");
        assert!(std::fs::read(&image).expect("the source is there") == before);
        assert_eq!(world.json(&["volume", "show", name])["state"], "serving");
    }
}

#[test]
fn a_target_with_larger_sectors_than_clients_use_is_refused() {
    let world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    world.attach("x", &image);
    let device = Loop::new(&world, "device.img", 4 << 20, 4096);
    world.refused(&["move", "x", "--to", &device.target(), "--overwrite"], 18, "sectors of 4096 bytes");
    assert!(device.read(0, 4096).iter().all(|byte| *byte == OLD), "a refused target was changed");
}

fn reattach(device: &Loop, file: &Path, sector: &str) {
    tool("losetup", &["--detach", &device.device]);
    tool("losetup", &["--sector-size", sector, &device.device, &file.display().to_string()]);
}

#[test]
fn a_device_whose_sectors_have_become_larger_than_clients_were_promised_is_not_served() {
    let mut world = World::new();
    let device = Loop::new(&world, "device.img", 4 << 20, 512);
    world.attach("x", Path::new(&device.device));
    world.kill();
    reattach(&device, &world.path("device.img"), "4096");
    world.start();
    let volume = world.json(&["volume", "show", "x"]);
    assert_eq!(volume["state"], "down", "{volume}");
    let problem = volume["problem"].to_string();
    assert!(problem.contains("sectors of 4096 bytes now") && problem.contains("cache=page"), "{problem}");
    world.kill();
    reattach(&device, &world.path("device.img"), "512");
    world.start();
    assert_eq!(world.json(&["volume", "show", "x"])["state"], "serving", "{}", world.log());
}

#[test]
fn a_guest_of_large_sectors_keeps_them_on_a_disk_of_small_ones_and_can_go_back() {
    let mut world = World::new();
    let large = Loop::new(&world, "large.img", 4 << 20, 4096);
    let small = Loop::new(&world, "small.img", 4 << 20, 512);
    let uri = world.attach("x", Path::new(&large.device));
    assert_eq!(minimum_of(&uri), 4096);
    for to in [&small, &large] {
        let report = world.json(&["move", "x", "--to", &to.target(), "--overwrite"]);
        assert_eq!(report["state"], "done", "{report}");
        assert_eq!(minimum_of(&uri), 4096, "its clients have other sectors on {}", to.device);
        world.kill();
        world.start();
        assert_eq!(minimum_of(&uri), 4096, "after a restart");
    }
}

#[test]
fn two_devices_of_one_disk_are_not_source_and_target_of_a_move() {
    let world = World::new();
    let source = Loop::new(&world, "device.img", 4 << 20, 512);
    let file = world.text("device.img");
    let twin = Loop::over(Path::new(&file), &[]);
    let overlapping = Loop::over(Path::new(&file), &["--offset", "1048576", "--sizelimit", "3145728"]);
    world.attach("x", Path::new(&source.device));
    for to in [twin.target(), overlapping.target(), format!("file:{file}")] {
        let plan = world.json(&["plan", "x", "--to", &to, "--overwrite"]);
        assert!(plan["refusal"].to_string().contains("bytes in common"), "{plan}");
        let moved = world.run(&["move", "x", "--to", &to, "--overwrite"]);
        assert!(String::from_utf8_lossy(&moved.stderr).contains("bytes in common"), "{moved:?}");
    }
    assert!(source.read(0, 4 << 20).iter().all(|byte| *byte == OLD), "a refused move has written");
}

#[test]
fn another_name_of_what_a_volume_is_in_is_nobody_elses_place() {
    let world = World::new();
    let image = world.image("served.img", 4 << 20, 65536);
    world.attach("x", &image);
    let twin = Loop::over(&image, &[]);
    let other = world.image("other.img", 4 << 20, 65536);
    world.attach("y", &other);
    let refused = |words: &[&str]| {
        let run = world.run(words);
        let said = String::from_utf8_lossy(&run.stderr).into_owned();
        assert!(!run.status.success() && said.contains("bytes in common"), "{words:?}: {said}");
    };
    refused(&["move", "y", "--to", &twin.target(), "--overwrite"]);
    let uri = format!("nbd+unix:///z?socket={}", world.text("z.sock"));
    refused(&["volume", "attach", "z", "--backend", &twin.target(), "--export", &uri]);
    refused(&["cache", "create", "flash", "--store", &twin.target()]);
    let plan = world.json(&["plan", "y", "--to", &twin.target(), "--overwrite"]);
    assert!(plan["refusal"].to_string().contains("bytes in common"), "{plan}");
}

#[test]
fn a_plan_tells_what_keeps_the_source_from_being_put_away_and_how_to_mend_it() {
    let world = World::new();
    let folder = world.path("folder");
    std::fs::create_dir(&folder).expect("created");
    let image = world.image("folder/disk.img", 1 << 20, 65536);
    world.attach("x", &image);
    let (to, folder) = (format!("file:{}", world.text("new.img")), folder.display().to_string());
    let notes = || world.json(&["plan", "x", "--to", &to])["notes"].to_string();
    assert!(!notes().contains("put out of the way"), "{}", notes());
    tool("chattr", &["+i", &folder]);
    let (noted, moved) = (notes(), world.run(&["move", "x", "--to", &to]));
    tool("chattr", &["-i", &folder]);
    let hint = format!("chattr -i {folder}");
    assert!(noted.contains("put out of the way") && noted.contains(&hint), "{noted}");
    let said = String::from_utf8_lossy(&moved.stderr);
    assert!(moved.status.code() == Some(43) && said.contains(&hint), "{said}");
    assert_eq!(world.json(&["volume", "show", "x"])["backend"], to.as_str());
}

#[test]
fn clients_are_told_of_sectors_that_they_can_use_before_and_after_a_move() {
    let world = World::new();
    let memory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    for (name, size, minimum) in [("even", 1 << 20, 512), ("odd", (1 << 20) + 100, 1)] {
        let image = memory.path().join(name);
        std::fs::copy(world.image(name, size, 65536), &image).expect("copied");
        let uri = world.attach(name, &image);
        assert_eq!(minimum_of(&uri), minimum, "{name} in memory");
        let move_to = |to: &Path, more: &str| format!("file:{}{more}", to.display());
        let to = world.path(&format!("{name}-new"));
        if minimum == 1 {
            world.refused(&["move", name, "--to", &move_to(&to, ",cache=direct")], 18, "cache=");
            assert!(!to.exists(), "a refused target was left behind");
        }
        world.json(&["move", name, "--to", &move_to(&to, "")]);
        assert_eq!(minimum_of(&uri), minimum, "{name} on a disk");
        let copy = world.text("copy");
        tool("nbdcopy", &[&uri, &copy]);
        assert_eq!(std::fs::metadata(&copy).expect("there").len(), size);
        assert!(std::fs::read(&copy).expect("read") == std::fs::read(world.path(name)).expect("read"), "{name}");
        std::fs::remove_file(&copy).expect("removed");
    }
    let export = format!("nbd+unix:///y?socket={}", world.text("y.sock"));
    let backend = format!("file:{},cache=direct", world.text("odd"));
    world.refused(&["volume", "attach", "y", "--backend", &backend, "--export", &export], 18, "no multiple of 512");
}
