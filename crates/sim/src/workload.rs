//! Loads that guests put on their disks, as streams of requests: what, where, and not before when.
//!
//! | load | what it stands for | figures |
//! |---|---|---|
//! | [`Oltp`] | Iometer's OLTP of the ESX paper (section 3) | 70 % reads, 8 KiB, uniform |
//! | [`Zoned`] | fio's `random_distribution=zoned`, as the Firepan paper has it (figure 5) | 80 % reads, 4 KiB; half of all in 5 % of the file, 30 % in 15 %, 20 % in 80 % |
//! | [`Zipf`] | fio's `zipf`, over zones laid at random | exponent, zones |
//! | [`Sequential`] | a stream, or Iometer's sequential mix of the dissertation (table 3.2) | 32 KiB, 60 % reads |
//! | [`FlushBursts`] | a database that writes its dirty pages back at checkpoints | a log in between |
//! | [`BootStorm`] | machines that boot from one image at nearly the same time | |
//! | [`Synthetic`] | published characteristics of Financial1 and 2 and WebSearch1 to 3. **Synthetic, not traces** | |
//! | [`Exchange`] | a mail server like the ESX paper's (figure 2) | Zipf's law, more towards the end of the disk |
//! | [`Shifted`] | any of them on a part of a volume | |
//! | [`Merged`] | several of them at once | |
//! | [`Replay`] | a trace: open loop (at its times) or closed loop (as fast as answers come) | |
//!
//! Who runs them: [`crate::bench`] against a bare model, [`crate::player`] against a device of the engine.

mod boot_storm;
mod exchange;
mod flush_bursts;
mod merged;
mod oltp;
mod ranks;
mod replay;
mod sequential;
mod shifted;
mod synthetic;
mod zipf;
mod zoned;

pub use boot_storm::BootStorm;
pub use exchange::{Exchange, ExchangeFigures};
pub use flush_bursts::FlushBursts;
pub use merged::Merged;
pub use oltp::Oltp;
pub use replay::Replay;
pub use sequential::Sequential;
pub use shifted::Shifted;
pub use synthetic::{Characteristics, Synthetic};
pub use zipf::Zipf;
pub use zoned::Zoned;

use std::time::Duration;

use crate::model::Request;
use crate::rng::Rng;

/// One request of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Not before this long after the load began. Zero in a closed loop.
    pub at: Duration,
    /// The request.
    pub request: Request,
}

/// A load.
pub trait Workload: Send {
    /// Its next request; `None` when it has no more.
    fn next(&mut self, rng: &Rng) -> Option<Step>;
}

impl Workload for Box<dyn Workload> {
    fn next(&mut self, rng: &Rng) -> Option<Step> {
        (**self).next(rng)
    }
}

/// A request as soon as there is room for it.
const fn at_once(request: Request) -> Option<Step> {
    Some(Step { at: Duration::ZERO, request })
}

/// A read or a write of `length` bytes.
fn read_or_write(reads: f64, offset: u64, length: u64, rng: &Rng) -> Request {
    if rng.chance(reads) { Request::read(offset, length) } else { Request::write(offset, length) }
}

#[cfg(test)]
mod tests;
