//! Which pages are to be sent: one bit for each.

use crate::region::Region;

/// Pages that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// In which region.
    pub region: usize,
    /// The first one.
    pub page: u64,
    /// How many.
    pub count: u64,
}

impl PageRun {
    /// The page behind it.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.page + self.count
    }
}

/// A set of pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyMap {
    regions: Vec<Bits>,
    count: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Bits {
    words: Vec<u64>,
    pages: u64,
}

impl DirtyMap {
    /// No page of `regions`.
    #[must_use]
    pub fn new(regions: &[Region]) -> Self {
        let bits = |region: &Region| {
            let pages = region.pages();
            Bits { words: vec![0; pages.div_ceil(64) as usize], pages }
        };
        Self { regions: regions.iter().map(bits).collect(), count: 0 }
    }

    /// How many pages are in it.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// How much memory it takes, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.regions.iter().map(|bits| bits.words.capacity() * size_of::<u64>()).sum()
    }

    /// Whether this page is in it.
    #[must_use]
    pub fn contains(&self, region: usize, page: u64) -> bool {
        let bits = self.regions.get(region).filter(|bits| page < bits.pages);
        bits.is_some_and(|bits| bits.words[(page / 64) as usize] >> (page % 64) & 1 == 1)
    }

    /// Adds all pages.
    pub fn insert_all(&mut self) {
        for region in 0..self.regions.len() {
            let count = self.regions[region].pages;
            self.insert(PageRun { region, page: 0, count });
        }
    }

    /// Adds pages. Those behind the region's end are left out.
    pub fn insert(&mut self, run: PageRun) {
        self.change(run, |word, mask| {
            let new = mask & !*word;
            *word |= mask;
            i64::from(new.count_ones())
        });
    }

    /// Takes pages out.
    pub fn remove(&mut self, run: PageRun) {
        self.change(run, |word, mask| {
            let old = mask & *word;
            *word &= !mask;
            -i64::from(old.count_ones())
        });
    }

    fn change(&mut self, run: PageRun, one: impl Fn(&mut u64, u64) -> i64) {
        let Some(bits) = self.regions.get_mut(run.region) else { return };
        let end = run.page.saturating_add(run.count).min(bits.pages);
        let mut page = run.page;
        let mut change = 0;
        while page < end {
            let (word, bit) = ((page / 64) as usize, page % 64);
            let count = (64 - bit).min(end - page);
            change += one(&mut bits.words[word], mask(bit, count));
            page += count;
        }
        self.count = self.count.saturating_add_signed(change);
    }

    /// Adds all pages of `other`, a map of the same regions.
    pub fn merge(&mut self, other: &Self) {
        for (bits, others) in self.regions.iter_mut().zip(&other.regions) {
            for (word, other) in bits.words.iter_mut().zip(&others.words) {
                self.count += u64::from((other & !*word).count_ones());
                *word |= other;
            }
        }
    }

    /// Takes all pages out.
    pub fn clear(&mut self) {
        self.regions.iter_mut().for_each(|bits| bits.words.fill(0));
        self.count = 0;
    }

    /// The first pages in it from (`region`, `page`) on, as many as follow each other, but at most `limit`.
    #[must_use]
    pub fn next_run(&self, region: usize, page: u64, limit: u64) -> Option<PageRun> {
        let (mut region, mut page) = (region, page);
        loop {
            let bits = self.regions.get(region)?;
            if let Some(first) = bits.next(page, true) {
                let end = bits.next(first, false).unwrap_or(bits.pages);
                return Some(PageRun { region, page: first, count: (end - first).min(limit.max(1)) });
            }
            (region, page) = (region + 1, 0);
        }
    }

    /// All pages in it, in runs.
    pub fn runs(&self) -> impl Iterator<Item = PageRun> + '_ {
        let mut at = (0, 0);
        std::iter::from_fn(move || {
            let run = self.next_run(at.0, at.1, u64::MAX)?;
            at = (run.region, run.end());
            Some(run)
        })
    }
}

impl Bits {
    /// The first page from `from` on whose bit is `wanted`.
    fn next(&self, from: u64, wanted: bool) -> Option<u64> {
        if from >= self.pages {
            return None;
        }
        let flip = if wanted { 0 } else { u64::MAX };
        let mut index = (from / 64) as usize;
        let mut word = (self.words[index] ^ flip) & (u64::MAX << (from % 64));
        loop {
            if word != 0 {
                let page = index as u64 * 64 + u64::from(word.trailing_zeros());
                return (page < self.pages).then_some(page);
            }
            index += 1;
            word = *self.words.get(index)? ^ flip;
        }
    }
}

/// `count` bits (1 to 64) from `bit` on.
const fn mask(bit: u64, count: u64) -> u64 {
    (u64::MAX >> (64 - count)) << bit
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::region::PAGE_BYTES;

    fn regions() -> Vec<Region> {
        [300_u64, 1, 64, 129]
            .iter()
            .map(|pages| Region { name: pages.to_string(), bytes: pages * PAGE_BYTES, page_bytes: PAGE_BYTES })
            .collect()
    }

    proptest! {
        #[test]
        fn it_is_a_set_of_pages(steps in prop::collection::vec((any::<bool>(), 0_usize..5, 0_u64..320, 0_u64..200), 0..40)) {
            let regions = regions();
            let mut map = DirtyMap::new(&regions);
            let mut model = BTreeSet::new();
            for (is_added, region, page, count) in steps {
                let run = PageRun { region, page, count };
                let limit = regions.get(region).map_or(0, Region::pages);
                let pages = (page..(page + count).min(limit)).map(|page| (region, page));
                if is_added {
                    map.insert(run);
                    model.extend(pages);
                } else {
                    map.remove(run);
                    pages.for_each(|page| _ = model.remove(&page));
                }
            }
            prop_assert_eq!(map.count(), model.len() as u64);
            let told: Vec<_> = map.runs().flat_map(|run| (run.page..run.end()).map(move |page| (run.region, page))).collect();
            prop_assert_eq!(told, model.iter().copied().collect::<Vec<_>>());
            for (region, page) in [(0, 0), (0, 299), (1, 0), (3, 128), (3, 129), (9, 0)] {
                prop_assert_eq!(map.contains(region, page), model.contains(&(region, page)));
            }
            let mut other = DirtyMap::new(&regions);
            other.insert(PageRun { region: 0, page: 100, count: 50 });
            other.merge(&map);
            model.extend((100..150).map(|page| (0, page)));
            prop_assert_eq!(other.count(), model.len() as u64);
        }
    }

    #[test]
    fn a_run_is_cut_at_its_limit_and_at_the_regions_end() {
        let mut map = DirtyMap::new(&regions());
        map.insert_all();
        assert_eq!(map.count(), 494);
        assert_eq!(map.next_run(0, 10, 64), Some(PageRun { region: 0, page: 10, count: 64 }));
        assert_eq!(map.next_run(0, 290, 64), Some(PageRun { region: 0, page: 290, count: 10 }));
        assert_eq!(map.next_run(0, 300, 64), Some(PageRun { region: 1, page: 0, count: 1 }));
        map.clear();
        assert_eq!(map.next_run(0, 0, 1), None);
    }

    #[test]
    fn a_guest_of_64_gib_takes_two_mib() {
        let map = DirtyMap::new(&[Region { name: "ram".to_owned(), bytes: 64 << 30, page_bytes: PAGE_BYTES }]);
        assert_eq!(map.memory_bytes(), 2 << 20);
    }
}
