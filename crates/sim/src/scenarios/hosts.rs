//! Moves to another host's daemon: either process killed, either host without power, the link between them cut.

use std::time::Duration;

use block::Bytes;
use migrate::{MoveOptions, Phase, Strategy};

use super::basic::{small, sparse};
use super::common;
use crate::fault_event::{Event, When};
use crate::guest::{Load, Pattern};
use crate::rng::Rng;
use crate::scenario::{FaultEvent, Scenario};

/// The phases around the switchover, where the two records change.
const AROUND: [Phase; 6] =
    [Phase::PreSwitch, Phase::Quiescing, Phase::Committing, Phase::Committed, Phase::Switched, Phase::Done];

fn around(rng: &Rng, scenario: Scenario, what: FaultEvent) -> Scenario {
    let mut scenario = scenario;
    scenario.events.push(Event { what, when: When::In(rng.pick(&AROUND)) });
    scenario
}

pub(super) fn between(rng: &Rng) -> Scenario {
    common(rng).between_hosts().within(Duration::from_millis(rng.pick(&[60, 200, 600])))
}

/// Two volumes or three that switch over to the other host as one, by strategies of their own.
fn as_one(rng: &Rng, scenario: Scenario) -> Scenario {
    let any = |options: &mut MoveOptions| {
        options.strategy = rng.pick(&[Strategy::Mirror, Strategy::Mirror, Strategy::Dbt, Strategy::Auto]);
    };
    let count = rng.within(2..=3) as usize;
    scenario.moves_at_once(rng.pick(&[1, 3])).options(any).volumes(count, any).together()
}

pub(super) fn quiet(rng: &Rng) -> Scenario {
    between(rng)
}

pub(super) fn crashed(rng: &Rng) -> Scenario {
    let scenario = between(rng).with(FaultEvent::Crash, rng.below(4)).with(FaultEvent::PeerCrash, rng.below(4));
    let scenario = around(rng, scenario, FaultEvent::Crash).with(FaultEvent::WrongEpoch, rng.below(2));
    if rng.chance(0.6) { around(rng, scenario, FaultEvent::PeerCrash) } else { scenario }
}

pub(super) fn cut(rng: &Rng) -> Scenario {
    let scenario = between(rng).with(FaultEvent::PeerTrouble, rng.within(1..=6));
    let scenario = around(rng, scenario, FaultEvent::PeerTrouble).with(FaultEvent::WrongEpoch, rng.below(2));
    if rng.chance(0.5) { around(rng, scenario, FaultEvent::Crash) } else { scenario }
}

/// A guest that works for longer than the hosts are apart, and a copy that takes long.
pub(super) fn cut_beside_guest(rng: &Rng) -> Scenario {
    let load = Load {
        requests: 6000,
        outstanding: rng.pick(&[2, 4, 8]),
        reads: rng.pick(&[0.2, 0.5]),
        sectors_max: 16,
        think: Duration::from_millis(rng.pick(&[4, 10])),
        ..Load::default()
    };
    let rate = rng.pick(&[200 << 10, 600 << 10]);
    between(rng)
        .volume(Bytes::mib(3))
        .filled(1.0)
        .guest(load)
        .options(|options| options.bandwidth = Some(rate))
        .within(Duration::from_secs(3))
        .with(FaultEvent::PeerTrouble, rng.within(1..=3))
}

/// What the other host was given is not there any more as it was, and nobody was told. The copy takes so long, and the guest
/// writes so little, that much is known to be there.
pub(super) fn meddled(rng: &Rng) -> Scenario {
    let scenario = between(rng)
        .volume(Bytes::mib(rng.pick(&[6, 9])))
        .filled(0.8)
        .guest(sparse(rng))
        .options(|options| options.bandwidth = Some(rng.pick(&[400 << 10, 600 << 10])))
        .within(Duration::from_secs(15))
        .with(FaultEvent::PeerMeddled, rng.within(1..=2));
    let scenario = scenario.at(When::After(Duration::from_millis(rng.within(5500..=9000))), FaultEvent::PeerMeddled);
    if rng.chance(0.6) { scenario.at(When::In(Phase::TargetLost), FaultEvent::Crash) } else { scenario }
}

/// The other host's file system fills up, and the source's daemon dies while the move is undone.
pub(super) fn full(rng: &Rng) -> Scenario {
    let scenario = between(rng).filled(0.8).target_space(rng.fraction());
    let scenario = scenario.at(When::In(Phase::Cancelling), FaultEvent::Crash).with(FaultEvent::Crash, rng.below(2));
    if rng.chance(0.3) { scenario.with(FaultEvent::Cancel, 1) } else { scenario }
}

/// Requests meet at a few sectors, and some writes are carried out long before their answers come.
pub(super) fn unheard(rng: &Rng) -> Scenario {
    let load = Load {
        requests: 8000,
        outstanding: 16,
        reads: 0.6,
        flushes: 0.002,
        fua: 0.0,
        zeroes: 0.0,
        discards: 0.0,
        sectors_max: 4,
        pattern: Pattern::Hot(rng.pick(&[4, 16])),
        think: Duration::from_micros(rng.pick(&[300, 800])),
        ..Load::default()
    };
    let scenario = common(rng).volume(Bytes::kib(256)).guest(load).between_hosts().within(Duration::from_millis(250));
    let scenario = scenario.options(|options| options.bandwidth = None).with(FaultEvent::PeerUnheard, 2);
    scenario.at(When::In(Phase::Done), FaultEvent::PeerUnheard)
}

pub(super) fn powerless(rng: &Rng) -> Scenario {
    let scenario =
        between(rng).with(FaultEvent::PowerLoss, rng.below(2)).with(FaultEvent::PeerPowerLoss, rng.within(1..=3));
    let scenario = around(rng, scenario, FaultEvent::PeerPowerLoss);
    // What the daemon before has passed on, and nobody has flushed, whoever comes after it must see to.
    if rng.chance(0.4) { around(rng, scenario, FaultEvent::Crash) } else { scenario }
}

pub(super) fn aborted(rng: &Rng) -> Scenario {
    let scenario = between(rng)
        .with(FaultEvent::Cancel, rng.within(1..=2))
        .with(FaultEvent::PeerTrouble, rng.below(3))
        .with(FaultEvent::PeerCrash, rng.below(2));
    if rng.chance(0.5) { around(rng, scenario, FaultEvent::Cancel) } else { scenario }
}

/// A quiet run has about 250 polls on the source's host and 150 on the other.
fn dying_at(rng: &Rng, polls: u64) -> Scenario {
    let scenario = small(rng).between_hosts().dies_at_poll(rng.below(polls));
    if rng.chance(0.5) { scenario.dies_at_poll(rng.below(polls)) } else { scenario }
}

pub(super) fn dying(rng: &Rng) -> Scenario {
    dying_at(rng, 300)
}

pub(super) fn dying_there(rng: &Rng) -> Scenario {
    dying_at(rng, 200).peer_dies()
}

/// Whoever decides is hard to ask around the switchover, and anything else may happen there, too.
pub(super) fn judged(rng: &Rng) -> Scenario {
    let scenario = between(rng).with_arbiter().with(FaultEvent::ArbiterTrouble, rng.within(1..=4));
    let mut scenario = around(rng, scenario, FaultEvent::ArbiterTrouble);
    if rng.chance(0.4) {
        let what = rng.pick(&[FaultEvent::Crash, FaultEvent::Cancel, FaultEvent::PeerTrouble]);
        scenario.events.push(Event { what, when: When::In(rng.pick(&[Phase::InDoubt, Phase::Reverting])) });
    }
    let more = [
        FaultEvent::Crash,
        FaultEvent::PeerCrash,
        FaultEvent::PeerTrouble,
        FaultEvent::PeerPowerLoss,
        FaultEvent::Cancel,
    ];
    for _ in 0..rng.below(4) {
        scenario = around(rng, scenario, rng.pick(&more));
    }
    let happens_after_the_commit = |event: &Event, what: FaultEvent| {
        event.what == what && matches!(event.when, When::In(phase) if phase.is_committed())
    };
    // What is passed on and not flushed is lost if both die at once; that is known, and no promise.
    if scenario.events.iter().any(|event| happens_after_the_commit(event, FaultEvent::PeerPowerLoss)) {
        scenario.events.retain(|event| !happens_after_the_commit(event, FaultEvent::Crash));
    }
    scenario
}

pub(super) fn judged_dying(rng: &Rng) -> Scenario {
    let scenario = dying_at(rng, 300).with_arbiter();
    let scenario = around(rng, scenario, FaultEvent::ArbiterTrouble);
    if rng.chance(0.3) { scenario.peer_dies() } else { scenario }
}

/// A commit is decided late, after another life of the source has taken it back and gone on.
pub(super) fn judged_late(rng: &Rng) -> Scenario {
    let scenario = between(rng).with_arbiter().at(When::In(Phase::PreSwitch), FaultEvent::ArbiterLate);
    let scenario = scenario.at(When::In(Phase::InDoubt), FaultEvent::Crash).with(FaultEvent::ArbiterLate, rng.below(2));
    if rng.chance(0.3) { scenario.at(When::In(Phase::Committing), FaultEvent::PeerTrouble) } else { scenario }
}

/// Something happens around the one commit of several volumes. They are committed and done with so soon after one another that
/// nobody sees those phases of all.
fn around_the_one(rng: &Rng, scenario: Scenario, faults: &[FaultEvent]) -> Scenario {
    let phases = [Phase::PreSwitch, Phase::Quiescing, Phase::Committing, Phase::Switched, Phase::Done];
    scenario.at(When::In(rng.pick(&phases)), rng.pick(faults))
}

/// Either host's daemon dies or has no power around the commit, the way is gone, one of the moves is cancelled, the record of the
/// group is hard to store.
pub(super) fn together(rng: &Rng) -> Scenario {
    let load = Load { requests: rng.pick(&[300, 1500]), ..common(rng).load };
    let mut scenario = between(rng).guest(load);
    let faults = [
        FaultEvent::Crash,
        FaultEvent::Crash,
        FaultEvent::PeerCrash,
        FaultEvent::PeerCrash,
        FaultEvent::PeerTrouble,
        FaultEvent::StoreFails,
        FaultEvent::StoreSlow,
    ];
    for _ in 0..rng.within(1..=4) {
        scenario = around_the_one(rng, scenario, &faults);
    }
    if rng.chance(0.3) {
        let phase = rng.pick(&[Phase::Copying, Phase::PreSwitch]);
        scenario = scenario.at(When::In(phase), FaultEvent::Cancel).with(FaultEvent::PeerCrash, 1);
    }
    if rng.chance(0.2) {
        scenario = scenario.with(FaultEvent::PeerPowerLoss, 1);
    }
    as_one(rng, scenario)
}

/// What becomes of the small files of either daemon.
const FILES: [FaultEvent; 4] =
    [FaultEvent::FilesFail, FaultEvent::StoreFull, FaultEvent::PeerFilesFail, FaultEvent::PeerStoreFull];

pub(super) fn with_files(rng: &Rng, mut scenario: Scenario) -> Scenario {
    for _ in 0..rng.within(1..=3) {
        let what = rng.pick(&FILES);
        scenario = match rng.chance(0.5) {
            true => around_the_one(rng, scenario, &[what]),
            false => scenario.with(what, 1),
        };
    }
    scenario
}

/// A volume moves, and the small files of either daemon fail, or what they are on is full.
pub(super) fn files(rng: &Rng) -> Scenario {
    let scenario = with_files(rng, between(rng)).with(FaultEvent::Crash, rng.below(2));
    scenario.with(FaultEvent::PeerCrash, rng.below(2))
}

/// Several volumes as one, where an arbiter decides that is hard to ask.
pub(super) fn together_judged(rng: &Rng) -> Scenario {
    let scenario = between(rng).with_arbiter().with(FaultEvent::ArbiterTrouble, rng.within(1..=3));
    let mut scenario = around_the_one(rng, scenario, &[FaultEvent::ArbiterTrouble]);
    if rng.chance(0.4) {
        let what = rng.pick(&[FaultEvent::Crash, FaultEvent::PeerTrouble]);
        scenario = scenario.at(When::In(rng.pick(&[Phase::InDoubt, Phase::Reverting])), what);
    }
    for _ in 0..rng.below(3) {
        let faults = [FaultEvent::Crash, FaultEvent::PeerCrash, FaultEvent::PeerTrouble];
        scenario = around_the_one(rng, scenario, &faults);
    }
    as_one(rng, scenario)
}

/// Either daemon is killed at one await of several moves that end as one.
pub(super) fn together_dying(rng: &Rng) -> Scenario {
    let scenario = as_one(rng, small(rng).between_hosts()).dies_at_poll(rng.below(700));
    let scenario = if rng.chance(0.4) { scenario.dies_at_poll(rng.below(700)) } else { scenario };
    let scenario = if rng.chance(0.3) { scenario.with_arbiter() } else { scenario };
    if rng.chance(0.5) { scenario.peer_dies() } else { scenario }
}
