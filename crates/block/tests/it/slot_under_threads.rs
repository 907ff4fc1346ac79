//! The slot under real threads: no request ever runs on a device that is not in the slot, and none is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use transhume_block::{
    BlockDevice, Buffer, Bytes, Data, Device, Extent, ExtentStatus, Geometry, IoFuture, MemDevice, Mutation,
};
use transhume_block::{Slot, ready};

/// Counts what passes and fails the test when something passes while it is retired.
struct Guarded {
    memory: MemDevice,
    retired: Arc<AtomicBool>,
    passed: Arc<AtomicU64>,
}

impl Guarded {
    async fn pass(&self) {
        assert!(!self.retired.load(Ordering::SeqCst), "a request began on a device that had left the slot");
        tokio::task::yield_now().await;
        assert!(!self.retired.load(Ordering::SeqCst), "a request was in flight when its device left the slot");
        self.passed.fetch_add(1, Ordering::SeqCst);
    }
}

impl BlockDevice for Guarded {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }
    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            self.pass().await;
            self.memory.read(offset, buffer).await
        })
    }
    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.pass().await;
            self.memory.write(mutation).await
        })
    }
    fn flush(&self) -> IoFuture<'_, ()> {
        ready(Ok(()))
    }
    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        self.memory.extents(extent)
    }
}

fn guarded(passed: &Arc<AtomicU64>) -> (Device, Arc<AtomicBool>) {
    let retired = Arc::new(AtomicBool::new(false));
    let memory = MemDevice::new(Bytes::mib(1));
    let device = Guarded { memory, retired: Arc::clone(&retired), passed: Arc::clone(passed) };
    (Device::new("guarded", device), retired)
}

/// Sends requests through a lane of its own until `stop`, eight at a time; gives their number.
fn send_until(slot: &Slot, stop: &Arc<AtomicBool>) -> std::thread::JoinHandle<u64> {
    let (lane, stop) = (Device::new("lane", slot.lane()), Arc::clone(stop));
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime can be built");
        runtime.block_on(async move {
            let mut sent = 0;
            while !stop.load(Ordering::SeqCst) {
                let writes =
                    (0..8).map(|index| lane.write(Mutation::data(Bytes(index * 512), Data::copy_of(&[1; 512]))));
                for answer in futures::future::join_all(writes).await {
                    answer.expect("memory answers");
                    sent += 1;
                }
            }
            sent
        })
    })
}

#[test]
fn requests_of_many_threads_never_meet_a_swap() {
    const SWAPS: usize = 2_000;
    let passed = Arc::new(AtomicU64::new(0));
    let (first, mut retired) = guarded(&passed);
    let slot = Slot::new(first);
    let stop = Arc::new(AtomicBool::new(false));
    let senders: Vec<_> = (0..3).map(|_| send_until(&slot, &stop)).collect();

    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime can be built");
    runtime.block_on(async {
        for _ in 0..SWAPS {
            let (next, next_retired) = guarded(&passed);
            let quiesced = slot.quiesce().await;
            let before = passed.load(Ordering::SeqCst);
            std::thread::yield_now();
            assert_eq!(passed.load(Ordering::SeqCst), before, "a request passed a quiesced slot");
            quiesced.swap(next);
            retired.store(true, Ordering::SeqCst);
            retired = next_retired;
            drop(quiesced);
            while passed.load(Ordering::SeqCst) == before {
                std::thread::yield_now();
            }
        }
    });
    stop.store(true, Ordering::SeqCst);
    let sent: u64 = senders.into_iter().map(|sender| sender.join().expect("no sender panics")).sum();
    assert_eq!(sent, passed.load(Ordering::SeqCst), "a request was answered without reaching a device");
    assert!(sent >= SWAPS as u64, "only {sent} requests met {SWAPS} swaps");
}
