//! Moves with strategies other than the mirror, through the real daemon, under a guest that knows what it was promised.

use std::path::Path;
use std::time::Duration;

use crate::support::load::Load;
use crate::support::{World, same, target};

#[test]
fn a_volume_moves_in_passes_under_load_and_every_promise_is_kept() {
    for (number, flags) in [
        ["--strategy", "dbt"].as_slice(),
        &["--strategy", "incremental-dbt", "--downtime-limit", "500ms", "--on-no-converge", "force"],
        &["--strategy", "dbt", "--hot-blocks", "--deadline", "10min"],
    ]
    .into_iter()
    .enumerate()
    {
        let world = World::new();
        let image = world.image("disk.img", (48 << 20) + 4096, 1 << 20);
        let uri = world.attach("x", &image);
        let load = Load::start(&uri, &image, 50 + number as u64);
        let to = world.path("new.img");
        let destination = target(&to);
        let mut arguments = vec!["move", "x", "--to", &destination, "--verify", "full"];
        arguments.extend(flags);
        let report = world.json(&arguments);
        assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
        assert_eq!(report["strategy"], flags[1], "{report}");
        let passes = report["iterations"].as_array().expect("passes");
        assert!(passes.len() >= 2, "{report}");
        for pass in passes {
            assert!(pass["decision"].as_str().is_some_and(|text| !text.is_empty()), "{pass}");
        }
        let mirrored = report["bytes_mirrored"].as_u64().expect("a count");
        let last = passes.last().expect("there are some");
        assert!(last["held"] == true || mirrored > 0, "neither held nor mirrored: {report}");
        load.goes_on();
        same(&to, &load.finish());
    }
}

#[test]
fn a_volume_is_mirrored_asynchronously_under_load_and_every_promise_is_kept() {
    for (number, flags) in [["--verify", "full"].as_slice(), &["--buffer", "1MiB"]].into_iter().enumerate() {
        let world = World::new();
        let image = world.image("disk.img", (48 << 20) + 4096, 1 << 20);
        let uri = world.attach("x", &image);
        let load = Load::start(&uri, &image, 80 + number as u64);
        let to = world.path("new.img");
        let destination = target(&to);
        let mut arguments = vec!["move", "x", "--to", &destination, "--strategy", "mirror-async"];
        arguments.extend(["--bandwidth", "64MiB/s"].iter().chain(flags));
        let report = world.json(&arguments);
        assert_eq!((&report["state"], &report["strategy"]), (&"done".into(), &"mirror-async".into()), "{report}");
        let buffered = report["bytes_buffered_max"].as_u64().expect("a count");
        assert!(buffered > 0 && buffered <= 64 << 20, "{report}");
        assert!(number == 0 || buffered <= 1 << 20, "{report}");
        assert!(report["throttled_us"].is_u64() && report["switchover"]["drain_us"].is_u64(), "{report}");
        load.goes_on();
        same(&to, &load.finish());
    }
}

#[test]
fn a_volume_is_mirrored_as_the_paper_does_it_under_load_and_kills_and_every_promise_is_kept() {
    let world = World::new();
    let image = world.image("disk.img", (48 << 20) + 4096, 1 << 20);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 85);
    let to = world.path("new.img");
    let destination = target(&to);
    let flags = ["--strategy", "mirror-paper", "--bandwidth", "64MiB/s", "--verify", "full"];
    let report = world.json(&[["move", "x", "--to", &destination].as_slice(), &flags].concat());
    assert_eq!((&report["state"], &report["strategy"]), (&"done".into(), &"mirror-paper".into()), "{report}");
    assert_eq!((&report["equal"], &report["redos"]), (&true.into(), &0.into()), "{report}");
    load.goes_on();
    same(&to, &load.finish());
    crate::support::moves_under_kills((86, 29), 2, &["--strategy", "mirror-paper"]);
}

#[test]
fn the_daemon_is_killed_with_writes_in_the_buffer_and_every_promise_is_kept() {
    let mut world = World::new();
    let image = world.image("disk.img", 48 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 90);
    let to = world.path("new.img");
    let destination = target(&to);
    let arguments =
        ["move", "x", "--to", &destination, "--strategy", "mirror-async", "--bandwidth", "40MiB/s", "--detach"];
    let id = world.json(&arguments)["id"].as_u64().expect("a number");
    let mut delay = 31_u64;
    world.kill_four_times(&mut delay);
    let over = world.wait_for_job(id);
    assert_eq!(over["state"], "done", "{over}\n{}", world.log());
    load.goes_on();
    same(&to, &load.finish());
}

#[test]
fn a_buffer_is_planned_for_and_refused_where_there_is_none() {
    let world = World::new();
    let image = world.image("disk.img", 16 << 20, 1 << 20);
    world.attach("x", &image);
    let to = target(&world.path("new.img"));
    let plan = world.json(&["plan", "x", "--to", &to, "--strategy", "mirror-async", "--buffer", "8MiB"]);
    let notes = plan["notes"].to_string();
    assert!(notes.contains("8 MiB behind") && plan["converges"] == true, "{plan}");
    let output = world.run(&["move", "x", "--to", &to, "--buffer", "8MiB"]);
    crate::support::check_refusal("a buffer of a mirror", &output, 2, "mirror-async");
    let output = world.run(&["move", "x", "--to", &to, "--strategy", "mirror-async", "--buffer", "1KiB"]);
    crate::support::check_refusal("a buffer too small", &output, 2, "1 MiB");
}

#[test]
fn a_volume_whose_chunks_are_mirrored_or_tracked_moves_under_load_and_every_promise_is_kept() {
    for (number, flags) in [["--verify", "full"].as_slice(), &["--bandwidth", "64MiB/s"]].into_iter().enumerate() {
        let world = World::new();
        let image = world.image("disk.img", (48 << 20) + 4096, 1 << 20);
        let uri = world.attach("x", &image);
        let load = Load::start(&uri, &image, 100 + number as u64);
        let to = world.path("new.img");
        let destination = target(&to);
        let report = world.json(&[&["move", "x", "--to", &destination, "--strategy", "auto"], flags].concat());
        assert_eq!((&report["state"], &report["strategy"]), (&"done".into(), &"auto".into()), "{report}");
        assert_eq!(report["equal"], true, "{report}");
        let passes = report["iterations"].as_array().expect("passes");
        let decided = passes[0]["decision"].as_str().expect("words");
        assert!(decided.contains("mirror"), "{report}");
        assert!(passes.iter().all(|pass| pass["held"] == false), "the guest was held for a copy: {report}");
        load.goes_on();
        same(&to, &load.finish());
    }
}

#[test]
fn the_daemon_is_killed_while_chunks_are_mirrored_or_tracked_and_every_promise_is_kept() {
    crate::support::moves_under_kills((61, 19), 2, &["--strategy", "auto"]);
}

#[test]
fn a_move_that_chooses_is_cancelled_and_planned_and_refuses_what_it_does_by_itself() {
    let world = World::new();
    let image = world.image("disk.img", 32 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 71);
    let to = target(&world.path("new.img"));
    let plan = world.json(&["plan", "x", "--to", &to, "--strategy", "auto"]);
    assert_eq!((&plan["converges"], &plan["refusal"]), (&true.into(), &serde_json::Value::Null), "{plan}");
    let arguments = ["move", "x", "--to", &to, "--strategy", "auto", "--bandwidth", "8MiB/s", "--detach"];
    let id = world.json(&arguments)["id"].as_u64().expect("a number");
    load.answers(200);
    world.json(&["cancel", "x"]);
    let over = world.wait_for_job(id);
    assert_eq!(over["state"], "cancelled", "{over}");
    assert_eq!(world.json(&["volume", "show", "x"])["backend"], target(&image));
    load.goes_on();
    same(&image, &load.finish());
    let output = world.run(&["move", "x", "--to", &to, "--strategy", "auto", "--hot-blocks"]);
    crate::support::check_refusal("hot blocks of auto", &output, 2, "by itself");
}

#[test]
fn a_volume_moves_in_another_order_and_schedules_that_cannot_work_are_refused() {
    let world = World::new();
    let image = world.image("disk.img", 16 << 20, 1 << 20);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 90);
    let to = world.path("new.img");
    let to_target = target(&to);
    for (flags, said) in [
        (["--schedule", "follow", "--strategy", "mirror-paper"], "copies in order"),
        (["--schedule", "cold-first", "--strategy", "snapshot"], "overlay"),
        (["--schedule", "follow", "--follow-ratio", "5"], "1 to 4"),
        (["--schedule", "cold-first", "--follow-ratio", "2"], "schedule follow"),
    ] {
        let output = world.run(&[["move", "x", "--to", &to_target].as_slice(), &flags].concat());
        crate::support::check_refusal(&flags.join(" "), &output, 2, said);
    }
    let report = world.json(&["move", "x", "--to", &to_target, "--schedule", "cold-first", "--verify", "full"]);
    assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
    assert_eq!(report["schedule"]["used"], "cold-first", "{report}");
    // Where the kernel says that the disk has no head the volume is copied in order, and else its head is followed.
    let memory = tempfile::Builder::new().prefix("th").tempdir_in("/dev/shm").expect("a directory in memory");
    let (in_memory, back) = (memory.path().join("memory.img"), world.path("back.img"));
    let used = if is_without_head(&to) { "sequential" } else { "follow" };
    for (source, to, used) in [(&to, &in_memory, used), (&in_memory, &back, "follow")] {
        let report = world.json(&["move", "x", "--to", &target(to), "--schedule", "follow", "--verify", "full"]);
        assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
        let schedule = &report["schedule"];
        assert_eq!((&schedule["asked"], &schedule["used"]), (&"follow".into(), &used.into()), "{source:?}: {report}");
        let has_chosen = schedule["runs_chosen"].as_u64() > Some(0);
        assert_eq!(has_chosen, used == "follow", "{source:?}: {report}");
    }
    same(&back, &load.finish());
}

/// Whether the kernel says of a file's disk that it has no head.
fn is_without_head(path: &Path) -> bool {
    let number = std::os::unix::fs::MetadataExt::dev(&std::fs::metadata(path).expect("it is there"));
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let device = std::fs::canonicalize(format!("/sys/dev/block/{major}:{minor}"));
    let Ok(device) = device else { return false };
    let disk = if device.join("partition").exists() { device.join("..") } else { device };
    let rotational = std::fs::read_to_string(disk.join("queue/rotational")).unwrap_or_default();
    disk.join("device").exists() && rotational.trim() == "0"
}

#[test]
fn the_daemon_is_killed_between_passes_and_every_promise_is_kept() {
    crate::support::moves_under_kills((60, 23), 2, &["--strategy", "dbt"]);
}

#[test]
fn a_move_that_does_not_converge_ends_on_the_source_and_says_why() {
    let world = World::new();
    let image = world.image("disk.img", 32 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 70);
    let to = target(&world.path("new.img"));
    let flags = ["--strategy", "dbt", "--downtime-limit", "1ms", "--on-no-converge", "abort", "--bandwidth", "16MiB/s"];
    let output = world.run(&[["move", "x", "--to", &to].as_slice(), &flags].concat());
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(44), "{words}");
    assert!(words.contains("does not converge"), "{words}");
    assert_eq!(world.json(&["volume", "show", "x"])["backend"], target(&image));
    same(&image, &load.finish());
}

#[test]
fn a_plan_tells_passes_and_flags_of_another_strategy_are_refused() {
    let world = World::new();
    let image = world.image("disk.img", 16 << 20, 1 << 20);
    world.attach("x", &image);
    let to = target(&world.path("new.img"));
    let plan = world.json(&["plan", "x", "--to", &to, "--strategy", "dbt"]);
    assert_eq!((&plan["passes"], &plan["converges"]), (&1.into(), &true.into()), "{plan}");
    let output = world.run(&["move", "x", "--to", &to, "--hot-blocks"]);
    crate::support::check_refusal("hot blocks of a mirror", &output, 2, "mirror");
    let output = world.run(&["move", "x", "--to", &to, "--strategy", "dbt", "--downtime-limit", "soon"]);
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_time_that_a_move_in_passes_is_given_goes_on_while_no_daemon_runs() {
    let mut world = World::new();
    let image = world.image("disk.img", 32 << 20, 65536);
    world.attach("x", &image);
    let to = target(&world.path("new.img"));
    let how =
        ["--strategy", "dbt", "--deadline", "6s", "--on-no-converge", "abort", "--bandwidth", "1MiB/s", "--detach"];
    world.json(&[["move", "x", "--to", &to].as_slice(), &how].concat());
    world.wait_until_job("it copies", |job| job["progress"]["bytes_copied"].as_u64() > Some(0));
    world.kill();
    std::thread::sleep(Duration::from_secs(6));
    world.start();
    let over = world.wait_until_job("it is over", |job| job["state"] == "failed");
    assert!(
        over["error"]["message"].as_str().is_some_and(|said| said.contains("the deadline of 6s has passed")),
        "{over}"
    );
    assert!(over["report"]["seconds"].as_f64().is_some_and(|seconds| seconds < 3.0), "its time began anew: {over}");
}
