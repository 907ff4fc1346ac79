//! A storage array behind Fibre Channel: a mirrored write cache in front of striped disks.
//!
//! ```text
//!   write ─▶ link ─▶ controller ─▶ cache with room? ─yes─▶ done        cache ─▶ disks, in the background
//!   read  ─▶ link ─▶ controller ─▶ disks ─▶ controller ─▶ link ─▶ done
//! ```
//!
//! [`ArrayFigures::CX4_120`] stands for the EMC CX4-120 of the ESX paper (section 3), of which the paper states 8 Gbit/s
//! FC and no spindles. Fitted, and to what: the number of disks and their kind (14 of 15,000 rpm) to the IOPS that
//! figure 10 begins with (about 2600 reads and 1100 writes a second of 8 KiB with 16 outstanding); the controller's rate
//! to the offline copy of 38 GB from one array to another in 176 s (section 3.1). Write cache: 600 MB a pair of
//! processors (data sheet). A command costs 0.15 ms (assumed). The cache hits no reads: OLTP over 32 GB has no locality.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use env::Moment;

use super::channels::{Endings, Server};
use super::hard_disk::{HardDisk, HardDiskFigures};
use super::{Model, Raid0, Request, Ticket, Verb, transfer};

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
    /// Bytes a second through the controller.
    pub controller_rate: u64,
    /// What a command costs.
    pub command: Duration,
    /// Bytes of writes that are answered before they are on the disks.
    pub cache: u64,
}

impl ArrayFigures {
    /// See the module's head.
    pub const CX4_120: Self = Self {
        disk: HardDiskFigures::CHEETAH_15K.without_write_cache(),
        disks: 14,
        stripe: 64 << 10,
        link_rate: 800_000_000,
        controller_rate: 240_000_000,
        command: Duration::from_micros(150),
        cache: 600_000_000,
    };
}

/// Writes to the disks under way at once: enough for every disk's elevator to have a choice.
const DESTAGES_MAX_PER_DISK: usize = 4;

/// An array.
pub struct Array {
    figures: ArrayFigures,
    from_host: Server,
    to_host: Server,
    controller: Server,
    disks: Raid0,
    /// What has passed the controller and goes to the disks then.
    arriving: VecDeque<(Moment, Ticket, Request)>,
    cached: VecDeque<Request>,
    cached_bytes: u64,
    held: VecDeque<(Ticket, Request)>,
    /// Writes on their way to the disks; the tickets there are even, those of reads odd.
    destaging: HashMap<u64, u64>,
    reading: HashMap<u64, (Ticket, u64)>,
    count: u64,
    endings: Endings,
    disk_done: Vec<Ticket>,
}

impl Array {
    /// An idle array.
    #[must_use]
    pub fn new(figures: ArrayFigures) -> Self {
        let members = (0..figures.disks).map(|_| Box::new(HardDisk::new(figures.disk)) as Box<dyn Model>);
        Self {
            figures,
            from_host: Server::default(),
            to_host: Server::default(),
            controller: Server::default(),
            disks: Raid0::new(members.collect(), figures.stripe),
            arriving: VecDeque::new(),
            cached: VecDeque::new(),
            cached_bytes: 0,
            held: VecDeque::new(),
            destaging: HashMap::new(),
            reading: HashMap::new(),
            count: 0,
            endings: Endings::default(),
            disk_done: Vec::new(),
        }
    }

    /// What has come through the controller: reads go to the disks, writes into the cache.
    fn arrive(&mut self, now: Moment, ticket: Ticket, request: Request) {
        match request.verb {
            Verb::Read => {
                self.count += 1;
                let number = self.count * 2 + 1;
                self.reading.insert(number, (ticket, request.length));
                self.disks.submit(now, Ticket(number), request);
            }
            Verb::Write if self.cached_bytes > 0 && self.cached_bytes + request.length > self.figures.cache => {
                self.held.push_back((ticket, request));
            }
            Verb::Write => self.cache(now, ticket, request),
            // The cache is mirrored and has a battery: what is in it is durable.
            Verb::Flush => self.endings.add(now, ticket),
        }
    }

    fn cache(&mut self, now: Moment, ticket: Ticket, request: Request) {
        self.cached_bytes += request.length;
        self.cached.push_back(request);
        self.endings.add(now, ticket);
    }

    fn destage(&mut self, now: Moment) {
        while self.destaging.len() < self.figures.disks * DESTAGES_MAX_PER_DISK {
            let Some(request) = self.cached.pop_front() else { return };
            self.count += 1;
            let number = self.count * 2;
            self.destaging.insert(number, request.length);
            self.disks.submit(now, Ticket(number), request);
        }
    }

    fn end_on_disk(&mut self, now: Moment, number: u64) {
        if let Some((ticket, length)) = self.reading.remove(&number) {
            let passed = self.controller.serve(now, transfer(length, self.figures.controller_rate));
            self.endings.add(self.to_host.serve(passed, transfer(length, self.figures.link_rate)), ticket);
        } else if let Some(length) = self.destaging.remove(&number) {
            self.cached_bytes -= length;
            while let Some((ticket, request)) = self.held.front().copied() {
                if self.cached_bytes > 0 && self.cached_bytes + request.length > self.figures.cache {
                    break;
                }
                self.held.pop_front();
                self.cache(now, ticket, request);
            }
        }
    }
}

impl Model for Array {
    fn submit(&mut self, now: Moment, ticket: Ticket, request: Request) {
        let mut at = now + self.figures.command;
        if request.verb == Verb::Write {
            at = self.from_host.serve(at, transfer(request.length, self.figures.link_rate));
            at = self.controller.serve(at, transfer(request.length, self.figures.controller_rate));
        }
        let place = self.arriving.partition_point(|(earlier, ..)| *earlier <= at);
        self.arriving.insert(place, (at, ticket, request));
    }

    fn next(&self) -> Option<Moment> {
        let arrival = self.arriving.front().map(|(at, ..)| *at);
        [arrival, self.disks.next(), self.endings.next()].into_iter().flatten().min()
    }

    fn advance(&mut self, now: Moment, done: &mut Vec<Ticket>) {
        while let Some(next) = self.next().filter(|next| *next <= now) {
            while self.arriving.front().is_some_and(|(at, ..)| *at <= next) {
                if let Some((at, ticket, request)) = self.arriving.pop_front() {
                    self.arrive(at, ticket, request);
                }
            }
            let mut disk_done = std::mem::take(&mut self.disk_done);
            self.disks.advance(next, &mut disk_done);
            disk_done.drain(..).for_each(|part| self.end_on_disk(next, part.0));
            self.disk_done = disk_done;
            self.destage(next);
            while let Some((_, ticket)) = self.endings.take(next) {
                done.push(ticket);
            }
        }
    }
}
