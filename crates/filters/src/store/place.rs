//! Where the bytes of a grain are on the device of a store.

use block::Bytes;

/// How the place of a grain's bytes is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// Where they are in the volume, counted from `start` of the device: nothing is allocated, and nothing moves.
    Identity {
        /// Where the first byte of the volume is.
        start: Bytes,
    },
}

impl Placement {
    /// Where the byte at `offset` of the volume is.
    pub(crate) fn place_of(self, offset: Bytes) -> Bytes {
        match self {
            Self::Identity { start } => start + offset,
        }
    }
}
