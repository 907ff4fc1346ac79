//! Holds a device to a rate, or a volume to a limit that can be changed while it is used.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::{Buffer, Bytes, Device, Filter, IoFuture, Mutation, MutationKind};
use env::{EnvRef, Task, timeout};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::TokenBucket;

/// Lets reads and data writes together pass at a number of bytes a second. Zeroes and discards move no data and pass.
pub struct Throttle {
    lower: Device,
    bucket: TokenBucket,
}

impl Throttle {
    /// `lower`, held to `bytes_per_second`.
    #[must_use]
    pub fn new(lower: Device, env: EnvRef, bytes_per_second: u64) -> Self {
        Self { lower, bucket: TokenBucket::new(env, Some(bytes_per_second)) }
    }
}

impl Filter for Throttle {
    fn lower(&self) -> &Device {
        &self.lower
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            self.bucket.acquire(buffer.len() as u64).await;
            self.lower.read(offset, buffer).await
        })
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(async move {
            if let MutationKind::Data(data) = mutation.kind() {
                self.bucket.acquire(data.len() as u64).await;
            }
            self.lower.write(mutation).await
        })
    }
}

/// What a volume's requests are held to. By default to nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Requests a second: reads, writes, zeroes and discards. None for no limit; zero counts as one.
    pub iops: Option<u64>,
    /// Bytes of reads and data writes a second. None for no limit; zero counts as one.
    pub bytes_per_second: Option<u64>,
}

/// A limit of a volume's requests that can be changed while they run. Clones are the same limit.
///
/// A request takes its tokens when it arrives and waits until they are paid. So the rate holds over any span longer
/// than a twentieth of a second. A change lets those go that wait; what they took stays a debt, paid at the new rate.
#[derive(Clone)]
pub struct RateLimit {
    shared: Arc<Limit>,
}

struct Limit {
    env: EnvRef,
    /// Whether there is any limit: all that a request looks at while there is none.
    is_limited: AtomicBool,
    limits: Mutex<RateLimits>,
    requests: TokenBucket,
    bytes: TokenBucket,
    changed: Notify,
}

impl RateLimit {
    /// No limit yet.
    #[must_use]
    pub fn new(env: EnvRef) -> Self {
        let bucket = || TokenBucket::new(Arc::clone(&env), None);
        let (requests, bytes) = (bucket(), bucket());
        let limit = Limit {
            env,
            is_limited: AtomicBool::new(false),
            limits: Mutex::default(),
            requests,
            bytes,
            changed: Notify::new(),
        };
        Self { shared: Arc::new(limit) }
    }

    /// Holds requests to `limits` from now on. If they are others than before, those that wait go on at once.
    pub fn set(&self, limits: RateLimits) {
        let mut now = self.shared.limits.lock();
        if *now == limits {
            return;
        }
        *now = limits;
        self.shared.requests.set_rate(limits.iops);
        self.shared.bytes.set_rate(limits.bytes_per_second);
        self.shared.is_limited.store(limits != RateLimits::default(), Ordering::Relaxed);
        self.shared.changed.notify_waiters();
    }

    /// What requests are held to.
    #[must_use]
    pub fn limits(&self) -> RateLimits {
        *self.shared.limits.lock()
    }

    /// The wait of a request that moves `bytes`; none if it need not wait.
    pub(crate) fn admit(&self, bytes: u64) -> Option<Task> {
        if !self.shared.is_limited.load(Ordering::Relaxed) {
            return None;
        }
        let shared = Arc::clone(&self.shared);
        Some(Box::pin(async move {
            // Before the look at the rates, so that no change is missed.
            let changed = shared.changed.notified();
            let wait = shared.requests.take(1).max(shared.bytes.take(bytes));
            if !wait.is_zero() {
                // Whether it is paid or the limit has changed, the request goes on.
                let _ = timeout(&*shared.env, wait, changed).await;
            }
        }))
    }
}

impl std::fmt::Debug for RateLimit {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "RateLimit({:?})", self.limits())
    }
}

#[cfg(test)]
mod tests;
