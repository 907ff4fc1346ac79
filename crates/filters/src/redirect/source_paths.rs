//! What a migration puts between a redirection and its source: a read cache, and whoever listens to the disk.
//!
//! ```text
//!   guest, its writes, fetches ──▶ redirection ──▶ the cache's guest face ──▶ source
//!   copies                     ──▶ redirection ──▶ the cache's copy face  ──▶ source
//!   comparisons                ──▶ redirection ─────────────────────────────▶ source
//! ```
//!
//! Below the redirection the cache hides no request from the popularity, and keeps no chunk that the surrogate has.

use block::Device;

use super::{Inner, Redirect};

/// Who reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    Guest,
    Copy,
    Comparison,
}

impl Redirect {
    /// The source itself, past every read cache.
    #[must_use]
    pub fn source(&self) -> &Device {
        &self.inner.source
    }

    /// Reads and changes [`source`](Self::source) by `guest` from now on, and reads it for copies by `copy`: ways to the same bytes.
    /// Whoever calls this has seen to it that nothing is under way.
    pub fn reach_source_by(&self, guest: Device, copy: Device) {
        *self.inner.copy_source.write() = Some(copy);
        self.inner.base.reach_by(guest);
    }

    /// Reaches the source itself again. What was put in between passes everything through by now, and keeps nothing.
    pub fn reach_source_directly(&self) {
        *self.inner.copy_source.write() = None;
        self.inner.base.reach_by(self.inner.source.clone());
    }
}

impl Inner {
    /// By what the source is read for `reader`.
    pub(super) fn source_of(&self, reader: Reader) -> Device {
        match reader {
            Reader::Guest => self.base.device(),
            Reader::Copy => self.copy_source.read().clone().unwrap_or_else(|| self.base.device()),
            Reader::Comparison => self.source.clone(),
        }
    }
}
