//! What a file system says of an image.

use std::path::Path;
use std::time::{Duration, SystemTime};

/// What a file system says of a file, as far as every change of it is told by that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageState {
    /// The file system.
    pub device: u64,
    /// The file in it.
    pub inode: u64,
    /// How large it is, in bytes.
    pub size: u64,
    /// When its bytes were changed last, since 1970.
    pub modified: Duration,
    /// When anything of it was changed last, since 1970.
    pub changed: Duration,
}

impl ImageState {
    /// Of the file at `path`; none if it is no file, or not there.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        use std::os::unix::fs::MetadataExt;
        let metadata = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
        let modified = metadata.modified().ok()?.duration_since(SystemTime::UNIX_EPOCH).ok()?;
        let changed = Duration::new(metadata.ctime().try_into().ok()?, metadata.ctime_nsec().try_into().ok()?);
        Some(Self { device: metadata.dev(), inode: metadata.ino(), size: metadata.len(), modified, changed })
    }
}
