//! Moving a volume to a target that is far or slow: the guest is answered by the source, and a bounded buffer follows.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{World, map_device, map_on, moved_under_writes, options, outcome, switched, until};
use block::{Buffer, Bytes, Data, ErrorKind, Extent, Mutation};
use migrate::{MoveOptions, Outcome, Phase, Strategy, Verify};

fn asynchronous() -> MoveOptions {
    MoveOptions { strategy: Strategy::MirrorAsync, buffer_bytes: Some(1 << 20), ..options() }
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_writes_all_the_time_is_moved_and_both_sides_are_equal() {
    for seed in 0..20 {
        let verify = [Verify::Off, Verify::Sample, Verify::Full][(seed % 3) as usize];
        let delay_ms = [3, 40][(seed % 2) as usize];
        let report = moved_under_writes(seed, delay_ms, MoveOptions { verify, ..asynchronous() }).await;
        assert!(report.bytes_mirrored > 0 && report.bytes_buffered_max > 0, "{report:?}");
        assert!(report.bytes_buffered_max <= 1 << 20, "the buffer had {} bytes", report.bytes_buffered_max);
    }
}

/// A migration that has copied everything of a volume of `size` bytes that is all data and is paused before the
/// switchover, with a buffer of 1 MiB.
async fn copied(world: &World) -> (migrate::Control, tokio::task::JoinHandle<Outcome>) {
    let (control, work) = world.start(MoveOptions { bandwidth: Some(2 << 20), ..asynchronous() }).await;
    until(&control, |progress| progress.bytes_left <= 64 << 10).await;
    control.pause();
    until(&control, |progress| progress.paused).await;
    (control, work)
}

async fn full_world(seed: u64) -> World {
    let world = World::new(seed, 4 << 20).await;
    world.source.put(0, &[7; 4 << 20]).await;
    world
}

fn write(at: u64, byte: u8, length: usize) -> Mutation {
    Mutation::data(Bytes(at), Data::copy_of(&vec![byte; length]))
}

#[tokio::test(start_paused = true)]
async fn the_guest_does_not_wait_for_a_target_that_hangs_until_the_buffer_is_full_and_then_it_does() {
    let world = full_world(1).await;
    let (control, work) = copied(&world).await;
    world.target.manners.lock().hung = true;
    let guest = world.lane();
    // 256 pages are a mebibyte.
    for number in 0..256 {
        let written = tokio::time::timeout(Duration::from_secs(1), guest.device.write(write(number * 8192, 9, 4096)));
        written.await.expect("the guest waits though there is room").expect("the write succeeds");
    }
    let progress = until(&control, |progress| progress.bytes_buffered == 1 << 20).await;
    assert_eq!(progress.throttled_us, 0);
    let one_more = guest.device.write(write(0, 10, 4096));
    let mut one_more = std::pin::pin!(one_more);
    let waited = tokio::time::timeout(Duration::from_secs(2), one_more.as_mut()).await;
    assert!(waited.is_err(), "there was no room, and the guest did not wait");
    world.target.manners.lock().hung = false;
    one_more.await.expect("the write succeeds");
    control.resume();
    let report = switched(work).await;
    world.assert_equal_at_commit();
    assert!(report.throttled_us >= 2_000_000, "{} us", report.throttled_us);
    assert_eq!(report.bytes_buffered_max, 1 << 20);
}

#[tokio::test(start_paused = true)]
async fn a_write_longer_than_a_quarter_of_the_buffer_goes_to_both_sides_at_once() {
    let world = full_world(2).await;
    let (control, work) = copied(&world).await;
    let guest = world.lane();
    guest.device.write(write(0, 1, 4096)).await.expect("the write succeeds");
    guest.device.write(write(0, 2, 600 << 10)).await.expect("the write succeeds");
    let target = world.target.contents().await;
    assert!(target[..600 << 10].iter().all(|byte| *byte == 2), "the target does not have what was answered");
    control.resume();
    switched(work).await;
    world.assert_equal_at_commit();
}

#[tokio::test(start_paused = true)]
async fn a_long_write_that_waits_for_room_while_the_buffer_is_emptied_gets_it() {
    let world = full_world(10).await;
    let (control, work) = copied(&world).await;
    world.target.manners.lock().delay_ms = 30;
    let mut tasks = Vec::new();
    for task in 0..8_u64 {
        let (guest, stop) = (world.lane(), std::sync::Arc::clone(&world.stop));
        tasks.push(tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                // Room is given in powers of two: this takes 256 KiB, the most that a write may.
                guest.device.write(write(task * (512 << 10), 5, 200 << 10)).await.expect("the write succeeds");
            }
        }));
    }
    world.env.sleep(Duration::from_secs(1)).await;
    control.resume();
    switched(work).await;
    world.assert_equal_at_commit();
    world.stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.expect("the guest is content");
    }
}

#[tokio::test(start_paused = true)]
async fn writes_zeroes_and_discards_to_the_same_place_land_in_their_order() {
    for seed in 0..20 {
        let world = full_world(seed).await;
        let (control, work) = copied(&world).await;
        world.target.manners.lock().delay_ms = 50;
        let guest = world.lane();
        for round in 0..40 {
            let extent = Extent::new(Bytes(4096 * (round % 3)), Bytes(8192 + 512 * (seed % 3)));
            let mutation = match (round + seed) % 4 {
                0 => Mutation::zeroes(extent, false),
                1 => Mutation::discard(extent),
                _ => write(extent.offset.0, round as u8 + 1, extent.length.as_usize()),
            };
            guest.device.write(mutation).await.expect("the write succeeds");
        }
        control.resume();
        switched(work).await;
        world.assert_equal_at_commit();
    }
}

#[tokio::test(start_paused = true)]
async fn the_guest_s_flush_waits_for_the_source_alone_before_the_pre_switch() {
    let world = full_world(3).await;
    let (control, work) = copied(&world).await;
    world.target.manners.lock().hung = true;
    let guest = world.lane();
    guest.device.write(write(0, 1, 4096).with_fua(true)).await.expect("the write succeeds");
    let before = world.source.flushes.load(Ordering::Relaxed);
    tokio::time::timeout(Duration::from_secs(1), guest.device.flush()).await.expect("no wait").expect("it succeeds");
    assert!(world.source.flushes.load(Ordering::Relaxed) > before);
    world.target.manners.lock().hung = false;
    control.resume();
    switched(work).await;
    world.assert_equal_at_commit();
    assert!(world.journal.target_flushes.load(Ordering::Relaxed) > 0, "the target was not flushed before the commit");
}

#[tokio::test(start_paused = true)]
async fn a_target_that_is_lost_with_a_full_buffer_is_not_felt_and_a_resumed_move_copies_what_was_dropped() {
    for kind in [ErrorKind::Io, ErrorKind::NoSpace] {
        let world = full_world(4).await;
        let (control, work) = copied(&world).await;
        {
            let mut manners = world.target.manners.lock();
            (manners.writes_left, manners.kind) = (Some(20), Some(kind));
        }
        let guest = world.lane();
        for number in 0..500 {
            let written = guest.device.write(write(number * 8192 % (4 << 20), number as u8, 5000));
            written.await.expect("the guest does not notice");
        }
        let progress = until(&control, |progress| progress.phase == Phase::TargetLost).await;
        assert_eq!(progress.bytes_buffered, 0, "what is of no use is still in memory");
        world.target.manners.lock().writes_left = None;
        control.resume();
        let report = switched(work).await;
        world.assert_equal_at_commit();
        assert_eq!(report.target_losses, 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_flush_that_succeeds_while_a_buffered_write_hangs_does_not_make_its_chunk_count_as_copied() {
    // The write hangs, a flush beside it succeeds, and then the target is lost with the write.
    for strategy in [Strategy::Mirror, Strategy::MirrorAsync] {
        let world = full_world(5).await;
        let options = MoveOptions { strategy, buffer_bytes: None, ..asynchronous() };
        let (control, work) = world.start(MoveOptions { bandwidth: Some(2 << 20), ..options }).await;
        until(&control, |progress| progress.bytes_left <= 64 << 10).await;
        control.pause();
        until(&control, |progress| progress.paused).await;
        world.env.sleep(Duration::from_secs(6)).await;
        world.target.manners.lock().hung = true;
        let guest = world.lane();
        let task = tokio::spawn(async move { guest.device.write(write(0, 99, 4096)).await });
        let flushed = world.target.flushes.load(Ordering::Relaxed);
        while world.target.flushes.load(Ordering::Relaxed) == flushed {
            world.env.sleep(Duration::from_millis(100)).await;
        }
        // It is given up after half a minute, and fails then.
        until(&control, |progress| progress.phase == Phase::TargetLost).await;
        task.await.expect("no panic").expect("the guest does not notice");
        {
            let mut manners = world.target.manners.lock();
            (manners.writes_left, manners.hung, manners.kind) = (Some(0), false, Some(ErrorKind::Disconnected));
        }
        world.env.sleep(Duration::from_secs(1)).await;
        world.target.manners.lock().writes_left = None;
        control.resume();
        switched(work).await;
        world.assert_equal_at_commit();
    }
}

#[tokio::test(start_paused = true)]
async fn a_target_that_fails_now_and_then_costs_a_copy_of_the_chunk_and_not_the_move() {
    let mut missed = 0;
    for seed in 0..6 {
        let world = World::new(seed, 2_000_000).await;
        world.target.manners.lock().every_nth_write_fails = Some(41);
        let guest = world.guest(2);
        let (control, work) = world.start(MoveOptions { bandwidth: Some(4_000_000), ..asynchronous() }).await;
        until(&control, |progress| progress.phase > Phase::Copying).await;
        world.target.manners.lock().every_nth_write_fails = None;
        let report = switched(work).await;
        world.assert_equal_at_commit();
        world.stop_guest(guest).await;
        assert_eq!(report.target_losses, 0, "{report:?}");
        missed += report.missed_writes;
    }
    assert!(missed > 0, "no buffered write failed: nothing is tested");
}

#[tokio::test(start_paused = true)]
async fn a_cancel_drops_the_buffer_and_leaves_the_guest_on_the_source() {
    let world = full_world(7).await;
    let (control, work) = copied(&world).await;
    world.target.manners.lock().hung = true;
    let guest = world.lane();
    for number in 0..100 {
        guest.device.write(write(number * 4096, 3, 4096)).await.expect("the write succeeds");
    }
    control.cancel().expect("it can be cancelled");
    let Outcome::Cancelled(_) = outcome(work).await else { panic!("it was not cancelled") };
    assert!(world.slot.device().is_same(&world.source_device));
    let found = guest.device.read(Bytes::ZERO, Buffer::unpooled(4096)).await.expect("the guest reads");
    assert!(found.iter().all(|byte| *byte == 3));
    guest.device.write(write(0, 4, 4096)).await.expect("the write succeeds");
}

#[tokio::test(start_paused = true)]
async fn a_process_that_dies_with_a_full_buffer_copies_what_was_in_it_again() {
    let size = 12 << 20;
    let world = World::new(8, size).await;
    world.source.put(0, &vec![7; size as usize]).await;
    let device = map_device(size);
    let mut context = world.context();
    context.progress_map = Some(map_on(&device, size, 1).await);
    let (control, work) = world.start_with(context, MoveOptions { bandwidth: Some(4 << 20), ..asynchronous() }).await;
    until(&control, |progress| progress.bytes_left <= 64 << 10).await;
    control.pause();
    world.env.sleep(Duration::from_secs(12)).await;
    world.target.manners.lock().hung = true;
    let guest = world.lane();
    for number in 0..100 {
        guest.device.write(write(number * 4096, 3, 4096)).await.expect("the write succeeds");
    }
    // Flushes and the map go on beside the writes that hang.
    world.env.sleep(Duration::from_secs(12)).await;
    work.abort();
    let _ = work.await;
    let world = {
        world.source.reboot();
        world.target.reboot();
        world.target.manners.lock().hung = false;
        World::over(std::sync::Arc::clone(&world.env), world.source.clone(), world.target.clone())
    };
    let mut context = world.context();
    context.target_is_fresh = false;
    context.progress_map = Some(map_on(&device, size, 1).await);
    let (_, work) = world.start_with(context, asynchronous()).await;
    let report = switched(work).await;
    world.assert_equal_at_commit();
    assert!(report.bytes_resumed >= 4 << 20, "everything was copied again: {}", report.bytes_resumed);
}

#[tokio::test(start_paused = true)]
async fn a_target_ten_times_slower_throttles_the_guest_and_the_move_converges_without_a_long_wait() {
    let world = World::new(9, 4 << 20).await;
    world.source.put(0, &[7; 4 << 20]).await;
    {
        world.source.manners.lock().delay_ms = 2;
        world.target.manners.lock().delay_ms = 20;
    }
    let mut tasks = Vec::new();
    for task in 0..16_u64 {
        let (guest, env, stop) = (world.lane(), std::sync::Arc::clone(&world.env), std::sync::Arc::clone(&world.stop));
        tasks.push(tokio::spawn(async move {
            let mut longest = Duration::ZERO;
            let mut round = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                round += 1;
                let at = task * (256 << 10) + round * 7 % 64 * 4096;
                let began = env.now();
                guest.device.write(write(at, round as u8, 4096)).await.expect("the write succeeds");
                longest = longest.max(env.now().since(began));
            }
            longest
        }));
    }
    let (_, work) = world.start(asynchronous()).await;
    let report = switched(work).await;
    world.assert_equal_at_commit();
    world.stop.store(true, Ordering::Relaxed);
    let mut longest = Duration::ZERO;
    for task in tasks {
        longest = longest.max(task.await.expect("the guest is content"));
    }
    assert!(report.throttled_us > 0 && report.bytes_buffered_max > 512 << 10, "{report:?}");
    assert!(longest < Duration::from_secs(2), "one write waited for {longest:?}");
    assert!(report.switchover.window_us < 200_000, "{:?}", report.switchover);
}
