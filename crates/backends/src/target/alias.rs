//! Whether a file that exists is the image of a volume under a name that no number of a file tells of.
//!
//! ```text
//!   /images/a.img        served as a volume, on a file system of this host
//!   /fuse/a.img          the same bytes through a FUSE server or an overlay: another device, another inode, other locks
//! ```
//!
//! A file of a name that nobody has used is made beside the one and looked for beside the other. Where it is seen both folders are one.
//! A file with several names, or one that is mounted by itself, may be reached through another folder, and is not told apart by that. Nor
//! is one of a FUSE server, which may follow links by itself and gives each name numbers of its own; nor any where no file can be made.
//! Two such files of one length are told apart by their bytes, read past what the kernel keeps of them, or not at all.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::file_system::is_of_server;

/// How much of two files is compared that are not told apart otherwise.
const SAMPLES: u64 = 64;
const SAMPLE_BYTES: usize = 4096;

/// What is known of a file and the image of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alias {
    /// They are two files.
    Apart,
    /// They are one, or the file is one of those that belong to the image.
    Same,
    /// Nobody can tell: the file, or the image, has several names, is mounted by itself, or is a FUSE server's.
    Names,
    /// Nobody can tell: no file can be made beside the file.
    Unmarked,
    /// Nobody can tell: the place of the image does not answer.
    Silent,
}

/// A file with bytes that are to be written over, and the mark beside it.
#[derive(Debug)]
pub struct MarkedFile {
    /// Its name without links.
    path: PathBuf,
    found: Metadata,
    is_mounted: bool,
    is_of_server: bool,
    /// None where none can be made.
    mark: Option<PathBuf>,
    mark_name: String,
}

impl MarkedFile {
    /// Leaves a mark called `mark_name` beside the file at `path`. None if there is no file with bytes.
    ///
    /// # Errors
    /// What the operating system says of the file; a mark that cannot be made is none.
    pub fn new(path: &Path, mark_name: &str) -> io::Result<Option<Self>> {
        let found = match std::fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            found => found?,
        };
        if !found.is_file() || found.len() == 0 {
            return Ok(None);
        }
        let path = path.canonicalize()?;
        let mark = path.with_file_name(mark_name);
        let made = File::options().write(true).create_new(true).open(&mark);
        if let Err(error) = &made {
            tracing::info!(mark = %mark.display(), %error, "no mark can be made beside a file that is to be written over");
        }
        let (is_mounted, is_of_server) = (is_mount_point(&path), is_of_server(&path));
        let mark = made.is_ok().then_some(mark);
        Ok(Some(Self { path, found, is_mounted, is_of_server, mark, mark_name: mark_name.to_owned() }))
    }

    /// Whether it is `image`, or one of the files beside that whose names begin with `prefix`.
    ///
    /// # Errors
    /// What the operating system says of the image's place.
    pub fn alias_of(&self, image: &Path, prefix: &str) -> io::Result<Alias> {
        let found = match std::fs::metadata(image) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Alias::Apart),
            found => found?,
        };
        if found.file_type().is_block_device() {
            return Ok(Alias::Apart);
        }
        let image = image.canonicalize()?;
        if numbers(&found) == numbers(&self.found) || self.is_in_folder_of(&image, &found, prefix)? {
            return Ok(Alias::Same);
        }
        // One file has one length, and on one file system of the kernel's one number.
        let is_of_server = self.is_of_server || is_of_server(&image);
        let may_be = (is_of_server || found.dev() != self.found.dev()) && found.len() == self.found.len();
        let is_linked = self.found.nlink() > 1 || found.nlink() > 1;
        let has_names = is_linked || is_of_server || self.is_mounted || is_mount_point(&image);
        Ok(match &self.mark {
            _ if !may_be || self.differs_from(&image).unwrap_or(false) => Alias::Apart,
            None => Alias::Unmarked,
            Some(_) if has_names => Alias::Names,
            Some(_) => Alias::Apart,
        })
    }

    /// Whether the folder of `image` is this file's folder, too, and has this file as the image or as one of the image's.
    fn is_in_folder_of(&self, image: &Path, found: &Metadata, prefix: &str) -> io::Result<bool> {
        if self.mark.is_none() || !image.with_file_name(&self.mark_name).try_exists()? {
            return Ok(false);
        }
        let Some(name) = self.path.file_name() else { return Ok(false) };
        let is_its_file = name.as_bytes().starts_with(prefix.as_bytes());
        // A file system may take names that differ for one.
        let there = std::fs::metadata(image.with_file_name(name));
        let is_one = there.is_ok_and(|there| numbers(&there) == numbers(found));
        Ok(is_its_file || is_one || image.file_name() == Some(name))
    }

    /// Whether `image` has other bytes, which have not been written meanwhile.
    ///
    /// # Errors
    /// One of them cannot be read where its bytes are.
    fn differs_from(&self, image: &Path) -> io::Result<bool> {
        let (own, image) = (open_past_caches(&self.path)?, open_past_caches(image)?);
        let step = (self.found.len() / SAMPLES).max(SAMPLE_BYTES as u64);
        for offset in (0..self.found.len()).step_by(usize::try_from(step).unwrap_or(usize::MAX)) {
            let [mut before, mut bytes, mut after] = [[0; SAMPLE_BYTES]; 3];
            let length = image.read_at(&mut before, offset)?;
            let (of_own, of_image) = (own.read_at(&mut bytes, offset)?, image.read_at(&mut after, offset)?);
            if length == of_own && length == of_image && before == after && bytes != before {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes the mark, now and not when the last look is over.
    pub fn unmark(&self) {
        let Some(mark) = &self.mark else { return };
        match std::fs::remove_file(mark) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(mark = %mark.display(), %error, "a mark beside a file could not be removed");
            }
            _ => {}
        }
    }
}

impl Drop for MarkedFile {
    fn drop(&mut self) {
        self.unmark();
    }
}

/// A file to read. What the kernel keeps of a server's files may be older than their bytes, so those are read directly.
fn open_past_caches(path: &Path) -> io::Result<File> {
    let flags = if is_of_server(path) { libc::O_DIRECT } else { 0 };
    File::options().read(true).custom_flags(flags).open(path)
}

fn numbers(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// Whether something is mounted at `path` itself.
fn is_mount_point(path: &Path) -> bool {
    let mounts = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let wanted = escaped(path);
    mounts.split(|byte| *byte == b'\n').any(|mount| mount.split(|byte| *byte == b' ').nth(4) == Some(&wanted))
}

/// A path as the system's list of mounts has it.
fn escaped(path: &Path) -> Vec<u8> {
    let escape = |byte: &u8| match byte {
        b' ' | b'\t' | b'\n' | b'\\' => format!("\\{byte:03o}").into_bytes(),
        byte => vec![*byte],
    };
    path.as_os_str().as_bytes().iter().flat_map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(folder: &Path, name: &str) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, b"disk").expect("written");
        path
    }

    /// What is known of `target` and `image`.
    fn alias(target: &Path, image: &Path) -> Alias {
        let marked = MarkedFile::new(target, ".mark").expect("looked at").expect("it has bytes");
        let alias = marked.alias_of(image, ".a.img.overlay-").expect("looked at");
        marked.unmark();
        assert!(!target.with_file_name(".mark").exists(), "the mark is left");
        alias
    }

    #[test]
    fn a_file_is_told_by_its_folder_and_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let [image, overlay, other] = ["a.img", ".a.img.overlay-1", "b.img"].map(|name| file(folder.path(), name));
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&image, &link).expect("a link");
        assert_eq!(alias(&image, &image), Alias::Same);
        assert_eq!(alias(&link, &image), Alias::Same);
        assert_eq!(alias(&overlay, &image), Alias::Same, "it belongs to the image");
        assert_eq!(alias(&other, &image), Alias::Apart);
        assert_eq!(alias(&image, &folder.path().join("none")), Alias::Apart);
    }

    #[test]
    fn a_mark_that_is_seen_proves_one_folder_whatever_the_numbers_say() {
        let [one, two] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
        let (target, image, other) = (file(one.path(), "a.img"), file(two.path(), "a.img"), file(two.path(), "b.img"));
        assert_eq!(alias(&target, &image), Alias::Apart, "names alone say nothing");
        let marked = MarkedFile::new(&target, ".mark").expect("looked at").expect("it has bytes");
        // As a server shows it that has numbers of its own.
        std::fs::write(two.path().join(".mark"), b"").expect("written");
        assert_eq!(marked.alias_of(&image, ".").expect("looked at"), Alias::Same);
        assert_eq!(marked.alias_of(&other, ".b.img.overlay-").expect("looked at"), Alias::Apart);
    }

    #[test]
    fn what_has_no_bytes_is_not_looked_at_and_mounts_are_found_by_their_escaped_names() {
        let folder = tempfile::tempdir().expect("a folder");
        let empty = folder.path().join("empty");
        File::create(&empty).expect("made");
        assert!(MarkedFile::new(&empty, ".mark").expect("looked at").is_none());
        assert!(MarkedFile::new(&folder.path().join("none"), ".mark").expect("looked at").is_none());
        assert!(is_mount_point(Path::new("/proc")) && !is_mount_point(folder.path()));
        assert_eq!(escaped(Path::new("/a b\\c")), b"/a\\040b\\134c");
    }
}
