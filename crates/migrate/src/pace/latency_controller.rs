//! Yields to the guest: the share of the window that the copy uses falls while the guest's latency is above its limit.
//!
//! The share falls by a third at every look and grows by a tenth. Below a quarter the copy also uses only a part of the
//! time ([`DutyCycle`](super::DutyCycle)). The reason is a device that answers at once: there a window of one copy is
//! always full. The share has a floor, so the migration converges whatever the guest does. If the guest is slow at the
//! floor look after look, the copy is not the cause. Then its usual latency there raises the limit, so that a slow disk
//! does not make the copy crawl. A single slow look does not raise it. Once the limit has been raised the share grows
//! back fast. Then a look that is a little above the limit costs only a little of the share. The reason is that a slow
//! disk answers few requests between two looks. Their 99th percentile is nearly the longest of them, and one look in
//! five is that much above the usual.

use std::time::Duration;

use crate::GuestWindow;

/// The copy always keeps this share.
const SHARE_MIN: f64 = 1.0 / 32.0;
/// Below this share the copy rests between copies; at the floor it is busy for an eighth of the time.
const SHARE_WITHOUT_REST: f64 = 0.25;
/// So many slow looks in a row at the floor tell what the guest feels without the copy.
const QUIET_LOOKS: usize = 6;
/// What a slow look leaves of the share at least.
const CUT_MAX: f64 = 0.66;
/// The guest's requests are too few to say anything below this.
const REQUESTS_MIN: u64 = 20;
/// The same where looks are compared with what is usual, which fewer do not tell.
const REQUESTS_MIN_LEARNT: u64 = 100;
/// No more looks than this are taken together for that.
const LOOKS_MAX: u32 = 5;
/// At the floor the guest's latency, times this, is what the copy may cause elsewhere.
const QUIET_FACTOR: f64 = 2.0;

/// Says which share of the window the copy may use.
pub(crate) struct LatencyController {
    share: f64,
    limit: Duration,
    /// What the guest feels while the copy is at its floor.
    quiet: Option<Duration>,
    /// What was felt in the present row of slow looks at the floor.
    at_floor: Vec<Duration>,
    /// The limit has been raised and no look was slow since: the share doubles.
    comes_back: bool,
    /// What was felt since the last decision.
    pending: GuestWindow,
    /// How many looks in a row brought too few requests.
    looks: u32,
    /// The guest did something before the last decision.
    is_guest_active: bool,
}

impl LatencyController {
    pub(crate) const fn new(limit: Duration) -> Self {
        let pending = GuestWindow { requests: 0, latency_p99: Duration::ZERO, latency_max: Duration::ZERO };
        Self {
            share: 1.0,
            limit,
            quiet: None,
            at_floor: Vec::new(),
            comes_back: false,
            pending,
            looks: 0,
            is_guest_active: false,
        }
    }

    pub(crate) const fn share(&self) -> f64 {
        self.share
    }

    /// Whether the guest has requests at all.
    pub(crate) const fn is_guest_active(&self) -> bool {
        self.is_guest_active
    }

    /// Which part of the time copies may be under way.
    pub(crate) const fn duty_cycle(&self) -> f64 {
        (self.share / SHARE_WITHOUT_REST).min(1.0)
    }

    /// Takes what the guest felt since the last look.
    pub(crate) fn look(&mut self, window: GuestWindow) {
        self.pending.requests += window.requests;
        self.pending.latency_p99 = self.pending.latency_p99.max(window.latency_p99);
        self.looks += 1;
        let is_learnt = self.quiet.is_some() || !self.at_floor.is_empty();
        let enough = if is_learnt { REQUESTS_MIN_LEARNT } else { REQUESTS_MIN };
        if (1..enough).contains(&self.pending.requests) && self.looks < LOOKS_MAX {
            return;
        }
        let felt = std::mem::take(&mut self.pending);
        self.looks = 0;
        self.is_guest_active = felt.requests > 0;
        let limit = self.quiet.map_or(self.limit, |quiet| self.limit.max(quiet.mul_f64(QUIET_FACTOR)));
        if felt.requests > 0 && felt.latency_p99 > limit {
            // Where the limit is the guest's own latency, a look is no more exact than that.
            let excess = limit.as_secs_f64() / felt.latency_p99.as_secs_f64();
            let cut = if self.quiet.is_some() { excess.max(CUT_MAX) } else { CUT_MAX };
            self.comes_back = false;
            if self.share <= SHARE_MIN {
                self.learn(felt.latency_p99);
            }
            self.share *= cut;
        } else {
            self.at_floor.clear();
            self.share = if self.comes_back { self.share * 2.0 } else { self.share * 1.1 + 0.005 };
        }
        self.share = self.share.clamp(SHARE_MIN, 1.0);
    }

    /// The guest was slow although the copy is at its floor.
    fn learn(&mut self, felt: Duration) {
        self.at_floor.push(felt);
        if self.at_floor.len() == QUIET_LOOKS {
            self.at_floor.sort_unstable();
            self.quiet = Some(self.at_floor[QUIET_LOOKS / 2 - 1]);
            self.at_floor.clear();
            self.comes_back = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest whose latency is `alone` and grows with the share.
    fn settle(alone_us: f64, per_share_us: f64) -> f64 {
        let mut latency_controller = LatencyController::new(Duration::from_micros(2000));
        let mut shares = Vec::new();
        for _ in 0..2000 {
            let latency_p99 = Duration::from_secs_f64((alone_us + per_share_us * latency_controller.share()) / 1e6);
            latency_controller.look(GuestWindow { requests: 100, latency_p99, latency_max: latency_p99 });
            shares.push(latency_controller.share());
        }
        shares[1000..].iter().sum::<f64>() / 1000.0
    }

    #[test]
    fn the_copy_yields_as_far_as_the_guest_needs() {
        assert!(settle(200.0, 500.0) > 0.99, "it yields to a guest that feels nothing");
        let share = settle(200.0, 18_000.0);
        assert!((0.06..0.13).contains(&share), "a share of {share} where a tenth is the limit");
        let floor = settle(200.0, 10_000_000.0);
        // What the guest feels at the floor may double, whoever causes it.
        assert!((SHARE_MIN..SHARE_MIN * 2.2).contains(&floor), "{floor}");
    }

    #[test]
    fn a_guest_that_is_slow_anyway_does_not_make_the_copy_crawl() {
        assert!(settle(10_000.0, 500.0) > 0.9);
    }

    /// The mean share beside a guest whose disk answers 50 requests between two looks. Their 99th percentile is 7 ms,
    /// and longer by `more` times that when the copy has all of its window.
    fn settle_on_a_slow_disk(more: f64) -> f64 {
        let mut latency_controller = LatencyController::new(Duration::from_micros(2000));
        let (mut shares, mut throw) = (Vec::new(), 1_u64);
        for _ in 0..4000 {
            // What is nearly the longest of few requests is scattered: from a fifth below the usual to two fifths above.
            throw = throw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let scatter = 0.8 + 0.6 * (throw >> 40) as f64 / (1_u64 << 24) as f64;
            let latency_p99 = Duration::from_secs_f64(7e-3 * scatter * (1.0 + more * latency_controller.share()));
            latency_controller.look(GuestWindow { requests: 50, latency_p99, latency_max: latency_p99 });
            shares.push(latency_controller.share());
        }
        shares[100..].iter().sum::<f64>() / 3900.0
    }

    #[test]
    fn on_a_slow_disk_the_scatter_of_what_the_guest_feels_is_not_taken_for_the_copy_s_doing() {
        let share = settle_on_a_slow_disk(0.3);
        assert!(share > 0.9, "a copy that the guest hardly feels has a share of {share}");
        let share = settle_on_a_slow_disk(8.0);
        assert!((0.05..0.25).contains(&share), "a copy that makes the guest nine times slower has a share of {share}");
    }

    #[test]
    fn once_the_limit_is_known_the_copy_comes_back_within_a_second() {
        let mut latency_controller = LatencyController::new(Duration::from_micros(2000));
        let mut looks = 0;
        while looks < 40 && (looks < 12 || latency_controller.share() < 1.0) {
            let latency_p99 = Duration::from_millis(20);
            latency_controller.look(GuestWindow { requests: 200, latency_p99, latency_max: latency_p99 });
            looks += 1;
        }
        assert!(looks <= 22, "it took {looks} looks of 50 ms");
    }

    #[test]
    fn a_moment_in_which_the_guest_is_slow_does_not_raise_the_limit() {
        let mut latency_controller = LatencyController::new(Duration::from_micros(2000));
        let mut look = |latency_us, looks| {
            for _ in 0..looks {
                let latency_p99 = Duration::from_micros(latency_us);
                latency_controller.look(GuestWindow { requests: 100, latency_p99, latency_max: latency_p99 });
            }
            latency_controller.share()
        };
        assert!(look(2500, 9) <= SHARE_MIN);
        look(50_000, 2);
        look(500, 1);
        assert!(look(2500, 3) <= SHARE_MIN, "2.5 ms are still above the limit");
    }

    #[test]
    fn the_copy_rests_below_a_quarter_and_is_busy_for_an_eighth_of_the_time_at_least() {
        let mut latency_controller = LatencyController::new(Duration::from_micros(2000));
        let mut duties = Vec::new();
        for _ in 0..12 {
            let latency_p99 = Duration::from_millis(10);
            latency_controller.look(GuestWindow { requests: 100, latency_p99, latency_max: latency_p99 });
            duties.push((latency_controller.share(), latency_controller.duty_cycle()));
        }
        assert!(
            duties.iter().all(|&(share, duty_cycle)| (share >= 0.25) == (duty_cycle >= 1.0) && duty_cycle >= 0.125),
            "{duties:?}"
        );
        assert!(duties.iter().any(|&(_, duty_cycle)| duty_cycle <= 0.125), "{duties:?}");
    }

    #[test]
    fn a_guest_that_is_idle_leaves_everything_to_the_copy() {
        let mut latency_controller = LatencyController::new(Duration::from_micros(2000));
        for _ in 0..500 {
            latency_controller.look(GuestWindow::default());
        }
        assert!(latency_controller.share() > 0.99);
    }
}
