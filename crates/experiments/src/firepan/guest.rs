//! The paper's guest (figure 5): a closed loop of fio on four files, which knows what it may read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{Buffer, Bytes, Data, Device, Mutation};
use parking_lot::Mutex;
use sim::model::Verb;
use sim::rng::Rng;
use sim::workload::{Workload, Zoned};
use sim::world::{Invariant, World};
use tokio::sync::Notify;

use super::devices::BLOCK_BYTES;

/// Four files with 32 each.
const OUTSTANDING: usize = 128;
/// What is played instead. A loop that always waits gets as much with fewer; but the engine admits no more than 64 misses at a time, and
/// what the paper used admits all.
const OUTSTANDING_ADMITTED: usize = 48;

/// What is known of a block: each write of it has a number, and no two are under way at once.
#[derive(Clone, Copy, Default)]
struct Known {
    asked: u32,
    answered: u32,
}

/// A guest. Clones are the same.
#[derive(Clone)]
pub(super) struct Guest {
    shared: Arc<Shared>,
}

struct Shared {
    world: World,
    rng: Rng,
    load: Mutex<Zoned>,
    /// Its volume; none while it is held.
    device: Mutex<Option<Device>>,
    let_run: Notify,
    known: Mutex<Vec<Known>>,
    in_flight: AtomicU64,
    drained: Notify,
    reads: AtomicU64,
    writes: AtomicU64,
}

impl Guest {
    /// A guest with files of `file_bytes` that is held. Whether it has so few requests outstanding that every miss is admitted.
    pub(super) fn new(world: &World, file_bytes: u64, admits_all: bool) -> Self {
        let blocks = 4 * file_bytes / BLOCK_BYTES;
        let shared = Arc::new(Shared {
            world: world.clone(),
            rng: world.rng("guest"),
            load: Mutex::new(Zoned::firepan(file_bytes)),
            device: Mutex::new(None),
            let_run: Notify::new(),
            known: Mutex::new(vec![Known::default(); blocks as usize]),
            in_flight: AtomicU64::new(0),
            drained: Notify::new(),
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
        });
        for _ in 0..if admits_all { OUTSTANDING_ADMITTED } else { OUTSTANDING } {
            let worker = Arc::clone(&shared);
            world.spawn(async move { worker.work().await });
        }
        Self { shared }
    }

    /// Lets it run on `device`.
    pub(super) fn run_on(&self, device: Device) {
        *self.shared.device.lock() = Some(device);
        self.shared.let_run.notify_waiters();
    }

    /// Holds it, and waits for what is under way.
    pub(super) async fn hold(&self) {
        *self.shared.device.lock() = None;
        loop {
            let drained = self.shared.drained.notified();
            if self.shared.in_flight.load(Ordering::SeqCst) == 0 {
                return;
            }
            drained.await;
        }
    }

    /// How many reads and writes were answered.
    pub(super) fn answered(&self) -> [u64; 2] {
        [&self.shared.reads, &self.shared.writes].map(|counter| counter.load(Ordering::Relaxed))
    }
}

impl Shared {
    async fn work(&self) {
        loop {
            let let_run = self.let_run.notified();
            let running = self.device.lock().clone();
            let Some(running) = running else {
                let_run.await;
                continue;
            };
            self.in_flight.fetch_add(1, Ordering::SeqCst);
            if let Err(error) = self.ask(&running).await {
                self.world.violate(Invariant::AckedWrite, format!("a request of the guest's fails: {}", error.chain()));
            }
            self.in_flight.fetch_sub(1, Ordering::SeqCst);
            self.drained.notify_waiters();
        }
    }

    async fn ask(&self, device: &Device) -> block::Result<()> {
        let (verb, offset, block, before) = loop {
            let step = self.load.lock().next(&self.rng).expect("the load has no end");
            let block = (step.request.offset / BLOCK_BYTES) as usize;
            let mut known = self.known.lock();
            let before = known[block];
            if step.request.verb == Verb::Read {
                break (Verb::Read, step.request.offset, block, before);
            }
            // Of two writes at once nobody knows which is the last.
            if before.asked == before.answered {
                known[block].asked += 1;
                break (Verb::Write, step.request.offset, block, known[block]);
            }
        };
        if verb == Verb::Write {
            let mut bytes = vec![0; BLOCK_BYTES as usize];
            bytes[..4].copy_from_slice(&before.asked.to_le_bytes());
            device.write(Mutation::data(Bytes(offset), Data::copy_of(&bytes))).await?;
            self.known.lock()[block].answered = before.asked;
            self.writes.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        let bytes = device.read(Bytes(offset), Buffer::unpooled(BLOCK_BYTES as usize)).await?;
        let read = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes"));
        let after = self.known.lock()[block];
        if read < before.answered || read > after.asked {
            let what =
                format!("block {block} has write {read}; {} was answered, {} asked for", before.answered, after.asked);
            self.world.violate(Invariant::StableRead, what);
        }
        self.reads.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
