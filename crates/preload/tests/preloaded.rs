//! The library in a process of its own: a child of this test that maps a file, and writes to it on demand.
#![allow(unsafe_code, reason = "the child maps memory, and the test asks the kernel what was written")]

use std::fs::File;
use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const PAGES: usize = 1024;
const PAGE: usize = 4096;
const CHILD: &str = "TRANSHUME_TEST_CHILD";
const VARIABLE: &str = "TRANSHUME_PRELOAD_SOCKET";
const PATIENCE: Duration = Duration::from_secs(20);
const NOBODY: u32 = 65534;

/// A process with the library, and the connection to it.
struct Preloaded {
    child: Child,
    socket: PathBuf,
    ram: PathBuf,
    _folder: tempfile::TempDir,
}

/// Where cargo has put the library.
fn library() -> PathBuf {
    let own = std::env::current_exe().expect("this program");
    let mut folders = own.ancestors().skip(1);
    folders.find_map(|folder| Some(folder.join("libtranshume_preload.so")).filter(|path| path.exists())).expect("built")
}

/// Copies a program by another one. What another test starts meanwhile would have a file that is open for writing here open, too, and no
/// program can be started from it then.
fn copy(from: &Path, to: &Path) {
    assert!(
        Command::new("cp").args([from, to]).status().expect("cp runs").success(),
        "{} is not copied",
        from.display()
    );
}

impl Preloaded {
    fn start(user: Option<u32>) -> Self {
        Self::start_by(&[], user)
    }

    /// Started by a wrapper, if one is given, which is followed by the program and its arguments.
    fn start_by(wrapper: &[&str], user: Option<u32>) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).expect("set");
        let (socket, ram) = (folder.path().join("socket"), folder.path().join("ram file"));
        let file = File::create(&ram).expect("made");
        file.set_len((PAGES * PAGE) as u64).expect("sized");
        std::fs::set_permissions(&ram, PermissionsExt::from_mode(0o666)).expect("set");
        let program = folder.path().join("child");
        copy(&std::env::current_exe().expect("this program"), &program);
        let preload = folder.path().join("libtranshume_preload.so");
        copy(&library(), &preload);
        let mut words = wrapper.iter().map(std::ffi::OsStr::new).chain([program.as_os_str()]);
        let mut command = Command::new(words.next().expect("a program"));
        command.args(words).args(["--exact", "child", "--nocapture", "--test-threads=1"]).env(CHILD, &ram);
        command.env("LD_PRELOAD", &preload).env(VARIABLE, &socket).current_dir(folder.path());
        if let Some(user) = user {
            command.uid(user).gid(user);
        }
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started");
        let mut this = Self { child, socket, ram, _folder: folder };
        assert_eq!(this.told(), "mapped");
        this
    }

    /// The next line that the child says for the test.
    fn told(&mut self) -> String {
        let output = self.child.stdout.as_mut().expect("piped");
        let mut line = Vec::new();
        let mut byte = [0];
        loop {
            output.read_exact(&mut byte).expect("the child lives");
            if byte[0] != b'\n' {
                line.push(byte[0]);
                continue;
            }
            if let Some(said) = line.strip_prefix(b"child: ") {
                return String::from_utf8_lossy(said).into_owned();
            }
            line.clear();
        }
    }

    fn tell(&mut self, what: &str) -> String {
        writeln!(self.child.stdin.as_mut().expect("piped"), "{what}").expect("told");
        self.told()
    }

    fn connect(&self) -> UnixStream {
        let began = Instant::now();
        loop {
            match UnixStream::connect(&self.socket) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(PATIENCE)).expect("set");
                    return stream;
                }
                Err(error) => assert!(began.elapsed() < PATIENCE, "{error}"),
            }
        }
    }

    fn register(&self) -> String {
        format!("register {}", self.ram.display())
    }

    /// Which pages were written since the last scan; `None` if that is not tracked.
    fn scan(&self, (start, end): (u64, u64)) -> Option<Vec<u64>> {
        let pagemap = File::open(format!("/proc/{}/pagemap", self.child.id())).expect("readable");
        let mut found = vec![[0_u64; 3]; PAGES];
        // The fields of `struct pm_scan_arg`: write-protect what matches, and refuse what is not tracked.
        let mut scan = [96, 3, start, end, 0, found.as_mut_ptr() as u64, PAGES as u64, 0, 0, 2, 0, 2];
        // SAFETY: the argument has the size and the fields that the request takes, and the array is as long as it says.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), 0xC060_6610, scan.as_mut_ptr()) };
        let count = usize::try_from(count).ok()?;
        Some(
            found[..count]
                .iter()
                .flat_map(|one| (one[0]..one[1]).step_by(PAGE))
                .map(|at| (at - start) / 4096)
                .collect(),
        )
    }
}

impl Drop for Preloaded {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ask(stream: &mut UnixStream, question: &[u8]) -> String {
    let mut message = u32::try_from(question.len()).expect("short").to_le_bytes().to_vec();
    message.extend_from_slice(question);
    stream.write_all(&message).expect("asked");
    answer(stream)
}

fn answer(stream: &mut UnixStream) -> String {
    let mut length = [0; 4];
    stream.read_exact(&mut length).expect("answered");
    let mut text = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut text).expect("answered");
    String::from_utf8(text).expect("text")
}

fn mapping(answer: &str) -> (u64, u64) {
    let (range, offset) = answer.strip_prefix("ok ").and_then(|text| text.split_once('+')).expect("one mapping");
    assert_eq!(offset, "0", "{answer}");
    let (start, end) = range.split_once('-').expect("a range");
    let number = |text| u64::from_str_radix(text, 16).expect("a number");
    (number(start), number(end))
}

/// No test: what the child does.
#[test]
fn child() {
    let Some(ram) = std::env::var_os(CHILD) else { return };
    let file = File::options().read(true).write(true).open(Path::new(&ram)).expect("opened");
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping of a file that is as long.
    let memory = unsafe {
        libc::mmap(std::ptr::null_mut(), PAGES * PAGE, rights, libc::MAP_SHARED, file.as_raw_fd(), 0).cast::<u8>()
    };
    // The harness has begun a line.
    println!("\nchild: mapped");
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match line.split_once(' ') {
            Some(("write", page)) => {
                let page: usize = page.parse().expect("a number");
                // SAFETY: the page is within the mapping.
                unsafe { memory.add(page * PAGE + 5).write_volatile(7) };
                println!("child: written");
            }
            Some(("read-into", page)) => {
                let page: usize = page.parse().expect("a number");
                // SAFETY: the page is within the mapping, and the kernel writes to it.
                let read = unsafe {
                    let zero = File::open("/dev/urandom").expect("opened");
                    libc::read(zero.as_raw_fd(), memory.add(page * PAGE).cast(), 100)
                };
                println!("child: read {read}");
            }
            _ if line == "environment" => {
                let seen = Command::new("/usr/bin/env").output().expect("run");
                let text = String::from_utf8_lossy(&seen.stdout).into_owned();
                let is_ours = |line: &&str| line.starts_with("LD_PRELOAD") || line.starts_with(VARIABLE);
                println!("child: {} of ours", text.lines().filter(is_ours).count());
            }
            _ => println!("child: what is {line}?"),
        }
    }
}

#[test]
fn what_is_written_is_tracked_until_the_connection_ends() {
    let mut process = Preloaded::start(None);
    let mut stream = process.connect();
    assert_eq!(ask(&mut stream, b"hello 1"), format!("ok {}", process.child.id()));
    let (start, end) = mapping(&ask(&mut stream, process.register().as_bytes()));
    assert_eq!(end - start, (PAGES * PAGE) as u64);
    process.scan((start, end)).expect("it is tracked");
    assert_eq!(process.scan((start, end)), Some(vec![]), "nothing was written");
    process.tell("write 3");
    process.tell("write 1000");
    assert_eq!(process.tell("read-into 77"), "read 100");
    assert_eq!(process.scan((start, end)), Some(vec![3, 77, 1000]));
    process.tell("write 3");
    assert_eq!(process.scan((start, end)), Some(vec![3]));
    // Once more does no harm.
    assert_eq!(mapping(&ask(&mut stream, process.register().as_bytes())), (start, end));
    assert_eq!(ask(&mut stream, b"release"), "ok");
    assert_eq!(process.scan((start, end)), None, "it is not tracked any more");
    mapping(&ask(&mut stream, process.register().as_bytes()));
    assert!(process.scan((start, end)).is_some());
    drop(stream);
    // The next connection is served when the one before is over, and its tracking with it.
    assert_eq!(ask(&mut process.connect(), b"hello 1"), format!("ok {}", process.child.id()));
    assert_eq!(process.scan((start, end)), None, "it is not tracked any more");
    assert_eq!(process.tell("write 9"), "written");
}

#[test]
fn children_know_nothing_of_it_and_its_thread_takes_no_signal() {
    let mut process = Preloaded::start(None);
    assert_eq!(process.tell("environment"), "0 of ours");
    let mut found = 0;
    for task in std::fs::read_dir(format!("/proc/{}/task", process.child.id())).expect("it lives").flatten() {
        let status = std::fs::read_to_string(task.path().join("status")).expect("readable");
        let value =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).expect("there").trim().to_owned();
        if value("Name:") == "transhume-mem" {
            found += 1;
            let blocked = u64::from_str_radix(&value("SigBlk:"), 16).expect("a number");
            // All but SIGKILL, SIGSTOP and the two that the C library keeps for itself.
            assert_eq!(blocked | 1 << 8 | 1 << 18 | 1 << 31 | 1 << 32, u64::MAX, "{blocked:x}");
        }
    }
    assert_eq!(found, 1);
    let rights = std::fs::metadata(&process.socket).expect("there").permissions().mode();
    assert_eq!(rights & 0o777, 0o600);
}

#[test]
fn a_wrapper_that_becomes_the_program_leaves_the_library_to_it() {
    // It starts another program first, as wrappers do, and goes on only if that knows nothing of the library.
    let script = "env | grep -q TRANSHUME_PRELOAD || exec \"$@\"";
    let mut process = Preloaded::start_by(&["/bin/sh", "-c", script, "wrapper", "/usr/bin/nice", "-n", "1"], None);
    let mut stream = process.connect();
    assert_eq!(ask(&mut stream, b"hello 1"), format!("ok {}", process.child.id()));
    mapping(&ask(&mut stream, process.register().as_bytes()));
    assert_eq!(process.tell("environment"), "0 of ours");
}

#[test]
fn what_cannot_be_done_is_refused_and_nonsense_ends_the_connection_only() {
    let mut process = Preloaded::start(None);
    let mut stream = process.connect();
    assert_eq!(ask(&mut stream, b"register /dev/shm/other"), "error not-mapped 0");
    assert_eq!(ask(&mut stream, b"hello 7"), "error malformed 0");
    assert_eq!(ask(&mut stream, &[0xff; 3000]), "error malformed 0");
    stream.write_all(&u32::MAX.to_le_bytes()).expect("sent");
    let mut rest = Vec::new();
    assert_eq!(stream.read_to_end(&mut rest).unwrap_or(0), 0, "it is closed");
    assert_eq!(ask(&mut process.connect(), b"hello 1"), format!("ok {}", process.child.id()));
    assert_eq!(process.tell("write 9"), "written");
}

#[test]
fn a_process_without_privileges_tracks_too_with_the_device_or_without() {
    let mut process = Preloaded::start(Some(NOBODY));
    let mut stream = process.connect();
    let (start, end) = mapping(&ask(&mut stream, process.register().as_bytes()));
    process.scan((start, end)).expect("it is tracked");
    process.tell("write 3");
    // What the kernel writes counts as well.
    assert_eq!(process.tell("read-into 77"), "read 100");
    assert_eq!(process.scan((start, end)), Some(vec![3, 77]));
    assert_eq!(ask(&mut stream, b"release"), "ok");

    let device = File::open("/dev/userfaultfd").expect("root may open it");
    let question = process.register();
    let length = u32::try_from(question.len()).expect("short").to_le_bytes();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [device.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    sendmsg(&stream, &[IoSlice::new(&length)], &mut control, SendFlags::empty()).expect("sent");
    stream.write_all(question.as_bytes()).expect("sent");
    assert_eq!(mapping(&answer(&mut stream)), (start, end));
    process.scan((start, end)).expect("it is tracked");
    process.tell("write 5");
    assert_eq!(process.scan((start, end)), Some(vec![5]));
}

#[test]
fn a_program_starts_without_a_place_for_the_socket_and_without_the_variable() {
    for socket in [None, Some("/nowhere/socket")] {
        let mut command = Command::new("/usr/bin/env");
        command.env("LD_PRELOAD", library()).env_remove(VARIABLE);
        if let Some(socket) = socket {
            command.env(VARIABLE, socket);
        }
        let output = command.output().expect("run");
        assert!(output.status.success());
        let said = BufReader::new(&output.stderr[..]).lines().map_while(Result::ok).collect::<Vec<_>>();
        assert_eq!(said.len(), usize::from(socket.is_some()), "{said:?}");
    }
}
