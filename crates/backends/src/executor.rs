//! Who carries out system calls that may wait for a disk, so that no worker does.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use block::{Buffer, Data, Extent};
use rustix::fs::FallocateFlags;
use rustix::io::{Errno, ReadWriteFlags};
use tokio::sync::Semaphore;

/// How many requests of one backend wait in threads at once.
const POOL_DEPTH: usize = 64;

/// Carries out requests off the worker. What a request needs stays with it until the kernel is done, even if nobody
/// waits for the outcome any more.
pub(crate) enum Executor {
    /// The event loop's threads for blocking work.
    Pool(Arc<Semaphore>),
}

impl Executor {
    /// Threads.
    pub(crate) fn pool() -> Self {
        Self::Pool(Arc::new(Semaphore::new(POOL_DEPTH)))
    }

    /// Runs `work` in a thread.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let Self::Pool(depth) = self;
        let permit = Arc::clone(depth).acquire_owned().await.expect("the pool's semaphore is never closed");
        let task = tokio::task::spawn_blocking(move || {
            let outcome = work();
            drop(permit);
            outcome
        });
        task.await.unwrap_or_else(|panic| Err(io::Error::other(panic)))
    }

    /// Fills `buffer` from byte `start` of it on; gives how many of its bytes are filled then, fewer than all only at
    /// the end of the file.
    pub(crate) async fn read(
        &self,
        file: &Arc<File>,
        offset: u64,
        mut buffer: Buffer,
        start: usize,
    ) -> io::Result<(Buffer, usize)> {
        let file = Arc::clone(file);
        let work = move || {
            let filled = start + read_full(&file, offset + start as u64, &mut buffer[start..])?;
            Ok((buffer, filled))
        };
        self.run(work).await
    }

    /// Writes all of `data`, durably if `fua`.
    pub(crate) async fn write(&self, file: &Arc<File>, offset: u64, data: Data, fua: bool) -> io::Result<()> {
        let file = Arc::clone(file);
        self.run(move || write_full(&file, offset, &data, fua)).await
    }

    /// Makes durable what was written to `file`.
    pub(crate) async fn sync(&self, file: &Arc<File>) -> io::Result<()> {
        let file = Arc::clone(file);
        self.run(move || retry(|| Ok(rustix::fs::fdatasync(&file)?))).await
    }

    /// Changes the allocation of `extent`.
    pub(crate) async fn allocate(&self, file: &Arc<File>, mode: FallocateFlags, extent: Extent) -> io::Result<()> {
        let file = Arc::clone(file);
        self.run(move || allocate(&file, mode, extent)).await
    }
}

/// Calls until no signal interrupts.
fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

/// Reads until `into` is full or the file ends; gives how many bytes there were.
pub(crate) fn read_full(file: &File, offset: u64, into: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < into.len() {
        match retry(|| file.read_at(&mut into[filled..], offset + filled as u64))? {
            0 => break,
            count => filled += count,
        }
    }
    Ok(filled)
}

/// Writes all of `data`, durably if `fua`.
pub(crate) fn write_full(file: &File, offset: u64, data: &[u8], fua: bool) -> io::Result<()> {
    let mut written = 0;
    let flags = if fua { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
    while written < data.len() {
        let rest = [io::IoSlice::new(&data[written..])];
        match retry(|| Ok(rustix::io::pwritev2(file, &rest, offset + written as u64, flags)?))? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            count => written += count,
        }
    }
    Ok(())
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

/// Changes the allocation of `extent`.
pub(crate) fn allocate(file: &File, mode: FallocateFlags, extent: Extent) -> io::Result<()> {
    retry(|| Ok(rustix::fs::fallocate(file, mode, extent.offset.0, extent.length.0)?))
}
