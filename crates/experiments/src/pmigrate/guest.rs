//! A guest of the evaluation: its memory, its disk, and what it writes to both while it runs.
//!
//! A page is a number: how often it was written. Its bytes are made of that when somebody reads them. So a guest of 16 GiB takes few
//! megabytes, and the target can be compared with the source page by page. The disk is a second region of the same pages,
//! because the paper's consumers take tasks of both (section 3.1).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use memory::{DirtyMap, Error, ErrorKind, GuestMemory, PAGE_BYTES, PageRun, Region, TargetMemory};
use parking_lot::Mutex;
use sim::rng::Rng;
use sim::world::World;

/// The region that is memory, and the one that is the disk.
pub(super) const MEMORY: usize = 0;
pub(super) const DISK: usize = 1;
const PAGE: usize = PAGE_BYTES as usize;
/// The guest writes so often.
const TICK: Duration = Duration::from_millis(5);
/// The noise that pages are cut from; a prime, so that neighbours differ.
const NOISE_BYTES: usize = 65_521;
/// A page that was written names itself and its version in so many bytes.
const TAG_BYTES: usize = 16;

/// Writes of the guest: pages of a part of a region, each as likely as the others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writes {
    pub(super) region: usize,
    /// How much of the region, from its beginning, in bytes of the paper's guest.
    pub(super) set_bytes: u64,
    /// Bytes a second, in whole pages.
    pub(super) bytes_per_second: f64,
}

/// A guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct GuestFigures {
    /// Its memory and its disk, in bytes.
    pub(super) bytes: [u64; 2],
    /// How much of each is not zeroes; the beginning.
    pub(super) filled_bytes: [u64; 2],
    /// To which part of itself a page of each gets shorter; 1 for what does not.
    pub(super) compressed: [f64; 2],
    pub(super) writes: &'static [Writes],
}

struct Pages {
    versions: [Vec<u32>; 2],
    dirty: DirtyMap,
}

/// A guest that is there, at a scale.
pub(super) struct Guest {
    /// Its memory, and its disk if that goes along.
    regions: Vec<Region>,
    compressed: [f64; 2],
    filled: [u64; 2],
    pages: Mutex<Pages>,
    noise: Vec<u8>,
    runs: AtomicBool,
    /// Every write is made so many thousandths of the time.
    activity: AtomicU64,
    /// What was read since somebody asked, in bytes: together, and of each region since the beginning.
    read_bytes: AtomicU64,
    sent_bytes: [AtomicU64; 2],
}

impl Guest {
    pub(super) fn new(world: &World, figures: &GuestFigures, scale: u64) -> Arc<Self> {
        let pages_of = |bytes: u64| bytes.div_ceil(PAGE_BYTES * scale);
        let pages = figures.bytes.map(pages_of);
        let region = |(name, pages): (&str, u64)| Region {
            name: name.to_owned(),
            bytes: pages * PAGE_BYTES,
            page_bytes: PAGE_BYTES,
        };
        let regions: Vec<Region> =
            ["memory", "disk"].into_iter().zip(pages).filter(|(_, pages)| *pages > 0).map(region).collect();
        let filled = figures.filled_bytes.map(pages_of);
        let versions = [MEMORY, DISK]
            .map(|region| (0..pages[region]).map(|page| u32::from(page < filled[region])).collect::<Vec<u32>>());
        let rng = world.rng("contents");
        let noise = (0..NOISE_BYTES + PAGE).map(|_| rng.below(256) as u8).collect();
        Arc::new(Self {
            pages: Mutex::new(Pages { versions, dirty: DirtyMap::new(&regions) }),
            regions,
            compressed: figures.compressed,
            filled,
            noise,
            runs: AtomicBool::new(true),
            activity: AtomicU64::new(1000),
            read_bytes: AtomicU64::new(0),
            sent_bytes: Default::default(),
        })
    }

    /// Has it write as long as it runs.
    pub(super) fn start(self: &Arc<Self>, world: &World, figures: &GuestFigures, scale: u64) {
        for (number, writes) in figures.writes.iter().enumerate() {
            let (guest, world, rng) = (Arc::clone(self), world.clone(), world.rng(&format!("writes {number}")));
            let set = (writes.set_bytes / (PAGE_BYTES * scale)).clamp(1, self.regions[writes.region].pages());
            let (region, per_tick) = (writes.region, writes.bytes_per_second / PAGE_BYTES as f64 * TICK.as_secs_f64());
            world.clone().spawn(async move {
                let mut due = 0.0;
                loop {
                    world.sleep(TICK).await;
                    if guest.runs.load(Ordering::Relaxed) {
                        due += per_tick * guest.activity.load(Ordering::Relaxed) as f64 / 1000.0;
                        guest.write(&rng, region, set, due as u64);
                        due -= due.floor();
                    }
                }
            });
        }
    }

    fn write(&self, rng: &Rng, region: usize, set: u64, count: u64) {
        let mut pages = self.pages.lock();
        for _ in 0..count {
            let page = rng.below(set);
            pages.versions[region][page as usize] += 1;
            pages.dirty.insert(PageRun { region, page, count: 1 });
        }
    }

    /// From now on it does only this part of what it would.
    pub(super) fn slow_down(&self, part: f64) {
        self.activity.store((part * 1000.0) as u64, Ordering::Relaxed);
    }

    /// It writes nothing any more.
    pub(super) fn stop(&self) {
        self.runs.store(false, Ordering::Relaxed);
    }

    /// Whether a page was written since the dirty log was taken.
    pub(super) fn is_dirty(&self, region: usize, page: u64) -> bool {
        self.pages.lock().dirty.contains(region, page)
    }

    /// What was read since the last call, in bytes.
    pub(super) fn take_read_bytes(&self) -> u64 {
        self.read_bytes.swap(0, Ordering::Relaxed)
    }

    /// What was read of memory and disk, in bytes.
    pub(super) fn sent_bytes(&self) -> [u64; 2] {
        [MEMORY, DISK].map(|region| self.sent_bytes[region].load(Ordering::Relaxed))
    }

    /// Counts what a model reads that has no use for bytes.
    pub(super) fn count_read(&self, region: usize, bytes: u64) {
        self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.sent_bytes[region].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Whether a page is not zeroes from the beginning.
    pub(super) fn is_filled(&self, region: usize, page: u64) -> bool {
        page < self.filled[region]
    }

    /// The first page that is another one at the target.
    pub(super) fn first_difference(&self, target: &Arrived) -> Option<(usize, u64)> {
        let (ours, theirs) = (self.pages.lock(), target.versions.lock());
        [MEMORY, DISK].into_iter().find_map(|region| {
            let page = ours.versions[region].iter().zip(&theirs[region]).position(|(ours, theirs)| ours != theirs)?;
            Some((region, page as u64))
        })
    }

    /// The bytes of a page at a version.
    fn fill(&self, region: usize, page: u64, version: u32, into: &mut [u8]) {
        if version == 0 {
            into.fill(0);
            return;
        }
        let noisy = ((PAGE as f64 * self.compressed[region]) as usize).clamp(TAG_BYTES, PAGE);
        let seed = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(version).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let at = (seed >> 16) as usize % NOISE_BYTES;
        into[..noisy].copy_from_slice(&self.noise[at..at + noisy]);
        into[noisy..].fill(0xa5);
        into[..8].copy_from_slice(&page.to_le_bytes());
        into[8..12].copy_from_slice(&version.to_le_bytes());
        into[12..TAG_BYTES].copy_from_slice(&(region as u32).to_le_bytes());
    }
}

impl GuestMemory for Guest {
    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn take_dirty(&self, into: &mut DirtyMap) -> memory::Result<()> {
        let mut pages = self.pages.lock();
        into.merge(&pages.dirty);
        pages.dirty.clear();
        Ok(())
    }

    fn read(&self, region: usize, page: u64, into: &mut [u8]) -> memory::Result<()> {
        self.count_read(region, into.len() as u64);
        let pages = self.pages.lock();
        for (page, bytes) in (page..).zip(into.chunks_exact_mut(PAGE)) {
            self.fill(region, page, pages.versions[region][page as usize], bytes);
        }
        Ok(())
    }

    fn next_data(&self, region: usize, page: u64) -> memory::Result<Option<Range<u64>>> {
        // Whatever was written lies in what is filled.
        Ok((page < self.filled[region]).then_some(page..self.filled[region]))
    }
}

/// The guest's memory and disk at the target, by the versions that have come.
pub(super) struct Arrived {
    source: Arc<Guest>,
    versions: Mutex<[Vec<u32>; 2]>,
}

impl Arrived {
    pub(super) fn of(source: &Arc<Guest>) -> Arc<Self> {
        let none = |region: usize| vec![u32::MAX; source.regions.get(region).map_or(0, Region::pages) as usize];
        Arc::new(Self { versions: Mutex::new([none(MEMORY), none(DISK)]), source: Arc::clone(source) })
    }

    /// What a model has sent that has no use for bytes.
    pub(super) fn take_over(&self, region: usize, page: u64) {
        self.versions.lock()[region][page as usize] = self.source.pages.lock().versions[region][page as usize];
    }
}

impl TargetMemory for Arrived {
    fn regions(&self) -> &[Region] {
        &self.source.regions
    }

    fn write(&self, region: usize, page: u64, bytes: &[u8]) -> memory::Result<()> {
        let mut versions = self.versions.lock();
        let mut expected = vec![0; PAGE];
        for (page, bytes) in (page..).zip(bytes.chunks_exact(PAGE)) {
            let version = u32::from_le_bytes(bytes[8..12].try_into().expect("four bytes"));
            self.source.fill(region, page, version, &mut expected);
            if bytes != expected {
                return Err(Error::new(
                    ErrorKind::Target,
                    format!("page {page} of region {region} is none of its versions"),
                ));
            }
            versions[region][page as usize] = version;
        }
        Ok(())
    }

    fn zero(&self, region: usize, page: u64, count: u64) -> memory::Result<()> {
        self.versions.lock()[region][page as usize..(page + count) as usize].fill(0);
        Ok(())
    }

    fn read(&self, region: usize, page: u64, into: &mut [u8]) -> memory::Result<()> {
        let versions = self.versions.lock();
        for (page, bytes) in (page..).zip(into.chunks_exact_mut(PAGE)) {
            match versions[region][page as usize] {
                u32::MAX => return Err(Error::new(ErrorKind::Target, format!("page {page} has not come yet"))),
                version => self.source.fill(region, page, version, bytes),
            }
        }
        Ok(())
    }
}
