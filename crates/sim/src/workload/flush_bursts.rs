//! A database that flushes.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Step, Workload};
use crate::model::Request;
use crate::rng::Rng;

/// A log that grows by a write and a flush at a time, and at every checkpoint a burst of dirty pages, then a flush.
///
/// Pages are 16 KiB anywhere in the volume but its log, which is the first 64 MiB; a log write is 4 KiB. Open loop: all
/// of it has its time, whatever the disk does.
#[derive(Clone, Debug)]
pub struct FlushBursts {
    size: u64,
    log_interval: Duration,
    checkpoint: Duration,
    pages: u64,
    now: Duration,
    next_checkpoint: Duration,
    log_next: u64,
    queue: VecDeque<Step>,
}

const LOG_BYTES: u64 = 64 << 20;
const LOG_WRITE_BYTES: u64 = 4096;
const PAGE_BYTES: u64 = 16 << 10;

impl FlushBursts {
    /// A commit every `log_interval`, and `pages` dirty pages every `checkpoint`, on a volume of `size` bytes.
    #[must_use]
    pub const fn new(size: u64, log_interval: Duration, checkpoint: Duration, pages: u64) -> Self {
        let queue = VecDeque::new();
        Self {
            size,
            log_interval,
            checkpoint,
            pages,
            now: Duration::ZERO,
            next_checkpoint: checkpoint,
            log_next: 0,
            queue,
        }
    }
}

impl Workload for FlushBursts {
    fn next(&mut self, rng: &Rng) -> Option<Step> {
        if self.queue.is_empty() {
            self.now += self.log_interval;
            let at = self.now;
            if self.now >= self.next_checkpoint {
                self.next_checkpoint += self.checkpoint;
                let places = (self.size - LOG_BYTES) / PAGE_BYTES;
                let pages = (0..self.pages).map(|_| LOG_BYTES + rng.below(places) * PAGE_BYTES);
                self.queue.extend(pages.map(|offset| Step { at, request: Request::write(offset, PAGE_BYTES) }));
                self.queue.push_back(Step { at, request: Request::flush() });
            }
            self.queue.push_back(Step { at, request: Request::write(self.log_next, LOG_WRITE_BYTES) });
            self.queue.push_back(Step { at, request: Request::flush() });
            self.log_next = (self.log_next + LOG_WRITE_BYTES) % LOG_BYTES;
        }
        self.queue.pop_front()
    }
}
