//! Renaming without overwriting, also on file systems that have no such call.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, RenameFlags};
use rustix::io::Errno;

/// Gives the file `from` the name `to` if nothing has that name. A second try finishes what a crash has interrupted.
///
/// # Errors
/// Something else has the name; what the operating system says.
pub(crate) fn rename_to_free(from: &Path, to: &Path) -> io::Result<()> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        // FUSE servers, NFS and old kernels do not know the flag.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => rename_in_steps(from, to),
        Err(Errno::EXIST) => finish_link(from, to),
        Err(error) => Err(error.into()),
    }
}

fn rename_in_steps(from: &Path, to: &Path) -> io::Result<()> {
    match rustix::fs::linkat(CWD, from, CWD, to, AtFlags::empty()) {
        Ok(()) => std::fs::remove_file(from),
        Err(Errno::EXIST) => finish_link(from, to),
        Err(Errno::NOENT) => Err(Errno::NOENT.into()),
        // There are no links here, as on FAT and with many FUSE servers, or not of this file.
        Err(_) => rename_after_look(from, to),
    }
}

/// The name `to` is taken: by the file itself, if a crash came before its old name was removed.
fn finish_link(from: &Path, to: &Path) -> io::Result<()> {
    let identity = |path: &Path| std::fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()));
    match identity(from)? == identity(to)? {
        true => std::fs::remove_file(from),
        false => Err(Errno::EXIST.into()),
    }
}

/// The kernel offers nothing here that looks and renames at once. Whoever takes the name between the two loses its file. The
/// names are of the form `NAME.moved-EPOCH`, which nobody else makes; with other names this is not to be used.
fn rename_after_look(from: &Path, to: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(to) {
        Ok(_) => Err(Errno::EXIST.into()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => std::fs::rename(from, to),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Rename = fn(&Path, &Path) -> io::Result<()>;

    #[test]
    fn every_way_renames_and_none_overwrites() {
        let ways: [Rename; 3] = [rename_to_free, rename_in_steps, rename_after_look];
        for rename in ways {
            let directory = tempfile::tempdir().expect("a directory");
            let path = |name: &str| directory.path().join(name);
            std::fs::write(path("from"), b"disk").expect("written");
            std::fs::write(path("taken"), b"other").expect("written");
            let error = rename(&path("from"), &path("taken")).expect_err("the name is taken");
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
            rename(&path("from"), &path("to")).expect("renamed");
            assert_eq!(std::fs::read(path("to")).expect("there"), b"disk");
            assert_eq!(std::fs::read(path("taken")).expect("there"), b"other");
            let error = rename(&path("from"), &path("free")).expect_err("it is gone");
            assert_eq!(error.kind(), io::ErrorKind::NotFound);
        }
    }

    #[test]
    fn a_crash_between_the_new_name_and_the_end_of_the_old_one_is_finished() {
        let ways: [Rename; 2] = [rename_to_free, rename_in_steps];
        for rename in ways {
            let directory = tempfile::tempdir().expect("a directory");
            let [from, to] = ["from", "to"].map(|name| directory.path().join(name));
            std::fs::write(&from, b"disk").expect("written");
            std::fs::hard_link(&from, &to).expect("linked");
            rename(&from, &to).expect("finished");
            assert!(!from.exists() && std::fs::read(&to).expect("there") == b"disk");
        }
    }
}
