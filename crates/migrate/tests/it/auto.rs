//! Moving a volume whose chunks are mirrored or tracked, whichever costs less.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{World, killed_after, map_device, map_on, moved_under_writes, options, outcome, switched, until};
use block::{Bytes, Data, Mutation};
use migrate::{MoveOptions, Outcome, Phase, Strategy, Verify};
use tokio::task::JoinHandle;

const SIZE: u64 = 8 << 20;

fn chosen() -> MoveOptions {
    MoveOptions { strategy: Strategy::Auto, ..options() }
}

/// A volume that is all data, on a source that answers within 2 ms, and a target within `target_ms`.
async fn world(seed: u64, target_ms: u64) -> World {
    let world = World::new(seed, SIZE).await;
    world.source.put(0, &[7; SIZE as usize]).await;
    world.source.manners.lock().delay_ms = 1;
    world.target.manners.lock().delay_ms = target_ms;
    world
}

/// Tasks that write a page at a time: most of them to the first `hot` bytes, the others anywhere. Gives how many were
/// written, and how long that took all together.
fn writers(world: &World, tasks: u64, hot: u64, pause_ms: u64) -> Vec<JoinHandle<(u64, Duration)>> {
    let write = |number: u64| {
        let (guest, env, stop) = (world.lane(), world.env.clone(), world.stop.clone());
        tokio::spawn(async move {
            let (mut written, mut waited) = (0, Duration::ZERO);
            while !stop.load(Ordering::Relaxed) {
                let within = if number.is_multiple_of(4) { SIZE } else { hot };
                let offset = env.random() % (within / 4096) * 4096;
                let data = Data::copy_of(&[env.random() as u8; 4096]);
                let began = env.now();
                guest.device.write(Mutation::data(Bytes(offset), data)).await.expect("it is written");
                waited += env.now().since(began);
                env.sleep(Duration::from_millis(env.random() % pause_ms)).await;
                written += 1;
            }
            (written, waited)
        })
    };
    (0..tasks).map(write).collect()
}

async fn stop(world: &World, tasks: Vec<JoinHandle<(u64, Duration)>>) -> (u64, Duration) {
    world.stop.store(true, Ordering::Relaxed);
    let mut sum = (0, Duration::ZERO);
    for task in tasks {
        let (written, waited) = task.await.expect("the guest is content");
        sum = (sum.0 + written, sum.1 + waited);
    }
    sum
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_writes_all_the_time_is_moved_and_both_sides_are_equal() {
    for seed in 0..24 {
        let verify = [Verify::Off, Verify::Sample, Verify::Full][(seed % 3) as usize];
        let bandwidth = [None, Some(1 << 20)][(seed / 2 % 2) as usize];
        let delay_ms = [1, 40][(seed % 2) as usize];
        let report = moved_under_writes(seed, delay_ms, MoveOptions { verify, bandwidth, ..chosen() }).await;
        assert!(report.iterations.iter().all(|pass| !pass.held), "the guest was held for a copy: {report:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_idle_guest_s_volume_is_copied_once() {
    let world = world(1, 1).await;
    let (_, work) = world.start(chosen()).await;
    let report = switched(work).await;
    assert_eq!((report.bytes_copied, report.iterations.len()), (SIZE, 1), "{report:?}");
}

/// What a move takes: its report, how many bytes it has copied, and the mean of the guest's writes meanwhile.
async fn with(strategy: Strategy, seed: u64, target_ms: u64, hot: u64, pause_ms: u64) -> (migrate::Report, Duration) {
    let world = world(seed, target_ms).await;
    if strategy == Strategy::Mirror {
        // What the hash functions take of the world's randomness.
        (0..2 * filters::STAGES).for_each(|_| _ = world.env.random());
    }
    let guest = writers(&world, 16, hot, pause_ms);
    let (_, work) = world.start(MoveOptions { strategy, bandwidth: Some(1 << 20), ..options() }).await;
    let report = switched(work).await;
    world.assert_equal_at_commit();
    let (written, waited) = stop(&world, guest).await;
    (report, waited / u32::try_from(written).expect("not so many"))
}

#[tokio::test(start_paused = true)]
async fn what_is_written_again_and_again_is_left_to_the_source_until_the_end() {
    let (mirrored, _) = with(Strategy::Mirror, 3, 1, 256 << 10, 10).await;
    let (chosen, _) = with(Strategy::Auto, 3, 1, 256 << 10, 10).await;
    assert!(
        chosen.bytes_mirrored * 2 < mirrored.bytes_mirrored,
        "{} mirrored by auto, {} by the mirror",
        chosen.bytes_mirrored,
        mirrored.bytes_mirrored
    );
    assert!(chosen.bytes_copied < SIZE + SIZE / 10, "{} copied", chosen.bytes_copied);
    assert!(chosen.seconds < mirrored.seconds * 1.1, "{} s, {} s", chosen.seconds, mirrored.seconds);
    let [first, last] = chosen.iterations.as_slice() else { panic!("{:?}", chosen.iterations) };
    assert!(first.bytes_dirty >= 200 << 10 && last.bytes == first.bytes_dirty, "{first:?} {last:?}");
}

#[tokio::test(start_paused = true)]
async fn a_slow_target_is_not_felt_while_what_is_written_stays_behind_what_is_copied() {
    let (mirrored, waited_mirrored) = with(Strategy::Mirror, 4, 60, SIZE, 300).await;
    let (chosen, waited_chosen) = with(Strategy::Auto, 4, 60, SIZE, 300).await;
    assert!(waited_chosen * 2 < waited_mirrored, "{waited_chosen:?} by auto, {waited_mirrored:?} by the mirror");
    assert!(chosen.iterations.len() > 2, "{:?}", chosen.iterations);
    assert!(chosen.seconds < mirrored.seconds * 2.0, "{} s, {} s", chosen.seconds, mirrored.seconds);
}

#[tokio::test(start_paused = true)]
async fn a_slow_target_under_a_guest_that_writes_everything_anew_is_mirrored_soon() {
    let (mirrored, _) = with(Strategy::Mirror, 5, 60, SIZE, 2).await;
    let (chosen, _) = with(Strategy::Auto, 5, 60, SIZE, 2).await;
    assert!(chosen.iterations.len() <= 2, "{:?}", chosen.iterations);
    assert!(chosen.bytes_copied < mirrored.bytes_copied + SIZE / 4, "{} copied", chosen.bytes_copied);
    assert!(chosen.seconds < mirrored.seconds * 1.25, "{} s, {} s", chosen.seconds, mirrored.seconds);
}

#[tokio::test(start_paused = true)]
async fn a_target_that_is_lost_between_sweeps_is_not_felt_and_is_judged_anew() {
    for seed in 0..6 {
        let world = world(seed, 40).await;
        let guest = writers(&world, 8, SIZE, 100);
        let (control, work) = world.start(MoveOptions { bandwidth: Some(1 << 20), ..chosen() }).await;
        until(&control, |progress| progress.bytes_copied > (1 + seed) << 20).await;
        world.target.manners.lock().writes_left = Some(0);
        until(&control, |progress| progress.phase == Phase::TargetLost).await;
        world.env.sleep(Duration::from_millis(300)).await;
        *world.target.manners.lock() = crate::common::Manners { delay_ms: 1, ..crate::common::Manners::default() };
        control.resume();
        let report = switched(work).await;
        world.assert_equal_at_commit();
        stop(&world, guest).await;
        assert_eq!(report.target_losses, 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancel_at_any_time_leaves_the_guest_on_the_source() {
    for seed in 0..12 {
        let world = World::new(seed, SIZE).await;
        world.target.manners.lock().delay_ms = [1, 40][(seed % 2) as usize];
        let guest = world.guest(2);
        let (control, work) = world.start(MoveOptions { bandwidth: Some(2 << 20), ..chosen() }).await;
        until(&control, |progress| progress.bytes_copied > seed * 300_000).await;
        control.cancel().expect("the commit is far away");
        let Outcome::Cancelled(_) = outcome(work).await else { panic!("it was not cancelled") };
        assert!(world.slot.device().is_same(&world.source_device));
        world.stop_guest(guest).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_dead_process_s_move_goes_on_with_what_is_left_and_what_was_left_to_the_source() {
    const LARGE: u64 = 20_000_000;
    for seed in 0..6 {
        let world = World::new(seed, LARGE).await;
        world.target.manners.lock().delay_ms = 40;
        let map = map_device(LARGE);
        let slow = MoveOptions { bandwidth: Some(700_000), ..chosen() };
        let world = killed_after(world, &map, LARGE, slow, 12.0 + seed as f64).await;
        let mut context = world.context();
        context.progress_map = Some(map_on(&map, LARGE, 1).await);
        context.target_is_fresh = false;
        let (_, work) = world.start_with(context, chosen()).await;
        let guest = world.guest(2);
        let report = switched(work).await;
        world.stop_guest(guest).await;
        world.assert_equal_at_commit();
        assert!(report.bytes_resumed > 2_000_000, "seed {seed}: {} were resumed", report.bytes_resumed);
    }
}
