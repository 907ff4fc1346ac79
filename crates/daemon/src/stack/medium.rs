//! What a volume lies on: whether that has a head, and where the head is. Volumes on one disk share it, each with its own pieces.

use std::path::Path;

use block::Bytes;
use migrate::{DiskPiece, HeadPosition, Medium};

use crate::daemon::Daemon;
use crate::disk::Disk;
use crate::volume::Volume;

impl Daemon {
    /// What the volume lies on now. Where its bytes lie is asked of the file system, which takes some milliseconds for many pieces.
    pub(crate) fn medium_of(&self, volume: &Volume) -> Medium {
        let path = volume.with_backend(|backend| backend.place.local_path().map(Path::to_owned)).flatten();
        self.medium_at(path.as_deref())
    }

    /// The same of what lies at `path`.
    pub(super) fn medium_at(&self, path: Option<&Path>) -> Medium {
        let Some((path, disk)) = path.and_then(|path| Some((path, self.backends.disk_of(path)?))) else {
            return Medium::default();
        };
        let head = if disk.is_rotational == Some(false) { HeadPosition::new() } else { self.head_of(&disk, path) };
        Medium { is_rotational: disk.is_rotational, head }
    }

    /// The head of `disk`, as the file at `path` sees it. Of a file whose pieces nobody knows it is one of its own.
    fn head_of(&self, disk: &Disk, path: &Path) -> HeadPosition {
        let Some(pieces) = self.backends.pieces_of(path) else { return HeadPosition::new() };
        let head = self.heads.lock().entry(disk.name.clone()).or_default().clone();
        head.of_pieces(pieces.into_iter().map(|piece| shifted(piece, disk.start)))
    }
}

fn shifted(piece: DiskPiece, start: Bytes) -> DiskPiece {
    DiskPiece { disk_offset: piece.disk_offset + start, ..piece }
}
