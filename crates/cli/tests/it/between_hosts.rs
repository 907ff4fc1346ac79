//! Moves to another host's daemon: real daemons, real files, TLS, and a network that can be cut.

use crate::support::load::Load;
use crate::support::pair::{Pair, host, is_over, wait_until};
use crate::support::{name_of, same, target};

const SIZE: u64 = 48 << 20;

#[test]
fn a_volume_moves_to_another_host_under_load_and_its_guest_goes_on_through_the_first() {
    let pair = Pair::new();
    let image = pair.a.image("disk.img", SIZE, 1 << 20);
    let uri = pair.a.attach("x", &image);
    let load = Load::start(&uri, &image, 20);
    let report = pair.a.json(&["move", "x", "--to", "b", "--verify", "full"]);
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
    assert!(report["stream"]["bytes_sent"].as_u64().is_some_and(|sent| sent > 1 << 20), "{report}");
    load.goes_on();

    let (here, there) = (pair.at_a("x"), pair.at_b("x"));
    assert_eq!((&here["backend"], &here["state"]), (&"b:x".into(), &"forwarding".into()), "{here}");
    assert_eq!((&there["state"], &there["arrival"]["stage"]), (&"serving".into(), &"held".into()), "{there}");
    assert_eq!(there["arrival"]["used"], true, "{there}");
    assert_eq!(here["epoch"], there["epoch"], "{here} {there}");
    assert!(!image.exists(), "a VM could be started on the old disk");
    assert!(name_of(&pair.a.files("disk.img.moved-").pop().expect("kept")).contains("moved"));
    pair.b.refused(&["volume", "detach", "x"], 8, "uses x");
    pair.a.refused(&["move", "x", "--to", &target(&pair.a.path("back.img"))], 9, "b holds the volume");

    let expected = load.finish();
    wait_until("the guest's connections are closed", || (pair.at_a("x")["connections"] == 0).then_some(()));
    pair.a.json(&["volume", "detach", "x"]);
    same(&pair.arrived("x"), &expected);
}

#[test]
fn a_source_that_is_restarted_passes_its_guest_s_requests_on_and_so_it_does_to_a_target_that_is() {
    let mut pair = Pair::new();
    let image = pair.a.image("disk.img", SIZE, 1 << 20);
    let uri = pair.a.attach("x", &image);
    let load = Load::start(&uri, &image, 21);
    pair.a.json(&["move", "x", "--to", "b:other"]);
    pair.a.kill();
    pair.a.start();
    load.goes_on();
    pair.b.kill();
    pair.b.start();
    load.goes_on();
    pair.network.cut();
    pair.network.mend();
    load.goes_on();
    // The holder moves it on, and nobody at the first host notices.
    let to = pair.b.path("moved-on.img");
    pair.b.json(&["move", "other", "--to", &target(&to)]);
    load.goes_on();
    same(&to, &load.finish());
}

#[test]
fn a_cut_network_costs_the_guest_nothing_and_the_move_goes_on_by_itself_with_what_is_missing() {
    let pair = Pair::new();
    let image = pair.a.image("disk.img", SIZE, 65536);
    let uri = pair.a.attach("x", &image);
    let load = Load::start(&uri, &image, 22);
    pair.a.json(&["move", "x", "--to", "b", "--bandwidth", "16MiB/s", "--detach"]);
    for _ in 0..3 {
        let job = pair.wait_for_move("it copies", |job| job["progress"]["phase"] == "copying" || is_over(job));
        let before = job["progress"]["bytes_copied"].as_u64().unwrap_or(0);
        pair.wait_for_move("it gets on", |job| {
            is_over(job) || job["progress"]["bytes_copied"].as_u64().is_some_and(|copied| copied >= before + (2 << 20))
        });
        pair.network.cut();
        pair.wait_for_move("it is lost", |job| job["progress"]["phase"] == "target-lost" || is_over(job));
        load.goes_on();
        pair.network.mend();
    }
    let over = pair.wait_for_move("it is over", is_over);
    assert_eq!(over["state"], "done", "{over}\n{}", pair.a.log());
    assert!(over["report"]["stream"]["sessions"].as_u64().is_some_and(|sessions| sessions >= 3), "{over}");
    same(&pair.arrived("x"), &load.finish());
}

#[test]
fn either_daemon_may_be_killed_again_and_again_and_the_move_ends_well() {
    let mut pair = Pair::new();
    let image = pair.a.image("disk.img", SIZE, 65536);
    let uri = pair.a.attach("x", &image);
    let load = Load::start(&uri, &image, 23);
    let id = pair.a.json(&["move", "x", "--to", "b", "--bandwidth", "40MiB/s", "--detach"])["id"].as_u64();
    let mut delay_ms = 211;
    for round in 0..8 {
        delay_ms = delay_ms * 31 % 409;
        std::thread::sleep(std::time::Duration::from_millis(delay_ms));
        let killed = if round % 2 == 0 { &mut pair.a } else { &mut pair.b };
        killed.kill();
        killed.start();
    }
    let over = pair.a.wait_for_job(id.expect("a number"));
    assert_eq!(over["state"], "done", "{over}\n{}\n{}", pair.a.log(), pair.b.log());
    load.goes_on();
    same(&pair.arrived("x"), &load.finish());
}

#[test]
fn a_cancelled_move_leaves_nothing_on_either_host_even_if_the_other_hears_of_it_later() {
    let pair = Pair::new();
    let image = pair.a.image("disk.img", SIZE, 65536);
    let uri = pair.a.attach("x", &image);
    let load = Load::start(&uri, &image, 24);
    pair.a.json(&["move", "x", "--to", "b", "--bandwidth", "4MiB/s", "--detach"]);
    wait_until("it is being filled", || (pair.at_b("x")["state"] == "incoming").then_some(()));
    assert_eq!(pair.at_b("x")["arrival"]["host"], "a");
    pair.a.json(&["cancel", "x"]);
    assert_eq!(pair.volumes_at_b().len(), 0);
    assert!(!pair.arrived("x").exists(), "a file was left behind");

    pair.a.json(&["move", "x", "--to", "b", "--bandwidth", "4MiB/s", "--detach"]);
    pair.network.cut();
    pair.a.json(&["cancel", "x"]);
    assert_eq!(pair.volumes_at_b(), ["x"]);
    pair.network.mend();
    wait_until("b has heard of it", || pair.volumes_at_b().is_empty().then_some(()));
    load.goes_on();
    same(&image, &load.finish());
}

#[test]
fn what_cannot_be_moved_to_another_host_is_refused_with_words_and_nothing_is_left() {
    let pair = Pair::new();
    let image = pair.a.image("disk.img", 1 << 20, 65536);
    pair.a.attach("x", &image);
    pair.a.refused(&["move", "x", "--to", "nowhere"], 50, "nowhere");
    pair.a.refused(&["move", "x", "--to", "b", "--overwrite"], 2, "nothing is overwritten");
    pair.a.refused(&["move", "x", "--to", "b", "--strategy", "snapshot"], 2, "keeps overlays");
    let there = pair.b.image("y.img", 1 << 20, 65536);
    pair.b.attach("y", &there);
    pair.a.refused(&["move", "x", "--to", "b:y"], 10, "there is a volume y already");
    let plan = pair.a.json(&["plan", "x", "--to", "b:y"]);
    assert_eq!(plan["refusal"]["code"], "target-exists", "{plan}");
    // The other way round: that host takes none.
    pair.b.refused(&["move", "y", "--to", "a"], 52, "takes no volumes");
    pair.network.cut();
    pair.a.refused(&["move", "x", "--to", "b"], 51, "b");
    pair.network.mend();
    assert_eq!(pair.a.json(&["jobs", "--all"]).as_array().map(Vec::len), Some(0), "a refused move is a job");
    let (lone, _) = host("c", "");
    let other = lone.image("z.img", 1 << 20, 65536);
    lone.attach("z", &other);
    lone.refused(&["move", "z", "--to", "b"], 50, "b");
}

#[test]
fn resolve_says_what_both_hosts_have_on_record_and_decides_where_one_is_gone() {
    let mut pair = Pair::new();
    let image = pair.a.image("disk.img", 8 << 20, 65536);
    pair.a.attach("x", &image);
    pair.a.json(&["move", "x", "--to", "b", "--bandwidth", "1MiB/s", "--detach"]);
    wait_until("it is being filled", || (pair.at_b("x")["state"] == "incoming").then_some(()));
    let found = pair.b.json(&["resolve", "x"]);
    assert_eq!((&found["here"], &found["in_doubt"]), (&"it is being filled".into(), &false.into()), "{found}");
    pair.b.refused(&["resolve", "x", "--take"], 9, "not complete");
    let found = pair.a.json(&["resolve", "x"]);
    assert_eq!((&found["there"], &found["in_doubt"]), (&"it is being filled".into(), &false.into()), "{found}");
    pair.b.kill();
    let found = pair.a.json(&["resolve", "x"]);
    assert!(found["there"].as_str().is_some_and(|there| there.contains("no answer")), "{found}");
    pair.b.start();
    pair.a.json(&["set", "x", "--bandwidth", "0"]);
    let over = pair.wait_for_move("it is over", is_over);
    assert_eq!(over["state"], "done", "{over}");
    let found = pair.a.json(&["resolve", "x"]);
    assert!(found["verdict"].as_str().is_some_and(|verdict| verdict.contains("b holds the volume")), "{found}");
}

#[test]
fn a_copy_that_was_changed_while_its_daemon_was_away_gets_what_differs_again() {
    let mut pair = Pair::new();
    let image = pair.a.image("disk.img", SIZE, 65536);
    let expected = std::fs::read(&image).expect("read");
    pair.a.attach("x", &image);
    let how = ["move", "x", "--to", "b", "--verify", "off", "--bandwidth", "12MiB/s", "--detach"];
    let id = pair.a.json(&how)["id"].as_u64();
    pair.wait_for_move("half of it is there", |job| {
        is_over(job) || job["progress"]["percent"].as_f64().is_some_and(|percent| percent > 50.0)
    });
    // What is there is flushed every five seconds.
    pair.a.json(&["pause", "x"]);
    std::thread::sleep(std::time::Duration::from_secs(6));
    pair.a.json(&["resume", "x"]);
    pair.b.kill();
    let arrived = pair.arrived("x");
    for place in [0, 4 << 20, 6_000_001] {
        let file = std::fs::File::options().write(true).open(&arrived).expect("it is there");
        std::os::unix::fs::FileExt::write_all_at(&file, &[0xee; 5000], place).expect("written");
    }
    pair.b.start();
    let over = pair.a.wait_for_job(id.expect("a number"));
    assert_eq!(over["state"], "done", "{over}\n{}", pair.a.log());
    let report = &over["report"];
    let counts = (report["bytes_rechecked"].as_u64(), report["bytes_different"].as_u64());
    assert!(matches!(counts, (Some(16_000_000..), Some(1..1_000_000))), "{counts:?} {report}");
    same(&arrived, &expected);
}
