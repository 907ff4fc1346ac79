//! What a volume's clients did in the last second or so, for whoever looks; and what they wait, for the copy's governor.
//!
//! The meters see a request from when a worker has taken it from its socket. What it has waited there while the worker
//! waited for a processor only the scheduler knows: it counts, thread by thread, how long the thread was runnable and did
//! not run. Requests come at moments of their own, so the part of the time in which a worker waits is the part of the
//! requests that find it waiting. How long the single waits were is not told. Waits that matter come from a processor that
//! somebody else holds until the scheduler's next tick, so they are taken to be as few and as long as that allows; that is
//! more than was felt when many short waits add up, and the copy yields a little early rather than late.

use std::path::PathBuf;
use std::time::Duration;

use api::v1::GuestIo;
use filters::{MeterSnapshot, MeterState, MeterWindow, StallWatch};
use migrate::{GuestMeter, GuestWindow};
use parking_lot::Mutex;

use crate::workers::DATA_NAME;

/// A window is at least this long, so that many who look do not make each other's windows short.
const WINDOW: Duration = Duration::from_millis(900);

/// A thread that waits for a processor gets it after about so long: the period of the slowest usual scheduler tick.
const TICK: Duration = Duration::from_millis(4);
/// The quantile that the governor looks at.
const TAIL_QUANTILE: f64 = 0.99;

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
    workers: Mutex<ProcessorWaits>,
}

impl MigrationMeter {
    pub(crate) fn new(meter: MeterState) -> Self {
        let since = Mutex::new(meter.snapshot());
        Self { meter, since, stall: Mutex::new(None), workers: Mutex::new(ProcessorWaits::of_data_workers()) }
    }
}

impl GuestMeter for MigrationMeter {
    fn take_window(&self) -> GuestWindow {
        let mut since = self.since.lock();
        let now = self.meter.snapshot();
        let window = now.since(&since);
        *since = now;
        let latency = window.latency();
        // Read in every window, so that the next one begins here.
        let wait = self.workers.lock().tail(window.span);
        let latency_p99 = if latency.count() == 0 { Duration::ZERO } else { latency.quantile(TAIL_QUANTILE) + wait };
        GuestWindow { requests: latency.count(), latency_p99, latency_max: latency.longest() }
    }

    fn begin_stall(&self) {
        *self.stall.lock() = Some(self.meter.watch_stall());
    }

    fn stall(&self) -> Duration {
        self.stall.lock().as_ref().map_or(Duration::ZERO, StallWatch::longest)
    }
}

/// How long the data plane's threads wait for a processor, where the kernel tells.
struct ProcessorWaits {
    threads: Vec<Thread>,
}

struct Thread {
    schedstat: PathBuf,
    waited: Duration,
}

impl ProcessorWaits {
    fn of_data_workers() -> Self {
        let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten().map(|task| task.path());
        let of_data =
            |task: &PathBuf| std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.starts_with(DATA_NAME));
        let threads = tasks.filter(of_data).filter_map(|task| {
            let schedstat = task.join("schedstat");
            let waited = waited(&std::fs::read_to_string(&schedstat).ok()?)?;
            Some(Thread { schedstat, waited })
        });
        Self { threads: threads.collect() }
    }

    /// The 99th percentile of what requests of the last `span` have waited for the worker that waited most.
    fn tail(&mut self, span: Duration) -> Duration {
        let waits = self.threads.iter_mut().filter_map(|thread| {
            let now = waited(&std::fs::read_to_string(&thread.schedstat).ok()?)?;
            Some(now.saturating_sub(std::mem::replace(&mut thread.waited, now)))
        });
        tail_wait(waits.max().unwrap_or_default(), span)
    }
}

/// How long a thread has waited for a processor, from what its `schedstat` says: nanoseconds on a processor, nanoseconds
/// waiting for one, and how often it got one.
fn waited(schedstat: &str) -> Option<Duration> {
    schedstat.split_ascii_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
}

/// What the 99th percentile of requests has waited for a worker that waited `waited` of a `span`: a request that comes
/// during a wait waits for the rest of it, anything between nothing and its length.
fn tail_wait(waited: Duration, span: Duration) -> Duration {
    let part = waited.as_secs_f64() / span.as_secs_f64().max(1e-9);
    if part <= 1.0 - TAIL_QUANTILE {
        return Duration::ZERO;
    }
    waited.min(TICK).mul_f64(1.0 - (1.0 - TAIL_QUANTILE) / part.min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workers::Workers;

    #[test]
    fn the_time_that_a_worker_waits_for_a_processor_counts_by_the_requests_that_feel_it() {
        let span = Duration::from_millis(50);
        let tail_us = |waited_us| tail_wait(Duration::from_micros(waited_us), span).as_micros();
        assert_eq!(tail_us(0), 0);
        assert_eq!(tail_us(400), 0, "fewer than one request in a hundred");
        assert!((400..600).contains(&tail_us(1000)));
        assert!((2000..3000).contains(&tail_us(3000)));
        assert!((3500..=4000).contains(&tail_us(40_000)), "a wait ends with the scheduler's tick");
        assert_eq!(tail_wait(Duration::from_secs(1), Duration::ZERO), TICK.mul_f64(TAIL_QUANTILE));
    }

    #[test]
    fn a_kernel_that_does_not_tell_changes_nothing() {
        assert_eq!(waited("25757530 3982440 80\n"), Some(Duration::from_nanos(3_982_440)));
        assert_eq!(waited(""), None);
        let gone = Thread { schedstat: PathBuf::from("/proc/self/task/0/schedstat"), waited: Duration::ZERO };
        assert_eq!(ProcessorWaits { threads: vec![gone] }.tail(Duration::from_millis(50)), Duration::ZERO);
    }

    #[test]
    fn the_data_workers_are_found() {
        let _workers = Workers::start(2).unwrap();
        let found = || ProcessorWaits::of_data_workers().threads.len();
        // A thread names itself when it begins to run.
        for _ in 0..1000 {
            if found() >= 2 || !std::path::Path::new("/proc/self/schedstat").exists() {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{} workers found", found());
    }
}
