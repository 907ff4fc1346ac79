//! How much a guest's program gets done, as it tells or as its client counts.

use std::time::{Duration, Instant};

/// How much was done by when, in the order of time.
#[derive(Debug, Default)]
pub(super) struct Counter {
    points: Vec<(Instant, f64)>,
}

impl Counter {
    /// Notes how much was done since the start. A figure that is less than the one before is not noted: who is counted has ended.
    pub(super) fn reached(&mut self, at: Instant, done: f64) {
        if self.points.last().is_none_or(|(_, before)| done >= *before) {
            self.points.push((at, done));
        }
    }

    /// Notes how much was done since the last time.
    pub(super) fn add(&mut self, at: Instant, done: f64) {
        let before = self.points.last().map_or(0.0, |(_, before)| *before);
        self.points.push((at, before + done));
    }

    /// How much was done a second between two moments; `None` if it is not known up to the second one.
    pub(super) fn rate(&self, from: Instant, to: Instant) -> Option<f64> {
        let done = self.at(to)? - self.at(from)?;
        Some(done / to.saturating_duration_since(from).as_secs_f64())
    }

    /// How much was done by then, where it is taken to have been done evenly between two figures.
    fn at(&self, moment: Instant) -> Option<f64> {
        let next = self.points.iter().position(|(at, _)| *at >= moment)?;
        let (end, done) = self.points[next];
        let Some((begin, before)) = next.checked_sub(1).map(|last| self.points[last]) else { return Some(done) };
        let share = (moment - begin).as_secs_f64() / (end - begin).max(Duration::from_nanos(1)).as_secs_f64();
        Some(before + (done - before) * share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_told_between_figures_and_never_beyond_the_last() {
        let start = Instant::now();
        let after = |ms| start + Duration::from_millis(ms);
        let mut counter = Counter::default();
        counter.reached(after(0), 0.0);
        counter.reached(after(1000), 100.0);
        counter.add(after(3000), 50.0);
        counter.reached(after(3500), 20.0);
        assert_eq!(counter.rate(after(0), after(1000)), Some(100.0));
        assert_eq!(counter.rate(after(500), after(2000)), Some(50.0), "half of one figure and half of the next");
        assert_eq!(counter.rate(after(1000), after(3200)), None, "what has ended is not known to have stood still");
    }
}
