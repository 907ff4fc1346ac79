//! Retires the source after a move: whatever starts the guest next must not find it under its old name. It is kept
//! until somebody deletes it.
//!
//! A file is renamed to `NAME.moved-EPOCH`. A block device has no name of its own. Tools recognise it by its first and
//! last 4 KiB, so these are kept in a file and overwritten with a tombstone:
//!
//! ```text
//! byte     0  "TRANSHUME MOVED\n"
//! byte    16  the epoch, a little-endian 64-bit number
//! byte    24  the length of the volume's name, a little-endian 16-bit number, and the name
//! byte   ...  the length of the following, a little-endian 16-bit number, and what the device says of itself
//! byte   ...  zeroes up to byte 4096
//! ```

use std::fs::{File, Metadata};
use std::io::Write;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::file_system::is_of_server;
use crate::rename::rename_to_free;
use crate::target::{
    DeviceIdentity, FileIdentity, TargetError, block_size_of, device_names, directory_of, have_common, is_read_only,
    sync_directory_of,
};
use crate::tombstone::{TOMBSTONE_BYTES, Tombstone};
use crate::{Obstacle, QemuLocks};

/// A file is deleted in steps of so many bytes, or more where that would take too many.
const SHRINK_BYTES: u64 = 32 << 20;
const SHRINK_STEPS_MAX: u64 = 256;

/// A retired source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Retired {
    /// A file, renamed.
    File {
        /// Its name before.
        from: PathBuf,
        /// Its name now.
        to: PathBuf,
    },
    /// A block device with a tombstone.
    BlockDevice {
        /// The block device.
        path: PathBuf,
        /// The file that keeps what the tombstone has overwritten.
        kept: PathBuf,
    },
}

/// The identity of a move's source, wherever its name leads later. Somebody may re-point a link between the move and
/// the retirement of the source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceIdentity {
    /// Its name without links.
    path: PathBuf,
    file: FileIdentity,
    /// Of a block device: the name of its node says nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    block_device: Option<DeviceIdentity>,
}

impl SourceIdentity {
    /// Of what is open as `file`, which was opened as `path`.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn of(file: &File, path: &Path) -> std::io::Result<Self> {
        let found = file.metadata()?;
        Ok(Self { path: path.canonicalize()?, file: FileIdentity::of(&found), block_device: device_identity(&found) })
    }

    /// Its name without links, when it was looked at.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The same of a file that was another one when it was looked at first.
    pub(crate) fn with_file(mut self, file: FileIdentity) -> Self {
        if self.block_device.is_none() {
            self.file = file;
        }
        self
    }

    fn is(&self, found: &Metadata) -> bool {
        match &self.block_device {
            Some(device) => found.file_type().is_block_device() && device.is_still(found),
            None => self.file.is_still(found),
        }
    }
}

fn device_identity(found: &Metadata) -> Option<DeviceIdentity> {
    found.file_type().is_block_device().then(|| DeviceIdentity::of(found))
}

/// A source that is to be retired.
#[derive(Clone, Copy, Debug)]
pub struct Retiring<'a> {
    /// Its name.
    pub path: &'a Path,
    /// Its identity, if known: nothing else is touched then.
    pub identity: Option<&'a SourceIdentity>,
    /// What holds the volume now: this is never touched.
    pub holder: Option<&'a Path>,
    /// The epoch under which it held the volume.
    pub epoch: u64,
    /// What the volume is called, for a tombstone.
    pub volume: Option<&'a str>,
}

impl<'a> Retiring<'a> {
    /// A source of which only its name is known.
    #[must_use]
    pub const fn by_name(path: &'a Path, epoch: u64) -> Self {
        Self { path, identity: None, holder: None, epoch, volume: None }
    }

    /// Where it is, or was before it was renamed.
    fn real(&self) -> Result<PathBuf, TargetError> {
        self.identity.map_or_else(|| resolve(self.path), |identity| Ok(identity.path.clone()))
    }

    /// Where it is, or was, and what it is called once it is put out of the way.
    fn names(&self) -> Result<(PathBuf, PathBuf), TargetError> {
        let real = self.real()?;
        let moved = moved_name(&real, self.epoch);
        Ok((real, moved))
    }

    /// What would keep it from being put out of the way now, as far as that can be told.
    #[must_use]
    pub fn obstacle(&self) -> Option<Obstacle> {
        let (path, moved) = self.names().ok()?;
        let found = std::fs::symlink_metadata(&path).ok()?;
        match found.file_type().is_block_device() {
            true => is_read_only(&found).then(|| Obstacle::read_only(&path)),
            false => Obstacle::to_renaming(&path, &moved, &found),
        }
    }

    /// What is there of it, by its own name or by the one that it is retired with.
    #[must_use]
    pub fn found(&self) -> Option<Metadata> {
        let (real, moved) = self.names().ok()?;
        let mut there = [real, moved].into_iter().filter_map(|path| std::fs::symlink_metadata(path).ok());
        there.find(|found| self.is_meant(found))
    }

    /// What is there of it, or may be it: after a boot a block device may have other numbers than those on record, and is what its name
    /// leads to.
    #[must_use]
    pub fn candidate(&self) -> Option<Metadata> {
        let by_name = || std::fs::metadata(self.path).ok().filter(|found| found.file_type().is_block_device());
        self.found().or_else(by_name)
    }

    /// Whether it is a file that is where it was.
    #[must_use]
    pub fn is_file(&self) -> bool {
        self.real()
            .and_then(|path| {
                std::fs::symlink_metadata(&path).map_err(|error| TargetError::os(&path, "looking at", error))
            })
            .is_ok_and(|found| found.is_file())
    }

    /// Whether it is sure that what was renamed is what was moved, so that it may be deleted. A FUSE server may give the numbers of one file
    /// to the next one of its name; that file was made later, where it is said when.
    #[must_use]
    pub fn is_proved(&self, retired: &Retired) -> bool {
        let Retired::File { to, .. } = retired else { return true };
        let Some(identity) = self.identity else { return !is_of_server(to) };
        let is_it = std::fs::symlink_metadata(to).is_ok_and(|found| identity.is(&found));
        // What is gone cannot be another one.
        !to.exists() || is_it && (identity.file.has_birth() || !is_of_server(to))
    }

    /// Whether `found` may be retired.
    fn is_meant(&self, found: &Metadata) -> bool {
        let holder = self.holder.and_then(|holder| std::fs::metadata(holder).ok());
        // By another path of the same disk, too: a tombstone would be written into the volume.
        let is_holder = holder.is_some_and(|holder| have_common(&holder, found));
        !is_holder && self.identity.is_none_or(|identity| identity.is(found))
    }
}

/// Retires the source of a move, durably. `keep` is a directory for what a block device's tombstone overwrites. Nobody
/// may have the source open for writing. Repeating it for the same epoch does no harm.
///
/// # Errors
/// `InUse` when a program of QEMU's has it. `OtherSource` when its name leads to something else by now, which stays as
/// it is. Also when something else has the new name, and what the operating system says.
pub fn retire_source(source: &Retiring<'_>, keep: &Path) -> Result<Retired, TargetError> {
    let (real, to) = source.names()?;
    let found = match std::fs::symlink_metadata(&real) {
        Ok(found) => Some(found),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(TargetError::os(&real, "looking at", error)),
    };
    if found.as_ref().is_some_and(|found| !source.is_meant(found)) {
        let is_done =
            source.identity.is_some() && std::fs::symlink_metadata(&to).is_ok_and(|moved| source.is_meant(&moved));
        return if is_done {
            Ok(Retired::File { from: real, to })
        } else {
            Err(TargetError::OtherSource { path: real })
        };
    }
    if found.is_some()
        && let Err(error) = QemuLocks::take(&real)
        && error.kind() == block::ErrorKind::Busy
    {
        return Err(TargetError::InUse { path: real, holder: error.to_string() });
    }
    if let Some(found) = found.filter(|found| found.file_type().is_block_device()) {
        let (volume, device) = (source.volume.map(str::to_owned), device_names(&found));
        let tombstone = Tombstone { epoch: source.epoch, volume, device };
        return bury(&real, &tombstone, keep);
    }
    match rename_to_free(&real, &to) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && to.exists() => {}
        Err(error) => return Err(TargetError::os(&real, &format!("renaming to {} of", to.display()), error)),
    }
    sync_directory_of(&real)?;
    Ok(Retired::File { from: real, to })
}

/// Gives a file that was retired its old name again, durably. Done if it has that name: it was not retired, or is back.
///
/// # Errors
/// `OtherSource` when something else has that name by now, and what the operating system says.
pub fn bring_back(source: &Retiring<'_>) -> Result<(), TargetError> {
    let (real, moved) = source.names()?;
    let is_retired = std::fs::symlink_metadata(&moved).is_ok_and(|found| found.is_file() && source.is_meant(&found));
    if !is_retired {
        return Ok(());
    }
    if std::fs::symlink_metadata(&real).is_ok() {
        return Err(TargetError::OtherSource { path: real });
    }
    Retired::File { from: real, to: moved }.restore()
}

/// Whether a file that was retired is gone under its old name and under its new one: somebody has deleted it since.
///
/// # Errors
/// What the operating system says of the links on the way to it.
pub fn is_deleted(source: &Retiring<'_>) -> Result<bool, TargetError> {
    let (real, moved) = source.names()?;
    Ok(!real.exists() && !moved.exists())
}

/// Frees a file's space in steps, each durable before the next. A file system with discard would block the disk for
/// half a second and more to free a whole volume at once. A file that has another name, too, keeps its bytes.
fn shrink(path: &Path) -> std::io::Result<()> {
    let flags = OFlags::NOFOLLOW.bits().cast_signed();
    let file = match File::options().write(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    let found = file.metadata()?;
    if found.nlink() > 1 {
        return Ok(());
    }
    let step = SHRINK_BYTES.max(found.len() / SHRINK_STEPS_MAX);
    let mut length = found.len();
    while length > step {
        length -= step;
        file.set_len(length)?;
        file.sync_all()?;
    }
    Ok(())
}

fn moved_name(real: &Path, epoch: u64) -> PathBuf {
    let mut name = real.as_os_str().to_owned();
    name.push(format!(".moved-{epoch}"));
    PathBuf::from(name)
}

impl Retired {
    /// Brings the source back as it was, under its old name.
    ///
    /// # Errors
    /// When something else has its name now, and what the operating system says.
    pub fn restore(&self) -> Result<(), TargetError> {
        match self {
            Self::File { from, to } => {
                let failed = |error| TargetError::os(to, &format!("renaming to {} of", from.display()), error);
                rename_to_free(to, from).map_err(failed)?;
                sync_directory_of(from)
            }
            Self::BlockDevice { path, kept } => {
                let blocks = std::fs::read(kept).map_err(|error| TargetError::os(kept, "reading", error))?;
                let attempt = |error| TargetError::os(path, "restoring", error);
                let file = File::options().read(true).write(true).open(path).map_err(attempt)?;
                let last = block_size_of(&file).map_err(attempt)?.saturating_sub(TOMBSTONE_BYTES as u64);
                let (first, end) = blocks.split_at(TOMBSTONE_BYTES.min(blocks.len()));
                file.write_all_at(end, last).and_then(|()| file.write_all_at(first, 0)).map_err(attempt)?;
                file.sync_all().map_err(attempt)
            }
        }
    }

    /// Deletes the source for good. A block device cannot be deleted and is left with its tombstone.
    ///
    /// # Errors
    /// What the operating system says; an already deleted source is no error.
    pub fn delete(&self) -> Result<(), TargetError> {
        let Self::File { to, .. } = self else { return Ok(()) };
        shrink(to).map_err(|error| TargetError::os(to, "deleting", error))?;
        match std::fs::remove_file(to) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(TargetError::os(to, "deleting", error)),
            _ => sync_directory_of(to),
        }
    }
}

/// Follows links to where the file is, or was before it was renamed.
fn resolve(path: &Path) -> Result<PathBuf, TargetError> {
    const LINKS_MAX: usize = 40;
    let mut next = path.to_owned();
    for _ in 0..LINKS_MAX {
        if !next.is_symlink() {
            return Ok(next);
        }
        let to = std::fs::read_link(&next).map_err(|error| TargetError::os(&next, "following", error))?;
        next = directory_of(&next).join(to);
    }
    Err(TargetError::os(path, "following", Errno::LOOP.into()))
}

fn bury(path: &Path, tombstone: &Tombstone, keep: &Path) -> Result<Retired, TargetError> {
    let attempt = |error| TargetError::os(path, "marking", error);
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let kept = keep.join(format!("{name}.moved-{}.blocks", tombstone.epoch));
    let tombstone = tombstone.to_bytes();

    let file = File::options().read(true).write(true).open(path).map_err(attempt)?;
    let last = block_size_of(&file).map_err(attempt)?.saturating_sub(TOMBSTONE_BYTES as u64);
    let mut blocks = [0; 2 * TOMBSTONE_BYTES];
    let (first, end) = blocks.split_at_mut(TOMBSTONE_BYTES);
    file.read_exact_at(first, 0).and_then(|()| file.read_exact_at(end, last)).map_err(attempt)?;
    let retired = Retired::BlockDevice { path: path.to_owned(), kept: kept.clone() };
    if blocks[..TOMBSTONE_BYTES] == tombstone && kept.exists() {
        return Ok(retired);
    }
    // What is overwritten is durable elsewhere first, once: a second try would find the half that is overwritten.
    // The first block goes last: it says that all is done.
    if !kept.exists() {
        let partial = kept.with_extension("partial");
        let saved = File::create(&partial).and_then(|mut file| file.write_all(&blocks).and_then(|()| file.sync_all()));
        saved
            .and_then(|()| std::fs::rename(&partial, &kept))
            .map_err(|error| TargetError::os(&kept, "writing", error))?;
        sync_directory_of(&kept)?;
    }
    file.write_all_at(&tombstone, last).and_then(|()| file.sync_all()).map_err(attempt)?;
    file.write_all_at(&tombstone, 0).and_then(|()| file.sync_all()).map_err(attempt)?;
    Ok(retired)
}
