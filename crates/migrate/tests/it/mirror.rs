//! Moving a volume under a guest that writes all the time.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{Disk, World, options, outcome, switched, until};
use block::{BlockDevice, Bytes, Device, ErrorKind, Extent, MemDevice, Mutation};
use env::EnvRef;
use env::testing::PausedEnv;
use migrate::{Control, Migration, MoveOptions, Outcome, Phase, Verify};

#[tokio::test(start_paused = true)]
async fn a_guest_that_writes_all_the_time_is_moved_and_both_sides_are_equal() {
    for seed in 0..20 {
        let size = 3_000_000 + seed * 1013;
        let world = World::new(seed, size).await;
        let guest = world.guest(3);
        let verify = [Verify::Off, Verify::Sample, Verify::Full][(seed % 3) as usize];
        let (_, work) = world.start(MoveOptions { verify, ..options() }).await;
        let report = switched(work).await;
        world.assert_equal_at_commit();
        let frozen = world.source.contents().await;
        world.env.sleep(Duration::from_millis(500)).await;
        let rounds = world.stop_guest(guest).await;
        assert!(rounds > 100, "the guest hardly ran");
        assert!(world.slot.device().is_same(&world.target_device));
        assert_eq!(world.source.contents().await, frozen, "the source changed after the switchover");
        assert_ne!(world.target.contents().await, frozen, "the guest does not write to the target");
        assert!(report.bytes_copied > 0 && report.bytes_zero > 0 && report.bytes_mirrored > 0);
        assert_eq!(report.verified, verify != Verify::Off);
        assert_eq!(report.equal, (verify != Verify::Off).then_some(true));
        if verify == Verify::Full {
            assert!(report.verification.bytes >= size, "{:?}", report.verification);
            assert_eq!(report.digest, Some(blake3::hash(&frozen).to_hex().to_string()));
        } else {
            assert_eq!(report.digest, None);
        }
        assert_eq!(report.phase, Phase::Done);
    }
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_cannot_tell_holes_is_moved_and_its_zeroes_are_not_written_as_data() {
    for (source_blind, target_blind) in [(true, false), (false, true), (true, true)] {
        let world = World::new(7, 4_000_000).await;
        // What the target held before must not shine through.
        world.target.put(0, &[0xee; 4_000_000]).await;
        world.source.manners.lock().blind = source_blind;
        world.target.manners.lock().blind = target_blind;
        let guest = world.guest(2);
        let (_, work) = world.start(MoveOptions { verify: Verify::Full, ..options() }).await;
        let report = switched(work).await;
        world.assert_equal_at_commit();
        world.stop_guest(guest).await;
        assert!(report.bytes_zero > 1_000_000, "zeroes were copied as data");
    }
}

#[tokio::test(start_paused = true)]
async fn a_sparse_volume_of_16_tib_is_moved_in_little_memory_and_stays_sparse() {
    let env: EnvRef = PausedEnv::shared(1);
    let size = Bytes(16 << 40);
    let (source, target) = (Disk::new(&env, size), Disk::new(&env, size));
    for place in 0..10 {
        source.put((place << 40) + 12_345, b"a little data").await;
    }
    let source_device = source.device("source");
    let world = World::over(env, source, target);
    let mut context = world.context();
    context.source = source_device.clone();
    context.slot = block::Slot::new(source_device);
    // This journal would read all of both disks.
    context.journal = Arc::new(Blank);
    let (_, work) = world.start_with(context, MoveOptions::default()).await;
    let report = switched(work).await;
    assert_eq!(report.bytes_copied, 10 * 65536);
    assert_eq!(report.bytes_zero, size.0 - 10 * 65536);
    assert_eq!(world.target.memory.allocated(), Bytes(10 * 65536), "the target is larger than the source");
}

/// Remembers nothing.
struct Blank;

impl migrate::JobJournal for Blank {
    fn record(&self, _: Phase) -> block::IoFuture<'_, ()> {
        block::ready(Ok(()))
    }
    fn commit(&self) -> block::IoFuture<'_, ()> {
        block::ready(Ok(()))
    }
}

#[tokio::test(start_paused = true)]
async fn the_guest_s_flushes_reach_the_target_from_the_pre_switch_on_and_not_before() {
    let world = World::new(3, 2_000_000).await;
    let guest = world.lane();
    let (control, work) = world.start(MoveOptions { bandwidth: Some(500_000), ..options() }).await;
    until(&control, |progress| progress.phase == Phase::Copying && progress.bytes_copied > 0).await;
    let before = world.target.flushes.load(Ordering::Relaxed);
    guest.device.flush().await.expect("the flush succeeds");
    assert_eq!(world.target.flushes.load(Ordering::Relaxed), before, "a flush went to the target");
    control.set_bandwidth(None);
    switched(work).await;
    assert!(world.journal.target_flushes.load(Ordering::Relaxed) > before, "no flush before the commit");
}

#[tokio::test(start_paused = true)]
async fn the_bandwidth_holds_and_can_be_changed() {
    let env: EnvRef = PausedEnv::shared(1);
    let (source, target) = (Disk::new(&env, Bytes::mib(64)), Disk::new(&env, Bytes::mib(64)));
    for place in 0..64 {
        source.put(place << 20, &vec![7; 1 << 20]).await;
    }
    let world = World::over(env, source, target);
    let limited = MoveOptions { bandwidth: Some(8 << 20), ..MoveOptions::default() };
    let (control, work) = world.start(limited).await;
    until(&control, |progress| progress.bytes_copied >= 32 << 20).await;
    let half = control.snapshot().seconds;
    assert!((3.5..4.5).contains(&half), "32 MiB at 8 MiB/s took {half} s");
    control.set_bandwidth(Some(Bytes::mib(32)));
    let report = switched(work).await;
    assert!((0.7..2.0).contains(&(report.seconds - half)), "32 MiB at 32 MiB/s took {} s", report.seconds - half);
}

#[tokio::test(start_paused = true)]
async fn progress_never_goes_back() {
    let world = World::new(11, 3_000_000).await;
    let guest = world.guest(3);
    let (control, work) = world.start(MoveOptions { verify: Verify::Full, ..options() }).await;
    let mut watch = control.watch();
    let watching = tokio::spawn(async move {
        let mut last = watch.borrow().clone();
        let mut changes = 0;
        while watch.changed().await.is_ok() {
            let now = watch.borrow().clone();
            let grows = now.bytes_done >= last.bytes_done
                && now.bytes_copied >= last.bytes_copied
                && now.bytes_zero >= last.bytes_zero
                && now.bytes_mirrored >= last.bytes_mirrored
                && now.bytes_verified >= last.bytes_verified
                && now.seconds >= last.seconds;
            assert!(grows, "{last:?} was followed by {now:?}");
            last = now;
            changes += 1;
        }
        changes
    });
    switched(work).await;
    drop(control);
    assert!(watching.await.expect("progress only grows") > 5);
    world.stop_guest(guest).await;
}

#[tokio::test(start_paused = true)]
async fn a_paused_migration_mirrors_but_does_not_copy_or_switch() {
    let world = World::new(5, 3_000_000).await;
    let (control, work) = world.start(MoveOptions { bandwidth: Some(1_000_000), ..options() }).await;
    until(&control, |progress| progress.bytes_copied > 100_000).await;
    control.pause();
    control.set_bandwidth(None);
    let paused = until(&control, |progress| progress.paused).await;
    world.env.sleep(Duration::from_secs(60)).await;
    let later = control.snapshot();
    assert_eq!((later.phase, later.paused), (Phase::Copying, true));
    assert!(later.bytes_copied <= paused.bytes_copied + (1 << 20), "it went on copying");
    let guest = world.lane();
    let first = Mutation::data(Bytes(0), block::Data::copy_of(&[9; 4096]));
    guest.device.write(first).await.expect("the write succeeds");
    assert!(control.snapshot().phase == Phase::Copying);
    assert_eq!(world.target.contents().await[..4096], [9; 4096], "a write to a copied chunk was not mirrored");
    control.resume();
    switched(work).await;
    world.assert_equal_at_commit();
}

#[tokio::test(start_paused = true)]
async fn corruption_that_was_planted_before_the_comparison_is_found_and_named() {
    for seed in 0..5 {
        let world = World::new(seed, 3_000_000).await;
        let guest = world.guest(2);
        let (control, work) = world.start(MoveOptions { verify: Verify::Full, ..options() }).await;
        // Behind everybody's back, in the half where the guest's checked writes are not.
        until(&control, |progress| progress.phase == Phase::Verifying).await;
        let place = 2_900_000;
        let was = world.target.contents().await[place];
        world.target.put(place as u64, &[was ^ 0x10]).await;
        let Outcome::Failed { error, report } = outcome(work).await else { panic!("the corruption was not found") };
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.chain().contains("1 bytes at 2900000"), "{}", error.chain());
        assert_eq!((report.equal, report.verified), (Some(false), false));
        assert!(world.slot.device().is_same(&world.source_device));
        world.stop_guest(guest).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_rewrites_one_chunk_forever_does_not_keep_the_copy_from_ending() {
    let env: EnvRef = PausedEnv::shared(9);
    let (source, target) = (Disk::new(&env, Bytes::mib(1)), Disk::new(&env, Bytes::mib(1)));
    source.put(0, &vec![1; 1 << 20]).await;
    source.manners.lock().delay_ms = 1;
    target.manners.lock().delay_ms = 50;
    let world = World::over(env, source, target);
    let stop = Arc::clone(&world.stop);
    let guest = world.lane();
    let hammer = tokio::spawn(async move {
        let mut round = 0_u8;
        while !stop.load(Ordering::Relaxed) {
            round = round.wrapping_add(1);
            for chunk in 0..16 {
                let write = Mutation::data(Bytes(chunk * 65536), block::Data::copy_of(&[round; 512]));
                guest.device.write(write).await.expect("the write succeeds");
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    // A copy that the guest always interrupts ends after two redos.
    let (_, work) = world.start(options()).await;
    let report = switched(work).await;
    world.assert_equal_at_commit();
    assert!(report.redos > 0, "the guest never met a copy");
    world.stop.store(true, Ordering::Relaxed);
    hammer.await.expect("the guest is content");
}

#[tokio::test(start_paused = true)]
async fn targets_that_do_not_suit_are_refused_and_nothing_changes() {
    let world = World::new(1, 1_000_000).await;
    let start = async |target: Device| {
        let context = migrate::MigrationContext { target, ..world.context() };
        let kind = Migration::start(context, options()).await.map(|_| ()).map_err(|error| error.kind());
        assert!(world.slot.device().is_same(&world.source_device));
        kind
    };
    let mem = |size| MemDevice::new(Bytes(size));
    assert_eq!(start(Device::new("small", mem(999_999))).await, Err(ErrorKind::Invalid));
    assert_eq!(start(Device::new("read-only", mem(1_000_000).with_read_only())).await, Err(ErrorKind::ReadOnly));
    let large_sectors = mem(1_000_000).with_request_alignment(4096);
    assert_eq!(start(Device::new("large sectors", large_sectors)).await, Err(ErrorKind::Invalid));
    assert_eq!(start(world.source_device.clone()).await, Err(ErrorKind::Invalid));
    let twice = Migration::start(world.context(), options()).await;
    let again = Migration::start(world.context(), options()).await.map(|_| ()).map_err(|error| error.kind());
    assert!(twice.is_ok());
    assert_eq!(again, Err(ErrorKind::Invalid), "a volume was moved twice at once");
}

#[tokio::test(start_paused = true)]
async fn a_target_that_is_larger_serves_the_volume_and_its_rest_is_left_alone() {
    let env: EnvRef = PausedEnv::shared(1);
    let (source, target) = (Disk::new(&env, Bytes(1_000_000)), Disk::new(&env, Bytes(2_000_000)));
    source.put(0, &vec![1; 1_000_000]).await;
    target.put(1_000_000, &[5; 100]).await;
    let world = World::over(env, source, target);
    let (_, work) = world.start(options()).await;
    switched(work).await;
    world.assert_equal_at_commit();
    assert_eq!(world.target.contents().await[1_000_000..1_000_100], [5; 100]);
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_is_discarded_at_once_while_it_is_copied_is_equal() {
    let world = World::new(21, 5_000_000).await;
    let guest = world.lane();
    let (control, work) = world.start(MoveOptions { bandwidth: Some(4_000_000), ..options() }).await;
    until(&control, |progress| progress.bytes_copied > 500_000).await;
    let all = Extent::whole(world.source.geometry().size);
    guest.device.write(Mutation::discard(all)).await.expect("the discard succeeds");
    switched(work).await;
    world.assert_equal_at_commit();
    assert!(world.target.contents().await.iter().all(|byte| *byte == 0));
}

#[tokio::test(start_paused = true)]
async fn what_is_asked_after_the_end_is_refused_and_harms_nothing() {
    let world = World::new(2, 100_000).await;
    let (control, work): (Control, _) = world.start(options()).await;
    switched(work).await;
    assert_eq!(control.cancel().expect_err("it is over").kind(), ErrorKind::Invalid);
    control.pause();
    control.resume();
    assert_eq!(control.snapshot().phase, Phase::Done);
}

#[tokio::test(start_paused = true)]
async fn the_longest_stall_of_the_switchover_is_what_the_meter_saw() {
    let world = World::new(4, 1_000_000).await;
    let meters = filters::MeterState::new(Arc::clone(&world.env));
    let guest = Device::new("meter", meters.metered(world.slot.lane()));
    let (env, stop) = (Arc::clone(&world.env), Arc::clone(&world.stop));
    let reading = tokio::spawn(async move {
        while !stop.load(Ordering::Relaxed) {
            guest.read(Bytes(0), block::Buffer::unpooled(4096)).await.expect("the guest reads");
            env.sleep(Duration::from_millis(1)).await;
        }
    });
    // The journal takes 300 ms, within its limit, and the guest is held all the while.
    world.journal.fates.lock().push_back(crate::common::Fate::Late(Duration::from_millis(300)));
    let context =
        migrate::MigrationContext { meter: Some(Arc::new(migrate::VolumeMeter::new(meters))), ..world.context() };
    let (_, work) = world.start_with(context, options()).await;
    let report = switched(work).await;
    assert!((300_000..320_000).contains(&report.stall_us_max), "{report:?}");
    assert!((300_000..320_000).contains(&report.switchover.window_us), "{report:?}");
    world.stop.store(true, Ordering::Relaxed);
    reading.await.expect("the guest is content");
}

#[tokio::test(start_paused = true)]
async fn a_bandwidth_that_was_too_small_keeps_the_copy_waiting_no_longer_than_it_is_so_small() {
    let world = World::new(3, 4_000_000).await;
    let (control, work) = world.start(MoveOptions { bandwidth: Some(4096), ..options() }).await;
    world.env.sleep(Duration::from_secs(5)).await;
    assert!(control.snapshot().bytes_left > 0, "nothing was held back");
    control.set_bandwidth(None);
    let began = world.env.now();
    switched(work).await;
    let took = world.env.now() - began;
    assert!(took < Duration::from_secs(10), "after it was raised the move took another {took:?}");
}

/// Holes that a target writes out count for the bandwidth; those that it unmaps do not.
#[tokio::test(start_paused = true)]
async fn the_bandwidth_holds_for_holes_that_the_target_writes_out() {
    for is_written_out in [true, false] {
        let env: EnvRef = PausedEnv::shared(4);
        let (source, target) = (Disk::new(&env, Bytes::mib(64)), Disk::new(&env, Bytes::mib(64)));
        target.put(0, &vec![7; 64 << 20]).await;
        target.manners.lock().blind = is_written_out;
        target.manners.lock().zero_ms_per_mib = 10;
        let world = World::over(env, source, target);
        let mut context = world.context();
        context.target_is_fresh = false;
        let slowly = MoveOptions { bandwidth: Some(4 << 20), verify: Verify::Off, ..options() };
        let began = world.env.now();
        let (_, work) = world.start_with(context, slowly).await;
        switched(work).await;
        world.assert_equal_at_commit();
        let took = (world.env.now() - began).as_secs_f64();
        assert_eq!((14.0..20.0).contains(&took), is_written_out, "64 MiB of holes at 4 MiB/s took {took} s");
    }
}
