//! Proof that the checkers can fail: mistakes of hosts, devices and engines, each of which must be seen within a number
//! of seeds. A checker that no mistake can trip checks nothing.

mod liars;

use std::time::Duration;

use block::Bytes;
use migrate::Verify;
use sim::disk::Faults;
use sim::guest::Load;
use sim::host::{Mistakes, Role};
use sim::log::Keep;
use sim::story::{Happening, Story};
use transhume_sim as sim;

use liars::{DropsWrites, FailsWrites, FlushesNothing, ForgetsDiscards, ForgetsForcedAccess, KeepsHoles, wrapping};

/// Plays `story` until one of `expected` is violated, and fails if none is within `seeds`.
fn is_seen(story: &Story, expected: &[&str], seeds: u64) {
    let found = (0..seeds).find_map(|seed| {
        let violation = story.play(seed, Keep::Tail).violation?;
        Some((seed, violation.invariant.name(), violation.what))
    });
    let (seed, name, what) = found.unwrap_or_else(|| panic!("nothing was seen in {seeds} seeds"));
    assert!(expected.contains(&name), "seed {seed}: {name} ({what}) instead of {expected:?}");
}

fn story() -> Story {
    Story::new().guest(Load { requests: 1000, ..Load::default() }).verify(Verify::Off)
}

#[test]
fn a_mirror_that_drops_writes_is_seen() {
    let mistakes = wrapping(Role::Target, |_, device| DropsWrites::over(device, 50));
    is_seen(&story().mistakes(mistakes), &["equal-at-switch"], 10);
}

/// What its disk does at other places and at other times excuses no failure.
#[test]
fn a_write_that_fails_though_the_disk_has_carried_it_out_is_seen() {
    let mistakes = wrapping(Role::Source, |_, device| FailsWrites::over(device, 200));
    let faults = Faults { slow: 0.01, write_errors: 0.002, ..Faults::default() };
    is_seen(&story().source(faults).mistakes(mistakes), &["cancel-safe"], 10);
}

#[test]
fn a_full_comparison_does_not_let_dropped_writes_through() {
    let mistakes = wrapping(Role::Target, |_, device| DropsWrites::over(device, 50));
    is_seen(&story().verify(Verify::Full).mistakes(mistakes), &["converges", "equal-at-switch"], 10);
}

#[test]
fn a_commit_before_the_target_was_flushed_is_seen() {
    let mistakes = wrapping(Role::Target, |_, device| FlushesNothing::over(device));
    let load = Load { flushes: 0.1, ..Load::default() };
    is_seen(&story().guest(load).mistakes(mistakes), &["flush"], 10);
}

#[test]
fn a_discard_that_only_one_side_carries_out_is_seen() {
    let mistakes = wrapping(Role::Target, |_, device| ForgetsDiscards::over(device));
    is_seen(&story().mistakes(mistakes), &["equal-at-switch"], 10);
}

#[test]
fn a_hole_that_is_skipped_on_a_target_that_does_not_read_zero_is_seen() {
    // Of a target that was there before nobody believes what it says of holes.
    let kept = wrapping(Role::Target, |_, device| KeepsHoles::over(device));
    let mistakes = Mistakes { trusts_used_targets: true, ..kept };
    is_seen(&story().filled(0.5).dirty_target(true).mistakes(mistakes), &["equal-at-switch"], 10);
}

#[test]
fn zeroes_that_an_undone_move_lost_and_the_next_one_trusts_are_seen() {
    let mistakes = Mistakes { trusts_used_targets: true, ..Mistakes::default() };
    let faults = Faults { flush_errors: 0.5, ..Faults::default() };
    let story = story().filled(0.5).dirty_target(true).target(faults).gives_up_lost_targets();
    is_seen(&story.clone().mistakes(mistakes), &["flush"], 300);
    for seed in 0..50 {
        let verdict = story.play(seed, Keep::Tail);
        assert!(verdict.violation.is_none(), "seed {seed}: {:?}\n{}", verdict.violation, verdict.log.join("\n"));
    }
}

#[test]
fn a_commit_record_that_is_not_durable_is_seen() {
    let mistakes = wrapping(Role::Journal, |_, device| ForgetsForcedAccess::over(device));
    let story = story().with(Happening::PowerLoss, 3).mistakes(mistakes);
    is_seen(&story, &["crash-resume", "acked-write", "flush", "stable-read"], 100);
}

#[test]
fn a_guest_that_is_served_from_the_source_again_is_seen() {
    let mistakes = Mistakes { returns_to_source: true, ..Mistakes::default() };
    let load = Load { requests: 4000, reads: 0.0, ..Load::default() };
    is_seen(&story().guest(load).mistakes(mistakes), &["one-writer"], 10);
}

/// A move of many seconds, in which the progress map gets something to say.
fn long_story() -> Story {
    let load = Load { requests: 1000, reads: 0.2, think: Duration::from_millis(100), ..Load::default() };
    story().volume(Bytes::mib(3)).guest(load).within(Duration::from_secs(15)).options(|options| {
        options.bandwidth = Some(200 << 10);
    })
}

#[test]
fn a_progress_map_that_is_believed_after_a_power_loss_is_seen() {
    let mistakes = Mistakes { trusts_old_maps: true, ..Mistakes::default() };
    is_seen(&long_story().with(Happening::PowerLoss, 3).mistakes(mistakes), &["equal-at-switch"], 100);
}

#[test]
fn serving_from_a_target_whose_dead_writer_still_writes_is_seen() {
    let mistakes = Mistakes { opens_at_once: true, ..Mistakes::default() };
    let story = story().with(Happening::Crash, 6).mistakes(mistakes);
    is_seen(&story, &["acked-write", "stable-read", "equal-at-switch"], 300);
}

#[test]
fn without_a_mistake_the_same_stories_hold() {
    let slow = Faults { slow: 0.01, ..Faults::default() };
    let stories = [
        story(),
        story().verify(Verify::Full),
        story().filled(0.5).dirty_target(true),
        story().with(Happening::PowerLoss, 3),
        story().with(Happening::Crash, 4).source(slow),
        long_story().with(Happening::Crash, 4),
        long_story().with(Happening::PowerLoss, 2),
    ];
    for (number, story) in stories.iter().enumerate() {
        for seed in 0..10 {
            let verdict = story.play(seed, Keep::Tail);
            assert!(
                verdict.violation.is_none(),
                "story {number}, seed {seed}: {:?}\n{}",
                verdict.violation,
                verdict.log.join("\n")
            );
        }
    }
}
