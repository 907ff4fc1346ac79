//! io_uring: one ring for each worker that uses a backend, served by a task on that worker.
//!
//! ```text
//!   request ──push──▶ submission queue ──┐                       ┌──▶ its buffer and outcome, to whoever waits
//!                                        │ one enter for all     │
//!   the ring's task: submit, reap, sleep ┴─▶ kernel ──completion─┘
//!        ▲                                      │
//!        └──── woken by a push ◀──── or by ─────┘  the ring's file descriptor
//! ```
//!
//! A request on an idle ring is submitted at once. Those that come while others are under way are gathered until the
//! ring's task runs, so that a batch costs one system call. A request's memory and file belong to the ring until the
//! kernel is done with them, whether anybody waits or not. When a worker's event loop ends, its rings wait for their
//! requests. When a backend is closed, its rings live on until they are idle.

#![expect(unsafe_code, reason = "the kernel works on memory that a submission queue entry only points to")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;

use block::{Buffer, Data, Extent};
use io_uring::{IoUring, opcode, squeue, types};
use parking_lot::Mutex;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};

/// How many requests of one backend are under way at once; also the size of a submission queue, so that it never
/// overflows.
const DEPTH: u32 = 256;

/// A request for the kernel, with all that it works on.
pub(crate) enum Request {
    /// Fill the buffer from byte `start` of it on; the buffer's first byte is at `offset` of the file.
    Read {
        /// Where the buffer's first byte is in the file.
        offset: u64,
        /// What is filled.
        buffer: Buffer,
        /// How much of it is filled already.
        start: usize,
        /// Whether it fails where the kernel would have to wait with it.
        nowait: bool,
    },
    /// Write the data from byte `start` of it on; its first byte goes to `offset` of the file.
    Write {
        /// Where the data's first byte goes in the file.
        offset: u64,
        /// What is written.
        data: Data,
        /// How much of it is written already.
        start: usize,
        /// Whether it is durable when it is answered.
        fua: bool,
        /// Whether it fails where the kernel would have to wait with it.
        nowait: bool,
    },
    /// Make durable what was written.
    Sync,
    /// Change the allocation of the extent, in the manner of fallocate's flags.
    Allocate {
        /// fallocate's flags.
        mode: i32,
        /// Of what.
        extent: Extent,
    },
}

/// What the kernel made of a request, which is given back.
pub(crate) type Answer = (Request, io::Result<usize>);

/// One backend's rings.
pub(crate) struct Rings {
    rings: Mutex<Vec<(ThreadId, Arc<Ring>)>>,
    depth: Arc<Semaphore>,
    /// Whether the last ring that was wanted could not be made.
    is_short: AtomicBool,
}

struct Ring {
    queue: Mutex<Queue>,
    /// The ring's task has something to do.
    wake: Notify,
    /// The backend is closed: the task ends when nothing is under way.
    is_closing: AtomicBool,
    /// The ring's task is gone: nobody would answer a new request. Set under the queue's lock.
    is_orphaned: AtomicBool,
}

struct Queue {
    uring: IoUring,
    /// Requests under way; the index is what the kernel calls them by.
    pending: Vec<Option<Pending>>,
    free: Vec<usize>,
}

struct Pending {
    request: Request,
    /// Kept open, with our lock on it, until the kernel is done.
    _file: Arc<File>,
    _permit: OwnedSemaphorePermit,
    answer: oneshot::Sender<Answer>,
}

/// A worker has no ring, and nothing was asked of the kernel: there may be no descriptors or no memory for one just now.
#[derive(Debug)]
struct NoRing(io::Error);

impl std::fmt::Display for NoRing {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "no ring could be made: {}", self.0)
    }
}

impl std::error::Error for NoRing {}

/// Whether a request has failed because there was no ring for it: somebody else can carry it out.
pub(crate) fn is_ringless(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|cause| cause.is::<NoRing>())
}

impl Rings {
    /// Rings, if the kernel has them and this process may use them.
    pub(crate) fn new() -> io::Result<Self> {
        // Tried once, so that opening a backend reports it, not a later read.
        drop(new_uring()?);
        Ok(Self {
            rings: Mutex::default(),
            depth: Arc::new(Semaphore::new(DEPTH as usize)),
            is_short: AtomicBool::new(false),
        })
    }

    /// Has the kernel carry out `request` on `file`.
    pub(crate) async fn perform(&self, file: &Arc<File>, request: Request) -> Answer {
        let permit = Arc::clone(&self.depth).acquire_owned().await.expect("the semaphore is never closed");
        let (answer, outcome) = oneshot::channel();
        let mut pending = Pending { request, _file: Arc::clone(file), _permit: permit, answer };
        loop {
            let ring = match self.ring_of_this_worker() {
                Ok(ring) => ring,
                Err(error) => return (pending.request, Err(self.ringless(error))),
            };
            match ring.push(pending) {
                Ok(()) => break,
                Err(refused) => pending = refused,
            }
        }
        outcome.await.expect("a ring answers every request, even when its event loop ends")
    }

    fn ringless(&self, error: io::Error) -> io::Error {
        if !self.is_short.swap(true, Ordering::Relaxed) {
            tracing::warn!(%error, "no ring could be made: until one can, threads do its work at a higher cost");
        }
        io::Error::other(NoRing(error))
    }

    fn ring_of_this_worker(&self) -> io::Result<Arc<Ring>> {
        let this = std::thread::current().id();
        let mut rings = self.rings.lock();
        if let Some(place) = rings.iter().position(|(thread, _)| *thread == this) {
            if !rings[place].1.is_orphaned.load(Ordering::Acquire) {
                return Ok(Arc::clone(&rings[place].1));
            }
            rings.swap_remove(place);
        }
        // Rings of ended threads would stay in the list.
        rings.retain(|(_, ring)| !ring.is_orphaned.load(Ordering::Acquire));
        let ring = Ring::start()?;
        self.is_short.store(false, Ordering::Relaxed);
        rings.push((this, Arc::clone(&ring)));
        Ok(ring)
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        for (_, ring) in self.rings.lock().drain(..) {
            ring.is_closing.store(true, Ordering::Release);
            ring.wake.notify_one();
        }
    }
}

/// The ring's file descriptor, valid as long as the ring.
struct RingFd {
    descriptor: RawFd,
    _ring: Arc<Ring>,
}

impl AsRawFd for RingFd {
    fn as_raw_fd(&self) -> RawFd {
        self.descriptor
    }
}

impl Ring {
    /// A ring with its task on the caller's event loop.
    fn start() -> io::Result<Arc<Self>> {
        let uring = new_uring()?;
        let descriptor = uring.as_raw_fd();
        let queue = Queue { uring, pending: Vec::new(), free: Vec::new() };
        let ring = Arc::new(Self {
            queue: Mutex::new(queue),
            wake: Notify::new(),
            is_closing: AtomicBool::new(false),
            is_orphaned: AtomicBool::new(false),
        });
        let descriptor = RingFd { descriptor, _ring: Arc::clone(&ring) };
        // SAFETY: the descriptor is the ring's own, which `RingFd` keeps open for as long as it is registered.
        let readiness = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE)? };
        tokio::spawn(Server { readiness, last_will: LastWill(Arc::clone(&ring)) }.serve());
        Ok(ring)
    }

    /// Queues a request; gives it back if nobody would answer it.
    fn push(&self, pending: Pending) -> Result<(), Pending> {
        let mut queue = self.queue.lock();
        if self.is_orphaned.load(Ordering::Acquire) {
            return Err(pending);
        }
        let was_idle = queue.is_idle();
        queue.push(pending);
        if was_idle {
            queue.submit();
        } else {
            self.wake.notify_one();
        }
        Ok(())
    }

    /// Submits what is queued and answers what is done; true if nothing is left.
    fn advance(&self) -> bool {
        let mut queue = self.queue.lock();
        queue.submit();
        let answers = queue.reap();
        let is_idle = queue.is_idle();
        drop(queue);
        for (to, answer) in answers {
            // Nobody may wait any more: then the request's memory is freed here, now that the kernel is done with it.
            let _ = to.send(answer);
        }
        is_idle
    }
}

/// A ring's task.
struct Server {
    readiness: AsyncFd<RingFd>,
    /// Here and not made by the task: an event loop may end before the task has begun.
    last_will: LastWill,
}

impl Server {
    async fn serve(self) {
        let ring = &self.last_will.0;
        loop {
            let is_idle = ring.advance();
            if is_idle && ring.is_closing.load(Ordering::Acquire) {
                return;
            }
            tokio::select! {
                biased;
                () = ring.wake.notified() => {}
                ready = self.readiness.readable() => match ready {
                    // Completions that come after this wake the task again; those before it are reaped next.
                    Ok(mut ready) => ready.clear_ready(),
                    // The event loop is ending; the drop handler finishes the rest.
                    Err(_) => return,
                },
            }
        }
    }
}

/// What to do when a ring's task ends, for whatever reason.
struct LastWill(Arc<Ring>);

impl Drop for LastWill {
    fn drop(&mut self) {
        let queue = self.0.queue.lock();
        self.0.is_orphaned.store(true, Ordering::Release);
        drop(queue);
        while !self.0.advance() {
            let waited = self.0.queue.lock().uring.submit_and_wait(1);
            if let Err(error) = waited.or_else(|error| if is_passing(&error) { Ok(0) } else { Err(error) }) {
                panic!("waiting for a ring's last requests: {error}");
            }
        }
    }
}

/// A ring whose completions need not interrupt the worker, where the kernel can do that (since 5.19).
fn new_uring() -> io::Result<IoUring> {
    IoUring::builder().setup_coop_taskrun().build(DEPTH).or_else(|_| IoUring::new(DEPTH))
}

/// Errors of entering a ring that go away by themselves.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

impl Queue {
    fn is_idle(&self) -> bool {
        self.free.len() == self.pending.len()
    }

    fn push(&mut self, mut pending: Pending) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.pending.push(None);
            self.pending.len() - 1
        });
        let entry = pending.request.entry(&pending._file).user_data(index as u64);
        self.pending[index] = Some(pending);
        // SAFETY: the request in `pending` owns the memory that the entry points to, on the heap. It stays there
        // untouched until the completion with this index has been reaped; so does the file.
        let pushed = unsafe { self.uring.submission().push(&entry) };
        pushed.expect("no more requests are under way than the queue has room for");
    }

    fn submit(&mut self) {
        while !self.uring.submission().is_empty() {
            match self.uring.submit() {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // The kernel is short of memory or wants completions reaped first: the task comes again.
                Err(error) if is_passing(&error) => return,
                Err(error) => panic!("a ring refused its requests: {error}"),
            }
        }
    }

    fn reap(&mut self) -> Vec<(oneshot::Sender<Answer>, Answer)> {
        let mut answers = Vec::new();
        for completion in self.uring.completion() {
            let index = completion.user_data() as usize;
            let done = self.pending[index].take().expect("the kernel completes every request once");
            self.free.push(index);
            let outcome = match completion.result() {
                failure if failure < 0 => Err(io::Error::from_raw_os_error(-failure)),
                count => Ok(count as usize),
            };
            answers.push((done.answer, (done.request, outcome)));
        }
        answers
    }
}

impl Request {
    /// The entry for the submission queue; it points into this request's memory.
    fn entry(&mut self, file: &File) -> squeue::Entry {
        let descriptor = types::Fd(file.as_raw_fd());
        match self {
            Self::Read { offset, buffer, start, nowait } => {
                let place = *offset + *start as u64;
                let rest = &mut buffer[*start..];
                let entry = opcode::Read::new(descriptor, rest.as_mut_ptr(), rest.len() as u32);
                entry.offset(place).rw_flags(if *nowait { libc::RWF_NOWAIT } else { 0 }).build()
            }
            Self::Write { offset, data, start, fua, nowait } => {
                let place = *offset + *start as u64;
                let rest = &data[*start..];
                let flags = if *fua { libc::RWF_DSYNC } else { 0 } | if *nowait { libc::RWF_NOWAIT } else { 0 };
                let entry = opcode::Write::new(descriptor, rest.as_ptr(), rest.len() as u32);
                entry.offset(place).rw_flags(flags).build()
            }
            Self::Sync => opcode::Fsync::new(descriptor).flags(types::FsyncFlags::DATASYNC).build(),
            Self::Allocate { mode, extent } => {
                opcode::Fallocate::new(descriptor, extent.length.0).offset(extent.offset.0).mode(*mode).build()
            }
        }
    }
}
