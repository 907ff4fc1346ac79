//! What a device should hold, in the slowest and most obvious way.

use crate::{Bytes, Device, Extent, Mutation, MutationKind};

const KNOWN: u8 = 0;
const UNKNOWN: u8 = 1;

/// Whether all of `bytes` are `byte`, at the speed of memory even in debug builds.
fn is_all(bytes: &[u8], byte: u8) -> bool {
    let pattern = [byte; 4096];
    bytes.chunks(pattern.len()).all(|chunk| *chunk == pattern[..chunk.len()])
}

/// What a device should hold.
pub struct Model {
    bytes: Vec<u8>,
    /// Bytes that were discarded and not read since: they may be anything, but always the same.
    unknown: Vec<u8>,
}

impl Model {
    /// A device that reads as zeroes.
    #[must_use]
    pub fn new(device: &Device) -> Self {
        let size = device.size().as_usize();
        Self { bytes: vec![0; size], unknown: vec![KNOWN; size] }
    }

    /// How large it is.
    #[must_use]
    pub fn size(&self) -> Bytes {
        self.bytes.len().into()
    }

    /// What `mutation` should do.
    pub fn apply(&mut self, mutation: &Mutation) {
        let start = mutation.extent().offset.as_usize();
        let end = mutation.extent().end().as_usize();
        let is_discard = matches!(mutation.kind(), MutationKind::Discard);
        self.unknown[start..end].fill(if is_discard { UNKNOWN } else { KNOWN });
        match mutation.kind() {
            MutationKind::Data(data) => self.bytes[start..end].copy_from_slice(data),
            MutationKind::Zeroes { .. } => self.bytes[start..end].fill(0),
            MutationKind::Discard => {}
        }
    }

    /// Compares what was read at `offset`, and remembers what discarded bytes read as.
    ///
    /// # Errors
    /// Where the first wrong byte is, and what it is.
    pub fn compare(&mut self, offset: Bytes, read: &[u8]) -> Result<(), String> {
        let range = offset.as_usize()..offset.as_usize() + read.len();
        if self.bytes[range.clone()] == *read && is_all(&self.unknown[range.clone()], KNOWN) {
            return Ok(());
        }
        for (place, &byte) in range.zip(read) {
            if self.unknown[place] == UNKNOWN {
                self.unknown[place] = KNOWN;
                self.bytes[place] = byte;
            } else if self.bytes[place] != byte {
                return Err(format!("byte {place} reads {byte:#04x} and should read {:#04x}", self.bytes[place]));
            }
        }
        Ok(())
    }

    /// Whether all of `extent` should read as zeroes, or may.
    #[must_use]
    pub fn may_read_zero(&self, extent: Extent) -> bool {
        let range = extent.offset.as_usize()..extent.end().as_usize();
        is_all(&self.bytes[range.clone()], 0)
            || range.into_iter().all(|place| self.unknown[place] == UNKNOWN || self.bytes[place] == 0)
    }

    /// Notes that `extent` reads as zeroes, also where it was discarded.
    pub fn note_zero(&mut self, extent: Extent) {
        for place in extent.offset.as_usize()..extent.end().as_usize() {
            if self.unknown[place] == UNKNOWN {
                self.unknown[place] = KNOWN;
                self.bytes[place] = 0;
            }
        }
    }
}
