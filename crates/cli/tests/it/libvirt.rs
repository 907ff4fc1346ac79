//! Disks of domains of a real libvirt: one of its own, in a mount namespace, so that the machine's is left alone.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::support::pair::wait_until;
use crate::support::{HANG, World, tool};
use serde_json::{Value, json};

/// Who QEMU runs as.
const NOBODY: u32 = 65534;

/// Everything that libvirt keeps goes into `$1`; its sockets are seen outside of the namespace too. A KVM that opens and
/// then hangs, as some virtual machines have it, would hold up libvirt's look at QEMU: it is not needed.
const START: &str = r#"
for pair in etc:/etc/libvirt run:/run/libvirt lib:/var/lib/libvirt log:/var/log/libvirt cache:/var/cache/libvirt; do
    mkdir -p "$1/${pair%%:*}" "${pair#*:}"
    mount --bind "$1/${pair%%:*}" "${pair#*:}"
done
: > "$1/no-kvm"
chmod 000 "$1/no-kvm"
[ ! -e /dev/kvm ] || mount --bind "$1/no-kvm" /dev/kvm
# Debian's build looks for its own user before it reads that another one is to be used, and only libvirt-daemon-system makes it.
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
END
cat > /etc/libvirt/qemu.conf <<END
user = "nobody"
group = "nogroup"
security_driver = "none"
stdio_handler = "file"
cgroup_controllers = []
namespaces = []
END
exec libvirtd --pid-file "$1/pid"
"#;

/// A libvirt daemon, gone with its domains when this is dropped.
struct Libvirt {
    daemon: Option<Child>,
    directory: PathBuf,
    uri: String,
}

impl Libvirt {
    /// Runs it in `world`'s directory, and makes `world`'s daemon use it.
    fn new(world: &mut World) -> Self {
        let directory = world.path("libvirt");
        std::fs::create_dir(&directory).expect("created");
        let uri = format!("qemu+unix:///system?socket={}", directory.join("libvirt-sock").display());
        // QEMU's user is to reach images and sockets.
        for folder in [directory.as_path(), &world.path("")] {
            std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).expect("opened");
        }
        world.daemon.launcher = vec!["env".to_owned(), format!("LIBVIRT_DEFAULT_URI={uri}")];
        let mut libvirt = Self { daemon: None, directory, uri };
        libvirt.start();
        libvirt
    }

    fn start(&mut self) {
        assert!(Path::new("/usr/sbin/libvirtd").exists(), "no libvirt: run `make setup`");
        let log = std::fs::File::create(self.directory.join("log.txt")).expect("a log");
        let daemon = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-ec", START, "sh"])
            .arg(&self.directory)
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::null())
            .stderr(log)
            .spawn();
        self.daemon = Some(daemon.expect("unshare runs"));
        let start = Instant::now();
        while !self.try_virsh(&["list"]).0 {
            let log = std::fs::read_to_string(self.directory.join("log.txt")).unwrap_or_default();
            assert!(start.elapsed() < HANG, "libvirt does not come up: {log}");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }

    /// `kill -9`; its domains live on.
    fn kill(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }

    fn try_virsh(&self, arguments: &[&str]) -> (bool, String) {
        let output = Command::new("virsh").args(["--connect", &self.uri]).args(arguments).output();
        let output = output.expect("virsh is there: run `make setup`");
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&said).into_owned())
    }

    fn virsh(&self, arguments: &[&str]) -> String {
        let (success, said) = self.try_virsh(arguments);
        assert!(success, "virsh {arguments:?}: {said}");
        said
    }

    /// Defines and starts a domain with a raw disk (vda) and a qcow2 disk (vdb).
    fn domain(&self, world: &World, name: &str, raw: &Path, qcow2: &Path) {
        let disk = |driver: &str, image: &Path, target: &str| {
            format!(
                "<disk type='file' device='disk'><driver name='qemu' {driver}/><source file='{}'/>\
                 <target dev='{target}' bus='virtio'/></disk>",
                image.display()
            )
        };
        let raw = disk("type='raw' cache='none' discard='unmap' detect_zeroes='unmap'", raw, "vda");
        let qcow2 = disk("type='qcow2' cache='writeback'", qcow2, "vdb");
        let xml = format!(
            "<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='q35'>hvm</type></os><devices>{raw}{qcow2}\
             <emulator>/usr/bin/qemu-system-x86_64</emulator><controller type='usb' model='none'/>\
             <memballoon model='none'/></devices></domain>"
        );
        let file = world.path("domain.xml");
        std::fs::write(&file, xml).expect("written");
        self.virsh(&["define", "--validate", &file.display().to_string()]);
        self.virsh(&["start", name]);
    }

    fn ask(&self, domain: &str, command: &str, arguments: Value) -> Value {
        let line = json!({ "execute": command, "arguments": arguments }).to_string();
        let said = self.virsh(&["qemu-monitor-command", domain, &line]);
        let answer: Value = serde_json::from_str(said.trim()).expect("JSON");
        assert!(answer.get("return").is_some(), "{command}: {answer}");
        answer["return"].clone()
    }

    /// What QMP tells of the domain's nodes, but for what a move changes.
    fn options(&self, domain: &str) -> Vec<Value> {
        let mut nodes = self.ask(domain, "query-named-block-nodes", json!({ "flat": true }));
        let mut nodes = nodes.as_array_mut().expect("a list").clone();
        for node in &mut nodes {
            let node = node.as_object_mut().expect("an object");
            node.remove("image");
            node.remove("file");
        }
        nodes.sort_by_key(|node| node["node-name"].to_string());
        nodes
    }

    /// The file that a disk of the domain lies in, as QEMU says.
    fn file_of(&self, domain: &str, device: &str) -> String {
        let disks = self.ask(domain, "query-block", json!({}));
        let disk = disks.as_array().expect("a list").iter().find(|disk| {
            let qdev = disk["qdev"].as_str().unwrap_or_default();
            qdev.contains(device)
        });
        disk.expect("the disk")["inserted"]["file"].as_str().expect("text").to_owned()
    }

    /// Writes `byte` all over the first MiB of a disk, as the guest would.
    fn write(&self, domain: &str, device: &str, byte: u8) {
        let command = format!("qemu-io -d /machine/peripheral/{device}/virtio-backend \"write -P {byte} 0 1M\"");
        let said = self.ask(domain, "human-monitor-command", json!({ "command-line": command }));
        assert_eq!(said, "", "the guest could not write");
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        if self.daemon.is_none() {
            self.start();
        }
        let (_, names) = self.try_virsh(&["list", "--name"]);
        for name in names.split_whitespace() {
            self.try_virsh(&["destroy", name]);
        }
        self.kill();
    }
}

/// A libvirt, a running domain `web1`, and a daemon of ours.
fn world() -> (World, Libvirt, PathBuf, PathBuf) {
    let mut world = World::without_daemon();
    let libvirt = Libvirt::new(&mut world);
    let raw = world.image("disk.img", 16 << 20, 65536);
    let qcow2 = world.path("disk.qcow2");
    tool("qemu-img", &["create", "-q", "-f", "qcow2", &qcow2.display().to_string(), "64M"]);
    libvirt.domain(&world, "web1", &raw, &qcow2);
    world.start();
    (world, libvirt, raw, qcow2)
}

#[test]
fn disks_of_a_domain_as_it_is_are_adopted_moved_and_released_and_it_starts_from_the_new_place() {
    let (mut world, libvirt, raw, qcow2) = world();
    let checked = world.json(&["adopt", "--check", "--libvirt", "web1"]);
    let adoptable = checked.as_array().expect("a list").iter().filter(|disk| disk["adoptable"] == true).count();
    assert_eq!(adoptable, 2, "{checked}");
    let before = libvirt.options("web1");
    // QEMU may not enter this one: what is in it is handed over open.
    let vault = world.path("vault");
    std::fs::create_dir(&vault).expect("created");
    std::fs::set_permissions(&vault, std::fs::Permissions::from_mode(0o700)).expect("closed");
    for (target, device, source, name) in
        [("vda", "virtio-disk0", &raw, "new.img"), ("vdb", "virtio-disk1", &qcow2, "vault/new.qcow2")]
    {
        world.json(&["adopt", "--libvirt", "web1", "--node", target, "--name", "web1"]);
        assert!(libvirt.file_of("web1", device).starts_with("nbd+unix:"), "QEMU does not go through the daemon");
        libvirt.write("web1", device, 0xa1);
        world.kill();
        world.start();
        let to = world.path(name);
        let report = world.json(&["move", "web1", "--to", &format!("file:{}", to.display()), "--verify", "full"]);
        assert_eq!((&report["state"], &report["equal"]), (&"done".into(), &true.into()), "{report}");
        libvirt.write("web1", device, 0xb2);
        let tomorrow = libvirt.virsh(&["dumpxml", "--inactive", "web1"]);
        assert!(tomorrow.contains(&to.display().to_string()), "{tomorrow}");
        assert!(!tomorrow.contains(&format!("{}'", source.display())), "the stale disk is started: {tomorrow}");
        world.json(&["release", "web1"]);
        let expected = if to.starts_with(&vault) { "/dev/fdset/0".to_owned() } else { to.display().to_string() };
        assert_eq!(libvirt.file_of("web1", device), expected);
        assert_eq!(libvirt.virsh(&["domstate", "web1"]).trim(), "running");
        libvirt.write("web1", device, 0xc3);
        assert_eq!(std::fs::metadata(&to).expect("there").uid(), NOBODY);
    }
    assert_eq!(libvirt.options("web1"), before);
    assert_eq!(world.json(&["volume", "ls"]).as_array().map(Vec::len), Some(0));
    libvirt.virsh(&["destroy", "web1"]);
    std::fs::set_permissions(&vault, std::fs::Permissions::from_mode(0o755)).expect("opened");
    libvirt.virsh(&["start", "web1"]);
    assert_eq!(libvirt.options("web1"), before);
    for (device, name) in [("virtio-disk0", "new.img"), ("virtio-disk1", "vault/new.qcow2")] {
        assert_eq!(libvirt.file_of("web1", device), world.text(name));
    }
    libvirt.virsh(&["destroy", "web1"]);
    assert!(std::fs::read(world.path("new.img")).expect("read")[..1 << 20].iter().all(|byte| *byte == 0xc3));
    tool("qemu-img", &["check", "-q", &world.text("vault/new.qcow2")]);
}

#[test]
fn a_libvirt_that_is_away_a_domain_that_does_not_run_and_a_block_job_of_somebody_else_are_told() {
    let (world, mut libvirt, raw, _) = world();
    let adopt = |domain: &str, node: &str, code: i32, part: &str| {
        world.refused(&["adopt", "--libvirt", domain, "--node", node, "--name", "web1"], code, part);
    };
    adopt("nosuch", "vda", 21, "failed to get domain 'nosuch'");
    adopt("web1", "vdz", 23, "vdz");
    world.json(&["adopt", "--libvirt", "web1", "--node", "vda", "--name", "web1"]);
    libvirt.kill();
    world.refused(&["release", "web1"], 22, "failed to connect to the hypervisor");
    assert_eq!(world.json(&["volume", "ls"])[0]["vm"]["state"], "adopted", "the disk was let go of");
    libvirt.start();
    libvirt.write("web1", "virtio-disk0", 0x11);

    let target = format!("file:{}", world.text("new.img"));
    let job = world.json(&["move", "web1", "--to", &target, "--bandwidth", "512KiB/s", "--detach"]);
    // Whoever listens does so a moment after the move has begun.
    std::thread::sleep(std::time::Duration::from_secs(1));
    let null = json!({ "driver": "null-co", "node-name": "elsewhere", "size": 16 << 20 });
    libvirt.ask("web1", "blockdev-add", null);
    let mirror = json!({ "job-id": "theirs", "device": "libvirt-2-format", "target": "elsewhere", "sync": "none" });
    libvirt.ask("web1", "blockdev-mirror", mirror);
    let over = world.wait_for_job(job["id"].as_u64().expect("a number"));
    assert!(over["state"] == "failed" && over.to_string().contains("block job"), "{over}");
    libvirt.ask("web1", "block-job-cancel", json!({ "device": "theirs", "force": true }));
    world.json(&["release", "web1"]);
    assert_eq!(libvirt.file_of("web1", "virtio-disk0"), raw.display().to_string());
    libvirt.write("web1", "virtio-disk0", 0x22);
    libvirt.virsh(&["destroy", "web1"]);
    adopt("web1", "vda", 21, "does not run");
    assert!(std::fs::read(&raw).expect("read")[..1 << 20].iter().all(|byte| *byte == 0x22));
}

#[test]
fn a_domain_that_ends_while_its_disk_is_adopted_is_started_again_by_libvirt_alone() {
    let (world, libvirt, raw, _) = world();
    world.json(&["adopt", "--libvirt", "web1", "--node", "vda", "--name", "web1"]);
    libvirt.write("web1", "virtio-disk0", 0x11);
    libvirt.virsh(&["destroy", "web1"]);
    wait_until("the disk is let go", || {
        world.json(&["volume", "ls"]).as_array().is_some_and(Vec::is_empty).then_some(())
    });
    libvirt.virsh(&["start", "web1"]);
    assert_eq!(libvirt.file_of("web1", "virtio-disk0"), raw.display().to_string());
    libvirt.write("web1", "virtio-disk0", 0x22);
}
