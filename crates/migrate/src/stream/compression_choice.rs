//! Which payloads are compressed, and how. Each decision follows from recent measurements. Nothing here waits or reads
//! a clock.
//!
//! A frame of `n` bytes takes `n * wire` as it is, and `n * cost + n * ratio * wire` compressed. `wire` is what the
//! link takes for a byte. `cost` and `ratio` are the recent time and ratio of a coding. The shorter time wins,
//! compression only with a margin. (Compressing and sending overlap, so this is what compression costs at most.)
//!
//! Before a frame is compressed a sample of 4 KiB is. That finds incompressible data for a sixtieth of the cost or
//! less. Where the link is so fast that no ratio could pay, there is no sample either.

use std::time::Duration;

use env::Moment;

use super::Compression;
use super::protocol::{Coding, feature};

/// Compression has to be better by this.
const MARGIN: f64 = 1.1;
/// A sample that does not become shorter than this part of itself speaks for the whole frame.
const SAMPLE_MAX: f64 = 0.85;
/// Shorter frames are not worth a thought.
const FRAME_BYTES_MIN: usize = 4096;
/// Every so many frames a coding that is not the best is used once, so that it is known.
const EXPLORE_EVERY: u32 = 64;
/// The best ratio that is hoped for when the question is whether to look at data at all.
const HOPED_RATIO: f64 = 0.1;
/// How much of an estimate a new measurement replaces.
const WEIGHT: f64 = 0.2;

/// What to do with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// Send it as it is.
    Raw,
    /// Compress a sample and ask again.
    Probe,
}

/// The recent cost and ratio of a coding.
#[derive(Clone, Copy, Debug)]
struct Cost {
    nanos_per_byte: f64,
    ratio: f64,
}

/// What is known of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reading {
    /// How long it takes for a byte.
    pub(super) nanos_per_byte: f64,
    /// Whether it was the link that requests waited for, and not the other side's device.
    pub(super) is_link: bool,
}

/// Decides for one stream.
pub(super) struct Decider {
    mode: Compression,
    /// `None`: not negotiated.
    lz4: Option<Cost>,
    zstd: Option<Cost>,
    wire: Option<f64>,
    turn: u32,
}

impl Decider {
    /// One that has measured nothing. `features` are those that were negotiated.
    pub(super) fn new(mode: Compression, features: u64) -> Self {
        // One core on mixed blocks, until it is measured here.
        let lz4 = Cost { nanos_per_byte: 0.8, ratio: 0.4 };
        let zstd = Cost { nanos_per_byte: 1.2, ratio: 0.3 };
        Self {
            mode,
            lz4: (features & feature::LZ4 != 0).then_some(lz4),
            zstd: (features & feature::ZSTD != 0).then_some(zstd),
            wire: None,
            turn: 0,
        }
    }

    /// What to do with a frame of `length` bytes.
    pub(super) fn plan(&mut self, length: usize) -> Plan {
        let is_possible = match self.mode {
            Compression::Off => false,
            Compression::Lz4 => self.lz4.is_some(),
            Compression::Zstd => self.zstd.is_some(),
            Compression::Auto => self.wire.is_some_and(|wire| {
                self.turn = self.turn.wrapping_add(1);
                let could_pay = |cost: Cost| (cost.nanos_per_byte + HOPED_RATIO * wire) * MARGIN < wire;
                let any_pays = [self.lz4, self.zstd].into_iter().flatten().any(could_pay);
                // What a coding costs may have been measured on a busy machine.
                any_pays || (self.turn.is_multiple_of(4 * EXPLORE_EVERY) && self.lz4.or(self.zstd).is_some())
            }),
        };
        if is_possible && length >= FRAME_BYTES_MIN { Plan::Probe } else { Plan::Raw }
    }

    /// How to send a frame of which a sample became `sample` of itself.
    pub(super) fn code(&mut self, sample: f64) -> Coding {
        if sample > SAMPLE_MAX {
            return Coding::Raw;
        }
        let wire = match (self.mode, self.wire) {
            (Compression::Lz4, _) => return Coding::Lz4,
            (Compression::Zstd, _) => return Coding::Zstd,
            (Compression::Off, _) | (_, None) => return Coding::Raw,
            (Compression::Auto, Some(wire)) => wire,
        };
        // The sample is LZ4's; zstd is as much better as it was before.
        let better = match (self.lz4, self.zstd) {
            (Some(lz4), Some(zstd)) => (zstd.ratio / lz4.ratio.max(0.01)).min(1.0),
            _ => 0.8,
        };
        let lz4 = self.lz4.map(|cost| (cost.nanos_per_byte + sample * wire, Coding::Lz4));
        let zstd = self.zstd.map(|cost| (cost.nanos_per_byte + sample * better * wire, Coding::Zstd));
        let mut options: Vec<(f64, Coding)> = [lz4, zstd].into_iter().flatten().collect();
        options.sort_by(|one, other| one.0.total_cmp(&other.0));
        if let [_, second] = options[..]
            && self.turn.is_multiple_of(EXPLORE_EVERY)
            && second.0 < 2.0 * wire
        {
            return second.1;
        }
        match options.first() {
            Some((time, coding)) if time * MARGIN < wire => *coding,
            _ => Coding::Raw,
        }
    }

    /// `raw` bytes became `payload` in `took`; as many as there were, if it did not help.
    pub(super) fn note_coded(&mut self, coding: Coding, raw: usize, payload: usize, took: Duration) {
        let cost = match coding {
            Coding::Lz4 => &mut self.lz4,
            Coding::Zstd => &mut self.zstd,
            Coding::Raw | Coding::Zero => return,
        };
        let Some(cost) = cost else { return };
        cost.nanos_per_byte += WEIGHT * (took.as_nanos() as f64 / raw.max(1) as f64 - cost.nanos_per_byte);
        cost.ratio += WEIGHT * (payload as f64 / raw.max(1) as f64 - cost.ratio);
    }

    /// What was measured of the link.
    pub(super) fn note_link(&mut self, reading: Reading) {
        self.wire = match (self.wire, reading.is_link) {
            (None, true) => Some(reading.nanos_per_byte),
            (Some(wire), true) => Some(wire + 0.5 * (reading.nanos_per_byte - wire)),
            // The link could do more than it was asked for: shorter payloads are not what is missing.
            (wire, false) => wire.map(|wire| wire * 0.7),
        };
    }
}

/// How long a link is watched for one reading.
const WINDOW: Duration = Duration::from_millis(50);
/// Fewer answers say nothing.
const ANSWERS_MIN: u32 = 4;

/// Measures what a link takes for a byte, from when requests were sent and answered.
pub(super) struct Meter {
    began: Moment,
    idle_since: Option<Moment>,
    idle: Duration,
    bytes: u64,
    answers: u32,
    latency: Duration,
    took: Duration,
}

impl Meter {
    /// A meter that begins now, with nothing under way.
    pub(super) const fn new(now: Moment) -> Self {
        Self {
            began: now,
            idle_since: Some(now),
            idle: Duration::ZERO,
            bytes: 0,
            answers: 0,
            latency: Duration::ZERO,
            took: Duration::ZERO,
        }
    }

    /// Something is under way from now on.
    pub(super) fn busy(&mut self, now: Moment) {
        if let Some(since) = self.idle_since.take() {
            self.idle += now.since(since);
        }
    }

    /// Nothing is under way from now on.
    pub(super) fn idle(&mut self, now: Moment) {
        self.idle_since.get_or_insert(now);
    }

    /// A request with so many bytes on the wire, sent at `sent`, was answered; the other side was busy with it for `took`.
    pub(super) fn answered(&mut self, now: Moment, sent: Moment, bytes: usize, took: Duration) -> Option<Reading> {
        self.bytes += bytes as u64;
        self.answers += 1;
        let latency = now.since(sent);
        self.latency += latency;
        self.took += took.min(latency);
        let elapsed = now.since(self.began);
        if elapsed < WINDOW || self.answers < ANSWERS_MIN {
            return None;
        }
        let busy = elapsed.saturating_sub(self.idle);
        let is_link = self.took * 2 < self.latency && self.idle * 10 < elapsed;
        let reading = Reading { nanos_per_byte: busy.as_nanos() as f64 / self.bytes.max(1) as f64, is_link };
        *self = Self { idle_since: self.idle_since.map(|_| now), ..Self::new(now) };
        Some(reading)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Nanoseconds a byte of 1 Gbit/s and of 10 Gbit/s.
    const SLOW: f64 = 8.5;
    const FAST: f64 = 0.85;

    fn on_link(nanos_per_byte: f64) -> Decider {
        let mut decider = Decider::new(Compression::Auto, feature::KNOWN);
        decider.note_link(Reading { nanos_per_byte, is_link: true });
        for _ in 0..50 {
            decider.note_coded(Coding::Lz4, 100_000, 36_000, Duration::from_nanos(83_000));
            decider.note_coded(Coding::Zstd, 100_000, 28_000, Duration::from_nanos(111_000));
        }
        decider
    }

    /// What the whole takes a byte, in nanoseconds, for frames whose samples become `ratio`.
    fn play(decider: &mut Decider, wire: f64, ratio: f64, frames: u32) -> f64 {
        let mut total = 0.0;
        for _ in 0..frames {
            let coding = match decider.plan(256 << 10) {
                Plan::Raw => Coding::Raw,
                Plan::Probe => {
                    // LZ4 passes over data that does not become shorter at 14 GB/s, and a sample is a sixty-fourth.
                    total += 0.07 / 64.0;
                    decider.code(ratio)
                }
            };
            total += match coding {
                Coding::Lz4 => 0.83 + ratio * wire,
                Coding::Zstd => 1.11 + ratio * 0.78 * wire,
                _ => wire,
            };
        }
        total / f64::from(frames)
    }

    #[test]
    fn nothing_is_compressed_before_the_link_is_known() {
        let mut decider = Decider::new(Compression::Auto, feature::KNOWN);
        assert_eq!(decider.plan(1 << 20), Plan::Raw);
        let mut off = Decider::new(Compression::Off, feature::KNOWN);
        off.note_link(Reading { nanos_per_byte: 1e6, is_link: true });
        assert_eq!(off.plan(1 << 20), Plan::Raw);
    }

    #[test]
    fn a_slow_link_is_given_the_strongest_coding_and_a_fast_one_none() {
        let mut slow = on_link(SLOW * 10.0);
        assert_eq!((slow.plan(65536), slow.code(0.4)), (Plan::Probe, Coding::Zstd));
        let mut gigabit = on_link(SLOW);
        assert!(play(&mut gigabit, SLOW, 0.36, 1000) < 0.55 * SLOW);
        let mut memory = on_link(0.1);
        let plans = (0..1000).filter(|_| memory.plan(256 << 10) == Plan::Probe).count();
        assert!(plans <= 4, "{plans} of 1000 frames were looked at though no ratio could pay");
        assert_eq!(on_link(SLOW).plan(512), Plan::Raw);
    }

    #[test]
    fn data_that_does_not_become_shorter_costs_less_than_three_percent() {
        for wire in [0.1, 0.3, FAST, 2.0, SLOW, 100.0] {
            let took = play(&mut on_link(wire), wire, 1.0, 2000);
            assert!(took < 1.03 * wire, "{took} instead of {wire} ns a byte");
        }
    }

    #[test]
    fn a_device_that_is_slower_than_the_link_ends_compression() {
        let mut decider = on_link(SLOW);
        for _ in 0..40 {
            decider.note_link(Reading { nanos_per_byte: SLOW, is_link: false });
        }
        let plans = (0..100).filter(|_| decider.plan(256 << 10) == Plan::Probe).count();
        assert!(plans <= 1, "{plans}");
    }

    #[test]
    fn a_meter_tells_a_slow_link_from_a_slow_device_and_from_a_sender_with_little_to_say() {
        let at = |milliseconds: u64| Moment(Duration::from_millis(milliseconds));
        let run = |gap: u64, latency: u64, took: u64| {
            let mut meter = Meter::new(at(0));
            let mut reading = None;
            for request in 0..20 {
                let sent = at(request * gap);
                meter.busy(sent);
                let took = Duration::from_millis(took);
                let read = meter.answered(at(request * gap + latency), sent, 1000, took);
                if gap > latency {
                    meter.idle(at(request * gap + latency));
                }
                reading = reading.or(read);
            }
            reading.expect("the window is over")
        };
        let link = run(5, 20, 2);
        assert!(link.is_link && (4000.0..8000.0).contains(&link.nanos_per_byte), "{link:?}");
        assert!(!run(5, 20, 19).is_link, "the device is what is slow");
        assert!(!run(10, 2, 0).is_link, "nobody waits for the link");
    }

    proptest! {
        #[test]
        fn it_is_never_much_slower_than_doing_nothing(wire in 0.05_f64..200.0, ratio in 0.02_f64..1.2) {
            let took = play(&mut on_link(wire), wire, ratio, 1000);
            prop_assert!(took < 1.03 * wire + 0.02, "{took} instead of {wire} ns a byte at {ratio}");
        }
    }
}
