//! Volumes with layers that move to another host: the guest goes through them at the first host until that lets go.

use std::path::{Path, PathBuf};

use crate::support::load::Load;
use crate::support::pair::{Pair, is_over, wait_until};
use crate::support::{World, same, target, tool};

const SIZE: u64 = 12 << 20;

fn snapshots(world: &World, volume: &str) -> Vec<String> {
    let layers = world.json(&["volume", "snapshot", "ls", volume]);
    let layers = layers.as_array().expect("a list").clone();
    layers.iter().map(|layer| layer["name"].as_str().expect("a name").to_owned()).collect()
}

/// What a client of a volume of `world` reads from beginning to end.
fn contents(world: &World, volume: &str) -> Vec<u8> {
    let uri = world.json(&["volume", "show", volume])["export"].as_str().expect("an address").to_owned();
    let copy = world.path("contents");
    tool("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, copy.to_str().expect("text")]);
    std::fs::read(&copy).expect("read")
}

/// The files of the directory for volumes that come to `b`.
fn arrived(pair: &Pair) -> Vec<PathBuf> {
    let directory = pair.b.path("incoming");
    std::fs::read_dir(directory).expect("listed").map(|entry| entry.expect("an entry").path()).collect()
}

/// A volume `x` at `a` with a load on it and two snapshots, and what it held when the first was taken.
fn with_snapshots(pair: &Pair, seed: u64) -> (Load, PathBuf, Vec<u8>) {
    // Neither a multiple of a chunk nor of a block.
    let image = pair.a.image("disk.img", SIZE + 1536, 65536);
    let before = std::fs::read(&image).expect("read");
    let uri = pair.a.attach("x", &image);
    pair.a.json(&["volume", "snapshot", "add", "x", "first"]);
    let load = Load::start(&uri, &image, seed);
    load.goes_on();
    pair.a.json(&["volume", "snapshot", "add", "x", "second"]);
    load.goes_on();
    (load, image, before)
}

fn let_go(pair: &Pair, load: Load) -> Vec<u8> {
    let after = load.finish();
    wait_until("the guest's connections are closed", || (pair.at_a("x")["connections"] == 0).then_some(()));
    pair.a.json(&["volume", "detach", "x"]);
    wait_until("it is let go", || pair.at_b("x")["arrival"].is_null().then_some(()));
    after
}

#[test]
fn snapshots_and_limits_go_to_another_host_with_their_volume() {
    let mut pair = Pair::new();
    let (load, _, before) = with_snapshots(&pair, 340);
    pair.a.json(&["volume", "layer", "add", "x", "throttle", "--iops", "100000"]);
    let plan = pair.a.json(&["plan", "x", "--to", "b"]);
    assert!(plan["refusal"].is_null(), "{plan}");
    let report = pair.a.json(&["move", "x", "--to", "b", "--verify", "full", "--delete-source"]);
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}\n{}", pair.b.log());
    assert_eq!(pair.a.files(".disk.img.layer.overlay-"), Vec::<PathBuf>::new(), "they go with the source");
    load.goes_on();
    // The guest goes through the layers here, over bytes that are there.
    for restarted in [true, false] {
        let killed = if restarted { &mut pair.a } else { &mut pair.b };
        killed.kill();
        killed.start();
        load.goes_on();
    }
    pair.network.cut();
    pair.network.mend();
    load.goes_on();
    assert_eq!(snapshots(&pair.a, "x"), ["first", "second"]);
    assert_eq!(snapshots(&pair.b, "x"), Vec::<String>::new(), "until then only their bytes are there");
    let to = target(&pair.b.path("moved-on.img"));
    pair.b.refused(&["move", "x", "--to", &to], 8, "its guest goes through them at a");
    pair.b.refused(&["volume", "snapshot", "add", "x", "third"], 8, "a guest of another host uses x");
    pair.a.refused(&["volume", "snapshot", "rm", "x", "first"], 9, "is no file or block device of this host");

    let after = let_go(&pair, load);
    assert_eq!(snapshots(&pair.b, "x"), ["first", "second"]);
    assert_eq!(pair.b.json(&["volume", "layer", "ls", "x"]).as_array().map(Vec::len), Some(3));
    assert!(contents(&pair.b, "x") == after, "the guest's disk is another");
    assert_eq!(arrived(&pair).len(), 3, "the image and two overlays");
    // From here on they are this host's like any others.
    pair.b.kill();
    pair.b.start();
    pair.b.run(&["volume", "snapshot", "rm", "x", "second"]);
    assert!(contents(&pair.b, "x") == after, "a removal has changed the guest's disk");
    pair.b.json(&["volume", "snapshot", "revert", "x", "first"]);
    assert!(contents(&pair.b, "x") == before, "not what it was at the first snapshot");
}

#[test]
fn a_move_of_a_volume_with_snapshots_goes_on_over_cuts_and_deaths_and_leaves_nothing_when_it_is_cancelled() {
    let mut pair = Pair::new();
    let (load, _, _) = with_snapshots(&pair, 341);
    pair.a.json(&["move", "x", "--to", "b", "--bandwidth", "2MiB/s", "--detach"]);
    pair.wait_for_move("it copies", |job| job["progress"]["bytes_copied"].as_u64() > Some(1 << 20));
    assert_eq!(arrived(&pair).len(), 3);
    pair.a.json(&["cancel", "x"]);
    wait_until("nothing is left there", || arrived(&pair).is_empty().then_some(()));
    assert_eq!(snapshots(&pair.a, "x"), ["first", "second"]);
    load.goes_on();

    let id = pair.a.json(&["move", "x", "--to", "b", "--bandwidth", "8MiB/s", "--detach"])["id"].as_u64();
    let mut delay_ms = 97;
    for round in 0..6 {
        delay_ms = delay_ms * 31 % 409;
        std::thread::sleep(std::time::Duration::from_millis(delay_ms));
        match round % 3 {
            0 => pair.network.cut(),
            1 => pair.a.kill(),
            _ => pair.b.kill(),
        }
        match round % 3 {
            0 => pair.network.mend(),
            1 => pair.a.start(),
            _ => pair.b.start(),
        }
    }
    let over = pair.a.wait_for_job(id.expect("a number"));
    assert_eq!(over["state"], "done", "{over}\n{}\n{}", pair.a.log(), pair.b.log());
    load.goes_on();
    let after = let_go(&pair, load);
    assert!(contents(&pair.b, "x") == after, "the guest's disk is another");
}

#[test]
fn a_volume_with_snapshots_that_was_given_up_untaken_is_given_back_with_them() {
    let pair = Pair::new();
    let (load, image, before) = with_snapshots(&pair, 342);
    pair.give_up_untaken();
    pair.network.cut();
    pair.a.json(&["resolve", "x", "--give-back"]);
    load.goes_on();
    assert_eq!(snapshots(&pair.a, "x"), ["first", "second"]);
    pair.network.mend();
    wait_until("the other host forgets it", || pair.volumes_at_b().is_empty().then_some(()));
    assert!(arrived(&pair).is_empty());
    // It moves again, and nothing of the first time is in its way.
    pair.a.json(&["move", "x", "--to", "b", "--detach"]);
    let over = pair.wait_for_move("it is over", is_over);
    assert_eq!(over["state"], "done", "{over}");
    load.goes_on();
    let after = let_go(&pair, load);
    assert!(contents(&pair.b, "x") == after, "the guest's disk is another");
    let base: &Path = &pair.arrived("x");
    same(base, &before);
    assert!(!image.exists());
}

#[test]
fn a_volume_with_snapshots_whose_first_host_is_gone_is_taken_with_what_was_flushed() {
    let mut pair = Pair::new();
    let (load, _, _) = with_snapshots(&pair, 343);
    pair.a.json(&["move", "x", "--to", "b"]);
    load.goes_on();
    let after = load.finish();
    wait_until("the guest's connections are closed", || (pair.at_a("x")["connections"] == 0).then_some(()));
    let uri = pair.at_a("x")["export"].as_str().expect("an address").to_owned();
    tool("qemu-io", &["-f", "raw", "-c", "flush", &uri]);
    pair.a.kill();
    pair.network.cut();
    // It would take a minute to notice that the first host is gone.
    pair.b.kill();
    pair.b.start();
    pair.b.json(&["resolve", "x", "--take"]);
    assert_eq!(snapshots(&pair.b, "x"), ["first", "second"]);
    assert!(contents(&pair.b, "x") == after, "what was flushed is not there");
}
