//! A domain of libvirt goes to another host by libvirt's own migration: two libvirts, each in a mount namespace of its own, and two
//! daemons, each beside one of them.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use transhume_guest::{
    BootFiles, Event, Guest, GuestSpec, Load, MemoryLoad, Side, TwoHosts, TwoHostsSpec, create_filled,
};

const DISK_BYTES: u64 = 32 << 20;
const HANG: Duration = Duration::from_secs(120);
/// Libvirt knows one path of a migration's socket for both hosts: each has its own folder there.
const SOCKETS: &str = "/run/transhume-test-sockets";
/// The same for the socket of the guest's workload.
const GUESTS: &str = "/run/transhume-test-guests";

/// Everything that libvirt keeps goes into `$1`; `$2` is the host's identity, and `$3` and `$4` who QEMU runs as. QEMUs of one UUID are
/// told apart by that. See the tests of adoption for the rest.
const START: &str = r#"
for pair in etc:/etc/libvirt run:/run/libvirt lib:/var/lib/libvirt log:/var/log/libvirt cache:/var/cache/libvirt \
    sockets:/run/transhume-test-sockets guests:/run/transhume-test-guests; do
    mkdir -p "$1/${pair%%:*}" "${pair#*:}"
    mount --bind "$1/${pair%%:*}" "${pair#*:}"
done
chown "$3:$4" "$1/guests"
: > "$1/no-kvm"
chmod 000 "$1/no-kvm"
[ ! -e /dev/kvm ] || mount --bind "$1/no-kvm" /dev/kvm
for file in passwd group; do
    cp "/etc/$file" "$1/$file"
    mount --bind "$1/$file" "/etc/$file"
done
grep -q ^libvirt-qemu: /etc/passwd || echo 'libvirt-qemu:x:64055:64055::/nonexistent:/usr/sbin/nologin' >> /etc/passwd
grep -q ^libvirt-qemu: /etc/group || echo 'libvirt-qemu:x:64055:' >> /etc/group
cat > /etc/libvirt/libvirtd.conf <<END
unix_sock_dir = "$1"
auth_unix_rw = "none"
auth_unix_ro = "none"
host_uuid = "$2"
END
cat > /etc/libvirt/qemu.conf <<END
user = "$3"
group = "$4"
security_driver = "none"
remember_owner = 0
stdio_handler = "file"
cgroup_controllers = []
namespaces = []
END
exec libvirtd --pid-file "$1/pid"
"#;

/// Who a host's QEMU runs as.
fn user_of(side: Side) -> (&'static str, &'static str) {
    match side {
        Side::A => ("nobody", "nogroup"),
        Side::B => ("games", "games"),
    }
}

/// A libvirt daemon, gone with its domains when this is dropped.
struct Libvirt {
    daemon: Child,
    folder: PathBuf,
}

impl Libvirt {
    fn start(folder: &Path, side: Side) -> Self {
        assert!(Path::new("/usr/sbin/libvirtd").exists(), "no libvirt: run `make setup`");
        std::fs::create_dir_all(folder).expect("created");
        let (user, group) = user_of(side);
        let number = if side == Side::A { 1 } else { 2 };
        let log = std::fs::File::create(folder.join("log.txt")).expect("a log");
        let daemon = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-ec", START, "sh"])
            .arg(folder)
            .args([&format!("7ab4ec6e-0b5c-4d0e-9a57-00000000000{number}"), user, group])
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::null())
            .stderr(log)
            .spawn();
        let libvirt = Self { daemon: daemon.expect("unshare runs"), folder: folder.to_owned() };
        let start = Instant::now();
        while !libvirt.try_virsh(&["list"]).0 {
            assert!(start.elapsed() < HANG, "libvirt does not come up: {}", libvirt.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        libvirt
    }

    /// `kill -9`, and a start anew beside `neighbour`, which is in the same mount namespace. Its domains live on meanwhile.
    fn restart(&mut self, neighbour: u32) {
        // It may have ended by itself.
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
        std::thread::sleep(Duration::from_secs(1));
        let log = std::fs::File::options().append(true).open(self.folder.join("log.txt")).expect("a log");
        let daemon = Command::new("nsenter")
            .args([&format!("--mount=/proc/{neighbour}/ns/mnt"), "libvirtd", "--pid-file"])
            .arg(self.folder.join("pid"))
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::null())
            .stderr(log)
            .spawn();
        self.daemon = daemon.expect("nsenter runs");
    }

    fn uri(&self) -> String {
        format!("qemu+unix:///system?socket={}", self.folder.join("libvirt-sock").display())
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log.txt")).unwrap_or_default()
    }

    fn try_virsh(&self, words: &[&str]) -> (bool, String) {
        let output = Command::new("virsh").args(["--connect", &self.uri()]).args(words).output();
        let output = output.expect("virsh is there: run `make setup`");
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&said).trim().to_owned())
    }

    fn virsh(&self, words: &[&str]) -> String {
        let (success, said) = self.try_virsh(words);
        assert!(success, "virsh {words:?}: {said}");
        said
    }

    /// The names of all domains.
    fn domains(&self) -> String {
        self.virsh(&["list", "--all", "--name"])
    }

    /// What runs a program beside it.
    fn beside(&self) -> Vec<String> {
        let namespace = format!("--mount=/proc/{}/ns/mnt", self.daemon.id());
        vec!["nsenter".to_owned(), namespace]
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        let (_, names) = self.try_virsh(&["list", "--name"]);
        for name in names.split_whitespace() {
            self.try_virsh(&["destroy", name]);
        }
        // It may have ended by itself.
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// Two paired hosts with a libvirt each, and a domain on the first.
struct Place {
    guest: Guest,
    libvirts: [Libvirt; 2],
    hosts: TwoHosts,
    folder: tempfile::TempDir,
}

impl Place {
    fn new(more: &'static str) -> Self {
        let folder = tempfile::Builder::new().prefix("dm").tempdir().expect("a temporary directory");
        // QEMU's users are to reach images and sockets.
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).expect("opened");
        let programs = Path::new(env!("CARGO_BIN_EXE_transhumed")).parent().expect("in a directory");
        let spec = TwoHostsSpec { more, ..TwoHostsSpec::default() };
        let mut hosts = TwoHosts::new(programs, folder.path(), spec).expect("two networks; run `make setup`, as root");
        let libvirts = Side::BOTH.map(|side| Libvirt::start(&folder.path().join(side.name()).join("lv"), side));
        for (side, libvirt) in Side::BOTH.into_iter().zip(&libvirts) {
            let config = folder.path().join(side.name()).join("config.toml");
            let text = std::fs::read_to_string(&config).expect("read");
            let text = format!("socket-dir = \"{SOCKETS}\"\n{text}vm-user = \"{}\"\n", user_of(side).0);
            std::fs::write(&config, text).expect("written");
            let mut launcher = libvirt.beside();
            launcher.extend(hosts.launcher(side));
            launcher.extend(["env".to_owned(), format!("LIBVIRT_DEFAULT_URI={}", libvirt.uri())]);
            hosts.daemon_mut(side).launcher = launcher;
        }
        hosts.start().expect("both daemons start");
        hosts.pair().expect("paired");
        // Little is written, because an emulated guest of QEMU 7.2 loses writes to its memory in a migration that is slow
        // beside them, without us, too.
        let load = Load { is_prefilled: true, rate: 20, workers: 4, read_percent: 50, ..Load::default() };
        let memory = MemoryLoad { rewrite_mib_per_second: 1, ..MemoryLoad::default() };
        let spec = GuestSpec::new().load(load).memory_load(memory);
        // Each libvirt gives the files to its QEMU's user: each has its own.
        let boots = libvirts.each_ref().map(|libvirt| {
            Guest::started_elsewhere(&spec, &libvirt.folder.join("guests")).expect("a guest's files; run `make setup`")
        });
        let [(guest, boot), _] = boots;
        let mut place = Self { guest, libvirts, hosts, folder };
        place.start_domain(&boot);
        place.json(Side::A, &["vm", "add", "web1", "--libvirt", "guest1"]);
        place
    }

    fn start_domain(&mut self, boot: &BootFiles) {
        let disk = self.folder.path().join("disk.raw");
        create_filled(&disk, DISK_BYTES).expect("filled");
        let xml = format!(
            "<domain type='qemu'><name>guest1</name><memory unit='MiB'>256</memory><vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='pc'>hvm</type><kernel>{}</kernel><initrd>{}</initrd>\
             <cmdline>{}</cmdline></os><on_reboot>destroy</on_reboot><devices>\
             <emulator>/usr/bin/qemu-system-x86_64</emulator>\
             <disk type='file' device='disk'><driver name='qemu' type='raw' cache='none' io='native' discard='unmap'/>\
             <source file='{}'/><target dev='vda' bus='virtio'/></disk>\
             <serial type='file'><source path='{GUESTS}/console.log'/><target port='0'/></serial>\
             <serial type='unix'><source mode='bind' path='{GUESTS}/workload.sock'/><target port='1'/></serial>\
             <controller type='usb' model='none'/><memballoon model='none'/></devices></domain>",
            in_guests(&boot.kernel),
            in_guests(&boot.initramfs),
            boot.command_line,
            disk.display(),
        );
        let file = self.folder.path().join("domain.xml");
        std::fs::write(&file, xml).expect("written");
        let libvirt = &self.libvirts[0];
        libvirt.virsh(&["define", "--validate", &file.display().to_string()]);
        libvirt.virsh(&["start", "guest1"]);
        let folder = self.guest_folder(Side::A);
        self.guest.follow(&folder).expect("it listens");
        self.guest.wait_for_load(HANG).expect("the load begins");
    }

    fn libvirt(&self, side: Side) -> &Libvirt {
        &self.libvirts[usize::from(side == Side::B)]
    }

    /// Where the guest's sockets are at a host, as seen from outside.
    fn guest_folder(&self, side: Side) -> PathBuf {
        self.libvirt(side).folder.join("guests")
    }

    fn json(&self, side: Side, words: &[&str]) -> Value {
        self.hosts.daemon(side).json(words).unwrap_or_else(|error| panic!("{words:?}: {error:#}\n{}", self.logs()))
    }

    /// What a command that fails says.
    fn refused(&self, words: &[&str]) -> String {
        let output = self.hosts.daemon(Side::A).run(words).expect("it answers");
        assert!(!output.status.success(), "{words:?} was not refused");
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat()
    }

    fn logs(&self) -> String {
        let of = |side: Side| {
            let domain = self.libvirt(side).folder.join("log/qemu/guest1.log");
            let domain = std::fs::read_to_string(domain).unwrap_or_default();
            let (daemon, libvirt) = (self.hosts.daemon(side).log(), self.libvirt(side).log());
            format!("--- {}\n{daemon}\n--- its libvirt\n{libvirt}\n{domain}", side.name())
        };
        Side::BOTH.map(of).concat()
    }

    /// The guest reads its whole disk, and everything is as it was written.
    fn verify(&mut self) {
        self.guest.send("verify").expect("sent");
        let verified = self.guest.wait_until(HANG, |event| matches!(event, Event::Verified { .. }));
        verified.unwrap_or_else(|error| panic!("{error:#}\n{}", self.logs()));
        let load_result = self.guest.load_result();
        let (is_whole, said) =
            (load_result.wrong == 0 && load_result.complaints.is_empty(), format!("{load_result:?}"));
        assert!(is_whole, "{said}\n{}", self.logs());
    }

    /// Moves the domain, and looks at both hosts afterwards.
    fn move_it(&mut self, from: Side, to: Side) {
        self.json(from, &["vm", "move", "web1", "--to", to.name(), "--verify", "full", "--detach"]);
        // The other host has the definition already, and the domain goes as it is now.
        let described = format!("on its way to {}", to.name());
        self.libvirt(from).virsh(&["desc", "guest1", "--live", "--config", &described]);
        let folder = self.guest_folder(to);
        // The new QEMU listens before the guest is there, and starts when little is left of the disks.
        let socket = folder.join("workload.sock");
        wait_until(self, |_| socket.exists());
        self.guest.follow(&folder).unwrap_or_else(|error| panic!("{error:#}\n{}", self.logs()));
        let moved = self.json(from, &["vm", "watch", "web1"]);
        assert_eq!(moved["state"], "done", "{moved}\n{}", self.logs());
        println!("{}", serde_json::to_string_pretty(&moved).expect("JSON"));
        self.verify();

        assert_eq!(self.libvirt(from).domains(), "", "libvirt has it still\n{}", self.logs());
        assert_eq!(self.libvirt(to).virsh(&["domstate", "guest1"]), "running");
        assert_eq!(self.libvirt(to).virsh(&["list", "--persistent", "--name"]), "guest1");
        assert_eq!(self.libvirt(to).virsh(&["desc", "guest1"]), described);
        let there = self.json(to, &["vm", "show", "web1"]);
        assert_eq!((&there["state"], there["disks"].as_array().map(Vec::len)), (&"running".into(), Some(1)), "{there}");
        let here = self.json(from, &["vm", "show", "web1"]);
        assert_eq!((&here["state"], &here["host"]), (&"moved".into(), &to.name().into()), "{here}");
        assert_eq!(self.json(from, &["volume", "ls"]), Value::Array(Vec::new()), "its disks are let go");
    }

    /// Begins a slow move to the second host, and returns in the middle of its memory.
    fn move_until_memory(&self) {
        self.json(Side::A, &["vm", "move", "web1", "--to", "b", "--bandwidth", "4MiB/s", "--detach"]);
        let is_migrating = |place: &Self| {
            place.libvirt(Side::B).try_virsh(&["domstate", "--reason", "guest1"]).1 == "paused (migrating)"
        };
        wait_until(self, is_migrating);
        std::thread::sleep(Duration::from_secs(1));
        assert!(is_migrating(self), "the memory goes too fast\n{}", self.logs());
    }

    /// Whether the move has failed, and no other one is under way.
    fn has_failed(&self) -> bool {
        let shown = self.json(Side::A, &["vm", "show", "web1"]);
        shown["state"] != "moving" && shown["last_move"]["state"] == "failed"
    }

    /// The domain runs at the first host as if nothing had been, and nothing is left at the second.
    fn is_undone(&mut self) {
        wait_until(self, |place| {
            place.json(Side::B, &["volume", "ls"]) == Value::Array(Vec::new())
                && place.json(Side::B, &["vm", "ls"]) == Value::Array(Vec::new())
                && place.libvirt(Side::B).try_virsh(&["list", "--all", "--name"]) == (true, String::new())
        });
        wait_until(self, |place| place.json(Side::A, &["vm", "show", "web1"])["state"] == "running");
        assert_eq!(self.libvirt(Side::A).virsh(&["domstate", "guest1"]), "running");
        self.verify();
    }
}

const BOTH_MAY: &str = "libvirt-vms = true\n";

/// The path of a guest's file as libvirt sees it.
fn in_guests(file: &Path) -> String {
    format!("{GUESTS}/{}", file.file_name().expect("a file").to_string_lossy())
}

fn wait_until(place: &Place, is_so: impl Fn(&Place) -> bool) {
    let start = Instant::now();
    while !is_so(place) {
        assert!(start.elapsed() < HANG, "it does not come to that\n{}", place.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_domain_moves_to_another_host_and_is_libvirts_there() {
    let mut place = Place::new(BOTH_MAY);
    let plan = place.json(Side::A, &["vm", "plan", "web1", "--to", "b"]);
    assert_eq!(plan["refusals"], Value::Array(Vec::new()), "{plan}");
    place.move_it(Side::A, Side::B);
    assert!(place.folder.path().join("disk.raw.moved-1").exists() || !place.folder.path().join("disk.raw").exists());
    let next = place.libvirt(Side::B).virsh(&["dumpxml", "--inactive", "guest1"]);
    assert!(next.contains("protocol='nbd'") && !next.contains("disk.raw"), "{next}");

    // libvirt 9 cannot have a disk wait for its export: the daemon sees to that.
    for _ in 0..2 {
        place.hosts.daemon_mut(Side::B).kill();
        std::thread::sleep(Duration::from_millis(500));
        place.hosts.daemon_mut(Side::B).start().expect("it starts");
        place.verify();
    }

    place.guest.leave();
    place.move_it(Side::B, Side::A);

    // A QEMU that libvirt starts later waits for its disks, too.
    let told = |place: &Place| place.logs().matches("its QEMU waits for its disks").count();
    let before = told(&place);
    for words in [["destroy", "guest1"], ["start", "guest1"]] {
        place.libvirt(Side::A).virsh(&words);
    }
    wait_until(&place, |place| told(place) > before);
}

#[test]
fn a_host_whose_libvirt_is_not_for_others_refuses_a_domain_and_it_goes_on() {
    let mut place = Place::new("");
    let plan = place.refused(&["vm", "plan", "web1", "--to", "b"]);
    assert!(plan.contains("libvirt-vms"), "{plan}");
    let plan = place.refused(&["vm", "plan", "web1", "--to", "b", "--channels", "4"]);
    assert!(plan.contains("one connection"), "{plan}");
    let moved = place.refused(&["vm", "move", "web1", "--to", "b"]);
    assert!(moved.contains("libvirt-vms"), "{moved}");
    place.is_undone();
}

#[test]
fn a_domain_that_the_targets_libvirt_refuses_goes_on_and_libvirts_words_are_told() {
    let mut place = Place::new(BOTH_MAY);
    // libvirt looks for what a domain is booted from when it starts it.
    let kernel = place.guest_folder(Side::B).join("kernel");
    std::fs::remove_file(&kernel).expect("removed");
    let moved = place.refused(&["vm", "move", "web1", "--to", "b"]);
    assert!(moved.contains("libvirt could not migrate guest1") && moved.contains("kernel"), "{moved}");
    place.is_undone();

    // A domain of somebody else with that name is left alone.
    let definition = place.folder.path().join("domain.xml");
    place.libvirt(Side::B).virsh(&["define", &definition.display().to_string()]);
    let moved = place.refused(&["vm", "move", "web1", "--to", "b"]);
    assert!(moved.contains("has a domain guest1"), "{moved}");
    assert_eq!(place.libvirt(Side::B).domains(), "guest1");
}

#[test]
fn a_domain_whose_source_daemon_dies_while_its_memory_goes_runs_on() {
    let mut place = Place::new(BOTH_MAY);
    let autostarts = |place: &Place| place.libvirt(Side::A).virsh(&["dominfo", "guest1"]).contains("enable");
    place.libvirt(Side::A).virsh(&["autostart", "guest1"]);
    assert!(autostarts(&place));
    place.move_until_memory();
    assert!(!autostarts(&place), "a boot of this host starts what the other one has");
    place.hosts.daemon_mut(Side::A).kill();
    place.hosts.daemon_mut(Side::A).start().expect("it starts");
    place.is_undone();
    wait_until(&place, autostarts);
    place.move_it(Side::A, Side::B);
}

/// Deaths of libvirt and kills at a moment: the slowest tests of all. A source's daemon that dies while the memory goes, both refusals and
/// the way there and back decide on main; so do the simulator's scenarios of machines, which kill at any await.
mod long {
    use super::*;

    #[test]
    fn a_domain_whose_target_dies_or_whose_move_is_cancelled_while_its_memory_goes_runs_on() {
        let mut place = Place::new(BOTH_MAY);
        place.move_until_memory();
        place.hosts.daemon_mut(Side::B).kill();
        wait_until(&place, Place::has_failed);
        place.hosts.daemon_mut(Side::B).start().expect("it starts");
        place.is_undone();

        place.move_until_memory();
        let over = place.json(Side::A, &["vm", "cancel", "web1"]);
        assert_eq!(over["state"], "cancelled", "{over}\n{}", place.logs());
        place.is_undone();
    }

    #[test]
    fn a_domain_whose_libvirt_dies_at_either_host_while_its_memory_goes_runs_on() {
        let mut place = Place::new(BOTH_MAY);
        for side in Side::BOTH {
            place.move_until_memory();
            let neighbour = place.hosts.daemon(side).pid().expect("it runs");
            place.libvirts[usize::from(side == Side::B)].restart(neighbour);
            wait_until(&place, Place::has_failed);
            place.is_undone();
        }
    }

    #[test]
    fn a_domain_whose_source_daemon_dies_at_the_switchover_runs_at_one_host() {
        dies_at_the_switchover(|from, _| from, &[0, 40, 80, 120, 300]);
    }

    #[test]
    fn a_domain_whose_target_daemon_dies_at_the_switchover_runs_at_one_host() {
        dies_at_the_switchover(|_, to| to, &[0, 50, 100, 200]);
    }

    /// Moves the domain again and again, and kills a daemon so many milliseconds after the guest was stopped. Some kills must strike before
    /// the commit and some after it: a few more come as early, or as late, as that takes.
    fn dies_at_the_switchover(which: impl Fn(Side, Side) -> Side, delays: &[u64]) {
        const MORE: usize = 6;
        let mut place = Place::new(BOTH_MAY);
        let mut at = Side::A;
        let (mut before, mut after) = (0, 0);
        for round in 0..delays.len() + MORE {
            let delay = match delays.get(round) {
                Some(delay) => *delay,
                None if before == 0 => 0,
                None if after == 0 => 1000,
                None => break,
            };
            let to = if at == Side::A { Side::B } else { Side::A };
            if is_at_target_after_a_death(&mut place, (at, to), which(at, to), delay) {
                after += 1;
                at = to;
            } else {
                before += 1;
            }
            place.verify();
        }
        assert!(before > 0 && after > 0, "{before} kills struck before the commit and {after} after it");
    }

    /// Moves the domain, and kills the daemon at `dies` so many milliseconds after the guest was stopped. Says whether it went on at the target.
    fn is_at_target_after_a_death(place: &mut Place, (at, to): (Side, Side), dies: Side, delay: u64) -> bool {
        place.json(at, &["vm", "move", "web1", "--to", to.name(), "--detach"]);
        wait_until(place, |place| place.libvirt(at).try_virsh(&["domstate", "guest1"]).1 != "running");
        std::thread::sleep(Duration::from_millis(delay));
        place.hosts.daemon_mut(dies).kill();
        place.hosts.daemon_mut(dies).start().expect("it starts");
        let runs = |place: &Place, side| place.libvirt(side).try_virsh(&["domstate", "guest1"]).1 == "running";
        let runs_only = |place: &Place, side, other| runs(place, side) && place.libvirt(other).domains().is_empty();
        wait_until(place, |place| runs_only(place, at, to) || runs_only(place, to, at));
        let is_at_target = runs(place, to);
        println!("{delay} ms: it runs at {}", if is_at_target { "the target" } else { "the source" });
        if is_at_target {
            wait_until(place, |place| place.json(at, &["vm", "show", "web1"])["state"] == "moved");
            place.guest.leave();
            let folder = place.guest_folder(to);
            place.guest.follow(&folder).expect("it listens");
        } else {
            wait_until(place, |place| place.json(at, &["vm", "show", "web1"])["state"] == "running");
            wait_until(place, |place| place.json(to, &["volume", "ls"]) == Value::Array(Vec::new()));
        }
        is_at_target
    }
}
