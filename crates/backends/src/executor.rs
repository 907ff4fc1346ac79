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
use crate::open_file::OpenFile;
use crate::ring::{Request, Rings, is_ringless};
use crate::{Helpers, QemuLocks};

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

    /// The same locks, where the helper alone keeps files open: in a file that it keeps.
    pub(crate) fn keep(&self, locks: QemuLocks) -> QemuLocks {
        match &self.helped {
            Some(helped) => locks.kept(|file| helped.keep(file)),
            None => locks,
        }
    }

    pub(crate) fn helpers(&self) -> Option<&Arc<Helpers>> {
        self.helped.as_ref().map(HelpedFile::helpers)
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
        file: &OpenFile,
        offset: u64,
        mut buffer: Buffer,
        mut start: usize,
    ) -> io::Result<(Buffer, usize)> {
        if let Some((rings, here)) = self.prompt_rings(file, &self.reads) {
            let (back, filled, outcome) = read_by_ring(rings, here, offset, buffer, start, Waiting::Refused).await;
            match outcome {
                Err(error) if would_wait(&error) => self.reads.note_waiting(),
                Err(error) if is_ringless(&error) => {}
                outcome => return outcome.map(|()| (back, filled)).inspect(|_| self.reads.note_prompt()),
            }
            (buffer, start) = (back, filled);
        }
        if let Some(helper) = self.helper() {
            match helper.read(file, offset, &mut buffer, start).await {
                Err(error) if is_unasked(&error) => {}
                outcome => return outcome.map(|filled| (buffer, filled)),
            }
        }
        if let Some((rings, here)) = self.rings_for(file) {
            let (back, filled, outcome) = read_by_ring(rings, here, offset, buffer, start, Waiting::Allowed).await;
            match outcome {
                Err(error) if is_ringless(&error) => (buffer, start) = (back, filled),
                outcome => return outcome.map(|()| (back, filled)),
            }
        }
        self.run_with(file, move |file| {
            let filled = start + read_full(file, offset + start as u64, &mut buffer[start..])?;
            Ok((buffer, filled))
        })
        .await
    }

    /// Writes all of `data`. If it is to be durable, as `fua` says, gives whether it is: otherwise a sync has to follow, which the caller
    /// asks for, and hears of as of any other.
    pub(crate) async fn write(&self, file: &OpenFile, offset: u64, mut data: Data, fua: bool) -> io::Result<bool> {
        let mut start = 0;
        if let Some((rings, here)) = self.prompt_rings(file, &self.writes) {
            let (back, written, outcome) =
                write_by_ring(rings, here, offset, (data, start), fua, Waiting::Refused).await;
            match outcome {
                Err(error) if would_wait(&error) => self.writes.note_waiting(),
                Err(error) if is_ringless(&error) => {}
                outcome => return outcome.inspect(|()| self.writes.note_prompt()).map(|()| fua),
            }
            (data, start) = (back, written);
        }
        if let Some(helper) = self.helper() {
            match helper.write(file, offset, &data, start).await {
                // Then nothing of it is under way, and it is done here rather than not at all.
                Err(error) if is_unasked(&error) => {}
                outcome => return outcome.map(|()| false),
            }
        }
        if let Some((rings, here)) = self.rings_for(file) {
            let (back, written, outcome) =
                write_by_ring(rings, here, offset, (data, start), fua, Waiting::Allowed).await;
            match outcome {
                Err(error) if is_ringless(&error) => (data, start) = (back, written),
                outcome => return outcome.map(|()| fua),
            }
        }
        let write = move |file: &File| write_full(file, offset + start as u64, &data[start..], fua);
        self.run_with(file, write).await.map(|()| fua)
    }

    /// Runs `work` on the file in a thread.
    async fn run_with<T: Send + 'static>(
        &self,
        file: &OpenFile,
        work: impl FnOnce(&File) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let file = file.clone();
        self.run(move || file.with(work)).await
    }

    /// The rings, and what they work on, if there is a descriptor for them.
    fn rings_for<'a>(&'a self, file: &'a OpenFile) -> Option<(&'a Rings, &'a Arc<File>)> {
        self.rings.as_ref().zip(file.descriptor())
    }

    /// The same, where they are asked before the helper.
    fn prompt_rings<'a>(&'a self, file: &'a OpenFile, promptness: &Promptness) -> Option<(&'a Rings, &'a Arc<File>)> {
        let may_be_prompt = self.helped.as_ref().is_some_and(|helped| helped.goes_past_the_cache(file));
        self.rings_for(file).filter(|_| may_be_prompt && promptness.asks())
    }

    /// How long the file or block device is.
    pub(crate) async fn length(&self, file: &OpenFile) -> io::Result<u64> {
        if let Some(helper) = self.helper() {
            match helper.length().await {
                Err(error) if is_unasked(&error) => {}
                outcome => return outcome,
            }
        }
        self.run_with(file, length_of).await
    }

    /// Where `extent` of the file has data, in pieces of whole units.
    pub(crate) async fn holes(
        &self,
        file: &OpenFile,
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
        self.run_with(file, move |file| find_holes(file, extent, unit.into(), may_be_short)).await
    }

    /// Makes durable what was written to `file`.
    pub(crate) async fn sync(&self, file: &OpenFile) -> io::Result<()> {
        file.take_close_failure()?;
        if let Some(helper) = self.helper() {
            match helper.sync().await {
                Err(error) if is_unasked(&error) && helper.may_be_synced_here() => {}
                outcome => return outcome,
            }
        }
        match self.by_rings(file, || Request::Sync).await {
            Some(outcome) => outcome,
            None => self.run_with(file, |file| retry(|| Ok(rustix::fs::fdatasync(file)?))).await,
        }
    }

    /// Changes the allocation of `extent`.
    pub(crate) async fn allocate(&self, file: &OpenFile, mode: FallocateFlags, extent: Extent) -> io::Result<()> {
        if let Some(helper) = self.helper() {
            match helper.allocate(mode.bits(), extent).await {
                Err(error) if is_unasked(&error) => {}
                outcome => return outcome,
            }
        }
        let flags = mode.bits() as i32;
        match self.by_rings(file, || Request::Allocate { mode: flags, extent }).await {
            Some(outcome) => outcome,
            None => self.run_with(file, move |file| allocate(file, mode, extent)).await,
        }
    }

    /// Has the kernel carry out a request without bytes; none if there is no ring for it.
    async fn by_rings(&self, file: &OpenFile, request: impl Fn() -> Request) -> Option<io::Result<()>> {
        let (rings, here) = self.rings_for(file)?;
        loop {
            match rings.perform(here, request()).await.1 {
                Err(error) if is_ringless(&error) => return None,
                Err(error) if is_passing(&error, Waiting::Allowed) => {}
                outcome => return Some(outcome.map(drop)),
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

/// Writes the data from where it is not written yet. The data, how much of it is written, and what has ended that.
async fn write_by_ring(
    rings: &Rings,
    file: &Arc<File>,
    offset: u64,
    (mut data, mut start): (Data, usize),
    fua: bool,
    waiting: Waiting,
) -> (Data, usize, io::Result<()>) {
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
