//! The environment of tests that need time but no world: tokio's paused clock and one seed.
//!
//! The clock jumps to the next timer whenever no task can run, so nothing waits and nothing depends on the machine. The
//! simulator's own environment is another: there a process can be killed with all of its tasks, and the clock counts in
//! microseconds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::{Env, EnvRef, Moment, Task};

/// Tokio's paused clock (the test runs with `start_paused = true`) and randomness from one seed.
pub struct PausedEnv {
    start: Instant,
    state: AtomicU64,
}

impl PausedEnv {
    /// An environment whose clock begins now.
    #[must_use]
    pub fn shared(seed: u64) -> EnvRef {
        Arc::new(Self { start: Instant::now(), state: AtomicU64::new(seed) })
    }
}

impl Env for PausedEnv {
    fn now(&self) -> Moment {
        Moment(self.start.elapsed())
    }

    fn sleep(&self, span: Duration) -> Task {
        Box::pin(tokio::time::sleep(span))
    }

    fn spawn(&self, task: Task) {
        tokio::spawn(task);
    }

    fn random(&self) -> u64 {
        // SplitMix64.
        let state = self.state.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        let mut mixed = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn wall_clock(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + self.start.elapsed()
    }
}
