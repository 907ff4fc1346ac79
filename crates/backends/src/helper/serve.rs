//! The helper itself. It ends when the process ends that has started it, and never before: signals that end the whole
//! service are not for it.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use block::{Bytes, Extent};
use nix::sys::signal::SigSet;
use parking_lot::Mutex;
use rustix::fs::FallocateFlags;
use rustix::net::{SendFlags, send};

use super::message::{Answer, Message, Verb, receive_message};
use crate::calls::{allocate, retry};

/// Serves the socket that is its standard input.
pub(super) fn serve() -> ExitCode {
    // A service manager tells all processes of a service to end, and a terminal all of a group. This one ends last.
    if SigSet::all().thread_block().is_err() {
        return ExitCode::FAILURE;
    }
    let _ = rustix::thread::set_name(c"transhume-sync");
    let threads = Threads::default();
    let mut files: HashMap<u64, Arc<Held>> = HashMap::new();
    while let Ok(Some((message, opened))) = receive_message(std::io::stdin().as_fd()) {
        let Message { id, verb, .. } = message;
        match (verb, files.get(&message.file)) {
            (Verb::Open, _) => {
                files.extend(Held::of(opened).map(|held| (message.file, Arc::new(held))));
                answer(id, Ok(()));
            }
            (Verb::Close, _) => {
                files.remove(&message.file);
                answer(id, Ok(()));
            }
            (_, Some(held)) => threads.run(Work { id, verb, held: Arc::clone(held) }),
            (_, None) => answer(id, Err(unknown())),
        }
    }
    // What still waits for a device is left to the kernel.
    ExitCode::SUCCESS
}

fn answer(id: u64, outcome: std::io::Result<()>) {
    // Nobody may be there any more: then the end comes next.
    let _ = send(std::io::stdin(), &Answer { id, outcome }.to_bytes(), SendFlags::NOSIGNAL);
}

/// What is said of a file that has not come; no call says it of one that has.
fn unknown() -> std::io::Error {
    std::io::Error::from_raw_os_error(libc::EBADF)
}

/// An open file and its witness. They are let go of together: the lock is on the first.
struct Held {
    file: File,
    witness: Option<File>,
}

impl Held {
    fn of(opened: Vec<OwnedFd>) -> Option<Self> {
        let mut opened = opened.into_iter().map(File::from);
        Some(Self { file: opened.next()?, witness: opened.next() })
    }

    fn carry_out(&self, verb: Verb) -> std::io::Result<()> {
        match verb {
            Verb::Allocate { mode, offset, length } => {
                let extent = Extent::new(Bytes(offset), Bytes(length));
                allocate(&self.file, FallocateFlags::from_bits_retain(mode), extent)
            }
            Verb::Sync { by_witness } => {
                let file = if by_witness { self.witness.as_ref().ok_or_else(unknown)? } else { &self.file };
                retry(|| Ok(rustix::fs::fdatasync(file)?))
            }
            Verb::Open | Verb::Close => Ok(()),
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
        answer(self.id, outcome);
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
    fn run(&self, work: Work) {
        let is_taken = self.idle.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |idle| idle.checked_sub(1)).is_ok();
        let _ = self.work.send(work);
        if is_taken {
            return;
        }
        let (queue, idle) = (Arc::clone(&self.queue), Arc::clone(&self.idle));
        // Without a thread of its own it waits for one of the others.
        let _ = std::thread::Builder::new().stack_size(64 << 10).spawn(move || {
            loop {
                let next = queue.lock().recv();
                let Ok(work) = next else { return };
                work.carry_out();
                idle.fetch_add(1, Ordering::SeqCst);
            }
        });
    }
}
