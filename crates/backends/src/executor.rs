//! Who carries out system calls that may wait for a disk, so that no worker does.

use std::fs::File;
use std::io;
use std::sync::Arc;

use block::{Buffer, Data, Extent};
use rustix::fs::FallocateFlags;
use rustix::io::{Errno, ReadWriteFlags};
use tokio::sync::Semaphore;

use crate::calls::{allocate, read_full, retry, write_full};
use crate::helper::{HelpedFile, Known};
use crate::ring::{Request, Rings};

/// How many requests of one backend wait in threads at once.
const THREADS_MAX: usize = 64;

/// Carries out requests off the worker. What a request needs stays with it until the kernel is done, even if nobody
/// waits for the outcome.
pub(crate) struct Executor {
    /// `None` where the kernel has no io_uring for us: then the threads do everything.
    rings: Option<Rings>,
    /// What syncs and changes of allocation go through, so that a device that hangs holds nothing else of this process.
    helped: Option<HelpedFile>,
    /// How many threads this backend may keep waiting.
    threads: Arc<Semaphore>,
}

impl Executor {
    /// Threads of the event loop only.
    pub(crate) fn threads() -> Self {
        Self { rings: None, helped: None, threads: Arc::new(Semaphore::new(THREADS_MAX)) }
    }

    /// io_uring where it may be used, and threads for what it has no request for.
    pub(crate) fn rings() -> Self {
        let rings = Rings::new();
        if let Err(error) = &rings {
            tracing::warn!(%error, "io_uring may not be used here: threads do its work at a higher cost");
        }
        Self { rings: rings.ok(), ..Self::threads() }
    }

    /// The same, with syncs and changes of allocation of the one file carried out by `helped`.
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
        let Some(rings) = &self.rings else {
            let file = Arc::clone(file);
            let work = move || {
                let filled = start + read_full(&file, offset + start as u64, &mut buffer[start..])?;
                Ok((buffer, filled))
            };
            return self.run(work).await;
        };
        let begin = start;
        while start < buffer.len() {
            let (request, outcome) = rings.perform(file, Request::Read { offset, buffer, start }).await;
            let Request::Read { buffer: back, .. } = request else { unreachable!("a request comes back as itself") };
            buffer = back;
            match outcome {
                Ok(0) => break,
                Ok(count) => start += count,
                Err(error) if is_passing(&error) => {}
                // Past the page cache only the end of the file is in the middle of a sector, and there is no asking on
                // from there.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput && start > begin => break,
                Err(error) => return Err(error),
            }
        }
        Ok((buffer, start))
    }

    /// Writes all of `data`, durably if `fua`.
    pub(crate) async fn write(&self, file: &Arc<File>, offset: u64, mut data: Data, fua: bool) -> io::Result<()> {
        let Some(rings) = &self.rings else {
            let file = Arc::clone(file);
            return self.run(move || write_full(&file, offset, &data, fua)).await;
        };
        let mut start = 0;
        while start < data.len() {
            let (request, outcome) = rings.perform(file, Request::Write { offset, data, start, fua }).await;
            let Request::Write { data: back, .. } = request else { unreachable!("a request comes back as itself") };
            data = back;
            match outcome {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => start += count,
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
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
                Err(error) if is_passing(&error) => {}
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
                Err(error) if is_passing(&error) => {}
                outcome => return outcome.map(drop),
            }
        }
    }
}

/// Errors that say to ask again.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
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
