//! A commit of which nobody knows whether it counts: while that is so, no side answers a write alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Disk, Fate, World, lost, map_device, map_on, options, outcome, switched, until};
use block::{Bytes, Data, Mutation};
use migrate::{MigrationContext, MoveOptions, Outcome, Phase};

#[tokio::test(start_paused = true)]
async fn a_commit_in_doubt_is_stored_again_while_the_guest_runs_on_both_sides() {
    for fates in [
        vec![Fate::Failed],
        vec![Fate::Failed, Fate::Failed, Fate::Failed],
        vec![Fate::Late(Duration::from_secs(3))],
        vec![Fate::Late(Duration::from_secs(3)), Fate::Failed],
    ] {
        let world = World::new(6, 1_500_000).await;
        let guest = world.guest(3);
        world.journal.fates.lock().extend(fates.iter().copied());
        let (control, work) = world.start(options()).await;
        until(&control, |progress| progress.phase == Phase::InDoubt).await;
        let lane = world.lane();
        let flushes = world.target.flushes.load(Ordering::Relaxed);
        lane.device.flush().await.expect("the guest's flush succeeds in doubt");
        assert!(world.target.flushes.load(Ordering::Relaxed) > flushes, "a flush in doubt went to one side");
        let report = switched(work).await;
        world.assert_equal_at_commit();
        assert_eq!(report.switchover.doubts, 1);
        assert!(world.journal.committed.load(Ordering::Relaxed));
        world.stop_guest(guest).await;
        assert!(world.slot.device().is_same(&world.target_device));
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_that_waits_for_a_progress_map_that_fails_in_doubt_is_answered_if_the_commit_counts() {
    let size = 2_000_000;
    let world = World::new(6, size).await;
    let map = Disk::new(&world.env, map_device(size).size());
    let context = MigrationContext { progress_map: Some(map_on(&map.device("map"), size, 1).await), ..world.context() };
    world.journal.fates.lock().extend([Fate::Failed; 100]);
    world.journal.counts.store(true, Ordering::Relaxed);
    let (control, work) = world.start_with(context, options()).await;
    until(&control, |progress| progress.phase == Phase::InDoubt).await;
    map.manners.lock().writes_left = Some(0);
    let guest = world.lane();
    let write = Mutation::data(Bytes(5000), Data::copy_of(&[1; 512]));
    let write = tokio::time::timeout(Duration::from_secs(600), guest.device.write(write));
    write.await.expect("it is not forgotten").expect("the target has it");
    assert!(control.snapshot().phase.is_committed(), "the map did not fail: nothing was tried");
    switched(work).await;
    assert_eq!(world.target.contents().await[5000..5512], [1; 512]);
}

#[tokio::test(start_paused = true)]
async fn a_commit_in_doubt_can_be_taken_back() {
    let world = World::new(6, 1_000_000).await;
    let guest = world.guest(2);
    world.journal.fates.lock().extend([Fate::Failed; 100]);
    let (control, work) = world.start(options()).await;
    until(&control, |progress| progress.phase == Phase::InDoubt).await;
    control.cancel().expect("it can still be cancelled");
    assert!(matches!(outcome(work).await, Outcome::Cancelled(_)));
    assert!(world.journal.recorded.lock().contains(&Phase::Reverting));
    assert!(!world.journal.committed.load(Ordering::Relaxed));
    world.stop_guest(guest).await;
    assert!(world.slot.device().is_same(&world.source_device));
}

#[tokio::test(start_paused = true)]
async fn in_doubt_no_write_is_answered_by_one_side_alone() {
    let world = World::new(6, 1_000_000).await;
    world.journal.fates.lock().extend([Fate::Failed; 100]);
    let (control, work) = world.start(options()).await;
    until(&control, |progress| progress.phase == Phase::InDoubt).await;
    // The target fails, and the journal too: nobody can say which side counts.
    world.target.manners.lock().writes_left = Some(0);
    world.journal.records_fail.store(true, Ordering::Relaxed);
    let guest = world.lane();
    let write =
        tokio::spawn(async move { guest.device.write(Mutation::data(Bytes(5000), Data::copy_of(&[1; 512]))).await });
    world.env.sleep(Duration::from_secs(60)).await;
    assert!(!write.is_finished(), "a write was answered by the source alone while the target may hold the volume");
    world.journal.records_fail.store(false, Ordering::Relaxed);
    write.await.expect("no panic").expect("the source holds the volume and has the write");
    assert!(lost(&control).await);
    world.target.mend();
    world.journal.fates.lock().clear();
    control.resume();
    switched(work).await;
    assert_eq!(world.target.contents().await[5000..5512], [1; 512]);
}

#[tokio::test(start_paused = true)]
async fn a_target_that_fails_while_the_commit_is_stored_is_not_given_up_before_that_is_settled() {
    for seed in 0..8 {
        let world = World::new(seed, 1_000_000).await;
        let answered = Arc::<AtomicU64>::default();
        let guest = tokio::spawn({
            let (lane, answered, env) = (world.lane(), Arc::clone(&answered), Arc::clone(&world.env));
            async move {
                loop {
                    let write = Mutation::data(Bytes(5000), Data::copy_of(&[1; 512]));
                    lane.device.write(write).await.expect("the source has it, or the guest waits");
                    answered.fetch_add(1, Ordering::Relaxed);
                    env.sleep(Duration::from_micros(100)).await;
                }
            }
        });
        world.journal.fates.lock().push_back(Fate::Late(Duration::from_secs(30)));
        let (control, work) = world.start(MoveOptions { commit_ms: 10_000, ..options() }).await;
        until(&control, |progress| progress.phase == Phase::Committing).await;
        let before = answered.load(Ordering::Relaxed);
        {
            let mut manners = world.target.manners.lock();
            (manners.writes_left, manners.flushes_detached) = (Some(0), Some(0));
        }
        world.journal.records_fail.store(true, Ordering::Relaxed);
        world.env.sleep(Duration::from_secs(60)).await;
        assert_eq!(control.snapshot().phase, Phase::Reverting, "seed {seed}");
        let since = answered.load(Ordering::Relaxed) - before;
        assert_eq!(since, 0, "seed {seed}: the source alone has answered while the target may hold the volume");
        world.journal.records_fail.store(false, Ordering::Relaxed);
        assert!(lost(&control).await);
        world.target.mend();
        control.resume();
        switched(work).await;
        guest.abort();
    }
}
