//! A trace as a load.

use std::time::Duration;

use super::{Step, Workload};
use crate::rng::Rng;
use crate::trace::Record;

/// The requests of a trace in its order.
pub struct Replay {
    records: std::vec::IntoIter<Record>,
    first: Duration,
    open: bool,
    speed: f64,
}

impl Replay {
    /// At the trace's own times, whatever the disk does.
    #[must_use]
    pub fn open_loop(records: Vec<Record>) -> Self {
        let first = records.first().map_or(Duration::ZERO, |record| record.at);
        Self { records: records.into_iter(), first, open: true, speed: 1.0 }
    }

    /// As fast as answers come, with as many outstanding as whoever plays it allows.
    #[must_use]
    pub fn closed_loop(records: Vec<Record>) -> Self {
        Self { open: false, ..Self::open_loop(records) }
    }

    /// The same, `factor` times as fast.
    #[must_use]
    pub const fn faster(mut self, factor: f64) -> Self {
        self.speed = factor;
        self
    }
}

impl Workload for Replay {
    fn next(&mut self, _: &Rng) -> Option<Step> {
        let record = self.records.next()?;
        let since = record.at.saturating_sub(self.first);
        let at = if self.open { since.div_f64(self.speed) } else { Duration::ZERO };
        Some(Step { at, request: record.request })
    }
}
