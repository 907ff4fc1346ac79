//! The mark of a file that a move has brought a volume into.

use std::fs::File;

use rustix::fs::XattrFlags;

/// The attribute of a file that a move has brought a volume into: the epoch, a space, and the volume's name.
const MARK: &str = "user.transhume";
const MARK_BYTES_MAX: usize = 512;

/// The epoch that the mark of `file` names.
pub(crate) fn marked_epoch(file: &File) -> Option<u64> {
    let mut value = [0_u8; MARK_BYTES_MAX];
    let length = rustix::fs::fgetxattr(file, MARK, &mut value).ok()?;
    let text = std::str::from_utf8(&value[..length]).ok()?;
    text.split(' ').next()?.parse().ok()
}

/// Marks `file` as what holds the volume called `volume` from `epoch` on. A file system without attributes keeps none.
pub(crate) fn mark(file: &File, epoch: u64, volume: &str) -> std::io::Result<()> {
    match rustix::fs::fsetxattr(file, MARK, format!("{epoch} {volume}").as_bytes(), XattrFlags::empty()) {
        Err(rustix::io::Errno::NOTSUP | rustix::io::Errno::PERM) => Ok(()),
        marked => marked.map_err(Into::into),
    }
}

/// Takes the mark off a file that another move is to fill.
pub(crate) fn unmark(file: &File) -> std::io::Result<()> {
    match rustix::fs::fremovexattr(file, MARK) {
        Err(rustix::io::Errno::NODATA | rustix::io::Errno::NOTSUP | rustix::io::Errno::PERM) => Ok(()),
        unmarked => unmarked.map_err(Into::into),
    }
}
