//! A connection of which something has been read already by whoever had to see what it is.

use std::io::{IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Gives what was read before what comes.
pub struct Replay<S> {
    inner: S,
    read: Vec<u8>,
    start: usize,
}

impl<S> Replay<S> {
    /// Over `inner`, of which `read` was read.
    pub const fn new(inner: S, read: Vec<u8>) -> Self {
        Self { inner, read, start: 0 }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Replay<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, target: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        let this = &mut *self;
        let left = &this.read[this.start..];
        if left.is_empty() {
            return Pin::new(&mut this.inner).poll_read(context, target);
        }
        let count = left.len().min(target.remaining());
        target.put_slice(&left[..count]);
        this.start += count;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Replay<S> {
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
    async fn what_was_read_comes_first_then_the_rest_then_the_end() {
        let (mut far, near) = tokio::io::duplex(100);
        far.write_all(b" and the rest").await.expect("it is read");
        drop(far);
        let mut near = Replay::new(near, b"what was read".to_vec());
        let mut piece = [0; 4];
        near.read_exact(&mut piece).await.expect("it is there");
        let mut others = String::new();
        near.read_to_string(&mut others).await.expect("it is text");
        assert_eq!((&piece[..], &*others), (&b"what"[..], " was read and the rest"));
    }
}
