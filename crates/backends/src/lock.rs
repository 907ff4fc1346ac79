//! Locks on open files (OFD locks): our own, and what they are made of.
//!
//! The server of a backend holds a lock on one byte far behind any data. The lock belongs to the open file and not to
//! the process. Requests of a killed process keep its open file alive until they are done. So whoever gets the lock
//! knows that no write of a dead server is under way.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use block::{Error, ErrorKind, Result};
use env::Env;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

/// The byte that a server locks: `transhum` as a number, far behind the largest file.
pub(crate) const SERVER_BYTE: i64 = i64::from_be_bytes(*b"transhum");

/// What the helper of a device calls itself.
pub(crate) const HELPER_NAME: &str = "transhume-sync";

/// How often a lock that is held is asked for again.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// A holder that is still seen after this long is alive, and waiting does not help. Looking for it walks over all
/// processes, so from then on the lock is tried less often.
const ALIVE_AFTER: Duration = Duration::from_secs(1);
const LATE_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// What a lock keeps others from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strength {
    /// Others may hold it too, but not exclusively.
    Shared,
    /// Nobody else may hold it.
    Exclusive,
}

fn description(byte: i64, kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}

/// Locks `byte` if nobody is in the way; false if somebody is.
pub(crate) fn try_lock(file: &File, byte: i64, strength: Strength) -> io::Result<bool> {
    let kind = match strength {
        Strength::Shared => libc::F_RDLCK,
        Strength::Exclusive => libc::F_WRLCK,
    };
    match fcntl(file, FcntlArg::F_OFD_SETLK(&description(byte, kind))) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Whether somebody else holds any lock on `byte`.
pub(crate) fn is_locked_by_others(file: &File, byte: i64) -> io::Result<bool> {
    let mut answer = description(byte, libc::F_WRLCK);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut answer))?;
    Ok(i32::from(answer.l_type) != libc::F_UNLCK)
}

/// Takes the lock of a server, waiting up to `limit` for the requests of a dead one, and less for a living one.
pub(crate) async fn lock_for_serving(
    file: &File,
    path: &Path,
    strength: Strength,
    limit: Duration,
    env: &dyn Env,
) -> Result<()> {
    let start = env.now();
    loop {
        let locked = try_lock(file, SERVER_BYTE, strength)
            .map_err(|error| Error::from_os(error, format!("locking {}", path.display())))?;
        if locked {
            return Ok(());
        }
        let waited = env.now() - start;
        let is_alive = waited >= ALIVE_AFTER && find_holder(file, SERVER_BYTE).is_some();
        if is_alive || waited >= limit {
            let holder = describe_holder(file, SERVER_BYTE);
            let context = format!("{} is being served already, {holder}", path.display());
            // A dead process's requests end with it, once its device answers. Somebody else who is alive need not.
            let is_dead = waited >= ALIVE_AFTER && !is_alive;
            return Err(Error::new(if is_dead { ErrorKind::TimedOut } else { ErrorKind::Busy }, context));
        }
        env.sleep(if waited < ALIVE_AFTER { RETRY_INTERVAL } else { LATE_RETRY_INTERVAL }).await;
    }
}

/// Who holds `byte`, in words. The kernel names no process for a lock of an open file, so the processes that have this
/// file open are looked through.
pub(crate) fn describe_holder(file: &File, byte: i64) -> String {
    match find_holder(file, byte) {
        Some((pid, name)) => match owner_of_helper(pid, &name) {
            // A device's helper ends with the process that it works for, and is replaced before that.
            Some((owner, owners)) => format!("by {owners} (process {owner}, through its {name}): stop that first"),
            None => format!("by {name} (process {pid}): stop that first"),
        },
        None => {
            "by nobody that this user can see: requests of a dead process are still on their way, to a device that \
                 does not answer, or another user's process holds it"
                .to_owned()
        }
    }
}

fn find_holder(file: &File, byte: i64) -> Option<(u32, String)> {
    let wanted = file.metadata().ok()?;
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let is_this_process = pid == std::process::id();
        let Ok(open_files) = std::fs::read_dir(process.path().join("fd")) else { continue };
        for open_file in open_files.flatten() {
            if is_this_process && open_file.file_name().to_str() == Some(&file.as_raw_fd().to_string()) {
                continue;
            }
            // What the kernel has in memory comes first: of other programs' files no server is asked, which may not answer.
            let details = process.path().join("fdinfo").join(open_file.file_name());
            let details = std::fs::read_to_string(details).unwrap_or_default();
            if !details.lines().any(|line| is_lock_on(line, byte) && is_of_inode(line, wanted.ino())) {
                continue;
            }
            let found = std::fs::metadata(open_file.path());
            if found.is_ok_and(|found| (found.dev(), found.ino()) == (wanted.dev(), wanted.ino())) {
                let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
                return Some((pid, name.trim().to_owned()));
            }
        }
    }
    None
}

/// The process that the helper of a device works for, if this is one.
fn owner_of_helper(pid: u32, name: &str) -> Option<(u32, String)> {
    if name != HELPER_NAME {
        return None;
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()?;
    let owners = std::fs::read_to_string(format!("/proc/{parent}/comm")).ok()?;
    Some((parent, owners.trim().to_owned()))
}

/// Whether a line of fdinfo tells of a lock on `byte`:
/// `lock:  1: OFDLCK  ADVISORY  READ -1 fd:00:1234 100 101`
fn is_lock_on(line: &str, byte: i64) -> bool {
    let Some(rest) = line.strip_prefix("lock:") else { return false };
    let words: Vec<&str> = rest.split_whitespace().collect();
    let [.., start, end] = words[..] else { return false };
    let Ok(start) = start.parse::<i64>() else { return false };
    start <= byte && end.parse::<i64>().unwrap_or(i64::MAX) >= byte
}

/// Whether such a line tells of a file with this number in its file system.
fn is_of_inode(line: &str, inode: u64) -> bool {
    let file = line.split_whitespace().rev().nth(2);
    file.and_then(|file| file.rsplit(':').next()?.parse::<u64>().ok()) == Some(inode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_fdinfo_are_understood() {
        assert!(is_of_inode("lock:  1: OFDLCK  ADVISORY  READ -1 fd:00:1234 100 101", 1234));
        assert!(
            !is_of_inode("lock:  1: OFDLCK  ADVISORY  READ -1 fd:00:1234 100 101", 123) && !is_of_inode("lock:", 0)
        );
        let line = "lock:\t1: OFDLCK ADVISORY  READ -1 00:19:1044 100 101";
        assert!(is_lock_on(line, 100) && is_lock_on(line, 101));
        assert!(!is_lock_on(line, 102) && !is_lock_on("pos:\t100", 100));
        assert!(is_lock_on("lock:\t1: POSIX  ADVISORY  WRITE 77 00:19:1044 50 EOF", 100));
    }

    #[test]
    fn the_holder_of_a_lock_is_named() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let other = File::options().read(true).write(true).open(file.path()).expect("opens");
        assert!(try_lock(file.as_file(), SERVER_BYTE, Strength::Exclusive).expect("locks work here"));
        assert!(!try_lock(&other, SERVER_BYTE, Strength::Shared).expect("locks work here"));
        assert!(is_locked_by_others(&other, SERVER_BYTE).expect("locks work here"));
        let words = describe_holder(&other, SERVER_BYTE);
        assert!(words.contains(&format!("(process {})", std::process::id())), "{words}");
    }
}
