//! Whether a connection without work polls for the next request, or goes to sleep.
//!
//! Going to sleep and being woken costs more than most clients need between an answer and their next request. So a
//! connection polls for a little while, but only as long as that pays:
//!
//! ```text
//!            ┌── a request comes while it looks: the penalty is halved
//!            ▼                │
//!   pause: looks ─────────────┤
//!            ▲                │ none comes within the limit
//!            │                ▼
//!            └───── sleeps at once, `penalty` pauses long: 1, 3, 7 .. 63; and after every long pause
//! ```
//!
//! A client that pauses between its requests, or has none, costs nothing. One whose pauses are a little longer than the
//! limit costs a poll in vain every 64 requests.

use std::time::Duration;

use env::{Env, Moment};

/// A connection polls if the client's last pause was at most so many times the polling time. A pause with sleep is
/// longer by the time of falling asleep and being woken.
const GAP_FACTOR: u32 = 4;

/// How often a connection polls at least, for clocks that stand still.
const LOOKS_MAX: u32 = 500;

/// After polls in vain one after the other so many pauses at most are slept through.
const PENALTY_MAX: u32 = 63;

/// A pause of the client: nothing of it is in flight and nothing waits to be sent.
struct Pause {
    since: Moment,
    looks: u32,
    is_looking: bool,
}

/// How long the client lets this connection wait.
#[derive(Default)]
pub(super) struct BusyPoll {
    pause: Option<Pause>,
    /// How long the last one was.
    gap: Duration,
    /// How many pauses were slept through after the last poll in vain, halved by every one that found something.
    penalty: u32,
    /// How many pauses are still to be slept through.
    skips: u32,
}

impl BusyPoll {
    /// There was something to do.
    pub(super) fn moved(&mut self, env: &dyn Env) {
        let Some(pause) = self.pause.take() else { return };
        self.gap = env.now().since(pause.since);
        if pause.is_looking {
            self.penalty /= 2;
        }
    }

    /// The client has nothing to do for this connection: whether to poll again at once.
    pub(super) fn polls_again(&mut self, env: &dyn Env, limit: Duration) -> bool {
        if limit.is_zero() {
            return false;
        }
        let now = env.now();
        let pause = match &mut self.pause {
            Some(pause) => pause,
            none => {
                let is_short = self.gap <= limit * GAP_FACTOR;
                let is_looking = is_short && self.skips == 0;
                self.skips = self.skips.saturating_sub(1);
                none.insert(Pause { since: now, looks: 0, is_looking })
            }
        };
        if !pause.is_looking {
            return false;
        }
        pause.looks += 1;
        if pause.looks <= LOOKS_MAX && now.since(pause.since) < limit {
            return true;
        }
        pause.is_looking = false;
        self.penalty = (self.penalty * 2 + 1).min(PENALTY_MAX);
        self.skips = self.penalty;
        false
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
        let mut busy_poll = BusyPoll::default();
        assert!(busy_poll.polls_again(&clock, limit), "a new client is given a chance");
        turn(19);
        assert!(busy_poll.polls_again(&clock, limit));
        turn(1);
        assert!(!busy_poll.polls_again(&clock, limit), "looks longer than it may");
        turn(1000);
        busy_poll.moved(&clock);
        assert!(!busy_poll.polls_again(&clock, limit), "looks for a client that pauses for a millisecond");
        turn(60);
        busy_poll.moved(&clock);
        assert!(busy_poll.polls_again(&clock, limit), "does not notice that the pauses have become short");
    }

    /// How much of `pauses` pauses of `micros` is looked through, at a limit of 20.
    fn looked_micros(busy_poll: &mut BusyPoll, clock: &Clock, pauses: u64, micros: u64) -> u64 {
        let mut looked = 0;
        for _ in 0..pauses {
            let mut looks = true;
            for _ in 0..micros {
                looks = looks && busy_poll.polls_again(clock, Duration::from_micros(20));
                looked += u64::from(looks);
                *clock.0.lock() += Duration::from_micros(1);
            }
            busy_poll.moved(clock);
        }
        looked
    }

    #[test]
    fn a_client_that_always_comes_a_little_too_late_is_hardly_looked_for() {
        let (clock, mut busy_poll) = (Clock::default(), BusyPoll::default());
        looked_micros(&mut busy_poll, &clock, 200, 40);
        let looked = looked_micros(&mut busy_poll, &clock, 6400, 40);
        assert!((1000..=2000 + 20).contains(&looked), "looked for {looked} of 256000 us");
        // And is looked for again soon after it has become quicker.
        looked_micros(&mut busy_poll, &clock, 1000, 10);
        assert_eq!(looked_micros(&mut busy_poll, &clock, 1000, 10), 10_000);
    }

    #[test]
    fn a_clock_that_stands_still_does_not_keep_it_looking_and_zero_never_looks() {
        let clock = Clock::default();
        let mut busy_poll = BusyPoll::default();
        let looks = (0..10_000).filter(|_| busy_poll.polls_again(&clock, Duration::from_micros(20))).count();
        assert_eq!(looks, LOOKS_MAX as usize);
        assert!(!BusyPoll::default().polls_again(&clock, Duration::ZERO));
    }
}
