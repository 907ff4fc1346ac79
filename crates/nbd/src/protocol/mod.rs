//! The NBD protocol as values, without IO: every message parsed from bytes and put into bytes.
//!
//! Names and numbers are those of the protocol's document (`doc/proto.md` of the NBD project), fixed newstyle only.
//! Nothing here trusts its input. Parsers return an error for malformed bytes; they never panic or allocate by a length
//! that the other side claims.

mod options;
mod transmission;

pub use options::{
    BlockSizes, ExportInfo, GoRequest, Greeting, InfoReply, MetaContextRequest, OPTION_HEADER_BYTES,
    OPTION_REPLY_HEADER_BYTES, OptionHeader, OptionReplyHeader, OptionReplyWriter, parse_client_flags, parse_info,
    parse_meta_context, parse_server, write_option,
};
pub use transmission::{
    Chunk, ChunkHeader, Command, REQUEST_BYTES, ReplyHead, Request, SIMPLE_REPLY_BYTES, STRUCTURED_HEADER_BYTES,
    block_status_payload, error_payload, parse_block_status, parse_error, simple_reply, structured_header,
};

/// `NBDMAGIC`, the first eight bytes a server says.
pub const MAGIC_GREETING: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`, which starts the newstyle greeting's second half and every option.
pub const MAGIC_OPTION: u64 = 0x4948_4156_454f_5054;
/// Starts every reply to an option.
pub const MAGIC_OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// Starts every request.
pub const MAGIC_REQUEST: u32 = 0x2560_9513;
/// Starts every simple reply.
pub const MAGIC_SIMPLE_REPLY: u32 = 0x6744_6698;
/// Starts every chunk of a structured reply.
pub const MAGIC_STRUCTURED_REPLY: u32 = 0x668e_33ef;

/// The longest string that the protocol allows: names, queries, messages.
pub const STRING_BYTES_MAX: usize = 4096;

/// The one metadata context that the protocol itself defines.
pub const CONTEXT_ALLOCATION: &str = "base:allocation";

/// Flags of the greeting, from the server (`NBD_FLAG_*`) and back (`NBD_FLAG_C_*`): the same bits.
pub mod handshake_flag {
    /// Fixed newstyle: unknown options are answered.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// No 124 zeroes after the answer to `NBD_OPT_EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Flags of an export (`NBD_FLAG_*`).
pub mod export_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Mutations are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// Flush is understood.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// Forced unit access is understood.
    pub const SEND_FUA: u16 = 1 << 3;
    /// Trim is understood.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// Write-zeroes is understood.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The flag "do not fragment" is understood.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers the writes answered on all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// Cache is understood.
    pub const SEND_CACHE: u16 = 1 << 10;
}

/// Options of the handshake (`NBD_OPT_*`).
pub mod option {
    /// Choose an export; no error can be answered.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Change to TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe an export and use it.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Replies to options (`NBD_REP_*`).
pub mod option_reply {
    /// Done, accepted.
    pub const ACK: u32 = 1;
    /// An export of the list.
    pub const SERVER: u32 = 2;
    /// Something about an export.
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Unknown option.
    pub const ERR_UNSUP: u32 = (1 << 31) + 1;
    /// Forbidden here.
    pub const ERR_POLICY: u32 = (1 << 31) + 2;
    /// Malformed option.
    pub const ERR_INVALID: u32 = (1 << 31) + 3;
    /// Only after a change to TLS.
    pub const ERR_TLS_REQD: u32 = (1 << 31) + 5;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = (1 << 31) + 6;
    /// The server is about to end.
    pub const ERR_SHUTDOWN: u32 = (1 << 31) + 7;
    /// The option's data is too long.
    pub const ERR_TOO_BIG: u32 = (1 << 31) + 9;
    /// Set in every error.
    pub const ERROR: u32 = 1 << 31;
}

/// What can be said about an export (`NBD_INFO_*`).
pub mod info {
    /// Size and flags.
    pub const EXPORT: u16 = 0;
    /// Its canonical name.
    pub const NAME: u16 = 1;
    /// Its description.
    pub const DESCRIPTION: u16 = 2;
    /// Its block sizes.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Flags of requests (`NBD_CMD_FLAG_*`).
pub mod command_flag {
    /// Durable before the answer.
    pub const FUA: u16 = 1 << 0;
    /// Zeroes that keep their space.
    pub const NO_HOLE: u16 = 1 << 1;
    /// At most one chunk of content in the reply.
    pub const DF: u16 = 1 << 2;
    /// One extent in the answer.
    pub const REQ_ONE: u16 = 1 << 3;
}

/// States of `base:allocation` (`NBD_STATE_*`).
pub mod allocation {
    /// No space is allocated.
    pub const HOLE: u32 = 1 << 0;
    /// It reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// The errors that may be answered to a request, with the numbers that go over the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Errno {
    /// `NBD_EPERM`.
    NotPermitted = 1,
    /// `NBD_EIO`.
    Io = 5,
    /// `NBD_ENOMEM`.
    NoMemory = 12,
    /// `NBD_EINVAL`.
    Invalid = 22,
    /// `NBD_ENOSPC`.
    NoSpace = 28,
    /// `NBD_EOVERFLOW`.
    Overflow = 75,
    /// `NBD_ENOTSUP`.
    NotSupported = 95,
    /// `NBD_ESHUTDOWN`.
    Shutdown = 108,
}

impl Errno {
    /// The number that goes over the wire.
    #[must_use]
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// The error of a number from the wire. The protocol says to treat numbers that it does not know as `EINVAL`.
    #[must_use]
    pub const fn from_code(code: u32) -> Self {
        match code {
            1 => Self::NotPermitted,
            5 => Self::Io,
            12 => Self::NoMemory,
            28 => Self::NoSpace,
            75 => Self::Overflow,
            95 => Self::NotSupported,
            108 => Self::Shutdown,
            _ => Self::Invalid,
        }
    }
}

/// What is wrong with bytes that should have been a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Malformed {
    /// The message does not begin with its magic number.
    Magic,
    /// Fewer bytes than the message needs.
    Truncated,
    /// More bytes than the message has.
    TrailingBytes,
    /// A string that is not UTF-8, or longer than the protocol allows.
    String,
    /// Flags that the protocol does not know here.
    Flags,
    /// A value that the protocol forbids.
    Value,
}

impl std::fmt::Display for Malformed {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::Magic => "the message does not begin with its magic number",
            Self::Truncated => "the message is cut short",
            Self::TrailingBytes => "the message is followed by bytes that do not belong to it",
            Self::String => "a string is too long or not UTF-8",
            Self::Flags => "flags are set that have no meaning here",
            Self::Value => "a value is not allowed",
        })
    }
}

impl std::error::Error for Malformed {}

/// Takes typed values from the front of a message.
pub(crate) struct Cursor<'a>(pub(crate) &'a [u8]);

impl<'a> Cursor<'a> {
    pub(crate) fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (front, rest) = self.0.split_at_checked(count).ok_or(Malformed::Truncated)?;
        self.0 = rest;
        Ok(front)
    }

    fn array<const COUNT: usize>(&mut self) -> Result<[u8; COUNT], Malformed> {
        let (front, rest) = self.0.split_first_chunk().ok_or(Malformed::Truncated)?;
        self.0 = rest;
        Ok(*front)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string of a known length.
    pub(crate) fn string(&mut self, length: usize) -> Result<&'a str, Malformed> {
        let bytes = self.bytes(length)?;
        if length > STRING_BYTES_MAX {
            return Err(Malformed::String);
        }
        std::str::from_utf8(bytes).map_err(|_| Malformed::String)
    }

    /// A string after its 32-bit length.
    pub(crate) fn counted_string(&mut self) -> Result<&'a str, Malformed> {
        let length = self.u32()?;
        self.string(length as usize)
    }

    pub(crate) fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed::TrailingBytes) }
    }
}
