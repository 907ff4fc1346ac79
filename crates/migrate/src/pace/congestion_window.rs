//! A congestion window in bytes at the devices' latency knee.
//!
//! Every copy tells how long it took. The shortest recent time is what the devices take without a queue. The time by
//! which a copy takes longer was spent in a queue. So `window * (1 - shortest / taken)` bytes are in that queue. The
//! window grows while fewer bytes than one limit are queued, and shrinks while more than a higher one are (TCP Vegas'
//! rule). More in flight would add latency for everybody and no bandwidth. At the beginning the window doubles until a
//! queue is seen. The lower limit is what the device takes in half a millisecond. The reason is that the shortest time
//! on a device shared with others was luck. A window that trusts it leaves a fast device idle.
//!
//! On the way to another host several places hold bytes. They are the memory of both ends of a connection, and
//! processors that read, encrypt, receive and write. Each needs work waiting, so the limits for the queue are
//! multiplied by their number.
//!
//! A guest's mirrored write waits behind what is in flight, and a target that does not answer it in time counts as lost.
//! So a window whose copies take a good part of that time shrinks whatever the knee is, also below its usual minimum. A
//! window with which the target was lost is halved for the next session.

use std::time::Duration;

use env::Moment;

/// Fewer bytes than this in the queue: grow. The least for slow devices, the most for fast ones.
const QUEUE_BYTES_TO_GROW: (f64, f64) = (128.0 * 1024.0, 384.0 * 1024.0);
/// In between it is what the device takes in this time, in seconds.
const QUEUE_SECONDS_TO_GROW: f64 = 0.000_55;
/// More bytes than this in the queue: shrink.
const QUEUE_BYTES_TO_SHRINK: (f64, f64) = (384.0 * 1024.0, 1024.0 * 1024.0);
/// In between, as above.
const QUEUE_SECONDS_TO_SHRINK: f64 = 0.001_5;
/// The window never falls below this for the sake of bandwidth.
const WINDOW_BYTES_MIN: f64 = 256.0 * 1024.0;
/// Nor below this, so that a target does not count as lost: one copy of the usual chunk.
const WINDOW_BYTES_MIN_LATE: f64 = 64.0 * 1024.0;
/// Copies may take this part of the time that the target has for an answer.
const PATIENCE_PART: u32 = 4;
/// How much the window changes for every window's worth of copies.
const STEP_BYTES: f64 = 128.0 * 1024.0;
/// The shortest time counts for so long, and then the shortest of a later span does.
const BASE_SPAN: Duration = Duration::from_secs(5);
/// Copies of 4 KiB, 8 KiB, ... 4 MiB and more.
const CLASSES: usize = 11;

/// How many bytes may be in flight.
pub(crate) struct CongestionWindow {
    bytes: f64,
    bytes_max: f64,
    /// Never less; falls when the target was late.
    bytes_min: f64,
    /// Copies that take longer are too many at once.
    patience: Duration,
    /// How many times as much may be queued as on one device.
    depth: f64,
    /// It still doubles.
    starting: bool,
    bases: [Base; CLASSES],
}

/// The shortest time of copies of one size, over the last one or two spans.
#[derive(Clone, Copy, Default)]
struct Base {
    before: Option<Duration>,
    now: Option<Duration>,
    since: Moment,
}

impl Base {
    fn take(&mut self, at: Moment, taken: Duration) -> Duration {
        if at.since(self.since) > BASE_SPAN {
            self.before = self.now.take();
            self.since = at;
        }
        let shortest = self.now.map_or(taken, |now| now.min(taken));
        self.now = Some(shortest);
        self.before.map_or(shortest, |before| before.min(shortest))
    }
}

impl CongestionWindow {
    /// A window that never grows beyond `bytes_max`, over a target that has `target_limit` for an answer and is reached
    /// through `depth` places that hold bytes.
    pub(crate) fn new(bytes_max: u64, target_limit: Duration, depth: u32) -> Self {
        let bytes_max = (bytes_max as f64).max(WINDOW_BYTES_MIN);
        let (bytes, bytes_min) = ((WINDOW_BYTES_MIN * 2.0).min(bytes_max), WINDOW_BYTES_MIN);
        let (patience, bases) = (target_limit / PATIENCE_PART, [Base::default(); CLASSES]);
        Self { bytes, bytes_max, bytes_min, patience, depth: f64::from(depth.max(1)), starting: true, bases }
    }

    /// The target was lost because it did not answer in time.
    pub(crate) fn target_timed_out(&mut self) {
        self.starting = false;
        self.bytes_min = WINDOW_BYTES_MIN_LATE;
        self.bytes = (self.bytes / 2.0).max(self.bytes_min);
    }

    /// How many bytes may be in flight.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// A copy of `length` bytes took `taken` and ended `at`, with the window fully used or not.
    pub(crate) fn record(&mut self, at: Moment, length: u64, taken: Duration, full: bool) {
        let class = (length.max(4096) / 4096).ilog2() as usize;
        let base = self.bases[class.min(CLASSES - 1)].take(at, taken);
        let ratio = base.as_secs_f64() / taken.as_secs_f64().max(1e-9);
        let queued = self.bytes * (1.0 - ratio.min(1.0));
        let fraction = length as f64 / self.bytes;
        // A window's worth takes as long as each of its copies.
        let rate = self.bytes / taken.as_secs_f64().max(1e-9);
        let limit = |seconds: f64, (least, most): (f64, f64)| (rate * seconds).clamp(least, most) * self.depth;
        let shrink_above = limit(QUEUE_SECONDS_TO_SHRINK, QUEUE_BYTES_TO_SHRINK);
        let grow_below = limit(QUEUE_SECONDS_TO_GROW, QUEUE_BYTES_TO_GROW);
        if taken > self.patience {
            self.starting = false;
            self.bytes_min = WINDOW_BYTES_MIN_LATE;
            self.bytes -= self.bytes * fraction.min(1.0) / 2.0;
        } else if queued > shrink_above {
            self.starting = false;
            // Beyond twice the limit by the surplus, so that a device that has become slow is not waited for long.
            let excess = (queued / shrink_above).min(4.0);
            self.bytes -= STEP_BYTES * fraction.min(1.0) * excess;
        } else if queued < grow_below && full {
            let growth = if self.starting { length as f64 } else { STEP_BYTES * fraction.min(1.0) };
            self.bytes += growth;
        }
        self.bytes = self.bytes.clamp(self.bytes_min, self.bytes_max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(bytes_max: u64) -> CongestionWindow {
        CongestionWindow::new(bytes_max, Duration::from_secs(30), 1)
    }

    /// A device that serves one byte after another at `rate` bytes a second after `fixed`, with the window always full.
    fn settle(rate: f64, fixed: Duration, rounds: usize) -> CongestionWindow {
        settled(window(64 << 20), rate, fixed, rounds)
    }

    fn settled(mut window: CongestionWindow, rate: f64, fixed: Duration, rounds: usize) -> CongestionWindow {
        let length = 256_u64 << 10;
        let mut at = Moment::default();
        for _ in 0..rounds {
            let service = window.bytes() as f64 / rate;
            let taken = (fixed + Duration::from_secs_f64(length as f64 / rate)).max(Duration::from_secs_f64(service));
            at = at + Duration::from_secs_f64(length as f64 / rate);
            window.record(at, length, taken, true);
        }
        window
    }

    #[test]
    fn the_window_settles_where_a_queue_begins() {
        for (rate, fixed_us) in [(500e6, 500_u64), (2e9, 100), (100e6, 10_000)] {
            let fixed = Duration::from_micros(fixed_us);
            let knee = rate * fixed.as_secs_f64() + 262_144.0;
            let settled = settle(rate, fixed, 5000).bytes() as f64;
            assert!(settled >= knee * 0.9, "{settled} leaves a device of knee {knee} idle");
            assert!(settled <= knee + 2.0 * QUEUE_BYTES_TO_SHRINK.1, "{settled} queues behind a knee of {knee}");
        }
    }

    #[test]
    fn a_fast_device_may_have_more_in_its_queue_than_a_slow_one() {
        // A window of 2 MiB, a third of which is queued.
        let shrinks = |rate: f64| {
            let mut window = CongestionWindow { bytes: 2048.0 * 1024.0, starting: false, ..window(64 << 20) };
            let taken = Duration::from_secs_f64(window.bytes / rate);
            window.record(Moment::default(), 256 << 10, taken.mul_f64(2.0 / 3.0), false);
            let before = window.bytes();
            window.record(Moment::default(), 256 << 10, taken, false);
            window.bytes() < before
        };
        assert!(shrinks(100e6), "683 KiB are 7 ms of work for a slow device");
        assert!(!shrinks(700e6), "683 KiB are 1 ms of work for a fast one");
    }

    #[test]
    fn a_way_of_several_stages_holds_more_than_a_device_and_not_without_a_limit() {
        let fixed = Duration::from_micros(500);
        let knee = 1e9 * fixed.as_secs_f64() + 262_144.0;
        let of = |depth| {
            settled(CongestionWindow::new(64 << 20, Duration::from_secs(30), depth), 1e9, fixed, 5000).bytes() as f64
        };
        let (device, way) = (of(1), of(4));
        assert!(way > device + 1.5 * QUEUE_BYTES_TO_GROW.1, "{way} is hardly more than {device}");
        assert!(way <= knee + 8.0 * QUEUE_BYTES_TO_SHRINK.1, "{way} queues behind a knee of {knee}");
    }

    #[test]
    fn a_window_that_is_not_used_does_not_grow() {
        let mut window = window(64 << 20);
        let before = window.bytes();
        for round in 0..1000 {
            window.record(Moment(Duration::from_millis(round)), 65536, Duration::from_micros(100), false);
        }
        assert_eq!(window.bytes(), before);
    }

    #[test]
    fn the_limit_holds() {
        assert_eq!(settle(1e12, Duration::from_secs(1), 5000).bytes(), 64 << 20);
        assert_eq!(window(1).bytes(), 256 << 10);
    }

    #[test]
    fn copies_do_not_take_the_time_that_the_target_has_for_a_guest_s_write() {
        let limit = Duration::from_millis(50);
        // 6 MB/s: what is the least for the bandwidth's sake takes nearly all of the time.
        let window = settled(CongestionWindow::new(64 << 20, limit, 1), 6e6, Duration::from_millis(5), 5000);
        let taken = Duration::from_secs_f64(window.bytes() as f64 / 6e6);
        assert!(taken < limit / 2, "{} bytes take {taken:?}", window.bytes());
    }

    #[test]
    fn a_target_that_was_lost_for_being_late_gets_half_as_much_the_next_time() {
        let mut window = window(64 << 20);
        let before = window.bytes();
        window.target_timed_out();
        assert_eq!(window.bytes(), before / 2);
        (0..20).for_each(|_| window.target_timed_out());
        assert_eq!(window.bytes(), 64 << 10);
    }
}
