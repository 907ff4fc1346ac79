//! Holds a device to a rate.

use block::{Buffer, Bytes, Device, Filter, IoFuture, Mutation, MutationKind};
use env::EnvRef;

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
