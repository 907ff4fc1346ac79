//! Aborted moves, so that their late messages do nothing.
//!
//! When a host aborts a move, a request to open its session may still be on the way. The abort may overtake that
//! request on another connection. Connections end with the daemon's process, so this need not outlive it.

use std::collections::VecDeque;

use parking_lot::Mutex;
use uuid::Uuid;

/// So many are remembered: more than could be on the way.
const MOVES_MAX: usize = 4096;

/// The moves that were undone last.
#[derive(Default)]
pub(crate) struct AbortedJobs(Mutex<VecDeque<Uuid>>);

impl AbortedJobs {
    /// The move `job` is undone.
    pub(super) fn note(&self, job: Uuid) {
        let mut moves = self.0.lock();
        if moves.len() == MOVES_MAX {
            moves.pop_front();
        }
        moves.push_back(job);
    }

    /// Whether the move `job` is.
    pub(super) fn has(&self, job: Uuid) -> bool {
        self.0.lock().contains(&job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_moves_are_remembered_and_older_ones_are_not() {
        let aborted_jobs = AbortedJobs::default();
        let jobs: Vec<Uuid> = (0..=MOVES_MAX as u128).map(Uuid::from_u128).collect();
        jobs.iter().for_each(|job| aborted_jobs.note(*job));
        assert!(!aborted_jobs.has(jobs[0]) && aborted_jobs.has(jobs[1]) && aborted_jobs.has(jobs[MOVES_MAX]));
        assert!(!aborted_jobs.has(Uuid::max()));
    }
}
