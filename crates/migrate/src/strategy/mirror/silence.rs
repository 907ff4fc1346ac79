//! A target that says nothing any more: the guest does not wait for it.
//!
//! ```text
//!              a guest's write waits, and nothing was answered for the limit
//!   heard ──────────────────────────────────────────────────────────────────▶ silent
//!     ▲                                                                          │
//!     └────── it answers anything: it is not called silent again for a while ◀───┘
//! ```
//!
//! While the target is silent its session goes on: a network that was away for half a second has lost nothing. What it does
//! not answer is *left*: the source answers the guest, and the chunk is absent, to be copied again, as if the target had
//! failed the write. What the guest writes meanwhile to chunks that the target has is left without being sent.
//!
//! A write that was left is still under way and may land at any time. It has a *turn* on its extent until it has: no copy
//! reads the extent before, and a chunk that is absent is mirrored to by nobody, so nothing newer is ever there for it to land on.
//! A copy looks for turns when it has the extent's lock, which whoever takes one holds, too.
//!
//! While any of them is under way the target is not called silent anew. A slow target answers something all the time. One that
//! stays silent is lost after its time for an answer, or as soon as a request to it fails, as without this.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use block::{Error, ErrorKind, Extent, RangeGuard, RangeLock};
use env::Moment;
use futures::future::{Either, select};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::filter::{CopyGuard, Shared};
use super::patience::may_pass;
use super::target_work::TargetWork;
use super::tracker::Mode;

/// A target that has answered is not called silent again for so many limits: mirroring converges between silences.
const REST_LIMITS: u32 = 40;

/// Whether the target of a session answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Silence {
    heard: Moment,
    since: Option<Moment>,
    not_before: Moment,
}

impl Silence {
    /// The target has answered something.
    pub(crate) fn answered(&mut self, now: Moment, limit: Duration) {
        self.heard = self.heard.max(now);
        if self.since.take().is_some() {
            self.not_before = now + limit * REST_LIMITS;
        }
    }

    /// Since when it is silent.
    pub(crate) const fn since(&self) -> Option<Moment> {
        self.since
    }

    /// Whether a write that waits since `began` need not wait any more: it is silent. If not, when to ask again.
    pub(crate) fn ask(&mut self, now: Moment, began: Moment, limit: Duration) -> Result<(), Moment> {
        if self.since.is_some() {
            return Ok(());
        }
        let due = (self.heard.max(began) + limit).max(self.not_before);
        if now < due {
            return Err(due);
        }
        self.since = Some(now);
        Ok(())
    }
}

/// Writes that were left while they were under way.
pub(crate) struct LeftWrites {
    limit: Option<Duration>,
    turns: RangeLock,
    /// How many are under way.
    count: Arc<AtomicUsize>,
    /// How those ended that nobody has heard of yet, and of which session they were.
    ended: Arc<Ended>,
}

#[derive(Default)]
struct Ended {
    list: Mutex<VecDeque<(u64, block::Result<()>)>>,
    told: Notify,
}

impl LeftWrites {
    /// Writes are left after `limit`; never if there is none.
    pub(crate) fn new(limit: Option<Duration>) -> Self {
        Self { limit, turns: RangeLock::new(), count: Arc::default(), ended: Arc::default() }
    }
}

/// What became of a guest's write at the target.
pub(super) enum AtTarget {
    Answered(block::Result<()>),
    /// It is still under way, and nobody waits for it.
    Left,
}

impl Shared {
    /// A request to the target of `session` has ended. A connection that is lost is no answer.
    pub(crate) fn note_answer<T>(&self, session: u64, outcome: &block::Result<T>) {
        let Some(limit) = self.left.limit else { return };
        if outcome.as_ref().is_err_and(|error| !may_pass(error)) {
            return;
        }
        let now = self.env.now();
        let was_silent = self.tracker(|tracker| {
            let was_silent = tracker.silence.since().is_some();
            if tracker.is_current(session) {
                tracker.silence.answered(now, limit);
            }
            was_silent && tracker.silence.since().is_none()
        });
        if was_silent {
            tracing::info!(session, "the target answers again");
            self.left.ended.told.notify_one();
        }
    }

    /// The source has answered a guest's write of `extent`, whose lock the caller holds; gives the target its time, which is
    /// over when it is silent, unless the write `must_end`.
    pub(super) async fn finish_at_target(
        &self,
        target: TargetWork,
        session: u64,
        extent: Extent,
        must_end: bool,
    ) -> AtTarget {
        let Some(limit) = self.left.limit.filter(|_| !must_end) else {
            return AtTarget::Answered(self.finish_target(target, session).await);
        };
        let (mut ours, theirs) = handover(target);
        let waiting = self.finish_target(Box::pin(theirs), session);
        match select(pin!(waiting), pin!(self.turn_in_silence(session, extent, limit))).await {
            Either::Left((answer, _)) => AtTarget::Answered(answer),
            Either::Right((turn, _)) => {
                if let Some(target) = ours.take_back() {
                    self.leave(target, session, turn);
                }
                AtTarget::Left
            }
        }
    }

    /// Waits until the target of `session` is silent and its writes may be left; gives a turn on `extent`.
    async fn turn_in_silence(&self, session: u64, extent: Extent, limit: Duration) -> RangeGuard {
        let began = self.env.now();
        loop {
            let changed = self.changed();
            let now = self.env.now();
            let asked = self.tracker(|tracker| {
                let is_the_sources = matches!(tracker.mode(), Mode::SourceHolds | Mode::FlushBoth);
                if !is_the_sources || !tracker.is_current(session) {
                    return None;
                }
                let was_silent = tracker.silence.since().is_some();
                // So there are never more of them than the guest had under way when the target fell silent.
                if !was_silent && self.left.count.load(Ordering::Acquire) > 0 {
                    return None;
                }
                Some((tracker.silence.ask(now, began, limit), was_silent))
            });
            match asked {
                Some((Ok(()), was_silent)) => {
                    if !was_silent {
                        tracing::info!(session, "the target is silent: the guest's writes are left to the source");
                        self.announce();
                        self.left.ended.told.notify_one();
                    }
                    match self.left.turns.try_exclusive(extent) {
                        Some(turn) => return turn,
                        None => changed.await,
                    }
                }
                Some((Err(due), _)) => _ = select(pin!(changed), self.env.sleep(due.since(now))).await,
                None => changed.await,
            }
        }
    }

    /// Lets a write go on by itself.
    fn leave(&self, target: TargetWork, session: u64, turn: RangeGuard) {
        let late = (self.count_late(), Late::new(&self.left.count));
        let ended = Arc::clone(&self.left.ended);
        self.env.spawn(Box::pin(async move {
            let outcome = target.await;
            drop((turn, late));
            ended.list.lock().push_back((session, outcome));
            ended.told.notify_one();
        }));
    }

    /// Hears of writes that were left and of silence that lasts, for as long as it is polled.
    pub(crate) async fn hear_left(&self) {
        loop {
            let told = self.left.ended.told.notified();
            let ended = std::mem::take(&mut *self.left.ended.list.lock());
            if !ended.is_empty() {
                for (session, outcome) in ended {
                    self.note_answer(session, &outcome);
                    if let Err(error) = outcome
                        && !may_pass(&error)
                    {
                        self.fail_target(session, error.wrap("mirroring to the target"));
                    }
                }
                self.announce();
            }
            let silent = self.tracker(|tracker| {
                let number = tracker.session().map(|session| session.number)?;
                Some((number, tracker.silence.since()?))
            });
            let Some((session, since)) = silent else {
                told.await;
                continue;
            };
            let lasts = self.env.now().since(since);
            if lasts >= self.target_limit {
                let context = format!("the target has not answered for {:?}", self.target_limit);
                self.fail_target(session, Error::new(ErrorKind::TimedOut, context));
                told.await;
            } else {
                select(pin!(told), self.env.sleep(self.target_limit - lasts)).await;
            }
        }
    }

    /// Locks `extent` for a copy as [`lock_for_copy`](Self::lock_for_copy) does, when no write that was left is under way in it.
    pub(crate) async fn lock_for_copy_alone(&self, extent: Extent) -> Option<CopyGuard> {
        loop {
            let changed = self.changed();
            let guard = self.lock_for_copy(extent).await?;
            // Without a target there is nothing to wait for, and nothing is copied either.
            if self.left.turns.is_free(extent) || self.tracker(|tracker| tracker.session().is_none()) {
                return Some(guard);
            }
            drop(guard);
            changed.await;
        }
    }
}

/// A request that one party waits for and another may take over.
fn handover(target: TargetWork) -> (Ours, impl Future<Output = block::Result<()>> + Send) {
    let place = Arc::new(Mutex::new(Some(target)));
    let ours = Ours(Arc::clone(&place));
    let theirs = std::future::poll_fn(move |context| match &mut *place.lock() {
        Some(target) => target.as_mut().poll(context),
        None => std::task::Poll::Pending,
    });
    (ours, theirs)
}

struct Ours(Arc<Mutex<Option<TargetWork>>>);

impl Ours {
    /// The request, if it is not over.
    fn take_back(&mut self) -> Option<TargetWork> {
        self.0.lock().take()
    }
}

/// Counts one late write while it lives.
pub(super) struct Late(Arc<AtomicUsize>);

impl Late {
    pub(super) fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(count))
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> Moment {
        Moment(Duration::from_millis(milliseconds))
    }

    const LIMIT: Duration = Duration::from_millis(250);

    #[test]
    fn a_write_is_left_when_nothing_was_answered_since_it_began_or_for_the_limit_and_the_next_ones_at_once() {
        let mut silence = Silence::default();
        silence.answered(at(10_000), LIMIT);
        assert_eq!(silence.ask(at(10_000), at(9_990), LIMIT), Err(at(10_250)));
        silence.answered(at(10_200), LIMIT);
        assert_eq!(silence.ask(at(10_250), at(9_990), LIMIT), Err(at(10_450)));
        // Long after the last answer nothing was asked.
        assert_eq!(silence.ask(at(20_000), at(20_000), LIMIT), Err(at(20_250)));
        assert_eq!(silence.ask(at(20_250), at(20_000), LIMIT), Ok(()));
        assert_eq!(silence.ask(at(20_251), at(20_251), LIMIT), Ok(()));
        assert_eq!(silence.since(), Some(at(20_250)));
    }

    #[test]
    fn a_target_that_answers_again_is_given_some_time() {
        let mut silence = Silence::default();
        assert_eq!(silence.ask(at(300), at(50), LIMIT), Ok(()));
        silence.answered(at(500), LIMIT);
        assert_eq!((silence.since(), silence.ask(at(900), at(550), LIMIT)), (None, Err(at(10_500))));
        silence.answered(at(600), LIMIT);
        assert_eq!(silence.ask(at(10_600), at(10_400), LIMIT), Err(at(10_650)));
        assert_eq!(silence.ask(at(10_650), at(10_400), LIMIT), Ok(()));
    }
}
