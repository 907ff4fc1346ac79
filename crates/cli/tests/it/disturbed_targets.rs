//! Targets of moves that another program has used while no daemon ran: nothing is written to them, and they are not taken back, before somebody
//! says so.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::support::load::Load;
use crate::support::qemu::Qemu;
use crate::support::{World, same, target};

/// What the other program has written.
const OTHERS: &[u8] = b"what somebody else needs";
/// Where: in what was copied by then.
const AT: u64 = 4096;
/// So long after the daemon's end a write is told from its own, if the target is in use.
const LATER: Duration = Duration::from_millis(1500);

/// A move is under way as the daemon is killed, and another program has written to its target by the time it is started again.
fn disturbed() -> (World, Load, PathBuf) {
    let mut world = World::new();
    let image = world.image("disk.img", 12 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 61);
    let to = world.path("new.img");
    world.json(&["move", "x", "--to", &target(&to), "--bandwidth", "2MiB/s", "--detach"]);
    world.wait_until_job("it copies nothing", |job| job["progress"]["bytes_copied"].as_u64() > Some(1 << 20));
    world.kill();
    let file = std::fs::File::options().write(true).open(&to).expect("the target is there");
    file.write_all_at(OTHERS, AT).expect("written");
    // Long after the daemon has ended.
    file.set_modified(SystemTime::now() + Duration::from_secs(60)).expect("set");
    drop(file);
    world.start();
    let job = world.wait_until_job("it does not wait", |job| job["state"] == "paused");
    let told = job["error"].to_string();
    assert!(told.contains("waits for a word") && told.contains("transhume resume x"), "{job}");
    load.goes_on();
    assert!(is_theirs(&to), "the target was written to");
    (world, load, to)
}

fn is_theirs(target: &Path) -> bool {
    let mut found = vec![0; OTHERS.len()];
    let file = std::fs::File::open(target).expect("the target is there");
    file.read_exact_at(&mut found, AT).is_ok() && found == OTHERS
}

#[test]
fn a_target_that_another_program_has_used_is_left_as_it_is_when_its_move_is_cancelled() {
    let (mut world, load, to) = disturbed();
    // A restart changes nothing of that.
    world.terminate();
    world.start();
    world.wait_until_job("it does not wait", |job| job["state"] == "paused");
    world.json(&["cancel", "x"]);
    assert!(is_theirs(&to), "the target was taken back");
    load.goes_on();
    same(&world.path("disk.img"), &load.finish());
}

#[test]
fn a_target_that_another_program_has_used_is_copied_over_once_somebody_says_so() {
    let (world, load, to) = disturbed();
    world.json(&["resume", "x"]);
    world.json(&["set", "x", "--bandwidth", "0"]);
    let job = world.wait_until_job("the move does not end", |job| job["report"].is_object());
    assert_eq!(job["state"], "done", "{job}");
    load.goes_on();
    same(&to, &load.finish());
}

#[test]
fn a_target_that_a_vm_uses_is_not_copied_over_once_the_vm_is_off_though_daemons_come_and_go_meanwhile() {
    let mut world = World::new();
    let image = world.image("disk.img", 12 << 20, 65536);
    world.attach("x", &image);
    let to = world.path("new.img");
    world.json(&["move", "x", "--to", &target(&to), "--bandwidth", "2MiB/s", "--detach"]);
    world.wait_until_job("it copies nothing", |job| job["progress"]["bytes_copied"].as_u64() > Some(1 << 20));
    world.kill();
    // The operator goes on by hand, from a copy of the source.
    std::fs::copy(&image, &to).expect("copied");
    let vm = Qemu::raw(&world, &to);
    std::thread::sleep(LATER);
    vm.write(0x66);
    for is_polite in [false, true] {
        world.start();
        world.wait_until_job("it does not wait", |job| job["error"].to_string().contains("in use"));
        match is_polite {
            true => world.terminate(),
            false => world.kill(),
        }
        vm.write(0x67);
    }
    world.start();
    world.wait_until_job("it does not wait", |job| job["error"].to_string().contains("in use"));
    drop(vm);
    let job = world.wait_until_job("it does not wait for a word", |job| job["state"] == "paused");
    assert!(job["error"].to_string().contains("waits for a word"), "{job}");
    world.json(&["cancel", "x"]);
    let there = std::fs::read(&to).expect("the VM's disk is there");
    assert!(there[..1 << 20].iter().all(|byte| *byte == 0x67), "what the VM has written is gone");
}
