//! What crosses a stream of memory. All numbers are little-endian; every length has a bound that is checked before anything is read.
//!
//! ```text
//!   sender                                             receiver
//!     │ hello: magic, version, length, postcard, sum ─────▶ │ same version, same regions, a generation that is not older
//!     │ ◀──────────────────── welcome: the same frame ───── │ taken, or why not
//!     │ frame: header (64), entries (12 each), body ──────▶ │ checked, decoded, written
//!     │ ◀──────────────────────────── ack: 24 bytes ─────── │ everything up to this number is written; one for up to 8 frames
//!     │ frame: barrier ───────────────────────────────────▶ │ the round is over, when it is acknowledged
//!     │ frame: end ───────────────────────────────────────▶ │ nothing is missing, if every stream has said so
//! ```
//!
//! | header of a frame | bytes |
//! |---|---|
//! | magic `TMF1` | 0..4 |
//! | kind: 1 pages, 2 barrier, 3 end | 4 |
//! | coding of the body: 0 as it is, 1 LZ4 | 5 |
//! | region | 6..8 |
//! | number of the frame on this stream, from 1 | 8..16 |
//! | round | 16..20 |
//! | entries | 20..24 |
//! | bytes of the body, decoded | 24..28 |
//! | bytes behind the header: entries and coded body | 28..32 |
//! | reserved, zero | 32..48 |
//! | xxh3 of what is behind the header | 48..56 |
//! | xxh3 of the 56 bytes before | 56..64 |
//!
//! An entry is a first page (u32), a count (u32), a kind (u8: 0 zeroes, 1 bytes, 2 difference) and three bytes of zero. Bytes take
//! 4096 bytes of the body for each page. A difference is of one page: 4096 bytes to be combined by XOR with the version that was sent
//! last, and the xxh3 of the result.

mod ack;
mod frame;
mod hello;

pub use ack::{ACK_BYTES, ACK_FRAMES, Ack, AckStatus};
pub use frame::{
    BODY_BYTES_MAX, Coding, ENTRIES_MAX, ENTRY_BYTES, Entry, EntryKind, FRAME_PAYLOAD_BYTES_MAX, FrameHeader,
    FrameKind, HEADER_BYTES, parse_entries, write_entries,
};
pub use hello::{
    HELLO_BYTES_MAX, Hello, PREFIX_BYTES, REGIONS_MAX, Refusal, STREAMS_MAX, VERSION, Welcome, parse_prefix,
};

use twox_hash::XxHash3_64;

/// The checksum of everything that crosses: xxh3 with 64 bits and seed 0.
#[must_use]
pub fn checksum_of(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
