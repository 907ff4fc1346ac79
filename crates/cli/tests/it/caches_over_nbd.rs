//! Caches of volumes on the export of another server: what a guest reads and what the server has at the end are what was written, through
//! deaths of the daemon and of the server.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::cached::{cached, number, wait_until};
use crate::support::load::Load;
use crate::support::server::{Server, empty, text};
use crate::support::{World, same};
use serde_json::Value;

const BYTES: u64 = 24 << 20;
/// So long after the return of the server a volume may be down.
const RETURN_LIMIT: Duration = Duration::from_secs(30);

/// Waits until each of these counters is more than nothing.
fn wait_until_counted(world: &World, counters: &[&str]) {
    let are_counted = |cached: &Value| counters.iter().all(|counter| number(cached, counter) > 0);
    wait_until(world, &format!("one of {counters:?} stays zero"), are_counted);
}

/// The daemon ends, and the server; the daemon is started twice without the server, and then that is back. The volume comes up by
/// itself, or by the restart that its message names. A polite end has the daemon wait for what its guest has asked the absent server.
fn starts_without_server(mut world: World, server: &mut Server, far: &Path, is_polite: bool) -> World {
    match is_polite {
        true => world.terminate(),
        false => world.kill(),
    }
    let _ = (server.child.kill(), server.child.wait());
    world.start();
    std::thread::sleep(Duration::from_secs(1));
    match is_polite {
        true => world.terminate(),
        false => world.kill(),
    }
    world.start();
    *server = Server::nbdkit(&world, &["file", text(far)]);
    let problem = |world: &World| world.json(&["volume", "show", "x"])["problem"].clone();
    let start = Instant::now();
    while problem(&world) != Value::Null && start.elapsed() < RETURN_LIMIT {
        std::thread::sleep(Duration::from_millis(50));
    }
    let told = problem(&world);
    if told != Value::Null {
        assert!(told.to_string().contains("restart"), "the server is back, and the volume is not: {told}");
        world.terminate();
        world.start();
    }
    assert_eq!(problem(&world), Value::Null, "{}", world.log());
    world
}

/// A guest works through a cache of this mode over nbdkit, while the daemon and nbdkit are killed; `counters` are what must happen.
fn goes_through_deaths(mode: &str, seed: u64, counters: &[&str]) {
    let mut world = World::new();
    let memory = tempfile::Builder::new().prefix("th").tempdir_in("/dev/shm").expect("a directory in memory");
    let store = format!("file:{},size=64MiB", memory.path().join("ssd").display());
    world.json(&["cache", "create", "ssd", "--store", &store]);
    let image = world.image("disk.img", BYTES, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, seed);
    let far = empty(&world, "far.img", BYTES);
    let mut server = Server::nbdkit(&world, &["file", text(&far)]);
    let backend = server.uri();
    world.json(&["move", "x", "--to", &backend, "--verify", "full"]);
    world.json(&["volume", "layer", "add", "x", "cache", "--cache", "ssd", "--size", "8MiB", "--mode", mode]);
    assert_eq!(world.json(&["volume", "show", "x"])["backend"], *backend);
    let mut delay_ms = 67;
    for _ in 0..2 {
        load.goes_on();
        wait_until_counted(&world, counters);
        world.kill_four_times(&mut delay_ms);
        let now = cached(&world);
        assert_eq!(now["open"], true, "{now}\n{}", world.log());
        assert!(number(&now, "places_free") < number(&now, "places"), "what was cached is forgotten: {now}");
    }
    // The server, and then the daemon while that is back. What a dead daemon has left in a server is lost with it until a new daemon has
    // flushed it, as the guest's own flushes do.
    for _ in 0..2 {
        load.goes_on();
        drop(server);
        std::thread::sleep(Duration::from_millis(300));
        server = Server::nbdkit(&world, &["file", text(&far)]);
        load.goes_on();
    }
    world.kill();
    world.start();
    load.goes_on();
    wait_until_counted(&world, counters);
    for is_polite in [false, true] {
        world = starts_without_server(world, &mut server, &far, is_polite);
        load.goes_on();
        wait_until_counted(&world, counters);
    }
    world.json(&["volume", "layer", "rm", "x", "cache"]);
    load.goes_on();
    let expected = load.finish();
    world.json(&["volume", "detach", "x"]);
    drop(server);
    same(&far, &expected);
}

#[test]
fn a_cache_that_writes_through_to_an_export_outlives_the_daemon_and_the_server() {
    goes_through_deaths("write-through", 840, &["hits", "writes_through"]);
}

#[test]
fn a_cache_that_writes_back_to_an_export_outlives_the_daemon_and_the_server() {
    goes_through_deaths("write-back", 850, &["hits", "dirty_bytes"]);
}
