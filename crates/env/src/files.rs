//! Small files that outlive the process, and how durable each step is.
//!
//! Code that keeps a decision in a file relies on two things and nothing else. Bytes are durable when [`Files::write`]
//! has given them back. Names are durable when [`Files::sync_directory`] has returned. Without it, name changes reach
//! the disk in the order in which they were asked for, or not at all.

use std::fs::File;
use std::io::{ErrorKind, Result, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FallocateFlags, fallocate};

/// The files of a process. Paths are absolute. Nothing here waits for long: these are small files of the control plane.
pub trait Files: Send + Sync + 'static {
    /// Makes the directory and those above it, as far as they are missing.
    ///
    /// # Errors
    /// What the store says, as in all that follows.
    fn create_directory(&self, path: &Path) -> Result<()>;

    /// What is in the directory, by name.
    ///
    /// # Errors
    /// `NotFound` if there is no such directory.
    fn list(&self, directory: &Path) -> Result<Vec<PathBuf>>;

    /// All of the file's bytes.
    ///
    /// # Errors
    /// `NotFound` if there is no such file.
    fn read(&self, path: &Path) -> Result<Vec<u8>>;

    /// Makes the file hold `bytes` and nothing else, durably. A crash in the midst of it leaves anything: write a new file
    /// and rename it.
    ///
    /// # Errors
    /// `StorageFull` if there is no room; the file may then hold a part.
    fn write(&self, path: &Path, bytes: &[u8]) -> Result<()>;

    /// Makes a new file of `length` zeroes that are written, so that no later write to it needs the store's own metadata.
    /// Durable.
    ///
    /// # Errors
    /// `AlreadyExists`; `StorageFull`.
    fn create_zeroed(&self, path: &Path, length: u64) -> Result<()>;

    /// Makes sure that there is a file of `length` bytes, with room for all of them where the store can reserve it. What it
    /// holds stays. Not durable.
    ///
    /// # Errors
    /// `StorageFull`.
    fn reserve(&self, path: &Path, length: u64) -> Result<()>;

    /// Adds `bytes` to the end of the file, and makes it if there is none. Not durable.
    ///
    /// # Errors
    /// `StorageFull`.
    fn append(&self, path: &Path, bytes: &[u8]) -> Result<()>;

    /// Gives a file or directory another name, which a file may have had before: then that one is gone.
    ///
    /// # Errors
    /// `NotFound` if there is nothing under the old one.
    fn rename(&self, from: &Path, to: &Path) -> Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    fn remove_file(&self, path: &Path) -> Result<()>;

    /// Removes a directory with all that is in it.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    fn remove_directory(&self, path: &Path) -> Result<()>;

    /// Makes durable which names are in the directory.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    fn sync_directory(&self, path: &Path) -> Result<()>;
}

/// Shared [`Files`].
pub type FilesRef = Arc<dyn Files>;

/// The machine's file systems.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealFiles;

impl RealFiles {
    /// The machine's file systems.
    #[must_use]
    pub fn shared() -> FilesRef {
        Arc::new(Self)
    }
}

impl Files for RealFiles {
    fn create_directory(&self, path: &Path) -> Result<()> {
        std::fs::create_dir_all(path)
    }

    fn list(&self, directory: &Path) -> Result<Vec<PathBuf>> {
        let entries = std::fs::read_dir(directory)?;
        let mut paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>>>()?;
        paths.sort();
        Ok(paths)
    }

    fn read(&self, path: &Path) -> Result<Vec<u8>> {
        std::fs::read(path)
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    }

    fn create_zeroed(&self, path: &Path, length: u64) -> Result<()> {
        let mut file = File::create_new(path)?;
        std::io::copy(&mut std::io::Read::take(std::io::repeat(0), length), &mut file)?;
        file.sync_all()
    }

    fn reserve(&self, path: &Path, length: u64) -> Result<()> {
        let file = File::options().create(true).truncate(false).write(true).open(path)?;
        file.set_len(length)?;
        match fallocate(&file, FallocateFlags::empty(), 0, length) {
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn append(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        // One write: appends of several threads do not mix.
        File::options().create(true).append(true).open(path)?.write_all(bytes)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        std::fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> Result<()> {
        std::fs::remove_file(path)
    }

    fn remove_directory(&self, path: &Path) -> Result<()> {
        std::fs::remove_dir_all(path)
    }

    fn sync_directory(&self, path: &Path) -> Result<()> {
        File::open(path)?.sync_all()
    }
}

/// Replaces the file at `path` by `bytes`, whole or not at all, and durably.
///
/// # Errors
/// Whatever the files say: `path` has what it had, or `bytes`.
///
/// # Panics
/// If `path` has no parent.
pub fn replace_file(files: &dyn Files, path: &Path, bytes: &[u8]) -> Result<()> {
    let new = path.with_extension("new");
    files.write(&new, bytes)?;
    files.rename(&new, path)?;
    files.sync_directory(path.parent().expect("a file has a directory"))
}

/// Whatever `outcome` says, but for something that was not there to be removed.
///
/// # Errors
/// Those of `outcome` that are not `NotFound`.
pub fn unless_missing(outcome: Result<()>) -> Result<()> {
    outcome.or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) })
}
