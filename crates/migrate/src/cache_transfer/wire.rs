//! What goes over the connection of a transfer, in both directions.
//!
//! ```text
//!   0      1         4        8         16       20
//!   +------+---------+--------+---------+--------+------------
//!   | kind | zeroes  | length | number  | CRC-32 | the payload
//!   | u8   | 3 bytes | u32    | u64     | u32    |
//!   +------+---------+--------+---------+--------+------------
//! ```
//!
//! All numbers are little-endian. The checksum is of the first 16 bytes and the payload.

use std::io::{Error, ErrorKind, Result};

use block::Buffer;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc::UnboundedReceiver;

const HEADER_BYTES: usize = 20;
/// The longest payload: a block, or a part of a list.
const PAYLOAD_BYTES_MAX: u32 = 1 << 20;
/// So many blocks are named in one frame.
pub(super) const NAMED_MAX: usize = 65536;
/// So many bytes are written at once.
const WRITE_BYTES: usize = 256 << 10;

/// What a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// To the target: the next blocks of the list, hottest first.
    List = 1,
    /// To the target: the list is complete; the number is its length.
    ListEnd = 2,
    /// To the target: the bytes of a block.
    Block = 3,
    /// To the target: a block that cannot be had, or was just changed.
    Absent = 4,
    /// To the target: blocks that the guest is changing.
    Invalid = 5,
    /// To the target: any block may have been changed.
    InvalidAll = 6,
    /// To the target: it may copy.
    Copy = 7,
    /// To the target: the guest is held; nothing is changed any more.
    Seal = 8,
    /// To the source: the bytes of a block are wanted.
    Ask = 16,
    /// To the source: what was told before the seal of this number is done.
    Sealed = 17,
    /// To the source: all of the list has come.
    Whole = 18,
    /// To the source: nothing more is wanted.
    Enough = 19,
}

impl Kind {
    const ALL: [Self; 12] = [
        Self::List,
        Self::ListEnd,
        Self::Block,
        Self::Absent,
        Self::Invalid,
        Self::InvalidAll,
        Self::Copy,
        Self::Seal,
        Self::Ask,
        Self::Sealed,
        Self::Whole,
        Self::Enough,
    ];
}

/// One message.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    /// A block, a count, or the number of a seal.
    pub(super) number: u64,
    pub(super) payload: Vec<u8>,
}

impl Frame {
    pub(super) const fn new(kind: Kind, number: u64) -> Self {
        Self { kind, number, payload: Vec::new() }
    }

    pub(super) fn block(block: u64, bytes: &Buffer) -> Self {
        Self { kind: Kind::Block, number: block, payload: bytes.to_vec() }
    }

    /// Names blocks, at most [`NAMED_MAX`], with four bytes each where those are enough.
    pub(super) fn naming(kind: Kind, blocks: &[u64]) -> Self {
        let is_wide = blocks.iter().any(|block| u32::try_from(*block).is_err());
        let payload = match is_wide {
            true => blocks.iter().flat_map(|block| block.to_le_bytes()).collect(),
            false => blocks.iter().flat_map(|block| (*block as u32).to_le_bytes()).collect(),
        };
        Self { kind, number: u64::from(is_wide), payload }
    }

    /// The blocks that it names.
    pub(super) fn named(&self) -> Vec<u64> {
        match self.number {
            0 => self.payload.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes).into()).collect(),
            _ => self.payload.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect(),
        }
    }

    fn append_to(&self, bytes: &mut Vec<u8>) {
        let start = bytes.len();
        bytes.extend_from_slice(&[self.kind as u8, 0, 0, 0]);
        bytes.extend_from_slice(&(self.payload.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&self.number.to_le_bytes());
        let checksum = checksum(&bytes[start..], &self.payload);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes.extend_from_slice(&self.payload);
    }
}

fn checksum(header: &[u8], payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(header);
    hasher.update(payload);
    hasher.finalize()
}

/// Sends what comes until nobody sends any more.
pub(super) async fn send_all(mut frames: UnboundedReceiver<Frame>, mut writer: impl AsyncWrite + Unpin) -> Result<()> {
    let mut bytes = Vec::with_capacity(WRITE_BYTES);
    while let Some(frame) = frames.recv().await {
        frame.append_to(&mut bytes);
        while bytes.len() < WRITE_BYTES
            && let Ok(frame) = frames.try_recv()
        {
            frame.append_to(&mut bytes);
        }
        writer.write_all(&bytes).await?;
        writer.flush().await?;
        bytes.clear();
    }
    Ok(())
}

/// The next message.
pub(super) async fn receive(reader: &mut (impl AsyncRead + Unpin)) -> Result<Frame> {
    let invalid = |what: &str| Error::new(ErrorKind::InvalidData, format!("the transfer of a cache: {what}"));
    let mut header = [0; HEADER_BYTES];
    reader.read_exact(&mut header).await?;
    let field = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let kind = Kind::ALL.into_iter().find(|kind| *kind as u8 == header[0]);
    let kind = kind.ok_or_else(|| invalid("a message that is not known"))?;
    let length = field(4);
    if length > PAYLOAD_BYTES_MAX {
        return Err(invalid("a message is too long"));
    }
    let mut payload = vec![0; length as usize];
    reader.read_exact(&mut payload).await?;
    if checksum(&header[..16], &payload) != field(16) {
        return Err(invalid("a message has another checksum"));
    }
    Ok(Frame { kind, number: u64::from(field(8)) | u64::from(field(12)) << 32, payload })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn frames_arrive_as_they_were_sent_and_damaged_ones_do_not() {
        let (near, mut far) = tokio::io::duplex(1 << 20);
        let (sender, frames) = tokio::sync::mpsc::unbounded_channel();
        let mut bytes = Buffer::unpooled(4096);
        bytes.fill(7);
        let send = |frame: Frame| sender.send(frame).expect("it is received");
        send(Frame::block(9, &bytes));
        send(Frame::naming(Kind::List, &[1, 1 << 40]));
        send(Frame::naming(Kind::Invalid, &[3, 4]));
        send(Frame::new(Kind::Seal, u64::MAX - 1));
        drop(sender);
        send_all(frames, near).await.expect("there is room");
        let mut next = async || receive(&mut far).await.expect("it is whole");
        assert_eq!(next().await, Frame { kind: Kind::Block, number: 9, payload: vec![7; 4096] });
        assert_eq!(next().await.named(), [1, 1 << 40]);
        let invalid = next().await;
        assert_eq!((invalid.kind, invalid.named(), invalid.payload.len()), (Kind::Invalid, vec![3, 4], 8));
        assert_eq!(next().await, Frame::new(Kind::Seal, u64::MAX - 1));

        let mut sound = Vec::new();
        Frame::new(Kind::Ask, 5).append_to(&mut sound);
        for at in 0..sound.len() {
            let mut damaged = sound.clone();
            damaged[at] ^= 0x20;
            damaged.resize(sound.len() + 64, 0);
            receive(&mut &damaged[..]).await.expect_err("a bit is another one");
        }
    }
}
