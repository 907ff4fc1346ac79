//! The load over NBD, against nbdkit: it verifies, it finds what is wrong, and it holds the rate that was offered.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use transhume_guest::{Event, LoadResult, create_filled};

const SIZE: u64 = 8 << 20;

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn serve(file: &Path, socket: &Path) -> Killed {
    let nbdkit = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "nbdkit", "-f", "-U"])
        .args([socket.as_os_str(), "file".as_ref(), file.as_os_str()])
        .spawn()
        .expect("nbdkit is there: run `make setup`");
    let nbdkit = Killed(nbdkit);
    let end = Instant::now() + Duration::from_secs(60);
    // The file is there before anybody listens.
    while std::os::unix::net::UnixStream::connect(socket).is_err() {
        assert!(Instant::now() < end, "nbdkit does not come up");
        std::thread::sleep(Duration::from_millis(5));
    }
    nbdkit
}

/// Runs the load; `between` is called when it has sent its first interval; returns what it told.
fn run(socket: &Path, words: &[&str], between: impl FnOnce()) -> (Vec<Event>, LoadResult) {
    let load = Command::new(env!("CARGO_BIN_EXE_nbd-load"))
        .arg(format!("socket={}", socket.display()))
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut load = Killed(load);
    let mut lines = BufReader::new(load.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    let (mut events, mut load_result) = (Vec::new(), LoadResult::default());
    let mut between = Some(between);
    for line in &mut lines {
        let event = Event::parse(&line);
        load_result.note(&event);
        if matches!(event, Event::Interval(_))
            && let Some(between) = between.take()
        {
            between();
            writeln!(load.0.stdin.as_mut().unwrap(), "stop").unwrap();
        }
        events.push(event);
    }
    assert!(load.0.wait().unwrap().success(), "{events:?}");
    (events, load_result)
}

#[test]
fn the_load_verifies_a_volume_and_says_that_all_is_right() {
    let folder = tempfile::tempdir().unwrap();
    let (file, socket) = (folder.path().join("disk.raw"), folder.path().join("nbd.sock"));
    create_filled(&file, SIZE).unwrap();
    let _server = serve(&file, &socket);
    let (_, load_result) = run(&socket, &["verify=1", "depth=8", "interval_ms=200", "flush_every=16"], || {});
    assert!(load_result.is_right(), "{load_result:?}");
    assert_eq!(load_result.blocks, SIZE / 4096);
    assert!(load_result.slots_rewritten > 0);
}

#[test]
fn discards_zeroes_and_forced_writes_reach_the_end_of_a_volume_of_an_odd_size() {
    const ODD: u64 = SIZE + 4096 + 3 * 512;
    let folder = tempfile::tempdir().unwrap();
    let (file, socket) = (folder.path().join("disk.raw"), folder.path().join("nbd.sock"));
    create_filled(&file, ODD).unwrap();
    assert_eq!(std::fs::metadata(&file).unwrap().len(), ODD);
    let _server = serve(&file, &socket);
    let words = ["verify=1", "depth=8", "interval_ms=500", "zero_percent=20", "discard_percent=20", "forced_percent=5"];
    let (events, load_result) = run(&socket, &words, || {});
    assert!(load_result.is_right(), "{load_result:?}");
    assert_eq!(load_result.blocks, ODD.div_ceil(4096));
    let counted = events.iter().rev().find_map(|event| match event {
        Event::Counted(counted) => Some(counted),
        _ => None,
    });
    let counted = counted.expect("it counts");
    for name in ["discards", "zeroes", "zeroes_kept", "forced"] {
        assert!(counted[name] > 0, "no {name}: {counted:?}");
    }
}

#[test]
fn a_discard_that_does_nothing_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let (file, socket) = (folder.path().join("disk.raw"), folder.path().join("nbd.sock"));
    create_filled(&file, SIZE).unwrap();
    let old = std::fs::read(&file).unwrap();
    let _server = serve(&file, &socket);
    let undo = || {
        let disk = std::fs::File::options().write(true).open(&file).unwrap();
        disk.write_all_at(&old, 0).unwrap();
    };
    let words = ["verify=1", "read_percent=0", "rate=2000", "interval_ms=200", "discard_percent=100"];
    let (_, load_result) = run(&socket, &words, undo);
    assert!(!load_result.is_right());
    assert!(load_result.complaints.iter().any(|told| told.contains("zeroes=true")), "{load_result:?}");
}

#[test]
fn a_write_that_was_lost_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let (file, socket) = (folder.path().join("disk.raw"), folder.path().join("nbd.sock"));
    create_filled(&file, SIZE).unwrap();
    let old = std::fs::read(&file).unwrap();
    let _server = serve(&file, &socket);
    // The whole volume falls back to what it was, as if every write had gone elsewhere.
    let lose = || {
        let disk = std::fs::File::options().write(true).open(&file).unwrap();
        disk.write_all_at(&old, 0).unwrap();
    };
    let (_, load_result) = run(&socket, &["verify=1", "read_percent=0", "rate=2000", "interval_ms=200"], lose);
    assert!(!load_result.is_right());
    assert!(load_result.complaints.iter().any(|told| told.contains("Stale")), "{load_result:?}");
}

#[test]
fn an_offered_rate_is_what_is_delivered() {
    let folder = tempfile::tempdir().unwrap();
    let (file, socket) = (folder.path().join("disk.raw"), folder.path().join("nbd.sock"));
    create_filled(&file, SIZE).unwrap();
    let _server = serve(&file, &socket);
    let (events, _) = run(&socket, &["rate=500", "interval_ms=1000"], || {});
    let told: u64 = events
        .iter()
        .filter_map(|event| match event {
            Event::Interval(interval) => Some(interval.reads + interval.writes),
            _ => None,
        })
        .sum();
    // Requests that wait are sent later, none is left out: the count depends on the clock alone.
    assert!((400..5_000).contains(&told), "{told} requests at 500 a second");
}
