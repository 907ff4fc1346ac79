//! How much of the network and of the processors a copy may take (PMigrate, section 3.2).

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use env::EnvRef;
use filters::TokenBucket;
use futures::future::BoxFuture;

/// Holds consumers back. Whoever owns the copy implements it over the budgets that it has.
pub trait Pace: Send + Sync {
    /// Ends when `stream` may send so many bytes.
    fn before_send(&self, stream: u16, bytes: u64) -> BoxFuture<'_, ()>;

    /// Ends when `stream` may use its processor again, after it has worked for `busy`.
    fn after_work(&self, stream: u16, busy: Duration) -> BoxFuture<'_, ()>;
}

/// Holds nobody back.
pub struct Unpaced;

impl Pace for Unpaced {
    fn before_send(&self, _: u16, _: u64) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    fn after_work(&self, _: u16, _: Duration) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

/// So much rest is owed before it is taken: timers are no finer than a millisecond.
const REST_MIN: Duration = Duration::from_millis(1);
/// No rest is longer.
const REST_MAX: Duration = Duration::from_millis(50);
/// The processor's share is kept in thousandths.
const WHOLE: u64 = 1000;

/// One rate for all streams, and one share of the processors. Both can be changed while the copy runs.
pub struct RateLimit {
    env: EnvRef,
    bucket: TokenBucket,
    cpu_share: AtomicU64,
    /// Rest that is owed, in nanoseconds, of all consumers together.
    owed: AtomicU64,
}

impl RateLimit {
    /// At most so many bytes a second (`None`: as many as go), and all of the processors.
    #[must_use]
    pub fn new(env: EnvRef, bytes_per_second: Option<u64>) -> Self {
        let bucket = TokenBucket::new(env.clone(), bytes_per_second);
        Self { env, bucket, cpu_share: AtomicU64::new(WHOLE), owed: AtomicU64::new(0) }
    }

    /// Changes the rate from now on.
    pub fn set_rate(&self, bytes_per_second: Option<u64>) {
        self.bucket.set_rate(bytes_per_second);
    }

    /// From now on consumers work for this part of the time, above 0 and at most 1.
    pub fn set_cpu_share(&self, share: f64) {
        let thousandths = (share.clamp(0.001, 1.0) * WHOLE as f64) as u64;
        self.cpu_share.store(thousandths.max(1), Ordering::Relaxed);
    }
}

impl Pace for RateLimit {
    fn before_send(&self, _: u16, bytes: u64) -> BoxFuture<'_, ()> {
        Box::pin(self.bucket.acquire(bytes))
    }

    fn after_work(&self, _: u16, busy: Duration) -> BoxFuture<'_, ()> {
        let share = self.cpu_share.load(Ordering::Relaxed);
        if share >= WHOLE {
            return Box::pin(async {});
        }
        let more = (busy.as_nanos() as u64).saturating_mul(WHOLE - share) / share;
        let owed = Duration::from_nanos(self.owed.fetch_add(more, Ordering::Relaxed).saturating_add(more));
        if owed < REST_MIN {
            return Box::pin(async {});
        }
        // Whole milliseconds, because a timer has no others; the rest is owed on.
        let rest = Duration::from_millis(owed.as_millis() as u64).min(REST_MAX);
        let _ = self.owed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |owed| {
            Some(owed.saturating_sub(rest.as_nanos() as u64).min(REST_MAX.as_nanos() as u64))
        });
        self.env.sleep(rest)
    }
}

#[cfg(test)]
mod tests {
    use env::testing::PausedEnv;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_rate_holds_and_can_be_changed() {
        let env = PausedEnv::shared(1);
        let limit = RateLimit::new(env.clone(), Some(1 << 20));
        let began = env.now();
        for stream in 0..8 {
            limit.before_send(stream, 256 << 10).await;
        }
        let passed = env.now().since(began).as_secs_f64();
        assert!((1.8..2.1).contains(&passed), "{passed}");
        limit.set_rate(None);
        let began = env.now();
        limit.before_send(0, 1 << 40).await;
        assert!(env.now().since(began) < Duration::from_millis(2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_share_of_the_processor_leaves_the_rest() {
        let env = PausedEnv::shared(1);
        let limit = RateLimit::new(env.clone(), None);
        limit.set_cpu_share(0.25);
        let began = env.now();
        for _ in 0..1000 {
            limit.after_work(0, Duration::from_micros(100)).await;
        }
        let rested = env.now().since(began).as_millis();
        assert!((250..=350).contains(&rested), "{rested} ms of rest after 100 ms of work");
    }
}
