//! A daemon in a directory of its own, the command line, and a client that behaves like QEMU's: it reconnects, sends
//! again what was not answered, and remembers what it was promised.

#![allow(dead_code, reason = "every test file uses a part of this")]

pub(crate) mod cached;
pub(crate) mod fuse;
pub(crate) mod helpers;
pub(crate) mod left_behind;
pub(crate) mod load;
pub(crate) mod pair;
pub(crate) mod qemu;
pub(crate) mod server;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use load::Load;
use serde_json::Value;
use transhume_guest::Daemon;

/// Nothing here takes longer, on the slowest machine.
pub(crate) const HANG: Duration = Duration::from_secs(120);

/// A daemon and its directory; both are gone when this is dropped.
pub(crate) struct World {
    /// The daemon; before the directory, so that it is gone first.
    pub(crate) daemon: Daemon,
    directory: tempfile::TempDir,
}

impl World {
    /// A directory without a daemon.
    pub(crate) fn without_daemon() -> Self {
        let directory = tempfile::Builder::new().prefix("th").tempdir().expect("a temporary directory");
        let programs = Path::new(env!("CARGO_BIN_EXE_transhumed")).parent().expect("in a directory");
        Self { daemon: Daemon::new(programs, directory.path()), directory }
    }

    /// A running daemon.
    pub(crate) fn new() -> Self {
        let mut world = Self::without_daemon();
        world.start();
        world
    }

    /// A path in its directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The same as text.
    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Starts the daemon and waits until it answers.
    pub(crate) fn start(&mut self) {
        self.daemon.start().expect("the daemon starts");
    }

    /// Starts a daemon that is expected to end by itself.
    pub(crate) fn start_in_vain(&self) -> Output {
        self.daemon.command().output().expect("the daemon starts")
    }

    /// `kill -9`.
    pub(crate) fn kill(&mut self) {
        self.daemon.kill();
    }

    /// The daemon's process.
    pub(crate) fn pid(&self) -> u32 {
        self.daemon.pid().expect("a daemon runs")
    }

    /// SIGTERM, and waits for the end.
    pub(crate) fn terminate(&mut self) {
        self.daemon.terminate().expect("the daemon ends well");
    }

    /// What the daemon has logged.
    pub(crate) fn log(&self) -> String {
        self.daemon.log()
    }

    /// Waits until the daemon has logged `words`: its log is written beside what it does.
    pub(crate) fn wait_for_log(&self, words: &str) {
        let start = Instant::now();
        while !self.log().contains(words) {
            assert!(start.elapsed() < HANG, "never logged: {words}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The command line, not yet run.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        self.daemon.client(arguments)
    }

    /// Runs the command line.
    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.daemon.run(arguments).expect("the program runs")
    }

    /// Runs the command line, which must succeed, with `--json`.
    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        self.daemon.json(arguments).expect("it succeeds")
    }

    /// Runs the command line, which must fail with `code` and one line that has `part` in it.
    pub(crate) fn refused(&self, arguments: &[&str], code: i32, part: &str) {
        check_refusal(&format!("{arguments:?}"), &self.run(arguments), code, part);
    }

    /// A raw file of `bytes` with data in it, at the start of every `stride` bytes.
    pub(crate) fn image(&self, name: &str, bytes: u64, stride: usize) -> PathBuf {
        use std::os::unix::fs::FileExt;
        let path = self.path(name);
        let file = std::fs::File::create(&path).expect("created");
        file.set_len(bytes).expect("sized");
        let data: Vec<u8> = (0..65536_u32).flat_map(|word| word.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        for offset in (0..bytes).step_by(stride) {
            let length = (bytes - offset).min(data.len() as u64).min(stride as u64) as usize;
            file.write_all_at(&data[..length], offset).expect("written");
        }
        path
    }

    /// Serves `file` as the volume `name` on a socket of its own, and gives the export's address.
    pub(crate) fn attach(&self, name: &str, file: &Path) -> String {
        let uri = format!("nbd+unix:///{name}?socket={}", self.text(&format!("{name}.sock")));
        self.json(&["volume", "attach", name, "--backend", &format!("file:{}", file.display()), "--export", &uri]);
        uri
    }

    /// The files in the directory whose name begins with `prefix`.
    pub(crate) fn files(&self, prefix: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.directory.path()).expect("listed").flatten();
        entries.map(|entry| entry.path()).filter(|path| name_of(path).starts_with(prefix)).collect()
    }

    /// Kills the daemon and starts it again, four times, each after another while that follows from `delay_ms`.
    pub(crate) fn kill_four_times(&mut self, delay_ms: &mut u64) {
        for _ in 0..4 {
            *delay_ms = *delay_ms * 31 % 409;
            std::thread::sleep(Duration::from_millis(*delay_ms));
            self.kill();
            self.start();
        }
    }

    /// Job `id` once it is over.
    pub(crate) fn wait_for_job(&self, id: u64) -> Value {
        self.daemon.wait_for_job(id).expect("the job ends")
    }

    /// The newest job once `is_there` says so of it; `what` says what is wrong if it never does.
    pub(crate) fn wait_until_job(&self, what: &str, is_there: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let job = self.json(&["jobs", "--all"])[0].clone();
            if is_there(&job) {
                return job;
            }
            assert!(start.elapsed() < HANG, "{what}: {job}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Whether a job has copied so much.
pub(crate) fn has_copied(bytes: u64) -> impl Fn(&Value) -> bool {
    move |job| job["progress"]["bytes_copied"].as_u64().is_some_and(|copied| copied >= bytes)
}

/// A file as the place of a volume.
pub(crate) fn target(path: &Path) -> String {
    format!("file:{}", path.display())
}

/// The file at `path` holds what is expected.
pub(crate) fn same(path: &Path, expected: &[u8]) {
    let found = std::fs::read(path).expect("read");
    assert_eq!(found.len(), expected.len(), "{} has another size", path.display());
    if let Some(at) = found.iter().zip(expected).position(|(found, expected)| found != expected) {
        panic!("{} differs from byte {at} on", path.display());
    }
}

/// Moves a volume so many `rounds` with `flags` under a load of the seed `load`, while the daemon is killed again and again, at
/// moments that follow from `delay_ms`.
pub(crate) fn moves_under_kills((load, mut delay_ms): (u64, u64), rounds: u32, flags: &[&str]) {
    let mut world = World::new();
    let image = world.image("disk.img", 48 << 20, 65536);
    let uri = world.attach("x", &image);
    let load = Load::start(&uri, &image, load);
    let mut current = image;
    for round in 0..rounds {
        let to = world.path(&format!("round-{round}.img"));
        let destination = target(&to);
        let arguments = ["move", "x", "--to", &destination, "--bandwidth", "40MiB/s", "--detach"];
        let id = world.json(&[&arguments, flags].concat())["id"].as_u64().expect("a number");
        world.kill_four_times(&mut delay_ms);
        let over = world.wait_for_job(id);
        assert_eq!(over["state"], "done", "{over}\n{}", world.log());
        assert!(!current.exists(), "the source of round {round} was not put out of the way");
        current = to;
    }
    load.goes_on();
    same(&current, &load.finish());
}

/// What is on a block device before.
pub(crate) const OLD: u8 = 0xee;

/// A block device over a file, gone when this is dropped.
pub(crate) struct Loop {
    /// Its path.
    pub(crate) device: String,
}

impl Loop {
    /// Over a new file of `bytes` in the world's directory.
    pub(crate) fn new(world: &World, name: &str, bytes: usize, sector: u32) -> Self {
        let file = world.path(name);
        std::fs::write(&file, vec![OLD; bytes]).expect("written");
        Self::over(&file, &["--sector-size", &sector.to_string()])
    }

    /// Over a file that is there, with more options of `losetup`.
    pub(crate) fn over(file: &Path, options: &[&str]) -> Self {
        let file = file.display().to_string();
        let device = tool("losetup", &[&["--find", "--show"], options, &[&file]].concat());
        Self { device: device.trim().to_owned() }
    }

    /// How it is named on the command line.
    pub(crate) fn target(&self) -> String {
        format!("file:{}", self.device)
    }

    /// What it holds.
    pub(crate) fn read(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let device = std::fs::File::open(&self.device).expect("opened");
        std::os::unix::fs::FileExt::read_exact_at(&device, &mut bytes, offset).expect("read");
        bytes
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        tool("losetup", &["--detach", &self.device]);
    }
}

/// A file's name.
pub(crate) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Sends a signal to a child.
pub(crate) fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, signal).expect("signalled");
}

/// Waits for a child's end.
pub(crate) fn wait(child: &mut Child) -> std::process::ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("a child") {
            return status;
        }
        assert!(start.elapsed() < HANG, "a child does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Fails unless `output` is a failure with `code` and one line that has `part` in it.
pub(crate) fn check_refusal(what: &str, output: &Output, code: i32, part: &str) {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{what}: {said}");
    assert_eq!(said.trim().lines().count(), 1, "{what}: not one line: {said}");
    assert!(said.contains(part), "{what}: \"{part}\" is not in: {said}");
}

/// A file system, unmounted when this is dropped.
pub(crate) struct Mount {
    pub(crate) path: PathBuf,
}

impl Mount {
    /// One of `size` at the directory `path`, which is made if there is none.
    pub(crate) fn tmpfs(path: &Path, size: &str) -> Self {
        std::fs::create_dir_all(path).expect("created");
        let shown = path.display().to_string();
        tool("mount", &["-t", "tmpfs", "-o", &format!("size={size}"), "none", &shown]);
        Self { path: path.to_owned() }
    }

    /// A new one on `device`, with inodes of so many bytes, at the directory `path`, which is made: 128 do not say when a file was made,
    /// and 256 do.
    pub(crate) fn ext4(device: &Loop, path: &Path, inode_bytes: u32) -> Self {
        let inodes = inode_bytes.to_string();
        tool("mkfs.ext4", &["-q", "-F", "-I", &inodes, "-O", "^has_journal", &device.device]);
        std::fs::create_dir(path).expect("created");
        tool("mount", &[&device.device, &path.display().to_string()]);
        Self { path: path.to_owned() }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

/// Runs a program of the machine, which must succeed, and gives what it printed.
pub(crate) fn tool(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}: run `make setup`"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
