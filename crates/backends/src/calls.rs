//! Calls of the system that are repeated when a signal interrupts them.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;

use block::Extent;
use rustix::fs::FallocateFlags;
use rustix::io::ReadWriteFlags;

/// Calls until no signal interrupts.
pub(crate) fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

/// Changes the allocation of `extent`.
pub(crate) fn allocate(file: &File, mode: FallocateFlags, extent: Extent) -> io::Result<()> {
    retry(|| Ok(rustix::fs::fallocate(file, mode, extent.offset.0, extent.length.0)?))
}

/// Reads until `into` is full or the file ends. Returns how many bytes there were.
pub(crate) fn read_full(file: &File, offset: u64, into: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < into.len() {
        match retry(|| Ok(rustix::io::pread(file, &mut into[filled..], offset + filled as u64)?))? {
            0 => break,
            count => filled += count,
        }
    }
    Ok(filled)
}

/// One call writes no more than this. The kernel holds the file's lock meanwhile, and a guest's mirrored write behind a
/// copy of a megabyte waits for a millisecond.
const WRITE_CALL_BYTES_MAX: usize = 64 << 10;

/// Writes all of `data`, durably if `fua`.
pub(crate) fn write_full(file: &File, offset: u64, data: &[u8], fua: bool) -> io::Result<()> {
    let mut written = 0;
    while written < data.len() {
        let (rest, offset) = (&data[written..], offset + written as u64);
        let count = if fua {
            retry(|| Ok(rustix::io::pwritev2(file, &[io::IoSlice::new(rest)], offset, ReadWriteFlags::DSYNC)?))
        } else {
            // The plain call: one with flags costs a twentieth more.
            let rest = &rest[..rest.len().min(WRITE_CALL_BYTES_MAX)];
            retry(|| Ok(rustix::io::pwrite(file, rest, offset)?))
        };
        match count? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            count => written += count,
        }
    }
    Ok(())
}

/// Reads until `into` is full or the file ends; what fails after some of it is for the next call to find.
pub(crate) fn read_some(file: &File, offset: u64, into: &mut [u8]) -> io::Result<u64> {
    go_on_with(into.len(), |filled| Ok(rustix::io::pread(file, &mut into[filled..], offset + filled as u64)?))
}

/// Writes all of `data`, or as much of it as comes before an error.
pub(crate) fn write_some(file: &File, offset: u64, data: &[u8]) -> io::Result<u64> {
    go_on_with(data.len(), |written| Ok(rustix::io::pwrite(file, &data[written..], offset + written as u64)?))
}

fn go_on_with(length: usize, mut call: impl FnMut(usize) -> io::Result<usize>) -> io::Result<u64> {
    let mut done = 0;
    while done < length {
        match retry(|| call(done)) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(_) if done > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(done as u64)
}

/// How large the file or block device is.
pub(crate) fn size_of(file: &File, is_block_device: bool) -> io::Result<u64> {
    if is_block_device {
        // A block device's metadata says nothing about its size.
        let mut file = file;
        return file.seek(SeekFrom::End(0));
    }
    Ok(file.metadata()?.len())
}

/// The same for whatever it is.
pub(crate) fn length_of(file: &File) -> io::Result<u64> {
    size_of(file, file.metadata()?.file_type().is_block_device())
}
