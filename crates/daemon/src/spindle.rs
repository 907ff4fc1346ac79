//! Which rotating disk a file lies on: two files on one disk share its head.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The name of the rotating disk that `path` lies on, or is: of its nearest directory if it does not exist. None if that disk does not
/// rotate, or the kernel does not say: a file system over the network, or in memory.
pub(crate) fn spindle_of(path: &Path) -> Option<String> {
    rotating_disk(Path::new("/sys/dev/block"), &number_of(path)?)
}

/// Whether the disk that `path` lies on, or is, rotates. None if the kernel does not say.
pub(crate) fn is_rotational(path: &Path) -> Option<bool> {
    disk(Path::new("/sys/dev/block"), &number_of(path)?).map(|(_, is_rotating)| is_rotating)
}

fn number_of(path: &Path) -> Option<String> {
    let found = path.ancestors().find_map(|path| fs::metadata(path).ok())?;
    let number = if found.file_type().is_block_device() { found.rdev() } else { found.dev() };
    Some(format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number)))
}

/// The disk that device `number` is, or is a partition of, below `devices`, if it rotates.
fn rotating_disk(devices: &Path, number: &str) -> Option<String> {
    let (disk, _) = disk(devices, number).filter(|(_, is_rotating)| *is_rotating)?;
    disk.file_name().map(|name| name.to_string_lossy().into_owned())
}

/// The same disk, and whether it rotates.
fn disk(devices: &Path, number: &str) -> Option<(PathBuf, bool)> {
    let device = fs::canonicalize(devices.join(number)).ok()?;
    let disk: PathBuf = if device.join("partition").exists() { device.parent()?.to_owned() } else { device };
    let is_rotating = fs::read_to_string(disk.join("queue/rotational")).ok()?.trim() == "1";
    // What stands for a file of another file system says nothing of that one's disk.
    disk.join("device").exists().then_some((disk, is_rotating))
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
        let found = ["8:0", "8:1", "259:0", "7:0", "9:9"].map(|number| rotating_disk(&devices, number));
        assert_eq!(found, [Some("sda".to_owned()), Some("sda".to_owned()), None, None, None]);
        let rotates = ["8:0", "8:1", "259:0", "7:0", "9:9"].map(|number| disk(&devices, number).map(|found| found.1));
        assert_eq!(rotates, [Some(true), Some(true), Some(false), None, None], "of the last two nobody knows");
    }
}
