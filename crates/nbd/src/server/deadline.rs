//! How long a client may leave its replies unfetched, or a payload that it announced unsent.
//!
//! Both keep buffers that others could use. The time runs from the moment at which the client owes something, and ends
//! when it owes nothing. A slow client that moves enough in that time goes on, and the time begins anew.

use std::task::Context;
use std::time::Duration;

use env::{Env, Task};
use futures::FutureExt;

/// Moving so much within the limit is progress.
const PROGRESS_BYTES: u64 = 1 << 20;

/// The limit is counted in so many parts. The first part may have begun before the client owed anything, and does not
/// count: so the deadline is late by a part of the limit at most, and a client that owes nothing in between costs no
/// timer of its own.
const PARTS: u32 = 4;

/// The deadline of one connection.
#[derive(Default)]
pub(super) struct Deadline {
    timer: Option<Task>,
    /// How many parts have ended since the client began to owe something.
    parts: u32,
    /// How many bytes were moved since then.
    moved: u64,
}

impl Deadline {
    /// So many bytes of replies or payload were moved.
    pub(super) const fn moved(&mut self, bytes: usize) {
        self.moved = self.moved.saturating_add(bytes as u64);
    }

    /// The client owes nothing now.
    pub(super) const fn clear(&mut self) {
        (self.parts, self.moved) = (0, 0);
    }

    /// The client owes something: whether it has for so long as `limit`, without progress. Wakes `task` when that may
    /// be.
    pub(super) fn is_over(&mut self, env: &dyn Env, limit: Duration, task: &mut Context<'_>) -> bool {
        loop {
            let timer = self.timer.get_or_insert_with(|| env.sleep(limit / PARTS));
            if timer.poll_unpin(task).is_pending() {
                return false;
            }
            self.timer = None;
            self.parts += 1;
            if self.parts <= PARTS {
                continue;
            }
            if self.moved < PROGRESS_BYTES {
                return true;
            }
            // The next part is a whole one.
            (self.parts, self.moved) = (1, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use env::RealEnv;
    use futures::task::noop_waker;

    #[tokio::test(start_paused = true)]
    async fn the_time_begins_when_the_client_begins_to_owe_something() {
        const LIMIT: Duration = Duration::from_secs(60);
        let env = RealEnv::new();
        let waker = noop_waker();
        let mut task = Context::from_waker(&waker);
        let mut deadline = Deadline::default();
        let mut is_over_after = async |deadline: &mut Deadline, seconds: u32| {
            for _ in 0..seconds {
                tokio::time::sleep(Duration::from_secs(1)).await;
                if deadline.is_over(&env, LIMIT, &mut task) {
                    return true;
                }
            }
            false
        };
        // It owes something now and then, as every client does.
        for _ in 0..20 {
            assert!(!is_over_after(&mut deadline, 9).await);
            deadline.clear();
        }
        assert!(!is_over_after(&mut deadline, 59).await, "it has owed something for less than a minute");
        deadline.moved(1 << 20);
        assert!(!is_over_after(&mut deadline, 59).await, "it moves enough");
        assert!(is_over_after(&mut deadline, 17).await, "it is late by more than a part");
    }
}
