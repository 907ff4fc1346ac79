//! What earlier versions have left behind is read by this one: state directories in every stage, with their images.
//! `cargo xtask record-fixtures` makes them; `fixtures/README.md` says what is in them.

use std::path::{Path, PathBuf};

use crate::support::left_behind::Left;
use crate::support::pair::wait_until;
use crate::support::{same, tool};
use serde_json::Value;

/// The versions whose fixtures there are.
fn versions() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let entries = std::fs::read_dir(folder).expect("fixtures are part of the checkout").flatten();
    let versions: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    assert!(!versions.is_empty(), "there are no fixtures");
    versions
}

/// Unpacks `stage` of every version and hands each to `read`.
fn for_each(stage: &str, read: impl Fn(Left)) {
    for version in versions() {
        let archive = version.join(format!("{stage}.tar.gz"));
        println!("{}", archive.display());
        read(Left::unpack(&archive));
    }
}

fn assert_reads(left: &Left, image: &str) {
    let read = left.path("read.img");
    tool("nbdcopy", &[&left.uri("x"), &read.display().to_string()]);
    same(&read, &left.expected(image));
}

#[test]
fn a_volume_at_rest_is_served_and_moves() {
    for_each("idle", |mut left| {
        left.start("a");
        assert_reads(&left, "expected.img");
        let daemon = left.daemon("a");
        let jobs = daemon.json(&["jobs", "--all"]).expect("listed");
        assert_eq!((&jobs[0]["state"], jobs.as_array().map(Vec::len)), (&"done".into(), Some(1)), "{jobs}");
        let to = left.path("again.img");
        daemon.json(&["move", "x", "--to", &crate::support::target(&to), "--verify", "full"]).expect("it moves");
        same(&to, &left.expected("expected.img"));
    });
}

#[test]
fn an_interrupted_move_of_each_strategy_goes_on() {
    for strategy in ["mirror", "dbt", "incremental-dbt", "auto", "snapshot"] {
        for_each(&format!("moving-{strategy}"), |mut left| {
            left.start("a");
            assert_reads(&left, "expected.img");
            let daemon = left.daemon("a");
            let job = daemon.json(&["jobs", "--all"]).expect("listed")[0].clone();
            assert_eq!(job["state"], "running", "{job}\n{}", daemon.log());
            daemon.json(&["set", "x", "--bandwidth", "0"]).expect("set");
            let over = daemon.wait_for_job(job["id"].as_u64().expect("a number")).expect("it ends");
            assert_eq!((&over["state"], &over["report"]["strategy"]), (&"done".into(), &strategy.into()), "{over}");
            let resumed = over["report"]["bytes_resumed"].as_u64();
            assert!(resumed > Some(0), "what the target had is copied again: {over}");
            same(&left.path("new.img"), &left.expected("expected.img"));
        });
    }
}

#[test]
fn all_disks_of_a_machine_that_died_with_its_daemon_are_known() {
    for_each("group", |mut left| {
        left.start("a");
        let daemon = left.daemon("a");
        for name in ["system", "data"] {
            let volume = daemon.json(&["volume", "show", name]).expect("it is known");
            let image = left.path(&format!("{name}.img"));
            let backend = volume["backend"].as_str().expect("text");
            assert!(backend.starts_with(&crate::support::target(&image)), "{volume}");
            same(&image, &left.expected(&format!("expected-{name}.img")));
        }
        let jobs = daemon.json(&["jobs", "--all"]).expect("listed");
        let groups: Vec<&Value> = jobs.as_array().expect("a list").iter().map(|job| &job["group"]).collect();
        assert!(groups.len() == 2 && groups.iter().all(|group| !group.is_null() && *group == groups[0]), "{jobs}");
    });
}

#[test]
fn an_interrupted_move_to_another_host_goes_on_there() {
    for_each("between-hosts-moving", |mut left| {
        left.start_hosts();
        assert_reads(&left, "expected.img");
        let daemon = left.daemon("a");
        let job = daemon.json(&["jobs", "--all"]).expect("listed")[0].clone();
        daemon.json(&["set", "x", "--bandwidth", "0"]).expect("it is not over");
        let over = daemon.wait_for_job(job["id"].as_u64().expect("a number")).expect("it ends");
        assert_eq!(over["state"], "done", "{over}\n{}", daemon.log());
        same(&left.path("b/incoming/x.raw"), &left.expected("expected.img"));
        assert_reads(&left, "expected.img");
    });
}

#[test]
fn a_volume_that_was_given_up_and_not_taken_is_taken() {
    for_each("between-hosts-given-up", |mut left| {
        left.start_hosts();
        wait_until("it is taken", || {
            let volume = left.daemon("b").json(&["volume", "show", "x"]).expect("it is known");
            (volume["arrival"]["stage"] == "held").then_some(())
        });
        assert_reads(&left, "expected.img");
        same(&left.path("b/incoming/x.raw"), &left.expected("expected.img"));
    });
}

#[test]
fn a_guest_whose_disk_has_moved_reaches_it_through_its_first_host() {
    for_each("between-hosts-forwarded", |mut left| {
        left.start_hosts();
        assert_reads(&left, "expected.img");
        tool("qemu-io", &["-f", "raw", "-c", "write -P 7 0 64k", "-c", "flush", &left.uri("x")]);
        let held = std::fs::read(left.path("b/incoming/x.raw")).expect("read");
        assert_eq!(held[..65536], [7; 65536], "what the guest writes does not come to its volume");
    });
}
