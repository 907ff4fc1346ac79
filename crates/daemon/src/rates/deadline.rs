//! Whether a move will be over in time.
//!
//! ```text
//!              slower than needed, twice in a row
//!   in time ─────────────────────────────────────▶ at risk
//!      ▲                                              │
//!      └──────────────────────────────────────────────┘
//!           a quarter faster than needed, five times in a row
//! ```

use std::time::Duration;

use migrate::stream::needed_rate;
use migrate::{Phase, Progress, Verify};

/// So often in a row it is too slow before anything is done about it,
const SLOW_LOOKS: u32 = 2;
/// and fast enough before that is taken back.
const FAST_LOOKS: u32 = 5;

/// What a look at a move has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeadlineStatus {
    /// Bytes a second that bring it home in time, with something to spare,
    pub(super) needed: u64,
    /// and those without which it is late for certain.
    pub(super) least: u64,
    pub(super) at_risk: bool,
    pub(super) has_passed: bool,
}

/// One move's deadline.
#[derive(Clone, Debug)]
pub(super) struct Deadline {
    /// How long after its start.
    limit: Duration,
    verify: Verify,
    at_risk: bool,
    in_a_row: u32,
    /// Bytes a second that were needed when it was looked at last.
    needed: u64,
}

impl Deadline {
    pub(super) const fn new(limit: Duration, verify: Verify) -> Self {
        Self { limit, verify, at_risk: false, in_a_row: 0, needed: 0 }
    }

    /// Takes how long the move has been under way and how far it is.
    pub(super) fn look(&mut self, age: Duration, progress: &Progress) -> DeadlineStatus {
        let left = self.left(progress);
        // Who aims at the last moment is late by whatever comes in between.
        let aim = self.limit * 7 / 8;
        let needed = needed_rate(left, Some(aim.saturating_sub(age)), 0);
        // Who is late does not slow down with what is left: each second would bring it closer, and none would end it.
        let needed = if age >= aim { needed.max(self.needed) } else { needed };
        self.needed = needed;
        let least = left as f64 / self.limit.saturating_sub(age).as_secs_f64().max(1.0);
        let is_working = matches!(progress.phase, Phase::Copying | Phase::Verifying) && !progress.paused;
        // It has just begun with something if there is no rate.
        if is_working && progress.rate > 0 {
            let has_turned = match self.at_risk {
                false => progress.rate < needed,
                true => progress.rate as f64 > needed as f64 * 1.25,
            };
            self.in_a_row = if has_turned { self.in_a_row + 1 } else { 0 };
            if self.in_a_row >= if self.at_risk { FAST_LOOKS } else { SLOW_LOOKS } {
                self.at_risk = !self.at_risk;
                self.in_a_row = 0;
            }
        }
        let has_passed = age >= self.limit && !progress.phase.is_committed();
        DeadlineStatus { needed, least: least as u64, at_risk: self.at_risk, has_passed }
    }

    /// What is to be copied and compared, in bytes.
    fn left(&self, progress: &Progress) -> u64 {
        let to_verify = match (progress.bytes_to_verify, self.verify) {
            (0, Verify::Full) => progress.bytes_total,
            (known, _) => known,
        };
        progress.bytes_left + to_verify.saturating_sub(progress.bytes_verified)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEGABYTE: u64 = 1_000_000;

    fn progress(left: u64, rate: u64) -> Progress {
        Progress {
            phase: Phase::Copying,
            bytes_total: 1000 * MEGABYTE,
            bytes_left: left,
            rate,
            iteration: 1,
            ..Progress::default()
        }
    }

    #[test]
    fn what_is_needed_grows_as_time_goes_by_and_falls_as_bytes_do() {
        let mut deadline = Deadline::new(Duration::from_secs(16), Verify::Off);
        let mut needed = |age, left| {
            let status = deadline.look(Duration::from_secs(age), &progress(left * MEGABYTE, MEGABYTE));
            (status.needed / MEGABYTE, status.least / MEGABYTE)
        };
        // It aims at fourteen seconds, a tenth faster than that takes.
        assert_eq!(needed(0, 1400), (110, 87));
        assert_eq!(needed(7, 1400), (220, 155));
        assert_eq!(needed(7, 700), (110, 77));
    }

    #[test]
    fn what_is_late_does_not_slow_down_as_it_comes_to_its_end() {
        let mut deadline = Deadline::new(Duration::from_secs(16), Verify::Off);
        let mut needed =
            |age, left| deadline.look(Duration::from_secs(age), &progress(left, MEGABYTE)).needed / MEGABYTE;
        assert_eq!(needed(13, 100 * MEGABYTE), 110);
        assert_eq!(needed(14, 50 * MEGABYTE), 110);
        assert_eq!(needed(15, 1), 110);
        assert_eq!(needed(15, 200 * MEGABYTE), 220);
    }

    #[test]
    fn a_full_comparison_counts_as_much_again() {
        let mut deadline = Deadline::new(Duration::from_secs(10), Verify::Full);
        let least = deadline.look(Duration::ZERO, &progress(1000 * MEGABYTE, MEGABYTE)).least;
        assert_eq!(least / MEGABYTE, 200);
    }

    #[test]
    fn one_slow_moment_is_no_risk_and_one_fast_one_is_no_relief() {
        let mut deadline = Deadline::new(Duration::from_secs(100), Verify::Off);
        let mut at_risk = |rate: u64| deadline.look(Duration::ZERO, &progress(1000 * MEGABYTE, rate)).at_risk;
        let needed = 1_100_000_000 / 87 + 1;
        assert!(!at_risk(needed / 2) && !at_risk(2 * needed) && !at_risk(needed / 2));
        assert!(at_risk(needed / 2));
        assert!(at_risk(2 * needed) && at_risk(needed));
        assert!((0..4).all(|_| at_risk(2 * needed)));
        assert!(!at_risk(2 * needed));
    }

    #[test]
    fn a_deadline_that_is_over_says_so_unless_the_target_holds_the_volume() {
        let mut deadline = Deadline::new(Duration::from_secs(1), Verify::Off);
        assert!(deadline.look(Duration::from_secs(1), &progress(1, 1)).has_passed);
        let switched = Progress { phase: Phase::Switched, ..progress(0, 0) };
        assert!(!deadline.look(Duration::from_secs(1), &switched).has_passed);
    }
}
