//! The host that a guest leaves: processors for the migration's threads, ports of its network cards, and what the paper's threads
//! wait for beside them.
//!
//! Each is a queue: who comes takes its turn. The engine knows nothing of it. It is held back through its own `Pace`, which it
//! asks twice. After a frame was made it pays the processor for what was read. Before the frame is sent it pays the processor for
//! what is encrypted, and the port.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use env::{EnvRef, Moment};
use filters::TokenBucket;
use futures::future::BoxFuture;
use memory::{PAGE_BYTES, Pace};
use migrate::stream::{EndUsage, SpareBandwidth, USAGE_INTERVAL, WIRE_OVERHEAD};
use parking_lot::Mutex;
use sim::world::World;

use super::guest::Guest;

/// A MByte of the paper's, in bytes.
pub(super) const MIB: f64 = (1 << 20) as f64;
/// What one connection gets of a port (6.1), in bytes a second.
pub(super) const PORT_BYTES_PER_SECOND: f64 = 117.6 * MIB;

/// How long things take, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Costs {
    /// A processor's time for a byte that is read of the guest.
    pub(super) of_byte_read: f64,
    /// A processor's time for a byte that is sent.
    pub(super) of_byte_sent: f64,
    /// What a consumer waits for a byte that is sent, without a processor or the port.
    pub(super) wait_of_byte_sent: f64,
    /// How long the address space is held for a page, by one consumer at a time.
    pub(super) lock_of_page: f64,
}

/// Somebody else's traffic on the first port, in bytes a second.
pub(super) const WEB_BYTES_PER_SECOND: f64 = 101.7 * MIB;

/// The host.
pub(super) struct Host {
    env: EnvRef,
    guest: Arc<Guest>,
    costs: Costs,
    cores: Vec<Queue>,
    ports: Vec<Queue>,
    address_space: Queue,
    /// Rates that each port's streams keep to.
    limits: Vec<TokenBucket>,
    sent_bytes: Vec<AtomicU64>,
    cpu_nanoseconds: AtomicU64,
    /// What the web server beside it has sent, in bytes.
    web_bytes: AtomicU64,
}

impl Host {
    pub(super) fn new(env: &EnvRef, guest: &Arc<Guest>, costs: Costs, (cores, ports): (usize, usize)) -> Arc<Self> {
        let queues = |count: usize| (0..count).map(|_| Queue::default()).collect();
        Arc::new(Self {
            guest: Arc::clone(guest),
            costs,
            cores: queues(cores),
            ports: queues(ports),
            address_space: Queue::default(),
            limits: (0..ports).map(|_| TokenBucket::new(Arc::clone(env), None)).collect(),
            sent_bytes: (0..ports).map(|_| AtomicU64::new(0)).collect(),
            cpu_nanoseconds: AtomicU64::new(0),
            web_bytes: AtomicU64::new(0),
            env: Arc::clone(env),
        })
    }

    /// Processor time that was taken, in seconds.
    pub(super) fn cpu_seconds(&self) -> f64 {
        self.cpu_nanoseconds.load(Ordering::Relaxed) as f64 / 1e9
    }

    /// What went through each port, in bytes.
    pub(super) fn sent_bytes(&self) -> Vec<u64> {
        self.sent_bytes.iter().map(|bytes| bytes.load(Ordering::Relaxed)).collect()
    }

    /// What the web server has sent, in bytes.
    pub(super) fn web_bytes(&self) -> u64 {
        self.web_bytes.load(Ordering::Relaxed)
    }

    /// Puts a web server on the first port. It gets what it wants or what the migration leaves it, half of the port at least. Each second
    /// the ports' counters are read, and the migration keeps to what they leave (section 3.2).
    pub(super) fn share_with_web_server(self: &Arc<Self>, world: &World) {
        let (host, timer) = (Arc::clone(self), world.clone());
        world.spawn(async move {
            let mut spare: Vec<SpareBandwidth> = host.ports.iter().map(|_| SpareBandwidth::new()).collect();
            let mut before = host.sent_bytes();
            loop {
                timer.sleep(USAGE_INTERVAL).await;
                let seconds = USAGE_INTERVAL.as_secs_f64();
                let sent = host.sent_bytes();
                for (port, spare) in spare.iter_mut().enumerate() {
                    let own = ((sent[port] - before[port]) as f64 / seconds) as u64;
                    let web = if port == 0 { host.web_server(own as f64, seconds) } else { 0.0 };
                    let end = EndUsage {
                        capacity: PORT_BYTES_PER_SECOND as u64,
                        // What is counted as ours is payload; the model has no headers.
                        carried: (own as f64 * WIRE_OVERHEAD + web) as u64,
                        ours: own,
                        sharers: 1,
                    };
                    host.limits[port].set_rate(spare.step(&[end], own));
                }
                before = sent;
            }
        });
    }

    fn web_server(&self, own: f64, seconds: f64) -> f64 {
        let left = (PORT_BYTES_PER_SECOND - own).max(PORT_BYTES_PER_SECOND / 2.0);
        let web = WEB_BYTES_PER_SECOND.min(left);
        self.web_bytes.fetch_add((web * seconds) as u64, Ordering::Relaxed);
        web
    }

    /// Takes a processor.
    async fn work(&self, stream: u16, seconds: f64) {
        self.cpu_nanoseconds.fetch_add((seconds * 1e9) as u64, Ordering::Relaxed);
        self.cores[usize::from(stream) % self.cores.len()].take(&self.env, seconds).await;
    }

    async fn send(&self, stream: u16, bytes: u64) {
        let (costs, length) = (self.costs, bytes as f64);
        if costs.lock_of_page > 0.0 {
            self.address_space.take(&self.env, costs.lock_of_page * length / PAGE_BYTES as f64).await;
        }
        self.work(stream, costs.of_byte_sent * length).await;
        self.env.sleep(Duration::from_secs_f64(costs.wait_of_byte_sent * length)).await;
        let port = usize::from(stream) % self.ports.len();
        self.limits[port].acquire(bytes).await;
        self.ports[port].take(&self.env, length / PORT_BYTES_PER_SECOND).await;
        self.sent_bytes[port].fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Pace for Host {
    fn before_send(&self, stream: u16, bytes: u64) -> BoxFuture<'_, ()> {
        Box::pin(self.send(stream, bytes))
    }

    fn after_work(&self, stream: u16, _: Duration) -> BoxFuture<'_, ()> {
        // Nobody else has run since the consumer read its pages.
        let read = self.guest.take_read_bytes();
        Box::pin(self.work(stream, self.costs.of_byte_read * read as f64))
    }
}

/// Something that one at a time uses.
#[derive(Default)]
struct Queue {
    free_at: Mutex<Duration>,
}

impl Queue {
    async fn take(&self, env: &EnvRef, seconds: f64) {
        if seconds <= 0.0 {
            return;
        }
        let end = {
            let mut free_at = self.free_at.lock();
            *free_at = env.now().0.max(*free_at) + Duration::from_secs_f64(seconds);
            *free_at
        };
        env.sleep(Moment(end).since(env.now())).await;
    }
}
