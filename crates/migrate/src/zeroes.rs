//! What of a device, or of a buffer, is zeroes.

use block::{Bytes, Device, Extent, ExtentState, Result};

/// Whether all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    // By blocks, so that the compiler makes wide comparisons of it and data is told after the first block.
    bytes.chunks(1024).all(|block| block.iter().fold(0, |bits, byte| bits | byte) == 0)
}

/// Where the part of `extent` that is known to read as zeroes, from its start, ends.
pub(crate) async fn zero_prefix(device: &Device, extent: Extent) -> Result<Bytes> {
    prefix(device, extent, ExtentState::reads_zero).await
}

/// Where the part of `extent` whose states all count, from its start, ends.
pub(crate) async fn prefix(device: &Device, extent: Extent, counts: impl Fn(ExtentState) -> bool) -> Result<Bytes> {
    let mut next = extent.offset;
    while next < extent.end() {
        for piece in device.extents(Extent::between(next, extent.end())).await? {
            if !counts(piece.state) {
                return Ok(next);
            }
            next = piece.extent.end();
        }
    }
    Ok(next)
}
