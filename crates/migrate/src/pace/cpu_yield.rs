//! Pauses in which the copy yields its processor.
//!
//! Where both devices answer at once (memory, the page cache) the copy never waits. A guest's worker that wakes on the
//! copy's processor then waits until the scheduler preempts the copy. That takes up to a tick of 4 ms, whatever the
//! copy's nice value is. So after every small copy the copy's thread sleeps for some microseconds. When it wakes the
//! processor may be taken. For as long as the copy was kept waiting it may then be busy before it sleeps again, up to a
//! limit. So it keeps a part of an overloaded machine.

use std::time::Duration;

use env::Moment;

/// So much time of being kept waiting is given back at most.
const CREDIT_MAX: Duration = Duration::from_millis(1);

/// When to yield.
#[derive(Default)]
pub(crate) struct CpuYield {
    /// When the last one ended.
    since: Moment,
    /// How long the copy may be busy from then on.
    credit: Duration,
}

impl CpuYield {
    /// Whether it is time to.
    pub(crate) fn is_due(&self, now: Moment) -> bool {
        now.since(self.since) >= self.credit
    }

    /// One has begun and ended.
    pub(crate) fn record(&mut self, began: Moment, ended: Moment) {
        self.since = ended;
        self.credit = ended.since(began).min(CREDIT_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A copier whose copies take `taken_us` and whose yields take `breath_us`. Gives which part of a second it is
    /// busy, and how long at most without a yield.
    fn drive(taken_us: u64, breath_us: u64) -> (f64, Duration) {
        let (mut cpu_yield, mut now) = (CpuYield::default(), Moment::default());
        let (mut busy, mut stretch, mut longest) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
        while now < Moment(Duration::from_secs(1)) {
            let taken = Duration::from_micros(taken_us);
            (now, busy, stretch) = (now + taken, busy + taken, stretch + taken);
            longest = longest.max(stretch);
            if cpu_yield.is_due(now) {
                let began = now;
                now = now + Duration::from_micros(breath_us);
                cpu_yield.record(began, now);
                stretch = Duration::ZERO;
            }
        }
        (busy.as_secs_f64() / now.0.as_secs_f64(), longest)
    }

    #[test]
    fn on_a_free_processor_every_copy_is_followed_by_a_breath() {
        let (part, stretch) = drive(100, 30);
        assert_eq!(stretch, Duration::from_micros(100));
        assert!(part > 0.7, "{part}");
    }

    #[test]
    fn a_copy_that_is_kept_waiting_keeps_a_part_of_the_time() {
        let (part, stretch) = drive(100, 800);
        assert!((0.4..0.6).contains(&part), "{part}");
        assert!(stretch <= Duration::from_micros(900), "{stretch:?}");
    }

    #[test]
    fn however_long_it_was_kept_waiting_the_copy_is_not_busy_for_long() {
        let (part, stretch) = drive(100, 20_000);
        assert!(stretch <= CREDIT_MAX + Duration::from_micros(100), "{stretch:?}");
        assert!(part > 0.04, "{part}");
    }
}
