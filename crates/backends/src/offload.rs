//! Copying within one file system without the bytes passing through this process.
//!
//! The file system shares the blocks where it can (reflink) and copies them itself where it cannot. Nobody sees the
//! bytes on their way, so this serves only copies whose checksums nobody wants.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use block::{Bytes, Extent, Result};
use rustix::io::Errno;

use crate::FileBackend;

/// What the file system made of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyOffload {
    /// It copied this many bytes from the start of the extent, perhaps not all.
    Copied(Bytes),
    /// It cannot copy between these two.
    Unsupported,
}

/// Has the file system copy `extent` from `source` to the same place of `target`. The caller holds whatever lock keeps
/// guests from writing there meanwhile, and copies by itself what is left.
///
/// # Errors
/// What the file system says, when it failed rather than refused.
pub async fn copy_extent(source: &FileBackend, target: &FileBackend, extent: Extent) -> Result<CopyOffload> {
    // The bytes at an odd end are reached in one way only, and this is another.
    let end = extent.end().min(Bytes(source.tail_start())).min(Bytes(target.tail_start()));
    if end <= extent.offset {
        return Ok(CopyOffload::Unsupported);
    }
    let (from, to) = (Arc::clone(source.file()), Arc::clone(target.file()));
    let copy = move || {
        let (one, other) = (from.metadata()?, to.metadata()?);
        if !one.is_file() || !other.is_file() || one.dev() != other.dev() {
            return Ok(CopyOffload::Unsupported);
        }
        let (mut read_at, mut write_at) = (extent.offset.0, extent.offset.0);
        while read_at < end.0 {
            let left = (end.0 - read_at) as usize;
            match rustix::fs::copy_file_range(&from, Some(&mut read_at), &to, Some(&mut write_at), left) {
                Ok(0) => break,
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::TXTBSY) => {
                    if read_at == extent.offset.0 {
                        return Ok(CopyOffload::Unsupported);
                    }
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(CopyOffload::Copied(Bytes(read_at) - extent.offset))
    };
    target.in_a_thread(copy).await.map_err(|error| {
        let context = format!("copying {extent} of {} to {}", source.path().display(), target.path().display());
        block::Error::from_os(error, context)
    })
}
