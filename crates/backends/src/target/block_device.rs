//! What must hold of a block device before a volume may move to it.

use std::fs::{File, Metadata};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use block::Bytes;

use super::{TargetError, TargetRequest, lock_others_out, refuse_misaligned};

/// How much is looked at, at the start, at the end and at places between, to see whether a block device is empty:
/// every partition table and file system has something there.
const SAMPLE_BYTES: u64 = 64 << 10;
const SAMPLES: u64 = 64;

/// How large a block device is: its metadata do not say.
pub(crate) fn block_size_of(file: &File) -> std::io::Result<u64> {
    let mut file = file;
    file.seek(SeekFrom::End(0))
}

pub(super) fn check(request: &TargetRequest<'_>, found: &Metadata) -> Result<(), TargetError> {
    let path = request.spec.path();
    if sys_attribute(found.rdev(), "ro").is_some_and(|flag| flag == "1") {
        return Err(TargetError::ReadOnly { path: path.to_owned() });
    }
    // The kernel gives a block device that is mounted or part of something to nobody else exclusively.
    let file = match File::options().read(true).write(true).custom_flags(libc::O_EXCL).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
            let holder = "it is mounted or part of another device: unmount it, or name another target".to_owned();
            return Err(TargetError::InUse { path: path.to_owned(), holder });
        }
        Err(error) => return Err(TargetError::opening(path, error)),
    };
    let _locks = lock_others_out(path, &file)?;
    let attempt = |error| TargetError::os(path, "looking at", error);
    let size = Bytes(block_size_of(&file).map_err(attempt)?);
    if size < request.size {
        return Err(TargetError::TooSmall { path: path.to_owned(), size, needed: request.size });
    }
    let sector = rustix::fs::ioctl_blksszget(&file).map_err(|error| attempt(error.into()))?;
    refuse_misaligned(request, sector)?;
    if !request.overwrite && !looks_empty(&file, size).map_err(attempt)? {
        return Err(TargetError::NotEmpty { path: path.to_owned(), size });
    }
    Ok(())
}

fn looks_empty(file: &File, size: Bytes) -> std::io::Result<bool> {
    let mut sample = vec![0; SAMPLE_BYTES.min(size.0) as usize];
    let last = size.0 - sample.len() as u64;
    for number in 0..=SAMPLES {
        let offset = (u128::from(last) * u128::from(number) / u128::from(SAMPLES)) as u64;
        file.read_exact_at(&mut sample, offset)?;
        if sample.iter().any(|&byte| byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether two are one: by another name, a block device over the other's file, or a disk and its partition.
pub(super) fn is_same(one: &Metadata, other: &Metadata) -> bool {
    if one.file_type().is_block_device() && other.file_type().is_block_device() {
        let (one, other) = (one.rdev(), other.rdev());
        return one == other || disk_of(one) == Some(other) || disk_of(other) == Some(one);
    }
    let identity = |file: &Metadata| (file.dev(), file.ino());
    let is_over = |device: &Metadata, file: &Metadata| {
        let backing = backing_file_of(device).and_then(|path| std::fs::metadata(path).ok());
        backing.is_some_and(|backing| identity(&backing) == identity(file))
    };
    identity(one) == identity(other) || is_over(one, other) || is_over(other, one)
}

fn sys_path(number: u64, name: &str) -> PathBuf {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    Path::new("/sys/dev/block").join(format!("{major}:{minor}")).join(name)
}

pub(super) fn sys_attribute(number: u64, name: &str) -> Option<String> {
    Some(std::fs::read_to_string(sys_path(number, name)).ok()?.trim_end_matches('\n').to_owned())
}

/// The file behind a loop device.
fn backing_file_of(device: &Metadata) -> Option<PathBuf> {
    device.file_type().is_block_device().then(|| sys_attribute(device.rdev(), "loop/backing_file"))?.map(PathBuf::from)
}

/// The disk that a partition is on.
fn disk_of(number: u64) -> Option<u64> {
    sys_attribute(number, "partition")?;
    let numbers = sys_attribute(number, "../dev")?;
    let (major, minor) = numbers.split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}
