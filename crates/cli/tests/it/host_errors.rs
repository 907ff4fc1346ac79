//! What goes wrong between two hosts for good: one of them is gone at the worst moment, the target is full, slow, or not what it
//! was, and somebody changes his mind.

use std::path::PathBuf;

use crate::identities::{back_up, restore};
use crate::support::load::Load;
use crate::support::pair::{Pair, is_over, wait_until};
use crate::support::qemu::Qemu;
use crate::support::{Mount, same};

/// A volume `x` of `a` under load, and its image.
fn with_load(pair: &Pair, bytes: u64, number: u64) -> (Load, PathBuf) {
    let image = pair.a.image("disk.img", bytes, 65536);
    let uri = pair.a.attach("x", &image);
    (Load::start(&uri, &image, number), image)
}

#[test]
fn a_volume_whose_first_host_is_gone_for_good_is_taken_by_hand_and_nothing_that_was_answered_is_lost() {
    let mut pair = Pair::new();
    let (load, _) = with_load(&pair, 8 << 20, 50);
    let epoch = pair.give_up_untaken();
    let found = pair.a.json(&["resolve", "x"]);
    assert_eq!(found["in_doubt"], true, "{found}");
    assert!(found["risk"].as_str().is_some_and(|risk| risk.contains("--give-back")), "{found}");
    pair.b.refused(&["volume", "detach", "x"], 9, "may have given it up");
    pair.a.kill();
    let found = pair.b.json(&["resolve", "x"]);
    let prepared = format!("prepared for epoch {epoch}");
    assert_eq!((&found["in_doubt"], &found["here"]), (&true.into(), &prepared.into()), "{found}");
    let taken = pair.b.json(&["resolve", "x", "--take"]);
    let done = format!("this host holds the volume under epoch {epoch}, and the guest of a is kept out");
    assert_eq!(taken["done"], done, "{taken}");
    assert_eq!(pair.at_b("x")["state"], "serving");
    // The first host was not gone after all: once a person says so, it passes its guest on.
    pair.network.mend();
    pair.a.start();
    wait_until_kept_out(&pair);
    let back = pair.b.json(&["resolve", "x", "--give-back"]);
    assert_eq!(back["done"], "the guest of a may use it again", "{back}");
    load.goes_on();
    let over = pair.wait_for_move("it is over", is_over);
    assert_eq!(over["state"], "done", "{over}");
    same(&pair.arrived("x"), &load.finish());
}

fn wait_until_kept_out(pair: &Pair) {
    wait_until("its guest is kept out", || {
        let found = pair.a.json(&["resolve", "x"]);
        found["verdict"].as_str()?.contains("a person has opened").then_some(())
    });
}

#[test]
fn a_client_that_is_gone_keeps_no_volume_that_was_opened_at_its_new_host() {
    let pair = Pair::new();
    let image = pair.a.image("disk.img", 8 << 20, 65536);
    let uri = pair.a.attach("x", &image);
    pair.give_up_untaken();
    let mut client = std::process::Command::new("qemu-io")
        .args(["-f", "raw", "-c", "write -P 9 0 4k", &uri])
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("qemu-io starts; run `make setup`");
    wait_until("it is connected", || (pair.at_a("x")["connections"] == 1).then_some(()));
    pair.b.json(&["resolve", "x", "--take"]);
    pair.network.mend();
    pair.wait_for_move("it is over", is_over);
    wait_until_kept_out(&pair);
    pair.a.refused(&["volume", "detach", "x"], 8, "1 client is connected");
    assert!(client.try_wait().expect("asked").is_none(), "what a living client waits for has failed");
    client.kill().expect("killed");
    client.wait().expect("over");
    pair.a.json(&["volume", "detach", "x"]);
    assert_eq!(pair.b.json(&["resolve", "x"])["verdict"], "this host holds the volume; nothing is in doubt");
    pair.b.json(&["volume", "detach", "x"]);
}

#[test]
fn a_rescue_of_a_volume_that_has_come_keeps_the_guest_at_its_old_host_out() {
    let mut pair = Pair::new();
    let (load, _) = with_load(&pair, 8 << 20, 53);
    pair.a.json(&["move", "x", "--to", "b"]);
    pair.network.close();
    pair.network.cut();
    pair.b.kill();
    let mut rescue = pair
        .b
        .command(&["rescue", "x", "--state-dir", &pair.b.text("state")])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut line = String::new();
    let printed = rescue.stdout.as_mut().expect("piped");
    std::io::BufRead::read_line(&mut std::io::BufReader::new(printed), &mut line).expect("it says where it serves");
    rescue.kill().expect("killed");
    rescue.wait().expect("over");
    pair.b.start();
    pair.network.mend();
    let found = pair.b.json(&["resolve", "x"]);
    assert!(found["verdict"].as_str().is_some_and(|verdict| verdict.contains("a person has opened it")), "{found}");
    pair.b.json(&["resolve", "x", "--give-back"]);
    load.goes_on();
    drop(load);
}

#[test]
fn what_a_host_cannot_read_or_does_not_hold_is_not_taken_for_given_up_and_not_served() {
    let mut pair = Pair::new();
    let (load, _) = with_load(&pair, 8 << 20, 51);
    pair.give_up_untaken();
    pair.b.kill();
    pair.b.refused(&["rescue", "x", "--state-dir", &pair.b.text("state")], 9, "is not held here");
    pair.b.start();
    pair.a.kill();
    let journal = std::path::Path::new(&pair.a.text("state")).join("volumes/x/journal");
    let kept = std::fs::read(&journal).expect("there is a journal");
    std::fs::write(&journal, vec![0; kept.len()]).expect("it is writable");
    pair.a.start();
    pair.network.mend();
    let found = pair.b.json(&["resolve", "x"]);
    assert!(found["verdict"].as_str().is_some_and(|verdict| verdict.contains("nobody here knows")), "{found}");
    assert!(found["risk"].as_str().is_some_and(|risk| risk.contains("--take")), "{found}");
    pair.a.kill();
    std::fs::write(&journal, kept).expect("it is writable");
    pair.a.start();
    load.goes_on();
    let over = pair.wait_for_move("it is over", is_over);
    assert_eq!(over["state"], "done", "{over}");
    same(&pair.arrived("x"), &load.finish());
}

#[test]
fn a_volume_whose_second_host_is_gone_for_good_is_given_back_by_hand_and_that_host_forgets_it_when_it_returns() {
    let mut pair = Pair::new();
    let (load, image) = with_load(&pair, 8 << 20, 51);
    let epoch = pair.give_up_untaken();
    pair.b.kill();
    let back = pair.a.json(&["resolve", "x", "--give-back"]);
    assert_eq!(back["done"], format!("this host holds the volume under epoch {}", epoch + 1), "{back}");
    load.goes_on();
    let over = pair.wait_for_move("it is over", is_over);
    assert_eq!(over["state"], "failed", "{over}");
    pair.a.refused(&["resolve", "x", "--give-back"], 9, "nothing is in doubt");
    // The daemon that returns has it on record as one to be taken, and is told otherwise.
    pair.b.start();
    pair.network.mend();
    wait_until("b has heard of it", || pair.volumes_at_b().is_empty().then_some(()));
    assert!(!pair.arrived("x").exists(), "what b had of it is left");
    pair.a.kill();
    pair.a.start();
    load.goes_on();
    same(&image, &load.finish());
}

#[test]
fn a_target_without_room_ends_the_move_with_the_guest_where_it_was() {
    let pair = Pair::new();
    let small = Mount::tmpfs(&pair.b.path("incoming"), "6m");
    let image = pair.a.image("disk.img", 24 << 20, 4096);
    let uri = pair.a.attach("x", &image);
    let load = Load::start(&uri, &image, 52);
    pair.a.refused(&["move", "x", "--to", "b"], 14, "b");
    assert_eq!(std::fs::read_dir(&small.path).expect("listed").count(), 0, "something is left at b");
    assert!(pair.volumes_at_b().is_empty());
    load.goes_on();
    same(&image, &load.finish());
}

#[test]
fn a_move_that_ends_for_want_of_space_is_told_so_though_the_daemon_dies_while_it_is_undone() {
    let mut pair = Pair::new();
    let small = Mount::tmpfs(&pair.b.path("incoming"), "40m");
    let (load, image) = with_load(&pair, 24 << 20, 57);
    pair.a.json(&["move", "x", "--to", "b", "--bandwidth", "4MiB/s", "--detach"]);
    pair.wait_for_move("it copies", |job| job["progress"]["bytes_copied"].as_u64() > Some(0));
    // The other host does not answer that it forgets the volume: the move is being undone for seconds.
    pair.network.mute();
    let fill = std::fs::write(small.path.join("other"), vec![1; 40 << 20]);
    fill.expect_err("there is more room than was to be filled");
    let is_undone = |job: &serde_json::Value| job["progress"]["phase"] == "cancelled" || is_over(job);
    pair.wait_for_move("it is being undone", is_undone);
    pair.a.kill();
    pair.a.start();
    let over = pair.wait_for_move("it is over", is_over);
    assert_eq!((&over["state"], &over["error"]["code"]), (&"failed".into(), &"no-space".into()), "{over}");
    load.goes_on();
    std::fs::remove_file(small.path.join("other")).expect("removed");
    pair.network.mend();
    wait_until("b has forgotten it", || pair.volumes_at_b().is_empty().then_some(()));
    same(&image, &load.finish());
}

#[test]
fn a_network_that_is_slower_than_the_guest_writes_slows_the_guest_down_and_the_move_ends() {
    let pair = Pair::new();
    let (load, _) = with_load(&pair, 6 << 20, 53);
    pair.network.slow_down(2 << 20);
    pair.a.json(&["move", "x", "--to", "b", "--detach"]);
    let over = pair.wait_for_move("it is over", is_over);
    assert_eq!(over["state"], "done", "{over}");
    pair.network.slow_down(0);
    load.goes_on();
    same(&pair.arrived("x"), &load.finish());
}

#[test]
fn a_target_that_somebody_has_put_something_else_in_the_place_of_is_not_committed_to() {
    let pair = Pair::new();
    let (load, image) = with_load(&pair, 8 << 20, 54);
    pair.a.json(&["move", "x", "--to", "b", "--bandwidth", "2MiB/s", "--detach"]);
    pair.wait_for_move("it copies", |job| job["progress"]["bytes_copied"].as_u64() > Some(0));
    std::fs::rename(pair.arrived("x"), pair.b.path("elsewhere")).expect("moved");
    std::fs::write(pair.arrived("x"), "another's").expect("written");
    pair.a.json(&["set", "x", "--bandwidth", "0"]);
    let over = pair.wait_for_move("it is over", is_over);
    assert_eq!(over["state"], "failed", "{over}");
    let said = over["error"]["message"].as_str().unwrap_or_default();
    assert!(said.contains("deleted or replaced"), "{over}");
    assert_eq!(std::fs::read_to_string(pair.arrived("x")).expect("read"), "another's", "another's file was touched");
    load.goes_on();
    same(&image, &load.finish());
}

#[test]
fn a_move_whose_hosts_die_as_it_begins_waits_for_the_other_one_and_can_be_cancelled_meanwhile() {
    let mut pair = Pair::new();
    let (load, _) = with_load(&pair, 8 << 20, 56);
    let begin = |pair: &mut Pair| {
        let id = pair.a.json(&["move", "x", "--to", "b", "--detach"])["id"].as_u64().expect("a number");
        pair.a.kill();
        pair.b.kill();
        pair.a.start();
        load.goes_on();
        id
    };
    let id = begin(&mut pair);
    let output = pair.a.run(&["cancel", "x"]);
    // It may have been committed before anybody died.
    if output.status.success() {
        assert_eq!(pair.a.wait_for_job(id)["state"], "cancelled");
        pair.b.start();
        wait_until("nothing is left at b", || pair.volumes_at_b().is_empty().then_some(()));
        let id = begin(&mut pair);
        pair.b.start();
        let over = pair.a.wait_for_job(id);
        assert_eq!(over["state"], "done", "{over}");
    } else {
        pair.b.start();
    }
    load.goes_on();
    same(&pair.arrived("x"), &load.finish());
}

#[test]
fn a_move_is_cancelled_in_every_phase_that_it_can_be_seen_in() {
    let pair = Pair::new();
    let (load, image) = with_load(&pair, 16 << 20, 55);
    let begin = |more: &[&str]| {
        let arguments = ["move", "x", "--to", "b", "--bandwidth", "4MiB/s", "--detach"];
        pair.a.json(&[&arguments[..], more].concat())["id"].as_u64().expect("a number")
    };
    let ends = |id: u64, phase: &str| {
        let output = pair.a.run(&["cancel", "x"]);
        assert!(output.status.success(), "{phase}: {output:?}");
        let over = pair.a.wait_for_job(id);
        assert_eq!(over["state"], "cancelled", "{phase}: {over}");
        wait_until("nothing is left at b", || pair.volumes_at_b().is_empty().then_some(()));
        assert!(!pair.arrived("x").exists(), "{phase}: a file is left at b");
        load.goes_on();
    };
    for (phase, more) in [("copying", &[][..]), ("verifying", &["--verify", "full"])] {
        let id = begin(more);
        if phase == "verifying" {
            pair.a.json(&["set", "x", "--bandwidth", "0"]);
            pair.a.wait_until_job(phase, |job| job["progress"]["phase"] != "copying");
        } else {
            pair.a.wait_until_job(phase, |job| job["progress"]["phase"] == phase);
        }
        if pair.at_a("x")["backend"] == "b:x" {
            panic!("the comparison was over before anybody could cancel it");
        }
        ends(id, phase);
    }
    let id = begin(&[]);
    pair.a.wait_until_job("copying", |job| job["progress"]["bytes_copied"].as_u64() > Some(0));
    pair.a.json(&["pause", "x"]);
    ends(id, "paused");
    let id = begin(&[]);
    pair.a.wait_until_job("copying", |job| job["progress"]["bytes_copied"].as_u64() > Some(0));
    pair.network.cut();
    pair.a.wait_until_job("lost", |job| job["progress"]["phase"] == "target-lost");
    let output = pair.a.run(&["cancel", "x"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(pair.a.wait_for_job(id)["state"], "cancelled");
    pair.network.mend();
    wait_until("nothing is left at b", || pair.volumes_at_b().is_empty().then_some(()));
    // What is done cannot be undone.
    pair.a.json(&["move", "x", "--to", "b"]);
    assert!(!pair.a.run(&["cancel", "x"]).status.success());
    load.goes_on();
    same(&pair.arrived("x"), &load.finish());
    assert!(!image.exists());
}

#[test]
fn disks_of_running_machines_move_both_ways_at_once_and_their_guests_go_on() {
    let pair = Pair::both_ways();
    let (one, other) = (pair.a.image("one.img", 16 << 20, 65536), pair.b.image("other.img", 16 << 20, 65536));
    let (at_a, at_b) = (Qemu::raw(&pair.a, &one), Qemu::raw(&pair.b, &other));
    pair.a.json(&["adopt", "--qmp", &at_a.text(), "--node", "disk0", "--name", "one"]);
    pair.b.json(&["adopt", "--qmp", &at_b.text(), "--node", "disk0", "--name", "other"]);
    at_a.write(0x11);
    at_b.write(0x22);
    pair.a.refused(&["move", "one", "--to", "b"], 25, "--no-persist");
    std::thread::scope(|scope| {
        let there = scope.spawn(|| pair.a.json(&["move", "one", "--to", "b", "--no-persist", "--verify", "full"]));
        let back = scope.spawn(|| pair.b.json(&["move", "other", "--to", "a", "--no-persist", "--verify", "full"]));
        at_a.write(0x33);
        at_b.write(0x44);
        for report in [there.join().expect("it ends"), back.join().expect("it ends")] {
            assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
        }
    });
    at_a.write(0x55);
    at_b.write(0x66);
    drop((at_a, at_b));
    for (world, name) in [(&pair.a, "one"), (&pair.b, "other")] {
        world.json(&["release", name]);
        assert_eq!(world.json(&["volume", "show", if name == "one" { "other" } else { "one" }])["state"], "serving");
    }
    let first = |path: PathBuf| std::fs::read(path).expect("read")[..1 << 20].to_vec();
    assert!(first(pair.arrived("one")).iter().all(|byte| *byte == 0x55), "a write of a guest is lost");
    assert!(first(pair.a.path("incoming").join("other.raw")).iter().all(|byte| *byte == 0x66));
}

#[test]
fn an_old_state_directory_of_a_target_removes_nothing_of_what_has_come_since() {
    let mut pair = Pair::new();
    let image = pair.a.image("disk.img", 8 << 20, 65536);
    pair.a.attach("x", &image);
    let expected = std::fs::read(&image).expect("an image");
    pair.a.json(&["move", "x", "--to", "b", "--bandwidth", "2MiB/s", "--detach"]);
    pair.wait_for_move("it copies", |job| job["progress"]["bytes_copied"].as_u64() > Some(0));
    back_up(&pair.b, "before");
    pair.a.json(&["set", "x", "--bandwidth", "0"]);
    let over = pair.wait_for_move("it is over", is_over);
    assert_eq!(over["state"], "done", "{over}");

    restore(&mut pair.b, "before");
    wait_until("it is down", || (pair.at_b("x")["state"] == "down").then_some(()));
    for host in [&pair.a, &pair.b] {
        let found = host.json(&["resolve", "x"]);
        let verdict = found["verdict"].as_str().expect("a verdict");
        assert!(found["in_doubt"] == true && verdict.contains("state directory is an older one"), "{found}");
    }
    pair.b.refused(&["resolve", "x", "--give-back"], 9, "state directory is an older one");
    pair.b.json(&["volume", "detach", "x"]);
    assert!(std::fs::read(pair.arrived("x")).expect("it is there") == expected, "other bytes");
    pair.b.attach("x", &pair.arrived("x"));
}
