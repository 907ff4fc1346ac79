//! What the receiver says of the frames of a stream.

use super::{checksum_of, u32_at, u64_at};
use crate::error::{Error, Result};

/// How long it is.
pub const ACK_BYTES: usize = 24;
const MAGIC: u32 = u32::from_le_bytes(*b"TMA1");

/// How it stands with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AckStatus {
    /// It is written.
    Written,
    /// The target's memory could not be written. The stream ends.
    TargetFailed,
    /// A difference does not fit to what is there. The stream ends.
    OtherVersion,
    /// A newer session of the same move has begun. The stream ends.
    Superseded,
}

/// Of frames with pages, every so many is acknowledged, and with it those before: an answer to each would cost a part of the copying. A
/// sender has more than these unconfirmed.
pub const ACK_FRAMES: u64 = 8;

/// An acknowledgement of all frames up to `sequence`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// The number of the frame.
    pub sequence: u64,
    /// What has become of it.
    pub status: AckStatus,
}

impl Ack {
    /// Its bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; ACK_BYTES] {
        let mut bytes = [0; ACK_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        let status: u32 = match self.status {
            AckStatus::Written => 0,
            AckStatus::TargetFailed => 1,
            AckStatus::OtherVersion => 2,
            AckStatus::Superseded => 3,
        };
        bytes[4..8].copy_from_slice(&status.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        let sum = checksum_of(&bytes[..16]);
        bytes[16..24].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Understands one.
    ///
    /// # Errors
    /// `Protocol`.
    pub fn parse(bytes: &[u8; ACK_BYTES]) -> Result<Self> {
        if u32_at(bytes, 0) != MAGIC || u64_at(bytes, 16) != checksum_of(&bytes[..16]) {
            return Err(Error::protocol("an acknowledgement is damaged"));
        }
        let status = match u32_at(bytes, 4) {
            0 => AckStatus::Written,
            1 => AckStatus::TargetFailed,
            2 => AckStatus::OtherVersion,
            3 => AckStatus::Superseded,
            other => return Err(Error::protocol(format!("the status {other} of an acknowledgement is not known"))),
        };
        Ok(Self { sequence: u64_at(bytes, 8), status })
    }
}
