//! Proof that the checkers can fail: mistakes of hosts, devices and engines, each of which must be seen within a number
//! of seeds. A checker that no mistake can trip checks nothing.

use std::time::Duration;

use block::Bytes;
use migrate::Verify;
use sim::disk::Faults;
use sim::guest::Load;
use sim::host::{Mistakes, Role};
use sim::log::Keep;
use sim::scenario::{FaultEvent, Scenario};
use transhume_sim as sim;

use crate::faulty_devices::{
    DropsWrites, FailsWrites, FlushesNothing, ForgetsDiscards, ForgetsForcedAccess, KeepsHoles, wrapping,
};

/// Plays `story` until one of `expected` is violated, and fails if none is within `seeds`.
fn is_seen(scenario: &Scenario, expected: &[&str], seeds: u64) {
    let found = (0..seeds).find_map(|seed| {
        let violation = scenario.play(seed, Keep::Tail).violation?;
        Some((seed, violation.invariant.name(), violation.what))
    });
    let (seed, name, what) = found.unwrap_or_else(|| panic!("nothing was seen in {seeds} seeds"));
    assert!(expected.contains(&name), "seed {seed}: {name} ({what}) instead of {expected:?}");
}

fn scenario() -> Scenario {
    Scenario::new().guest(Load { requests: 1000, ..Load::default() }).verify(Verify::Off)
}

#[test]
fn a_mirror_that_drops_writes_is_seen() {
    let mistakes = wrapping(Role::Target, |_, device| DropsWrites::over(device, 50));
    is_seen(&scenario().mistakes(mistakes), &["equal-at-switch"], 10);
}

/// What its disk does at other places and at other times excuses no failure.
#[test]
fn a_write_that_fails_though_the_disk_has_carried_it_out_is_seen() {
    let mistakes = wrapping(Role::Source, |_, device| FailsWrites::over(device, 200));
    let faults = Faults { slow: 0.01, write_errors: 0.002, ..Faults::default() };
    is_seen(&scenario().source(faults).mistakes(mistakes), &["cancel-safe"], 10);
}

#[test]
fn a_full_comparison_does_not_let_dropped_writes_through() {
    let mistakes = wrapping(Role::Target, |_, device| DropsWrites::over(device, 50));
    is_seen(&scenario().verify(Verify::Full).mistakes(mistakes), &["converges", "equal-at-switch"], 10);
}

#[test]
fn a_commit_before_the_target_was_flushed_is_seen() {
    let mistakes = wrapping(Role::Target, |_, device| FlushesNothing::over(device));
    let load = Load { flushes: 0.1, ..Load::default() };
    is_seen(&scenario().guest(load).mistakes(mistakes), &["flush"], 10);
}

#[test]
fn a_discard_that_only_one_side_carries_out_is_seen() {
    let mistakes = wrapping(Role::Target, |_, device| ForgetsDiscards::over(device));
    is_seen(&scenario().mistakes(mistakes), &["equal-at-switch"], 10);
}

#[test]
fn a_hole_that_is_skipped_on_a_target_that_does_not_read_zero_is_seen() {
    // Of a target that was there before nobody believes what it says of holes.
    let kept = wrapping(Role::Target, |_, device| KeepsHoles::over(device));
    let mistakes = Mistakes { trusts_used_targets: true, ..kept };
    is_seen(&scenario().filled(0.5).dirty_target(true).mistakes(mistakes), &["equal-at-switch"], 10);
}

#[test]
fn zeroes_that_an_undone_move_lost_and_the_next_one_trusts_are_seen() {
    let mistakes = Mistakes { trusts_used_targets: true, ..Mistakes::default() };
    let faults = Faults { flush_errors: 0.5, ..Faults::default() };
    let scenario = scenario().filled(0.5).dirty_target(true).target(faults).gives_up_lost_targets();
    is_seen(&scenario.clone().mistakes(mistakes), &["flush"], 300);
    for seed in 0..50 {
        let result = scenario.play(seed, Keep::Tail);
        assert!(result.violation.is_none(), "seed {seed}: {:?}\n{}", result.violation, result.log.join("\n"));
    }
}

#[test]
fn a_commit_record_that_is_not_durable_is_seen() {
    let mistakes = wrapping(Role::Journal, |_, device| ForgetsForcedAccess::over(device));
    let scenario = scenario().with(FaultEvent::PowerLoss, 3).mistakes(mistakes);
    is_seen(&scenario, &["crash-resume", "acked-write", "flush", "stable-read"], 100);
}

#[test]
fn a_guest_that_is_served_from_the_source_again_is_seen() {
    let mistakes = Mistakes { returns_to_source: true, ..Mistakes::default() };
    let load = Load { requests: 4000, reads: 0.0, ..Load::default() };
    is_seen(&scenario().guest(load).mistakes(mistakes), &["one-writer"], 10);
}

/// A move of many seconds, in which the progress map gets something to say.
fn long_story() -> Scenario {
    let load = Load { requests: 1000, reads: 0.2, think: Duration::from_millis(100), ..Load::default() };
    scenario().volume(Bytes::mib(3)).guest(load).within(Duration::from_secs(15)).options(|options| {
        options.bandwidth = Some(200 << 10);
    })
}

#[test]
fn a_progress_map_that_is_believed_after_a_power_loss_is_seen() {
    let mistakes = Mistakes { trusts_old_maps: true, ..Mistakes::default() };
    is_seen(&long_story().with(FaultEvent::PowerLoss, 3).mistakes(mistakes), &["equal-at-switch"], 100);
}

#[test]
fn serving_from_a_target_whose_dead_writer_still_writes_is_seen() {
    let mistakes = Mistakes { opens_at_once: true, ..Mistakes::default() };
    let scenario = scenario().with(FaultEvent::Crash, 6).mistakes(mistakes);
    is_seen(&scenario, &["acked-write", "stable-read", "equal-at-switch"], 300);
}

#[test]
fn without_a_mistake_the_same_stories_hold() {
    let slow = Faults { slow: 0.01, ..Faults::default() };
    let stories = [
        scenario(),
        scenario().verify(Verify::Full),
        scenario().filled(0.5).dirty_target(true),
        scenario().with(FaultEvent::PowerLoss, 3),
        scenario().with(FaultEvent::Crash, 4).source(slow),
        long_story().with(FaultEvent::Crash, 4),
        long_story().with(FaultEvent::PowerLoss, 2),
    ];
    for (number, scenario) in stories.iter().enumerate() {
        for seed in 0..10 {
            let result = scenario.play(seed, Keep::Tail);
            assert!(
                result.violation.is_none(),
                "story {number}, seed {seed}: {:?}\n{}",
                result.violation,
                result.log.join("\n")
            );
        }
    }
}
