//! A load on a part of a volume.

use super::{Step, Workload};
use crate::model::Verb;
use crate::rng::Rng;

/// Another load, beginning at a byte that is not the volume's first.
#[derive(Clone, Copy, Debug)]
pub struct Shifted<W> {
    start: u64,
    load: W,
}

impl<W: Workload> Shifted<W> {
    /// `load`, with its first byte at `start`.
    #[must_use]
    pub const fn new(start: u64, load: W) -> Self {
        Self { start, load }
    }
}

impl<W: Workload> Workload for Shifted<W> {
    fn next(&mut self, rng: &Rng) -> Option<Step> {
        let mut step = self.load.next(rng)?;
        if step.request.verb != Verb::Flush {
            step.request.offset += self.start;
        }
        Some(step)
    }
}
