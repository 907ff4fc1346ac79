//! Many machines that boot at nearly the same time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use super::{Step, Workload};
use crate::model::Request;
use crate::rng::Rng;

/// Machines that begin to boot within a while. Each reads its part of the image in runs of 64 KiB and single blocks of
/// 4 KiB, half of the requests each. It writes a block for every twenty requests (logs). All read the same image; each
/// writes to an area of 64 MiB of its own behind it. Thinking times between requests are up to twice their mean.
#[derive(Clone, Debug)]
pub struct BootStorm {
    image_bytes: u64,
    think: Duration,
    /// The next request of each machine: when, which, how many are left, and where its run goes on.
    machines: BinaryHeap<Reverse<(Duration, u64, u64, u64)>>,
}

const RUN_BYTES: u64 = 64 << 10;
const BLOCK_BYTES: u64 = 4096;
const AREA_BYTES: u64 = 64 << 20;

impl BootStorm {
    /// `machines` of them, beginning within `spread`; each makes `requests` requests over `span`.
    #[must_use]
    pub fn new(image_bytes: u64, machines: u64, spread: Duration, requests: u64, span: Duration, rng: &Rng) -> Self {
        let starts = (0..machines).map(|machine| {
            let place = rng.below(image_bytes / RUN_BYTES) * RUN_BYTES;
            Reverse((rng.up_to(spread), machine, requests, place))
        });
        let think = span.div_f64(requests.max(1) as f64);
        Self { image_bytes, think, machines: starts.collect() }
    }

    /// How large the volume has to be.
    #[must_use]
    pub const fn size(image_bytes: u64, machines: u64) -> u64 {
        image_bytes + machines * AREA_BYTES
    }
}

impl Workload for BootStorm {
    fn next(&mut self, rng: &Rng) -> Option<Step> {
        let Reverse((at, machine, left, mut place)) = self.machines.pop()?;
        let request = if rng.chance(0.05) {
            let area = self.image_bytes + machine * AREA_BYTES;
            Request::write(area + rng.below(AREA_BYTES / BLOCK_BYTES) * BLOCK_BYTES, BLOCK_BYTES)
        } else if rng.chance(0.5) {
            let request = Request::read(place, RUN_BYTES);
            place += RUN_BYTES;
            // A file ends and another begins.
            if place + RUN_BYTES > self.image_bytes || rng.chance(0.1) {
                place = rng.below(self.image_bytes / RUN_BYTES) * RUN_BYTES;
            }
            request
        } else {
            Request::read(rng.below(self.image_bytes / BLOCK_BYTES) * BLOCK_BYTES, BLOCK_BYTES)
        };
        if left > 1 {
            self.machines.push(Reverse((at + rng.up_to(self.think * 2), machine, left - 1, place)));
        }
        Some(Step { at, request })
    }
}
