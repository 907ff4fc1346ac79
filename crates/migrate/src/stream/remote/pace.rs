//! How fast a stream may take large requests: what a network card that others use has left.

use std::task::{Context, Poll};
use std::time::Duration;

use env::{Env, Moment, Task};
use filters::TokenBucket;
use futures::FutureExt;

/// The rest of one connection until it may take the next large request.
pub(super) struct Pace {
    ready: Moment,
    timer: Option<Task>,
}

impl Pace {
    pub(super) const fn new(now: Moment) -> Self {
        Self { ready: now, timer: None }
    }

    /// Whether a large request may be taken now. If not, `task` is woken when it may.
    pub(super) fn is_ready(&mut self, env: &dyn Env, task: &mut Context<'_>) -> bool {
        let now = env.now();
        if now >= self.ready {
            self.timer = None;
            return true;
        }
        let timer = self.timer.get_or_insert_with(|| env.sleep(self.ready.since(now)));
        match timer.poll_unpin(task) {
            Poll::Ready(()) => {
                self.timer = None;
                true
            }
            Poll::Pending => false,
        }
    }

    /// So many bytes were taken.
    pub(super) fn take(&mut self, bucket: &TokenBucket, env: &dyn Env, bytes: usize) {
        let rest = bucket.take(bytes as u64);
        if rest > Duration::ZERO {
            self.ready = env.now() + rest;
            self.timer = None;
        }
    }
}
