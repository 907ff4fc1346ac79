//! A real QEMU without an operating system, an export of ours, and the daemon's part of an adoption.

#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use backends::{BackendSpec, FileBackend, OpenOptions, QemuLocks};
use block::{BufferPool, Bytes, Device};
use env::{EnvRef, RealEnv};
use futures::future::BoxFuture;
use nbd::{Export, Exports, Limits, serve_connection};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use transhume_vm::{
    AdoptionRequest, CommandLine, ExportAddress, Graph, Plan, QemuProcess, Qmp, Sources, Step, Surroundings, adopt,
    release,
};

/// How long anything may take before the test counts as hung.
pub const HANG: Duration = Duration::from_secs(30);

pub const DISK_BYTES: u64 = 16 << 20;

/// A boot sector that for ever writes a counter to sector `64 + counter % 16384` and reads it back. It sends `.` to
/// port 0xe9 if it is the same, `E` if it is not, and `X` if the BIOS reports an error.
const LOAD: [u8; 144] = [
    0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, 0x88, 0x16, 0xf0, 0x7d, 0x66, 0x31, 0xed, 0x66,
    0x45, 0x66, 0x89, 0x2e, 0x00, 0x80, 0x66, 0x89, 0xe8, 0x66, 0x25, 0xff, 0x3f, 0x00, 0x00, 0x66, 0x83, 0xc0, 0x40,
    0x66, 0xa3, 0xe8, 0x7d, 0x66, 0xc7, 0x06, 0xec, 0x7d, 0x00, 0x00, 0x00, 0x00, 0x66, 0xc7, 0x06, 0xe0, 0x7d, 0x10,
    0x00, 0x01, 0x00, 0x66, 0xc7, 0x06, 0xe4, 0x7d, 0x00, 0x80, 0x00, 0x00, 0x8a, 0x16, 0xf0, 0x7d, 0xbe, 0xe0, 0x7d,
    0xb8, 0x00, 0x43, 0xcd, 0x13, 0x72, 0x37, 0x66, 0xc7, 0x06, 0xe0, 0x7d, 0x10, 0x00, 0x01, 0x00, 0x66, 0xc7, 0x06,
    0xe4, 0x7d, 0x00, 0x90, 0x00, 0x00, 0x8a, 0x16, 0xf0, 0x7d, 0xbe, 0xe0, 0x7d, 0xb8, 0x00, 0x42, 0xcd, 0x13, 0x72,
    0x17, 0x66, 0xa1, 0x00, 0x90, 0x66, 0x39, 0x06, 0x00, 0x80, 0x75, 0x06, 0xb0, 0x2e, 0xe6, 0xe9, 0xeb, 0x8e, 0xb0,
    0x45, 0xe6, 0xe9, 0xeb, 0x88, 0xb0, 0x58, 0xe6, 0xe9, 0xeb, 0x82,
];

pub fn real_env() -> EnvRef {
    Arc::new(RealEnv::new())
}

pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}: run `make setup`"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// How the disk is given to QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given {
    /// `-blockdev` for file and format.
    Blockdev,
    /// `-drive`.
    Drive,
    /// `-blockdev` of the file alone.
    FileAlone,
}

#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub given: Given,
    pub format: &'static str,
    pub iothread: bool,
}

/// What the disk hangs on in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bus {
    VirtioBlk,
    VirtioScsi,
    /// The AHCI controller of the machine.
    Ide,
}

impl Bus {
    /// The devices that make `disk0` the guest's disk.
    fn devices(self, iothread: bool) -> Vec<String> {
        let iothread = if iothread { ",iothread=io0" } else { "" };
        match self {
            Self::VirtioBlk => vec![format!("virtio-blk-pci,drive=disk0,id=vda,bootindex=0,bus=port0{iothread}")],
            Self::VirtioScsi => vec![
                format!("virtio-scsi-pci,id=scsi0,bus=port0{iothread}"),
                "scsi-hd,drive=disk0,id=vda,bootindex=0,bus=scsi0.0".to_owned(),
            ],
            Self::Ide => vec!["ide-hd,drive=disk0,id=vda,bootindex=0,bus=ide.0".to_owned()],
        }
    }
}

/// A block device over a file, gone when this is dropped.
pub struct Loop(pub PathBuf);

impl Loop {
    pub fn over(file: &Path) -> Self {
        Self(run("losetup", &["--find", "--show", &file.display().to_string()]).trim().into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run("losetup", &["--detach", &self.0.display().to_string()]);
    }
}

pub const KINDS: [Kind; 10] = [
    Kind { given: Given::Blockdev, format: "raw", iothread: false },
    Kind { given: Given::Blockdev, format: "raw", iothread: true },
    Kind { given: Given::Blockdev, format: "qcow2", iothread: false },
    Kind { given: Given::Blockdev, format: "qcow2", iothread: true },
    Kind { given: Given::Drive, format: "raw", iothread: false },
    Kind { given: Given::Drive, format: "raw", iothread: true },
    Kind { given: Given::Drive, format: "qcow2", iothread: false },
    Kind { given: Given::Drive, format: "qcow2", iothread: true },
    Kind { given: Given::FileAlone, format: "raw", iothread: false },
    Kind { given: Given::FileAlone, format: "raw", iothread: true },
];

/// Each way to name a disk with each format, and one of them in an iothread.
pub const USUAL: [Kind; 6] = [KINDS[0], KINDS[2], KINDS[4], KINDS[6], KINDS[7], KINDS[8]];

/// The others, all of them in an iothread.
pub const RARE: [Kind; 4] = [KINDS[1], KINDS[3], KINDS[5], KINDS[9]];

/// A directory with a disk in it whose boot sector is [`LOAD`].
fn boot_image(kind: Kind) -> (TempDir, PathBuf) {
    let directory = tempfile::Builder::new().prefix("vm-test-").tempdir().expect("a temporary directory");
    let raw = directory.path().join("boot.raw");
    let mut bytes = vec![0_u8; DISK_BYTES as usize];
    bytes[..LOAD.len()].copy_from_slice(&LOAD);
    bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
    std::fs::write(&raw, bytes).expect("the image is written");
    let image = directory.path().join(format!("disk.{}", kind.format));
    let (from, to) = (raw.display().to_string(), image.display().to_string());
    run("qemu-img", &["convert", "-f", "raw", "-O", kind.format, &from, &to]);
    std::fs::remove_file(raw).expect("the boot image goes");
    (directory, image)
}

/// A QEMU that is killed when the test is done with it.
pub struct Vm {
    pub directory: TempDir,
    pub child: Child,
    pub monitor: PathBuf,
    pub image: PathBuf,
    pub kind: Kind,
}

impl Drop for Vm {
    fn drop(&mut self) {
        // Killing fails only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Vm {
    pub fn start(kind: Kind) -> Self {
        Self::start_with(kind, &[])
    }

    pub fn start_with(kind: Kind, more: &[&str]) -> Self {
        let (directory, image) = boot_image(kind);
        Self::start_on(directory, &image, "file", kind, Bus::VirtioBlk, more)
    }

    /// With the disk on another bus.
    pub fn start_on_bus(kind: Kind, bus: Bus) -> Self {
        let (directory, image) = boot_image(kind);
        Self::start_on(directory, &image, "file", kind, bus, &[])
    }

    /// With the disk in a block device.
    pub fn start_on_block_device(kind: Kind) -> (Self, Loop) {
        let (directory, image) = boot_image(kind);
        let device = Loop::over(&image);
        (Self::start_on(directory, &device.0, "host_device", kind, Bus::VirtioBlk, &[]), device)
    }

    fn start_on(directory: TempDir, image: &Path, driver: &str, kind: Kind, bus: Bus, more: &[&str]) -> Self {
        let (image, to) = (image.to_owned(), image.display().to_string());
        let monitor = directory.path().join("qmp");
        let mut arguments: Vec<String> =
            ["-accel", "tcg", "-machine", "q35", "-nodefaults", "-display", "none"].map(str::to_owned).to_vec();
        let mut add = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
        add("-qmp", format!("unix:{},server=on,wait=off", monitor.display()));
        add("-object", "iothread,id=io0".to_owned());
        add("-device", "pcie-root-port,id=port0".to_owned());
        match kind.given {
            Given::Blockdev => {
                let file = json!({
                    "driver": driver, "node-name": "file0", "filename": to, "discard": "unmap", "aio": "threads",
                    "cache": { "direct": false, "no-flush": true }, "auto-read-only": true, "read-only": false,
                });
                let more = if kind.format == "qcow2" { ",l2-cache-size=1048576,pass-discard-other=on" } else { "" };
                add("-blockdev", file.to_string());
                add(
                    "-blockdev",
                    format!(
                        "driver={},node-name=disk0,file=file0,discard=unmap,detect-zeroes=unmap,cache.no-flush=on{more}",
                        kind.format
                    ),
                );
            }
            Given::Drive => {
                let options =
                    "if=none,id=disk0,cache=unsafe,discard=unmap,detect-zeroes=on,throttling.iops-total=20000";
                add("-drive", format!("file={to},format={},{options}", kind.format));
            }
            Given::FileAlone => {
                add(
                    "-blockdev",
                    format!(
                        "{driver},node-name=disk0,filename={to},discard=unmap,detect-zeroes=unmap,cache.no-flush=on"
                    ),
                );
            }
        }
        for device in bus.devices(kind.iothread) {
            add("-device", device);
        }
        add("-chardev", format!("file,id=console,path={}", directory.path().join("console").display()));
        add("-device", "isa-debugcon,iobase=0xe9,chardev=console".to_owned());
        arguments.extend(more.iter().map(|argument| (*argument).to_owned()));
        let log = std::fs::File::create(directory.path().join("log")).expect("a log");
        let child = Command::new("qemu-system-x86_64")
            .args(&arguments)
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("qemu-system-x86_64 runs: run `make setup`");
        Self { directory, child, monitor, image, kind }
    }

    pub async fn qmp(&self) -> Qmp {
        let started = Instant::now();
        loop {
            match Qmp::connect(&self.monitor, real_env()).await {
                Ok(qmp) => {
                    let version = format!("{}.{}", qmp.version().major, qmp.version().minor);
                    let wanted = std::env::var("TRANSHUME_TEST_QEMU").unwrap_or_default();
                    assert!(version.starts_with(&wanted), "QEMU {version} runs where {wanted} is to be tried");
                    return qmp;
                }
                Err(error) => assert!(started.elapsed() < HANG, "{error}; QEMU says: {}", self.log()),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    pub fn sources(&self) -> Sources {
        let command_line = CommandLine::of_process(self.child.id()).expect("QEMU lives");
        Sources { command_line, process: QemuProcess::of(self.child.id()), ..Sources::default() }
    }

    /// What the guest has said of its load.
    pub fn console(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("console")).unwrap_or_default()
    }

    /// Waits until the guest has done more of its load, and fails if it saw an error.
    pub async fn load_goes_on(&self) {
        let before = self.console().len();
        let started = Instant::now();
        while self.console().len() < before + 20 {
            assert!(started.elapsed() < HANG, "the guest's load stands still; QEMU says: {}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let console = self.console();
        if let Some(at) = console.find(['E', 'X']) {
            let what = if console[at..].starts_with('E') { "stale data" } else { "an error" };
            let (kind, rounds) = (self.kind, console.len());
            let after: String = console[at..].chars().take(40).collect();
            panic!("{kind:?}: the guest saw {what} after {at} rounds of {rounds}: {after}; QEMU says: {}", self.log());
        }
    }

    pub fn request(&self, server: &Server) -> AdoptionRequest {
        AdoptionRequest {
            node: "disk0".to_owned(),
            volume: "web".to_owned(),
            export: server.address.clone(),
            accept_option_loss: false,
            format: None,
            reconnect_seconds: 60,
        }
    }
}

struct One(Arc<Export>);

impl Exports for One {
    fn find(&self, name: &str) -> Option<Arc<Export>> {
        (name == self.0.name()).then(|| Arc::clone(&self.0))
    }
    fn list(&self) -> Vec<Arc<Export>> {
        vec![Arc::clone(&self.0)]
    }
}

/// An export of an image over our NBD server.
pub struct Server {
    pub address: ExportAddress,
    pub export: Arc<Export>,
    task: JoinHandle<()>,
    connections: Arc<std::sync::Mutex<Vec<JoinHandle<()>>>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Server {
    pub async fn start(vm: &Vm) -> Self {
        Self::start_at(&vm.image, &vm.directory.path().join("nbd"), vm.kind.format == "qcow2").await
    }

    pub async fn start_at(image: &Path, socket: &Path, grows: bool) -> Self {
        let env = real_env();
        let spec: BackendSpec = format!("file:{}", image.display()).parse().expect("a backend's name");
        let options = if grows { OpenOptions::growing(Bytes::gib(1)) } else { OpenOptions::default() };
        let backend = FileBackend::open(&spec, &options, &*env).await.expect("the image opens");
        let device = Device::new("image", backend);
        let pool = BufferPool::new(Bytes::mib(64));
        let export = Export::new("web", pool, move || device.clone());
        let export = Arc::new(export);
        // The socket of an earlier server, if there was one.
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).expect("the socket is free");
        let exports: Arc<dyn Exports> = Arc::new(One(Arc::clone(&export)));
        let connections = Arc::new(std::sync::Mutex::new(Vec::new()));
        let opened = Arc::clone(&connections);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (exports, env) = (Arc::clone(&exports), Arc::clone(&env));
                let serving = tokio::spawn(async move {
                    serve_connection(stream, exports, env, Limits::default()).await;
                });
                opened.lock().expect("no panic").push(serving);
            }
        });
        let address = ExportAddress { socket: socket.to_owned(), name: "web".to_owned() };
        Self { address, export, task, connections }
    }

    /// What a killed daemon leaves: a socket that nobody listens on.
    pub fn stop(&self) {
        self.task.abort();
        for connection in self.connections.lock().expect("no panic").drain(..) {
            connection.abort();
        }
    }
}

/// The daemon's part: the locks and the state of the export.
pub struct Daemon {
    pub image: PathBuf,
    pub locks: Option<QemuLocks>,
    pub is_connected: bool,
    /// So often it says that it is not, although it is: it has yet to count the connection.
    pub counts_late: u32,
    /// Dies before this step.
    pub dies_before: Option<usize>,
    /// Takes so long before every reopen.
    pub dawdles: Duration,
    pub taken: Vec<String>,
}

impl Daemon {
    pub fn new(image: &Path) -> Self {
        Self {
            image: image.to_owned(),
            locks: None,
            is_connected: true,
            counts_late: 0,
            dies_before: None,
            dawdles: Duration::ZERO,
            taken: Vec::new(),
        }
    }

    pub fn dying_before(image: &Path, step: usize) -> Self {
        Self { dies_before: Some(step), ..Self::new(image) }
    }
}

impl Surroundings for Daemon {
    fn take_locks(&mut self) -> BoxFuture<'_, io::Result<()>> {
        Box::pin(async {
            if self.locks.is_none() {
                self.locks = Some(QemuLocks::take_beside(&self.image).map_err(io::Error::other)?);
            }
            Ok(())
        })
    }

    fn drop_locks(&mut self) -> BoxFuture<'_, io::Result<()>> {
        self.locks = None;
        Box::pin(async { Ok(()) })
    }

    fn is_export_connected(&mut self) -> bool {
        let is_counted = self.counts_late == 0;
        self.counts_late = self.counts_late.saturating_sub(1);
        self.is_connected && is_counted
    }

    fn before(&mut self, step: usize, what: &Step) -> BoxFuture<'_, io::Result<()>> {
        self.taken.push(what.describe());
        let dies = self.dies_before == Some(step);
        let dawdles = if matches!(what, Step::Reopen { .. }) { self.dawdles } else { Duration::ZERO };
        Box::pin(async move {
            tokio::time::sleep(dawdles).await;
            if dies { Err(io::Error::other("killed by the test")) } else { Ok(()) }
        })
    }
}

/// A VM, the export of its disk, and a plan to adopt it.
pub struct Setup {
    pub qmp: Qmp,
    pub plan: Plan,
    pub daemon: Daemon,
    pub server: Server,
    pub vm: Vm,
}

impl Setup {
    /// Planned, not yet adopted.
    pub async fn planned(vm: Vm) -> Self {
        let server = Server::start(&vm).await;
        let qmp = vm.qmp().await;
        let plan = Plan::adopt(&qmp, &vm.sources(), &vm.request(&server)).await;
        let plan = plan.unwrap_or_else(|error| panic!("{:?}: {error}", vm.kind));
        let daemon = Daemon::new(&vm.image);
        Self { qmp, plan, daemon, server, vm }
    }

    /// Adopted.
    pub async fn adopted(vm: Vm) -> Self {
        let mut setup = Self::planned(vm).await;
        setup.adopt().await;
        setup
    }

    /// Adopted, by a VM whose guest works on its disk.
    pub async fn adopted_under_load(kind: Kind) -> Self {
        let vm = Vm::start(kind);
        vm.load_goes_on().await;
        Self::adopted(vm).await
    }

    pub async fn adopt(&mut self) -> Option<Duration> {
        let ran = adopt(&self.qmp, &self.plan, &mut self.daemon).await;
        ran.unwrap_or_else(|error| panic!("{:?}: {error}: {}", self.vm.kind, self.vm.log()))
    }

    /// Back to the image that it was adopted from.
    pub async fn release(&mut self) -> Option<Duration> {
        let back = Plan::release(&self.plan.disk, &self.vm.image, None, true);
        let ran = release(&self.qmp, &back, &mut self.daemon).await;
        ran.unwrap_or_else(|error| panic!("{:?}: {error}: {}", self.vm.kind, self.vm.log()))
    }
}

/// The nodes of a disk with every option that QMP tells, in an order of their own; names only where somebody gave them.
pub async fn options_shown(qmp: &Qmp) -> Vec<Value> {
    let nodes = qmp.execute("query-named-block-nodes", json!({})).await.expect("QEMU answers");
    let is_ours = |name: &str| name.starts_with("th-") || name.starts_with('#');
    let mut shown: Vec<Value> = Vec::new();
    for node in nodes.as_array().expect("a list") {
        let mut node = node.clone();
        let object = node.as_object_mut().expect("an object");
        // The image grows, and nodes without names have new names afterwards.
        object.remove("image");
        let name = object["node-name"].as_str().unwrap_or_default().to_owned();
        if is_ours(&name) {
            object.remove("node-name");
        }
        shown.push(node);
    }
    shown.sort_by_key(Value::to_string);
    // The device's backend has limits, a throttle group and error policies of its own.
    let devices = qmp.execute("query-block", json!({})).await.expect("QEMU answers");
    for device in devices.as_array().expect("a list") {
        let mut device = device.clone();
        let inserted = device["inserted"].as_object_mut().expect("an object");
        inserted.remove("image");
        inserted.remove("node-name");
        // The guest's driver chooses this one.
        inserted["cache"].as_object_mut().expect("an object").remove("writeback");
        let path = device["qdev"].as_str().unwrap_or_default().to_owned();
        shown.push(device);
        for property in ["werror", "rerror", "write-cache", "discard", "serial"] {
            let arguments = json!({ "path": path, "property": property });
            shown.push(qmp.execute("qom-get", arguments).await.unwrap_or_default());
        }
    }
    shown
}

pub async fn node_names(qmp: &Qmp) -> Vec<String> {
    let graph = Graph::read(qmp).await.expect("QEMU answers");
    let mut names: Vec<String> = graph.nodes.into_iter().map(|node| node.name).collect();
    names.sort();
    names
}
