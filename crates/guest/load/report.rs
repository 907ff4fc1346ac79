//! Latencies counted without a lock, and the lines that carry them out of the guest.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Buckets of 1/16 of a power of two: a percentile is right to about six percent.
const STEPS: u64 = 16;
const BUCKETS: usize = 48 * STEPS as usize;

/// What was measured since it was last taken.
pub(crate) struct Meter {
    buckets: Vec<AtomicU64>,
    longest_us: AtomicU64,
    reads: AtomicU64,
    writes: AtomicU64,
    total_us: AtomicU64,
}

/// What [`Meter::take`] took.
pub(crate) struct Taken {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) p50_us: u64,
    pub(crate) p99_us: u64,
    pub(crate) p999_us: u64,
    pub(crate) mean_us: u64,
    pub(crate) longest_us: u64,
}

impl Meter {
    pub(crate) fn new() -> Self {
        Self {
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            longest_us: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            total_us: AtomicU64::new(0),
        }
    }

    pub(crate) fn note(&self, is_read: bool, latency: Duration) {
        let us = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        self.buckets[bucket_of(us)].fetch_add(1, Ordering::Relaxed);
        self.total_us.fetch_add(us, Ordering::Relaxed);
        self.longest_us.fetch_max(us, Ordering::Relaxed);
        let count = if is_read { &self.reads } else { &self.writes };
        count.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn take(&self) -> Taken {
        let counts: Vec<u64> = self.buckets.iter().map(|bucket| bucket.swap(0, Ordering::Relaxed)).collect();
        let longest_us = self.longest_us.swap(0, Ordering::Relaxed);
        let percentile = |share: f64| {
            let total: u64 = counts.iter().sum();
            let rank = (total as f64 * share).ceil() as u64;
            let mut seen = 0;
            let bucket = counts.iter().position(|count| {
                seen += count;
                total > 0 && seen >= rank
            });
            bucket.map_or(0, |bucket| upper_us(bucket).min(longest_us))
        };
        Taken {
            reads: self.reads.swap(0, Ordering::Relaxed),
            writes: self.writes.swap(0, Ordering::Relaxed),
            p50_us: percentile(0.5),
            p99_us: percentile(0.99),
            p999_us: percentile(0.999),
            mean_us: self.total_us.swap(0, Ordering::Relaxed).checked_div(counts.iter().sum()).unwrap_or(0),
            longest_us,
        }
    }
}

impl Taken {
    /// The fields of an `interval` line.
    pub(crate) fn fields(&self) -> String {
        let Self { reads, writes, p50_us, p99_us, p999_us, mean_us, longest_us } = self;
        format!(
            "reads={reads} writes={writes} mean_us={mean_us} p50_us={p50_us} p99_us={p99_us} p999_us={p999_us} \
             max_us={longest_us}"
        )
    }
}

fn bucket_of(us: u64) -> usize {
    let bucket = if us < STEPS {
        us
    } else {
        let power = u64::from(us.ilog2()) - u64::from(STEPS.ilog2());
        power * STEPS + (us >> power)
    };
    usize::try_from(bucket).map_or(BUCKETS - 1, |bucket| bucket.min(BUCKETS - 1))
}

fn upper_us(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < 2 * STEPS {
        return bucket;
    }
    let power = bucket / STEPS - 1;
    ((bucket - power * STEPS + 1) << power) - 1
}
