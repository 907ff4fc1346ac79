//! The driver of a migration: it does what the machine's phase asks for, awaits, and tells the machine what came of it.
//!
//! Each phase is one activity that ends with one event. A control request or a failure ends every activity early.
//! Copies and comparisons under way are always driven to their end first.

mod abort;
mod auto_passes;
mod copier;
mod drain;
mod eta;
mod iterations;
mod passes;
mod resync_verify;
mod snapshots;
mod statistics;
mod switchover;
mod verifier;

use std::sync::Arc;
use std::time::Duration;

use block::{BufferPool, Bytes, Device, Error, ErrorKind, Quiesced, Result, Slot};
use env::{EnvRef, Moment};
use filters::TokenBucket;
use futures::future::{BoxFuture, Either, select};
use parking_lot::Mutex;
use std::pin::pin;

use crate::control::{Control, TargetResumption};
use crate::migration::Entry;
use crate::pace::{CongestionWindow, CpuYield, DutyCycle, LatencyController, PauseLimit};
use crate::schedule::Schedule;
use crate::strategy::mirror::Mirror;
use crate::strategy::mirror::filter::Shared;
use crate::strategy::mirror::map_pages::Part;
use crate::strategy::mirror::tracker::{Mode, Tracker};
use crate::strategy::snapshot::Snapshots;
use crate::strategy::tracking::converge::Convergence;
use crate::{
    Action, Comparison, Event, GuestMeter, JobJournal, Machine, MigrationContext, MoveOptions, Outcome, Phase, UnderWay,
};

use auto_passes::Heeded;
pub(crate) use copier::COPY_BYTES_MIN;
use copier::Copies;
use iterations::Tracking;
use passes::Passes;
use statistics::Statistics;
pub(crate) use switchover::{STALL_TAIL, micros};

/// How often progress is published and the guest's latency looked at.
const TICK: Duration = Duration::from_millis(50);
/// How long a cancelled migration waits for the guest's requests to drain before it leaves the idle mirror in place.
const CLEAN_UP_LIMIT: Duration = Duration::from_secs(30);
/// How long it waits for late writes to the target.
const LATE_LIMIT: Duration = Duration::from_secs(1);

pub(crate) struct Driver {
    pub(crate) env: EnvRef,
    pub(crate) slot: Slot,
    pub(crate) source: Device,
    pub(crate) target: Device,
    pub(crate) comparison: Option<Comparison>,
    pub(crate) journal: Arc<dyn JobJournal>,
    pub(crate) meter: Option<Arc<dyn GuestMeter>>,
    pub(crate) pool: BufferPool,
    pub(crate) options: MoveOptions,
    pub(crate) control: Control,
    pub(crate) mirror: Arc<Shared>,
    /// The mirror as a device, for those above it.
    pub(crate) mirror_device: Mirror,
    /// Of the snapshot strategy: the overlays between the guest and the mirror.
    pub(crate) snapshots: Option<Arc<tokio::sync::Mutex<Snapshots>>>,
    pub(crate) machine: Machine,
    pub(crate) window: CongestionWindow,
    pub(crate) latency_controller: LatencyController,
    pub(crate) duty_cycle: DutyCycle,
    pub(crate) cpu_yield: CpuYield,
    pub(crate) hold: PauseLimit,
    /// Both devices answered the last copy at once.
    pub(crate) at_once: bool,
    pub(crate) bucket: Arc<TokenBucket>,
    pub(crate) statistics: Statistics,
    pub(crate) under_way: UnderWay,
    pub(crate) passes: Passes,
    /// Of the strategy that chooses for itself: what it has seen of the guest's writes.
    heeded: Heeded,
    /// Of a strategy that copies in passes, until it mirrors.
    tracking: Option<Tracking>,
    /// What ended it, or the last thing that it survived.
    pub(crate) error: Option<Error>,
    /// The slot while the guest is held.
    pub(crate) quiesced: Option<Quiesced>,
    /// A store of the commit that has not answered in its time. (A mutex only because futures cannot be shared.)
    pub(crate) pending_commit: Mutex<Option<BoxFuture<'static, Result<()>>>>,
    /// What a last copy that was given up has left under way: copies, and the flush of the target. (Mutexes as above.)
    left_over: Mutex<Option<Copies>>,
    pending_flush: Mutex<Option<BoxFuture<'static, Result<()>>>>,
    /// Which chunk is copied next.
    schedule: Box<dyn Schedule>,
    /// Where the copy goes on.
    pub(crate) cursor: u64,
    /// Since when the move's end waits for what is under way.
    parting: Option<Moment>,
}

impl Driver {
    /// Over `parts`, whose source and target `mirror` has, and its progress map.
    pub(crate) fn new(
        context: MigrationContext,
        options: MoveOptions,
        control: Control,
        mirror: &Mirror,
        (bytes_resumed, entry): (Bytes, Entry),
        schedule: Box<dyn Schedule>,
    ) -> Self {
        let MigrationContext {
            env, slot, source, target, under_way, comparison, journal, meter, pool, snapshots, ..
        } = context;
        let bucket = Arc::new(TokenBucket::new(Arc::clone(&env), options.bandwidth));
        let tracking = options.strategy.iterates().then(|| Tracking::new(Convergence::new(&options)));
        let mut statistics = Statistics::new(env.now(), source.size(), bytes_resumed, &options, comparison.is_some());
        (statistics.switchover.entry_us, statistics.switchover.entry_retries) = (micros(entry.held), entry.retries);
        Self {
            window: CongestionWindow::new(
                window_bytes_max(&options, &pool),
                options.target_limit(),
                options.path_depth,
            ),
            latency_controller: LatencyController::new(Duration::from_micros(options.guest_latency_us)),
            duty_cycle: DutyCycle::default(),
            cpu_yield: CpuYield::default(),
            hold: PauseLimit::new(options.quiesce_limit()),
            at_once: false,
            bucket,
            statistics,
            under_way,
            passes: Passes::default(),
            heeded: Heeded::default(),
            tracking,
            env,
            slot,
            source,
            target,
            comparison,
            journal,
            meter,
            pool,
            options,
            control,
            mirror: Arc::clone(&mirror.shared),
            mirror_device: mirror.clone(),
            snapshots,
            machine: Machine::default(),
            error: None,
            quiesced: None,
            pending_commit: Mutex::default(),
            left_over: Mutex::default(),
            pending_flush: Mutex::default(),
            schedule,
            cursor: 0,
            parting: None,
        }
    }

    /// Drives the migration to its end.
    pub(crate) async fn run(mut self) -> Outcome {
        let mirror = Arc::clone(&self.mirror);
        // Neither the upkeep nor the landing nor the hearing ends by itself.
        let beside =
            futures::future::join3(mirror.run_map_writer(), mirror.write_back_buffered(), mirror.hear_detached());
        match select(pin!(self.work()), pin!(beside)).await {
            Either::Left(((), _)) | Either::Right((((), (), ()), _)) => {}
        }
        self.outcome()
    }

    async fn work(&mut self) {
        loop {
            self.publish();
            let event = match self.machine.phase() {
                Phase::Preparing => self.prepare().await,
                Phase::Copying => match self.copy().await {
                    Event::Copied => self.consolidate().await,
                    event => event,
                },
                Phase::Verifying => self.verify().await,
                Phase::PreSwitch => self.pre_switch().await,
                Phase::Quiescing => self.quiesce().await,
                Phase::LastCopy => self.last_copy().await,
                Phase::Committing => self.commit().await,
                Phase::InDoubt => self.settle_doubt().await,
                Phase::Reverting => self.revert().await,
                Phase::Committed => self.swap().await,
                Phase::Switched => self.finish().await,
                Phase::TargetLost => self.await_target().await,
                Phase::Cancelling => self.clean_up().await,
                Phase::Done | Phase::Cancelled | Phase::Failed => return,
            };
            self.apply(event).await;
        }
    }

    async fn apply(&mut self, event: Event) {
        let before = self.machine.phase();
        let actions = self.machine.apply(event);
        let after = self.machine.phase();
        let is_on_the_way = |phase| matches!(phase, Phase::PreSwitch | Phase::Quiescing | Phase::LastCopy);
        if is_on_the_way(before) && !is_on_the_way(after) && after != Phase::Committing || after == Phase::PreSwitch {
            self.journal.put_off();
        }
        if before != after {
            tracing::info!(from = %before, to = %after, ?event, "the migration goes on");
            self.statistics.enter(self.env.now(), before);
            self.statistics.switchover.doubts += u64::from(after == Phase::InDoubt);
            if after == Phase::TargetLost {
                // A wish from before the loss was for something else. It goes before anybody is told of the loss.
                drop(self.control.take_target());
                if self.error.as_ref().is_some_and(|error| error.kind() == ErrorKind::TimedOut) {
                    self.window.target_timed_out();
                }
            }
        }
        for action in actions {
            match action {
                Action::Record(phase) => self.record(phase).await,
                Action::FlushBoth(true) => self.mirror.set_mode(Mode::FlushBoth),
                Action::FlushBoth(false) => self.mirror.set_mode(Mode::SourceHolds),
                Action::HoldDoubt => self.mirror.set_mode(Mode::InDoubt),
                Action::DropMirror => {
                    self.statistics.target_losses += 1;
                    self.mirror.drop_session().await;
                }
                Action::TargetHolds => {
                    self.journal.committed();
                    self.mirror.set_mode(Mode::TargetHolds);
                }
                Action::LetGo => self.quiesced = None,
            }
        }
    }

    /// What somebody wishes or what has failed, if that ends the current activity. A pause ends nothing: whoever copies
    /// or compares looks at the machine.
    fn demand(&mut self) -> Option<Event> {
        let failures = self.mirror.take_failures();
        if let Some(error) = failures.map {
            self.error = Some(error);
            return Some(Event::Broken);
        }
        if let Some(error) = failures.target {
            self.error = Some(error);
            return Some(Event::TargetFailed);
        }
        let requests = self.control.requests();
        if requests.cancel && self.machine.phase().can_cancel() {
            return Some(Event::Cancel);
        }
        if requests.paused != self.machine.paused() {
            self.machine.apply(if requests.paused { Event::Pause } else { Event::Resume });
        }
        self.statistics.set_bandwidth(requests.bandwidth, &self.bucket);
        if let Some(tracking) = &mut self.tracking {
            tracking.convergence.set_deadline(requests.deadline);
        }
        if self.source.size() != self.mirror.size && !self.machine.phase().is_committed() {
            let context = format!("the volume was resized from {} while it was moved", self.mirror.size);
            self.error = Some(Error::new(ErrorKind::Invalid, context));
            return Some(Event::Broken);
        }
        None
    }

    /// Waits for a change or for `limit`.
    async fn wait(&self, limit: Duration) {
        select(pin!(self.control.shared.signal.notified()), self.env.sleep(limit)).await;
    }

    fn window_bytes_max(&self) -> u64 {
        window_bytes_max(&self.options, &self.pool)
    }

    /// Whether the copy holds a processor that the guest may want, and goes in small steps therefore.
    fn is_in_the_way(&self) -> bool {
        self.at_once && self.latency_controller.is_guest_active()
    }

    /// Gives the processor away for a moment, if it is time to.
    fn yield_cpu(&mut self) {
        let began = self.env.now();
        if self.is_in_the_way() && self.cpu_yield.is_due(began) {
            self.env.yield_cpu();
            self.cpu_yield.record(began, self.env.now());
        }
    }

    /// Publishes progress and looks at what the guest feels.
    fn tick(&mut self) {
        if let Some(meter) = &self.meter {
            let felt = meter.take_window();
            self.latency_controller.look(felt);
            self.hold.look(felt);
            tracing::debug!(?felt, share = self.latency_controller.share(), "what the guest feels");
        }
        self.publish();
    }

    async fn record(&self, phase: Phase) {
        // Whether this is on record or not, the source holds the volume.
        if let Err(error) = self.journal.record(phase).await {
            tracing::warn!(%phase, error = error.chain(), "the phase could not be recorded");
        }
    }

    async fn prepare(&mut self) -> Event {
        if let Some(event) = self.demand() {
            return event;
        }
        if let Some(event) = self.verify_record().await {
            return event;
        }
        let began = self.env.now();
        let recorded = self.journal.record(Phase::Copying).await;
        if let Some(tracking) = &mut self.tracking {
            tracking.convergence.rates().note_record(self.env.now().since(began));
        }
        // Those who were held when the mirror came into the path have been answered since, or count as they are.
        let longest = self.meter.as_ref().map_or(Duration::ZERO, |meter| meter.stall());
        self.statistics.switchover.entry_stall_us = micros(longest);
        match recorded {
            Ok(()) => Event::Prepared,
            Err(error) => {
                self.error = Some(error.wrap("recording the job"));
                Event::Broken
            }
        }
    }

    async fn await_target(&mut self) -> Event {
        self.end_left_over().await;
        loop {
            self.publish();
            if let Some(event) = self.demand().filter(|event| *event != Event::TargetFailed) {
                return event;
            }
            match self.control.take_target() {
                None => self.wait(TICK * 20).await,
                Some(request) => {
                    if let Some(event) = self.resume_target(request).await {
                        return event;
                    }
                }
            }
        }
    }

    async fn resume_target(&mut self, request: TargetResumption) -> Option<Event> {
        let (mut empty, mut digests) = (false, None);
        match request {
            TargetResumption::Same => {}
            TargetResumption::Compared(wanted) => digests = Some(wanted),
            TargetResumption::Other { device, comparison, empty: is_empty } => {
                if let Err(error) = crate::migration::check_target(&self.source, &device) {
                    self.error = Some(error);
                    return None;
                }
                self.target = device;
                self.mirror.tracker(|tracker| tracker.set_offload(None));
                self.statistics.set_past_page_cache(comparison.is_some());
                self.comparison = comparison;
                empty = is_empty;
            }
        }
        // What the lost session still has under way must not land on what the new one writes.
        while self.mirror.has_outliving_writes() {
            if let Some(event) = self.demand().filter(|event| *event != Event::TargetFailed) {
                return Some(event);
            }
            self.wait(TICK).await;
        }
        if empty {
            self.mirror.in_parts(Part::default(), Tracker::forget_copies).await;
        }
        // From here on nothing is waited for but the record: it says nothing of the target before any more.
        if let (true, Some(map)) = (empty, &self.mirror.map)
            && let Err(error) = map.forget().await
        {
            self.error = Some(error);
            return Some(Event::Broken);
        }
        if let Some(digests) = digests
            && let Some(event) = self.resync_verify(&*digests).await
        {
            return Some(event);
        }
        let _ = self.mirror.take_failures();
        self.cursor = 0;
        // What was lost with the target, or is another one's, has yet to be compared.
        self.statistics.verified = false;
        if empty {
            self.statistics.equal = None;
        }
        if let Some(tracking) = &mut self.tracking {
            tracking.is_compared = false;
        }
        self.mirror.begin_session(self.target.clone(), empty);
        self.mirror.tracker(|tracker| tracker.choose_anew());
        Some(Event::TargetResumed)
    }

    async fn clean_up(&mut self) -> Event {
        if let Some(error) = self.error.as_ref().filter(|_| self.machine.is_broken()) {
            self.journal.failed(error, self.statistics.equal == Some(false));
        }
        // Guest writes that could not be made safe against a crash wait for this record: it must be there.
        while let Err(error) = self.journal.record(Phase::Cancelling).await {
            tracing::warn!(error = error.chain(), "the end of the migration could not be recorded");
            self.env.sleep(TICK * 4).await;
        }
        self.mirror.drop_session().await;
        self.end_left_over().await;
        self.mirror.set_mode(Mode::Detached);
        self.mirror.close_read_cache();
        self.fold_back().await;
        let until = self.env.now() + CLEAN_UP_LIMIT;
        while self.env.now() < until {
            match env::timeout(&*self.env, self.hold.limit(), self.slot.quiesce()).await {
                Some(quiesced) => {
                    quiesced.swap(self.source.clone());
                    break;
                }
                None => {
                    self.hold.note_failure();
                    self.env.sleep(TICK).await;
                }
            }
        }
        let until = self.env.now() + LATE_LIMIT;
        while self.mirror.has_outliving_writes() && self.env.now() < until {
            self.env.sleep(TICK).await;
        }
        Event::Cleaned
    }

    fn outcome(mut self) -> Outcome {
        self.statistics.stop(self.env.now(), self.machine.phase());
        self.publish();
        let report = self.report();
        match self.machine.phase() {
            Phase::Done => Outcome::Switched(report),
            Phase::Cancelled => Outcome::Cancelled(report),
            phase => {
                let unknown = || Error::new(ErrorKind::Internal, format!("the migration ended in {phase}"));
                Outcome::Failed { error: self.error.take().unwrap_or_else(unknown), report }
            }
        }
    }
}

/// How much may be in flight in copies, as asked for and as buffers allow.
fn window_bytes_max(options: &MoveOptions, pool: &BufferPool) -> u64 {
    options.window_bytes_max.min(pool.limit().0 / 2)
}
