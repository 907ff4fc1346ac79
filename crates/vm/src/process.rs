//! QEMU's process: which one it is, whether it lives, and what it has open.
//!
//! A process's number is reused once it has ended. Together with the moment of its start and the boot of the machine it
//! is unique.

use std::fs::{self, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, makedev, statx};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A process of this boot of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuProcess {
    /// Its number.
    pub pid: u32,
    /// When it was started, in the kernel's ticks since the boot.
    pub started: u64,
    /// The boot.
    pub boot: String,
}

/// Whether the process of an adopted disk's QEMU is still there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessState {
    /// It is, or what has its number looks like it.
    Lives,
    /// It has ended.
    Ended,
    /// Its number was never known.
    Unknown,
}

impl QemuProcess {
    /// The process that has the number `pid` now; none if there is no such process, or it has ended.
    #[must_use]
    pub fn of(pid: u32) -> Option<Self> {
        let handle = pidfd_open(Pid::from_raw(pid.cast_signed())?, PidfdFlags::empty()).ok()?;
        let (started, boot) = (started(pid)?, boot()?);
        // What was read is of the process behind the handle as long as that one has not ended.
        is_running(&handle).then_some(Self { pid, started, boot })
    }

    /// Whether the process `pid` is this one, or was started by it: what a host runs as QEMU may be a program that starts QEMU.
    #[must_use]
    pub fn has_started(&self, pid: u32) -> bool {
        let mut next = Some(pid);
        // A loop would be of numbers that were used again meanwhile.
        for _ in 0..8 {
            match next {
                Some(pid) if pid == self.pid => return self.lives(),
                Some(pid) if pid > 1 => next = parent_of(pid),
                _ => return false,
            }
        }
        false
    }

    /// Kills it, and no other one that has its number by now. Done if it has ended.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn kill(&self) -> io::Result<()> {
        let Some(pid) = Pid::from_raw(self.pid.cast_signed()) else { return Ok(()) };
        // Of one that has ended there is no handle.
        let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) else { return Ok(()) };
        // The handle is taken first: what is read of that number then is of the process behind it.
        if !self.lives() {
            return Ok(());
        }
        match pidfd_send_signal(&handle, Signal::KILL) {
            Err(rustix::io::Errno::SRCH) => Ok(()),
            sent => sent.map_err(io::Error::from),
        }
    }

    /// Whether it still runs.
    #[must_use]
    pub fn lives(&self) -> bool {
        Self::of(self.pid).as_ref() == Some(self)
    }
}

fn parent_of(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// Whether a process runs that an earlier version has recorded by its number only.
pub(crate) fn looks_alive(pid: u32) -> bool {
    let is_qemu = |text: &[u8]| text.windows(4).any(|part| part == b"qemu");
    let program = fs::read_link(format!("/proc/{pid}/exe"));
    let program = program.map(|path| path.as_os_str().as_encoded_bytes().to_owned());
    let line = program.or_else(|_| fs::read(format!("/proc/{pid}/cmdline"))).unwrap_or_default();
    QemuProcess::of(pid).is_some() && is_qemu(&line)
}

/// Whether process `pid` has the file or block device `image` open for writing.
///
/// # Errors
/// What the operating system says of the process.
pub fn writes_to(pid: u32, image: &Metadata) -> io::Result<bool> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        // A file that it closes meanwhile is none that it has open.
        if is_image(&entry.path(), image) && is_writable(pid, &entry.file_name().to_string_lossy()) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn is_writable(pid: u32, descriptor: &str) -> bool {
    const ACCESS: u32 = 0o3;
    let told = fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}")).unwrap_or_default();
    let flags = told.lines().find_map(|line| u32::from_str_radix(line.strip_prefix("flags:")?.trim(), 8).ok());
    flags.is_some_and(|flags| flags & ACCESS != 0)
}

/// Whether what is at `path` is the file or block device `image`, as far as the kernel knows: no file system's server is asked, which may
/// hang.
fn is_image(path: &Path, image: &Metadata) -> bool {
    let Ok(found) = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS) else { return false };
    let is_device = FileType::from_raw_mode(found.stx_mode.into()).is_block_device();
    match is_device && image.file_type().is_block_device() {
        true => makedev(found.stx_rdev_major, found.stx_rdev_minor) == image.rdev(),
        false => (makedev(found.stx_dev_major, found.stx_dev_minor), found.stx_ino) == (image.dev(), image.ino()),
    }
}

/// The processes that have the file or block device `image` open for writing, but for this program's own ones.
#[must_use]
pub fn writers_of(image: &Metadata) -> Vec<u32> {
    let program = |pid: &str| fs::read_link(format!("/proc/{pid}/exe")).ok();
    let own = program("self");
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    // Another daemon of this host, or a helper of either, writes for clients that are known.
    let is_other = |pid: &u32| own.is_none() || program(&pid.to_string()) != own;
    pids.filter(is_other).filter(|pid| writes_to(*pid, image).unwrap_or(false)).collect()
}

/// Refuses an image that QEMU names and does not write itself. Otherwise an attacker who controls QEMU could have us
/// open any file.
pub(crate) fn require_open(pid: Option<u32>, image: &Path) -> Result<()> {
    let Some(pid) = pid else { return Ok(()) };
    let shown = image.display();
    let found = fs::metadata(image).map_err(|error| Error::refused(format!("its image {shown}: {error}")))?;
    require_writer(pid, &found, image)
}

/// The same of an image that is open here.
///
/// # Errors
/// `Refused` if QEMU's process does not have it open for writing.
pub fn require_writer(pid: u32, found: &Metadata, image: &Path) -> Result<()> {
    let shown = image.display();
    match writes_to(pid, found) {
        Ok(true) => Ok(()),
        Ok(false) => Err(Error::refused(format!(
            "QEMU names {shown} as its image, but its process {pid} does not have that file open for writing"
        ))),
        // An unprivileged caller may open no more than it may by itself.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !rustix::process::geteuid().is_root() => {
            Ok(())
        }
        Err(error) => Err(Error::refused(format!("what QEMU's process {pid} has open cannot be seen: {error}"))),
    }
}

/// The 22nd word of `/proc/PID/stat`. The second one, the program's name, may have anything in it.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

fn boot() -> Option<String> {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|boot| boot.trim().to_owned())
}

fn is_running(handle: &OwnedFd) -> bool {
    let mut looked = [PollFd::new(handle, PollFlags::IN)];
    let none = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut looked, Some(&none)).is_ok_and(|ended| ended == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_is_told_from_another_with_its_number_and_from_one_that_has_ended() {
        let own = QemuProcess::of(std::process::id()).expect("this process lives");
        assert!(own.lives());
        assert!(!QemuProcess { started: own.started + 1, ..own.clone() }.lives());
        assert!(!QemuProcess { boot: "another".to_owned(), ..own }.lives());

        let mut child = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().expect("it runs");
        let known = QemuProcess::of(child.id()).expect("it lives");
        assert!(known.lives() && !looks_alive(child.id()));
        QemuProcess { started: known.started + 1, ..known.clone() }.kill().expect("it is another process");
        assert!(known.lives(), "a process with another start was meant");
        known.kill().expect("killed");
        // Nobody has waited for it yet: its number is still its own.
        let mut looks = (0..500).map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            known.lives()
        });
        assert!(looks.any(|lives| !lives));
        child.wait().expect("ended");
        assert!(!known.lives());
        known.kill().expect("it has ended");
    }

    #[test]
    fn only_what_is_open_for_writing_is_an_image_of_the_process() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        for name in ["written", "read", "closed"] {
            fs::write(path(name), b"disk").expect("written");
        }
        symlink("written", path("link")).expect("a symlink");
        let _written = fs::File::options().read(true).write(true).open(path("written")).expect("opened");
        let _read = fs::File::open(path("read")).expect("opened");
        let own = Some(std::process::id());
        require_open(own, &path("written")).expect("it is open");
        require_open(own, &path("link")).expect("by another name");
        for name in ["read", "closed", "missing"] {
            let error = require_open(own, &path(name)).expect_err(name);
            assert!(error.to_string().contains(name), "{error}");
        }
    }
    #[test]
    fn whoever_else_writes_to_a_file_is_found_and_this_program_and_readers_are_not() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk");
        let _own = fs::File::create(&path).expect("created");
        let found = fs::metadata(&path).expect("it is there");
        assert_eq!(writers_of(&found), Vec::<u32>::new());
        let start = |redirection: &str| {
            let script = format!("exec 9{redirection} \"$0\"; echo; exec sleep 1000");
            let mut child = Command::new("sh");
            child.args(["-c", &script]).arg(&path).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
            let mut child = child.spawn().expect("it runs");
            let mut line = [0];
            std::io::Read::read_exact(child.stdout.as_mut().expect("piped"), &mut line).expect("it has opened it");
            child
        };
        let (mut reader, mut writer) = (start("<"), start(">>"));
        let writers = writers_of(&found);
        assert!(writers.contains(&writer.id()) && !writers.contains(&reader.id()), "{writers:?}");
        for child in [&mut reader, &mut writer] {
            child.kill().expect("killed");
            child.wait().expect("ended");
        }
    }
}
