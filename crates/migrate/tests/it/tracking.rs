//! Dirty block tracking: moving a volume in passes under a guest that writes all the time.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{Fate, World, killed_after, map_device, map_on, options, outcome, switched, until};
use block::{BlockDevice, ErrorKind};
use migrate::{MigrationContext, MoveOptions, OnNoConverge, Outcome, Phase, Strategy, UnderWay, Verify};

const SIZE: u64 = 3_000_000;

fn tracked(strategy: Strategy) -> MoveOptions {
    MoveOptions { strategy, on_no_converge: OnNoConverge::Abort, ..options() }
}

/// So slow a copy, and so short a hold, that no pass leaves less than the one before.
fn hopeless(on_no_converge: OnNoConverge) -> MoveOptions {
    let bandwidth = Some(400_000);
    MoveOptions { bandwidth, downtime_limit_ms: 1, on_no_converge, ..tracked(Strategy::Dbt) }
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_writes_all_the_time_is_moved_in_passes_and_both_sides_are_equal() {
    for seed in 0..20 {
        let size = SIZE + seed * 1013;
        let world = World::new(seed, size).await;
        let guest = world.guest(3);
        let strategy = [Strategy::Dbt, Strategy::IncrementalDbt][(seed % 2) as usize];
        let verify = [Verify::Off, Verify::Sample, Verify::Full][(seed % 3) as usize];
        let (_, work) = world.start(MoveOptions { verify, ..tracked(strategy) }).await;
        let report = switched(work).await;
        world.assert_equal_at_commit();
        let frozen = world.source.contents().await;
        world.env.sleep(Duration::from_millis(500)).await;
        let rounds = world.stop_guest(guest).await;
        assert!(rounds > 100, "the guest hardly ran");
        assert_eq!(world.source.contents().await, frozen, "the source changed after the switchover");
        assert_ne!(world.target.contents().await, frozen, "the guest does not write to the target");
        assert_eq!((report.strategy, report.bytes_mirrored), (strategy, 0));
        let passes = &report.iterations;
        assert!(passes.len() >= 2 && passes.last().is_some_and(|last| last.held), "{passes:?}");
        assert!(passes[..passes.len() - 1].iter().all(|pass| !pass.held), "{passes:?}");
        assert_eq!(passes[0].bytes, size);
        assert!(passes.iter().all(|pass| !pass.decision.is_empty()), "{passes:?}");
        assert!(report.switchover.last_copy_us > 0 && report.switchover.window_us >= report.switchover.last_copy_us);
        assert_eq!(report.equal, (verify != Verify::Off).then_some(true));
        assert!(report.verification.bytes_proved < size, "what was copied last was not compared: {report:?}");
        assert_eq!(report.verified, verify == Verify::Sample, "{:?}", report.verification);
    }
}

#[tokio::test(start_paused = true)]
async fn without_writes_there_is_one_pass_and_all_of_it_is_proved() {
    let world = World::new(3, SIZE).await;
    let (_, work) = world.start(MoveOptions { verify: Verify::Full, ..tracked(Strategy::Dbt) }).await;
    let report = switched(work).await;
    world.assert_equal_at_commit();
    assert_eq!(report.iterations.len(), 1, "{:?}", report.iterations);
    assert!(report.verified && report.verification.bytes_proved == SIZE, "{:?}", report.verification);
}

#[tokio::test(start_paused = true)]
async fn what_is_written_ahead_of_an_incremental_copy_is_copied_once() {
    let mut copied = Vec::new();
    for strategy in [Strategy::Dbt, Strategy::IncrementalDbt] {
        let world = World::new(5, SIZE).await;
        let guest = world.guest(2);
        let (control, work) = world.start(MoveOptions { bandwidth: Some(2_000_000), ..tracked(strategy) }).await;
        until(&control, |progress| progress.iteration >= 2 || progress.phase > Phase::Copying).await;
        control.set_bandwidth(None);
        let report = switched(work).await;
        world.stop_guest(guest).await;
        world.assert_equal_at_commit();
        copied.push(report.iterations[0].bytes_dirty);
    }
    assert!(copied[1] < copied[0], "{copied:?}: nothing was saved");
}

#[tokio::test(start_paused = true)]
async fn a_move_that_does_not_converge_is_ended_and_says_why() {
    let world = World::new(1, SIZE).await;
    let guest = world.guest(3);
    let (_, work) = world.start(hopeless(OnNoConverge::Abort)).await;
    let Outcome::Failed { error, report } = outcome(work).await else { panic!("it converged") };
    world.stop_guest(guest).await;
    assert!(error.chain().contains("does not converge"), "{}", error.chain());
    assert!(report.iterations.last().is_some_and(|last| last.decision.starts_with("abort")), "{report:?}");
    assert!(world.slot.device().is_same(&world.source_device));
    assert!(!world.journal.committed.load(Ordering::Relaxed));
}

#[tokio::test(start_paused = true)]
async fn a_move_that_does_not_converge_goes_on_as_a_mirror() {
    for seed in 0..10 {
        let world = World::new(seed, SIZE).await;
        let guest = world.guest(3);
        let verify = [Verify::Sample, Verify::Full][(seed % 2) as usize];
        let (control, work) = world.start(MoveOptions { verify, ..hopeless(OnNoConverge::Mirror) }).await;
        until(&control, |progress| progress.bytes_mirrored > 0).await;
        control.set_bandwidth(None);
        let report = switched(work).await;
        world.stop_guest(guest).await;
        world.assert_equal_at_commit();
        assert!(report.iterations.iter().any(|pass| pass.decision.starts_with("go on as a mirror")), "{report:?}");
        assert!(report.verified && report.switchover.last_copy_us == 0, "{report:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_forced_move_holds_the_guest_for_as_long_as_it_takes() {
    let world = World::new(2, SIZE).await;
    let guest = world.guest(3);
    let (_, work) = world.start(hopeless(OnNoConverge::Force)).await;
    let report = switched(work).await;
    world.stop_guest(guest).await;
    world.assert_equal_at_commit();
    assert!(report.iterations.iter().any(|pass| pass.decision.starts_with("force")), "{report:?}");
}

#[tokio::test(start_paused = true)]
async fn a_deadline_ends_a_pass_in_its_middle() {
    let world = World::new(4, SIZE).await;
    let guest = world.guest(2);
    let late = MoveOptions { deadline_ms: Some(2000), bandwidth: Some(100_000), ..tracked(Strategy::Dbt) };
    let (_, work) = world.start(late.clone()).await;
    let Outcome::Failed { error, report } = outcome(work).await else { panic!("it was in time") };
    assert!(error.chain().contains("deadline") && report.seconds < 4.0, "{} after {}", error.chain(), report.seconds);
    let mirror = MoveOptions { on_no_converge: OnNoConverge::Mirror, ..late };
    let mut context = world.context();
    context.target_is_fresh = false;
    let (control, work) = world.start_with(context, mirror).await;
    until(&control, |progress| progress.bytes_mirrored > 0).await;
    control.set_bandwidth(None);
    switched(work).await;
    world.stop_guest(guest).await;
    world.assert_equal_at_commit();
}

#[tokio::test(start_paused = true)]
async fn a_deadline_counts_from_the_moves_start_and_not_from_its_last_session() {
    let world = World::new(4, SIZE).await;
    let late = MoveOptions { deadline_ms: Some(60_000), bandwidth: Some(10_000), ..tracked(Strategy::Dbt) };
    let guest = world.guest(2);
    let context =
        MigrationContext { under_way: UnderWay::new(Duration::from_secs(59), world.env.now()), ..world.context() };
    let (_, work) = world.start_with(context, late).await;
    let Outcome::Failed { error, report } = outcome(work).await else { panic!("it was in time") };
    assert!(error.chain().contains("deadline") && report.seconds < 4.0, "{} after {}", error.chain(), report.seconds);
    assert!((report.age_seconds - report.seconds - 59.0).abs() < 0.1, "{} of {}", report.seconds, report.age_seconds);
    world.stop_guest(guest).await;
}

#[tokio::test(start_paused = true)]
async fn a_deadline_that_is_given_later_counts_and_one_that_is_taken_away_does_not() {
    let world = World::new(4, SIZE).await;
    let guest = world.guest(2);
    let slow = MoveOptions { bandwidth: Some(100_000), ..tracked(Strategy::Dbt) };
    let (control, work) = world.start(slow.clone()).await;
    until(&control, |progress| progress.bytes_copied > 0).await;
    control.set_deadline(Some(Duration::from_secs(1)));
    let Outcome::Failed { error, report } = outcome(work).await else { panic!("it was in time") };
    assert!(error.chain().contains("deadline") && report.seconds < 4.0, "{} after {}", error.chain(), report.seconds);
    let mut context = world.context();
    context.target_is_fresh = false;
    let late = MoveOptions { deadline_ms: Some(2000), on_no_converge: OnNoConverge::Mirror, ..slow };
    let (control, work) = world.start_with(context, late).await;
    until(&control, |progress| progress.bytes_copied > 0).await;
    control.set_deadline(None);
    until(&control, |progress| progress.seconds > 3.0).await;
    control.set_bandwidth(None);
    let report = switched(work).await;
    assert!(!report.iterations.iter().any(|pass| pass.decision.contains("deadline")), "{report:?}");
    world.stop_guest(guest).await;
    world.assert_equal_at_commit();
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_takes_too_long_lets_the_guest_go() {
    let world = World::new(6, SIZE).await;
    let guest = world.guest(2);
    let short = MoveOptions { downtime_limit_ms: 40, ..tracked(Strategy::Dbt) };
    let (control, work) = world.start(MoveOptions { on_no_converge: OnNoConverge::Mirror, ..short }).await;
    until(&control, |progress| progress.phase >= Phase::Quiescing).await;
    // From now on the target takes much longer than anybody could expect.
    world.target.manners.lock().delay_ms = 400;
    let done = until(&control, |progress| progress.iteration >= 4 || progress.phase.is_final()).await;
    world.target.manners.lock().delay_ms = 3;
    let report = switched(work).await;
    world.stop_guest(guest).await;
    world.assert_equal_at_commit();
    assert!(report.iterations.iter().any(|pass| pass.decision.contains("was let go")), "{done:?} {report:?}");
}

#[tokio::test(start_paused = true)]
async fn a_target_that_is_lost_between_passes_and_comes_back_is_brought_into_step_again() {
    for seed in 0..10 {
        let world = World::new(seed, SIZE).await;
        let guest = world.guest(3);
        let (control, work) = world.start(hopeless(OnNoConverge::Mirror)).await;
        until(&control, |progress| progress.bytes_copied > 200_000 * (seed + 1)).await;
        world.target.manners.lock().flushes_detached = Some(0);
        world.target.manners.lock().writes_left = Some(0);
        world.target.manners.lock().kind = Some(ErrorKind::Disconnected);
        until(&control, |progress| progress.phase == Phase::TargetLost).await;
        world.env.sleep(Duration::from_millis(100)).await;
        *world.target.manners.lock() = crate::common::Manners { delay_ms: 3, ..crate::common::Manners::default() };
        control.set_bandwidth(None);
        control.resume();
        let report = switched(work).await;
        world.stop_guest(guest).await;
        world.assert_equal_at_commit();
        assert_eq!(report.target_losses, 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_dead_process_s_passes_go_on_with_what_is_left() {
    const LARGE: u64 = 20_000_000;
    for seed in 0..6 {
        let world = World::new(seed, LARGE).await;
        let map = map_device(LARGE);
        let slow = MoveOptions { bandwidth: Some(700_000), ..hopeless(OnNoConverge::Mirror) };
        let world = killed_after(world, &map, LARGE, slow, 12.0 + seed as f64).await;
        let mut context = world.context();
        context.progress_map = Some(map_on(&map, LARGE, 1).await);
        context.target_is_fresh = false;
        let (_, work) = world.start_with(context, tracked(Strategy::Dbt)).await;
        let guest = world.guest(2);
        let report = switched(work).await;
        world.stop_guest(guest).await;
        world.assert_equal_at_commit();
        assert!(report.bytes_resumed > 2_000_000, "seed {seed}: {} were resumed", report.bytes_resumed);
    }
}

#[tokio::test(start_paused = true)]
async fn a_commit_in_doubt_after_a_last_copy_has_both_sides_written_until_it_is_settled() {
    for (seed, fates) in [
        (1, vec![Fate::Failed, Fate::Stored]),
        (2, vec![Fate::Late(Duration::from_secs(2))]),
        (3, vec![Fate::Failed, Fate::Failed, Fate::Failed, Fate::Stored]),
    ] {
        let world = World::new(seed, SIZE).await;
        world.journal.fates.lock().extend(fates);
        let guest = world.guest(3);
        let (_, work) = world.start(tracked(Strategy::Dbt)).await;
        let report = switched(work).await;
        world.stop_guest(guest).await;
        world.assert_equal_at_commit();
        assert!(report.switchover.doubts == 1 && report.bytes_mirrored > 0, "{report:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancel_during_any_pass_leaves_the_guest_on_the_source() {
    for seed in 0..12 {
        let world = World::new(seed, SIZE).await;
        let guest = world.guest(2);
        let (control, work) = world.start(hopeless(OnNoConverge::Mirror)).await;
        until(&control, |progress| progress.bytes_copied > seed * 300_000).await;
        control.cancel().expect("the commit is far away");
        let Outcome::Cancelled(_) = outcome(work).await else { panic!("it was not cancelled") };
        assert!(world.slot.device().is_same(&world.source_device));
        world.stop_guest(guest).await;
    }
}

/// Tasks that write a sector at a time: most of them to the first `hot` bytes, the others anywhere.
fn skewed_guest(world: &World, tasks: u64, size: u64, hot: u64) -> Vec<tokio::task::JoinHandle<u64>> {
    let write = |number: u64| {
        let (guest, env, stop) = (world.lane(), world.env.clone(), world.stop.clone());
        tokio::spawn(async move {
            let mut written = 0;
            while !stop.load(Ordering::Relaxed) {
                let within = if number.is_multiple_of(4) { size } else { hot };
                let offset = env.random() % (within / 512) * 512;
                let data = block::Data::copy_of(&[env.random() as u8; 512]);
                guest.device.write(block::Mutation::data(block::Bytes(offset), data)).await.expect("it is written");
                env.sleep(Duration::from_millis(env.random() % 16)).await;
                written += 1;
            }
            written
        })
    };
    (0..tasks).map(write).collect()
}

/// What a move takes in seconds and bytes copied, over some seeds, without and with hot chunks put off.
async fn with_and_without_hot_blocks(hot: u64) -> [(f64, u64); 2] {
    const LARGE: u64 = 16 << 20;
    let mut sums = [(0.0, 0); 2];
    for (hot_blocks, sum) in [false, true].into_iter().zip(&mut sums) {
        for seed in 0..8 {
            let world = World::new(seed, LARGE).await;
            if !hot_blocks {
                // What the hash functions take of the world's randomness: otherwise two runs differ by their luck alone.
                (0..2 * filters::STAGES).for_each(|_| _ = world.env.random());
            }
            let options = MoveOptions {
                hot_blocks,
                bandwidth: Some(3 << 20),
                downtime_limit_ms: 350,
                on_no_converge: OnNoConverge::Force,
                ..tracked(Strategy::IncrementalDbt)
            };
            let (_, work) = world.start(options).await;
            let guest = skewed_guest(&world, 16, LARGE, hot);
            let report = switched(work).await;
            world.stop_guest(guest).await;
            world.assert_equal_at_commit();
            *sum = (sum.0 + report.seconds, sum.1 + report.bytes_copied);
        }
    }
    sums
}

#[tokio::test(start_paused = true)]
async fn putting_hot_chunks_off_saves_copies_where_some_are_hot() {
    let [without, with] = with_and_without_hot_blocks(1 << 20).await;
    assert!((with.1 as f64) < without.1 as f64 * 0.95, "{without:?} without, {with:?} with");
}

#[tokio::test(start_paused = true)]
async fn putting_hot_chunks_off_costs_nothing_where_none_is_hot() {
    let [without, with] = with_and_without_hot_blocks(16 << 20).await;
    assert!(with.0 <= without.0 * 1.02, "{without:?} without, {with:?} with");
}

#[test]
fn a_disk_of_the_tests_has_the_size_that_they_count_on() {
    let world = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let size = world.expect("a runtime").block_on(async { World::new(1, SIZE).await.source.geometry().size });
    assert_eq!(size.0, SIZE);
}
