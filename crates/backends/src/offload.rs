//! Copying within one file system that lets two files share blocks (reflink: XFS, btrfs): no byte is read or written.
//!
//! Whether the file system does it is tried once, with two small unnamed files beside source and target. Then
//! `copy_file_range` is asked, which shares blocks where possible. Other file systems are not asked. They would copy
//! the bytes, a little cheaper than the mirror does, but unchecked.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::{Bytes, Error, Extent, IoFuture, Offload, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::FileBackend;
use crate::target::directory_of;

/// Shares the blocks of one file with another of the same file system.
pub struct FileOffload {
    source: Arc<FileBackend>,
    target: Arc<FileBackend>,
    /// What shared extents begin and end at multiples of.
    unit: u64,
    /// It has refused or failed once, and is not asked again.
    given_up: AtomicBool,
}

impl FileOffload {
    /// From `source` to `target`, if their file system shares blocks.
    pub async fn between(source: &Arc<FileBackend>, target: &Arc<FileBackend>) -> Option<Self> {
        let (from, to) = (Arc::clone(source), Arc::clone(target));
        let unit = target.in_a_thread(move || Ok(shared_unit(&from, &to))).await.ok().flatten()?;
        let (source, target) = (Arc::clone(source), Arc::clone(target));
        Some(Self { source, target, unit, given_up: AtomicBool::new(false) })
    }

    async fn share(&self, extent: Extent) -> Result<Bytes> {
        // The bytes at an odd end are reached in one way only, and this is another.
        let end = extent.end().0.min(self.source.tail_start()).min(self.target.tail_start());
        let end = Bytes(end).align_down(self.unit);
        let is_aligned = extent.offset.is_multiple_of(self.unit);
        if end <= extent.offset || !is_aligned || self.given_up.load(Ordering::Relaxed) {
            return Ok(Bytes::ZERO);
        }
        let (from, to) = (self.source.file().clone(), self.target.file().clone());
        let (start, end) = (extent.offset.0, end.0);
        let share = move || from.with(|from| to.with(|to| share(from, to, start, end)));
        let shared = self.target.in_a_thread(share).await;
        if !matches!(shared, Ok(end) if end > start) {
            self.given_up.store(true, Ordering::Relaxed);
        }
        let end = shared.map_err(|error| {
            let (source, target) = (self.source.path().display(), self.target.path().display());
            Error::from_os(error, format!("sharing {extent} of {source} with {target}"))
        })?;
        Ok(Bytes(end) - extent.offset)
    }
}

impl Offload for FileOffload {
    fn copy(&self, extent: Extent) -> IoFuture<'_, Bytes> {
        Box::pin(self.share(extent))
    }
}

impl std::fmt::Debug for FileOffload {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "FileOffload({}, {})", self.source.path().display(), self.target.path().display())
    }
}

/// Shares the bytes from `start` to `end`, and gives where it stopped.
fn share(from: &File, to: &File, start: u64, end: u64) -> std::io::Result<u64> {
    let (mut read_at, mut write_at) = (start, start);
    while read_at < end {
        let left = (end - read_at) as usize;
        match rustix::fs::copy_file_range(from, Some(&mut read_at), to, Some(&mut write_at), left) {
            Ok(0) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::TXTBSY) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(read_at)
}

/// The file system's block, if files beside these two can share blocks.
fn shared_unit(source: &FileBackend, target: &FileBackend) -> Option<u64> {
    let (one, other) = (source.file().name().metadata().ok()?, target.file().name().metadata().ok()?);
    if !one.is_file() || !other.is_file() {
        return None;
    }
    let unit = one.blksize().max(other.blksize()).max(4096);
    let (from, to) = (nameless(source.path())?, nameless(target.path())?);
    (&from).write_all(&vec![1; unit as usize]).ok()?;
    rustix::fs::ioctl_ficlone(&to, &from).ok()?;
    Some(unit)
}

/// A file without a name beside the one at `path`.
fn nameless(path: &Path) -> Option<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::open(directory_of(path), flags, Mode::RUSR | Mode::WUSR).ok().map(File::from)
}
