//! Caches: made and removed, put into a running guest's path, changed and taken out of it, through every death of the daemon and with
//! flash that is missing, old or full.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::support::cached::{cached, layer, number, wait_until};
use crate::support::load::Load;
use crate::support::pair::{self, Pair, is_over};
use crate::support::{HANG, Mount, World, has_copied, same, signal, target, tool, wait};
use serde_json::Value;

/// Caches are in memory here: that is as fast as flash is.
fn memory() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("th").tempdir_in("/dev/shm").expect("a directory in memory")
}

fn store(memory: &Path, name: &str, size: &str) -> String {
    format!("file:{},size={size}", memory.join(name).display())
}

/// A cache `ssd` of 64 MiB; gives where its store is.
fn make_cache(world: &World, memory: &Path) -> PathBuf {
    world.json(&["cache", "create", "ssd", "--store", &store(memory, "ssd", "64MiB")]);
    memory.join("ssd")
}

/// Puts a cache of 8 MiB into the path of the volume's guest: the volumes are larger.
fn add_cache(world: &World, mode: &str) -> Value {
    world.json(&["volume", "layer", "add", "x", "cache", "--cache", "ssd", "--size", "8MiB", "--mode", mode])
}

fn parts(world: &World) -> usize {
    world.json(&["cache", "show", "ssd"])["partitions"].as_array().expect("a list").len()
}

/// What a client reads from beginning to end.
fn contents(world: &World, uri: &str) -> Vec<u8> {
    let copy = world.path("contents");
    tool("qemu-img", &["convert", "-f", "raw", "-O", "raw", uri, copy.to_str().expect("text")]);
    std::fs::read(&copy).expect("read")
}

fn write(uri: &str, pattern: u8, extent: &str) {
    tool("qemu-io", &["-f", "raw", "-c", &format!("write -P {pattern} {extent}"), "-c", "flush", uri]);
}

/// Fails unless the client reads `pattern` there.
fn reads(uri: &str, pattern: u8, extent: &str) {
    let said = tool("qemu-io", &["-f", "raw", "-c", &format!("read -P {pattern} {extent}"), uri]);
    assert!(!said.contains("verification failed"), "{extent} is not {pattern}: {said}");
}

#[test]
fn a_cache_is_made_listed_resized_and_removed() {
    let (world, memory) = (World::new(), memory());
    world.refused(&["cache", "show", "ssd"], 5, "no cache ssd");
    world.refused(&["cache", "create", "ssd", "--store", &store(Path::new("/nowhere"), "c", "8MiB")], 16, "/nowhere");
    let place = store(memory.path(), "ssd", "64MiB");
    let made = world.json(&["cache", "create", "ssd", "--store", &place, "--policy", "lru"]);
    assert_eq!((&made["bytes"], &made["policy"]), (&(64 << 20).into(), &"lru".into()), "{made}");
    world.refused(&["cache", "create", "ssd", "--store", &store(memory.path(), "c", "8MiB")], 6, "already");
    assert!(!memory.path().join("c").exists(), "what was made for a cache that was refused is left");
    world.refused(&["cache", "create", "other", "--store", &place], 6, "is a store of a cache already");
    world.refused(&["surrogate", "create", "fast", "--store", &place], 6, "is a store of a cache already");
    let image = world.image("disk.img", 4 << 20, 65536);
    world.attach("x", &image);
    world.refused(&["volume", "layer", "add", "x", "cache"], 2, "--cache NAME");
    world.refused(&["volume", "layer", "add", "x", "cache", "--cache", "no", "--size", "1MiB"], 5, "no cache no");
    world.refused(&["volume", "layer", "add", "x", "cache", "--cache", "ssd", "--size", "65MiB"], 14, "no room for");
    world.refused(&["volume", "layer", "add", "x", "cache", "--cache", "ssd", "--size", "4KiB"], 14, "room");
    let odd = ["volume", "layer", "add", "x", "cache", "--cache", "ssd", "--size", "8MiB", "--block", "12KiB"];
    world.refused(&odd, 2, "unit of a cache");
    world.refused(&["volume", "layer", "add", "x", "throttle", "--iops", "9", "--size", "8MiB"], 2, "of a cache");
    assert_eq!(parts(&world), 0, "a part of what was refused is left");
    let layers = add_cache(&world, "read-only");
    assert_eq!(layers["layers"][0]["cached"]["policy"], "lru", "not what the cache says: {layers}");
    assert_eq!(layers["layers"][0]["state"], "clean");
    world.refused(
        &["volume", "layer", "add", "x", "cache", "--cache", "ssd", "--size", "1MiB"],
        6,
        "has the cache ssd already",
    );
    world.refused(&["cache", "resize", "ssd", "--size", "4MiB"], 8, "x has a part");
    assert_eq!(world.json(&["cache", "resize", "ssd", "--size", "8MiB"])["free_bytes"], 0);
    assert_eq!(world.json(&["cache", "resize", "ssd", "--size", "96MiB"])["free_bytes"], 88 << 20);
    assert_eq!(std::fs::metadata(memory.path().join("ssd")).expect("there").len(), 96 << 20);
    world.refused(&["cache", "rm", "ssd"], 8, "x has a part of the cache ssd");
    // Nothing is lost with one that is clean, so the volume may go, and its part with it.
    world.json(&["volume", "detach", "x"]);
    assert_eq!(parts(&world), 0, "a part of a volume that is gone");
    assert_eq!(world.json(&["cache", "ls"]).as_array().map(Vec::len), Some(1));
    world.json(&["cache", "rm", "ssd"]);
    assert!(!memory.path().join("ssd").exists(), "its file is left");
    world.json(&["surrogate", "create", "fast", "--store", &place]);
}

#[test]
fn a_cache_comes_changes_and_goes_under_a_guest() {
    let (world, memory) = (World::new(), memory());
    make_cache(&world, memory.path());
    // Neither a multiple of a chunk nor of a block.
    let image = world.image("disk.img", (24 << 20) + 1536, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 800);
    load.goes_on();
    add_cache(&world, "write-through");
    load.goes_on();
    wait_until(&world, "nothing hits it", |cached| number(cached, "hits") > 0 && number(cached, "writes_through") > 0);
    assert_eq!(layer(&world)["state"], "clean");
    for round in 0..2 {
        world.json(&["volume", "layer", "set", "x", "cache", "--mode", "write-back"]);
        assert_eq!(layer(&world)["state"], "may-hold");
        load.goes_on();
        wait_until(&world, "nothing is dirty", |cached| number(cached, "dirty_bytes") > 0);
        world.json(&["volume", "layer", "set", "x", "cache", "--size", ["2MiB", "3MiB"][round]]);
        load.goes_on();
        let small = cached(&world);
        assert!(number(&small, "places") < number(&small, "capacity") / 2, "{small}");
        world.json(&["volume", "layer", "set", "x", "cache", "--size", "7MiB"]);
        load.goes_on();
        world.json(&["cache", "drain", "ssd"]);
        load.goes_on();
        // A drain switches nothing.
        wait_until(&world, "it has stayed a drain", |cached| number(cached, "dirty_bytes") > 0);
        let mode = ["read-only", "write-through"][round];
        world.json(&["volume", "layer", "set", "x", "cache", "--mode", mode]);
        let now = layer(&world);
        assert_eq!((&now["state"], &now["cached"]["dirty_bytes"]), (&"clean".into(), &0.into()), "{now}");
        load.goes_on();
    }
    world.refused(&["volume", "layer", "set", "x", "cache", "--size", "9MiB"], 14, "is smaller");
    world.json(&["volume", "layer", "set", "x", "cache", "--mode", "write-back"]);
    load.goes_on();
    world.refused(&["cache", "rm", "ssd"], 8, "x has a part of the cache ssd");
    world.refused(&["volume", "detach", "x"], 8, "may hold what x has written last");
    let shown = world.run(&["volume", "show", "x"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("write-back") && shown.contains("hit rate") && shown.contains("amplification"), "{shown}");
    world.json(&["volume", "layer", "rm", "x", "cache"]);
    assert_eq!((layer(&world), parts(&world)), (Value::Null, 0), "it is left");
    load.goes_on();
    let expected = load.finish();
    world.json(&["volume", "detach", "x"]);
    same(&image, &expected);
    world.json(&["cache", "rm", "ssd"]);
}

#[test]
fn the_daemon_is_killed_while_a_guest_writes_to_the_flash() {
    let (mut world, memory) = (World::new(), memory());
    make_cache(&world, memory.path());
    let image = world.image("disk.img", 24 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 810);
    add_cache(&world, "write-back");
    let mut delay_ms = 61;
    for _ in 0..2 {
        load.goes_on();
        wait_until(&world, "nothing is dirty", |cached| number(cached, "dirty_bytes") > 0);
        world.kill_four_times(&mut delay_ms);
        let now = cached(&world);
        assert_eq!(now["open"], true, "{now}\n{}", world.log());
        assert!(number(&now, "places_free") < number(&now, "places"), "what was cached is forgotten: {now}");
    }
    load.goes_on();
    // And in the middle of a change of mode, and of its removal.
    for words in [&["set", "x", "cache", "--mode", "write-through"][..], &["rm", "x", "cache", "--detach"]] {
        let mut changing = world.command(&[&["volume", "layer"], words].concat()).spawn().expect("it starts");
        delay_ms = delay_ms * 31 % 97;
        std::thread::sleep(Duration::from_millis(delay_ms));
        world.kill();
        let _ = changing.wait();
        world.start();
        load.goes_on();
    }
    if layer(&world)["state"] != "draining" && !layer(&world).is_null() {
        // It may have gone meanwhile.
        let _ = world.run(&["volume", "layer", "rm", "x", "cache"]);
    }
    let start = Instant::now();
    while parts(&world) > 0 || !layer(&world).is_null() {
        assert!(start.elapsed() < HANG, "it does not go\n{}", world.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    load.goes_on();
    let expected = load.finish();
    world.json(&["volume", "detach", "x"]);
    same(&image, &expected);
}

#[test]
fn what_the_guest_wrote_past_a_cache_is_not_read_from_it_later() {
    let (mut world, memory) = (World::new(), memory());
    let flash = make_cache(&world, memory.path());
    let image = world.image("disk.img", 8 << 20, 65536);
    let uri = world.attach("x", &image);
    add_cache(&world, "write-through");
    write(&uri, 1, "0 1M");
    for _ in 0..2 {
        reads(&uri, 1, "0 1M");
    }
    assert!(number(&cached(&world), "places_free") < number(&cached(&world), "places"), "nothing is cached");
    // The volume comes up without it, and is written to.
    world.kill();
    let aside = memory.path().join("aside");
    std::fs::rename(&flash, &aside).expect("renamed");
    world.start();
    let without = cached(&world);
    assert_eq!(without["open"], false, "{without}");
    assert!(without["problem"].as_str().is_some_and(|problem| problem.contains("ssd")), "{without}");
    let shown = world.run(&["volume", "show", "x"]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains("not in use"), "{shown:?}");
    reads(&uri, 1, "0 1M");
    write(&uri, 2, "0 512k");
    world.refused(&["volume", "layer", "set", "x", "cache", "--mode", "write-back"], 9, "not in use");
    world.kill();
    std::fs::rename(&aside, &flash).expect("renamed");
    world.start();
    let again = cached(&world);
    assert_eq!((&again["open"], &again["problem"]), (&true.into(), &Value::Null), "{again}\n{}", world.log());
    reads(&uri, 2, "0 512k");
    reads(&uri, 1, "512k 512k");
    // It is believed again from here on, and is what it was made as.
    world.kill();
    world.start();
    assert!(number(&cached(&world), "places_free") < number(&cached(&world), "places"), "nothing is cached");
    reads(&uri, 2, "0 512k");
}

#[test]
fn flash_of_an_older_layer_is_refused() {
    let (mut world, memory) = (World::new(), memory());
    let flash = make_cache(&world, memory.path());
    let image = world.image("disk.img", 8 << 20, 65536);
    let uri = world.attach("x", &image);
    let (old, new) = (memory.path().join("old"), memory.path().join("new"));
    add_cache(&world, "write-back");
    write(&uri, 1, "0 256k");
    world.kill();
    std::fs::copy(&flash, &old).expect("copied");
    world.start();
    reads(&uri, 1, "0 256k");
    world.json(&["volume", "layer", "rm", "x", "cache"]);
    add_cache(&world, "write-back");
    write(&uri, 2, "0 256k");
    world.kill();
    std::fs::copy(&flash, &new).expect("copied");
    std::fs::copy(&old, &flash).expect("copied");
    world.start();
    let shown = world.json(&["volume", "show", "x"]);
    assert_eq!(shown["state"], "down", "{shown}");
    assert!(shown["problem"].as_str().is_some_and(|problem| problem.contains("cache ssd")), "{shown}");
    world.refused(&["volume", "layer", "rm", "x", "cache"], 9, "is down");
    world.refused(&["cache", "drain", "ssd"], 9, "is down");
    world.refused(&["cache", "rm", "ssd"], 8, "x has a part");
    world.kill();
    std::fs::copy(&new, &flash).expect("copied");
    world.start();
    reads(&uri, 2, "0 256k");
    // The same of one that holds nothing: the volume comes up, and begins a new one.
    world.json(&["volume", "layer", "set", "x", "cache", "--mode", "write-through"]);
    world.kill();
    std::fs::copy(&old, &flash).expect("copied");
    world.start();
    assert_eq!(cached(&world)["open"], false);
    reads(&uri, 2, "0 256k");
    write(&uri, 3, "0 128k");
    world.kill();
    world.start();
    assert_eq!(cached(&world)["open"], true, "{}", world.log());
    reads(&uri, 3, "0 128k");
    reads(&uri, 2, "128k 128k");
}

#[test]
fn flash_that_was_copied_while_the_daemon_ran_is_refused_after_a_clean_stop() {
    let (mut world, memory) = (World::new(), memory());
    let flash = make_cache(&world, memory.path());
    let image = world.image("disk.img", 8 << 20, 65536);
    let uri = world.attach("x", &image);
    let (old, new) = (memory.path().join("old"), memory.path().join("new"));
    add_cache(&world, "write-back");
    write(&uri, 1, "0 256k");
    std::fs::copy(&flash, &old).expect("copied");
    write(&uri, 2, "0 256k");
    world.terminate();
    std::fs::rename(&flash, &new).expect("renamed");
    std::fs::copy(&old, &flash).expect("copied");
    world.start();
    let shown = world.json(&["volume", "show", "x"]);
    assert_eq!(shown["state"], "down", "{shown}");
    assert!(shown["problem"].to_string().contains("an older copy"), "{shown}");
    world.terminate();
    std::fs::rename(&new, &flash).expect("renamed");
    world.start();
    reads(&uri, 2, "0 256k");
    // The same of one that holds nothing: the volume comes up, and begins a new one.
    world.json(&["volume", "layer", "set", "x", "cache", "--mode", "write-through"]);
    write(&uri, 3, "0 256k");
    for _ in 0..2 {
        reads(&uri, 3, "0 256k");
    }
    std::fs::copy(&flash, &old).expect("copied");
    write(&uri, 4, "0 256k");
    world.terminate();
    std::fs::copy(&old, &flash).expect("copied");
    world.start();
    let without = cached(&world);
    assert!(without["problem"].to_string().contains("an older copy"), "{without}");
    reads(&uri, 4, "0 256k");
}

#[test]
fn a_volume_comes_up_by_itself_once_the_right_flash_is_put_back() {
    let (mut world, memory) = (World::new(), memory());
    let flash = make_cache(&world, memory.path());
    let image = world.image("disk.img", 8 << 20, 65536);
    let uri = world.attach("x", &image);
    let (old, new) = (memory.path().join("old"), memory.path().join("new"));
    add_cache(&world, "write-back");
    write(&uri, 1, "0 256k");
    world.kill();
    std::fs::copy(&flash, &old).expect("copied");
    world.start();
    write(&uri, 2, "0 256k");
    world.terminate();
    std::fs::rename(&flash, &new).expect("renamed");
    std::fs::rename(&old, &flash).expect("renamed");
    world.start();
    let shown = world.json(&["volume", "show", "x"]);
    assert_eq!(shown["state"], "down", "{shown}");
    assert!(shown["problem"].to_string().contains("an older copy"), "{shown}");
    std::fs::rename(&new, &flash).expect("renamed");
    pair::wait_until("the volume is up", || (world.json(&["volume", "show", "x"])["state"] == "serving").then_some(()));
    reads(&uri, 2, "0 256k");
}

#[test]
fn what_was_on_flash_that_is_lost_can_be_given_up() {
    let (mut world, memory) = (World::new(), memory());
    let flash = make_cache(&world, memory.path());
    let image = world.image("disk.img", 8 << 20, 65536);
    let before = std::fs::read(&image).expect("read");
    let uri = world.attach("x", &image);
    add_cache(&world, "write-back");
    write(&uri, 1, "0 64k");
    world.kill();
    std::fs::remove_file(&flash).expect("removed");
    world.start();
    assert_eq!(world.json(&["volume", "show", "x"])["state"], "down");
    world.refused(&["volume", "detach", "x"], 8, "may hold what x has written last");
    world.json(&["volume", "layer", "rm", "x", "cache", "--discard-dirty"]);
    assert_eq!(parts(&world), 0);
    world.kill();
    world.start();
    let found = contents(&world, &uri);
    // Nobody knows how much was written back before.
    assert!(found[64 << 10..] == before[64 << 10..], "more than what was written is another");
    assert_eq!(layer(&world), Value::Null);
    world.json(&["cache", "rm", "ssd"]);
}

#[test]
fn a_state_directory_that_is_full_leads_nobody_to_give_up_what_the_flash_holds() {
    let (mut world, memory) = (World::without_daemon(), memory());
    let state = Mount::tmpfs(&world.path("state"), "8m");
    world.start();
    make_cache(&world, memory.path());
    let image = world.image("disk.img", 8 << 20, 65536);
    let uri = world.attach("x", &image);
    add_cache(&world, "write-back");
    write(&uri, 1, "0 64k");
    world.kill();
    // It takes as much of this as there is room for.
    let rest = state.path.join("rest");
    assert!(std::fs::write(&rest, vec![1; 16 << 20]).is_err(), "there is room left");
    world.start();
    let shown = world.json(&["volume", "show", "x"]);
    assert_eq!(shown["state"], "down", "{shown}");
    let problem = shown["problem"].to_string();
    assert!(problem.contains("state directory") && problem.contains("tried again"), "{problem}");
    assert!(!problem.contains("discard"), "{problem}");
    std::fs::remove_file(&rest).expect("removed");
    let start = Instant::now();
    while world.json(&["volume", "show", "x"])["state"] != "serving" {
        assert!(start.elapsed() < HANG, "it does not come back\n{}", world.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    reads(&uri, 1, "0 64k");
    world.kill();
}

#[test]
fn a_guest_goes_on_when_the_flash_is_full() {
    let mut world = World::new();
    let mount = Mount::tmpfs(&world.path("flash"), "24m");
    let flash = mount.path.join("ssd");
    std::fs::File::create(&flash).and_then(|file| file.set_len(64 << 20)).expect("made");
    world.json(&["cache", "create", "ssd", "--store", &format!("file:{},cache=page", flash.display())]);
    let image = world.image("disk.img", 32 << 20, 65536);
    let uri = world.attach("x", &image);
    world.json(&[
        "volume",
        "layer",
        "add",
        "x",
        "cache",
        "--cache",
        "ssd",
        "--size",
        "40MiB",
        "--mode",
        "write-through",
    ]);
    let load = Load::start(&uri, &image, 820);
    load.goes_on();
    // Somebody else takes what is left, as a flash does that has failed for good.
    let _ = std::fs::write(mount.path.join("other"), vec![1; 32 << 20]);
    wait_until(&world, "it does not fail", |cached| cached["failed"] == true);
    load.goes_on();
    let shown = world.run(&["volume", "show", "x"]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains("FAILED"), "{shown:?}");
    // What it has cached is not believed after a restart, with or without room.
    world.kill();
    world.start();
    load.goes_on();
    world.kill();
    std::fs::remove_file(mount.path.join("other")).expect("removed");
    world.start();
    load.goes_on();
    let again = cached(&world);
    assert_eq!(again["open"], true, "{again}\n{}", world.log());
    world.json(&["volume", "layer", "rm", "x", "cache"]);
    let expected = load.finish();
    world.json(&["volume", "detach", "x"]);
    same(&image, &expected);
}

#[test]
fn a_volume_moves_with_what_only_its_cache_has() {
    let (mut world, memory) = (World::new(), memory());
    make_cache(&world, memory.path());
    let mut current = world.image("disk.img", 24 << 20, 65536);
    let uri = world.attach("x", &current);
    let load = Load::start(&uri, &current, 830);
    let mut delay_ms = 47;
    for (number, mode) in ["write-back", "write-through", "write-back"].into_iter().enumerate() {
        add_cache(&world, mode);
        load.goes_on();
        let to = world.path(&format!("new-{number}.img"));
        let place = target(&to);
        world.refused(&["move", "x", "--to", &place, "--strategy", "snapshot"], 8, "has the cache ssd");
        world.json(&["move", "x", "--to", &place, "--bandwidth", "8MiB/s", "--detach"]);
        world.wait_until_job("nothing is copied", has_copied(4 << 20));
        world.refused(&["volume", "layer", "rm", "x", "cache"], 7, "is being moved");
        world.refused(&["volume", "layer", "set", "x", "cache", "--mode", "read-only"], 7, "is being moved");
        assert_eq!(world.json(&["cancel", "x"])["state"], "cancelled");
        assert_eq!(cached(&world)["open"], true, "a move that was cancelled has taken it");
        load.goes_on();
        let words = ["move", "x", "--to", &place, "--verify", "full", "--bandwidth", "40MiB/s", "--detach"];
        let id = world.json(&words)["id"].as_u64().expect("a number");
        if number == 2 {
            world.kill_four_times(&mut delay_ms);
        }
        let over = world.wait_for_job(id);
        assert_eq!(over["state"], "done", "{over}\n{}", world.log());
        assert_eq!((layer(&world), parts(&world)), (Value::Null, 0), "it is over the target");
        current = to;
        load.goes_on();
    }
    let expected = load.finish();
    world.json(&["volume", "detach", "x"]);
    same(&current, &expected);
}

#[test]
fn a_volume_that_went_to_another_host_and_is_given_back_has_what_its_cache_holds() {
    let (pair, memory) = (Pair::new(), memory());
    make_cache(&pair.a, memory.path());
    let image = pair.a.image("disk.img", 16 << 20, 65536);
    let uri = pair.a.attach("x", &image);
    let load = Load::start(&uri, &image, 850);
    add_cache(&pair.a, "write-back");
    load.goes_on();
    pair.a.json(&["move", "x", "--to", "b", "--bandwidth", "2MiB/s", "--detach"]);
    pair.wait_for_move("it copies", |job| job["progress"]["bytes_copied"].as_u64() > Some(0));
    load.goes_on();
    pair.network.close();
    pair.a.json(&["set", "x", "--bandwidth", "0"]);
    pair::wait_until("it is given up", || (pair.at_a("x")["backend"] == "b:x").then_some(()));
    assert_eq!(parts(&pair.a), 1, "the part was given back before the other host has the volume");
    pair.network.cut();
    pair.a.json(&["resolve", "x", "--give-back"]);
    load.goes_on();
    assert_eq!(cached(&pair.a)["open"], true, "{}", pair.a.log());
    pair.network.mend();
    pair::wait_until("the other host forgets it", || pair.volumes_at_b().is_empty().then_some(()));
    // It moves again, and comes through this time.
    pair.a.json(&["move", "x", "--to", "b", "--detach"]);
    let over = pair.wait_for_move("it is over", is_over);
    assert_eq!(over["state"], "done", "{over}");
    pair::wait_until("the part is given back", || (parts(&pair.a) == 0).then_some(()));
    assert_eq!(layer(&pair.a), Value::Null);
    load.goes_on();
    same(&pair.arrived("x"), &load.finish());
}

#[test]
fn caches_are_in_the_audit_log_and_in_the_metrics() {
    let (world, memory) = (World::new(), memory());
    make_cache(&world, memory.path());
    let image = world.image("disk.img", 4 << 20, 65536);
    let uri = world.attach("x", &image);
    add_cache(&world, "write-through");
    write(&uri, 1, "0 64k");
    reads(&uri, 1, "0 64k");
    world.json(&["volume", "layer", "set", "x", "cache", "--mode", "read-only"]);
    let api = world.text("api");
    let metrics = tool("curl", &["-s", "--unix-socket", &api, "http://localhost/metrics"]);
    for line in [
        "transhume_cache_up{volume=\"x\",cache=\"ssd\"} 1",
        "transhume_cache_guest_written_bytes_total{volume=\"x\",cache=\"ssd\"} 65536",
        "transhume_cache_pool_free_bytes{cache=\"ssd\"} 58720256",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    world.json(&["cache", "drain", "ssd"]);
    world.json(&["volume", "layer", "rm", "x", "cache"]);
    world.json(&["cache", "rm", "ssd"]);
    let audit = std::fs::read_to_string(world.path("state/audit.jsonl")).expect("read");
    for action in ["cache.create", "layer.add", "layer.change", "cache.drain", "layer.remove", "cache.remove"] {
        assert!(audit.contains(&format!("\"action\":\"{action}\"")), "{action} is not in {audit}");
    }
}

#[test]
fn snapshots_lie_over_a_cache() {
    let (mut world, memory) = (World::new(), memory());
    make_cache(&world, memory.path());
    let image = world.image("disk.img", 16 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 840);
    for mode in ["write-back", "write-through"] {
        world.json(&["volume", "snapshot", "add", "x", "before"]);
        load.goes_on();
        // Under a snapshot that is there, and before one that comes.
        add_cache(&world, mode);
        load.goes_on();
        world.json(&["volume", "snapshot", "add", "x", "after"]);
        load.goes_on();
        let to = target(&world.path("new.img"));
        world.refused(&["move", "x", "--to", &to], 8, "lies under snapshots");
        world.json(&["volume", "snapshot", "rm", "x", "before"]);
        wait_until(&world, "nothing was read or written by it", |cached| number(cached, "guest_written_bytes") > 0);
        world.kill();
        world.start();
        load.goes_on();
        world.json(&["volume", "layer", "rm", "x", "cache"]);
        load.goes_on();
        world.json(&["volume", "snapshot", "rm", "x", "after"]);
        load.goes_on();
        assert_eq!((layer(&world), parts(&world)), (Value::Null, 0), "it is left");
    }
    let expected = load.finish();
    world.json(&["volume", "detach", "x"]);
    same(&image, &expected);
}

#[test]
fn rescue_serves_what_only_the_cache_has() {
    let (mut world, memory) = (World::new(), memory());
    make_cache(&world, memory.path());
    let image = world.image("disk.img", 8 << 20, 65536);
    let before = std::fs::read(&image).expect("read");
    let uri = world.attach("x", &image);
    add_cache(&world, "write-back");
    write(&uri, 7, "64k 64k");
    let written = contents(&world, &uri);
    assert!(written != before, "nothing was written");
    world.kill();
    let state = world.text("state");
    let mut rescue = world
        .command(&["rescue", "x", "--state-dir", &state])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("it starts");
    let start = Instant::now();
    while std::os::unix::net::UnixStream::connect(world.path("x.sock")).is_err() {
        assert!(start.elapsed() < HANG, "rescue does not serve");
        std::thread::sleep(Duration::from_millis(20));
    }
    reads(&uri, 7, "64k 64k");
    write(&uri, 8, "128k 64k");
    signal(&rescue, rustix::process::Signal::TERM);
    assert!(wait(&mut rescue).success());
    world.start();
    reads(&uri, 7, "64k 64k");
    reads(&uri, 8, "128k 64k");
    world.json(&["volume", "layer", "rm", "x", "cache"]);
    let expected = contents(&world, &uri);
    world.json(&["volume", "detach", "x"]);
    same(&image, &expected);
}
