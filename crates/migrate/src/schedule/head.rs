//! Where the head of a disk is, as far as its requests tell.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{Bytes, Extent};

/// What the source of a move is on. The default is a device of its own of which nothing is known.
#[derive(Clone, Debug, Default)]
pub struct Medium {
    /// Whether it has a head that moves; `None` if that is not known.
    pub is_rotational: Option<bool>,
    /// Where that head is. Volumes on one disk have it together, each with its own place ([`HeadPosition::of_part`]).
    pub head: HeadPosition,
}

/// The position of a disk's head, seen from one volume: the byte behind the last request that was served, the guest's or a copy's
/// (IOFollow, section 5.2.3, algorithm 1). Clones share it.
///
/// Where the volume lies on the disk is known if its pieces are ([`of_pieces`](Self::of_pieces)). Without them its bytes count as lying in
/// order, which is an approximation of a fragmented image file.
#[derive(Clone, Debug, Default)]
pub struct HeadPosition {
    /// In bytes of the disk.
    position: Arc<AtomicU64>,
    place: Place,
}

/// Where a volume lies on its disk.
#[derive(Clone, Debug)]
enum Place {
    /// In order, from this byte on.
    From(Bytes),
    Pieces(Arc<Pieces>),
}

impl Default for Place {
    fn default() -> Self {
        Self::From(Bytes::ZERO)
    }
}

/// A part of a volume that lies in order on its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskPiece {
    /// Which part of the volume.
    pub extent: Extent,
    /// Where its first byte lies on the disk.
    pub disk_offset: Bytes,
}

/// The pieces of a volume, none of them empty, by where they are in it and by where they lie on the disk.
#[derive(Debug)]
struct Pieces {
    by_offset: Vec<DiskPiece>,
    by_disk_offset: Vec<DiskPiece>,
}

impl DiskPiece {
    fn disk_end(&self) -> Bytes {
        self.disk_offset + self.extent.length
    }
}

impl Pieces {
    /// Where byte `offset` of the volume lies; `None` if it lies nowhere.
    fn disk_offset_of(&self, offset: Bytes) -> Option<Bytes> {
        let behind = self.by_offset.partition_point(|piece| piece.extent.offset <= offset);
        let piece = self.by_offset[..behind].last()?;
        (offset < piece.extent.end()).then(|| piece.disk_offset + (offset - piece.extent.offset))
    }

    /// The byte of the volume that lies nearest to byte `position` of the disk.
    fn nearest_to(&self, position: Bytes) -> Bytes {
        let behind = self.by_disk_offset.partition_point(|piece| piece.disk_offset <= position);
        let (before, after) = (self.by_disk_offset[..behind].last(), self.by_disk_offset.get(behind));
        let ahead_by = after.map(|piece| piece.disk_offset - position);
        match before {
            Some(piece) if position < piece.disk_end() => piece.extent.offset + (position - piece.disk_offset),
            Some(piece) if ahead_by.is_none_or(|ahead| position - piece.disk_end() < ahead) => piece.extent.end(),
            _ => after.map_or(Bytes::ZERO, |piece| piece.extent.offset),
        }
    }
}

impl HeadPosition {
    /// Of a disk of which nothing has been read yet, and of the volume that begins with it.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same head, seen from the volume that begins at byte `start` of the disk.
    #[must_use]
    pub fn of_part(&self, start: Bytes) -> Self {
        Self { position: Arc::clone(&self.position), place: Place::From(start) }
    }

    /// The same head, seen from the volume that lies in these pieces. What is in none of them lies nowhere.
    #[must_use]
    pub fn of_pieces(&self, pieces: impl IntoIterator<Item = DiskPiece>) -> Self {
        let mut by_offset: Vec<DiskPiece> =
            pieces.into_iter().filter(|piece| piece.extent.length > Bytes::ZERO).collect();
        by_offset.sort_unstable_by_key(|piece| piece.extent.offset);
        let mut by_disk_offset = by_offset.clone();
        by_disk_offset.sort_unstable_by_key(|piece| piece.disk_offset);
        let pieces = Arc::new(Pieces { by_offset, by_disk_offset });
        Self { position: Arc::clone(&self.position), place: Place::Pieces(pieces) }
    }

    /// A request for `extent` of this volume has been served. It leaves the head where it was if its last byte lies nowhere.
    pub(crate) fn served(&self, extent: Extent) {
        let end = match &self.place {
            Place::From(start) => Some(*start + extent.end()),
            Place::Pieces(pieces) => {
                let last = extent.end().0.checked_sub(1).map(Bytes);
                last.and_then(|last| pieces.disk_offset_of(last)).map(|at| at + Bytes(1))
            }
        };
        if let Some(end) = end {
            self.position.store(end.0, Ordering::Relaxed);
        }
    }

    /// The byte of this volume that is nearest to the head.
    pub(crate) fn offset(&self) -> Bytes {
        let position = Bytes(self.position.load(Ordering::Relaxed));
        match &self.place {
            Place::From(start) => Bytes(position.0.saturating_sub(start.0)),
            Place::Pieces(pieces) => pieces.nearest_to(position),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_of_one_disk_see_one_head_each_from_its_own_start() {
        let first = HeadPosition::new();
        let second = first.of_part(Bytes::mib(64));
        first.served(Extent::new(Bytes::mib(10), Bytes::mib(1)));
        assert_eq!((first.offset(), second.offset()), (Bytes::mib(11), Bytes::ZERO), "it is before the second");
        second.served(Extent::new(Bytes::mib(2), Bytes::mib(1)));
        assert_eq!((first.offset(), second.offset()), (Bytes::mib(67), Bytes::mib(3)));
    }

    #[test]
    fn the_pieces_of_a_file_are_where_its_blocks_lie() {
        let piece = |offset, length, disk_offset| DiskPiece {
            extent: Extent::new(Bytes::mib(offset), Bytes::mib(length)),
            disk_offset: Bytes::mib(disk_offset),
        };
        let head = HeadPosition::new();
        let other = head.of_part(Bytes::ZERO);
        // 0..4 lies at 100, 4..8 before it at 50, and 8..10 nowhere.
        let file = head.of_pieces([piece(4, 4, 50), piece(0, 4, 100), piece(10, 2, 104)]);
        let at = |mib| {
            other.served(Extent::new(Bytes::ZERO, Bytes::mib(mib)));
            file.offset()
        };
        let seen = [0, 52, 60, 90, 101, 105, 900].map(at);
        assert_eq!(seen, [4, 6, 8, 0, 1, 11, 12].map(Bytes::mib));
        file.served(Extent::new(Bytes::mib(5), Bytes::mib(1)));
        assert_eq!((other.offset(), file.offset()), (Bytes::mib(52), Bytes::mib(6)));
        file.served(Extent::new(Bytes::mib(8), Bytes::mib(1)));
        assert_eq!(other.offset(), Bytes::mib(52), "a hole is read without the disk");
        assert_eq!(head.of_pieces([]).offset(), Bytes::ZERO);
    }
}
