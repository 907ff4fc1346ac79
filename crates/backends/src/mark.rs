//! The marks of a file that holds a volume: by them an older copy of the volume's record is told from the newest.

use std::fs::File;

use rustix::fs::XattrFlags;

/// The attribute of a file that a move has brought a volume into: the epoch, a space, and the volume's name.
const MARK: &str = "user.transhume";
/// The attribute of the image of a volume that has, or had, layers which may hold bytes that the image lacks: the generation of its
/// layers.
const LAYERS: &str = "user.transhume.layers";
const MARK_BYTES_MAX: usize = 512;

/// The epoch that the mark of `file` names.
pub(crate) fn marked_epoch(file: &File) -> Option<u64> {
    number_in(file, MARK)
}

/// The generation of its volume's layers that `file` names.
pub(crate) fn marked_layers(file: &File) -> Option<u64> {
    number_in(file, LAYERS)
}

/// Marks `file` as what holds the volume called `volume` from `epoch` on. A file system without attributes keeps none.
pub(crate) fn mark(file: &File, epoch: u64, volume: &str) -> std::io::Result<()> {
    set(file, MARK, &format!("{epoch} {volume}"))
}

/// Marks `file` as the image of a volume with layers of `generation`. A file system without attributes keeps none.
pub(crate) fn mark_layers(file: &File, generation: u64) -> std::io::Result<()> {
    set(file, LAYERS, &generation.to_string())
}

/// Takes the marks off a file that another move is to fill.
pub(crate) fn unmark(file: &File) -> std::io::Result<()> {
    remove(file, MARK).and_then(|()| remove(file, LAYERS))
}

/// The number with which the attribute `name` of `file` begins.
fn number_in(file: &File, name: &str) -> Option<u64> {
    let mut value = [0_u8; MARK_BYTES_MAX];
    let length = rustix::fs::fgetxattr(file, name, &mut value).ok()?;
    let text = std::str::from_utf8(&value[..length]).ok()?;
    text.split(' ').next()?.parse().ok()
}

fn set(file: &File, name: &str, value: &str) -> std::io::Result<()> {
    match rustix::fs::fsetxattr(file, name, value.as_bytes(), XattrFlags::empty()) {
        Err(rustix::io::Errno::NOTSUP | rustix::io::Errno::PERM) => Ok(()),
        marked => marked.map_err(Into::into),
    }
}

fn remove(file: &File, name: &str) -> std::io::Result<()> {
    match rustix::fs::fremovexattr(file, name) {
        Err(rustix::io::Errno::NODATA | rustix::io::Errno::NOTSUP | rustix::io::Errno::PERM) => Ok(()),
        unmarked => unmarked.map_err(Into::into),
    }
}
