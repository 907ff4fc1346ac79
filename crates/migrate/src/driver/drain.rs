//! Emptying an asynchronous mirror's buffer before the switchover, without one guest write that waits for all of it.
//!
//! The driver takes the buffer's room for itself piece by piece, in turn with the guest's writes. So the guest has less
//! and less room, and each write waits for less. When the last room is taken, writes are mirrored at once, and what is
//! still buffered is written to the target.

use std::future::Future;
use std::pin::{Pin, pin};

use block::Buffer;
use futures::future::{Either, select};

use super::{Driver, TICK};
use crate::Event;

/// How much room is taken at a time.
const STEP_BYTES: usize = 64 << 10;

impl Driver {
    /// Guest writes are buffered from now on, if they are at all.
    pub(super) fn buffer_again(&self) {
        if self.mirror.write_buffer.is_some() {
            self.mirror.write_through(false);
        }
    }

    /// Empties the buffer; what the guest is answered after that is on both sides. Gives what ends that early.
    pub(super) async fn drain(&mut self) -> Option<Event> {
        let mirror = std::sync::Arc::clone(&self.mirror);
        let room = mirror.write_buffer.as_ref()?;
        let began = self.env.now();
        // Room is given in the order of asking: a write that has asked for the most must get it before the rest is taken.
        let wanted = room.pool.limit().0 - room.write_bytes_max();
        let mut taken: Vec<Buffer> = Vec::new();
        while (taken.len() * STEP_BYTES) as u64 + STEP_BYTES as u64 <= wanted {
            let piece = pin!(room.pool.acquire(STEP_BYTES));
            match self.meanwhile(piece).await {
                Ok(piece) => taken.push(piece),
                Err(event) => return Some(event),
            }
        }
        mirror.write_through(true);
        if let Err(event) = self.meanwhile(pin!(mirror.drained())).await {
            return Some(event);
        }
        let took = self.env.now().since(began);
        self.statistics.switchover.drain_us = super::switchover::micros(took);
        None
    }

    /// Waits for `work`, and gives what ends that early instead.
    pub(super) async fn meanwhile<T>(&mut self, mut work: Pin<&mut impl Future<Output = T>>) -> Result<T, Event> {
        loop {
            if let Some(event) = self.demand() {
                return Err(event);
            }
            if let Either::Left((done, _)) = select(work.as_mut(), pin!(self.wait(TICK))).await {
                return Ok(done);
            }
            self.tick();
        }
    }
}
