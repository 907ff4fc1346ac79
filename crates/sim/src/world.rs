//! The world: one thread, one seed, one virtual clock, one event log, and the first violation that anybody saw.
//!
//! The clock is that of tokio's paused runtime. Its timers are exact to a millisecond, so one millisecond there is one
//! microsecond here: [`Moment`]s and [`Duration`]s that the engine sees are always simulated ones.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use env::Moment;
use futures::FutureExt;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::clock;
use crate::crash_point::CrashPoint;
use crate::log::{EventLog, Keep};
use crate::occurrence::Occurrence;
use crate::rng::Rng;

/// What must always hold, by the names of ARCHITECTURE.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Invariant {
    /// A write acknowledged to the guest is never lost while a copy that holds authority survives.
    AckedWrite,
    /// The guest never reads something older than what it has read or been acknowledged.
    StableRead,
    /// At the switchover the target equals the source, byte for byte.
    EqualAtSwitch,
    /// Only the holder of the newest epoch writes.
    OneWriter,
    /// Until the commit point a cancel or a failure of the target leaves the guest on the source.
    CancelSafe,
    /// After a crash at any moment the migration resumes or is cleanly undone.
    CrashResume,
    /// What was flushed is durable on every copy that may become the authority.
    Flush,
    /// Memory, queue depth and journal size hold their limits.
    Bounded,
    /// Reported progress never goes back.
    Monotonic,
    /// The mirror finishes under any guest load once faults stop.
    Converges,
    /// The engine does not panic.
    NoPanic,
    /// What a scenario expects of its own.
    AsTold,
}

impl Invariant {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AckedWrite => "acked-write",
            Self::StableRead => "stable-read",
            Self::EqualAtSwitch => "equal-at-switch",
            Self::OneWriter => "one-writer",
            Self::CancelSafe => "cancel-safe",
            Self::CrashResume => "crash-resume",
            Self::Flush => "flush",
            Self::Bounded => "bounded",
            Self::Monotonic => "monotonic",
            Self::Converges => "converges",
            Self::NoPanic => "no-panic",
            Self::AsTold => "as-told",
        }
    }
}

impl fmt::Display for Invariant {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

/// An invariant that did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which.
    pub invariant: Invariant,
    /// What was seen.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.invariant, self.what)
    }
}

/// A handle of the world. Clones are the same world.
#[derive(Clone)]
pub struct World {
    shared: Arc<Shared>,
}

struct Shared {
    seed: u64,
    start: clock::Start,
    log: Mutex<EventLog>,
    violation: Mutex<Option<Violation>>,
    violated: Notify,
    /// What the wall clock shows too much, in seconds.
    wall_ahead: Mutex<i64>,
    faults: Mutex<BTreeMap<&'static str, u64>>,
    occurred: Mutex<BTreeSet<Occurrence>>,
    absences: Mutex<Absences>,
    crash_point: CrashPoint,
}

/// What is away, or not what it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Absences {
    /// So many things are.
    pub(crate) now: u32,
    /// Of those so many are, without which a volume cannot be served.
    pub(crate) needed: u32,
    /// So many were, those that are included.
    pub(crate) ever: u64,
}

impl World {
    /// The world of `seed`, beginning now. Call it within a runtime of [`clock::run`].
    #[must_use]
    pub fn new(seed: u64, keep: Keep) -> Self {
        let shared = Shared {
            seed,
            start: clock::Start::now(),
            log: Mutex::new(EventLog::new(keep)),
            violation: Mutex::default(),
            violated: Notify::new(),
            wall_ahead: Mutex::default(),
            faults: Mutex::default(),
            occurred: Mutex::default(),
            absences: Mutex::default(),
            crash_point: CrashPoint::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The seed that everything here comes from.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// The random numbers of `label`.
    #[must_use]
    pub fn rng(&self, label: &str) -> Rng {
        Rng::new(self.shared.seed, label)
    }

    /// What kills a process at a chosen await.
    #[must_use]
    pub fn crash_point(&self) -> &CrashPoint {
        &self.shared.crash_point
    }

    /// The simulated time.
    #[must_use]
    pub fn now(&self) -> Moment {
        self.shared.start.elapsed()
    }

    /// The wall clocks show so many seconds more from now on, or fewer; the other clock does not jump.
    pub fn step_wall_clock(&self, seconds: i64) {
        *self.shared.wall_ahead.lock() += seconds;
        self.fault("clock-step", format_args!("{seconds} s"));
    }

    /// What the wall clocks show.
    #[must_use]
    pub fn wall_clock(&self) -> SystemTime {
        // 2026-01-01: any fixed day will do, as long as every run has the same.
        let true_time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_600) + self.now().0;
        let ahead = *self.shared.wall_ahead.lock();
        let step = Duration::from_secs(ahead.unsigned_abs());
        if ahead < 0 { true_time - step } else { true_time + step }
    }

    /// Waits for `span` of simulated time.
    pub async fn sleep(&self, span: Duration) {
        clock::sleep(span).await;
    }

    /// Waits until the clock shows `moment`.
    pub async fn sleep_until(&self, moment: Moment) {
        let span = moment - self.now();
        if !span.is_zero() {
            clock::sleep(span).await;
        }
    }

    /// Runs `task` as a part of the world: no crash of a process ends it. A panic of it is a violation.
    pub fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> tokio::task::JoinHandle<T> {
        let world = self.clone();
        tokio::spawn(async move {
            match AssertUnwindSafe(task).catch_unwind().await {
                Ok(value) => value,
                Err(panic) => {
                    world.violate(Invariant::NoPanic, format!("in the world itself: {}", words_of(&*panic)));
                    resume_unwind(panic)
                }
            }
        })
    }

    /// Writes down an event.
    pub fn event(&self, event: fmt::Arguments<'_>) {
        self.shared.log.lock().add(self.now(), event);
    }

    /// Writes down a fault and counts it.
    pub fn fault(&self, class: &'static str, event: fmt::Arguments<'_>) {
        *self.shared.faults.lock().entry(class).or_default() += 1;
        self.occur(Occurrence::Fault(class));
        self.event(format_args!("fault {class}: {event}"));
    }

    /// Says that an invariant does not hold. The first one ends the run.
    pub fn violate(&self, invariant: Invariant, what: impl Into<String>) {
        let violation = Violation { invariant, what: what.into() };
        self.event(format_args!("VIOLATION {violation}"));
        self.shared.violation.lock().get_or_insert(violation);
        self.shared.violated.notify_waiters();
    }

    /// The first violation, if there was one.
    #[must_use]
    pub fn violation(&self) -> Option<Violation> {
        self.shared.violation.lock().clone()
    }

    /// Waits for a violation.
    pub async fn violated(&self) {
        let violated = self.shared.violated.notified();
        if self.violation().is_none() {
            violated.await;
        }
    }

    /// Writes down that this has occurred.
    pub fn occur(&self, what: Occurrence) {
        self.shared.occurred.lock().insert(what);
    }

    /// All that has occurred.
    #[must_use]
    pub fn occurred(&self) -> BTreeSet<Occurrence> {
        self.shared.occurred.lock().clone()
    }

    /// Something is away from now on, without which a volume cannot be served if it `is_needed`.
    pub(crate) fn begin_absence(&self, is_needed: bool) {
        let mut absences = self.shared.absences.lock();
        absences.now += 1;
        absences.needed += u32::from(is_needed);
        absences.ever += 1;
    }

    /// It is back.
    pub(crate) fn end_absence(&self, was_needed: bool) {
        let mut absences = self.shared.absences.lock();
        absences.now -= 1;
        absences.needed -= u32::from(was_needed);
    }

    /// What is away, or not what it was.
    pub(crate) fn absences(&self) -> Absences {
        *self.shared.absences.lock()
    }

    /// How many faults of each class there were.
    #[must_use]
    pub fn faults(&self) -> BTreeMap<&'static str, u64> {
        self.shared.faults.lock().clone()
    }

    /// How many faults of `class` there were.
    #[must_use]
    pub fn count(&self, class: &str) -> u64 {
        self.shared.faults.lock().get(class).copied().unwrap_or_default()
    }

    /// The hash of all events so far, and how many there were.
    #[must_use]
    pub fn log_hash(&self) -> (u64, u64) {
        let log = self.shared.log.lock();
        (log.hash(), log.count())
    }

    /// The events that were kept, one a line, the virtual time first.
    #[must_use]
    pub fn log_lines(&self) -> Vec<String> {
        self.shared.log.lock().lines()
    }
}

/// What a panic said.
pub(crate) fn words_of(panic: &(dyn std::any::Any + Send)) -> &str {
    let words = panic.downcast_ref::<String>().map(String::as_str);
    words.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_world_itself_is_a_violation() {
        clock::run(async {
            let world = World::new(1, Keep::Tail);
            let task = world.spawn(async { panic!("as planned") });
            world.violated().await;
            assert_eq!(world.violation().expect("it was noted").invariant, Invariant::NoPanic);
            assert!(task.await.is_err_and(|error| error.is_panic()), "whoever waits for it must not go on");
        });
    }
}
