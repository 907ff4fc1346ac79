//! What is said of a VM's move before it: how long it takes, for how long the guest is stopped, and whether it ends at all. The move
//! says it again beside what it took.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use transhume_guest::{
    Disk, Guest, GuestNetwork, GuestSpec, Load, MemoryLoad, Network, Side, TwoHosts, TwoHostsSpec, create_filled,
};

const HANG: Duration = Duration::from_secs(120);
const MIB: u64 = 1 << 20;

struct Place {
    _guest: Guest,
    _network: GuestNetwork,
    hosts: TwoHosts,
    _folder: tempfile::TempDir,
}

impl Place {
    fn new(spec: TwoHostsSpec<'_>, memory: Option<MemoryLoad>) -> Self {
        let folder = tempfile::Builder::new().prefix("plan").tempdir().expect("a temporary directory");
        let programs = Path::new(env!("CARGO_BIN_EXE_transhumed")).parent().expect("in a directory");
        let spec = TwoHostsSpec { more: "run-vms = true\n", ..spec };
        let mut hosts = TwoHosts::new(programs, folder.path(), spec).expect("two networks; run `make setup`, as root");
        hosts.start().expect("both daemons start");
        hosts.pair().expect("paired");
        let network = GuestNetwork::new(&hosts, ["guest0"]).expect("a network");
        let file = folder.path().join("disk0.raw");
        create_filled(&file, 16 * MIB).expect("filled");
        let load = Load { is_prefilled: true, rate: 20, workers: 1, read_percent: 50, ..Load::default() };
        let mut spec = GuestSpec::new().network(Network::default()).workload_socket().load(load);
        spec = spec.disk(Disk::raw(&file, "disk0")).launcher(hosts.launcher(Side::A));
        if let Some(memory) = memory {
            spec = spec.memory_load(memory);
        }
        let mut guest = Guest::boot(spec).expect("QEMU starts; run `make setup`");
        guest.wait_for_load(HANG).expect("the load begins");
        let qmp = guest.qmp_socket().display().to_string();
        let place = Self { _guest: guest, _network: network, hosts, _folder: folder };
        place.json(&["vm", "add", "web1", "--qmp", &qmp]);
        place
    }

    fn json(&self, words: &[&str]) -> Value {
        let logs = || Side::BOTH.map(|side| self.hosts.daemon(side).log()).join("\n---\n");
        self.hosts.daemon(Side::A).json(words).unwrap_or_else(|error| panic!("{words:?}: {error:#}\n{}", logs()))
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

#[test]
fn a_move_says_what_its_plan_has_said_beside_what_it_took() {
    let place = Place::new(TwoHostsSpec::default(), None);
    let plan = place.json(&["vm", "plan", "web1", "--to", "b"]);
    let (seconds, downtime) = (plan["seconds"].as_f64().expect("told"), plan["downtime_ms"].as_f64().expect("told"));
    assert!((0.1..60.0).contains(&seconds) && (10.0..1000.0).contains(&downtime), "{plan}");
    let resident = plan["memory_resident_bytes"].as_u64().expect("told");
    assert!((20 * MIB..256 * MIB).contains(&resident), "{plan}");
    assert_eq!(plan["converges"], Value::Bool(true), "{plan}");
    // Only an old QEMU that emulates has a note.
    let notes = plan["notes"].as_array().expect("a list");
    assert!(notes.iter().all(|note| note.as_str().is_some_and(|note| note.contains("TCG"))), "{plan}");

    let moved = place.json(&["vm", "move", "web1", "--to", "b"]);
    assert_eq!(moved["state"], "done", "{moved}");
    assert_eq!((&moved["forecast_seconds"], &moved["forecast_downtime_ms"]), (&plan["seconds"], &plan["downtime_ms"]));
    assert!(moved["memory_bytes_per_second"].as_u64().is_some_and(|rate| rate > MIB), "{moved}");
    let last = place.json(&["vm", "show", "web1"])["last_move"].clone();
    assert_eq!((&last["forecast_seconds"], &last["elapsed_ms"]), (&moved["forecast_seconds"], &moved["elapsed_ms"]));
}

#[test]
fn a_plan_for_a_guest_that_is_faster_than_the_link_says_so() {
    let memory = MemoryLoad { mib: 96, rewrite_mib_per_second: 60, hot_percent: 100 };
    let slow = TwoHostsSpec { link_bits_per_second: Some(80_000_000), ..TwoHostsSpec::default() };
    let place = Place::new(slow, Some(memory));
    let plan = place.json(&["vm", "plan", "web1", "--to", "b"]);
    assert_eq!((&plan["converges"], &plan["seconds"]), (&false.into(), &Value::Null), "{plan}");
    let note = plan["notes"][0].as_str().unwrap_or_default();
    assert!(note.contains("--auto-converge") && note.contains("more links"), "{plan}");
}
