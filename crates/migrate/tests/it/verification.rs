//! What verification says when something has come in between: it says no more than was compared.

use std::time::Duration;

use crate::common::{CHUNK, Disk, World, lost, options, outcome, switched, until};
use block::{BufferPool, Bytes, Data, Mutation};
use migrate::{MigrationContext, MoveOptions, Outcome, Phase, Strategy, Verify};

const STRATEGIES: [Strategy; 5] =
    [Strategy::Mirror, Strategy::Dbt, Strategy::IncrementalDbt, Strategy::Auto, Strategy::MirrorAsync];

#[tokio::test(start_paused = true)]
async fn what_a_target_has_lost_after_it_was_compared_is_compared_when_it_is_back() {
    for strategy in STRATEGIES {
        let world = World::new(4, 2_000_000).await;
        let sample = MoveOptions { strategy, verify: Verify::Sample, sample_chunks: 1, ..options() };
        let (control, work) = world.start(sample).await;
        until(&control, |progress| progress.phase == Phase::Verifying).await;
        // The flush before the switchover is the first one.
        world.target.manners.lock().flushes_detached = Some(0);
        assert!(lost(&control).await, "{strategy}");
        world.target.mend();
        control.resume();
        let report = switched(work).await;
        world.assert_equal_at_commit();
        let compared = report.verification.chunks;
        assert!(report.verified && compared > 100, "{strategy} has compared {compared} chunks: {report:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn of_another_target_nothing_is_known_to_be_equal() {
    for strategy in STRATEGIES {
        let world = World::new(4, 2_000_000).await;
        let full = MoveOptions { strategy, verify: Verify::Full, ..options() };
        let (control, work) = world.start(full).await;
        until(&control, |progress| progress.phase == Phase::Verifying).await;
        world.target.manners.lock().flushes_detached = Some(0);
        assert!(lost(&control).await, "{strategy}");
        let other = Disk::new(&world.env, Bytes(2_000_000));
        control.set_bandwidth(Some(Bytes(100_000)));
        control.resume_with(other.device("other"), None);
        until(&control, |progress| progress.phase == Phase::Copying && progress.bytes_left > 0).await;
        control.cancel().expect("it is far from its commit");
        let Outcome::Cancelled(report) = outcome(work).await else { panic!("it was cancelled") };
        assert_eq!((report.equal, report.verified, report.verification.bytes_proved), (None, false, 0), "{strategy}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_comparison_that_could_not_read_is_made_again_with_every_strategy() {
    for strategy in STRATEGIES {
        let world = World::new(4, 2_000_000).await;
        let full = MoveOptions { strategy, verify: Verify::Full, ..options() };
        let (control, work) = world.start(full).await;
        until(&control, |progress| progress.phase == Phase::Verifying).await;
        world.source.manners.lock().reads_left = Some(1);
        world.env.sleep(Duration::from_millis(40)).await;
        world.source.mend();
        let report = switched(work).await;
        assert!(report.retries > 0, "{strategy}: nothing could not be read");
        assert!(report.verified && report.verification.bytes_proved == 2_000_000, "{strategy}: {report:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn chunks_larger_than_a_copy_are_compared() {
    for mib in [1, 2, 4] {
        let world = World::new(4, 9_000_000).await;
        let context = MigrationContext { pool: BufferPool::new(Bytes::mib(32)), ..world.context() };
        let whole = MoveOptions { chunk_bytes: mib << 20, verify: Verify::Full, ..MoveOptions::default() };
        let (_, work) = world.start_with(context, whole).await;
        assert!(switched(work).await.verified);
        world.assert_equal_at_commit();
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_last_copy_has_failed_to_write_is_compared_before_the_switchover() {
    let world = World::new(6, 2_000_000).await;
    let tracked = MoveOptions { strategy: Strategy::Dbt, verify: Verify::Sample, sample_chunks: 1, ..options() };
    let (control, work) = world.start(MoveOptions { downtime_limit_ms: 2_000, ..tracked }).await;
    until(&control, |progress| progress.phase == Phase::Verifying).await;
    control.pause();
    for chunk in 0..50 {
        let write = Mutation::data(Bytes(chunk * 7 * CHUNK), Data::copy_of(&[0xa5; 512]));
        world.lane().device.write(write).await.expect("the source takes it");
    }
    // The target fails a write now and then, which is borne: the guest is let go, and another pass copies the rest.
    world.target.manners.lock().every_nth_write_fails = Some(20);
    control.resume();
    let report = switched(work).await;
    world.assert_equal_at_commit();
    assert!(report.retries > 0 && report.switchover.last_copy_bytes > 0, "nothing has failed: {report:?}");
    // The chunk that was drawn, and those whose copies have failed.
    assert!(report.verified && report.verification.suspects > 1, "{report:?}");
}
