//! A disk as a layer below the process writes to it. Such a layer copies by itself: a file system that shares blocks.
//!
//! Such a copy is one call. Whether it may write is decided when it begins. Until its end the disk is open: the call
//! holds the file, so nobody else gets its lock. If it hangs at the source and is given up, it writes when the source
//! answers.

use block::{Extent, Mutation, Result};

use super::Disk;

/// Copies to a disk.
pub(crate) struct Below {
    disk: Disk,
    grant: u64,
    epoch: u64,
}

/// A copy under way.
pub(crate) struct UnderWay {
    disk: Disk,
    /// A disk that lost its power or was replaced gets nothing of it.
    power: u32,
}

impl Below {
    /// Writes `extent` from now on, whenever that comes.
    pub(crate) fn begin(&self, extent: Extent) -> UnderWay {
        let mut state = self.disk.state();
        self.disk.check_writer(&state, &Mutation::zeroes(extent, true), self.grant, self.epoch);
        self.disk.enter(&mut state, 0);
        UnderWay { disk: self.disk.clone(), power: state.power }
    }
}

impl UnderWay {
    /// Writes a part of it.
    pub(crate) async fn write(&self, mutation: Mutation) -> Result<()> {
        if self.disk.state().power != self.power {
            return Ok(());
        }
        let write = self.disk.submit_admitted(mutation);
        write.finish().await
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.disk.leave(0);
    }
}

impl Disk {
    /// Opens it for copies by a layer below the process.
    pub(crate) fn open_below(&self, epoch: u64) -> Below {
        let mut state = self.state();
        state.grants += 1;
        Below { disk: self.clone(), grant: state.grants, epoch }
    }
}
