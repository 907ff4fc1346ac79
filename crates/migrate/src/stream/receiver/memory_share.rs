//! Memory of one session: a share of its own, and what there is of a common pool.
//!
//! A session whose disk hangs, or whose sender takes no answers, keeps what it has. It may have all of the common pool; the others
//! go on with their shares.

use block::{Buffer, BufferPool, Bytes};
use futures::future::{Either, select};
use std::pin::pin;

pub(super) struct Share {
    own: BufferPool,
    common: BufferPool,
}

impl Share {
    pub(super) fn new(own: Bytes, common: &BufferPool) -> Self {
        Self { own: BufferPool::new(own), common: common.clone() }
    }

    /// How many bytes of its own are in use.
    pub(super) fn own_in_use(&self) -> Bytes {
        self.own.in_use()
    }

    /// A buffer of `length` bytes, if there is one at once.
    pub(super) fn try_acquire(&self, length: usize) -> Option<Buffer> {
        self.own.try_acquire(length).or_else(|| self.fits(length).then(|| self.common.try_acquire(length))?)
    }

    /// A buffer of `length` bytes, from wherever there is one first.
    pub(super) async fn acquire(&self, length: usize) -> Buffer {
        if !self.fits(length) {
            return self.own.acquire(length).await;
        }
        match select(pin!(self.own.acquire(length)), pin!(self.common.acquire(length))).await {
            Either::Left((buffer, _)) | Either::Right((buffer, _)) => buffer,
        }
    }

    /// Two of them, from the same place.
    pub(super) async fn acquire_two(&self, length: usize) -> (Buffer, Buffer) {
        if !self.fits(2 * length) {
            return self.own.acquire_two(length).await;
        }
        match select(pin!(self.own.acquire_two(length)), pin!(self.common.acquire_two(length))).await {
            Either::Left((two, _)) | Either::Right((two, _)) => two,
        }
    }

    /// Whether the common pool can ever have so much.
    fn fits(&self, length: usize) -> bool {
        // Buffers are rounded up to a power of two at most.
        2 * length as u64 <= self.common.limit().get()
    }
}
