//! A raw file or block device as a volume.
//!
//! ```text
//!   request ──▶ engine ── memory: the file is in memory (tmpfs, ramfs): carried out in place, done at the first poll
//!                 │
//!                 ├───── page cache: in place where the cache answers at once, otherwise by the executor
//!                 │
//!                 └───── direct: past the page cache by the executor; the last partial 4 KiB of an odd-sized file
//!                        go through the page cache, always and only those, so that no byte is reached in two ways
//! ```
//!
//! A worker never waits for the server of a file system (FUSE, NFS): all volumes of that worker would wait with it.
//! Even the length of a file may have to be asked for there. So a thread asks for it, whatever the engine.

mod holes;
mod open;
mod zeroes;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use block::{
    BLOCK_BYTES, BlockDevice, Buffer, Bytes, Data, Error, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture,
    Mutation, MutationKind, Result, ready,
};
use parking_lot::Mutex;

use crate::SourceIdentity;
use crate::calls::{read_full, size_of, write_full};
use crate::executor::{Executor, read_cached, write_cached};
use crate::helper::is_unasked;
use crate::in_place::in_place;
use crate::open_file::OpenFile;
use crate::{Helpers, PreparedTarget, QemuLocks, TargetError};

pub(crate) use open::direct_alignment_of;
pub use open::{Access, OpenOptions};

/// How a backend reaches its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// The file is in memory: requests are carried out in place.
    Memory,
    /// Through the page cache.
    PageCache,
    /// Past the page cache.
    Direct,
}

/// Requests of more than this are not carried out in place: copying them would hold the worker for too long.
const IN_PLACE_BYTES_MAX: u64 = 4 << 20;

/// A raw file or block device as a volume.
pub struct FileBackend {
    path: PathBuf,
    engine: Engine,
    executor: Executor,
    /// What the engine reads and writes. Our lock is on this open file, so that the kernel keeps it until the last
    /// request is done, even if this process dies.
    file: OpenFile,
    /// The same file through the page cache, for the partial block at an odd end.
    tail: Option<OpenFile>,
    is_block_device: bool,
    /// How large the file is, as far as we have looked.
    size: AtomicU64,
    /// A container may grow up to this: reads past its end give zeroes, writes past its end extend it.
    advertised: Option<Bytes>,
    /// The volume ends here even if the file is larger.
    limit: Option<Bytes>,
    trim: bool,
    geometry: Geometry,
    /// What addresses of buffers must be multiples of.
    memory_alignment: usize,
    sync_failure: Latch,
    /// Somebody has made the file shorter than the volume. What was written behind its end is lost, whatever becomes of the
    /// file later.
    was_cut: AtomicBool,
    /// Whether every write looks for that first: the next one may make the file as long as it was.
    guards_length: AtomicBool,
    /// Whether a look at the length may wait for whoever serves the file system.
    length_waits: bool,
    can: zeroes::Abilities,
    /// The last run of data that was found. Treating a hole as data is always safe, so writers need not update it.
    data_run: Mutex<Option<Extent>>,
}

/// Remembers the first failed sync. The kernel reports such a failure once and then takes the lost pages for clean, so
/// a later sync that succeeds would prove nothing.
#[derive(Default)]
struct Latch {
    failed: AtomicBool,
    cause: Mutex<String>,
}

impl Latch {
    fn check(&self, path: &Path) -> Result<()> {
        if !self.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        let context = format!(
            "{} promises nothing durable any more since a sync of it failed ({}): move the volume to another place; what \
             was written since is in memory only, and a restart loses it",
            path.display(),
            self.cause.lock()
        );
        Err(Error::new(ErrorKind::Io, context))
    }

    fn set(&self, path: &Path, cause: &std::io::Error) {
        let mut first = self.cause.lock();
        if first.is_empty() {
            *first = cause.to_string();
            tracing::error!(path = %path.display(), %cause, "a sync failed: nothing durable is promised any more");
        }
        self.failed.store(true, Ordering::Release);
    }

    fn clear(&self) {
        self.cause.lock().clear();
        self.failed.store(false, Ordering::Release);
    }
}

impl FileBackend {
    /// The file or block device behind it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives `locks`, which are on the same image, to whoever has that open: a server that hangs keeps no process from
    /// ending that has no descriptor there. Not to be asked on a worker.
    #[must_use]
    pub fn keep(&self, locks: QemuLocks) -> QemuLocks {
        in_place(|| self.executor.keep(locks))
    }

    /// The processes that carry out what the kernel may hold for ever, for whoever opens the same once more.
    #[must_use]
    pub fn helpers(&self) -> Option<&Arc<Helpers>> {
        self.executor.helpers()
    }

    /// Whether the open file is the prepared `target`, even if the name now leads elsewhere.
    ///
    /// # Errors
    /// When it is another one.
    pub fn check_is(&self, target: &PreparedTarget) -> std::result::Result<(), TargetError> {
        target.check_open(self.file.name())
    }

    /// What the system says of it. Not to be asked on a worker: it may wait for whoever serves the file system.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn metadata(&self) -> std::io::Result<std::fs::Metadata> {
        in_place(|| self.file.name().metadata())
    }

    /// Which file or block device it is, whatever its name leads to later. Not to be asked on a worker.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn identity(&self) -> std::io::Result<SourceIdentity> {
        in_place(|| SourceIdentity::of(self.file.name(), &self.path))
    }

    /// How it reaches its bytes.
    #[must_use]
    pub const fn engine(&self) -> Engine {
        self.engine
    }

    /// Whether reads come from the medium and not from the page cache.
    #[must_use]
    pub fn reads_the_medium(&self) -> bool {
        self.engine == Engine::Direct
    }

    /// Whether it is a block device, whose old contents nobody knows and whose space is all allocated.
    #[must_use]
    pub const fn is_block_device(&self) -> bool {
        self.is_block_device
    }

    /// Updates the size of the volume. A file or block device that has grown is a larger volume from then on. One that
    /// has shrunk keeps its size, and reads past its end fail.
    ///
    /// # Errors
    /// When the operating system does not say.
    pub async fn refresh_size(&self) -> Result<Bytes> {
        let looked = self.executor.length(&self.file).await;
        let now =
            looked.map_err(|error| Error::from_os(error, format!("looking at the size of {}", self.path.display())))?;
        if now > self.size.load(Ordering::Acquire) {
            if let Some(tail) = &self.tail {
                // The bytes at the old odd end are reached past the page cache from now on.
                self.executor.sync(tail).await.map_err(|error| self.sync_failed(error))?;
            }
            self.size.fetch_max(now, Ordering::AcqRel);
        }
        Ok(self.geometry().size)
    }

    /// Whether a sync has failed: what was written before it may be in memory only, and durable nowhere.
    #[must_use]
    pub fn has_failed_sync(&self) -> bool {
        self.sync_failure.failed.load(Ordering::Acquire)
    }

    /// Why nothing durable is promised any more, if so.
    #[must_use]
    pub fn sync_failure(&self) -> Option<Error> {
        self.sync_failure.check(&self.path).err()
    }

    /// Promises durability again after a failed sync. Only for a caller that has given up all writes since the last
    /// successful sync, and repeats them or does without. Those bytes may be lost although they read as written.
    pub fn forget_failed_sync(&self) {
        self.sync_failure.clear();
    }

    pub(crate) const fn file(&self) -> &OpenFile {
        &self.file
    }

    pub(crate) async fn in_a_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
    ) -> std::io::Result<T> {
        self.executor.run(work).await
    }

    /// Where the bytes begin that are reached through the page cache although the others are not.
    pub(crate) fn tail_start(&self) -> u64 {
        match self.tail {
            Some(_) => self.geometry().size.align_down(BLOCK_BYTES).0,
            None => u64::MAX,
        }
    }

    fn failed(&self, error: std::io::Error, verb: &str, extent: Extent) -> Error {
        Error::from_os(error, format!("{verb} {extent} of {}", self.path.display()))
    }

    fn sync_failed(&self, error: std::io::Error) -> Error {
        // A sync that nobody has carried out has lost nothing: the next one covers what it was to cover.
        if !is_unasked(&error) {
            self.sync_failure.set(&self.path, &error);
        }
        Error::from_os(error, format!("syncing {}", self.path.display()))
    }

    /// Fills what lies past the end of the file with zeroes, where the file may be shorter than the volume.
    fn finish_read(&self, offset: Bytes, mut buffer: Buffer, filled: usize) -> Result<Buffer> {
        if filled < buffer.len() {
            if self.advertised.is_none() {
                let context = format!(
                    "{} ends at {}, not at {}: it was made shorter while it was in use",
                    self.path.display(),
                    offset.0 + filled as u64,
                    self.geometry().size.0
                );
                return Err(Error::new(ErrorKind::Io, context));
            }
            buffer[filled..].fill(0);
        }
        Ok(buffer)
    }

    async fn read_slowly(&self, offset: Bytes, buffer: Buffer, start: usize) -> Result<Buffer> {
        let extent = Extent::new(offset, buffer.len().into());
        let outcome = self.executor.read(&self.file, offset.0, buffer, start).await;
        let (buffer, filled) = outcome.map_err(|error| self.failed(error, "reading", extent))?;
        self.finish_read(offset, buffer, filled)
    }

    /// Reads past the page cache, but for the partial block at an odd end.
    async fn read_direct(&self, offset: Bytes, mut buffer: Buffer) -> Result<Buffer> {
        let extent = Extent::new(offset, buffer.len().into());
        let tail_start = self.tail_start();
        let Some(tail) = self.tail.as_ref().filter(|_| extent.end().0 > tail_start) else {
            return self.read_slowly(offset, buffer, 0).await;
        };
        let body = tail_start.saturating_sub(offset.0) as usize;
        let whole = buffer.len();
        if body > 0 {
            buffer.set_len(body);
            buffer = self.read_slowly(offset, buffer, 0).await?;
            buffer.set_len(whole);
        }
        let outcome = self.executor.read(tail, offset.0, buffer, body).await;
        let (buffer, filled) = outcome.map_err(|error| self.failed(error, "reading", extent))?;
        self.finish_read(offset, buffer, filled)
    }

    /// Writes through the executor; `file` is the one that reaches all of the extent.
    async fn write_slowly(&self, file: &OpenFile, offset: Bytes, data: Data, fua: bool) -> Result<()> {
        let extent = Extent::new(offset, data.len().into());
        let written = self.executor.write(file, offset.0, data, fua).await.map_err(|error| {
            if fua && error.raw_os_error() == Some(libc::EIO) {
                self.sync_failure.set(&self.path, &error);
            }
            self.failed(error, "writing", extent)
        })?;
        if fua && !written { self.sync().await } else { Ok(()) }
    }

    async fn write_direct(&self, offset: Bytes, data: Data, fua: bool) -> Result<()> {
        let end = offset.0 + data.len() as u64;
        let tail_start = self.tail_start();
        let Some(tail) = self.tail.as_ref().filter(|_| end > tail_start) else {
            return self.write_slowly(&self.file, offset, self.aligned(data), fua).await;
        };
        let body = tail_start.saturating_sub(offset.0) as usize;
        if body > 0 {
            self.write_slowly(&self.file, offset, self.aligned(data.slice(0..body)), fua).await?;
        }
        self.write_through_cache(tail, offset + Bytes::from(body), data.slice(body..data.len()), fua).await
    }

    /// Writes, and syncs apart from that if `fua`. If a durable write failed as one, nobody could say whether its sync
    /// failed and lost what others wrote.
    async fn write_through_cache(&self, file: &OpenFile, offset: Bytes, data: Data, fua: bool) -> Result<()> {
        self.write_slowly(file, offset, data, false).await?;
        if fua && self.engine != Engine::Memory { self.sync().await } else { Ok(()) }
    }

    /// The same bytes at an address that the disk can read from.
    fn aligned(&self, data: Data) -> Data {
        if data.as_ptr().addr().is_multiple_of(self.memory_alignment) { data } else { Data::copy_of(&data) }
    }

    /// How much of `data` the page cache took at once, where it is asked at all.
    fn write_in_place(&self, extent: Extent, data: &Data) -> usize {
        if self.engine != Engine::PageCache || extent.length.0 > IN_PLACE_BYTES_MAX || !self.can.write_at_once() {
            return 0;
        }
        let Some(file) = self.file.descriptor() else { return 0 };
        match write_cached(file, extent.offset.0, data) {
            Ok(written) => written.unwrap_or(0),
            // It cannot be asked (ext4), or it failed: then the proper write says why.
            Err(error) => {
                self.can.note_write_at_once(&error);
                0
            }
        }
    }

    /// Writes data in the way of the engine.
    async fn write_data(&self, offset: Bytes, data: Data, fua: bool) -> Result<()> {
        match self.engine {
            Engine::Direct => self.write_direct(offset, data, fua).await,
            Engine::Memory if data.len() as u64 <= IN_PLACE_BYTES_MAX => {
                let extent = Extent::new(offset, data.len().into());
                let outcome = self.file.with(|file| write_full(file, offset.0, &data, false));
                outcome.map_err(|error| self.failed(error, "writing", extent))
            }
            Engine::PageCache | Engine::Memory => self.write_through_cache(&self.file, offset, data, fua).await,
        }
    }

    async fn sync(&self) -> Result<()> {
        self.sync_failure.check(&self.path)?;
        self.executor.sync(&self.file).await.map_err(|error| self.sync_failed(error))?;
        self.check_length().await?;
        // A sync that failed meanwhile may have taken the report of what this one covers.
        self.sync_failure.check(&self.path)
    }

    /// Looks before every write whether somebody has made the file shorter, or no more. It is for a target: what it has lost
    /// nobody would copy again.
    pub fn guard_length(&self, guards: bool) {
        self.guards_length.store(guards, Ordering::Relaxed);
    }

    /// Refuses to promise anything of a file that somebody has made shorter than the volume.
    async fn check_length(&self) -> Result<()> {
        if !self.length_waits || !self.may_be_cut() {
            return self.check_length_at_once();
        }
        let size = self.geometry().size;
        self.judge_length(size, self.executor.length(&self.file).await)
    }

    /// The same at once, for a file system that has the lengths of its files in memory.
    fn check_length_at_once(&self) -> Result<()> {
        let size = self.geometry().size;
        if !self.may_be_cut() {
            return Ok(());
        }
        self.judge_length(size, size_of(self.file.name(), false))
    }

    const fn may_be_cut(&self) -> bool {
        !self.is_block_device && self.advertised.is_none()
    }

    /// What `found`, the length of the file, says of a volume of `size`: what has failed to be found out says nothing.
    fn judge_length(&self, size: Bytes, found: std::io::Result<u64>) -> Result<()> {
        if found.is_ok_and(|length| length < size.0) {
            self.was_cut.store(true, Ordering::Release);
        }
        if !self.was_cut.load(Ordering::Acquire) {
            return Ok(());
        }
        let context = format!(
            "{} was made shorter than its {size} while it was in use, and what was written behind its end is lost",
            self.path.display()
        );
        Err(Error::new(ErrorKind::Io, context))
    }

    /// Begins a write. What the engine can carry out at once is done then.
    fn begin_write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        let extent = mutation.extent();
        match mutation.kind() {
            MutationKind::Data(data) if self.engine == Engine::Memory && extent.length.0 <= IN_PLACE_BYTES_MAX => {
                let outcome = self.file.with(|file| write_full(file, extent.offset.0, data, false));
                ready(outcome.map_err(|error| self.failed(error, "writing", extent)))
            }
            MutationKind::Data(data) => {
                let written = if mutation.fua { 0 } else { self.write_in_place(extent, data) };
                if written == data.len() {
                    return ready(Ok(()));
                }
                let offset = extent.offset + Bytes::from(written);
                let data = data.slice(written..data.len());
                Box::pin(async move {
                    if mutation.fua {
                        self.sync_failure.check(&self.path)?;
                    }
                    self.write_data(offset, data, mutation.fua).await
                })
            }
            MutationKind::Zeroes { may_unmap } => {
                let may_unmap = *may_unmap && self.trim;
                Box::pin(self.clear(extent, may_unmap, mutation.fua))
            }
            MutationKind::Discard if !self.trim => ready(Ok(())),
            MutationKind::Discard => Box::pin(self.clear(extent, true, mutation.fua)),
        }
    }
}

impl BlockDevice for FileBackend {
    fn geometry(&self) -> Geometry {
        let size = Bytes(self.size.load(Ordering::Acquire));
        let size = self.advertised.map_or(size, |advertised| advertised.max(size));
        Geometry { size: self.limit.map_or(size, |limit| limit.min(size)), ..self.geometry }
    }

    fn read(&self, offset: Bytes, mut buffer: Buffer) -> IoFuture<'_, Buffer> {
        let extent = Extent::new(offset, buffer.len().into());
        match self.engine {
            Engine::Memory if extent.length.0 <= IN_PLACE_BYTES_MAX => {
                let filled = self.file.with(|file| read_full(file, offset.0, &mut buffer));
                ready(match filled {
                    Ok(filled) => self.finish_read(offset, buffer, filled),
                    Err(error) => Err(self.failed(error, "reading", extent)),
                })
            }
            Engine::PageCache if extent.length.0 <= IN_PLACE_BYTES_MAX => {
                let Some(file) = self.file.descriptor() else {
                    return Box::pin(self.read_slowly(offset, buffer, 0));
                };
                match read_cached(file, offset.0, &mut buffer) {
                    Ok(Some(filled)) if filled == buffer.len() => ready(Ok(buffer)),
                    Ok(filled) => Box::pin(self.read_slowly(offset, buffer, filled.unwrap_or(0))),
                    Err(error) => ready(Err(self.failed(error, "reading", extent))),
                }
            }
            Engine::Memory | Engine::PageCache => Box::pin(self.read_slowly(offset, buffer, 0)),
            Engine::Direct => Box::pin(self.read_direct(offset, buffer)),
        }
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        if !self.guards_length.load(Ordering::Relaxed) {
            return self.begin_write(mutation);
        }
        if self.length_waits {
            // The write goes to the same server: a look of its own before each costs little beside it.
            return Box::pin(async move {
                self.check_length().await?;
                self.begin_write(mutation).await
            });
        }
        match self.check_length_at_once() {
            Ok(()) => self.begin_write(mutation),
            Err(error) => ready(Err(error)),
        }
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        match self.engine {
            Engine::Memory => ready(self.check_length_at_once()),
            Engine::PageCache | Engine::Direct => Box::pin(self.sync()),
        }
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        self.describe(extent)
    }

    fn keeps_holes(&self) -> bool {
        // The file system has nothing there, and says so of data that was never written out, too.
        !self.is_block_device
    }
}

impl std::fmt::Debug for FileBackend {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "FileBackend({}, {:?})", self.path.display(), self.engine)
    }
}

#[cfg(test)]
mod tests;
