//! Hot spots by Zipf's law.

use super::ranks::Ranks;
use super::{Step, Workload, at_once, read_or_write};
use crate::rng::Rng;

/// Requests of one size, zones by Zipf's law, uniform within a zone.
#[derive(Clone, Debug)]
pub struct Zipf {
    ranks: Ranks,
    zone_bytes: u64,
    length: u64,
    reads: f64,
}

impl Zipf {
    /// Over a volume of `size` bytes in zones of `zone_bytes`; `rng` places the ranks.
    #[must_use]
    pub fn new(size: u64, zone_bytes: u64, length: u64, reads: f64, exponent: f64, rng: &Rng) -> Self {
        let zones = size / zone_bytes;
        Self { ranks: Ranks::new(zones, zones, exponent, rng), zone_bytes, length, reads }
    }
}

impl Workload for Zipf {
    fn next(&mut self, rng: &Rng) -> Option<Step> {
        let within = rng.below(self.zone_bytes / self.length) * self.length;
        let offset = self.ranks.draw(rng) * self.zone_bytes + within;
        at_once(read_or_write(self.reads, offset, self.length, rng))
    }
}
