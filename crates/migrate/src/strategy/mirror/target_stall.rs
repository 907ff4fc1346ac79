//! A target that says nothing any more: the guest does not wait for it.
//!
//! ```text
//!              the guest waits, and nothing was answered for the limit
//!   heard ──────────────────────────────────────────────────────────────▶ silent
//!     ▲                                                                       │
//!     └── it answers anything: for a while it is called silent later only ◀───┘
//! ```
//!
//! While the target is silent its session goes on: a network or a server that was away for half a second has lost nothing.
//! A request that it does not answer is *left*, as if the target had failed the write. The source answers the guest,
//! and the chunk is absent, to be copied again. What the guest writes meanwhile to chunks that the target has is left
//! without being sent. A copy or a comparison that keeps the guest from an extent is left in the same way. So is a
//! flush of the guest's: the target is flushed again before it may hold the volume.
//!
//! A write that was left is still under way and may land at any time. Until it has landed it has a *turn* on its
//! extent, and no copy reads the extent before. Nobody mirrors to a chunk that is absent. So it never lands on anything
//! newer. A copy looks for turns when it has the extent's lock, and whoever takes a turn holds that lock, too.
//!
//! While any request that was left is under way the target is not called silent anew. If it answers nothing at all
//! meanwhile, it is lost. A target is also lost if it stays silent for its time for an answer, or if it answers others
//! and not what was left. A slow target answers something all the time, and the guest waits for it.
//!
//! The paper's mirror cannot leave a chunk, nor can one that has answered the guest already: their target is lost instead.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use block::{Error, ErrorKind, Extent, RangeGuard, RangeLock, Result};
use env::Moment;
use futures::future::{Either, select};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::error_budget::may_pass;
use super::filter::{CopyGuard, Shared};
use super::target_work::TargetWork;
use super::tracker::Mode;

/// A target that has answered is called silent later only for so many limits: mirroring converges between silences.
const REST_LIMITS: u32 = 40;
/// So many limits are later, and as many a target has that cannot be left.
const PATIENT_LIMITS: u32 = 3;

/// Whether the target of a session answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TargetStall {
    heard: Moment,
    since: Option<Moment>,
    not_before: Moment,
}

impl TargetStall {
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

    /// Whether what waits since `began` need not wait any more: it is silent. If not, when to ask again.
    pub(crate) fn ask(&mut self, now: Moment, began: Moment, limit: Duration) -> Result<(), Moment> {
        if self.since.is_some() {
            return Ok(());
        }
        let from = self.heard.max(began);
        let due = (from + limit).max(self.not_before).min(from + limit * PATIENT_LIMITS);
        if now < due {
            return Err(due);
        }
        self.since = Some(now);
        Ok(())
    }

    /// When whoever waits since `began` has waited for long without anything being answered.
    fn patient(&self, began: Moment, limit: Duration) -> Moment {
        self.heard.max(began) + limit * PATIENT_LIMITS
    }
}

/// Requests that were left while they were under way.
pub(crate) struct DetachedRequests {
    limit: Option<Duration>,
    /// Whether what a guest's write waits for is left; otherwise the target is lost.
    leaves: bool,
    turns: RangeLock,
    /// How many are under way.
    count: Arc<AtomicUsize>,
    /// What became of those that nobody has heard of yet.
    ended: Arc<Ended>,
}

#[derive(Default)]
struct Ended {
    list: Mutex<VecDeque<News>>,
    told: Notify,
}

/// What became of a request that was left.
struct News {
    session: u64,
    /// A flush, or a write that is one: what it did not make durable is lost.
    is_flush: bool,
    /// `None` if its time is over.
    outcome: Option<Result<()>>,
}

impl Ended {
    fn tell(&self, news: News) {
        self.list.lock().push_back(news);
        self.told.notify_one();
    }
}

impl DetachedRequests {
    /// The guest waits for no longer than `limit`; for as long as the target has for an answer if there is none.
    pub(crate) fn new(limit: Option<Duration>, leaves: bool) -> Self {
        Self { limit, leaves, turns: RangeLock::new(), count: Arc::default(), ended: Arc::default() }
    }

    /// Whether any is under way.
    pub(crate) fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }
}

/// What is asked of a target while a guest may wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// To write an extent whose lock the caller holds, durably or not.
    Write { extent: Extent, is_forced: bool },
    /// To say what it holds.
    Read,
    /// To make durable what it was written.
    Flush,
}

/// What became of that.
pub(crate) enum AtTarget<T = ()> {
    Answered(Result<T>),
    /// It is still under way, and nobody waits for it.
    Detached,
}

impl Shared {
    /// A request to the target of `session` has ended. A connection that is lost is no answer.
    pub(crate) fn note_answer<T>(&self, session: u64, outcome: &Result<T>) {
        let Some(limit) = self.detached.limit else { return };
        if outcome.as_ref().is_err_and(|error| !may_pass(error)) {
            return;
        }
        let now = self.env.now();
        let was_silent = self.tracker(|tracker| {
            let was_silent = tracker.target_stall.since().is_some();
            if tracker.is_current(session) {
                tracker.target_stall.answered(now, limit);
            }
            was_silent && tracker.target_stall.since().is_none()
        });
        if was_silent {
            tracing::info!(session, "the target answers again");
            self.detached.ended.told.notify_one();
        }
    }

    /// Whether the target is silent: nothing is begun there that a guest could come to wait for.
    pub(crate) fn is_target_stalled(&self) -> bool {
        self.tracker(|tracker| tracker.target_stall.since().is_some())
    }

    /// How long the guest waits for a target of which nothing is heard, if not for as long as that has for an answer.
    pub(crate) const fn stall_limit(&self) -> Option<Duration> {
        self.detached.limit
    }

    /// A guest may wait for `asked`: gives the target its time, which is over when it is silent.
    pub(crate) async fn finish_at_target<T: Send + 'static>(
        &self,
        target: TargetWork<T>,
        session: u64,
        asked: Asked,
    ) -> AtTarget<T> {
        let Some(limit) = self.detached.limit else {
            return AtTarget::Answered(self.finish_target(target, session).await);
        };
        let (mut ours, theirs) = handover(target);
        let waiting = self.finish_target(Box::pin(theirs), session);
        match select(pin!(waiting), pin!(self.slot_in_stall(session, asked, limit))).await {
            Either::Left((answer, _)) => AtTarget::Answered(answer),
            Either::Right((turn, _)) => {
                if let Some(target) = ours.take_back() {
                    self.leave(target, session, asked, turn);
                }
                AtTarget::Detached
            }
        }
    }

    /// Waits until the target of `session` is silent and `asked` may be left; gives a turn on what is written.
    async fn slot_in_stall(&self, session: u64, asked: Asked, limit: Duration) -> Option<RangeGuard> {
        let began = self.env.now();
        let may_leave = self.detached.leaves || asked == Asked::Flush;
        loop {
            let changed = self.changed();
            let now = self.env.now();
            let mut was_silent = false;
            let due = self.tracker(|tracker| {
                let is_the_sources = matches!(tracker.mode(), Mode::SourceHolds | Mode::FlushBoth);
                if !is_the_sources || !tracker.is_current(session) {
                    return None;
                }
                was_silent = tracker.target_stall.since().is_some();
                // So there are never more of them than were under way when the target fell silent.
                let is_anew = tracker.target_stall.since().is_none() && self.detached.any();
                Some(match may_leave && !is_anew {
                    true => tracker.target_stall.ask(now, began, limit).err(),
                    false => Some(tracker.target_stall.patient(began, limit)),
                })
            });
            match due {
                Some(None) => {
                    // Once: it wakes who waits here, too.
                    if !was_silent {
                        tracing::info!(session, ?asked, "the target is silent: the guest does not wait for it");
                        self.announce();
                        self.detached.ended.told.notify_one();
                    }
                    match asked {
                        Asked::Read | Asked::Flush => return None,
                        Asked::Write { extent, .. } => match self.detached.turns.try_exclusive(extent) {
                            Some(turn) => return Some(turn),
                            None => changed.await,
                        },
                    }
                }
                Some(Some(due)) if now >= due => self.fail_stalled(session, now.since(began)),
                Some(Some(due)) => _ = select(pin!(changed), self.env.sleep(due.since(now))).await,
                None => changed.await,
            }
        }
    }

    /// A guest has waited for the target for `span`, of which nothing was heard.
    fn fail_stalled(&self, session: u64, span: Duration) {
        let context = format!("the target has answered nothing for {span:?} that the guest has waited");
        self.fail_target(session, Error::new(ErrorKind::TimedOut, context));
    }

    /// Waits for `work`, which the target must do something for and a guest waits for: one that says nothing is lost.
    pub(crate) async fn or_fail_stalled<T>(&self, work: impl Future<Output = T>) -> T {
        let Some(limit) = self.detached.limit else { return work.await };
        let began = self.env.now();
        let watch = async {
            loop {
                let changed = self.changed();
                let now = self.env.now();
                let due = self.tracker(|tracker| {
                    let is_the_sources = matches!(tracker.mode(), Mode::SourceHolds | Mode::FlushBoth);
                    let number = tracker.session().filter(|_| is_the_sources)?.number;
                    Some((number, tracker.target_stall.patient(began, limit)))
                });
                match due {
                    Some((session, due)) if now >= due => self.fail_stalled(session, now.since(began)),
                    Some((_, due)) => _ = select(pin!(changed), self.env.sleep(due.since(now))).await,
                    None => changed.await,
                }
            }
        };
        match select(pin!(work), pin!(watch)).await {
            Either::Left((done, _)) => done,
            Either::Right((never, _)) => never,
        }
    }

    /// Lets a request go on by itself.
    fn leave<T: Send + 'static>(&self, target: TargetWork<T>, session: u64, asked: Asked, turn: Option<RangeGuard>) {
        let outliving_writes = (self.count_outliving(), OutlivingWrite::new(&self.detached.count));
        let (env, limit, ended) = (Arc::clone(&self.env), self.target_limit, Arc::clone(&self.detached.ended));
        let is_flush = matches!(asked, Asked::Flush | Asked::Write { is_forced: true, .. });
        self.env.spawn(Box::pin(async move {
            let outcome = match select(target, env.sleep(limit)).await {
                Either::Left((outcome, _)) => outcome,
                Either::Right(((), target)) => {
                    ended.tell(News { session, is_flush, outcome: None });
                    target.await
                }
            };
            drop((turn, outliving_writes));
            ended.tell(News { session, is_flush, outcome: Some(outcome.map(drop)) });
        }));
    }

    /// Hears of requests that were left and of silence that lasts, for as long as it is polled.
    pub(crate) async fn hear_detached(&self) {
        loop {
            let told = self.detached.ended.told.notified();
            let ended = std::mem::take(&mut *self.detached.ended.list.lock());
            if !ended.is_empty() {
                ended.into_iter().for_each(|news| self.hear(news));
                self.announce();
            }
            let silent = self.tracker(|tracker| {
                let number = tracker.session().map(|session| session.number)?;
                Some((number, tracker.target_stall.since()?))
            });
            let Some((session, since)) = silent else {
                told.await;
                continue;
            };
            let lasts = self.env.now().since(since);
            if lasts >= self.target_limit {
                self.fail_target(session, self.too_late());
                told.await;
            } else {
                select(pin!(told), self.env.sleep(self.target_limit - lasts)).await;
            }
        }
    }

    fn hear(&self, news: News) {
        let News { session, is_flush, outcome } = news;
        let Some(outcome) = outcome else { return self.fail_target(session, self.too_late()) };
        self.note_answer(session, &outcome);
        if let Err(error) = outcome
            && (is_flush || !may_pass(&error))
        {
            self.fail_target(session, error.wrap("mirroring to the target"));
        }
    }

    fn too_late(&self) -> Error {
        Error::new(ErrorKind::TimedOut, format!("the target has not answered for {:?}", self.target_limit))
    }

    /// Locks `extent` for a copy as [`lock_for_copy`](Self::lock_for_copy) does, when no write that was left is under way in it.
    pub(crate) async fn lock_for_lone_copy(&self, extent: Extent) -> Option<CopyGuard> {
        loop {
            let changed = self.changed();
            let guard = self.lock_for_copy(extent).await?;
            // Without a target there is nothing to wait for, and nothing is copied either.
            if self.detached.turns.is_free(extent) || self.tracker(|tracker| tracker.session().is_none()) {
                return Some(guard);
            }
            drop(guard);
            changed.await;
        }
    }
}

/// A request that one party waits for and another may take over.
fn handover<T: Send + 'static>(target: TargetWork<T>) -> (Ours<T>, impl Future<Output = Result<T>> + Send + 'static) {
    let place = Arc::new(Mutex::new(Some(target)));
    let ours = Ours(Arc::clone(&place));
    let theirs = std::future::poll_fn(move |context| match &mut *place.lock() {
        Some(target) => target.as_mut().poll(context),
        None => std::task::Poll::Pending,
    });
    (ours, theirs)
}

struct Ours<T>(Arc<Mutex<Option<TargetWork<T>>>>);

impl<T> Ours<T> {
    /// The request, if it is not over.
    fn take_back(&mut self) -> Option<TargetWork<T>> {
        self.0.lock().take()
    }
}

/// Counts one late write while it lives.
pub(super) struct OutlivingWrite(Arc<AtomicUsize>);

impl OutlivingWrite {
    pub(super) fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(count))
    }
}

impl Drop for OutlivingWrite {
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
        let mut target_stall = TargetStall::default();
        target_stall.answered(at(10_000), LIMIT);
        assert_eq!(target_stall.ask(at(10_000), at(9_990), LIMIT), Err(at(10_250)));
        target_stall.answered(at(10_200), LIMIT);
        assert_eq!(target_stall.ask(at(10_250), at(9_990), LIMIT), Err(at(10_450)));
        // Long after the last answer nothing was asked.
        assert_eq!(target_stall.ask(at(20_000), at(20_000), LIMIT), Err(at(20_250)));
        assert_eq!(target_stall.ask(at(20_250), at(20_000), LIMIT), Ok(()));
        assert_eq!(target_stall.ask(at(20_251), at(20_251), LIMIT), Ok(()));
        assert_eq!(target_stall.since(), Some(at(20_250)));
    }

    #[test]
    fn a_target_that_answers_again_is_given_some_time() {
        let mut target_stall = TargetStall::default();
        assert_eq!(target_stall.ask(at(300), at(50), LIMIT), Ok(()));
        target_stall.answered(at(500), LIMIT);
        assert_eq!((target_stall.since(), target_stall.ask(at(900), at(550), LIMIT)), (None, Err(at(1_300))));
        target_stall.answered(at(600), LIMIT);
        assert_eq!(target_stall.ask(at(1_349), at(550), LIMIT), Err(at(1_350)), "no longer than three limits");
        assert_eq!(target_stall.ask(at(10_600), at(10_400), LIMIT), Err(at(10_650)));
        assert_eq!(target_stall.ask(at(10_650), at(10_400), LIMIT), Ok(()));
    }
}
