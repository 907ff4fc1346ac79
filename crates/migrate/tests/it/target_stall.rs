//! A target that answers nothing at all, reads and flushes no more than writes: a server that is stopped. The guest does not
//! wait for it, nor does a cancel, and the move goes on when the target does.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{World, options, outcome, switched, until};
use block::{Bytes, Data, Extent, Mutation};
use env::EnvRef;
use migrate::{Control, MoveOptions, Outcome, Phase, Strategy, Verify};

const SILENCE_MS: u64 = 60;
/// Strategies whose writes may be left to the source.
const LEAVING: [Strategy; 4] = [Strategy::Mirror, Strategy::Auto, Strategy::Dbt, Strategy::IncrementalDbt];
/// Those that lose their target instead, after four times as long.
const LOSING: [Strategy; 2] = [Strategy::MirrorAsync, Strategy::MirrorPaper];

/// When the target is stopped.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Copying,
    Verifying,
    /// When it is flushed for the switchover.
    Flush,
}

const MOMENTS: [At; 3] = [At::Copying, At::Verifying, At::Flush];

fn chosen(strategy: Strategy) -> MoveOptions {
    let buffer_bytes = (strategy == Strategy::MirrorAsync).then_some(1 << 20);
    let (silence_ms, bandwidth, verify) = (Some(SILENCE_MS), Some(1_500_000), Verify::Full);
    MoveOptions { silence_ms, bandwidth, verify, strategy, buffer_bytes, ..options() }
}

/// Stops the target at its moment.
async fn stop(world: &World, control: &Control, at: At) {
    match at {
        At::Copying => {
            until(control, |progress| progress.bytes_copied > 150_000).await;
            world.target.manners.lock().stopped = true;
        }
        At::Verifying => {
            until(control, |progress| progress.phase >= Phase::Verifying).await;
            world.target.manners.lock().stopped = true;
        }
        At::Flush => {
            until(control, |progress| progress.phase >= Phase::Verifying).await;
            world.target.manners.lock().stops_at_flush = true;
            while !world.target.manners.lock().stopped {
                world.env.sleep(Duration::from_millis(1)).await;
            }
        }
    }
}

/// The longest of writes and flushes, durable ones among them, for `span`.
async fn longest(world: &World, env: &EnvRef, span: Duration) -> Duration {
    let lane = world.lane();
    let (until, mut longest) = (env.now() + span, Duration::ZERO);
    for turn in 0_u64.. {
        let began = env.now();
        if began >= until {
            break;
        }
        if turn % 5 == 4 {
            lane.device.flush().await.expect("the source is flushed");
        } else {
            let offset = Bytes(200_000 + turn * 7919 % 190_000);
            let write = Mutation::data(offset, Data::copy_of(&[turn as u8; 4096])).with_fua(turn % 3 == 0);
            lane.device.write(write).await.expect("the source takes it");
        }
        longest = longest.max(env.now() - began);
    }
    longest
}

async fn waits_for_stopped_target(strategy: Strategy, at: At, seed: u64, limit: Duration) {
    let world = World::new(seed, 400_000).await;
    let guest = world.guest(4);
    let (control, work) = world.start(chosen(strategy)).await;
    stop(&world, &control, at).await;
    let env = world.env.clone();
    let longest = longest(&world, &env, Duration::from_secs(3)).await;
    // A last copy may hold the guest for as long as it was given.
    let held = if strategy.iterates() { Duration::from_millis(options().downtime_limit_ms) } else { Duration::ZERO };
    let limit = limit + held;
    assert!(longest <= limit, "{strategy}, stopped at {at:?}: a request took {longest:?}");
    assert!(!control.snapshot().phase.is_committed(), "{strategy} {at:?}: it switched to a target that is stopped");
    world.target.mend();
    control.set_bandwidth(None);
    let mut watch = control.watch();
    let resumed = control.clone();
    tokio::spawn(async move {
        while watch.wait_for(|progress| progress.phase == Phase::TargetLost).await.is_ok() {
            resumed.resume();
            env.sleep(Duration::from_millis(50)).await;
        }
    });
    let report = switched(work).await;
    world.assert_equal_at_commit();
    world.stop_guest(guest).await;
    if LEAVING.contains(&strategy) {
        assert_eq!(report.target_losses, 0, "{strategy} {at:?}: {report:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn no_request_waits_long_for_a_target_that_is_stopped_and_the_move_goes_on_with_it() {
    for (seed, strategy) in LEAVING.into_iter().cycle().take(12).enumerate() {
        for at in MOMENTS {
            // The limit, the source's time, and that of those that are before it.
            waits_for_stopped_target(strategy, at, seed as u64, Duration::from_millis(2 * SILENCE_MS)).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_target_that_cannot_be_left_is_lost_and_no_request_waits_long_for_it() {
    for (seed, strategy) in LOSING.into_iter().cycle().take(6).enumerate() {
        for at in MOMENTS {
            waits_for_stopped_target(strategy, at, seed as u64, Duration::from_millis(6 * SILENCE_MS)).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancel_does_not_wait_for_a_target_that_is_stopped() {
    for (seed, strategy) in LEAVING.into_iter().chain(LOSING).enumerate() {
        for at in MOMENTS {
            let world = World::new(seed as u64, 400_000).await;
            let guest = world.guest(4);
            let (control, work) = world.start(chosen(strategy)).await;
            stop(&world, &control, at).await;
            world.env.sleep(Duration::from_millis(20)).await;
            let began = world.env.now();
            control.cancel().expect("it can be cancelled");
            let Outcome::Cancelled(_) = outcome(work).await else { panic!("{strategy} {at:?}: it was not cancelled") };
            let took = world.env.now() - began;
            assert!(took <= Duration::from_secs(2), "{strategy}, stopped at {at:?}: the cancel took {took:?}");
            assert!(world.slot.device().is_same(&world.source_device));
            world.stop_guest(guest).await;
        }
    }
}

/// What was left may be answered never although others are: the target is lost after its time for an answer.
#[tokio::test(start_paused = true)]
async fn a_write_that_was_left_has_its_time_however_much_else_the_target_answers() {
    let world = World::new(3, 400_000).await;
    let guest = world.guest(4);
    let (control, work) = world.start(MoveOptions { target_ms: 3_000, ..chosen(Strategy::Mirror) }).await;
    until(&control, |progress| progress.bytes_copied > 150_000).await;
    world.target.manners.lock().hung = true;
    world.env.sleep(Duration::from_millis(200)).await;
    // Mutations that are under way stay so, and everything that comes later is answered.
    world.target.forsake();
    let lost = tokio::time::timeout(Duration::from_secs(20), crate::common::lost(&control)).await;
    assert_eq!(lost, Ok(true), "the move waits for a write that is never answered");
    world.target.mend();
    control.set_bandwidth(None);
    control.resume();
    switched(work).await;
    world.assert_equal_at_commit();
    world.stop_guest(guest).await;
}

/// A discard of all of a volume: on a target that writes zeroes out it takes seconds, and the guest does not wait for that.
#[tokio::test(start_paused = true)]
async fn a_large_discard_holds_nobody_for_long_and_does_not_lose_the_target() {
    for strategy in [Strategy::Mirror, Strategy::Auto] {
        let world = World::new(5, 64 << 20).await;
        world.target.manners.lock().zero_ms_per_mib = 50;
        let chosen = MoveOptions { target_ms: 1_500, strategy, silence_ms: Some(250), ..options() };
        let (control, work) = world.start(MoveOptions { verify: Verify::Off, ..chosen }).await;
        until(&control, |progress| progress.bytes_left < 1 << 20).await;
        control.pause();
        let discarding = world.lane();
        let discard = tokio::spawn(async move {
            let all = Extent::new(Bytes::ZERO, Bytes(64 << 20));
            discarding.device.write(Mutation::discard(all)).await.expect("the guest discards");
        });
        let (lane, began) = (world.lane(), world.env.now());
        let mut longest = Duration::ZERO;
        for turn in 0_u64.. {
            if discard.is_finished() {
                break;
            }
            let asked = world.env.now();
            let write = Mutation::data(Bytes(turn * 7_919_000 % (60 << 20)), Data::copy_of(&[turn as u8; 512]));
            lane.device.write(write).await.expect("the guest writes");
            longest = longest.max(world.env.now() - asked);
            world.env.sleep(Duration::from_millis(1)).await;
        }
        let took = world.env.now() - began;
        assert!(took < Duration::from_secs(1), "{strategy}: the discard took {took:?}");
        assert!(longest < Duration::from_millis(500), "{strategy}: a write beside it took {longest:?}");
        control.resume();
        let report = switched(work).await;
        world.assert_equal_at_commit();
        assert_eq!(report.target_losses, 0, "{strategy}: {report:?}");
    }
}

/// Guest requests of 200 ms, many at once: the hold grows to what they need.
#[tokio::test(start_paused = true)]
async fn a_guest_whose_own_requests_are_slow_is_switched_over_by_longer_holds_and_the_report_says_so() {
    for strategy in [Strategy::Mirror, Strategy::MirrorAsync] {
        let world = World::new(6, 300_000).await;
        let (stop, mut guest) = (Arc::clone(&world.stop), Vec::new());
        world.source.manners.lock().delay_ms = 150;
        world.target.manners.lock().delay_ms = 150;
        for task in 0..16 {
            let (lane, stop) = (world.lane(), Arc::clone(&stop));
            guest.push(tokio::spawn(async move {
                for turn in 0_u64.. {
                    if stop.load(Ordering::Relaxed) {
                        return turn;
                    }
                    let write = Mutation::data(Bytes(task * 16_384), Data::copy_of(&[turn as u8; 4096]));
                    lane.device.write(write).await.expect("the guest writes");
                }
                0
            }));
        }
        world.env.sleep(Duration::from_secs(1)).await;
        let (_, work) = world.start(MoveOptions { strategy, ..options() }).await;
        let report = switched(work).await;
        world.stop_guest(guest).await;
        let switchover = report.switchover;
        let holds = switchover.quiesce_retries + switchover.entry_retries;
        assert!((1..=8).contains(&holds), "{strategy}: {switchover:?}");
        assert!((100_001..=1_000_000).contains(&switchover.quiesce_limit_us), "{strategy}: {switchover:?}");
        assert!(switchover.entry_us > 0, "{strategy}: {switchover:?}");
    }
}

/// The start of a move beside a request that takes long: the guest is held for short times only.
#[tokio::test(start_paused = true)]
async fn the_start_of_a_move_does_not_hold_the_guest_for_one_request_that_takes_long() {
    let world = World::new(7, 300_000).await;
    world.source.manners.lock().hung = true;
    let slow = world.lane();
    let slow = tokio::spawn(async move { slow.device.write(Mutation::data(Bytes(0), Data::copy_of(&[1; 512]))).await });
    tokio::task::yield_now().await;
    let (env, source) = (world.env.clone(), world.source.clone());
    let ends = async {
        env.sleep(Duration::from_secs(10)).await;
        source.mend();
    };
    let (lane, stop) = (world.lane(), Arc::clone(&world.stop));
    let reader_env = world.env.clone();
    let reader = tokio::spawn(async move {
        let mut longest = Duration::ZERO;
        while !stop.load(Ordering::Relaxed) {
            let began = reader_env.now();
            lane.device.read(Bytes(100_000), block::Buffer::unpooled(512)).await.expect("the guest reads");
            longest = longest.max(reader_env.now() - began);
            reader_env.sleep(Duration::from_millis(5)).await;
        }
        longest
    });
    let ((_, work), ()) = futures::join!(world.start(options()), ends);
    world.stop.store(true, Ordering::Relaxed);
    let longest = reader.await.expect("no panic");
    assert!(longest <= Duration::from_millis(1_050), "a read waited {longest:?} at the start of a move");
    slow.await.expect("no panic").expect("the write succeeds");
    let report = switched(work).await;
    assert!(report.switchover.entry_retries > 3, "{:?}", report.switchover);
}
