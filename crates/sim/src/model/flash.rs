//! Flash: a controller, parallel dies, a write buffer, an interface; reads and writes are not alike.
//!
//! ```text
//!   request ─▶ controller (one command at a time) ─▶ dies (4 KiB pages in turn, each die one at a time) ─▶ interface ─▶ done
//!   write   ─▶ controller ─▶ interface ─▶ buffer ─▶ done; the dies program it later. Without room it waits for them.
//! ```
//!
//! | figure | SATA | NVMe | from |
//! |---|--:|--:|---|
//! | device | Intel 320 80 GB (SSDSA2CW080), the dissertation's surrogate | 512 GB, Samsung 970 PRO class, as in the Firepan paper (4.1 names size and interface only) | |
//! | random reads of 4 KiB | 38,000 IOPS | 370,000 IOPS | data sheets |
//! | random writes of 4 KiB | 10,000 IOPS | 370,000 IOPS | data sheets; the second says 500,000, the model's controller has one limit for both |
//! | sequential | 270 and 90 MB/s | 3,500 and 2,300 MB/s | data sheets |
//! | one read of 4 KiB | 77 us | 65 us | follows; data sheets say 75 us and nothing |
//! | dies that work at once | 10 | 64 | channels of the first; assumed |
//! | write buffer | 1 MiB | 64 MiB | assumed |
//!
//! A partition gets as many dies as its part of the device, rounded up (Firepan paper, 4.3.1: a small partition cannot use
//! the device's parallelism). That a partition gets exactly its part is assumed, and agrees with the paper. The paper's
//! cache of 10 GB on 512 gives 9,200 hits and takes 6,000 fills a second. These keep one die busy for 1.2 s of every
//! second. A program delays reads of the same die. Short writes cost [`FlashFigures::short_write_factor`] times as much
//! of the dies as long ones. This models garbage collection as an average and never as an event.

use std::time::Duration;

use env::Moment;

use super::channels::{Endings, Server};
use super::{Model, Request, Ticket, Verb, transfer};

const PAGE_BYTES: u64 = 4096;
/// Writes of at least this many bytes fill whole erase blocks sooner or later.
const LONG_WRITE_BYTES: u64 = 64 << 10;

/// What a flash device is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlashFigures {
    /// Bytes.
    pub capacity: u64,
    /// Dies that work at once.
    pub dies: usize,
    /// What the controller takes for a command, one after another.
    pub command: Duration,
    /// Reading a page of 4 KiB.
    pub read_page: Duration,
    /// Programming a page of 4 KiB, in long writes.
    pub program_page: Duration,
    /// How much more a page costs in a write shorter than 64 KiB.
    pub short_write_factor: f64,
    /// Bytes a second over the interface, towards the host.
    pub interface_rate: u64,
    /// How many bytes of writes are answered before they are programmed.
    pub buffer: u64,
}

impl FlashFigures {
    /// Intel 320 series, 80 GB, SATA: the surrogate device of the dissertation (table 3.4).
    pub const SATA_80GB: Self = Self {
        capacity: 80_026_361_856,
        dies: 10,
        command: Duration::from_micros(26),
        read_page: Duration::from_micros(36),
        program_page: Duration::from_micros(455),
        short_write_factor: 2.2,
        interface_rate: 270_000_000,
        buffer: 1 << 20,
    };
    /// An NVMe device of 512 GB as in the Firepan paper's hosts.
    pub const NVME_512GB: Self = Self {
        capacity: 512_110_190_592,
        dies: 64,
        command: Duration::from_nanos(2_700),
        read_page: Duration::from_micros(60),
        program_page: Duration::from_micros(114),
        short_write_factor: 1.0,
        interface_rate: 3_500_000_000,
        buffer: 64 << 20,
    };
    /// An NVMe device of 480 GB as in the Firepan paper's storage node.
    pub const NVME_480GB: Self = Self { capacity: 480_103_981_056, ..Self::NVME_512GB };

    /// A partition of `bytes` of it: its part of the dies and of the buffer.
    #[must_use]
    pub fn partition(mut self, bytes: u64) -> Self {
        let part = bytes as f64 / self.capacity as f64;
        self.dies = (self.dies as f64 * part).ceil() as usize;
        self.buffer = ((self.buffer as f64 * part) as u64).max(PAGE_BYTES);
        self.capacity = bytes;
        self
    }
}

/// A flash device.
pub struct Flash {
    figures: FlashFigures,
    controller: Server,
    interface: Server,
    dies: Vec<Server>,
    /// Writes in the buffer, the oldest first: until when, and how many bytes.
    buffered: std::collections::VecDeque<(Moment, u64)>,
    buffered_bytes: u64,
    endings: Endings,
}

impl Flash {
    /// An idle device.
    #[must_use]
    pub fn new(figures: FlashFigures) -> Self {
        Self {
            figures,
            controller: Server::default(),
            interface: Server::default(),
            dies: vec![Server::default(); figures.dies],
            buffered: std::collections::VecDeque::new(),
            buffered_bytes: 0,
            endings: Endings::default(),
        }
    }

    /// Lets the dies work on all pages of a request, `page` each; says when the last of them is done.
    fn occupy(&mut self, now: Moment, request: &Request, page: Duration) -> Moment {
        let first = request.offset / PAGE_BYTES;
        let pages = request.end().div_ceil(PAGE_BYTES) - first;
        let dies = self.dies.len() as u64;
        let mut last = now;
        for index in 0..pages.min(dies) {
            // Pages lie over the dies in turn; consecutive ones of a die are one piece of work.
            let count = (pages - index).div_ceil(dies) as u32;
            let die = &mut self.dies[((first + index) % dies) as usize];
            last = last.max(die.serve(now, page * count));
        }
        last
    }

    /// When the buffer has room for `length` more bytes.
    fn room(&mut self, now: Moment, length: u64) -> Moment {
        let mut at = now;
        while let Some((until, bytes)) = self.buffered.front().copied() {
            if until > now && self.buffered_bytes + length <= self.figures.buffer {
                break;
            }
            at = at.max(until);
            self.buffered_bytes -= bytes;
            self.buffered.pop_front();
        }
        at
    }
}

impl Model for Flash {
    fn submit(&mut self, now: Moment, ticket: Ticket, request: Request) {
        let commanded = self.controller.serve(now, self.figures.command);
        let moving = transfer(request.length, self.figures.interface_rate);
        let done = match request.verb {
            Verb::Read => {
                let read = self.occupy(commanded, &request, self.figures.read_page);
                // Long reads leave while their last pages are still being read.
                let pages = request.length.div_ceil(PAGE_BYTES).max(1);
                let last = transfer(request.length / pages, self.figures.interface_rate);
                self.interface.serve(commanded, moving).max(read + last)
            }
            Verb::Write => {
                let arrived = commanded + moving;
                let accepted = self.room(arrived, request.length);
                let is_short = request.length < LONG_WRITE_BYTES;
                let factor = if is_short { self.figures.short_write_factor } else { 1.0 };
                let programmed = self.occupy(accepted, &request, self.figures.program_page.mul_f64(factor));
                self.buffered.push_back((programmed, request.length));
                self.buffered_bytes += request.length;
                accepted
            }
            Verb::Flush => self.buffered.iter().map(|(until, _)| *until).fold(commanded, Moment::max),
        };
        self.endings.add(done, ticket);
    }

    fn next(&self) -> Option<Moment> {
        self.endings.next()
    }

    fn advance(&mut self, now: Moment, done: &mut Vec<Ticket>) {
        while let Some((_, ticket)) = self.endings.take(now) {
            done.push(ticket);
        }
    }
}
