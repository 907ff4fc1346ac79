//! Which file or block device a target is, whatever its name leads to later.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use super::block_device::sys_attribute;
use super::storage::Devices;

/// Which file it is, whatever its name. Numbers of removed files are used again at once, so its birth counts too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileIdentity {
    device: u64,
    inode: u64,
    born_ns: Option<u64>,
    /// The boot in which the file system had the number `device`: a later boot may give it another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    boot: Option<String>,
}

/// Which block device it is, whatever node of `/dev` it has: the next boot, or a disk that was unplugged, may give
/// `/dev/sdb` to another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeviceIdentity {
    /// What the kernel calls it.
    number: u64,
    /// How large it is, in bytes.
    size: u64,
    /// What the disk, the volume group or the array says of itself, and where a partition lies on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    serial: Option<String>,
    /// Counts what the kernel has attached in this boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sequence: Option<u64>,
    /// The boot for which `number` and `sequence` count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    boot: Option<String>,
}

impl FileIdentity {
    pub(crate) fn of(found: &Metadata) -> Self {
        let born = found.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        let born_ns = born.and_then(|born| u64::try_from(born.as_nanos()).ok());
        Self { device: found.dev(), inode: found.ino(), born_ns, boot: this_boot() }
    }

    /// One that is only a number.
    pub(super) const fn numbered(number: u64) -> Self {
        Self { device: 0, inode: number, born_ns: None, boot: None }
    }

    pub(super) const fn number(&self) -> u64 {
        self.inode
    }

    /// Whether `found`, a directory, is on the file system where that file was, as far as this boot can tell. Another
    /// number says nothing here: what lies under a mount point has one, too.
    pub(crate) fn is_on_device_of(&self, found: &Metadata) -> bool {
        self.device == found.dev() && (self.boot.is_none() || self.boot == this_boot())
    }

    /// Whether its file system says when it was made.
    pub(crate) const fn has_birth(&self) -> bool {
        self.born_ns.is_some()
    }

    /// Whether `found` is that file.
    pub(crate) fn is_still(&self, found: &Metadata) -> bool {
        self.is(&Self::of(found))
    }

    pub(crate) fn is(&self, now: &Self) -> bool {
        let is_alike = (self.inode, self.born_ns) == (now.inode, now.born_ns);
        is_alike && (self.device == now.device || self.may_be_renumbered(now))
    }

    /// Whether the file system of that file may have the number of `now` by now: in a later boot, or because it was
    /// mounted again. While the old number is in use the new one is that of a copy, as of a snapshot beside it.
    fn may_be_renumbered(&self, now: &Self) -> bool {
        if self.boot.is_none() || self.born_ns.is_none() {
            return false;
        }
        self.boot != now.boot || are_mounted([self.device, now.device]) == Some([false, true])
    }
}

impl DeviceIdentity {
    pub(crate) fn of(found: &Metadata) -> Self {
        let number = found.rdev();
        let sectors = sys_attribute(number, "size").and_then(|sectors| sectors.parse::<u64>().ok());
        let sequence = sys_attribute(number, "diskseq").or_else(|| sys_attribute(number, "../diskseq"));
        Self {
            number,
            size: sectors.map_or(0, |sectors| sectors * 512),
            serial: serial_of(number),
            sequence: sequence.and_then(|sequence| sequence.parse().ok()),
            boot: this_boot(),
        }
    }

    /// Whether `found` is that block device, which may have grown.
    pub(crate) fn is_still(&self, found: &Metadata) -> bool {
        self.is(&Self::of(found))
    }

    fn is(&self, now: &Self) -> bool {
        let is_it = match (&self.serial, &now.serial) {
            (Some(before), Some(now)) => before == now,
            // It says nothing of itself: only as long as the kernel has not let go of it.
            (None, _) => self.is_kept_by_kernel(now),
            // The file of a loop device may be removed while that shows it.
            (Some(before), None) => before.starts_with("file ") && self.is_kept_by_kernel(now),
        };
        is_it && now.size >= self.size
    }

    fn is_kept_by_kernel(&self, now: &Self) -> bool {
        self.boot == now.boot && (self.number, self.sequence) == (now.number, now.sequence)
    }

    /// Whether a volume that was in this device may be in `now`. After a boot a device that says nothing of itself is told by
    /// its size alone: a volume cannot do without its disk because of that.
    pub(crate) fn holds_the_same(&self, now: &Self) -> bool {
        let is_later_boot = self.boot != now.boot;
        match (&self.serial, &now.serial) {
            (None, _) if is_later_boot => self.size == now.size,
            _ => self.is(now),
        }
    }
}

/// What a block device says of itself that no other says.
fn serial_of(number: u64) -> Option<String> {
    let devices = Devices::of_system();
    let attribute = |name: &str| devices.attribute(number, name).map(|found| found.trim().to_owned());
    let first = |prefix: &str| devices.name_of(number, prefix);
    match attribute("partition") {
        Some(partition) => {
            let start = attribute("start").unwrap_or_default();
            Some(format!("{}, partition {partition} at {start}", first("../")?))
        }
        None => first("").or_else(|| file_behind(number)),
    }
}

/// The file that a loop device shows, and from where on.
pub(super) fn file_behind(number: u64) -> Option<String> {
    let file = std::fs::metadata(sys_attribute(number, "loop/backing_file")?).ok()?;
    let offset = sys_attribute(number, "loop/offset")?;
    let born = file.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok())?;
    Some(format!("file {} of {} from {offset}", file.ino(), born.as_nanos()))
}

/// Whether file systems with these numbers are mounted, where the system says. Subvolumes of btrfs have numbers that no
/// list of mounts shows.
fn are_mounted(numbers: [u64; 2]) -> Option<[bool; 2]> {
    let mounts = std::fs::read("/proc/self/mountinfo").ok()?;
    let mounts = String::from_utf8_lossy(&mounts);
    Some(numbers.map(|number| {
        let number = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        mounts.lines().any(|mount| mount.split(' ').nth(2) == Some(number.as_str()))
    }))
}

fn this_boot() -> Option<String> {
    Some(std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(device: u64, boot: &str) -> FileIdentity {
        FileIdentity { device, inode: 7, born_ns: Some(1), boot: Some(boot.to_owned()) }
    }

    /// The number of the file system at `path`, which is mounted.
    fn number_at(path: &str) -> u64 {
        std::fs::metadata(path).expect("it is mounted").dev()
    }

    #[test]
    fn a_file_system_may_have_another_number_after_a_boot_or_once_the_old_one_is_not_in_use() {
        assert!(file(1, "a").is(&file(1, "a")) && file(1, "a").is(&file(2, "b")));
        let (mounted, beside) = (number_at("/proc"), number_at("/sys"));
        let gone = rustix::fs::makedev(4000, 1);
        assert!(file(gone, "a").is(&file(mounted, "a")), "it was mounted again");
        assert!(!file(beside, "a").is(&file(mounted, "a")), "a copy of the file system is another one");
        assert!(!file(gone, "a").is(&file(gone + 1, "a")), "whether a number is in use is not known");
        assert!(!file(gone, "a").is(&FileIdentity { inode: 8, ..file(mounted, "a") }));
        assert!(!file(gone, "a").is(&FileIdentity { born_ns: Some(2), ..file(mounted, "a") }));
        assert!(!file(1, "a").is(&FileIdentity { inode: 8, ..file(1, "b") }));
        assert!(!file(1, "a").is(&FileIdentity { born_ns: Some(2), ..file(1, "a") }));
        let unborn = FileIdentity { born_ns: None, ..file(1, "a") };
        assert!(!unborn.is(&FileIdentity { device: 2, boot: Some("b".to_owned()), ..unborn.clone() }));
        let unborn = FileIdentity { device: gone, ..unborn };
        assert!(!unborn.is(&FileIdentity { device: mounted, ..unborn.clone() }));
        let old = FileIdentity { boot: None, ..file(gone, "a") };
        assert!(old.is(&file(gone, "a")) && !old.is(&file(mounted, "a")), "a record of before says less");
    }

    #[test]
    fn a_block_device_is_known_by_what_it_says_of_itself_or_for_as_long_as_the_kernel_has_it() {
        let known = DeviceIdentity {
            number: 8,
            size: 4096,
            serial: Some("wwid naa.1".to_owned()),
            sequence: Some(3),
            boot: Some("a".to_owned()),
        };
        let renumbered = DeviceIdentity { number: 16, sequence: Some(5), boot: Some("b".to_owned()), ..known.clone() };
        assert!(known.is(&renumbered));
        assert!(known.is(&DeviceIdentity { size: 8192, ..known.clone() }), "it may grow");
        assert!(!known.is(&DeviceIdentity { size: 2048, ..known.clone() }));
        assert!(!known.is(&DeviceIdentity { serial: Some("wwid naa.2".to_owned()), ..known.clone() }));
        assert!(!known.is(&DeviceIdentity { serial: None, ..known.clone() }));
        assert!(!known.holds_the_same(&DeviceIdentity { serial: Some("wwid naa.2".to_owned()), ..known.clone() }));
        let silent = DeviceIdentity { serial: None, ..known.clone() };
        assert!(silent.is(&known), "an older program did not look for what it says of itself");
        assert!(silent.is(&silent.clone()));
        assert!(!silent.is(&DeviceIdentity { sequence: Some(4), ..silent.clone() }), "another one was attached there");
        let later = DeviceIdentity { boot: Some("b".to_owned()), number: 16, ..silent.clone() };
        assert!(!silent.is(&later) && silent.holds_the_same(&later));
        assert!(!silent.holds_the_same(&DeviceIdentity { size: 8192, ..later }), "its size is all that is known of it");
        assert!(!silent.holds_the_same(&DeviceIdentity { sequence: Some(4), ..silent.clone() }));
    }
}
