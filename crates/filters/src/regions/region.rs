//! A part of a device as a device.

use block::{
    BlockDevice, Buffer, Bytes, Device, Error, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture, Mutation,
    MutationKind, Result,
};

use crate::translate::moved;

/// The bytes of an extent of a device as a device of their own. It begins at a multiple of the device's request
/// alignment, and may end anywhere. What lies behind its end within the last unit is kept as it is.
#[derive(Debug)]
pub struct Region {
    lower: Device,
    extent: Extent,
    geometry: Geometry,
    /// Where the last unit begins, counted in the region, if the region has only a part of it.
    odd_from: Option<Bytes>,
}

impl Region {
    /// The bytes of `extent` of `lower`.
    ///
    /// # Errors
    /// Invalid if `extent` is empty, does not lie within `lower`, or does not begin where a request may.
    pub fn new(lower: Device, extent: Extent) -> Result<Self> {
        let below = lower.geometry();
        let unit = u64::from(below.request_alignment);
        let is_within = extent.offset.0.checked_add(extent.length.0).is_some_and(|end| end <= below.size.0);
        if extent.is_empty() || !is_within || !extent.offset.is_multiple_of(unit) {
            let context = format!("{extent} of {} cannot be a device: it takes multiples of {unit}", lower.name());
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        let is_whole = extent.length.is_multiple_of(unit) || extent.end() == below.size;
        let odd_from = (!is_whole).then(|| extent.length.align_down(unit));
        Ok(Self { lower, extent, geometry: Geometry { size: extent.length, ..below }, odd_from })
    }

    /// Where it lies in the device below.
    #[must_use]
    pub const fn extent(&self) -> Extent {
        self.extent
    }

    /// What of `extent`, counted in the region, lies in the last unit of which the region has only a part.
    fn odd_end(&self, extent: Extent) -> Option<Extent> {
        let from = self.odd_from.filter(|from| extent.end() > *from)?;
        Some(Extent::between(from.max(extent.offset), extent.end()))
    }

    /// The last unit as it is below, with what lies behind the region.
    async fn read_last_unit(&self, from: Bytes) -> Result<Buffer> {
        let start = self.extent.offset + from;
        let unit = u64::from(self.geometry.request_alignment);
        let end = self.extent.end().align_up(unit).min(self.lower.size());
        self.lower.read(start, Buffer::unpooled((end - start).as_usize())).await
    }

    async fn read_odd(&self, offset: Bytes, mut buffer: Buffer, odd: Extent) -> Result<Buffer> {
        let length = buffer.len();
        let even = (odd.offset - offset).as_usize();
        if even > 0 {
            buffer.set_len(even);
            buffer = self.lower.read(self.extent.offset + offset, buffer).await?;
            buffer.set_len(length);
        }
        let last = self.read_last_unit(odd.offset).await?;
        buffer[even..].copy_from_slice(&last[..length - even]);
        Ok(buffer)
    }

    /// Requests that touch the last unit have all of the region's part of it, so that two at once do not disturb each other.
    async fn write_odd(&self, mutation: Mutation, odd: Extent) -> Result<()> {
        let extent = mutation.extent();
        if extent.offset < odd.offset {
            let even = mutation.slice(Extent::between(extent.offset, odd.offset));
            self.lower.write(moved(&even, self.extent.offset + extent.offset)).await?;
        }
        let part = mutation.slice(odd);
        let length = odd.length.as_usize();
        let mut last = match part.kind() {
            MutationKind::Discard => return Ok(()),
            MutationKind::Data(_) | MutationKind::Zeroes { .. } => self.read_last_unit(odd.offset).await?,
        };
        match part.kind() {
            MutationKind::Data(data) => last[..length].copy_from_slice(data),
            MutationKind::Zeroes { .. } | MutationKind::Discard => last[..length].fill(0),
        }
        self.lower.write(Mutation::data(self.extent.offset + odd.offset, last.freeze()).with_fua(mutation.fua)).await
    }

    async fn describe(&self, extent: Extent) -> Result<Vec<ExtentStatus>> {
        let start = self.extent.offset;
        let unit = u64::from(self.geometry.request_alignment);
        let mut end = start + extent.end();
        if self.odd_end(extent).is_some() {
            end = end.align_up(unit).min(self.lower.size());
        }
        let mut pieces = self.lower.extents(Extent::between(start + extent.offset, end)).await?;
        for piece in &mut pieces {
            let end = (piece.extent.end() - start).min(extent.end());
            piece.extent = Extent::between(piece.extent.offset - start, end);
        }
        Ok(pieces)
    }
}

impl BlockDevice for Region {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        match self.odd_end(Extent::new(offset, buffer.len().into())) {
            None => Box::pin(self.lower.read(self.extent.offset + offset, buffer)),
            Some(odd) => Box::pin(self.read_odd(offset, buffer, odd)),
        }
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        let extent = mutation.extent();
        match self.odd_end(extent) {
            None => Box::pin(self.lower.write(moved(&mutation, self.extent.offset + extent.offset))),
            Some(odd) => Box::pin(self.write_odd(mutation, odd)),
        }
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.lower.flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.describe(extent))
    }

    fn keeps_holes(&self) -> bool {
        self.lower.keeps_holes()
    }
}
