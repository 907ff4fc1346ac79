//! What the guest touches least is copied first (Zheng et al., as section 5.1 of the dissertation has it). What it touches
//! most is copied last, so that less of it is mirrored or copied again.
//!
//! The volume has at most [`REGIONS_MAX`] regions of [`REGION_CHUNKS_MIN`] chunks or more, so the counts take 80 KiB at most.
//! Each guest request of the move, reads included, raises the count of every region that it touches. The region with the
//! lowest count is copied next, from its start; of several the first. Each is taken once. What is absent after that is copied
//! by an ascending sweep. The regions are taken anew when more than half of the volume waits.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use block::Bytes;

use super::{Candidates, Choice, GuestListener, GuestRequest, Schedule, cool_stretch};
use crate::{ScheduleKind, ScheduleReport};

/// So many counts are looked at for the next region.
const REGIONS_MAX: u64 = 16_384;
/// Smaller regions are not worth the seek to them.
const REGION_CHUNKS_MIN: u64 = 16;
/// So many regions in which nothing waits are passed under one lock of the tracker.
const REGIONS_AT_ONCE: u32 = 16;
/// A request that is larger than so many regions raises no more counts than that.
const COUNTED_MAX: u64 = 64;
/// Counts are halved once there are so many for each region, so that they tell of what was touched of late.
const AGEING: u64 = 64;

/// How often the guest has touched each region.
struct Accesses {
    region_bytes: u64,
    counts: Vec<AtomicU32>,
    total: AtomicU64,
}

impl GuestListener for Accesses {
    fn begins(&self, request: GuestRequest) {
        let first = request.extent.offset.0 / self.region_bytes;
        let regions = request.extent.end().0.div_ceil(self.region_bytes).saturating_sub(first).min(COUNTED_MAX);
        for count in self.counts.iter().skip(first as usize).take(regions as usize) {
            // A count that is full stays so until it is halved.
            let _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_add(1));
        }
        self.total.fetch_add(regions, Ordering::Relaxed);
    }

    fn ended(&self, _request: GuestRequest) {}
}

impl Accesses {
    fn age(&self) {
        let total = self.total.load(Ordering::Relaxed);
        if total < AGEING * self.counts.len() as u64 {
            return;
        }
        self.total.fetch_sub(total / 2, Ordering::Relaxed);
        for count in &self.counts {
            // What is counted meanwhile may be lost, which only shifts the order.
            count.store(count.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
        }
    }
}

/// Region after region, the coldest first.
pub(super) struct ColdFirst {
    accesses: Arc<Accesses>,
    sweep: Box<dyn Schedule>,
    region_chunks: u64,
    /// Which regions were taken.
    taken: Vec<bool>,
    current: Option<usize>,
    /// All were taken.
    is_over: bool,
    was_chosen: bool,
    counts: ScheduleReport,
}

impl ColdFirst {
    /// For a volume of `size` in chunks of `chunk_bytes`. What is copied in order is copied as `sweep` says.
    pub(super) fn new(size: Bytes, chunk_bytes: u64, sweep: Box<dyn Schedule>) -> Self {
        let chunks = size.0.div_ceil(chunk_bytes);
        let region_chunks = chunks.div_ceil(REGIONS_MAX).max(REGION_CHUNKS_MIN);
        let regions = chunks.div_ceil(region_chunks);
        let accesses = Accesses {
            region_bytes: region_chunks * chunk_bytes,
            counts: (0..regions).map(|_| AtomicU32::new(0)).collect(),
            total: AtomicU64::new(0),
        };
        Self {
            accesses: Arc::new(accesses),
            sweep,
            region_chunks,
            taken: vec![false; regions as usize],
            current: None,
            is_over: false,
            was_chosen: false,
            counts: ScheduleReport { used: ScheduleKind::ColdFirst, ..ScheduleReport::default() },
        }
    }

    fn chunks_of(&self, region: usize) -> Range<u64> {
        let start = region as u64 * self.region_chunks;
        start..start + self.region_chunks
    }

    /// The next stretch of the region under way, or of the coldest that was not taken yet.
    fn coldest(&mut self, candidates: &dyn Candidates, from: u64, chunks_max: u64) -> Option<Choice> {
        for _ in 0..REGIONS_AT_ONCE {
            let region = match self.current {
                Some(region) => region,
                None => self.take()?,
            };
            let window = self.chunks_of(region);
            if let Some(run) = cool_stretch(candidates, &window, chunks_max) {
                let data_max = run.end.min(window.end) - run.start;
                return Some(Choice::Detour { run, data_max });
            }
            self.current = None;
        }
        Some(Choice::GoOnAt(from))
    }

    /// Takes the coldest region. `None` if all are taken.
    fn take(&mut self) -> Option<usize> {
        self.accesses.age();
        let counts = self.accesses.counts.iter().map(|count| count.load(Ordering::Relaxed));
        let left = counts.enumerate().filter(|(region, _)| !self.taken[*region]);
        let Some((region, _)) = left.min_by_key(|(region, count)| (*count, *region)) else {
            self.is_over = true;
            return None;
        };
        self.taken[region] = true;
        self.current = Some(region);
        self.current
    }
}

impl Schedule for ColdFirst {
    fn next(&mut self, candidates: &mut dyn Candidates, from: u64, chunks_max: u64) -> Choice {
        if self.is_over && candidates.absent() > candidates.chunks() / 2 {
            self.is_over = false;
            self.taken.fill(false);
        }
        let choice = match !self.is_over && candidates.is_order_free() {
            true => self.coldest(candidates, from, chunks_max),
            false => None,
        };
        self.was_chosen = choice.is_some();
        choice.unwrap_or_else(|| self.sweep.next(candidates, from, chunks_max))
    }

    fn listener(&self) -> Option<Arc<dyn GuestListener>> {
        Some(Arc::clone(&self.accesses) as Arc<dyn GuestListener>)
    }

    fn began(&mut self, _run: &Range<u64>, _is_hole: bool) {
        match self.was_chosen {
            true => self.counts.runs_chosen += 1,
            false => self.counts.copies_swept += 1,
        }
    }

    fn report(&self) -> ScheduleReport {
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::ascending::Ascending;
    use crate::schedule::fake::{Waiting, copy_all};
    use block::Extent;

    const CHUNK: u64 = 65_536;

    fn cold_first(chunks: u64) -> ColdFirst {
        ColdFirst::new(Bytes(chunks * CHUNK), CHUNK, Box::new(Ascending))
    }

    fn touch(schedule: &ColdFirst, chunk: u64, is_write: bool) {
        let extent = Extent::new(Bytes(chunk * CHUNK), Bytes(4096));
        schedule.accesses.begins(GuestRequest { extent, is_write });
    }

    #[test]
    fn regions_come_from_the_coldest_to_the_hottest_and_reads_count() {
        let mut schedule = cold_first(64);
        (0..9).for_each(|_| touch(&schedule, 0, false));
        (0..5).for_each(|_| touch(&schedule, 40, true));
        touch(&schedule, 20, true);
        let runs = copy_all(&mut schedule, &mut Waiting::new(64, []), 8);
        let regions: Vec<u64> = runs.iter().map(|run| run.start / REGION_CHUNKS_MIN).collect();
        assert_eq!(regions, [3, 3, 1, 1, 2, 2, 0, 0]);
        assert_eq!((schedule.report().runs_chosen, schedule.report().copies_swept), (8, 0));
    }

    #[test]
    fn what_becomes_hot_on_the_way_is_put_last_and_everything_is_copied_once() {
        let mut schedule = cold_first(1000);
        let mut waiting = Waiting::new(1000, []);
        let mut seen = vec![0_u8; 1000];
        for round in 0_u64.. {
            // The guest goes up and touches what would be next.
            touch(&schedule, (round * 16 + 16) % 1000, true);
            let Choice::Detour { run, data_max } = schedule.next(&mut waiting, 0, 16) else { break };
            let run = run.start..run.start + data_max;
            schedule.began(&run, false);
            waiting.copy(&run);
            run.for_each(|index| seen[index as usize] += 1);
        }
        assert!(seen.iter().all(|count| *count == 1), "{seen:?}");
    }

    #[test]
    fn what_fails_in_the_end_is_swept_and_another_target_begins_anew() {
        let mut schedule = cold_first(64);
        let mut waiting = Waiting::new(64, []);
        copy_all(&mut schedule, &mut waiting, 64);
        waiting.absent.extend([5, 40]);
        assert_eq!(schedule.next(&mut waiting, 0, 8), Choice::Copy(5..6));
        waiting.absent.extend(0..64);
        touch(&schedule, 1, true);
        let choice = schedule.next(&mut waiting, 0, 8);
        assert_eq!(choice, Choice::Detour { run: 16..24, data_max: 8 }, "it has not begun anew");
    }

    #[test]
    fn the_counts_are_small_and_old_ones_fade() {
        let chunks = (64_u64 << 40) / CHUNK;
        let schedule = cold_first(chunks);
        assert!(schedule.taken.len() as u64 <= REGIONS_MAX, "{} regions", schedule.taken.len());
        let mut schedule = cold_first(64);
        (0..400).for_each(|_| touch(&schedule, 1, true));
        assert!(schedule.take().is_some(), "nothing was taken");
        let count = schedule.accesses.counts[0].load(Ordering::Relaxed);
        assert_eq!((count, schedule.accesses.total.load(Ordering::Relaxed)), (200, 200));
    }
}
