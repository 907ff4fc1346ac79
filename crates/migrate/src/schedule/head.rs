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
/// The bytes of a volume count as lying in order on the disk. Of a fragmented image file that is an approximation.
#[derive(Clone, Debug, Default)]
pub struct HeadPosition {
    /// In bytes of the disk.
    position: Arc<AtomicU64>,
    /// Where the volume begins on it.
    start: Bytes,
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
        Self { position: Arc::clone(&self.position), start }
    }

    /// A request for `extent` of this volume has been served.
    pub(crate) fn served(&self, extent: Extent) {
        self.position.store(self.position_of(extent), Ordering::Relaxed);
    }

    /// The byte of this volume that is nearest to the head on the near side of its end: 0 while the head is before the volume.
    pub(crate) fn offset(&self) -> Bytes {
        Bytes(self.position.load(Ordering::Relaxed).saturating_sub(self.start.0))
    }

    /// Where the head is once `extent` has been served.
    fn position_of(&self, extent: Extent) -> u64 {
        (self.start + extent.end()).0
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
}
