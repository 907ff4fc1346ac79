//! How a request ended, as a number that never changes its meaning.

use block::ErrorKind;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It was carried out.
    Done,
    /// It was not, or not entirely.
    Failed(ErrorKind),
    /// The frame's payload was not what its checksum says: nothing was done, and it may be sent again.
    Damaged,
}

/// The kinds of errors and their numbers. A number is never given to another kind.
const KINDS: [(ErrorKind, u8); 18] = [
    (ErrorKind::OutOfRange, 1),
    (ErrorKind::Misaligned, 2),
    (ErrorKind::TooLarge, 3),
    (ErrorKind::ReadOnly, 4),
    (ErrorKind::NoSpace, 5),
    (ErrorKind::Io, 6),
    (ErrorKind::Unsupported, 7),
    (ErrorKind::Busy, 8),
    (ErrorKind::NotFound, 9),
    (ErrorKind::PermissionDenied, 10),
    (ErrorKind::Invalid, 11),
    (ErrorKind::Fenced, 12),
    (ErrorKind::Disconnected, 13),
    (ErrorKind::Cancelled, 14),
    (ErrorKind::TimedOut, 15),
    (ErrorKind::Corrupt, 16),
    (ErrorKind::Internal, 17),
    (ErrorKind::KeptOut, 18),
];

const DAMAGED: u8 = 255;

impl Status {
    /// Its number on the wire. A kind that has none yet is sent as internal.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Damaged => DAMAGED,
            Self::Failed(kind) => KINDS.iter().find(|(known, _)| *known == kind).map_or(17, |(_, code)| *code),
        }
    }

    /// What a number means. One that is not known is an error of the device.
    #[must_use]
    pub fn from_code(code: u8) -> Self {
        match code {
            0 => Self::Done,
            DAMAGED => Self::Damaged,
            _ => Self::Failed(KINDS.iter().find(|(_, known)| *known == code).map_or(ErrorKind::Io, |(kind, _)| *kind)),
        }
    }
}
