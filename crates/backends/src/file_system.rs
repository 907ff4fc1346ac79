//! What kinds of file systems do, as far as it matters how their files are reached.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::{Errno, ReadWriteFlags};

/// `TMPFS_MAGIC`.
const TMPFS: i64 = 0x0102_1994;
/// `RAMFS_MAGIC`.
const RAMFS: i64 = 0x8584_58f6;
/// `EXT4_SUPER_MAGIC`, and that of its elders.
const EXT4: i64 = 0xef53;
/// `XFS_SUPER_MAGIC`.
const XFS: i64 = 0x5846_5342;
/// `FUSE_SUPER_MAGIC`.
const FUSE: i64 = 0x6573_5546;
/// `BTRFS_SUPER_MAGIC`.
const BTRFS: i64 = 0x9123_683e;

/// Whether the file system keeps its files in memory. Not to be asked of a block device: its node may be on a tmpfs.
pub(crate) fn is_in_memory(file: &File) -> io::Result<bool> {
    let kind = rustix::fs::fstatfs(file)?.f_type as i64;
    Ok(kind == TMPFS || kind == RAMFS)
}

/// Whether a FUSE server has the file at `path`, or nobody knows.
pub(crate) fn is_of_server(path: &Path) -> bool {
    let kind = File::open(path).and_then(|file| Ok(rustix::fs::fstatfs(file)?.f_type as i64));
    kind.map_or(true, |kind| kind == FUSE)
}

/// Whether the file system says how long a file is without waiting for anything: it has the lengths of open files in
/// memory, and nobody else has others. All others may ask a server, which may never answer.
pub(crate) fn has_lengths_in_memory(file: &File) -> io::Result<bool> {
    let kind = rustix::fs::fstatfs(file)?.f_type as i64;
    Ok([TMPFS, RAMFS, EXT4, XFS, BTRFS].contains(&kind))
}

/// Whether a process that has the file open must expect to wait for a server when it closes it (FUSE, NFS), and has no use
/// of it beside a helper: the kernel takes no request for such a file that must not wait.
pub(crate) fn belongs_to_helper(file: &File) -> io::Result<bool> {
    let mut byte = [0];
    let nothing = rustix::io::preadv2(file, &mut [io::IoSliceMut::new(&mut byte)], 0, ReadWriteFlags::NOWAIT);
    Ok(nothing == Err(Errno::OPNOTSUPP) && file.metadata()?.is_file() && !has_lengths_in_memory(file)?)
}

/// Whether the kernel lets one write of this file in at a time, if it has to allocate or goes through the page cache.
pub(crate) fn takes_one_write(file: &File) -> bool {
    let is_file = file.metadata().is_ok_and(|found| found.is_file());
    let kind = rustix::fs::fstatfs(file).map_or(0, |found| found.f_type);
    let is_direct = rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(OFlags::DIRECT));
    is_file && (kind == EXT4 || [XFS, BTRFS].contains(&kind) && !is_direct)
}

/// The directory that `path` is in.
pub(crate) fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}
