//! The handshake: greeting, options and their replies.
//!
//! ```text
//! server                                   client
//!   NBDMAGIC IHAVEOPT flags:u16      ──▶
//!                                    ◀──   flags:u32
//!                                    ◀──   IHAVEOPT option:u32 length:u32 data
//!   magic:u64 option:u32 type:u32    ──▶
//!   length:u32 data
//!                                    ...
//! ```

use block::Bytes;
use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{
    Cursor, MAGIC_GREETING, MAGIC_OPTION, MAGIC_OPTION_REPLY, Malformed, STRING_BYTES_MAX, handshake_flag, info,
    option_reply,
};

/// The length of an option before its data.
pub const OPTION_HEADER_BYTES: usize = 16;
/// The length of an option's reply before its data.
pub const OPTION_REPLY_HEADER_BYTES: usize = 20;

/// What the server says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// [`handshake_flag`]s that the server offers.
    pub flags: u16,
}

impl Greeting {
    /// Its length.
    pub const BYTES: usize = 18;

    /// The message.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC_GREETING.to_be_bytes());
        bytes[8..16].copy_from_slice(&MAGIC_OPTION.to_be_bytes());
        bytes[16..].copy_from_slice(&self.flags.to_be_bytes());
        bytes
    }

    /// The greeting in `bytes`.
    ///
    /// # Errors
    /// If it is none, or an oldstyle one.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, Malformed> {
        let mut cursor = Cursor(bytes);
        if cursor.u64()? != MAGIC_GREETING || cursor.u64()? != MAGIC_OPTION {
            return Err(Malformed::Magic);
        }
        Ok(Self { flags: cursor.u16()? })
    }
}

/// The client's answer to the greeting: its [`handshake_flag`]s.
///
/// # Errors
/// If a flag is set that was not offered: the protocol has the server drop such a client.
pub fn parse_client_flags(bytes: [u8; 4]) -> Result<u16, Malformed> {
    let flags = u32::from_be_bytes(bytes);
    let known = u32::from(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
    if flags & !known != 0 {
        return Err(Malformed::Flags);
    }
    Ok(flags as u16)
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct OptionWire {
    magic: U64,
    option: U32,
    length: U32,
}

/// What comes before an option's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// One of [`option`](super::option), or unknown.
    pub option: u32,
    /// How much data follows.
    pub length: u32,
}

impl OptionHeader {
    /// The header in `bytes`.
    ///
    /// # Errors
    /// If its magic number is wrong.
    pub fn parse(bytes: &[u8; OPTION_HEADER_BYTES]) -> Result<Self, Malformed> {
        let wire = OptionWire::ref_from_bytes(bytes).map_err(|_| Malformed::Truncated)?;
        if wire.magic.get() != MAGIC_OPTION {
            return Err(Malformed::Magic);
        }
        Ok(Self { option: wire.option.get(), length: wire.length.get() })
    }
}

/// An option with its data, for a client to send.
#[must_use]
pub fn write_option(option: u32, data: &[u8]) -> Vec<u8> {
    let header =
        OptionWire { magic: U64::new(MAGIC_OPTION), option: U32::new(option), length: U32::new(data.len() as u32) };
    [header.as_bytes(), data].concat()
}

/// What comes before the data of an option's reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// The option that is answered.
    pub option: u32,
    /// One of [`option_reply`].
    pub reply: u32,
    /// How much data follows.
    pub length: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct OptionReplyWire {
    magic: U64,
    option: U32,
    reply: U32,
    length: U32,
}

impl OptionReplyHeader {
    /// The header in `bytes`.
    ///
    /// # Errors
    /// If its magic number is wrong.
    pub fn parse(bytes: &[u8; OPTION_REPLY_HEADER_BYTES]) -> Result<Self, Malformed> {
        let wire = OptionReplyWire::ref_from_bytes(bytes).map_err(|_| Malformed::Truncated)?;
        if wire.magic.get() != MAGIC_OPTION_REPLY {
            return Err(Malformed::Magic);
        }
        Ok(Self { option: wire.option.get(), reply: wire.reply.get(), length: wire.length.get() })
    }
}

/// Size and flags of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// How many bytes it has.
    pub size: Bytes,
    /// Its [`export_flag`](super::export_flag)s.
    pub flags: u16,
}

/// What requests an export takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Offsets and lengths are multiples of this.
    pub minimum: u32,
    /// Multiples of this are served best.
    pub preferred: u32,
    /// The largest payload of a read or a write.
    pub maximum: u32,
}

/// The data of `NBD_OPT_INFO` and `NBD_OPT_GO`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoRequest<'a> {
    /// The export; empty for the default one.
    pub name: &'a str,
    /// The [`info`] items that the client asks for.
    pub items: Vec<u16>,
}

impl<'a> GoRequest<'a> {
    /// The request in an option's data.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn parse(data: &'a [u8]) -> Result<Self, Malformed> {
        let mut cursor = Cursor(data);
        let name = cursor.counted_string()?;
        let count = usize::from(cursor.u16()?);
        if cursor.0.len() != count * 2 {
            return Err(if cursor.0.len() < count * 2 { Malformed::Truncated } else { Malformed::TrailingBytes });
        }
        let items = cursor.0.as_chunks().0.iter().map(|item| u16::from_be_bytes(*item)).collect();
        Ok(Self { name, items })
    }

    /// The data of the option.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = (self.name.len() as u32).to_be_bytes().to_vec();
        bytes.extend_from_slice(self.name.as_bytes());
        bytes.extend_from_slice(&(self.items.len() as u16).to_be_bytes());
        self.items.iter().for_each(|item| bytes.extend_from_slice(&item.to_be_bytes()));
        bytes
    }
}

/// The data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaContextRequest<'a> {
    /// The export.
    pub name: &'a str,
    /// What is asked for.
    pub queries: Vec<&'a str>,
}

impl<'a> MetaContextRequest<'a> {
    /// The request in an option's data.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn parse(data: &'a [u8]) -> Result<Self, Malformed> {
        let mut cursor = Cursor(data);
        let name = cursor.counted_string()?;
        let count = cursor.u32()? as usize;
        // Each query takes at least the four bytes of its length, so a lying count cannot make this allocate.
        if count > cursor.0.len() / 4 {
            return Err(Malformed::Truncated);
        }
        let queries = (0..count).map(|_| cursor.counted_string()).collect::<Result<_, _>>()?;
        cursor.end()?;
        Ok(Self { name, queries })
    }

    /// The data of the option.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = (self.name.len() as u32).to_be_bytes().to_vec();
        bytes.extend_from_slice(self.name.as_bytes());
        bytes.extend_from_slice(&(self.queries.len() as u32).to_be_bytes());
        for query in &self.queries {
            bytes.extend_from_slice(&(query.len() as u32).to_be_bytes());
            bytes.extend_from_slice(query.as_bytes());
        }
        bytes
    }
}

/// Puts all replies to one option into one piece of memory, so that they leave in one write.
pub struct OptionReplyWriter {
    option: u32,
    bytes: Vec<u8>,
}

impl OptionReplyWriter {
    /// Replies to `option`.
    #[must_use]
    pub const fn new(option: u32) -> Self {
        Self { option, bytes: Vec::new() }
    }

    fn reply(&mut self, reply: u32, pieces: &[&[u8]]) {
        let length = pieces.iter().map(|piece| piece.len()).sum::<usize>() as u32;
        let header = OptionReplyWire {
            magic: U64::new(MAGIC_OPTION_REPLY),
            option: U32::new(self.option),
            reply: U32::new(reply),
            length: U32::new(length),
        };
        self.bytes.extend_from_slice(header.as_bytes());
        pieces.iter().for_each(|piece| self.bytes.extend_from_slice(piece));
    }

    /// Size and flags.
    pub fn export(&mut self, export: ExportInfo) {
        let size = export.size.get().to_be_bytes();
        self.reply(option_reply::INFO, &[&info::EXPORT.to_be_bytes(), &size, &export.flags.to_be_bytes()]);
    }

    /// Block sizes.
    pub fn block_sizes(&mut self, sizes: BlockSizes) {
        let BlockSizes { minimum, preferred, maximum } = sizes;
        let numbers = [minimum.to_be_bytes(), preferred.to_be_bytes(), maximum.to_be_bytes()];
        self.reply(option_reply::INFO, &[&info::BLOCK_SIZE.to_be_bytes(), numbers.as_flattened()]);
    }

    /// The canonical name or the description: `item` says which.
    pub fn text(&mut self, item: u16, text: &str) {
        self.reply(option_reply::INFO, &[&item.to_be_bytes(), text.as_bytes()]);
    }

    /// An export of the list.
    pub fn server(&mut self, name: &str, description: &str) {
        let length = (name.len() as u32).to_be_bytes();
        self.reply(option_reply::SERVER, &[&length, name.as_bytes(), description.as_bytes()]);
    }

    /// A metadata context.
    pub fn meta_context(&mut self, id: u32, name: &str) {
        self.reply(option_reply::META_CONTEXT, &[&id.to_be_bytes(), name.as_bytes()]);
    }

    /// The end: accepted.
    #[must_use]
    pub fn acknowledge(mut self) -> Vec<u8> {
        self.reply(option_reply::ACK, &[]);
        self.bytes
    }

    /// The end: `error`, with words for a person.
    #[must_use]
    pub fn refuse(mut self, error: u32, message: &str) -> Vec<u8> {
        let cut = message.floor_char_boundary(STRING_BYTES_MAX);
        self.reply(error, &[&message.as_bytes()[..cut]]);
        self.bytes
    }
}

/// One item of a reply of type `NBD_REP_INFO`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InfoReply {
    /// Size and flags.
    Export(ExportInfo),
    /// Block sizes.
    BlockSizes(BlockSizes),
    /// The canonical name.
    Name(String),
    /// The description.
    Description(String),
    /// An item that this client does not know; the protocol has it ignore those.
    Unknown,
}

/// The item in the data of an `NBD_REP_INFO`.
///
/// # Errors
/// If it is malformed or has values that the protocol forbids.
pub fn parse_info(data: &[u8]) -> Result<InfoReply, Malformed> {
    let mut cursor = Cursor(data);
    let item = match cursor.u16()? {
        info::EXPORT => InfoReply::Export(ExportInfo { size: Bytes(cursor.u64()?), flags: cursor.u16()? }),
        info::BLOCK_SIZE => {
            let sizes = BlockSizes { minimum: cursor.u32()?, preferred: cursor.u32()?, maximum: cursor.u32()? };
            let valid = sizes.minimum.is_power_of_two()
                && sizes.minimum <= 1 << 16
                && sizes.preferred.is_power_of_two()
                && sizes.preferred >= sizes.minimum.max(512)
                && sizes.maximum >= sizes.minimum;
            if !valid {
                return Err(Malformed::Value);
            }
            InfoReply::BlockSizes(sizes)
        }
        info::NAME => InfoReply::Name(cursor.string(cursor.0.len())?.to_owned()),
        info::DESCRIPTION => InfoReply::Description(cursor.string(cursor.0.len())?.to_owned()),
        _ => return Ok(InfoReply::Unknown),
    };
    cursor.end()?;
    Ok(item)
}

/// Number and name of the context in the data of an `NBD_REP_META_CONTEXT`.
///
/// # Errors
/// If it is malformed.
pub fn parse_meta_context(data: &[u8]) -> Result<(u32, &str), Malformed> {
    let mut cursor = Cursor(data);
    let id = cursor.u32()?;
    Ok((id, cursor.string(cursor.0.len())?))
}

/// Name and description of the export in the data of an `NBD_REP_SERVER`.
///
/// # Errors
/// If it is malformed.
pub fn parse_server(data: &[u8]) -> Result<(&str, &str), Malformed> {
    let mut cursor = Cursor(data);
    let name = cursor.counted_string()?;
    Ok((name, cursor.string(cursor.0.len())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_lying_count_of_queries_is_refused_before_anything_is_allocated() {
        let mut data = MetaContextRequest { name: "a", queries: vec!["base:"] }.to_bytes();
        data[5..9].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(MetaContextRequest::parse(&data), Err(Malformed::Truncated));
    }

    #[test]
    fn names_that_are_too_long_or_no_text_are_refused() {
        let long = "n".repeat(STRING_BYTES_MAX + 1);
        let data = GoRequest { name: &long, items: vec![] }.to_bytes();
        assert_eq!(GoRequest::parse(&data), Err(Malformed::String));
        let mut data = GoRequest { name: "abc", items: vec![] }.to_bytes();
        data[5] = 0xff;
        assert_eq!(GoRequest::parse(&data), Err(Malformed::String));
    }

    #[test]
    fn flags_that_were_not_offered_are_refused() {
        assert_eq!(parse_client_flags([0, 0, 0, 3]), Ok(3));
        assert_eq!(parse_client_flags([0, 0, 0, 4]), Err(Malformed::Flags));
        assert_eq!(parse_client_flags([1, 0, 0, 0]), Err(Malformed::Flags));
    }

    #[test]
    fn block_sizes_that_the_protocol_forbids_are_refused() {
        let parse = |minimum: u32, preferred: u32, maximum: u32| {
            let mut writer = OptionReplyWriter::new(7);
            writer.block_sizes(BlockSizes { minimum, preferred, maximum });
            parse_info(&writer.bytes[OPTION_REPLY_HEADER_BYTES..])
        };
        assert!(parse(1, 512, 4096).is_ok());
        assert_eq!(parse(0, 4096, 4096), Err(Malformed::Value));
        assert_eq!(parse(3, 4096, 4096), Err(Malformed::Value));
        assert_eq!(parse(1, 256, 4096), Err(Malformed::Value));
        assert_eq!(parse(4096, 4096, 512), Err(Malformed::Value));
    }

    proptest! {
        #[test]
        fn requests_survive_the_way_there_and_back(
            name in "\\PC{0,20}", items in prop::collection::vec(any::<u16>(), 0..9), queries in prop::collection::vec("\\PC{0,9}", 0..9),
        ) {
            let go = GoRequest { name: &name, items };
            let bytes = go.to_bytes();
            prop_assert_eq!(GoRequest::parse(&bytes), Ok(go.clone()));
            let meta = MetaContextRequest { name: &name, queries: queries.iter().map(String::as_str).collect() };
            let bytes = meta.to_bytes();
            prop_assert_eq!(MetaContextRequest::parse(&bytes), Ok(meta.clone()));
        }

        #[test]
        fn hostile_bytes_never_panic(data in prop::collection::vec(any::<u8>(), 0..200), lead in 0_u8..4) {
            // A small first length lets the parsers come past it.
            let mut data = data;
            if data.len() > 4 {
                data[..4].copy_from_slice(&[0, 0, 0, lead]);
            }
            let _ = GoRequest::parse(&data);
            let _ = MetaContextRequest::parse(&data);
            let _ = parse_info(&data);
            let _ = parse_meta_context(&data);
            let _ = parse_server(&data);
            if let Some(header) = data.first_chunk() {
                let _ = OptionHeader::parse(header);
            }
            if let Some(header) = data.first_chunk() {
                let _ = OptionReplyHeader::parse(header);
            }
            if let Some(greeting) = data.first_chunk() {
                let _ = Greeting::parse(greeting);
            }
        }
    }
}
