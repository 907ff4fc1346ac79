//! Whether QEMU's user can reach a path, and what prevents it.
//!
//! QEMU says only `Permission denied`. Owners and modes along the path explain most cases. If they allow it and QEMU is
//! refused all the same, a security module, the device cgroup or a mount namespace has refused.

use std::fmt;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Who a QEMU runs as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QemuUser {
    pid: u32,
    uid: u32,
    groups: Vec<u32>,
    /// What a security module calls it, if one confines it.
    label: Option<String>,
}

/// What denies a path to a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// A directory on the way may not be searched.
    Directory { path: PathBuf, mode: u32, owner: u32 },
    /// The thing itself may not be read and written.
    Target { mode: u32, owner: u32 },
    /// QEMU does not see it, because its file system differs from ours.
    Unseen,
}

impl QemuUser {
    /// The user of a process, unless it is gone.
    pub(crate) fn of_process(pid: u32) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let numbers = |name: &str| -> Vec<u32> {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            line.split_whitespace().filter_map(|word| word.parse().ok()).collect()
        };
        // Real, effective, saved, and the one that counts for files.
        let uid = *numbers("Uid:").get(3)?;
        let mut groups = numbers("Groups:");
        groups.extend(numbers("Gid:").get(3));
        let label = fs::read_to_string(format!("/proc/{pid}/attr/current")).ok();
        let label = label.map(|label| label.trim_matches(['\0', '\n', ' ']).to_owned());
        let label = label.filter(|label| !label.is_empty() && label != "unconfined");
        Some(Self { pid, uid, groups, label })
    }

    /// What prevents it from reading and writing `path`, by owners and modes.
    pub(crate) fn obstacle(&self, path: &Path) -> Option<Obstacle> {
        let path = fs::canonicalize(path).ok()?;
        let root = PathBuf::from(format!("/proc/{}/root", self.pid));
        let as_seen = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
        let mut folders: Vec<&Path> = path.ancestors().skip(1).collect();
        folders.reverse();
        for folder in folders {
            let Ok(found) = fs::metadata(as_seen(folder)) else { return Some(Obstacle::Unseen) };
            if !self.may(&as_seen(folder), &found, 0o1) {
                let (mode, owner) = (found.mode() & 0o7777, found.uid());
                return Some(Obstacle::Directory { path: folder.to_owned(), mode, owner });
            }
        }
        let Ok(found) = fs::metadata(as_seen(&path)) else { return Some(Obstacle::Unseen) };
        let is_refused = !self.may(&as_seen(&path), &found, 0o6);
        is_refused.then(|| Obstacle::Target { mode: found.mode() & 0o7777, owner: found.uid() })
    }

    fn may(&self, path: &Path, found: &Metadata, wanted: u32) -> bool {
        let shift = if found.uid() == self.uid {
            6
        } else if self.groups.contains(&found.gid()) {
            3
        } else {
            0
        };
        let is_allowed = (found.mode() >> shift) & wanted == wanted;
        // An access control list may allow more than the mode shows; that is left to QEMU's own try.
        self.uid == 0 || is_allowed || has_list(path)
    }

    /// In one line: what was refused, to whom, why, and how to fix it.
    pub(crate) fn explain(&self, what: &str, path: &Path, obstacle: Option<&Obstacle>) -> String {
        let (user, shown) = (name_of(self.uid), path.display());
        let because = match obstacle {
            Some(Obstacle::Directory { path: folder, mode, owner }) => {
                let (folder, owner) = (folder.display(), name_of(*owner));
                format!(
                    "it may not search {folder} (mode {mode:04o}, owner {owner}): `setfacl -m u:{user}:x {folder}` mends that"
                )
            }
            Some(Obstacle::Target { mode, owner }) => {
                let owner = name_of(*owner);
                format!(
                    "it may not read and write it (mode {mode:04o}, owner {owner}): `chown {user} {shown}` mends that"
                )
            }
            Some(Obstacle::Unseen) => {
                "it is not in QEMU's mount namespace (libvirt gives QEMU a /dev of its own): docs/libvirt.md, Confinement"
                    .to_owned()
            }
            None => {
                let label = self.label.as_ref().map(|label| format!(" (QEMU runs as {label})")).unwrap_or_default();
                format!(
                    "owners and modes allow it, so AppArmor, SELinux{label} or the device cgroup does not: docs/libvirt.md, \
                     Confinement"
                )
            }
        };
        format!("QEMU (pid {}, user {user}) was refused {what} {shown}: {because}", self.pid)
    }
}

fn has_list(path: &Path) -> bool {
    let mut room = [0_u8; 1024];
    rustix::fs::getxattr(path, "system.posix_acl_access", &mut room).is_ok_and(|length| length > 0)
}

/// A user's name, or number.
fn name_of(uid: u32) -> UserName {
    UserName(uid)
}

struct UserName(u32);

impl fmt::Display for UserName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let user = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(self.0)).ok().flatten();
        match user {
            Some(user) => out.write_str(&user.name),
            None => write!(out, "{}", self.0),
        }
    }
}
