//! The meters of a volume's connections as the migration sees them.

use std::time::Duration;

use filters::{MeterSnapshot, MeterState, StallWatch};
use parking_lot::Mutex;

use crate::{GuestMeter, GuestWindow};

/// What the guest feels, from the [`MeterState`] that all connections of its volume share.
pub struct VolumeMeter {
    state: MeterState,
    last: Mutex<MeterSnapshot>,
    watch: Mutex<Option<StallWatch>>,
}

impl VolumeMeter {
    /// Over the meters of one volume, beginning now.
    #[must_use]
    pub fn new(state: MeterState) -> Self {
        let last = Mutex::new(state.snapshot());
        Self { state, last, watch: Mutex::new(None) }
    }
}

impl GuestMeter for VolumeMeter {
    fn take_window(&self) -> GuestWindow {
        let now = self.state.snapshot();
        let mut last = self.last.lock();
        let window = now.since(&last);
        *last = now;
        let latency = window.latency();
        let latency_p99 = if latency.count() == 0 { Duration::ZERO } else { latency.quantile(0.99) };
        GuestWindow { requests: latency.count(), latency_p99, latency_max: latency.longest() }
    }

    fn begin_stall(&self) {
        *self.watch.lock() = Some(self.state.watch_stall());
    }

    fn stall(&self) -> Duration {
        self.watch.lock().as_ref().map_or(Duration::ZERO, StallWatch::longest)
    }
}
