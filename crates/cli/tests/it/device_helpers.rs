//! A device's own process, which carries out what the kernel may hold for ever.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::{BlockDevice, Bytes, Data, Mutation};
use env::{EnvRef, RealEnv};
use nbd::{NbdDevice, NbdUri};
use rustix::fs::OFlags;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::fuse::{self, FuseDevice, FuseExport};
use crate::support::helpers::{helpers_of, name_of};
use crate::support::load::Load;
use crate::support::{HANG, World, check_refusal, has_copied, same, target};

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

/// A device hangs with reads and writes under way, and the daemon is killed.
fn others_are_served_beside_device(hung: impl Fn(&World, &FuseDevice) -> PathBuf) {
    if let Some(why) = fuse::is_missing() {
        eprintln!("left out: {why}");
        return;
    }
    let mut world = World::new();
    let far = FuseDevice::new(&world, 16 << 20);
    let hung = hung(&world, &far);
    others_are_served_beside(&mut world, &hung, || far.stop(), || far.go_on());
}

/// The server of `hung` is stopped, and the daemon is killed. It has ended at once, and so the next one serves all others,
/// without a word of anybody. The hung volume is served again when its server goes on.
fn others_are_served_beside(world: &mut World, hung: &Path, stop: impl Fn(), go_on: impl Fn()) {
    let hung = world.attach("hung", hung);
    let other = world.attach("other", &world.image("other.img", 1 << 20, 65536));
    use_volume(&hung);
    use_volume(&other);
    stop();
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
    go_on();
    wait_until("the device answers", || {
        let volumes = world.json(&["volume", "ls"]);
        volumes.as_array().expect("a list").iter().all(|volume| volume["state"] == "serving")
    });
    use_volume(&hung);
    world.kill();
}

#[test]
fn a_killed_daemon_leaves_nothing_behind_in_a_device_whose_pages_have_to_be_read() {
    others_are_served_beside_device(|_, far| PathBuf::from(format!("{},cache=page", far.device)));
}

#[test]
fn a_killed_daemon_leaves_nothing_behind_in_a_file_system_that_does_not_answer() {
    others_are_served_beside_device(|world, _| {
        let image = world.image("behind/near.img", 16 << 20, 65536);
        world.path("fuse").join(image.file_name().expect("a name"))
    });
}

/// What a process has open of the file or folder `place`, a file for each descriptor by which its bytes are reached.
fn open_below(pid: u32, place: &Path) -> Vec<PathBuf> {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").flatten();
    let open = open.filter_map(|entry| {
        let file = std::fs::read_link(entry.path()).ok().filter(|file| file.starts_with(place))?;
        let details = format!("/proc/{pid}/fdinfo/{}", entry.file_name().to_str()?);
        let details = std::fs::read_to_string(details).ok()?;
        let flags = details.lines().find_map(|line| line.strip_prefix("flags:"))?;
        // Those of O_PATH name the file, and no server hears of their end.
        let names = u32::from_str_radix(flags.trim(), 8).is_ok_and(|flags| flags & OFlags::PATH.bits() != 0);
        (!names).then_some(file)
    });
    open.collect()
}

#[test]
fn a_server_that_is_asked_at_every_close_keeps_no_daemon_from_ending() {
    if let Some(why) = fuse::is_missing() {
        eprintln!("left out: {why}");
        return;
    }
    let mut world = World::new();
    let far = FuseExport::new(&world, 16 << 20);
    // Nothing is asked of this one: the descriptors alone would do it.
    let idle = world.attach("idle", &far.file);
    let [helper] = helpers_of(world.pid())[..] else { panic!("it has no helper") };
    assert_eq!(open_below(world.pid(), &far.file), Vec::<PathBuf>::new());
    // The image, its witness, and the file with QEMU's locks.
    assert_eq!(open_below(helper, &far.file).len(), 3);
    let error = world.run(&["copy", &target(&far.file), "--to", &target(&world.path("copy.img"))]);
    check_refusal("copy", &error, 15, &format!("transhumed (process {}, through its transhume-sync)", world.pid()));
    // A helper that is killed is replaced, with the same open files.
    kill_process(process(helper), Signal::KILL).expect("killed");
    wait_until("it lives", || name_of(helper) != "transhume-sync");
    use_volume(&idle);
    world.json(&["volume", "detach", "idle"]);
    others_are_served_beside(&mut world, &far.file, || far.stop(), || far.go_on());
}

#[test]
fn what_a_move_opens_on_such_a_server_is_open_in_its_helper_alone() {
    if let Some(why) = fuse::is_missing() {
        eprintln!("left out: {why}");
        return;
    }
    let world = World::new();
    let _far = FuseDevice::new(&world, 16 << 20);
    world.image("behind/near.img", 4 << 20, 65536);
    let folder = world.path("fuse");
    let image = folder.join("near.img");
    world.attach("x", &PathBuf::from(format!("{},cache=page", image.display())));
    let to = target(&world.path("new.img"));
    for strategy in [["--strategy", "snapshot"], ["--verify", "full"]] {
        let arguments = ["move", "x", "--to", &to, "--bandwidth", "1MiB/s", "--detach"];
        let id = world.json(&[&arguments[..], &strategy].concat())["id"].as_u64().expect("a number");
        world.wait_until_job("nothing is copied", has_copied(1));
        let helper = helpers_of(world.pid());
        let (here, there) = (open_below(world.pid(), &folder), open_below(helper[0], &folder));
        assert_eq!(here, Vec::<PathBuf>::new(), "{strategy:?}");
        assert!(there.len() > 3, "{strategy:?}: {there:?}");
        world.json(&["cancel", "x"]);
        world.wait_for_job(id);
    }
}

/// Flushes the volume at `uri`, after a write and what is to be done then, if `writes`; what it said.
fn flush(uri: &str, writes: Option<&dyn Fn()>) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an event loop");
    runtime.block_on(async {
        let env: EnvRef = Arc::new(RealEnv::new());
        let device = NbdDevice::connect(&uri.parse().expect("an address"), &env).await.expect("it is served");
        if let Some(written) = writes {
            device.write(Mutation::data(Bytes(4096), Data::copy_of(&[9; 4096]))).await.expect("written");
            written();
        }
        device.flush().await.map_err(|error| error.to_string())
    })
}

/// Whether a thread of the process waits for the server of a FUSE file system.
fn hangs(pid: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.path().join("wchan")).ok())
        .any(|place| place.contains("request_wait"))
}

#[test]
fn what_two_helpers_killed_in_flushes_may_have_lost_is_told_until_the_volume_is_attached_anew() {
    if let Some(why) = fuse::is_missing() {
        eprintln!("left out: {why}");
        return;
    }
    let world = World::new();
    // Not one that is asked at every close: a helper that is killed would wait for it.
    let far = FuseDevice::new(&world, 16 << 20);
    world.image("behind/near.img", 4 << 20, 65536);
    let image = world.path("fuse").join("near.img");
    let uri = world.attach("x", &image);
    use_volume(&uri);
    let (written, is_written) = std::sync::mpsc::channel();
    let (stopped, is_stopped) = std::sync::mpsc::channel();
    let flushed = std::thread::spawn({
        let uri = uri.clone();
        let stop = move || {
            let _ = written.send(());
            // It comes, or the test has failed.
            let _: Result<(), _> = is_stopped.recv();
        };
        move || flush(&uri, Some(&stop))
    });
    is_written.recv().expect("it is written");
    far.stop();
    stopped.send(()).expect("somebody waits for it");
    for _ in 0..2 {
        let mut helper = 0;
        wait_until("no sync is under way", || {
            helper = helpers_of(world.pid()).first().copied().unwrap_or_default();
            helper != 0 && hangs(helper)
        });
        kill_process(process(helper), Signal::KILL).expect("killed");
        wait_until("it lives", || name_of(helper) != "transhume-sync");
    }
    flushed.join().expect("it ends").expect_err("nobody knows what the server would have said");
    far.go_on();
    flush(&uri, None).expect_err("that is not forgotten");
    let problem = |world: &World| world.json(&["volume", "show", "x"])["problem"].clone();
    let told = problem(&world).as_str().expect("it has one").to_owned();
    assert!(told.contains("promises nothing durable any more") && told.contains("was killed"), "{told}");
    world.json(&["volume", "detach", "x"]);
    let uri = world.attach("x", &image);
    use_volume(&uri);
    assert!(problem(&world).is_null());
}
