//! A QEMU for tests.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{HANG, World};

/// A QEMU without a guest system: its disk is there, its monitor answers. It is gone when this is dropped.
pub(crate) struct Qemu {
    child: Child,
    pub(crate) monitor: PathBuf,
}

impl Qemu {
    pub(crate) fn start(world: &World, arguments: &[&str]) -> Self {
        let monitor = world.path("qmp");
        // An earlier QEMU that was killed has left it.
        let _ = std::fs::remove_file(&monitor);
        let child = Command::new("qemu-system-x86_64")
            .args(["-M", "q35,accel=tcg", "-nodefaults", "-display", "none", "-m", "64"])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("qemu-system-x86_64 is there: run `make setup`");
        let qemu = Self { child, monitor };
        let start = Instant::now();
        while !qemu.monitor.exists() {
            assert!(start.elapsed() < HANG, "QEMU does not come up");
            std::thread::sleep(Duration::from_millis(20));
        }
        qemu
    }

    /// A raw disk at a named node, as libvirt and scripts make them.
    pub(crate) fn raw(world: &World, image: &Path) -> Self {
        Self::raw_with(world, image, "")
    }

    /// The same, with more options of its file node.
    pub(crate) fn raw_with(world: &World, image: &Path, more: &str) -> Self {
        let file = format!("driver=file,node-name=file0,filename={},discard=unmap{more}", image.display());
        let format = "driver=raw,node-name=disk0,file=file0,discard=unmap,detect-zeroes=unmap";
        Self::start(world, &["-blockdev", &file, "-blockdev", format, "-device", "virtio-blk-pci,drive=disk0,id=vda"])
    }

    /// With two adopted disks, `system` and `data`.
    pub(crate) fn with_two_disks(world: &World) -> Self {
        let system = world.image("web1.img", 12 << 20, 65536);
        let data = world.image("web1-data.img", 20 << 20, 65536);
        let node = |number: u32, image: &Path| {
            let file = format!("driver=file,node-name=file{number},filename={},discard=unmap", image.display());
            (file, format!("driver=raw,node-name=disk{number},file=file{number}"))
        };
        let ((file0, disk0), (file1, disk1)) = (node(0, &system), node(1, &data));
        let mut arguments = Vec::new();
        for blockdev in [&file0, &disk0, &file1, &disk1] {
            arguments.extend(["-blockdev", blockdev]);
        }
        arguments.extend([
            "-device",
            "virtio-blk-pci,drive=disk0,id=vda",
            "-device",
            "virtio-blk-pci,drive=disk1,id=vdb",
        ]);
        let qemu = Self::start(world, &arguments);
        for (node, name) in [("disk0", "system"), ("disk1", "data")] {
            world.json(&["adopt", "--qmp", &qemu.text(), "--node", node, "--name", name]);
        }
        qemu
    }

    pub(crate) fn text(&self) -> String {
        self.monitor.display().to_string()
    }

    /// What a QMP command returns, over a connection of its own.
    pub(crate) fn ask(&self, command: &str, arguments: Value) -> Value {
        let mut stream = UnixStream::connect(&self.monitor).expect("connects");
        stream.set_read_timeout(Some(HANG)).expect("set");
        let mut lines = BufReader::new(stream.try_clone().expect("cloned")).lines();
        lines.next().expect("a greeting").expect("read");
        let mut execute = |command: &str, arguments: Value| {
            let line = json!({ "execute": command, "arguments": arguments }).to_string();
            stream.write_all(line.as_bytes()).expect("sent");
            loop {
                let line = lines.next().expect("an answer").expect("read");
                let answer: Value = serde_json::from_str(&line).expect("JSON");
                if answer.get("return").is_some() || answer.get("error").is_some() {
                    return answer;
                }
            }
        };
        execute("qmp_capabilities", json!({}));
        execute(command, arguments)["return"].clone()
    }

    /// The file below the disk's format node.
    pub(crate) fn file_of(&self, node: &str) -> String {
        let nodes = self.ask("query-named-block-nodes", json!({ "flat": true }));
        let find = nodes.as_array().expect("a list").iter().find(|found| found["node-name"] == node).cloned();
        find.expect("the node")["file"].as_str().expect("text").to_owned()
    }

    /// Writes `byte` all over the first MiB, as the guest would, through the disk's node.
    pub(crate) fn write(&self, byte: u8) {
        self.write_to("vda", byte);
    }

    /// The same to the disk of the device `id`.
    pub(crate) fn write_to(&self, id: &str, byte: u8) {
        let command = format!("qemu-io -d /machine/peripheral/{id}/virtio-backend \"write -P {byte} 0 1M\"");
        let said = self.ask("human-monitor-command", json!({ "command-line": command }));
        // What went well it says on its standard output, what went wrong here.
        assert_eq!(said, "", "the guest could not write");
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
