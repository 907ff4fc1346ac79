//! How long the guest is held while its requests in flight end.
//!
//! The first attempt is short. An attempt in which they do not end is followed by one twice as long. The limit is twice
//! the longest request that the guest's meter has seen recently. A disk that takes so long by itself needs that, and a
//! guest whose requests are fast is never held for long. Without a meter the limit is [`HOLD_MAX`]. It is above that
//! only if the least was set higher.

use std::time::Duration;

use crate::GuestWindow;

/// The guest is held no longer for its requests in flight, unless the least is set above this.
pub(crate) const HOLD_MAX: Duration = Duration::from_secs(1);
/// What the guest's longest request, times this, allows.
const LATENCY_FACTOR: u32 = 2;
/// After so many looks what was felt before is forgotten by half.
const LOOKS: u32 = 100;

/// The limit of the next hold.
pub(crate) struct PauseLimit {
    least: Duration,
    /// The longest request of these looks, and of those before.
    felt: [Option<Duration>; 2],
    looks: u32,
    failures: u32,
}

impl PauseLimit {
    /// The first attempt has `least`.
    pub(crate) const fn new(least: Duration) -> Self {
        Self { least, felt: [None; 2], looks: 0, failures: 0 }
    }

    /// Takes what the guest felt since the last look.
    pub(crate) fn look(&mut self, window: GuestWindow) {
        self.looks += 1;
        if self.looks > LOOKS {
            self.felt = [None, self.felt[0]];
            self.looks = 1;
        }
        if window.requests > 0 {
            self.felt[0] = self.felt[0].max(Some(window.latency_max));
        }
    }

    /// How long the guest may be held for its requests in flight.
    pub(crate) fn limit(&self) -> Duration {
        let most = self.felt[0].max(self.felt[1]).map_or(HOLD_MAX, |felt| felt * LATENCY_FACTOR);
        let limit = self.least.saturating_mul(1 << self.failures.min(16));
        limit.min(most.min(HOLD_MAX)).max(self.least)
    }

    /// They have not ended in that time.
    pub(crate) const fn note_failure(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }

    /// They have.
    pub(crate) const fn note_success(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    fn felt(longest: u64) -> GuestWindow {
        GuestWindow { requests: 10, latency_p99: ms(longest), latency_max: ms(longest) }
    }

    fn after(failures: u32, longest: Option<u64>) -> Duration {
        let mut limit = PauseLimit::new(ms(100));
        longest.into_iter().for_each(|longest| limit.look(felt(longest)));
        (0..failures).for_each(|_| limit.note_failure());
        limit.limit()
    }

    #[test]
    fn a_hold_grows_to_what_the_guests_own_latency_allows() {
        assert_eq!([0, 1, 2, 9].map(|failures| after(failures, Some(2))), [ms(100); 4], "of a fast disk");
        assert_eq!([0, 1, 2, 3].map(|failures| after(failures, Some(300))), [ms(100), ms(200), ms(400), ms(600)]);
        assert_eq!([0, 9, 40].map(|failures| after(failures, Some(4_000))), [ms(100), ms(1000), ms(1000)]);
        assert_eq!([0, 2, 9].map(|failures| after(failures, None)), [ms(100), ms(400), ms(1000)], "without a meter");
    }

    #[test]
    fn what_was_felt_long_ago_counts_no_more_and_what_was_asked_for_counts_always() {
        let mut limit = PauseLimit::new(ms(100));
        limit.look(felt(400));
        (0..3).for_each(|_| limit.note_failure());
        assert_eq!(limit.limit(), ms(800));
        (0..2 * LOOKS + 2).for_each(|_| limit.look(felt(1)));
        assert_eq!(limit.limit(), ms(100));
        assert_eq!(PauseLimit::new(Duration::from_secs(5)).limit(), Duration::from_secs(5));
    }
}
