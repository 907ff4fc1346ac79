//! The marks of a file that holds a volume: by them an older copy of the volume's record is told from the newest.
//!
//! ```text
//!   user.transhume         EPOCH VOLUME INODE BORN
//!   user.transhume.layers  GENERATION INODE BORN
//! ```
//!
//! A program that copies a file may bring its attributes along, also over what another file holds. So a mark names its file: by its number
//! and when it was made, in nanoseconds since 1970, or `-` where the file system does not say. One that names another file says nothing.
//! Marks of earlier versions end before the number of the file, and say what they say wherever they are.

use std::fs::{File, Metadata};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::time::UNIX_EPOCH;

use rustix::fs::XattrFlags;
use rustix::io::Errno;

/// The attribute of a file that a move has brought a volume into.
const MARK: &str = "user.transhume";
/// The attribute of the image of a volume that has, or had, layers which may hold bytes that the image lacks.
const LAYERS: &str = "user.transhume.layers";
const MARK_BYTES_MAX: usize = 512;

/// What a mark says.
#[derive(Clone, Copy)]
struct Mark {
    /// The epoch, or the generation.
    number: u64,
    /// Whether it is of the file that carries it; none if it does not say.
    is_own: Option<bool>,
}

/// The epoch that the mark of `file` names.
pub(crate) fn marked_epoch(file: &File) -> Option<u64> {
    mark_in(file, MARK).filter(|mark| mark.is_own != Some(false)).map(|mark| mark.number)
}

/// Whether `file` carries the mark of a move, be it another file's.
pub(crate) fn carries_mark(file: &File) -> bool {
    mark_in(file, MARK).is_some()
}

/// The generation of its volume's layers that `file` names.
pub(crate) fn marked_layers(file: &File) -> Option<u64> {
    mark_in(file, LAYERS).filter(|mark| mark.is_own != Some(false)).map(|mark| mark.number)
}

/// Whether a mark of `generation` is to be written to `file`: it has an older one, another file's, or one that names no file.
pub(crate) fn lacks_layers_mark(file: &File, generation: u64) -> bool {
    mark_in(file, LAYERS).is_none_or(|mark| match mark.is_own {
        Some(false) => true,
        Some(true) => mark.number < generation,
        None => mark.number <= generation,
    })
}

/// Marks `file` as what holds the volume called `volume` from `epoch` on. A file system without attributes keeps none.
pub(crate) fn mark(file: &File, epoch: u64, volume: &str) -> std::io::Result<()> {
    set(file, MARK, &format!("{epoch} {volume} {}", name_of(&file.metadata()?)))
}

/// Marks `file` as the image of a volume with layers of `generation`. A file system without attributes keeps none.
pub(crate) fn mark_layers(file: &File, generation: u64) -> std::io::Result<()> {
    set(file, LAYERS, &format!("{generation} {}", name_of(&file.metadata()?)))
}

/// Takes the marks off a file that another move is to fill.
pub(crate) fn unmark(file: &File) -> std::io::Result<()> {
    remove(file, MARK).and_then(|()| remove(file, LAYERS))
}

/// What the attribute `name` of `file` says.
fn mark_in(file: &File, name: &str) -> Option<Mark> {
    let mut value = [0_u8; MARK_BYTES_MAX];
    let length = match rustix::fs::fgetxattr(file, name, &mut value) {
        // It only names the file.
        Err(Errno::BADF) => rustix::fs::getxattr(format!("/proc/self/fd/{}", file.as_raw_fd()), name, &mut value),
        found => found,
    };
    let length = length.ok()?;
    let text = std::str::from_utf8(&value[..length]).ok()?;
    let words: Vec<&str> = text.split(' ').collect();
    let number = words.first()?.parse().ok()?;
    let before = if name == MARK { 2 } else { 1 };
    let named = words.get(before..).and_then(<[&str]>::last_chunk::<2>);
    // Of a file of which nothing is known the mark is taken for its own.
    let is_own = named.map(|named| file.metadata().map_or(true, |found| is_named(&found, *named)));
    Some(Mark { number, is_own })
}

/// The file in a mark. Its file system has another number after the next boot, and so that is left out.
fn name_of(found: &Metadata) -> String {
    let born = born_ns(found).map_or_else(|| "-".to_owned(), |born| born.to_string());
    format!("{} {born}", found.ino())
}

/// Whether a mark names the file. One host may know when it was made, and another one not.
fn is_named(found: &Metadata, [inode, born]: [&str; 2]) -> bool {
    let named = born.parse::<u128>().ok();
    inode.parse() == Ok(found.ino()) && born_ns(found).zip(named).is_none_or(|(own, named)| own == named)
}

fn born_ns(found: &Metadata) -> Option<u128> {
    let born = found.created().ok()?;
    born.duration_since(UNIX_EPOCH).ok().map(|born| born.as_nanos())
}

fn set(file: &File, name: &str, value: &str) -> std::io::Result<()> {
    match rustix::fs::fsetxattr(file, name, value.as_bytes(), XattrFlags::empty()) {
        Err(Errno::NOTSUP | Errno::PERM) => Ok(()),
        marked => marked.map_err(Into::into),
    }
}

fn remove(file: &File, name: &str) -> std::io::Result<()> {
    match rustix::fs::fremovexattr(file, name) {
        Err(Errno::NODATA | Errno::NOTSUP | Errno::PERM) => Ok(()),
        unmarked => unmarked.map_err(Into::into),
    }
}
