//! How far a move is, when it will be over, and how sure that is: from what its rates did so far.
//!
//! Progress is what has come into step, less what the guest has made different again, in equal spans of time. The
//! expected time follows from the last quarter of the spans. The interval follows from the slow and the fast ones among
//! all spans. So a move whose rate has varied much has a wide interval.

use std::time::Duration;

use env::Moment;

use crate::Estimate;

/// So many spans at most; then each two become one.
const SPANS_MAX: usize = 64;
/// How long a span is at first.
const SPAN_FIRST: Duration = Duration::from_millis(250);
/// Fewer spans say nothing of how much rates change.
const SPANS_TELLING: usize = 4;
/// Then they may be so many times slower and faster.
const UNTOLD: f64 = 2.0;
/// However steady the rates were, the interval leaves so much room.
const ROOM: f64 = 0.1;
/// How far a move is when what is expected is kept for the report, in percent.
const KEPT_AT: [f64; 3] = [10.0, 50.0, 90.0];

/// How long something takes, and between which that lies, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Expected {
    pub(super) seconds: f64,
    pub(super) between: (f64, f64),
}

/// Rates in equal spans of time.
#[derive(Debug)]
struct Spans {
    rates: Vec<f64>,
    span: Duration,
    current: (Duration, f64),
}

impl Default for Spans {
    fn default() -> Self {
        Self { rates: Vec::new(), span: SPAN_FIRST, current: (Duration::ZERO, 0.0) }
    }
}

impl Spans {
    fn add(&mut self, time: Duration, work: f64) {
        self.current.0 += time;
        self.current.1 += work;
        if self.current.0 < self.span {
            return;
        }
        let (time, work) = std::mem::take(&mut self.current);
        self.rates.push(work / time.as_secs_f64());
        if self.rates.len() == SPANS_MAX {
            self.rates = self.rates.chunks(2).map(|pair| pair.iter().sum::<f64>() / pair.len() as f64).collect();
            self.span *= 2;
        }
    }

    /// How long `left` takes.
    fn expected(&self, left: f64) -> Option<Expected> {
        let count = self.rates.len();
        let late = &self.rates[count - count.div_ceil(4)..];
        let rate = late.iter().sum::<f64>() / late.len() as f64;
        // Of no rates the mean is no number.
        if rate.is_nan() || rate <= 0.0 {
            return None;
        }
        let (slow, fast) = if count < SPANS_TELLING {
            (rate / UNTOLD, rate * UNTOLD)
        } else {
            let mut sorted = self.rates.clone();
            sorted.sort_by(f64::total_cmp);
            (sorted[count / 10].clamp(rate / 10.0, rate), sorted[count - 1 - count / 10].max(rate))
        };
        Some(Expected { seconds: left / rate, between: (left / fast * (1.0 - ROOM), left / slow * (1.0 + ROOM)) })
    }
}

/// What is to be looked at.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EtaSample {
    pub(super) now: Moment,
    /// How long the move has taken.
    pub(super) age: Duration,
    /// Whether it copies or compares now.
    pub(super) is_moving: bool,
    pub(super) is_verifying: bool,
    pub(super) size: u64,
    /// What is in step now, and what has ever been at once.
    pub(super) had: u64,
    pub(super) had_most: u64,
    pub(super) verified: u64,
    /// What is compared in all, as far as that is known or expected.
    pub(super) to_verify: u64,
}

/// See the module's head.
#[derive(Debug, Default)]
pub(crate) struct Eta {
    copying: Spans,
    verifying: Spans,
    last: Option<(Moment, bool, f64)>,
    percent: f64,
    kept: Vec<Estimate>,
}

impl Eta {
    /// Gives how far the move is, in percent, which never goes back, and how long it still takes.
    pub(super) fn look(&mut self, look: EtaSample) -> (f64, Option<Expected>) {
        let all = (look.size + look.to_verify).max(1) as f64;
        let percent = 100.0 * (look.had_most + look.verified.min(look.to_verify)) as f64 / all;
        self.percent = percent.clamp(self.percent, 100.0);
        if !look.is_moving {
            self.last = None;
            return (self.percent, None);
        }
        let work = if look.is_verifying { look.verified } else { look.had } as f64;
        let spans = if look.is_verifying { &mut self.verifying } else { &mut self.copying };
        if let Some((then, was_verifying, before)) = self.last
            && was_verifying == look.is_verifying
        {
            spans.add(look.now.since(then), work - before);
        }
        self.last = Some((look.now, look.is_verifying, work));
        let to_verify = look.to_verify.saturating_sub(look.verified) as f64;
        let expected = match look.is_verifying {
            true => self.verifying.expected(to_verify),
            // Nothing is known of comparisons but that they read like the copy.
            false => self.copying.expected(look.size.saturating_sub(look.had) as f64 + to_verify),
        };
        if let Some(expected) = expected {
            self.keep(look.age, expected);
        }
        (self.percent, expected)
    }

    fn keep(&mut self, age: Duration, expected: Expected) {
        if KEPT_AT.get(self.kept.len()).is_none_or(|percent| self.percent < *percent) {
            return;
        }
        self.kept.push(Estimate {
            percent: self.percent,
            seconds: age.as_secs_f64(),
            eta_seconds: expected.seconds,
            eta_seconds_min: expected.between.0,
            eta_seconds_max: expected.between.1,
            error_percent: None,
        });
    }

    /// It is over.
    pub(super) const fn finish(&mut self) -> f64 {
        self.percent = 100.0;
        self.percent
    }

    /// What was expected on the way, and by how much of what the whole took, `seconds`, that was off.
    pub(super) fn kept(&self, seconds: Option<f64>) -> Vec<Estimate> {
        let off = |said: &Estimate| {
            seconds
                .filter(|seconds| *seconds > 0.0)
                .map(|seconds| ((said.seconds + said.eta_seconds) / seconds - 1.0) * 100.0)
        };
        self.kept.iter().map(|said| Estimate { error_percent: off(said), ..said.clone() }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A copy of 1000 MB in steps of 50 ms, with `rate` MB a second by the second.
    fn play(rate: impl Fn(f64) -> f64) -> (Eta, Vec<(f64, Option<Expected>)>, f64) {
        let (mut eta, mut said, mut had, mut at) = (Eta::default(), Vec::new(), 0.0, 0.0);
        while had < 1e9 {
            let age = Duration::from_secs_f64(at);
            let look = EtaSample {
                now: Moment(age),
                age,
                is_moving: true,
                size: 1_000_000_000,
                had: had as u64,
                had_most: had as u64,
                ..EtaSample::default()
            };
            said.push(eta.look(look));
            had += rate(at) * 1e6 * 0.05;
            at += 0.05;
        }
        (eta, said, at)
    }

    #[test]
    fn a_steady_copy_is_foretold_exactly_and_narrowly() {
        let (eta, said, took) = play(|_| 50.0);
        let (percent, expected) = said[said.len() / 2];
        let expected = expected.expect("half of it is done");
        assert!((percent - 50.0).abs() < 1.0 && (expected.seconds - 10.0).abs() < 0.3, "{percent} {expected:?}");
        assert!(expected.between.1 - expected.between.0 < 2.5, "{expected:?}");
        let kept = eta.kept(Some(took));
        assert_eq!(kept.len(), 3, "{kept:?}");
        assert!(kept.iter().all(|said| said.error_percent.is_some_and(|error| error.abs() < 2.0)), "{kept:?}");
    }

    #[test]
    fn a_rate_that_changes_makes_the_interval_wide_and_the_truth_lies_in_it() {
        let (_, said, took) = play(|at| if ((at / 2.0) as u64).is_multiple_of(2) { 80.0 } else { 20.0 });
        for (step, (_, expected)) in said.iter().enumerate().skip(100) {
            let left = took - step as f64 * 0.05;
            let Expected { between, .. } = expected.expect("it goes on");
            assert!(between.0 <= left && left <= between.1, "{left} s are left, {expected:?}");
        }
    }

    #[test]
    fn percent_never_goes_back_and_a_copy_that_loses_ground_has_no_end_in_sight() {
        let mut eta = Eta::default();
        let mut percents = Vec::new();
        let mut last = None;
        for step in 0..200_u64 {
            let age = Duration::from_millis(step * 50);
            let had = if step < 100 { step * 5 } else { 500 - (step - 100) };
            let (size, had_most) = (1000, had);
            let look =
                EtaSample { now: Moment(age), age, is_moving: true, size, had, had_most, ..EtaSample::default() };
            let (percent, expected) = eta.look(look);
            percents.push(percent);
            last = expected;
        }
        assert!(percents.is_sorted(), "{percents:?}");
        assert_eq!(last, None);
    }

    #[test]
    fn a_pause_is_no_slowness() {
        let (mut eta, _, _) = play(|_| 50.0);
        let now = Moment(Duration::from_secs(1000));
        assert_eq!(eta.look(EtaSample { now, size: 1_000_000_000, had: 1, ..EtaSample::default() }).1, None);
        let look = EtaSample { now, is_moving: true, size: 1_000_000_000, had: 500_000_000, ..EtaSample::default() };
        assert!(eta.look(look).1.is_some_and(|expected| (expected.seconds - 10.0).abs() < 0.5));
    }
}
