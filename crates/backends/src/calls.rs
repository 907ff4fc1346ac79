//! Calls of the system that are repeated when a signal interrupts them.

use std::fs::File;
use std::io;

use block::Extent;
use rustix::fs::FallocateFlags;

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
