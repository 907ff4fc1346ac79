//! What guest to boot.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::{Acceleration, Load, MemoryLoad, Network, Workload};

/// A guest that is still to be booted.
#[derive(Clone, Debug)]
pub struct GuestSpec {
    pub(crate) disks: Vec<Disk>,
    pub(crate) workload: Workload,
    pub(crate) acceleration: Acceleration,
    pub(crate) memory_mib: u32,
    pub(crate) cores: u32,
    pub(crate) machine: String,
    pub(crate) has_iothread: bool,
    pub(crate) arguments: Vec<String>,
    pub(crate) memory_load: Option<MemoryLoad>,
    pub(crate) network: Option<Network>,
    pub(crate) has_workload_socket: bool,
    pub(crate) launcher: Vec<String>,
    pub(crate) tracked_memory: Option<TrackedMemory>,
}

/// What a guest's memory needs so that the parallel memory engine can copy it.
#[derive(Clone, Debug)]
pub(crate) struct TrackedMemory {
    /// The file that it is, on tmpfs.
    file: PathBuf,
    /// The library that has the kernel track it.
    library: PathBuf,
    /// Where that library waits to be asked.
    socket: PathBuf,
}

impl TrackedMemory {
    /// What QEMU is started with, behind the launcher.
    pub(crate) fn environment(&self) -> [String; 3] {
        let Self { library, socket, .. } = self;
        let variables = [("LD_PRELOAD", library), ("TRANSHUME_PRELOAD_SOCKET", socket)];
        let [library, socket] = variables.map(|(name, path)| format!("{name}={}", path.display()));
        ["env".to_owned(), library, socket]
    }

    /// Words of QEMU's command line.
    pub(crate) fn words(&self, memory_mib: u32) -> [String; 4] {
        let file = self.file.display();
        let backend = format!("memory-backend-file,id=ram,size={memory_mib}M,share=on,mem-path={file}");
        ["-object".to_owned(), backend, "-machine".to_owned(), "memory-backend=ram".to_owned()]
    }
}

impl Default for GuestSpec {
    fn default() -> Self {
        Self {
            disks: Vec::new(),
            workload: Workload::Idle,
            acceleration: Acceleration::Tcg,
            memory_mib: 256,
            cores: 1,
            machine: "pc".into(),
            has_iothread: false,
            arguments: Vec::new(),
            memory_load: None,
            network: None,
            has_workload_socket: false,
            launcher: Vec::new(),
            tracked_memory: None,
        }
    }
}

impl GuestSpec {
    /// A guest of one core and 256 MiB, emulated, without disks, that does nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a data disk; the first one is `/dev/vda` (or `/dev/sda`).
    #[must_use]
    pub fn disk(mut self, disk: Disk) -> Self {
        self.disks.push(disk);
        self
    }

    /// Runs the verifying load once booted, and powers off when it is finished.
    #[must_use]
    pub fn load(mut self, load: Load) -> Self {
        self.workload = Workload::Load(load);
        self
    }

    /// Has the load rewrite and check memory too; the only thing that it does if [`GuestSpec::load`] is not called. A
    /// script is not joined by it.
    #[must_use]
    pub fn memory_load(mut self, load: MemoryLoad) -> Self {
        self.memory_load = Some(load);
        self
    }

    /// Runs a shell script once booted, and powers off when it ends. Its input and output are the line that
    /// [`Guest::send`](crate::Guest::send) and [`Event::Line`](crate::Event::Line) carry.
    #[must_use]
    pub fn script(mut self, script: &str) -> Self {
        self.workload = Workload::Script(script.into());
        self
    }

    /// How it is executed; emulated unless said otherwise.
    #[must_use]
    pub fn acceleration(mut self, acceleration: Acceleration) -> Self {
        self.acceleration = acceleration;
        self
    }

    /// How many cores it has.
    #[must_use]
    pub fn cores(mut self, cores: u32) -> Self {
        self.cores = cores;
        self
    }

    /// How much memory it has, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        u64::from(self.memory_mib) << 20
    }

    /// How much memory it has, 256 MiB unless said otherwise. Its system takes about 60 MiB of it.
    #[must_use]
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Joins it to a network; it answers there from boot on.
    #[must_use]
    pub fn network(mut self, network: Network) -> Self {
        self.network = Some(network);
        self
    }

    /// Makes the workload's line a socket, `workload.sock` in the guest's folder, instead of QEMU's input and output.
    /// Only such a guest can be followed to another QEMU: see [`Guest::follow`](crate::Guest::follow).
    #[must_use]
    pub fn workload_socket(mut self) -> Self {
        self.has_workload_socket = true;
        self
    }

    /// A program and its arguments that become QEMU, as `ip netns exec NAME`.
    #[must_use]
    pub fn launcher(mut self, words: impl IntoIterator<Item = String>) -> Self {
        self.launcher = words.into_iter().collect();
        self
    }

    /// Puts its memory into `file`, which is to be on tmpfs, and starts QEMU with the `library` of `crates/preload`, which waits at
    /// `socket`: so the parallel memory engine can copy it.
    #[must_use]
    pub fn tracked_memory(mut self, file: &Path, library: &Path, socket: &Path) -> Self {
        let [file, library, socket] = [file, library, socket].map(Path::to_owned);
        self.tracked_memory = Some(TrackedMemory { file, library, socket });
        self
    }

    /// QEMU's machine type, `pc` unless said otherwise.
    #[must_use]
    pub fn machine(mut self, machine: &str) -> Self {
        self.machine = machine.into();
        self
    }

    /// Serves every disk from an IO thread named `iothread0`.
    #[must_use]
    pub fn iothread(mut self) -> Self {
        self.has_iothread = true;
        self
    }

    /// Adds words to QEMU's command line.
    #[must_use]
    pub fn arguments<'a>(mut self, words: impl IntoIterator<Item = &'a str>) -> Self {
        self.arguments.extend(words.into_iter().map(str::to_owned));
        self
    }
}

/// A disk of the guest.
#[derive(Clone, Debug)]
pub struct Disk {
    pub(crate) path: PathBuf,
    pub(crate) name: String,
    pub(crate) format: String,
    pub(crate) attachment: Attachment,
    pub(crate) bus: Bus,
    pub(crate) file_options: Map<String, Value>,
    pub(crate) format_options: Map<String, Value>,
    pub(crate) drive_options: String,
    pub(crate) device_options: String,
}

/// How QEMU is told of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// `-blockdev` twice: the format node is called NAME, its file node NAME-file.
    Blockdev,
    /// `-drive if=none,id=NAME`: node names are QEMU's own (`#block123`).
    Drive,
}

/// The controller that the guest sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bus {
    /// `virtio-blk-pci`
    VirtioBlk,
    /// `scsi-hd` on a `virtio-scsi-pci`
    VirtioScsi,
}

impl Disk {
    /// A raw file, given with `-blockdev`; its device is called `NAME-device`.
    #[must_use]
    pub fn raw(path: impl AsRef<Path>, name: &str) -> Self {
        Self {
            path: path.as_ref().into(),
            name: name.into(),
            format: "raw".into(),
            attachment: Attachment::Blockdev,
            bus: Bus::VirtioBlk,
            file_options: Map::new(),
            format_options: Map::new(),
            drive_options: String::new(),
            device_options: String::new(),
        }
    }

    /// A qcow2 file, given with `-blockdev`.
    #[must_use]
    pub fn qcow2(path: impl AsRef<Path>, name: &str) -> Self {
        Self { format: "qcow2".into(), ..Self::raw(path, name) }
    }

    /// Given with `-drive` instead, with more options as they stand there (`cache=none,discard=unmap`, or nothing).
    #[must_use]
    pub fn with_drive(mut self, options: &str) -> Self {
        self.attachment = Attachment::Drive;
        self.drive_options = options.into();
        self
    }

    /// The controller that the guest sees.
    #[must_use]
    pub fn bus(mut self, bus: Bus) -> Self {
        self.bus = bus;
        self
    }

    /// More options of the file node (an object as in QMP's `blockdev-add`).
    ///
    /// # Panics
    /// If it is no object.
    #[must_use]
    pub fn file_options(mut self, options: Value) -> Self {
        self.file_options = object(options);
        self
    }

    /// More options of the format node.
    ///
    /// # Panics
    /// If it is no object.
    #[must_use]
    pub fn format_options(mut self, options: Value) -> Self {
        self.format_options = object(options);
        self
    }

    /// More options of the device (`serial=abc,write-cache=on`).
    #[must_use]
    pub fn device_options(mut self, options: &str) -> Self {
        self.device_options = options.into();
        self
    }

    /// The words of QEMU's command line that attach it.
    pub(crate) fn words(&self, has_iothread: bool) -> Vec<String> {
        let mut words = match self.attachment {
            Attachment::Blockdev => self.blockdev_words(),
            Attachment::Drive => self.drive_words(),
        };
        let name = &self.name;
        let iothread = if has_iothread { ",iothread=iothread0" } else { "" };
        let more = if self.device_options.is_empty() { String::new() } else { format!(",{}", self.device_options) };
        let devices = match self.bus {
            Bus::VirtioBlk => vec![format!("virtio-blk-pci,id={name}-device,drive={name}{iothread}{more}")],
            Bus::VirtioScsi => vec![
                format!("virtio-scsi-pci,id={name}-scsi{iothread}"),
                format!("scsi-hd,bus={name}-scsi.0,id={name}-device,drive={name}{more}"),
            ],
        };
        words.extend(devices.into_iter().flat_map(|device| ["-device".to_owned(), device]));
        words
    }

    fn blockdev_words(&self) -> Vec<String> {
        let file_name = format!("{}-file", self.name);
        let mut file = object(json!({ "driver": "file", "node-name": file_name, "filename": self.path }));
        file.extend(self.file_options.clone());
        let mut format = object(json!({ "driver": self.format, "node-name": self.name, "file": file_name }));
        format.extend(self.format_options.clone());
        vec!["-blockdev".into(), Value::from(file).to_string(), "-blockdev".into(), Value::from(format).to_string()]
    }

    fn drive_words(&self) -> Vec<String> {
        let Self { name, format, drive_options, .. } = self;
        let more = if drive_options.is_empty() { String::new() } else { format!(",{drive_options}") };
        let path = self.path.display().to_string().replace(',', ",,");
        vec!["-drive".into(), format!("if=none,id={name},format={format},file={path}{more}")]
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(object) => object,
        other => panic!("options are an object, not {other}"),
    }
}
