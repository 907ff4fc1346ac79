//! A host's page cache in front of a device, as far as time is concerned.
//!
//! ```text
//!   read  ─▶ all pages there? ─yes─▶ done         a stream of reads ─▶ the next pages are read ahead
//!               └no─▶ device, then kept
//!   write ─▶ room for dirty pages? ─yes─▶ kept, done          dirty pages ─▶ device, in runs, in the order of the disk
//!               └no─▶ waits for writeback
//!   flush ─▶ everything dirty to the device ─▶ device's flush ─▶ done
//! ```
//!
//! The least recently used clean one goes first (second chance; Linux's two lists would keep pages that
//! were used twice a little longer). Figures of [`PageCacheFigures::of`]: pages have 4 KiB. Dirty pages are written
//! back from a tenth of the cache on, and writers wait at a fifth (Linux' `dirty_background_ratio` and `dirty_ratio`).
//! The read-ahead is 128 KiB (Linux' default). A page that is in the cache costs 2 us (assumed). Partial pages are not
//! read before they are written.
//!
//! What a power loss leaves of writes that were not flushed is not a matter of time: [`crate::disk`] says it, with the
//! same rule for every volatile cache between a guest and its platter (any subset of sectors, torn at 512 bytes).

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use env::Moment;

use super::channels::Endings;
use super::{Model, Request, Ticket, Verb};
use crate::numbers::NumberMap;

/// A run of dirty pages is written in pieces of this.
const WRITEBACK_BYTES_MAX: u64 = 1 << 20;
/// A stream may leave out this much and still be one.
const STREAM_GAP_BYTES: u64 = 256 << 10;
const STREAMS_MAX: usize = 16;

/// What a page cache is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PageCacheFigures {
    /// Bytes.
    pub capacity: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// From so many dirty bytes on they are written back.
    pub dirty_background: u64,
    /// At so many, writers wait.
    pub dirty_max: u64,
    /// How many bytes of a stream are read ahead.
    pub read_ahead: u64,
    /// What a request costs that needs no device, a page.
    pub page: Duration,
    /// How many runs of dirty pages are on their way to the device at once.
    pub writebacks_max: usize,
}

impl PageCacheFigures {
    /// A cache of `capacity` bytes; see the module's head.
    #[must_use]
    pub const fn of(capacity: u64) -> Self {
        Self {
            capacity,
            page_bytes: 4096,
            dirty_background: capacity / 10,
            dirty_max: capacity / 5,
            read_ahead: 128 << 10,
            page: Duration::from_micros(2),
            writebacks_max: 8,
        }
    }
}

/// A page cache over a device.
pub struct PageCache {
    figures: PageCacheFigures,
    lower: Box<dyn Model>,
    pages: NumberMap<u64, bool>,
    /// The order in which pages came, or were given their second chance.
    clock: VecDeque<u64>,
    dirty: BTreeSet<u64>,
    /// Dirty pages on their way to the device.
    writing: u64,
    writebacks: NumberMap<u64, u64>,
    cursor: u64,
    /// Pages on their way from the device, and with which read.
    coming: NumberMap<u64, u64>,
    reads: NumberMap<u64, (std::ops::Range<u64>, Vec<Ticket>)>,
    /// For how many reads a request still waits.
    waiting: NumberMap<Ticket, usize>,
    held: VecDeque<(Ticket, Request)>,
    flushes: Vec<Ticket>,
    /// Flushes that the device carries out now.
    flushing: NumberMap<u64, Vec<Ticket>>,
    /// Where streams go on, and up to where they are read.
    streams: VecDeque<(u64, u64)>,
    count: u64,
    endings: Endings,
    lower_done: Vec<Ticket>,
    hits: u64,
    misses: u64,
}

impl PageCache {
    /// An empty cache over `lower`.
    #[must_use]
    pub fn new(figures: PageCacheFigures, lower: impl Model + 'static) -> Self {
        Self {
            figures,
            lower: Box::new(lower),
            pages: NumberMap::default(),
            clock: VecDeque::new(),
            dirty: BTreeSet::new(),
            writing: 0,
            writebacks: NumberMap::default(),
            cursor: 0,
            coming: NumberMap::default(),
            reads: NumberMap::default(),
            waiting: NumberMap::default(),
            held: VecDeque::new(),
            flushes: Vec::new(),
            flushing: NumberMap::default(),
            streams: VecDeque::new(),
            count: 0,
            endings: Endings::default(),
            lower_done: Vec::new(),
            hits: 0,
            misses: 0,
        }
    }

    /// The same with the pages of `range` (bytes) in it, as if they had been read before.
    #[must_use]
    pub fn warmed(mut self, range: std::ops::Range<u64>) -> Self {
        self.pages_of(range.start, range.end).for_each(|page| self.keep(page));
        self
    }

    fn pages_of(&self, start: u64, end: u64) -> std::ops::Range<u64> {
        start / self.figures.page_bytes..end.div_ceil(self.figures.page_bytes)
    }

    /// Which part of the pages that were asked for was there.
    #[must_use]
    pub fn hit_ratio(&self) -> f64 {
        self.hits as f64 / (self.hits + self.misses).max(1) as f64
    }

    /// Puts a page in, or gives it its second chance, and makes room.
    fn keep(&mut self, page: u64) {
        match self.pages.entry(page) {
            Entry::Occupied(mut used) => *used.get_mut() = true,
            Entry::Vacant(place) => {
                place.insert(false);
                self.clock.push_back(page);
            }
        }
        let mut looks = self.clock.len() * 2;
        while self.pages.len() as u64 * self.figures.page_bytes > self.figures.capacity && looks > 0 {
            looks -= 1;
            let Some(oldest) = self.clock.pop_front() else { return };
            let used = self.pages.get_mut(&oldest).expect("what the clock has is in the cache");
            if *used || self.dirty.contains(&oldest) {
                *used = false;
                self.clock.push_back(oldest);
            } else {
                self.pages.remove(&oldest);
            }
        }
    }

    fn fetch(&mut self, now: Moment, pages: std::ops::Range<u64>) -> u64 {
        self.count += 1;
        let request =
            Request::read(pages.start * self.figures.page_bytes, (pages.end - pages.start) * self.figures.page_bytes);
        self.lower.submit(now, Ticket(self.count), request);
        self.coming.extend(pages.clone().map(|page| (page, self.count)));
        self.reads.insert(self.count, (pages, Vec::new()));
        self.count
    }

    /// Reads on for a stream that goes on at `request`.
    fn read_ahead(&mut self, now: Moment, request: &Request) {
        let goes_on = |next: u64| (next..=next + STREAM_GAP_BYTES).contains(&request.offset);
        let known = self.streams.iter().position(|(next, _)| goes_on(*next));
        let (_, mut read_to) =
            known.and_then(|index| self.streams.remove(index)).unwrap_or((request.end(), request.end()));
        if known.is_some() && request.end() + self.figures.read_ahead / 2 > read_to {
            let start = read_to.max(request.end());
            read_to = start + self.figures.read_ahead;
            let mut wanted = self.pages_of(start, read_to);
            let is_there = |page: &u64| self.pages.contains_key(page) || self.coming.contains_key(page);
            wanted.start = wanted.clone().find(|page| !is_there(page)).unwrap_or(wanted.end);
            if !wanted.is_empty() {
                self.fetch(now, wanted);
            }
        }
        if self.streams.len() == STREAMS_MAX {
            self.streams.pop_front();
        }
        self.streams.push_back((request.end(), read_to));
    }

    fn read(&mut self, now: Moment, ticket: Ticket, request: &Request) {
        let pages = self.pages_of(request.offset, request.end());
        let mut first_missing = None;
        let mut waits: BTreeSet<u64> = BTreeSet::new();
        let mut end_missing = pages.start;
        for page in pages.clone() {
            if self.pages.contains_key(&page) {
                self.hits += 1;
                self.keep(page);
            } else if let Some(read) = self.coming.get(&page) {
                self.hits += 1;
                waits.insert(*read);
            } else {
                self.misses += 1;
                first_missing.get_or_insert(page);
                end_missing = page + 1;
            }
        }
        if let Some(first) = first_missing {
            waits.insert(self.fetch(now, first..end_missing));
        }
        if waits.is_empty() {
            self.endings.add(now + self.cost(request), ticket);
        } else {
            self.waiting.insert(ticket, waits.len());
            for read in waits {
                if let Some((_, tickets)) = self.reads.get_mut(&read) {
                    tickets.push(ticket);
                }
            }
        }
        self.read_ahead(now, request);
    }

    fn cost(&self, request: &Request) -> Duration {
        self.figures.page * request.length.div_ceil(self.figures.page_bytes).max(1) as u32
    }

    fn write(&mut self, now: Moment, ticket: Ticket, request: &Request) {
        for page in self.pages_of(request.offset, request.end()) {
            self.dirty.insert(page);
            self.keep(page);
        }
        self.endings.add(now + self.cost(request), ticket);
    }

    fn dirty_bytes(&self) -> u64 {
        (self.dirty.len() as u64 + self.writing) * self.figures.page_bytes
    }

    fn write_back(&mut self, now: Moment) {
        let must = !self.flushes.is_empty() || !self.held.is_empty();
        while self.writebacks.len() < self.figures.writebacks_max
            && (must || self.dirty_bytes() > self.figures.dirty_background)
        {
            let first = self.dirty.range(self.cursor..).next().or_else(|| self.dirty.iter().next()).copied();
            let Some(first) = first else { break };
            let mut end = first;
            while end < first + WRITEBACK_BYTES_MAX / self.figures.page_bytes && self.dirty.remove(&end) {
                end += 1;
            }
            self.cursor = end;
            self.count += 1;
            self.writing += end - first;
            self.writebacks.insert(self.count, end - first);
            let request = Request::write(first * self.figures.page_bytes, (end - first) * self.figures.page_bytes);
            self.lower.submit(now, Ticket(self.count), request);
        }
        if !self.flushes.is_empty() && self.dirty.is_empty() && self.writebacks.is_empty() {
            self.count += 1;
            self.flushing.insert(self.count, std::mem::take(&mut self.flushes));
            self.lower.submit(now, Ticket(self.count), Request::flush());
        }
    }

    fn end_below(&mut self, now: Moment, number: u64) {
        if let Some((pages, tickets)) = self.reads.remove(&number) {
            for page in pages {
                self.coming.remove(&page);
                self.keep(page);
            }
            for ticket in tickets {
                let left = self.waiting.get_mut(&ticket).expect("whoever waits for a read is known");
                *left -= 1;
                if *left == 0 {
                    self.waiting.remove(&ticket);
                    self.endings.add(now + self.figures.page, ticket);
                }
            }
        } else if let Some(pages) = self.writebacks.remove(&number) {
            self.writing -= pages;
            while self.dirty_bytes() < self.figures.dirty_max {
                let Some((ticket, request)) = self.held.pop_front() else { break };
                self.write(now, ticket, &request);
            }
        } else if let Some(tickets) = self.flushing.remove(&number) {
            tickets.into_iter().for_each(|ticket| self.endings.add(now, ticket));
        }
    }
}

impl Model for PageCache {
    fn submit(&mut self, now: Moment, ticket: Ticket, request: Request) {
        match request.verb {
            Verb::Read => self.read(now, ticket, &request),
            Verb::Write if self.dirty_bytes() >= self.figures.dirty_max => self.held.push_back((ticket, request)),
            Verb::Write => self.write(now, ticket, &request),
            Verb::Flush => self.flushes.push(ticket),
        }
        self.write_back(now);
    }

    fn next(&self) -> Option<Moment> {
        [self.lower.next(), self.endings.next()].into_iter().flatten().min()
    }

    fn advance(&mut self, now: Moment, done: &mut Vec<Ticket>) {
        while let Some(next) = self.next().filter(|next| *next <= now) {
            let mut lower_done = std::mem::take(&mut self.lower_done);
            self.lower.advance(next, &mut lower_done);
            let any = !lower_done.is_empty();
            lower_done.drain(..).for_each(|part| self.end_below(next, part.0));
            self.lower_done = lower_done;
            if any {
                self.write_back(next);
            }
            while let Some((_, ticket)) = self.endings.take(next) {
                done.push(ticket);
            }
        }
    }
}
