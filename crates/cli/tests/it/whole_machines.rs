//! A whole VM goes to another host: its memory, its devices and its disks, while a client asks it things.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use transhume_guest::programs::vm_program_line;
use transhume_guest::{
    ClientSpec, Disk, Event, Guest, GuestNetwork, GuestSpec, Load, Network, NetworkClient, Side, TwoHosts,
    TwoHostsSpec, create_filled,
};

use crate::support::Loop;

const DISK_BYTES: u64 = 32 << 20;
const HANG: Duration = Duration::from_secs(120);
const RUNS_VMS: &str = "run-vms = true\n";

/// Two paired hosts, a guest on the first, and everybody's networks.
pub(crate) struct Place {
    pub(crate) guest: Guest,
    network: GuestNetwork,
    pub(crate) hosts: TwoHosts,
    folder: tempfile::TempDir,
}

impl Place {
    fn new(disks: usize) -> Self {
        let files: Vec<_> = (0..disks).map(|number| format!("disk{number}.raw")).collect();
        Self::on(|_| String::new(), &files.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// With disks in these files of the folder, of which `more` gives what both configurations say besides.
    fn on(more: impl FnOnce(&Path) -> String, files: &[&str]) -> Self {
        Self::with(more, "", files)
    }

    fn with(more: impl FnOnce(&Path) -> String, more_at_b: &str, files: &[&str]) -> Self {
        Self::of([None, None], more, more_at_b, files)
    }

    /// With daemons of these programs, where they are not those of this test.
    pub(crate) fn of(
        programs_of_sides: [Option<&Path>; 2],
        more: impl FnOnce(&Path) -> String,
        more_at_b: &str,
        files: &[&str],
    ) -> Self {
        let folder = tempfile::Builder::new().prefix("vm").tempdir().expect("a temporary directory");
        let programs = Path::new(env!("CARGO_BIN_EXE_transhumed")).parent().expect("in a directory");
        let own = vm_program_line();
        // The key may be there once.
        let more_at_b = if own.is_empty() { more_at_b.to_owned() } else { String::new() };
        let more = format!("{RUNS_VMS}{own}{}", more(folder.path()));
        let spec = TwoHostsSpec { more: &more, more_at_b: &more_at_b, ..TwoHostsSpec::default() };
        let mut hosts = TwoHosts::new(programs, folder.path(), spec).expect("two networks; run `make setup`, as root");
        for (side, programs) in Side::BOTH.into_iter().zip(programs_of_sides) {
            programs.into_iter().for_each(|programs| hosts.daemon_mut(side).use_programs(programs));
        }
        hosts.start().expect("both daemons start");
        hosts.pair().expect("paired");
        let network = GuestNetwork::new(&hosts, ["guest0"]).expect("a network");
        let load = Load { is_prefilled: true, rate: 200, workers: 4, read_percent: 50, ..Load::default() };
        let mut spec = GuestSpec::new().network(Network::default()).workload_socket().load(load);
        for (number, file) in files.iter().enumerate() {
            let file = folder.path().join(file);
            std::fs::create_dir_all(file.parent().expect("in a folder")).expect("a folder");
            create_filled(&file, DISK_BYTES).expect("filled");
            let name = format!("disk{number}");
            spec = spec.disk(match file.extension().is_some_and(|extension| extension == "qcow2") {
                true => Disk::qcow2(to_qcow2(&file), &name),
                false => Disk::raw(&file, &name),
            });
        }
        let mut guest = Guest::boot(spec.launcher(hosts.launcher(Side::A))).expect("QEMU starts; run `make setup`");
        guest.wait_for_load(HANG).expect("the load begins");
        let place = Self { guest, network, hosts, folder };
        let qmp = place.guest.qmp_socket().display().to_string();
        place.json(Side::A, &["vm", "add", "web1", "--qmp", &qmp]);
        place
    }

    pub(crate) fn json(&self, side: Side, words: &[&str]) -> Value {
        self.hosts.daemon(side).json(words).unwrap_or_else(|error| panic!("{words:?}: {error:#}\n{}", self.logs()))
    }

    pub(crate) fn logs(&self) -> String {
        Side::BOTH.map(|side| format!("--- {}\n{}", side.name(), self.hosts.daemon(side).log())).concat()
    }

    /// Where the sockets of the VM's QEMU are at a host that it was moved to.
    pub(crate) fn folder_of(&self, side: Side) -> PathBuf {
        self.hosts.daemon(side).api().parent().expect("in a folder").join("vm/web1")
    }

    /// Moves the VM from one host to the other, and follows it there.
    pub(crate) fn follow_move(&mut self, from: Side, to: Side) {
        let moved = self.json(from, &["vm", "move", "web1", "--to", to.name(), "--verify", "full"]);
        assert_eq!(moved["state"], "done", "{moved}\n{}", self.logs());
        let folder = self.folder_of(to);
        self.guest.leave();
        self.guest.follow(&folder).unwrap_or_else(|error| panic!("{error:#}\n{}", self.logs()));
        self.verify();
    }

    /// Waits until the VM at `side` goes through no volume of that host.
    pub(crate) fn wait_released(&self, side: Side) {
        wait_until(self, |place| place.json(side, &["volume", "ls"]).as_array().is_some_and(Vec::is_empty));
    }

    fn client(&self) -> NetworkClient {
        let network = Network::default();
        let namespace = self.network.namespace();
        NetworkClient::start(namespace, network.host(), ClientSpec::default(), HANG).expect("the guest answers")
    }

    /// The guest reads its whole disk, and everything is as it was written.
    pub(crate) fn verify(&mut self) {
        self.guest.send("verify").expect("sent");
        let verified = self.guest.wait_until(HANG, |event| matches!(event, Event::Verified { .. }));
        verified.unwrap_or_else(|error| panic!("{error:#}\n{}", self.logs()));
        let load_result = self.guest.load_result();
        assert!(load_result.wrong == 0 && load_result.complaints.is_empty(), "{load_result:?}");
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // QEMUs that a daemon has started outlive it.
        for side in Side::BOTH {
            let shown = self.hosts.daemon(side).json(&["vm", "ls"]).unwrap_or_default();
            let pids = shown.as_array().into_iter().flatten().filter_map(|vm| vm["pid"].as_u64());
            for pid in pids {
                // Its number may be another process's by now.
                let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                if String::from_utf8_lossy(&line).contains("qemu") {
                    let _ = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status();
                }
            }
        }
    }
}

/// Makes a qcow2 image in the place of a raw one, compressed: it grows with everything that is written.
fn to_qcow2(file: &Path) -> &Path {
    let raw = file.with_extension("filled");
    std::fs::rename(file, &raw).expect("renamed");
    let mut convert = std::process::Command::new("qemu-img");
    convert.args(["convert", "-c", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(file);
    assert!(convert.status().expect("qemu-img runs").success());
    file
}

pub(crate) fn wait_until(place: &Place, is_so: impl Fn(&Place) -> bool) {
    let start = Instant::now();
    while !is_so(place) {
        assert!(start.elapsed() < HANG, "it does not come to that\n{}", place.logs());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_vm_moves_to_another_host_while_a_client_asks_it_things() {
    let mut place = Place::new(2);
    let plan = place.json(Side::A, &["vm", "plan", "web1", "--to", "b", "--show-command"]);
    assert_eq!(plan["refusals"], Value::Array(Vec::new()), "{plan}");
    let client = place.client();
    std::thread::sleep(Duration::from_secs(1));
    place.json(Side::A, &["vm", "move", "web1", "--to", "b", "--verify", "full", "--detach"]);
    // The new QEMU listens before the guest is there.
    place.guest.follow(&place.folder_of(Side::B)).unwrap_or_else(|error| panic!("{error:#}\n{}", place.logs()));
    let moved = place.json(Side::A, &["vm", "watch", "web1"]);
    assert_eq!(moved["state"], "done", "{moved}\n{}", place.logs());
    println!("{}", serde_json::to_string_pretty(&moved).expect("JSON"));
    std::thread::sleep(Duration::from_secs(2));
    let report = client.finish();
    println!("{report}");
    assert_eq!((report.http_backwards, &report.tcp_broken), (0, &None), "{report}\n{}", place.logs());
    assert_eq!(place.network.side_of(&Network::default().mac).expect("asked"), Some(Side::B));
    place.verify();

    let there = place.json(Side::B, &["vm", "show", "web1"]);
    assert_eq!((&there["state"], there["disks"].as_array().map(Vec::len)), (&"running".into(), Some(2)), "{there}");
    let pid = there["pid"].as_u64().expect("it runs");
    let nice =
        std::process::Command::new("ps").args(["-o", "nice=", "-p", &pid.to_string()]).output().expect("it runs");
    assert_eq!(String::from_utf8_lossy(&nice.stdout).trim(), "0", "the guest gives way to others for good");
    let here = place.json(Side::A, &["vm", "show", "web1"]);
    assert_eq!((&here["state"], &here["host"]), (&"moved".into(), &"b".into()), "{here}");
    assert_eq!(place.json(Side::A, &["volume", "ls"]), Value::Array(Vec::new()), "its disks are let go");
    assert!(!place.guest.is_running(), "the QEMU at the source has ended");
}

#[test]
fn a_vm_whose_move_is_cancelled_goes_on_where_it_is_and_nothing_is_left_at_the_target() {
    let mut place = Place::new(1);
    let request = ["vm", "move", "web1", "--to", "b", "--bandwidth", "4MiB/s", "--detach"];
    place.json(Side::A, &request);
    std::thread::sleep(Duration::from_millis(500));
    let over = place.json(Side::A, &["vm", "cancel", "web1"]);
    assert_eq!(over["state"], "cancelled", "{over}\n{}", place.logs());
    let start = Instant::now();
    while place.json(Side::B, &["volume", "ls"]) != Value::Array(Vec::new())
        || place.json(Side::B, &["vm", "ls"]) != Value::Array(Vec::new())
    {
        assert!(start.elapsed() < HANG, "something is left at the target\n{}", place.logs());
        std::thread::sleep(Duration::from_millis(100));
    }
    place.verify();
    assert_eq!(place.json(Side::A, &["vm", "show", "web1"])["state"], "running");
    assert!(place.folder.path().join("disk0.raw").exists());
}

/// Whoever starts the VM's command line again would start a second guest: nobody may take such a move for one that is done with.
#[test]
fn an_old_image_that_keeps_its_name_is_told_after_a_move_that_counts() {
    let mut place = Place::on(|_| String::new(), &["images/disk0.raw"]);
    let images = place.folder.path().join("images");
    let is_kept = |flag: &str| {
        let changed = std::process::Command::new("chattr").arg(flag).arg(&images).status();
        assert!(changed.expect("chattr is there").success());
    };
    is_kept("+i");
    let host = place.hosts.daemon(Side::A);
    let moved = host.run(&["vm", "move", "web1", "--to", "b"]).expect("it runs");
    let shown = host.run(&["vm", "show", "web1"]).expect("it runs");
    is_kept("-i");
    let [said, complained] = [&moved.stdout, &moved.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(said.contains("web1 is at b"), "{said}{complained}\n{}", place.logs());
    assert!(!moved.status.success() && complained.contains("disk0.raw"), "{complained}");
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("unfinished") && shown.contains("disk0.raw"), "{shown}");
    let folder = place.folder_of(Side::B);
    place.guest.leave();
    place.guest.follow(&folder).unwrap_or_else(|error| panic!("{error:#}\n{}", place.logs()));
    place.verify();
}

#[test]
fn a_vm_whose_target_dies_as_it_is_announced_moves_there_afterwards_and_back() {
    let mut place = Place::new(1);
    let arrives = |place: &Place| place.json(Side::B, &["vm", "ls"]) != Value::Array(Vec::new());
    place.json(Side::A, &["vm", "move", "web1", "--to", "b", "--bandwidth", "4MiB/s", "--detach"]);
    wait_until(&place, arrives);
    place.hosts.daemon_mut(Side::B).kill();
    place.hosts.daemon_mut(Side::B).start().expect("it starts");
    // It has forgotten how the VM is started, and nobody asks it to run it.
    wait_until(&place, |place| !arrives(place));
    wait_until(&place, |place| place.json(Side::A, &["vm", "show", "web1"])["state"] == "running");
    let mut former = place.guest.folder().to_owned();
    for (from, to) in [(Side::A, Side::B), (Side::B, Side::A)] {
        let moved = place.json(from, &["vm", "move", "web1", "--to", to.name(), "--delete-source"]);
        assert_eq!(moved["state"], "done", "{moved}\n{}", place.logs());
        let folder = place.folder_of(to);
        place.guest.leave();
        place.guest.follow(&folder).unwrap_or_else(|error| panic!("{error:#}\n{}", place.logs()));
        assert!(former == place.guest.folder() || !former.exists(), "sockets are left in {}", former.display());
        former = folder;
        place.verify();
    }
}

#[test]
fn a_disk_that_both_hosts_reach_stays_where_it_is_and_another_is_copied() {
    let shares = |folder: &Path| format!("shared-storage = [{:?}]\n", folder.join("shared"));
    let mut place = Place::on(shares, &["shared/disk0.raw", "disk1.raw"]);
    let plan = place.json(Side::A, &["vm", "plan", "web1", "--to", "b"]);
    assert_eq!(plan["refusals"], Value::Array(Vec::new()), "{plan}");
    let handling = [0, 1].map(|disk| plan["disks"][disk]["handling"].clone());
    assert_eq!(handling, ["shared", "copied"], "{plan}");
    let image = place.folder.path().join("shared/disk0.raw");
    let same = std::fs::metadata(&image).expect("it is there").ino();
    let mut ways = vec![(Side::A, Side::B), (Side::B, Side::A)];
    // A move that is undone leaves the storage as it is.
    place.json(Side::A, &["vm", "move", "web1", "--to", "b", "--bandwidth", "4MiB/s", "--detach"]);
    wait_until(&place, |place| place.json(Side::B, &["volume", "ls"]).as_array().map(Vec::len) == Some(2));
    place.json(Side::A, &["vm", "cancel", "web1"]);
    wait_until(&place, |place| place.json(Side::B, &["volume", "ls"]) == Value::Array(Vec::new()));
    assert!(image.exists(), "what both hosts reach was removed");
    for (from, to) in ways.drain(..) {
        let moved = place.json(from, &["vm", "move", "web1", "--to", to.name()]);
        assert_eq!(moved["state"], "done", "{moved}\n{}", place.logs());
        let reports = moved["disks"].as_array().expect("disks").iter().map(|disk| &disk["report"]["bytes_copied"]);
        let copied: Vec<_> = reports.map(|bytes| bytes.as_u64().expect("a number")).collect();
        assert!(copied.contains(&0) && copied.iter().any(|bytes| *bytes > 0), "{moved}");
        let folder = place.folder_of(to);
        place.guest.leave();
        place.guest.follow(&folder).unwrap_or_else(|error| panic!("{error:#}\n{}", place.logs()));
        place.verify();
        assert_eq!(std::fs::metadata(&image).expect("it is where it was").ino(), same);
    }
    let left: Vec<_> = std::fs::read_dir(image.parent().expect("in a folder")).expect("a folder").flatten().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    let error = place.hosts.daemon(Side::A).json(&["vm", "move", "web1", "--to", "b", "--disk", "disk1=shared"]);
    let error = format!("{:#}", error.expect_err("a disk that the other host may not use stays where it is"));
    assert!(error.contains("shared-storage"), "{error}");
}

#[test]
fn a_disk_on_the_export_of_a_third_server_is_handed_over_there_and_back() {
    let address = "10.77.0.1:10899";
    let shares = |_: &Path| format!("shared-storage = [\"nbd://{address}/\"]\n");
    let mut place = Place::on(shares, &["disk0.raw"]);
    let mut server = place.hosts.command(Side::A, "nbdkit");
    let (ip, port) = address.split_once(':').expect("an address");
    server.args(["--foreground", "--ipaddr", ip, "--port", port, "memory", &DISK_BYTES.to_string()]);
    let mut server = server.spawn().expect("nbdkit starts; run `make setup`");
    let volume = "web1-disk0";
    let qmp = place.guest.qmp_socket().display().to_string();
    place.json(Side::A, &["adopt", "--qmp", &qmp, "--node", "disk0", "--name", volume]);
    let export = format!("nbd://{address}/");
    wait_until(&place, |place| {
        place.hosts.daemon(Side::A).json(&["move", volume, "--to", &export, "--no-persist"]).is_ok()
    });
    for (from, to) in [(Side::A, Side::B), (Side::B, Side::A)] {
        let moved = place.json(from, &["vm", "move", "web1", "--to", to.name()]);
        assert_eq!(moved["state"], "done", "{moved}\n{}", place.logs());
        assert_eq!(moved["disks"][0]["report"]["bytes_copied"], 0, "{moved}");
        let folder = place.folder_of(to);
        place.guest.leave();
        place.guest.follow(&folder).unwrap_or_else(|error| panic!("{error:#}\n{}", place.logs()));
        place.verify();
    }
    server.kill().expect("it runs");
    server.wait().expect("it ends");
}

/// What either host has read of the device before it came is old then, and the guest reads its whole disk: through the daemon first, and
/// through its own QEMU once that has the device itself.
#[test]
fn a_block_device_that_both_hosts_reach_is_handed_over_there_and_back() {
    let shares = |folder: &Path| format!("shared-storage = [{:?}]\n", TwoPageCaches::path_in(folder));
    let mut place = Place::on(shares, &["disk0.raw"]);
    let device = TwoPageCaches::make(place.folder.path());
    for side in Side::BOTH {
        let daemon = place.hosts.daemon_mut(side);
        daemon.kill();
        daemon.launcher.extend(device.enter(side));
        daemon.start().expect("it starts");
    }
    let volume = "web1-disk0";
    let qmp = place.guest.qmp_socket().display().to_string();
    place.json(Side::A, &["adopt", "--qmp", &qmp, "--node", "disk0", "--name", volume]);
    let to = format!("file:{},cache=page", device.path.display());
    place.json(Side::A, &["move", volume, "--to", &to, "--overwrite", "--no-persist"]);
    let plan = place.json(Side::A, &["vm", "plan", "web1", "--to", "b", "--no-persist"]);
    assert_eq!(plan["disks"][0]["handling"], "shared", "{plan}\n{}", place.logs());
    // The device keeps its name: whatever starts the VM at its host again would start a second guest on it.
    let refused =
        place.hosts.daemon(Side::A).json(&["vm", "move", "web1", "--to", "b"]).expect_err("nobody says who starts it");
    assert!(format!("{refused:#}").contains("--no-persist"), "{refused:#}");
    for (from, to) in [(Side::A, Side::B), (Side::B, Side::A)] {
        // As a look at its partitions does, or an earlier stay of the VM.
        device.read_all(to);
        place.verify();
        let moved = place.json(from, &["vm", "move", "web1", "--to", to.name(), "--no-persist"]);
        assert_eq!(moved["state"], "done", "{moved}\n{}", place.logs());
        assert_eq!(moved["disks"][0]["report"]["bytes_copied"], 0, "{moved}");
        let folder = place.folder_of(to);
        place.guest.leave();
        place.guest.follow(&folder).unwrap_or_else(|error| panic!("{error:#}\n{}", place.logs()));
        place.verify();
        place.wait_released(to);
        place.verify();
    }
}

/// One disk behind two block devices: as two hosts that share a LUN, each has a page cache of its own for it. Both see it at one path,
/// with one worldwide name.
struct TwoPageCaches {
    path: PathBuf,
    names: PathBuf,
    /// The kernel forgets what it has read of a block device that nobody has open.
    kept: [std::fs::File; 2],
    devices: [Loop; 2],
}

impl TwoPageCaches {
    fn path_in(folder: &Path) -> PathBuf {
        folder.join("lun")
    }

    fn make(folder: &Path) -> Self {
        let (file, path, names) = (folder.join("lun.raw"), Self::path_in(folder), folder.join("sysfs"));
        std::fs::File::create(&file).and_then(|file| file.set_len(DISK_BYTES)).expect("lengthened");
        std::fs::write(&path, "").expect("a place for it");
        std::fs::create_dir(&names).expect("made");
        std::fs::write(names.join("wwid"), "naa.600140512345678\n").expect("written");
        let devices = Side::BOTH.map(|_| Loop::over(&file, &[]));
        let kept = [0, 1].map(|number: usize| std::fs::File::open(&devices[number].device).expect("it is there"));
        Self { path, names, devices, kept }
    }

    /// What a program of `side` is started with so that it has that side's device at the path.
    fn enter(&self, side: Side) -> Vec<String> {
        let device = &self.devices[usize::from(side == Side::B)].device;
        let name = device.rsplit('/').next().expect("a name");
        let (path, names) = (self.path.display(), self.names.display());
        let mounts = format!(
            "mount --bind {device} {path} && mount --bind {names} /sys/devices/virtual/block/{name} && exec \"$@\""
        );
        ["sh", "-c", &mounts, "sh"].map(str::to_owned).to_vec()
    }

    /// Has the page cache of `side` read all of it.
    fn read_all(&self, side: Side) {
        let mut bytes = vec![0; usize::try_from(DISK_BYTES).expect("it fits")];
        self.kept[usize::from(side == Side::B)].read_exact_at(&mut bytes, 0).expect("read");
    }
}

/// A second host of the same storage knows nothing of layers: their bytes come along, and the guest writes through them at once.
#[test]
fn a_disk_with_snapshots_and_limits_goes_along_with_them_and_back() {
    let mut place = Place::new(1);
    let volume = "web1-disk0";
    let qmp = place.guest.qmp_socket().display().to_string();
    place.json(Side::A, &["adopt", "--qmp", &qmp, "--node", "disk0", "--name", volume]);
    place.json(Side::A, &["volume", "snapshot", "add", volume, "before"]);
    place.verify();
    place.json(Side::A, &["volume", "layer", "add", volume, "throttle", "--iops", "5000"]);
    for (from, to) in [(Side::A, Side::B), (Side::B, Side::A)] {
        let moved = place.json(from, &["vm", "move", "web1", "--to", to.name(), "--verify", "full"]);
        assert_eq!(moved["state"], "done", "{moved}\n{}", place.logs());
        let folder = place.folder_of(to);
        place.guest.leave();
        place.guest.follow(&folder).unwrap_or_else(|error| panic!("{error:#}\n{}", place.logs()));
        place.verify();
        let shown = place.json(to, &["volume", "layer", "ls", volume]);
        assert_eq!(shown.as_array().map(Vec::len), Some(2), "{shown}");
        // A daemon that starts anew serves it through the same layers.
        place.hosts.daemon_mut(to).kill();
        place.hosts.daemon_mut(to).start().expect("it starts");
        place.verify();
    }
    place.json(Side::A, &["volume", "snapshot", "rm", volume, "before"]);
    place.verify();
}

/// What a VM needs of the daemon that it has come to is nothing, once its disks are its own again.
#[test]
fn disks_are_given_back_at_the_target_whose_daemon_may_end_then_and_the_vm_moves_back() {
    let mut place = Place::new(2);
    place.follow_move(Side::A, Side::B);
    place.wait_released(Side::B);
    let shown = place.json(Side::B, &["vm", "show", "web1"]);
    assert!(
        shown["disks"].as_array().is_some_and(|disks| disks.iter().all(|disk| disk["volume"].is_null())),
        "{shown}"
    );
    place.hosts.daemon_mut(Side::B).kill();
    place.verify();
    place.hosts.daemon_mut(Side::B).start().expect("it starts");
    place.follow_move(Side::B, Side::A);
    place.wait_released(Side::A);
    place.hosts.daemon_mut(Side::A).kill();
    place.verify();
    place.hosts.daemon_mut(Side::A).start().expect("it starts");
}

/// Whoever wants them to stay says so, and gives them back later.
#[test]
fn disks_that_were_kept_are_given_back_when_somebody_asks_for_it() {
    let mut place = Place::new(1);
    let moved = place.json(Side::A, &["vm", "move", "web1", "--to", "b", "--keep-volumes"]);
    assert_eq!(moved["state"], "done", "{moved}\n{}", place.logs());
    let folder = place.folder_of(Side::B);
    place.guest.leave();
    place.guest.follow(&folder).unwrap_or_else(|error| panic!("{error:#}\n{}", place.logs()));
    let kept = place.json(Side::B, &["volume", "ls"]);
    assert_eq!(kept.as_array().map(Vec::len), Some(1), "{kept}");
    // All VMs that come here may run as one user: each has its own disks, and nobody else may.
    let export = kept[0]["export"].as_str().expect("it is served").replace("nbd+unix:///?", "nbd+unix:///web1-disk0?");
    let mut other = std::process::Command::new("qemu-io");
    let other = other.args(["-f", "raw", "-c", "read 0 512", &export]).output().expect("qemu-io runs");
    assert!(!other.status.success(), "another process reads the disk: {}", String::from_utf8_lossy(&other.stdout));
    place.json(Side::B, &["volume", "snapshot", "add", "web1-disk0", "before"]);
    place.verify();
    let refused = place.hosts.daemon(Side::B).json(&["vm", "release", "web1"]).expect_err("a snapshot holds its bytes");
    assert!(format!("{refused:#}").contains("snapshot rm web1-disk0 before"), "{refused:#}");
    place.json(Side::B, &["volume", "snapshot", "rm", "web1-disk0", "before"]);
    let released = place.json(Side::B, &["vm", "release", "web1"]);
    assert!(released["disks"][0]["volume"].is_null(), "{released}");
    place.verify();
}

/// From the distribution's QEMU to a later one at a host that has no other, and back.
#[test]
fn a_vm_moves_to_a_host_with_another_qemu_and_back() {
    let Some(other) = std::env::var_os("TRANSHUME_TEST_OTHER_QEMU") else {
        println!("not run: `make test-qemu10` names another QEMU");
        return;
    };
    let own = "/usr/bin/qemu-system-x86_64";
    let more_at_b = format!("vm-program-for = {{ {own:?} = {other:?} }}\n");
    let mut place = Place::with(|_| String::new(), &more_at_b, &["disk0.raw"]);
    let version = |place: &Place, side| place.json(side, &["vm", "show", "web1"])["facts"]["qemu"].clone();
    let before = version(&place, Side::A);
    for (from, to) in [(Side::A, Side::B), (Side::B, Side::A)] {
        let moved = place.json(from, &["vm", "move", "web1", "--to", to.name()]);
        assert_eq!(moved["state"], "done", "{moved}\n{}", place.logs());
        let folder = place.folder_of(to);
        place.guest.leave();
        place.guest.follow(&folder).unwrap_or_else(|error| panic!("{error:#}\n{}", place.logs()));
        place.verify();
        assert_eq!(version(&place, to) == before, to == Side::A, "its QEMU is the wrong one");
    }
}

#[test]
fn a_disk_in_a_container_goes_along_and_grows_at_the_other_host() {
    a_container_moves("disk0.qcow2", "copied");
}

#[test]
fn a_container_that_both_hosts_reach_stays_where_it_is_and_grows() {
    a_container_moves("shared/disk0.qcow2", "shared");
}

fn a_container_moves(file: &str, handling: &str) {
    let shares = |folder: &Path| format!("shared-storage = [{:?}]\n", folder.join("shared"));
    let mut place = Place::on(shares, &[file]);
    let length = |place: &Place| std::fs::metadata(place.folder.path().join(file)).expect("it is there").len();
    let before = length(&place);
    for (from, to) in [(Side::A, Side::B), (Side::B, Side::A)] {
        let plan = place.json(from, &["vm", "plan", "web1", "--to", to.name()]);
        assert_eq!(plan["disks"][0]["handling"], handling, "{plan}");
        let moved = place.json(from, &["vm", "move", "web1", "--to", to.name(), "--verify", "full"]);
        assert_eq!(moved["state"], "done", "{moved}\n{}", place.logs());
        let folder = place.folder_of(to);
        place.guest.leave();
        place.guest.follow(&folder).unwrap_or_else(|error| panic!("{error:#}\n{}", place.logs()));
        if to == Side::B {
            // It finds the room that it may grow into, after a start of the daemon, too.
            place.hosts.daemon_mut(Side::B).kill();
            place.hosts.daemon_mut(Side::B).start().expect("it starts");
        }
        place.verify();
    }
    assert!(handling == "copied" || length(&place) > before, "nothing was written to it");
}
