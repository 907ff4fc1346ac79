//! Who carries out system calls that may wait for a disk, so that no worker does.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use block::{Buffer, Data, Extent};
use rustix::fs::FallocateFlags;
use rustix::io::{Errno, ReadWriteFlags};
use tokio::sync::Semaphore;

use crate::calls::{allocate, length_of, read_full, retry, write_full};
use crate::helper::{HelpedFile, Known, is_unasked};
use crate::holes::{Found, find_holes};
use crate::ring::{Request, Rings};

/// How many requests of one backend wait in threads at once.
const THREADS_MAX: usize = 64;

/// Carries out requests off the worker. What a request needs stays with it until the kernel is done, even if nobody
/// waits for the outcome.
pub(crate) struct Executor {
    /// `None` where the kernel has no io_uring for us: then the threads do everything.
    rings: Option<Rings>,
    /// What everything goes through that the kernel may wait with, so that a device that hangs holds nothing else of
    /// this process.
    helped: Option<HelpedFile>,
    /// Whether the kernel takes reads and writes at once.
    reads: Promptness,
    writes: Promptness,
    /// How many threads this backend may keep waiting.
    threads: Arc<Semaphore>,
}

impl Executor {
    /// Threads of the event loop only.
    pub(crate) fn threads() -> Self {
        Self {
            rings: None,
            helped: None,
            reads: Promptness::default(),
            writes: Promptness::default(),
            threads: Arc::new(Semaphore::new(THREADS_MAX)),
        }
    }

    /// io_uring where it may be used, and threads for what it has no request for.
    pub(crate) fn rings() -> Self {
        let rings = Rings::new();
        if let Err(error) = &rings {
            tracing::warn!(%error, "io_uring may not be used here: threads do its work at a higher cost");
        }
        Self { rings: rings.ok(), ..Self::threads() }
    }

    /// From now on the helper does everything.
    #[cfg(test)]
    pub(crate) fn forget_rings(&mut self) {
        self.rings = None;
    }

    /// The same, with all that may wait for the one file carried out by `helped`.
    pub(crate) fn with_helper(mut self, helped: Option<HelpedFile>) -> Self {
        self.helped = helped;
        self
    }

    fn helper(&self) -> Option<Known> {
        self.helped.as_ref().and_then(HelpedFile::helper)
    }

    /// Runs `work` in a thread.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let permit = Arc::clone(&self.threads).acquire_owned().await.expect("the semaphore is never closed");
        let task = tokio::task::spawn_blocking(move || {
            let outcome = work();
            drop(permit);
            outcome
        });
        task.await.unwrap_or_else(|panic| Err(io::Error::other(panic)))
    }

    /// Fills `buffer` from byte `start` of it on. Returns how many of its bytes are filled then; fewer than all only at
    /// the end of the file.
    pub(crate) async fn read(
        &self,
        file: &Arc<File>,
        offset: u64,
        mut buffer: Buffer,
        mut start: usize,
    ) -> io::Result<(Buffer, usize)> {
        if let Some(rings) = self.rings_for(file, &self.reads) {
            let (back, filled, outcome) = read_by_ring(rings, file, offset, buffer, start, Waiting::Refused).await;
            match outcome {
                Err(error) if would_wait(&error) => (buffer, start) = (back, filled),
                outcome => return outcome.map(|()| (back, filled)).inspect(|_| self.reads.note_prompt()),
            }
            self.reads.note_waiting();
        }
        if let Some(helper) = self.helper() {
            match helper.read(file, offset, &mut buffer, start).await {
                Err(error) if is_unasked(&error) => {}
                outcome => return outcome.map(|filled| (buffer, filled)),
            }
        }
        let Some(rings) = &self.rings else {
            let file = Arc::clone(file);
            let work = move || {
                let filled = start + read_full(&file, offset + start as u64, &mut buffer[start..])?;
                Ok((buffer, filled))
            };
            return self.run(work).await;
        };
        let (buffer, filled, outcome) = read_by_ring(rings, file, offset, buffer, start, Waiting::Allowed).await;
        outcome.map(|()| (buffer, filled))
    }

    /// Writes all of `data`. If it is to be durable, as `fua` says, gives whether it is: otherwise a sync has to follow, which the caller
    /// asks for, and hears of as of any other.
    pub(crate) async fn write(&self, file: &Arc<File>, offset: u64, mut data: Data, fua: bool) -> io::Result<bool> {
        let mut start = 0;
        if let Some(rings) = self.rings_for(file, &self.writes) {
            let (back, written, outcome) = write_by_ring(rings, file, offset, data, fua, Waiting::Refused).await;
            match outcome {
                Err(error) if would_wait(&error) => (data, start) = (back, written),
                outcome => return outcome.inspect(|()| self.writes.note_prompt()).map(|()| fua),
            }
            self.writes.note_waiting();
        }
        if let Some(helper) = self.helper() {
            match helper.write(file, offset, &data, start).await {
                // Then nothing of it is under way, and it is done here rather than not at all.
                Err(error) if is_unasked(&error) => {}
                outcome => return outcome.map(|()| false),
            }
        }
        let Some(rings) = &self.rings else {
            let file = Arc::clone(file);
            return self.run(move || write_full(&file, offset, &data, fua)).await.map(|()| fua);
        };
        write_by_ring(rings, file, offset, data, fua, Waiting::Allowed).await.2.map(|()| fua)
    }

    /// The rings, where they are asked before the helper.
    fn rings_for(&self, file: &Arc<File>, promptness: &Promptness) -> Option<&Rings> {
        let may_be_prompt = self.helped.as_ref().is_some_and(|helped| helped.goes_past_the_cache(file));
        self.rings.as_ref().filter(|_| may_be_prompt && promptness.asks())
    }

    /// How long the file or block device is.
    pub(crate) async fn length(&self, file: &Arc<File>) -> io::Result<u64> {
        if let Some(helper) = self.helper() {
            match helper.length().await {
                Err(error) if is_unasked(&error) => {}
                outcome => return outcome,
            }
        }
        let file = Arc::clone(file);
        self.run(move || length_of(&file)).await
    }

    /// Where `extent` of the file has data, in pieces of whole units.
    pub(crate) async fn holes(
        &self,
        file: &Arc<File>,
        extent: Extent,
        unit: u32,
        may_be_short: bool,
    ) -> io::Result<Found> {
        if let Some(helper) = self.helper() {
            match helper.holes(extent, unit, may_be_short).await {
                Err(error) if is_unasked(&error) => {}
                outcome => return outcome,
            }
        }
        let file = Arc::clone(file);
        self.run(move || find_holes(&file, extent, unit.into(), may_be_short)).await
    }

    /// Makes durable what was written to `file`.
    pub(crate) async fn sync(&self, file: &Arc<File>) -> io::Result<()> {
        if let Some(helper) = self.helper() {
            return helper.sync().await;
        }
        let Some(rings) = &self.rings else {
            let file = Arc::clone(file);
            return self.run(move || retry(|| Ok(rustix::fs::fdatasync(&file)?))).await;
        };
        loop {
            match rings.perform(file, Request::Sync).await.1 {
                Err(error) if is_passing(&error, Waiting::Allowed) => {}
                outcome => return outcome.map(drop),
            }
        }
    }

    /// Changes the allocation of `extent`.
    pub(crate) async fn allocate(&self, file: &Arc<File>, mode: FallocateFlags, extent: Extent) -> io::Result<()> {
        if let Some(helper) = self.helper() {
            return helper.allocate(mode.bits(), extent).await;
        }
        let Some(rings) = &self.rings else {
            let file = Arc::clone(file);
            return self.run(move || allocate(&file, mode, extent)).await;
        };
        let mode = mode.bits() as i32;
        loop {
            match rings.perform(file, Request::Allocate { mode, extent }).await.1 {
                Err(error) if is_passing(&error, Waiting::Allowed) => {}
                outcome => return outcome.map(drop),
            }
        }
    }
}

/// Whether the kernel takes requests of a kind without waiting: it does not where blocks have to be allocated, and some
/// file systems never do. Then it is asked seldom, to find out whether that has changed.
#[derive(Default)]
struct Promptness {
    /// How many requests in a row it would have waited with.
    waited: AtomicU32,
}

impl Promptness {
    /// After so many in a row it is not asked any more.
    const WAITED_MAX: u32 = 8;
    /// One request in so many is asked about all the same.
    const ASKED_OF: u32 = 16;

    fn asks(&self) -> bool {
        let waited = self.waited.load(Ordering::Relaxed);
        if waited < Self::WAITED_MAX {
            return true;
        }
        self.waited.fetch_add(1, Ordering::Relaxed).is_multiple_of(Self::ASKED_OF)
    }

    fn note_waiting(&self) {
        if self.waited.load(Ordering::Relaxed) < Self::WAITED_MAX {
            self.waited.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn note_prompt(&self) {
        if self.waited.load(Ordering::Relaxed) != 0 {
            self.waited.store(0, Ordering::Relaxed);
        }
    }
}

/// Whether the kernel may wait with a request, in a thread that has all files of this process.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waiting {
    Allowed,
    /// It says that it would, and does nothing more.
    Refused,
}

/// The buffer, how much of it is filled, and what has ended that.
async fn read_by_ring(
    rings: &Rings,
    file: &Arc<File>,
    offset: u64,
    mut buffer: Buffer,
    mut start: usize,
    waiting: Waiting,
) -> (Buffer, usize, io::Result<()>) {
    let begin = start;
    let nowait = waiting == Waiting::Refused;
    while start < buffer.len() {
        let (request, outcome) = rings.perform(file, Request::Read { offset, buffer, start, nowait }).await;
        let Request::Read { buffer: back, .. } = request else { unreachable!("a request comes back as itself") };
        buffer = back;
        match outcome {
            Ok(0) => break,
            Ok(count) => start += count,
            Err(error) if is_passing(&error, waiting) => {}
            // Past the page cache only the end of the file is in the middle of a sector, and there is no asking on
            // from there.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput && start > begin => break,
            Err(error) => return (buffer, start, Err(error)),
        }
    }
    (buffer, start, Ok(()))
}

/// The data, how much of it is written, and what has ended that.
async fn write_by_ring(
    rings: &Rings,
    file: &Arc<File>,
    offset: u64,
    mut data: Data,
    fua: bool,
    waiting: Waiting,
) -> (Data, usize, io::Result<()>) {
    let mut start = 0;
    let nowait = waiting == Waiting::Refused;
    while start < data.len() {
        let (request, outcome) = rings.perform(file, Request::Write { offset, data, start, fua, nowait }).await;
        let Request::Write { data: back, .. } = request else { unreachable!("a request comes back as itself") };
        data = back;
        match outcome {
            Ok(0) => return (data, start, Err(io::ErrorKind::WriteZero.into())),
            Ok(count) => start += count,
            Err(error) if is_passing(&error, waiting) => {}
            Err(error) => return (data, start, Err(error)),
        }
    }
    (data, start, Ok(()))
}

/// Errors that say to ask again.
fn is_passing(error: &io::Error, waiting: Waiting) -> bool {
    error.kind() == io::ErrorKind::Interrupted
        || waiting == Waiting::Allowed && error.kind() == io::ErrorKind::WouldBlock
}

/// What the kernel says of a request that it would have to wait with, or may have to.
fn would_wait(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EOPNOTSUPP))
}

/// Reads what the page cache can give at once; `None` if it has nothing of it.
pub(crate) fn read_cached(file: &File, offset: u64, into: &mut [u8]) -> io::Result<Option<usize>> {
    let mut slices = [io::IoSliceMut::new(into)];
    match rustix::io::preadv2(file, &mut slices, offset, ReadWriteFlags::NOWAIT) {
        Ok(count) => Ok(Some(count)),
        Err(Errno::AGAIN | Errno::INTR | Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Writes what the page cache takes at once; `None` if it takes nothing, an error if it never does.
pub(crate) fn write_cached(file: &File, offset: u64, data: &[u8]) -> io::Result<Option<usize>> {
    match rustix::io::pwritev2(file, &[io::IoSlice::new(data)], offset, ReadWriteFlags::NOWAIT) {
        Ok(count) => Ok(Some(count)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
