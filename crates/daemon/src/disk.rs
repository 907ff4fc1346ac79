//! Which rotating disk a file lies on: two files on one disk share its head.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A disk that files lie on, as the kernel knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// What the kernel calls it.
    pub name: String,
    /// Whether it rotates: then it has a head, which its files share.
    pub is_rotational: bool,
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
    let disk: PathBuf = if device.join("partition").exists() { device.parent()?.to_owned() } else { device };
    let is_rotational = fs::read_to_string(disk.join("queue/rotational")).ok()?.trim() == "1";
    // What stands for a file of another file system says nothing of that one's disk.
    disk.join("device").exists().then_some(())?;
    Some(Disk { name: disk.file_name()?.to_string_lossy().into_owned(), is_rotational })
}

#[cfg(test)]
mod tests {
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
        make("disks/nvme0n1/queue/rotational", "0\n");
        make("disks/nvme0n1/device/model", "x");
        make("disks/loop0/queue/rotational", "1\n");
        let devices = place.path().join("by-number");
        fs::create_dir(&devices).expect("a directory");
        for (number, disk) in [("8:0", "sda"), ("8:1", "sda/sda1"), ("259:0", "nvme0n1"), ("7:0", "loop0")] {
            std::os::unix::fs::symlink(place.path().join("disks").join(disk), devices.join(number)).expect("a link");
        }
        let found = ["8:0", "8:1", "259:0", "7:0", "9:9"].map(|number| disk(&devices, number));
        let of = |name: &str, is_rotational| Some(Disk { name: name.to_owned(), is_rotational });
        let expected = [of("sda", true), of("sda", true), of("nvme0n1", false), None, None];
        assert_eq!(found, expected, "of the last two nobody knows");
    }
}
