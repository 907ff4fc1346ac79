//! The passes of a copy: what each begins with, what is decided at its end, and the last one while the guest is held.

use std::sync::Arc;
use std::time::Duration;

use block::{Bytes, Error, ErrorKind};
use env::Moment;
use futures::future::BoxFuture;

use super::passes::PassResult;
use super::switchover::micros;
use super::{Driver, TICK};
use crate::Event;
use crate::strategy::tracking::converge::{Convergence, PassDecision, Passed};
use crate::strategy::tracking::rates::Kind;

/// So many chunks become clean under one lock of the tracker; guest writes get in between.
const CLEAR_CHUNKS: u64 = 4096;

/// How fast copies of data were while some were under way.
#[derive(Debug, Default)]
pub(super) struct Busy {
    bytes: u64,
    time: Duration,
    since: Option<Moment>,
}

impl Busy {
    /// Copies are under way from now on, or not any more.
    pub(super) fn set(&mut self, now: Moment, is_busy: bool) {
        match (self.since, is_busy) {
            (None, true) => self.since = Some(now),
            (Some(since), false) => {
                self.time += now.since(since);
                self.since = None;
            }
            _ => {}
        }
    }

    /// A copy has ended.
    pub(super) const fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
    }
}

/// What a strategy in passes keeps beside the mirror's.
pub(super) struct Tracking {
    pub(super) convergence: Convergence,
    /// The next pass copies what was put off, too.
    with_all: bool,
    /// The guest is held for the last copy whatever that takes.
    forced: bool,
    /// Everything that can be compared while the guest writes has been.
    pub(super) is_compared: bool,
    busy: Busy,
    /// Since when the guest has been held.
    pub(super) held_since: Moment,
    /// When the pass under way began, and how many writes to chunks there had been.
    writes_from: (Moment, u64),
}

impl Tracking {
    pub(super) fn new(convergence: Convergence) -> Self {
        Self {
            convergence,
            with_all: false,
            forced: false,
            is_compared: false,
            busy: Busy::default(),
            held_since: Moment::default(),
            writes_from: <(Moment, u64)>::default(),
        }
    }
}

impl Driver {
    /// A pass over what is not in step begins, or goes on after an interruption.
    pub(super) async fn begin_pass(&mut self, held: bool) {
        if !self.passes.is_under_way() && self.tracking.is_some() {
            let with_all = held || self.tracking.as_ref().is_some_and(|tracking| tracking.with_all);
            self.tune_hot_chunks(with_all);
            self.get_and_clear(with_all).await;
        }
        if !self.passes.is_under_way() {
            self.begin_auto_pass();
        }
        let (had, dirty, copied) =
            self.mirror.tracker(|tracker| (tracker.bytes_in_step(), tracker.bytes_dirty().0, tracker.counts.copied));
        let bytes = (self.mirror.size - had).saturating_sub(dirty);
        self.passes.begin(self.env.now(), bytes.0, copied, held);
        if let Some(tracking) = &mut self.tracking {
            tracking.busy = Busy::default();
        }
    }

    /// Says which chunks count as hot in the pass that begins. That follows from how long the pass is expected to take,
    /// and from how fast chunks were written in the last one. In the first pass nothing is hot: its copies are the
    /// first ones.
    fn tune_hot_chunks(&mut self, with_all: bool) {
        let now = self.env.now();
        let Some(tracking) = &mut self.tracking else { return };
        let (since, before) = tracking.writes_from;
        let (is_first, convergence) = (self.passes.number() == 0, &tracking.convergence);
        tracking.writes_from.1 = self.mirror.tracker(|tracker| {
            let dirty = tracker.bytes_dirty().0;
            let Some(hot) = tracker.hot() else { return 0 };
            let rate = (hot.total() - before) as f64 / now.since(since).as_secs_f64().max(1e-6);
            if is_first || with_all || !convergence.defers() {
                hot.stop();
            } else {
                let threshold = hot.tune(convergence.pass_expected(dirty.0), rate);
                tracing::info!(?threshold, rate, "chunks that are written so often are put off");
            }
            hot.total()
        });
        tracking.writes_from.0 = now;
    }

    /// What is dirty becomes what this pass copies, a few chunks at a time.
    async fn get_and_clear(&mut self, with_deferred: bool) {
        let mut from = 0;
        loop {
            let cleared = self.mirror.tracker(|tracker| {
                let first = from;
                while from < first + CLEAR_CHUNKS {
                    match tracker.get_and_clear(from, CLEAR_CHUNKS, with_deferred) {
                        Some(run) => from = run.end,
                        None => return false,
                    }
                }
                true
            });
            if !cleared {
                break;
            }
            crate::pace::yield_now().await;
        }
        self.cursor = 0;
    }

    /// The pass is over, and `decision` is what was made of it.
    pub(super) fn end_pass(&mut self, decision: String) {
        let (deferred, copied) = self.mirror.tracker(|tracker| {
            (tracker.bytes_dirty().1.max(tracker.bytes_passed_and_deferred().0), tracker.counts.copied)
        });
        let dirty = self.bytes_left();
        let left = PassResult { copied, dirty, deferred: deferred.0.min(dirty) };
        self.passes.end(self.env.now(), left, decision);
    }

    /// Copies are under way or not, and one of `bytes` has ended.
    pub(super) fn note_busy(&mut self, is_busy: bool, bytes: u64) {
        let now = self.env.now();
        if let Some(Tracking { busy, .. }) = &mut self.tracking {
            busy.add(bytes);
            busy.set(now, is_busy);
        }
    }

    /// Whether the pass shall end before it is through: the time that the move was given is over.
    pub(super) fn is_too_late(&self) -> bool {
        let age = self.under_way.age(self.env.now());
        self.tracking.as_ref().is_some_and(|tracking| tracking.convergence.is_too_late(age))
    }

    /// A pass has copied all that it was to copy, or its time is over. Says how the move goes on; `None` is with the next
    /// pass.
    pub(super) async fn decide(&mut self) -> Option<Event> {
        let age = self.under_way.age(self.env.now());
        if self.mirror.tracker(|tracker| tracker.auto_passes()) {
            return self.end_auto_pass().await;
        }
        let (dirty, deferred) = (self.bytes_left(), self.mirror.tracker(|tracker| tracker.bytes_dirty().1));
        let Some(tracking) = &mut self.tracking else {
            self.end_pass("every chunk is on both sides".to_owned());
            return Some(Event::Copied);
        };
        let Tracking { busy, convergence, .. } = tracking;
        let kind = if self.passes.number() == 1 { Kind::Whole } else { Kind::Scattered };
        convergence.rates().note_pass(kind, busy.bytes, busy.time);
        let passed = Passed { age, dirty, deferred: deferred.0 };
        let (ruling, decision) = convergence.decide(passed);
        tracing::info!(pass = self.passes.number(), ?passed, decision, "a pass is over");
        tracking.with_all = ruling == PassDecision::GoOnWithAll;
        tracking.forced |= ruling == PassDecision::Force;
        self.end_pass(decision.clone());
        match ruling {
            PassDecision::Complete | PassDecision::Force => Some(Event::Copied),
            PassDecision::GoOn | PassDecision::GoOnWithAll => {
                self.begin_pass(false).await;
                None
            }
            PassDecision::Mirror => {
                self.tracking = None;
                // Nearly all of it a few chunks at a time, and what is written meanwhile at once.
                self.get_and_clear(true).await;
                self.mirror.mirror_from_now_on();
                self.begin_pass(false).await;
                None
            }
            PassDecision::Abort => {
                let context = format!("the move does not converge and ends here ({decision})");
                self.error = Some(Error::new(ErrorKind::NoConvergence, context));
                Some(Event::Broken)
            }
        }
    }

    /// Whether what is left can be copied while the guest is held, now that the target was flushed. `None` where nothing
    /// may be left.
    pub(super) fn fits_hold(&mut self) -> Option<bool> {
        let dirty = self.bytes_left();
        let Tracking { convergence, forced, .. } = self.tracking.as_mut()?;
        let fits = *forced || convergence.fits_hold(dirty);
        if !fits {
            convergence.note_miss();
            tracing::info!(dirty, "too much was written while the target was flushed; the guest is not held yet");
        }
        Some(fits)
    }

    /// Copies what is left while the guest is held, and flushes the target. The guest is let go when its time is over,
    /// with whatever is under way then.
    pub(super) async fn last_copy(&mut self) -> Event {
        let began = self.env.now();
        let forced = self.tracking.as_ref().is_none_or(|tracking| tracking.forced);
        let limits = self.tracking.as_ref().map(|Tracking { convergence, held_since, .. }| {
            let of_copy = convergence.copy_limit(forced);
            (*held_since + of_copy, *held_since + convergence.hold_limit(forced))
        });
        self.begin_pass(true).await;
        let bytes = self.passes.bytes();
        let event = match self.copy_held(limits.map(|(copied, _)| copied)).await {
            None => self.flush_held(limits.map(|(_, flushed)| flushed)).await,
            Some(event) => event,
        };
        let took = self.env.now().since(began);
        self.statistics.switchover.last_copy_us = micros(took);
        self.statistics.switchover.last_copy_bytes = bytes;
        self.statistics.switchover.window_us += micros(took);
        let event = match event {
            Event::CaughtUp => match self.settle_target().await {
                Event::Quiesced => Event::CaughtUp,
                // It takes too long while the guest is held.
                Event::NotQuiesced => Event::Missing,
                event => event,
            },
            event => event,
        };
        match event {
            Event::CaughtUp => self.end_pass(format!("switch over: {} were copied in {took:.0?}", Bytes(bytes))),
            Event::Missing => {
                self.note_stall();
                let copied = bytes - self.bytes_left().min(bytes);
                if let Some(tracking) = &mut self.tracking {
                    tracking.convergence.note_hold(copied, took, forced);
                    tracking.forced = false;
                }
                let done = Bytes(copied);
                let why = format!("{done} of {} were copied after {took:.0?}, and the guest was let go", Bytes(bytes));
                self.end_pass(format!("go on: {why}"));
            }
            _ => self.end_pass("the last copy was interrupted".to_owned()),
        }
        event
    }

    /// How long the guest is held for what the target needs before the commit. Others that switch over with it may copy for as
    /// long as this might have.
    pub(super) fn settle_limit(&self) -> Duration {
        let limit = self.options.commit_limit().min(self.options.stall_limit().unwrap_or(Duration::MAX));
        match &self.tracking {
            Some(Tracking { convergence, held_since, forced, .. }) if self.journal.is_of_group() => {
                let until = *held_since + convergence.hold_limit(*forced);
                until.since(self.env.now()).max(limit)
            }
            _ => limit,
        }
    }

    /// What is not in step.
    pub(super) fn bytes_left(&self) -> u64 {
        (self.mirror.size - self.mirror.tracker(|tracker| tracker.bytes_in_step())).0
    }

    async fn flush_held(&mut self, until: Option<Moment>) -> Event {
        let mirror = Arc::clone(&self.mirror);
        let mut flush: BoxFuture<'static, _> = Box::pin(async move { mirror.flush_target().await });
        let flushed = match until {
            Some(until) => env::timeout(&*self.env, until.since(self.env.now()), &mut flush).await,
            None => Some(flush.as_mut().await),
        };
        if flushed.is_none() {
            *self.pending_flush.get_mut() = Some(flush);
        }
        if let Some(event) = self.demand() {
            return event;
        }
        match flushed {
            Some(Ok(())) if self.is_settled() && self.mirror.tracker(|tracker| tracker.is_complete()) => {
                Event::CaughtUp
            }
            Some(Ok(())) | None => Event::Missing,
            Some(Err(error)) => {
                self.error = Some(error);
                Event::TargetFailed
            }
        }
    }

    /// Waits for what a last copy that was given up has left under way, while the guest works: nothing is copied twice at
    /// once. What comes of it is seen by the next pass.
    pub(super) async fn end_left_over(&mut self) {
        if let Some(mut flush) = self.pending_flush.get_mut().take() {
            // One that fails has dropped the target, which is seen next.
            while env::timeout(&*self.env, TICK, &mut flush).await.is_none() {
                self.abort_if_cancelled();
                self.tick();
            }
        }
        if let Some(copies) = self.left_over.get_mut().take() {
            self.end_copies(copies).await;
        }
    }
}
