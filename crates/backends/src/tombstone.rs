//! The mark of a block device whose volume was moved away.
//!
//! ```text
//!   0 "TRANSHUME MOVED\n" │ 16 epoch (u64) │ 24 length of the name (u16) │ 26 the volume's name
//!   ... length (u16) of what follows │ what the device says of itself, one line each │ zeroes up to 4096
//! ```
//!
//! Numbers are little-endian. It stands in the first block; the last one keeps what stood there.
//!
//! A guest may have such bytes of its own: it runs this program itself, or keeps a copy of such a device. So a tombstone says which
//! device it was written to. Earlier versions did not say that.

const TOMBSTONE_MAGIC: &[u8; 16] = b"TRANSHUME MOVED\n";
pub(crate) const TOMBSTONE_BYTES: usize = 4096;
/// Where a tombstone names the volume.
const TOMBSTONE_NAME: usize = 26;

/// What a retired block device says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tombstone {
    /// The epoch that ended with the move.
    pub epoch: u64,
    /// The volume that was moved away. Earlier versions did not name it.
    pub volume: Option<String>,
    /// What the device said of itself that no other says, each as `KIND NAME from BYTE`.
    pub device: Vec<String>,
}

impl Tombstone {
    /// The tombstone that the first bytes of a block device are, if they are one.
    #[must_use]
    pub fn parse(first: &[u8]) -> Option<Self> {
        let rest = first.strip_prefix(TOMBSTONE_MAGIC)?;
        let epoch = u64::from_le_bytes(rest.get(..8)?.try_into().ok()?);
        let (name, rest) = text_at(first, TOMBSTONE_NAME - 2)?;
        let device = text_at(first, rest).map_or_else(String::new, |(device, _)| device);
        let device = device.lines().map(str::to_owned).collect();
        Some(Self { epoch, volume: Some(name).filter(|name| !name.is_empty()), device })
    }

    pub(crate) fn to_bytes(&self) -> [u8; TOMBSTONE_BYTES] {
        let mut bytes = [0; TOMBSTONE_BYTES];
        bytes[..16].copy_from_slice(TOMBSTONE_MAGIC);
        bytes[16..24].copy_from_slice(&self.epoch.to_le_bytes());
        let next = put_text(&mut bytes, TOMBSTONE_NAME - 2, self.volume.as_deref().unwrap_or_default());
        put_text(&mut bytes, next, &self.device.join("\n"));
        bytes
    }

    /// Whether it was written to the device that says `own` of itself; none if that cannot be told.
    #[must_use]
    pub fn is_of(&self, own: &[String]) -> Option<bool> {
        let kinds = |names: &[String]| -> Vec<String> {
            names.iter().filter_map(|name| Some(name.split_once(' ')?.0.to_owned())).collect()
        };
        if self.device.iter().any(|name| own.contains(name)) {
            return Some(true);
        }
        let own = kinds(own);
        kinds(&self.device).iter().any(|kind| own.contains(kind)).then_some(false)
    }

    /// Whether it says of the device that says `own` of itself that `volume` was moved away from it. Without a volume any will
    /// do. What does not say to which device it was written is believed as far as its name goes.
    #[must_use]
    pub fn concerns(&self, volume: Option<&str>, own: &[String]) -> bool {
        self.is_of(own).unwrap_or_else(|| match (volume, &self.volume) {
            (Some(volume), Some(named)) => volume == named,
            _ => true,
        })
    }
}

/// The text at `start`, after its length, and where it ends.
fn text_at(bytes: &[u8], start: usize) -> Option<(String, usize)> {
    let begin = start + 2;
    let length = u16::from_le_bytes(bytes.get(start..begin)?.try_into().ok()?);
    let end = begin + usize::from(length);
    Some((String::from_utf8_lossy(bytes.get(begin..end)?).into_owned(), end))
}

/// Writes as much of `text` as there is room for, after its length. Gives where it ends.
fn put_text(bytes: &mut [u8; TOMBSTONE_BYTES], start: usize, text: &str) -> usize {
    let begin = start + 2;
    let Some(room) = TOMBSTONE_BYTES.checked_sub(begin) else { return start };
    let length = text.len().min(room);
    bytes[start..begin].copy_from_slice(&u16::try_from(length).unwrap_or_default().to_le_bytes());
    bytes[begin..begin + length].copy_from_slice(&text.as_bytes()[..length]);
    begin + length
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(lines: &[&str]) -> Vec<String> {
        lines.iter().map(|&line| line.to_owned()).collect()
    }

    #[test]
    fn a_tombstone_is_read_back_and_an_older_one_names_no_device() {
        for volume in [None, Some("web1".to_owned())] {
            let tombstone =
                Tombstone { epoch: 7, volume, device: names(&["wwid naa.6001 from 0", "dm/uuid mpath-3 from 0"]) };
            assert_eq!(Tombstone::parse(&tombstone.to_bytes()), Some(tombstone.clone()));
            let mut older = Tombstone { device: Vec::new(), ..tombstone }.to_bytes();
            assert_eq!(Tombstone::parse(&older).map(|older| older.device), Some(Vec::new()));
            older[24..26].copy_from_slice(&u16::MAX.to_le_bytes());
            assert_eq!(Tombstone::parse(&older), None, "its name would end behind it");
        }
        let long = Tombstone { epoch: 7, volume: Some("n".repeat(5000)), device: names(&["wwid naa.6001 from 0"]) };
        assert!(Tombstone::parse(&long.to_bytes()).is_some());
    }

    #[test]
    fn a_tombstone_concerns_its_device_and_a_copy_of_it_only_the_volume_that_it_names() {
        let tombstone =
            |device: &[&str]| Tombstone { epoch: 7, volume: Some("web1".to_owned()), device: names(device) };
        let own = names(&["device/wwid naa.6001 from 0"]);
        let of_lun = tombstone(&["dm/uuid mpath-36001 from 0", "device/wwid naa.6001 from 0"]);
        for volume in [None, Some("web1"), Some("db")] {
            assert!(of_lun.concerns(volume, &own), "another host reaches it by another way");
            assert!(!tombstone(&["device/wwid naa.6002 from 0"]).concerns(volume, &own), "a guest's own");
        }
        for unknown in [tombstone(&[]), tombstone(&["serial x from 0"])] {
            assert!(unknown.concerns(Some("web1"), &own) && unknown.concerns(None, &own));
            assert!(!unknown.concerns(Some("db"), &own), "it names another volume");
            assert!(unknown.concerns(Some("web1"), &[]));
        }
    }
}
