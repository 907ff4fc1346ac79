//! What a move took, and what was felt of it.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use transhume_guest::{ClientSpec, Interval, NetworkClient, NetworkReport};

use super::place::Place;

/// The client's requests by UDP a second: they tell the downtime. An emulated guest that answers them takes half a processor.
pub(super) const UDP_RATE: u32 = 1000;
/// How long the guest is left alone before and after the move.
const CALM: Duration = Duration::from_secs(2);

/// One move.
pub(super) struct Felt {
    /// From the order to when the guest runs at the other host, and the mover is done.
    pub(super) seconds: f64,
    /// From QEMU's STOP at the source to its RESUME at the target.
    pub(super) stopped_ms: f64,
    /// From when the memory begins to be copied until all of it is at the target, and the guest runs there. QEMU stops it with much
    /// still to be copied.
    pub(super) memory_seconds: f64,
    /// How many requests the load was answered while the move went on, of what it was before.
    pub(super) kept: f64,
    /// The longest time in which the client had no answer by UDP.
    pub(super) downtime_ms: f64,
    /// The median over the load's intervals of their 99th percentiles, while the move went on.
    pub(super) p99_ms: f64,
    /// The same before.
    pub(super) p99_before_ms: f64,
    /// The longest request of the load.
    pub(super) longest_ms: f64,
    /// How far its forecast was off, if it had one.
    pub(super) forecast: Option<Judged>,
}

/// A forecast beside what the move took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Judged {
    /// By how much of what the move took its time was off, in percent.
    pub(super) seconds_percent: f64,
    /// How many times too long or too short the downtime was expected to be.
    pub(super) downtime_factor: f64,
}

/// How a mover ended.
pub(super) struct Ended {
    /// How long it took.
    pub(super) seconds: f64,
    /// From QEMU's STOP at the source to its RESUME at the target.
    pub(super) stopped_ms: f64,
    /// From when the memory begins to be copied until all of it is at the target, and the guest runs there. QEMU stops it with much
    /// still to be copied.
    pub(super) memory_seconds: f64,
    /// How often the memory was gone through, as the mover counts.
    pub(super) rounds: u64,
    /// How far its forecast was off, if it had one.
    pub(super) forecast: Option<Judged>,
    /// What must live as long as the guest.
    pub(super) keeps: Option<super::peers::Peer>,
}

/// Has `mover` move the guest while a client asks it, and the guest check itself afterwards.
pub(super) fn feel(place: &mut Place, mover: impl FnOnce(&mut Place) -> anyhow::Result<Ended>) -> anyhow::Result<Felt> {
    feel_asked(place, UDP_RATE, mover)
}

/// The same, while the client sends so many requests a second.
pub(super) fn feel_asked(
    place: &mut Place,
    udp_per_second: u32,
    mover: impl FnOnce(&mut Place) -> anyhow::Result<Ended>,
) -> anyhow::Result<Felt> {
    let _reserve = place.reserve()?;
    let spec = ClientSpec { udp_per_second, http_per_second: 0, tcp_per_second: 0 };
    let client: NetworkClient = place.client(spec)?;
    let calm = Instant::now();
    std::thread::sleep(CALM);
    let began = Instant::now();
    let ended = mover(place)?;
    let over = Instant::now();
    std::thread::sleep(CALM);
    let report: NetworkReport = client.finish();
    let before = place.intervals(calm, began);
    let during = place.intervals(began, over + Duration::from_millis(300));
    place.verify().with_context(|| place.guest.last_words())?;
    if report.udp.answered() == 0 {
        bail!("the guest has not answered");
    }
    drop(ended.keeps);
    Ok(Felt {
        seconds: ended.seconds,
        stopped_ms: ended.stopped_ms,
        memory_seconds: ended.memory_seconds,
        kept: rate(&during) / rate(&before),
        downtime_ms: ms(report.udp.longest_gap().length),
        p99_ms: median_p99(&during),
        p99_before_ms: median_p99(&before),
        longest_ms: during.iter().map(|interval| ms(interval.longest)).fold(0.0, f64::max),
        forecast: ended.forecast,
    })
}

/// Requests in an interval, in the mean.
fn rate(intervals: &[Interval]) -> f64 {
    let requests: u64 = intervals.iter().map(|interval| interval.reads + interval.writes).sum();
    requests as f64 / intervals.len().max(1) as f64
}

fn median_p99(intervals: &[Interval]) -> f64 {
    let mut samples = crate::figures::Samples::default();
    let busy = intervals.iter().filter(|interval| interval.reads + interval.writes > 0);
    busy.for_each(|interval| samples.push(ms(interval.p99)));
    samples.median()
}

pub(super) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl std::fmt::Display for Felt {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { seconds, stopped_ms, downtime_ms, p99_ms, p99_before_ms, longest_ms, forecast, .. } = self;
        write!(out, "{seconds:.2} s, without an answer for {downtime_ms:.0} ms, stopped for {stopped_ms:.0} ms, ")?;
        write!(out, "p99 {p99_ms:.1} ms ({p99_before_ms:.1} ms before), longest request {longest_ms:.0} ms")?;
        write!(out, ", memory {:.2} s, {:.2} of the requests", self.memory_seconds, self.kept)?;
        forecast.map_or(Ok(()), |judged| {
            let Judged { seconds_percent, downtime_factor } = judged;
            write!(out, ", forecast off by {seconds_percent:.0} % and {downtime_factor:.1} x")
        })
    }
}
