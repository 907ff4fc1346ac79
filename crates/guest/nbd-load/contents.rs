//! What the slots of a verified volume hold.

use crate::pattern::{self, BLOCK_BYTES, Fault};
use crate::{TOLD_MAX, say};

/// What a slot holds: how often it was written, and whether by zeroes the last time.
#[derive(Clone, Copy)]
pub(crate) struct Content {
    generation: u32,
    is_zero: bool,
}

impl Content {
    /// What every slot holds before the load begins.
    pub(crate) const FIRST: Self = Self { generation: 1, is_zero: false };

    pub(crate) const fn after_write(self) -> Self {
        Self { generation: self.generation + 1, is_zero: false }
    }

    pub(crate) const fn after_zeroes(self) -> Self {
        Self { generation: self.generation + 1, is_zero: true }
    }

    pub(crate) const fn is_rewritten(self) -> bool {
        self.generation > 1
    }
}

/// Appends the `length` bytes of a slot at `offset` that was written.
pub(crate) fn append_slot(out: &mut Vec<u8>, offset: u64, length: usize, content: Content) {
    let start = out.len();
    out.resize(start + length, 0);
    let first = offset / BLOCK_BYTES as u64;
    // The last block may be a part of one.
    for (block, bytes) in (first..).zip(out[start..].chunks_mut(BLOCK_BYTES)) {
        pattern::fill(bytes, block, u64::from(content.generation));
    }
}

/// How many blocks of a slot at `offset` hold something else; the first of them are told, `told` were before.
pub(crate) fn count_faults(bytes: &[u8], offset: u64, content: Content, told: u64) -> u64 {
    let first = offset / BLOCK_BYTES as u64;
    let mut faults = 0;
    for (block, bytes) in (first..).zip(bytes.chunks(BLOCK_BYTES)) {
        let fault = match pattern::check(bytes, block, u64::from(content.generation)) {
            Err(Fault::Zeroes) if content.is_zero => continue,
            Ok(()) if !content.is_zero => continue,
            Ok(()) => "NotZeroes".to_owned(),
            Err(fault) => format!("{fault:?}"),
        };
        if told + faults < TOLD_MAX {
            say(&format!("fault block={block} expected={} zeroes={} {fault}", content.generation, content.is_zero));
        }
        faults += 1;
    }
    faults
}
