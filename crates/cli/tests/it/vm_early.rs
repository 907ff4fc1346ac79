//! The target's QEMU is started before the disks of its VM are complete, and ended when the move is undone then.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use transhume_guest::{Disk, Guest, GuestSpec, Load, Side, TwoHosts, TwoHostsSpec, create_filled};

const HANG: Duration = Duration::from_secs(120);

#[test]
fn the_targets_qemu_is_there_before_the_disks_are_complete_and_goes_with_a_cancelled_move() {
    let folder = tempfile::Builder::new().prefix("early").tempdir().expect("a temporary directory");
    let programs = Path::new(env!("CARGO_BIN_EXE_transhumed")).parent().expect("in a directory");
    let spec = TwoHostsSpec { more: "run-vms = true\n", ..TwoHostsSpec::default() };
    let mut hosts = TwoHosts::new(programs, folder.path(), spec).expect("two networks; run `make setup`, as root");
    hosts.start().expect("both daemons start");
    hosts.pair().expect("paired");
    let file = folder.path().join("disk0.raw");
    create_filled(&file, 32 << 20).expect("filled");
    let load = Load { is_prefilled: true, rate: 20, workers: 1, read_percent: 50, ..Load::default() };
    let spec = GuestSpec::new().disk(Disk::raw(&file, "disk0")).load(load).workload_socket();
    let mut guest = Guest::boot(spec.launcher(hosts.launcher(Side::A))).expect("QEMU starts; run `make setup`");
    guest.wait_for_load(HANG).expect("the load begins");
    let json = |side: Side, words: &[&str]| hosts.daemon(side).json(words).expect("it answers");
    let logs = || Side::BOTH.map(|side| hosts.daemon(side).log()).join("\n---\n");
    json(Side::A, &["vm", "add", "web1", "--qmp", &guest.qmp_socket().display().to_string()]);

    json(Side::A, &["vm", "move", "web1", "--to", "b", "--bandwidth", "8MiB/s", "--detach"]);
    let monitor = hosts.daemon(Side::B).api().parent().expect("in a folder").join("vm/web1/transhume.qmp");
    let began = Instant::now();
    while !monitor.exists() {
        assert!(began.elapsed() < HANG, "it is not started\n{}", logs());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!hosts.daemon(Side::A).log().contains("copying memory"), "the disks were awaited\n{}", logs());
    let over = json(Side::A, &["vm", "cancel", "web1"]);
    assert_eq!(over["state"], "cancelled", "{over}\n{}", logs());
    while json(Side::B, &["vm", "ls"]) != Value::Array(Vec::new()) || monitor.exists() {
        assert!(began.elapsed() < HANG, "something is left at the target\n{}", logs());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(json(Side::A, &["vm", "show", "web1"])["state"], "running", "{}", logs());

    let moved = json(Side::A, &["vm", "move", "web1", "--to", "b"]);
    assert_eq!(moved["state"], "done", "{moved}\n{}", logs());
    let pid = json(Side::B, &["vm", "show", "web1"])["pid"].as_u64().expect("it runs");
    // A QEMU that a daemon has started outlives it.
    let _ = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status();
}
