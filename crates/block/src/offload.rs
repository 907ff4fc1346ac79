//! Copies that a layer below makes by itself: an array's XCOPY, a file system's shared blocks.

use crate::{Bytes, Extent, IoFuture};

/// Copies between two devices without the bytes passing through this process, where that is cheap.
///
/// The bytes do not pass through this process, so they have no checksum; comparing both sides afterwards works as
/// always.
pub trait Offload: Send + Sync {
    /// Has `extent` of the one device put at the same place of the other. The caller keeps others from writing there
    /// meanwhile on both. Returns how many bytes, from the start of the extent, were copied. The caller copies the
    /// rest, or all of it.
    ///
    /// # Errors
    /// What the layer below says. Then the target's contents in `extent` are unknown.
    fn copy(&self, extent: Extent) -> IoFuture<'_, Bytes>;
}
