//! The one seam between Transhume and the world: time, tasks, randomness, and small durable files.
//!
//! Code that waits or draws a random number does it through an [`Env`] that it was given. [`RealEnv`] is the machine.
//! The simulator has an `Env` of its own, whose clock is virtual and whose randomness comes from one seed. It runs the
//! same code. [`Files`] is the same for the files of the control plane. Other durable bytes go through
//! `block::BlockDevice`, streams through generic readers and writers, so they need no seam of their own.

mod calendar;
mod files;
mod real;
#[cfg(feature = "testing")]
pub mod testing;

use std::future::Future;
use std::ops::{Add, Sub};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::future::{Either, select};

pub use calendar::{civil, date, unix_seconds};
pub use files::{Files, FilesRef, RealFiles, replace_file, unless_missing};
pub use real::RealEnv;

/// A point on the clock of an [`Env`]: the time since that clock began. It never goes back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(pub Duration);

impl Moment {
    /// How long before this `earlier` was; zero if it was not before.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Moment {
    type Output = Self;
    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span))
    }
}

impl Sub for Moment {
    type Output = Duration;
    fn sub(self, earlier: Self) -> Duration {
        self.since(earlier)
    }
}

/// A task for [`Env::spawn`].
pub type Task = Pin<Box<dyn Future<Output = ()> + Send + 'static>>;

/// The clock, the tasks and the randomness that code may use.
pub trait Env: Send + Sync + 'static {
    /// The time now.
    fn now(&self) -> Moment;

    /// Waits for at least `span`. The real clock has a granularity of a millisecond.
    fn sleep(&self, span: Duration) -> Task;

    /// Runs `task` beside the caller, on the caller's worker.
    fn spawn(&self, task: Task);

    /// A random number from this world's one source.
    fn random(&self) -> u64;

    /// Lets whoever waits for the caller's processor have it, by blocking the calling thread for some microseconds. Only
    /// for a thread that carries nothing of a guest's. A world without threads has nobody to let.
    fn yield_cpu(&self) {}

    /// The wall clock, for records that people read; never for measuring.
    fn wall_clock(&self) -> SystemTime;
}

/// A shared [`Env`].
pub type EnvRef = Arc<dyn Env>;

/// A random identity, which nothing else has.
pub fn random_id(env: &dyn Env) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&env.random().to_le_bytes());
    bytes[8..].copy_from_slice(&env.random().to_le_bytes());
    bytes
}

/// What `work` gives, or `None` if it is not done within `limit`; then it is dropped.
pub async fn timeout<T>(env: &dyn Env, limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    match select(pin!(work), env.sleep(limit)).await {
        Either::Left((value, _)) => Some(value),
        Either::Right(((), _)) => None,
    }
}

/// Runs `work` beside the caller and hands its value to whoever awaits the receiver.
pub fn spawn_with_result<T: Send + 'static>(
    env: &dyn Env,
    work: impl Future<Output = T> + Send + 'static,
) -> tokio::sync::oneshot::Receiver<T> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    env.spawn(Box::pin(async move {
        // The receiver may have gone: then nobody wants the value.
        let _ = sender.send(work.await);
    }));
    receiver
}
