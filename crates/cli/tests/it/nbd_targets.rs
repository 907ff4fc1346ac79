//! Moves to servers that are not ours: nbdkit and qemu-nbd, killed, started again, away for good, slow, unsuitable.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::load::Load;
use crate::support::server::{Server, empty, text};
use crate::support::{HANG, World, has_copied, same, signal, target};
use block::{Buffer, Bytes, Data, Device, Mutation};
use env::{EnvRef, RealEnv};
use nbd::NbdDevice;
use rustix::process::Signal;

const MIB: u64 = 1 << 20;

/// The move `id` of `x`, slow so far, ends with equal sides while the load goes on, and `far` holds what that has written.
fn ends_equal(world: &World, id: u64, load: Load, far: &Path) {
    world.json(&["set", "x", "--bandwidth", "0"]);
    let over = world.wait_for_job(id);
    assert_eq!((&over["state"], &over["report"]["equal"]), (&"done".into(), &true.into()), "{over}\n{}", world.log());
    load.goes_on();
    same(far, &load.finish());
}

#[test]
fn a_volume_moves_to_nbdkit_under_load_outlives_both_ends_and_moves_back() {
    let mut world = World::new();
    let image = world.image("disk.img", 24 * MIB + 4096, MIB as usize);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 31);
    // The export is larger than the volume, and stays so.
    let far = empty(&world, "far.img", 32 * MIB);
    let server = Server::nbdkit(&world, &["file", text(&far)]);
    let to = server.uri();
    let report = world.json(&["move", "x", "--to", &to, "--verify", "full"]);
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
    assert!(!image.exists(), "a VM could be started on the old disk");
    assert_eq!(world.json(&["volume", "show", "x"])["backend"], *to);
    load.goes_on();

    world.kill();
    world.start();
    load.goes_on();
    drop(server);
    std::thread::sleep(Duration::from_millis(300));
    let server = Server::nbdkit(&world, &["file", text(&far)]);
    load.goes_on();
    // Both at once: the daemon comes up without the server, and its clients wait.
    world.kill();
    drop(server);
    world.start();
    assert_eq!(world.json(&["volume", "show", "x"])["state"], "serving");
    let _server = Server::nbdkit(&world, &["file", text(&far)]);
    load.goes_on();

    let back = world.path("back.img");
    let report = world.json(&["move", "x", "--to", &target(&back), "--verify", "full"]);
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
    assert!(report["notes"].to_string().contains("was left as it is"), "{report}");
    load.goes_on();
    let expected = load.finish();
    same(&back, &expected);
    assert_eq!(std::fs::metadata(&far).expect("it is there").len(), 32 * MIB, "the export's file was changed in size");
}

#[test]
fn a_server_and_a_daemon_that_are_killed_in_the_middle_of_a_copy_do_not_end_it() {
    let mut world = World::new();
    let image = world.image("disk.img", 32 * MIB, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 32);
    let far = empty(&world, "far.img", 32 * MIB);
    let server = Server::nbdkit(&world, &["file", text(&far)]);
    let to = server.uri();
    let id = world.json(&["move", "x", "--to", &to, "--bandwidth", "6MiB/s", "--verify", "full", "--detach"])["id"]
        .as_u64()
        .expect("a number");
    world.wait_until_job("nothing is copied", has_copied(4 * MIB));
    drop(server);
    load.goes_on();
    let _server = Server::nbdkit(&world, &["file", text(&far)]);
    world.wait_until_job("the copy does not go on", has_copied(12 * MIB));
    world.kill();
    world.start();
    ends_equal(&world, id, load, &far);
}

#[test]
fn what_is_no_target_is_refused_before_anything_is_changed() {
    let world = World::new();
    let image = world.image("disk.img", 4 * MIB, 65536);
    let uri = world.attach("x", &image);
    let refused = |to: &str, code, part| world.refused(&["move", "x", "--to", to], code, part);
    refused(&uri, 12, "is the export of x here");
    refused("nbd://127.0.0.1:1/x", 19, "connecting to nbd://127.0.0.1:1/x");
    refused("nbd:///x", 2, "needs a host");
    let far = empty(&world, "far.img", 4 * MIB);
    {
        let server = Server::nbdkit(&world, &["--readonly", "file", text(&far)]);
        refused(&server.uri(), 13, "takes no writes");
        refused(&format!("nbd+unix:///other?socket={}", world.text("nobody.sock")), 16, "connecting to");
    }
    {
        let server = Server::nbdkit(&world, &["memory", "2M"]);
        refused(&server.uri(), 11, "has 2 MiB and the volume 4 MiB");
    }
    {
        let server = Server::nbdkit(&world, &["file", text(&far)]);
        world.refused(&["move", "x", "--to", &server.uri(), "--strategy", "snapshot"], 2, "keeps overlays beside");
        let plan = world.json(&["plan", "x", "--to", &server.uri()]);
        assert!(plan["refusal"].is_null(), "{plan}");
    }
    assert!(std::fs::read(&far).expect("read").iter().all(|byte| *byte == 0), "a target that was refused was written");
    std::fs::write(&far, vec![7; 4 << 20]).expect("written");
    let server = Server::nbdkit(&world, &["file", text(&far)]);
    refused(&server.uri(), 10, "is not empty");
    assert_eq!(world.json(&["move", "x", "--to", &server.uri(), "--overwrite"])["state"], "done");
    let expected = std::fs::read(&world.files("disk.img.moved-")[0]).expect("the source is kept");
    same(&far, &expected);
    refused(&server.uri(), 12, "is on");
}

#[test]
fn qemu_nbd_takes_a_volume_that_is_mostly_holes() {
    let world = World::new();
    let image = world.image("disk.img", 16 * MIB, 4 << 20);
    world.attach("x", &image);
    let far = empty(&world, "far.img", 16 * MIB);
    let socket = world.path("qemu.sock");
    let arguments =
        ["--persistent", "--shared=8", "--format=raw", "--discard=unmap", "--socket", text(&socket), text(&far)];
    let server = Server::start("qemu-nbd", socket.clone(), &arguments);
    let report = world.json(&["move", "x", "--to", &server.uri(), "--verify", "full"]);
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
    let expected = std::fs::read(&world.files("disk.img.moved-")[0]).expect("the source is kept");
    same(&far, &expected);
}

#[test]
fn a_slow_server_over_tcp_keeps_every_promise() {
    let world = World::new();
    let image = world.image("disk.img", 8 * MIB, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 33);
    let far = empty(&world, "far.img", 8 * MIB);
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a port").port();
    let port = port.to_string();
    let arguments = ["--foreground", "--exit-with-parent", "--ipaddr", "127.0.0.1", "--port", &port];
    let delay = ["--filter=delay", "file", text(&far), "wdelay=3ms", "rdelay=1ms"];
    let child = Command::new("nbdkit")
        .args([&arguments[..], &delay[..]].concat())
        .stdin(Stdio::null())
        .spawn()
        .expect("nbdkit is missing: run `make setup`");
    let _server = Server { child, socket: PathBuf::new() };
    let start = Instant::now();
    while std::net::TcpStream::connect(format!("127.0.0.1:{port}")).is_err() {
        assert!(start.elapsed() < HANG, "nbdkit does not come up");
        std::thread::sleep(Duration::from_millis(10));
    }
    let report = world.json(&["move", "x", "--to", &format!("nbd://127.0.0.1:{port}/"), "--verify", "full"]);
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
    load.goes_on();
    same(&far, &load.finish());
}

#[test]
fn a_server_that_stays_away_gives_errors_after_the_patience_and_serves_again_when_it_is_back() {
    let mut world = World::without_daemon();
    std::fs::write(world.path("config.toml"), "nbd-patience-seconds = 1\n").expect("written");
    world.daemon.arguments = vec!["--config".to_owned(), world.text("config.toml")];
    world.start();
    let image = world.image("disk.img", 4 * MIB, 65536);
    let uri = world.attach("x", &image);
    let far = empty(&world, "far.img", 4 * MIB);
    let server = Server::nbdkit(&world, &["file", text(&far)]);
    assert_eq!(world.json(&["move", "x", "--to", &server.uri()])["state"], "done");
    drop(server);
    let read =
        || Command::new("qemu-io").args(["-r", "-f", "raw", "-c", "read 0 4096", &uri]).output().expect("qemu-io");
    let output = read();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("Input/output error"), "{said}");
    let _server = Server::nbdkit(&world, &["file", text(&far)]);
    let start = Instant::now();
    while !String::from_utf8_lossy(&read().stdout).contains("read 4096/4096") {
        assert!(start.elapsed() < HANG, "the server is back and nobody connects\n{}", world.log());
    }
}

#[test]
fn a_server_that_is_stopped_holds_up_neither_the_guest_nor_anybody_else_and_the_move_goes_on_with_it() {
    let mut world = World::new();
    let image = world.image("disk.img", 16 * MIB, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 35);
    let far = empty(&world, "far.img", 16 * MIB);
    let server = Server::nbdkit(&world, &["file", text(&far)]);
    let to = server.uri();
    let begin = |flags: &[&str]| {
        let flags = [&["move", "x", "--to", &to, "--verify", "full", "--overwrite", "--detach"], flags].concat();
        world.json(&flags)["id"].as_u64().expect("a number")
    };
    // While it is copied to: the guest, those who ask, and a cancel.
    let id = begin(&["--bandwidth", "4MiB/s"]);
    world.wait_until_job("nothing is copied", has_copied(4 * MIB));
    signal(&server.child, Signal::STOP);
    load.goes_on_beside("copying", &world);
    assert_eq!(world.json(&["volume", "show", "x"])["state"], "moving");
    assert_eq!(world.json(&["cancel", "x"])["state"], "cancelled");
    assert_eq!(world.wait_for_job(id)["state"], "cancelled");
    load.goes_on_beside("cancelled", &world);
    // What is under way there may land on what is written next.
    world.refused(&["move", "x", "--to", &to, "--overwrite"], 7, "has not answered all");
    signal(&server.child, Signal::CONT);
    let start = Instant::now();
    while !world.json(&["plan", "x", "--to", &to, "--overwrite"])["refusal"].is_null() {
        assert!(start.elapsed() < HANG, "the export is not free again\n{}", world.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    // While everything is copied and compared, and a stop of the daemon.
    let id = begin(&["--bandwidth", "8MiB/s"]);
    world.wait_until_job("nothing is copied", has_copied(8 * MIB));
    signal(&server.child, Signal::STOP);
    load.goes_on_beside("copying again", &world);
    world.terminate();
    world.start();
    load.goes_on_beside("started again", &world);
    signal(&server.child, Signal::CONT);
    ends_equal(&world, id, load, &far);
}

#[test]
fn a_server_below_a_volume_may_be_stopped_politely_under_load_and_killed_after_a_forced_write() {
    let world = World::new();
    let image = world.image("disk.img", 4 * MIB, 65536);
    let uri = world.attach("x", &image);
    let far = empty(&world, "far.img", 4 * MIB);
    let mut server = Server::nbdkit(&world, &["file", text(&far)]);
    assert_eq!(world.json(&["move", "x", "--to", &server.uri()])["state"], "done");
    let load = Load::start(&uri, &far, 34);
    for _ in 0..3 {
        load.goes_on();
        crate::support::signal(&server.child, rustix::process::Signal::TERM);
        server.child.wait().expect("it ends");
        std::thread::sleep(Duration::from_millis(200));
        server = Server::nbdkit(&world, &["file", text(&far)]);
    }
    load.goes_on();
    same(&far, &load.finish());

    // Without a flush, which QEMU's programs ask for when they end.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an event loop");
    runtime.block_on(async {
        let env: EnvRef = Arc::new(RealEnv::new());
        let export = NbdDevice::connect(&uri.parse().expect("a good address"), &env).await.expect("it is served");
        let device = Device::new("export", export);
        let filled = |length, value| Mutation::data(Bytes(0), Data::copy_of(&vec![value; length]));
        device.write(filled(8192, 1)).await.expect("it is served");
        device.write(filled(4096, 2).with_fua(true)).await.expect("it is served");
        drop(server);
        let _server = Server::nbdkit(&world, &["file", text(&far)]);
        let read = device.read(Bytes(0), Buffer::unpooled(8192)).await.expect("the server is back");
        assert!(read[..4096].iter().all(|byte| *byte == 2), "an older write came back over a forced one");
        assert!(read[4096..].iter().all(|byte| *byte == 1), "a write was lost");
    });
}

/// A client that asks for no flush by itself.
async fn client_of(uri: &str) -> Device {
    let env: EnvRef = Arc::new(RealEnv::new());
    let export = NbdDevice::connect(&uri.parse().expect("a good address"), &env).await.expect("it is served");
    Device::new("export", export)
}

#[test]
fn a_stop_of_the_daemon_does_not_hide_what_a_dead_server_had_answered_from_the_next_flush() {
    let mut world = World::new();
    let image = world.image("disk.img", 4 * MIB, 65536);
    let uri = world.attach("x", &image);
    let far = empty(&world, "far.img", 4 * MIB);
    let server = Server::nbdkit(&world, &["file", text(&far)]);
    assert_eq!(world.json(&["move", "x", "--to", &server.uri()])["state"], "done");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an event loop");
    runtime.block_on(async {
        let client = client_of(&uri).await;
        client.flush().await.expect("it is served");
        for number in 0..100 {
            let written = Mutation::data(Bytes(number * 4096), Data::copy_of(&[1; 4096]));
            client.write(written).await.expect("it is served");
        }
        // Nobody flushes from here on.
        drop(server);
    });
    world.terminate();
    world.start();
    let _server = Server::nbdkit(&world, &["file", text(&far)]);
    // Nobody was told: the daemon that comes after tells it.
    world.kill();
    world.start();
    runtime.block_on(async {
        let client = client_of(&uri).await;
        client.flush().await.expect_err("answered writes may be lost, and the flush says that all is well");
        client.flush().await.expect("that was told, and the server is back");
    });
    world.wait_for_log("the guest was told of a loss");
    for is_polite in [false, true] {
        match is_polite {
            true => world.terminate(),
            false => world.kill(),
        }
        world.start();
        runtime.block_on(async {
            let client = client_of(&uri).await;
            client.flush().await.expect("a loss is told once");
        });
    }
}
