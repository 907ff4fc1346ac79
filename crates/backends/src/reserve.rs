//! Space that is taken before it is needed, so that no later write finds none.

use std::fs::File;
use std::io;

use block::Bytes;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::file_system::is_in_memory;

/// Reserves the space of the first `length` bytes of a file, which read as before. False where the file system cannot
/// do that, and in memory, where it would take what nobody may ever write.
///
/// # Errors
/// There is no such space, and what else the operating system says.
pub fn reserve(file: &File, length: Bytes) -> io::Result<bool> {
    if is_in_memory(file)? {
        return Ok(false);
    }
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, 0, length.0) {
            Err(Errno::INTR) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => return Ok(false),
            reserved => return reserved.map(|()| true).map_err(Into::into),
        }
    }
}
