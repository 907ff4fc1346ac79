//! What nobody but a person can tell: whether a file that looks like another one is the volume's, and whether a tombstone is the guest's own.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{HANG, Loop, Mount, World, target, tool};

const MIB: u64 = 1 << 20;

fn show(world: &World, name: &str) -> Value {
    world.json(&["volume", "show", name])
}

fn is_down(world: &World, name: &str, why: &str) {
    let volume = show(world, name);
    assert!(volume["state"] == "down" && volume["problem"].to_string().contains(why), "{volume}");
}

fn is_served(world: &World, name: &str) {
    let volume = show(world, name);
    assert!(volume["state"] == "serving" && volume["problem"].is_null(), "{volume}\n{}", world.log());
}

/// What a guest that runs an earlier version of this program writes when it moves a volume off its disk.
fn tombstone_of(volume: &str) -> Vec<u8> {
    let mut bytes = b"TRANSHUME MOVED\n".to_vec();
    bytes.extend(u64::from(u32::MAX).to_le_bytes());
    bytes.extend(u16::try_from(volume.len()).expect("short").to_le_bytes());
    bytes.extend(volume.as_bytes());
    bytes.resize(4096, 0);
    bytes
}

#[test]
fn a_tombstone_that_the_guest_has_written_takes_no_volume_down_for_good() {
    let mut world = World::new();
    let device = Loop::new(&world, "device.img", 4 * MIB as usize, 512);
    world.attach("x", Path::new(&device.device));
    for (volume, is_told_apart) in [("guests-own", true), ("x", false)] {
        world.kill();
        let disk = File::options().write(true).open(&device.device).expect("opened");
        disk.write_all_at(&tombstone_of(volume), 0).and_then(|()| disk.sync_all()).expect("written");
        world.start();
        if is_told_apart {
            is_served(&world, "x");
            world.wait_for_log("is taken for the guest's own bytes");
            world.refused(&["volume", "accept", "x"], 9, "is served");
            continue;
        }
        is_down(&world, "x", "was moved away");
        world.json(&["volume", "accept", "x"]);
        is_served(&world, "x");
        world.kill();
        world.start();
        is_served(&world, "x");
    }
    world.json(&["volume", "detach", "x"]);
    let export = format!("nbd+unix:///y?socket={}", world.text("y.sock"));
    let attach = ["volume", "attach", "y", "--backend", &device.target(), "--export", &export];
    world.refused(&attach, 18, "was moved away");
    world.json(&[&attach[..], &["--accept-tombstone"]].concat());
    world.terminate();
    world.start();
    is_served(&world, "y");
    assert_eq!(device.read(0, 4096), tombstone_of("x"), "the guest's bytes were changed");

    // The tombstone of this very device says where its volume is, whatever anybody says.
    world.json(&["move", "y", "--to", &target(&world.path("new.img"))]);
    world.json(&["volume", "detach", "y"]);
    for more in [&[][..], &["--accept-tombstone"]] {
        world.refused(&[&attach[..], more].concat(), 18, "was moved away");
    }
}

#[test]
fn a_volume_with_a_snapshot_whose_file_system_came_back_under_another_number_is_served_once_somebody_says_so() {
    let mut world = World::new();
    let first = Loop::new(&world, "disk.ext4", 32 * MIB as usize, 512);
    let folder = world.path("mounted");
    let mount = Mount::ext4(&first, &folder, 128);
    let image = folder.join("disk.img");
    std::fs::write(&image, vec![7; MIB as usize]).expect("written");
    let uri = world.attach("x", &image);
    world.json(&["volume", "snapshot", "add", "x", "s1"]);
    tool("qemu-io", &["-f", "raw", "-c", "write -P 9 64k 4k", "-c", "flush", &uri]);
    world.terminate();
    let begun = Instant::now();
    while !Command::new("umount").arg(&folder).output().expect("umount runs").status.success() {
        assert!(begun.elapsed() < HANG, "the file system stays busy");
        std::thread::sleep(Duration::from_millis(20));
    }
    let second = Loop::over(&world.path("disk.ext4"), &[]);
    tool("mount", &[&second.device, &world.text("mounted")]);
    world.start();
    is_down(&world, "x", "another file or block device");
    is_down(&world, "x", "volume accept");
    assert!(!world.run(&["volume", "detach", "x"]).status.success(), "its snapshot would be lost");

    // What is shorter than the volume is not its image, whatever anybody says.
    let aside = folder.join("aside.img");
    std::fs::rename(&image, &aside).expect("renamed");
    std::fs::write(&image, b"short").expect("written");
    world.refused(&["volume", "accept", "x"], 18, "shorter");
    is_down(&world, "x", "another file or block device");
    std::fs::rename(&aside, &image).expect("put back");

    world.json(&["volume", "accept", "x"]);
    is_served(&world, "x");
    let said = tool("qemu-io", &["-f", "raw", "-c", "read -P 9 64k 4k", "-c", "read -P 7 128k 4k", &uri]);
    assert!(!said.contains("verification failed"), "{said}");
    world.terminate();
    world.start();
    is_served(&world, "x");
    world.kill();
    drop(mount);
}
