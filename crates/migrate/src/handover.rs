//! Handing a volume over that lies where the other host reaches it, too: nothing is copied.
//!
//! ```text
//!   asking ──▶ waiting for those that switch over with it ──▶ held, drained, flushed ──▶ commit ──▶ the guest is let go
//!     ▲  │ lost               │ put off, does not drain           │    │                  │ failed      on the target
//!     │  ▼                    ▼                                   │    ▼                  ▼
//!   lost ◀────────────────────┴───────────────────────────────────┘  asking again   taken back, still held
//! ```
//!
//! There is one copy of the bytes. So the guest works on the source until it is held, and on nothing until it is known who
//! holds the volume: a commit in doubt is taken back, or counts, while the guest waits. Once the guest is let go on the target
//! nothing of this host writes there any more: what it had under way was answered and flushed before the commit.
//!
//! A flush that fails tells of a loss, and some devices tell of each loss once. The hand-over flushes the source for itself, so the guest has
//! not heard of what such a flush says. Whoever made the source is told, also when nobody waits for that flush any more: the guest's next one
//! fails.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use block::{Device, Error, ErrorKind, Quiesced, Slot};
use env::{EnvRef, Moment};
use futures::future::{Either, select};

use crate::control::Control;
use crate::driver::{STALL_TAIL, micros};
use crate::pace::PauseLimit;
use crate::{Failure, GuestMeter, JobJournal, MoveOptions, Outcome, Phase, Progress, Report, Switchover, UnderWay};

/// How often requests to the move are looked at.
const TICK: Duration = Duration::from_millis(50);
/// After a guest that did not drain, or a store that has failed.
const REST: Duration = Duration::from_millis(100);

/// The hand-over of one volume.
pub struct Handover;

/// What a hand-over works with.
pub struct HandoverContext {
    /// Clock, tasks, randomness.
    pub env: EnvRef,
    /// The joint of the guest's stack: its device is [`source`](Self::source), and [`target`](Self::target) after the commit.
    pub slot: Slot,
    /// What holds the volume now.
    pub source: Device,
    /// What reaches it through the other host. It is asked for nothing before the commit.
    pub target: Device,
    /// What the job's record says: a move that was being undone ([`Phase::Cancelling`]) is undone.
    pub phase: Phase,
    /// Since when the move has been under way.
    pub under_way: UnderWay,
    /// Where the commit is made durable.
    pub journal: Arc<dyn JobJournal>,
    /// What the guest feels.
    pub meter: Option<Arc<dyn GuestMeter>>,
    /// Lets go of the source: called once, after the commit, with the guest held. No handle of it is here any more then.
    pub let_go: Box<dyn FnOnce() + Send + Sync>,
    /// Has the guest's next flush of the source fail: one that it has not asked for has told of a loss.
    pub flush_failed: Arc<dyn Fn() + Send + Sync>,
}

/// What came of one attempt.
enum Attempt {
    Switched,
    /// Another one may succeed.
    PutOff,
    /// The other host is not reached.
    Lost(Error),
    Cancelled,
    Failed(Error),
}

struct Driver {
    context: HandoverContext,
    options: MoveOptions,
    control: Control,
    began: Moment,
    hold: PauseLimit,
    /// Held by each flush of the source in turn: once one has ended none that came before it has the source open.
    flushing: Arc<tokio::sync::Mutex<()>>,
    progress: Progress,
    switchover: Switchover,
    error: Option<Error>,
}

impl Handover {
    /// Gives the handle that steers the hand-over, and the work itself, which the caller drives to its end. Dropping the work is
    /// the same as a crash.
    ///
    /// # Errors
    /// The target cannot hold what the source does.
    pub fn start(
        context: HandoverContext,
        options: MoveOptions,
    ) -> block::Result<(Control, impl Future<Output = Outcome> + Send + 'static)> {
        options.check()?;
        crate::migration::check_target(&context.source, &context.target)?;
        let progress = Progress { bytes_total: context.source.size().get(), ..Progress::default() };
        let control = Control::new(progress.clone(), &options);
        if context.phase == Phase::Cancelling {
            control.cancel()?;
        }
        let driver = Driver {
            began: context.env.now(),
            hold: PauseLimit::new(options.quiesce_limit()),
            flushing: Arc::default(),
            context,
            options,
            control: control.clone(),
            progress,
            switchover: Switchover::default(),
            error: None,
        };
        Ok((control, driver.run()))
    }
}

impl Driver {
    async fn run(mut self) -> Outcome {
        loop {
            match self.attempt().await {
                Attempt::Switched => return Outcome::Switched(self.report(Phase::Done)),
                Attempt::PutOff => {
                    self.context.journal.put_off();
                    self.wait(REST).await;
                }
                Attempt::Lost(error) => {
                    self.context.journal.put_off();
                    self.progress.target_losses += 1;
                    self.progress.error = Some(Failure::from(&error));
                    self.error = Some(error);
                    if self.await_target().await {
                        return self.cancelled().await;
                    }
                }
                Attempt::Cancelled => return self.cancelled().await,
                Attempt::Failed(error) => {
                    self.context.journal.failed(&error, false);
                    self.record(Phase::Cancelling).await;
                    self.progress.error = Some(Failure::from(&error));
                    let report = self.report(Phase::Failed);
                    return Outcome::Failed { error, report };
                }
            }
        }
    }

    async fn cancelled(mut self) -> Outcome {
        // What a flush under way says is heard: the tasks of this move may end with it.
        let flushing = Arc::clone(&self.flushing);
        env::timeout(&*self.context.env, self.options.target_limit(), flushing.lock()).await;
        self.record(Phase::Cancelling).await;
        Outcome::Cancelled(self.report(Phase::Cancelled))
    }

    async fn attempt(&mut self) -> Attempt {
        if let Err(error) = self.context.journal.record(Phase::PreSwitch).await {
            return Attempt::Failed(error.wrap("recording the job"));
        }
        self.enter(Phase::PreSwitch);
        match self.try_switch().await {
            Ok(()) => Attempt::Switched,
            Err(ended) => ended,
        }
    }

    async fn try_switch(&mut self) -> Result<(), Attempt> {
        self.ask_target().await?;
        // So that little is left to flush while the guest is held.
        let flushed = self.unless_cancelled(self.flush_source()).await?;
        flushed.map_err(|error| Attempt::Failed(error.wrap("flushing the source")))?;
        self.wait_for_others().await?;
        self.enter(Phase::Quiescing);
        let quiesced = self.hold_guest().await?;
        self.enter(Phase::Committing);
        self.commit().await?;
        self.enter(Phase::Committed);
        quiesced.swap(self.context.target.clone());
        self.context.source = self.context.target.clone();
        std::mem::replace(&mut self.context.let_go, Box::new(|| ()))();
        // From here on the other host may open what this one has let go.
        self.context.journal.committed();
        drop(quiesced);
        self.enter(Phase::Switched);
        // Who was held is under way still.
        self.context.env.sleep(STALL_TAIL).await;
        Ok(())
    }

    /// Flushes the source, on a task of its own: what it says is heard whether anybody waits for it or not.
    fn flush_source(&self) -> impl Future<Output = block::Result<()>> + Send + use<> {
        let (source, flushing) = (self.context.source.clone(), Arc::clone(&self.flushing));
        let failed = Arc::clone(&self.context.flush_failed);
        let flushed = env::spawn_with_result(&*self.context.env, async move {
            let _turn = flushing.lock().await;
            let flushed = source.flush().await;
            drop(source);
            // A source that is away has lost nothing.
            if flushed.as_ref().is_err_and(|error| error.kind() != ErrorKind::TimedOut) {
                failed();
            }
            flushed
        });
        async move {
            let gone = |_| Err(Error::new(ErrorKind::Internal, "whoever was to flush the source is gone"));
            flushed.await.unwrap_or_else(gone)
        }
    }

    /// Asks whether the other host can be what the volume's record will name.
    async fn ask_target(&self) -> Result<(), Attempt> {
        let (limit, journal) = (self.options.target_limit(), Arc::clone(&self.context.journal));
        let asked = env::timeout(&*self.context.env, limit, journal.may_commit());
        match self.unless_cancelled(asked).await? {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) if is_loss(&error) => Err(Attempt::Lost(error)),
            Some(Err(error)) => Err(Attempt::Failed(error)),
            None => Err(Attempt::Lost(silent(limit))),
        }
    }

    /// Waits until those that switch over with it are as far, and nobody has it wait.
    async fn wait_for_others(&self) -> Result<(), Attempt> {
        while self.control.requests().paused {
            self.unless_cancelled(self.wait(TICK)).await?;
        }
        let journal = Arc::clone(&self.context.journal);
        let mut turn = journal.turn();
        loop {
            if let Either::Left(_) = select(&mut turn, pin!(self.wait(TICK))).await {
                return Ok(());
            }
            if self.is_cancelled() {
                return Err(Attempt::Cancelled);
            }
            if self.control.requests().paused {
                return Err(Attempt::PutOff);
            }
        }
    }

    /// Holds the guest until nothing of it is under way, and has what it was answered durable.
    async fn hold_guest(&mut self) -> Result<Quiesced, Attempt> {
        let (env, began) = (Arc::clone(&self.context.env), self.context.env.now());
        if let Some(meter) = &self.context.meter {
            meter.begin_stall();
        }
        let held = env::timeout(&*env, self.hold.limit(), self.context.slot.quiesce()).await;
        self.switchover.quiesce_us = micros(env.now().since(began));
        let Some(quiesced) = held else {
            self.hold.note_failure();
            self.switchover.quiesce_retries += 1;
            return Err(Attempt::PutOff);
        };
        self.hold.note_success();
        if self.context.source.size().get() != self.progress.bytes_total {
            let error = Error::new(ErrorKind::Invalid, "the volume was resized while it was handed over");
            return Err(Attempt::Failed(error));
        }
        let limit = self.options.target_limit();
        let settled = async {
            self.flush_source().await.map_err(|error| Attempt::Failed(error.wrap("flushing the source")))?;
            match self.context.journal.before_commit().await {
                Ok(()) => Ok(()),
                Err(error) if error.kind() == ErrorKind::Busy => Err(Attempt::PutOff),
                Err(error) => Err(Attempt::Lost(error)),
            }
        };
        // One that takes long is given the time while the guest works: there is less to do then the next time.
        env::timeout(&*env, limit, settled).await.unwrap_or(Err(Attempt::PutOff))?;
        if self.is_cancelled() {
            return Err(Attempt::Cancelled);
        }
        self.switchover.window_us = micros(env.now().since(began));
        Ok(quiesced)
    }

    /// Stores the commit. Until it is known whether it counts the guest stays held: there is no second copy to work on.
    async fn commit(&mut self) -> Result<(), Attempt> {
        let (env, began) = (Arc::clone(&self.context.env), self.context.env.now());
        let journal = Arc::clone(&self.context.journal);
        let mut store = journal.commit();
        let stored = env::timeout(&*env, self.options.commit_limit(), &mut store).await;
        self.switchover.commit_us = micros(env.now().since(began));
        self.switchover.window_us += self.switchover.commit_us;
        let error = match stored {
            Some(Ok(())) => return Ok(()),
            Some(Err(error)) => error,
            // It began earlier, so it ends earlier; the record after it counts.
            None => match store.await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            },
        };
        self.switchover.doubts += 1;
        self.enter(Phase::Reverting);
        loop {
            match self.context.journal.revert().await {
                Ok(false) => return Ok(()),
                Ok(true) if self.is_cancelled() => return Err(Attempt::Cancelled),
                Ok(true) if error.kind() == ErrorKind::Fenced => return Err(Attempt::Failed(error)),
                Ok(true) => {
                    self.error = Some(error);
                    return Err(Attempt::PutOff);
                }
                Err(doubt) => {
                    tracing::warn!(error = doubt.chain(), "whether a hand-over counts is not known yet");
                    env.sleep(REST).await;
                }
            }
        }
    }

    /// Waits until the other host is there again. Gives whether somebody has cancelled the move meanwhile.
    async fn await_target(&mut self) -> bool {
        // A wish from before the loss was for something else. It goes before anybody is told of the loss.
        drop(self.control.take_target());
        self.record(Phase::TargetLost).await;
        self.enter(Phase::TargetLost);
        loop {
            if self.is_cancelled() {
                return true;
            }
            // With whatever session: it has no bytes that could be another's.
            if self.control.take_target().is_some() {
                return false;
            }
            self.wait(TICK * 20).await;
        }
    }

    async fn unless_cancelled<T>(&self, work: impl Future<Output = T>) -> Result<T, Attempt> {
        let mut work = pin!(work);
        loop {
            if let Either::Left((done, _)) = select(work.as_mut(), pin!(self.wait(TICK))).await {
                return Ok(done);
            }
            if self.is_cancelled() {
                return Err(Attempt::Cancelled);
            }
        }
    }

    /// Waits for a change or for `limit`.
    async fn wait(&self, limit: Duration) {
        select(pin!(self.control.shared.signal.notified()), self.context.env.sleep(limit)).await;
    }

    fn is_cancelled(&self) -> bool {
        self.control.requests().cancel
    }

    async fn record(&self, phase: Phase) {
        // Whether this is on record or not, the source holds the volume.
        if let Err(error) = self.context.journal.record(phase).await {
            tracing::warn!(%phase, error = error.chain(), "the phase could not be recorded");
        }
    }

    fn enter(&mut self, phase: Phase) {
        self.progress.phase = phase;
        self.progress.seconds = self.context.env.now().since(self.began).as_secs_f64();
        if phase.is_committed() {
            self.progress.percent = 100.0;
        }
        self.control.shared.progress.send_replace(self.progress.clone());
    }

    fn report(&mut self, phase: Phase) -> Report {
        self.enter(phase);
        let now = self.context.env.now();
        let stall = self.context.meter.as_ref().map_or(Duration::ZERO, |meter| meter.stall());
        Report {
            phase,
            strategy: self.options.strategy,
            seconds: now.since(self.began).as_secs_f64(),
            age_seconds: self.context.under_way.age(now).as_secs_f64(),
            bytes_total: self.progress.bytes_total,
            stall_us_max: micros(stall),
            switchover: self.switchover,
            target_losses: self.progress.target_losses,
            error: self.error.as_ref().map(Failure::from).or_else(|| self.progress.error.clone()),
            ..Report::default()
        }
    }
}

fn silent(limit: Duration) -> Error {
    Error::new(ErrorKind::TimedOut, format!("the other host has not answered within {limit:?}"))
}

fn is_loss(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Disconnected | ErrorKind::TimedOut)
}
