//! What the paper compares itself with, as models without bytes: the tools of Xen 4.1 and the migration of KVM 0.14. Neither can be
//! run any more. They copy the same guests, and every page is compared in the end, as it is after a move of the engine's.

use std::sync::Arc;
use std::time::Duration;

use memory::{DirtyMap, GuestMemory, PAGE_BYTES, PageRun};
use sim::world::World;

use super::guest::{Arrived, DISK, Guest, MEMORY};
use super::host::MIB;

/// The tools map and send so many pages at a time.
const BATCH_PAGES: u64 = 1024;
/// They stop the guest when fewer pages than this are left, after so many iterations, or when so many times the memory was sent.
const FEW_PAGES: u64 = 50;
const ITERATIONS_MAX: u64 = 29;
const SENT_FACTOR_MAX: u64 = 3;
/// KVM sends so much between two looks at the bitmaps, and a look takes so long: fitted to the iterations of tables 6 and 7. They take 20.8 ms, and
/// are of 1.7 and 2.1 MByte.
const CHUNK_BYTES: f64 = 1.9 * MIB;
const LOOK: Duration = Duration::from_micros(4_600);
/// What is left may take so long (`migrate_set_downtime`, 30 ms by default).
const DOWNTIME: f64 = 0.03;
/// Whoever migrates lets it stop the guest when what is left has not got less for so long: fitted to the memory that it sends of dbench's
/// guest (table 8). That writes more than the rule lets be left, for ever, and the paper's was stopped.
const NO_LESS: Duration = Duration::from_secs(1);
/// A page of zeroes is sent as one byte with its address.
const ZERO_PAGE_BYTES: u64 = 9;

/// What came of a copy.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Copied {
    pub(super) iterations: u64,
    /// Bytes that were sent while the guest was stopped.
    pub(super) downtime_bytes: u64,
    /// How long it was stopped for them, in seconds.
    pub(super) downtime_seconds: f64,
}

/// What both have.
pub(super) struct Source {
    pub(super) world: World,
    pub(super) guest: Arc<Guest>,
    pub(super) target: Arc<Arrived>,
    /// How fast it sends.
    pub(super) bytes_per_second: f64,
    /// What a byte that is read costs, in seconds.
    pub(super) of_byte_read: f64,
    /// To which part bytes get shorter.
    pub(super) compressed: [f64; 2],
    pub(super) scale: u64,
}

impl Source {
    /// Xen's tools: whole iterations. A page that was written again since its iteration began is left to the next one.
    pub(super) async fn copy_as_xen(&self) -> Copied {
        let mut pending = DirtyMap::new(self.guest.regions());
        pending.insert_all();
        let total = pending.count();
        let (mut sent, mut iterations) = (0, 0);
        loop {
            iterations += 1;
            sent += self.iterate(&pending, true).await;
            pending.clear();
            self.take_dirty(&mut pending);
            let is_last =
                pending.count() < FEW_PAGES || iterations + 1 >= ITERATIONS_MAX || sent > total * SENT_FACTOR_MAX;
            if is_last {
                break;
            }
        }
        self.guest.stop();
        self.take_dirty(&mut pending);
        let began = self.world.now();
        let pages = self.iterate(&pending, false).await;
        let downtime_seconds = self.world.now().since(began).as_secs_f64();
        Copied { iterations: iterations + 1, downtime_bytes: pages * PAGE_BYTES, downtime_seconds }
    }

    async fn iterate(&self, pending: &DirtyMap, skips: bool) -> u64 {
        let (mut at, mut sent, batch) = ((0, 0), 0, (BATCH_PAGES / self.scale).max(1));
        while let Some(run) = pending.next_run(at.0, at.1, batch) {
            at = (run.region, run.end());
            let mut pages = 0;
            for page in run.page..run.end() {
                if !(skips && self.guest.is_dirty(run.region, page)) {
                    self.target.take_over(run.region, page);
                    pages += 1;
                }
            }
            self.guest.count_read(run.region, pages * PAGE_BYTES);
            self.wait(pages as f64 * PAGE_BYTES as f64 / self.bytes_per_second).await;
            sent += pages;
        }
        sent
    }

    /// KVM: a little at a time, in the thread that also serves the guest's devices. The disk comes first: since 0.14 no other state is sent while
    /// more of it is left than the stop may take.
    pub(super) async fn copy_as_kvm(&self) -> Copied {
        let mut pending = DirtyMap::new(self.guest.regions());
        pending.insert_all();
        // Without a look no rate is known.
        let rate = CHUNK_BYTES / (CHUNK_BYTES / self.bytes_per_second + LOOK.as_secs_f64());
        let (mut places, mut iterations) = ([0; 2], 0);
        let few = (rate * DOWNTIME / self.scale as f64).max(PAGE_BYTES as f64) as u64 / PAGE_BYTES;
        // Chance alone takes a little off.
        let less = CHUNK_BYTES as u64 / PAGE_BYTES / self.scale;
        let mut least = (u64::MAX, self.world.now());
        while pending.count() > few {
            iterations += 1;
            self.world.sleep(LOOK).await;
            self.take_dirty(&mut pending);
            let region = if has_more(&pending, DISK, few) { DISK } else { MEMORY };
            self.send_chunk(&mut pending, (region, &mut places), CHUNK_BYTES).await;
            if pending.count() + less < least.0 {
                least = (pending.count(), self.world.now());
            } else if self.world.now().since(least.1) > NO_LESS / self.scale as u32 {
                break;
            }
        }
        self.guest.stop();
        self.take_dirty(&mut pending);
        let began = self.world.now();
        let downtime_bytes = self.send_chunk(&mut pending, (DISK, &mut places), f64::INFINITY).await;
        let downtime_seconds = self.world.now().since(began).as_secs_f64();
        Copied { iterations, downtime_bytes, downtime_seconds }
    }

    /// Sends what is dirty until so many bytes are sent: of `first`, and of the other region once none is left there. It goes round and
    /// round in a region, from the place where it was left.
    async fn send_chunk(&self, pending: &mut DirtyMap, (first, places): (usize, &mut [u64; 2]), bytes_max: f64) -> u64 {
        let (mut bytes, mut read) = (0.0, 0);
        while bytes < bytes_max {
            let of = |region: usize| {
                let from = |page| pending.next_run(region, page, 1).filter(|run| run.region == region);
                from(places[region]).or_else(|| from(0))
            };
            let Some(PageRun { region, page, .. }) = of(first).or_else(|| of(1 - first)) else { break };
            pending.remove(PageRun { region, page, count: 1 });
            places[region] = page + 1;
            self.target.take_over(region, page);
            if self.guest.is_filled(region, page) {
                read += PAGE_BYTES;
                bytes += PAGE_BYTES as f64 * self.compressed[region];
                self.guest.count_read(region, PAGE_BYTES);
            } else {
                bytes += ZERO_PAGE_BYTES as f64;
            }
        }
        self.wait(bytes / self.bytes_per_second + read as f64 * self.of_byte_read).await;
        bytes as u64
    }

    fn take_dirty(&self, into: &mut DirtyMap) {
        self.guest.take_dirty(into).expect("the model's log does not fail");
    }

    async fn wait(&self, seconds: f64) {
        self.world.sleep(Duration::from_secs_f64(seconds)).await;
    }
}

/// Whether more than so many pages of a region are left.
fn has_more(pending: &DirtyMap, region: usize, few: u64) -> bool {
    let mut counted = 0;
    let mut at = 0;
    while let Some(run) = pending.next_run(region, at, u64::MAX).filter(|run| run.region == region) {
        counted += run.count;
        if counted > few {
            return true;
        }
        at = run.end();
    }
    false
}
