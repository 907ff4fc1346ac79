//! The mark of a block device whose volume was moved away.
//!
//! ```text
//!   0 "TRANSHUME MOVED\n" │ 16 epoch (u64) │ 24 length of the name (u16) │ 26 the volume's name │ zeroes up to 4096
//! ```
//!
//! Numbers are little-endian. It stands in the first block; the last one keeps what stood there.

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
}

impl Tombstone {
    /// The tombstone that the first bytes of a block device are, if they are one.
    #[must_use]
    pub fn parse(first: &[u8]) -> Option<Self> {
        let rest = first.strip_prefix(TOMBSTONE_MAGIC)?;
        let epoch = u64::from_le_bytes(rest.get(..8)?.try_into().ok()?);
        let length = usize::from(u16::from_le_bytes(rest.get(8..10)?.try_into().ok()?));
        let name = first.get(TOMBSTONE_NAME..TOMBSTONE_NAME + length).filter(|name| !name.is_empty());
        Some(Self { epoch, volume: name.map(|name| String::from_utf8_lossy(name).into_owned()) })
    }

    pub(crate) fn to_bytes(&self) -> [u8; TOMBSTONE_BYTES] {
        let mut bytes = [0; TOMBSTONE_BYTES];
        bytes[..16].copy_from_slice(TOMBSTONE_MAGIC);
        bytes[16..24].copy_from_slice(&self.epoch.to_le_bytes());
        let name = self.volume.as_deref().unwrap_or_default().as_bytes();
        let length = name.len().min(TOMBSTONE_BYTES - TOMBSTONE_NAME);
        bytes[24..TOMBSTONE_NAME].copy_from_slice(&u16::try_from(length).unwrap_or_default().to_le_bytes());
        bytes[TOMBSTONE_NAME..TOMBSTONE_NAME + length].copy_from_slice(&name[..length]);
        bytes
    }
}
