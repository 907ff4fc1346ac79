//! Chunks that wait, for the tests of the schedules: a set, searched slowly.

use std::collections::BTreeSet;
use std::ops::Range;

use super::{Candidates, Choice, Schedule};

/// Chunks that wait, some of them hot.
pub(super) struct Waiting {
    pub(super) chunks: u64,
    pub(super) absent: BTreeSet<u64>,
    pub(super) hot: BTreeSet<u64>,
    pub(super) put_off: Vec<u64>,
    pub(super) passes_once: bool,
    pub(super) is_order_free: bool,
    pub(super) in_memory: BTreeSet<u64>,
}

impl Waiting {
    /// All of so many chunks.
    pub(super) fn new(chunks: u64, hot: impl IntoIterator<Item = u64>) -> Self {
        Self {
            chunks,
            absent: (0..chunks).collect(),
            hot: hot.into_iter().collect(),
            put_off: Vec::new(),
            passes_once: false,
            is_order_free: true,
            in_memory: BTreeSet::new(),
        }
    }

    /// These do not wait any more.
    pub(super) fn copy(&mut self, run: &Range<u64>) {
        for index in run.clone() {
            assert!(self.absent.remove(&index), "chunk {index} did not wait for a copy");
        }
    }
}

impl Candidates for Waiting {
    fn next_absent(&self, from: u64, chunks_max: u64) -> Option<Range<u64>> {
        let start = *self.absent.range(from..).next()?;
        let end = (start..start + chunks_max).find(|index| !self.absent.contains(index));
        Some(start..end.unwrap_or(start + chunks_max))
    }
    fn puts_off(&self) -> bool {
        !self.hot.is_empty()
    }
    fn is_hot(&self, index: u64) -> bool {
        self.hot.contains(&index)
    }
    fn put_off(&mut self, index: u64) {
        self.absent.remove(&index);
        self.put_off.push(index);
    }
    fn passes_once(&self) -> bool {
        self.passes_once
    }
    fn nearest_absent(&self, at: u64) -> Option<u64> {
        self.absent.iter().copied().min_by_key(|index| (index.abs_diff(at), std::cmp::Reverse(*index)))
    }
    fn chunks(&self) -> u64 {
        self.chunks
    }
    fn absent(&self) -> u64 {
        self.absent.len() as u64
    }
    fn is_order_free(&self) -> bool {
        self.is_order_free
    }
    fn in_memory(&self, chunks_max: u64) -> Option<Range<u64>> {
        let waits = |index: &u64| self.in_memory.contains(index) && self.absent.contains(index);
        let start = self.in_memory.iter().copied().find(waits)?;
        Some(start..(start..start + chunks_max).take_while(waits).last()? + 1)
    }
}

/// Copies all that `waiting` has, at most `chunks_max` at a time. Gives the copies in their order.
pub(super) fn copy_all(schedule: &mut dyn Schedule, waiting: &mut Waiting, chunks_max: u64) -> Vec<Range<u64>> {
    let (mut from, mut runs) = (0, Vec::new());
    loop {
        let choice = match schedule.next(waiting, from, chunks_max) {
            Choice::Nothing if from > 0 => schedule.next(waiting, 0, chunks_max),
            choice => choice,
        };
        let run = match choice {
            Choice::Copy(run) => {
                from = run.end;
                run
            }
            Choice::Detour { run, data_max } => run.start..run.start + data_max,
            Choice::GoOnAt(next) => {
                from = next;
                continue;
            }
            Choice::Nothing => return runs,
        };
        schedule.began(&run, false);
        waiting.copy(&run);
        runs.push(run);
    }
}
