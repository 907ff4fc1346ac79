//! The hook at each phase of a VM's move: it makes the VM's tap device at the target, it refuses, it hangs, and it is called again
//! after a restart of the daemon.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use transhume_guest::{
    ClientSpec, Disk, Guest, GuestNetwork, GuestSpec, Load, Network, NetworkClient, Side, TwoHosts, TwoHostsSpec,
    create_filled,
};

const DISK_BYTES: u64 = 32 << 20;
const HANG: Duration = Duration::from_secs(120);
const TAP: &str = "guest0";

/// Two hosts with a hook, and a guest on the first whose tap device the second lacks.
struct Place {
    guest: Guest,
    network: GuestNetwork,
    hosts: TwoHosts,
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("hook").tempdir().expect("a temporary directory");
        let hook = hook_in(folder.path());
        let more = format!("run-vms = true\nvm-hook = \"{}\"\nvm-hook-seconds = 8\n", hook.display());
        let programs = Path::new(env!("CARGO_BIN_EXE_transhumed")).parent().expect("in a directory");
        let spec = TwoHostsSpec { more: more.leak(), ..TwoHostsSpec::default() };
        let mut hosts = TwoHosts::new(programs, folder.path(), spec).expect("two networks; run `make setup`, as root");
        hosts.start().expect("both daemons start");
        hosts.pair().expect("paired");
        let network = GuestNetwork::new(&hosts, []).expect("a network");
        GuestNetwork::add_tap(&hosts, Side::A, TAP).expect("a tap");
        let file = folder.path().join("disk0.raw");
        create_filled(&file, DISK_BYTES).expect("filled");
        let load = Load { is_prefilled: true, rate: 100, workers: 2, read_percent: 50, ..Load::default() };
        let spec = GuestSpec::new().network(Network::default()).workload_socket().load(load);
        let spec = spec.disk(Disk::raw(&file, "disk0")).launcher(hosts.launcher(Side::A));
        let mut guest = Guest::boot(spec).expect("QEMU starts; run `make setup`");
        guest.wait_for_load(HANG).expect("the load begins");
        let qmp = guest.qmp_socket().display().to_string();
        let place = Self { guest, network, hosts, folder };
        place.json(Side::A, &["vm", "add", "web1", "--qmp", &qmp]);
        place
    }

    fn json(&self, side: Side, words: &[&str]) -> Value {
        self.hosts.daemon(side).json(words).unwrap_or_else(|error| panic!("{words:?}: {error:#}\n{}", self.logs()))
    }

    fn logs(&self) -> String {
        Side::BOTH.map(|side| format!("--- {}\n{}", side.name(), self.hosts.daemon(side).log())).concat()
    }

    /// From now on the hook does this at a phase, and what is in packaging/ at the others.
    fn have_hook(&self, phase: &str, does: &str) {
        std::fs::write(self.folder.path().join(format!("does-{phase}")), does).expect("written");
    }

    /// The phases of one side in the order in which the hook was called.
    fn calls(&self, side: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.folder.path().join("calls")).unwrap_or_default();
        let of_side = |line: &str| line.strip_prefix(side)?.strip_prefix(' ').map(str::to_owned);
        text.lines().filter_map(of_side).collect()
    }

    /// What the hook was told at a phase.
    fn told(&self, phase: &str, side: &str) -> Value {
        let path = self.folder.path().join(format!("told-{phase}-{side}"));
        serde_json::from_slice(&std::fs::read(path).expect("it was called")).expect("JSON")
    }

    fn has_tap(&self, side: Side) -> bool {
        let shown = self.hosts.command(side, "ip").args(["link", "show", "dev", TAP]).output();
        shown.expect("ip runs").status.success()
    }

    fn until(&self, is_so: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !is_so(self) {
            let calls = ["source", "target"].map(|side| self.calls(side));
            assert!(start.elapsed() < HANG, "it does not come to that: {calls:?}\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The VM goes on at the first host, and the second has nothing of it.
    fn has_stayed(&self) {
        assert_eq!(self.json(Side::A, &["vm", "show", "web1"])["state"], "running", "{}", self.logs());
        assert_eq!(self.json(Side::B, &["vm", "ls"]), Value::Array(Vec::new()), "{}", self.logs());
        assert!(!self.has_tap(Side::B) && self.has_tap(Side::A));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // QEMUs that a daemon has started outlive it.
        let shown = self.hosts.daemon(Side::B).json(&["vm", "ls"]).unwrap_or_default();
        for pid in shown.as_array().into_iter().flatten().filter_map(|vm| vm["pid"].as_u64()) {
            // Its number may be another process's by now.
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&line).contains("qemu") {
                let _ = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status();
            }
        }
    }
}

/// A hook that notes each call, does what it was told to do at a phase, or what the example does.
fn hook_in(folder: &Path) -> PathBuf {
    let example = folder.join("vm-hook-tap");
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/vm-hook-tap");
    std::fs::copy(&shipped, &example).expect("copied");
    let (hook, shown) = (folder.join("hook"), folder.display());
    let text = format!(
        "#!/bin/sh\ncat >{shown}/told-$1-$2\necho \"$2 $1\" >>{shown}/calls\n\
         if [ -e {shown}/does-$1 ]; then . {shown}/does-$1; fi\nexec {shown}/vm-hook-tap \"$@\" <{shown}/told-$1-$2\n"
    );
    std::fs::write(&hook, text).expect("written");
    std::fs::set_permissions(&hook, std::fs::Permissions::from_mode(0o755)).expect("set");
    hook
}

#[test]
fn the_hook_makes_the_tap_at_the_target_and_removes_it_at_the_source() {
    let mut place = Place::new();
    let network = Network::default();
    let spec = ClientSpec::default();
    let client = NetworkClient::start(place.network.namespace(), network.host(), spec, HANG).expect("it answers");
    place.json(Side::A, &["vm", "move", "web1", "--to", "b", "--detach"]);
    let there = place.hosts.daemon(Side::B).api().parent().expect("in a folder").join("vm/web1");
    place.guest.follow(&there).unwrap_or_else(|error| panic!("{error:#}\n{}", place.logs()));
    let moved = place.json(Side::A, &["vm", "watch", "web1"]);
    assert_eq!(moved["state"], "done", "{moved}\n{}", place.logs());
    std::thread::sleep(Duration::from_secs(2));
    let report = client.finish();
    assert_eq!((report.http_backwards, &report.tcp_broken), (0, &None), "{report}\n{}", place.logs());
    assert_eq!(place.network.side_of(&network.mac).expect("asked"), Some(Side::B));
    assert!(place.has_tap(Side::B) && !place.has_tap(Side::A), "{}", place.logs());

    place.until(|place| place.calls("target").len() == 4);
    assert_eq!(place.calls("source"), ["prepare", "switchover", "released"]);
    assert_eq!(place.calls("target"), ["prepare", "start", "switchover", "running"]);
    let told = place.told("start", "target");
    assert_eq!((&told["vm"], &told["host"], &told["move"]), (&"web1".into(), &"a".into(), &moved["id"]), "{told}");
    assert_eq!((&told["networks"][0]["interface"], &told["networks"][0]["mac"]), (&TAP.into(), &network.mac.into()));
    assert!(told["command"].as_array().is_some_and(|words| words.iter().any(|word| word == "-incoming")), "{told}");
    assert_eq!((&told["facts"]["accelerator"], &told["disks"][0]["node"]), (&"tcg".into(), &"disk0".into()), "{told}");
}

#[test]
fn a_hook_that_refuses_or_hangs_keeps_the_vm_where_it_is_and_hears_that_it_was_abandoned() {
    let place = Place::new();
    let both = |place: &Place| ["source", "target"].iter().all(|side| place.calls(side).contains(&"abandoned".into()));
    let forget = |place: &Place| std::fs::remove_file(place.folder.path().join("calls")).expect("removed");
    let moving = ["vm", "move", "web1", "--to", "b"];

    place.have_hook("prepare", "if [ $2 = target ]; then echo no room >&2; exit 1; fi");
    let refused = place.hosts.daemon(Side::A).json(&moving).expect_err("it was accepted");
    assert!(format!("{refused:#}").contains("no room"), "{refused:#}");
    place.until(both);
    place.has_stayed();
    forget(&place);

    place.have_hook("prepare", "");
    place.have_hook("start", "sleep 1000");
    let refused = place.hosts.daemon(Side::A).json(&moving).expect_err("it has moved");
    assert!(format!("{refused:#}").contains("within 8 s and was killed"), "{refused:#}");
    place.until(both);
    place.until(|place| place.json(Side::B, &["vm", "ls"]) == Value::Array(Vec::new()));
    place.has_stayed();
    assert_eq!(place.calls("target"), ["prepare", "start", "abandoned"]);
}

#[test]
fn after_a_restart_of_both_daemons_both_hooks_hear_that_the_move_was_abandoned() {
    let mut place = Place::new();
    place.json(Side::A, &["vm", "move", "web1", "--to", "b", "--bandwidth", "2MiB/s", "--detach"]);
    place.until(|place| place.calls("target") == ["prepare"]);
    for side in Side::BOTH {
        place.hosts.daemon_mut(side).kill();
    }
    for side in Side::BOTH {
        place.hosts.daemon_mut(side).start().expect("it starts");
    }
    let heard = |place: &Place, side: &str| place.calls(side).contains(&"abandoned".to_owned());
    place.until(|place| heard(place, "source") && heard(place, "target"));
    assert_eq!(place.told("abandoned", "source")["networks"][0]["interface"], TAP);
    place.until(|place| place.json(Side::A, &["vm", "show", "web1"])["state"] == "running");
    place.until(|place| place.json(Side::B, &["vm", "ls"]) == Value::Array(Vec::new()));
    place.has_stayed();
}
