//! Frames on their way out: collected while others are made, sent by one vectored write.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use block::{Buffer, Data};
use tokio::io::AsyncWrite;

use super::protocol::{HEADER_BYTES, Header};

/// How many pieces one write gathers: two a frame.
const SLICES_MAX: usize = 64;

/// What follows a frame's header.
pub(super) enum Body {
    None,
    Data(Data),
    Buffer(Buffer),
    /// The first so many bytes.
    Bytes(Vec<u8>, usize),
}

impl Body {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::None => &[],
            Self::Data(data) => data,
            Self::Buffer(buffer) => buffer,
            Self::Bytes(bytes, length) => &bytes[..*length],
        }
    }
}

struct Frame {
    header: [u8; HEADER_BYTES],
    body: Body,
    cost: usize,
}

impl Frame {
    fn length(&self) -> usize {
        HEADER_BYTES + self.body.bytes().len()
    }
}

/// The frames that wait for the connection, oldest first, each with what it costs of some allowance.
#[derive(Default)]
pub(super) struct Outbox {
    frames: VecDeque<Frame>,
    /// How much of the first frame has been sent.
    sent: usize,
    /// How much all of them still have to send.
    bytes: usize,
}

impl Outbox {
    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// How many bytes wait.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Puts a frame at the end. `body` is as long as `header` says.
    pub(super) fn push(&mut self, header: &Header, body: Body, cost: usize) {
        debug_assert_eq!(header.payload_bytes as usize, body.bytes().len(), "a header tells how long its payload is");
        let frame = Frame { header: header.to_bytes(), body, cost };
        self.bytes += frame.length();
        self.frames.push_back(frame);
    }

    /// Throws all away: nobody will read it.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// One vectored write: how many bytes it took. Calls `release` with the body and the cost of every frame that has
    /// left entirely.
    pub(super) fn poll_send<S: AsyncWrite + Unpin + ?Sized>(
        &mut self,
        stream: &mut S,
        context: &mut Context<'_>,
        mut release: impl FnMut(Body, usize),
    ) -> Poll<io::Result<usize>> {
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        let mut count = 0;
        let mut skip = self.sent;
        for frame in self.frames.iter().take(SLICES_MAX / 2) {
            for piece in [&frame.header[..], frame.body.bytes()] {
                let skipped = skip.min(piece.len());
                skip -= skipped;
                if skipped < piece.len() {
                    slices[count] = IoSlice::new(&piece[skipped..]);
                    count += 1;
                }
            }
        }
        let written = ready!(Pin::new(stream).poll_write_vectored(context, &slices[..count]))?;
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.bytes -= written;
        self.sent += written;
        while self.frames.front().is_some_and(|frame| self.sent >= frame.length())
            && let Some(frame) = self.frames.pop_front()
        {
            self.sent -= frame.length();
            release(frame.body, frame.cost);
        }
        Poll::Ready(Ok(written))
    }
}
