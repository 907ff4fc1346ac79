//! In the order of the volume.

use std::sync::Arc;

use super::{Candidates, Choice, GuestListener, Schedule};

/// The next absent chunks behind the last copy.
#[derive(Debug)]
pub(crate) struct Ascending;

impl Schedule for Ascending {
    fn next(&mut self, candidates: &mut dyn Candidates, from: u64, chunks_max: u64) -> Choice {
        candidates.next_absent(from, chunks_max).map_or(Choice::Nothing, Choice::Copy)
    }

    fn listener(&self) -> Option<Arc<dyn GuestListener>> {
        None
    }
}
