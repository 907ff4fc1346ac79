//! Which file or block device holds a volume, and what it says of moves: its name says neither.
//!
//! | what | of | says |
//! |---|---|---|
//! | [`ImageIdentity`] | both | whether it still is what the volume's record names |
//! | [`ImageTimes`] | a file | whether anybody has changed it since they were noted |
//! | [`ImageState`] | a file | the same, and whether it is another one or of another size |
//! | [`Tombstone`] | a block device | that its volume was moved away |
//! | the attribute `user.transhume` | a file | the move that has brought a volume into it |
//! | the attribute `user.transhume.layers` | a file | how often its volume has got a layer that may hold bytes |

use std::fmt;
use std::fs::{File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use block::{BlockDevice, Buffer, Bytes, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::mark::{lacks_layers_mark, mark_layers, marked_epoch, marked_layers};
use crate::target::{DeviceIdentity, FileIdentity, PreparedTarget, block_size_of, device_names};
use crate::tombstone::{TOMBSTONE_BYTES, Tombstone};
use crate::{FileBackend, SourceIdentity};

/// The identity of the file or block device that holds a volume, wherever its name leads later.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageIdentity {
    file: FileIdentity,
    /// Of a block device: the name of its node says nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    block_device: Option<DeviceIdentity>,
    /// How long it is at least, in bytes.
    size: u64,
}

/// When a file was changed last, by the clock of its file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageTimes {
    modified_ns: i64,
    changed_ns: i64,
}

/// What a file system says of a file, as far as every change of it is told by that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageState {
    /// The file system.
    pub device: u64,
    /// The file in it.
    pub inode: u64,
    /// How large it is, in bytes.
    pub size: u64,
    /// When it was changed last.
    pub times: ImageTimes,
}

/// Why a file or block device is not what a volume's record names.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImageError {
    /// Another one has its name.
    Another,
    /// Somebody has made it shorter.
    Shorter {
        /// How long it was.
        was: Bytes,
        /// How long it is.
        is: Bytes,
    },
    /// It carries the tombstone of a volume that was moved away.
    Moved {
        /// The epoch that ended with the move.
        epoch: u64,
    },
    /// A move has made it the volume under a newer epoch than the record says.
    Newer {
        /// The epoch that began with the move.
        epoch: u64,
    },
    /// Its volume has got a layer of which the record does not know.
    Layered,
}

impl ImageError {
    /// What an error of opening says of the image, if that is what it is about.
    #[must_use]
    pub fn of(error: &Error) -> Option<&Self> {
        std::error::Error::source(error)?.downcast_ref()
    }

    /// The same as an error about `path`.
    #[must_use]
    pub fn about(self, path: &Path) -> Error {
        let kind = match self {
            Self::Another | Self::Shorter { .. } => ErrorKind::Invalid,
            Self::Moved { .. } | Self::Newer { .. } | Self::Layered => ErrorKind::Fenced,
        };
        Error::new(kind, path.display().to_string()).with_source(self)
    }
}

impl fmt::Display for ImageError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Another => {
                out.write_str("another file or block device has this name now than the one that was served")
            }
            Self::Shorter { was, is } => write!(out, "it had {was} and has {is}: somebody has made it shorter"),
            Self::Moved { epoch } => {
                write!(out, "its volume was moved away: it carries the tombstone of epoch {epoch}")
            }
            Self::Newer { epoch } => {
                write!(
                    out,
                    "a move made it the volume under epoch {epoch}, which this state directory does not know of"
                )
            }
            Self::Layered => out.write_str(
                "a layer was added to this volume of which this state directory does not know: it is an older copy",
            ),
        }
    }
}

impl std::error::Error for ImageError {}

impl ImageIdentity {
    pub(crate) const fn new(file: FileIdentity, block_device: Option<DeviceIdentity>, size: Bytes) -> Self {
        Self { file, block_device, size: size.0 }
    }

    /// The source of a move of the volume, which was this image when it was put there. What a server says of the open file later may be
    /// of another one, which has got its name since.
    #[must_use]
    pub fn as_source(&self, now: SourceIdentity) -> SourceIdentity {
        now.with_file(self.file.clone())
    }

    /// Of what is open as `file`.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn of(file: &File) -> std::io::Result<Self> {
        let found = file.metadata()?;
        let is_block_device = found.file_type().is_block_device();
        let size = if is_block_device { block_size_of(file)? } else { found.len() };
        Ok(Self {
            file: FileIdentity::of(&found),
            block_device: is_block_device.then(|| DeviceIdentity::of(&found)),
            size,
        })
    }

    /// Whether `now` is the same file or block device. It may have grown.
    ///
    /// # Errors
    /// It is another one, or shorter.
    pub fn check(&self, now: &Self) -> std::result::Result<(), ImageError> {
        let is_same = match (&self.block_device, &now.block_device) {
            (None, None) => self.file.is(&now.file),
            (Some(before), Some(now)) => before.holds_the_same(now),
            _ => false,
        };
        match is_same {
            true => self.check_length(now),
            false => Err(ImageError::Another),
        }
    }

    /// Whether `now`, which may be another one, is as long at least.
    ///
    /// # Errors
    /// It is shorter.
    pub const fn check_length(&self, now: &Self) -> std::result::Result<(), ImageError> {
        match now.size < self.size {
            true => Err(ImageError::Shorter { was: Bytes(self.size), is: Bytes(now.size) }),
            false => Ok(()),
        }
    }

    /// Whether the name `path` leads to it.
    ///
    /// # Errors
    /// It leads to another file or block device, or nowhere.
    pub fn check_name(&self, path: &Path) -> Result<()> {
        let file = File::open(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => ImageError::Another.about(path),
            _ => Error::from_os(error, format!("opening {}", path.display())),
        })?;
        let now = Self::of(&file).map_err(|error| Error::from_os(error, format!("looking at {}", path.display())))?;
        self.check(&now).map_err(|error| error.about(path))
    }
}

impl ImageTimes {
    /// When the bytes were changed last, and when anything was: in nanoseconds since 1970.
    #[must_use]
    pub const fn new(modified_ns: i64, changed_ns: i64) -> Self {
        Self { modified_ns, changed_ns }
    }

    /// When the bytes were changed last, in nanoseconds since 1970.
    #[must_use]
    pub const fn modified_ns(&self) -> i64 {
        self.modified_ns
    }

    /// When anything was changed last, in nanoseconds since 1970.
    #[must_use]
    pub const fn changed_ns(&self) -> i64 {
        self.changed_ns
    }

    /// Of what `found` tells of; a block device has none that would say anything.
    #[must_use]
    pub fn of(found: &Metadata) -> Option<Self> {
        let ns = |seconds: i64, ns: i64| seconds.saturating_mul(1_000_000_000).saturating_add(ns);
        found.is_file().then(|| Self {
            modified_ns: ns(found.mtime(), found.mtime_nsec()),
            changed_ns: ns(found.ctime(), found.ctime_nsec()),
        })
    }
}

impl ImageState {
    /// Of the file at `path`; none if it is no file, or not there.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        let found = std::fs::metadata(path).ok()?;
        let times = ImageTimes::of(&found)?;
        Some(Self { device: found.dev(), inode: found.ino(), size: found.len(), times })
    }
}

impl PreparedTarget {
    /// What it is as the image of a volume of `size`. Older records of a block device do not say.
    #[must_use]
    pub fn image(&self, size: Bytes) -> Option<ImageIdentity> {
        let (file, block_device) = self.identities()?;
        Some(ImageIdentity::new(file, block_device, size))
    }
}

/// Marks the file at `path` durably as the image of a volume with layers of `generation`, unless it is marked with that or a later
/// one. A block device keeps no mark, and neither does a file that is not the `known` one, or is there no more.
///
/// # Errors
/// What the operating system says.
pub fn mark_layers_of(path: &Path, known: Option<&ImageIdentity>, generation: u64) -> Result<()> {
    let attempt = |error| Error::from_os(error, format!("marking {}", path.display()));
    let file = match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        opened => opened.map_err(attempt)?,
    };
    let is_known = match known {
        Some(known) => known.check(&ImageIdentity::of(&file).map_err(attempt)?).is_ok(),
        None => true,
    };
    let is_file = file.metadata().map_err(attempt)?.is_file();
    if !is_known || !is_file || !lacks_layers_mark(&file, generation) {
        return Ok(());
    }
    mark_layers(&file, generation).and_then(|()| file.sync_all()).map_err(attempt)
}

impl FileBackend {
    /// Which file or block device it is, and how long.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn image(&self) -> std::io::Result<ImageIdentity> {
        ImageIdentity::of(self.file().name())
    }

    /// When it was changed last; a block device does not say.
    #[must_use]
    pub fn times(&self) -> Option<ImageTimes> {
        self.file().name().metadata().ok().as_ref().and_then(ImageTimes::of)
    }

    /// The tombstone that it carries, if it is a block device with one.
    ///
    /// # Errors
    /// What the device says.
    pub async fn tombstone(&self) -> Result<Option<Tombstone>> {
        if !self.is_block_device() || self.geometry().size < Bytes::from(TOMBSTONE_BYTES) {
            return Ok(None);
        }
        let first = BlockDevice::read(self, Bytes::ZERO, Buffer::unpooled(TOMBSTONE_BYTES)).await?;
        Ok(Tombstone::parse(&first))
    }

    /// What it says of itself that no other says, if it is a block device.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn device_names(&self) -> std::io::Result<Vec<String>> {
        let found = self.metadata()?;
        Ok(if found.file_type().is_block_device() { device_names(&found) } else { Vec::new() })
    }

    /// The epoch under which a move has brought a volume into this file, if one has.
    #[must_use]
    pub fn marked_epoch(&self) -> Option<u64> {
        marked_epoch(self.file().name())
    }

    /// The generation of its volume's layers that this file names, if it names one.
    #[must_use]
    pub fn marked_layers(&self) -> Option<u64> {
        marked_layers(self.file().name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mark::{mark, unmark};

    fn file(size: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").expect("a file on disk");
        file.as_file().set_len(size).expect("extended");
        file
    }

    #[test]
    fn an_image_is_known_whatever_its_name_leads_to_and_may_grow_but_not_shrink() {
        let (one, other) = (file(8192), file(8192));
        let known = ImageIdentity::of(one.as_file()).expect("looked");
        known.check_name(one.path()).expect("it is the same");
        assert_eq!(ImageError::of(&known.check_name(other.path()).expect_err("another")), Some(&ImageError::Another));
        one.as_file().set_len(16384).expect("extended");
        known.check_name(one.path()).expect("it has grown");
        one.as_file().set_len(4096).expect("cut");
        let shorter = known.check_name(one.path()).expect_err("shorter");
        let expected = ImageError::Shorter { was: Bytes(8192), is: Bytes(4096) };
        assert_eq!(ImageError::of(&shorter), Some(&expected));
        std::fs::rename(other.path(), one.path()).expect("replaced");
        let replaced = known.check_name(one.path()).expect_err("another one has its name");
        assert_eq!(ImageError::of(&replaced), Some(&ImageError::Another));
        let text = serde_json::to_string(&known).expect("plain data");
        assert_eq!(serde_json::from_str::<ImageIdentity>(&text).expect("readable"), known);
    }

    #[test]
    fn a_mark_names_the_epoch_until_it_is_taken_off() {
        let file = file(4096);
        assert_eq!(marked_epoch(file.as_file()), None);
        mark(file.as_file(), 7, "web one").expect("marked");
        assert_eq!(marked_epoch(file.as_file()), Some(7));
        unmark(file.as_file()).expect("taken off");
        unmark(file.as_file()).expect("twice does no harm");
        assert_eq!(marked_epoch(file.as_file()), None);
    }

    #[test]
    fn a_mark_of_layers_grows_and_is_of_the_known_file_only() {
        let (image, other) = (file(4096), file(4096));
        let known = ImageIdentity::of(image.as_file()).expect("looked");
        mark_layers_of(image.path(), Some(&known), 2).expect("marked");
        mark_layers_of(image.path(), Some(&known), 1).expect("it has a later one");
        assert_eq!(marked_layers(image.as_file()), Some(2));
        assert_eq!(marked_epoch(image.as_file()), None);
        mark_layers_of(other.path(), Some(&known), 3).expect("another file is left alone");
        assert_eq!(marked_layers(other.as_file()), None);
        mark_layers_of(Path::new("/var/tmp/no-such-image"), Some(&known), 3).expect("it is not there");
        unmark(image.as_file()).expect("taken off");
        assert_eq!(marked_layers(image.as_file()), None);
    }

    /// Copies an attribute as `cp -a` does.
    fn bring_along(from: &tempfile::NamedTempFile, to: &tempfile::NamedTempFile, name: &str) {
        let mut value = [0_u8; 512];
        let length = rustix::fs::fgetxattr(from.as_file(), name, &mut value).expect("it is there");
        write_mark(to, name, &value[..length]);
    }

    fn write_mark(file: &tempfile::NamedTempFile, name: &str, value: &[u8]) {
        rustix::fs::fsetxattr(file.as_file(), name, value, rustix::fs::XattrFlags::empty()).expect("marked");
    }

    #[test]
    fn a_mark_that_came_along_with_a_copy_says_nothing_and_one_that_names_no_file_what_it_says() {
        const LAYERS: &str = "user.transhume.layers";
        let (template, copy) = (file(4096), file(4096));
        mark(template.as_file(), 7, "web1").expect("marked");
        mark_layers(template.as_file(), 5).expect("marked");
        bring_along(&template, &copy, "user.transhume");
        bring_along(&template, &copy, LAYERS);
        assert_eq!((marked_epoch(template.as_file()), marked_layers(template.as_file())), (Some(7), Some(5)));
        assert_eq!((marked_epoch(copy.as_file()), marked_layers(copy.as_file())), (None, None));
        mark_layers_of(copy.path(), None, 1).expect("marked");
        assert_eq!(marked_layers(copy.as_file()), Some(1), "it has a mark of its own");
        // As earlier versions wrote them.
        write_mark(&copy, "user.transhume", b"9 web1");
        write_mark(&copy, LAYERS, b"3");
        assert_eq!((marked_epoch(copy.as_file()), marked_layers(copy.as_file())), (Some(9), Some(3)));
        bring_along(&copy, &template, LAYERS);
        assert_eq!(marked_layers(template.as_file()), Some(3));
        mark_layers_of(template.path(), None, 3).expect("marked");
        bring_along(&template, &copy, LAYERS);
        assert_eq!(marked_layers(copy.as_file()), None, "it names its file from then on");
    }

    #[test]
    fn a_write_past_us_shows_in_the_times_of_a_file() {
        let file = file(4096);
        let times = || ImageTimes::of(&file.as_file().metadata().expect("looked"));
        let before = times();
        assert_eq!(times(), before);
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::write(file.path(), b"by hand").expect("written");
        assert_ne!(times(), before);
    }
}
