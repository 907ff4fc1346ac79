//! How fast copies are, by the kind of pass that has shown it, and how long a hold takes by that.
//!
//! The first pass is a stream: devices read ahead of it, and it is copied in large pieces. What the guest has written
//! since lies scattered, and a disk that streams 200 MB/s may copy 10 MB/s of that. So a rate counts for its own kind
//! only. Until scattered chunks have been copied once, their expected rate is that of the slowest disks.

use std::time::Duration;

/// What the copy of one scattered chunk takes before any has been seen, in seconds. It is the seek time and the
/// rotational delay of a slow disk.
const CHUNK_UNKNOWN: f64 = 7e-3;
/// What a flush takes before one has been seen, but no more than this part of the downtime limit.
const FLUSH_FIRST: Duration = Duration::from_millis(10);
const FLUSH_FIRST_PART: u32 = 4;
/// Nothing beside the copy is expected to be faster than this.
const BESIDE_MIN: Duration = Duration::from_millis(2);
/// A hold makes copies look so many times slower than those of a pass at most.
const SLOWNESS_MAX: f64 = 16.0;
/// No expectation is longer than this many seconds.
const SECONDS_MAX: f64 = 1e9;

/// What a pass goes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The whole volume, in its order.
    Whole,
    /// What the guest has written, wherever that is.
    Scattered,
}

/// What is known of how fast copies are.
#[derive(Clone, Debug)]
pub(crate) struct Rates {
    /// What is expected of scattered chunks before any have been copied, in bytes a second.
    unknown: f64,
    whole: Option<f64>,
    scattered: Option<f64>,
    /// Of the last pass, of whatever kind.
    last: Option<f64>,
    /// How many times slower copies were while the guest was held than expected.
    slowness: f64,
    flush: Duration,
    record: Duration,
}

impl Rates {
    /// Nothing is known yet, of a move in chunks of `chunk` bytes that may hold the guest for `limit`.
    pub(crate) fn new(chunk: u64, limit: Duration) -> Self {
        let [whole, scattered, last] = [None; 3];
        let flush = FLUSH_FIRST.min(limit / FLUSH_FIRST_PART);
        let unknown = chunk as f64 / CHUNK_UNKNOWN;
        Self { unknown, whole, scattered, last, slowness: 1.0, flush, record: Duration::ZERO }
    }

    /// Copies of so many bytes took so long, with the time in which none was under way left out.
    pub(crate) fn note_pass(&mut self, kind: Kind, bytes: u64, busy: Duration) {
        if bytes == 0 || busy.is_zero() {
            return;
        }
        let rate = bytes as f64 / busy.as_secs_f64();
        self.last = Some(rate);
        match kind {
            Kind::Whole => self.whole = Some(rate),
            Kind::Scattered => {
                // The slower of two neighbours: few chunks are copied slower than many.
                self.scattered = Some(self.scattered.map_or(rate, |before| rate.min(f64::midpoint(rate, before))));
                // What made a hold slow may have passed.
                self.slowness = self.slowness.sqrt();
            }
        }
    }

    /// While the guest was held, so many bytes were copied in so long.
    pub(crate) fn note_hold(&mut self, bytes: u64, took: Duration) {
        let expected = bytes as f64 / self.in_hold();
        self.slowness = (took.as_secs_f64() / expected.max(1e-9)).clamp(self.slowness, SLOWNESS_MAX);
    }

    /// A flush of the target took so long.
    pub(crate) fn note_flush(&mut self, took: Duration) {
        self.flush = self.flush / 2 + took / 2;
    }

    /// A record in the journal took so long.
    pub(crate) fn note_record(&mut self, took: Duration) {
        self.record = self.record.max(took);
    }

    /// Whether scattered chunks have been copied, so that [`hold`](Self::hold) rests on something.
    pub(crate) const fn knows_scattered(&self) -> bool {
        self.scattered.is_some()
    }

    /// What a hold takes beside the copy: a flush and the record.
    pub(crate) fn beside(&self) -> Duration {
        (self.flush + self.record).max(BESIDE_MIN)
    }

    /// What the record takes.
    pub(crate) const fn record(&self) -> Duration {
        self.record
    }

    /// How long the guest would be held for the copy of so much that lies scattered.
    pub(crate) fn hold(&self, bytes: u64) -> Duration {
        self.beside() + span(bytes, self.in_hold() / self.slowness)
    }

    /// How long a pass over so much takes, as the last one went.
    pub(crate) fn pass(&self, bytes: u64) -> Duration {
        span(bytes, self.last.unwrap_or(self.unknown))
    }

    /// The same if the guest is held for it, whatever it consists of.
    pub(crate) fn forced_hold(&self, bytes: u64) -> Duration {
        self.beside() + span(bytes, self.last.unwrap_or(self.unknown) / self.slowness)
    }

    fn in_hold(&self) -> f64 {
        self.scattered.unwrap_or_else(|| self.whole.map_or(self.unknown, |rate| rate.min(self.unknown)))
    }
}

fn span(bytes: u64, rate: f64) -> Duration {
    Duration::from_secs_f64((bytes as f64 / rate.max(1e-3)).min(SECONDS_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_stream_s_rate_says_nothing_of_what_lies_scattered() {
        let mut rates = Rates::new(65_536, SECOND);
        rates.note_pass(Kind::Whole, 200_000_000, SECOND);
        assert_eq!(rates.pass(200_000_000), SECOND);
        assert!(rates.hold(100_000_000) > 9 * SECOND, "{:?}", rates.hold(100_000_000));
        rates.note_pass(Kind::Scattered, 20_000_000, SECOND);
        assert!(rates.knows_scattered() && rates.hold(20_000_000) < SECOND + FLUSH_FIRST * 2);
    }

    #[test]
    fn a_stream_slower_than_the_slowest_disk_is_believed() {
        let mut rates = Rates::new(65_536, SECOND);
        rates.note_pass(Kind::Whole, 1_000_000, SECOND);
        assert!(rates.hold(1_000_000) >= SECOND);
    }

    #[test]
    fn of_two_passes_the_slower_counts_for_more() {
        let mut rates = Rates::new(65_536, SECOND);
        rates.note_pass(Kind::Scattered, 10_000_000, SECOND);
        rates.note_pass(Kind::Scattered, 30_000_000, SECOND);
        let copy = rates.hold(20_000_000).saturating_sub(rates.beside());
        assert_eq!(copy, SECOND, "the mean of 10 and 30 MB/s");
        rates.note_pass(Kind::Scattered, 5_000_000, SECOND);
        assert_eq!(rates.hold(5_000_000).saturating_sub(rates.beside()), SECOND);
    }

    #[test]
    fn a_slow_hold_is_learned_from_and_forgiven_by_and_by() {
        let mut rates = Rates::new(65_536, SECOND);
        rates.note_pass(Kind::Scattered, 10_000_000, SECOND);
        rates.note_hold(1_000_000, SECOND);
        let copy = |rates: &Rates| rates.hold(1_000_000).saturating_sub(rates.beside()).as_secs_f64();
        assert!((copy(&rates) - 1.0).abs() < 0.01, "{}", copy(&rates));
        for _ in 0..4 {
            rates.note_pass(Kind::Scattered, 10_000_000, SECOND);
        }
        assert!(copy(&rates) < 0.12, "{}", copy(&rates));
        rates.note_hold(0, SECOND);
        assert!(copy(&rates) <= 0.1 * SLOWNESS_MAX + 0.01, "one hold without a copy is not the end: {}", copy(&rates));
    }
}
