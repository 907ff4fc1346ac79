//! Memory in huge pages, for a test that needs some.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use rustix::fs::{FlockOperation, flock};

/// How many the machine has: whoever writes here has them made or given back.
const COUNT: &str = "/proc/sys/vm/nr_hugepages";
/// Whoever writes here has the kernel move pages together.
const COMPACT: &str = "/proc/sys/vm/compact_memory";
/// So often it is asked for them.
const TRIES_MAX: usize = 3;
/// Held by whoever has some: there is one number for the whole machine.
const LOCK: &str = "/tmp/transhume-huge-pages.lock";

/// Some huge pages of 2 MiB of this machine, and a file system of them, as long as it lives.
#[derive(Debug)]
pub struct HugePages {
    folder: tempfile::TempDir,
    before: u64,
    _lock: File,
}

impl HugePages {
    /// So many of them, once nobody else has any.
    ///
    /// # Errors
    /// They cannot be had: without root, or without so much memory in pieces of 2 MiB.
    pub fn take(pages: u64) -> anyhow::Result<Self> {
        let lock = File::create(LOCK).context(LOCK)?;
        flock(&lock, FlockOperation::LockExclusive).context(LOCK)?;
        let before = count()?;
        let folder = tempfile::Builder::new().prefix("huge").tempdir()?;
        let this = Self { folder, before, _lock: lock };
        let mut mount = Command::new("mount");
        let mounted = mount.args(["-t", "hugetlbfs", "-o", "pagesize=2M", "none"]).arg(this.path()).status();
        if !mounted.context("mount")?.success() {
            bail!("hugetlbfs cannot be mounted at {}", this.path().display());
        }
        for _ in 0..TRIES_MAX {
            std::fs::write(COUNT, (before + pages).to_string()).context(COUNT)?;
            if count()? >= before + pages {
                return Ok(this);
            }
            // It has made as many as it has found pieces for: there are more once it has moved what lies between them.
            std::fs::write(COMPACT, "1").context(COMPACT)?;
        }
        bail!("of {pages} huge pages the kernel has made {}", count()?.saturating_sub(before));
    }

    /// Where files of them are made.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // Pages that a process still has are given back when it ends.
        let _ = Command::new("umount").arg("-l").arg(self.folder.path()).status();
        let _ = std::fs::write(COUNT, self.before.to_string());
    }
}

fn count() -> anyhow::Result<u64> {
    std::fs::read_to_string(COUNT).context(COUNT)?.trim().parse().context(COUNT)
}
