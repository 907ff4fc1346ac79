//! The cache of a disk on storage that both hosts reach goes along with its VM, by every way, while the guest checks what it reads.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use transhume_guest::{
    Disk, Event, Guest, GuestNetwork, GuestSpec, Load, Network, Side, TwoHosts, TwoHostsSpec, create_filled,
};

const DISK_BYTES: u64 = 32 << 20;
const HANG: Duration = Duration::from_secs(120);

struct Place {
    guest: Guest,
    _network: GuestNetwork,
    hosts: TwoHosts,
    folder: tempfile::TempDir,
    /// Where the flash of both hosts is.
    memory: tempfile::TempDir,
}

impl Place {
    /// A guest with one disk on shared storage, adopted with a cache `ssd` of this mode, and a cache `ssd` at the other host.
    fn new(mode: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("vc").tempdir().expect("a temporary directory");
        let memory = tempfile::Builder::new().prefix("vc").tempdir_in("/dev/shm").expect("a directory in memory");
        let programs = Path::new(env!("CARGO_BIN_EXE_transhumed")).parent().expect("in a directory");
        let more = format!("run-vms = true\nshared-storage = [{:?}]\n", folder.path().join("shared"));
        let spec = TwoHostsSpec { more: &more, ..TwoHostsSpec::default() };
        let mut hosts = TwoHosts::new(programs, folder.path(), spec).expect("two networks; run `make setup`, as root");
        hosts.start().expect("both daemons start");
        hosts.pair().expect("paired");
        let network = GuestNetwork::new(&hosts, ["guest0"]).expect("a network");
        let load = Load { is_prefilled: true, rate: 200, workers: 4, read_percent: 70, ..Load::default() };
        let file = folder.path().join("shared/disk0.raw");
        std::fs::create_dir_all(folder.path().join("shared")).expect("a folder");
        create_filled(&file, DISK_BYTES).expect("filled");
        let spec = GuestSpec::new().network(Network::default()).workload_socket().load(load);
        let spec = spec.disk(Disk::raw(&file, "disk0")).launcher(hosts.launcher(Side::A));
        let mut guest = Guest::boot(spec).expect("QEMU starts; run `make setup`");
        guest.wait_for_load(HANG).expect("the load begins");
        let qmp = guest.qmp_socket().display().to_string();
        let place = Self { guest, _network: network, hosts, folder, memory };
        place.json(Side::A, &["vm", "add", "web1", "--qmp", &qmp]);
        place.json(Side::A, &["adopt", "--qmp", &qmp, "--node", "disk0", "--name", "web1-disk"]);
        for side in Side::BOTH {
            let store = format!("file:{},size=96MiB", place.memory.path().join(side.name()).display());
            place.json(side, &["cache", "create", "ssd", "--store", &store, "--policy", "lru"]);
        }
        let add = ["volume", "layer", "add", "web1-disk", "cache", "--cache", "ssd", "--size", "40MiB", "--mode", mode];
        place.json(Side::A, &add);
        place
    }

    fn json(&self, side: Side, words: &[&str]) -> Value {
        self.hosts.daemon(side).json(words).unwrap_or_else(|error| panic!("{words:?}: {error:#}\n{}", self.logs()))
    }

    fn logs(&self) -> String {
        Side::BOTH.map(|side| format!("--- {}\n{}", side.name(), self.hosts.daemon(side).log())).concat()
    }

    /// What the cache of the disk has done at `side`; null if it has none there.
    fn cached(&self, side: Side) -> Value {
        let layers = self.hosts.daemon(side).json(&["volume", "layer", "ls", "web1-disk"]).unwrap_or_default();
        let layers = layers.as_array().cloned().unwrap_or_default();
        layers.into_iter().find(|layer| layer["kind"] == "cache").unwrap_or_default()["cached"].clone()
    }

    fn wait_until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !is_so(self) {
            let cached = Side::BOTH.map(|side| self.cached(side));
            assert!(start.elapsed() < HANG, "{what}: {cached:?}\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the cache has so many blocks: the guest's reads warm it.
    fn warm(&self, side: Side, blocks: u64) {
        self.wait_until("it is warmed", |place| number(&place.cached(side), "admitted") >= blocks);
    }

    fn partitions(&self, side: Side) -> usize {
        self.json(side, &["cache", "show", "ssd"])["partitions"].as_array().map_or(0, Vec::len)
    }

    /// Moves the VM, and follows it there.
    fn go(&mut self, from: Side, to: Side, more: &[&str]) -> Value {
        let words: Vec<_> = ["vm", "move", "web1", "--to", to.name()].into_iter().chain(more.iter().copied()).collect();
        let moved = self.json(from, &words);
        assert_eq!(moved["state"], "done", "{moved}\n{}", self.logs());
        let folder = self.hosts.daemon(to).api().parent().expect("in a folder").join("vm/web1");
        self.guest.leave();
        self.guest.follow(&folder).unwrap_or_else(|error| panic!("{error:#}\n{}", self.logs()));
        moved
    }

    /// The guest reads its whole disk, and everything is as it was written.
    fn verify(&mut self) {
        self.guest.send("verify").expect("sent");
        let verified = self.guest.wait_until(HANG, |event| matches!(event, Event::Verified { .. }));
        verified.unwrap_or_else(|error| panic!("{error:#}\n{}", self.logs()));
        let load_result = self.guest.load_result();
        let is_right = load_result.wrong == 0 && load_result.complaints.is_empty();
        let shown = format!("{load_result:?}");
        assert!(is_right, "{shown}\n{}", self.logs());
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // QEMUs that a daemon has started outlive it.
        for side in Side::BOTH {
            let shown = self.hosts.daemon(side).json(&["vm", "ls"]).unwrap_or_default();
            for pid in shown.as_array().into_iter().flatten().filter_map(|vm| vm["pid"].as_u64()) {
                // Its number may be another process's by now.
                let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                if String::from_utf8_lossy(&line).contains("qemu") {
                    let _ = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status();
                }
            }
        }
    }
}

fn number(of: &Value, name: &str) -> u64 {
    of[name].as_u64().unwrap_or_default()
}

#[test]
fn a_cache_goes_along_by_every_way_and_the_guest_reads_what_it_wrote() {
    let mut place = Place::new("write-through");
    let mut ways = [(Side::A, Side::B), (Side::B, Side::A)].into_iter().cycle();
    for way in ["hybrid", "firepan", "firepan-if", "cachemior", "remote-read", "none"] {
        let (from, to) = ways.next().expect("without end");
        place.warm(from, 500);
        // What the guest never asks for is not read of the source either.
        let time = if way == "remote-read" { "8s" } else { "120s" };
        // A machine that is busy with others needs more than the five seconds that the memory waits for so small a cache.
        let mut words = vec!["--cache-transfer", way, "--cache-time", time];
        if way == "hybrid" {
            words.extend(["--cache-wait", "30s"]);
        }
        let moved = place.go(from, to, &words);
        println!("{way}: {} ms, {}, {}", moved["elapsed_ms"], moved["downtime_ms"], moved["caches"]);
        if way == "remote-read" {
            place.wait_until("the guest reads there", |place| {
                number(&place.cached(to)["arrival"], "read_remotely") > 20
            });
            place.verify();
            continue_when_over(&place, to, way);
            continue;
        }
        place.verify();
        continue_when_over(&place, to, way);
        let arrival = place.cached(to)["arrival"].clone();
        match way {
            "none" => assert_eq!(arrival, Value::Null),
            "cachemior" => assert!(number(&arrival, "from_storage") > 200, "{arrival}"),
            _ => assert!(number(&arrival, "from_source") > 200, "{way}: {arrival}\n{}", place.logs()),
        }
        if way == "hybrid" {
            assert!(moved["cache_wait_ms"].as_u64().is_some_and(|waited| waited < 60_000), "{moved}");
            assert!(moved["caches"][0]["hit_share"].as_f64().is_some_and(|share| share > 0.9), "{moved}");
        }
        place.verify();
    }
}

/// Waits until all of the cache is at `to`, and its part at the other host was given back.
fn continue_when_over(place: &Place, to: Side, way: &str) {
    let from = if to == Side::A { Side::B } else { Side::A };
    place.wait_until(way, |place| {
        let arrival = place.cached(to)["arrival"].clone();
        arrival.is_null() || arrival["over"] == true
    });
    place.wait_until("the part is given back", |place| place.partitions(from) == 0);
    assert_eq!(place.partitions(to), 1, "{way}");
}

#[test]
fn a_cache_that_writes_back_does_so_again_at_its_new_host_and_through_a_death_of_the_daemon() {
    let mut place = Place::new("write-back");
    place.warm(Side::A, 300);
    // A move that is undone leaves it as it was.
    place.json(Side::A, &["vm", "move", "web1", "--to", "b", "--bandwidth", "1MiB/s", "--detach"]);
    place.wait_until("it begins", |place| place.partitions(Side::B) == 1);
    place.json(Side::A, &["vm", "cancel", "web1"]);
    place.wait_until("nothing is left there", |place| place.partitions(Side::B) == 0);
    place.wait_until("it writes back again", |place| {
        let cached = place.cached(Side::A);
        cached["mode"] == "write-back" && number(&cached, "dirty_bytes") > 0
    });
    let moved = place.go(Side::A, Side::B, &[]);
    assert_eq!(moved["caches"][0]["transfer"], "hybrid", "{moved}");
    place.wait_until("it writes back there", |place| {
        let cached = place.cached(Side::B);
        cached["mode"] == "write-back" && number(&cached, "dirty_bytes") > 0
    });
    place.verify();
    place.hosts.daemon_mut(Side::B).kill();
    place.hosts.daemon_mut(Side::B).start().expect("it starts");
    place.verify();
    let cached = place.cached(Side::B);
    assert!(number(&cached, "hits") > 0, "it is warm: {cached}");
    // An empty one does, too.
    place.go(Side::B, Side::A, &["--cache-transfer", "none"]);
    place.wait_until("it writes back here", |place| {
        let cached = place.cached(Side::A);
        cached["mode"] == "write-back" && number(&cached, "dirty_bytes") > 0
    });
    place.verify();
    assert!(place.folder.path().join("shared/disk0.raw").exists());
}

#[test]
fn a_target_without_a_cache_says_so_before_and_one_that_dies_begins_with_an_empty_one() {
    let mut place = Place::new("read-only");
    place.warm(Side::A, 300);
    for command in ["plan", "move"] {
        let words = ["vm", command, "web1", "--to", "b", "--cache-at", "fast", "--json"];
        let refused = place.hosts.daemon(Side::A).run(&words).expect("it runs");
        let said = [refused.stdout, refused.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        assert!(refused.status.code() == Some(5) && said.contains("no cache fast"), "{said}");
        assert!(said.contains("--cache-at"), "{said}");
    }
    place.verify();
    let words = ["vm", "move", "web1", "--to", "b", "--cache-transfer", "remote-read", "--cache-time", "300s"];
    let moved = place.json(Side::A, &words);
    assert_eq!(moved["state"], "done", "{moved}\n{}", place.logs());
    let folder = place.hosts.daemon(Side::B).api().parent().expect("in a folder").join("vm/web1");
    place.guest.leave();
    place.guest.follow(&folder).expect("it runs there");
    assert_eq!(place.cached(Side::B)["arrival"]["over"], false, "{}", place.logs());
    place.hosts.daemon_mut(Side::B).kill();
    place.hosts.daemon_mut(Side::B).start().expect("it starts");
    place.verify();
    assert_eq!(place.cached(Side::B)["arrival"], Value::Null);
    place.wait_until("the part is given back", |place| place.partitions(Side::A) == 0);
}
