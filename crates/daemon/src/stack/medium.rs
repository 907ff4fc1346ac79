//! What a volume lies on: whether that has a head, and where the head is. Volumes on one disk share it, each with its own pieces.

use std::path::{Path, PathBuf};

use block::Bytes;
use migrate::{DiskPiece, HeadPosition, Medium};

use crate::daemon::Daemon;
use crate::disk::Disk;
use crate::volume::Volume;

impl Daemon {
    /// What the volume lies on now. Only an order that follows the head needs to know where that is: the file system is asked for the
    /// pieces of the volume, which takes some milliseconds for many.
    pub(crate) fn medium_of(&self, volume: &Volume, follows_head: bool) -> Medium {
        let disk = path_of(volume).and_then(|path| Some((self.backends.disk_of(&path)?, path)));
        let Some((disk, path)) = disk else { return Medium::default() };
        let head = match follows_head && disk.is_rotational != Some(false) {
            true => self.head_of(&disk, &path),
            false => HeadPosition::new(),
        };
        Medium { is_rotational: disk.is_rotational, head }
    }

    /// Whether what the volume lies on rotates, if the kernel says.
    pub(super) fn is_rotational(&self, volume: &Volume) -> Option<bool> {
        path_of(volume).and_then(|path| self.is_rotational_at(&path))
    }

    /// The same of what lies at `path`.
    pub(super) fn is_rotational_at(&self, path: &Path) -> Option<bool> {
        self.backends.disk_of(path)?.is_rotational
    }

    /// The head of `disk`, as the file at `path` sees it. Of a file whose pieces nobody knows it is one of its own.
    fn head_of(&self, disk: &Disk, path: &Path) -> HeadPosition {
        let Some(pieces) = self.backends.pieces_of(path) else { return HeadPosition::new() };
        let head = self.heads.lock().entry(disk.name.clone()).or_default().clone();
        head.of_pieces(pieces.into_iter().map(|piece| shifted(piece, disk.start)))
    }
}

/// Where the volume is, if that is a file or block device of this host.
fn path_of(volume: &Volume) -> Option<PathBuf> {
    volume.with_backend(|backend| backend.place.local_path().map(Path::to_owned)).flatten()
}

fn shifted(piece: DiskPiece, start: Bytes) -> DiskPiece {
    DiskPiece { disk_offset: piece.disk_offset + start, ..piece }
}
