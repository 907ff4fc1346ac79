//! The version of each page that was sent last, of as many pages as fit. What was written and is the same is not sent; what differs
//! little is sent as a difference.
//!
//! A page has one place, which its number says. The version there is that of the last sending or it is another page's: whoever
//! sends a page in any way says so here.

use parking_lot::Mutex;

use crate::region::PAGE_BYTES;

const PAGE: usize = PAGE_BYTES as usize;
/// Consumers seldom wait for each other.
const SHARDS: usize = 16;

/// What is known of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// The target has exactly this.
    Same,
    /// The difference from what the target has is in the buffer.
    Differs,
    /// Nothing.
    Nothing,
}

pub(crate) struct VersionCache {
    shards: Vec<Mutex<Shard>>,
    places: u64,
}

#[derive(Default)]
struct Shard {
    /// The page that has the place: its region and number.
    owners: Vec<Option<(u32, u32)>>,
    bytes: Vec<u8>,
}

impl VersionCache {
    /// A cache that takes at most so many bytes.
    pub(crate) fn new(bytes_max: usize) -> Self {
        let places = (bytes_max / PAGE / SHARDS * SHARDS) as u64;
        Self { shards: (0..SHARDS).map(|_| Mutex::default()).collect(), places }
    }

    /// Compares `bytes` with the version that was sent last; with a difference, `difference` becomes it.
    pub(crate) fn compare(&self, region: usize, page: u64, bytes: &[u8], difference: &mut [u8]) -> Known {
        let Some((shard, place)) = self.place(region, page) else { return Known::Nothing };
        let shard = self.shards[shard].lock();
        if shard.owners.get(place).copied().flatten() != Some(owner(region, page)) {
            return Known::Nothing;
        }
        let sent = &shard.bytes[place * PAGE..(place + 1) * PAGE];
        if sent == bytes {
            return Known::Same;
        }
        for ((difference, new), old) in difference.iter_mut().zip(bytes).zip(sent) {
            *difference = new ^ old;
        }
        Known::Differs
    }

    /// These bytes are being sent. A page that keeps another one out is left out if `only_free`.
    pub(crate) fn sent(&self, region: usize, page: u64, bytes: &[u8], only_free: bool) {
        let Some((shard, place)) = self.place(region, page) else { return };
        let mut shard = self.shards[shard].lock();
        let known = shard.owners.get(place).copied().flatten();
        if only_free && known.is_some_and(|known| known != owner(region, page)) {
            return;
        }
        if shard.owners.len() <= place {
            shard.owners.resize(place + 1, None);
            shard.bytes.resize((place + 1) * PAGE, 0);
        }
        shard.owners[place] = Some(owner(region, page));
        shard.bytes[place * PAGE..(place + 1) * PAGE].copy_from_slice(bytes);
    }

    /// Something else is being sent for this page.
    pub(crate) fn forget(&self, region: usize, page: u64) {
        let Some((shard, place)) = self.place(region, page) else { return };
        let mut shard = self.shards[shard].lock();
        if shard.owners.get(place).copied().flatten() == Some(owner(region, page)) {
            shard.owners[place] = None;
        }
    }

    /// The same of many pages.
    pub(crate) fn forget_run(&self, region: usize, page: u64, count: u64) {
        // No page has more than one place, so no more need be looked at than there are.
        if count >= self.places {
            let is_in =
                |known: &(u32, u32)| known.0 as usize == region && (page..page + count).contains(&known.1.into());
            for shard in &self.shards {
                shard
                    .lock()
                    .owners
                    .iter_mut()
                    .filter(|known| known.is_some_and(|known| is_in(&known)))
                    .for_each(|known| *known = None);
            }
            return;
        }
        (page..page + count).for_each(|page| self.forget(region, page));
    }

    /// Nothing is known any more.
    pub(crate) fn clear(&self) {
        self.shards.iter().for_each(|shard| *shard.lock() = Shard::default());
    }

    fn place(&self, region: usize, page: u64) -> Option<(usize, usize)> {
        let place = (page + region as u64 * 0x9e37_79b9).checked_rem(self.places)?;
        Some(((place % SHARDS as u64) as usize, (place / SHARDS as u64) as usize))
    }
}

/// Regions have no more than 2^32 pages (the wire's bound).
const fn owner(region: usize, page: u64) -> (u32, u32) {
    (region as u32, page as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_sent_last_is_known() {
        let cache = VersionCache::new(64 * PAGE);
        let (old, new) = (vec![1; PAGE], vec![3; PAGE]);
        let mut difference = vec![0; PAGE];
        assert_eq!(cache.compare(0, 5, &old, &mut difference), Known::Nothing);
        cache.sent(0, 5, &old, false);
        assert_eq!(cache.compare(0, 5, &old, &mut difference), Known::Same);
        assert_eq!(cache.compare(1, 5, &old, &mut difference), Known::Nothing);
        assert_eq!(cache.compare(0, 5, &new, &mut difference), Known::Differs);
        assert_eq!(difference, vec![2; PAGE]);
        // Another page takes the place, unless it may not.
        cache.sent(0, 69, &new, true);
        assert_eq!(cache.compare(0, 69, &new, &mut difference), Known::Nothing);
        assert_eq!(cache.compare(0, 5, &old, &mut difference), Known::Same);
        cache.sent(0, 69, &new, false);
        assert_eq!(cache.compare(0, 5, &old, &mut difference), Known::Nothing);
        cache.forget(0, 5);
        assert_eq!(cache.compare(0, 69, &new, &mut difference), Known::Same);
        cache.forget_run(0, 69, 1);
        assert_eq!(cache.compare(0, 69, &new, &mut difference), Known::Nothing);
        cache.sent(0, 69, &new, false);
        cache.forget_run(0, 0, 1 << 40);
        assert_eq!(cache.compare(0, 69, &new, &mut difference), Known::Nothing);
        cache.sent(0, 69, &new, false);
        cache.clear();
        assert_eq!(cache.compare(0, 69, &new, &mut difference), Known::Nothing);
    }

    #[test]
    fn a_cache_of_nothing_knows_nothing() {
        let cache = VersionCache::new(0);
        cache.sent(0, 1, &[0; PAGE], false);
        assert_eq!(cache.compare(0, 1, &[0; PAGE], &mut [0; PAGE]), Known::Nothing);
        cache.forget_run(0, 0, 10);
    }
}
