//! The storage behind a file or block device: which bytes of which disks and files it shows.
//!
//! ```text
//!   /dev/loop0 ──▶ file, from the loop's offset on ──▶ some part of the disk of its file system
//!   /dev/sda2  ──▶ /dev/sda, from the partition's start on ──▶ its worldwide name
//!   /dev/mapper/mpatha ──▶ all of /dev/sdb and of /dev/sdc
//!   a logical volume   ──▶ some part of each physical volume
//! ```
//!
//! Two names lead to one storage if these have bytes in common. The system does not say which part of a disk a logical
//! volume or a file is. Two of them on one disk are taken for separate; one and the disk itself are not.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// How many devices may stand over each other before the rest is not looked at.
const DEPTH_MAX: usize = 16;
const SECTOR: u64 = 512;
/// What a disk says of itself that no other says, the surest first.
pub(super) const NAMES: [&str; 6] = ["dm/uuid", "md/uuid", "wwid", "device/wwid", "serial", "device/serial"];

/// A disk or file that has bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Store {
    File {
        device: u64,
        inode: u64,
    },
    /// The file of a loop device that has no name any more.
    Nameless(String),
    Disk(u64),
    /// By what the disk says of itself: one disk may have several numbers.
    Named(String),
}

/// Bytes of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    store: Store,
    start: u64,
    end: u64,
    /// Whether it is all of these bytes, and not some of them.
    is_all: bool,
}

impl Piece {
    fn meets(&self, other: &Self) -> bool {
        if self.may_show(other) || other.may_show(self) {
            return true;
        }
        let is_common = self.start < other.end && other.start < self.end;
        self.store == other.store && is_common && (self.is_all || other.is_all)
    }

    /// Whether this is of a loop device whose file has a name that does not lead to it from here, as one that was made in another mount
    /// namespace. It may be any file.
    fn may_show(&self, other: &Self) -> bool {
        let Store::Nameless(name) = &self.store else { return false };
        let is_removed = name.ends_with(" (deleted)");
        !is_removed && self.is_all && other.is_all && matches!(other.store, Store::File { .. })
    }
}

/// The system's list of devices.
pub(super) struct Devices<'a> {
    sysfs: &'a Path,
}

impl Devices<'static> {
    pub(super) fn of_system() -> Self {
        Self { sysfs: Path::new("/sys") }
    }
}

impl Devices<'_> {
    fn path(&self, number: u64, name: &str) -> PathBuf {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        self.sysfs.join(format!("dev/block/{major}:{minor}")).join(name)
    }

    pub(super) fn attribute(&self, number: u64, name: &str) -> Option<String> {
        Some(std::fs::read_to_string(self.path(number, name)).ok()?.trim_end_matches('\n').to_owned())
    }

    fn number(&self, number: u64, name: &str) -> Option<u64> {
        self.attribute(number, name)?.trim().parse().ok()
    }

    /// How large the device is, in bytes.
    fn size(&self, number: u64) -> u64 {
        self.number(number, "size").map_or(u64::MAX, |sectors| sectors.saturating_mul(SECTOR))
    }

    /// The disk that a partition is on.
    fn disk_of(&self, number: u64) -> Option<u64> {
        self.attribute(number, "partition")?;
        parse_number(&self.attribute(number, "../dev")?)
    }

    /// What the device mapper, an array or the like stands over.
    fn slaves(&self, number: u64) -> Vec<u64> {
        let Ok(slaves) = std::fs::read_dir(self.path(number, "slaves")) else { return Vec::new() };
        let number_of = |path: PathBuf| parse_number(std::fs::read_to_string(path.join("dev")).ok()?.trim());
        slaves.flatten().filter_map(|slave| number_of(slave.path())).collect()
    }

    /// Whether all that a device stands over has its bytes, each at the same place.
    fn is_all_of(&self, number: u64, slaves: &[u64]) -> bool {
        let is_multipath = self.attribute(number, "dm/uuid").is_some_and(|uuid| uuid.starts_with("mpath-"));
        is_multipath || matches!(slaves, [slave] if self.size(*slave) == self.size(number))
    }

    fn pieces(&self, found: &Metadata) -> Vec<Piece> {
        let mut pieces = Vec::new();
        if found.file_type().is_block_device() {
            let range = (0, self.size(found.rdev()));
            self.add_device(found.rdev(), range, true, &mut pieces, DEPTH_MAX);
        } else {
            self.add_file(found, (0, u64::MAX), true, &mut pieces, DEPTH_MAX);
        }
        pieces
    }

    fn add_device(&self, number: u64, range: (u64, u64), is_all: bool, pieces: &mut Vec<Piece>, depth: usize) {
        let Some(depth) = depth.checked_sub(1) else { return };
        let moved = |by: u64| (range.0.saturating_add(by), range.1.saturating_add(by));
        if let Some(disk) = self.disk_of(number) {
            let start = self.number(number, "start").unwrap_or_default().saturating_mul(SECTOR);
            return self.add_device(disk, moved(start), is_all, pieces, depth);
        }
        let (start, end) = range;
        pieces.push(Piece { store: Store::Disk(number), start, end, is_all });
        if let Some(name) = self.name_of(number, "") {
            pieces.push(Piece { store: Store::Named(name), start, end, is_all });
        }
        if let Some(file) = self.attribute(number, "loop/backing_file") {
            let offset = self.number(number, "loop/offset").unwrap_or_default();
            match std::fs::metadata(&file) {
                Ok(found) if found.file_type().is_block_device() => {
                    self.add_device(found.rdev(), moved(offset), is_all, pieces, depth);
                }
                Ok(found) => self.add_file(&found, moved(offset), is_all, pieces, depth),
                Err(_) => {
                    let (start, end) = moved(offset);
                    pieces.push(Piece { store: Store::Nameless(file), start, end, is_all });
                }
            }
        }
        let slaves = self.slaves(number);
        let shows_all = self.is_all_of(number, &slaves);
        for slave in slaves {
            let range = if shows_all { range } else { (0, self.size(slave)) };
            self.add_device(slave, range, is_all && shows_all, pieces, depth);
        }
    }

    fn add_file(&self, found: &Metadata, range: (u64, u64), is_all: bool, pieces: &mut Vec<Piece>, depth: usize) {
        // Of a directory what counts is the disk that what is made in it comes to.
        if found.is_file() {
            let store = Store::File { device: found.dev(), inode: found.ino() };
            pieces.push(Piece { store, start: range.0, end: range.1, is_all });
        }
        // A file system in memory, of a network or of several devices has no such device.
        if self.path(found.dev(), "size").exists() {
            self.add_device(found.dev(), (0, self.size(found.dev())), false, pieces, depth);
        }
    }

    /// What the device under `prefix` of `number` says of itself that no other says.
    pub(super) fn name_of(&self, number: u64, prefix: &str) -> Option<String> {
        NAMES.iter().find_map(|name| {
            let found = self.attribute(number, &format!("{prefix}{name}"))?;
            let found = found.trim();
            (!found.is_empty()).then(|| format!("{name} {found}"))
        })
    }

    /// What the block device says of itself that no other says, by whatever way it is reached: `KIND NAME from BYTE`.
    pub(super) fn names(&self, device: &Metadata) -> Vec<String> {
        let pieces = self.pieces(device).into_iter().filter(|piece| piece.is_all);
        let mut names: Vec<String> = pieces
            .filter_map(|Piece { store, start, .. }| match store {
                Store::Named(name) => Some(format!("{name} from {start}")),
                Store::File { .. } | Store::Nameless(_) | Store::Disk(_) => None,
            })
            .collect();
        names.extend(super::identity::file_behind(device.rdev()));
        names.sort();
        names.dedup();
        names
    }

    fn add_files_behind(&self, number: u64, files: &mut Vec<PathBuf>, depth: usize) {
        let Some(depth) = depth.checked_sub(1) else { return };
        if let Some(file) = self.attribute(number, "loop/backing_file").map(PathBuf::from) {
            match std::fs::metadata(&file) {
                Ok(found) if found.file_type().is_block_device() => self.add_files_behind(found.rdev(), files, depth),
                _ => files.push(file),
            }
        }
        let below = self.disk_of(number).into_iter().chain(self.slaves(number));
        below.for_each(|device| self.add_files_behind(device, files, depth));
    }

    /// Whether the two have bytes in common.
    pub(super) fn have_common(&self, one: &Metadata, other: &Metadata) -> bool {
        let (one, other) = (self.pieces(one), self.pieces(other));
        one.iter().any(|piece| other.iter().any(|other| piece.meets(other)))
    }

    /// The loop device that shows the file.
    pub(super) fn loop_over(&self, file: &Metadata) -> Option<PathBuf> {
        let devices = std::fs::read_dir(self.sysfs.join("block")).ok()?;
        devices.flatten().find_map(|device| {
            let backing = std::fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
            let found = std::fs::metadata(backing.trim_end_matches('\n')).ok()?;
            let is_it = (found.dev(), found.ino()) == (file.dev(), file.ino());
            is_it.then(|| Path::new("/dev").join(device.file_name()))
        })
    }
}

/// A device's number as the system writes it: `8:16`.
fn parse_number(text: &str) -> Option<u64> {
    let (major, minor) = text.split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// The files whose bytes a block device shows, as a loop device does; the file itself if it is one.
#[must_use]
pub fn files_behind(path: &Path) -> Vec<PathBuf> {
    match std::fs::metadata(path) {
        Ok(found) if found.file_type().is_block_device() => {
            let mut files = Vec::new();
            Devices::of_system().add_files_behind(found.rdev(), &mut files, DEPTH_MAX);
            files
        }
        _ => vec![path.to_owned()],
    }
}

/// Whether two files or block devices that exist have bytes in common.
#[must_use]
pub fn share_bytes(one: &Path, other: &Path) -> bool {
    match (std::fs::metadata(one), std::fs::metadata(other)) {
        (Ok(one), Ok(other)) => Devices::of_system().have_common(&one, &other),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device's number, what it says, and what it stands over.
    type Described<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a [&'a str]);

    /// A list of devices.
    struct Fake(tempfile::TempDir);

    impl Fake {
        fn new(devices: &[Described<'_>]) -> Self {
            let root = tempfile::tempdir().expect("a folder");
            for (number, attributes, slaves) in devices {
                let device = root.path().join("dev/block").join(number);
                for (name, text) in attributes.iter().chain(&[("dev", *number)]) {
                    let path = device.join(name);
                    std::fs::create_dir_all(path.parent().expect("in a folder")).expect("made");
                    std::fs::write(path, format!("{text}\n")).expect("written");
                }
                for slave in *slaves {
                    let path = device.join("slaves").join(slave.replace(':', "-"));
                    std::fs::create_dir_all(&path).expect("made");
                    std::fs::write(path.join("dev"), format!("{slave}\n")).expect("written");
                }
            }
            Self(root)
        }

        fn pieces(&self, number: &str) -> Vec<Piece> {
            let devices = Devices { sysfs: self.0.path() };
            let (number, mut pieces) = (parse_number(number).expect("a number"), Vec::new());
            devices.add_device(number, (0, devices.size(number)), true, &mut pieces, DEPTH_MAX);
            pieces
        }

        fn have_common(&self, one: &str, other: &str) -> bool {
            let (one, other) = (self.pieces(one), self.pieces(other));
            one.iter().any(|piece| other.iter().any(|other| piece.meets(other)))
        }
    }

    #[test]
    fn the_paths_of_a_disk_its_multipath_device_and_their_partitions_are_one_storage() {
        const WWID: (&str, &str) = ("device/wwid", "naa.6001");
        let devices = Fake::new(&[
            ("8:0", &[("size", "8000"), WWID], &[]),
            ("8:16", &[("size", "8000"), WWID], &[]),
            ("8:32", &[("size", "8000"), ("device/wwid", "naa.6002")], &[]),
            ("253:0", &[("size", "8000"), ("dm/uuid", "mpath-36001")], &["8:0", "8:16"]),
            ("253:1", &[("size", "8000"), ("dm/uuid", "")], &["8:32"]),
        ]);
        assert!(devices.have_common("8:0", "8:16"), "two paths");
        assert!(devices.have_common("253:0", "8:16") && devices.have_common("8:0", "253:0"));
        assert!(devices.have_common("253:1", "8:32"), "all of it through the device mapper");
        assert!(!devices.have_common("8:0", "8:32") && !devices.have_common("253:0", "253:1"));
    }

    #[test]
    fn two_logical_volumes_of_one_disk_are_separate_and_the_disk_is_neither() {
        let volume = |uuid: &'static str| [("size", "100"), ("dm/uuid", uuid)];
        let devices = Fake::new(&[
            ("8:0", &[("size", "8000"), ("device/wwid", "naa.1")], &[]),
            ("253:0", &volume("LVM-a"), &["8:0"]),
            ("253:1", &volume("LVM-b"), &["8:0"]),
        ]);
        assert!(!devices.have_common("253:0", "253:1"));
        assert!(devices.have_common("253:0", "253:0"));
        assert!(devices.have_common("253:0", "8:0") && devices.have_common("8:0", "253:1"));
    }

    #[test]
    fn a_loop_device_over_a_file_that_has_no_name_here_may_be_any_file() {
        let of = |store| Piece { store, start: 0, end: 100, is_all: true };
        let file = of(Store::File { device: 1, inode: 2 });
        let hidden = of(Store::Nameless("/elsewhere/disk.img".to_owned()));
        let removed = of(Store::Nameless("/images/disk.img (deleted)".to_owned()));
        assert!(hidden.meets(&file) && file.meets(&hidden));
        assert!(!removed.meets(&file) && removed.meets(&removed));
    }

    #[test]
    fn partitions_that_do_not_overlap_are_separate() {
        let devices = Fake::new(&[("8:0", &[("size", "8000"), ("device/wwid", "naa.1")], &[])]);
        let folder = devices.0.path().join("dev/block");
        for (minor, start, size) in [(1, "0", "10"), (2, "10", "20"), (3, "25", "10")] {
            let partition = folder.join(format!("8:0/sda{minor}"));
            std::fs::create_dir(&partition).expect("made");
            for (name, text) in [("partition", "x"), ("start", start), ("size", size)] {
                std::fs::write(partition.join(name), text).expect("written");
            }
            std::os::unix::fs::symlink(partition, folder.join(format!("8:{minor}"))).expect("a link");
        }
        assert!(!devices.have_common("8:1", "8:2") && !devices.have_common("8:1", "8:3"));
        assert!(devices.have_common("8:2", "8:3") && devices.have_common("8:0", "8:3"));
    }
}
