//! What is ours is decided by a lock and a recorded identity: files and block devices that others replace, change or use while no
//! daemon runs, and state directories that come back from a backup.

use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::qemu::Qemu;
use crate::support::{HANG, Loop, Mount, OLD, World, has_copied, same, target, tool};

const MIB: u64 = 1 << 20;

fn wait_until(what: &str, world: &World, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < HANG, "{what}\n{}", world.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn show(world: &World, name: &str) -> Value {
    world.json(&["volume", "show", name])
}

fn is_down(world: &World, name: &str, why: &str) {
    let volume = show(world, name);
    assert_eq!(volume["state"], "down", "{volume}");
    assert!(volume["problem"].to_string().contains(why), "{volume}");
}

/// Moves `x` to `to` slowly, and kills the daemon when some MiB are copied.
fn killed_in_a_move(world: &mut World, to: &str, more: &[&str]) -> u64 {
    let slow = ["move", "x", "--to", to, "--bandwidth", "4MiB/s", "--detach"];
    let id = world.json(&[&slow[..], more].concat())["id"].as_u64().expect("a number");
    world.wait_until_job("nothing is copied", has_copied(2 * MIB));
    world.kill();
    id
}

/// A VM's lock on an image, as any program of QEMU's has it.
struct User(Child);

impl User {
    fn of(world: &World, image: &Path) -> Self {
        let socket = world.text("user.sock");
        let server = Command::new("qemu-nbd")
            .args(["-f", "raw", "-t", "-x", "u", "-k", &socket])
            .arg(image)
            .stdin(Stdio::null())
            .spawn()
            .expect("qemu-nbd is there: run `make setup`");
        wait_until("qemu-nbd does not come up", world, || Path::new(&socket).exists());
        Self(server)
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn an_image_that_is_another_one_after_a_restart_is_served_to_nobody_until_it_is_put_back() {
    let mut world = World::new();
    let image = world.image("disk.img", MIB, 65536);
    world.attach("x", &image);
    for polite in [true, false] {
        if polite {
            world.terminate()
        } else {
            world.kill()
        };
        std::fs::rename(&image, world.path("aside.img")).expect("renamed");
        std::fs::copy(world.path("aside.img"), &image).expect("copied");
        world.start();
        is_down(&world, "x", "another file or block device has this name");
        std::fs::rename(world.path("aside.img"), &image).expect("put back");
        wait_until("it is not served again", &world, || show(&world, "x")["state"] == "serving");
        assert!(show(&world, "x")["problem"].is_null());
    }
    world.kill();
    std::fs::File::options().write(true).open(&image).expect("opened").set_len(MIB / 2).expect("cut");
    world.start();
    is_down(&world, "x", "somebody has made it shorter");
    // Whoever means what is there says so.
    world.json(&["volume", "detach", "x"]);
    world.attach("x", &image);
    assert_eq!(show(&world, "x")["size_bytes"], MIB / 2);
}

#[test]
fn a_block_device_that_went_to_another_disk_is_not_served() {
    let mut world = World::new();
    let device = Loop::new(&world, "device.img", MIB as usize, 512);
    let other = world.path("other.img");
    std::fs::write(&other, vec![7; MIB as usize]).expect("written");
    world.attach("x", Path::new(&device.device));
    world.kill();
    world.start();
    assert_eq!(show(&world, "x")["state"], "serving", "the same one is refused");
    world.kill();
    tool("losetup", &["--detach", &device.device]);
    tool("losetup", &[&device.device, &world.text("other.img")]);
    world.start();
    is_down(&world, "x", "another file or block device has this name");
    assert!(std::fs::read(&other).expect("read").iter().all(|byte| *byte == 7));
    // Attached again to what it was it is the same one for whoever knows loop devices.
    tool("losetup", &["--detach", &device.device]);
    tool("losetup", &[&device.device, &world.text("device.img")]);
    wait_until("it is not served again", &world, || show(&world, "x")["state"] == "serving");
}

#[test]
fn a_start_takes_no_target_back_from_whom_has_it_locked() {
    for is_there in [false, true] {
        let mut world = World::without_daemon();
        std::fs::write(world.path("config.toml"), "lock-wait-seconds = 1\n").expect("written");
        world.daemon.arguments = vec!["--config".to_owned(), world.text("config.toml")];
        world.start();
        let image = world.image("disk.img", 16 * MIB, 65536);
        let expected = std::fs::read(&image).expect("read");
        world.attach("x", &image);
        let to = world.path("new.img");
        if is_there {
            std::fs::write(&to, vec![OLD; MIB as usize]).expect("written");
        }
        let id = killed_in_a_move(&mut world, &target(&to), &["--overwrite"]);
        // The operator goes on by hand.
        tool("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", &world.text("disk.img"), &world.text("new.img")]);
        let by_hand = std::fs::File::options().write(true).open(&to).expect("opened");
        by_hand.write_all_at(&[7; 4096], MIB).expect("written");
        let expected_there = std::fs::read(&to).expect("read");
        let user = User::of(&world, &to);
        world.start();
        let job = world.wait_until_job("it does not say what it waits for", |job| !job["error"].is_null());
        assert!(job["error"].to_string().contains("in use by a QEMU program"), "{job}");
        assert_eq!(show(&world, "x")["state"], "serving");
        assert!(std::fs::read(&to).expect("it is there") == expected_there, "the VM's disk was changed");
        if is_there {
            // It goes on by itself when that is free.
            drop(user);
            let over = world.wait_for_job(id);
            assert_eq!(over["state"], "done", "{over}\n{}", world.log());
            same(&to, &expected);
        } else {
            world.json(&["cancel", "x"]);
            let over = world.wait_for_job(id);
            assert_eq!(over["state"], "cancelled", "{over}\n{}", world.log());
            assert!(over["error"].to_string().contains("is left as it is"), "{over}");
            assert!(std::fs::read(&to).expect("it is there") == expected_there, "the VM's disk was changed");
            drop(user);
        }
    }
}

#[test]
fn a_target_that_is_not_there_yet_is_waited_for() {
    let mut world = World::new();
    let image = world.image("disk.img", 16 * MIB, 65536);
    let expected = std::fs::read(&image).expect("read");
    world.attach("x", &image);
    let (folder, away) = (world.path("mounted"), world.path("away"));
    std::fs::create_dir(&folder).expect("created");
    let to = folder.join("new.img");
    let id = killed_in_a_move(&mut world, &target(&to), &[]);
    std::fs::rename(&folder, &away).expect("unmounted");
    world.start();
    let job = world.wait_until_job("it does not say what it waits for", |job| !job["error"].is_null());
    assert!(job["error"].to_string().contains("mount its file system"), "{job}");
    assert_eq!(show(&world, "x")["state"], "serving");
    std::fs::rename(&away, &folder).expect("mounted");
    let over = world.wait_for_job(id);
    assert_eq!(over["state"], "done", "{over}\n{}", world.log());
    same(&to, &expected);
}

#[test]
fn a_cancel_tells_of_a_target_that_is_not_there() {
    let mut world = World::new();
    let image = world.image("disk.img", 16 * MIB, 65536);
    world.attach("x", &image);
    let (folder, away) = (world.path("mounted"), world.path("away"));
    std::fs::create_dir(&folder).expect("created");
    let id = killed_in_a_move(&mut world, &target(&folder.join("new.img")), &[]);
    std::fs::rename(&folder, &away).expect("unmounted");
    world.start();
    world.wait_until_job("it does not say what it waits for", |job| !job["error"].is_null());
    world.json(&["cancel", "x"]);
    let over = world.wait_for_job(id);
    assert_eq!(over["state"], "cancelled", "{over}\n{}", world.log());
    let said = over["error"].to_string();
    assert!(said.contains("is left as it is") && said.contains("is not there"), "{over}");
    assert!(away.join("new.img").exists(), "what was not there was taken back");
}

#[test]
fn an_image_is_the_same_one_when_its_file_system_was_mounted_again_under_another_number() {
    let mut world = World::new();
    let first = Loop::new(&world, "disk.ext4", 32 * MIB as usize, 512);
    let folder = world.path("mounted");
    let mount = Mount::ext4(&first, &folder, 256);
    let image = folder.join("disk.img");
    std::fs::write(&image, vec![7; MIB as usize]).expect("written");
    world.attach("x", &image);
    world.kill();
    // What a dead daemon has under way keeps it busy for a moment.
    let is_unmounted = || Command::new("umount").arg(&folder).output().expect("umount runs").status.success();
    wait_until("the file system stays busy", &world, is_unmounted);
    // The first is still attached, so this is another one.
    let second = Loop::over(&world.path("disk.ext4"), &[]);
    tool("mount", &[&second.device, &world.text("mounted")]);
    world.start();
    let volume = show(&world, "x");
    assert_eq!(volume["state"], "serving", "{volume}");
    world.kill();
    drop(mount);
}

#[test]
fn what_is_changed_while_no_daemon_runs_is_found_and_only_then_everything_is_read_again() {
    for (polite, changes) in [(true, false), (true, true), (false, true)] {
        let mut world = World::new();
        let image = world.image("disk.img", 48 * MIB, 65536);
        world.attach("x", &image);
        let to = world.path("new.img");
        let slow = ["move", "x", "--to", &target(&to), "--bandwidth", "5MiB/s", "--detach"];
        let id = world.json(&slow)["id"].as_u64().expect("a number");
        // The target is flushed, and what it has is written down, every five seconds.
        world.wait_until_job("nothing is copied", has_copied(32 * MIB));
        if polite {
            world.terminate()
        } else {
            world.kill()
        };
        if changes {
            let by_hand = std::fs::File::options().write(true).open(&image).expect("opened");
            by_hand.write_all_at(&[0x5a; 4096], MIB + 8192).expect("written");
        }
        let expected = std::fs::read(&image).expect("read");
        world.start();
        world.json(&["set", "x", "--bandwidth", "0"]);
        let over = world.wait_for_job(id);
        assert_eq!(over["state"], "done", "{over}\n{}", world.log());
        same(&to, &expected);
        let report = &over["report"];
        let number = |name: &str| report[name].as_u64().unwrap_or_else(|| panic!("{name}: {report}"));
        assert!(number("bytes_resumed") >= 16 * MIB, "{over}");
        assert_eq!(number("bytes_rechecked") > 0, changes, "{over}");
    }
}

/// Copies the state directory, as a backup program does.
pub(crate) fn back_up(world: &World, name: &str) {
    tool("cp", &["-a", &world.text("state"), &world.text(name)]);
}

pub(crate) fn restore(world: &mut World, name: &str) {
    world.terminate();
    std::fs::remove_dir_all(world.path("state")).expect("removed");
    tool("cp", &["-a", &world.text(name), &world.text("state")]);
    world.start();
}

#[test]
fn a_journal_from_before_a_move_serves_no_device_that_was_moved_away_and_nobody_attaches_that() {
    let mut world = World::new();
    let device = Loop::new(&world, "device.img", 16 * MIB as usize, 512);
    let uri = world.attach("x", Path::new(&device.device));
    back_up(&world, "before");
    let to = world.path("new.img");
    let slow = ["move", "x", "--to", &target(&to), "--bandwidth", "8MiB/s", "--detach"];
    let id = world.json(&slow)["id"].as_u64().expect("a number");
    world.wait_until_job("nothing is copied", has_copied(2 * MIB));
    back_up(&world, "during");
    assert_eq!(world.wait_for_job(id)["state"], "done");
    tool("qemu-io", &["-f", "raw", "-c", "write -P 7 1M 4k", "-c", "flush", &uri]);
    let live = std::fs::read(&to).expect("read");
    for backup in ["before", "during"] {
        restore(&mut world, backup);
        let volume = show(&world, "x");
        assert_eq!(volume["state"], "down", "{volume}");
        let problem = volume["problem"].to_string();
        assert!(problem.contains("was moved away") || problem.contains("does not know of"), "{volume}");
        assert!(std::fs::read(&to).expect("read") == live, "the live volume was changed");
    }
    world.json(&["volume", "detach", "x"]);
    let export = format!("nbd+unix:///y?socket={}", world.text("y.sock"));
    let backend = format!("file:{}", device.device);
    world.refused(&["volume", "attach", "y", "--backend", &backend, "--export", &export], 18, "was moved away");
}

#[test]
fn a_journal_from_the_middle_of_a_move_does_not_go_on_with_it_when_a_file_tells_of_its_end() {
    let mut world = World::new();
    let image = world.image("disk.img", 16 * MIB, 65536);
    world.attach("x", &image);
    let to = world.path("new.img");
    let slow = ["move", "x", "--to", &target(&to), "--bandwidth", "8MiB/s", "--detach"];
    let id = world.json(&slow)["id"].as_u64().expect("a number");
    world.wait_until_job("nothing is copied", has_copied(2 * MIB));
    back_up(&world, "during");
    assert_eq!(world.wait_for_job(id)["state"], "done");
    // The source is back, too, as from the same backup.
    let kept = world.files("disk.img.moved-").pop().expect("kept");
    std::fs::rename(&kept, &image).expect("renamed");
    let by_hand = std::fs::File::options().write(true).open(&to).expect("opened");
    by_hand.write_all_at(&[7; 4096], MIB).expect("written by the guest");
    let live = std::fs::read(&to).expect("read");
    restore(&mut world, "during");
    is_down(&world, "x", "does not know of");
    assert!(std::fs::read(&to).expect("read") == live, "the live volume was changed");
}

/// Adds a layer of this kind to `x`, or has the one that is there hold bytes.
fn begin_to_hold(world: &World, kind: &str) {
    match kind {
        "snapshot" => world.json(&["volume", "snapshot", "add", "x", "s1"]),
        "cache" => world.json(&["volume", "layer", "set", "x", "cache", "--mode", "write-back"]),
        "surrogate" => {
            let add = ["volume", "layer", "add", "x", "surrogate", "--surrogate", "fast", "--sole-copy"];
            world.json(&[&add[..], &["--surrogate-on-flash"]].concat())
        }
        _ => {
            let slow = ["move", "x", "--to", &target(&world.path("new.img")), "--strategy", "snapshot"];
            let job = world.json(&[&slow[..], &["--bandwidth", "1MiB/s", "--detach"]].concat());
            wait_until("no overlay is made", world, || !world.files(".disk.img.overlay-").is_empty());
            wait_until("nothing is marked", world, || has_layers_mark(&world.path("disk.img")));
            job
        }
    };
}

fn has_layers_mark(image: &Path) -> bool {
    let mut value = [0_u8; 64];
    rustix::fs::getxattr(image, "user.transhume.layers", &mut value).is_ok()
}

#[test]
fn a_state_directory_from_before_a_layer_does_not_serve_the_image_without_it() {
    for kind in ["snapshot", "cache", "surrogate", "snapshot move"] {
        let mut world = World::new();
        let image = world.image("disk.img", 16 * MIB, 65536);
        let uri = world.attach("x", &image);
        // On another disk than the volume, as a surrogate wants it.
        let memory = tempfile::Builder::new().prefix("th").tempdir_in("/dev/shm").expect("a directory in memory");
        let store = |name: &str| format!("file:{},size=64MiB", memory.path().join(name).display());
        if kind == "cache" {
            world.json(&["cache", "create", "ssd", "--store", &store("ssd")]);
            let add = ["volume", "layer", "add", "x", "cache", "--cache", "ssd", "--size", "8MiB"];
            world.json(&[&add[..], &["--mode", "write-through"]].concat());
        }
        if kind == "surrogate" {
            world.json(&["surrogate", "create", "fast", "--partition", "32MiB", "--store", &store("fast")]);
        }
        assert!(!has_layers_mark(&image), "{kind}: nothing holds bytes yet");
        back_up(&world, "before");
        begin_to_hold(&world, kind);
        tool("qemu-io", &["-f", "raw", "-c", "write -P 7 1M 4k", "-c", "flush", &uri]);
        world.kill();
        std::fs::rename(world.path("state"), world.path("newest")).expect("renamed");
        let there = std::fs::read(&image).expect("read");
        tool("cp", &["-a", &world.text("before"), &world.text("state")]);
        world.start();
        is_down(&world, "x", "a layer was added to this volume of which this state directory does not know");
        assert!(std::fs::read(&image).expect("read") == there, "{kind}: the image was written to");
        if kind == "snapshot" {
            restore(&mut world, "newest");
            assert_eq!(show(&world, "x")["state"], "serving", "{}", world.log());
            let said = tool("qemu-io", &["-f", "raw", "-c", "read -P 7 1M 4k", &uri]);
            assert!(!said.contains("verification failed"), "{said}");
            restore(&mut world, "before");
        }
        // Whoever means the image as it is says so.
        world.json(&["volume", "detach", "x"]);
        world.attach("x", &image);
        world.terminate();
        world.start();
        assert_eq!(show(&world, "x")["state"], "serving", "{kind}: {}", world.log());
    }
}

#[test]
fn a_mark_of_layers_is_written_again_where_it_is_missing() {
    let mut world = World::new();
    let image = world.image("disk.img", 16 * MIB, 65536);
    world.attach("x", &image);
    world.json(&["volume", "snapshot", "add", "x", "s1"]);
    world.terminate();
    // As after a crash between the record and the mark.
    rustix::fs::removexattr(&image, "user.transhume.layers").expect("removed");
    world.start();
    assert_eq!(show(&world, "x")["state"], "serving");
    assert!(has_layers_mark(&image));
    let to = world.path("new.img");
    std::fs::write(&to, vec![OLD; MIB as usize]).expect("written");
    rustix::fs::setxattr(&to, "user.transhume.layers", b"9", rustix::fs::XattrFlags::empty()).expect("marked");
    // What the target was marked with was another volume's.
    let over = world.json(&["move", "x", "--to", &target(&to), "--overwrite"]);
    assert_eq!(over["state"], "done", "{over}");
    world.terminate();
    world.start();
    assert_eq!(show(&world, "x")["state"], "serving", "{}", world.log());
    assert!(has_layers_mark(&to));
}

#[test]
fn a_mark_of_layers_that_came_along_with_a_copy_takes_no_other_volume_down() {
    let mut world = World::new();
    let (template, image) = (world.image("template.img", 4 * MIB, 65536), world.image("disk.img", 4 * MIB, 65536));
    for (name, image) in [("t", &template), ("x", &image)] {
        world.attach(name, image);
    }
    for name in ["s1", "s2"] {
        world.json(&["volume", "snapshot", "add", "t", name]);
    }
    world.terminate();
    tool("cp", &["-a", &world.text("template.img"), &world.text("disk.img")]);
    assert!(has_layers_mark(&image), "the copy has brought no mark along");
    world.start();
    assert_eq!(show(&world, "x")["state"], "serving", "{}", world.log());
    // It gets a mark of its own all the same.
    back_up(&world, "before");
    world.json(&["volume", "snapshot", "add", "x", "s1"]);
    world.terminate();
    world.start();
    assert_eq!(show(&world, "x")["state"], "serving", "{}", world.log());
    restore(&mut world, "before");
    is_down(&world, "x", "a layer was added to this volume of which this state directory does not know");
}

#[test]
fn an_older_copy_of_an_overlay_is_not_believed_and_the_right_one_is_looked_for() {
    for kind in ["snapshot", "snapshot elsewhere", "reverted snapshot", "snapshot move"] {
        let mut world = World::new();
        let image = world.image("disk.img", 16 * MIB, 65536);
        let uri = world.attach("x", &image);
        let (elsewhere, aside) = (world.path("elsewhere"), world.path("aside"));
        std::fs::create_dir(&elsewhere).expect("made");
        let write = |pattern: u8| {
            tool("qemu-io", &["-f", "raw", "-c", &format!("write -P {pattern} 1M 4k"), "-c", "flush", &uri]);
        };
        match kind {
            "snapshot elsewhere" => {
                world.json(&["volume", "snapshot", "add", "x", "s1", "--at", &world.text("elsewhere")]);
            }
            "reverted snapshot" => {
                world.json(&["volume", "snapshot", "add", "x", "s1"]);
                world.json(&["volume", "snapshot", "revert", "x"]);
            }
            _ => begin_to_hold(&world, kind),
        }
        write(6);
        world.terminate();
        let overlay = match kind {
            "snapshot elsewhere" => elsewhere.join(".disk.img.layer.overlay-1"),
            "snapshot move" => world.files(".disk.img.overlay-").into_iter().max().expect("there"),
            _ => world.files(".disk.img.layer.overlay-").pop().expect("there"),
        };
        tool("cp", &["--sparse=always", &overlay.display().to_string(), &world.text("backup")]);
        world.start();
        assert_eq!(show(&world, "x")["problem"], Value::Null, "{kind}: the same one is refused\n{}", world.log());
        write(7);
        world.kill();
        std::fs::rename(&overlay, &aside).expect("renamed");
        std::fs::rename(world.path("backup"), &overlay).expect("restored");
        let there = std::fs::read(&overlay).expect("read");
        world.start();
        is_down(&world, "x", "another file or block device has this name");
        is_down(&world, "x", &overlay.file_name().expect("a name").to_string_lossy());
        assert!(std::fs::read(&overlay).expect("read") == there, "{kind}: another file was written to");
        std::fs::rename(&aside, &overlay).expect("put back");
        let is_offered = || UnixStream::connect(world.path("x.sock")).is_ok();
        wait_until("it is not served again", &world, || show(&world, "x")["problem"].is_null() && is_offered());
        let said = tool("qemu-io", &["-f", "raw", "-c", "read -P 7 1M 4k", &uri]);
        assert!(!said.contains("verification failed"), "{kind}: {said}");
    }
}

#[test]
fn an_overlay_that_has_moved_is_known_by_its_new_file() {
    let mut world = World::new();
    let image = world.image("disk.img", 4 * MIB, 65536);
    world.attach("x", &image);
    world.json(&["volume", "snapshot", "add", "x", "s1"]);
    let to = world.path("new.img");
    let over = world.json(&["move", "x", "--to", &target(&to)]);
    assert_eq!(over["state"], "done", "{over}");
    // Its overlay lies beside the target now, and is another file.
    let overlay = world.files(".new.img.layer.overlay-").pop().expect("there");
    world.terminate();
    world.start();
    assert_eq!(show(&world, "x")["state"], "serving", "{}", world.log());
    world.terminate();
    std::fs::copy(&overlay, world.path("copy")).expect("copied");
    std::fs::rename(world.path("copy"), &overlay).expect("replaced");
    world.start();
    is_down(&world, "x", "another file or block device has this name");
}

#[test]
fn a_disk_whose_image_was_replaced_is_not_given_back_to_its_vm_and_a_move_saves_it() {
    let world = World::new();
    let image = world.image("disk.img", 4 * MIB, 65536);
    let qemu = Qemu::raw(&world, &image);
    world.json(&["adopt", "--qmp", &qemu.text(), "--node", "disk0", "--name", "web1"]);
    std::fs::copy(&image, world.path("restored.img")).expect("copied");
    std::fs::rename(world.path("restored.img"), &image).expect("replaced");
    qemu.write(0x5a);
    world.refused(&["release", "web1"], 18, "another file or block device has this name");
    assert!(qemu.file_of("disk0").starts_with("nbd+unix:"), "QEMU has the other file");
    let to = world.path("saved.img");
    // The old name is somebody else's, so the move is done but for putting that away.
    world.refused(&["move", "web1", "--to", &target(&to), "--no-persist"], 43, "is not what was moved any more");
    world.json(&["release", "web1"]);
    assert_eq!(qemu.file_of("disk0"), world.text("saved.img"));
    drop(qemu);
    assert!(std::fs::read(&to).expect("read")[..MIB as usize].iter().all(|byte| *byte == 0x5a));
}
