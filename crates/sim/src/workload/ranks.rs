//! Zipf's law over zones that lie anywhere.

use crate::rng::Rng;

/// Zones by popularity: the zone of rank r has a share of `1 / r^s`.
#[derive(Clone, Debug)]
pub(super) struct Ranks {
    /// Up to which part of all accesses the ranks up to this one take.
    shares: Vec<f64>,
    /// Where the zone of each rank lies.
    places: Vec<u64>,
}

impl Ranks {
    /// `active` zones out of `span`, placed at random.
    pub(super) fn new(active: u64, span: u64, exponent: f64, rng: &Rng) -> Self {
        let mut sum = 0.0;
        let weights = (1..=active).map(|rank| {
            sum += (rank as f64).powf(-exponent);
            sum
        });
        let mut shares: Vec<f64> = weights.collect();
        shares.iter_mut().for_each(|share| *share /= sum);
        // The first `active` of a shuffled deck.
        let mut places: Vec<u64> = (0..span).collect();
        for index in 0..active as usize {
            let other = index + rng.below(span - index as u64) as usize;
            places.swap(index, other);
        }
        places.truncate(active as usize);
        Self { shares, places }
    }

    pub(super) fn draw(&self, rng: &Rng) -> u64 {
        let throw = rng.fraction();
        let rank = self.shares.partition_point(|share| *share <= throw);
        self.places[rank.min(self.places.len() - 1)]
    }
}
