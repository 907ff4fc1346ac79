//! How fast a stream may take large requests: what a network card that others use has left.

use std::task::{Context, Poll};
use std::time::Duration;

use env::{Env, Task};
use filters::TokenBucket;
use futures::FutureExt;

/// The rate may have been raised or lifted meanwhile: it is asked for again at least this often.
const LOOK_MAX: Duration = Duration::from_millis(500);

/// The rest of one connection until it may take the next large request.
#[derive(Default)]
pub struct Pace {
    timer: Option<Task>,
}

impl Pace {
    /// Whether a large request may be taken now: what was taken of `bucket` is paid. If not, `task` is woken to ask again.
    pub fn is_ready(&mut self, bucket: &TokenBucket, env: &dyn Env, task: &mut Context<'_>) -> bool {
        loop {
            let rest = bucket.take(0);
            if rest.is_zero() {
                self.timer = None;
                return true;
            }
            let timer = self.timer.get_or_insert_with(|| env.sleep(rest.min(LOOK_MAX)));
            match timer.poll_unpin(task) {
                Poll::Ready(()) => self.timer = None,
                Poll::Pending => return false,
            }
        }
    }

    /// So many bytes were taken.
    pub fn take(&mut self, bucket: &TokenBucket, bytes: usize) {
        let rest = bucket.take(bytes as u64);
        if !rest.is_zero() {
            self.timer = None;
        }
    }
}
