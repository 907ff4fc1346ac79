//! The transmission: requests, simple replies, and the chunks of structured replies.
//!
//! ```text
//! request           magic:u32 flags:u16 type:u16 cookie:u64 offset:u64 length:u32 [payload of a write]
//! simple reply      magic:u32 error:u32 cookie:u64 [payload of a read]
//! structured chunk  magic:u32 flags:u16 type:u16 cookie:u64 length:u32 payload
//! ```

use block::{Bytes, Extent};
use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{
    Cursor, Errno, MAGIC_REQUEST, MAGIC_SIMPLE_REPLY, MAGIC_STRUCTURED_REPLY, Malformed, STRING_BYTES_MAX, command_flag,
};

/// The length of a request without its payload.
pub const REQUEST_BYTES: usize = 28;
/// The length of a simple reply without its payload.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// The length of a chunk without its payload.
pub const STRUCTURED_HEADER_BYTES: usize = 20;

/// What a request asks for (`NBD_CMD_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Command {
    /// Read.
    Read,
    /// Write the payload.
    Write,
    /// Go away.
    Disconnect,
    /// Make durable what was answered.
    Flush,
    /// The contents are not needed any more.
    Trim,
    /// Bring into the cache.
    Cache,
    /// Write zeroes.
    WriteZeroes,
    /// Describe extents.
    BlockStatus,
    /// Something that this implementation does not know. Such requests have no payload.
    Unknown(u16),
}

impl Command {
    const fn from_code(code: u16) -> Self {
        match code {
            0 => Self::Read,
            1 => Self::Write,
            2 => Self::Disconnect,
            3 => Self::Flush,
            4 => Self::Trim,
            5 => Self::Cache,
            6 => Self::WriteZeroes,
            7 => Self::BlockStatus,
            other => Self::Unknown(other),
        }
    }

    const fn code(self) -> u16 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Disconnect => 2,
            Self::Flush => 3,
            Self::Trim => 4,
            Self::Cache => 5,
            Self::WriteZeroes => 6,
            Self::BlockStatus => 7,
            Self::Unknown(code) => code,
        }
    }

    /// The [`command_flag`]s that mean something with this command. FUA is valid for all.
    #[must_use]
    pub const fn valid_flags(self) -> u16 {
        command_flag::FUA
            | match self {
                Self::Read => command_flag::DF,
                Self::WriteZeroes => command_flag::NO_HOLE,
                Self::BlockStatus => command_flag::REQ_ONE,
                _ => 0,
            }
    }

    /// Whether it changes the volume.
    #[must_use]
    pub const fn is_mutation(self) -> bool {
        matches!(self, Self::Write | Self::Trim | Self::WriteZeroes)
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RequestWire {
    magic: U32,
    flags: U16,
    command: U16,
    cookie: U64,
    offset: U64,
    length: U32,
}

/// A request, without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its [`command_flag`]s.
    pub flags: u16,
    /// What it asks for.
    pub command: Command,
    /// The client's name for it, which the reply repeats.
    pub cookie: u64,
    /// Where.
    pub offset: Bytes,
    /// How much.
    pub length: u32,
}

impl Request {
    /// The request in `bytes`.
    ///
    /// # Errors
    /// If its magic number is wrong: then the two sides have lost each other, and the connection must end.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Result<Self, Malformed> {
        let wire = RequestWire::ref_from_bytes(bytes).map_err(|_| Malformed::Truncated)?;
        if wire.magic.get() != MAGIC_REQUEST {
            return Err(Malformed::Magic);
        }
        Ok(Self {
            flags: wire.flags.get(),
            command: Command::from_code(wire.command.get()),
            cookie: wire.cookie.get(),
            offset: Bytes(wire.offset.get()),
            length: wire.length.get(),
        })
    }

    /// The message.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; REQUEST_BYTES] {
        let wire = RequestWire {
            magic: U32::new(MAGIC_REQUEST),
            flags: U16::new(self.flags),
            command: U16::new(self.command.code()),
            cookie: U64::new(self.cookie),
            offset: U64::new(self.offset.get()),
            length: U32::new(self.length),
        };
        zerocopy::transmute!(wire)
    }

    /// The bytes that it is about.
    #[must_use]
    pub fn extent(&self) -> Extent {
        Extent::new(self.offset, Bytes(self.length.into()))
    }

    /// Whether `flag` is set.
    #[must_use]
    pub const fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// The types of chunks (`NBD_REPLY_TYPE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Chunk {
    /// Nothing more.
    None,
    /// Contents.
    OffsetData,
    /// Contents that are zeroes.
    OffsetHole,
    /// Extents.
    BlockStatus,
    /// An error.
    Error,
    /// An error at an offset.
    ErrorOffset,
    /// Something else; with bit 15 set an error all the same.
    Unknown(u16),
}

impl Chunk {
    const fn code(self) -> u16 {
        match self {
            Self::None => 0,
            Self::OffsetData => 1,
            Self::OffsetHole => 2,
            Self::BlockStatus => 5,
            Self::Error => (1 << 15) + 1,
            Self::ErrorOffset => (1 << 15) + 2,
            Self::Unknown(code) => code,
        }
    }

    const fn from_code(code: u16) -> Self {
        match code {
            0 => Self::None,
            1 => Self::OffsetData,
            2 => Self::OffsetHole,
            5 => Self::BlockStatus,
            0x8001 => Self::Error,
            0x8002 => Self::ErrorOffset,
            other => Self::Unknown(other),
        }
    }

    /// Whether it says that the request failed.
    #[must_use]
    pub const fn is_error(self) -> bool {
        self.code() & 1 << 15 != 0
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ChunkWire {
    magic: U32,
    flags: U16,
    chunk: U16,
    cookie: U64,
    length: U32,
}

/// What comes before a chunk's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// Whether it is the last of its reply.
    pub done: bool,
    /// What the payload is.
    pub chunk: Chunk,
    /// The request's name.
    pub cookie: u64,
    /// How much payload follows.
    pub length: u32,
}

/// The header of the last (or only) chunk of a reply.
#[must_use]
pub fn structured_header(chunk: Chunk, cookie: u64, length: u32) -> [u8; STRUCTURED_HEADER_BYTES] {
    let wire = ChunkWire {
        magic: U32::new(MAGIC_STRUCTURED_REPLY),
        flags: U16::new(1),
        chunk: U16::new(chunk.code()),
        cookie: U64::new(cookie),
        length: U32::new(length),
    };
    zerocopy::transmute!(wire)
}

/// A simple reply without its payload.
#[must_use]
pub fn simple_reply(error: Option<Errno>, cookie: u64) -> [u8; SIMPLE_REPLY_BYTES] {
    let mut bytes = [0; SIMPLE_REPLY_BYTES];
    bytes[..4].copy_from_slice(&MAGIC_SIMPLE_REPLY.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.map_or(0, Errno::code).to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// The beginning of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyHead {
    /// A simple reply: the request's name, and the error if there was one.
    Simple(u64, Option<Errno>),
    /// A chunk of a structured reply.
    Chunk(ChunkHeader),
}

impl ReplyHead {
    /// How many bytes the header has that begins with `first`.
    ///
    /// # Errors
    /// If `first` is not the magic number of a reply.
    pub fn length(first: [u8; 4]) -> Result<usize, Malformed> {
        match u32::from_be_bytes(first) {
            MAGIC_SIMPLE_REPLY => Ok(SIMPLE_REPLY_BYTES),
            MAGIC_STRUCTURED_REPLY => Ok(STRUCTURED_HEADER_BYTES),
            _ => Err(Malformed::Magic),
        }
    }

    /// The header in `bytes`, which has the length that [`length`](Self::length) said.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut cursor = Cursor(bytes);
        if cursor.u32()? == MAGIC_SIMPLE_REPLY {
            let error = cursor.u32()?;
            return Ok(Self::Simple(cursor.u64()?, (error != 0).then(|| Errno::from_code(error))));
        }
        let wire = ChunkWire::ref_from_bytes(bytes).map_err(|_| Malformed::Truncated)?;
        if wire.magic.get() != MAGIC_STRUCTURED_REPLY {
            return Err(Malformed::Magic);
        }
        Ok(Self::Chunk(ChunkHeader {
            done: wire.flags.get() & 1 != 0,
            chunk: Chunk::from_code(wire.chunk.get()),
            cookie: wire.cookie.get(),
            length: wire.length.get(),
        }))
    }
}

/// The payload of an error chunk.
#[must_use]
pub fn error_payload(error: Errno, message: &str) -> Vec<u8> {
    let message = &message.as_bytes()[..message.floor_char_boundary(STRING_BYTES_MAX)];
    let mut bytes = Vec::with_capacity(6 + message.len());
    bytes.extend_from_slice(&error.code().to_be_bytes());
    bytes.extend_from_slice(&(message.len() as u16).to_be_bytes());
    bytes.extend_from_slice(message);
    bytes
}

/// Error and message of an error chunk's payload, whatever follows them.
///
/// # Errors
/// If it is malformed.
pub fn parse_error(payload: &[u8]) -> Result<(Errno, String), Malformed> {
    let mut cursor = Cursor(payload);
    let error = cursor.u32()?;
    let length = usize::from(cursor.u16()?);
    if error == 0 {
        return Err(Malformed::Value);
    }
    Ok((Errno::from_code(error), String::from_utf8_lossy(cursor.bytes(length)?).into_owned()))
}

/// The payload of a block status chunk: lengths and flags of consecutive extents.
#[must_use]
pub fn block_status_payload(context: u32, descriptors: &[(u32, u32)]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(4 + descriptors.len() * 8);
    bytes.extend_from_slice(&context.to_be_bytes());
    for (length, flags) in descriptors {
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(&flags.to_be_bytes());
    }
    bytes
}

/// Context and descriptors of a block status chunk's payload.
///
/// # Errors
/// If it is malformed.
pub fn parse_block_status(payload: &[u8]) -> Result<(u32, Vec<(u32, u32)>), Malformed> {
    let mut cursor = Cursor(payload);
    let context = cursor.u32()?;
    if cursor.0.is_empty() || !cursor.0.len().is_multiple_of(8) {
        return Err(Malformed::Truncated);
    }
    let mut descriptors = Vec::with_capacity(cursor.0.len() / 8);
    while !cursor.0.is_empty() {
        let (length, flags) = (cursor.u32()?, cursor.u32()?);
        if length == 0 {
            return Err(Malformed::Value);
        }
        descriptors.push((length, flags));
    }
    Ok((context, descriptors))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_messages_are_the_bytes_of_the_protocols_document() {
        let request = Request { flags: 1, command: Command::Write, cookie: 0x0102, offset: Bytes(4096), length: 512 };
        let bytes = request.to_bytes();
        assert_eq!(bytes[..8], [0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1]);
        assert_eq!(bytes[8..], [0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 2, 0]);
        let reply = simple_reply(Some(Errno::NoSpace), 7);
        assert_eq!(reply, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 28, 0, 0, 0, 0, 0, 0, 0, 7]);
        let chunk = structured_header(Chunk::OffsetData, 7, 4104);
        assert_eq!(chunk, [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0x10, 8]);
    }

    #[test]
    fn long_messages_are_cut_at_a_character() {
        let payload = error_payload(Errno::Io, &"ä".repeat(4000));
        let (errno, message) = parse_error(&payload).expect("what we write can be read");
        assert_eq!((errno, message.len()), (Errno::Io, STRING_BYTES_MAX));
    }

    proptest! {
        #[test]
        fn requests_survive_the_way_there_and_back(flags: u16, code: u16, cookie: u64, offset: u64, length: u32) {
            let request = Request { flags, command: Command::from_code(code), cookie, offset: Bytes(offset), length };
            prop_assert_eq!(Request::parse(&request.to_bytes()), Ok(request));
        }

        #[test]
        fn block_status_survives_the_way_there_and_back(context: u32, pieces in prop::collection::vec((1_u32.., any::<u32>()), 1..9)) {
            prop_assert_eq!(parse_block_status(&block_status_payload(context, &pieces)), Ok((context, pieces)));
        }

        #[test]
        fn hostile_bytes_never_panic(data in prop::collection::vec(any::<u8>(), 0..100), magic in 0..3) {
            let mut data = data;
            let magics = [MAGIC_REQUEST, MAGIC_SIMPLE_REPLY, MAGIC_STRUCTURED_REPLY];
            if let Some(first) = data.first_chunk_mut() {
                *first = magics[magic as usize].to_be_bytes();
                let _ = ReplyHead::length(*first);
            }
            if let Some(request) = data.first_chunk() {
                let _ = Request::parse(request);
            }
            let _ = ReplyHead::parse(&data);
            let _ = parse_error(&data);
            let _ = parse_block_status(&data);
        }
    }
}
