//! Rests between copies, so that the copy uses a part of the time and not only a part of the window.
//!
//! A device that answers at once (memory, the page cache) has one copy under way at every moment, however small the
//! window is. There the copy costs the guest processor time, and only time without a copy gives it back. For the time
//! that copies were under way, `busy * (1 / duty_cycle - 1)` of rest is owed. Timers are no finer than a millisecond, so owed
//! rest adds up until it is worth one. Every moment without a copy counts as rest, whatever the reason. If a late timer
//! makes a rest too long, a little of the surplus is remembered.

use std::time::Duration;

use env::Moment;

/// No rest is shorter.
const REST_MIN: Duration = Duration::from_millis(1);
/// No rest is longer: on a slow device the copy goes on although more is owed.
const REST_MAX: Duration = Duration::from_millis(20);

/// So much too much rest is remembered.
const CREDIT_MAX: Duration = Duration::from_millis(2);

/// What the copy owes to everybody else.
#[derive(Default)]
pub(crate) struct DutyCycle {
    busy_until: Moment,
    /// In seconds; below zero it has rested too much.
    owed: f64,
}

impl DutyCycle {
    /// A copy was under way from `began` to `ended`, and copies may use `duty_cycle` of the time. Returns how long nothing is
    /// to be begun.
    pub(crate) fn record(&mut self, began: Moment, ended: Moment, duty_cycle: f64) -> Duration {
        self.owed = (self.owed - began.since(self.busy_until).as_secs_f64()).max(-CREDIT_MAX.as_secs_f64());
        // Copies that were under way together count once.
        let busy = ended.since(self.busy_until.max(began));
        self.busy_until = self.busy_until.max(ended);
        if duty_cycle >= 1.0 {
            self.owed = self.owed.min(0.0);
            return Duration::ZERO;
        }
        self.owed = (self.owed + busy.as_secs_f64() * (1.0 / duty_cycle - 1.0)).min(REST_MAX.as_secs_f64());
        if self.owed < REST_MIN.as_secs_f64() { Duration::ZERO } else { Duration::from_secs_f64(self.owed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A copier whose copies take `taken`, `lanes` of them at once, with timers that go off at whole milliseconds.
    /// Gives which part of a long time it is busy, and the longest time without and with a copy.
    fn drive(taken: Duration, lanes: u32, duty_cycle: f64) -> (f64, Duration, Duration) {
        let (mut rests, mut now) = (DutyCycle::default(), Moment::default());
        let (mut busy, mut burst) = (Duration::ZERO, Duration::ZERO);
        let (mut idle_longest, mut burst_longest) = (Duration::ZERO, Duration::ZERO);
        while now < Moment(Duration::from_secs(20)) {
            let began = now;
            now = now + taken;
            busy += taken;
            burst += taken;
            let rest = (0..lanes).map(|_| rests.record(began, now, duty_cycle)).max().unwrap_or_default();
            if rest > Duration::ZERO {
                let until = (now + rest).0.as_nanos().div_ceil(1_000_000) as u64 + 1;
                let until = Moment(Duration::from_millis(until));
                idle_longest = idle_longest.max(until.since(now));
                burst_longest = burst_longest.max(burst);
                burst = Duration::ZERO;
                now = until;
            }
        }
        (busy.as_secs_f64() / now.0.as_secs_f64(), idle_longest, burst_longest)
    }

    #[test]
    fn the_copy_is_busy_for_its_part_of_the_time() {
        for taken_us in [20, 300, 2000] {
            for lanes in [1, 4] {
                for duty_cycle in [0.125, 0.3, 0.7] {
                    let (part, _, _) = drive(Duration::from_micros(taken_us), lanes, duty_cycle);
                    assert!(
                        (part / duty_cycle - 1.0).abs() < 0.1,
                        "{part} instead of {duty_cycle}, {lanes} of {taken_us} us"
                    );
                }
            }
        }
    }

    #[test]
    fn bursts_of_short_copies_are_short() {
        let (_, idle, burst) = drive(Duration::from_micros(50), 1, 0.125);
        assert!(burst <= Duration::from_millis(1), "{burst:?}");
        assert!(idle <= Duration::from_millis(5), "{idle:?}");
    }

    #[test]
    fn a_slow_device_is_not_left_for_long() {
        let (part, idle, _) = drive(Duration::from_millis(100), 1, 0.125);
        assert!(idle <= REST_MAX + Duration::from_millis(2), "{idle:?}");
        assert!(part > 0.8, "{part}");
    }

    #[test]
    fn a_copy_with_all_of_the_time_never_rests_and_owes_nothing_later() {
        let mut rests = DutyCycle::default();
        let at = |ms| Moment(Duration::from_millis(ms));
        assert_eq!(rests.record(at(0), at(50), 1.0), Duration::ZERO);
        assert!(rests.record(at(50), at(52), 0.5) <= Duration::from_millis(2));
    }

    #[test]
    fn time_without_a_copy_pays() {
        let mut rests = DutyCycle::default();
        let at = |ms| Moment(Duration::from_millis(ms));
        assert_eq!(rests.record(at(0), at(4), 0.5), Duration::from_millis(4));
        assert!(rests.record(at(100), at(104), 0.5) <= Duration::from_millis(4), "what was paid is owed again");
    }
}
