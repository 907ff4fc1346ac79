//! Plays loads on devices of the engine, and knows what they may read.
//!
//! The guest of scenarios ([`crate::guest`]) knows every sector of a small volume and all that can become of it. This
//! one is for volumes of any size. It remembers only the blocks that it has written. It checks every whole block that
//! it reads against them as a register (the rule is in `knowledge`). No request of it may fail.

mod knowledge;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use block::{BufferPool, Bytes, Device, Extent, Mutation};
use env::Moment;
use filters::LatencyHistogram;
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use crate::bench::Tally;
use crate::model::contents::{BLOCK_BYTES, Origin, fill};
use crate::model::{Request, Verb};
use crate::rng::Rng;
use crate::workload::Workload;
use crate::world::{Invariant, World};
use knowledge::Knowledge;

/// A load that runs. Dropping it does not stop it.
pub struct Player {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    world: World,
    device: Device,
    rng: Rng,
    pool: BufferPool,
    began: Moment,
    workload: Mutex<Box<dyn Workload>>,
    knowledge: Mutex<Knowledge>,
    stopped: AtomicBool,
    tally: Mutex<Window>,
}

/// What was answered since it was last taken.
struct Window {
    since: Moment,
    tally: Tally,
}

impl Player {
    /// Puts `workload` on `device`, up to `outstanding` requests at once. The device holds `origin`, or what other
    /// players have left where this one reads nothing.
    #[must_use]
    pub fn start(
        world: &World,
        name: &str,
        device: Device,
        origin: Origin,
        workload: impl Workload + 'static,
        outstanding: usize,
    ) -> Self {
        let began = world.now();
        let shared = Arc::new(Shared {
            world: world.clone(),
            device,
            rng: world.rng(name),
            pool: BufferPool::new(Bytes::mib(256)),
            began,
            workload: Mutex::new(Box::new(workload)),
            knowledge: Mutex::new(Knowledge::new(origin)),
            stopped: AtomicBool::new(false),
            tally: Mutex::new(Window { since: began, tally: Tally::default() }),
        });
        let workers = (0..outstanding).map(|_| {
            let shared = Arc::clone(&shared);
            world.spawn(async move { shared.work().await })
        });
        let workers = workers.collect();
        Self { shared, workers }
    }

    /// What was answered since this was last called.
    #[must_use]
    pub fn take(&self) -> Tally {
        let now = self.shared.world.now();
        let mut window = self.shared.tally.lock();
        let span = now - window.since;
        window.since = now;
        Tally { span, ..std::mem::take(&mut window.tally) }
    }

    /// Lets it end what it has asked for, and no more.
    pub async fn stop(self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        for worker in self.workers {
            // A worker that panicked has said so.
            let _ = worker.await;
        }
    }

    /// Waits until it has no more requests.
    pub async fn finish(self) {
        for worker in self.workers {
            // A worker that panicked has said so.
            let _ = worker.await;
        }
    }
}

/// The latency that 99 of 100 requests of `latency` do not exceed, in milliseconds.
#[must_use]
pub fn p99_ms(latency: &LatencyHistogram) -> f64 {
    latency.quantile(0.99).as_secs_f64() * 1e3
}

impl Shared {
    async fn work(&self) {
        while !self.stopped.load(Ordering::Relaxed) {
            let step = self.workload.lock().next(&self.rng);
            let Some(step) = step else { return };
            if step.at > Duration::ZERO {
                self.world.sleep_until(self.began + step.at).await;
            }
            let asked = self.world.now();
            match step.request.verb {
                Verb::Read => self.read(&step.request).await,
                Verb::Write => self.write(&step.request).await,
                Verb::Flush => self.judge("flush", self.device.flush().await),
            }
            let took = self.world.now() - asked;
            self.tally.lock().tally.add(step.request.verb, step.request.length, took);
        }
    }

    fn judge<T>(&self, what: &str, answer: block::Result<T>) {
        if let Err(error) = answer {
            self.world.violate(Invariant::CancelSafe, format!("a player's {what} failed: {}", error.chain()));
        }
    }

    async fn read(&self, request: &Request) {
        let ticket = self.knowledge.lock().begin();
        let buffer = self.pool.acquire(request.length as usize).await;
        let answer = self.device.read(Bytes(request.offset), buffer).await;
        let mut knowledge = self.knowledge.lock();
        if let Ok(buffer) = &answer
            && let Err(what) = knowledge.check(ticket, request.offset, buffer)
        {
            self.world.violate(Invariant::StableRead, what);
        }
        knowledge.end(ticket);
        drop(knowledge);
        self.judge("read", answer);
    }

    async fn write(&self, request: &Request) {
        let extent = Extent::new(Bytes(request.offset), Bytes(request.length));
        let mut buffer = self.pool.acquire(extent.length.as_usize()).await;
        let (ticket, number) = self.knowledge.lock().begin_write(extent);
        for piece in extent.split_at_multiples(BLOCK_BYTES) {
            let start = (piece.offset - extent.offset).as_usize();
            let word = knowledge::word(number, piece.offset.0 / BLOCK_BYTES);
            fill(word, piece.offset.0 % BLOCK_BYTES, &mut buffer[start..start + piece.length.as_usize()]);
        }
        let answer = self.device.write(Mutation::data(extent.offset, buffer.freeze())).await;
        self.knowledge.lock().end_write(ticket, number, extent);
        self.judge("write", answer);
    }
}
