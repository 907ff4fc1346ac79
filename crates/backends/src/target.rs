//! Where a volume may move to: checked, created, and removed again if the move fails.
//!
//! Everything that would make a move fail later, or destroy data, is found here, before anything changes.

mod block_device;
mod error;
mod identity;

use std::fs::{File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use block::Bytes;
use env::Env;
use serde::{Deserialize, Serialize};

use crate::lock::{SERVER_BYTE, Strength, describe_holder, try_lock};
use crate::{BackendSpec, CacheMode, QemuLocks, in_place};

pub(crate) use block_device::block_size_of;
pub use error::TargetError;
pub(crate) use identity::{DeviceIdentity, FileIdentity};

/// How long a target may be in use before it is refused. A process that is just being started holds its parent's open
/// files until it runs, and a dead one its last requests' files.
const IN_USE_WAIT: Duration = Duration::from_millis(500);
const IN_USE_INTERVAL: Duration = Duration::from_millis(10);

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
}

impl PreparedTarget {
    /// A target that is ready somewhere else than in a file system of this machine; `number` tells it from others of
    /// the same name.
    #[must_use]
    pub const fn elsewhere(spec: BackendSpec, origin: TargetOrigin, reads_zero: bool, number: u64) -> Self {
        Self { spec, origin, reads_zero, identity: FileIdentity::numbered(number), block_device: None }
    }

    /// The number of its file, or the one that it was given [elsewhere](Self::elsewhere).
    #[must_use]
    pub const fn number(&self) -> u64 {
        self.identity.number()
    }

    /// Whether the target's name still leads to what was prepared.
    ///
    /// # Errors
    /// When the file was deleted, or another file or block device has its name.
    pub fn check(&self) -> Result<(), TargetError> {
        let path = self.spec.path();
        match std::fs::metadata(path) {
            Ok(found) => self.require(&found),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(self.replaced()),
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
        if is_same { Ok(()) } else { Err(self.replaced()) }
    }

    fn replaced(&self) -> TargetError {
        TargetError::Replaced { path: self.spec.path().to_owned() }
    }

    /// Takes back what was prepared. A created file is removed, an existing one is left empty, a block device is left
    /// as it is. A file that was replaced meanwhile is not touched. Doing it twice does no harm.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn discard(&self) -> Result<(), TargetError> {
        let path = self.spec.path();
        let found = match std::fs::metadata(path) {
            Ok(found) => found,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(TargetError::os(path, "looking at", error)),
        };
        if !self.identity.is_still(&found) {
            return Ok(());
        }
        match self.origin {
            TargetOrigin::Created => {
                std::fs::remove_file(path).map_err(|error| TargetError::os(path, "removing", error))?;
                sync_directory_of(path)
            }
            TargetOrigin::WasEmpty | TargetOrigin::Overwritten => {
                let file = File::options().write(true).open(path);
                let emptied = file.and_then(|file| file.set_len(0));
                emptied.map_err(|error| TargetError::os(path, "emptying", error))
            }
            TargetOrigin::BlockDevice => Ok(()),
        }
    }
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

fn attempt(request: &TargetRequest<'_>) -> Result<PreparedTarget, TargetError> {
    let path = request.spec.path();
    let source = match request.source {
        Some(source) => Some(std::fs::metadata(source).map_err(|error| TargetError::os(source, "looking at", error))?),
        None => None,
    };
    let found = match std::fs::metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return create(request, source.as_ref()),
        Err(error) => return Err(TargetError::os(path, "looking at", error)),
    };
    if let (Some(source), Some(source_path)) = (&source, request.source)
        && block_device::is_same(source, &found)
    {
        return Err(TargetError::SameAsSource { path: path.to_owned(), source: source_path.to_owned() });
    }
    if found.file_type().is_block_device() {
        block_device::check(request, &found)?;
        return Ok(PreparedTarget {
            spec: request.spec.clone(),
            origin: TargetOrigin::BlockDevice,
            reads_zero: false,
            identity: FileIdentity::of(&found),
            block_device: Some(DeviceIdentity::of(&found)),
        });
    }
    if !found.is_file() {
        return Err(TargetError::NoFile { path: path.to_owned() });
    }
    if found.len() > 0 && !request.overwrite {
        return Err(TargetError::NotEmpty { path: path.to_owned(), size: Bytes(found.len()) });
    }
    reuse(request, source.as_ref(), &found)
}

/// A file that exists and may be overwritten.
fn reuse(
    request: &TargetRequest<'_>,
    source: Option<&Metadata>,
    found: &Metadata,
) -> Result<PreparedTarget, TargetError> {
    let path = request.spec.path();
    let file = File::options().read(true).write(true).open(path);
    let file = file.map_err(|error| TargetError::opening(path, error))?;
    refuse_if_in_use(path, &file)?;
    check_space(path, &file, request.size, source, Bytes(found.blocks() * 512))?;
    check_alignment(request, &file)?;
    let emptied = file.set_len(0).and_then(|()| file.set_len(request.size.0)).and_then(|()| file.sync_all());
    emptied.map_err(|error| TargetError::os(path, "emptying", error))?;
    Ok(PreparedTarget {
        spec: request.spec.clone(),
        origin: if found.len() == 0 { TargetOrigin::WasEmpty } else { TargetOrigin::Overwritten },
        reads_zero: true,
        identity: FileIdentity::of(found),
        block_device: None,
    })
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
            fchown(&file, Some(source.uid()), Some(source.gid())).map_err(attempt)?;
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
        Ok(made) => Ok(PreparedTarget {
            spec: request.spec.clone(),
            origin: TargetOrigin::Created,
            reads_zero: true,
            identity: FileIdentity::of(&made),
            block_device: None,
        }),
        Err(error) => {
            if let Err(leftover) = std::fs::remove_file(path) {
                tracing::warn!(path = %path.display(), %leftover, "a target that cannot be used was left behind");
            }
            Err(error)
        }
    }
}

fn refuse_if_in_use(path: &Path, file: &File) -> Result<(), TargetError> {
    let in_use = |holder: String| TargetError::InUse { path: path.to_owned(), holder };
    let locked = try_lock(file, SERVER_BYTE, Strength::Exclusive);
    if !locked.map_err(|error| TargetError::os(path, "locking", error))? {
        return Err(in_use(describe_holder(file, SERVER_BYTE)));
    }
    QemuLocks::take(path).map(drop).map_err(|error| in_use(error.context().to_owned()))
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

pub(crate) fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Makes the names in the directory of `path` durable.
pub(crate) fn sync_directory_of(path: &Path) -> Result<(), TargetError> {
    let directory = directory_of(path);
    let synced = File::open(&directory).and_then(|directory| directory.sync_all());
    synced.map_err(|error| TargetError::os(&directory, "syncing", error))
}
