//! Messages that are not on the way of bytes: postcard, in payloads of at most 64 KiB.
//!
//! Postcard numbers the variants of an enum and the fields of a struct by their order. So within one version of the
//! wire nothing is inserted between two others, and nothing is removed.

use std::net::IpAddr;

use block::{Bytes, Extent, ExtentState, ExtentStatus};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{CONTROL_BYTES_MAX, Malformed, SessionLayers, feature};

/// What a session is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Fills a volume that the other end is to take.
    Copy,
    /// Uses a volume that the other end holds.
    Forward,
}

/// What a session is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionRequest {
    /// The volume's name at the other end; at most 255 bytes.
    pub volume: String,
    /// The job that moves it.
    pub job: Uuid,
    /// What the session is for.
    pub role: Role,
    /// The volume's epoch: of a copy that of the source, of a forward that under which the other end is to hold it.
    pub epoch: u64,
    /// How many bytes the volume has.
    #[serde(with = "bytes")]
    pub size: Bytes,
    /// What the guest's requests are multiples of, so that a target with larger sectors can be refused.
    pub request_alignment: u32,
    /// What the asking end calls the volume; at most 255 bytes.
    pub origin: String,
    /// What makes the bytes of a copy a volume, if they are not it by themselves. It follows the rest of an [`Opening`].
    #[serde(skip)]
    pub layers: Option<SessionLayers>,
    /// Whether its bytes are where both ends reach them, and stay there. A receiver that would make a place for it refuses it then. It
    /// follows the rest of an [`Opening`], too.
    #[serde(skip)]
    pub stays: bool,
}

mod bytes {
    use block::Bytes;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(bytes.0)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<Bytes, D::Error> {
        u64::deserialize(deserializer).map(Bytes)
    }
}

/// The first frame of a stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opening {
    /// Who sends: random, new with each sending device.
    pub sender: [u8; 16],
    /// Which of the sender's sessions, growing by one.
    pub session: u64,
    /// Which stream of the session.
    pub stream: u16,
    /// Which connection of the stream, from 1 on.
    pub generation: u32,
    /// Whether the session is there already. If not it is opened now, and what there was before of the same job is
    /// ended.
    pub joins: bool,
    /// What the session is about, the same in all of its streams.
    pub request: SessionRequest,
}

impl Opening {
    /// The message as bytes, between two that have agreed on these features.
    ///
    /// # Errors
    /// It is longer than a control message may be.
    pub fn to_bytes(&self, features: u64) -> Result<Vec<u8>, Malformed> {
        let request = &self.request;
        match &request.layers {
            layers if features & feature::STAYS != 0 => encode(&(self, layers, request.stays)),
            Some(layers) => encode(&(self, layers)),
            None => encode(self),
        }
    }

    /// The message that `bytes` are, all of them, between two that have agreed on these features.
    ///
    /// # Errors
    /// They are none.
    pub fn parse(bytes: &[u8], features: u64) -> Result<Self, Malformed> {
        if features & feature::STAYS != 0 {
            let (mut opening, layers, stays): (Self, Option<SessionLayers>, bool) = decode(bytes)?;
            (opening.request.layers, opening.request.stays) = (layers, stays);
            return Ok(opening);
        }
        decode(bytes).or_else(|_| {
            let (mut opening, layers): (Self, SessionLayers) = decode(bytes)?;
            opening.request.layers = Some(layers);
            Ok(opening)
        })
    }
}

/// The answer to an [`Opening`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Of the receiving program: new at each of its starts.
    pub instance: [u8; 16],
    /// Of the receiving machine: new at each of its boots.
    pub boot: [u8; 16],
    /// The volume's size.
    pub size: u64,
    /// What requests are multiples of.
    pub request_alignment: u32,
    /// What requests are served best in.
    pub preferred_bytes: u32,
    /// The largest transfer of the device.
    pub transfer_bytes_max: u32,
    /// Whether mutations are refused.
    pub read_only: bool,
    /// What there is of an earlier session of the job.
    pub earlier: Option<MapSummary>,
}

/// What an end has of a job's volume, durably.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapSummary {
    /// The size of a chunk.
    pub chunk_bytes: u64,
    /// How many chunks it has.
    pub chunks_had: u64,
    /// The digest of the map that says which.
    pub digest: [u8; 32],
}

/// What the sender asks of whoever holds volumes at the other end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Be durably prepared to hold the volume under `epoch`.
    Prepare {
        /// The epoch after the source's.
        epoch: u64,
    },
    /// Hold the volume under `epoch`, durably: the source does not any more.
    Take {
        /// The epoch that was prepared.
        epoch: u64,
    },
    /// Forget what was prepared: the source keeps the volume.
    Abandon,
    /// Where does the volume stand?
    Status,
    /// What do you have of the job, in chunks of so many bytes? Asked before a copy goes on with a part only.
    MapDigest {
        /// The size of a chunk.
        chunk_bytes: u64,
    },
    /// Keep this map of what you have: a flush has succeeded since all of it was written.
    KeepMap {
        /// The map that is durable then.
        map: MapSummary,
    },
    /// What have the network interfaces carried that have these addresses? Only with [`feature::USAGE`](super::feature::USAGE).
    Usage {
        /// Where streams have reached the other end; at most [`USAGE_ADDRESSES_MAX`].
        addresses: Vec<IpAddr>,
    },
    /// What are the BLAKE3 digests of these extents of the volume? The receiver answers by itself, from the session's device.
    /// Only with [`feature::DIGESTS`](super::feature::DIGESTS).
    Digests {
        /// Offset and length of each: at most [`DIGEST_EXTENTS_MAX`], of at most [`DIGEST_BYTES_MAX`] bytes.
        extents: Vec<(u64, u64)>,
    },
    /// The source's guest uses the volume no more: it is the receiver's alone. A receiver that does not know this answers
    /// that it is unsupported.
    Release,
    /// Would the volume be let in if a session began to fill it? Nothing changes. A receiver that does not know this answers
    /// that it is unsupported.
    Offer,
}

/// How many extents are asked about at once, and how many bytes each has at most.
pub const DIGEST_EXTENTS_MAX: usize = 64;
/// See [`DIGEST_EXTENTS_MAX`].
pub const DIGEST_BYTES_MAX: u64 = 4 << 20;

/// How many addresses are asked about at once.
pub const USAGE_ADDRESSES_MAX: usize = 64;

/// What a network interface has carried since it came up, by the kernel's counters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkCounters {
    /// What its machine calls it.
    pub interface: String,
    /// When they were read, in nanoseconds on a clock of that machine that never goes back.
    pub at_ns: u64,
    /// Bytes that came in.
    pub received: u64,
    /// Bytes that went out.
    pub sent: u64,
    /// What it can carry in either direction, in bytes a second; 0 if nobody knows.
    pub capacity: u64,
    /// What of it all was of migrations.
    pub migrations: MigrationCounters,
}

/// What the streams that fill volumes have carried over an interface, to and from whatever hosts. It covers all
/// migrations of the interface's machine, which counts them itself. It is read together with the kernel's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationCounters {
    /// Bytes that came in, without what the network adds to them.
    pub received: u64,
    /// The same that went out.
    pub sent: u64,
    /// How many migrations are carried now of which more comes in than goes out,
    pub incoming: u32,
    /// and of which more goes out.
    pub outgoing: u32,
}

/// The answer to an [`Ask`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// It is so now.
    Done,
    /// Where the volume stands.
    Status(VolumeStatus),
    /// What there is of the job; `None` if nothing is known.
    MapDigest(Option<MapSummary>),
    /// Of each address, in their order; `None` where no interface has it.
    Usage(Vec<Option<LinkCounters>>),
    /// Of each extent, in their order.
    Digests(Vec<[u8; 32]>),
}

/// Where a volume stands at the other end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumeStatus {
    /// It is being filled, or was.
    Filling,
    /// Prepared for this epoch, and waiting to be told.
    Prepared {
        /// The epoch that was prepared.
        epoch: u64,
    },
    /// It holds the volume under this epoch.
    Held {
        /// The epoch under which it does.
        epoch: u64,
    },
    /// It has given the volume up, or never knew of it.
    Without,
}

/// The message as bytes.
///
/// # Errors
/// It is longer than a control message may be.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, Malformed> {
    let bytes = postcard::to_stdvec(message).map_err(|_| Malformed("a control message does not serialise"))?;
    match bytes.len() <= CONTROL_BYTES_MAX as usize {
        true => Ok(bytes),
        false => Err(Malformed("a control message is too long")),
    }
}

/// The message that `bytes` are, all of them.
///
/// # Errors
/// They are none, or too many.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Malformed> {
    if bytes.len() > CONTROL_BYTES_MAX as usize {
        return Err(Malformed("a control message is too long"));
    }
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        _ => Err(Malformed("a control message makes no sense")),
    }
}

/// How many pieces an answer to extents has at most.
pub const EXTENT_PIECES_MAX: usize = 4096;

const PIECE_BYTES: usize = 9;

/// The payload of an answer to extents: of each piece its length (u64) and its state (u8: 0 data, 1 zero, 2 hole).
#[must_use]
pub fn encode_extents(pieces: &[ExtentStatus]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(pieces.len().min(EXTENT_PIECES_MAX) * PIECE_BYTES);
    for piece in pieces.iter().take(EXTENT_PIECES_MAX) {
        bytes.extend_from_slice(&piece.extent.length.0.to_le_bytes());
        bytes.push(match piece.state {
            ExtentState::Data => 0,
            ExtentState::Zero => 1,
            ExtentState::Hole => 2,
        });
    }
    bytes
}

/// The pieces of `asked` that such a payload describes.
///
/// # Errors
/// There is none, one is empty, or they reach past what was asked.
pub fn parse_extents(asked: Extent, bytes: &[u8]) -> Result<Vec<ExtentStatus>, Malformed> {
    let count = bytes.len() / PIECE_BYTES;
    if count == 0 || count > EXTENT_PIECES_MAX || !bytes.len().is_multiple_of(PIECE_BYTES) {
        return Err(Malformed("an answer to extents has a wrong length"));
    }
    let mut pieces = Vec::with_capacity(count);
    let mut left = asked;
    for piece in bytes.chunks_exact(PIECE_BYTES) {
        let (length, state) = piece.split_first_chunk().ok_or(Malformed("a piece has nine bytes"))?;
        let length = Bytes(u64::from_le_bytes(*length));
        let state = match state {
            [0] => ExtentState::Data,
            [1] => ExtentState::Zero,
            [2] => ExtentState::Hole,
            _ => return Err(Malformed("an extent is in no known state")),
        };
        if length.is_zero() || length > left.length {
            return Err(Malformed("an answer to extents reaches past what was asked"));
        }
        pieces.push(ExtentStatus { extent: Extent::new(left.offset, length), state });
        left = Extent::new(left.offset + length, left.length - length);
    }
    Ok(pieces)
}
