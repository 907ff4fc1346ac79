//! Addresses as the SPC traces have them: zones of 1 MiB, some of which get most of the requests, and which lie at random.

use crate::Random;
use crate::options::Options;

/// What a zone has.
pub(crate) const ZONE_BYTES: u64 = 1 << 20;

/// The zones that are used.
pub(crate) struct Zones {
    /// Their numbers, the most popular first.
    places: Vec<u64>,
    /// How often this zone or one before it is asked for, by Zipf's law.
    shares: Vec<f64>,
    slots_each: u64,
}

impl Zones {
    /// Lays the zones at random over `region` bytes.
    pub(crate) fn lay(options: &Options, region: u64, random: &mut Random) -> Self {
        let mut places: Vec<u64> = (0..region / ZONE_BYTES).collect();
        let count = options.zones.min(places.len());
        for index in 0..count {
            let other = index as u64 + random.below((places.len() - index) as u64);
            places.swap(index, other as usize);
        }
        places.truncate(count);
        let exponent = f64::from(options.zipf_percent) / 100.0;
        let mut sum = 0.0;
        let shares = (1..=count)
            .map(|rank| {
                sum += (rank as f64).powf(-exponent);
                sum
            })
            .collect();
        Self { places, shares, slots_each: ZONE_BYTES / u64::from(options.io_bytes) }
    }

    /// A slot of one of them.
    pub(crate) fn draw(&self, random: &mut Random) -> usize {
        let all = self.shares.last().copied().unwrap_or_default();
        let drawn = random.below(1 << 32) as f64 / (1_u64 << 32) as f64 * all;
        let rank = self.shares.partition_point(|share| *share <= drawn).min(self.places.len() - 1);
        (self.places[rank] * self.slots_each + random.below(self.slots_each)) as usize
    }
}
