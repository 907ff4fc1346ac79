//! One request, carried out on the session's device.

use std::time::Duration;

use block::{Buffer, Bytes, Error, ErrorKind, Extent, Mutation, Result};

use super::session::{Membership, Session};
use super::{Shared, WORDS_BYTES_MAX};
use crate::stream::outbox::Body;
use crate::stream::protocol::{
    Answer, Ask, CONTROL_BYTES_MAX, Coding, DIGEST_BYTES_MAX, DIGEST_EXTENTS_MAX, EXTENT_PIECES_MAX, Header, Kind,
    PAYLOAD_BYTES_MAX, Status, clip, decode, encode, encode_extents, flag,
};
use crate::zeroes::is_zero;

/// A reply, and how many bytes of the connection's allowance it gives back when it has been sent.
pub(super) struct Reply {
    pub(super) header: Header,
    pub(super) body: Body,
    pub(super) cost: usize,
    /// The connection ends after it.
    pub(super) is_last: bool,
}

/// All that a request needs.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) shared: &'a Shared,
    pub(super) session: &'a Session,
    pub(super) membership: &'a Membership,
}

impl Reply {
    pub(super) fn failed(request: &Header, error: &Error, cost: usize) -> Self {
        let words = error.chain();
        let words = clip(&words, WORDS_BYTES_MAX).as_bytes();
        let header = Header { status: Status::Failed(error.kind()), ..request.reply() }.with_payload(words);
        let body = if words.is_empty() { Body::None } else { Body::Bytes(words.to_vec(), words.len()) };
        Self { header, body, cost, is_last: false }
    }

    /// The request's payload is not what its checksum says.
    pub(super) const fn damaged(request: &Header, cost: usize) -> Self {
        let header = Header { status: Status::Damaged, ..request.reply() };
        Self { header, body: Body::None, cost, is_last: false }
    }

    const fn done(request: &Header, cost: usize) -> Self {
        Self { header: request.reply(), body: Body::None, cost, is_last: false }
    }
}

/// Carries out a request whose payload, if it has one, is whole.
pub(super) async fn execute(context: Context<'_>, request: Header, payload: Option<Buffer>, cost: usize) -> Reply {
    let began = context.shared.env.now();
    let outcome = match request.kind {
        kind if kind.is_mutation() => mutate(context, &request, payload).await.map(|()| Reply::done(&request, cost)),
        Kind::Read => read(context, &request, cost).await,
        Kind::Flush => context.session.device.flush().await.map(|()| Reply::done(&request, cost)),
        Kind::Extents => extents(context, &request, cost).await,
        Kind::Control => control(context, &request, payload, cost).await,
        Kind::Retire => retire(context, &request).await.map(|()| Reply::done(&request, cost)),
        Kind::Leave => {
            context.session.leave(context.membership).await;
            Ok(Reply { is_last: true, ..Reply::done(&request, cost) })
        }
        _ => Err(Error::new(ErrorKind::Internal, "a frame came to be carried out that asks for nothing")),
    };
    let mut reply = outcome.unwrap_or_else(|error| {
        tracing::debug!(?request, error = error.chain(), "a request of another host failed");
        Reply::failed(&request, &error, cost)
    });
    let took: Duration = context.shared.env.now().since(began);
    reply.header.offset = took.as_nanos() as u64;
    reply
}

/// The extent of a request, if it lies within the device: the range lock must not meet one that ends past all numbers.
fn extent_of(context: Context<'_>, request: &Header) -> Result<Extent> {
    let size = context.session.device.size();
    match request.offset.checked_add(request.length) {
        Some(end) if Bytes(end) <= size => Ok(Extent::new(Bytes(request.offset), Bytes(request.length))),
        _ => {
            let context = format!("{} bytes at {} do not lie within {size}", request.length, request.offset);
            Err(Error::new(ErrorKind::OutOfRange, context))
        }
    }
}

async fn mutate(context: Context<'_>, request: &Header, payload: Option<Buffer>) -> Result<()> {
    let extent = extent_of(context, request)?;
    let mutation = match (request.kind, payload) {
        (Kind::Write, Some(buffer)) => Mutation::data(extent.offset, buffer.freeze()),
        (Kind::Zeroes, None) => Mutation::zeroes(extent, request.flags & flag::MAY_UNMAP != 0),
        (Kind::Discard, None) => Mutation::discard(extent),
        _ => return Err(Error::new(ErrorKind::Internal, "a write has no payload")),
    };
    let _guard = context.session.ranges.exclusive(extent).await;
    context.session.device.write(mutation.with_fua(request.flags & flag::FUA != 0)).await
}

async fn read(context: Context<'_>, request: &Header, cost: usize) -> Result<Reply> {
    let extent = extent_of(context, request)?;
    let buffer = context.session.answered.acquire(extent.length.as_usize()).await;
    let buffer = context.session.device.read(extent.offset, buffer).await?;
    if is_zero(&buffer) {
        let header = Header { coding: Coding::Zero, length: extent.length.0, ..request.reply() };
        return Ok(Reply { header, ..Reply::done(request, cost) });
    }
    Ok(Reply { header: request.reply().with_payload(&buffer), body: Body::Buffer(buffer), cost, is_last: false })
}

async fn extents(context: Context<'_>, request: &Header, cost: usize) -> Result<Reply> {
    let extent = extent_of(context, request)?;
    let mut pieces = context.session.device.extents(extent).await?;
    pieces.truncate(EXTENT_PIECES_MAX);
    Ok(message(request, encode_extents(&pieces), cost))
}

async fn control(context: Context<'_>, request: &Header, payload: Option<Buffer>, cost: usize) -> Result<Reply> {
    let bytes = payload.ok_or_else(|| Error::new(ErrorKind::Internal, "a message has no payload"))?;
    let unknown = |error| Error::new(ErrorKind::Unsupported, "what is asked is not known here").with_source(error);
    let ask = decode(&bytes).map_err(unknown)?;
    drop(bytes);
    let Context { shared, session, .. } = context;
    let answer = match ask {
        Ask::Digests { extents } => Answer::Digests(digests(context, &extents).await?),
        ask => shared.handler.ask(&session.peer, &session.request, ask).await?,
    };
    let bytes = encode(&answer).map_err(|error| Error::new(ErrorKind::Internal, error.0))?;
    Ok(message(request, bytes, cost))
}

/// What the session's device holds, piece by piece.
async fn digests(context: Context<'_>, extents: &[(u64, u64)]) -> Result<Vec<[u8; 32]>> {
    let (pool, device) = (&context.session.answered, &context.session.device);
    if extents.len() > DIGEST_EXTENTS_MAX || extents.iter().any(|(_, length)| *length > DIGEST_BYTES_MAX) {
        return Err(Error::new(ErrorKind::TooLarge, "digests of so much are not answered at once"));
    }
    let mut digests = Vec::with_capacity(extents.len());
    for (offset, length) in extents {
        let extent =
            extent_of(context, &Header { offset: *offset, length: *length, ..Header::request(Kind::Read, 0) })?;
        let mut hasher = blake3::Hasher::new();
        for piece in extent.split_at_multiples(PAYLOAD_BYTES_MAX.into()) {
            let buffer = pool.acquire(piece.length.as_usize()).await;
            hasher.update(&device.read(piece.offset, buffer).await?);
        }
        digests.push(*hasher.finalize().as_bytes());
    }
    Ok(digests)
}

/// A reply with a message. It waits for no memory: what it takes the connection's allowance has paid for.
fn message(request: &Header, bytes: Vec<u8>, cost: usize) -> Reply {
    debug_assert!(bytes.len() <= CONTROL_BYTES_MAX as usize, "whoever makes a message keeps to the limit");
    let (header, length) = (request.reply().with_payload(&bytes), bytes.len());
    Reply { header, body: Body::Bytes(bytes, length), cost, is_last: false }
}

async fn retire(context: Context<'_>, request: &Header) -> Result<()> {
    let out_of_range = || Error::new(ErrorKind::Invalid, "there is no such stream");
    let stream = u16::try_from(request.offset).map_err(|_| out_of_range())?;
    let generation = u32::try_from(request.length).map_err(|_| out_of_range())?;
    if stream == context.membership.stream && generation >= context.membership.generation {
        return Err(Error::new(ErrorKind::Invalid, "a connection cannot wait for its own end"));
    }
    context.session.retire(stream, generation).await;
    Ok(())
}
