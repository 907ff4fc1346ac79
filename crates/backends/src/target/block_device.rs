//! What must hold of a block device before a volume may move to it.

use std::fs::{File, Metadata};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use block::Bytes;

use super::storage::Devices;
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

/// Whether the kernel lets nobody write to the block device.
pub(crate) fn is_read_only(device: &Metadata) -> bool {
    sys_attribute(device.rdev(), "ro").is_some_and(|flag| flag == "1")
}

pub(super) fn check(request: &TargetRequest<'_>, found: &Metadata) -> Result<(), TargetError> {
    let path = request.spec.path();
    if is_read_only(found) {
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

/// Whether two are one, or have bytes in common: by another name or path, a loop device over the other's file, a disk and its
/// partition, a file and the device below its file system.
pub(crate) fn have_common(one: &Metadata, other: &Metadata) -> bool {
    Devices::of_system().have_common(one, other)
}

/// What the block device says of itself that no other says.
pub(crate) fn device_names(device: &Metadata) -> Vec<String> {
    Devices::of_system().names(device)
}

/// Refuses a file that a loop device shows: who uses or has mounted that would lose what the file holds.
pub(super) fn refuse_looped(path: &Path, found: &Metadata) -> Result<(), TargetError> {
    let Some(device) = Devices::of_system().loop_over(found) else { return Ok(()) };
    let device = device.display();
    let holder = format!("{device} shows what it holds; unmount that and `losetup -d {device}`, or name {device}");
    Err(TargetError::InUse { path: path.to_owned(), holder })
}

pub(super) fn sys_attribute(number: u64, name: &str) -> Option<String> {
    Devices::of_system().attribute(number, name)
}
