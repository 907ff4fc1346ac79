//! The wire's messages as values and bytes, without IO. `docs/wire.md` draws each of them.
//!
//! ```text
//!   sender                                        receiver
//!     ── hello: versions, features ──────────────▶
//!     ◀───────── choice: version, features, words ──
//!     ── open: the session, this stream ─────────▶      a frame like all that follow
//!     ◀───────────────────── opened: the volume ──
//!     ── requests ───────────────────────────────▶
//!     ◀──────────────────── replies, in any order ──
//!     ◀─ beats: whoever has been silent for a while says so ─▶
//! ```
//!
//! All numbers are little-endian. Everything that comes from the other side is checked here, once: what a parser gives
//! back keeps every rule that the drawing states.

mod control;
mod header;
mod hello;
mod layers;
mod status;

use std::fmt;

pub use control::{
    Answer, Ask, DIGEST_BYTES_MAX, DIGEST_EXTENTS_MAX, EXTENT_PIECES_MAX, LinkCounters, MapSummary, MigrationCounters,
    Opening, Role, SessionRequest, USAGE_ADDRESSES_MAX, VolumeStatus, Welcome, decode, encode, encode_extents,
    parse_extents,
};
pub use header::{Coding, HEADER_BYTES, Header, Kind, flag};
pub use hello::{CHOICE_BYTES, Choice, HELLO_BYTES, Hello, choose, feature};
pub use layers::{PART_ALIGNMENT, SessionLayer, SessionLayerKind, SessionLayers};
pub use status::Status;

/// The version of the frames that this implementation speaks.
pub const VERSION: u16 = 1;

/// The first bytes of a connection, from both sides.
pub const MAGIC: [u8; 8] = *b"TRANSHUW";

/// The most bytes of a volume in one frame: 1 MiB.
pub const PAYLOAD_BYTES_MAX: u32 = 1 << 20;

/// The longest control message, 64 KiB.
pub const CONTROL_BYTES_MAX: u32 = 64 << 10;

/// The longest words of an error.
pub const WORDS_BYTES_MAX: u32 = 4096;

/// A message that breaks the rules, and which rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.0)
    }
}

impl std::error::Error for Malformed {}

/// `words` cut to what an error may carry, at the end of a character.
#[must_use]
pub fn clip(words: &str, bytes_max: usize) -> &str {
    let mut end = words.len().min(bytes_max);
    while !words.is_char_boundary(end) {
        end -= 1;
    }
    &words[..end]
}

#[cfg(test)]
mod tests;
