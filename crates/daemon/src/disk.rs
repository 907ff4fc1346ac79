//! Which disk a file lies on, and where: files on one rotating disk share its head.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use block::{Bytes, Extent};
use fiemap::FiemapExtentFlags;
use migrate::DiskPiece;

/// What the kernel counts in, whatever the disk's sectors are.
const SECTOR_BYTES: u64 = 512;
/// No device is larger.
const DEVICE_BYTES_MAX: u64 = 1 << 62;
/// A file in more pieces counts as lying in order: so many are read within some milliseconds.
const PIECES_MAX: usize = 1 << 16;
/// What has no place on the disk, or none that is known.
const NOWHERE: FiemapExtentFlags = FiemapExtentFlags::UNKNOWN
    .union(FiemapExtentFlags::DELALLOC)
    .union(FiemapExtentFlags::ENCODED)
    .union(FiemapExtentFlags::DATA_INLINE);

/// A disk that files lie on, as the kernel knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// What the kernel calls it.
    pub name: String,
    /// Whether it rotates: then it has a head, which its files share. None of what stands for other storage: a loop device, a logical
    /// volume. Its files share a head all the same, if there is one behind it.
    pub is_rotational: Option<bool>,
    /// Where that what the file lies on begins on it: a partition or all of it, in bytes.
    pub start: Bytes,
}

/// The disk that `path` lies on, or is: of its nearest directory if it does not exist. None if the kernel does not say: a file system
/// over the network, or in memory.
pub(crate) fn disk_of(path: &Path) -> Option<Disk> {
    disk(Path::new("/sys/dev/block"), &number_of(path)?)
}

fn number_of(path: &Path) -> Option<String> {
    let found = path.ancestors().find_map(|path| fs::metadata(path).ok())?;
    let number = if found.file_type().is_block_device() { found.rdev() } else { found.dev() };
    Some(format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number)))
}

/// The disk that device `number` is, or is a partition of, below `devices`.
fn disk(devices: &Path, number: &str) -> Option<Disk> {
    let device = fs::canonicalize(devices.join(number)).ok()?;
    let disk: PathBuf = if device.join("partition").exists() { device.parent()?.to_owned() } else { device.clone() };
    let rotational = fs::read_to_string(disk.join("queue/rotational")).ok()?;
    // What stands for other storage says nothing of that.
    let is_rotational = disk.join("device").exists().then(|| rotational.trim() == "1");
    let start = fs::read_to_string(device.join("start")).ok().and_then(|sectors| sectors.trim().parse().ok());
    let start = Bytes(start.unwrap_or(0_u64).saturating_mul(SECTOR_BYTES));
    Some(Disk { name: disk.file_name()?.to_string_lossy().into_owned(), is_rotational, start })
}

/// Where the bytes of the file `path` lie, in bytes from the start of what it lies on; a block device lies in order. None if the file
/// system does not say, or if they lie in more pieces than are kept.
pub(crate) fn pieces_of(path: &Path) -> Option<Vec<DiskPiece>> {
    if fs::metadata(path).ok()?.file_type().is_block_device() {
        let extent = Extent::new(Bytes::ZERO, Bytes(DEVICE_BYTES_MAX));
        return Some(vec![DiskPiece { extent, disk_offset: Bytes::ZERO }]);
    }
    let mut pieces = Vec::new();
    for extent in fiemap::fiemap(path).ok()? {
        let extent = extent.ok()?;
        if extent.fe_flags.intersects(NOWHERE) {
            continue;
        }
        if pieces.len() == PIECES_MAX {
            return None;
        }
        pieces.push(DiskPiece {
            extent: Extent::new(Bytes(extent.fe_logical), Bytes(extent.fe_length)),
            disk_offset: Bytes(extent.fe_physical),
        });
    }
    Some(pieces)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_partition_lies_on_its_disk_and_flash_has_no_head() {
        let place = tempfile::tempdir().expect("a directory");
        let make = |path: &str, text: &str| {
            let path = place.path().join(path);
            fs::create_dir_all(path.parent().expect("it has one")).expect("a directory");
            fs::write(path, text).expect("a file");
        };
        make("disks/sda/queue/rotational", "1\n");
        make("disks/sda/device/model", "x");
        make("disks/sda/sda1/partition", "1\n");
        make("disks/sda/sda1/start", "2048\n");
        make("disks/nvme0n1/queue/rotational", "0\n");
        make("disks/nvme0n1/device/model", "x");
        make("disks/loop0/queue/rotational", "1\n");
        let devices = place.path().join("by-number");
        fs::create_dir(&devices).expect("a directory");
        for (number, disk) in [("8:0", "sda"), ("8:1", "sda/sda1"), ("259:0", "nvme0n1"), ("7:0", "loop0")] {
            std::os::unix::fs::symlink(place.path().join("disks").join(disk), devices.join(number)).expect("a link");
        }
        let found = ["8:0", "8:1", "259:0", "7:0", "9:9"].map(|number| disk(&devices, number));
        let of =
            |name: &str, is_rotational: Option<bool>, start| Some(Disk { name: name.to_owned(), is_rotational, start });
        let at_start = Bytes::ZERO;
        let expected = [
            of("sda", Some(true), at_start),
            of("sda", Some(true), Bytes::mib(1)),
            of("nvme0n1", Some(false), at_start),
            of("loop0", None, at_start),
            None,
        ];
        assert_eq!(found, expected, "of the last one nobody knows");
    }

    #[test]
    fn the_pieces_of_a_file_are_what_was_written_of_it() {
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("image");
        let file = fs::File::create(&path).expect("a file");
        let bytes = vec![7; 1 << 20];
        file.write_all_at(&bytes, 0).expect("it is written");
        file.write_all_at(&bytes, 8 << 20).expect("it is written");
        file.sync_all().expect("it is on the disk");
        let Some(pieces) = pieces_of(&path) else {
            // What has its blocks on a disk says where.
            let kind = rustix::fs::statfs(&path).expect("it is on a file system").f_type;
            assert!(![0xef53, 0x5846_5342, 0x9123_683e].contains(&kind), "ext4, XFS and Btrfs say where: {kind:#x}");
            return;
        };
        let covered: u64 = pieces.iter().map(|piece| piece.extent.length.0).sum();
        assert_eq!(covered, 2 << 20, "{pieces:?}");
        let is_written = |piece: &DiskPiece| {
            [0, 8 << 20].iter().any(|start| (*start..start + (1 << 20)).contains(&piece.extent.offset.0))
        };
        assert!(pieces.iter().all(|piece| is_written(piece) && piece.disk_offset > Bytes::ZERO), "{pieces:?}");
        assert_eq!(pieces_of(Path::new("/nothing")), None);
    }
}
