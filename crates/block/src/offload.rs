//! Copies that somebody below makes by itself: an array's XCOPY, a file system's shared blocks.

use crate::{Bytes, Extent, IoFuture};

/// Copies between two devices without the bytes passing through this process, where that is cheap.
///
/// Nobody sees the bytes on their way, so no checksum goes with them; comparing both sides afterwards works as always.
pub trait Offload: Send + Sync {
    /// Has `extent` of the one device put at the same place of the other. The caller keeps everybody from writing there
    /// meanwhile on both. Gives how many bytes, from the start of the extent, were copied: the rest, or all of it, is for
    /// the caller to copy.
    ///
    /// # Errors
    /// What the layer below says. Then nobody knows what the target holds in `extent`.
    fn copy(&self, extent: Extent) -> IoFuture<'_, Bytes>;
}
