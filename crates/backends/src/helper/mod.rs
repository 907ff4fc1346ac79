//! Processes that carry out the calls which a device may hold in the kernel for ever.
//!
//! A thread that waits in the kernel for a device cannot be killed. Until the device answers, the kernel keeps all files
//! of its process open: sockets, locks, the images of all other volumes. io_uring carries out syncs and changes of
//! allocation in such threads. So each device has a process of its own for them, with nothing but that device's images:
//!
//! ```text
//!   sync, allocate ──▶ socket ──▶ helper of the device ──▶ kernel
//!                                   │ has the open files themselves, and so their locks
//!   answer ◀── one thread ◀── socket┘
//! ```
//!
//! A daemon that dies leaves at most that process behind. It keeps the locks of the images that it still works on, so
//! nobody else serves those until the device has answered. Reads and writes past the page cache hold no thread, as long
//! as the file system takes them without waiting; NFS does not.

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

use block::Extent;
use parking_lot::{Condvar, Mutex};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, shutdown, socketpair};
use tokio::sync::{Semaphore, oneshot};

use message::{ANSWER_BYTES, Answer, Message, Verb, send_message};

/// The first argument of the program that says what it is to be.
const ARGUMENT: &str = "--device-helper";
/// How many requests of one device are under way at once.
const REQUESTS_MAX: usize = 64;
/// How long whoever lets a file go waits for its helper to have done so. A device that hangs has it for longer.
const CLOSE_LIMIT: Duration = Duration::from_millis(100);

/// Becomes a helper, if this process was started as one; gives what it exits with then.
#[must_use]
pub fn run_as_helper() -> Option<std::process::ExitCode> {
    (std::env::args_os().nth(1)? == ARGUMENT).then(serve::serve)
}

/// The helpers of a process, one for each device.
pub struct Helpers {
    program: PathBuf,
    by_device: Mutex<HashMap<u64, Weak<Helper>>>,
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
        Arc::new(Self { program, by_device: Mutex::default() })
    }

    fn helper(&self, device: u64) -> io::Result<Arc<Helper>> {
        let mut by_device = self.by_device.lock();
        by_device.retain(|_, helper| helper.strong_count() > 0);
        let living = by_device.get(&device).and_then(Weak::upgrade).filter(|helper| !helper.has_ended());
        if let Some(helper) = living {
            return Ok(helper);
        }
        let helper = Helper::start(&self.program)?;
        by_device.insert(device, Arc::downgrade(&helper));
        Ok(helper)
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
    fn start(program: &PathBuf) -> io::Result<Arc<Self>> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let mut command = Command::new(program);
        command.arg(ARGUMENT).stdin(Stdio::from(theirs)).stdout(Stdio::null()).env_clear().current_dir("/");
        let child = command.spawn()?;
        // The child has its own copy of the other end: this one must not keep the socket open.
        drop(command);
        let helper = Arc::new(Self {
            socket: ours,
            permits: Semaphore::new(REQUESTS_MAX),
            state: Mutex::default(),
            answered: Condvar::new(),
        });
        let (socket, reading) = (helper.socket.try_clone()?, Arc::downgrade(&helper));
        let read = move || read_answers(&socket, &reading, child);
        std::thread::Builder::new().name("helper".to_owned()).stack_size(64 << 10).spawn(read)?;
        Ok(helper)
    }

    fn has_ended(&self) -> bool {
        self.state.lock().has_ended
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

    fn send(&self, message: &Message, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let sent = send_message(self.socket.as_fd(), message, file, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        if sent.is_err() {
            self.state.lock().waiting.remove(&message.id);
        }
        sent
    }

    /// Asks for something that takes no time, and waits for `limit` at most; whether it was answered.
    fn ask(&self, verb: Verb, file: u64, descriptor: Option<BorrowedFd<'_>>, limit: Duration) -> io::Result<bool> {
        let id = self.begin(Waiting::Thread)?;
        self.send(&Message { id, file, verb }, descriptor)?;
        let mut state = self.state.lock();
        let is_waiting = |state: &mut State| state.waiting.contains_key(&id);
        self.answered.wait_while_for(&mut state, is_waiting, limit);
        Ok(state.waiting.remove(&id).is_none() && !state.has_ended)
    }

    async fn perform(&self, verb: Verb, file: u64) -> io::Result<()> {
        let _permit = self.permits.acquire().await.expect("the semaphore is never closed");
        let (answer, answered) = oneshot::channel();
        let id = self.begin(Waiting::Task(answer))?;
        self.send(&Message { id, file, verb }, None)?;
        answered.await.unwrap_or_else(|_| Err(ended()))
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
            let _ = task.send(outcome);
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

/// A file that the helper of its device has, too.
pub(crate) struct HelpedFile {
    helpers: Arc<Helpers>,
    file: Arc<File>,
    device: u64,
    known: Mutex<Option<Known>>,
}

/// A helper, and what it calls the file.
#[derive(Clone)]
pub(crate) struct Known {
    helper: Arc<Helper>,
    number: u64,
}

impl HelpedFile {
    pub(crate) fn new(helpers: &Arc<Helpers>, file: &Arc<File>) -> io::Result<Self> {
        let (helpers, device) = (Arc::clone(helpers), device_of(file)?);
        Ok(Self { helpers, file: Arc::clone(file), device, known: Mutex::default() })
    }

    /// The helper that has the file; it is given it first, if need be.
    fn known(&self) -> io::Result<Known> {
        let mut known = self.known.lock();
        if let Some(known) = known.as_ref().filter(|known| !known.helper.has_ended()) {
            return Ok(known.clone());
        }
        let helper = self.helpers.helper(self.device)?;
        let number = {
            let mut state = helper.state.lock();
            state.next += 1;
            state.next
        };
        let id = helper.begin(Waiting::Thread)?;
        helper.send(&Message { id, file: number, verb: Verb::Open }, Some(self.file.as_fd()))?;
        let given = Known { helper, number };
        *known = Some(given.clone());
        Ok(given)
    }

    /// The helper that has the file; none if there can be none: then the caller does its work itself.
    pub(crate) fn helper(&self) -> Option<Known> {
        self.known().inspect_err(|error| tracing::warn!(%error, "a device has no helper")).ok()
    }
}

impl Known {
    /// Makes durable what was written.
    pub(crate) async fn sync(&self) -> io::Result<()> {
        self.helper.perform(Verb::Sync, self.number).await
    }

    /// Changes the allocation of `extent`, in the manner of fallocate's flags.
    pub(crate) async fn allocate(&self, mode: u32, extent: Extent) -> io::Result<()> {
        let verb = Verb::Allocate { mode, offset: extent.offset.0, length: extent.length.0 };
        self.helper.perform(verb, self.number).await
    }
}

impl Drop for HelpedFile {
    /// Whoever opens the file next must find its lock free.
    fn drop(&mut self) {
        if let Some(Known { helper, number }) = self.known.get_mut().take() {
            let _ = helper.ask(Verb::Close, number, None, CLOSE_LIMIT);
        }
    }
}
