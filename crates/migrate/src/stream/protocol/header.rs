//! The header that every frame begins with, in both directions.
//!
//! ```text
//! offset  0     1      2       3       4         8     16      24      32             40
//!         +-----+------+-------+-------+---------+-----+-------+-------+--------------+--------------+
//!         | kind| flags| coding| status| payload | id  | offset| length| payload check| header check | payload ...
//!         | u8  | u8   | u8    | u8    | u32     | u64 | u64   | u64   | u64          | u64          |
//!         +-----+------+-------+-------+---------+-----+-------+-------+--------------+--------------+
//! ```

use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::checksum::checksum_of;

use super::{CONTROL_BYTES_MAX, Malformed, PAYLOAD_BYTES_MAX, Status, WORDS_BYTES_MAX};

/// The length of a header.
pub const HEADER_BYTES: usize = 48;

/// What its checksum covers.
const CHECKED_BYTES: usize = 40;

/// This bit of a kind says that it is the reply.
const REPLY: u8 = 0x80;

/// What a request's flags mean.
pub mod flag {
    /// Durable before it is answered.
    pub const FUA: u8 = 1;
    /// The space of zeroes may be given back.
    pub const MAY_UNMAP: u8 = 2;
    /// It was sent before, on this stream or another.
    pub const AGAIN: u8 = 4;
}

/// What a frame asks for, or answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    /// Read `length` bytes at `offset`.
    Read = 1,
    /// Write the payload at `offset`.
    Write = 2,
    /// Make `length` bytes at `offset` read as zeroes.
    Zeroes = 3,
    /// `length` bytes at `offset` are not needed.
    Discard = 4,
    /// Make durable what was answered.
    Flush = 5,
    /// Describe `length` bytes at `offset`.
    Extents = 6,
    /// End the connection of stream `offset` up to generation `length`; answered when nothing of it is in flight.
    Retire = 7,
    /// A message to whoever holds the volume.
    Control = 8,
    /// A sign of life: `offset` bytes have come over this connection. A `length` of 1 says that its reader waits for
    /// memory or for requests to be done, and not for bytes. It is not answered.
    Beat = 9,
    /// End the session; answered when nothing of its other streams is in flight.
    Leave = 10,
    /// The first frame of a stream: which session it belongs to.
    Open = 11,
}

impl Kind {
    const ALL: [Self; 11] = [
        Self::Read,
        Self::Write,
        Self::Zeroes,
        Self::Discard,
        Self::Flush,
        Self::Extents,
        Self::Retire,
        Self::Control,
        Self::Beat,
        Self::Leave,
        Self::Open,
    ];

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// Whether it changes the volume.
    #[must_use]
    pub const fn is_mutation(self) -> bool {
        matches!(self, Self::Write | Self::Zeroes | Self::Discard)
    }

    const fn flags(self) -> u8 {
        match self {
            Self::Write | Self::Discard => flag::FUA | flag::AGAIN,
            Self::Zeroes => flag::FUA | flag::MAY_UNMAP | flag::AGAIN,
            Self::Beat | Self::Open => 0,
            _ => flag::AGAIN,
        }
    }
}

/// How a payload was made shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Coding {
    /// Not at all.
    Raw = 0,
    /// One LZ4 block.
    Lz4 = 1,
    /// One zstd frame.
    Zstd = 2,
    /// They are all zeroes, and there is no payload. Replies to reads only: a write of zeroes is [`Kind::Zeroes`].
    Zero = 3,
}

impl Coding {
    const fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Raw),
            1 => Some(Self::Lz4),
            2 => Some(Self::Zstd),
            3 => Some(Self::Zero),
            _ => None,
        }
    }
}

/// What a frame begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What is asked for, or was.
    pub kind: Kind,
    /// Whether this is the answer.
    pub is_reply: bool,
    /// Of a request, see [`flag`].
    pub flags: u8,
    /// How the payload was made shorter.
    pub coding: Coding,
    /// Of a reply: how it ended.
    pub status: Status,
    /// How many bytes follow.
    pub payload_bytes: u32,
    /// The request's number. Later requests of a session have higher ones, on whichever stream they travel.
    pub id: u64,
    /// Where in the volume; of a reply: how many nanoseconds it was being carried out.
    pub offset: u64,
    /// How many bytes of the volume, or of the payload before it was made shorter.
    pub length: u64,
    /// xxh3 of the payload before it was made shorter; zero without payload.
    pub payload_check: u64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Layout {
    kind: u8,
    flags: u8,
    coding: u8,
    status: u8,
    payload_bytes: U32,
    id: U64,
    offset: U64,
    length: U64,
    payload_check: U64,
    header_check: U64,
}

const _: () = assert!(size_of::<Layout>() == HEADER_BYTES);

impl Header {
    /// A request without payload, flags and place.
    #[must_use]
    pub const fn request(kind: Kind, id: u64) -> Self {
        Self {
            kind,
            is_reply: false,
            flags: 0,
            coding: Coding::Raw,
            status: Status::Done,
            payload_bytes: 0,
            id,
            offset: 0,
            length: 0,
            payload_check: 0,
        }
    }

    /// The answer to `self` that it was carried out, without payload.
    #[must_use]
    pub const fn reply(&self) -> Self {
        Self { is_reply: true, ..Self::request(self.kind, self.id) }
    }

    /// The same, with `payload` behind it as it is.
    #[must_use]
    pub fn with_payload(self, payload: &[u8]) -> Self {
        let check = if payload.is_empty() { 0 } else { checksum_of(payload) };
        self.with_checked_payload(payload.len(), check)
    }

    /// The same with a payload of so many bytes whose checksum is known.
    #[must_use]
    pub const fn with_checked_payload(self, length: usize, check: u64) -> Self {
        Self { payload_bytes: length as u32, length: length as u64, payload_check: check, ..self }
    }

    /// Its bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut layout = Layout {
            kind: self.kind as u8 | if self.is_reply { REPLY } else { 0 },
            flags: self.flags,
            coding: self.coding as u8,
            status: self.status.code(),
            payload_bytes: self.payload_bytes.into(),
            id: self.id.into(),
            offset: self.offset.into(),
            length: self.length.into(),
            payload_check: self.payload_check.into(),
            header_check: U64::ZERO,
        };
        layout.header_check = checksum_of(&layout.as_bytes()[..CHECKED_BYTES]).into();
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(layout.as_bytes());
        bytes
    }

    /// What `bytes` say.
    ///
    /// # Errors
    /// The checksum does not fit, or a rule of the drawing is broken.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, Malformed> {
        let layout = Layout::ref_from_bytes(bytes).map_err(|_| Malformed("a header has 48 bytes"))?;
        if checksum_of(&bytes[..CHECKED_BYTES]) != layout.header_check.get() {
            return Err(Malformed("a header's checksum does not fit"));
        }
        let kind = Kind::from_code(layout.kind & !REPLY).ok_or(Malformed("a frame is of no known kind"))?;
        let coding = Coding::from_code(layout.coding).ok_or(Malformed("a payload has no known coding"))?;
        let header = Self {
            kind,
            is_reply: layout.kind & REPLY != 0,
            flags: layout.flags,
            coding,
            status: Status::from_code(layout.status),
            payload_bytes: layout.payload_bytes.get(),
            id: layout.id.get(),
            offset: layout.offset.get(),
            length: layout.length.get(),
            payload_check: layout.payload_check.get(),
        };
        match header.is_reply {
            true => header.check_reply()?,
            false => header.check_request()?,
        }
        if header.payload_bytes == 0 && header.payload_check != 0 {
            return Err(Malformed("a checksum of nothing"));
        }
        Ok(header)
    }

    fn check_request(&self) -> Result<(), Malformed> {
        if self.status != Status::Done {
            return Err(Malformed("a request has a status"));
        }
        if self.flags & !self.kind.flags() != 0 {
            return Err(Malformed("a flag has no meaning with this kind of request"));
        }
        if self.offset.checked_add(self.length).is_none() {
            return Err(Malformed("a request reaches past the end of all numbers"));
        }
        match self.kind {
            Kind::Read => self.without_payload(self.length > 0 && self.length <= PAYLOAD_BYTES_MAX.into()),
            Kind::Zeroes | Kind::Discard | Kind::Extents => self.without_payload(self.length > 0),
            Kind::Flush | Kind::Leave => self.without_payload(self.length == 0 && self.offset == 0),
            Kind::Beat => self.without_payload(self.length <= 1 && self.id == 0),
            Kind::Retire => {
                let is_stream = self.offset <= u16::MAX.into() && self.length > 0 && self.length <= u32::MAX.into();
                self.without_payload(is_stream)
            }
            Kind::Control | Kind::Open => self.with_raw(CONTROL_BYTES_MAX, self.payload_bytes > 0 && self.offset == 0),
            Kind::Write => {
                let payload = u64::from(self.payload_bytes);
                let fits = match self.coding {
                    Coding::Raw => payload == self.length,
                    Coding::Lz4 | Coding::Zstd => payload < self.length,
                    Coding::Zero => false,
                };
                match fits && payload > 0 && self.length <= PAYLOAD_BYTES_MAX.into() {
                    true => Ok(()),
                    false => Err(Malformed("the payload of a write is too long, too short, or of a wrong coding")),
                }
            }
        }
    }

    fn check_reply(&self) -> Result<(), Malformed> {
        if self.flags != 0 {
            return Err(Malformed("a reply has flags"));
        }
        if matches!(self.kind, Kind::Beat) {
            return Err(Malformed("a beat is not answered"));
        }
        if self.status != Status::Done {
            return self.with_raw(WORDS_BYTES_MAX, true);
        }
        match (self.kind, self.coding) {
            (Kind::Read, Coding::Zero) => match self.payload_bytes == 0 && self.length <= PAYLOAD_BYTES_MAX.into() {
                true => Ok(()),
                false => Err(Malformed("zeroes have a payload")),
            },
            (Kind::Read, _) => self.with_raw(PAYLOAD_BYTES_MAX, self.payload_bytes > 0),
            (Kind::Extents | Kind::Control | Kind::Open, _) => self.with_raw(CONTROL_BYTES_MAX, self.payload_bytes > 0),
            _ => self.without_payload(self.length == 0),
        }
    }

    fn without_payload(&self, is_right: bool) -> Result<(), Malformed> {
        match is_right && self.payload_bytes == 0 && self.coding == Coding::Raw {
            true => Ok(()),
            false => Err(Malformed("a frame without payload has a wrong length or place")),
        }
    }

    fn with_raw(&self, bytes_max: u32, is_right: bool) -> Result<(), Malformed> {
        let is_whole = self.payload_bytes <= bytes_max && u64::from(self.payload_bytes) == self.length;
        match is_right && is_whole && self.coding == Coding::Raw {
            true => Ok(()),
            false => Err(Malformed("a payload is too long, or not as long as its frame says")),
        }
    }
}
