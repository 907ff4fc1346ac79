//! Loads with the published characteristics of the SPC traces. **Synthetic**: what they generate is no trace, and is
//! called synthetic wherever it is shown.
//!
//! Published are read ratio, IOPS and mean size (dissertation, table 3.5). The rest of the parameters was fitted to the
//! openings of Financial1 and WebSearch1 that are in public repositories. These parameters are sizes by direction, and
//! the skew over zones of 1 MiB (Zipf, ranks laid at random). Two more are how often a request continues one of the
//! last 32, and gaps between requests by a gamma law. For Financial2, WebSearch2 and 3 no part of the traces was
//! available. Sizes were chosen to meet the published mean, and the rest is taken from their namesakes.

use std::collections::VecDeque;
use std::time::Duration;

use super::ranks::Ranks;
use super::{Step, Workload};
use crate::model::Request;
use crate::rng::Rng;

/// What a synthetic load is like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Characteristics {
    /// Its name; all of them begin with `synthetic-`.
    pub name: &'static str,
    /// Which part reads.
    pub reads: f64,
    /// Requests a second.
    pub iops: f64,
    /// Lengths of reads in bytes, and how often each is asked for (weights).
    pub read_sizes: &'static [(u64, f64)],
    /// The same for writes.
    pub write_sizes: &'static [(u64, f64)],
    /// The coefficient of variation of the gaps.
    pub gap_variation: f64,
    /// Zipf's exponent over zones of 1 MiB.
    pub zipf_exponent: f64,
    /// How many zones are used at all.
    pub zones_active: u64,
    /// Over how many they are spread.
    pub zones: u64,
    /// How often a request continues one of the last 32.
    pub continues: f64,
}

const FINANCIAL_SIZES: [&[(u64, f64)]; 2] = [
    &[(8192, 74.0), (512, 12.0), (3072, 6.0), (1024, 4.0), (4096, 4.0)],
    &[
        (3072, 28.4),
        (1024, 16.0),
        (512, 12.5),
        (3584, 12.5),
        (49152, 7.1),
        (8192, 6.0),
        (2560, 4.5),
        (4096, 4.0),
        (1536, 3.0),
        (2048, 2.0),
        (12288, 2.0),
        (6656, 2.0),
    ],
];

impl Characteristics {
    /// Like Financial1.
    pub const FINANCIAL1: Self = Self {
        name: "synthetic-financial1",
        reads: 0.328,
        iops: 69.0,
        read_sizes: FINANCIAL_SIZES[0],
        write_sizes: FINANCIAL_SIZES[1],
        gap_variation: 2.4,
        zipf_exponent: 0.85,
        zones_active: 219,
        zones: 490,
        continues: 0.52,
    };
    /// Like Financial2.
    pub const FINANCIAL2: Self = Self {
        name: "synthetic-financial2",
        reads: 0.824,
        iops: 125.0,
        read_sizes: &[(2048, 40.0), (512, 24.0), (4096, 16.0), (1024, 15.0), (8192, 5.0)],
        write_sizes: &[(2048, 30.0), (512, 25.0), (4096, 25.0), (1024, 10.0), (8192, 10.0)],
        ..Self::FINANCIAL1
    };
    /// Like WebSearch1.
    pub const WEB_SEARCH1: Self = Self {
        name: "synthetic-websearch1",
        reads: 1.0,
        iops: 113.0,
        read_sizes: &[(8192, 59.8), (16384, 11.7), (24576, 8.3), (32768, 20.2)],
        write_sizes: &[],
        gap_variation: 1.18,
        zipf_exponent: 0.5,
        zones_active: 5576,
        zones: 17074,
        continues: 0.3,
    };
    /// Like WebSearch2.
    pub const WEB_SEARCH2: Self = Self {
        name: "synthetic-websearch2",
        iops: 100.3,
        read_sizes: &[(8192, 60.5), (16384, 11.9), (24576, 8.0), (32768, 19.6)],
        ..Self::WEB_SEARCH1
    };
    /// Like WebSearch3.
    pub const WEB_SEARCH3: Self = Self {
        name: "synthetic-websearch3",
        iops: 63.5,
        read_sizes: &[(8192, 59.4), (16384, 11.7), (24576, 8.3), (32768, 20.6)],
        ..Self::WEB_SEARCH1
    };
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::FINANCIAL1, Self::FINANCIAL2, Self::WEB_SEARCH1, Self::WEB_SEARCH2, Self::WEB_SEARCH3];

    /// How large the volume has to be.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.zones * ZONE_BYTES
    }
}

const ZONE_BYTES: u64 = 1 << 20;
const SECTOR_BYTES: u64 = 512;
const REMEMBERED: usize = 32;

/// A synthetic load. Open loop; without end.
#[derive(Clone, Debug)]
pub struct Synthetic {
    characteristics: Characteristics,
    ranks: Ranks,
    now: f64,
    /// Where the last requests ended.
    ends: VecDeque<u64>,
}

impl Synthetic {
    /// `rng` places the zones.
    #[must_use]
    pub fn new(characteristics: Characteristics, rng: &Rng) -> Self {
        let Characteristics { zones_active, zones, zipf_exponent, .. } = characteristics;
        let ranks = Ranks::new(zones_active, zones, zipf_exponent, rng);
        Self { characteristics, ranks, now: 0.0, ends: VecDeque::new() }
    }
}

impl Workload for Synthetic {
    fn next(&mut self, rng: &Rng) -> Option<Step> {
        let like = &self.characteristics;
        let shape = 1.0 / (like.gap_variation * like.gap_variation);
        self.now += gamma(shape, rng) / (shape * like.iops);
        let is_read = rng.chance(like.reads);
        let length = weighted(if is_read { like.read_sizes } else { like.write_sizes }, rng);
        let continued = rng.chance(like.continues) && !self.ends.is_empty();
        let offset = match continued {
            true => self.ends[rng.below(self.ends.len() as u64) as usize],
            false => self.ranks.draw(rng) * ZONE_BYTES + rng.below(ZONE_BYTES / SECTOR_BYTES) * SECTOR_BYTES,
        };
        let offset = offset.min(like.size() - length);
        if self.ends.len() == REMEMBERED {
            self.ends.pop_front();
        }
        self.ends.push_back(offset + length);
        let request = if is_read { Request::read(offset, length) } else { Request::write(offset, length) };
        Some(Step { at: Duration::from_secs_f64(self.now), request })
    }
}

fn weighted(choices: &[(u64, f64)], rng: &Rng) -> u64 {
    let sum: f64 = choices.iter().map(|choice| choice.1).sum();
    let mut throw = rng.fraction() * sum;
    for (value, weight) in choices {
        throw -= weight;
        if throw < 0.0 {
            return *value;
        }
    }
    choices.last().map_or(0, |choice| choice.0)
}

/// A number of the gamma law of `shape` and scale 1. The method is that of Marsaglia and Tsang, "A simple method for
/// generating gamma variables", 2000. Below a shape of 1 it is the one of their section 6.
fn gamma(shape: f64, rng: &Rng) -> f64 {
    if shape < 1.0 {
        return gamma(shape + 1.0, rng) * open_fraction(rng).powf(1.0 / shape);
    }
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let normal = (-2.0 * open_fraction(rng).ln()).sqrt() * (std::f64::consts::TAU * rng.fraction()).cos();
        let v = (1.0 + c * normal).powi(3);
        if v > 0.0 && open_fraction(rng).ln() < 0.5 * normal * normal + d - d * v + d * v.ln() {
            return d * v;
        }
    }
}

/// A number between 0 and 1, neither of them.
fn open_fraction(rng: &Rng) -> f64 {
    rng.fraction().max(f64::MIN_POSITIVE)
}
