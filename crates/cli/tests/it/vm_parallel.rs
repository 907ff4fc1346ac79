//! A whole VM goes to another host by the parallel memory engine: its guest checks its memory and its disk afterwards.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use transhume_guest::programs::vm_program_line;
use transhume_guest::{
    Disk, Event, Guest, GuestNetwork, GuestSpec, HugePages, Load, MemoryLoad, Network, Side, TwoHosts, TwoHostsSpec,
    create_filled,
};

const DISK_BYTES: u64 = 8 << 20;
const HANG: Duration = Duration::from_secs(120);
/// Huge pages for a guest at both hosts, and for the file that it began with.
const HUGE_PAGES: u64 = 3 * 256 / 2 + 16;

/// What the guest's memory is.
enum Memory {
    /// QEMU's own, as anybody starts it.
    Own,
    /// A tracked file on tmpfs.
    Tracked,
    /// A tracked file of huge pages.
    Huge(HugePages),
}

/// Two paired hosts and a guest on the first, whose memory changes all the time.
struct Place {
    guest: Guest,
    hosts: TwoHosts,
    _network: GuestNetwork,
    _folder: tempfile::TempDir,
    /// Where all memory lies.
    memory: PathBuf,
    _memory_folder: tempfile::TempDir,
    _huge_pages: Option<HugePages>,
}

/// Where cargo has put the library that has the kernel track a QEMU's memory.
fn library() -> PathBuf {
    let own = std::env::current_exe().expect("this program");
    let mut folders = own.ancestors().skip(1);
    folders.find_map(|folder| Some(folder.join("libtranshume_preload.so")).filter(|path| path.exists())).expect("built")
}

impl Place {
    fn new(kind: Memory) -> Self {
        let folder = tempfile::Builder::new().prefix("par").tempdir().expect("a temporary directory");
        let shared = tempfile::Builder::new().prefix("par").tempdir_in("/dev/shm").expect("a temporary directory");
        let is_tracked = !matches!(kind, Memory::Own);
        let huge_pages = if let Memory::Huge(pages) = kind { Some(pages) } else { None };
        let memory = huge_pages.as_ref().map_or_else(|| shared.path(), HugePages::path).to_owned();
        let programs = Path::new(env!("CARGO_BIN_EXE_transhumed")).parent().expect("in a directory");
        let more = format!("run-vms = true\nmemory-dir = {memory:?}\n{}", vm_program_line());
        let spec = TwoHostsSpec { more: &more, ..TwoHostsSpec::default() };
        let mut hosts = TwoHosts::new(programs, folder.path(), spec).expect("two networks; run `make setup`, as root");
        hosts.start().expect("both daemons start");
        hosts.pair().expect("paired");
        let network = GuestNetwork::new(&hosts, ["guest0"]).expect("a network");
        let load = Load { is_prefilled: true, rate: 50, workers: 2, read_percent: 50, ..Load::default() };
        // One write makes a whole page change: with much of a guest in huge pages the copy is behind for good on a busy machine.
        let (mib, rewrite_mib_per_second) = if huge_pages.is_some() { (8, 2) } else { (64, 16) };
        let load_of_memory = MemoryLoad { mib, rewrite_mib_per_second, hot_percent: 50 };
        let spec =
            GuestSpec::new().network(Network::default()).workload_socket().load(load).memory_load(load_of_memory);
        let file = folder.path().join("disk0.raw");
        create_filled(&file, DISK_BYTES).expect("filled");
        let spec = match is_tracked {
            true => spec.tracked_memory(&memory.join("ram"), &library(), &folder.path().join("memory.sock")),
            false => spec,
        };
        let spec = spec.disk(Disk::raw(&file, "disk0")).launcher(hosts.launcher(Side::A));
        let mut guest = Guest::boot(spec).expect("QEMU starts; run `make setup`");
        guest.wait_for_load(HANG).expect("the load begins");
        let (_memory_folder, _huge_pages) = (shared, huge_pages);
        let place = Self { guest, hosts, _network: network, _folder: folder, memory, _memory_folder, _huge_pages };
        let qmp = place.guest.qmp_socket().display().to_string();
        place.json(Side::A, &["vm", "add", "web1", "--qmp", &qmp]);
        place
    }

    fn json(&self, side: Side, words: &[&str]) -> Value {
        self.hosts.daemon(side).json(words).unwrap_or_else(|error| panic!("{words:?}: {error:#}\n{}", self.logs()))
    }

    fn logs(&self) -> String {
        Side::BOTH.map(|side| format!("--- {}\n{}", side.name(), self.hosts.daemon(side).log())).concat()
    }

    /// Moves the VM, and follows it there. Gives what the move has come to.
    fn follow_move(&mut self, (from, to): (Side, Side), more: &[&str]) -> Value {
        let mut words = vec!["vm", "move", "web1", "--to", to.name()];
        words.extend(more);
        let moved = self.json(from, &words);
        assert_eq!(moved["state"], "done", "{moved}\n{}", self.logs());
        let folder = self.hosts.daemon(to).api().parent().expect("in a folder").join("vm/web1");
        self.guest.leave();
        self.guest.follow(&folder).unwrap_or_else(|error| panic!("{error:#}\n{}", self.logs()));
        self.verify();
        moved
    }

    /// The guest goes on rewriting its memory, and finds that and its disk as it wrote them.
    fn verify(&mut self) {
        let rewritten = self.guest.load_result().memory.rewritten;
        self.guest
            .wait_until(HANG, |event| matches!(event, Event::Memory(memory) if memory.rewritten > rewritten))
            .unwrap_or_else(|error| panic!("{error:#}\n{}", self.logs()));
        self.guest.send("verify").expect("sent");
        let verified = self.guest.wait_until(HANG, |event| matches!(event, Event::Verified { .. }));
        verified.unwrap_or_else(|error| panic!("{error:#}\n{}", self.logs()));
        let logs = self.logs();
        let result = self.guest.load_result();
        let is_right = result.wrong == 0 && result.memory.wrong == 0 && result.complaints.is_empty();
        assert!(is_right, "{result:?}\n{logs}");
    }

    /// How many files of memory have a name that a daemon has made.
    fn memory_files(&self) -> usize {
        let entries = std::fs::read_dir(&self.memory).expect("there").flatten();
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("transhume-")).count()
    }

    fn until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !is_so(self) {
            assert!(start.elapsed() < HANG, "{what}: it does not come to that\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
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

#[test]
fn a_vm_moves_there_and_back_by_the_parallel_engine_and_misses_nothing() {
    let mut place = Place::new(Memory::Tracked);
    let ready = place.json(Side::A, &["vm", "prepare", "web1"]);
    assert_eq!((&ready["not_parallel"], &ready["changes"]), (&Value::Null, &Value::Array(Vec::new())), "{ready}");
    let plan = place.json(Side::A, &["vm", "plan", "web1", "--to", "b", "--show-command"]);
    assert_eq!((&plan["refusals"], &plan["memory_engine"]), (&Value::Array(Vec::new()), &"parallel".into()), "{plan}");
    assert!(plan["changes"].to_string().contains("mem-path"), "{plan}");
    for (way, streams, share) in [((Side::A, Side::B), "2", "100"), ((Side::B, Side::A), "1", "50")] {
        let how = ["--memory", "parallel", "--channels", streams, "--memory-cpu", share];
        let moved = place.follow_move(way, &how);
        println!("{streams} streams: {} ms of downtime, {}", moved["downtime_ms"], moved["memory"]);
        // When each step was made.
        let log = place.hosts.daemon(way.0).log();
        let steps = log.lines().filter(|line| line.contains("a VM moves") || line.contains("a VM's memory"));
        steps.for_each(|line| println!("{line}"));
        assert_eq!(moved["memory_engine"], "parallel", "{moved}");
        assert_eq!(moved["connections"].to_string(), streams, "{moved}");
        place.until("its disks are given back", |place| {
            place.json(way.1, &["volume", "ls"]).as_array().is_some_and(Vec::is_empty)
        });
    }
    assert_eq!(place.memory_files(), 0, "no file of a memory has a name any more");
}

#[test]
fn a_vm_in_huge_pages_moves_there_and_back() {
    let pages = HugePages::take(HUGE_PAGES).expect("huge pages; as root, with 800 MiB free");
    let mut place = Place::new(Memory::Huge(pages));
    for way in [(Side::A, Side::B), (Side::B, Side::A)] {
        // A pass of huge pages is long on a busy machine: how long the guest is stopped is not what this looks at.
        let how = ["--memory", "parallel", "--channels", "2", "--downtime-limit", "5s"];
        let moved = place.follow_move(way, &how);
        println!("{} ms of downtime, {}", moved["downtime_ms"], moved["memory"]);
        assert_eq!(moved["memory_engine"], "parallel", "{moved}");
    }
    assert_eq!(place.memory_files(), 0, "no file of a memory has a name any more");
}

#[test]
fn a_vm_whose_memory_is_its_own_goes_by_qemu_and_is_told_why() {
    let mut place = Place::new(Memory::Own);
    let ready = place.json(Side::A, &["vm", "prepare", "web1"]);
    assert!(ready["not_parallel"].to_string().contains("is in no file"), "{ready}");
    assert!(ready["changes"].to_string().contains("memory-backend-file"), "{ready}");
    assert!(ready["environment"].to_string().contains("LD_PRELOAD="), "{ready}");
    let only = ["vm", "move", "web1", "--to", "b", "--memory", "parallel"];
    let refused = format!("{:#}", place.hosts.daemon(Side::A).json(&only).expect_err("it cannot"));
    assert!(refused.contains("is in no file"), "{refused}");
    let limited = ["vm", "move", "web1", "--to", "b", "--memory", "qemu", "--memory-cpu", "50"];
    let refused = format!("{:#}", place.hosts.daemon(Side::A).json(&limited).expect_err("QEMU has no such limit"));
    assert!(refused.contains("limits no processors"), "{refused}");
    let moved = place.follow_move((Side::A, Side::B), &[]);
    println!("by QEMU: {} ms of downtime", moved["downtime_ms"]);
    assert_eq!(moved["memory_engine"], "qemu", "{moved}");
    assert!(moved["not_parallel"].to_string().contains("is in no file"), "{moved}");
}

#[test]
fn a_vm_goes_on_here_when_the_other_daemon_dies_while_its_memory_is_copied() {
    let mut place = Place::new(Memory::Tracked);
    let slow = ["vm", "move", "web1", "--to", "b", "--memory", "parallel", "--bandwidth", "8MiB/s", "--detach"];
    place.json(Side::A, &slow);
    place.until("the memory is copied", |place| {
        let moving = place.json(Side::A, &["vm", "show", "web1"]);
        moving["state"] == "moving" && place.hosts.daemon(Side::A).log().contains("phase=copying memory")
    });
    place.hosts.daemon_mut(Side::B).kill();
    place.hosts.daemon_mut(Side::B).start().expect("it starts");
    place.until("the move is undone", |place| place.json(Side::A, &["vm", "show", "web1"])["state"] == "running");
    place.verify();
    // Its disk is given up by a move of its own, which may end a moment later.
    place.until("nothing is left there", |place| {
        ["vm", "volume"].iter().all(|what| place.json(Side::B, &[what, "ls"]) == Value::Array(Vec::new()))
    });
    assert_eq!(place.memory_files(), 0, "its memory is removed there");
    let moved = place.follow_move((Side::A, Side::B), &[]);
    assert_eq!(moved["memory_engine"], "parallel", "{moved}");
}
