//! What a move cost the load, of what was seen.

use super::load::{Answered, INTERVAL_MS};
use super::moved::{MoveSeen, PLATEAU};
use super::watch::Seen;

/// The load has recovered once it reaches this share of its plateau over such a span.
const RECOVERED: f64 = 0.95;
const RECOVERED_SPAN_MS: f64 = 2_000.0;
/// Bytes of a block.
const BLOCK: f64 = 4096.0;

/// The moments of a move, in milliseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moments {
    pub(super) ordered: f64,
    /// QEMU has stopped the guest at the source.
    pub(super) stopped: f64,
    /// QEMU runs it at the target.
    pub(super) ran: f64,
}

/// The figures of one move.
#[derive(Clone, Debug)]
pub(super) struct Figures {
    /// Requests a second before the move.
    pub(super) plateau: f64,
    /// The share of the reads that hit before.
    pub(super) hit_rate: f64,
    /// Requests a second over the spans after the switchover, of the plateau.
    pub(super) kept: Vec<f64>,
    /// Seconds from the switchover until the load has recovered; all that was measured if it has not.
    pub(super) recovery: f64,
    /// Seconds from the order until the guest stops.
    pub(super) before_stop: f64,
    /// Seconds that the memory waited for the cache.
    pub(super) wait: f64,
    /// Seconds for which the guest stood still.
    pub(super) stopped: f64,
    /// Seconds of the load at its plateau that were lost before the guest stopped.
    pub(super) lost_before: f64,
    /// The same over the spans after the switchover.
    pub(super) lost: Vec<f64>,
    /// Seconds from the switchover until the transfer is over.
    pub(super) transfer: f64,
    /// MB/s that were read of storage and flash over the spans after the switchover.
    pub(super) read: Vec<f64>,
    /// The same before the move.
    pub(super) read_before: f64,
}

impl Figures {
    /// Of one move; the spans are in seconds.
    pub(super) fn of(seen: &MoveSeen, spans: &[f64]) -> Self {
        let Moments { ordered, stopped, ran } = seen.moments;
        let [before, after] = &seen.answered;
        let [source, target] = &seen.watched;
        let from = ordered - PLATEAU.as_secs_f64() * 1e3;
        let plateau = requests(before, from, ordered) / PLATEAU.as_secs_f64();
        let lost =
            |answered: &[Answered], from: f64, to: f64| (to - from) / 1e3 - requests(answered, from, to) / plateau;
        let over = target.iter().find(|seen| seen.unix_ms >= ran && seen.over);
        let waited = seen.shown["cache_wait_ms"].as_f64().unwrap_or_default();
        Self {
            plateau,
            hit_rate: super::moved::hit_rate(source, from, ordered).unwrap_or(f64::NAN),
            kept: spans.iter().map(|span| requests(after, ran, ran + span * 1e3) / span / plateau).collect(),
            recovery: recovery(after, ran, plateau),
            before_stop: (stopped - ordered) / 1e3,
            wait: waited / 1e3,
            stopped: (ran - stopped) / 1e3,
            lost_before: lost(before, ordered, stopped),
            lost: spans.iter().map(|span| lost(after, ran, ran + span * 1e3)).collect(),
            transfer: over.map_or(f64::NAN, |seen| ((seen.unix_ms - ran) / 1e3).max(0.0)),
            read: spans.iter().map(|span| read(target, ran, ran + span * 1e3)).collect(),
            read_before: read(source, from, ordered),
        }
    }
}

/// Requests that were answered between two moments. An interval that is cut counts in part.
fn requests(answered: &[Answered], from: f64, to: f64) -> f64 {
    let length = INTERVAL_MS as f64;
    let of = |interval: &Answered| {
        let begins = (interval.unix_ms - length).max(from);
        let inside = interval.unix_ms.min(to) - begins;
        (interval.reads + interval.writes) * inside.max(0.0) / 1e3
    };
    answered.iter().map(of).sum()
}

fn recovery(after: &[Answered], ran: f64, plateau: f64) -> f64 {
    let end = after.last().map_or(ran, |last| last.unix_ms);
    let step = INTERVAL_MS as f64;
    let mut at = ran;
    while at + RECOVERED_SPAN_MS <= end {
        if requests(after, at, at + RECOVERED_SPAN_MS) >= RECOVERED * plateau * RECOVERED_SPAN_MS / 1e3 {
            return (at - ran) / 1e3;
        }
        at += step;
    }
    (end - ran) / 1e3
}

/// MB/s that were read of storage and flash between two moments. The warmer's reads of the storage are among them, copies of the source's
/// cache are not.
fn read(seen: &[Seen], from: f64, to: f64) -> f64 {
    let inside: Vec<&Seen> = seen.iter().filter(|seen| (from..=to).contains(&seen.unix_ms)).collect();
    let [Some(first), Some(last)] = [inside.first(), inside.last()] else { return f64::NAN };
    let blocks = (last.hits + last.arrived[2]).saturating_sub(first.hits + first.arrived[2]) as f64;
    let bytes = blocks * BLOCK + last.store_read.saturating_sub(first.store_read) as f64;
    bytes / 1e3 / (last.unix_ms - first.unix_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(unix_ms: f64, reads: f64) -> Answered {
        Answered { unix_ms, reads, writes: 0.0 }
    }

    #[test]
    fn an_interval_that_is_cut_counts_in_part() {
        let answered = [at(250.0, 100.0), at(500.0, 200.0)];
        assert!((requests(&answered, 0.0, 500.0) - 75.0).abs() < 1e-9);
        assert!((requests(&answered, 125.0, 375.0) - 37.5).abs() < 1e-9);
    }

    #[test]
    fn a_load_recovers_when_it_is_near_its_plateau_for_a_while() {
        let slow = (1..=40).map(|number| at(f64::from(number) * 250.0, 50.0));
        let fast = (41..=80).map(|number| at(f64::from(number) * 250.0, 100.0));
        let after: Vec<Answered> = slow.chain(fast).collect();
        let seconds = recovery(&after, 0.0, 100.0);
        assert!((9.75..=10.0).contains(&seconds), "{seconds}");
        assert!((recovery(&after, 0.0, 200.0) - 20.0).abs() < 1e-9, "it never recovers");
    }
}
