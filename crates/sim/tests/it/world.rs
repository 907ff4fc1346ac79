//! The world without a migration: what holds by itself, and that the checkers see it when it does not.

use block::Bytes;
use migrate::Phase;
use sim::disk::Faults;
use sim::host::Mistakes;
use sim::log::Keep;
use sim::scenario::{FaultEvent, Part, Scenario};
use sim::scenario_dsl::{guest, store};
use transhume_sim as sim;

fn still() -> Scenario {
    Scenario::new().volume(Bytes(1_000_000)).without_move()
}

/// Plays `story` with seeds from 0 on until something is violated.
fn first_violation(scenario: &Scenario, seeds: u64) -> Option<String> {
    (0..seeds)
        .find_map(|seed| scenario.play(seed, Keep::Tail).violation)
        .map(|violation| violation.invariant.to_string())
}

fn holds(scenario: &Scenario, seeds: u64) {
    for seed in 0..seeds {
        let result = scenario.play(seed, Keep::Tail);
        assert!(result.violation.is_none(), "seed {seed}: {:?}\n{}", result.violation, result.log.join("\n"));
    }
}

#[test]
fn a_guest_on_a_good_disk_sees_what_it_wrote() {
    holds(&still(), 20);
}

#[test]
fn a_guest_survives_crashes_power_losses_and_reconnects() {
    let scenario = still().with(FaultEvent::Crash, 3).with(FaultEvent::PowerLoss, 2).with(FaultEvent::Reconnect, 3);
    holds(&scenario, 40);
}

#[test]
fn a_guest_copes_with_a_disk_that_fails() {
    let faults = Faults { read_errors: 0.02, write_errors: 0.02, flush_errors: 0.1, stuck: 0.001, ..Faults::default() };
    holds(&still().source(faults).with(FaultEvent::PowerLoss, 2).with(FaultEvent::Crash, 2), 40);
}

#[test]
fn a_guest_waits_for_a_disk_that_is_away_when_the_daemon_starts_and_loses_nothing() {
    holds(&still().with(FaultEvent::StartWithout(Part::Source), 3).with(FaultEvent::Crash, 1), 20);
}

#[test]
fn a_lost_flush_takes_what_was_not_flushed_and_no_more() {
    let scenario = still().with(FaultEvent::FlushLost(Part::Source), 1);
    holds(&scenario.clone().with(FaultEvent::Crash, 2).with(FaultEvent::PowerLoss, 1), 30);
    let told = |seed| scenario.play(seed, Keep::Tail).guest.errors > 0;
    assert!((0..10).any(told), "no guest was told of it");
}

#[test]
fn a_guest_reads_what_somebody_else_has_written_while_no_daemon_ran() {
    holds(&still().with(FaultEvent::ChangedBehind, 3).with(FaultEvent::Crash, 1), 20);
}

#[test]
fn the_same_seed_is_the_same_run() {
    let scenario = still().with(FaultEvent::Crash, 3).with(FaultEvent::PowerLoss, 1);
    for seed in 0..5 {
        let (one, two) = (scenario.play(seed, Keep::Tail), scenario.play(seed, Keep::All));
        assert_eq!((one.log_hash, one.events, one.simulated), (two.log_hash, two.events, two.simulated));
        assert_ne!(one.log_hash, scenario.play(seed + 1, Keep::Tail).log_hash);
    }
}

/// Writes that wait for the end of a job whose progress map is full all go on at once: in the order in which they came.
#[test]
fn requests_that_are_woken_together_go_on_in_the_same_order_every_time() {
    let writer = guest().asks(250).at_once(16).sectors(8).writes(1.0);
    let scenario = Scenario::new().volume(Bytes::mib(8)).and(writer).and(store().full_in(Phase::Verifying));
    for seed in 0..6 {
        let first = scenario.play(seed, Keep::Tail).log_hash;
        assert!((0..6).all(|_| scenario.play(seed, Keep::Tail).log_hash == first), "seed {seed}");
    }
    let swarm = sim::scenarios::find("swarm").expect("it is listed").for_seed(16_700);
    let first = swarm.play(16_700, Keep::Tail).log_hash;
    assert!((0..6).all(|_| swarm.play(16_700, Keep::Tail).log_hash == first), "seed 16700 of the swarm");
}

#[test]
fn opening_a_disk_while_a_dead_process_still_writes_to_it_is_seen() {
    let mistakes = Mistakes { opens_at_once: true, ..Mistakes::default() };
    let scenario = still().with(FaultEvent::Crash, 6).mistakes(mistakes);
    let found = first_violation(&scenario, 200);
    assert!(matches!(found.as_deref(), Some("acked-write" | "stable-read")), "{found:?}");
}

#[test]
fn letting_a_new_connection_in_too_early_is_seen() {
    let mistakes = Mistakes { no_barrier: true, ..Mistakes::default() };
    let slow = Faults { slow: 0.05, ..Faults::default() };
    let scenario = still().source(slow).with(FaultEvent::Reconnect, 8).mistakes(mistakes);
    let found = first_violation(&scenario, 200);
    assert!(matches!(found.as_deref(), Some("acked-write" | "stable-read")), "{found:?}");
}

#[test]
fn a_disk_that_forgets_what_was_flushed_is_seen() {
    let forgets = Faults { lost_writes: 0.01, ..Faults::default() };
    assert_eq!(first_violation(&still().source(forgets), 20).as_deref(), Some("acked-write"));
}
