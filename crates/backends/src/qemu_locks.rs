//! The locks by which QEMU's programs keep out of each other's images, held in QEMU's stead while a disk is adopted.
//!
//! QEMU locks bytes of the image file, always shared: byte `100 + n` says "I use permission n", byte `200 + n` says "I
//! do not share permission n". Before it starts it checks both ways: whether others use what it does not share, and
//! whether others do not share what it uses. Permission 0 is reading consistent data, 1 writing, 3 resizing.

use std::fs::File;
use std::path::{Path, PathBuf};

use block::{Error, ErrorKind, Result};

use crate::helper::KeptFile;
use crate::lock::{Strength, describe_holder, is_locked_by_others, try_lock};

/// Reads, writes, and shares neither writing nor resizing: what QEMU holds for a guest's disk.
const HELD: [i64; 4] = [100, 101, 201, 203];

/// What no other may hold when these locks are taken: it uses what we do not share, or does not share what we use.
const CONFLICTS: [i64; 4] = [101, 103, 200, 201];

/// QEMU's locks on an image, held until this is dropped. qemu-img and qemu-io refuse the image meanwhile, as they do
/// while a QEMU runs on it.
#[derive(Debug)]
pub struct QemuLocks {
    held: Held,
    path: PathBuf,
}

/// Who has the open file that the locks are on.
#[derive(Debug)]
enum Held {
    Here { _file: File },
    ByHelper { _file: KeptFile },
}

impl QemuLocks {
    /// Takes the locks if no QEMU has the image.
    ///
    /// # Errors
    /// Busy, naming the holder, if one has; otherwise what the operating system says.
    pub fn take(path: &Path) -> Result<Self> {
        // As QEMU does it: first lock, then look, so that of two who do this at once at least one sees the other.
        let file = lock_shared(path)?;
        for byte in CONFLICTS {
            let taken = is_locked_by_others(&file, byte)
                .map_err(|error| Error::from_os(error, format!("looking at the locks of {}", path.display())))?;
            if taken {
                let holder = describe_holder(&file, byte);
                let context = format!("{} is in use by a QEMU program, {holder}", path.display());
                return Err(Error::new(ErrorKind::Busy, context));
            }
        }
        Ok(Self { held: Held::Here { _file: file }, path: path.to_owned() })
    }

    /// Takes the locks beside a QEMU that holds the same ones: during an adoption, before QEMU releases them, and
    /// during a release. Shared locks do not conflict; QEMU checks for others only when it asks for more than it has.
    ///
    /// # Errors
    /// Busy if somebody who is no QEMU holds one of the bytes exclusively; otherwise what the operating system says.
    pub fn take_beside(path: &Path) -> Result<Self> {
        Ok(Self { held: Held::Here { _file: lock_shared(path)? }, path: path.to_owned() })
    }

    /// The same locks, on a file that `keep` takes over, or gives back.
    pub(crate) fn kept(self, keep: impl FnOnce(File) -> std::result::Result<KeptFile, File>) -> Self {
        let held = match self.held {
            Held::Here { _file: file } => match keep(file) {
                Ok(file) => Held::ByHelper { _file: file },
                Err(file) => Held::Here { _file: file },
            },
            held @ Held::ByHelper { .. } => held,
        };
        Self { held, path: self.path }
    }

    /// The image.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Opens the file at `path` with QEMU's locks.
fn lock_shared(path: &Path) -> Result<File> {
    let attempt = |error| Error::from_os(error, format!("locking {} in QEMU's way", path.display()));
    let file = File::open(path).map_err(attempt)?;
    for byte in HELD {
        if !try_lock(&file, byte, Strength::Shared).map_err(attempt)? {
            let context = format!("byte {byte} of {} is locked {}", path.display(), describe_holder(&file, byte));
            return Err(Error::new(ErrorKind::Busy, context));
        }
    }
    Ok(file)
}
