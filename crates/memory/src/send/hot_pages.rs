//! Pages that are written in almost every round: to send them before the last one is in vain. They are told by the multi-stage filter
//! of `filters`, in little memory.

use filters::WriteFrequencySketch;

use crate::dirty_map::{DirtyMap, PageRun};
use crate::region::Region;

/// Before so many rounds nothing is called hot.
const ROUNDS_MIN: u16 = 3;
/// A hot page was written in at least this part of the rounds.
const SHARE: f64 = 0.75;
/// So many are enough: the counts age.
const ROUNDS_ENOUGH: f64 = 12.0;

pub(crate) struct HotPages {
    sketch: WriteFrequencySketch,
    /// The number of each region's first page.
    bases: Vec<u64>,
    rounds: u16,
}

impl HotPages {
    pub(crate) fn new(regions: &[Region], random: impl FnMut() -> u64) -> Self {
        let mut pages = 0;
        let mut base = |region: &Region| {
            let first = pages;
            pages += region.pages();
            first
        };
        let bases = regions.iter().map(&mut base).collect();
        Self { sketch: WriteFrequencySketch::new(pages, random), bases, rounds: 0 }
    }

    /// These pages were written in one round.
    pub(crate) fn note(&mut self, written: &DirtyMap) {
        self.rounds = self.rounds.saturating_add(1);
        for run in written.runs() {
            let first = self.bases[run.region] + run.page;
            (first..first + run.count).for_each(|page| _ = self.sketch.add(page));
        }
    }

    /// Moves hot pages from `pending` to `deferred`, as many as that may have.
    pub(crate) fn defer(&self, pending: &mut DirtyMap, deferred: &mut DirtyMap, pages_max: u64) {
        if self.rounds < ROUNDS_MIN || deferred.count() >= pages_max {
            return;
        }
        let least = (f64::from(self.rounds) * SHARE).min(ROUNDS_ENOUGH);
        let mut hot = Vec::new();
        let mut left = pages_max - deferred.count();
        'all: for run in pending.runs() {
            for page in run.page..run.end() {
                let count = f64::from(self.sketch.count(self.bases[run.region] + page));
                if count - self.sketch.noise() >= least {
                    if left == 0 {
                        break 'all;
                    }
                    left -= 1;
                    hot.push(PageRun { region: run.region, page, count: 1 });
                }
            }
        }
        for run in hot {
            pending.remove(run);
            deferred.insert(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::PAGE_BYTES;

    #[test]
    fn what_is_written_in_every_round_is_deferred_within_the_limit() {
        let region = |pages: u64| Region { name: "r".to_owned(), bytes: pages * PAGE_BYTES, page_bytes: PAGE_BYTES };
        let regions = [region(100_000), region(1000)];
        let mut state = 1_u64;
        let mut hot = HotPages::new(&regions, move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state
        });
        let (mut pending, mut deferred) = (DirtyMap::new(&regions), DirtyMap::new(&regions));
        for round in 0..4 {
            let mut written = DirtyMap::new(&regions);
            written.insert(PageRun { region: 1, page: 10, count: 20 });
            written.insert(PageRun { region: 0, page: round * 100, count: 100 });
            hot.note(&written);
            pending.merge(&written);
        }
        hot.defer(&mut pending, &mut deferred, 15);
        assert_eq!((deferred.count(), pending.count()), (15, 405));
        hot.defer(&mut pending, &mut deferred, 1000);
        let runs: Vec<_> = deferred.runs().collect();
        assert_eq!(runs, [PageRun { region: 1, page: 10, count: 20 }]);
    }
}
