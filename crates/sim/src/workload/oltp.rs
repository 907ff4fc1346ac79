//! Transactions: small requests anywhere.

use super::{Step, Workload, at_once, read_or_write};
use crate::rng::Rng;

/// Uniformly random reads and writes of one size.
#[derive(Clone, Copy, Debug)]
pub struct Oltp {
    size: u64,
    length: u64,
    reads: f64,
}

impl Oltp {
    /// Iometer's OLTP of the ESX paper over a volume of `size` bytes: 70 % reads of 8 KiB.
    #[must_use]
    pub const fn iometer(size: u64) -> Self {
        Self { size, length: 8192, reads: 0.7 }
    }

    /// Requests of `length` bytes over `size`, the part `reads` of them reading.
    #[must_use]
    pub const fn new(size: u64, length: u64, reads: f64) -> Self {
        Self { size, length, reads }
    }
}

impl Workload for Oltp {
    fn next(&mut self, rng: &Rng) -> Option<Step> {
        let offset = rng.below(self.size / self.length) * self.length;
        at_once(read_or_write(self.reads, offset, self.length, rng))
    }
}
