//! The end of a move that the target does not answer: nobody waits for it.

use std::pin::pin;
use std::time::Duration;

use futures::future::{Either, select};

use super::{Driver, TICK};
use crate::Event;

/// What is under way at the target has so long to end by itself when the move ends.
const PARTING_LIMIT: Duration = Duration::from_millis(500);

impl Driver {
    /// Looks whether anything ends the current activity, and sees to its end.
    pub(super) fn look_for_end(&mut self, stop: &mut Option<Event>) {
        *stop = stop.or_else(|| self.demand());
        self.abort_if_stopped(*stop);
    }

    /// The current activity ends by `event` as soon as what is under way has. If the move ends with it, what the target does
    /// not answer soon goes on by itself.
    fn abort_if_stopped(&mut self, event: Option<Event>) {
        if !matches!(event, Some(Event::Cancel | Event::Broken)) {
            self.parting = None;
            return;
        }
        let now = self.env.now();
        let since = *self.parting.get_or_insert(now);
        // Once: the end of a session is announced, which wakes this driver, too.
        if now.since(since) >= PARTING_LIMIT && self.mirror.tracker(|tracker| tracker.session().is_some()) {
            self.mirror.end_session();
        }
    }

    /// The same where no activity can end.
    pub(super) fn abort_if_cancelled(&mut self) {
        let is_cancelled = self.control.requests().cancel && self.machine.phase().can_cancel();
        self.abort_if_stopped(is_cancelled.then_some(Event::Cancel));
    }

    /// Waits for `work`, which ends with the target's session at the latest.
    pub(super) async fn with_target<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            if let Either::Left((done, _)) = select(work.as_mut(), pin!(self.wait(TICK))).await {
                return done;
            }
            self.abort_if_cancelled();
            self.tick();
        }
    }
}
