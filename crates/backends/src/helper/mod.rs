//! Processes that carry out the calls which a device may hold in the kernel for ever.
//!
//! A thread that waits in the kernel for a device cannot be killed. Until the device answers, the kernel keeps all files
//! of its process open: sockets, locks, the images of all other volumes. Nor does whoever has started the process hear
//! of its end. io_uring carries out syncs and changes of allocation in such threads, and all reads and writes that
//! would wait: where the file system has to allocate, or to fetch what it needs first, and through the page cache. So
//! each device has a process of its own for them, with nothing but that device's images:
//!
//! ```text
//!   sync, allocate ──▶ socket ──▶ helper of the device ──▶ kernel
//!                                   │ has the open files themselves, and so their locks
//!   answer ◀── one thread ◀── socket┘
//!
//!   read, write ──▶ ring, with the word that it must not wait ── it would ──▶ a worker's connection, shared memory
//! ```
//!
//! A daemon that dies leaves at most that process behind. It keeps the locks of the images that it still works on, so
//! nobody else serves those until the device has answered.
//!
//! Where a server is asked whenever a file is closed, the daemon has no descriptor of it at all: it gives the helper a
//! socket in which the file is parked, and keeps that (see `open_file`).
//!
//! A helper may be killed, and another one takes its place. What the first could not be asked for, and changes of
//! allocation, are given to that one. A sync that was under way is another matter. The open file description that the
//! helper has is ours, and the kernel reports a lost write once to each description: a helper that is killed while the
//! kernel syncs takes the report with it, and the next sync would find all well. So each file is open a second time
//! from before its first write, as a witness that nobody syncs:
//!
//! ```text
//!   file, witness ── syncs by the file ── a helper dies in a sync ──▶ syncs by the witness, the file is in doubt
//!                          ▲                                                │                    │
//!                          └── likewise, with the two changed over ◀── all is well          it dies, too
//!                                                                                                │
//!                                                              nothing durable is promised any more
//! ```
//!
//! The witness reports whatever the file has. If there is nothing, the file has missed nothing, and is the witness of
//! the next such death. Only what the kernel keeps is reported twice: pages that could not be written out, whoever has
//! written them. That a device could not empty its own cache (or that a FUSE server could not sync) is told to the one
//! sync that has asked, and to nobody else. Devices say so when they give up after a long time, and that is when
//! somebody kills a process that hangs. So a sync that a killed helper has had for more than ten seconds counts as
//! failed. In a shorter one such an answer has to fall into the moment of the kill, as it may into that of the daemon's
//! own end.

mod helped;
mod kept;
mod line;
mod memory;
mod message;
mod serve;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, shutdown, socketpair};
use tokio::sync::{Semaphore, SemaphorePermit, oneshot};

use crate::file_system::belongs_to_helper;
use crate::open_file::Parked;
use line::{Done, Lines};
use memory::Slot;
use message::{ANSWER_BYTES, Answer, Message, Verb, send_message};

#[cfg(test)]
pub(crate) use helped::unasked;
pub(crate) use helped::{HelpedFile, Known, is_unasked};
pub(crate) use kept::KeptFile;

/// The first argument of the program that says what it is to be.
const ARGUMENT: &str = "--device-helper";
/// How many requests of one device are under way at once.
const REQUESTS_MAX: usize = 64;
/// How long whoever lets a file go waits for its helper to have done so. A device that hangs has it for longer.
const CLOSE_LIMIT: Duration = Duration::from_millis(100);
/// How long after one of its sockets has ended the others of a helper may still be open.
const END_LIMIT_MS: u32 = 1000;
/// How many descriptors a helper takes beside the connections of workers: its socket, once more for whoever reads its
/// answers, and its memory.
const HELPER_DESCRIPTORS: usize = 3;
/// What an answer about holes takes of a slot at most.
const HOLES_BYTES: usize = crate::holes::FOUND_BYTES_MAX;

/// Becomes a helper, if this process was started as one; gives what it exits with then.
#[must_use]
pub fn run_as_helper() -> Option<std::process::ExitCode> {
    (std::env::args_os().nth(1)? == ARGUMENT).then(serve::serve)
}

/// The helpers of a process, one for each device.
pub struct Helpers {
    program: PathBuf,
    arguments: Vec<&'static str>,
    by_device: Mutex<HashMap<u64, OfDevice>>,
    /// Helpers alone keep the files of whatever file system.
    #[cfg(test)]
    keep_all: bool,
}

impl Helpers {
    /// Helpers that are this program again, which calls [`run_as_helper`] before all else.
    ///
    /// # Errors
    /// If the kernel does not say which program this is.
    pub fn of_this_program() -> io::Result<Arc<Self>> {
        // It may have been replaced: the name in /proc leads to the very same.
        Ok(Self::of(PathBuf::from("/proc/self/exe")))
    }

    /// Helpers that are `program`.
    #[must_use]
    pub fn of(program: PathBuf) -> Arc<Self> {
        Self::with_arguments(program, vec![ARGUMENT])
    }

    fn with_arguments(program: PathBuf, arguments: Vec<&'static str>) -> Arc<Self> {
        Arc::new(Self {
            program,
            arguments,
            by_device: Mutex::default(),
            #[cfg(test)]
            keep_all: false,
        })
    }

    /// The same, and they alone keep the files of whatever file system.
    #[cfg(test)]
    pub(crate) fn keeping_all(self: Arc<Self>) -> Arc<Self> {
        let this = Arc::into_inner(self).expect("nobody has it yet");
        Arc::new(Self { keep_all: true, ..this })
    }

    /// Whether nobody but the helper is to keep `file` open.
    fn alone_keep(&self, file: &File) -> io::Result<bool> {
        #[cfg(test)]
        if self.keep_all {
            return Ok(true);
        }
        belongs_to_helper(file)
    }

    /// Helpers that are this program of tests.
    #[cfg(test)]
    pub(crate) fn of_this_test() -> Arc<Self> {
        let arguments = vec!["--exact", "helper::tests::become_a_helper_where_the_input_is_its_socket", "--nocapture"];
        Self::with_arguments(PathBuf::from("/proc/self/exe"), arguments)
    }

    fn helper(&self, device: u64) -> io::Result<Arc<Helper>> {
        let mut by_device = self.by_device.lock();
        let of_device = by_device.entry(device).or_default();
        if let Some(helper) = of_device.living() {
            return Ok(helper);
        }
        let helper = Helper::start(&self.program, &self.arguments)?;
        of_device.helper = Arc::downgrade(&helper);
        Ok(helper)
    }

    /// One file more of `device` may need its helper.
    fn enter(&self, device: u64) {
        self.by_device.lock().entry(device).or_default().files += 1;
    }

    /// One file less does.
    fn leave(&self, device: u64) {
        let mut by_device = self.by_device.lock();
        if let Some(of_device) = by_device.get_mut(&device) {
            of_device.files -= 1;
            by_device.retain(|_, of_device| of_device.files > 0);
        }
    }

    /// How many descriptors of this process the helpers of its devices may still come to take, if each of so many
    /// `workers` asks each of them.
    #[must_use]
    pub fn descriptors_to_come(&self, workers: usize) -> usize {
        let by_device = self.by_device.lock();
        let to_come = by_device.values().map(|of_device| {
            let taken = of_device.living().map_or(0, |helper| helper.descriptors());
            (HELPER_DESCRIPTORS + workers).saturating_sub(taken)
        });
        to_come.sum()
    }

    /// How many they take of a process with so many `workers`, for each device.
    #[must_use]
    pub const fn descriptors_of_a_device(workers: usize) -> usize {
        HELPER_DESCRIPTORS + workers
    }
}

/// The helper of a device, and how many files may need it.
#[derive(Default)]
struct OfDevice {
    files: usize,
    helper: Weak<Helper>,
}

impl OfDevice {
    fn living(&self) -> Option<Arc<Helper>> {
        self.helper.upgrade().filter(|helper| !helper.has_ended())
    }
}

impl std::fmt::Debug for Helpers {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Helpers({})", self.program.display())
    }
}

/// Which device holds the file, or is it.
fn device_of(file: &File) -> io::Result<u64> {
    let found = file.metadata()?;
    Ok(if found.file_type().is_block_device() { found.rdev() } else { found.dev() })
}

/// One process, and who waits for it.
struct Helper {
    socket: OwnedFd,
    permits: Semaphore,
    state: Mutex<State>,
    /// An answer has come.
    answered: Condvar,
    lines: Lines,
}

#[derive(Default)]
struct State {
    next: u64,
    has_ended: bool,
    waiting: HashMap<u64, Waiting>,
}

enum Waiting {
    Task(oneshot::Sender<io::Result<()>>),
    /// Somebody who looks whether this is gone.
    Thread,
}

impl Helper {
    fn start(program: &PathBuf, arguments: &[&str]) -> io::Result<Arc<Self>> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::from(theirs)).stdout(Stdio::null()).env_clear().current_dir("/");
        let child = command.spawn()?;
        // The child has its own copy of the other end: this one must not keep the socket open.
        drop(command);
        let helper = Arc::new(Self {
            socket: ours,
            permits: Semaphore::new(REQUESTS_MAX),
            state: Mutex::default(),
            answered: Condvar::new(),
            lines: Lines::default(),
        });
        let (socket, reading) = (helper.socket.try_clone()?, Arc::downgrade(&helper));
        let read = move || read_answers(&socket, &reading, child);
        std::thread::Builder::new().name("helper".to_owned()).stack_size(64 << 10).spawn(read)?;
        Ok(helper)
    }

    /// How many descriptors of this process it takes now.
    fn descriptors(&self) -> usize {
        HELPER_DESCRIPTORS - 1 + self.lines.descriptors()
    }

    fn has_ended(&self) -> bool {
        self.state.lock().has_ended
    }

    /// Waits until its end is known to all who ask it, if it has ended. One of its sockets says so before the others.
    async fn expect_end(&self) {
        for _ in 0..END_LIMIT_MS {
            if self.has_ended() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    fn begin(&self, waiting: Waiting) -> io::Result<u64> {
        let mut state = self.state.lock();
        if state.has_ended {
            return Err(ended());
        }
        state.next += 1;
        let id = state.next;
        state.waiting.insert(id, waiting);
        Ok(id)
    }

    fn send(&self, message: &Message, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let sent = send_message(self.socket.as_fd(), message, files, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        if let Err(error) = &sent {
            let is_gone = [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset, io::ErrorKind::NotConnected];
            let mut state = self.state.lock();
            state.waiting.remove(&message.id);
            // Whoever reads its answers may not have come to their end yet.
            state.has_ended |= is_gone.contains(&error.kind());
        }
        sent
    }

    /// Gives it a file, and what goes with that, or a socket in which so many are `parked`; what it calls it.
    fn open(&self, files: &[BorrowedFd<'_>], parked: u32) -> io::Result<u64> {
        let id = self.begin(Waiting::Thread)?;
        self.send(&Message { id, file: id, verb: Verb::Open { parked } }, files)?;
        Ok(id)
    }

    /// The same with those that are parked.
    fn open_parked(&self, parked: &Parked) -> io::Result<u64> {
        parked.with_socket(|socket| self.open(&[socket], parked.count() as u32))
    }

    /// Asks for something that takes no time, and waits for `limit` at most; whether it was answered.
    fn ask(&self, verb: Verb, file: u64, limit: Duration) -> io::Result<bool> {
        let id = self.begin(Waiting::Thread)?;
        self.send(&Message { id, file, verb }, &[])?;
        let mut state = self.state.lock();
        let is_waiting = |state: &mut State| state.waiting.contains_key(&id);
        self.answered.wait_while_for(&mut state, is_waiting, limit);
        Ok(state.waiting.remove(&id).is_none() && !state.has_ended)
    }

    /// What it takes to ask for something that may take long.
    async fn permit(&self) -> SemaphorePermit<'_> {
        self.permits.acquire().await.expect("the semaphore is never closed")
    }

    /// Memory for a request with `length` bytes, or with as many of them as it can have.
    async fn slot(&self, length: usize) -> io::Result<Slot> {
        let slots = self.lines.slots()?;
        Ok(slots.acquire(length).await)
    }

    /// Has `verb` carried out on `file` with the bytes of `slot`; `None` if the helper ends before it has answered.
    ///
    /// # Errors
    /// It could not be asked: there may be no descriptors for a connection just now.
    async fn perform(&self, file: u64, verb: Verb, slot: Slot) -> io::Result<Option<Done>> {
        let line = self.lines.of_this_worker(|theirs| {
            let id = self.begin(Waiting::Thread)?;
            let introduced = self.send(&Message { id, file: 0, verb: Verb::Line }, &[theirs.as_fd(), slot.memory()]);
            self.state.lock().waiting.remove(&id);
            introduced
        })?;
        Ok(line.perform(file, verb, slot).await)
    }

    /// Asks for something. The answer comes through what this gives, or none if the helper ends before.
    fn request(&self, verb: Verb, file: u64) -> io::Result<oneshot::Receiver<io::Result<()>>> {
        let (answer, answered) = oneshot::channel();
        let id = self.begin(Waiting::Task(answer))?;
        self.send(&Message { id, file, verb }, &[])?;
        Ok(answered)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // Its end: it ends, as far as its device lets it.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

fn ended() -> io::Error {
    io::Error::other("the process that carries out this device's syncs has ended")
}

fn read_answers(socket: &OwnedFd, helper: &Weak<Helper>, mut child: Child) {
    let mut bytes = [0; ANSWER_BYTES];
    while let Ok((_, length)) = recv(socket, &mut bytes[..], RecvFlags::empty()) {
        let (Some(helper), true) = (helper.upgrade(), length == ANSWER_BYTES) else { break };
        let Answer { id, outcome } = Answer::parse(&bytes);
        let waiting = helper.state.lock().waiting.remove(&id);
        if let Some(Waiting::Task(task)) = waiting {
            // Nobody may wait any more.
            let _ = task.send(outcome.map(drop));
        }
        helper.answered.notify_all();
    }
    if let Some(helper) = helper.upgrade() {
        let mut state = helper.state.lock();
        state.has_ended = true;
        state.waiting.clear();
        drop(state);
        helper.answered.notify_all();
    }
    // It is not left behind as a zombie. A device that hangs keeps it, and this thread.
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileTypeExt;

    #[test]
    fn become_a_helper_where_the_input_is_its_socket() {
        let input = std::fs::metadata("/proc/self/fd/0");
        if input.is_ok_and(|input| input.file_type().is_socket()) && std::env::args().any(|word| word == "--exact") {
            super::serve::serve();
            std::process::exit(0);
        }
    }
}
