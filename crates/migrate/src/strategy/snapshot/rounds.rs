//! When the guest is held for the last overlay: what is decided between two folds, as a plain structure.

use std::time::Duration;

use block::Bytes;

/// A snapshot that is at least this much of the one before shows that they get no smaller.
const SHRINKS: f64 = 0.9;
/// So often in a row, and the guest is held for what there is.
const STUBBORN_MAX: u32 = 2;
/// So often the guest may be let go because the last fold took longer than expected. After that it is held for as long
/// as it may.
const MISSES_MAX: u32 = 3;
/// The guest is let go after so many times what may be expected.
pub(crate) const HOLD_LIMITS: u32 = 4;

/// What the rounds so far have shown.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rounds {
    /// How fast snapshots are folded, in bytes a second.
    rate: Option<f64>,
    /// What the one before held.
    last: Option<u64>,
    /// How often in a row they got no smaller.
    stubborn: u32,
    pub(crate) failures: u32,
    /// How often the guest was let go.
    misses: u32,
    /// It was held for as long as it may be, and that was not enough.
    held_in_vain: bool,
    /// How many bytes were folded.
    pub(crate) folded: u64,
}

/// What is to be done with the snapshot that the guest writes to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Decision {
    /// Another one is taken and this one folded meanwhile.
    Another(String),
    /// The guest is held and this one folded; it is let go if that takes longer than this.
    Hold(String, Duration),
    /// It would take too long.
    GiveUp(String),
}

impl Rounds {
    /// Decides about a snapshot of `bytes`. The guest may be held for `limit`, and for `longest` where snapshots get no
    /// smaller, unless that `aborts` the move.
    pub(crate) fn decide(&mut self, bytes: u64, limit: Duration, longest: Duration, aborts: bool) -> Decision {
        let expected = match (self.rate, bytes) {
            (_, 0) => Some(Duration::ZERO),
            (Some(rate), _) => Some(Duration::from_secs_f64(bytes as f64 / rate.max(1.0))),
            (None, _) => None,
        };
        let said = Bytes(bytes);
        let Some(expected) = expected else {
            return Decision::Another(format!("{said} were written, and how fast they are folded is not known yet"));
        };
        let has_misses_left = self.misses <= MISSES_MAX;
        if expected <= limit && has_misses_left {
            let why = format!("{said} are folded in {expected:.1?}, within {limit:?}: the guest is held");
            return Decision::Hold(why, limit * HOLD_LIMITS);
        }
        if self.stubborn < STUBBORN_MAX && has_misses_left {
            return Decision::Another(format!("{said} would take {expected:.1?}, more than {limit:?}: one more"));
        }
        if self.held_in_vain {
            return Decision::GiveUp(format!("the guest has been held for {longest:?} in vain"));
        }
        if aborts || expected > longest {
            return Decision::GiveUp(format!(
                "the snapshots get no smaller: to fold {said} the guest would be held for {expected:.1?}"
            ));
        }
        let why = match has_misses_left {
            true => "the snapshots get no smaller",
            false => "the last fold took longer than expected too often",
        };
        Decision::Hold(format!("{why}: the guest is held for {said} and {expected:.1?}"), longest)
    }

    /// The guest was let go after `span`, of at most `longest`, with so much folded.
    pub(crate) fn note_miss(&mut self, folded: u64, span: Duration, longest: Duration) {
        self.misses += 1;
        self.held_in_vain |= span >= longest;
        let rate = folded as f64 / span.as_secs_f64().max(1e-6);
        self.rate = self.rate.map(|before| before.min(rate.max(1.0)));
    }

    /// A snapshot of `bytes` was folded in `span`, and the guest wrote `next` meanwhile.
    pub(crate) fn note(&mut self, bytes: u64, span: Duration, next: u64) {
        self.folded += bytes;
        self.failures = 0;
        if bytes > 0 {
            let rate = bytes as f64 / span.as_secs_f64().max(1e-6);
            // The slower of two neighbours: what is small is folded slower than what is large.
            self.rate = Some(self.rate.map_or(rate, |before| rate.min((rate + before) / 2.0)));
        }
        let is_smaller = self.last.is_none_or(|_| (next as f64) < bytes as f64 * SHRINKS);
        self.stubborn = if is_smaller { 0 } else { self.stubborn + 1 };
        self.last = Some(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(200);
    const LONGEST: Duration = Duration::from_secs(30);

    fn is_hold(decision: &Decision) -> bool {
        matches!(decision, Decision::Hold(..))
    }

    #[test]
    fn a_guest_that_was_let_go_is_held_for_what_its_fold_has_shown_and_not_for_ever() {
        let fast = || {
            let mut rounds = Rounds::default();
            rounds.note(1_000_000_000, Duration::from_secs(10), 1_000_000);
            rounds
        };
        let mut rounds = fast();
        let decision = rounds.decide(1_000_000, LIMIT, LONGEST, false);
        assert!(matches!(decision, Decision::Hold(_, hold) if hold == LIMIT * HOLD_LIMITS), "{decision:?}");
        rounds.note_miss(500_000, LIMIT * HOLD_LIMITS, LONGEST);
        assert!(!is_hold(&rounds.decide(1_000_000, LIMIT, LONGEST, false)), "1.25 MB/s are not fast enough");
        for _ in 0..MISSES_MAX {
            rounds.note_miss(500_000, LIMIT * HOLD_LIMITS, LONGEST);
        }
        let decision = rounds.decide(1_000_000, LIMIT, LONGEST, false);
        assert!(matches!(decision, Decision::Hold(_, hold) if hold == LONGEST), "{decision:?}");
        assert!(matches!(rounds.decide(1_000_000, LIMIT, LONGEST, true), Decision::GiveUp(_)));
        rounds.note_miss(100_000, LONGEST, LONGEST);
        assert!(matches!(rounds.decide(1_000, LIMIT, LONGEST, false), Decision::GiveUp(_)), "once is enough");
    }

    #[test]
    fn the_guest_is_held_once_what_is_left_takes_no_longer_than_the_limit() {
        let mut rounds = Rounds::default();
        assert!(is_hold(&rounds.decide(0, LIMIT, LONGEST, false)), "nothing was written");
        assert!(!is_hold(&rounds.decide(1, LIMIT, LONGEST, false)), "nothing is known of the rate");
        rounds.note(1_000_000_000, Duration::from_secs(10), 30_000_000);
        assert!(!is_hold(&rounds.decide(30_000_000, LIMIT, LONGEST, false)), "it takes 300 ms");
        assert!(is_hold(&rounds.decide(20_000_000, LIMIT, LONGEST, false)), "it takes 200 ms");
    }

    #[test]
    fn snapshots_that_get_no_smaller_end_in_a_hold_or_not_at_all() {
        let mut rounds = Rounds::default();
        for _ in 0..2 {
            rounds.note(100_000_000, Duration::from_secs(1), 100_000_000);
            assert!(matches!(rounds.decide(100_000_000, LIMIT, LONGEST, false), Decision::Another(_)));
        }
        rounds.note(100_000_000, Duration::from_secs(1), 100_000_000);
        assert!(is_hold(&rounds.decide(100_000_000, LIMIT, LONGEST, false)));
        assert!(matches!(rounds.decide(100_000_000, LIMIT, LONGEST, true), Decision::GiveUp(_)));
        let far = Duration::from_millis(500);
        assert!(matches!(rounds.decide(100_000_000, LIMIT, far, false), Decision::GiveUp(_)));
    }
}
