//! A device's own process, which carries out what the kernel may hold for ever.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::{BlockDevice, Bytes, Data, Mutation};
use env::{EnvRef, RealEnv};
use nbd::{NbdDevice, NbdUri};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::fuse::{self, FuseDevice};
use crate::support::helpers::{helpers_of, name_of};
use crate::support::load::Load;
use crate::support::{HANG, World, same};

/// The files that a process has open.
fn open_files(pid: u32) -> Vec<PathBuf> {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").flatten();
    open.filter_map(|file| std::fs::read_link(file.path()).ok()).filter(|file| file.starts_with("/tmp")).collect()
}

/// A write, zeroes and a flush of the volume at `uri`.
fn use_volume(uri: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an event loop");
    runtime.block_on(async {
        let env: EnvRef = Arc::new(RealEnv::new());
        let uri: NbdUri = uri.parse().expect("an address");
        let device = NbdDevice::connect(&uri, &env).await.expect("it is served");
        device.write(Mutation::data(Bytes(0), Data::copy_of(&[7; 4096]))).await.expect("written");
        let extent = block::Extent::new(Bytes(8192), Bytes(65536));
        device.write(Mutation::zeroes(extent, true)).await.expect("zeroed");
        device.flush().await.expect("flushed");
    });
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < HANG, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn process(pid: u32) -> Pid {
    Pid::from_raw(i32::try_from(pid).expect("small")).expect("a number")
}

#[test]
fn a_device_has_a_process_of_its_own_for_syncs_and_nothing_else_is_in_it() {
    let mut world = World::new();
    let (image, other) = (world.image("x.img", 1 << 20, 65536), world.image("y.img", 1 << 20, 65536));
    let (x, y) = (world.attach("x", &image), world.attach("y", &other));
    assert!(helpers_of(world.pid()).is_empty(), "nothing was flushed yet");
    use_volume(&x);
    let helpers = helpers_of(world.pid());
    let [helper] = helpers[..] else { panic!("one device has {helpers:?}") };
    assert!(open_files(helper).iter().all(|file| file == &image || is_log(file)), "{:?}", open_files(helper));
    use_volume(&y);
    assert_eq!(helpers_of(world.pid()), vec![helper], "both are on one device");

    // What ends a whole service does not end it before the daemon.
    kill_process(process(helper), Signal::TERM).expect("signalled");
    use_volume(&x);
    assert_eq!(helpers_of(world.pid()), vec![helper]);
    // The image is free as soon as the volume is gone.
    world.json(&["volume", "detach", "x"]);
    let x = world.attach("x", &image);
    use_volume(&x);
    for name in ["x", "y"] {
        world.json(&["volume", "detach", name]);
    }
    wait_until("it stays without a file", || helpers_of(world.pid()).is_empty());
    world.attach("x", &image);
    use_volume(&x);
    let helpers = helpers_of(world.pid());
    world.kill();
    wait_until("it outlives the daemon", || helpers.iter().all(|helper| name_of(*helper) != "transhume-sync"));
}

/// It shares the daemon's standard error.
fn is_log(file: &Path) -> bool {
    file.file_name().is_some_and(|name| name == "log")
}

#[test]
fn a_helper_that_dies_is_replaced_by_another() {
    let world = World::new();
    let image = world.image("x.img", 1 << 20, 65536);
    let uri = world.attach("x", &image);
    use_volume(&uri);
    let helpers = helpers_of(world.pid());
    kill_process(process(helpers[0]), Signal::KILL).expect("killed");
    wait_until("it lives", || name_of(helpers[0]) != "transhume-sync");
    use_volume(&uri);
    assert_eq!(helpers_of(world.pid()).len(), 1);
}

#[test]
fn helpers_that_are_killed_while_a_guest_flushes_cost_it_nothing() {
    let world = World::new();
    let image = world.image("x.img", 4 << 20, 65536);
    let load = Load::start(&world.attach("x", &image), &image, 81);
    for _ in 0..20 {
        // Flushes among it: an error of one ends the guest.
        load.goes_on();
        for helper in helpers_of(world.pid()) {
            // It may be gone already.
            let _ = kill_process(process(helper), Signal::KILL);
        }
    }
    load.goes_on();
    let volumes = world.json(&["volume", "ls"]);
    assert!(volumes[0]["problem"].is_null(), "{volumes}\n{}", world.log());
    let log = world.log();
    assert!(!log.contains("a sync failed"), "{log}");
    same(&image, &load.finish());
}

/// Reads and writes that wait for a device which does not answer, each in a thread that waits for it.
fn leave_requests(uri: &str) {
    for number in 0..8_u64 {
        let uri = uri.to_owned();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an event loop");
            runtime.block_on(async {
                let env: EnvRef = Arc::new(RealEnv::new());
                let uri: NbdUri = uri.parse().expect("an address");
                let Ok(device) = NbdDevice::connect(&uri, &env).await else { return };
                // A part of a block: the page cache has to fetch the rest. It fails when the daemon is killed.
                let place = Bytes((number * 2 + 1) * 262_144 + 512);
                let _ = match number % 2 {
                    0 => device.write(Mutation::data(place, Data::copy_of(&[7; 1024]))).await,
                    _ => device.read(place, block::Buffer::unpooled(65536)).await.map(drop),
                };
            });
        });
    }
}

/// A device hangs with reads and writes under way, and the daemon is killed. It has ended at once, and so the next one serves
/// all others, without a word of anybody. The hung volume is served again when its device answers.
fn others_are_served_beside(hung: impl Fn(&World, &FuseDevice) -> PathBuf) {
    if let Some(why) = fuse::is_missing() {
        eprintln!("left out: {why}");
        return;
    }
    let mut world = World::new();
    let far = FuseDevice::new(&world, 16 << 20);
    let hung = world.attach("hung", &hung(&world, &far));
    let other = world.attach("other", &world.image("other.img", 1 << 20, 65536));
    use_volume(&hung);
    use_volume(&other);
    far.stop();
    leave_requests(&hung);
    std::thread::sleep(Duration::from_millis(300));
    let pid = world.pid();
    let start = Instant::now();
    world.kill();
    assert!(!Path::new(&format!("/proc/{pid}")).exists(), "something of the daemon waits for the device");
    world.start();
    use_volume(&other);
    // The API is there after the five seconds that a start gives a device.
    assert!(start.elapsed() < Duration::from_secs(15), "others waited for {:?}", start.elapsed());
    far.go_on();
    wait_until("the device answers", || {
        let volumes = world.json(&["volume", "ls"]);
        volumes.as_array().expect("a list").iter().all(|volume| volume["state"] == "serving")
    });
    use_volume(&hung);
    world.kill();
}

#[test]
fn a_killed_daemon_leaves_nothing_behind_in_a_device_whose_pages_have_to_be_read() {
    others_are_served_beside(|_, far| PathBuf::from(format!("{},cache=page", far.device)));
}

#[test]
fn a_killed_daemon_leaves_nothing_behind_in_a_file_system_that_does_not_answer() {
    others_are_served_beside(|world, _| {
        let image = world.image("behind/near.img", 16 << 20, 65536);
        world.path("fuse").join(image.file_name().expect("a name"))
    });
}
