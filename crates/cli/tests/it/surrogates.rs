//! Moves whose guest is served by a surrogate while its disk is copied.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::load::Load;
use crate::support::pair::{Pair, is_over, wait_until};
use crate::support::server::Server;
use crate::support::{HANG, World, has_copied, same, target};
use serde_json::Value;
use transhume_guest::{Disk, Event, Guest, GuestSpec, Side, TwoHosts, TwoHostsSpec, create_filled};

/// Surrogates are in memory: none may be on the rotating disk that the volumes are on.
fn memory() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("th").tempdir_in("/dev/shm").expect("a directory in memory")
}

fn store(memory: &Path, name: &str) -> String {
    format!("file:{},size=128MiB", memory.join(name).display())
}

/// A surrogate `fast` with so many stores.
fn make_surrogate(world: &World, memory: &Path, stores: usize) {
    let stores: Vec<String> = (0..stores).map(|number| store(memory, &format!("s{number}"))).collect();
    let mut words = vec!["surrogate", "create", "fast", "--partition", "32MiB"];
    stores.iter().for_each(|store| words.extend(["--store", store]));
    world.json(&words);
}

fn parts(world: &World) -> usize {
    world.json(&["surrogate", "show", "fast"])["partitions"].as_array().expect("a list").len()
}

fn wait_until_given_back(world: &World) {
    let start = Instant::now();
    while parts(world) > 0 {
        assert!(start.elapsed() < HANG, "the surrogate is not given back\n{}", world.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(world.json(&["volume", "layer", "ls", "x"]), Value::Array(Vec::new()), "a layer is left");
}

#[test]
fn a_surrogate_is_made_listed_drained_and_removed() {
    let (world, memory) = (World::new(), memory());
    let first = store(memory.path(), "s0");
    world.refused(&["surrogate", "create", "fast", "--store", &store(Path::new("/nowhere"), "s")], 16, "/nowhere");
    let small = format!("file:{},size=8MiB", memory.path().join("small").display());
    world.refused(&["surrogate", "create", "fast", "--store", &small], 14, "no room");
    assert!(!memory.path().join("small").exists(), "what was made for it is left");
    let made = world.json(&["surrogate", "create", "fast", "--store", &first]);
    assert_eq!((&made["partition_bytes"], &made["partitions_max"]), (&(16 << 20).into(), &8.into()), "{made}");
    world.refused(&["surrogate", "create", "fast", "--store", &store(memory.path(), "s1")], 6, "already");
    world.refused(&["surrogate", "create", "other", "--store", &first], 6, "is a store of a surrogate already");
    let image = world.image("disk.img", 4 << 20, 65536);
    world.attach("x", &image);
    let to = target(&world.path("new.img"));
    world.refused(&["move", "x", "--to", &to, "--surrogate", "slow"], 5, "no surrogate slow");
    world.refused(&["move", "x", "--to", &to, "--surrogate", "fast"], 2, "the only copy of what the guest writes");
    let by_snapshot = ["move", "x", "--to", &to, "--surrogate", "fast", "--sole-copy", "--strategy", "snapshot"];
    world.refused(&by_snapshot, 2, "takes the guest's writes itself");
    assert_eq!(world.json(&["surrogate", "drain", "fast"])["draining"], true);
    world.refused(&["move", "x", "--to", &to, "--surrogate", "fast", "--sole-copy"], 40, "is being drained");
    assert!(!world.path("new.img").exists(), "what the move had made is left");
    assert_eq!(world.json(&["surrogate", "ls"]).as_array().map(Vec::len), Some(1));
    world.json(&["surrogate", "rm", "fast"]);
    assert!(!memory.path().join("s0").exists(), "its file is left");
    world.refused(&["surrogate", "show", "fast"], 5, "no surrogate fast");
    same(&image, &std::fs::read(&image).expect("read"));
}

#[test]
fn a_guest_is_served_by_the_surrogate_while_its_disk_is_copied_by_every_strategy() {
    let (world, memory) = (World::new(), memory());
    make_surrogate(&world, memory.path(), 1);
    let mut current = world.image("disk.img", (24 << 20) + 1536, 65536);
    let uri = world.attach("x", &current);
    let load = Load::start(&uri, &current, 700);
    for (number, strategy) in ["mirror", "dbt", "incremental-dbt", "mirror-async", "auto"].into_iter().enumerate() {
        let to = world.path(&format!("new-{number}.img"));
        let place = target(&to);
        let words = ["move", "x", "--to", &place, "--strategy", strategy, "--verify", "full", "--bandwidth", "40MiB/s"];
        let report = world.json(&[&words, &["--surrogate", "fast", "--sole-copy"][..]].concat());
        assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}\n{}", world.log());
        let redirection = &report["redirection"];
        let count = |name: &str| redirection[name].as_u64().unwrap_or_default();
        assert!(count("writes_redirected") > 0 && count("reads_redirected") > 0, "{strategy}: {redirection}");
        assert!(!current.exists(), "the source is left");
        wait_until_given_back(&world);
        current = to;
        load.goes_on();
    }
    let expected = load.finish();
    world.json(&["volume", "detach", "x"]);
    same(&current, &expected);
}

#[test]
fn a_move_that_is_cancelled_brings_back_what_the_surrogate_holds() {
    let (world, memory) = (World::new(), memory());
    make_surrogate(&world, memory.path(), 2);
    let image = world.image("disk.img", 48 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 710);
    for round in 0..3 {
        let to = target(&world.path(&format!("new-{round}.img")));
        let words = ["move", "x", "--to", &to, "--surrogate", "fast", "--bandwidth", "16MiB/s", "--detach"];
        world.json(&words);
        world.wait_until_job("it copies", has_copied(4 << 20));
        load.goes_on();
        assert_eq!(parts(&world), 1);
        world.refused(&["surrogate", "rm", "fast"], 8, "has a part of");
        world.refused(&["volume", "layer", "rm", "x", &layer(&world)], 2, "of a move");
        assert_eq!(world.json(&["cancel", "x"])["state"], "cancelled");
        // The guest may have its disk back before all of that is in it.
        wait_until_given_back(&world);
        load.goes_on();
    }
    let expected = load.finish();
    world.json(&["volume", "detach", "x"]);
    same(&image, &expected);
}

#[test]
fn a_volume_that_went_to_another_host_and_is_given_back_has_what_the_surrogate_holds() {
    let (pair, memory) = (Pair::new(), memory());
    make_surrogate(&pair.a, memory.path(), 2);
    let image = pair.a.image("disk.img", 8 << 20, 65536);
    let uri = pair.a.attach("x", &image);
    let load = Load::start(&uri, &image, 730);
    pair.a.json(&["move", "x", "--to", "b", "--surrogate", "fast", "--bandwidth", "2MiB/s", "--detach"]);
    pair.wait_for_move("it copies", |job| job["progress"]["bytes_copied"].as_u64() > Some(0));
    load.goes_on();
    pair.network.close();
    pair.a.json(&["set", "x", "--bandwidth", "0"]);
    wait_until("it is given up", || (pair.at_a("x")["backend"] == "b:x").then_some(()));
    assert_eq!(parts(&pair.a), 1, "the part was given back before the other host has the volume");
    pair.network.cut();
    pair.a.json(&["resolve", "x", "--give-back"]);
    load.goes_on();
    wait_until_given_back(&pair.a);
    pair.network.mend();
    wait_until("the other host forgets it", || pair.volumes_at_b().is_empty().then_some(()));
    // It moves again, and comes through this time.
    pair.a.json(&["move", "x", "--to", "b", "--surrogate", "fast", "--detach"]);
    let over = pair.wait_for_move("it is over", is_over);
    assert_eq!(over["state"], "done", "{over}");
    wait_until_given_back(&pair.a);
    load.goes_on();
    same(&pair.arrived("x"), &load.finish());
}

fn layer(world: &World) -> String {
    world.json(&["volume", "layer", "ls", "x"])[0]["id"].as_str().expect("it has one").to_owned()
}

#[test]
fn the_daemon_is_killed_while_a_surrogate_serves_a_guest() {
    let (mut world, memory) = (World::new(), memory());
    make_surrogate(&world, memory.path(), 2);
    let mut current = world.image("disk.img", 32 << 20, 65536);
    let uri = world.attach("x", &current);
    let load = Load::start(&uri, &current, 720);
    let mut delay_ms = 53;
    for round in 0..4 {
        let to = world.path(&format!("new-{round}.img"));
        let place = target(&to);
        let words = ["move", "x", "--to", &place, "--surrogate", "fast", "--bandwidth", "30MiB/s", "--detach"];
        let id = world.json(&words)["id"].as_u64().expect("a number");
        world.kill_four_times(&mut delay_ms);
        if round % 2 == 0 {
            let _ = world.run(&["cancel", "x"]);
            world.kill_four_times(&mut delay_ms);
        }
        let over = world.wait_for_job(id);
        wait_until_given_back(&world);
        if over["state"] == "done" {
            current = to;
        }
        load.goes_on();
    }
    let expected = load.finish();
    world.json(&["volume", "detach", "x"]);
    same(&current, &expected);
}

/// A VM with two disks at the first of two hosts, whose surrogate `fast` has two stores, and the folder of all that.
struct Machine {
    guest: Guest,
    hosts: TwoHosts,
    folder: tempfile::TempDir,
}

impl Machine {
    fn new(memory: &Path) -> Self {
        let folder = tempfile::Builder::new().prefix("vm").tempdir().expect("a temporary directory");
        let programs = Path::new(env!("CARGO_BIN_EXE_transhumed")).parent().expect("in a directory");
        let spec = TwoHostsSpec { more: "run-vms = true\n", ..TwoHostsSpec::default() };
        let mut hosts = TwoHosts::new(programs, folder.path(), spec).expect("two networks; run `make setup`, as root");
        hosts.start().expect("both daemons start");
        hosts.pair().expect("paired");
        let load =
            transhume_guest::Load { is_prefilled: true, rate: 200, workers: 4, read_percent: 50, ..<_>::default() };
        let mut spec = GuestSpec::new().workload_socket().load(load);
        for name in ["disk0", "disk1"] {
            let file = folder.path().join(name);
            create_filled(&file, 24 << 20).expect("filled");
            spec = spec.disk(Disk::raw(&file, name));
        }
        let mut guest = Guest::boot(spec.launcher(hosts.launcher(Side::A))).expect("QEMU starts; run `make setup`");
        guest.wait_for_load(HANG).expect("the load begins");
        let machine = Self { guest, hosts, folder };
        machine.json(&["vm", "add", "web1", "--qmp", &machine.guest.qmp_socket().display().to_string()]);
        let [first, second] = ["s0", "s1"].map(|name| store(memory, name));
        let words = ["surrogate", "create", "fast", "--partition", "32MiB", "--store", &first, "--store", &second];
        machine.json(&words);
        machine
    }

    fn json(&self, words: &[&str]) -> Value {
        self.hosts.daemon(Side::A).json(words).unwrap_or_else(|error| panic!("{words:?}: {error:#}\n{}", self.logs()))
    }

    fn refused(&self, words: &[&str], part: &str) {
        let output = self.hosts.daemon(Side::A).run(words).expect("the program runs");
        // A plan says it among the rest, a move on standard error.
        let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
        assert!(!output.status.success() && said.contains(part), "{words:?}: {said}");
    }

    fn logs(&self) -> String {
        Side::BOTH.map(|side| format!("--- {}\n{}", side.name(), self.hosts.daemon(side).log())).concat()
    }

    fn parts(&self) -> Vec<Value> {
        self.json(&["surrogate", "show", "fast"])["partitions"].as_array().expect("a list").clone()
    }

    /// The guest reads its disks, and everything is as it was written.
    fn verify(&mut self) {
        self.guest.send("verify").expect("sent");
        let verified = self.guest.wait_until(HANG, |event| matches!(event, Event::Verified { .. }));
        verified.unwrap_or_else(|error| panic!("{error:#}\n{}", self.logs()));
        let load_result = self.guest.load_result();
        assert!(load_result.wrong == 0 && load_result.complaints.is_empty(), "{load_result:?}");
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // A QEMU that a daemon has started outlives it.
        let shown = self.hosts.daemon(Side::B).json(&["vm", "ls"]).unwrap_or_default();
        for pid in shown.as_array().into_iter().flatten().filter_map(|vm| vm["pid"].as_u64()) {
            // Its number may be another process's by now.
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&line).contains("qemu") {
                let _ = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status();
            }
        }
    }
}

#[test]
fn the_disks_of_a_vm_that_moves_are_served_by_a_surrogate() {
    let memory = memory();
    let mut machine = Machine::new(memory.path());
    let plan = |surrogate| ["vm", "plan", "web1", "--to", "b", "--surrogate", surrogate, "--surrogate-on-flash"];
    for (name, more) in [("sole", "24MiB"), ("small", "128MiB")] {
        machine.json(&["surrogate", "create", name, "--store", &store(memory.path(), name), "--partition", more]);
    }
    machine.refused(&plan("none"), "there is no surrogate none");
    machine.refused(&plan("sole"), "the only copy of what the guest writes");
    machine.refused(&plan("small"), "needed: 2, that are left: 1");
    machine.refused(&[&plan("fast")[..], &["--strategy", "mirror-paper"]].concat(), "takes the guest's writes itself");
    machine.refused(&[&plan("fast")[..], &["--follow-ratio", "3"]].concat(), "for the schedule follow");
    machine.json(&plan("fast"));

    let words =
        ["vm", "move", "web1", "--to", "b", "--surrogate", "fast", "--surrogate-on-flash", "--schedule", "follow"];
    let words = [&words[..], &["--follow-ratio", "3", "--read-cache", "16MiB"]].concat();
    machine.json(&[&words[..], &["--bandwidth", "8MiB/s", "--detach"]].concat());
    let serves = |part: &Value| part["redirection"]["writes_redirected"].as_u64() > Some(0);
    // The guest uses the first one only.
    wait_until("the disks are served", || {
        let parts = machine.parts();
        (parts.len() == 2 && parts.iter().any(serves)).then_some(())
    });
    // What disks that are volumes by now are refused for a plan says, too.
    machine.refused(&plan("sole"), "the only copy of what the guest writes");
    assert_eq!(machine.json(&["vm", "cancel", "web1"])["state"], "cancelled");
    wait_until("the disks have all again", || machine.parts().is_empty().then_some(()));
    machine.verify();

    let moved = machine.json(&[&words[..], &["--popular-threshold", "2", "--verify", "full"]].concat());
    assert_eq!(moved["state"], "done", "{moved}\n{}", machine.logs());
    for disk in moved["disks"].as_array().expect("two disks") {
        let report = &disk["report"];
        assert_eq!((&report["schedule"]["asked"], &report["equal"]), (&"follow".into(), &true.into()), "{report}");
        assert!(!report["redirection"].is_null() && !report["read_cache"].is_null(), "{report}");
        assert_eq!(disk["request"]["popular_threshold"], 2, "{disk}");
    }
    assert!(moved["disks"].as_array().is_some_and(|disks| disks.iter().any(|disk| serves(&disk["report"]))), "{moved}");
    wait_until("the parts are given back", || machine.parts().is_empty().then_some(()));
    let folder = machine.hosts.daemon(Side::B).api().parent().expect("in a folder").join("vm/web1");
    machine.guest.leave();
    machine.guest.follow(&folder).unwrap_or_else(|error| panic!("{error:#}\n{}", machine.logs()));
    machine.verify();
    assert!(!machine.folder.path().join("disk0").exists(), "the source is left under its name");
}

/// The volume's layer of the kind `redirect`; null if it has none.
fn standing(world: &World) -> Value {
    world.json(&["volume", "layer", "ls", "x"])[0].clone()
}

/// What the redirection of the only volume with a part of `fast` has done.
fn count(world: &World, name: &str) -> u64 {
    world.json(&["surrogate", "show", "fast"])["partitions"][0]["redirection"][name].as_u64().unwrap_or_default()
}

const ADD: [&str; 7] = ["volume", "layer", "add", "x", "surrogate", "--surrogate", "fast"];

#[test]
fn a_surrogate_learns_before_the_move_which_uses_it_and_leaves_it_when_it_is_undone() {
    let (mut world, memory) = (World::new(), memory());
    make_surrogate(&world, memory.path(), 2);
    world.json(&["surrogate", "create", "sole", "--store", &store(memory.path(), "sole")]);
    let image = world.image("disk.img", 32 << 20, 65536);
    let uri = world.attach("x", &image);
    let sole = ["volume", "layer", "add", "x", "surrogate", "--surrogate", "sole", "--surrogate-on-flash"];
    world.refused(&sole, 2, "the only copy of what the guest writes");
    world.refused(&["volume", "layer", "add", "x", "surrogate"], 2, "which surrogate");
    world.refused(&[&ADD[..], &["--iops", "9"]].concat(), 2, "of a throttle");
    let load = Load::start(&uri, &image, 740);
    load.goes_on();
    let added = world.json(&[&ADD[..], &["--popular-threshold", "2", "--surrogate-on-flash"]].concat());
    assert_eq!((&added["layers"][0]["kind"], &added["layers"][0]["state"]), (&"redirect".into(), &"may-hold".into()));
    let id = standing(&world)["id"].clone();
    world.refused(&[&ADD[..], &["--surrogate-on-flash"]].concat(), 6, "has the surrogate fast already");
    load.goes_on();
    wait_until("it learns and serves", || {
        (count(&world, "chunks_fetched") > 0 && count(&world, "writes_redirected") > 0).then_some(())
    });
    world.refused(&["volume", "snapshot", "add", "x", "s"], 8, "the surrogate fast serves x");
    world.refused(&["surrogate", "rm", "fast"], 8, "has a part of");
    world.json(&["surrogate", "drain", "fast"]);

    // What it has learned is there when a move begins, and after one that is undone, whatever happens between.
    let fetched = count(&world, "chunks_fetched");
    let to = target(&world.path("new.img"));
    world.refused(&["move", "x", "--to", &to, "--strategy", "snapshot"], 8, "takes the guest's writes itself");
    world.refused(&["move", "x", "--to", &to, "--surrogate", "sole", "--sole-copy"], 8, "no other one");
    let again = ["move", "x", "--to", &to, "--surrogate", "fast", "--popular-threshold", "3"];
    world.refused(&again, 8, "from request 2 on");
    let slow = ["move", "x", "--to", &to, "--surrogate", "fast", "--read-cache", "4MiB", "--bandwidth", "8MiB/s"];
    world.json(&[&slow[..], &["--detach"]].concat());
    world.wait_until_job("it copies", has_copied(4 << 20));
    assert!(count(&world, "chunks_fetched") >= fetched, "it was made anew");
    world.refused(&["volume", "layer", "rm", "x", "surrogate"], 7, "is being moved");
    assert_eq!(world.json(&["cancel", "x"])["state"], "cancelled");
    load.goes_on();
    assert_eq!((&standing(&world)["id"], &standing(&world)["state"]), (&id, &"may-hold".into()), "{}", world.log());
    world.kill();
    world.start();
    load.goes_on();
    assert_eq!((&standing(&world)["id"], &standing(&world)["state"]), (&id, &"may-hold".into()), "{}", world.log());

    // A move takes along what it holds, also one that does not name it.
    let report = world.json(&["move", "x", "--to", &to, "--verify", "full"]);
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}\n{}", world.log());
    assert!(format!("{}", report["notes"]).contains("since the surrogate was added"), "{report}");
    wait_until_given_back(&world);
    load.goes_on();
    let expected = load.finish();
    world.json(&["volume", "detach", "x"]);
    same(&world.path("new.img"), &expected);
}

#[test]
fn a_surrogate_that_is_taken_out_brings_back_what_it_holds_through_every_death_of_the_daemon() {
    let (mut world, memory) = (World::new(), memory());
    make_surrogate(&world, memory.path(), 2);
    let image = world.image("disk.img", 48 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 750);
    let mut delay_ms = 71;
    for _ in 0..3 {
        world.json(&[&ADD[..], &["--surrogate-on-flash"]].concat());
        load.goes_on();
        world.kill_four_times(&mut delay_ms);
        world.refused(&["volume", "detach", "x"], 8, "holds what x has written last");
        world.json(&["volume", "layer", "rm", "x", "surrogate", "--detach"]);
        world.kill_four_times(&mut delay_ms);
        wait_until_given_back(&world);
        load.goes_on();
    }
    world.json(&[&ADD[..], &["--surrogate-on-flash"]].concat());
    load.goes_on();
    // It waits for the end.
    let left = world.json(&["volume", "layer", "rm", "x", "surrogate"]);
    assert_eq!((&left["layers"], parts(&world)), (&Value::Null, 0), "{left}");
    let expected = load.finish();
    world.json(&["volume", "detach", "x"]);
    same(&image, &expected);
}

#[test]
fn a_volume_whose_surrogate_is_lost_for_good_goes_on_with_its_backend_alone_if_that_is_meant() {
    let (mut world, memory) = (World::new(), memory());
    make_surrogate(&world, memory.path(), 1);
    let image = world.image("disk.img", 8 << 20, 65536);
    let uri = world.attach("x", &image);
    world.json(&[&ADD[..], &["--surrogate-on-flash", "--sole-copy"]].concat());
    let load = Load::start(&uri, &image, 760);
    load.goes_on();
    world.refused(&["volume", "layer", "rm", "x", "surrogate", "--discard-dirty"], 8, "connected to x");
    load.finish();
    crate::support::tool("qemu-io", &["-f", "raw", "-c", "write -P 7 1M 64k", "-c", "flush", &uri]);
    world.kill();
    std::fs::remove_file(memory.path().join("s0")).expect("removed");
    world.start();
    let shown = world.json(&["volume", "show", "x"]);
    assert!(shown["problem"].to_string().contains("--discard-dirty"), "{shown}");
    world.refused(&["volume", "detach", "x"], 8, "holds what x has written last");
    world.refused(&["volume", "layer", "rm", "x", "surrogate"], 9, "is down");
    let left = world.json(&["volume", "layer", "rm", "x", "surrogate", "--discard-dirty"]);
    assert_eq!((&left["layers"], parts(&world)), (&Value::Null, 0), "{left}");
    world.kill();
    world.start();
    assert_eq!(world.json(&["volume", "show", "x"])["problem"], Value::Null, "{}", world.log());
    world.json(&["volume", "detach", "x"]);
    let left = std::fs::read(&image).expect("read");
    assert!(left[1 << 20..][..64 << 10].iter().any(|byte| *byte != 7), "only the surrogate had that");
    world.json(&["surrogate", "rm", "fast"]);
}

fn write(uri: &str, pattern: u8) {
    let words = format!("write -P {pattern} 1M 256k");
    crate::support::tool("qemu-io", &["-f", "raw", "-c", &words, "-c", "flush", uri]);
}

/// Fails unless the client reads `pattern` where [`write`] has written.
fn reads(uri: &str, pattern: u8) {
    let said = crate::support::tool("qemu-io", &["-f", "raw", "-c", &format!("read -P {pattern} 1M 256k"), uri]);
    assert!(!said.contains("verification failed"), "it is not {pattern}: {said}");
}

#[test]
fn a_store_that_was_copied_while_the_daemon_ran_is_not_believed_after_a_clean_stop() {
    for stores in [1, 2] {
        let (mut world, memory) = (World::new(), memory());
        make_surrogate(&world, memory.path(), stores);
        let image = world.image("disk.img", 8 << 20, 65536);
        let uri = world.attach("x", &image);
        world.json(&[&ADD[..], &["--surrogate-on-flash", "--sole-copy"]].concat());
        write(&uri, 1);
        let (store, old, new) = (memory.path().join("s0"), memory.path().join("old"), memory.path().join("new"));
        std::fs::copy(&store, &old).expect("copied");
        write(&uri, 2);
        world.terminate();
        std::fs::rename(&store, &new).expect("renamed");
        std::fs::rename(&old, &store).expect("renamed");
        world.start();
        if stores == 1 {
            let shown = world.json(&["volume", "show", "x"]);
            assert_eq!(shown["state"], "down", "{shown}");
            assert!(shown["problem"].to_string().contains("an older copy"), "{shown}");
            world.terminate();
            std::fs::rename(&new, &store).expect("renamed");
            world.start();
        } else {
            let shown = world.json(&["surrogate", "show", "fast"]);
            assert_eq!(shown["partitions"][0]["lost_store"], 0, "{shown}\n{}", world.log());
        }
        reads(&uri, 2);
    }
}

/// nbdkit with a file as the store of a surrogate.
fn server(world: &World) -> Server {
    let file = world.path("far.img");
    if !file.exists() {
        crate::support::server::empty(world, "far.img", 128 << 20);
    }
    Server::nbdkit(world, &["file", file.to_str().expect("text")])
}

/// A daemon whose requests wait so many seconds for an NBD server.
fn impatient(seconds: u32) -> World {
    let mut world = World::without_daemon();
    std::fs::write(world.path("config.toml"), format!("nbd-patience-seconds = {seconds}\n")).expect("written");
    world.daemon.arguments = vec!["--config".to_owned(), world.text("config.toml")];
    world.start();
    world
}

#[test]
fn a_surrogate_on_the_export_of_another_server_survives_deaths_of_that_and_of_the_daemon() {
    let (mut world, memory) = (impatient(5), memory());
    let image = world.image("disk.img", 24 << 20, 65536);
    let uri = world.attach("x", &image);
    let refused = |arguments: &[&str], code, part: &str| {
        let server = Server::nbdkit_at(&world, "other.sock", arguments);
        world.refused(&["surrogate", "create", "fast", "--store", &server.uri()], code, part);
    };
    refused(&["--readonly", "memory", "128M"], 13, "takes no writes");
    let zeroes = "pread=dd if=/dev/zero iflag=count_bytes count=$3 status=none";
    let no_flush = ["eval", "get_size=echo 128M", zeroes, "can_write=exit 0", "pwrite=cat >/dev/null"];
    refused(&no_flush, 18, "no flush");
    world.refused(&["surrogate", "create", "fast", "--store", &uri], 12, "is the export of x here");
    world.refused(&["surrogate", "create", "fast", "--store", "nbd+unix:///?socket=/none"], 16, "the store");

    let mut far = server(&world);
    world.refused(&["cache", "create", "ssd", "--store", &far.uri()], 2, "on this host's own flash");
    let (near, of_far) = (store(memory.path(), "s0"), far.uri());
    let create = ["surrogate", "create", "fast", "--partition", "32MiB", "--store"];
    let made = world.json(&[&create[..], &[&of_far]].concat());
    assert_eq!((&made["stores"][0]["place"], &made["bytes"]), (&of_far.clone().into(), &(128 << 20).into()), "{made}");
    world.refused(&["surrogate", "create", "b", "--store", &of_far], 6, "is a store of a surrogate already");
    world.refused(&["move", "x", "--to", &of_far, "--overwrite"], 8, "is a store of a surrogate");
    let load = Load::start(&uri, &image, 770);
    world.json(&[&ADD[..], &["--surrogate-on-flash", "--sole-copy"]].concat());
    load.goes_on();
    for round in 0..3 {
        let _ = far.child.kill();
        let _ = far.child.wait();
        if round != 1 {
            world.kill();
        }
        far = server(&world);
        if round != 1 {
            world.start();
        }
        load.goes_on();
        assert!(count(&world, "places_dirty") > 0, "nothing is redirected\n{}", world.log());
    }
    let to = world.path("new.img");
    let report = world.json(&["move", "x", "--to", &target(&to), "--surrogate", "fast", "--verify", "full"]);
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}\n{}", world.log());
    wait_until_given_back(&world);
    load.goes_on();

    // Beside a store of this host it may be lost for good: a request waits for it once.
    world.json(&["surrogate", "rm", "fast"]);
    assert!(world.path("far.img").exists(), "what the daemon has not made is not its to remove");
    world.json(&[&create[..], &[&near, "--store", &of_far]].concat());
    world.json(&[&ADD[..], &["--surrogate-on-flash"]].concat());
    load.goes_on();
    drop(far);
    load.goes_on_beside("a store is away", &world);
    assert_eq!(world.json(&["volume", "layer", "rm", "x", "surrogate"])["layers"], Value::Null);
    load.goes_on();
    let expected = load.finish();
    world.json(&["volume", "detach", "x"]);
    same(&to, &expected);
}

#[test]
fn what_only_a_server_had_that_is_lost_is_an_error_and_never_older_bytes() {
    let world = impatient(2);
    let far = server(&world);
    let image = world.image("disk.img", 8 << 20, 65536);
    let uri = world.attach("x", &image);
    world.json(&["surrogate", "create", "fast", "--partition", "32MiB", "--store", &far.uri()]);
    world.json(&[&ADD[..], &["--surrogate-on-flash", "--sole-copy"]].concat());
    crate::support::tool("qemu-io", &["-f", "raw", "-c", "write -P 7 1M 64k", "-c", "read -P 7 1M 64k", &uri]);
    drop(far);
    let read = |extent: &str| {
        let mut read = std::process::Command::new("qemu-io");
        read.args(["-f", "raw", "-c", &format!("read {extent}"), &uri]).output().expect("it runs").status.success()
    };
    assert!(!read("1M 64k"), "something was read that only the server had\n{}", world.log());
    assert!(read("4M 64k"), "what the surrogate never had\n{}", world.log());
    world.json(&["volume", "layer", "rm", "x", "surrogate", "--discard-dirty"]);
    assert!(read("1M 64k"), "{}", world.log());
    world.json(&["volume", "detach", "x"]);
}

#[test]
fn a_lost_store_is_repaired_under_the_guest_which_goes_on_with_it_when_the_other_one_is_lost() {
    let (mut world, memory) = (impatient(2), memory());
    let servers = [0, 1].map(|number| {
        let file = crate::support::server::empty(&world, &format!("far{number}.img"), 64 << 20);
        let name = format!("far{number}.sock");
        Server::nbdkit_at(&world, &name, &["file", file.to_str().expect("text")])
    });
    let [first, second] = servers;
    let image = world.image("disk.img", 24 << 20, 65536);
    let uri = world.attach("x", &image);
    let create =
        ["surrogate", "create", "fast", "--partition", "32MiB", "--store", &first.uri(), "--store", &second.uri()];
    world.json(&create);
    world.refused(&["surrogate", "repair", "fast"], 9, "no store of the surrogate fast is lost");
    world.json(&[&ADD[..], &["--surrogate-on-flash"]].concat());
    let load = Load::start(&uri, &image, 780);
    load.goes_on();
    drop(second);
    let lost = |world: &World| world.json(&["surrogate", "show", "fast"])["partitions"][0]["lost_store"].clone();
    wait_until("the store is lost", || (lost(&world) == 1).then_some(()));
    load.goes_on();
    let small = format!("file:{},size=8MiB", memory.path().join("small").display());
    world.refused(&["surrogate", "repair", "fast", "--store", &small], 14, "the other store");
    assert!(!memory.path().join("small").exists(), "what was made for it is left");
    world.refused(&["surrogate", "repair", "fast", "--store", &first.uri()], 6, "is a store of a surrogate already");
    let new = crate::support::server::empty(&world, "new.img", 64 << 20);
    let new = new.to_str().expect("text");
    // So slow that no copy to it is done before the daemon dies.
    let slow = Server::nbdkit_at(&world, "new.sock", &["--filter=delay", "file", new, "wdelay=500ms"]);
    world.json(&["surrogate", "repair", "fast", "--store", &slow.uri(), "--detach"]);
    world.kill();
    drop(slow);
    let _new = Server::nbdkit_at(&world, "new.sock", &["file", new]);
    world.start();
    load.goes_on();
    assert_eq!(lost(&world), 1, "a copy that was not done counts as one\n{}", world.log());
    world.json(&["surrogate", "repair", "fast"]);
    let shown = world.json(&["surrogate", "show", "fast"]);
    assert_eq!(shown["partitions"][0]["lost_store"], Value::Null, "{shown}\n{}", world.log());
    assert!(shown["stores"][1]["place"].as_str().is_some_and(|place| place.contains("new.sock")), "{shown}");
    load.goes_on();
    drop(first);
    wait_until("the other store is lost", || (lost(&world) == 0).then_some(()));
    load.goes_on();
    world.json(&["volume", "layer", "rm", "x", "surrogate"]);
    let expected = load.finish();
    world.json(&["volume", "detach", "x"]);
    same(&image, &expected);
}
