//! Limits before a meter, on a virtual clock.

use std::time::Duration;

use block::{Data, Extent, MemDevice, Slot};
use env::testing::PausedEnv;

use super::*;
use crate::MeterState;

fn limited(env: &EnvRef, iops: Option<u64>, bytes_per_second: Option<u64>) -> (MeterState, Device) {
    let state = MeterState::new(Arc::clone(env));
    state.rate_limit().set(RateLimits { iops, bytes_per_second });
    let memory = Device::new("memory", MemDevice::new(Bytes::mib(1)));
    let meter = Device::new("meter", state.metered(Slot::new(memory).lane()));
    (state, meter)
}

/// The requests of a guest: reads, writes, zeroes and discards of `length` bytes, `depth` at once.
fn load(device: &Device, depth: usize, length: u64) -> Vec<tokio::task::JoinHandle<()>> {
    let lane = |number: usize| {
        let device = device.clone();
        tokio::spawn(async move {
            for step in number.. {
                let extent = Extent::new(Bytes(step as u64 % 8 * length), Bytes(length));
                let done = match step % 4 {
                    0 => device.read(extent.offset, Buffer::unpooled(length as usize)).await.map(drop),
                    1 => device.write(Mutation::zeroes(extent, true)).await,
                    2 => device.write(Mutation::discard(extent)).await,
                    _ => device.write(Mutation::data(extent.offset, Data::copy_of(&vec![7; length as usize]))).await,
                };
                done.expect("memory answers");
            }
        })
    };
    (0..depth).map(lane).collect()
}

#[tokio::test(start_paused = true)]
async fn requests_and_bytes_a_second_are_held() {
    for (iops, bytes_per_second) in [(Some(200), None), (None, Some(1 << 20)), (Some(300), Some(1 << 20))] {
        for depth in [1, 32] {
            let env = PausedEnv::shared(0);
            let (state, device) = limited(&env, iops, bytes_per_second);
            let tasks = load(&device, depth, 4096);
            env.sleep(Duration::from_secs(10)).await;
            tasks.iter().for_each(tokio::task::JoinHandle::abort);
            let total = state.snapshot();
            let requests = (total.read.requests() + total.write.requests()) as f64 / 10.0;
            let bytes = (total.read.bytes + total.write.bytes) as f64 / 10.0;
            // Half of the requests move bytes, so a limit of both is one of requests here.
            let (is, should) = match (iops, bytes_per_second) {
                (Some(iops), _) => (requests, iops as f64),
                (_, limit) => (bytes, limit.map_or(0.0, |limit| limit as f64)),
            };
            assert!((is / should - 1.0).abs() < 0.05, "{is} a second instead of {should} at depth {depth}");
            assert!(bytes <= (1 << 20) as f64 * 1.05, "{bytes} bytes a second at depth {depth}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_limit_that_is_changed_or_removed_lets_those_go_that_wait() {
    for limits in [RateLimits::default(), RateLimits { iops: Some(1000), bytes_per_second: None }] {
        let env = PausedEnv::shared(0);
        let (state, device) = limited(&env, Some(1), None);
        let writes: Vec<_> = (0..16)
            .map(|_| {
                let device = device.clone();
                tokio::spawn(async move { device.write(Mutation::zeroes(Extent::whole(Bytes(512)), true)).await })
            })
            .collect();
        env.sleep(Duration::from_millis(3500)).await;
        assert_eq!(writes.iter().filter(|write| write.is_finished()).count(), 3);
        assert_eq!(state.snapshot().in_flight, 0, "who waits for the limit has not begun");
        state.rate_limit().set(RateLimits { iops: Some(1), bytes_per_second: None });
        env.sleep(Duration::from_millis(100)).await;
        assert_eq!(writes.iter().filter(|write| write.is_finished()).count(), 3, "nothing was changed");
        state.rate_limit().set(limits);
        assert_eq!(state.rate_limit().limits(), limits);
        env.sleep(Duration::from_millis(100)).await;
        assert!(writes.iter().all(tokio::task::JoinHandle::is_finished), "they wait on under {limits:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_wait_is_not_the_guests_latency_and_flushes_do_not_wait() {
    let env = PausedEnv::shared(0);
    let (state, device) = limited(&env, Some(10), None);
    let watch = state.watch_stall();
    let tasks = load(&device, 4, 4096);
    env.sleep(Duration::from_secs(2)).await;
    let began = env.now();
    device.flush().await.expect("memory flushes");
    device.extents(Extent::whole(Bytes(4096))).await.expect("memory answers");
    assert_eq!(env.now(), began);
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    let total = state.snapshot();
    assert!(total.read.requests() + total.write.requests() >= 19);
    assert_eq!((total.read.latency.longest(), total.write.latency.longest()), (Duration::ZERO, Duration::ZERO));
    assert_eq!(watch.longest(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn without_a_limit_nothing_waits_and_nothing_is_owed_later() {
    let env = PausedEnv::shared(0);
    let (state, device) = limited(&env, None, None);
    assert!(state.rate_limit().admit(1 << 30).is_none());
    device.write(Mutation::data(Bytes::ZERO, Data::copy_of(&vec![7; 1 << 20]))).await.expect("memory answers");
    assert_eq!(env.now().since(Default::default()), Duration::ZERO);
    state.rate_limit().set(RateLimits { iops: None, bytes_per_second: Some(4096) });
    let began = env.now();
    device.read(Bytes::ZERO, Buffer::unpooled(4096)).await.expect("memory answers");
    assert_eq!(env.now().since(began), Duration::from_secs(1));
}
