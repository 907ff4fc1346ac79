//! How long devices take: models of disks, flash, arrays and volumes on the network, without contents and without
//! faults.
//!
//! A [`Model`] is a plain structure that nobody awaits: requests go in at a moment, and it says when the next of them is
//! done. So it is tested by feeding it, an hour of it takes seconds ([`crate::bench`]), and models are made of models.
//! [`Volume`] puts contents beside a model and makes a device of both, which the engine runs on unchanged.
//!
//! Every model states its figures and where they are from in its module's head. What none of them has: faults (those of
//! [`crate::disk`] are where faults are tried), wear, garbage collection as events, temperature.

mod array;
mod channels;
pub mod contents;
mod cylinders;
mod flash;
mod groups;
mod hard_disk;
mod nfs;
mod page_cache;
mod path;
mod raid0;
mod volume;

pub use array::{Array, ArrayFigures};
pub use flash::{Flash, FlashFigures};
pub use groups::Groups;
pub use hard_disk::{HardDisk, HardDiskFigures};
pub use nfs::{Nfs, NfsFigures};
pub use page_cache::{PageCache, PageCacheFigures};
pub use path::Path;
pub use raid0::Raid0;
pub use volume::{Traffic, Volume};

use std::time::Duration;

use env::Moment;

/// What a request does to a device, as far as its time is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Reads bytes.
    Read,
    /// Writes bytes.
    Write,
    /// Makes durable what was written before.
    Flush,
}

/// A request to a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What it does.
    pub verb: Verb,
    /// Where, in bytes.
    pub offset: u64,
    /// How many bytes; zero for a flush.
    pub length: u64,
}

impl Request {
    /// A read.
    #[must_use]
    pub const fn read(offset: u64, length: u64) -> Self {
        Self { verb: Verb::Read, offset, length }
    }

    /// A write.
    #[must_use]
    pub const fn write(offset: u64, length: u64) -> Self {
        Self { verb: Verb::Write, offset, length }
    }

    /// A flush.
    #[must_use]
    pub const fn flush() -> Self {
        Self { verb: Verb::Flush, offset: 0, length: 0 }
    }

    /// The byte after its last.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.offset + self.length
    }
}

/// Names a request while it is under way. Whoever submits it chooses the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// A device as a matter of time: it takes requests and says when they are done.
///
/// Moments never go back from call to call, and whoever drives it calls [`advance`](Self::advance) at
/// [`next`](Self::next) at the latest: something inside may begin then.
pub trait Model: Send {
    /// Takes a request at `now`.
    fn submit(&mut self, now: Moment, ticket: Ticket, request: Request);

    /// When something will happen next, if anything will.
    fn next(&self) -> Option<Moment>;

    /// Lets everything up to `now` happen and adds the requests that are done to `done`, in the order of their ends.
    fn advance(&mut self, now: Moment, done: &mut Vec<Ticket>);
}

impl Model for Box<dyn Model> {
    fn submit(&mut self, now: Moment, ticket: Ticket, request: Request) {
        (**self).submit(now, ticket, request);
    }

    fn next(&self) -> Option<Moment> {
        (**self).next()
    }

    fn advance(&mut self, now: Moment, done: &mut Vec<Ticket>) {
        (**self).advance(now, done);
    }
}

/// How long `bytes` take at `rate` bytes a second.
fn transfer(bytes: u64, rate: u64) -> Duration {
    Duration::from_nanos((u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1))) as u64)
}

#[cfg(test)]
mod tests;
