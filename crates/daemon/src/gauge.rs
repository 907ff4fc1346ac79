//! What a volume's clients did in the last second or so, for whoever looks.

use std::time::Duration;

use api::v1::GuestIo;
use filters::{MeterSnapshot, MeterState, MeterWindow, StallWatch};
use migrate::{GuestMeter, GuestWindow};
use parking_lot::Mutex;

/// A window is at least this long, so that many who look do not make each other's windows short.
const WINDOW: Duration = Duration::from_millis(900);

/// Figures of the last window.
pub(crate) struct Gauge {
    meter: MeterState,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    since: MeterSnapshot,
    last: GuestIo,
}

impl Gauge {
    pub(crate) fn new(meter: MeterState) -> Self {
        let state = State { since: meter.snapshot(), last: GuestIo::default() };
        Self { meter, state: Mutex::new(state) }
    }

    /// What clients did and felt in the last window.
    pub(crate) fn guest_io(&self) -> GuestIo {
        let mut state = self.state.lock();
        let now = self.meter.snapshot();
        let window = now.since(&state.since);
        if window.span >= WINDOW {
            state.last = of_window(&window);
            state.since = now;
        }
        state.last
    }
}

fn of_window(window: &MeterWindow) -> GuestIo {
    let seconds = window.span.as_secs_f64().max(1e-9);
    let latency = window.latency();
    let us = |span: Duration| u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
    GuestIo {
        iops: window.iops(),
        read_bytes_per_second: window.read.bytes as f64 / seconds,
        write_bytes_per_second: window.write.bytes as f64 / seconds,
        write_iops: window.write.requests() as f64 / seconds,
        latency_us_p50: us(latency.quantile(0.5)),
        latency_us_p99: us(latency.quantile(0.99)),
        latency_us_max: us(latency.longest()),
    }
}

/// What a migration asks of a volume's meters.
pub(crate) struct MigrationMeter {
    meter: MeterState,
    since: Mutex<MeterSnapshot>,
    stall: Mutex<Option<StallWatch>>,
}

impl MigrationMeter {
    pub(crate) fn new(meter: MeterState) -> Self {
        let since = Mutex::new(meter.snapshot());
        Self { meter, since, stall: Mutex::new(None) }
    }
}

impl GuestMeter for MigrationMeter {
    fn take_window(&self) -> GuestWindow {
        let mut since = self.since.lock();
        let now = self.meter.snapshot();
        let latency = now.since(&since).latency();
        *since = now;
        GuestWindow { requests: latency.count(), latency_p99: latency.quantile(0.99), latency_max: latency.longest() }
    }

    fn begin_stall(&self) {
        *self.stall.lock() = Some(self.meter.watch_stall());
    }

    fn stall(&self) -> Duration {
        self.stall.lock().as_ref().map_or(Duration::ZERO, StallWatch::longest)
    }
}
