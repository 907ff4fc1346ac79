//! The machine itself.

use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha12Rng;

use crate::{Env, Moment, Task};

/// Long enough for a thread that waits to be put on the processor. (After 2 us most still waited.)
const BREATH: Duration = Duration::from_micros(20);

/// The machine's monotonic clock, its operating system's randomness, and the tokio runtime of whoever calls.
pub struct RealEnv {
    start: Instant,
    random: Mutex<ChaCha12Rng>,
}

impl RealEnv {
    /// An environment whose clock begins now.
    #[must_use]
    pub fn new() -> Self {
        Self { start: Instant::now(), random: Mutex::new(ChaCha12Rng::from_rng(&mut rand::rng())) }
    }
}

impl Default for RealEnv {
    fn default() -> Self {
        Self::new()
    }
}

impl Env for RealEnv {
    fn now(&self) -> Moment {
        Moment(self.start.elapsed())
    }

    fn sleep(&self, span: Duration) -> Task {
        Box::pin(tokio::time::sleep(span))
    }

    fn spawn(&self, task: Task) {
        tokio::spawn(task);
    }

    fn yield_cpu(&self) {
        // A sleep: to yield means to lose all of the time slice wherever somebody else is busy.
        std::thread::sleep(BREATH);
    }

    fn random(&self) -> u64 {
        self.random.lock().next_u64()
    }

    fn wall_clock(&self) -> SystemTime {
        SystemTime::now()
    }
}
