//! The helper itself. It ends when the process ends that has started it, and never before: signals that end the whole
//! service are not for it.

use std::collections::{HashMap, VecDeque};
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use block::{Bytes, Extent};
use nix::sys::signal::SigSet;
use parking_lot::{Condvar, Mutex};
use rustix::fs::FallocateFlags;
use rustix::net::{SendFlags, send};

use super::memory::{SLOTS, Shared};
use super::message::{Answer, Message, UnknownFile, Verb, receive_message};
use crate::calls::{allocate, length_of, read_some, retry, write_some};
use crate::file_system::takes_one_write;
use crate::holes::find_holes;
use crate::lock::HELPER_NAME;
use crate::open_file::parked_in;

/// How long a request waits for its file, which was sent before it by another way.
const FILE_LIMIT: Duration = Duration::from_secs(1);
const STACK_BYTES: usize = 128 << 10;

/// Serves the socket that is its standard input.
pub(super) fn serve() -> ExitCode {
    // A service manager tells all processes of a service to end, and a terminal all of a group. This one ends last.
    if SigSet::all().thread_block().is_err() {
        return ExitCode::FAILURE;
    }
    if let Ok(name) = CString::new(HELPER_NAME) {
        let _ = rustix::thread::set_name(&name);
    }
    let threads = Threads::default();
    let files: Arc<Files> = Arc::default();
    while let Ok(Some((message, opened))) = receive_message(std::io::stdin().as_fd()) {
        let Message { id, file, verb } = message;
        match verb {
            Verb::Open { parked } => {
                files.open(file, Held::of(opened, parked));
                answer(std::io::stdin(), id, Ok(0));
            }
            Verb::Close => {
                files.close(file);
                answer(std::io::stdin(), id, Ok(0));
            }
            Verb::Line => {
                // Without it the other end sees an end, and asks another helper.
                if let Some(line) = Line::of(opened, &files) {
                    line.start_thread();
                }
            }
            _ => match files.get(file, Duration::ZERO) {
                Some(held) => threads.run(Work { id, verb, held }),
                None => answer(std::io::stdin(), id, Err(unknown())),
            },
        }
    }
    // What still waits for a device is left to the kernel.
    ExitCode::SUCCESS
}

fn answer(socket: impl AsFd, id: u64, outcome: std::io::Result<u64>) {
    // Nobody may be there any more: then the end comes next.
    let _ = send(socket, &Answer { id, outcome }.to_bytes(), SendFlags::NOSIGNAL);
}

fn unknown() -> std::io::Error {
    std::io::Error::other(UnknownFile)
}

/// The files that were given to it, by what they are called.
#[derive(Default)]
struct Files {
    /// `None` for one that there was no room for.
    open: Mutex<HashMap<u64, Option<Arc<Held>>>>,
    opened: Condvar,
}

impl Files {
    fn open(&self, number: u64, held: Option<Held>) {
        self.open.lock().insert(number, held.map(Arc::new));
        self.opened.notify_all();
    }

    fn close(&self, number: u64) {
        let closed = self.open.lock().remove(&number);
        drop(closed);
    }

    /// The file of that name, which may come within `limit`.
    fn get(&self, number: u64, limit: Duration) -> Option<Arc<Held>> {
        let mut open = self.open.lock();
        self.opened.wait_while_for(&mut open, |open| !open.contains_key(&number), limit);
        open.get(&number)?.clone()
    }
}

/// An open file and its witness. They are let go of together: the lock is on the first.
struct Held {
    file: File,
    witness: Option<File>,
    /// Made by whoever writes first: it asks the file system, which may not answer.
    writes: OnceLock<Writes>,
}

impl Held {
    fn of(mut opened: Vec<OwnedFd>, parked: u32) -> Option<Self> {
        if parked > 0 {
            opened = parked_in(opened.first()?.as_fd(), parked as usize).ok()?;
        }
        let mut opened = opened.into_iter().map(File::from);
        let (file, witness) = (opened.next()?, opened.next());
        Some(Self { writes: OnceLock::new(), file, witness })
    }

    fn file(&self, by_witness: bool) -> std::io::Result<&File> {
        if by_witness { self.witness.as_ref().ok_or_else(unknown) } else { Ok(&self.file) }
    }

    /// Carries out what needs no memory.
    fn carry_out(&self, verb: Verb) -> std::io::Result<u64> {
        match verb {
            Verb::Allocate { mode, offset, length } => {
                let extent = Extent::new(Bytes(offset), Bytes(length));
                allocate(&self.file, FallocateFlags::from_bits_retain(mode), extent)?;
                Ok(0)
            }
            Verb::Sync { by_witness } => {
                let file = self.file(by_witness)?;
                retry(|| Ok(rustix::fs::fdatasync(file)?))?;
                Ok(0)
            }
            Verb::Length => length_of(&self.file),
            _ => Err(std::io::Error::from_raw_os_error(libc::EINVAL)),
        }
    }

    /// Carries out what may have its bytes in `memory`.
    fn carry_out_with(&self, memory: &Shared, verb: Verb) -> std::io::Result<u64> {
        let bytes = |slot, length| memory.slot(slot, length).ok_or(std::io::Error::from_raw_os_error(libc::EFAULT));
        match verb {
            Verb::Read { by_witness, offset, length, slot } => {
                read_some(self.file(by_witness)?, offset, bytes(slot, length)?)
            }
            Verb::Write { by_witness, offset, length, slot } => {
                write_some(self.file(by_witness)?, offset, bytes(slot, length)?)
            }
            Verb::Holes { offset, length, slot, unit, may_be_short } => {
                let extent = Extent::new(Bytes(offset), Bytes(length));
                let found = find_holes(&self.file, extent, unit.into(), may_be_short)?;
                Ok(found.put(bytes(slot, super::HOLES_BYTES as u64)?))
            }
            other => self.carry_out(other),
        }
    }
}

struct Work {
    id: u64,
    verb: Verb,
    held: Arc<Held>,
}

impl Work {
    fn carry_out(self) {
        let outcome = self.held.carry_out(self.verb);
        // First let go of, so that who is told that all is done may close it.
        drop(self.held);
        answer(std::io::stdin(), self.id, outcome);
    }
}

/// As many threads as there were requests at once.
struct Threads {
    work: Sender<Work>,
    queue: Arc<Mutex<Receiver<Work>>>,
    /// How many are without work.
    idle: Arc<AtomicUsize>,
}

impl Default for Threads {
    fn default() -> Self {
        let (work, queue) = channel();
        Self { work, queue: Arc::new(Mutex::new(queue)), idle: Arc::default() }
    }
}

impl Threads {
    /// There can be no more threads, and none may ever come for what waits.
    fn carry_out_here(&self) {
        // Somebody who waits for work has the queue, and takes it.
        let next = self.queue.try_lock().and_then(|queue| queue.try_recv().ok());
        if let Some(work) = next {
            work.carry_out();
        }
    }

    fn run(&self, work: Work) {
        let is_taken = self.idle.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |idle| idle.checked_sub(1)).is_ok();
        let _ = self.work.send(work);
        if is_taken {
            return;
        }
        let (queue, idle) = (Arc::clone(&self.queue), Arc::clone(&self.idle));
        let serve = move || {
            loop {
                let next = queue.lock().recv();
                let Ok(work) = next else { return };
                work.carry_out();
                idle.fetch_add(1, Ordering::SeqCst);
            }
        };
        if std::thread::Builder::new().stack_size(STACK_BYTES).spawn(serve).is_err() {
            self.carry_out_here();
        }
    }
}

/// The connection of one worker. Whoever of its threads has nothing to do waits for the next request.
struct Line {
    socket: OwnedFd,
    memory: Shared,
    files: Arc<Files>,
    threads: AtomicUsize,
    /// How many of them wait for a request.
    waiting: AtomicUsize,
}

impl Line {
    fn of(opened: Vec<OwnedFd>, files: &Arc<Files>) -> Option<Arc<Self>> {
        let mut opened = opened.into_iter();
        let (socket, memory) = (opened.next()?, Shared::of(opened.next()?).ok()?);
        let (threads, waiting) = Default::default();
        Some(Arc::new(Self { socket, memory, files: Arc::clone(files), threads, waiting }))
    }

    fn start_thread(self: &Arc<Self>) {
        // There are no more requests at once than slots.
        if self.threads.fetch_add(1, Ordering::SeqCst) >= SLOTS {
            self.threads.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let line = Arc::clone(self);
        // Without one more the request after this waits for one of the others.
        if std::thread::Builder::new().stack_size(STACK_BYTES).spawn(move || line.serve()).is_err() {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            self.threads.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn serve(self: Arc<Self>) {
        while let Ok(Some((message, _))) = receive_message(self.socket.as_fd()) {
            if self.waiting.fetch_sub(1, Ordering::SeqCst) == 1 {
                self.start_thread();
            }
            let held = self.files.get(message.file, FILE_LIMIT);
            match held {
                Some(held) if matches!(message.verb, Verb::Write { .. }) => self.write(message, &held),
                Some(held) => self.answer(message.id, held.carry_out_with(&self.memory, message.verb)),
                None => self.answer(message.id, Err(unknown())),
            }
            self.waiting.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Carries out a write, and those that come meanwhile; or leaves it to the thread that does so already.
    fn write(self: &Arc<Self>, message: Message, held: &Arc<Held>) {
        let writes = held.writes.get_or_init(|| Writes::of(&held.file));
        let mut next = writes.begin(Write { line: Arc::clone(self), message });
        while let Some(Write { line, message }) = next {
            line.answer(message.id, held.carry_out_with(&line.memory, message.verb));
            next = writes.go_on();
        }
    }

    fn answer(&self, id: u64, outcome: std::io::Result<u64>) {
        answer(&self.socket, id, outcome);
    }
}

struct Write {
    line: Arc<Line>,
    message: Message,
}

/// The writes of one file. Where its file system lets one in at a time, one thread carries them out: several would only
/// wake each other up.
struct Writes {
    takes_one: bool,
    state: Mutex<WritesState>,
}

#[derive(Default)]
struct WritesState {
    has_writer: bool,
    queue: VecDeque<Write>,
}

impl Writes {
    fn of(file: &File) -> Self {
        Self { takes_one: takes_one_write(file), state: Mutex::default() }
    }

    /// The write that the caller carries out now; then it goes on.
    fn begin(&self, write: Write) -> Option<Write> {
        let mut state = self.state.lock();
        if self.takes_one && state.has_writer {
            state.queue.push_back(write);
            return None;
        }
        state.has_writer = true;
        Some(write)
    }

    fn go_on(&self) -> Option<Write> {
        let mut state = self.state.lock();
        let next = state.queue.pop_front();
        state.has_writer = next.is_some();
        next
    }
}
