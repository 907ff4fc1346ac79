//! Moves: under load, steered, refused, killed in the middle, rescued.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::support::load::Load;
use crate::support::{HANG, Mount, World, name_of, same, signal, target, tool, wait};
use serde_json::Value;

/// Waits until the volume's job has copied at least `bytes`.
fn wait_until_copied(world: &World, bytes: u64) {
    let start = Instant::now();
    loop {
        let jobs = world.json(&["jobs"]);
        if jobs[0]["progress"]["bytes_copied"].as_u64().is_some_and(|copied| copied >= bytes) {
            return;
        }
        assert!(start.elapsed() < HANG, "nothing is copied: {jobs}\n{}", world.log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_volume_moves_under_load_and_every_promise_is_kept() {
    let world = World::new();
    let image = world.image("disk.img", (48 << 20) + 4096, 1 << 20);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 10);
    let to = world.path("new.img");
    let report = world.json(&["move", "x", "--to", &target(&to), "--verify", "full"]);
    assert_eq!((&report["state"], &report["verified"], &report["equal"]), (&"done".into(), &true.into(), &true.into()));
    for key in ["seconds", "bytes_copied", "bytes_mirrored", "stall_us_max"] {
        assert!(report[key].is_number(), "{key}: {report}");
    }
    load.goes_on();
    same(&to, &load.finish());

    assert!(!image.exists(), "a VM could be started on the old disk");
    let kept = world.files("disk.img.moved-").pop().expect("the source is kept");
    let digest = blake3_of(&kept);
    assert_eq!(report["digest"], *digest, "the digest is not that of the frozen source");
    assert_eq!(world.json(&["volume", "show", "x"])["backend"], target(&to));
    assert_eq!(world.json(&["jobs", "--all"])[0]["report"]["equal"], true);
}

fn blake3_of(path: &Path) -> String {
    let printed = tool("b3sum", &["--no-names", &path.display().to_string()]);
    printed.trim().to_owned()
}

#[test]
fn fio_verifies_what_it_wrote_through_a_move() {
    let world = World::new();
    let image = world.image("disk.img", 64 << 20, 1 << 20);
    let uri = world.attach("x", &image);
    let job = [
        "--name=verify",
        "--ioengine=nbd",
        &format!("--uri={uri}"),
        "--rw=randwrite",
        "--bs=8k",
        "--size=64m",
        "--iodepth=8",
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
        "--rate_iops=4000",
        "--output-format=terse",
    ];
    let mut fio = std::process::Command::new("fio")
        .args(job)
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("fio is there: run `make setup`");
    std::thread::sleep(Duration::from_millis(300));
    let report = world.json(&["move", "x", "--to", &target(&world.path("new.img")), "--bandwidth", "64MiB/s"]);
    assert_eq!(report["equal"], true);
    assert!(wait(&mut fio).success(), "fio found something else than it had written");
}

#[test]
fn two_moves_at_once_are_refused_and_a_cancel_leaves_nothing_behind() {
    let world = World::new();
    let image = world.image("disk.img", 32 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 20);
    let to = world.path("new.img");
    world.json(&["move", "x", "--to", &target(&to), "--bandwidth", "2MiB/s", "--detach"]);
    wait_until_copied(&world, 1 << 20);
    world.refused(&["move", "x", "--to", &target(&world.path("other.img"))], 7, "is being moved");
    world.refused(&["volume", "detach", "x"], 7, "is being moved");
    assert_eq!(world.json(&["pause", "x"])["state"], "paused");
    assert_eq!(world.json(&["resume", "x"])["volume"], "x");
    assert_eq!(world.json(&["cancel", "x"])["state"], "cancelled");
    assert!(!to.exists() && !world.path("other.img").exists(), "a target was left behind");
    assert!(world.files("disk.img.moved-").is_empty());
    same(&image, &load.finish());
    // What was cancelled does not stand in the way of the next try.
    assert_eq!(world.json(&["move", "x", "--to", &target(&to)])["state"], "done");
}

#[test]
fn a_waiting_move_ends_with_the_code_of_the_cancel() {
    let world = World::new();
    let image = world.image("disk.img", 32 << 20, 65536);
    world.attach("x", &image);
    let mut moving = world
        .command(&["move", "x", "--to", &target(&world.path("new.img")), "--bandwidth", "1MiB/s"])
        .arg("--json")
        .stderr(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("runs");
    wait_until_copied(&world, 1 << 20);
    world.json(&["cancel", "x"]);
    assert_eq!(wait(&mut moving).code(), Some(41));
    let report: Value = serde_json::from_reader(moving.stdout.take().expect("piped")).expect("one document");
    assert_eq!(report["error"]["code"], "move-cancelled");
}

#[test]
fn the_bandwidth_holds_and_can_be_lifted() {
    let world = World::new();
    let image = world.image("disk.img", 24 << 20, 65536);
    world.attach("x", &image);
    let start = Instant::now();
    world.json(&["move", "x", "--to", &target(&world.path("new.img")), "--bandwidth", "4MiB/s", "--detach"]);
    std::thread::sleep(Duration::from_secs(2));
    let copied = world.json(&["jobs"])[0]["progress"]["bytes_copied"].as_u64().expect("a count");
    let allowed = (start.elapsed().as_secs_f64() * f64::from(4 << 20)) as u64 + (4 << 20);
    assert!(copied <= allowed, "{copied} bytes in {:?}", start.elapsed());
    let job = world.json(&["set", "x", "--bandwidth", "0"]);
    let over = world.wait_for_job(job["id"].as_u64().expect("a number"));
    assert_eq!(over["state"], "done", "{over}");
}

#[test]
fn targets_that_cannot_be_used_are_refused_with_codes_of_their_own() {
    let world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    world.attach("x", &image);
    let existing = world.image("existing.img", 1 << 20, 65536);
    let refused = |to: &Path, code: i32, part: &str| world.refused(&["move", "x", "--to", &target(to)], code, part);
    refused(&existing, 10, "--overwrite");
    refused(&image, 12, "is the source itself");
    std::os::unix::fs::symlink(&image, world.path("link.img")).expect("linked");
    refused(&world.path("link.img"), 12, "is the source itself");
    refused(Path::new("/nonexistent/new.img"), 16, "/nonexistent");
    refused(Path::new("/proc/new.img"), 16, "/proc/new.img");
    world.refused(&["move", "x", "--to", "/nowhere"], 2, "names neither a backend nor a volume of a host");
    world.refused(&["move", "x", "--to", "nowhere"], 2, "this daemon speaks to no other hosts");
    world.refused(&["move", "nobody", "--to", &target(&world.path("new.img"))], 5, "no volume");
    assert_eq!(std::fs::metadata(&existing).expect("there").len(), 1 << 20, "a refused target was changed");
    assert!(world.files("new.img").is_empty());
    let plan = world.json(&["plan", "x", "--to", &target(&existing)]);
    assert_eq!(plan["refusal"]["code"], "target-exists");
    let plan = world.json(&["plan", "x", "--to", &target(&world.path("new.img"))]);
    assert!(plan["refusal"].is_null() && plan["bytes_to_copy"] == 4 << 20, "{plan}");
    assert!(world.files("new.img").is_empty(), "a plan left its target behind");
    let report = world.json(&["move", "x", "--to", &target(&existing), "--overwrite", "--delete-source"]);
    assert_eq!((&report["state"], &report["source_kept"]), (&"done".into(), &Value::Null));
    assert!(!image.exists() && world.files("disk.img.moved-").is_empty(), "the source was to be deleted");
}

#[test]
fn a_target_that_runs_full_ends_the_move_and_the_guest_goes_on() {
    let world = World::new();
    let full = Mount::tmpfs(&world.path("full"), "10m");
    let image = world.image("disk.img", 8 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 30);
    // There is room when the move begins, and none before it ends.
    let arguments = ["move", "x", "--to", &target(&full.path.join("new.img")), "--bandwidth", "4MiB/s", "--detach"];
    let id = world.json(&arguments)["id"].as_u64().expect("a number");
    std::fs::write(full.path.join("other"), vec![1; 6 << 20]).expect("room for another file");
    let over = world.wait_for_job(id);
    assert_eq!((&over["state"], &over["error"]["code"]), (&"failed".into(), &"no-space".into()), "{over}");
    assert!(!full.path.join("new.img").exists(), "a target was left behind");
    same(&image, &load.finish());
}

#[test]
fn a_target_that_is_deleted_or_replaced_meanwhile_does_not_get_the_volume() {
    let world = World::new();
    let image = world.image("disk.img", 8 << 20, 65536);
    world.attach("x", &image);
    let to = world.path("new.img");
    for replacement in [None, Some("somebody's")] {
        let arguments = ["move", "x", "--to", &target(&to), "--bandwidth", "8MiB/s", "--detach"];
        let id = world.json(&arguments)["id"].as_u64().expect("a number");
        std::fs::remove_file(&to).expect("deleted");
        if let Some(bytes) = replacement {
            std::fs::write(&to, bytes).expect("replaced");
        }
        let over = world.wait_for_job(id);
        assert_eq!(over["state"], "failed", "{over}");
        let words = over["error"]["message"].as_str().expect("text");
        assert!(words.contains("deleted or replaced"), "{words}");
        assert_eq!(std::fs::read_to_string(&to).ok().as_deref(), replacement, "another's file was touched");
        assert!(image.exists(), "the source was put out of the way");
    }
    assert!(world.json(&["volume", "show", "x"])["backend"].as_str().expect("text").contains("disk.img"));
}

#[test]
fn read_only_and_small_targets_are_refused() {
    let world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    world.attach("x", &image);
    let mount = Mount::tmpfs(&world.path("ro"), "1m");
    world.refused(&["move", "x", "--to", &target(&mount.path.join("new.img"))], 14, "free");
    tool("mount", &["-o", "remount,ro", &mount.path.display().to_string()]);
    world.refused(&["move", "x", "--to", &target(&mount.path.join("new.img"))], 13, "read-only");

    let small = world.image("small.img", 1 << 20, 65536);
    let device = tool("losetup", &["--find", "--show", &small.display().to_string()]);
    let device = device.trim();
    let output = world.run(&["move", "x", "--to", &format!("file:{device}"), "--overwrite"]);
    tool("losetup", &["--detach", device]);
    crate::support::check_refusal("a small block device", &output, 11, "at least as large");
}

#[test]
fn the_daemon_is_killed_in_the_middle_of_moves_and_every_promise_is_kept() {
    crate::support::moves_under_kills((40, 17), 3, &["--verify", "full"]);
}

#[test]
fn a_killed_move_resumes_with_what_is_missing_only() {
    let mut world = World::new();
    let image = world.image("disk.img", 32 << 20, 65536);
    world.attach("x", &image);
    let to = world.path("new.img");
    let id = world.json(&["move", "x", "--to", &target(&to), "--bandwidth", "4MiB/s", "--detach"])["id"].as_u64();
    // The target is flushed, and what it has is written down, every five seconds.
    wait_until_copied(&world, 26 << 20);
    world.kill();
    world.start();
    world.json(&["set", "x", "--bandwidth", "0"]);
    let over = world.wait_for_job(id.expect("a number"));
    assert_eq!((&over["state"], &over["report"]["sessions"]), (&"done".into(), &2.into()), "{over}");
    let resumed = over["report"]["bytes_resumed"].as_u64().expect("a count");
    assert!(resumed >= 4 << 20, "only {resumed} bytes were taken over: {over}");
    same(&to, &std::fs::read(world.files("disk.img.moved-").pop().expect("kept")).expect("read"));
}

#[test]
fn a_paused_move_stays_paused_over_a_restart() {
    let mut world = World::new();
    let image = world.image("disk.img", 32 << 20, 65536);
    world.attach("x", &image);
    let to = target(&world.path("new.img"));
    let id = world.json(&["move", "x", "--to", &to, "--bandwidth", "8MiB/s", "--detach"])["id"].as_u64();
    wait_until_copied(&world, 1 << 20);
    world.json(&["pause", "x"]);
    world.kill();
    world.start();
    let job = world.json(&["jobs"])[0].clone();
    assert_eq!(job["state"], "paused", "{job}");
    world.json(&["set", "x", "--bandwidth", "0"]);
    world.json(&["resume", "x"]);
    assert_eq!(world.wait_for_job(id.expect("a number"))["state"], "done");
}

#[test]
fn moves_wait_in_a_queue() {
    let mut world = World::without_daemon();
    std::fs::write(world.path("config.toml"), "running-jobs-max = 1\n").expect("written");
    world.daemon.arguments = vec!["--config".to_owned(), world.text("config.toml")];
    world.start();
    let mut ids = Vec::new();
    for name in ["a", "b"] {
        let image = world.image(&format!("{name}.img"), 16 << 20, 65536);
        world.attach(name, &image);
        let to = target(&world.path(&format!("{name}-new.img")));
        let job = world.json(&["move", name, "--to", &to, "--bandwidth", "8MiB/s", "--detach"]);
        ids.push(job["id"].as_u64().expect("a number"));
    }
    wait_until_copied_by(&world, ids[0]);
    let jobs = world.json(&["jobs"]);
    let second = jobs.as_array().expect("a list").iter().find(|job| job["id"] == ids[1]).expect("there");
    assert_eq!(second["state"], "queued", "{jobs}");
    // A queued move survives a crash, too.
    world.kill();
    world.start();
    for id in ids {
        assert_eq!(world.wait_for_job(id)["state"], "done");
    }
}

fn wait_until_copied_by(world: &World, id: u64) {
    let start = Instant::now();
    while start.elapsed() < HANG {
        let jobs = world.json(&["jobs"]);
        let job = jobs.as_array().and_then(|jobs| jobs.iter().find(|job| job["id"] == id));
        if job.is_some_and(|job| job["progress"]["bytes_copied"].as_u64() > Some(0)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("job {id} does not begin:\n{}", world.log());
}

#[test]
fn rescue_serves_the_source_without_the_daemon_and_the_move_copies_anew() {
    let mut world = World::new();
    let image = world.image("disk.img", 24 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 50);
    let to = world.path("new.img");
    let id = world.json(&["move", "x", "--to", &target(&to), "--bandwidth", "8MiB/s", "--detach"])["id"].as_u64();
    wait_until_copied(&world, 8 << 20);
    let state = world.text("state");
    world.refused(&["rescue", "x", "--state-dir", &state], 31, "a transhumed uses");
    world.kill();
    world.refused(&["rescue", "nobody", "--state-dir", &state], 5, "no volume nobody");
    let mut rescue = world
        .command(&["rescue", "x", "--state-dir", &state])
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("runs");
    let before = load.requests();
    let start = Instant::now();
    while load.requests() < before + 200 {
        assert!(start.elapsed() < HANG, "the guest does not go on");
        std::thread::sleep(Duration::from_millis(5));
    }
    signal(&rescue, rustix::process::Signal::TERM);
    assert!(wait(&mut rescue).success());
    world.start();
    world.json(&["set", "x", "--bandwidth", "0"]);
    let over = world.wait_for_job(id.expect("a number"));
    assert_eq!((&over["state"], &over["report"]["bytes_resumed"]), (&"done".into(), &0.into()), "{over}");
    assert!(name_of(&to) == "new.img");
    same(&to, &load.finish());
}

#[test]
fn what_was_foretold_of_a_move_stays_with_its_job_and_is_held_against_what_it_took() {
    let world = World::new();
    let image = world.image("disk.img", 16 << 20, 1 << 20);
    world.attach("x", &image);
    let first = target(&world.path("first.img"));
    let report = world.json(&["move", "x", "--to", &first]);
    let made = &report["prediction"];
    assert_eq!((&made["planned"], &made["passes"], &made["converges"]), (&false.into(), &1.into(), &true.into()));
    assert!(made["seconds_error_percent"].is_number() && made["seconds_within"].is_boolean(), "{report}");

    let second = target(&world.path("second.img"));
    let plan = world.json(&["plan", "x", "--to", &second, "--verify", "full"]);
    let report = world.json(&["move", "x", "--to", &second, "--verify", "full", "--delete-source"]);
    assert_eq!(report["prediction"]["planned"], true, "{report}");
    let [said, kept] = [&plan, &report["prediction"]].map(|what| what["seconds"].as_f64().expect("a number"));
    assert!((said / kept - 1.0).abs() < 1e-9, "{plan} and {report}");
    let job = &world.json(&["jobs", "--all"])[0];
    assert_eq!(job["prediction"]["made_unix_ms"], report["prediction"]["made_unix_ms"], "{job}");

    // A plan of another move, and one that was steered on its way.
    let third = target(&world.path("third.img"));
    world.json(&["plan", "x", "--to", &third]);
    let arguments = ["move", "x", "--to", &third, "--bandwidth", "16MiB/s", "--detach"];
    let id = world.json(&arguments)["id"].as_u64().expect("a number");
    world.json(&["set", "x", "--bandwidth", "0"]);
    let over = world.wait_for_job(id);
    assert_eq!((&over["state"], &over["prediction"]["planned"]), (&"done".into(), &false.into()), "{over}");
    assert_eq!(over["prediction"]["seconds_error_percent"], Value::Null, "{over}");
}

#[test]
fn a_deadline_is_given_changed_and_taken_away_under_way_and_outlives_the_daemon() {
    let mut world = World::new();
    let image = world.image("disk.img", 32 << 20, 65536);
    world.attach("x", &image);
    let to = target(&world.path("new.img"));
    let id =
        world.json(&["move", "x", "--to", &to, "--bandwidth", "1MiB/s", "--detach"])["id"].as_u64().expect("a number");
    let set = |world: &World, deadline: &str| {
        world.json(&["set", "x", "--deadline", deadline])["request"]["deadline_ms"].clone()
    };
    assert_eq!(set(&world, "1s"), 1000);
    let is_late = |job: &serde_json::Value| {
        let rates = &job["progress"]["rates"];
        rates["deadline_ms"] == 1000 && rates["notes"].to_string().contains("its deadline has passed")
    };
    world.wait_until_job("nobody looks after its deadline", is_late);
    world.kill();
    world.start();
    world.wait_until_job("the deadline is forgotten", is_late);
    assert_eq!(set(&world, "0"), serde_json::Value::Null);
    world.wait_until_job("it still has one", |job| {
        let rates = &job["progress"]["rates"];
        rates["needed"].is_null() && rates["at_risk"] == false && !rates["notes"].to_string().contains("deadline")
    });
    world.refused(&["set", "x", "--reserve", "1MB/s"], 2, "give --bandwidth or --deadline");
    assert_eq!(set(&world, "1h"), 3_600_000);
    world.json(&["set", "x", "--bandwidth", "0"]);
    let over = world.wait_for_job(id);
    let rates = &over["report"]["rates"];
    assert_eq!((&rates["deadline_ms"], &rates["deadline_kept"]), (&3_600_000.into(), &true.into()), "{over}");
}

#[test]
fn watching_a_move_that_fails_fails_and_nobody_to_read_is_no_defect() {
    let world = World::new();
    let image = world.image("disk.img", 4 << 20, 65536);
    world.attach("x", &image);
    let to = world.path("new.img");
    let slow = ["move", "x", "--to", &target(&to), "--bandwidth", "1MiB/s", "--detach"];
    world.json(&slow);
    let mut watching =
        world.command(&["watch", "x"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("runs");
    world.wait_until_job("nothing is copied", |job| job["progress"]["bytes_copied"].as_u64() > Some(1 << 20));
    std::fs::remove_file(&to).expect("somebody removes the target");
    world.json(&["set", "x", "--bandwidth", "0"]);
    let code = wait(&mut watching).code();
    let over = world.json(&["jobs", "--all"])[0].clone();
    assert_eq!(over["state"], "failed", "{over}");
    assert_eq!(code.map(i64::from), over["error"]["exit_code"].as_i64(), "{over}");

    for arguments in [&["jobs", "--all"][..], &["status", "--json"], &["volume", "ls"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = world.command(arguments).stdout(writer).stderr(Stdio::piped()).output().expect("runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*said), (Some(141), ""), "{arguments:?}");
    }
    // What the engine says names the volume and the move.
    let log = world.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("the migration goes on")).collect();
    assert!(!lines.is_empty() && lines.iter().all(|line| line.contains("move{volume=\"x\" job=1}")), "{lines:?}");
}
