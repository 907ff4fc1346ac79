//! A machine whose memory the parallel engine copies from outside: pages with real bytes, which its guest writes as long as it
//! runs. When it runs at the target, every byte is what it was at the source.
//!
//! What a host does wrong: the source's QEMU writes to the memory once more while it saves its devices. Such a move must not be
//! committed.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ::memory::{DirtyMap, EmulatedMemory, GuestMemory, Region, TargetMemory};
use api::v1::{Error, ErrorCode};

use super::{SimMachine, Stage};
use crate::occurrence::Occurrence;
use crate::world::Invariant;

/// How many pages it has, how many of them are written all the time, and how long its guest rests after a few writes.
const PAGES: u64 = 96;
const HOT_PAGES: u64 = 12;
const REST_MAX: Duration = Duration::from_millis(3);
/// Of so many migrations one has a QEMU that writes late.
const WRITES_LATE: f64 = 0.1;
/// And of so many one loses its connections while its memory is read.
const CUT: f64 = 0.3;

/// The memory of the QEMU on each host.
pub(super) type Memories = [Option<Arc<EmulatedMemory>>; 2];

pub(super) fn regions() -> Vec<Region> {
    vec![Region { name: "ram".to_owned(), bytes: PAGES * ::memory::PAGE_BYTES, page_bytes: ::memory::PAGE_BYTES }]
}

impl SimMachine {
    /// Gives it a memory that is copied from outside, and a guest that writes to it.
    pub(crate) fn hold_memory(&self) {
        let memory = Arc::new(EmulatedMemory::new(regions()));
        for page in 0..PAGES {
            self.write_page(&memory, page);
        }
        self.shared.memories.lock()[0] = Some(memory);
        let machine = self.clone();
        self.shared.world.spawn(async move {
            loop {
                machine.shared.world.sleep(machine.shared.rng.up_to(REST_MAX)).await;
                machine.write_some();
            }
        });
    }

    /// What its guest writes before it rests, if it runs.
    fn write_some(&self) {
        let host = {
            let state = self.shared.state.lock();
            let stage = state.instances[state.at].as_ref().map(|it| it.stage);
            matches!(stage, Some(Stage::Running | Stage::Sending)).then_some(state.at)
        };
        let memory = host.and_then(|host| self.shared.memories.lock()[host].clone());
        let Some(memory) = memory else { return };
        for _ in 0..self.shared.rng.within(1..=4) {
            let pages = if self.shared.rng.chance(0.7) { HOT_PAGES } else { PAGES };
            self.write_page(&memory, self.shared.rng.below(pages));
        }
    }

    fn write_page(&self, memory: &EmulatedMemory, page: u64) {
        let rng = &self.shared.rng;
        let at = page * ::memory::PAGE_BYTES;
        match rng.below(4) {
            0 => memory.store(0, at, &[0; ::memory::PAGE_BYTES as usize]),
            1 => memory.store(0, at, &[rng.below(256) as u8; ::memory::PAGE_BYTES as usize]),
            // A word: most of the page stays as it was sent.
            _ => memory.store(0, at + rng.below(memory::PAGE_BYTES - 8), &rng.below(u64::MAX).to_le_bytes()),
        }
    }

    /// The memory of the QEMU at `host`, for whoever copies it.
    pub(super) fn memory_at(&self, host: usize) -> Result<Arc<dyn GuestMemory>, Error> {
        let memory = self.shared.memories.lock()[host].clone();
        memory.map(|memory| memory as _).ok_or_else(|| Error::new(ErrorCode::VmRefused, "its memory is its own"))
    }

    /// The same for whoever sends it: now and then all connections are lost while that reads it.
    pub(super) fn open_memory_at(&self, host: usize) -> Result<Arc<dyn GuestMemory>, Error> {
        let memory = self.memory_at(host)?;
        let rng = &self.shared.rng;
        // Of a page that is read nobody knows yet whether it arrives.
        let left = if rng.chance(CUT) { rng.within(1..=2 * PAGES) } else { 0 };
        Ok(Arc::new(CutWhileRead { memory, machine: self.clone(), left: AtomicU64::new(left) }))
    }

    /// The daemon at `host` makes a memory for one that comes.
    pub(super) fn make_memory_at(&self, host: usize) -> Arc<dyn TargetMemory> {
        let memory = Arc::new(EmulatedMemory::new(regions()));
        self.shared.memories.lock()[host] = Some(Arc::clone(&memory));
        memory
    }

    /// The QEMU at `host` saves its devices: now and then it writes to the memory once more.
    pub(super) fn save_devices(&self, host: usize) {
        let memory = self.shared.memories.lock()[host].clone();
        let is_calm = self.shared.state.lock().is_calm;
        let Some(memory) = memory.filter(|_| !is_calm && self.shared.rng.chance(WRITES_LATE)) else { return };
        self.shared.world.fault("memory-written-late", format_args!("QEMU writes to the memory after the last round"));
        memory.store(0, 77 * ::memory::PAGE_BYTES, b"late");
    }

    /// Its guest is about to run at the target: every byte is there.
    pub(super) fn compare_memories(&self) {
        let memories = self.shared.memories.lock();
        let [Some(source), Some(target)] = &*memories else { return };
        match source.first_difference(target) {
            Some((_, page)) => {
                let what = format!("page {page} of the machine's memory is not what it was at the source");
                self.shared.world.violate(Invariant::EqualAtSwitch, what);
            }
            None => self.shared.world.occur(Occurrence::Told("memory copied from outside")),
        }
    }
}

/// A memory whose reader loses its connections after so many pages.
struct CutWhileRead {
    memory: Arc<dyn GuestMemory>,
    machine: SimMachine,
    left: AtomicU64,
}

impl GuestMemory for CutWhileRead {
    fn regions(&self) -> &[Region] {
        self.memory.regions()
    }

    fn take_dirty(&self, into: &mut DirtyMap) -> ::memory::Result<()> {
        self.memory.take_dirty(into)
    }

    fn read(&self, region: usize, page: u64, into: &mut [u8]) -> ::memory::Result<()> {
        let pages = into.len() as u64 / ::memory::PAGE_BYTES;
        let before =
            self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| Some(left.saturating_sub(pages)));
        let shared = &self.machine.shared;
        if before.is_ok_and(|left| 0 < left && left <= pages) && !shared.state.lock().is_calm {
            shared.world.fault("memory-link-cut", format_args!("the connections are lost while the memory is read"));
            shared.link.cut();
        }
        self.memory.read(region, page, into)
    }

    fn next_data(&self, region: usize, page: u64) -> ::memory::Result<Option<Range<u64>>> {
        self.memory.next_data(region, page)
    }
}
