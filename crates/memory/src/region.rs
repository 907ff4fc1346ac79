//! The parts of a guest's memory, and the unit that they are counted in.

use serde::{Deserialize, Serialize};

/// The unit that is sent and compared, in bytes. The dirty log may count in larger ones.
pub const PAGE_BYTES: u64 = 4096;

/// A contiguous part of a guest's memory with a name, which both sides know it by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// Its name.
    pub name: String,
    /// How long it is, in bytes: whole pages of [`PAGE_BYTES`].
    pub bytes: u64,
    /// In which unit the dirty log counts here: [`PAGE_BYTES`], or the size of a huge page.
    pub page_bytes: u64,
}

impl Region {
    /// How many pages of [`PAGE_BYTES`] it has.
    #[must_use]
    pub const fn pages(&self) -> u64 {
        self.bytes / PAGE_BYTES
    }
}
