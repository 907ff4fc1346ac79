//! When the guest is stopped (PMigrate, section 2.1): what is left is little, it does not get less, or too much was sent.

use std::time::Duration;

use crate::region::PAGE_BYTES;

/// So few pages are little, whatever the rate is: they fit into a frame.
const FEW_PAGES: u64 = 64;
/// A round that leaves more than this part of what the round before has left does not make it less.
const LESS: f64 = 0.8;

/// The limits of the rules.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StopRules {
    /// What is left may take so long while the guest is stopped.
    pub downtime_limit: Duration,
    /// After so many rounds in a row that made it no less, it will not get less.
    pub rounds_without_less: u32,
    /// So many times the memory is too much.
    pub sent_factor_max: f64,
    /// Whether rounds go on that leave less each time, although what is left fits into the limit: they shorten the stop. Without it the
    /// first round that leaves little is the last, as in the paper.
    pub goes_on_while_less: bool,
}

impl Default for StopRules {
    fn default() -> Self {
        Self {
            downtime_limit: Duration::from_millis(300),
            rounds_without_less: 4,
            sent_factor_max: 3.0,
            goes_on_while_less: true,
        }
    }
}

/// Why the rounds end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// What is left fits into the limit.
    Little,
    /// More rounds do not make it less.
    NoLess,
    /// More was sent than may be.
    TooMuchSent,
}

/// What comes after a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Another round.
    GoOn,
    /// The guest can be stopped.
    Stop(StopReason),
}

/// What a round has come to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RoundResult {
    /// Pages that are dirty after it.
    pub(crate) left_pages: u64,
    /// Pages with bytes that are sent in a second.
    pub(crate) pages_per_second: f64,
    /// Pages with bytes that were sent in all rounds.
    pub(crate) sent_pages: u64,
    /// Pages of the memory.
    pub(crate) total_pages: u64,
}

impl RoundResult {
    /// How long what is left takes.
    pub(crate) fn time_left(&self) -> Duration {
        if self.left_pages == 0 {
            return Duration::ZERO;
        }
        let seconds = self.left_pages as f64 / self.pages_per_second.max(1e-9);
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

/// The rules over one copy. It never waits and asks nobody.
#[derive(Clone, Debug)]
pub(crate) struct Judge {
    rules: StopRules,
    least: Option<u64>,
    without_less: u32,
}

impl Judge {
    pub(crate) const fn new(rules: StopRules) -> Self {
        Self { rules, least: None, without_less: 0 }
    }

    /// What comes after a round that came to `result`.
    pub(crate) fn after(&mut self, result: &RoundResult) -> Decision {
        let is_less = self.least.is_none_or(|least| (result.left_pages as f64) < least as f64 * LESS);
        self.without_less = if is_less { 0 } else { self.without_less + 1 };
        self.least = Some(self.least.map_or(result.left_pages, |least| least.min(result.left_pages)));
        let is_few = result.left_pages <= FEW_PAGES;
        let is_enough = is_few || !is_less || !self.rules.goes_on_while_less;
        if result.time_left() <= self.rules.downtime_limit && is_enough {
            return Decision::Stop(StopReason::Little);
        }
        if self.without_less >= self.rules.rounds_without_less {
            return Decision::Stop(StopReason::NoLess);
        }
        let sent_max = result.total_pages as f64 * self.rules.sent_factor_max;
        if result.sent_pages as f64 > sent_max && result.sent_pages * PAGE_BYTES > 64 << 20 {
            return Decision::Stop(StopReason::TooMuchSent);
        }
        Decision::GoOn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(left_pages: u64) -> RoundResult {
        RoundResult { left_pages, pages_per_second: 25_600.0, sent_pages: 0, total_pages: 1 << 18 }
    }

    #[test]
    fn an_idle_guest_is_stopped_once_little_is_left() {
        let mut judge = Judge::new(StopRules::default());
        assert_eq!(judge.after(&result(2000)), Decision::GoOn, "it fits, and gets less yet");
        assert_eq!(judge.after(&result(100)), Decision::GoOn);
        assert_eq!(judge.after(&result(40)), Decision::Stop(StopReason::Little));
    }

    #[test]
    fn a_guest_that_writes_at_a_steady_rate_is_stopped_when_it_does_not_get_less() {
        let mut judge = Judge::new(StopRules::default());
        assert_eq!(judge.after(&result(5000)), Decision::GoOn);
        assert_eq!(judge.after(&result(4900)), Decision::Stop(StopReason::Little), "it fits, and gets no less");
    }

    #[test]
    fn the_first_round_that_leaves_little_is_the_last_where_that_is_the_rule() {
        let mut judge = Judge::new(StopRules { goes_on_while_less: false, ..StopRules::default() });
        assert_eq!(judge.after(&result(9000)), Decision::GoOn, "it does not fit");
        assert_eq!(judge.after(&result(5000)), Decision::Stop(StopReason::Little));
    }

    #[test]
    fn a_guest_that_writes_too_fast_is_told_after_some_rounds() {
        let mut judge = Judge::new(StopRules::default());
        for _ in 0..4 {
            assert_eq!(judge.after(&result(100_000)), Decision::GoOn);
        }
        assert_eq!(judge.after(&result(100_000)), Decision::Stop(StopReason::NoLess));
    }

    #[test]
    fn sending_without_end_is_ended() {
        let mut judge = Judge::new(StopRules { rounds_without_less: 1000, ..StopRules::default() });
        let much = RoundResult { sent_pages: (3 << 18) + 1, ..result(100_000) };
        assert_eq!(judge.after(&RoundResult { sent_pages: 3 << 18, ..much }), Decision::GoOn);
        assert_eq!(judge.after(&much), Decision::Stop(StopReason::TooMuchSent));
    }

    #[test]
    fn nothing_that_is_left_takes_no_time_and_no_rate_takes_for_ever() {
        assert_eq!(RoundResult { pages_per_second: 0.0, ..result(0) }.time_left(), Duration::ZERO);
        assert!(RoundResult { pages_per_second: 0.0, ..result(1) }.time_left() > Duration::from_secs(1 << 20));
    }
}
