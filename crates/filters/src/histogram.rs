//! A histogram of latencies that one thread adds to and others read without a lock.
//!
//! ```text
//! microseconds    0 1 2 ... 31 | 32 33 ... 63 | 64 66 ... 126 | 128 132 ... | ...
//! bucket width         1       |      1       |       2       |      4      | ...
//! ```
//!
//! 32 buckets a power of two: a percentile is never more than 1/32 too large. 1024 of them reach nine hours.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Buckets a power of two, as a power of two.
const SUB_BITS: u32 = 5;
const SUB_COUNT: usize = 1 << SUB_BITS;
const BUCKETS: usize = SUB_COUNT * 32;

fn bucket_of(us: u64) -> usize {
    if us < SUB_COUNT as u64 {
        return us as usize;
    }
    let shift = us.ilog2() - SUB_BITS;
    let sub = (us >> shift) as usize & (SUB_COUNT - 1);
    ((shift as usize + 1) * SUB_COUNT + sub).min(BUCKETS - 1)
}

/// The largest latency that lands in `bucket`, in microseconds.
fn bucket_us_max(bucket: usize) -> u64 {
    if bucket < SUB_COUNT {
        return bucket as u64;
    }
    let shift = (bucket / SUB_COUNT - 1) as u32;
    let sub = (bucket % SUB_COUNT) as u64;
    ((SUB_COUNT as u64 + sub + 1) << shift) - 1
}

/// Adds to a counter that only the calling thread changes: no locked instruction, which would cost more than the rest
/// of what a meter does.
pub(crate) fn bump(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
}

/// Counts being added to.
pub(crate) struct AtomicHistogram {
    buckets: Box<[AtomicU64]>,
}

impl AtomicHistogram {
    pub(crate) fn new() -> Self {
        Self { buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect() }
    }

    pub(crate) fn add(&self, nanoseconds: u64) {
        bump(&self.buckets[bucket_of(nanoseconds / 1000)], 1);
    }

    pub(crate) fn add_to(&self, total: &mut LatencyHistogram) {
        for (sum, bucket) in total.buckets.iter_mut().zip(&self.buckets) {
            *sum += bucket.load(Ordering::Relaxed);
        }
    }
}

/// Counts of latencies at one moment, or in a window between two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LatencyHistogram {
    buckets: Box<[u64]>,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self { buckets: vec![0; BUCKETS].into() }
    }
}

impl LatencyHistogram {
    /// Counts one latency.
    pub fn add(&mut self, latency: Duration) {
        let us = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        self.buckets[bucket_of(us)] += 1;
    }

    /// Adds all counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (sum, count) in self.buckets.iter_mut().zip(&other.buckets) {
            *sum += count;
        }
    }

    /// What was counted after `earlier`, an older state of the same histogram.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let pairs = self.buckets.iter().zip(&earlier.buckets);
        Self { buckets: pairs.map(|(now, before)| now.saturating_sub(*before)).collect() }
    }

    /// How many latencies were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The latency that the share `quantile` (0 to 1) of all does not exceed, at most 1/32 too large; zero if nothing
    /// was counted.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> Duration {
        let total = self.count();
        let rank = ((total as f64 * quantile).ceil() as u64).clamp(1, total.max(1));
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Duration::from_micros(bucket_us_max(bucket));
            }
        }
        Duration::ZERO
    }

    /// All latencies together, off by at most 1/64: each counts as the middle of its bucket.
    #[must_use]
    pub fn sum(&self) -> Duration {
        let mut from = 0;
        let us = self.buckets.iter().enumerate().map(|(bucket, count)| {
            let end = bucket_us_max(bucket) + 1;
            let middle = (from + end) as f64 / 2.0;
            from = end;
            middle * *count as f64
        });
        Duration::from_secs_f64(us.sum::<f64>() / 1e6)
    }

    /// The longest latency counted, at most 1/32 too large.
    #[must_use]
    pub fn longest(&self) -> Duration {
        let last = self.buckets.iter().rposition(|count| *count > 0);
        last.map_or(Duration::ZERO, |bucket| Duration::from_micros(bucket_us_max(bucket)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_never_wider_than_a_thirty_second_of_its_latency() {
        let mut last = 0;
        for us in (0..5000).chain((0..36).map(|power| (1 << power) + (1 << power) / 3)) {
            let bucket = bucket_of(us);
            assert!(bucket >= last || us < 5000, "buckets are not in order at {us}");
            last = bucket;
            let max = bucket_us_max(bucket);
            assert!(max >= us && max - us <= us / 32, "{us} us was counted as {max} us");
        }
    }

    #[test]
    fn the_sum_is_off_by_no_more_than_half_a_bucket() {
        let mut histogram = LatencyHistogram::default();
        assert_eq!(histogram.sum(), Duration::ZERO);
        let latencies = (1..1000).map(|number: u64| Duration::from_micros(number * number));
        latencies.clone().for_each(|latency| histogram.add(latency));
        let (sum, expected) = (histogram.sum().as_secs_f64(), latencies.sum::<Duration>().as_secs_f64());
        assert!((sum / expected - 1.0).abs() <= 1.0 / 64.0, "{sum} instead of {expected}");
    }

    #[test]
    fn quantiles_come_from_a_window() {
        let mut histogram = LatencyHistogram::default();
        histogram.add(Duration::from_secs(1));
        let before = histogram.clone();
        for us in 1..=100 {
            histogram.add(Duration::from_micros(us));
        }
        let window = histogram.since(&before);
        assert_eq!(window.count(), 100);
        assert_eq!(window.quantile(0.5).as_micros(), 50);
        assert!((99..=102).contains(&window.quantile(0.99).as_micros()));
        assert!(window.longest() < Duration::from_micros(104));
        assert!(histogram.longest() >= Duration::from_secs(1));
        assert_eq!(LatencyHistogram::default().quantile(0.99), Duration::ZERO);
    }
}
