//! How much the streams of one path may have on their way while a guest's writes go over it, too.
//!
//! What a connection was given is ahead of every later write of the guest's. It is in the memory of the TLS library, in
//! the kernel, in the queues of the network. Only what keeps the path busy until the next answer is needed there. The
//! rest waits in the send queue, where short requests go first.
//!
//! ```text
//!   queue ──▶ as much as a path carries in the shortest time to an answer, and in QUEUE more ──▶ the network
//!     short requests first                                 + what the other end is carrying out
//! ```
//!
//! As in BBR the path is a rate and a time. The rate is the highest recent one, because a lower one may be the sender's
//! own. The time is the shortest recent one, because a longer one was spent in a queue. The time in which the other end
//! carries requests out is not spent on the path. What is carried out there is allowed in addition, so that a slow
//! device gets as many at once as without this limit.
//!
//! On a fast path requests wait for processors, and a fast path does not make that wait shorter. So more may be under
//! way there. Where no guest writes there is no limit but each stream's own.

use std::sync::Arc;
use std::time::Duration;

use env::Moment;
use parking_lot::Mutex;

/// What is on its way beyond what keeps the path busy takes this long. A guest's write waits so long for it.
const QUEUE: Duration = Duration::from_micros(300);
/// Up to this rate, in bytes a second. Above it it is longer by more than the rate is higher,
const QUEUE_RATE: f64 = 125e6;
const QUEUE_POWER: f64 = 1.85;
/// but no more than so many times.
const QUEUE_FACTOR_MAX: f64 = 20.0;
/// On a long path it is this part of the time to an answer. Otherwise a rate that has risen would stay unnoticed for
/// long.
const GROWTH: f64 = 0.25;
/// While nothing is known of the path.
const BYTES_UNKNOWN: f64 = 512.0 * 1024.0;
/// So much may be under way on the slowest path: the smallest frame of a copy, and the next one behind it.
const BYTES_MIN: f64 = 48.0 * 1024.0;
/// A guest that has written within so much time writes.
const GUEST_SPAN: Duration = Duration::from_secs(1);
/// The rate is that of so much time,
const INTERVAL: Duration = Duration::from_millis(50);
/// and the highest one counts for so long, as the shortest time does.
const SPAN: Duration = Duration::from_secs(4);
/// How much of an estimate a new measurement replaces.
const WEIGHT: f64 = 0.05;
/// A large frame takes this long on the path at most,
const FRAME: Duration = Duration::from_micros(500);
/// but is no smaller than this: the work for each frame is the same.
pub(super) const FRAME_BYTES_MIN: u32 = 32 << 10;

/// The best recent value: of this span and the one before.
#[derive(Clone, Copy, Debug, Default)]
struct Best {
    before: Option<f64>,
    now: Option<f64>,
    since: Moment,
}

impl Best {
    fn take(&mut self, at: Moment, value: f64, better: fn(f64, f64) -> f64) {
        if at.since(self.since) > SPAN {
            self.before = self.now.take();
            self.since = at;
        }
        self.now = Some(self.now.map_or(value, |now| better(now, value)));
    }

    fn get(&self, better: fn(f64, f64) -> f64) -> Option<f64> {
        match (self.before, self.now) {
            (Some(before), Some(now)) => Some(better(before, now)),
            (before, now) => before.or(now),
        }
    }
}

/// What is on its way over one path, and what is known of the path. All sizes are bytes on the wire.
#[derive(Debug, Default)]
pub(super) struct InflightWindow {
    load: usize,
    /// When the guest has written last.
    guest: Option<Moment>,
    /// Bytes a second.
    rate: Best,
    /// Seconds from sending to answering, less those in which the request was carried out.
    base: Best,
    /// Seconds in which a large request is carried out.
    took: f64,
    /// Of the present interval: its beginning and what was answered.
    since: Moment,
    answered: usize,
}

impl InflightWindow {
    /// The guest has written.
    pub(super) const fn guest_writes(&mut self, now: Moment) {
        self.guest = Some(now);
    }

    fn has_guest(&self, now: Moment) -> bool {
        self.guest.is_some_and(|guest| now.since(guest) < GUEST_SPAN)
    }

    /// How many bytes may be on their way; `None` for no limit.
    fn limit(&self, now: Moment) -> Option<usize> {
        if !self.has_guest(now) {
            return None;
        }
        let (Some(rate), Some(base)) = (self.rate.get(f64::max), self.base.get(f64::min)) else {
            return Some(BYTES_UNKNOWN as usize);
        };
        let busy = base + self.took;
        let queue = QUEUE.as_secs_f64() * (rate / QUEUE_RATE).powf(QUEUE_POWER).clamp(1.0, QUEUE_FACTOR_MAX);
        Some((rate * (busy + queue.max(busy * GROWTH))).max(BYTES_MIN) as usize)
    }

    /// Whether another large request may go now.
    pub(super) fn has_room(&self, now: Moment) -> bool {
        self.load == 0 || self.limit(now).is_none_or(|limit| self.load < limit)
    }

    /// The largest frame that should be made now; `None` for no limit.
    pub(super) fn frame_bytes(&self, now: Moment) -> Option<u32> {
        let rate = self.rate.get(f64::max).filter(|_| self.has_guest(now))?;
        let bytes = (rate * FRAME.as_secs_f64()).min(f64::from(1_u32 << 30)) as u32;
        Some((1 << bytes.max(1).ilog2()).max(FRAME_BYTES_MIN))
    }

    /// A request of so many bytes, sent at `sent`, was answered; carrying it out took `took`.
    fn answered(&mut self, now: Moment, sent: Moment, bytes: usize, took: Duration) {
        let latency = now.since(sent);
        self.base.take(now, latency.saturating_sub(took).as_secs_f64(), f64::min);
        if bytes >= FRAME_BYTES_MIN as usize {
            self.took += WEIGHT * (took.min(latency).as_secs_f64() - self.took);
        }
        self.answered += bytes;
        let elapsed = now.since(self.since);
        if elapsed >= INTERVAL {
            self.rate.take(now, self.answered as f64 / elapsed.as_secs_f64(), f64::max);
            (self.since, self.answered) = (now, 0);
        }
    }
}

/// A path's window, with the path's number.
pub(super) type NumberedInflightWindow = (usize, Arc<Mutex<InflightWindow>>);

/// What one connection has on its way over a path; nothing any more when it is dropped.
pub(super) struct ConnectionShare {
    path: usize,
    inflight_window: Arc<Mutex<InflightWindow>>,
    load: usize,
}

impl ConnectionShare {
    pub(super) fn new((path, inflight_window): NumberedInflightWindow) -> Self {
        Self { path, inflight_window, load: 0 }
    }

    /// The path's number.
    pub(super) const fn path(&self) -> usize {
        self.path
    }

    /// Whether another large request may go now.
    pub(super) fn has_room(&self, now: Moment) -> bool {
        self.inflight_window.lock().has_room(now)
    }

    /// A request of so many bytes is sent.
    pub(super) fn sent(&mut self, bytes: usize) {
        self.load += bytes;
        self.inflight_window.lock().load += bytes;
    }

    /// A request of so many bytes, sent at `sent`, was answered; carrying it out took `took`, if it is worth to be noted.
    /// Gives whether the path has become free for those who waited for that.
    pub(super) fn answered(&mut self, now: Moment, sent: Moment, bytes: usize, took: Option<Duration>) -> bool {
        self.load -= bytes;
        let mut inflight_window = self.inflight_window.lock();
        inflight_window.load -= bytes;
        if let Some(took) = took {
            inflight_window.answered(now, sent, bytes, took);
        }
        inflight_window.has_room(now)
    }
}

impl Drop for ConnectionShare {
    fn drop(&mut self) {
        self.inflight_window.lock().load -= self.load;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    fn at(seconds: f64) -> Moment {
        Moment(Duration::from_secs_f64(seconds))
    }

    /// A path that carries `rate` bytes a second, one after the other. Its device takes `took` for each request,
    /// however many it has. Answers are there `base` later. Copies always wait to be sent, and a guest writes 8 KiB
    /// every 2 ms, if at all. Gives which part of the path was used and the longest that a guest's write waited, after
    /// the first second of three.
    fn drive(rate: f64, base: f64, took: f64, guest: bool) -> (f64, f64) {
        let inflight_window = Arc::new(Mutex::new(InflightWindow::default()));
        let mut share = ConnectionShare::new((0, Arc::clone(&inflight_window)));
        let (mut now, mut free, mut next_guest) = (0.0, 0.0_f64, 0.0);
        let mut waiting: VecDeque<(f64, f64, usize)> = VecDeque::new();
        let (mut carried, mut waited) = (0, 0.0_f64);
        while now < 3.0 {
            if guest && now >= next_guest {
                next_guest += 0.002;
                inflight_window.lock().guest_writes(at(now));
                free = free.max(now) + 8192.0 / rate;
                share.sent(8192);
                waiting.push_back((free + base + took, now, 8192));
                if now > 1.0 {
                    (carried, waited) = (carried + 8192, waited.max(free - now));
                }
            }
            // A stream's own limit.
            while share.load < 8 << 20 && share.has_room(at(now)) {
                let bytes = inflight_window.lock().frame_bytes(at(now)).unwrap_or(256 << 10).min(256 << 10) as usize;
                free = free.max(now) + bytes as f64 / rate;
                share.sent(bytes);
                waiting.push_back((free + base + took, now, bytes));
                carried += if now > 1.0 { bytes } else { 0 };
            }
            let (answer, sent, bytes) = waiting.pop_front().expect("a copy is under way");
            if guest && next_guest < answer {
                waiting.push_front((answer, sent, bytes));
                now = next_guest;
                continue;
            }
            now = now.max(answer);
            share.answered(at(now), at(sent), bytes, Some(Duration::from_secs_f64(took)));
        }
        (carried as f64 / 2.0 / rate, waited)
    }

    #[test]
    fn a_slow_path_is_full_and_a_guest_s_write_waits_little_on_it() {
        for (rate, base) in [(119e6, 0.000_2), (119e6, 0.005), (119e6, 0.05), (30e6, 0.000_5)] {
            let (used, waited) = drive(rate, base, 0.000_05, true);
            assert!(used > 0.97, "{used} of {rate} bytes a second over {base} s is used");
            let most = 0.001_f64.max(120e3 / rate).max(base * 0.5);
            assert!(waited < most, "a guest's write waits {waited} s on {rate} bytes a second over {base} s");
        }
    }

    #[test]
    fn without_a_guest_there_is_no_limit() {
        let mut inflight_window = InflightWindow { load: 1 << 30, ..InflightWindow::default() };
        assert!(inflight_window.has_room(at(5.0)) && inflight_window.frame_bytes(at(5.0)).is_none());
        inflight_window.guest_writes(at(5.0));
        assert!(!inflight_window.has_room(at(5.5)));
        assert!(inflight_window.has_room(at(6.5)), "the guest has long stopped to write");
    }

    #[test]
    fn a_fast_path_has_more_under_way_and_large_frames() {
        let (used, waited) = drive(1.2e9, 0.000_3, 0.000_05, true);
        assert!(used > 0.97 && waited < 0.01, "{used} {waited}");
        let mut inflight_window = InflightWindow::default();
        inflight_window.guest_writes(at(0.0));
        for step in 1..40 {
            inflight_window.answered(
                at(f64::from(step) * 0.01),
                at(f64::from(step) * 0.01 - 0.001),
                7 << 20,
                Duration::ZERO,
            );
        }
        assert_eq!(inflight_window.frame_bytes(at(0.4)), Some(256 << 10));
        assert!(inflight_window.limit(at(0.4)).is_some_and(|limit| limit > 3 << 20), "{inflight_window:?}");
    }

    #[test]
    fn a_slow_device_behind_a_fast_path_is_given_as_many_requests_as_it_needs() {
        let (used, _) = drive(119e6, 0.000_2, 0.02, true);
        assert!(used > 0.97, "{used}");
    }

    #[test]
    fn what_a_dead_connection_had_under_way_is_nobody_s() {
        let inflight_window = Arc::new(Mutex::new(InflightWindow::default()));
        let (mut dead, mut other) = (
            ConnectionShare::new((0, Arc::clone(&inflight_window))),
            ConnectionShare::new((0, Arc::clone(&inflight_window))),
        );
        dead.sent(5 << 20);
        other.sent(100);
        drop(dead);
        assert_eq!(inflight_window.lock().load, 100);
        other.answered(at(1.0), at(0.9), 100, None);
        assert!(inflight_window.lock().has_room(at(1.0)));
    }
}
