//! A rate as a bucket of tokens on the clock of `env`.

use std::time::Duration;

use env::{EnvRef, Moment};
use parking_lot::Mutex;

/// What a taker that does not wait may owe when the rate changes.
const DEBT_SECONDS_MAX: f64 = 10.0;

/// Lets a number of bytes (or anything that is counted) pass per second. A taker may go into debt and then waits until
/// the debt is paid. So large takes need no large bucket, and the rate holds over any span longer than a burst.
pub struct TokenBucket {
    env: EnvRef,
    state: Mutex<State>,
}

struct State {
    /// Tokens a second; `None` lets everything pass.
    rate: Option<f64>,
    /// What may be taken at once after a rest.
    burst: f64,
    /// May be negative: a debt.
    tokens: f64,
    updated: Moment,
}

impl TokenBucket {
    /// A bucket filled at `rate` tokens a second (`None`: no limit) that holds at most a twentieth of a second's worth.
    #[must_use]
    pub fn new(env: EnvRef, rate: Option<u64>) -> Self {
        let updated = env.now();
        let bucket = Self { env, state: Mutex::new(State { rate: None, burst: 0.0, tokens: 0.0, updated }) };
        bucket.set_rate(rate);
        bucket
    }

    /// Changes the rate from now on. A debt is paid at the new rate, and is what that pays in ten seconds at most.
    pub fn set_rate(&self, rate: Option<u64>) {
        let now = self.env.now();
        let mut state = self.state.lock();
        state.refill(now);
        state.rate = rate.map(|rate| rate.max(1) as f64);
        state.burst = state.rate.map_or(0.0, |rate| rate / 20.0);
        let debt_max = state.rate.map_or(0.0, |rate| rate * DEBT_SECONDS_MAX);
        state.tokens = state.tokens.clamp(-debt_max, state.burst);
    }

    /// Takes `count` tokens and says how long to wait before using them. The caller holds no lock while it waits.
    #[must_use]
    pub fn take(&self, count: u64) -> Duration {
        let now = self.env.now();
        let mut state = self.state.lock();
        state.refill(now);
        let Some(rate) = state.rate else { return Duration::ZERO };
        state.tokens -= count as f64;
        Duration::from_secs_f64((-state.tokens).max(0.0) / rate)
    }

    /// How long to wait, at the rate as it is now, before anything should be taken.
    #[must_use]
    pub fn wait(&self) -> Duration {
        let now = self.env.now();
        let mut state = self.state.lock();
        state.refill(now);
        state.rate.map_or(Duration::ZERO, |rate| Duration::from_secs_f64((-state.tokens).max(0.0) / rate))
    }

    /// Takes `count` tokens and waits as long as that takes.
    pub async fn acquire(&self, count: u64) {
        let wait = self.take(count);
        if !wait.is_zero() {
            self.env.sleep(wait).await;
        }
    }
}

impl State {
    fn refill(&mut self, now: Moment) {
        let seconds = now.since(self.updated).as_secs_f64();
        self.updated = now;
        if let Some(rate) = self.rate {
            self.tokens = (self.tokens + rate * seconds).min(self.burst);
        } else {
            self.tokens = 0.0;
        }
    }
}
