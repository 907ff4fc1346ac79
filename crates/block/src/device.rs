//! What a device is, and the checked handle through which one layer calls the next.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use crate::{Buffer, Bytes, Error, ErrorKind, Extent, Mutation, MutationKind, Result};

/// An operation under way. Dropping it early leaves the outcome unknown and the kernel perhaps still at work. So the
/// caller drives an operation on behalf of a guest to its end.
pub type IoFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// An operation that is already done.
pub fn ready<'a, T: Send + 'a>(outcome: Result<T>) -> IoFuture<'a, T> {
    Box::pin(std::future::ready(outcome))
}

/// The size of a device and what requests it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// How many bytes it has.
    pub size: Bytes,
    /// Offsets and lengths are multiples of this (a power of two, 1 to 4096). A request that ends at the device's very
    /// end may have an odd length.
    pub request_alignment: u32,
    /// Requests of multiples of this are served best (a power of two of at least `request_alignment`).
    pub preferred_bytes: u32,
    /// The largest read or data write. Zeroes and discards may be larger.
    pub transfer_bytes_max: u32,
    /// Whether it refuses mutations.
    pub read_only: bool,
}

impl Geometry {
    /// A writable device of `size` bytes that takes any offset and up to 32 MiB a request.
    #[must_use]
    pub const fn of_size(size: Bytes) -> Self {
        Self { size, request_alignment: 1, preferred_bytes: 4096, transfer_bytes_max: 32 << 20, read_only: false }
    }
}

/// What is known of an extent without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExtentState {
    /// It holds bytes that must be read to be known.
    Data,
    /// It reads as zeroes, and space is allocated for it.
    Zero,
    /// It reads as zeroes, and no space is allocated for it.
    Hole,
}

impl ExtentState {
    /// Whether it is known to read as zeroes.
    #[must_use]
    pub const fn reads_zero(self) -> bool {
        matches!(self, Self::Zero | Self::Hole)
    }
}

/// One piece of an answer to [`BlockDevice::extents`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentStatus {
    /// The bytes.
    pub extent: Extent,
    /// What is known of them.
    pub state: ExtentState,
}

/// Anything that can read, change, flush and describe extents.
///
/// No verb has a default: adding one means visiting every device. Callers go through [`Device`], which checks ranges,
/// alignment and the size of every answer, so implementations carry no such checks.
pub trait BlockDevice: Send + Sync {
    /// Its size and limits now. The size may grow while it is used; nothing else changes.
    fn geometry(&self) -> Geometry;

    /// Fills all of `buffer` with the bytes at `offset` and gives it back.
    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer>;

    /// Carries out `mutation`. Answered means that later reads see it; with `fua` also that it is durable.
    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()>;

    /// Makes durable all that was answered before this was called. A failure is final for what it covered: it is not
    /// repeated.
    fn flush(&self) -> IoFuture<'_, ()>;

    /// Describes `extent` from its start, as pieces in order without gaps, at least one. They may end before the extent
    /// does; then the caller asks again from there.
    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>>;

    /// Whether it compares what is written with its [checks](Mutation::with_checks), where it has any, at the last
    /// layer. Then no layer before need do that. This is no verb; the default is no.
    fn compares_checks(&self) -> bool {
        false
    }

    /// Whether what it calls a [hole](ExtentState::Hole) stays one, whatever flush has failed or process has died
    /// before. No space is allocated there that could return with other bytes. This is no verb; the default is no.
    fn keeps_holes(&self) -> bool {
        false
    }
}

/// The checked handle of a device: the contract between two layers is enforced and traced here, once.
#[derive(Clone)]
pub struct Device {
    name: Arc<str>,
    inner: Arc<dyn BlockDevice>,
}

impl Device {
    /// A handle of `inner`; `name` is how logs and errors call it.
    pub fn new(name: &str, inner: impl BlockDevice + 'static) -> Self {
        Self::from_arc(name, Arc::new(inner))
    }

    /// A handle of a device that is also held elsewhere.
    #[must_use]
    pub fn from_arc(name: &str, inner: Arc<dyn BlockDevice>) -> Self {
        Self { name: name.into(), inner }
    }

    /// How logs and errors call it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its size and limits now.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    /// Its size now.
    #[must_use]
    pub fn size(&self) -> Bytes {
        self.geometry().size
    }

    /// Whether it compares what is written with its checks, see [`BlockDevice::compares_checks`].
    #[must_use]
    pub fn compares_checks(&self) -> bool {
        self.inner.compares_checks()
    }

    /// Whether its holes are holes for good, see [`BlockDevice::keeps_holes`].
    #[must_use]
    pub fn keeps_holes(&self) -> bool {
        self.inner.keeps_holes()
    }

    /// Whether both are handles of one device.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Fills all of `buffer` with the bytes at `offset` and gives it back.
    ///
    /// # Errors
    /// Out of range, misaligned or too large, without asking the device; otherwise what the device says.
    pub async fn read(&self, offset: Bytes, buffer: Buffer) -> Result<Buffer> {
        let extent = Extent::new(offset, buffer.len().into());
        self.check(extent, true)?;
        tracing::trace!(device = &*self.name, ?extent, "read");
        let buffer = self.inner.read(offset, buffer).await?;
        if Bytes::from(buffer.len()) != extent.length {
            return Err(self.broken(format!("answered a read of {} with {} bytes", extent.length.0, buffer.len())));
        }
        Ok(buffer)
    }

    /// Carries out `mutation`.
    ///
    /// # Errors
    /// Read-only, out of range, misaligned or too large, without asking the device; otherwise what the device says.
    pub async fn write(&self, mutation: Mutation) -> Result<()> {
        let geometry = self.check(mutation.extent(), matches!(mutation.kind(), MutationKind::Data(_)))?;
        if geometry.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{} is read-only", self.name)));
        }
        tracing::trace!(device = &*self.name, ?mutation, "write");
        self.inner.write(mutation).await
    }

    /// Makes durable all that was answered before.
    ///
    /// # Errors
    /// What the device says.
    pub async fn flush(&self) -> Result<()> {
        tracing::trace!(device = &*self.name, "flush");
        self.inner.flush().await
    }

    /// Describes `extent` from its start, perhaps not to its end.
    ///
    /// # Errors
    /// Out of range or misaligned, without asking the device; otherwise what the device says.
    pub async fn extents(&self, extent: Extent) -> Result<Vec<ExtentStatus>> {
        self.check(extent, false)?;
        tracing::trace!(device = &*self.name, ?extent, "extents");
        let pieces = self.inner.extents(extent).await?;
        let mut next = extent.offset;
        for piece in &pieces {
            if piece.extent.offset != next || piece.extent.is_empty() {
                return Err(self.broken(format!("described {extent} with a gap at {}", next.0)));
            }
            next = piece.extent.end();
        }
        if pieces.is_empty() || next > extent.end() {
            return Err(self.broken(format!("described {extent} up to {}", next.0)));
        }
        Ok(pieces)
    }

    fn check(&self, extent: Extent, is_transfer: bool) -> Result<Geometry> {
        let geometry = self.inner.geometry();
        let end = extent.offset.0.checked_add(extent.length.0);
        if extent.is_empty() || end.is_none_or(|end| end > geometry.size.0) {
            let context = format!("{extent} do not lie within {} of {}", self.name, geometry.size);
            return Err(Error::new(ErrorKind::OutOfRange, context));
        }
        if is_transfer && extent.length.0 > u64::from(geometry.transfer_bytes_max) {
            let context =
                format!("{extent}: {} takes {} at most", self.name, Bytes(geometry.transfer_bytes_max.into()));
            return Err(Error::new(ErrorKind::TooLarge, context));
        }
        let unit = u64::from(geometry.request_alignment);
        let aligned =
            extent.offset.is_multiple_of(unit) && (extent.length.is_multiple_of(unit) || end == Some(geometry.size.0));
        if !aligned {
            let context = format!("{extent}: {} takes multiples of {unit} bytes", self.name);
            return Err(Error::new(ErrorKind::Misaligned, context));
        }
        Ok(geometry)
    }

    fn broken(&self, what: String) -> Error {
        Error::new(ErrorKind::Internal, format!("{} broke the contract: it {what}", self.name))
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Device({})", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Data, MemDevice};

    /// Breaks the contract in every answer.
    struct Liar;

    impl BlockDevice for Liar {
        fn geometry(&self) -> Geometry {
            Geometry { request_alignment: 512, transfer_bytes_max: 65536, ..Geometry::of_size(Bytes(1 << 20)) }
        }
        fn read(&self, _: Bytes, mut buffer: Buffer) -> IoFuture<'_, Buffer> {
            buffer.set_len(1);
            ready(Ok(buffer))
        }
        fn write(&self, _: Mutation) -> IoFuture<'_, ()> {
            ready(Ok(()))
        }
        fn flush(&self) -> IoFuture<'_, ()> {
            ready(Ok(()))
        }
        fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
            let beyond = Extent::new(extent.offset, extent.length + Bytes(1));
            ready(Ok(vec![ExtentStatus { extent: beyond, state: ExtentState::Data }]))
        }
    }

    #[tokio::test]
    async fn answers_that_break_the_contract_are_errors() {
        let device = Device::new("liar", Liar);
        let read = device.read(Bytes(0), Buffer::unpooled(512)).await;
        assert_eq!(read.expect_err("a short answer passed").kind(), ErrorKind::Internal);
        let extents = device.extents(Extent::new(Bytes(0), Bytes(512))).await;
        assert_eq!(extents.expect_err("a long answer passed").kind(), ErrorKind::Internal);
    }

    #[tokio::test]
    async fn requests_that_break_the_contract_do_not_reach_the_device() {
        let device = Device::new("liar", Liar);
        let kind_of = async |offset, length| {
            let mutation = Mutation::data(Bytes(offset), Data::copy_of(&vec![0; length]));
            device.write(mutation).await.map_err(|error| error.kind())
        };
        assert_eq!(kind_of(0, 512).await, Ok(()));
        assert_eq!(kind_of(1, 512).await, Err(ErrorKind::Misaligned));
        assert_eq!(kind_of(0, 100).await, Err(ErrorKind::Misaligned));
        assert_eq!(kind_of(1 << 20, 512).await, Err(ErrorKind::OutOfRange));
        assert_eq!(kind_of(u64::MAX - 511, 512).await, Err(ErrorKind::OutOfRange));
        assert_eq!(kind_of(0, 65536 + 512).await, Err(ErrorKind::TooLarge));
        assert_eq!(kind_of(0, 0).await, Err(ErrorKind::OutOfRange));
    }

    #[tokio::test]
    async fn a_request_that_ends_at_an_odd_end_is_aligned() {
        let device = Device::new("odd", MemDevice::new(Bytes(1000)).with_request_alignment(512));
        assert!(device.read(Bytes(512), Buffer::unpooled(488)).await.is_ok());
        let short = device.read(Bytes(512), Buffer::unpooled(400)).await;
        assert_eq!(short.expect_err("a misaligned read passed").kind(), ErrorKind::Misaligned);
    }
}
