//! Processor time per request on a device in memory: bare, and below what the daemon puts between a connection and its
//! volume while nothing migrates. One line of JSON per kind of request.
//!
//! Both sides are measured in turn, many times, and both drive eight requests at once on one thread, as a connection
//! does.

use std::sync::Arc;
use std::time::Duration;

use block::{Buffer, BufferPool, Bytes, Device, MemDevice, Mutation, Slot};
use filters::MeterState;
use futures::StreamExt;
use futures::executor::block_on;
use rustix::time::{ClockId, clock_gettime};

const SIZE: Bytes = Bytes::mib(64);
const REQUEST_BYTES: usize = 4096;
const REQUESTS: u64 = 200_000;
const DEPTH: usize = 8;

fn main() {
    let rounds: usize = std::env::args().nth(1).and_then(|word| word.parse().ok()).unwrap_or(5);
    let memory = Device::new("memory", MemDevice::new(SIZE));
    block_on(fill(&memory));
    let slot = Slot::new(memory.clone());
    let meters = MeterState::new(Arc::new(env::RealEnv::new()));
    let stack = Device::new("meter", meters.metered(slot.lane()));
    for (what, is_read) in [("read", true), ("write", false)] {
        let (mut bare_ns, mut stack_ns) = (Vec::new(), Vec::new());
        measure(&memory, is_read);
        measure(&stack, is_read);
        for _ in 0..rounds {
            bare_ns.push(measure(&memory, is_read));
            stack_ns.push(measure(&stack, is_read));
        }
        println!("{{\"what\":\"{what}\",\"bare\":{bare_ns:?},\"stack\":{stack_ns:?}}}");
    }
}

async fn fill(device: &Device) {
    for offset in (0..SIZE.get()).step_by(1 << 20) {
        device
            .write(Mutation::data(Bytes(offset), Buffer::unpooled(1 << 20).freeze()))
            .await
            .expect("memory takes every write");
    }
}

/// Nanoseconds of this thread's processor time per request.
fn measure(device: &Device, is_read: bool) -> f64 {
    let pool = BufferPool::new(Bytes::mib(4));
    let before = thread_time();
    let requests = futures::stream::iter(0..REQUESTS).map(|number| {
        let pool = &pool;
        let offset =
            Bytes(number.wrapping_mul(0x9e37_79b9) % (SIZE.get() / REQUEST_BYTES as u64) * REQUEST_BYTES as u64);
        async move {
            let buffer = pool.acquire(REQUEST_BYTES).await;
            if is_read {
                drop(device.read(offset, buffer).await.expect("memory answers every read"));
            } else {
                device.write(Mutation::data(offset, buffer.freeze())).await.expect("memory takes every write");
            }
        }
    });
    block_on(requests.buffer_unordered(DEPTH).for_each(|()| std::future::ready(())));
    (thread_time() - before).as_nanos() as f64 / REQUESTS as f64
}

fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).expect("nanoseconds are below a billion"))
}
