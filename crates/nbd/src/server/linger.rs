//! Whether a connection without work looks for the next request at once, or goes to sleep.
//!
//! Going to sleep and being woken costs more than most clients need between an answer and their next request. So a
//! connection looks again for a little while, but only if the client's last pause was short: one that thinks between its
//! requests, or has none, costs nothing.

use std::time::Duration;

use env::{Env, Moment};

/// A connection lingers if the client's last pause was at most so many times the time that it lingers: a pause that was
/// slept through is longer by the time of falling asleep and being woken.
const GAP_FACTOR: u32 = 4;

/// How often a connection looks while it lingers, for clocks that stand still.
const LOOKS_MAX: u32 = 500;

/// How long the client lets this connection wait.
#[derive(Default)]
pub(super) struct Linger {
    /// Since when there is nothing to do, and how often that was seen.
    idle: Option<(Moment, u32)>,
    /// How long it took last time.
    gap: Duration,
}

impl Linger {
    /// There was something to do.
    pub(super) fn moved(&mut self, env: &dyn Env) {
        if let Some((since, _)) = self.idle.take() {
            self.gap = env.now().since(since);
        }
    }

    /// There is nothing to do: whether to look again at once.
    pub(super) fn looks_again(&mut self, env: &dyn Env, limit: Duration) -> bool {
        if limit.is_zero() {
            return false;
        }
        let now = env.now();
        let (since, looks) = self.idle.get_or_insert((now, 0));
        *looks += 1;
        self.gap <= limit * GAP_FACTOR && *looks <= LOOKS_MAX && now.since(*since) < limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use env::{RealEnv, Task};
    use parking_lot::Mutex;
    use std::time::SystemTime;

    /// A clock that a test turns.
    #[derive(Default)]
    struct Clock(Mutex<Duration>);

    impl Env for Clock {
        fn now(&self) -> Moment {
            Moment(*self.0.lock())
        }
        fn sleep(&self, span: Duration) -> Task {
            RealEnv::new().sleep(span)
        }
        fn spawn(&self, task: Task) {
            RealEnv::new().spawn(task);
        }
        fn random(&self) -> u64 {
            0
        }
        fn wall_clock(&self) -> SystemTime {
            SystemTime::UNIX_EPOCH
        }
    }

    #[test]
    fn only_a_client_with_short_pauses_is_looked_for() {
        let clock = Clock::default();
        let turn = |micros| *clock.0.lock() += Duration::from_micros(micros);
        let limit = Duration::from_micros(20);
        let mut linger = Linger::default();
        assert!(linger.looks_again(&clock, limit), "a new client is given a chance");
        turn(19);
        assert!(linger.looks_again(&clock, limit));
        turn(1);
        assert!(!linger.looks_again(&clock, limit), "looks longer than it may");
        turn(1000);
        linger.moved(&clock);
        assert!(!linger.looks_again(&clock, limit), "looks for a client that pauses for a millisecond");
        turn(60);
        linger.moved(&clock);
        assert!(linger.looks_again(&clock, limit), "does not notice that the pauses have become short");
    }

    #[test]
    fn a_clock_that_stands_still_does_not_keep_it_looking_and_zero_never_looks() {
        let clock = Clock::default();
        let mut linger = Linger::default();
        let looks = (0..10_000).filter(|_| linger.looks_again(&clock, Duration::from_micros(20))).count();
        assert_eq!(looks, LOOKS_MAX as usize);
        assert!(!Linger::default().looks_again(&clock, Duration::ZERO));
    }
}
