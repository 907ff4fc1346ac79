//! Requests of one kind, when each was made and how long its answer took.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// When it was made, or due, since the start.
    pub at: Duration,
    /// How long its answer took; `None` if none came, or none yet.
    pub latency: Option<Duration>,
}

/// The longest time without an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gap {
    /// When the last answer before it came, since the start.
    pub from: Duration,
    /// How long it was.
    pub length: Duration,
}

/// The requests of one part of a timeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimelineSlot {
    /// When it begins, since the start.
    pub at: Duration,
    /// Requests that were made in it.
    pub made: usize,
    /// How many of them were answered, at any time.
    pub answered: usize,
    /// The median latency of those.
    pub p50: Duration,
    /// The latency that one of a hundred exceeded.
    pub p99: Duration,
    /// The longest latency.
    pub longest: Duration,
}

/// Requests in the order in which they were made.
#[derive(Clone, Debug, Default)]
pub struct ProbeSeries {
    probes: Vec<Probe>,
}

impl ProbeSeries {
    /// Requests in the order in which they were made.
    #[must_use]
    pub fn new(probes: Vec<Probe>) -> Self {
        Self { probes }
    }

    /// All of them.
    #[must_use]
    pub fn probes(&self) -> &[Probe] {
        &self.probes
    }

    /// How many were made.
    #[must_use]
    pub fn made(&self) -> usize {
        self.probes.len()
    }

    /// How many were answered.
    #[must_use]
    pub fn answered(&self) -> usize {
        self.probes.iter().filter(|probe| probe.latency.is_some()).count()
    }

    /// How many were not.
    #[must_use]
    pub fn lost(&self) -> usize {
        self.made() - self.answered()
    }

    /// The longest time between two answers that followed each other.
    #[must_use]
    pub fn longest_gap(&self) -> Gap {
        let mut answers: Vec<Duration> =
            self.probes.iter().filter_map(|probe| Some(probe.at + probe.latency?)).collect();
        answers.sort_unstable();
        let gaps = answers.windows(2).map(|pair| Gap { from: pair[0], length: pair[1] - pair[0] });
        gaps.max_by_key(|gap| gap.length).unwrap_or_default()
    }

    /// The latency that all answered requests but a share of `1 - share` kept to.
    #[must_use]
    pub fn percentile(&self, share: f64) -> Duration {
        percentile(&sorted_latencies(&self.probes), share)
    }

    /// The longest latency.
    #[must_use]
    pub fn longest(&self) -> Duration {
        self.percentile(1.0)
    }

    /// The same over time, in slots of this length, from the first request to the last.
    #[must_use]
    pub fn timeline(&self, slot: Duration) -> Vec<TimelineSlot> {
        let number = |probe: &Probe| probe.at.as_nanos() / slot.as_nanos().max(1);
        let Some((first, last)) = self.probes.first().map(number).zip(self.probes.last().map(number)) else {
            return Vec::new();
        };
        let mut rest = self.probes.as_slice();
        let slots = (first..=last).map(|current| {
            let (inside, after) = rest.split_at(rest.partition_point(|probe| number(probe) <= current));
            rest = after;
            let latencies = sorted_latencies(inside);
            TimelineSlot {
                at: slot * u32::try_from(current).unwrap_or(u32::MAX),
                made: inside.len(),
                answered: latencies.len(),
                p50: percentile(&latencies, 0.5),
                p99: percentile(&latencies, 0.99),
                longest: percentile(&latencies, 1.0),
            }
        });
        slots.collect()
    }
}

impl fmt::Display for ProbeSeries {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Gap { from, length } = self.longest_gap();
        write!(out, "{} made, {} lost, ", self.made(), self.lost())?;
        write!(out, "p50 {:.1?}, p99 {:.1?}, ", self.percentile(0.5), self.percentile(0.99))?;
        write!(out, "longest {:.1?}, no answer for {length:.1?} at {from:.1?}", self.longest())
    }
}

fn sorted_latencies(probes: &[Probe]) -> Vec<Duration> {
    let mut latencies: Vec<Duration> = probes.iter().filter_map(|probe| probe.latency).collect();
    latencies.sort_unstable();
    latencies
}

fn percentile(sorted: &[Duration], share: f64) -> Duration {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or_default()
}

/// A series that several threads make.
pub(crate) struct Recorder {
    started: Instant,
    probes: Mutex<Vec<Probe>>,
}

impl Recorder {
    pub(crate) fn new(started: Instant) -> Self {
        Self { started, probes: Mutex::new(Vec::new()) }
    }

    /// Notes a request that is made now; returns its number.
    pub(crate) fn made_now(&self) -> usize {
        let mut probes = self.lock();
        probes.push(Probe { at: self.started.elapsed(), latency: None });
        probes.len() - 1
    }

    /// Notes the next request of a fixed rate; returns its number and when it is due.
    pub(crate) fn next_due(&self, per_second: u32) -> (usize, Instant) {
        let mut probes = self.lock();
        let at = Duration::from_secs(1) * u32::try_from(probes.len()).unwrap_or(u32::MAX) / per_second.max(1);
        probes.push(Probe { at, latency: None });
        (probes.len() - 1, self.started + at)
    }

    /// Notes an answer; the first one to a request counts.
    pub(crate) fn answered(&self, number: usize) {
        let now = self.started.elapsed();
        if let Some(probe) = self.lock().get_mut(number) {
            probe.latency.get_or_insert(now.saturating_sub(probe.at));
        }
    }

    /// Everything that was due by `end`.
    pub(crate) fn series(&self, end: Duration) -> ProbeSeries {
        ProbeSeries::new(self.lock().iter().filter(|probe| probe.at <= end).copied().collect())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Probe>> {
        self.probes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn gaps_losses_and_slots_follow_from_the_requests() {
        let probe = |at, latency: Option<u64>| Probe { at: ms(at), latency: latency.map(ms) };
        let series = ProbeSeries::new(vec![
            probe(0, Some(5)),
            probe(40, Some(1)),
            probe(90, None),
            probe(110, Some(70)),
            probe(310, Some(2)),
        ]);
        assert_eq!((series.made(), series.answered(), series.lost()), (5, 4, 1));
        assert_eq!(series.longest_gap(), Gap { from: ms(41), length: ms(139) });
        assert_eq!((series.percentile(0.5), series.longest()), (ms(2), ms(70)));
        let timeline = series.timeline(ms(100));
        let counts: Vec<_> = timeline.iter().map(|slot| (slot.at, slot.made, slot.answered, slot.longest)).collect();
        assert_eq!(
            counts,
            [(ms(0), 3, 2, ms(5)), (ms(100), 1, 1, ms(70)), (ms(200), 0, 0, ms(0)), (ms(300), 1, 1, ms(2))]
        );
        assert_eq!(ProbeSeries::default().timeline(ms(100)), []);
        assert_eq!(ProbeSeries::default().longest_gap(), Gap::default());
    }
}
