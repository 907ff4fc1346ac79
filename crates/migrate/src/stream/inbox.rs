//! What a connection has received and not yet understood: one piece of memory, filled by large reads.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};

/// How much it holds: many small frames, or the beginning of a large one.
const CAPACITY: usize = 256 << 10;

/// After a large payload only so much is read ahead of the next. What comes with its header must be copied, and the
/// rest goes from the socket directly to where it belongs.
const CAUTIOUS_BYTES: usize = 4096;

/// A window of received bytes in fixed memory.
pub(super) struct Inbox {
    memory: Box<[u8]>,
    start: usize,
    end: usize,
    is_cautious: bool,
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self { memory: vec![0; CAPACITY].into(), start: 0, end: 0, is_cautious: false }
    }

    /// The bytes that are there.
    pub(super) fn filled(&self) -> &[u8] {
        &self.memory[self.start..self.end]
    }

    /// Whether the next frames are likely to be large ones.
    pub(super) const fn expect_large(&mut self, is_likely: bool) {
        self.is_cautious = is_likely;
    }

    /// Forgets the first `count` bytes. An empty inbox begins again at the front, which the processor's cache still has.
    pub(super) fn consume(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.end, "more was consumed than received");
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Copies as much as there is and fits into `target`, and forgets it.
    pub(super) fn take_into(&mut self, target: &mut [u8]) -> usize {
        let count = target.len().min(self.end - self.start);
        target[..count].copy_from_slice(&self.memory[self.start..self.start + count]);
        self.consume(count);
        count
    }

    /// One read from `stream` behind what is there: how many bytes came, 0 at the stream's end. `None` when it is full.
    pub(super) fn poll_fill<S: AsyncRead + Unpin + ?Sized>(
        &mut self,
        stream: &mut S,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Option<usize>>> {
        if self.start > 0 && self.end > self.memory.len() / 2 {
            self.memory.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let mut room = self.memory.len() - self.end;
        if room == 0 {
            return Poll::Ready(Ok(None));
        }
        if self.is_cautious {
            room = room.min(CAUTIOUS_BYTES);
        }
        let mut room = ReadBuf::new(&mut self.memory[self.end..self.end + room]);
        ready!(Pin::new(stream).poll_read(context, &mut room))?;
        let count = room.filled().len();
        self.end += count;
        Poll::Ready(Ok(Some(count)))
    }
}
