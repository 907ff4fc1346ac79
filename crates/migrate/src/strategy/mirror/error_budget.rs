//! How many failures of a target are tolerated before the target counts as lost.
//!
//! It is a leaky bucket: every failure adds one, every second takes one out, and an overflow ends the session. So a
//! path that fails over, or a few bad answers, cost a chunk each that is copied again. A target that is gone costs 32
//! requests, which a busy guest has sent within milliseconds. Successes do not count: a target that keeps failing one
//! write in a hundred is not fit for a volume.

use block::{Error, ErrorKind};
use env::Moment;

/// So many failures at once are tolerated.
const FAILURES_MAX: f64 = 32.0;
/// So many failures are forgotten in a second.
const FORGOTTEN_PER_SECOND: f64 = 1.0;

/// How many failures of a session count now.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ErrorBudget {
    level: f64,
    at: Moment,
}

impl ErrorBudget {
    /// The target has failed a request. Gives whether that can be tolerated.
    pub(crate) fn bears_failure(&mut self, now: Moment) -> bool {
        let forgotten = now.since(self.at).as_secs_f64() * FORGOTTEN_PER_SECOND;
        self.level = (self.level - forgotten).max(0.0) + 1.0;
        self.at = now;
        self.level <= FAILURES_MAX
    }
}

/// Whether the same request may succeed the next time. No space, no permission, no connection and program errors stay
/// as they are until somebody mends them.
pub(crate) const fn may_pass(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Io | ErrorKind::TimedOut | ErrorKind::Busy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    fn at(milliseconds: u64) -> Moment {
        Moment(Duration::from_millis(milliseconds))
    }

    #[test]
    fn a_burst_is_borne_and_one_more_is_not() {
        let mut error_budget = ErrorBudget::default();
        assert!((0..32).all(|_| error_budget.bears_failure(at(5))));
        assert!(!error_budget.bears_failure(at(5)));
    }

    #[test]
    fn a_failure_now_and_then_is_borne_for_ever() {
        let mut error_budget = ErrorBudget::default();
        assert!((0..100_000).all(|second| error_budget.bears_failure(at(second * 1000))));
    }

    proptest! {
        #[test]
        fn no_more_is_borne_than_a_burst_and_one_a_second(gaps in prop::collection::vec(0_u64..400, 1..300)) {
            let (mut error_budget, mut now, mut borne) = (ErrorBudget::default(), 0, 0_u64);
            for gap in gaps {
                now += gap;
                if !error_budget.bears_failure(at(now)) {
                    break;
                }
                borne += 1;
            }
            prop_assert!(borne <= 33 + now / 1000, "{borne} in {now} ms");
        }
    }
}
