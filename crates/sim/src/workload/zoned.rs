//! Hot zones as fio has them.

use super::{Step, Workload, at_once, read_or_write};
use crate::rng::Rng;

/// Parts of all accesses within parts of the file, the first zone first.
#[derive(Clone, Debug)]
pub struct Zoned {
    files: u64,
    file_bytes: u64,
    length: u64,
    reads: f64,
    /// Of each zone: up to which part of the accesses, from where and up to where in the file.
    zones: Vec<(f64, u64, u64)>,
}

impl Zoned {
    /// `zones` are percentages of accesses and of the file, as in fio's option; `files` such files lie one after another
    /// and are used alike.
    ///
    /// # Panics
    /// If either kind of percentages does not add up to 100.
    #[must_use]
    pub fn new(files: u64, file_bytes: u64, length: u64, reads: f64, zones: &[(u32, u32)]) -> Self {
        let sums = zones.iter().fold((0, 0), |sum, zone| (sum.0 + zone.0, sum.1 + zone.1));
        assert_eq!(sums, (100, 100), "zones cover all accesses and all of the file");
        let blocks = file_bytes / length;
        let (mut accesses, mut part) = (0, 0);
        let zones = zones.iter().map(|zone| {
            let from = blocks * u64::from(part) / 100;
            accesses += zone.0;
            part += zone.1;
            (f64::from(accesses) / 100.0, from, blocks * u64::from(part) / 100)
        });
        let zones = zones.collect();
        Self { files, file_bytes, length, reads, zones }
    }

    /// The Firepan paper's guest (figure 5): four files of `file_bytes`, 4 KiB, 80 % reads, `zoned:50/5:30/15:20/80`.
    #[must_use]
    pub fn firepan(file_bytes: u64) -> Self {
        Self::new(4, file_bytes, 4096, 0.8, &[(50, 5), (30, 15), (20, 80)])
    }
}

impl Workload for Zoned {
    fn next(&mut self, rng: &Rng) -> Option<Step> {
        let throw = rng.fraction();
        let zone = self.zones.iter().find(|zone| throw < zone.0).or(self.zones.last());
        let (_, from, to) = *zone.expect("there is a zone, or the sums would not be 100");
        let block = from + rng.below((to - from).max(1));
        let offset = rng.below(self.files) * self.file_bytes + block * self.length;
        at_once(read_or_write(self.reads, offset, self.length, rng))
    }
}
