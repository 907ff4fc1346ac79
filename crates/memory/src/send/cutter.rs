//! The producer of a round: walks the dirty map and cuts tasks. It is asked for the next one by whoever has room, so tasks wait
//! nowhere.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::dirty_map::{DirtyMap, PageRun};
use crate::error::Result;
use crate::guest_memory::GuestMemory;

/// A task has no more pages with bytes: 256 KiB.
pub(crate) const TASK_PAGES: u64 = 64;
/// Nor more runs.
const TASK_RUNS_MAX: usize = 256;
/// Of a shorter run it is not asked whether it is a hole: who is asked looks as far as its data goes, and what was written lately is
/// hardly a hole. It reads as zeroes if it is one.
const HOLE_PAGES_MIN: u64 = 512;
/// Holes are cut at this: an entry counts pages with 32 bits.
const HOLE_PAGES_MAX: u64 = 1 << 30;

/// Pages of one region for one consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Task {
    pub(crate) region: usize,
    pub(crate) runs: Vec<TaskRun>,
}

/// Pages that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TaskRun {
    pub(crate) page: u64,
    pub(crate) count: u64,
    /// Nothing was ever written there: they are zeroes, and need not be read.
    pub(crate) is_hole: bool,
}

/// The pages of one round that no consumer has yet.
pub(crate) struct Round {
    pub(crate) number: u32,
    memory: Arc<dyn GuestMemory>,
    state: Mutex<State>,
    is_over: AtomicBool,
}

struct State {
    map: DirtyMap,
    at: (usize, u64),
    /// The region and the first page that was asked for, and the data from there on.
    known: Option<(usize, u64, Option<std::ops::Range<u64>>)>,
}

impl Round {
    pub(crate) fn new(number: u32, memory: Arc<dyn GuestMemory>, map: DirtyMap) -> Self {
        let state = Mutex::new(State { map, at: (0, 0), known: None });
        Self { number, memory, state, is_over: AtomicBool::new(false) }
    }

    /// No further task is cut.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// The next task, if there is one.
    pub(crate) fn next_task(&self) -> Result<Option<Task>> {
        if self.is_over.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let mut state = self.state.lock();
        let mut task: Option<Task> = None;
        let mut room = TASK_PAGES;
        while let Some(next) = state.map.next_run(state.at.0, state.at.1, u64::MAX) {
            if task.as_ref().is_some_and(|task| task.region != next.region || task.runs.len() >= TASK_RUNS_MAX) {
                break;
            }
            let data = self.data_from(&mut state, &next)?;
            let (count, is_hole) = match data {
                Some(data) if data.start <= next.page => (next.count.min(data.end - next.page).min(room), false),
                Some(data) => (next.count.min(data.start - next.page).min(HOLE_PAGES_MAX), true),
                None => (next.count.min(HOLE_PAGES_MAX), true),
            };
            if count == 0 {
                // It is full.
                break;
            }
            if !is_hole {
                room -= count;
            }
            state.map.remove(PageRun { count, ..next });
            state.at = (next.region, next.page + count);
            let run = TaskRun { page: next.page, count, is_hole };
            task.get_or_insert_with(|| Task { region: next.region, runs: Vec::new() }).runs.push(run);
            if room == 0 {
                break;
            }
        }
        Ok(task)
    }

    /// The data at or behind the beginning of `run`. What was told before holds: what is written since is dirty again.
    fn data_from(&self, state: &mut State, run: &PageRun) -> Result<Option<std::ops::Range<u64>>> {
        if let Some((region, from, data)) = &state.known
            && *region == run.region
            && *from <= run.page
            && data.as_ref().is_none_or(|data| data.end > run.page)
        {
            return Ok(data.clone());
        }
        if run.count < HOLE_PAGES_MIN {
            return Ok(Some(run.page..run.page + run.count));
        }
        let data = self.memory.next_data(run.region, run.page)?.filter(|data| data.end > run.page);
        state.known = Some((run.region, run.page, data.clone()));
        Ok(data)
    }

    /// A task was not confirmed.
    pub(crate) fn give_back(&self, task: &Task) {
        let mut state = self.state.lock();
        for run in &task.runs {
            state.map.insert(PageRun { region: task.region, page: run.page, count: run.count });
        }
        state.at = (0, 0);
    }

    /// What no consumer has, or has given back.
    pub(crate) fn take_left(&self, into: &mut DirtyMap) {
        let mut state = self.state.lock();
        into.merge(&state.map);
        state.map.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::region::{PAGE_BYTES, Region};

    /// A memory in which only some pages have data.
    struct Sparse {
        regions: Vec<Region>,
        data: Vec<Vec<std::ops::Range<u64>>>,
    }

    impl GuestMemory for Sparse {
        fn regions(&self) -> &[Region] {
            &self.regions
        }
        fn take_dirty(&self, _: &mut DirtyMap) -> Result<()> {
            Ok(())
        }
        fn read(&self, _: usize, _: u64, _: &mut [u8]) -> Result<()> {
            Ok(())
        }
        fn next_data(&self, region: usize, page: u64) -> Result<Option<std::ops::Range<u64>>> {
            let found = self.data[region].iter().find(|data| data.end > page);
            Ok(found.map(|data| data.start.max(page)..data.end))
        }
    }

    proptest! {
        #[test]
        fn every_page_is_cut_once_and_told_right(
            dirty in prop::collection::vec((0_usize..2, 0_u64..1000, 1_u64..1000), 0..30),
            holes in prop::collection::vec(1_u64..600, 0..12),
        ) {
            let region = |pages: u64| Region { name: "r".to_owned(), bytes: pages * PAGE_BYTES, page_bytes: PAGE_BYTES };
            let regions = vec![region(4000), region(2000)];
            let mut at = 0;
            let mut data = Vec::new();
            for pair in holes.chunks(2) {
                at += pair[0];
                let end = at + pair.get(1).copied().unwrap_or(1);
                data.push(at..end);
                at = end;
            }
            let memory = Arc::new(Sparse { regions: regions.clone(), data: vec![data.clone(), vec![]] });
            let mut map = DirtyMap::new(&regions);
            dirty.iter().for_each(|(region, page, count)| map.insert(PageRun { region: *region, page: *page, count: *count }));
            let round = Round::new(1, memory, map.clone());
            let mut seen = BTreeMap::new();
            while let Some(task) = round.next_task().expect("cut") {
                let bytes: u64 = task.runs.iter().filter(|run| !run.is_hole).map(|run| run.count).sum();
                prop_assert!(bytes <= TASK_PAGES && task.runs.len() <= TASK_RUNS_MAX && !task.runs.is_empty());
                for run in &task.runs {
                    for page in run.page..run.page + run.count {
                        prop_assert_eq!(seen.insert((task.region, page), run.is_hole), None);
                    }
                }
            }
            let mut expected = 0;
            for run in map.runs() {
                for page in run.page..run.end() {
                    let is_data = run.region == 0 && data.iter().any(|data| data.contains(&page));
                    let told = seen.get(&(run.region, page)).copied();
                    prop_assert!(told.is_some() && !(is_data && told == Some(true)), "page {} of {}: {:?}", page, run.region, told);
                    // A long hole is told as one, but for an end that is short by itself.
                    let rest_is_long = run.end() - page >= HOLE_PAGES_MIN;
                    prop_assert!(is_data || told == Some(true) || !rest_is_long, "page {} of {}", page, run.region);
                    expected += 1;
                }
            }
            prop_assert_eq!(seen.len(), expected);
        }
    }

    #[test]
    fn what_is_given_back_is_cut_again_or_left() {
        let memory = Arc::new(crate::EmulatedMemory::with_pages(100));
        let mut map = DirtyMap::new(GuestMemory::regions(&*memory));
        map.insert_all();
        let round = Round::new(1, memory.clone(), map);
        let first = round.next_task().expect("cut").expect("a task");
        assert_eq!(first.runs, [TaskRun { page: 0, count: 64, is_hole: false }]);
        round.give_back(&first);
        assert_eq!(round.next_task().expect("cut"), Some(first));
        round.end();
        assert_eq!(round.next_task().expect("none"), None);
        let mut left = DirtyMap::new(GuestMemory::regions(&*memory));
        round.take_left(&mut left);
        assert_eq!(left.count(), 36);
    }
}
