//! What a block device is, whatever host looks at it.
//!
//! Its path says nothing, and no file can be put beside it. So the proof is what the storage itself says: the worldwide name of
//! a SCSI or NVMe device, or the UUID that the device mapper has of a multipath device or a logical volume. Two daemons on one
//! kernel see the same device by its number.

use std::path::Path;

/// Names that no two devices share. What a vendor makes of model and serial number (`t10.`, `nvme.`) is none of them, and
/// neither is what a host has made up by itself (`naa.3`).
const WORLDWIDE: [&str; 5] = ["naa.2", "naa.5", "naa.6", "eui.", "uuid."];
/// What the device mapper's names begin with where they say which device it is, at every host.
const MAPPED: [&str; 2] = ["mpath-", "LVM-"];

/// The identity of the block device `major`:`minor` under the kernel that booted as `boot`, as text that only such a device has.
pub(crate) fn of(sysfs: &Path, boot: &[u8], (major, minor): (u32, u32)) -> String {
    let device = sysfs.join(format!("dev/block/{major}:{minor}"));
    stored(&device).or_else(|| partition(&device)).unwrap_or_else(|| {
        let boot: String = boot.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("kernel {boot} {major}:{minor}")
    })
}

/// What the storage says of a whole device.
fn stored(device: &Path) -> Option<String> {
    let read = |name: &str| Some(std::fs::read_to_string(device.join(name)).ok()?.trim().to_owned());
    let begins = |text: &String, starts: &[&str]| starts.iter().any(|start| text.starts_with(start));
    let mapped = read("dm/uuid").filter(|uuid| begins(uuid, &MAPPED));
    let named = || ["wwid", "device/wwid"].into_iter().filter_map(read).find(|name| begins(name, &WORLDWIDE));
    mapped.or_else(named)
}

/// A partition is where it lies in its device.
fn partition(device: &Path) -> Option<String> {
    let read = |name: &str| Some(std::fs::read_to_string(device.join(name)).ok()?.trim().to_owned());
    read("partition")?;
    let whole = stored(device.canonicalize().ok()?.parent()?)?;
    Some(format!("{whole} from sector {} on", read("start")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(files: &[(&str, &str)]) -> tempfile::TempDir {
        let sysfs = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            let path = sysfs.path().join("dev/block/8:0").join(name);
            std::fs::create_dir_all(path.parent().expect("in a folder")).expect("made");
            std::fs::write(path, text).expect("written");
        }
        sysfs
    }

    #[test]
    fn a_worldwide_name_is_an_identity_and_a_made_up_one_is_none() {
        let identity = |files: &[(&str, &str)]| of(device(files).path(), &[0xab], (8, 0));
        assert_eq!(identity(&[("device/wwid", "naa.600140512345\n")]), "naa.600140512345");
        assert_eq!(identity(&[("wwid", "eui.0025388b710116a1\n")]), "eui.0025388b710116a1");
        assert_eq!(identity(&[("dm/uuid", "LVM-abc\n"), ("wwid", "eui.1")]), "LVM-abc");
        for made_up in ["t10.ATA QEMU HARDDISK QM00001", "naa.3000", "nvme.8086-1"] {
            let found = identity(&[("device/wwid", made_up)]);
            assert_eq!(found, "kernel ab 8:0");
        }
        assert!(identity(&[("dm/uuid", "CRYPT-LUKS2-1-x")]).starts_with("kernel "));
    }

    #[test]
    fn a_partition_is_told_from_its_device_and_from_others() {
        let sysfs = device(&[("device/wwid", "naa.6001"), ("sda1/partition", "1"), ("sda1/start", "2048")]);
        let folder = sysfs.path().join("dev/block");
        std::os::unix::fs::symlink(folder.join("8:0/sda1"), folder.join("8:1")).expect("a link");
        assert_eq!(of(sysfs.path(), &[], (8, 1)), "naa.6001 from sector 2048 on");
        assert_eq!(of(sysfs.path(), &[], (8, 0)), "naa.6001");
    }
}
