//! Replies on their way out: collected while requests are served, sent by one vectored write.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use block::Buffer;
use tokio::io::AsyncWrite;

use crate::protocol::{
    Chunk, Errno, SIMPLE_REPLY_BYTES, STRUCTURED_HEADER_BYTES, error_payload, simple_reply, structured_header,
};

/// The longest header: a structured one and the offset of its data.
const HEADER_BYTES_MAX: usize = STRUCTURED_HEADER_BYTES + 8;

/// How many pieces one write gathers: two a reply.
const SLICES_MAX: usize = 64;

/// What follows a reply's header.
enum Body {
    None,
    Buffer(Buffer),
    Bytes(Vec<u8>),
}

impl Body {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::None => &[],
            Self::Buffer(buffer) => buffer,
            Self::Bytes(bytes) => bytes,
        }
    }
}

/// A complete reply.
pub(crate) struct Reply {
    header: [u8; HEADER_BYTES_MAX],
    header_length: u8,
    body: Body,
    is_failed_flush: bool,
}

impl Reply {
    fn new(header: &[u8], body: Body) -> Self {
        let mut own = [0; HEADER_BYTES_MAX];
        own[..header.len()].copy_from_slice(header);
        Self { header: own, header_length: header.len() as u8, body, is_failed_flush: false }
    }

    /// Done, nothing to tell. A simple reply is right for everything but reads, and shorter.
    pub(crate) fn done(cookie: u64) -> Self {
        Self::new(&simple_reply(None, cookie), Body::None)
    }

    /// The bytes that were read at `offset`.
    pub(crate) fn data(is_structured: bool, cookie: u64, offset: u64, buffer: Buffer) -> Self {
        if !is_structured {
            return Self::new(&simple_reply(None, cookie), Body::Buffer(buffer));
        }
        let mut header = [0; HEADER_BYTES_MAX];
        let length = buffer.len() as u32 + 8;
        header[..STRUCTURED_HEADER_BYTES].copy_from_slice(&structured_header(Chunk::OffsetData, cookie, length));
        header[STRUCTURED_HEADER_BYTES..].copy_from_slice(&offset.to_be_bytes());
        let (header_length, body) = (HEADER_BYTES_MAX as u8, Body::Buffer(buffer));
        Self { header, header_length, body, is_failed_flush: false }
    }

    /// The payload of a block status chunk.
    pub(crate) fn block_status(cookie: u64, payload: Vec<u8>) -> Self {
        let header = structured_header(Chunk::BlockStatus, cookie, payload.len() as u32);
        Self::new(&header, Body::Bytes(payload))
    }

    /// An error, with words if the client negotiated replies that can carry them.
    pub(crate) fn error(is_structured: bool, cookie: u64, errno: Errno, message: &str) -> Self {
        if !is_structured {
            return Self::new(&simple_reply(Some(errno), cookie), Body::None);
        }
        let payload = error_payload(errno, message);
        Self::new(&structured_header(Chunk::Error, cookie, payload.len() as u32), Body::Bytes(payload))
    }

    /// The same, if `is_failed_flush` as the answer to a flush that failed.
    pub(crate) const fn of_failed_flush(mut self, is_failed_flush: bool) -> Self {
        self.is_failed_flush = is_failed_flush;
        self
    }

    fn header(&self) -> &[u8] {
        &self.header[..usize::from(self.header_length)]
    }

    fn length(&self) -> usize {
        self.header().len() + self.body.bytes().len()
    }
}

const _: () = assert!(SIMPLE_REPLY_BYTES <= HEADER_BYTES_MAX);

/// The replies that wait for the socket, oldest first, each with the bytes that it holds of the connection's allowance.
#[derive(Default)]
pub(crate) struct Outbox {
    replies: VecDeque<(Reply, usize)>,
    /// How much of the first reply has been sent.
    sent: usize,
    /// How much all of them still have to send.
    bytes: usize,
}

impl Outbox {
    pub(crate) fn is_empty(&self) -> bool {
        self.replies.is_empty()
    }

    /// How many replies wait.
    pub(crate) fn len(&self) -> usize {
        self.replies.len()
    }

    /// How many bytes wait.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn push(&mut self, reply: Reply, cost: usize) {
        self.bytes += reply.length();
        self.replies.push_back((reply, cost));
    }

    /// Discards all replies: the client will not read them.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// One vectored write; calls `release` for every reply that has left entirely, with its cost and whether it says that a flush failed.
    pub(crate) fn poll_send<S: AsyncWrite>(
        &mut self,
        stream: Pin<&mut S>,
        context: &mut Context<'_>,
        mut release: impl FnMut(usize, bool),
    ) -> Poll<io::Result<()>> {
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        let mut count = 0;
        let mut skip = self.sent;
        for (reply, _) in self.replies.iter().take(SLICES_MAX / 2) {
            for piece in [reply.header(), reply.body.bytes()] {
                let skipped = skip.min(piece.len());
                skip -= skipped;
                if skipped < piece.len() {
                    slices[count] = IoSlice::new(&piece[skipped..]);
                    count += 1;
                }
            }
        }
        let written = ready!(stream.poll_write_vectored(context, &slices[..count]))?;
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.bytes -= written;
        self.sent += written;
        while let Some((reply, cost)) = self.replies.front() {
            if self.sent < reply.length() {
                break;
            }
            self.sent -= reply.length();
            release(*cost, reply.is_failed_flush);
            self.replies.pop_front();
        }
        Poll::Ready(Ok(()))
    }
}
