//! Zeroes and discards: what the file system can do by itself, and writing zeroes where it cannot.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use block::{BLOCK_BYTES, Buffer, Bytes, Extent, Result};
use rustix::fs::FallocateFlags;

use super::{Engine, FileBackend};
use crate::calls::allocate;

/// Zeroes that must be written are written in pieces of this many bytes.
const PIECE_BYTES: u64 = 1 << 20;

/// A file in memory gives back up to this much in place; more would hold the worker for too long.
const IN_PLACE_BYTES_MAX: u64 = 1 << 20;

/// What the file system has refused so far: asking again would cost a call a request.
#[derive(Default)]
pub(super) struct Abilities {
    refused_punch: AtomicBool,
    refused_zero_range: AtomicBool,
    refused_write_at_once: AtomicBool,
}

impl Abilities {
    /// Whether the page cache may be asked to take a write at once.
    pub(super) fn write_at_once(&self) -> bool {
        !self.refused_write_at_once.load(Ordering::Relaxed)
    }

    /// Notes that it answered with `error`.
    pub(super) fn note_write_at_once(&self, error: &io::Error) {
        if is_refusal(error) {
            self.refused_write_at_once.store(true, Ordering::Relaxed);
        }
    }

    fn refused(&self, mode: FallocateFlags) -> &AtomicBool {
        if mode.contains(FallocateFlags::PUNCH_HOLE) { &self.refused_punch } else { &self.refused_zero_range }
    }
}

impl FileBackend {
    /// Makes `extent` read as zeroes, giving space back if `may_unmap`.
    pub(super) async fn clear(&self, extent: Extent, may_unmap: bool, fua: bool) -> Result<()> {
        if fua {
            self.sync_failure.check(&self.path)?;
        }
        self.forget_data(extent);
        // Past the page cache the file system gets whole blocks only. It would zero parts of blocks in the page cache,
        // beside the requests that go past it.
        let whole = if self.engine == Engine::Direct || self.is_block_device {
            whole_blocks(extent).unwrap_or(Extent::new(extent.offset, Bytes::ZERO))
        } else {
            extent
        };
        self.write_zeroes(Extent::between(extent.offset, whole.offset)).await?;
        if !whole.is_empty() && !self.clear_by_file_system(whole, may_unmap).await? {
            self.write_zeroes(whole).await?;
        }
        self.write_zeroes(Extent::between(whole.end(), extent.end())).await?;
        // Once more: somebody may have looked in the middle of it.
        self.forget_data(extent);
        if fua && self.engine != Engine::Memory {
            self.sync().await?;
        }
        Ok(())
    }

    /// Lets the file system clear `extent`; false if it cannot.
    async fn clear_by_file_system(&self, extent: Extent, may_unmap: bool) -> Result<bool> {
        let modes: &[FallocateFlags] = match (self.advertised, may_unmap) {
            // A container grows by zeroes as it grows by data.
            (Some(_), false) => &[FallocateFlags::ZERO_RANGE],
            (_, true) => &[FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE],
            (None, false) => &[FallocateFlags::ZERO_RANGE],
        };
        for &mode in modes {
            let refused = self.can.refused(mode);
            if refused.load(Ordering::Relaxed) {
                continue;
            }
            let keep_size = self.advertised.is_none() || mode.contains(FallocateFlags::PUNCH_HOLE);
            let flags = if keep_size { mode | FallocateFlags::KEEP_SIZE } else { mode };
            let outcome = if self.engine == Engine::Memory && extent.length.0 <= IN_PLACE_BYTES_MAX {
                self.file.with(|file| allocate(file, flags, extent))
            } else {
                self.executor.allocate(&self.file, flags, extent).await
            };
            match outcome {
                Ok(()) => return Ok(true),
                Err(error) if is_refusal(&error) => refused.store(true, Ordering::Relaxed),
                Err(error) => return Err(self.failed(error, "zeroing", extent)),
            }
        }
        Ok(false)
    }

    async fn write_zeroes(&self, extent: Extent) -> Result<()> {
        if extent.is_empty() {
            return Ok(());
        }
        let zeroes = Buffer::unpooled(extent.length.0.min(PIECE_BYTES) as usize).freeze();
        for piece in extent.split_at_multiples(PIECE_BYTES) {
            self.write_data(piece.offset, zeroes.slice(0..piece.length.as_usize()), false).await?;
        }
        Ok(())
    }
}

/// Whether the file system cannot do it at all, rather than having failed at it.
fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV))
}

/// The whole 4 KiB blocks within `extent`, if there are any.
fn whole_blocks(extent: Extent) -> Option<Extent> {
    let start = extent.offset.align_up(BLOCK_BYTES);
    let end = extent.end().align_down(BLOCK_BYTES);
    (start < end).then(|| Extent::between(start, end))
}
