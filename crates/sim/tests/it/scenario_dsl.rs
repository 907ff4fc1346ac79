//! Scenarios told in the vocabulary, with what they expect of their own.

use std::time::Duration;

use block::Bytes;
use migrate::{Phase, Verify};
use sim::disk::Timing;
use sim::log::Keep;
use sim::scenario::{Aim, FaultEvent, Scenario};
use sim::scenario_dsl::{expect, guest, operator, process, source, store, target};
use transhume_sim as sim;

fn holds(scenario: &Scenario, seeds: u64) {
    for seed in 0..seeds {
        let result = scenario.play(seed, Keep::Tail);
        assert!(result.violation.is_none(), "seed {seed}: {:?}\n{}", result.violation, result.log.join("\n"));
    }
}

#[test]
fn no_request_waits_long_where_nothing_goes_wrong() {
    let calm = guest().asks(500).at_once(4).sectors(16).thinks(Duration::from_millis(1));
    let scenario = Scenario::new().options(|options| options.bandwidth = Some(100 << 20));
    holds(&scenario.and(calm).and(expect().switched().no_wait_above(Duration::from_millis(20))), 20);
}

#[test]
fn a_limit_that_is_not_held_is_seen() {
    let scenario = Scenario::new().and(expect().no_wait_above(Duration::from_micros(1)));
    let violation = scenario.play(0, Keep::Tail).violation.expect("no request takes a microsecond");
    assert_eq!(violation.invariant.name(), "as-told");
}

#[test]
fn a_first_try_that_does_not_move_the_volume_is_seen() {
    let scenario = Scenario::new().and(operator().cancels_in(Phase::Copying)).and(expect().switched().all_happens());
    let violation = scenario.play(0, Keep::Tail).violation.expect("it is cancelled");
    assert!(violation.what.contains("expected that it moves the volume"), "{violation}");
}

#[test]
fn a_phase_that_does_not_come_is_seen() {
    // A mirror has no last copy.
    let scenario =
        Scenario::new().volume(Bytes::mib(1)).and(guest().asks(50)).and(process().killed_in(Phase::LastCopy));
    let result = scenario.clone().and(expect().all_happens()).play(0, Keep::Tail);
    assert_eq!(result.violation.expect("it does not come").invariant.name(), "as-told");
    assert_eq!(scenario.play(0, Keep::Tail).missed, [(Aim::Disk(Phase::LastCopy), FaultEvent::Crash)]);
}

#[test]
fn a_disk_that_cannot_be_looked_at_is_seen() {
    let blind = Scenario::new().volume(Bytes::mib(1)).without_move().and(source().read_errors(1.0));
    let violation = blind.with(FaultEvent::PowerLoss, 1).play(0, Keep::Tail).violation.expect("no read succeeds");
    assert_eq!(violation.invariant.name(), "converges");
}

#[test]
fn a_target_that_is_lost_while_it_is_copied_to_comes_back_within_the_move() {
    let writer = guest().asks(1000).writes(0.8);
    let scenario = Scenario::new()
        .and(writer)
        .and(target().lost_in(Phase::Copying))
        .and(expect().switched().target_failed().all_happens());
    holds(&scenario, 20);
}

#[test]
fn a_process_killed_around_the_commit_ends_on_one_side() {
    for phase in [Phase::PreSwitch, Phase::Quiescing, Phase::Committing, Phase::Committed, Phase::Switched] {
        let scenario = Scenario::new().volume(Bytes::mib(1)).and(guest().asks(500).writes(0.8));
        holds(&scenario.and(process().killed_in(phase)).and(store().slow(0.1)), 10);
    }
}

#[test]
fn a_commit_in_doubt_is_settled_whatever_comes_then() {
    let scenario = || Scenario::new().volume(Bytes::mib(1)).and(guest().asks(500)).and(store().write_errors(0.7));
    holds(&scenario().and(process().powerless_in(Phase::InDoubt)), 20);
    holds(&scenario().and(operator().cancels_in(Phase::InDoubt)).and(target().lost_in(Phase::InDoubt)), 20);
    holds(&scenario().and(process().killed_recovering_in(Phase::InDoubt)), 20);
}

#[test]
fn a_pause_and_slow_disks_end_well() {
    let scenario = Scenario::new().volume(Bytes::mib(1)).verify(Verify::Full).and(guest().asks(300));
    holds(&scenario.and(operator().pauses_in(Phase::Copying)).and(source().is(Timing::SLOW)), 5);
}

#[test]
fn what_a_source_fails_to_write_in_doubt_does_not_keep_later_writes_from_the_target() {
    let writer = guest().asks(1500).writes(1.0).sectors(8);
    let scenario = Scenario::new().volume(Bytes::mib(2)).and(writer).and(source().write_errors(0.01));
    holds(&scenario.and(store().write_errors(0.7)), 60);
}

#[test]
fn a_full_progress_map_ends_the_job_and_does_not_hold_the_guest() {
    let writer = guest().asks(250).at_once(16).sectors(64).at_one_place(256);
    for phase in [Phase::Copying, Phase::Verifying] {
        let scenario = Scenario::new().volume(Bytes::mib(1)).filled(0.7).and(writer);
        holds(&scenario.and(store().full_in(phase)), 100);
    }
}

#[test]
fn a_flush_that_fails_while_the_connection_is_cut_is_told_to_the_next() {
    let writer = guest().asks(1000).writes(0.9).flushes(0.2).at_one_place(64).thinks(Duration::from_micros(100));
    let scenario = Scenario::new().volume(Bytes::mib(1)).without_move().and(writer).and(source().flush_errors(0.3));
    holds(&scenario.with(FaultEvent::Reconnect, 12).with(FaultEvent::PowerLoss, 2), 60);
}

#[test]
fn a_move_between_hosts_that_ends_for_want_of_space_is_not_told_as_one_that_somebody_has_cancelled() {
    // Only a part of the volume finds room, and the daemon dies when the move is being undone.
    let scenario =
        Scenario::new().volume(Bytes::mib(1)).filled(1.0).and(guest().asks(200)).target_space(0.3).between_hosts();
    holds(&scenario.and(process().killed_in(Phase::Cancelling)), 10);
}
