//! A memory in this process with a dirty log that it keeps itself, as a VMM without a kernel's help would have it. Tests, the
//! simulator and the example of an embedding VMM use it.

use std::ops::Range;

use parking_lot::Mutex;

use crate::dirty_map::{DirtyMap, PageRun};
use crate::error::{Error, ErrorKind, Result};
use crate::guest_memory::{GuestMemory, TargetMemory};
use crate::region::{PAGE_BYTES, Region};

const PAGE: usize = PAGE_BYTES as usize;

/// Memory that is written through it.
pub struct EmulatedMemory {
    regions: Vec<Region>,
    state: Mutex<State>,
}

struct State {
    bytes: Vec<Vec<u8>>,
    dirty: DirtyMap,
    /// For tests of what a broken log leads to.
    forgets_every: Option<u64>,
    writes: u64,
}

impl EmulatedMemory {
    /// A memory of zeroes.
    #[must_use]
    pub fn new(regions: Vec<Region>) -> Self {
        let bytes = regions.iter().map(|region| vec![0; region.bytes as usize]).collect();
        let dirty = DirtyMap::new(&regions);
        Self { regions, state: Mutex::new(State { bytes, dirty, forgets_every: None, writes: 0 }) }
    }

    /// One region called `ram` with so many pages.
    #[must_use]
    pub fn with_pages(pages: u64) -> Self {
        Self::new(vec![Region { name: "ram".to_owned(), bytes: pages * PAGE_BYTES, page_bytes: PAGE_BYTES }])
    }

    /// A write of the guest, or of one of its devices.
    ///
    /// # Panics
    /// It is outside of the region.
    pub fn store(&self, region: usize, offset: u64, bytes: &[u8]) {
        let mut state = self.state.lock();
        let at = offset as usize;
        state.bytes[region][at..at + bytes.len()].copy_from_slice(bytes);
        state.writes += 1;
        let is_forgotten = state.forgets_every.is_some_and(|every| state.writes.is_multiple_of(every));
        if !is_forgotten && !bytes.is_empty() {
            let unit = self.regions[region].page_bytes.max(PAGE_BYTES);
            let (first, last) = (offset / unit * unit, (offset + bytes.len() as u64).div_ceil(unit) * unit);
            let (page, count) = (first / PAGE_BYTES, (last - first) / PAGE_BYTES);
            state.dirty.insert(PageRun { region, page, count });
        }
    }

    /// Bytes as the guest reads them.
    ///
    /// # Panics
    /// They are outside of the region.
    pub fn load(&self, region: usize, offset: u64, into: &mut [u8]) {
        let at = offset as usize;
        into.copy_from_slice(&self.state.lock().bytes[region][at..at + into.len()]);
    }

    /// From now on the log misses one in so many writes. For tests, which must notice.
    pub fn forget_every(&self, writes: u64) {
        self.state.lock().forgets_every = Some(writes);
    }

    /// The first page that differs from the one of `other`.
    #[must_use]
    pub fn first_difference(&self, other: &Self) -> Option<(usize, u64)> {
        let (ours, theirs) = (self.state.lock(), other.state.lock());
        let mut regions = ours.bytes.iter().zip(&theirs.bytes).enumerate();
        regions.find_map(|(region, (ours, theirs))| {
            if ours.len() != theirs.len() {
                return Some((region, 0));
            }
            let page = ours.chunks(PAGE).zip(theirs.chunks(PAGE)).position(|(ours, theirs)| ours != theirs)?;
            Some((region, page as u64))
        })
    }

    fn place(&self, region: usize, page: u64, length: usize) -> Result<Range<usize>> {
        let at = page.saturating_mul(PAGE_BYTES);
        let is_inside = self.regions.get(region).is_some_and(|region| at.saturating_add(length as u64) <= region.bytes);
        if !is_inside {
            return Err(Error::new(ErrorKind::Invalid, format!("page {page} of region {region} is not there")));
        }
        Ok(at as usize..at as usize + length)
    }
}

impl GuestMemory for EmulatedMemory {
    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn take_dirty(&self, into: &mut DirtyMap) -> Result<()> {
        let mut state = self.state.lock();
        into.merge(&state.dirty);
        state.dirty.clear();
        Ok(())
    }

    fn read(&self, region: usize, page: u64, into: &mut [u8]) -> Result<()> {
        let place = self.place(region, page, into.len())?;
        into.copy_from_slice(&self.state.lock().bytes[region][place]);
        Ok(())
    }

    fn next_data(&self, region: usize, page: u64) -> Result<Option<Range<u64>>> {
        let pages = self.regions.get(region).map_or(0, Region::pages);
        Ok((page < pages).then_some(page..pages))
    }
}

impl TargetMemory for EmulatedMemory {
    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn write(&self, region: usize, page: u64, bytes: &[u8]) -> Result<()> {
        let place = self.place(region, page, bytes.len())?;
        self.state.lock().bytes[region][place].copy_from_slice(bytes);
        Ok(())
    }

    fn zero(&self, region: usize, page: u64, count: u64) -> Result<()> {
        let place = self.place(region, page, (count * PAGE_BYTES) as usize)?;
        self.state.lock().bytes[region][place].fill(0);
        Ok(())
    }

    fn read(&self, region: usize, page: u64, into: &mut [u8]) -> Result<()> {
        GuestMemory::read(self, region, page, into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_marks_the_pages_that_it_touches() {
        let memory = EmulatedMemory::with_pages(10);
        memory.store(0, 4095, &[1, 2]);
        let mut dirty = DirtyMap::new(GuestMemory::regions(&memory));
        memory.take_dirty(&mut dirty).expect("taken");
        assert_eq!(dirty.runs().collect::<Vec<_>>(), [PageRun { region: 0, page: 0, count: 2 }]);
        dirty.clear();
        memory.take_dirty(&mut dirty).expect("taken");
        assert!(dirty.is_empty(), "it was taken before");
        let huge = EmulatedMemory::new(vec![Region { name: "huge".to_owned(), bytes: 4 << 20, page_bytes: 2 << 20 }]);
        huge.store(0, 3 << 20, &[1]);
        huge.take_dirty(&mut dirty).expect("taken");
        let mut dirty = DirtyMap::new(GuestMemory::regions(&huge));
        huge.store(0, 3 << 20, &[1]);
        huge.take_dirty(&mut dirty).expect("taken");
        assert_eq!(dirty.runs().collect::<Vec<_>>(), [PageRun { region: 0, page: 512, count: 512 }]);
    }

    #[test]
    fn what_is_outside_is_refused() {
        let memory = EmulatedMemory::with_pages(2);
        assert!(TargetMemory::write(&memory, 0, 2, &[0; 4096]).is_err());
        assert!(TargetMemory::zero(&memory, 1, 0, 1).is_err());
        assert!(TargetMemory::zero(&memory, 0, u64::MAX, 1).is_err());
        assert!(TargetMemory::zero(&memory, 0, 1, 1).is_ok());
    }
}
