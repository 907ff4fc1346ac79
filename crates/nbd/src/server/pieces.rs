//! Reads and writes that are larger than the maximum that clients are told of.
//!
//! A client that did not ask for block sizes may send up to 32 MiB, as the protocol has it. The device gets pieces of
//! at most the maximum, one after another. Each piece of a forced write is forced, so that all of it is durable when it
//! is answered.

use block::{Buffer, Bytes, Device, Error, ErrorKind, Extent, Mutation};

use super::execute::Context;

/// Refuses what a device would refuse of the last piece, before the first is carried out.
fn check(device: &Device, extent: Extent) -> Result<(), Error> {
    let geometry = device.geometry();
    let alignment = u64::from(geometry.request_alignment);
    if extent.end() > geometry.size {
        return Err(Error::new(ErrorKind::OutOfRange, format!("{extent}: the export has {}", geometry.size)));
    }
    if !extent.offset.is_multiple_of(alignment) || !extent.length.is_multiple_of(alignment) {
        return Err(Error::new(ErrorKind::Misaligned, format!("{extent}: the export takes multiples of {alignment}")));
    }
    Ok(())
}

/// Fills `buffer` from `offset` on. One piece more than the buffer is used of memory meanwhile.
pub(super) async fn read(context: &Context, offset: Bytes, mut buffer: Buffer) -> Result<Buffer, Error> {
    let extent = Extent::new(offset, buffer.len().into());
    check(&context.device, extent)?;
    let unit = u64::from(context.sizes.maximum);
    // It is not taken from the quota: waiting there with a buffer in hand could deadlock with another that does the
    // same.
    let mut scratch = Buffer::unpooled(context.sizes.maximum as usize);
    for piece in extent.split_at_multiples(unit) {
        scratch.set_len(piece.length.as_usize());
        scratch = context.device.read(piece.offset, scratch).await?;
        let start = (piece.offset - offset).as_usize();
        buffer[start..start + scratch.len()].copy_from_slice(&scratch);
    }
    Ok(buffer)
}

/// Carries out `mutation` in pieces.
pub(super) async fn write(context: &Context, mutation: &Mutation) -> Result<(), Error> {
    check(&context.device, mutation.extent())?;
    for piece in mutation.extent().split_at_multiples(context.sizes.maximum.into()) {
        context.device.write(mutation.slice(piece)).await?;
    }
    Ok(())
}
