//! The guest's path while a migration runs: reads from the source, writes to the source and, where the target is in
//! step, to both.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use block::{
    Bytes, ChunkSize, Device, Error, ErrorKind, Extent, Mutation, MutationKind, RangeGuard, RangeLock, Result,
};
use env::{EnvRef, Moment};
use filters::ReadCache;
use futures::future::{Either, select};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::error_budget::may_pass;
use super::target_stall::{Asked, AtTarget, DetachedRequests, OutlivingWrite};
use super::target_work::{TargetWork, flush_of, write_parts};
use super::tracker::{Mode, Session, Tracker, WritePlan};
use super::write_buffer::WriteBuffer;
use crate::control::Control;
use crate::reduce::skip::Skip;
use crate::schedule::{GuestListener, GuestRequest, HeardRequest};
use crate::{MoveOptions, ProgressMap};

/// A mirror over source and target. Clones are the same mirror: one is the guest's device, one the driver's.
#[derive(Clone)]
pub(crate) struct Mirror {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) env: EnvRef,
    pub(crate) source: Device,
    /// What a copy reads the source by.
    pub(crate) copy_face: Device,
    /// What a comparison reads the source by: no cache is between the two.
    pub(crate) comparison_face: Device,
    /// What of the source is in memory, where that is kept.
    pub(crate) read_cache: Option<ReadCache>,
    pub(crate) size: Bytes,
    pub(crate) chunk: ChunkSize,
    pub(crate) lock: RangeLock,
    /// Of an asynchronous mirror.
    pub(crate) write_buffer: Option<WriteBuffer>,
    pub(crate) map: Option<ProgressMap>,
    tracker: Mutex<Tracker>,
    /// The target answers reads, too.
    pub(super) reads_target: AtomicBool,
    /// Guest writes are tracked, and need not have their extents alone.
    tracks: AtomicBool,
    /// Told of every change of mode or session. Wakes waiters in the order in which they came. A channel of tokio's
    /// wakes them in a random order, and a seed would not repeat a run.
    changes: Notify,
    /// Writes to a target that was given up while they were under way.
    outliving_writes: Arc<AtomicUsize>,
    /// Requests that were left although their target goes on.
    pub(super) detached: DetachedRequests,
    pub(super) target_limit: Duration,
    /// How often the target is flushed.
    pub(crate) flush_interval: Duration,
    /// One flush of the target by the driver at a time.
    pub(crate) flushing: tokio::sync::Mutex<()>,
    /// What the target or the progress map has failed with, until the driver takes it.
    failures: Mutex<Failures>,
    /// The progress map has failed: guest writes wait, with their extents locked, for the end of the job.
    has_map_failed: AtomicBool,
    control: Control,
    /// Says what need not be sent.
    pub(crate) skip: Arc<dyn Skip>,
    /// What hears of guest requests, if a schedule wants to.
    listener: Option<Arc<dyn GuestListener>>,
}

/// Failures that the guest does not see: those of the target and of the progress map.
#[derive(Default)]
pub(crate) struct Failures {
    pub(crate) target: Option<Error>,
    pub(crate) map: Option<Error>,
}

impl Mirror {
    pub(crate) fn new(
        env: EnvRef,
        source: Device,
        tracker: Tracker,
        chunk: ChunkSize,
        map: Option<ProgressMap>,
        options: &MoveOptions,
        control: Control,
    ) -> Self {
        let tracks = AtomicBool::new(tracker.tracks());
        let shared = Shared {
            env,
            size: source.size(),
            copy_face: source.clone(),
            comparison_face: source.clone(),
            read_cache: None,
            source,
            chunk,
            lock: RangeLock::new(),
            write_buffer: options.buffer().map(WriteBuffer::new),
            map,
            tracker: Mutex::new(tracker),
            reads_target: AtomicBool::new(false),
            tracks,
            changes: Notify::new(),
            outliving_writes: Arc::default(),
            detached: DetachedRequests::new(options.stall_limit(), options.strategy.leaves_chunks()),
            target_limit: options.target_limit(),
            flush_interval: options.flush_interval(),
            flushing: tokio::sync::Mutex::default(),
            failures: Mutex::default(),
            has_map_failed: AtomicBool::new(false),
            control,
            skip: crate::reduce::skip::of(options.skip_zero),
            listener: None,
        };
        Self { shared: Arc::new(shared) }
    }

    /// Has `listener` told of guest requests. Said before anybody else has the mirror.
    #[must_use]
    pub(crate) fn heard_by(mut self, listener: Option<Arc<dyn GuestListener>>) -> Self {
        Arc::get_mut(&mut self.shared).expect("nobody else has it yet").listener = listener;
        self
    }

    /// Has copies and comparisons read the source by `copy_face`. Said before anybody else has the mirror.
    #[must_use]
    pub(crate) fn reading_by(mut self, copy_face: Option<Device>) -> Self {
        let shared = Arc::get_mut(&mut self.shared).expect("nobody else has it yet");
        if let Some(copy_face) = copy_face {
            (shared.comparison_face, shared.copy_face) = (copy_face.clone(), copy_face);
        }
        self
    }

    /// Tells whoever listens of a guest request, until what this gives is dropped.
    pub(super) fn hear(&self, extent: Extent, is_write: bool) -> Option<HeardRequest> {
        let listener = self.shared.listener.as_ref()?;
        Some(HeardRequest::begin(listener, GuestRequest { extent, is_write }))
    }
}

impl Shared {
    /// Looks at or changes the tracker. Never held across a wait.
    pub(crate) fn tracker<T>(&self, work: impl FnOnce(&mut Tracker) -> T) -> T {
        work(&mut self.tracker.lock())
    }

    /// Changes who answers the guest.
    pub(crate) fn set_mode(&self, mode: Mode) {
        let mut tracker = self.tracker.lock();
        tracker.set_mode(mode);
        self.tracks.store(tracker.tracks(), Ordering::Release);
        drop(tracker);
        self.reads_target.store(mode == Mode::TargetHolds, Ordering::Release);
        self.announce();
    }

    /// Mirrors what was tracked until now. No copy may be under way.
    pub(crate) fn mirror_from_now_on(&self) {
        let mut tracker = self.tracker.lock();
        tracker.mirror_from_now_on();
        self.tracks.store(false, Ordering::Release);
        drop(tracker);
        self.announce();
    }

    /// Waits for the target no more. The mirror is dropped next, and what the target may have lost with it.
    pub(crate) fn end_session(&self) {
        let buffered = self.tracker(Tracker::drop_session);
        drop(buffered);
        self.announce();
    }

    /// Drops the mirror; the guest's writes are tracked from now on. What the target may have lost must be copied again.
    pub(crate) async fn drop_session(&self) {
        self.end_session();
        self.in_parts(0, Tracker::forget_unflushed).await;
    }

    /// Mirrors guest writes at once from now on, or buffers them again.
    pub(crate) fn write_through(&self, through: bool) {
        self.tracker(|tracker| tracker.write_through(through));
        self.announce();
    }

    /// Goes on with a target.
    pub(crate) fn begin_session(&self, target: Device, empty: bool) {
        self.tracker.lock().begin_session(target, empty);
        self.announce();
    }

    pub(super) fn announce(&self) {
        self.changes.notify_waiters();
        if let Some(write_buffer) = &self.write_buffer {
            write_buffer.announce();
        }
        self.control.shared.signal.notify_one();
    }

    /// What has failed since this was last asked.
    pub(crate) fn take_failures(&self) -> Failures {
        std::mem::take(&mut *self.failures.lock())
    }

    /// Ends with the next change of mode or session.
    pub(super) fn changed(&self) -> impl Future<Output = ()> + '_ {
        self.changes.notified()
    }

    /// Counts a write as late for as long as what this gives lives.
    pub(super) fn count_outliving(&self) -> OutlivingWrite {
        OutlivingWrite::new(&self.outliving_writes)
    }

    /// Whether requests to a target that was given up, or that were left, are still under way.
    pub(crate) fn has_outliving_writes(&self) -> bool {
        self.outliving_writes.load(Ordering::Acquire) > 0
    }

    /// The target of `session` has failed. Where the source alone may answer, the mirror is dropped at once; in doubt
    /// that is for the driver to settle first.
    pub(crate) fn fail_target(&self, session: u64, error: Error) {
        let mut tracker = self.tracker.lock();
        if !tracker.is_current(session) || tracker.mode() == Mode::TargetHolds {
            return;
        }
        tracing::warn!(session, error = error.chain(), "the target has failed");
        let buffered = (tracker.mode() != Mode::InDoubt).then(|| tracker.drop_session());
        drop(tracker);
        drop(buffered);
        self.failures.lock().target.get_or_insert(error);
        self.announce();
    }

    /// Whether the mirror goes on although a request to the target of `session` ended with `error`. Not for a flush: what
    /// it did not make durable is lost.
    pub(crate) fn bears_failure(&self, session: u64, error: &Error) -> bool {
        let is_borne = may_pass(error) && self.tracker.lock().bears_failure(session, self.env.now());
        if is_borne {
            tracing::info!(
                session,
                error = error.chain(),
                "the target has failed a request; the chunk is copied again"
            );
        }
        is_borne
    }

    /// The progress map cannot be written: the job must end, because a crash could not be survived.
    pub(crate) fn fail_map(&self, error: Error) {
        self.failures.lock().map.get_or_insert(error);
        self.has_map_failed.store(true, Ordering::Release);
        self.announce();
    }

    /// Locks `extent` for a copy or a comparison. None when the progress map has failed. Then a guest write that waits
    /// for the end of the job may hold the extent. The job does not end before this call has.
    pub(crate) async fn lock_for_job(&self, extent: Extent) -> Option<RangeGuard> {
        let failed = async {
            loop {
                let changed = self.changes.notified();
                if self.has_map_failed.load(Ordering::Acquire) {
                    return;
                }
                changed.await;
            }
        };
        match select(pin!(self.lock.exclusive(extent)), pin!(failed)).await {
            Either::Left((guard, _)) => Some(guard),
            Either::Right(_) => None,
        }
    }

    /// Waits until `is_over` holds of mode and session.
    pub(super) async fn wait_until(&self, is_over: impl Fn(&Tracker) -> bool) {
        loop {
            let changed = self.changes.notified();
            if is_over(&self.tracker.lock()) {
                return;
            }
            changed.await;
        }
    }

    /// Carries out a write as one. What the target has of it may be left to the source with `leaves`.
    pub(super) async fn write_piece(&self, mutation: Mutation, writer: Writer, leaves: bool) -> Result<()> {
        let extent = mutation.extent();
        // A discard leaves the two sides free to differ, so both are told to read as zeroes.
        let mutation = match mutation.kind() {
            MutationKind::Discard => Mutation::zeroes(extent, true).with_fua(mutation.fua),
            _ => mutation,
        };
        if self.tracks.load(Ordering::Acquire)
            && let Some(answer) = Box::pin(self.tracked_write(&mutation, writer)).await
        {
            return answer;
        }
        if let Some(write_buffer) = &self.write_buffer
            && let Some(answer) = Box::pin(self.buffered_write(write_buffer, &mutation)).await
        {
            return answer;
        }
        let _guard = match self.lock.try_exclusive(extent) {
            Some(guard) => guard,
            None => self.lock.exclusive(extent).await,
        };
        if self.write_buffer.is_some() {
            // What was buffered before comes before.
            self.written_back_or_lost(extent).await;
        }
        let plan = self.tracker.lock().plan_write(extent, leaves);
        let mut finish = Finish { shared: self, plan: &plan, may_differ: true };
        if !plan.activate.is_empty()
            && let Err(error) = self.activate(&plan.activate, writer).await
        {
            // It has reached neither side.
            finish.may_differ = false;
            return Err(error);
        }
        // The session may have ended during the wait for the activity log. Then its target is not in use any more, or
        // another session will copy these chunks again.
        let (is_current, mode, began) = {
            let tracker = self.tracker.lock();
            let is_current = plan.mirror.as_ref().is_some_and(|(session, _)| tracker.is_current(session.number));
            (is_current, tracker.mode(), tracker.weighs().then(|| self.env.now()))
        };
        let Some((session, parts)) = plan.mirror.as_ref().filter(|_| is_current) else {
            let is_mirrored = plan.mirror.is_some();
            let answer = self.source.write(mutation).await;
            // A flush that succeeded before the session ended has made the target of before count as in step.
            finish.may_differ = answer.is_err() || is_mirrored;
            return answer;
        };
        if mode == Mode::TargetHolds {
            // A commit that was in doubt is settled, and the guest has not been swapped over yet: the source is frozen.
            assert!(
                *parts == [extent],
                "the target holds the volume, and {extent} is not all of what is there: {parts:?}"
            );
            let answer = write_parts(session.target.clone(), parts, &mutation).await;
            finish.may_differ = answer.is_err();
            return answer;
        }
        let force = mutation.fua && plan.force_target;
        let target = write_parts(session.target.clone(), parts, &mutation.clone().with_fua(force));
        let (source, at_target) = self.write_both((&mutation, extent), (target, force), session.number, began).await;
        let (missed, mut target) = match at_target {
            AtTarget::Detached => (true, Err(super::session::given_up())),
            AtTarget::Answered(Ok(())) => (false, Ok(())),
            // A forced write that fails may be a flush that failed, and is never tolerated.
            AtTarget::Answered(Err(error)) => (!force && self.bears_failure(session.number, &error), Err(error)),
        };
        finish.may_differ = source.is_err() || target.is_err();
        // Noted before the guest is answered, and while nobody else can reach the extent.
        drop(finish);
        if source.is_err() && self.tracker.lock().mode() == Mode::InDoubt {
            // The two sides may differ here, so the commit must not be stored again: the doubt is settled for the source.
            let context = "the source failed a write while the commit was in doubt, so the two sides may differ";
            self.fail_target(session.number, Error::new(ErrorKind::Io, context));
        }
        if missed {
            self.tracker.lock().counts.missed += 1;
            target = Ok(());
        }
        let again = || write_parts(session.target.clone(), parts, &mutation);
        let answer = self.settle(session, source, target, again).await;
        if mutation.fua && !plan.force_target && answer.is_ok() {
            return self.force_afterwards(session, mutation).await;
        }
        answer
    }

    /// A write that goes to the source alone and is tracked; `None` if it must be mirrored after all.
    async fn tracked_write(&self, mutation: &Mutation, writer: Writer) -> Option<Result<()>> {
        let extent = mutation.extent();
        let _guard = self.lock.shared(extent).await;
        let plan = self.tracker.lock().plan_tracked(extent)?;
        // Marked again when this is dropped: before the guest is answered, and while nobody can have the extent alone.
        let _finish = Finish { shared: self, plan: &plan, may_differ: false };
        if !plan.activate.is_empty()
            && let Err(error) = self.activate(&plan.activate, writer).await
        {
            return Some(Err(error));
        }
        Some(self.source.write(mutation.clone()).await)
    }

    /// Locks `extent` for a copy, or does not where guest writes are tracked. `None` as with
    /// [`lock_for_job`](Self::lock_for_job).
    pub(crate) async fn lock_for_copy(&self, extent: Extent) -> Option<CopyGuard> {
        match self.tracks.load(Ordering::Acquire) {
            true => Some(CopyGuard(None)),
            false => self.lock_for_job(extent).await.map(|guard| CopyGuard(Some(guard))),
        }
    }

    /// Makes sure of the activity log before a write is issued. If the log cannot be written, a crash of this process
    /// could lose what this write changes. So a guest's write waits until the driver has ended the job on record, or
    /// the commit counts after all. The job's own write is refused, because the driver waits for it.
    pub(super) async fn activate(&self, numbers: &[u64], writer: Writer) -> Result<()> {
        let Some(map) = &self.map else { return Ok(()) };
        let Err(error) = map.activate(numbers).await else {
            self.tracker.lock().activated(numbers);
            return Ok(());
        };
        let refusal = Error::new(error.kind(), format!("the progress map cannot be written: {}", error.chain()));
        self.fail_map(error);
        if writer == Writer::Job {
            return Err(refusal);
        }
        self.wait_until(|tracker| matches!(tracker.mode(), Mode::Detached | Mode::TargetHolds)).await;
        Ok(())
    }

    /// A forced write began when the source alone was forced, and ends when both must be: the target is flushed.
    pub(super) async fn force_afterwards(&self, session: &Session, mutation: Mutation) -> Result<()> {
        if !self.tracker.lock().mode().flushes_both() {
            return Ok(());
        }
        let target = session.target.clone();
        let flush = || flush_of(target.clone());
        let extent = mutation.extent();
        let nothing = async { Ok(()) };
        let (source, target) = self.flush_both(nothing, flush(), session.number).await;
        self.settle(session, source, target.map_err(|error| error.wrap(format!("forcing {extent}"))), flush).await
    }

    pub(super) async fn guest_flush(&self) -> Result<()> {
        let (session, mode) = {
            let tracker = self.tracker.lock();
            (tracker.mode().flushes_both().then(|| tracker.session().cloned()).flatten(), tracker.mode())
        };
        let Some(session) = session else { return self.source.flush().await };
        if mode == Mode::TargetHolds {
            return session.target.flush().await;
        }
        let flush = || flush_of(session.target.clone());
        let (source, target) = self.flush_both(self.source.flush(), flush(), session.number).await;
        self.settle(&session, source, target, flush).await
    }

    /// What the guest is told, given what both sides have said. `again` asks the target once more. That is for a target
    /// that was lost while it was in doubt who holds the volume. If the target turns out to hold it, it is there again.
    async fn settle(
        &self,
        session: &Session,
        source: Result<()>,
        target: Result<()>,
        again: impl FnOnce() -> TargetWork,
    ) -> Result<()> {
        let target_failed = match &target {
            Ok(()) => false,
            Err(error) => {
                let copy = Error::new(error.kind(), format!("mirroring to the target: {}", error.chain()));
                self.fail_target(session.number, copy);
                true
            }
        };
        if target_failed {
            // In doubt the target may be the one that counts: nothing is answered before that is settled.
            self.wait_until(|tracker| tracker.mode() != Mode::InDoubt).await;
        }
        let holds = self.tracker.lock().mode() == Mode::TargetHolds;
        match holds {
            true if target_failed => again().await,
            true => target,
            false => source,
        }
    }

    /// Writes to both sides, and tells how long that has taken if it `began` at a moment that matters. The target's part may be
    /// left when the target is silent.
    async fn write_both(
        &self,
        (mutation, extent): (&Mutation, Extent),
        (target, is_forced): (TargetWork, bool),
        session: u64,
        began: Option<Moment>,
    ) -> (Result<()>, AtTarget) {
        let mut source_took = None;
        let source = async {
            let answer = self.source.write(mutation.clone()).await;
            source_took = began.map(|began| self.env.now().since(began));
            answer
        };
        let answers = match select(pin!(source), target).await {
            Either::Left((source, target)) => {
                (source, self.finish_at_target(target, session, Asked::Write { extent, is_forced }).await)
            }
            Either::Right((target, source)) => {
                self.note_answer(session, &target);
                (source.await, AtTarget::Answered(target))
            }
        };
        if let (Some(began), Some(source_took)) = (began, source_took) {
            let both_took = self.env.now().since(began);
            self.tracker(|tracker| tracker.weigh(source_took, both_took));
        }
        answers
    }

    /// Flushes both sides, until the target's session ends at the latest. What the target is still doing then goes on by
    /// itself. A target that is silent is flushed again before it may hold the volume.
    async fn flush_both(
        &self,
        source: impl Future<Output = Result<()>> + Send,
        target: TargetWork,
        session: u64,
    ) -> (Result<()>, Result<()>) {
        if self.tracker(|tracker| tracker.detach_flush_in_stall()) {
            return (source.await, Ok(()));
        }
        match select(pin!(source), target).await {
            Either::Left((source, target)) => match self.finish_at_target(target, session, Asked::Flush).await {
                AtTarget::Answered(target) => (source, target),
                AtTarget::Detached => {
                    self.tracker(Tracker::detach_flush);
                    (source, Ok(()))
                }
            },
            Either::Right((target, source)) => {
                self.note_answer(session, &target);
                (source.await, target)
            }
        }
    }

    /// Waits until a target that was asked something when it `began` must have answered, and gives how long that is. In doubt
    /// the guest waits for it, and nothing may be left.
    async fn wait_for_answer(&self, began: Moment) -> Duration {
        loop {
            let changed = self.changed();
            let in_doubt = self.tracker.lock().mode() == Mode::InDoubt;
            let limit = self.stall_limit().filter(|_| in_doubt).unwrap_or(self.target_limit);
            let (now, due) = (self.env.now(), began + limit);
            if now >= due {
                return limit;
            }
            select(pin!(changed), self.env.sleep(due.since(now))).await;
        }
    }

    /// The source has answered; gives the target its time.
    pub(crate) async fn finish_target<T: Send + 'static>(&self, mut target: TargetWork<T>, session: u64) -> Result<T> {
        if let std::task::Poll::Ready(outcome) = futures::poll!(&mut target) {
            self.note_answer(session, &outcome);
            return outcome;
        }
        let gone = |tracker: &Tracker| !tracker.is_current(session) && tracker.mode() != Mode::TargetHolds;
        let given_up = async {
            let slow = async {
                let limit = self.wait_for_answer(self.env.now()).await;
                let context = format!("the target has not answered for {limit:?}");
                self.fail_target(session, Error::new(ErrorKind::TimedOut, context));
                // In doubt, or when the target holds the volume, slowness does not end the wait.
                std::future::pending::<()>().await;
            };
            select(pin!(slow), pin!(self.wait_until(gone))).await;
        };
        match select(&mut target, pin!(given_up)).await {
            Either::Left((outcome, _)) => {
                self.note_answer(session, &outcome);
                return outcome;
            }
            Either::Right(_) => {}
        }
        let outliving_writes = self.count_outliving();
        self.env.spawn(Box::pin(async move {
            let _late = outliving_writes;
            // Whatever it says is too late to matter: its session is over and its chunks will be copied again.
            let _ = target.await;
        }));
        Err(super::session::given_up())
    }
}

/// Who writes through the mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writer {
    /// Must not see an error that is not the volume's, and can wait for the end of the job.
    Guest,
    /// Is waited for by the end of the job.
    Job,
}

/// What a copy holds while it reads: its extent, or nothing where writes meanwhile are seen by their marks.
pub(crate) struct CopyGuard(#[expect(dead_code, reason = "held until it is dropped")] Option<RangeGuard>);

/// Ends a guest write in the tracker, however the write ends.
pub(super) struct Finish<'a> {
    pub(super) shared: &'a Shared,
    pub(super) plan: &'a WritePlan,
    pub(super) may_differ: bool,
}

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.shared.tracker.lock().finish_write(self.plan, self.may_differ);
    }
}
