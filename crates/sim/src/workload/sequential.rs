//! One place after another.

use std::time::Duration;

use super::{Step, Workload, read_or_write};
use crate::model::Request;
use crate::rng::Rng;

/// A stream from `start` to `end`, around again or once, as fast as it can or at a rate.
#[derive(Clone, Copy, Debug)]
pub struct Sequential {
    start: u64,
    end: u64,
    length: u64,
    reads: f64,
    next: u64,
    rate: Option<u64>,
    sent: u64,
    once: bool,
}

impl Sequential {
    /// Around and around from `start` to `end` in requests of `length`, the part `reads` of them reading.
    #[must_use]
    pub const fn new(start: u64, end: u64, length: u64, reads: f64) -> Self {
        Self { start, end, length, reads, next: start, rate: None, sent: 0, once: false }
    }

    /// The same at `rate` bytes a second at most, in even steps.
    #[must_use]
    pub const fn at_rate(mut self, rate: u64) -> Self {
        self.rate = Some(rate);
        self
    }

    /// The same, ending at the end.
    #[must_use]
    pub const fn once(mut self) -> Self {
        self.once = true;
        self
    }
}

impl Workload for Sequential {
    fn next(&mut self, rng: &Rng) -> Option<Step> {
        if self.next + self.length > self.end {
            if self.once {
                return None;
            }
            self.next = self.start;
        }
        let at = self.rate.map_or(0.0, |rate| self.sent as f64 / rate as f64);
        let request: Request = read_or_write(self.reads, self.next, self.length, rng);
        self.next += self.length;
        self.sent += self.length;
        Some(Step { at: Duration::from_secs_f64(at), request })
    }
}
