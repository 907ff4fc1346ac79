//! A block device over a file of a FUSE file system, whose server can be stopped, slowed down and let go on.
//!
//! Whoever waits for a stopped server waits in the kernel, where no signal ends it. So the server goes on when its handle
//! is dropped, and after [`HANG`] whatever the test does.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{HANG, World, signal, tool};

/// What the server gives when it is read, a second: a comparison of a small volume takes long enough to be seen.
const READ_BYTES_PER_SECOND: u64 = 16 << 20;
/// How long a sync takes while syncs are slow.
const SLOW_SYNC_US: u32 = 1_000_000;

/// Why nothing can be mounted and attached here, if so.
pub(crate) fn is_missing() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("only root may mount and attach");
    }
    if !Path::new("/dev/fuse").exists() {
        return Some("this kernel has no FUSE");
    }
    (!Path::new("/dev/loop-control").exists()).then_some("this kernel has no loop devices")
}

/// bindfs, which passes a folder on, and a loop device over a file below it. Must be dropped before the daemon that uses it.
pub(crate) struct FuseDevice {
    server: Child,
    mount: PathBuf,
    /// The file itself, past the server.
    pub(crate) file: PathBuf,
    /// The block device.
    pub(crate) device: String,
    /// The device is gone when nobody has it open any more.
    open: Option<File>,
    /// Ends the thread that lets the server go on.
    _watch: Sender<()>,
}

impl FuseDevice {
    /// Over a new file of `bytes` in the world's directory.
    pub(crate) fn new(world: &World, bytes: u64) -> Self {
        let (folder, mount) = (world.path("behind"), world.path("fuse"));
        for directory in [&folder, &mount] {
            std::fs::create_dir(directory).expect("created");
        }
        let file = folder.join("far.img");
        File::create(&file).and_then(|file| file.set_len(bytes)).expect("created");
        // Without the kernel's cache, so that every read and write comes to the server.
        let server = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "bindfs", "-f", "-o", "direct_io"])
            .arg(format!("--read-rate={READ_BYTES_PER_SECOND}"))
            .args([&folder, &mount])
            .stdin(Stdio::null())
            .spawn()
            .expect("setpriv is there");
        let watch = watch(&server);
        let mut made = Self { server, mount, file, device: String::new(), open: None, _watch: watch };
        let through = made.mount.join("far.img");
        let start = Instant::now();
        while !through.exists() {
            let ended = made.server.try_wait().expect("a child");
            assert!(ended.is_none() && start.elapsed() < HANG, "bindfs does not come up: run `make setup`");
            std::thread::sleep(Duration::from_millis(10));
        }
        let through = through.display().to_string();
        let device = tool("losetup", &["--find", "--show", "--direct-io=off", &through]);
        made.device = device.trim().to_owned();
        made.open = Some(File::open(&made.device).expect("opened"));
        tool("losetup", &["--detach", &made.device]);
        made
    }

    /// How it is named on the command line.
    pub(crate) fn target(&self) -> String {
        format!("file:{}", self.device)
    }

    /// A file of the file system itself that is not there yet, in the same words.
    pub(crate) fn file_target(&self) -> String {
        format!("file:{}", self.mount.join("target.img").display())
    }

    /// The file by the server.
    pub(crate) fn through(&self) -> PathBuf {
        self.mount.join("far.img")
    }

    /// The server answers nothing any more.
    pub(crate) fn stop(&self) {
        signal(&self.server, Signal::STOP);
    }

    /// The server goes on.
    pub(crate) fn go_on(&self) {
        signal(&self.server, Signal::CONT);
    }

    /// Every sync takes a second, and so does all that comes after it, until this is dropped.
    pub(crate) fn slow_syncs(&self) -> SlowSyncs {
        let tracer = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync,fdatasync"])
            .args(["-e", &format!("inject=fsync,fdatasync:delay_enter={SLOW_SYNC_US}")])
            .args(["-p", &self.server.id().to_string()])
            .stdin(Stdio::null())
            .spawn()
            .expect("setpriv is there");
        let status = format!("/proc/{}/status", self.server.id());
        let start = Instant::now();
        while std::fs::read_to_string(&status).expect("read").contains("TracerPid:\t0\n") {
            assert!(start.elapsed() < HANG, "strace does not trace: run `make setup`");
            std::thread::sleep(Duration::from_millis(5));
        }
        SlowSyncs(tracer)
    }
}

impl Drop for FuseDevice {
    fn drop(&mut self) {
        // First of all: whatever waits for the server cannot be ended otherwise.
        let _ = kill_process(Pid::from_child(&self.server), Signal::CONT);
        self.open = None;
        let _ = Command::new("umount").arg("-l").arg(&self.mount).status();
        // What is still under way fails then.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// Has `server` go on after a while, unless what this gives is dropped before.
fn watch(server: &Child) -> Sender<()> {
    let (watch, is_over) = channel();
    let pid = Pid::from_child(server);
    std::thread::spawn(move || {
        if is_over.recv_timeout(HANG) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            // The test fails by then.
            let _ = kill_process(pid, Signal::CONT);
        }
    });
    watch
}

/// A file that is a FUSE file system of its own. Its server is asked whenever somebody closes it. Must be dropped before the
/// daemon that uses it.
pub(crate) struct FuseExport {
    server: Child,
    /// The file.
    pub(crate) file: PathBuf,
    /// Ends the thread that lets the server go on.
    _watch: Sender<()>,
}

impl FuseExport {
    /// Of `bytes`, in the world's directory.
    pub(crate) fn new(world: &World, bytes: u64) -> Self {
        let (behind, file) = (world.path("behind.img"), world.path("export.img"));
        for file in [&behind, &file] {
            File::create(file).expect("created");
        }
        File::options().write(true).open(&behind).and_then(|file| file.set_len(bytes)).expect("extended");
        let disk = format!("driver=file,node-name=disk,filename={}", behind.display());
        let export =
            format!("type=fuse,id=export,node-name=disk,writable=on,growable=off,mountpoint={}", file.display());
        let server = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "qemu-storage-daemon", "--blockdev", &disk, "--export", &export])
            .stdin(Stdio::null())
            .spawn()
            .expect("setpriv is there");
        let watch = watch(&server);
        let mut made = Self { server, file, _watch: watch };
        let start = Instant::now();
        while std::fs::metadata(&made.file).map_or(0, |found| found.len()) != bytes {
            let ended = made.server.try_wait().expect("a child");
            assert!(
                ended.is_none() && start.elapsed() < HANG,
                "qemu-storage-daemon does not come up: run `make setup`"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        made
    }

    /// The server answers nothing any more.
    pub(crate) fn stop(&self) {
        signal(&self.server, Signal::STOP);
    }

    /// The server goes on.
    pub(crate) fn go_on(&self) {
        signal(&self.server, Signal::CONT);
    }
}

impl Drop for FuseExport {
    fn drop(&mut self) {
        // First of all: whatever waits for the server cannot be ended otherwise.
        let _ = kill_process(Pid::from_child(&self.server), Signal::CONT);
        let _ = Command::new("umount").arg("-l").arg(&self.file).status();
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// A tracer that holds up syncs.
pub(crate) struct SlowSyncs(Child);

impl Drop for SlowSyncs {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
