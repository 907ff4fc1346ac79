//! Yields to the guest: the share of the window that the copy uses falls while the guest's latency is above its limit.
//!
//! The share falls by a third at every look and grows by a tenth. Below a quarter the copy also uses only a part of the
//! time ([`Duty`](super::Duty)), because a window of one copy is always full on a device that answers at once. The share
//! has a floor, so the migration converges whatever the guest does. Where the guest is slow at the floor look after look,
//! the copy is not why: what is seen there raises the limit, so that a slow disk does not make the copy crawl. A single
//! slow look does not raise it.

use std::time::Duration;

use crate::GuestWindow;

/// The copy always keeps this share.
const SHARE_MIN: f64 = 1.0 / 32.0;
/// Below this share the copy rests between copies; at the floor it is busy for an eighth of the time.
const SHARE_WITHOUT_REST: f64 = 0.25;
/// So many looks in a row at the floor tell what the guest feels without the copy.
const QUIET_LOOKS: u32 = 4;
/// The guest's requests are too few to say anything below this.
const REQUESTS_MIN: u64 = 20;
/// At the floor the guest's latency, times this, is what the copy may cause elsewhere.
const QUIET_FACTOR: f64 = 1.5;

/// Says which share of the window the copy may use.
pub(crate) struct Governor {
    share: f64,
    limit: Duration,
    /// What the guest feels while the copy is at its floor.
    quiet: Option<Duration>,
    /// The least that was felt in the present row of slow looks at the floor, and how many they are.
    at_floor: (Duration, u32),
    /// What was felt since the last decision.
    pending: GuestWindow,
    /// How many looks in a row brought too few requests.
    looks: u32,
    /// The guest did something before the last decision.
    is_guest_active: bool,
}

impl Governor {
    pub(crate) const fn new(limit: Duration) -> Self {
        let pending = GuestWindow { requests: 0, latency_p99: Duration::ZERO, latency_max: Duration::ZERO };
        Self { share: 1.0, limit, quiet: None, at_floor: (Duration::MAX, 0), pending, looks: 0, is_guest_active: false }
    }

    pub(crate) const fn share(&self) -> f64 {
        self.share
    }

    /// Whether the guest has requests at all.
    pub(crate) const fn is_guest_active(&self) -> bool {
        self.is_guest_active
    }

    /// Which part of the time copies may be under way.
    pub(crate) const fn duty(&self) -> f64 {
        (self.share / SHARE_WITHOUT_REST).min(1.0)
    }

    /// Takes what the guest felt since the last look.
    pub(crate) fn look(&mut self, window: GuestWindow) {
        self.pending.requests += window.requests;
        self.pending.latency_p99 = self.pending.latency_p99.max(window.latency_p99);
        self.looks += 1;
        if (1..REQUESTS_MIN).contains(&self.pending.requests) && self.looks < 5 {
            return;
        }
        let felt = std::mem::take(&mut self.pending);
        self.looks = 0;
        self.is_guest_active = felt.requests > 0;
        let limit = self.quiet.map_or(self.limit, |quiet| self.limit.max(quiet.mul_f64(QUIET_FACTOR)));
        if felt.requests > 0 && felt.latency_p99 > limit {
            if self.share <= SHARE_MIN {
                let (least, looks) = self.at_floor;
                self.at_floor = (least.min(felt.latency_p99), looks + 1);
                if looks + 1 >= QUIET_LOOKS {
                    self.quiet = Some(self.at_floor.0);
                    self.at_floor = (Duration::MAX, 0);
                }
            }
            self.share *= 0.66;
        } else {
            self.at_floor = (Duration::MAX, 0);
            self.share = self.share * 1.1 + 0.005;
        }
        self.share = self.share.clamp(SHARE_MIN, 1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest whose latency is `alone` and grows with the share.
    fn settle(alone_us: f64, per_share_us: f64) -> f64 {
        let mut governor = Governor::new(Duration::from_micros(2000));
        let mut shares = Vec::new();
        for _ in 0..2000 {
            let latency_p99 = Duration::from_secs_f64((alone_us + per_share_us * governor.share()) / 1e6);
            governor.look(GuestWindow { requests: 100, latency_p99, latency_max: latency_p99 });
            shares.push(governor.share());
        }
        shares[1000..].iter().sum::<f64>() / 1000.0
    }

    #[test]
    fn the_copy_yields_as_far_as_the_guest_needs() {
        assert!(settle(200.0, 500.0) > 0.99, "it yields to a guest that feels nothing");
        let share = settle(200.0, 18_000.0);
        assert!((0.06..0.13).contains(&share), "a share of {share} where a tenth is the limit");
        let floor = settle(200.0, 10_000_000.0);
        assert!((SHARE_MIN..0.05).contains(&floor), "{floor}");
    }

    #[test]
    fn a_guest_that_is_slow_anyway_does_not_make_the_copy_crawl() {
        assert!(settle(10_000.0, 500.0) > 0.9);
    }

    #[test]
    fn a_moment_in_which_the_guest_is_slow_does_not_raise_the_limit() {
        let mut governor = Governor::new(Duration::from_micros(2000));
        let mut look = |latency_us, looks| {
            for _ in 0..looks {
                let latency_p99 = Duration::from_micros(latency_us);
                governor.look(GuestWindow { requests: 100, latency_p99, latency_max: latency_p99 });
            }
            governor.share()
        };
        assert!(look(2500, 9) <= SHARE_MIN);
        look(50_000, 2);
        look(500, 1);
        assert!(look(2500, 3) <= SHARE_MIN, "2.5 ms are still above the limit");
    }

    #[test]
    fn the_copy_rests_below_a_quarter_and_is_busy_for_an_eighth_of_the_time_at_least() {
        let mut governor = Governor::new(Duration::from_micros(2000));
        let mut duties = Vec::new();
        for _ in 0..12 {
            let latency_p99 = Duration::from_millis(10);
            governor.look(GuestWindow { requests: 100, latency_p99, latency_max: latency_p99 });
            duties.push((governor.share(), governor.duty()));
        }
        assert!(duties.iter().all(|&(share, duty)| (share >= 0.25) == (duty >= 1.0) && duty >= 0.125), "{duties:?}");
        assert!(duties.iter().any(|&(_, duty)| duty <= 0.125), "{duties:?}");
    }

    #[test]
    fn a_guest_that_is_idle_leaves_everything_to_the_copy() {
        let mut governor = Governor::new(Duration::from_micros(2000));
        for _ in 0..500 {
            governor.look(GuestWindow::default());
        }
        assert!(governor.share() > 0.99);
    }
}
