//! Moves by snapshots, with what goes wrong with other moves, too.

use migrate::{Phase, Strategy};

use super::basic::{at_await, crash, power_loss, recovery, source_errors, steering};
use super::stores::journal_errors;
use super::{common, target_errors};
use crate::fault_event::When;
use crate::rng::Rng;
use crate::scenario::{FaultEvent, Scenario};

fn by_snapshots(scenario: Scenario, rng: &Rng) -> Scenario {
    let (limit, bandwidth) = (rng.pick(&[5, 50, 500]), rng.pick(&[4 << 20, 20 << 20, 300 << 20]));
    scenario.options(|options| {
        options.strategy = Strategy::Snapshot;
        options.downtime_limit_ms = limit;
        options.bandwidth = Some(bandwidth);
    })
}

pub(super) fn quiet(rng: &Rng) -> Scenario {
    by_snapshots(common(rng), rng)
}

pub(super) fn crashed(rng: &Rng) -> Scenario {
    by_snapshots(crash(rng), rng).with(FaultEvent::Cancel, rng.below(2))
}

pub(super) fn powerless(rng: &Rng) -> Scenario {
    by_snapshots(power_loss(rng), rng).with(FaultEvent::Cancel, rng.below(2))
}

pub(super) fn steered(rng: &Rng) -> Scenario {
    by_snapshots(steering(rng), rng)
}

/// Files cannot be written, synced or removed for a while, overlays included.
pub(super) fn on_failing_files(rng: &Rng) -> Scenario {
    let phases = [Phase::PreSwitch, Phase::Switched];
    let mut scenario = common(rng).with(FaultEvent::FilesFail, rng.within(1..=4)).with(FaultEvent::Crash, rng.below(2));
    for phase in phases {
        scenario = scenario.at(When::In(phase), FaultEvent::FilesFail);
    }
    by_snapshots(scenario, rng)
}

/// The process dies while it recovers, or at one await or step of its files.
pub(super) fn dying(rng: &Rng) -> Scenario {
    let scenario = if rng.chance(0.5) { recovery(rng) } else { at_await(rng) };
    by_snapshots(scenario, rng)
}

pub(super) fn on_failing_disks(rng: &Rng) -> Scenario {
    let scenario = match rng.below(3) {
        0 => target_errors(rng),
        1 => source_errors(rng),
        _ => journal_errors(rng),
    };
    by_snapshots(scenario, rng).with(FaultEvent::Crash, rng.below(2))
}
