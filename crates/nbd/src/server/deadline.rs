//! How long a client may leave its replies unfetched, or a payload that it announced unsent.
//!
//! Both keep buffers that others could use. The time runs while the client owes something, and begins anew whenever it
//! owes nothing. A slow client that moves enough in that time goes on.

use std::task::Context;
use std::time::Duration;

use env::{Env, Task};
use futures::FutureExt;

/// Moving so much within the limit is progress.
const PROGRESS_BYTES: u64 = 1 << 20;

/// The deadline of one connection.
#[derive(Default)]
pub(super) struct Deadline {
    timer: Option<Task>,
    /// How many bytes were moved since the timer was set.
    moved: u64,
    /// The client owed nothing at some moment since the timer was set.
    was_clear: bool,
}

impl Deadline {
    /// So many bytes of replies or payload were moved.
    pub(super) const fn moved(&mut self, bytes: usize) {
        self.moved = self.moved.saturating_add(bytes as u64);
    }

    /// The client owes nothing now.
    pub(super) const fn clear(&mut self) {
        self.was_clear = true;
    }

    /// The client owes something: whether it has for so long as `limit`, without progress. Wakes `task` when that may
    /// be.
    pub(super) fn is_over(&mut self, env: &dyn Env, limit: Duration, task: &mut Context<'_>) -> bool {
        loop {
            let timer = self.timer.get_or_insert_with(|| env.sleep(limit));
            if timer.poll_unpin(task).is_pending() {
                return false;
            }
            let is_over = !self.was_clear && self.moved < PROGRESS_BYTES;
            *self = Self::default();
            if is_over {
                return true;
            }
        }
    }
}
