//! Requests one after the other.

use super::Run;
use crate::{Buffer, Bytes, Data, ErrorKind, Extent, Geometry, Mutation};

/// The longest random request.
const REQUEST_BYTES_MAX: u64 = 200_000;

impl Run {
    pub(super) fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    pub(super) async fn write(&mut self, mutation: Mutation) {
        self.model.apply(&mutation);
        if let Err(error) = self.device.write(mutation.clone()).await {
            panic!("{}: {mutation:?} failed: {}", self.what, error.chain());
        }
    }

    pub(super) async fn check(&mut self, extent: Extent) {
        let most = u64::from(self.geometry().transfer_bytes_max);
        for piece in extent.split_at_multiples(most.min(1 << 20)) {
            let read = match self.device.read(piece.offset, Buffer::unpooled(piece.length.as_usize())).await {
                Ok(read) => read,
                Err(error) => panic!("{}: reading {piece} failed: {}", self.what, error.chain()),
            };
            if let Err(difference) = self.model.compare(piece.offset, &read) {
                panic!("{}: reading {piece}: {difference}", self.what);
            }
        }
    }

    pub(super) async fn check_all(&mut self) {
        self.check(Extent::whole(self.model.size())).await;
    }

    /// Whatever is said to read as zeroes does.
    pub(super) async fn check_extents(&mut self) {
        let size = self.model.size();
        let mut next = Bytes::ZERO;
        while next < size {
            let pieces = match self.device.extents(Extent::between(next, size)).await {
                Ok(pieces) => pieces,
                Err(error) => panic!("{}: describing from {} failed: {}", self.what, next.0, error.chain()),
            };
            for piece in pieces {
                next = piece.extent.end();
                if piece.state.reads_zero() {
                    let zero = self.model.may_read_zero(piece.extent);
                    assert!(zero, "{}: {} are said to read as zeroes and hold data", self.what, piece.extent);
                    self.model.note_zero(piece.extent);
                }
                let unit = u64::from(self.geometry().request_alignment);
                let is_readable = next.is_multiple_of(unit) || next == size;
                assert!(is_readable, "{}: a piece ends at {}, inside a unit of {unit}", self.what, next.0);
            }
        }
        self.check_all().await;
    }

    /// An extent that the device takes, often at the edges of blocks or at the very end.
    pub(super) fn random_extent(&mut self, length_max: u64) -> Extent {
        let size = self.model.size();
        let unit = u64::from(self.geometry().request_alignment);
        let offset = match self.random.below(4) {
            0 => Bytes(self.random.below(size.0)).align_down(4096.max(unit)),
            1 => size.saturating_sub(Bytes(1 + self.random.below(8192))).align_down(unit),
            _ => Bytes(self.random.below(size.0)).align_down(unit),
        };
        let length = match self.random.below(4) {
            0 => 1,
            1 => 4096,
            2 => 1 + self.random.below(length_max),
            _ => 1 + self.random.below(10_000.min(length_max)),
        };
        let end = (offset + Bytes(length)).align_up(unit).min(size);
        Extent::between(offset, end)
    }

    pub(super) fn random_mutation(&mut self, extent: Extent) -> Mutation {
        let fua = self.random.one_in(16);
        let mutation = match self.random.below(8) {
            0 => Mutation::zeroes(extent, true),
            1 => Mutation::zeroes(extent, false),
            2 => Mutation::discard(extent),
            _ => Mutation::data(extent.offset, Data::copy_of(&self.random.bytes(extent.length.as_usize()))),
        };
        mutation.with_fua(fua)
    }

    pub(super) async fn reads_zero_at_first(&mut self) {
        self.check_extents().await;
    }

    /// The first and the last byte that can be reached, and one request that is as large as they may be.
    pub(super) async fn edges(&mut self) {
        let size = self.model.size();
        let unit = u64::from(self.geometry().request_alignment);
        let first = Extent::between(Bytes::ZERO, Bytes(unit).min(size));
        let last = Extent::between((size - Bytes(1)).align_down(unit), size);
        for extent in [first, last] {
            for fua in [false, true] {
                let data = Data::copy_of(&self.random.bytes(extent.length.as_usize()));
                self.write(Mutation::data(extent.offset, data).with_fua(fua)).await;
                self.check_all().await;
            }
            self.write(Mutation::zeroes(extent, false)).await;
            self.check_extents().await;
        }
        let longest = u64::from(self.geometry().transfer_bytes_max).min(size.0);
        let longest = if longest == size.0 { size } else { Bytes(longest).align_down(unit) };
        let data = Data::copy_of(&self.random.bytes(longest.as_usize()));
        self.write(Mutation::data(Bytes::ZERO, data)).await;
        self.check_all().await;
        // A part of a larger piece of memory, at an address that no disk likes.
        let length = unit.max(512).min(size.0) as usize;
        let data = Data::copy_of(&self.random.bytes(length + 13));
        self.write(Mutation::data(Bytes::ZERO, data.slice(13..13 + length))).await;
        self.check_extents().await;
    }

    pub(super) async fn random_mutations(&mut self, count: u64) {
        for number in 0..count {
            let extent = self.random_extent(REQUEST_BYTES_MAX.min(self.geometry().transfer_bytes_max.into()));
            let mutation = self.random_mutation(extent);
            self.write(mutation).await;
            match self.random.below(6) {
                0 => self.flush().await,
                1 => self.check(extent).await,
                2 => {
                    let other = self.random_extent(REQUEST_BYTES_MAX.min(self.geometry().transfer_bytes_max.into()));
                    self.check(other).await;
                }
                _ => {}
            }
            if number % 50 == 49 {
                self.check_extents().await;
            }
        }
        self.check_all().await;
    }

    pub(super) async fn flush(&self) {
        if let Err(error) = self.device.flush().await {
            panic!("{}: a flush failed: {}", self.what, error.chain());
        }
    }

    /// Zeroes and discards may be larger than a transfer.
    pub(super) async fn zeroes_over_the_whole_device(&mut self) {
        let whole = Extent::whole(self.model.size());
        for may_unmap in [false, true] {
            let extent = self.random_extent(REQUEST_BYTES_MAX.min(self.geometry().transfer_bytes_max.into()));
            let data = Data::copy_of(&self.random.bytes(extent.length.as_usize()));
            self.write(Mutation::data(extent.offset, data)).await;
            self.write(Mutation::zeroes(whole, may_unmap).with_fua(may_unmap)).await;
            self.check_extents().await;
        }
        self.write(Mutation::discard(whole)).await;
        // Whatever it reads now it reads ever after.
        self.check_all().await;
        self.check_extents().await;
        self.flush().await;
        self.check_all().await;
    }

    /// The handle refuses these; the point is that nothing of them reaches the bytes.
    pub(super) async fn bad_requests_are_refused_and_change_nothing(&mut self) {
        let size = self.model.size();
        let unit = u64::from(self.geometry().request_alignment);
        let beyond = size.align_up(unit);
        let outcome = self.device.write(Mutation::zeroes(Extent::new(beyond, Bytes(unit)), true)).await;
        let kind = outcome.expect_err("zeroes behind the end were accepted").kind();
        assert_eq!(kind, ErrorKind::OutOfRange, "{}", self.what);
        if unit > 1 {
            let outcome = self.device.write(Mutation::data(Bytes(1), Data::copy_of(&vec![7; unit as usize]))).await;
            let kind = outcome.expect_err("a misaligned write was accepted").kind();
            assert_eq!(kind, ErrorKind::Misaligned, "{}", self.what);
        }
        self.check_all().await;
    }
}
