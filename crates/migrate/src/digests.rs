//! What a target says that it holds, so that nothing is sent to find out.

use block::{BufferPool, Device, Extent, Result};
use futures::future::BoxFuture;

/// A device is read in pieces of this size.
const PIECE_BYTES: u64 = 1 << 20;

/// Says what a target that was away holds, where reading it there costs less than here.
pub trait Digests: Send + Sync {
    /// The BLAKE3 of each extent, in their order: at most 64 extents, of at most 4 MiB each.
    ///
    /// # Errors
    /// Nobody knows.
    fn digests<'a>(&'a self, extents: &'a [Extent]) -> BoxFuture<'a, Result<Vec<[u8; 32]>>>;

    /// Told when everything was compared: the target holds what it is thought to hold.
    fn compared(&self);
}

/// What a device says that is reached from here.
pub struct DeviceDigests {
    device: Device,
    pool: BufferPool,
}

impl DeviceDigests {
    /// Of the target as `device` reads it, with buffers of the pool of the copy.
    #[must_use]
    pub const fn new(device: Device, pool: BufferPool) -> Self {
        Self { device, pool }
    }
}

impl Digests for DeviceDigests {
    fn digests<'a>(&'a self, extents: &'a [Extent]) -> BoxFuture<'a, Result<Vec<[u8; 32]>>> {
        Box::pin(digests_of(&self.device, &self.pool, extents))
    }

    fn compared(&self) {
        tracing::info!(target = self.device.name(), "what an earlier session has copied was compared");
    }
}

/// The BLAKE3 of each extent of `device`.
pub(crate) async fn digests_of(device: &Device, pool: &BufferPool, extents: &[Extent]) -> Result<Vec<[u8; 32]>> {
    let mut digests = Vec::with_capacity(extents.len());
    for extent in extents {
        let mut hasher = blake3::Hasher::new();
        for piece in extent.split_at_multiples(PIECE_BYTES) {
            let buffer = pool.acquire(piece.length.as_usize()).await;
            hasher.update(&device.read(piece.offset, buffer).await?);
        }
        digests.push(*hasher.finalize().as_bytes());
    }
    Ok(digests)
}
