//! Every filter passes the body that every device passes, alone and all of them over each other.

use std::time::Duration;

use block::testing::conformance;
use block::{Bytes, Device, ErrorKind, Extent, MemDevice, Slot};
use env::EnvRef;
use env::testing::PausedEnv;
use transhume_filters::{Fault, FaultAction, FaultRule, FaultVerb, FaultWhen, MeterState, Throttle};

fn memory(size: Bytes) -> Device {
    Device::new("memory", MemDevice::new(size))
}

/// A rule that strikes a tenth of everything with a delay, and one that would fail what nobody asks for.
fn unreliable(lower: Device, env: &EnvRef) -> Device {
    let fault = Fault::new(lower, env.clone());
    let beyond = Extent::new(Bytes(1 << 40), Bytes(1));
    let rule = |extent, when, action| FaultRule { verb: FaultVerb::Write, extent, when, action };
    fault.add(rule(None, FaultWhen::Probability(0.1), FaultAction::Delay(Duration::from_millis(7))));
    fault.add(rule(Some(beyond), FaultWhen::Always, FaultAction::Fail(ErrorKind::Io)));
    Device::new("faulty", fault)
}

fn metered(lower: Device, env: &EnvRef) -> Device {
    Device::new("metered", MeterState::new(env.clone()).metered(Slot::new(lower).lane()))
}

fn throttled(lower: Device, env: &EnvRef) -> Device {
    Device::new("throttled", Throttle::new(lower, env.clone(), 50_000_000))
}

#[tokio::test(start_paused = true)]
async fn the_meter_conforms() {
    let env: EnvRef = PausedEnv::shared(1);
    conformance(1, async |size| metered(memory(size), &env)).await;
}

#[tokio::test(start_paused = true)]
async fn the_throttle_conforms() {
    let env: EnvRef = PausedEnv::shared(2);
    conformance(2, async |size| throttled(memory(size), &env)).await;
}

#[tokio::test(start_paused = true)]
async fn a_fault_that_only_delays_conforms() {
    let env: EnvRef = PausedEnv::shared(3);
    conformance(3, async |size| unreliable(memory(size), &env)).await;
}

#[tokio::test(start_paused = true)]
async fn all_of_them_over_each_other_conform() {
    let env: EnvRef = PausedEnv::shared(4);
    for unit in [1, 512, 4096] {
        let lower = |size| Device::new("memory", MemDevice::new(size).with_request_alignment(unit));
        conformance(4, async |size| metered(throttled(unreliable(lower(size), &env), &env), &env)).await;
    }
}
