//! Guests that speak NBD over a link, and what goes wrong with links.

use std::time::Duration;

use block::Bytes;

use super::{common, rate};
use crate::dice::Dice;
use crate::disk::Faults;
use crate::guest::{Load, Pattern};
use crate::link::LinkFigures;
use crate::story::{Happening, Story};
use crate::wire::WireFigures;

/// A link of any kind, and a server that takes few or many requests at once.
pub(super) fn any_wire(dice: &Dice) -> WireFigures {
    let link = LinkFigures {
        rate: dice.pick(&[100_000_000, 2_000_000_000]),
        latency: Duration::from_micros(dice.pick(&[5, 50, 500])),
        window: dice.pick(&[32 << 10, 256 << 10, 1 << 20]),
    };
    WireFigures { link, requests_max: dice.pick(&[2, 16, 128]), bytes_max: Bytes::kib(dice.pick(&[256, 16_384])) }
}

pub(super) fn whole(dice: &Dice) -> Story {
    let wire = any_wire(dice);
    common(dice).wire(wire)
}

/// Slow requests, so that those of a connection that is cut are still under way when they are asked again.
fn slowly(dice: &Dice) -> Story {
    let slow = Faults { slow: rate(dice), stuck: dice.pick(&[0.0, 0.0, 0.0005]), ..Faults::default() };
    let load = Load { requests: 1000, outstanding: 16, reads: 0.4, pattern: Pattern::Hot(128), ..Load::default() };
    let wire = any_wire(dice);
    common(dice).guest(load).wire(wire).source(slow).target(slow)
}

pub(super) fn cut(dice: &Dice) -> Story {
    slowly(dice).with(Happening::Reconnect, dice.within(1..=8)).with(Happening::LinkDown, dice.below(3))
}

pub(super) fn half_open(dice: &Dice) -> Story {
    let stuck = Faults { stuck: 0.01, slow: 0.01, ..Faults::default() };
    let load = Load { requests: 1000, outstanding: 16, reads: 0.4, pattern: Pattern::Hot(64), ..Load::default() };
    let wire = any_wire(dice);
    let story = common(dice).guest(load).wire(wire).source(stuck);
    story.with(Happening::HalfOpen, dice.within(1..=5)).with(Happening::Reconnect, dice.below(3))
}

pub(super) fn crashed(dice: &Dice) -> Story {
    let crashes = dice.within(1..=5);
    slowly(dice).with(Happening::Crash, crashes).with(Happening::Reconnect, dice.below(3))
}

pub(super) fn powerless(dice: &Dice) -> Story {
    let load =
        Load { requests: 500, reads: 0.2, flushes: 0.1, fua: 0.2, pattern: Pattern::Hot(256), ..Load::default() };
    let wire = any_wire(dice);
    let losses = dice.within(1..=3);
    common(dice).guest(load).wire(wire).with(Happening::PowerLoss, losses).with(Happening::Reconnect, dice.below(3))
}

pub(super) fn slow_reader(dice: &Dice) -> Story {
    let wire = any_wire(dice);
    common(dice)
        .wire(WireFigures { link: LinkFigures { window: 16 << 10, ..wire.link }, ..wire })
        .with(Happening::SlowReader, dice.within(1..=4))
        .with(Happening::LinkDown, dice.within(1..=3))
        .with(Happening::Reconnect, dice.below(4))
}
