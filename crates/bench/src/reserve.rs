//! Memory that stays at hand while something in memory is measured.
//!
//! The host of a virtual machine takes free memory back (free page reporting). Two seconds after a file in memory was
//! deleted, the guest's kernel reports every free run of 128 KiB and more. The host takes these runs, and whoever
//! touches one next waits for the host. A copy then took 1 to 12 s, and guests waited 30 to 160 ms at a time, whoever
//! copied. So two files are written page by page in turn, and one of them is deleted. The free pages then lie between
//! the pages of the other file, in runs that are too short to be reported.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;

const PAGE_BYTES: usize = 4096;

/// Keeps free memory at hand until it is dropped.
pub(crate) struct Reserve {
    comb: PathBuf,
}

impl Reserve {
    /// At least `bytes` of it, by as much memory again that is in use.
    pub(crate) fn create(folder: &Path, bytes: u64) -> anyhow::Result<Self> {
        let (comb, gaps) = (folder.join("reserve.comb"), folder.join("reserve.gaps"));
        let reserve = Self { comb };
        let written = write_in_turn(&[&reserve.comb, &gaps], bytes);
        let removed = std::fs::remove_file(&gaps).context("freeing the reserve's memory");
        written.and(removed)?;
        Ok(reserve)
    }
}

impl Drop for Reserve {
    fn drop(&mut self) {
        // What stays is in the benchmark's own folder, which is removed at the end.
        let _ = std::fs::remove_file(&self.comb);
    }
}

fn write_in_turn(paths: &[&Path; 2], bytes: u64) -> anyhow::Result<()> {
    let create = |path: &Path| File::create(path).with_context(|| format!("creating {}", path.display()));
    let mut files = [create(paths[0])?, create(paths[1])?];
    for _ in 0..bytes.div_ceil(PAGE_BYTES as u64) {
        for file in &mut files {
            file.write_all(&[1; PAGE_BYTES]).context("filling the reserve of memory")?;
        }
    }
    Ok(())
}
