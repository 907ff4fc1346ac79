//! What a connection has received and not yet understood: one piece of memory, filled by large reads.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};

/// A window of received bytes in fixed memory.
pub(crate) struct Inbox {
    memory: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Inbox {
    /// An empty one that holds at most `capacity` bytes.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { memory: vec![0; capacity].into(), start: 0, end: 0 }
    }

    /// The bytes that are there.
    pub(crate) fn filled(&self) -> &[u8] {
        &self.memory[self.start..self.end]
    }

    /// Whether nothing more fits.
    pub(crate) const fn is_full(&self) -> bool {
        self.end - self.start == self.memory.len()
    }

    /// Forgets the first `count` bytes. An empty inbox begins again at the front, which the processor's cache still
    /// has.
    pub(crate) fn consume(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.end, "more was consumed than received");
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Copies as much as there is and fits into `target`, and forgets it.
    pub(crate) fn take_into(&mut self, target: &mut [u8]) -> usize {
        let count = target.len().min(self.end - self.start);
        target[..count].copy_from_slice(&self.memory[self.start..self.start + count]);
        self.consume(count);
        count
    }

    /// One read from `stream` behind what is there: how many bytes came, 0 at the stream's end.
    pub(crate) fn poll_fill<S: AsyncRead>(
        &mut self,
        stream: Pin<&mut S>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        if self.start > 0 && self.end > self.memory.len() / 2 {
            self.memory.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        assert!(self.end < self.memory.len(), "a full inbox was asked to read: its zero would look like the end");
        let mut room = ReadBuf::new(&mut self.memory[self.end..]);
        ready!(stream.poll_read(context, &mut room))?;
        let count = room.filled().len();
        self.end += count;
        Poll::Ready(Ok(count))
    }
}
