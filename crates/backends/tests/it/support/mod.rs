//! Loop devices and small file systems that go away by themselves.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test program uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::thread::CapabilitySet;
use tempfile::{TempDir, tempdir_in};

pub fn directory() -> TempDir {
    tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory on disk")
}

pub fn file_of(path: &Path, size: u64) {
    std::fs::File::create(path).and_then(|file| file.set_len(size)).expect("a file");
}

pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program} does not run ({error}): run `make setup`"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text").trim().to_owned()
}

/// A loop device that goes away with this.
pub struct Loop {
    pub path: PathBuf,
}

impl Loop {
    pub fn over(file: &Path, arguments: &[&str]) -> Self {
        let file = file.to_str().expect("a plain name");
        let path = run("losetup", &[&["--find", "--show"], arguments, &[file]].concat());
        Self { path: path.into() }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run("losetup", &["--detach", self.path.to_str().expect("a plain name")]);
    }
}

/// A block device that is mounted until this goes.
pub struct Mount {
    at: PathBuf,
}

impl Mount {
    /// `device` at `at`, so that it can be read and written, or only read.
    pub fn of(device: &Loop, at: &Path, option: &str) -> Self {
        let names = [device.path.as_path(), at].map(|path| path.to_str().expect("a plain name"));
        run("mount", &["-o", option, names[0], names[1]]);
        Self { at: at.to_owned() }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        run("umount", &[self.at.to_str().expect("a plain name")]);
    }
}

/// A small file system that goes away with this.
pub struct SmallFileSystem {
    pub directory: TempDir,
}

impl SmallFileSystem {
    /// 8 MiB in memory.
    pub fn in_memory() -> Self {
        let directory = directory();
        run("mount", &["-t", "tmpfs", "-o", "size=8M", "tmpfs", directory.path().to_str().expect("a plain name")]);
        Self { directory }
    }

    /// ext4 of 16 MiB in a file.
    pub fn ext4() -> Self {
        let directory = directory();
        let image = directory.path().with_extension("ext4");
        file_of(&image, 16 << 20);
        let image_name = image.to_str().expect("a plain name");
        run("mkfs.ext4", &["-q", "-F", "-O", "^has_journal", image_name]);
        run("mount", &["-o", "loop", image_name, directory.path().to_str().expect("a plain name")]);
        std::fs::remove_file(&image).expect("it stays while it is mounted");
        Self { directory }
    }

    pub fn remount(&self, option: &str) {
        run("mount", &["-o", &format!("remount,{option}"), self.directory.path().to_str().expect("a plain name")]);
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        run("umount", &["--lazy", self.directory.path().to_str().expect("a plain name")]);
    }
}

/// A directory that is shown by a FUSE server which cannot rename without overwriting.
pub struct Fuse {
    pub at: PathBuf,
}

impl Fuse {
    pub fn of(directory: &Path, at: &Path) -> Self {
        std::fs::create_dir_all(at).expect("a directory");
        run("bindfs", &[directory.to_str().expect("a plain name"), at.to_str().expect("a plain name")]);
        Self { at: at.to_owned() }
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        run("umount", &[self.at.to_str().expect("a plain name")]);
    }
}

/// An attribute that `chattr` gives to a file or directory, until this goes.
pub struct Attribute {
    path: PathBuf,
    name: char,
}

impl Attribute {
    pub fn of(path: &Path, name: char) -> Self {
        run("chattr", &[&format!("+{name}"), path.to_str().expect("a plain name")]);
        Self { path: path.to_owned(), name }
    }
}

impl Drop for Attribute {
    fn drop(&mut self) {
        run("chattr", &[&format!("-{}", self.name), self.path.to_str().expect("a plain name")]);
    }
}

/// Does `work` in a thread without one of root's capabilities.
pub fn without<T: Send>(capability: CapabilitySet, work: impl FnOnce() -> T + Send) -> T {
    let thread = || {
        let mut sets = rustix::thread::capabilities(None).expect("known");
        sets.effective.remove(capability);
        rustix::thread::set_capabilities(None, sets).expect("given up");
        work()
    };
    std::thread::scope(|scope| scope.spawn(thread).join().expect("done"))
}
