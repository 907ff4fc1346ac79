//! How much of a target's failing is borne before the target counts as lost.
//!
//! A bucket that leaks: every failure fills it by one, every second takes one out, and one that runs over ends the
//! session. So a path that fails over or a few bad answers cost a chunk each that is copied again, and a target that is
//! gone costs 32 requests of whoever asks, which a busy guest has asked within milliseconds. Successes do not count:
//! a target that fails one write in a hundred for good is no place for a volume.

use block::{Error, ErrorKind};
use env::Moment;

/// So many failures at once are borne.
const FAILURES_MAX: f64 = 32.0;
/// So many failures are forgotten in a second.
const FORGOTTEN_PER_SECOND: f64 = 1.0;

/// What a session has left of its patience.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ErrorBudget {
    level: f64,
    at: Moment,
}

impl ErrorBudget {
    /// The target has failed a request. Whether that can be borne.
    pub(crate) fn bears_failure(&mut self, now: Moment) -> bool {
        let forgotten = now.since(self.at).as_secs_f64() * FORGOTTEN_PER_SECOND;
        self.level = (self.level - forgotten).max(0.0) + 1.0;
        self.at = now;
        self.level <= FAILURES_MAX
    }
}

/// Whether what a target has answered may be otherwise the next time. No space, no right, no connection and whatever a
/// program got wrong stay as they are until somebody does something about them.
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
