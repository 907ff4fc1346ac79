//! Starts of the daemon while something else is not there: the network, a file system, a journal. The other volumes are served.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::cached::cached;
use crate::support::{HANG, World, same, signal, target, tool, wait};
use rustix::process::Signal;

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < HANG, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_network_between_hosts_that_cannot_be_had_takes_no_local_volume_down() {
    let mut world = World::without_daemon();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("bound").port();
    let config = format!("[hosts]\nname = \"a\"\nlisten = [\"127.0.0.1:{port}\"]\n");
    std::fs::write(world.path("config.toml"), config).expect("written");
    world.daemon.arguments = vec!["--config".to_owned(), world.text("config.toml")];
    world.start();
    let image = world.image("disk.img", 1 << 20, 65536);
    let uri = world.attach("x", &image);
    let host = world.json(&["host"]);
    assert_eq!(host["listen"].as_array().map(Vec::len), Some(0), "{host}");
    assert!(host["problem"].to_string().contains("somebody listens"), "{host}");
    drop(taken);
    wait_until("it never listens", || world.json(&["host"])["listen"][0] == format!("127.0.0.1:{port}"));
    assert!(world.json(&["host"])["problem"].is_null());

    world.kill();
    let identity = world.path("state/hosts/identity.pem");
    std::fs::set_permissions(&identity, std::fs::Permissions::from_mode(0o644)).expect("chmod");
    world.start();
    assert_eq!(world.json(&["volume", "show", "x"])["state"], "serving");
    assert_eq!(tool("nbdinfo", &["--size", &uri]).trim(), (1 << 20).to_string());
    let said = world.run(&["host"]);
    let words = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(!said.status.success() && words.contains("others may read this host's key"), "{words}");
}

/// A file whose server may be stopped: whoever opens it then waits.
struct Fused {
    server: Child,
    file: PathBuf,
}

impl Fused {
    fn over(image: &Path, file: &Path) -> Self {
        std::fs::write(file, b"").expect("written");
        let node = format!("driver=file,node-name=node,filename={}", image.display());
        let export =
            format!("type=fuse,id=export,node-name=node,mountpoint={},writable=on,growable=on", file.display());
        let server = Command::new("qemu-storage-daemon")
            .args(["--blockdev", &node, "--export", &export])
            .stdin(Stdio::null())
            .spawn()
            .expect("qemu-storage-daemon is there: run `make setup`");
        wait_until("nothing is exported", || std::fs::metadata(file).is_ok_and(|found| found.len() > 0));
        Self { server, file: file.to_owned() }
    }
}

impl Drop for Fused {
    fn drop(&mut self) {
        signal(&self.server, Signal::CONT);
        let _ = Command::new("umount").arg("-l").arg(&self.file).status();
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

#[test]
fn a_file_system_that_hangs_delays_only_the_volume_that_lies_on_it() {
    let mut world = World::new();
    let (image, other) = (world.image("disk.img", 1 << 20, 65536), world.image("other.img", 1 << 20, 65536));
    let fused = Fused::over(&image, &world.path("fused.img"));
    world.attach("x", &fused.file);
    let uri = world.attach("y", &other);
    world.kill();
    signal(&fused.server, Signal::STOP);
    world.start();
    assert_eq!(world.json(&["volume", "show", "y"])["state"], "serving");
    assert_eq!(tool("nbdinfo", &["--size", &uri]).trim(), (1 << 20).to_string());
    let hangs = world.json(&["volume", "show", "x"]);
    assert_eq!(hangs["state"], "down", "{hangs}");
    assert!(hangs["problem"].to_string().contains("has not answered yet"), "{hangs}");
    signal(&fused.server, Signal::CONT);
    wait_until("it does not come back", || world.json(&["volume", "show", "x"])["state"] == "serving");
    assert!(world.json(&["volume", "show", "x"])["problem"].is_null());
    world.kill();
}

#[test]
fn what_is_asked_of_a_volume_that_hangs_at_a_start_is_refused_and_never_carried_out() {
    let mut world = World::new();
    let image = world.image("disk.img", 1 << 20, 65536);
    let fused = Fused::over(&image, &world.path("fused.img"));
    world.attach("x", &fused.file);
    world.kill();
    signal(&fused.server, Signal::STOP);
    world.start();
    world.refused(&["volume", "detach", "x"], 7, "does not answer");
    world.refused(&["volume", "layer", "add", "x", "throttle", "--iops", "9"], 7, "does not answer");
    signal(&fused.server, Signal::CONT);
    wait_until("it does not come back", || world.json(&["volume", "show", "x"])["state"] == "serving");
    std::thread::sleep(Duration::from_secs(1));
    let shown = world.json(&["volume", "show", "x"]);
    assert!(shown["state"] == "serving" && !shown.to_string().contains("throttle"), "{shown}");
    world.json(&["volume", "detach", "x"]);
    world.kill();
}

#[test]
fn flash_that_hangs_at_a_start_keeps_no_guest_from_a_volume_of_which_it_holds_nothing() {
    let mut world = World::new();
    let (image, flash) = (world.image("disk.img", 4 << 20, 65536), world.image("flash.img", 32 << 20, 1 << 20));
    let fused = Fused::over(&flash, &world.path("fused.img"));
    world.json(&["cache", "create", "ssd", "--store", &target(&fused.file)]);
    let uri = world.attach("x", &image);
    world.json(&["volume", "layer", "add", "x", "cache", "--cache", "ssd", "--size", "8MiB"]);
    let ask = |words: &str| {
        let said = tool("qemu-io", &["-f", "raw", "-c", words, "-c", "flush", &uri]);
        assert!(!said.contains("verification failed"), "{words}: {said}");
    };
    let parts = |world: &World| world.json(&["cache", "show", "ssd"])["partitions"].as_array().map_or(0, Vec::len);
    let hangs_at_a_start = |world: &mut World| {
        world.kill();
        signal(&fused.server, Signal::STOP);
        world.start();
        wait_until("it waits for its flash", || world.json(&["volume", "show", "x"])["state"] == "serving");
        let without = cached(world);
        assert_eq!(without["open"], false, "{without}");
        assert!(without["problem"].to_string().contains("has not answered"), "{without}");
    };
    ask("write -P 1 0 1M");
    ask("read -P 1 0 1M");
    hangs_at_a_start(&mut world);
    ask("read -P 1 0 1M");
    ask("write -P 2 0 512k");
    // The opening goes on where it was, and nobody believes what it has opened.
    signal(&fused.server, Signal::CONT);
    std::thread::sleep(Duration::from_secs(1));
    ask("read -P 2 0 512k");
    world.kill();
    world.start();
    assert_eq!(cached(&world)["open"], true, "{}", world.log());
    ask("read -P 2 0 512k");
    ask("read -P 1 512k 512k");
    // Its place is another layer's only once the opening has ended.
    hangs_at_a_start(&mut world);
    world.json(&["volume", "layer", "rm", "x", "cache"]);
    assert_eq!(parts(&world), 1, "the opening may still write there");
    signal(&fused.server, Signal::CONT);
    wait_until("its part is not given back", || parts(&world) == 0);
    ask("read -P 2 0 512k");
    world.kill();
}

/// Runs what must answer although something hangs.
fn answers(command: &mut Command, limit: Duration) {
    let start = Instant::now();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("it is there: run `make setup`");
    let status = wait(&mut child);
    let took = start.elapsed();
    assert!(status.success() && took < limit, "{command:?}: {status} after {took:?}");
}

#[test]
fn images_under_caches_that_hang_delay_neither_the_api_nor_clients() {
    const LIMIT: Duration = Duration::from_secs(3);
    let mut world = World::new();
    world.json(&["cache", "create", "ssd", "--store", &format!("file:{},size=64MiB", world.text("ssd"))]);
    // As many as the control plane has threads, and one more.
    let fused = ["a", "b", "c"].map(|name| {
        let image = world.image(&format!("{name}.img"), 1 << 20, 65536);
        let fused = Fused::over(&image, &world.path(&format!("{name}.fused")));
        world.attach(name, &fused.file);
        world.json(&["volume", "layer", "add", name, "cache", "--cache", "ssd", "--size", "8MiB"]);
        fused
    });
    let other = world.image("other.img", 1 << 20, 65536);
    let uri = world.attach("y", &other);
    fused.iter().for_each(|fused| signal(&fused.server, Signal::STOP));
    // Each image is looked at every second.
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(5) {
        answers(&mut world.command(&["volume", "ls"]), LIMIT);
        answers(Command::new("nbdinfo").args(["--size", &uri]), LIMIT);
        std::thread::sleep(Duration::from_millis(200));
    }
    fused.iter().for_each(|fused| signal(&fused.server, Signal::CONT));
    world.terminate();
    world.start();
    for name in ["a", "b", "c"] {
        wait_until("it does not come back", || world.json(&["volume", "show", name])["state"] == "serving");
    }
    world.kill();
}

#[test]
fn a_target_that_hangs_keeps_no_guest_from_its_source_and_gets_all_of_it_when_it_answers() {
    let mut world = World::new();
    let image = world.image("disk.img", 6 << 20, 65536);
    let (behind, expected) = (world.path("behind.img"), std::fs::read(&image).expect("read"));
    std::fs::write(&behind, vec![0xee; 6 << 20]).expect("written");
    let fused = Fused::over(&behind, &world.path("fused.img"));
    let uri = world.attach("x", &image);
    let slow = ["move", "x", "--to", &target(&fused.file), "--overwrite", "--bandwidth", "1MiB/s", "--detach"];
    let id = world.json(&slow)["id"].as_u64().expect("a number");
    world.wait_until_job("nothing is copied", |job| job["progress"]["bytes_copied"].as_u64() > Some(1 << 20));
    world.kill();
    signal(&fused.server, Signal::STOP);
    world.start();
    assert_eq!(world.json(&["volume", "show", "x"])["state"], "serving");
    assert_eq!(tool("nbdinfo", &["--size", &uri]).trim(), (6 << 20).to_string());
    signal(&fused.server, Signal::CONT);
    world.json(&["set", "x", "--bandwidth", "0"]);
    let over = world.wait_for_job(id);
    assert_eq!(over["state"], "done", "{over}\n{}", world.log());
    world.kill();
    same(&behind, &expected);
}

/// A move whose journal nobody could read goes on when that comes back, whatever number others were given meanwhile: programs of
/// before did not record the last one.
#[test]
fn a_journal_that_comes_back_finds_its_own_move() {
    for is_recorded in [true, false] {
        let mut world = World::new();
        let (x, y) = (world.image("x.img", 6 << 20, 65536), world.image("y.img", 1 << 20, 65536));
        world.attach("x", &x);
        world.attach("y", &y);
        let expected = std::fs::read(&x).expect("read");
        let to = world.path("x-new.img");
        let slow = ["move", "x", "--to", &target(&to), "--bandwidth", "1MiB/s", "--detach"];
        let id = world.json(&slow)["id"].as_u64().expect("a number");
        world.wait_until_job("nothing is copied", |job| job["progress"]["bytes_copied"].as_u64() > Some(1 << 20));
        world.kill();
        let journal = world.path("state/volumes/x/journal");
        let kept = std::fs::read(&journal).expect("there is a journal");
        std::fs::write(&journal, vec![0; kept.len()]).expect("written");
        if !is_recorded {
            std::fs::remove_file(world.path("state/jobs/last")).expect("there is a record");
        }
        world.start();
        world.json(&["move", "y", "--to", &target(&world.path("y-new.img"))]);
        let other = world.json(&["jobs", "--all"])[0]["id"].as_u64();
        assert_eq!(other == Some(id), !is_recorded, "a number was given twice");
        world.kill();
        std::fs::write(&journal, &kept).expect("written");
        world.start();
        world.json(&["set", "x", "--bandwidth", "0"]);
        wait_until("the move does not go on", || world.json(&["volume", "show", "x"])["backend"] == target(&to));
        wait_until("it is not over", || world.json(&["jobs"]).as_array().is_some_and(Vec::is_empty));
        same(&to, &expected);
    }
}

/// A child that is gone when the test is.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Started {
    fn end(&mut self) {
        signal(&self.0, Signal::TERM);
        assert!(self.0.wait().expect("a child").success(), "it did not end well");
    }
}

#[test]
fn a_log_that_cannot_be_written_ends_no_daemon() {
    let world = World::without_daemon();
    let image = world.image("disk.img", 1 << 20, 65536);
    let full = std::fs::File::options().write(true).open("/dev/full").expect("opened");
    let (unread, written) = std::io::pipe().expect("a pipe");
    drop(unread);
    for (name, place) in [("x", Stdio::from(full)), ("y", Stdio::from(written))] {
        let mut daemon = Started(world.daemon.command().stderr(place).spawn().expect("started"));
        wait_until("it does not come up", || {
            assert!(daemon.0.try_wait().expect("a child").is_none(), "the log has ended it");
            world.run(&["status"]).status.success()
        });
        let copy = world.path(name);
        std::fs::copy(&image, &copy).expect("copied");
        let uri = world.attach(&format!("v{name}"), &copy);
        assert_eq!(tool("nbdinfo", &["--size", &uri]).trim(), (1 << 20).to_string());
        let metrics = tool("curl", &["-s", "--unix-socket", &world.text("api"), "http://localhost/metrics"]);
        let lost = metrics.lines().find_map(|line| line.strip_prefix("transhume_log_lost_lines_total "));
        assert!(lost.is_some_and(|lost| lost != "0"), "{lost:?}");
        daemon.end();
    }
}

#[test]
fn a_terminal_that_goes_away_ends_nothing_and_has_the_configuration_read_again() {
    let mut world = World::without_daemon();
    let image = world.image("disk.img", 1 << 20, 65536);
    let path = world.path("config.toml");
    let config = |text: &str| std::fs::write(&path, text).expect("written");
    config("log = \"warn\"\nworkers = 1\n");
    world.daemon.arguments = vec!["--config".to_owned(), world.text("config.toml")];
    world.start();
    let uri = world.attach("x", &image);
    assert!(!world.log().contains("transhumed is up"), "{}", world.log());
    for (text, said) in [
        ("log = \"info\"\nworkers = 2\n", "counts after a restart only key=\"workers\""),
        ("logs = \"info\"\n", "the configuration is as before"),
        ("log = \"info\"\n", "reading the configuration, certificates and trust again"),
    ] {
        config(text);
        world.daemon.signal(Signal::HUP).expect("it runs");
        wait_until(said, || world.log().contains(said));
    }
    assert_eq!(tool("nbdinfo", &["--size", &uri]).trim(), (1 << 20).to_string());
    world.terminate();

    let mut rescue = world.command(&["rescue", "x"]);
    rescue.arg("--state-dir").arg(world.path("state")).stdout(Stdio::null());
    let mut rescue = Started(rescue.spawn().expect("started"));
    let is_served = || Command::new("nbdinfo").arg(&uri).output().expect("it runs").status.success();
    wait_until("nothing is rescued", is_served);
    signal(&rescue.0, Signal::HUP);
    std::thread::sleep(Duration::from_millis(100));
    assert!(is_served() && rescue.0.try_wait().expect("a child").is_none(), "the terminal has taken it along");
    rescue.end();
}

#[test]
fn a_journal_that_another_process_has_for_a_while_keeps_its_volume_down_no_longer() {
    let mut world = World::new();
    let image = world.image("disk.img", 1 << 20, 65536);
    world.attach("x", &image);
    world.terminate();
    let journal = std::fs::File::options().read(true).write(true).open(world.path("state/volumes/x/journal"));
    let journal = journal.expect("opened");
    rustix::fs::fcntl_lock(&journal, rustix::fs::FlockOperation::NonBlockingLockExclusive).expect("it is free");
    world.start();
    let shown = || world.json(&["volume", "ls"])[0].clone();
    let down = shown();
    let problem = down["problem"].to_string();
    assert!(down["state"] == "down" && problem.contains("is tried again by itself"), "{down}");
    assert!(!problem.contains("put back a copy"), "{down}");
    drop(journal);
    wait_until("it does not come back", || shown()["state"] == "serving");
}
