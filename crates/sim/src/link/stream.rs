//! One end of a connection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Link;
use super::state::Answer;

/// One end of a connection over a simulated link. Dropping it closes it.
pub struct SimStream {
    link: Link,
    outward: usize,
    inward: usize,
}

impl SimStream {
    pub(super) fn new(link: &Link, outward: usize, inward: usize) -> Self {
        Self { link: link.clone(), outward, inward }
    }
}

fn reset() -> io::Error {
    io::Error::from(io::ErrorKind::ConnectionReset)
}

impl AsyncRead for SimStream {
    fn poll_read(self: Pin<&mut Self>, task: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let answer = {
            let place = buffer.initialize_unfilled();
            let now = self.link.shared.world.now();
            self.link.shared.state.lock().read(now, self.inward, place, task.waker())
        };
        match answer {
            Answer::Bytes(count) => {
                self.link.shared.kick.notify_one();
                buffer.advance(count);
                Poll::Ready(Ok(()))
            }
            Answer::End => Poll::Ready(Ok(())),
            Answer::Reset => Poll::Ready(Err(reset())),
            Answer::Wait => Poll::Pending,
        }
    }
}

impl AsyncWrite for SimStream {
    fn poll_write(self: Pin<&mut Self>, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let answer = self.link.shared.state.lock().write(self.outward, bytes, task.waker());
        match answer {
            Answer::Bytes(count) => {
                self.link.shared.kick.notify_one();
                Poll::Ready(Ok(count))
            }
            Answer::End | Answer::Reset => Poll::Ready(Err(reset())),
            Answer::Wait => Poll::Pending,
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.link.shared.state.lock().end(self.outward);
        self.link.shared.kick.notify_one();
        Poll::Ready(Ok(()))
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        let mut state = self.link.shared.state.lock();
        state.end(self.outward);
        state.stop_reading(self.inward);
        drop(state);
        self.link.shared.kick.notify_one();
    }
}
