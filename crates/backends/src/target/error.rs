//! Why a target cannot be used: one line each, that says what is wrong and what to do.

use std::fmt;
use std::path::{Path, PathBuf};

use block::{Bytes, Error, ErrorKind};

use crate::obstacle;

/// Why a target cannot be used.
#[derive(Debug)]
#[non_exhaustive]
pub enum TargetError {
    /// It is the source, or has bytes in common with it.
    SameAsSource {
        /// The target.
        path: PathBuf,
        /// The source.
        source: PathBuf,
    },
    /// It holds something.
    NotEmpty {
        /// The target.
        path: PathBuf,
        /// How large it is.
        size: Bytes,
    },
    /// The volume does not fit.
    TooSmall {
        /// The target.
        path: PathBuf,
        /// How large it is.
        size: Bytes,
        /// How large the volume is.
        needed: Bytes,
    },
    /// It may not be written.
    ReadOnly {
        /// The target.
        path: PathBuf,
    },
    /// Its file system is too full.
    NoSpace {
        /// The target.
        path: PathBuf,
        /// What the source has allocated.
        needed: Bytes,
        /// What is free.
        available: Bytes,
    },
    /// Its sectors are larger than the guest's.
    Sectors {
        /// The target.
        path: PathBuf,
        /// What it takes multiples of.
        target: u32,
        /// What the guest sends multiples of.
        guest: u32,
    },
    /// Somebody uses it.
    InUse {
        /// The target.
        path: PathBuf,
        /// Who.
        holder: String,
    },
    /// Its directory does not exist.
    NoDirectory {
        /// The target.
        path: PathBuf,
        /// The directory.
        directory: PathBuf,
    },
    /// It is a link to nothing.
    DanglingLink {
        /// The target.
        path: PathBuf,
    },
    /// It was deleted or replaced while it was written.
    Replaced {
        /// The target.
        path: PathBuf,
    },
    /// It is not there, and nobody can tell whether it was deleted.
    Away {
        /// The target.
        path: PathBuf,
    },
    /// The name of a source that is to be put away leads to something else by now.
    OtherSource {
        /// The name.
        path: PathBuf,
    },
    /// It cannot be given to who has the source.
    Owner {
        /// The target.
        path: PathBuf,
        /// The source's user.
        user: u32,
        /// The source's group.
        group: u32,
        /// What the operating system says.
        error: String,
    },
    /// It is neither a file nor a block device.
    NoFile {
        /// The target.
        path: PathBuf,
    },
    /// The operating system failed.
    Os(Error),
}

impl TargetError {
    pub(crate) fn os(path: &Path, verb: &str, error: std::io::Error) -> Self {
        let context = match obstacle::of_refusal(path, &error) {
            Some(obstacle) => format!("{verb} {} ({obstacle})", path.display()),
            None => format!("{verb} {}", path.display()),
        };
        Self::Os(Error::from_os(error, context))
    }

    pub(crate) fn opening(path: &Path, error: std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::ReadOnlyFilesystem => Self::ReadOnly { path: path.to_owned() },
            _ => Self::os(path, "opening", error),
        }
    }

    /// What went wrong, to match on.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::ReadOnly { .. } => ErrorKind::ReadOnly,
            Self::NoSpace { .. } => ErrorKind::NoSpace,
            Self::InUse { .. } => ErrorKind::Busy,
            Self::NoDirectory { .. } | Self::Away { .. } => ErrorKind::NotFound,
            Self::Owner { .. } => ErrorKind::PermissionDenied,
            Self::Sectors { .. } => ErrorKind::Misaligned,
            Self::Os(error) => error.kind(),
            Self::SameAsSource { .. }
            | Self::NotEmpty { .. }
            | Self::TooSmall { .. }
            | Self::DanglingLink { .. }
            | Self::Replaced { .. }
            | Self::OtherSource { .. }
            | Self::NoFile { .. } => ErrorKind::Invalid,
        }
    }
}

impl fmt::Display for TargetError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SameAsSource { path, source } => {
                let (path, source) = (path.display(), source.display());
                write!(
                    out,
                    "{path} is the source itself ({source}), or has bytes in common with it on the same disk or file: \
                     name another target"
                )
            }
            Self::NotEmpty { path, size } => {
                let path = path.display();
                write!(out, "{path} exists and holds {size}: name another target, or overwrite it with --overwrite")
            }
            Self::TooSmall { path, size, needed } => {
                let path = path.display();
                write!(out, "{path} has {size} and the volume has {needed}: use a target at least as large")
            }
            Self::ReadOnly { path } => {
                write!(out, "{} is read-only: make it writable, or name another target", path.display())
            }
            Self::NoSpace { path, needed, available } => {
                let path = path.display();
                write!(out, "the file system of {path} has {available} free and the volume needs {needed}: make room")
            }
            Self::Sectors { path, target, guest } if *guest < 512 => {
                let path = path.display();
                write!(
                    out,
                    "{path} takes multiples of {target} bytes past the page cache, and the volume's size is none: use \
                     cache=page"
                )
            }
            Self::Sectors { path, target, guest } => {
                let path = path.display();
                write!(
                    out,
                    "{path} has sectors of {target} bytes and the guest writes sectors of {guest}: use a target with \
                     sectors of {guest} bytes"
                )
            }
            Self::InUse { path, holder } => write!(out, "{} is in use: {holder}", path.display()),
            Self::NoDirectory { path, directory } => {
                write!(out, "{} cannot be created: create {} first", path.display(), directory.display())
            }
            Self::DanglingLink { path } => {
                write!(out, "{} is a link to nothing: remove it, or name another target", path.display())
            }
            Self::Replaced { path } => {
                write!(out, "somebody has deleted or replaced {} during the move: move again", path.display())
            }
            Self::Away { path } => {
                write!(out, "{} is not there: mount its file system, or attach its device", path.display())
            }
            Self::OtherSource { path } => {
                write!(out, "{} is not what was moved any more and is left as it is", path.display())
            }
            Self::Owner { path, user, group, error } => {
                let path = path.display();
                write!(
                    out,
                    "{path} cannot be given to the source's owner {user} and group {group} ({error}): give the daemon \
                     CAP_CHOWN, or make an empty file there that its users may open, which is taken as it is"
                )
            }
            Self::NoFile { path } => {
                write!(out, "{} is neither a file nor a block device: name another target", path.display())
            }
            Self::Os(error) => out.write_str(&error.chain()),
        }
    }
}

impl std::error::Error for TargetError {}

impl From<TargetError> for Error {
    fn from(error: TargetError) -> Self {
        match error {
            TargetError::Os(error) => error,
            other => Self::new(other.kind(), other.to_string()),
        }
    }
}
