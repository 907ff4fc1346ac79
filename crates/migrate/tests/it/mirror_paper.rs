//! Moving a volume as the ESX paper's mirror does it: two offsets, and one window in which the guest's writes wait.

use std::time::Duration;

use crate::common::{World, map_device, map_on, moved_under_writes, options, switched, until};
use block::{Buffer, Bytes, Data, ErrorKind, Mutation};
use migrate::{MoveOptions, Phase, Strategy, Verify};

const MIB: u64 = 1 << 20;

/// Windows of 1 MiB.
fn paper() -> MoveOptions {
    MoveOptions { strategy: Strategy::MirrorPaper, window_bytes_max: MIB, ..options() }
}

async fn full_world(seed: u64) -> World {
    let world = World::new(seed, 4 * MIB).await;
    world.source.put(0, &[7; 4 << 20]).await;
    world
}

fn write(at: u64, byte: u8) -> Mutation {
    Mutation::data(Bytes(at), Data::copy_of(&[byte; 4096]))
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_writes_all_the_time_is_moved_and_both_sides_are_equal() {
    for seed in 0..20 {
        let verify = [Verify::Off, Verify::Sample, Verify::Full][(seed % 3) as usize];
        let window_bytes_max = [64 << 10, 300 << 10, MIB, 16 * MIB][(seed % 4) as usize];
        let delay_ms = [3, 40][(seed % 2) as usize];
        let report = moved_under_writes(seed, delay_ms, MoveOptions { verify, window_bytes_max, ..paper() }).await;
        assert!(report.bytes_zero > 0, "{report:?}");
        assert_eq!(report.redos, 0, "something was copied twice for the guest's sake");
    }
}

#[tokio::test(start_paused = true)]
async fn writes_wait_in_the_window_go_to_the_source_beyond_it_and_to_both_sides_before_it() {
    let world = full_world(1).await;
    world.target.manners.lock().delay_ms = 20;
    let (control, work) = world.start(MoveOptions { bandwidth: Some(MIB), ..paper() }).await;
    until(&control, |progress| progress.bytes_left <= 3 * MIB).await;
    let guest = world.lane();
    guest.device.write(write(4096, 1)).await.expect("the write succeeds");
    assert_eq!(world.target.contents().await[4096], 1, "before the window a write goes to both sides");
    guest.device.write(write(3 * MIB, 2)).await.expect("the write succeeds");
    assert_eq!(world.target.contents().await[3 << 20], 0, "beyond the window a write goes to the source only");
    world.target.manners.lock().hung = true;
    // At one window a second the second one is open by then.
    world.env.sleep(Duration::from_secs(2)).await;
    let mut within = std::pin::pin!(guest.device.write(write(MIB + 8192, 3)));
    let waited = tokio::time::timeout(Duration::from_secs(5), within.as_mut()).await;
    assert!(waited.is_err(), "a write in the window does not wait");
    let other = world.lane();
    let beyond = tokio::time::timeout(Duration::from_secs(1), other.device.write(write(2 * MIB, 4))).await;
    beyond.expect("beyond the window nobody waits").expect("the write succeeds");
    let read = tokio::time::timeout(Duration::from_secs(1), other.device.read(Bytes(MIB), Buffer::unpooled(4096)));
    read.await.expect("a read does not wait").expect("the read succeeds");
    world.target.manners.lock().hung = false;
    within.await.expect("the write succeeds");
    assert_eq!(world.target.contents().await[(MIB + 8192) as usize], 3, "it was answered before both sides had it");
    let report = switched(work).await;
    world.assert_equal_at_commit();
    assert!(report.bytes_copied == 4 * MIB && report.iterations.len() == 1, "{report:?}");
}

#[tokio::test(start_paused = true)]
async fn a_lost_target_takes_the_copy_back_to_the_first_chunk_that_differs_and_it_goes_on_from_there() {
    let world = full_world(2).await;
    let (control, work) = world.start(MoveOptions { bandwidth: Some(MIB), ..paper() }).await;
    until(&control, |progress| progress.bytes_left <= MIB).await;
    // All that was copied is flushed by then.
    control.pause();
    world.env.sleep(Duration::from_secs(6)).await;
    {
        let mut manners = world.target.manners.lock();
        (manners.writes_left, manners.kind) = (Some(0), Some(ErrorKind::NoSpace));
    }
    let guest = world.lane();
    guest.device.write(write(2 * MIB, 9)).await.expect("the guest does not notice");
    until(&control, |progress| progress.phase == Phase::TargetLost).await;
    world.target.manners.lock().writes_left = None;
    control.resume();
    let report = switched(work).await;
    world.assert_equal_at_commit();
    assert_eq!((report.target_losses, report.bytes_copied), (1, 5 * MIB), "two windows are copied again");
}

#[tokio::test(start_paused = true)]
async fn after_a_crash_the_copy_goes_on_behind_what_was_copied_without_a_gap() {
    let world = full_world(3).await;
    let map = map_device(4 * MIB);
    let mut context = world.context();
    context.progress_map = Some(map_on(&map, 4 * MIB, 1).await);
    let (control, work) = world.start_with(context, MoveOptions { bandwidth: Some(MIB), ..paper() }).await;
    until(&control, |progress| progress.bytes_left <= 2 * MIB).await;
    control.pause();
    // The target is flushed and the map follows.
    world.env.sleep(Duration::from_secs(12)).await;
    work.abort();
    assert!(work.await.is_err(), "it was killed");
    world.source.reboot();
    world.target.reboot();
    let world = World::over(std::sync::Arc::clone(&world.env), world.source.clone(), world.target.clone());
    let mut context = world.context();
    context.target_is_fresh = false;
    context.progress_map = Some(map_on(&map, 4 * MIB, 1).await);
    let (_, work) = world.start_with(context, paper()).await;
    let report = switched(work).await;
    world.assert_equal_at_commit();
    assert_eq!((report.bytes_resumed, report.bytes_copied), (2 * MIB, 2 * MIB), "{report:?}");
}
