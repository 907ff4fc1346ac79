//! The meters against devices whose latency is known, on a virtual clock.

use std::sync::Arc;
use std::time::Duration;

use block::{Data, Device, ErrorKind, Extent, MemDevice, Mutation, Slot};
use env::testing::PausedEnv;

use super::*;
use crate::{Fault, FaultAction, FaultRule, FaultVerb, FaultWhen, Throttle};

fn rule(verb: FaultVerb, when: FaultWhen, action: FaultAction) -> FaultRule {
    FaultRule { verb, extent: None, when, action }
}

fn faulty(env: &EnvRef) -> Fault {
    Fault::new(Device::new("mem", MemDevice::new(Bytes::mib(1))), Arc::clone(env))
}

fn metered(state: &MeterState, lower: Device) -> Meter {
    state.metered(Slot::new(lower).lane())
}

fn write_of(offset: u64, length: usize) -> Mutation {
    Mutation::data(Bytes(offset), Data::copy_of(&vec![7; length]))
}

#[tokio::test(start_paused = true)]
async fn latencies_bytes_and_errors_are_counted_in_their_window() {
    let env = PausedEnv::shared(0);
    let fault = faulty(&env);
    let state = MeterState::new(Arc::clone(&env));
    let device = Device::new("metered", metered(&state, Device::new("faulty", fault.clone())));

    device.write(write_of(0, 4096)).await.expect("memory answers");
    let before = state.snapshot();
    fault.add(rule(FaultVerb::Read, FaultWhen::Nth(1), FaultAction::Fail(ErrorKind::Io)));
    fault.add(rule(FaultVerb::Read, FaultWhen::Always, FaultAction::Delay(Duration::from_millis(10))));
    device.read(Bytes(0), Buffer::unpooled(512)).await.expect("the first read is only slow");
    device.read(Bytes(0), Buffer::unpooled(512)).await.expect_err("the second read fails");
    env.sleep(Duration::from_millis(90)).await;

    let window = state.snapshot().since(&before);
    assert_eq!(window.span, Duration::from_millis(100));
    assert_eq!((window.read.requests(), window.read.bytes, window.read.errors), (2, 1024, 1));
    assert_eq!(window.write.requests(), 0, "the write came before the window");
    assert!((window.iops() - 20.0).abs() < 0.1);
    let longest = window.latency().longest();
    assert!(longest >= Duration::from_millis(10) && longest < Duration::from_micros(10_400), "{longest:?}");
}

#[tokio::test(start_paused = true)]
async fn what_a_connection_counted_outlives_it() {
    let env = PausedEnv::shared(0);
    let state = MeterState::new(Arc::clone(&env));
    let device = Device::new("metered", metered(&state, Device::new("mem", MemDevice::new(Bytes::mib(1)))));
    device.write(write_of(0, 4096)).await.expect("memory answers");
    drop(device);
    let total = state.snapshot();
    assert_eq!((total.write.requests(), total.write.bytes, total.in_flight), (1, 4096, 0));
}

#[tokio::test(start_paused = true)]
async fn a_stall_is_seen_while_the_request_still_waits_and_after_it_was_answered() {
    let env = PausedEnv::shared(0);
    let fault = faulty(&env);
    fault.add(rule(FaultVerb::Write, FaultWhen::Nth(1), FaultAction::Delay(Duration::from_millis(50))));
    let state = MeterState::new(Arc::clone(&env));
    let device = Device::new("metered", metered(&state, Device::new("faulty", fault)));
    device.write(write_of(0, 512)).await.expect("memory answers");

    let watch = state.watch_stall();
    let writing = tokio::spawn({
        let device = device.clone();
        async move { device.write(write_of(0, 512)).await }
    });
    env.sleep(Duration::from_millis(20)).await;
    assert_eq!(state.snapshot().in_flight, 1);
    assert_eq!(watch.longest(), Duration::from_millis(20));
    writing.await.expect("no panic").expect("the write is only slow");
    env.sleep(Duration::from_millis(20)).await;
    assert_eq!(watch.longest(), Duration::from_millis(50));
    drop(device);
    assert_eq!(watch.longest(), Duration::from_millis(50), "the stall went with its connection");
    assert_eq!(state.watch_stall().longest(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn faults_strike_as_their_rules_say() {
    let env = PausedEnv::shared(0);
    let fault = faulty(&env);
    let device = Device::new("faulty", fault.clone());
    let first_block = Some(Extent::new(Bytes(0), Bytes(4096)));
    let full = FaultAction::Fail(ErrorKind::NoSpace);
    fault.add(FaultRule { verb: FaultVerb::Write, extent: first_block, when: FaultWhen::Always, action: full });
    fault.add(rule(FaultVerb::Write, FaultWhen::Nth(0), FaultAction::Lose));
    fault.add(rule(FaultVerb::Flush, FaultWhen::Run { first: 1, count: 2 }, FaultAction::Fail(ErrorKind::Io)));

    let refused = device.write(write_of(0, 512)).await.expect_err("the rule forbids it");
    assert_eq!(refused.kind(), ErrorKind::NoSpace);
    device.write(write_of(4096, 512)).await.expect("a lost write is answered");
    device.write(write_of(8192, 512)).await.expect("only the first write is lost");
    let lost = device.read(Bytes(4096), Buffer::unpooled(1)).await.expect("reads are well");
    let kept = device.read(Bytes(8192), Buffer::unpooled(1)).await.expect("reads are well");
    assert_eq!((lost[0], kept[0]), (0, 7));
    let mut flushes = Vec::new();
    for _ in 0..4 {
        flushes.push(device.flush().await.is_ok());
    }
    assert_eq!(flushes, [true, false, false, true]);
    fault.clear();
    device.write(write_of(0, 512)).await.expect("no rule is left");
}

#[tokio::test(start_paused = true)]
async fn a_throttle_holds_its_rate_over_a_second() {
    let env = PausedEnv::shared(0);
    let memory = Device::new("mem", MemDevice::new(Bytes::mib(8)));
    let device = Device::new("slow", Throttle::new(memory, Arc::clone(&env), 1 << 20));
    let began = env.now();
    for index in 0..64 {
        device.write(write_of(index * 65536, 65536)).await.expect("memory answers");
    }
    let seconds = env.now().since(began).as_secs_f64();
    assert!((3.9..4.1).contains(&seconds), "4 MiB at 1 MiB/s took {seconds} s");
}
