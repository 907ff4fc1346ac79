//! Reading ahead of the TLS library, which asks the kernel for 4 KiB at a time: a record of 16 KiB would take five calls.

use std::io::{IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// How much is read at once: eight records.
const AHEAD_BYTES: usize = 128 << 10;

/// A connection of which more is read than was asked for, if it is there.
pub(crate) struct ReadAhead<S> {
    inner: S,
    memory: Box<[u8]>,
    start: usize,
    end: usize,
}

impl<S> ReadAhead<S> {
    pub(crate) fn new(inner: S) -> Self {
        Self { inner, memory: vec![0; AHEAD_BYTES].into(), start: 0, end: 0 }
    }

    /// The connection itself.
    pub(crate) const fn inner(&self) -> &S {
        &self.inner
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadAhead<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, target: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        let this = &mut *self;
        if this.start == this.end {
            if target.remaining() >= this.memory.len() {
                return Pin::new(&mut this.inner).poll_read(context, target);
            }
            let mut room = ReadBuf::new(&mut this.memory);
            ready!(Pin::new(&mut this.inner).poll_read(context, &mut room))?;
            this.start = 0;
            this.end = room.filled().len();
        }
        let count = target.remaining().min(this.end - this.start);
        target.put_slice(&this.memory[this.start..this.start + count]);
        this.start += count;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ReadAhead<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn bytes_come_in_their_order_whatever_is_asked_for_at_once_and_so_does_the_end() {
        let (mut far, near) = tokio::io::duplex(300_000);
        let sent: Vec<u8> = (0..1_000_000_u32).map(|number| (number % 251) as u8).collect();
        let sending = async {
            far.write_all(&sent).await.expect("it is read");
            drop(far);
        };
        let receiving = async {
            let mut near = ReadAhead::new(near);
            let mut received = Vec::new();
            for size in [1, 5, 4096, 200_000, 3, 131_072, 77].iter().cycle() {
                let mut piece = vec![0; *size];
                let count = near.read(&mut piece).await.expect("it is sent");
                if count == 0 {
                    return received;
                }
                received.extend_from_slice(&piece[..count]);
            }
            unreachable!("the sizes go round for ever");
        };
        let ((), received) = tokio::join!(sending, receiving);
        assert!(received == sent, "{} of {} bytes, or in another order", received.len(), sent.len());
    }
}
