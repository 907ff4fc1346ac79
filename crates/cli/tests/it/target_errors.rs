//! Disks that fail below the daemon: the kernel's answers to its requests are tampered with, so that everything above is
//! as it always is.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::helpers::helpers_of;
use crate::support::load::Load;
use crate::support::{HANG, World, signal, target};

/// Makes system calls of the daemon fail while it lives.
struct Tampering(Child);

impl Tampering {
    /// Calls on `path`, as `injections` say (`CALLS:error=ERROR[:when=NUMBERS]`). Numbers count in each thread.
    fn with(world: &World, path: &Path, injections: &[&str]) -> Self {
        let mut command = Command::new("strace");
        // What may wait for a disk is called by the helper of its device.
        let processes = std::iter::once(world.pid()).chain(helpers_of(world.pid()));
        command.args(processes.flat_map(|process| ["-p".to_owned(), process.to_string()]));
        command.args(["-f", "-P"]).arg(path);
        let calls: Vec<&str> = injections.iter().filter_map(|injection| injection.split(':').next()).collect();
        command.arg(format!("-etrace={}", calls.join(",")));
        command.args(injections.iter().map(|injection| format!("-einject={injection}")));
        let mut strace =
            command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().expect("strace is there: run `make setup`");
        // It says so of every thread, the first one first, before any of them goes on.
        let mut said = BufReader::new(strace.stderr.take().expect("it was asked for"));
        let mut line = String::new();
        said.read_line(&mut line).expect("it talks");
        assert!(line.contains("attached"), "strace cannot attach: {line}");
        std::thread::spawn(move || said.lines().map_while(Result::ok).count());
        Self(strace)
    }
}

impl Drop for Tampering {
    fn drop(&mut self) {
        // Told to end it lets the daemon go; killed it would do so, too, in the middle of a call.
        signal(&self.0, rustix::process::Signal::INT);
        let _ = self.0.wait();
    }
}

/// A daemon that gets no io_uring: what rings do nobody can tamper with.
fn world_without_rings() -> World {
    let mut world = World::without_daemon();
    let strace = "strace -D -I1 -f -qq -o /dev/null -etrace=io_uring_setup -einject=io_uring_setup:error=EPERM";
    world.daemon.launcher = strace.split(' ').map(str::to_owned).collect();
    world.start();
    world
}

/// Lets go of the daemon that was started without io_uring; what it has opened stays without.
fn let_go(world: &World) {
    let tracer = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", world.pid())).expect("the daemon lives");
        let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:")).expect("the kernel says it");
        rustix::process::Pid::from_raw(tracer.trim().parse().expect("a number"))
    };
    let start = Instant::now();
    while let Some(strace) = tracer() {
        let _ = rustix::process::kill_process(strace, rustix::process::Signal::TERM);
        assert!(start.elapsed() < HANG, "strace does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A directory in memory: what is there is written by plain system calls.
fn in_memory() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("th").tempdir_in("/dev/shm").expect("there is memory")
}

const WRITES: &str = "pwrite64,pwritev2";

#[test]
fn a_few_writes_that_fail_cost_their_copies_and_not_the_mirror() {
    let world = World::new();
    let image = world.image("disk.img", 24 << 20, 1 << 18);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 30);
    let memory = in_memory();
    let to = memory.path().join("new.img");
    world.json(&["move", "x", "--to", &target(&to), "--bandwidth", "16MiB/s", "--detach"]);
    world.wait_until_job("nothing is copied", |job| job["progress"]["bytes_copied"].as_u64() > Some(0));
    let tampering = Tampering::with(&world, &to, &[&format!("{WRITES}:error=EIO:when=2")]);
    let job = world.wait_until_job("the move does not end", |job| job["report"].is_object());
    drop(tampering);
    assert_eq!(job["state"], "done", "{job}");
    let report = &job["report"];
    assert_eq!((&report["target_losses"], &report["equal"]), (&0.into(), &true.into()), "{report}");
    let (retries, missed) = (report["retries"].as_u64(), report["missed_writes"].as_u64());
    assert!(retries.max(missed) > Some(0), "no write failed: nothing is tested: {report}");
    assert!(report["verification"]["suspects"].as_u64() > Some(0), "{report}");
    let expected = load.finish();
    assert!(std::fs::read(&to).expect("read") == expected, "the target is not what the guest wrote");
}

#[test]
fn a_target_that_fails_for_good_is_resumed_with_what_is_left() {
    loses_its_target_and_resumes(31, &[]);
}

#[test]
fn a_target_that_fails_for_good_is_resumed_with_what_is_left_where_chunks_are_chosen() {
    loses_its_target_and_resumes(32, &["--strategy", "auto"]);
}

fn loses_its_target_and_resumes(number: u64, flags: &[&str]) {
    let world = World::new();
    let bytes = 24 << 20;
    let image = world.image("disk.img", bytes, 1 << 18);
    let uri = world.attach("x", &image);
    let memory = in_memory();
    let to = memory.path().join("new.img");
    let destination = target(&to);
    let arguments = ["move", "x", "--to", &destination, "--bandwidth", "2MiB/s", "--detach"];
    world.json(&[arguments.as_slice(), flags].concat());
    // Some of it has been flushed by then: the target is flushed every five seconds.
    world.wait_until_job("it copies too little", |job| job["progress"]["bytes_copied"].as_u64() > Some(14 << 20));
    let tampering = Tampering::with(&world, &to, &[&format!("{WRITES}:error=EIO")]);
    let lost =
        world.wait_until_job("the target is not lost", |job| job["progress"]["target_losses"].as_u64() > Some(0));
    assert!(lost["progress"]["last_error"].as_str().is_some_and(|error| error.contains("error 5")), "{lost}");
    let load = Load::start(&uri, &image, number);
    load.answers(100);
    drop(tampering);
    let expected = load.finish();
    world.json(&["resume", "x"]);
    world.json(&["set", "x", "--bandwidth", "0"]);
    let job = world.wait_until_job("the move does not end", |job| job["report"].is_object());
    assert_eq!(job["state"], "done", "{job}");
    let report = &job["report"];
    let again = report["bytes_copied"].as_u64().expect("a number") + report["bytes_zero"].as_u64().expect("a number");
    assert!(again < bytes + (bytes / 3), "much was copied twice: {report}");
    assert!(std::fs::read(&to).expect("read") == expected, "the target is not what the guest wrote");
}

#[test]
fn a_target_whose_sync_failed_is_written_again_and_synced_again() {
    let world = world_without_rings();
    let image = world.image("disk.img", 8 << 20, 1 << 18);
    world.attach("x", &image);
    let to = world.path("new.img");
    let before = std::fs::read(&image).expect("read");
    world.json(&["move", "x", "--to", &target(&to), "--bandwidth", "2MiB/s", "--detach"]);
    world.wait_until_job("nothing is copied", |job| job["progress"]["bytes_copied"].as_u64() > Some(0));
    let_go(&world);
    let tampering = Tampering::with(&world, &to, &["fsync,fdatasync:error=EIO:when=1"]);
    world.wait_until_job("no sync fails", |job| job["progress"]["target_losses"].as_u64() > Some(0));
    drop(tampering);
    let job = world.wait_until_job("the move does not end", |job| job["report"].is_object());
    assert_eq!(job["state"], "done", "{job}");
    let copied = job["report"]["bytes_copied"].as_u64().expect("a number");
    assert!(
        copied > job["report"]["bytes_total"].as_u64().expect("a number"),
        "what was lost was not copied again: {job}"
    );
    assert!(std::fs::read(&to).expect("read") == before, "the target is not the source");
}

#[test]
fn a_commit_whose_store_failed_is_stored_again() {
    let world = world_without_rings();
    let image = world.image("disk.img", 8 << 20, 1 << 18);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, 33);
    let to = world.path("new.img");
    world.json(&["move", "x", "--to", &target(&to), "--bandwidth", "4MiB/s", "--detach"]);
    world.wait_until_job("nothing is copied", |job| job["progress"]["bytes_copied"].as_u64() > Some(0));
    let journal = world.path("state").join("volumes/x/journal");
    assert!(journal.exists(), "the journal is elsewhere");
    let_go(&world);
    let tampering = Tampering::with(&world, &journal, &["fsync,fdatasync:error=EIO:when=1"]);
    world.wait_until_job("no store fails", |_| world.log().contains("to=in-doubt"));
    drop(tampering);
    let job = world.wait_until_job("the move does not end", |job| job["report"].is_object());
    assert_eq!(job["state"], "done", "{job}");
    let expected = load.finish();
    assert!(std::fs::read(&to).expect("read") == expected, "the target is not what the guest wrote");
}
