//! A storage array behind Fibre Channel: a mirrored write cache in front of striped disks.
//!
//! ```text
//!   write ─▶ link ─▶ controller ─▶ cache with room? ─yes─▶ done        cache ─▶ disks, in the background
//!   read  ─▶ cache, or disks ─▶ controller ─▶ link ─▶ done             a stream is read ahead into the cache
//! ```
//!
//! [`ArrayFigures::CX4_120`] stands for the EMC CX4-120 of the ESX paper (section 3). The paper states 8 Gbit/s FC and
//! no spindles. Fitted, and to what: the number of disks and their kind (14 of 15,000 rpm) are fitted to the IOPS that
//! figure 10 begins with. These are about 2600 reads and 1100 writes a second of 8 KiB with 16 outstanding. The rate at
//! which its processors write (each keeps a copy of the other's write cache) is fitted to section 3.1. There the
//! offline copy of 38 GB from one array to another takes 176 s. The rate at which they read is fitted to what mirroring
//! costs a guest, 34 % in the mean over all loads (section 5). A stream's read-ahead is fitted to the share of the disks that the paper's
//! copy leaves to 32 outstanding requests (figures 4 and 8). Write cache: 600 MB a pair of processors (data sheet), of
//! which four fifths may be dirty. Assumed: 0.15 ms a command.
//!
//! [`ArrayFigures::CX3_40`] stands for the CX3-40 of the Exchange runs, on which both volumes lie, each on six disks of
//! its own ([`Array::with_two_groups`]; stated). Its rate lets 350 GB be mirrored in about 1900 s (table 1). A command
//! takes what lets a write of 32 KiB take 0.78 ms without a migration (table 2). Its cache of 2 GB is assumed: a quarter
//! of the data sheet's 8 GB. So is the rate at which it reads.

use std::collections::VecDeque;
use std::time::Duration;

use env::Moment;

use super::channels::{Endings, Server};
use super::hard_disk::{HardDisk, HardDiskFigures};
use super::{Groups, Model, PageCache, PageCacheFigures, Raid0, Request, Ticket, Verb, transfer};
use crate::numbers::NumberMap;

/// What an array is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ArrayFigures {
    /// Its disks.
    pub disk: HardDiskFigures,
    /// How many of them.
    pub disks: usize,
    /// Bytes of a stripe.
    pub stripe: u64,
    /// Bytes a second over the host's link, each way.
    pub link_rate: u64,
    /// Bytes a second that the controllers read.
    pub read_rate: u64,
    /// Bytes a second that the controllers write: each keeps a copy of the other's write cache.
    pub write_rate: u64,
    /// What a command costs.
    pub command: Duration,
    /// Bytes of the cache, which holds what was read ahead and writes that are not yet on the disks.
    pub cache: u64,
    /// How many bytes of a stream are read ahead.
    pub read_ahead: u64,
}

impl ArrayFigures {
    /// See the module's head.
    pub const CX4_120: Self = Self {
        disk: HardDiskFigures::CHEETAH_15K.without_write_cache(),
        disks: 14,
        stripe: 64 << 10,
        link_rate: 800_000_000,
        read_rate: 255_000_000,
        write_rate: 232_000_000,
        command: Duration::from_micros(150),
        cache: 600_000_000,
        read_ahead: 16 << 20,
    };
    /// See the module's head.
    pub const CX3_40: Self = Self {
        disks: 6,
        read_rate: 300_000_000,
        write_rate: 215_000_000,
        command: Duration::from_micros(570),
        cache: 2_000_000_000,
        ..Self::CX4_120
    };
}

/// A page of the cache: the CLARiiON's default.
const PAGE_BYTES: u64 = 8192;
/// Writes to the disks under way at once: enough for every disk's elevator to have a choice.
const DESTAGES_MAX_PER_DISK: usize = 4;

/// An array.
pub struct Array {
    figures: ArrayFigures,
    from_host: Server,
    to_host: Server,
    reading: Server,
    writing: Server,
    store: PageCache,
    /// What has passed the controller and goes to the cache then.
    arriving: VecDeque<(Moment, Ticket, Request)>,
    under_way: NumberMap<Ticket, Request>,
    endings: Endings,
    stored: Vec<Ticket>,
}

impl Array {
    /// An idle array.
    #[must_use]
    pub fn new(figures: ArrayFigures) -> Self {
        Self::over(figures, Self::striped(&figures))
    }

    /// An idle array with two groups of disks of their own, the second one's addresses from `group_bytes` on. They share
    /// link, processors and cache.
    #[must_use]
    pub fn with_two_groups(figures: ArrayFigures, group_bytes: u64) -> Self {
        let groups = [(); 2].map(|()| Box::new(Self::striped(&figures)) as Box<dyn Model>);
        Self::over(figures, Groups::new(groups.into(), group_bytes))
    }

    fn striped(figures: &ArrayFigures) -> Raid0 {
        let members = (0..figures.disks).map(|_| Box::new(HardDisk::new(figures.disk)) as Box<dyn Model>);
        Raid0::new(members.collect(), figures.stripe)
    }

    fn over(figures: ArrayFigures, disks: impl Model + 'static) -> Self {
        let cache = PageCacheFigures {
            capacity: figures.cache,
            page_bytes: PAGE_BYTES,
            // What is written goes to the disks at once.
            dirty_background: 0,
            dirty_max: figures.cache / 5 * 4,
            read_ahead: figures.read_ahead,
            page: Duration::ZERO,
            writebacks_max: figures.disks * DESTAGES_MAX_PER_DISK,
        };
        Self {
            figures,
            from_host: Server::default(),
            to_host: Server::default(),
            reading: Server::default(),
            writing: Server::default(),
            store: PageCache::new(cache, disks),
            arriving: VecDeque::new(),
            under_way: NumberMap::default(),
            endings: Endings::default(),
            stored: Vec::new(),
        }
    }

    /// The cache or the disks have done what they were asked.
    fn end_in_store(&mut self, now: Moment, ticket: Ticket) {
        let request = self.under_way.remove(&ticket).expect("what the cache did was asked of it");
        if request.verb == Verb::Write {
            return self.endings.add(now, ticket);
        }
        let passed = self.reading.serve(now, transfer(request.length, self.figures.read_rate));
        self.endings.add(self.to_host.serve(passed, transfer(request.length, self.figures.link_rate)), ticket);
    }
}

impl Model for Array {
    fn submit(&mut self, now: Moment, ticket: Ticket, request: Request) {
        let mut at = now + self.figures.command;
        match request.verb {
            Verb::Read => {}
            Verb::Write => {
                at = self.from_host.serve(at, transfer(request.length, self.figures.link_rate));
                at = self.writing.serve(at, transfer(request.length, self.figures.write_rate));
            }
            // The cache is mirrored and has a battery: what is in it is durable.
            Verb::Flush => return self.endings.add(at, ticket),
        }
        let place = self.arriving.partition_point(|(earlier, ..)| *earlier <= at);
        self.arriving.insert(place, (at, ticket, request));
    }

    fn next(&self) -> Option<Moment> {
        let arrival = self.arriving.front().map(|(at, ..)| *at);
        [arrival, self.store.next(), self.endings.next()].into_iter().flatten().min()
    }

    fn advance(&mut self, now: Moment, done: &mut Vec<Ticket>) {
        while let Some(next) = self.next().filter(|next| *next <= now) {
            while let Some((at, ticket, request)) = self.arriving.front().copied().filter(|(at, ..)| *at <= next) {
                self.arriving.pop_front();
                self.under_way.insert(ticket, request);
                self.store.submit(at, ticket, request);
            }
            let mut stored = std::mem::take(&mut self.stored);
            self.store.advance(next, &mut stored);
            stored.drain(..).for_each(|ticket| self.end_in_store(next, ticket));
            self.stored = stored;
            while let Some((_, ticket)) = self.endings.take(next) {
                done.push(ticket);
            }
        }
    }
}
