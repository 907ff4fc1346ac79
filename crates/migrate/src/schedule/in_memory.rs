//! Another order, after what is in memory already: its copies take nothing from the disk (`IOFollow`, dissertation, section 5.2.4).
//!
//! A guest read that missed the read cache has read such a chunk for its copy. The earlier it is copied, the surer it is still there,
//! and the memory is free for another chunk sooner.

use std::ops::Range;
use std::sync::Arc;

use super::{Candidates, Choice, GuestListener, Schedule, cool_part};
use crate::ScheduleReport;

/// What waits for a copy and is in memory, and then what `inner` chooses.
pub(crate) struct InMemoryFirst {
    inner: Box<dyn Schedule>,
    /// The last choice was not `inner`'s.
    is_own: bool,
}

impl InMemoryFirst {
    pub(crate) const fn new(inner: Box<dyn Schedule>) -> Self {
        Self { inner, is_own: false }
    }

    fn in_memory(candidates: &dyn Candidates, chunks_max: u64) -> Option<Range<u64>> {
        let run = candidates.is_order_free().then(|| candidates.in_memory(chunks_max))??;
        // What is put off is put off although it is in memory.
        cool_part(candidates, run)
    }
}

impl Schedule for InMemoryFirst {
    fn next(&mut self, candidates: &mut dyn Candidates, from: u64, chunks_max: u64) -> Choice {
        let found = Self::in_memory(candidates, chunks_max);
        self.is_own = found.is_some();
        match found {
            Some(run) => Choice::Detour { data_max: run.end - run.start, run },
            None => self.inner.next(candidates, from, chunks_max),
        }
    }

    fn listener(&self) -> Option<Arc<dyn GuestListener>> {
        self.inner.listener()
    }

    fn hears_disk(&self) -> bool {
        self.inner.hears_disk()
    }

    fn began(&mut self, run: &Range<u64>, is_hole: bool) {
        if !self.is_own {
            self.inner.began(run, is_hole);
        }
    }

    fn lets_guest_first(&self) -> bool {
        self.inner.lets_guest_first()
    }

    fn waited_for_long(&mut self) {
        self.inner.waited_for_long();
    }

    fn report(&self) -> ScheduleReport {
        self.inner.report()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::ascending::Ascending;
    use crate::schedule::fake::{Waiting, copy_all};

    #[test]
    fn what_is_in_memory_comes_first_and_the_rest_in_its_order() {
        let mut waiting = Waiting::new(10, []);
        waiting.in_memory.extend([4, 5, 8]);
        let runs = copy_all(&mut InMemoryFirst::new(Box::new(Ascending)), &mut waiting, 3);
        assert_eq!(runs, [4..6, 8..9, 0..3, 3..4, 6..8, 9..10]);
    }

    #[test]
    fn what_is_hot_is_not_copied_because_it_is_in_memory_and_an_order_that_is_not_free_is_kept() {
        let mut waiting = Waiting::new(10, [4]);
        waiting.in_memory.extend([4, 5]);
        let mut schedule = InMemoryFirst::new(Box::new(Ascending));
        assert_eq!(schedule.next(&mut waiting, 0, 3), Choice::Detour { run: 5..6, data_max: 1 });
        waiting.is_order_free = false;
        assert_eq!(schedule.next(&mut waiting, 0, 3), Choice::Copy(0..3));
    }
}
