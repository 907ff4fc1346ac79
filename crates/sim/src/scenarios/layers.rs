//! Volumes whose layers come and go while their guests work, and which move with them.

use std::time::Duration;

use block::Bytes;
use migrate::{OnNoConverge, Phase, Strategy, Verify};

use super::common;
use super::common::failing;
use crate::disk::{Faults, Timing};
use crate::guest::Load;
use crate::rng::Rng;
use crate::scenario::{FaultEvent, Scenario};

const STRATEGIES: &[Strategy] = &[
    Strategy::Mirror,
    Strategy::Mirror,
    Strategy::Dbt,
    Strategy::IncrementalDbt,
    Strategy::MirrorAsync,
    Strategy::Auto,
];

pub(super) fn layered(rng: &Rng) -> Scenario {
    let load = Load { requests: rng.pick(&[500, 1500]), ..common(rng).load };
    common(rng).guest(load).volume(Bytes(rng.pick(&[1 << 20, 3 << 20]))).changes_layers().options(|options| {
        options.strategy = rng.pick(STRATEGIES);
        options.on_no_converge = OnNoConverge::Mirror;
        options.verify = rng.pick(&[Verify::Off, Verify::Sample, Verify::Full]);
    })
}

/// Snapshots are taken and removed, the guest is limited, and the volume moves with what it has.
pub(super) fn quiet(rng: &Rng) -> Scenario {
    layered(rng).moves(rng.within(1..=3) as u32)
}

/// The process is killed and the power is lost while layers come, go and move.
pub(super) fn crashed(rng: &Rng) -> Scenario {
    let phase = rng.pick(&[Phase::Copying, Phase::PreSwitch, Phase::Committing, Phase::Switched]);
    layered(rng)
        .with(FaultEvent::Crash, rng.within(1..=5))
        .with(FaultEvent::PowerLoss, rng.below(3))
        .with(FaultEvent::PowerLossAtStore, rng.below(2))
        .with(FaultEvent::Cancel, rng.below(2))
        .at(crate::fault_event::When::In(phase), FaultEvent::Crash)
}

/// The same, and the daemon's small files fail, or there is no room for them.
pub(super) fn files(rng: &Rng) -> Scenario {
    crashed(rng).with(FaultEvent::FilesFail, rng.within(1..=3)).with(FaultEvent::StoreFull, rng.below(3))
}

/// The process dies at one of its awaits.
pub(super) fn dying(rng: &Rng) -> Scenario {
    layered(rng).dies_at_poll(rng.below(3000)).with(FaultEvent::FilesFail, rng.below(2))
}

/// The volume goes to another host with what it has; its guest goes through the layers at the first one. Either daemon is
/// killed, the link is cut, or the other host has no power. Not both of the last and a death here: see `hosts.rs`.
pub(super) fn to_other_host(rng: &Rng) -> Scenario {
    let scenario = layered(rng)
        .between_hosts()
        .within(Duration::from_millis(rng.pick(&[60, 200, 600])))
        .with(FaultEvent::PeerTrouble, rng.below(3))
        .with(FaultEvent::Cancel, rng.below(2));
    if rng.chance(0.4) {
        return scenario.with(FaultEvent::PeerPowerLoss, rng.within(1..=3));
    }
    let phase = rng.pick(&[Phase::Copying, Phase::PreSwitch, Phase::Committing, Phase::Switched, Phase::Done]);
    scenario
        .with(FaultEvent::Crash, rng.below(3))
        .with(FaultEvent::PeerCrash, rng.below(4))
        .at(crate::fault_event::When::In(phase), FaultEvent::Crash)
}

/// The disks fail, and moves are undone.
pub(super) fn failing_disks(rng: &Rng) -> Scenario {
    let timing = |rng: &Rng| if rng.chance(0.3) { Timing::SLOW } else { Timing::FLASH };
    let (source, target) = (timing(rng), timing(rng));
    // What comes of a flush that fails is told in `flush-lost-target`.
    let faults = Faults { flush_errors: 0.0, ..failing(rng, &[0.0005, 0.002, 0.01]) };
    failing_targets(rng, (source, target), faults)
}

/// The same, and flushes fail, too, so that an overlay answers none well until it is opened again.
pub(super) fn failing_flushes(rng: &Rng) -> Scenario {
    let faults = Faults { flush_errors: rng.pick(&[0.1, 0.4]), ..failing(rng, &[0.0005, 0.002, 0.01]) };
    failing_targets(rng, (Timing::FLASH, Timing::FLASH), faults)
}

fn failing_targets(rng: &Rng, (source, target): (Timing, Timing), faults: Faults) -> Scenario {
    layered(rng)
        .timings(source, target)
        .target(faults)
        .with(FaultEvent::TargetLost, rng.below(2))
        .with(FaultEvent::Cancel, rng.below(3))
        .with(FaultEvent::Crash, rng.below(2))
}
