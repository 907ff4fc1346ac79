//! Whole machines that move to another host: either daemon dies, the way is gone, QEMU does what it should not, and others have to
//! do with QEMU, too.

use std::time::Duration;

use api::v1::VmMovePhase;
use migrate::{MoveOptions, Phase, Strategy};

use super::basic::small;
use super::hosts::{between, with_files};
use super::{UNMENDED, common};
use crate::fault_event::When;
use crate::guest::Load;
use crate::rng::Rng;
use crate::scenario::{FaultEvent, MachineEvent, Scenario};

/// Phases of the move in which the machine is this host's, and one in which it is not any more.
const BEFORE: [VmMovePhase; 3] = [VmMovePhase::Disks, VmMovePhase::Memory, VmMovePhase::Switching];
const AFTER: VmMovePhase = VmMovePhase::Finishing;

/// So many polls a run without deaths was measured to have, by its disks: on the source's host, and on the other one.
const POLLS: [[u64; 2]; 3] = [[560, 220], [690, 300], [930, 430]];

/// The moments of a machine's move that anything is aimed at. Around the commit they are those of its disks.
fn any_phase(rng: &Rng) -> When {
    match rng.below(8) {
        0 => When::In(Phase::PreSwitch),
        1 => When::In(Phase::Quiescing),
        2 => When::In(Phase::Committing),
        3..=5 => When::InMachine(AFTER),
        _ => When::InMachine(rng.pick(&BEFORE)),
    }
}

/// A machine moves with its disks, one to three. Either daemon dies, the way is gone, QEMU does what it should not, and others do what
/// the daemon bears.
pub(super) fn machine(rng: &Rng) -> Scenario {
    with_others(rng, alone(rng))
}

/// The same, and nobody else has to do with it.
fn alone(rng: &Rng) -> Scenario {
    let load = Load { requests: rng.pick(&[300, 1500]), ..common(rng).load };
    let mut scenario = between(rng).guest(load);
    let faults = [
        FaultEvent::Crash,
        FaultEvent::Crash,
        FaultEvent::PeerCrash,
        FaultEvent::PeerCrash,
        FaultEvent::PeerTrouble,
        FaultEvent::StoreFails,
    ];
    for _ in 0..rng.within(0..=3) {
        scenario = scenario.at(any_phase(rng), rng.pick(&faults));
    }
    if rng.chance(0.2) {
        let phase = rng.pick(&[Phase::Copying, Phase::PreSwitch]);
        scenario = scenario.at(When::In(phase), FaultEvent::Cancel);
    }
    if rng.chance(0.2) {
        scenario = scenario.others(|others| others.have_slow_hooks = true);
    }
    of_machine(rng, scenario)
}

/// The same, and one of the daemons is killed at one await.
pub(super) fn dying(rng: &Rng) -> Scenario {
    let scenario = of_machine(rng, small(rng).between_hosts());
    let is_there = rng.chance(0.5);
    let polls = POLLS[scenario.volume_count() - 1][usize::from(is_there)];
    let scenario = scenario.dies_at_poll(rng.below(polls));
    let scenario = if rng.chance(0.4) { scenario.dies_at_poll(rng.below(polls)) } else { scenario };
    if is_there { scenario.peer_dies() } else { scenario }
}

/// The same without others, and its memory follows its guest.
pub(super) fn following(rng: &Rng) -> Scenario {
    alone(rng).memory_follows()
}

/// The same, and one of the daemons is killed at one await.
pub(super) fn following_dying(rng: &Rng) -> Scenario {
    dying(rng).memory_follows()
}

/// The same, and its memory is copied from outside.
pub(super) fn parallel(rng: &Rng) -> Scenario {
    machine(rng).memory_outside()
}

/// The same, and one of the daemons is killed at one await.
pub(super) fn parallel_dying(rng: &Rng) -> Scenario {
    dying(rng).memory_outside()
}

/// The same, where the first disk at least lies on storage that both hosts reach.
pub(super) fn sharing(rng: &Rng) -> Scenario {
    let scenario = on_shared_storage(rng, machine(rng));
    if rng.chance(0.3) { scenario.at(any_phase(rng), FaultEvent::StoreFails) } else { scenario }
}

/// The same, and one of the daemons is killed at one await.
pub(super) fn sharing_dying(rng: &Rng) -> Scenario {
    on_shared_storage(rng, dying(rng))
}

/// The same, and its disks have layers, which go along.
pub(super) fn layered(rng: &Rng) -> Scenario {
    machine(rng).changes_layers().others(|others| others.are_impatient = false)
}

/// The same, and a move that was undone is asked for again soon.
pub(super) fn layered_again(rng: &Rng) -> Scenario {
    alone(rng).changes_layers()
}

/// A machine moves, and the small files of either daemon fail, or what they are on is full.
pub(super) fn files(rng: &Rng) -> Scenario {
    with_files(rng, machine(rng))
}

/// What somebody else does to a machine that moves.
type Other = fn(&Rng, Scenario) -> Scenario;

/// What others do to machines, each by the scenario that shows it. What the daemon does not bear yet is played there alone.
const OTHERS: [(&str, Other); 6] = [
    ("machine-restarted", restart),
    ("machine-stopped", stop),
    ("machine-sent-resumed", resume_sent),
    ("machine-monitor-held", hold_monitor),
    ("machine-qemu-killed", kill_qemu),
    ("machine-namesake", have_namesake),
];

fn with_others(rng: &Rng, scenario: Scenario) -> Scenario {
    let (name, add) = rng.pick(&OTHERS);
    let is_borne = UNMENDED.iter().all(|(unmended, _)| *unmended != name);
    if rng.chance(0.3) && is_borne { add(rng, scenario) } else { scenario }
}

fn restart(rng: &Rng, scenario: Scenario) -> Scenario {
    let scenario = scenario.at(When::Before, MachineEvent::Restarted.into());
    match rng.chance(0.3) {
        true => scenario.at(When::InMachine(VmMovePhase::Disks), MachineEvent::Restarted.into()),
        false => scenario,
    }
}

/// Its operator has shut it down and started it again since the daemon knows it.
pub(super) fn restarted(rng: &Rng) -> Scenario {
    restart(rng, alone(rng))
}

fn stop(rng: &Rng, scenario: Scenario) -> Scenario {
    let phase = |rng: &Rng| When::InMachine(rng.pick(&[VmMovePhase::Disks, VmMovePhase::Memory]));
    let scenario = match rng.chance(0.5) {
        true => scenario.at(When::Before, MachineEvent::Stopped.into()),
        false => scenario.at(phase(rng), MachineEvent::Stopped.into()),
    };
    match rng.chance(0.6) {
        true => scenario.at(phase(rng), MachineEvent::Resumed.into()),
        false => scenario,
    }
}

/// Its operator stops its guest and lets it go on, before and while it moves.
pub(super) fn stopped(rng: &Rng) -> Scenario {
    stop(rng, alone(rng))
}

fn resume_sent(_: &Rng, scenario: Scenario) -> Scenario {
    scenario.at(When::InMachine(VmMovePhase::Memory), MachineEvent::SentResumed.into())
}

/// A script lets its guest go on that QEMU has stopped and sent.
pub(super) fn sent_resumed(rng: &Rng) -> Scenario {
    resume_sent(rng, alone(rng))
}

fn hold_monitor(_: &Rng, scenario: Scenario) -> Scenario {
    let scenario = scenario.at(When::InMachine(VmMovePhase::Switching), MachineEvent::MonitorHeld.into());
    scenario.at(When::InMachine(VmMovePhase::Switching), FaultEvent::Crash)
}

/// Another client has a monitor while the daemon wants it: it was killed with the guest stopped.
pub(super) fn monitor_held(rng: &Rng) -> Scenario {
    hold_monitor(rng, alone(rng))
}

fn kill_qemu(rng: &Rng, scenario: Scenario) -> Scenario {
    match rng.chance(0.3) {
        true => scenario.at(When::InMachine(rng.pick(&BEFORE)), MachineEvent::SourceKilled.into()),
        false => scenario.at(When::InMachine(VmMovePhase::Memory), MachineEvent::TargetKilled.into()),
    }
}

/// One of its QEMUs is killed: the source's, or the target's after it has loaded everything.
pub(super) fn qemu_killed(rng: &Rng) -> Scenario {
    kill_qemu(rng, alone(rng))
}

fn have_namesake(_: &Rng, scenario: Scenario) -> Scenario {
    let scenario = scenario.others(|others| others.have_namesake = true);
    scenario.at(When::InMachine(VmMovePhase::Disks), FaultEvent::PeerCrash)
}

/// Another VM of its name lives at the other host.
pub(super) fn namesake(rng: &Rng) -> Scenario {
    have_namesake(rng, alone(rng))
}

/// All of its disks stay where they are, and a supervisor starts its QEMU again when it is killed.
pub(super) fn supervised(rng: &Rng) -> Scenario {
    let scenario = alone(rng);
    let all = (0..scenario.volume_count()).collect();
    scenario.sharing(all).others(|others| others.are_supervisors = true)
}

/// A volume at the other host has the name of one of its disks.
pub(super) fn leftover(rng: &Rng) -> Scenario {
    let scenario = of_machine(rng, between(rng)).with(FaultEvent::PeerCrash, rng.below(2));
    scenario.others(|others| others.have_leftover = true)
}

/// One of its disks has moved to the other host before, alone, and somebody asks for its move all the time. That is refused: it is
/// where it was, whenever its daemon dies.
pub(super) fn disk_alone(rng: &Rng) -> Scenario {
    let scenario = of_machine(rng, between(rng)).without_move().others(|others| others.have_slow_hooks = true);
    let scenario = scenario
        .at(When::Before, MachineEvent::DiskMoved.into())
        .at(When::After(Duration::ZERO), MachineEvent::Asked.into())
        .with(FaultEvent::Crash, rng.within(1..=3))
        .with(FaultEvent::PeerCrash, rng.below(2));
    if rng.chance(0.3) { scenario.with(FaultEvent::FilesFail, 1) } else { scenario }
}

fn on_shared_storage(rng: &Rng, scenario: Scenario) -> Scenario {
    let others = (1..scenario.volume_count()).filter(|_| rng.chance(0.5));
    let shared = std::iter::once(0).chain(others).collect();
    scenario.sharing(shared)
}

/// The volumes are disks of one machine.
fn of_machine(rng: &Rng, scenario: Scenario) -> Scenario {
    let any = |options: &mut MoveOptions| {
        options.strategy = rng.pick(&[Strategy::Mirror, Strategy::Mirror, Strategy::Dbt, Strategy::Auto]);
    };
    let count = rng.within(1..=3) as usize;
    let scenario = scenario.options(any).volumes(count, |_| ()).together().machine();
    scenario.others(|others| others.are_impatient = true)
}
