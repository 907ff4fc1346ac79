//! What keeps files from being changed or renamed although their permissions allow it, and what to do about it.

use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Access, AtFlags, CWD, Statx, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::thread::CapabilitySet;

use crate::file_system::directory_of;

/// The longest name of a file.
const NAME_BYTES_MAX: usize = 255;
const STICKY: u32 = 0o1000;

/// What is in the way, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    what: String,
    hint: String,
}

impl Obstacle {
    fn new(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { what: what.into(), hint: hint.into() }
    }

    /// What is in the way.
    #[must_use]
    pub fn what(&self) -> &str {
        &self.what
    }

    /// What to do about it.
    #[must_use]
    pub fn hint(&self) -> &str {
        &self.hint
    }

    /// What would keep the file `found` at `path` from being renamed to `new`, in the same directory, as far as that can be told.
    pub(crate) fn to_renaming(path: &Path, new: &Path, found: &Metadata) -> Option<Self> {
        let name = new.file_name()?;
        if name.len() > NAME_BYTES_MAX {
            let what = format!("its new name, {}, would be longer than {NAME_BYTES_MAX} bytes", name.display());
            return Some(Self::new(what, "rename it later by hand, to a shorter name"));
        }
        if new.symlink_metadata().is_ok() {
            return Some(Self::new(format!("there is a {} already", new.display()), "remove or rename that"));
        }
        Self::of_attributes(path).or_else(|| Self::of_mount(path)).or_else(|| Self::of_directory(path, found))
    }

    /// The kernel lets nobody write to the block device `path`.
    pub(crate) fn read_only(path: &Path) -> Self {
        let path = path.display();
        Self::new(format!("{path} is read-only"), format!("`blockdev --setrw {path}`"))
    }

    /// The attributes of a file, or of its directory, that keep everybody from changing it, root included.
    #[must_use]
    pub fn of_attributes(path: &Path) -> Option<Self> {
        const NAMED: [(StatxAttributes, &str, &str); 2] =
            [(StatxAttributes::IMMUTABLE, "immutable", "-i"), (StatxAttributes::APPEND, "append-only", "-a")];
        let directory = directory_of(path);
        [(path, "file"), (&directory, "directory")].into_iter().find_map(|(path, kind)| {
            let attributes = attributes_of(path)?;
            let (_, word, option) = NAMED.into_iter().find(|(attribute, ..)| attributes.contains(*attribute))?;
            let shown = path.display();
            Some(Self::new(format!("the {kind} {shown} is {word}"), format!("`chattr {option} {shown}`")))
        })
    }

    fn of_mount(path: &Path) -> Option<Self> {
        let shown = path.display();
        attributes_of(path)?.contains(StatxAttributes::MOUNT_ROOT).then(|| {
            Self::new(format!("{shown} is a mount point: the file is mounted there"), format!("`umount {shown}` later"))
        })
    }

    fn of_directory(path: &Path, file: &Metadata) -> Option<Self> {
        let directory = directory_of(path);
        let shown = directory.display();
        match rustix::fs::accessat(CWD, &directory, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS) {
            Err(Errno::ROFS) => {
                let what = format!("the file system of {shown} is read-only");
                return Some(Self::new(what, "mount it writable"));
            }
            Err(Errno::ACCESS | Errno::PERM) => {
                let what = format!("the daemon's user may not write to the directory {shown}");
                return Some(Self::new(what, format!("let it, as by `setfacl -m u:USER:rwx {shown}`")));
            }
            _ => {}
        }
        let found = std::fs::metadata(&directory).ok()?;
        let user = rustix::process::geteuid().as_raw();
        let is_owner = [found.uid(), file.uid()].contains(&user) || is_capable(CapabilitySet::FOWNER);
        (found.mode() & STICKY != 0 && !is_owner).then(|| {
            let what = format!("the directory {shown} is sticky, and it and the file belong to other users");
            Self::new(what, "have their owner rename the file, or run the daemon with CAP_FOWNER")
        })
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.what, self.hint)
    }
}

/// What the operating system's refusal to change `path` comes from, where it does not say.
pub(crate) fn of_refusal(path: &Path, error: &std::io::Error) -> Option<Obstacle> {
    let is_refused = error.raw_os_error() == Some(Errno::PERM.raw_os_error());
    is_refused.then(|| Obstacle::of_attributes(path)).flatten()
}

fn attributes_of(path: &Path) -> Option<StatxAttributes> {
    let Statx { stx_attributes, stx_attributes_mask, .. } =
        rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS).ok()?;
    Some(stx_attributes & stx_attributes_mask)
}

fn is_capable(capability: CapabilitySet) -> bool {
    rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(capability))
}
