//! Where a volume may move to: checked, created, and removed again if the move fails.
//!
//! Everything that would make a move fail later, or destroy data, is found here, before anything changes.

mod alias;
mod block_device;
mod error;
mod identity;
mod storage;

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;
use std::time::Duration;

use block::Bytes;
use env::Env;
use serde::{Deserialize, Serialize};

use crate::lock::{SERVER_BYTE, Strength, describe_holder, try_lock};
use crate::mark::{carries_mark, mark, marked_epoch, unmark};
use crate::reserve::reserve;
use crate::{BackendSpec, CacheMode, QemuLocks, in_place};

pub(crate) use crate::file_system::directory_of;
pub use alias::{Alias, MarkedFile};
pub(crate) use block_device::{block_size_of, device_names, have_common, is_read_only};
pub use error::TargetError;
pub(crate) use identity::{DeviceIdentity, FileIdentity};
pub use storage::{files_behind, share_bytes};

/// How long a target may be in use before it is refused. A process that is just being started holds its parent's open
/// files until it runs, and a dead one its last requests' files.
const IN_USE_WAIT: Duration = Duration::from_millis(500);
const IN_USE_INTERVAL: Duration = Duration::from_millis(10);
/// How long a target that is to be taken back may be in use: our own last requests keep it for a moment.
const DISCARD_WAIT: Duration = Duration::from_secs(2);

/// What is asked of a target.
#[derive(Clone, Debug)]
pub struct TargetRequest<'a> {
    /// Where to.
    pub spec: &'a BackendSpec,
    /// The file or block device that moves. It must not be the target. The target gets its owner and mode, and needs as
    /// much space as it has allocated.
    pub source: Option<&'a Path>,
    /// How many bytes the volume has.
    pub size: Bytes,
    /// What the guest's requests are multiples of.
    pub guest_alignment: u32,
    /// Whether what the target holds may be destroyed.
    pub overwrite: bool,
}

/// How the target came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetOrigin {
    /// It did not exist.
    Created,
    /// It was an empty file.
    WasEmpty,
    /// It was a file with contents that were to be overwritten.
    Overwritten,
    /// It is a block device.
    BlockDevice,
}

/// A target that is ready to be written, as a record that a journal keeps: what is needed to take it back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedTarget {
    /// What to open.
    pub spec: BackendSpec,
    /// How it came to be.
    pub origin: TargetOrigin,
    /// Whether all of it is known to read as zeroes, so that holes need not be written.
    pub reads_zero: bool,
    identity: FileIdentity,
    /// Of a block device: the name of its node says nothing. Older records have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    block_device: Option<DeviceIdentity>,
    /// The directory of a file. While it is there, a file that is not was deleted. Older records have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    directory: Option<FileIdentity>,
}

impl PreparedTarget {
    /// A target that is ready somewhere else than in a file system of this machine; `number` tells it from others of
    /// the same name.
    #[must_use]
    pub const fn elsewhere(spec: BackendSpec, origin: TargetOrigin, reads_zero: bool, number: u64) -> Self {
        let identity = FileIdentity::numbered(number);
        Self { spec, origin, reads_zero, identity, block_device: None, directory: None }
    }

    /// The file `found`, which came to be so and reads as zeroes.
    fn file(spec: &BackendSpec, origin: TargetOrigin, found: &Metadata) -> Self {
        let directory = std::fs::metadata(directory_of(spec.path())).ok();
        Self {
            spec: spec.clone(),
            origin,
            reads_zero: true,
            identity: FileIdentity::of(found),
            block_device: None,
            directory: directory.as_ref().map(FileIdentity::of),
        }
    }

    /// The number of its file, or the one that it was given [elsewhere](Self::elsewhere).
    #[must_use]
    pub const fn number(&self) -> u64 {
        self.identity.number()
    }

    /// Whether the target's name still leads to what was prepared.
    ///
    /// # Errors
    /// `Replaced` when it was deleted, or another file or block device has its name. `Away` when it is not there and nobody
    /// can tell why, as while its file system is not mounted.
    pub fn check(&self) -> Result<(), TargetError> {
        let path = self.spec.path();
        match std::fs::metadata(path) {
            Ok(found) => self.require(&found),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(self.missing()),
            Err(error) => Err(TargetError::os(path, "looking at", error)),
        }
    }

    /// Whether an open file is what was prepared, even if the name now leads elsewhere.
    pub(crate) fn check_open(&self, file: &File) -> Result<(), TargetError> {
        let found = file.metadata().map_err(|error| TargetError::os(self.spec.path(), "looking at", error))?;
        self.require(&found)
    }

    fn require(&self, found: &Metadata) -> Result<(), TargetError> {
        let is_block_device = found.file_type().is_block_device();
        let is_same = match (&self.block_device, self.origin) {
            (Some(known), _) => is_block_device && known.is_still(found),
            (None, TargetOrigin::BlockDevice) => is_block_device,
            (None, _) => self.identity.is_still(found),
        };
        match is_same {
            true => Ok(()),
            false if is_block_device => Err(self.replaced()),
            false => Err(self.missing()),
        }
    }

    /// Why what was prepared does not have its name.
    fn missing(&self) -> TargetError {
        let path = self.spec.path();
        let directory = std::fs::metadata(directory_of(path)).ok();
        let is_directory_there = directory.is_some_and(|found| match &self.directory {
            Some(directory) => directory.is_still(&found),
            None => self.origin != TargetOrigin::BlockDevice && self.identity.is_on_device_of(&found),
        });
        match is_directory_there {
            true => self.replaced(),
            false => TargetError::Away { path: path.to_owned() },
        }
    }

    fn replaced(&self) -> TargetError {
        TargetError::Replaced { path: self.spec.path().to_owned() }
    }

    /// Marks a file as what holds the volume called `volume` from `epoch` on, so that an older record of the move is told
    /// from the newest. A block device keeps no mark, and neither does a file that is another by now.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn mark(&self, epoch: u64, volume: &str) -> Result<(), TargetError> {
        let path = self.spec.path();
        if self.origin == TargetOrigin::BlockDevice {
            return Ok(());
        }
        let attempt = |error| TargetError::os(path, "marking", error);
        let file = File::open(path).map_err(attempt)?;
        if !self.identity.is_still(&file.metadata().map_err(attempt)?) {
            return Ok(());
        }
        mark(&file, epoch, volume).and_then(|()| file.sync_all()).map_err(attempt)
    }

    /// Reserves the space of the first `length` bytes of its file, which read as before; where the file system cannot do that, nothing.
    ///
    /// # Errors
    /// `NoSpace` if there is no such space, `Replaced`; what the operating system says.
    pub fn reserve(&self, length: Bytes) -> Result<(), TargetError> {
        let path = self.spec.path();
        if self.origin == TargetOrigin::BlockDevice {
            return Ok(());
        }
        let attempt = |error| TargetError::os(path, "reserving the space of", error);
        let file = File::options().write(true).open(path).map_err(attempt)?;
        self.check_open(&file)?;
        reserve(&file, length).and_then(|_| file.sync_all()).map_err(attempt)
    }

    /// The epoch under which a move was committed to it since it was prepared, if one was.
    #[must_use]
    pub fn committed_epoch(&self) -> Option<u64> {
        let file = File::open(self.spec.path()).ok()?;
        self.check_open(&file).ok()?;
        marked_epoch(&file)
    }

    /// Takes back what was prepared. A created file is removed, an existing one is left empty, a block device is left
    /// as it is. A file that was replaced meanwhile, or that a finished move has marked as a volume's, is not touched. Doing it twice does no harm.
    ///
    /// # Errors
    /// `InUse` when somebody else has it, which stays as it is; what the operating system says.
    pub fn discard(&self) -> Result<(), TargetError> {
        if self.origin == TargetOrigin::BlockDevice {
            return Ok(());
        }
        let path = self.spec.path();
        let is_ours = |found: &Metadata| self.identity.is_still(found);
        let Some((file, _locks)) = lock_unless_gone(path, &is_ours)? else { return Ok(()) };
        if carries_mark(&file) {
            tracing::warn!(path = %path.display(), "a target that holds a volume by now is left as it is");
            return Ok(());
        }
        match self.origin {
            TargetOrigin::Created => remove(path),
            TargetOrigin::WasEmpty | TargetOrigin::Overwritten => {
                file.set_len(0).map_err(|error| TargetError::os(path, "emptying", error))
            }
            TargetOrigin::BlockDevice => Ok(()),
        }
    }

    /// The same, waiting a moment for what our own requests keep.
    ///
    /// # Errors
    /// As above.
    pub async fn discard_once_free(&self, env: &dyn Env) -> Result<(), TargetError> {
        let start = env.now();
        loop {
            match in_place(|| self.discard()) {
                Err(TargetError::InUse { .. }) if env.now() - start < DISCARD_WAIT => env.sleep(IN_USE_INTERVAL).await,
                outcome => return outcome,
            }
        }
    }

    /// The identities of its file, or of its node and block device; none if an older record does not say which block device it is.
    pub(crate) fn identities(&self) -> Option<(FileIdentity, Option<DeviceIdentity>)> {
        let is_known = self.origin != TargetOrigin::BlockDevice || self.block_device.is_some();
        is_known.then(|| (self.identity.clone(), self.block_device.clone()))
    }
}

/// Removes the file at `path`, if there is one and nobody has it locked.
///
/// # Errors
/// `InUse` when somebody has it, which stays as it is; what the operating system says.
pub fn remove_unless_used(path: &Path) -> Result<(), TargetError> {
    match lock_unless_gone(path, &Metadata::is_file)? {
        Some(_locked) => remove(path),
        None => Ok(()),
    }
}

/// Opens the file at `path` and locks everybody else out, for as long as what is given is kept. None if there is no such
/// file, or it is not `meant`.
fn lock_unless_gone(path: &Path, meant: &dyn Fn(&Metadata) -> bool) -> Result<Option<(File, QemuLocks)>, TargetError> {
    let looking = |error| TargetError::os(path, "looking at", error);
    match std::fs::metadata(path) {
        Ok(found) if meant(&found) => {}
        Ok(_) => return Ok(None),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(looking(error)),
    }
    let file = match File::options().read(true).write(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(TargetError::opening(path, error)),
    };
    let locks = lock_others_out(path, &file)?;
    // Under the locks the name leads to it, or to something else.
    let opened = file.metadata().map_err(looking)?;
    let is_named =
        std::fs::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (opened.dev(), opened.ino()));
    Ok((is_named && meant(&opened)).then_some((file, locks)))
}

fn remove(path: &Path) -> Result<(), TargetError> {
    std::fs::remove_file(path).map_err(|error| TargetError::os(path, "removing", error))?;
    sync_directory_of(path)
}

/// Makes a target ready. A file is created as long as the volume, without allocating anything, with the source's owner,
/// mode, access control list and label. A file or block device that exists is checked.
///
/// # Errors
/// One line that says what is wrong and what to do; then nothing has been changed or left behind.
pub async fn prepare_target(request: &TargetRequest<'_>, env: &dyn Env) -> Result<PreparedTarget, TargetError> {
    let start = env.now();
    loop {
        match in_place(|| attempt(request)) {
            Err(TargetError::InUse { .. }) if env.now() - start < IN_USE_WAIT => env.sleep(IN_USE_INTERVAL).await,
            outcome => return outcome,
        }
    }
}

/// Whether a target could be made ready as far as what is there already tells. Nothing is changed.
///
/// # Errors
/// As of [`prepare_target`].
pub fn check_target(request: &TargetRequest<'_>) -> Result<(), TargetError> {
    let source = source_of(request)?;
    match found_of(request, source.as_ref())? {
        Some(found) if found.is_file() => check_reused(request, source.as_ref(), &found).map(drop),
        Some(found) => block_device::check(request, &found),
        None => Ok(()),
    }
}

fn attempt(request: &TargetRequest<'_>) -> Result<PreparedTarget, TargetError> {
    let source = source_of(request)?;
    let Some(found) = found_of(request, source.as_ref())? else { return create(request, source.as_ref()) };
    if found.is_file() {
        return reuse(request, source.as_ref(), &found);
    }
    block_device::check(request, &found)?;
    Ok(PreparedTarget {
        spec: request.spec.clone(),
        origin: TargetOrigin::BlockDevice,
        reads_zero: false,
        identity: FileIdentity::of(&found),
        block_device: Some(DeviceIdentity::of(&found)),
        directory: None,
    })
}

fn source_of(request: &TargetRequest<'_>) -> Result<Option<Metadata>, TargetError> {
    let look = |source: &Path| std::fs::metadata(source).map_err(|error| TargetError::os(source, "looking at", error));
    request.source.map(look).transpose()
}

/// The file or block device that the target's name leads to, if there is one. It may be overwritten as far as its kind and
/// contents tell.
fn found_of(request: &TargetRequest<'_>, source: Option<&Metadata>) -> Result<Option<Metadata>, TargetError> {
    let path = request.spec.path();
    let found = match std::fs::metadata(path) {
        Ok(found) => Some(found),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(TargetError::os(path, "looking at", error)),
    };
    // What is made in a directory whose file system is in the source is written into that.
    let directory = std::fs::metadata(directory_of(path)).ok().filter(Metadata::is_dir);
    directory.map_or(Ok(()), |directory| refuse_common(request, source, &directory))?;
    let Some(found) = found else { return Ok(None) };
    refuse_common(request, source, &found)?;
    if found.file_type().is_block_device() {
        return Ok(Some(found));
    }
    if !found.is_file() {
        return Err(TargetError::NoFile { path: path.to_owned() });
    }
    if found.len() > 0 && !request.overwrite {
        return Err(TargetError::NotEmpty { path: path.to_owned(), size: Bytes(found.len()) });
    }
    block_device::refuse_looped(path, &found)?;
    Ok(Some(found))
}

/// Refuses what has bytes in common with the source.
fn refuse_common(request: &TargetRequest<'_>, source: Option<&Metadata>, found: &Metadata) -> Result<(), TargetError> {
    match (source, request.source) {
        (Some(source), Some(source_path)) if have_common(source, found) => {
            Err(TargetError::SameAsSource { path: request.spec.path().to_owned(), source: source_path.to_owned() })
        }
        _ => Ok(()),
    }
}

/// A file that exists and may be overwritten, open and locked against everybody else.
fn check_reused(
    request: &TargetRequest<'_>,
    source: Option<&Metadata>,
    found: &Metadata,
) -> Result<(File, QemuLocks), TargetError> {
    let path = request.spec.path();
    let file = File::options().read(true).write(true).open(path);
    let file = file.map_err(|error| TargetError::opening(path, error))?;
    let locks = lock_others_out(path, &file)?;
    check_space(path, &file, request.size, source, Bytes(found.blocks() * 512))?;
    check_alignment(request, &file)?;
    Ok((file, locks))
}

/// Empties such a file.
fn reuse(
    request: &TargetRequest<'_>,
    source: Option<&Metadata>,
    found: &Metadata,
) -> Result<PreparedTarget, TargetError> {
    let path = request.spec.path();
    let (file, _locks) = check_reused(request, source, found)?;
    let emptied = file.set_len(0).and_then(|()| file.set_len(request.size.0));
    let emptied = emptied.and_then(|()| unmark(&file)).and_then(|()| file.sync_all());
    emptied.map_err(|error| TargetError::os(path, "emptying", error))?;
    let origin = if found.len() == 0 { TargetOrigin::WasEmpty } else { TargetOrigin::Overwritten };
    Ok(PreparedTarget::file(request.spec, origin, found))
}

fn create(request: &TargetRequest<'_>, source: Option<&Metadata>) -> Result<PreparedTarget, TargetError> {
    let path = request.spec.path();
    if path.is_symlink() {
        return Err(TargetError::DanglingLink { path: path.to_owned() });
    }
    let directory = directory_of(path);
    if !directory.is_dir() {
        return Err(TargetError::NoDirectory { path: path.to_owned(), directory });
    }
    // Nobody else may open it before it has its owner and mode.
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(path);
    let file = file.map_err(|error| TargetError::opening(path, error))?;
    let finish = || {
        check_space(path, &file, request.size, source, Bytes::ZERO)?;
        check_alignment(request, &file)?;
        let attempt = |error| TargetError::os(path, "setting up", error);
        file.set_len(request.size.0).map_err(attempt)?;
        if let Some(source) = source.filter(|source| source.is_file()) {
            fchown(&file, Some(source.uid()), Some(source.gid())).map_err(|error| TargetError::Owner {
                path: path.to_owned(),
                user: source.uid(),
                group: source.gid(),
                error: error.to_string(),
            })?;
            let mode = std::fs::Permissions::from_mode(source.mode() & 0o7777);
            file.set_permissions(mode).map_err(attempt)?;
            if let Some(source) = request.source {
                copy_labels(source, &file);
            }
        }
        file.sync_all().map_err(attempt)?;
        sync_directory_of(path)?;
        file.metadata().map_err(attempt)
    };
    match finish() {
        Ok(made) => Ok(PreparedTarget::file(request.spec, TargetOrigin::Created, &made)),
        Err(error) => {
            if let Err(leftover) = std::fs::remove_file(path) {
                tracing::warn!(path = %path.display(), %leftover, "a target that cannot be used was left behind");
            }
            Err(error)
        }
    }
}

/// Locks everybody else out of what is open as `file`, until both are dropped.
fn lock_others_out(path: &Path, file: &File) -> Result<QemuLocks, TargetError> {
    let in_use = |holder: String| TargetError::InUse { path: path.to_owned(), holder };
    let locked = try_lock(file, SERVER_BYTE, Strength::Exclusive);
    if !locked.map_err(|error| TargetError::os(path, "locking", error))? {
        return Err(in_use(describe_holder(file, SERVER_BYTE)));
    }
    QemuLocks::take(path).map_err(|error| match error.kind() {
        block::ErrorKind::Busy => in_use(error.context().to_owned()),
        _ => TargetError::Os(error),
    })
}

/// Copies who else may open the source: its access control list and its SELinux label. A file system that keeps neither
/// is not refused; an image that cannot be opened is reported then.
fn copy_labels(source: &Path, target: &File) {
    for name in ["system.posix_acl_access", "security.selinux"] {
        let mut value = [0_u8; 4096];
        let Ok(length) = rustix::fs::getxattr(source, name, &mut value) else { continue };
        let copied = rustix::fs::fsetxattr(target, name, &value[..length], rustix::fs::XattrFlags::empty());
        if let Err(error) = copied {
            tracing::warn!(source = %source.display(), name, %error, "not copied to the target");
        }
    }
}

/// Whether the file system has room for what the source has allocated, counting what the target itself will free.
fn check_space(
    path: &Path,
    file: &File,
    size: Bytes,
    source: Option<&Metadata>,
    freed: Bytes,
) -> Result<(), TargetError> {
    let allocated = source.filter(|source| source.is_file()).map(|source| Bytes(source.blocks() * 512));
    let needed = allocated.map_or(size, |allocated| allocated.min(size));
    let room = rustix::fs::fstatvfs(file).map_err(|error| TargetError::os(path, "looking at", error.into()))?;
    let available = Bytes(room.f_bavail.saturating_mul(room.f_frsize)) + freed;
    if available < needed {
        return Err(TargetError::NoSpace { path: path.to_owned(), needed, available });
    }
    Ok(())
}

/// Whether direct IO takes the guest's requests, where there is direct IO.
fn check_alignment(request: &TargetRequest<'_>, file: &File) -> Result<(), TargetError> {
    if request.spec.cache == CacheMode::Page {
        return Ok(());
    }
    let wanted = crate::file::direct_alignment_of(file);
    refuse_misaligned(request, wanted)
}

fn refuse_misaligned(request: &TargetRequest<'_>, wanted: u32) -> Result<(), TargetError> {
    let guest = match request.spec.cache {
        // The page cache takes bytes and writes sectors.
        CacheMode::Page => request.guest_alignment.max(512),
        CacheMode::Auto | CacheMode::Direct => request.guest_alignment,
    };
    if wanted > guest {
        let path = request.spec.path().to_owned();
        return Err(TargetError::Sectors { path, target: wanted, guest });
    }
    Ok(())
}

/// Makes the names in the directory of `path` durable.
pub(crate) fn sync_directory_of(path: &Path) -> Result<(), TargetError> {
    let directory = directory_of(path);
    let synced = File::open(&directory).and_then(|directory| directory.sync_all());
    synced.map_err(|error| TargetError::os(&directory, "syncing", error))
}
