//! Devices that take a host's time: shared storage, and the partition of a host's flash.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use block::{BlockDevice, Buffer, Bytes, Device, Extent, ExtentStatus, Geometry, IoFuture, Mutation};
use env::{Env, EnvRef, Moment, Task};
use parking_lot::Mutex;
use sim::model::FlashFigures;
use sim::world::World;

use super::host::{Class, Host};

/// A block of the cache, and a request of the guest's.
pub(super) const BLOCK_BYTES: u64 = 4096;

tokio::task_local! {
    /// Set where blocks are copied from one host to another.
    static COPIES: ();
}

/// Runs `work`, and all that it spawns by a [`CopierEnv`], as a copy between hosts.
pub(super) async fn as_copier<T>(work: impl Future<Output = T>) -> T {
    COPIES.scope((), work).await
}

fn is_copier() -> bool {
    COPIES.try_with(|()| ()).is_ok()
}

/// The environment of one end of a transfer: what it spawns is the copier's. Its clock goes `scale` times slower than the world's: a
/// request stands for so many, and takes as many times longer. So what it measures and waits for is as many requests as without a scale.
pub(super) struct CopierEnv {
    pub(super) inner: EnvRef,
    pub(super) scale: u32,
}

impl Env for CopierEnv {
    fn now(&self) -> Moment {
        Moment(self.inner.now().0 / self.scale)
    }

    fn sleep(&self, span: Duration) -> Task {
        self.inner.sleep(span * self.scale)
    }

    fn spawn(&self, task: Task) {
        self.inner.spawn(Box::pin(as_copier(task)));
    }

    fn random(&self) -> u64 {
        self.inner.random()
    }

    fn wall_clock(&self) -> SystemTime {
        self.inner.wall_clock()
    }
}

/// What a request costs a host, in seconds of its time, unscaled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    /// To shared storage.
    pub(super) storage: f64,
    /// A read of the flash by the guest.
    pub(super) hit: f64,
    /// A write of the flash by the guest: a block that is admitted.
    pub(super) admission: f64,
    /// A block that is copied.
    pub(super) copy: f64,
}

impl Costs {
    const fn of(&self, class: Class, is_write: bool) -> f64 {
        match (class, is_write) {
            (Class::GuestFlash, false) => self.hit,
            (Class::GuestFlash, true) => self.admission,
            (Class::GuestStorage | Class::Warmer | Class::WarmerApart, _) => self.storage,
            (Class::Copier, _) => self.copy,
        }
    }
}

/// What a partition gives at most (section 4.3.1): its dies, one request after another on each.
pub(super) struct Ceiling {
    read: Duration,
    write: Duration,
    free_at: Mutex<Moment>,
}

impl Ceiling {
    /// Of `bytes` of a device, where one request stands for `scale`.
    pub(super) fn new(device: FlashFigures, bytes: u64, scale: u32) -> Self {
        let part = device.partition(bytes);
        let each = |page: Duration| page * scale / part.dies as u32;
        Self { read: each(part.read_page), write: each(part.program_page), free_at: Mutex::default() }
    }

    async fn pass(&self, world: &World, is_write: bool) {
        let until = {
            let mut free_at = self.free_at.lock();
            *free_at = world.now().max(*free_at) + if is_write { self.write } else { self.read };
            *free_at
        };
        world.sleep_until(until).await;
    }
}

/// How many requests were answered.
#[derive(Default)]
pub(super) struct Counts {
    reads: AtomicU64,
    writes: AtomicU64,
    copies: AtomicU64,
}

impl Counts {
    /// Reads by the guest or the warmer.
    pub(super) fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Writes by the guest; of a partition these are admissions.
    pub(super) fn writes(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }
}

/// A device behind a host's path.
pub(super) struct Paced {
    pub(super) world: World,
    pub(super) inner: Device,
    pub(super) host: Host,
    pub(super) class: Class,
    pub(super) costs: Costs,
    pub(super) scale: u32,
    pub(super) ceiling: Arc<Ceiling>,
    pub(super) counts: Arc<Counts>,
    /// What is before this are maps: EnhanceIO keeps those of a read-only cache in memory, so they cost nothing.
    pub(super) data_start: u64,
}

impl Paced {
    async fn pay(&self, offset: Bytes, is_write: bool) {
        if offset.get() < self.data_start {
            return;
        }
        // A block that is copied lies in a long request, which a partition's few dies do not hold up.
        let class = match self.class {
            Class::GuestFlash if is_copier() => Class::Copier,
            class => class,
        };
        self.host.serve(class, self.costs.of(class, is_write) * f64::from(self.scale)).await;
        let counter = match (class, is_write) {
            (Class::Copier, _) => &self.counts.copies,
            (_, false) => &self.counts.reads,
            (_, true) => &self.counts.writes,
        };
        if class != Class::Copier {
            self.ceiling.pass(&self.world, is_write).await;
        }
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

impl BlockDevice for Paced {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            self.pay(offset, false).await;
            self.inner.read(offset, buffer).await
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.pay(mutation.extent().offset, true).await;
            self.inner.write(mutation).await
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.inner.flush())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.inner.extents(extent))
    }
}
