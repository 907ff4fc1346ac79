//! What every device must do, as one body of tests. [`conformance`] runs it against any [`Device`]: a file, a simulated
//! disk, an NBD client and a whole stack of filters alike.
//!
//! ```no_run
//! # use transhume_block as block;
//! # async fn example() {
//! use block::{Device, MemDevice, testing::conformance};
//! conformance(1, async |size| Device::new("memory", MemDevice::new(size))).await;
//! # }
//! ```
//!
//! Everything random comes from the seed; a failure names it.

mod concurrent;
mod model;
mod random;
mod sequential;

use std::future::Future;
use std::panic::Location;

use crate::{Bytes, Device};

pub use model::Model;
pub use random::Random;

/// The sizes that a device is asked to have: whole blocks, an odd number of sectors, and no multiple of anything.
const SIZES: [Bytes; 3] = [Bytes(1 << 20), Bytes((700 << 10) + 3 * 512), Bytes(300_001)];

/// Runs the whole body against devices from `make`. It is asked for a device of about a size and gives a new one that
/// reads as zeroes. A device that cannot have that size has the nearest that it can.
///
/// # Panics
/// If a device does not conform.
#[track_caller]
pub fn conformance(seed: u64, make: impl AsyncFn(Bytes) -> Device) -> impl Future<Output = ()> {
    let caller = Location::caller();
    async move {
        for (index, size) in SIZES.into_iter().enumerate() {
            let seed = seed.wrapping_mul(0x9e37_79b9).wrapping_add(index as u64);
            let device = make(size).await;
            let what = format!("{} of {}, seed {seed}, asked at {caller}", device.name(), device.size());
            let mut run = Run { model: Model::new(&device), random: Random::new(seed), device, what };
            run.all().await;
        }
    }
}

/// One device being tested, and what it should hold.
struct Run {
    device: Device,
    model: Model,
    random: Random,
    what: String,
}

impl Run {
    async fn all(&mut self) {
        self.reads_zero_at_first().await;
        self.edges().await;
        self.random_mutations(200).await;
        self.disjoint_requests_do_not_disturb_each_other().await;
        self.overlapping_writes_land_in_some_order().await;
        self.zeroes_over_the_whole_device().await;
        self.random_mutations(50).await;
        self.bad_requests_are_refused_and_change_nothing().await;
    }
}

#[cfg(test)]
mod tests;
