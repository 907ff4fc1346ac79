//! How long a disk takes.

use std::time::Duration;

/// How fast a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// What every request takes.
    pub base: Duration,
    /// What every KiB takes on top.
    pub per_kib: Duration,
    /// Up to this is added at random.
    pub jitter: Duration,
    /// How many requests it serves at once.
    pub channels: usize,
}

impl Timing {
    /// Flash: 80 us and 0.5 us a KiB, eight requests at once.
    pub const FLASH: Self = Self {
        base: Duration::from_micros(80),
        per_kib: Duration::from_nanos(500),
        jitter: Duration::from_micros(40),
        channels: 8,
    };
    /// A slow disk: 2 ms and 8 us a KiB, two requests at once.
    pub const SLOW: Self = Self {
        base: Duration::from_millis(2),
        per_kib: Duration::from_micros(8),
        jitter: Duration::from_millis(6),
        channels: 2,
    };
    /// A disk whose head moves for every request: 4 ms and 4 us a KiB, one request after the other. It streams 125 MB/s in
    /// pieces of 1 MiB and takes 4 MB/s in pieces of 16 KiB.
    pub const MOVING_HEAD: Self = Self {
        base: Duration::from_millis(4),
        per_kib: Duration::from_micros(4),
        jitter: Duration::from_millis(1),
        channels: 1,
    };
}
