//! Guests that speak NBD over a link, and what goes wrong with links.

use std::time::Duration;

use block::Bytes;

use super::basic::rate;
use super::common;
use crate::disk::Faults;
use crate::guest::{Load, Pattern};
use crate::link::LinkFigures;
use crate::rng::Rng;
use crate::scenario::{FaultEvent, Scenario};
use crate::wire::WireFigures;

/// A link of any kind, and a server that takes few or many requests at once.
pub(super) fn any_wire(rng: &Rng) -> WireFigures {
    let link = LinkFigures {
        rate: rng.pick(&[100_000_000, 2_000_000_000]),
        latency: Duration::from_micros(rng.pick(&[5, 50, 500])),
        window: rng.pick(&[32 << 10, 256 << 10, 1 << 20]),
    };
    WireFigures { link, requests_max: rng.pick(&[2, 16, 128]), bytes_max: Bytes::kib(rng.pick(&[256, 16_384])) }
}

pub(super) fn whole(rng: &Rng) -> Scenario {
    let wire = any_wire(rng);
    common(rng).wire(wire)
}

/// Slow requests, so that those of a connection that is cut are still under way when they are asked again.
fn slowly(rng: &Rng) -> Scenario {
    let slow = Faults { slow: rate(rng), stuck: rng.pick(&[0.0, 0.0, 0.0005]), ..Faults::default() };
    let load = Load { requests: 1000, outstanding: 16, reads: 0.4, pattern: Pattern::Hot(128), ..Load::default() };
    let wire = any_wire(rng);
    common(rng).guest(load).wire(wire).source(slow).target(slow)
}

pub(super) fn cut(rng: &Rng) -> Scenario {
    slowly(rng).with(FaultEvent::Reconnect, rng.within(1..=8)).with(FaultEvent::LinkDown, rng.below(3))
}

pub(super) fn half_open(rng: &Rng) -> Scenario {
    let stuck = Faults { stuck: 0.01, slow: 0.01, ..Faults::default() };
    let load = Load { requests: 1000, outstanding: 16, reads: 0.4, pattern: Pattern::Hot(64), ..Load::default() };
    let wire = any_wire(rng);
    let scenario = common(rng).guest(load).wire(wire).source(stuck);
    scenario.with(FaultEvent::HalfOpen, rng.within(1..=5)).with(FaultEvent::Reconnect, rng.below(3))
}

pub(super) fn crashed(rng: &Rng) -> Scenario {
    let crashes = rng.within(1..=5);
    slowly(rng).with(FaultEvent::Crash, crashes).with(FaultEvent::Reconnect, rng.below(3))
}

pub(super) fn powerless(rng: &Rng) -> Scenario {
    let load =
        Load { requests: 500, reads: 0.2, flushes: 0.1, fua: 0.2, pattern: Pattern::Hot(256), ..Load::default() };
    let wire = any_wire(rng);
    let losses = rng.within(1..=3);
    common(rng).guest(load).wire(wire).with(FaultEvent::PowerLoss, losses).with(FaultEvent::Reconnect, rng.below(3))
}

pub(super) fn slow_reader(rng: &Rng) -> Scenario {
    let wire = any_wire(rng);
    common(rng)
        .wire(WireFigures { link: LinkFigures { window: 16 << 10, ..wire.link }, ..wire })
        .with(FaultEvent::SlowReader, rng.within(1..=4))
        .with(FaultEvent::LinkDown, rng.within(1..=3))
        .with(FaultEvent::Reconnect, rng.below(4))
}
