//! The tracker as a schedule sees it: what waits for a copy, and what is better put off.

use std::ops::Range;

use crate::schedule::Candidates;

use super::tracker::{CopyState, Tracker};

impl Candidates for Tracker {
    fn next_absent(&self, from: u64, chunks_max: u64) -> Option<Range<u64>> {
        Self::next_absent(self, from, chunks_max)
    }

    fn puts_off(&self) -> bool {
        match self.auto_passes() {
            true => self.auto_hot().is_some(),
            false => self.hot.as_ref().is_some_and(|hot| hot.is_on()),
        }
    }

    fn is_hot(&self, index: u64) -> bool {
        let hot = if self.auto_passes() { self.auto_hot() } else { self.hot.as_ref() };
        hot.is_some_and(|hot| hot.is_hot(index))
    }

    /// Of a strategy that iterates, the chunk is dirty for a later pass. Of one that chooses for itself it stays absent, and
    /// this pass goes by.
    fn put_off(&mut self, index: u64) {
        if self.auto_passes() {
            return self.pass_hot();
        }
        self.copy_state.set(index, CopyState::Copied);
        if let Some(dirty_bitmap) = &mut self.dirty_bitmap {
            dirty_bitmap.defer(index);
        }
    }

    fn passes_once(&self) -> bool {
        self.auto_passes()
    }
}
