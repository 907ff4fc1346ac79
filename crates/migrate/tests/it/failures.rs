//! What fails on the way: targets, sources, journals, processes. The guest never sees any of it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{Disk, World, lost, map_device, map_on, options, outcome, switched, until};
use block::{BlockDevice, Bytes, Data, Device, ErrorKind, Mutation};
use migrate::{Control, JobJournal, MigrationContext, MoveOptions, Outcome, Phase, Strategy, Verify};

#[tokio::test(start_paused = true)]
async fn a_target_that_fails_at_any_write_is_dropped_and_resumed_and_the_guest_sees_nothing() {
    let mut losses = 0;
    for (seed, writes) in (0..110).step_by(5).enumerate() {
        let world = World::new(seed as u64, 2_000_000).await;
        let kind = [ErrorKind::Io, ErrorKind::NoSpace, ErrorKind::Disconnected][seed % 3];
        {
            let mut manners = world.target.manners.lock();
            (manners.writes_left, manners.kind) = (Some(writes), Some(kind));
        }
        let guest = world.guest(2);
        let verify = if seed % 2 == 0 { Verify::Full } else { Verify::Sample };
        let (control, work) = world.start(MoveOptions { verify, ..options() }).await;
        if lost(&control).await {
            losses += 1;
            assert_eq!(control.snapshot().error.map(|error| error.kind), Some(kind.name().to_owned()));
            // The guest goes on alone for a while, and what it changes is tracked.
            world.env.sleep(Duration::from_millis(200)).await;
            world.target.mend();
            control.resume();
        }
        world.target.mend();
        let report = switched(work).await;
        world.assert_equal_at_commit();
        world.stop_guest(guest).await;
        assert_eq!(report.equal, Some(true));
    }
    assert!(losses > 7, "the target failed only {losses} times");
}

#[tokio::test(start_paused = true)]
async fn a_target_that_fails_now_and_then_stays_the_target_and_what_it_missed_is_copied_again_and_compared() {
    let mut missed = 0;
    for seed in 0..6 {
        let world = World::new(seed, 2_000_000).await;
        world.target.manners.lock().every_nth_write_fails = Some(41);
        let guest = world.guest(2);
        let slowly = MoveOptions { sample_chunks: 1, bandwidth: Some(4_000_000), ..options() };
        let (control, work) = world.start(slowly).await;
        until(&control, |progress| progress.phase > Phase::Copying).await;
        world.target.mend();
        let report = switched(work).await;
        world.assert_equal_at_commit();
        world.stop_guest(guest).await;
        assert_eq!(report.target_losses, 0, "{report:?}");
        assert!(report.retries > 0 && report.verification.suspects > 1, "{report:?}");
        missed += report.missed_writes;
    }
    assert!(missed > 0, "no mirrored write failed: nothing is tested");
}

#[tokio::test(start_paused = true)]
async fn a_target_that_is_full_is_lost_at_once() {
    let world = World::new(1, 2_000_000).await;
    {
        let mut manners = world.target.manners.lock();
        (manners.writes_left, manners.kind) = (Some(5), Some(ErrorKind::NoSpace));
    }
    let (control, work) = world.start(options()).await;
    assert!(lost(&control).await);
    assert_eq!(control.snapshot().error.map(|error| error.kind), Some("no-space".to_owned()));
    control.cancel().expect("it can be cancelled");
    let Outcome::Cancelled(report) = outcome(work).await else { panic!("not cancelled") };
    assert_eq!(report.retries, 0);
}

#[tokio::test(start_paused = true)]
async fn a_target_that_fails_for_good_is_lost_within_its_retries() {
    let world = World::new(1, 2_000_000).await;
    world.target.manners.lock().writes_left = Some(5);
    let began = world.env.now();
    let (control, work) = world.start(options()).await;
    assert!(lost(&control).await);
    assert!(world.env.now() - began < Duration::from_secs(2));
    world.target.mend();
    control.resume();
    assert!(switched(work).await.retries <= 3 * 4, "many copies were tried again and again");
    world.assert_equal_at_commit();
}

#[tokio::test(start_paused = true)]
async fn what_was_not_flushed_is_copied_again_after_a_flush_that_failed() {
    for seed in 0..6 {
        let world = World::new(seed, 2_000_000).await;
        world.target.manners.lock().flushes_detached = Some(0);
        let guest = world.guest(2);
        let (control, work) = world.start(options()).await;
        assert!(lost(&control).await);
        // What was never flushed is gone: a target that lost its cache.
        for (chunk, bytes) in world.target.contents().await.chunks(4096).enumerate() {
            if bytes.iter().any(|byte| *byte != 0) {
                world.target.put(chunk as u64 * 4096, &vec![0xdd; bytes.len()]).await;
            }
        }
        world.target.mend();
        control.resume();
        let report = switched(work).await;
        world.assert_equal_at_commit();
        assert_eq!(report.target_losses, 1);
        assert!(report.bytes_again > 0, "nothing is said to have been copied twice");
        assert!(report.bytes_again <= report.bytes_copied, "{report:?}");
        world.stop_guest(guest).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_target_that_hangs_does_not_hang_the_guest_and_late_writes_do_not_land_on_newer_ones() {
    let world = World::new(4, 2_000_000).await;
    let guest = world.guest(3);
    let (control, work) = world.start(MoveOptions { target_ms: 2_000, bandwidth: Some(1_000_000), ..options() }).await;
    until(&control, |progress| progress.bytes_copied > 300_000).await;
    world.target.manners.lock().hung = true;
    assert!(lost(&control).await);
    control.set_bandwidth(None);
    control.resume();
    world.env.sleep(Duration::from_secs(5)).await;
    assert_eq!(control.snapshot().phase, Phase::TargetLost, "it went on beside writes that are still under way");
    world.target.mend();
    switched(work).await;
    world.assert_equal_at_commit();
    world.stop_guest(guest).await;
}

#[tokio::test(start_paused = true)]
async fn a_target_that_is_silent_for_a_moment_is_kept_and_the_guest_does_not_wait_for_it_nor_is_a_late_write_newer() {
    for (seed, strategy) in [(1, Strategy::Mirror), (2, Strategy::Auto), (3, Strategy::Mirror), (4, Strategy::Auto)] {
        let world = World::new(seed, 400_000).await;
        // Everything is copied soon, and then all that the guest writes is mirrored.
        let guest = world.guest(8);
        let chosen = MoveOptions { silence_ms: Some(60), strategy, bandwidth: Some(1_500_000), ..options() };
        let (control, work) = world.start(chosen).await;
        until(&control, |progress| progress.bytes_copied > 150_000).await;
        world.target.manners.lock().hung = true;
        world.env.sleep(Duration::from_millis(200)).await;
        // Whoever waits for the target now waits until it answers.
        let lane = world.lane();
        for turn in 0..60 {
            let began = world.env.now();
            let offset = Bytes(200_000 + turn * 7919 % 190_000);
            let write = Mutation::data(offset, Data::copy_of(&[turn as u8; 4096]));
            lane.device.write(write).await.expect("the source takes it");
            let took = world.env.now() - began;
            assert!(
                took < Duration::from_millis(100),
                "a write of the guest's took {took:?} while the target was silent"
            );
        }
        assert_eq!(control.snapshot().phase, Phase::Copying);
        world.target.mend();
        control.set_bandwidth(None);
        let report = switched(work).await;
        world.assert_equal_at_commit();
        world.stop_guest(guest).await;
        assert_eq!(report.target_losses, 0, "{report:?}");
        assert!(report.missed_writes > 0, "no write was under way when the target fell silent");
    }
}

#[tokio::test(start_paused = true)]
async fn a_target_that_stays_silent_is_lost_after_its_time() {
    let world = World::new(5, 400_000).await;
    let guest = world.guest(3);
    let chosen = MoveOptions { silence_ms: Some(60), target_ms: 3_000, bandwidth: Some(1_000_000), ..options() };
    let (control, work) = world.start(chosen).await;
    until(&control, |progress| progress.bytes_copied > 100_000).await;
    world.target.manners.lock().hung = true;
    let began = world.env.now();
    assert!(lost(&control).await);
    assert!(world.env.now() - began < Duration::from_secs(4));
    control.set_bandwidth(None);
    control.resume();
    world.target.mend();
    let report = switched(work).await;
    world.assert_equal_at_commit();
    world.stop_guest(guest).await;
    assert_eq!(report.target_losses, 1);
}

#[tokio::test(start_paused = true)]
async fn a_migration_goes_on_with_another_target_that_has_nothing() {
    let world = World::new(8, 2_000_000).await;
    world.target.manners.lock().writes_left = Some(10);
    let guest = world.guest(2);
    let (control, work) = world.start(options()).await;
    assert!(lost(&control).await);
    let other = Disk::new(&world.env, Bytes(2_000_000));
    let device = other.device("other");
    control.resume_with(device.clone(), None);
    switched(work).await;
    world.stop_guest(guest).await;
    assert!(world.slot.device().is_same(&device));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_in_every_phase_leaves_the_guest_on_the_source() {
    for phase in [Phase::Preparing, Phase::Copying, Phase::Verifying, Phase::PreSwitch, Phase::TargetLost] {
        let world = World::new(3, 2_000_000).await;
        let guest = world.guest(2);
        if phase == Phase::TargetLost {
            world.target.manners.lock().writes_left = Some(50);
        }
        let (control, work) = world.start(MoveOptions { verify: Verify::Full, ..options() }).await;
        until(&control, |progress| progress.phase >= phase || progress.phase == Phase::TargetLost).await;
        control.cancel().expect("it can be cancelled");
        let Outcome::Cancelled(report) = outcome(work).await else { panic!("not cancelled in {phase}") };
        assert_eq!(report.phase, Phase::Cancelled);
        assert!(world.slot.device().is_same(&world.source_device));
        assert!(!world.journal.committed.load(Ordering::Relaxed));
        world.stop_guest(guest).await;
        // Nothing stands in the way of the next try.
        world.target.mend();
        let (_, work) = world.start(options()).await;
        switched(work).await;
        world.assert_equal_at_commit();
    }
}

#[tokio::test(start_paused = true)]
async fn a_source_that_cannot_be_read_ends_the_migration_and_not_the_guest() {
    let world = World::new(2, 1_000_000).await;
    world.source.manners.lock().reads_left = Some(3);
    let (_, work) = world.start(options()).await;
    let Outcome::Failed { error, report } = outcome(work).await else { panic!("it did not fail") };
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(report.retries > 0);
    assert!(world.slot.device().is_same(&world.source_device));
}

#[tokio::test(start_paused = true)]
async fn a_read_error_that_passes_is_survived_and_its_chunks_are_compared() {
    let world = World::new(2, 2_000_000).await;
    world.source.manners.lock().reads_left = Some(2);
    let (control, work) = world.start(MoveOptions { sample_chunks: 1, ..options() }).await;
    let source = world.source.clone();
    world.env.sleep(Duration::from_millis(30)).await;
    source.mend();
    let report = switched(work).await;
    assert!(report.retries > 0 && report.verification.suspects > 1, "{report:?}");
    world.assert_equal_at_commit();
    drop(control);
}

#[tokio::test(start_paused = true)]
async fn a_guest_whose_requests_do_not_drain_is_let_go_and_held_again_later() {
    let world = World::new(2, 500_000).await;
    let (control, work) = world.start(MoveOptions { quiesce_ms: 20, verify: Verify::Off, ..options() }).await;
    until(&control, |progress| progress.bytes_left == 0 || progress.phase.is_final()).await;
    control.pause();
    world.env.sleep(Duration::from_secs(1)).await;
    world.source.manners.lock().hung = true;
    let guest = world.lane();
    let slow =
        tokio::spawn(async move { guest.device.write(Mutation::data(Bytes(499_000), Data::copy_of(&[1; 512]))).await });
    tokio::task::yield_now().await;
    control.resume();
    world.env.sleep(Duration::from_secs(20)).await;
    let reader = world.lane();
    reader.device.read(Bytes(1000), block::Buffer::unpooled(512)).await.expect("the guest was let go");
    world.source.mend();
    slow.await.expect("no panic").expect("the write succeeds");
    let report = switched(work).await;
    assert!(report.switchover.quiesce_retries > 1, "{:?}", report.switchover);
    world.assert_equal_at_commit();
}

/// The state that survives a crash of the process: disks, the journal and the map.
async fn crash_once(seed: u64, boot: u8, delay_ms: u64) -> (World, Device, u64) {
    let size = 20_000_000;
    let map = map_device(size);
    let world = World::new(seed, size).await;
    let guest = world.guest_within(2, 5_000_000);
    let context = MigrationContext { progress_map: Some(map_on(&map, size, boot).await), ..world.context() };
    let slow = MoveOptions { bandwidth: Some(900_000), ..options() };
    let (_, work) = world.start_with(context, slow).await;
    world.env.sleep(Duration::from_millis(delay_ms)).await;
    // The process dies: the migration and the guest's connections with it, in the middle of whatever they do. What the
    // guest asked for last may have reached one side only.
    work.abort();
    guest.iter().for_each(tokio::task::JoinHandle::abort);
    world.env.sleep(Duration::from_secs(1)).await;
    world.source.reboot();
    world.target.reboot();
    (World::over(world.env.clone(), world.source.clone(), world.target.clone()), map, size)
}

#[tokio::test(start_paused = true)]
async fn after_a_crash_of_the_process_only_the_rest_is_copied_and_the_sides_are_equal() {
    let mut resumed = 0;
    for seed in 0..8 {
        let (world, map, size) = crash_once(seed, 1, 5_500 + seed * 731).await;
        let context = MigrationContext { progress_map: Some(map_on(&map, size, 1).await), ..world.context() };
        let guest = world.guest_within(2, 5_000_000);
        let (_, work) = world.start_with(context, MoveOptions { verify: Verify::Full, ..options() }).await;
        let report = switched(work).await;
        world.assert_equal_at_commit();
        world.stop_guest(guest).await;
        resumed += report.bytes_resumed;
    }
    assert!(resumed > 10_000_000, "nothing was resumed: {resumed}");
}

#[tokio::test(start_paused = true)]
async fn after_a_reboot_everything_is_copied_again() {
    let (world, map, size) = crash_once(3, 1, 8_000).await;
    let context = MigrationContext { progress_map: Some(map_on(&map, size, 2).await), ..world.context() };
    let (_, work) = world.start_with(context, options()).await;
    assert_eq!(switched(work).await.bytes_resumed, 0);
    world.assert_equal_at_commit();
}

#[tokio::test(start_paused = true)]
async fn a_progress_map_that_cannot_be_written_ends_the_job_before_a_guest_write_is_answered() {
    let world = World::new(3, 2_000_000).await;
    let map = Disk::new(&world.env, map_device(2_000_000).size());
    let device = map.device("map");
    let context = MigrationContext { progress_map: Some(map_on(&device, 2_000_000, 1).await), ..world.context() };
    map.manners.lock().writes_left = Some(0);
    let guest = world.guest(2);
    let (_, work) = world.start_with(context, options()).await;
    let Outcome::Failed { error, .. } = outcome(work).await else { panic!("it did not fail") };
    assert!(error.chain().contains("progress map"), "{}", error.chain());
    assert!(world.journal.recorded.lock().contains(&Phase::Cancelling));
    world.stop_guest(guest).await;
    let _ = world.journal.record(Phase::Failed).await;
}

#[tokio::test(start_paused = true)]
async fn a_guest_write_that_the_source_fails_is_the_guest_s_error_and_the_chunk_is_copied_again() {
    let world = World::new(3, 1_000_000).await;
    let (control, work) = world.start(MoveOptions { verify: Verify::Full, ..options() }).await;
    until(&control, |progress| progress.phase == Phase::Verifying).await;
    {
        let mut manners = world.source.manners.lock();
        (manners.writes_left, manners.kind) = (Some(0), Some(ErrorKind::NoSpace));
    }
    let guest = world.lane();
    let failed = guest.device.write(Mutation::data(Bytes(100), Data::copy_of(&[9; 512]))).await;
    assert_eq!(failed.expect_err("the source is full").kind(), ErrorKind::NoSpace);
    world.source.mend();
    let report = switched(work).await;
    assert_eq!(report.equal, Some(true));
    world.assert_equal_at_commit();
    assert_eq!(world.source.geometry().size, Bytes(1_000_000));
}

#[tokio::test(start_paused = true)]
async fn a_mirror_that_a_cancel_had_to_leave_behind_is_in_nobodys_way() {
    let world = World::new(3, 1_000_000).await;
    let (control, work) = world.start(MoveOptions { bandwidth: Some(10_000), ..options() }).await;
    until(&control, |progress| progress.phase == Phase::Copying).await;
    // A request of the guest does not end, so its path cannot be changed.
    world.source.manners.lock().hung = true;
    let guest = world.lane().device;
    let write = |byte: u8| {
        let guest = guest.clone();
        async move { guest.write(Mutation::data(Bytes(8192), Data::copy_of(&[byte; 512]))).await }
    };
    let stuck = tokio::spawn(write(7));
    world.env.sleep(Duration::from_millis(50)).await;
    control.cancel().expect("it can be cancelled");
    assert!(matches!(outcome(work).await, Outcome::Cancelled(_)));
    let left = world.slot.device();
    assert!(!left.is_same(&world.source_device), "the mirror could be taken out: nothing is tested");
    world.source.mend();
    stuck.await.expect("no panic").expect("the guest's write succeeds");

    // The next move takes what it finds in the slot for its source.
    let context = MigrationContext { source: left, target_is_fresh: false, ..world.context() };
    let (_, work) = world.start_with(context, options()).await;
    write(9).await.expect("the guest's write succeeds");
    switched(work).await;
    world.assert_equal_at_commit();
    assert!(world.slot.device().is_same(&world.target_device));
    assert_eq!(world.target.contents().await[8192..8704], [9; 512]);
}

#[tokio::test(start_paused = true)]
async fn zeroes_of_a_target_that_others_have_written_to_are_written_again() {
    for (is_fresh, keeps_holes) in [(true, false), (false, false), (false, true)] {
        let size = 1_000_000;
        let env: env::EnvRef = env::testing::PausedEnv::shared(1);
        let world = World::over(env.clone(), Disk::new(&env, Bytes(size)), Disk::new(&env, Bytes(size)));
        // Every mutation of the target fails: where zeroes are trusted, or holes are holes for good, there is none.
        {
            let mut manners = world.target.manners.lock();
            (manners.writes_left, manners.keeps_holes) = (Some(0), keeps_holes);
        }
        let context = MigrationContext { target_is_fresh: is_fresh, ..world.context() };
        let (control, work) = world.start_with(context, options()).await;
        let is_lost = lost(&control).await;
        assert_eq!(is_lost, !is_fresh && !keeps_holes);
        world.target.mend();
        control.resume();
        switched(work).await;
    }
}

/// Says what a disk holds, which somebody may have changed.
struct DiskDigests {
    disk: Disk,
    fails: Option<ErrorKind>,
    is_compared: std::sync::atomic::AtomicBool,
}

impl DiskDigests {
    fn new(disk: &Disk, fails: Option<ErrorKind>) -> std::sync::Arc<Self> {
        std::sync::Arc::new(Self { disk: disk.clone(), fails, is_compared: false.into() })
    }
}

impl migrate::Digests for DiskDigests {
    fn digests<'a>(
        &'a self,
        extents: &'a [block::Extent],
    ) -> futures::future::BoxFuture<'a, block::Result<Vec<[u8; 32]>>> {
        Box::pin(async move {
            if let Some(kind) = self.fails {
                return Err(block::Error::new(kind, "nobody knows"));
            }
            let contents = self.disk.contents().await;
            let digest = |extent: &block::Extent| {
                let end = (extent.offset + extent.length).as_usize();
                *blake3::hash(&contents[extent.offset.as_usize()..end]).as_bytes()
            };
            Ok(extents.iter().map(digest).collect())
        })
    }

    fn compared(&self) {
        self.is_compared.store(true, Ordering::Relaxed);
    }
}

/// The target fails when what is there has been flushed. Gives whether it is lost.
async fn lost_when_flushed(world: &World, control: &Control) -> bool {
    control.pause();
    world.env.sleep(Duration::from_secs(6)).await;
    world.target.manners.lock().writes_left = Some(0);
    control.resume();
    lost(control).await
}

#[tokio::test(start_paused = true)]
async fn a_target_that_somebody_has_changed_while_it_was_away_gets_what_differs_again_with_every_strategy() {
    use migrate::Strategy;
    for (seed, strategy) in [
        Strategy::Mirror,
        Strategy::Dbt,
        Strategy::IncrementalDbt,
        Strategy::MirrorAsync,
        Strategy::Auto,
        Strategy::MirrorPaper,
    ]
    .into_iter()
    .enumerate()
    {
        let world = World::new(seed as u64, 16_000_000).await;
        let slowly = MoveOptions { strategy, verify: Verify::Off, bandwidth: Some(4_000_000), ..options() };
        let guest = world.guest(1);
        let (control, work) = world.start(slowly).await;
        until(&control, |progress| progress.bytes_done > 6_000_000 || progress.phase.is_final()).await;
        assert!(lost_when_flushed(&world, &control).await, "{strategy}: it was over before the target was lost");
        // A chunk in its midst, one byte of another, and all of a third.
        world.target.put(70_000, &[0xee; 4096]).await;
        world.target.put(1_000_001, &[0xee]).await;
        world.target.put(2 << 20, &[0xee; 65536]).await;
        world.env.sleep(Duration::from_millis(100)).await;
        world.target.mend();
        let held = DiskDigests::new(&world.target, None);
        control.resume_after_comparing(std::sync::Arc::clone(&held) as _);
        let report = switched(work).await;
        world.assert_equal_at_commit();
        world.stop_guest(guest).await;
        assert!(held.is_compared.load(Ordering::Relaxed), "{strategy}");
        // What the guest has changed since is copied again anyhow: where that is tracked, and all behind it where there is one offset.
        if strategy == Strategy::Mirror {
            assert!(report.bytes_rechecked > 1_000_000, "{report:?}");
            assert!((1..2_000_000).contains(&report.bytes_different), "{report:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_comparison_that_cannot_be_made_keeps_nobody_from_going_on_and_is_not_counted_as_made() {
    let world = World::new(3, 4_000_000).await;
    world.target.manners.lock().writes_left = Some(40);
    let (control, work) = world.start(MoveOptions { bandwidth: Some(8_000_000), ..options() }).await;
    assert!(lost(&control).await);
    world.target.mend();
    let held = DiskDigests::new(&world.target, Some(ErrorKind::Disconnected));
    control.resume_after_comparing(std::sync::Arc::clone(&held) as _);
    let report = switched(work).await;
    world.assert_equal_at_commit();
    assert!(!held.is_compared.load(Ordering::Relaxed) && report.bytes_rechecked == 0, "{report:?}");
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_compared_with_a_target_that_is_there_is_copied_again() {
    let world = World::new(3, 4_000_000).await;
    let slowly = MoveOptions { verify: Verify::Off, bandwidth: Some(4_000_000), ..options() };
    let (control, work) = world.start(slowly).await;
    until(&control, |progress| progress.bytes_done > 2_000_000 || progress.phase.is_final()).await;
    assert!(lost_when_flushed(&world, &control).await);
    world.target.put(70_000, &[0xee; 4096]).await;
    world.target.mend();
    control.resume_after_comparing(DiskDigests::new(&world.target, Some(ErrorKind::TimedOut)) as _);
    switched(work).await;
    world.assert_equal_at_commit();
}
