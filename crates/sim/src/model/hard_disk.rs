//! A hard disk: seeks, rotation, zones, a volatile cache and an elevator.
//!
//! ```text
//!   read  ──▶ in the read-ahead? ──yes──▶ done when the head has passed it
//!                  │ no
//!                  ▼
//!              queue of reads ───────────┐  the elevator: inwards only, then from the outside again; reads
//!                                        ├─▶ first, but after 16 of them writes that somebody waits for.
//!   write ──▶ cache ──▶ queue of destages ┘  A cache that is full, or idle for 20 ms, is emptied by half.
//!               └──▶ done, as long as there is room (without a cache: when it is on the platter)
//! ```
//!
//! | figure | ST31000524AS | Cheetah 15K | from |
//! |---|--:|--:|---|
//! | capacity | 1 TB | 300 GB | data sheets (Barracuda 7200.12, Cheetah 15K.6) |
//! | turn | 8.333 ms | 4 ms | 7200 and 15,000 rpm |
//! | average seek, read | 8.5 ms | 3.4 ms | data sheets; a write settles 1.0 and 0.5 ms longer |
//! | track to track | 0.8 ms | 0.2 ms | data sheets |
//! | outside, inside | 125, 62 MB/s | 164, 112 MB/s | data sheets; the inside of the first assumed half |
//! | cache | 32 MiB, 16 of it dirty | 16 MiB, 8 | data sheets; the dirty part is assumed |
//! | a command | 0.1 ms | 0.1 ms | assumed: controller and interface |
//!
//! A seek over the part x of all cylinders takes `t + b * sqrt(x)`. `b` makes the average over all pairs of cylinders
//! the stated one (the linear part of long seeks is ignored). Track and cylinder skew are ignored as well: bytes in
//! order never wait for the platter. So are head switches, defects, thermal recalibration, and the time to change from
//! reading to writing. An idle head reads on into its buffer up to [`HardDiskFigures::read_ahead`] bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use env::Moment;

use super::channels::Endings;
use super::cylinders::Cylinders;
use super::{Model, Request, Ticket, Verb, transfer};

/// What a hard disk is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HardDiskFigures {
    /// Bytes.
    pub capacity: u64,
    /// One turn of the platter.
    pub revolution: Duration,
    /// The average seek over all pairs of cylinders, for reads.
    pub seek_average: Duration,
    /// The shortest seek.
    pub seek_track: Duration,
    /// How much longer the head settles before it writes.
    pub write_settle: Duration,
    /// Bytes a second outside.
    pub rate_outer: u64,
    /// Bytes a second inside.
    pub rate_inner: u64,
    /// Tracks a cylinder.
    pub heads: u64,
    /// Bytes a second over the interface.
    pub interface_rate: u64,
    /// What every command costs before anything moves.
    pub command: Duration,
    /// How many bytes may wait in the volatile cache for the platter; zero for a cache that writes through.
    pub dirty_max: u64,
    /// How many bytes an idle head reads on.
    pub read_ahead: u64,
    /// How long nobody must have read before destaging begins by itself.
    pub idle: Duration,
}

impl HardDiskFigures {
    /// Seagate Barracuda 7200.12, ST31000524AS: the disk of the dissertation (table 3.4).
    pub const ST31000524AS: Self = Self {
        capacity: 1_000_204_886_016,
        revolution: Duration::from_nanos(8_333_333),
        seek_average: Duration::from_micros(8500),
        seek_track: Duration::from_micros(800),
        write_settle: Duration::from_micros(1000),
        rate_outer: 125_000_000,
        rate_inner: 62_000_000,
        heads: 4,
        interface_rate: 300_000_000,
        command: Duration::from_micros(100),
        dirty_max: 16 << 20,
        read_ahead: 1 << 20,
        idle: Duration::from_millis(20),
    };
    /// Seagate Cheetah 15K.6: what arrays of 2010 were built from.
    pub const CHEETAH_15K: Self = Self {
        capacity: 300_000_000_000,
        revolution: Duration::from_millis(4),
        seek_average: Duration::from_micros(3400),
        seek_track: Duration::from_micros(200),
        write_settle: Duration::from_micros(500),
        rate_outer: 164_000_000,
        rate_inner: 112_000_000,
        heads: 4,
        interface_rate: 400_000_000,
        command: Duration::from_micros(100),
        dirty_max: 8 << 20,
        read_ahead: 1 << 20,
        idle: Duration::from_millis(20),
    };

    /// The same, answering a write only when it is on the platter.
    #[must_use]
    pub const fn without_write_cache(mut self) -> Self {
        self.dirty_max = 0;
        self
    }

    /// What a seek over the part `distance` (0 to 1) of all cylinders takes.
    #[must_use]
    pub fn seek(&self, distance: f64) -> Duration {
        if distance <= 0.0 {
            return Duration::ZERO;
        }
        // The average of sqrt(|x - y|) over all pairs is 8/15.
        let slope = (self.seek_average.as_secs_f64() - self.seek_track.as_secs_f64()) * 15.0 / 8.0;
        self.seek_track + Duration::from_secs_f64(slope * distance.sqrt())
    }
}

/// After so many reads in a row writes that somebody waits for have their turn.
const READS_IN_A_ROW: u32 = 16;
/// So many writes are done in a row at most while reads wait.
const THROUGH_IN_A_ROW: u32 = 16;
/// The same for those that were answered from the cache.
const DESTAGES_IN_A_ROW: u32 = 64;
/// Queued requests that follow one another are one movement up to this many bytes.
const MERGE_BYTES_MAX: u64 = 1 << 20;

/// A hard disk.
pub struct HardDisk {
    figures: HardDiskFigures,
    cylinders: Cylinders,
    /// Waiting for the head, by offset. Requests to the same offset are told apart by their tickets.
    reads: BTreeSet<(u64, Ticket, u64)>,
    /// Writes that wait for the platter; the ticket of one that was answered from the cache is no longer known.
    destages: BTreeMap<(u64, u64), (u64, Option<Ticket>)>,
    /// Writes for which the cache has no room yet, in the order of asking.
    held: std::collections::VecDeque<(Ticket, Request)>,
    dirty: u64,
    /// What the head does now, until when, and whom it serves.
    busy: Option<Movement>,
    head: Head,
    in_a_row: (Verb, u32),
    quiet_since: Moment,
    flushes: Vec<(Ticket, u64)>,
    sequence: u64,
    endings: Endings,
}

struct Movement {
    until: Moment,
    verb: Verb,
    served: Vec<Ticket>,
    bytes: u64,
}

/// Where the head stands, and what it has read on since.
#[derive(Clone, Copy, Default)]
struct Head {
    position: u64,
    since: Moment,
    /// The first byte in the buffer; equal to `position` if it has none.
    buffer_start: u64,
}

impl HardDisk {
    /// A disk at rest, the head outside.
    #[must_use]
    pub fn new(figures: HardDiskFigures) -> Self {
        let revolution_ns = figures.revolution.as_nanos() as u64;
        let cylinders =
            Cylinders::new(figures.capacity, figures.rate_outer, figures.rate_inner, revolution_ns, figures.heads);
        Self {
            figures,
            cylinders,
            reads: BTreeSet::new(),
            destages: BTreeMap::new(),
            held: std::collections::VecDeque::new(),
            dirty: 0,
            busy: None,
            head: Head::default(),
            in_a_row: (Verb::Read, 0),
            quiet_since: Moment::default(),
            flushes: Vec::new(),
            sequence: 0,
            endings: Endings::default(),
        }
    }

    /// How long the head takes from where it stands to the first byte of `offset`, beginning at `now`.
    fn positioning(&self, now: Moment, offset: u64, verb: Verb) -> Duration {
        let revolution_ns = self.figures.revolution.as_nanos() as u64;
        let mut seek = self.figures.seek(self.cylinders.distance(offset, self.head.position));
        if verb == Verb::Write && !seek.is_zero() {
            seek += self.figures.write_settle;
        }
        let arrived = (now + seek).0.as_nanos() as u64 % revolution_ns;
        let wanted = (self.cylinders.angle(offset, revolution_ns) * revolution_ns as f64) as u64;
        seek + Duration::from_nanos((wanted + revolution_ns - arrived) % revolution_ns)
    }

    /// When a read of the buffer, or of what the idle head is about to pass, is done.
    fn buffered_until(&self, now: Moment, request: &Request) -> Option<Moment> {
        let Head { position, since, buffer_start } = self.head;
        if self.busy.is_some() || request.offset < buffer_start {
            return None;
        }
        let rate = self.cylinders.rate(position);
        let passed = ((now - since).as_nanos() * u128::from(rate) / 1_000_000_000) as u64;
        let reached = position + passed.min(self.figures.read_ahead);
        // What an idle head is on its way to it gives when it comes there.
        let will_reach = position + self.figures.read_ahead;
        if request.offset > will_reach || (request.end() > reached && passed >= self.figures.read_ahead) {
            return None;
        }
        let passes = since + transfer(request.end().saturating_sub(position), rate);
        Some(passes.max(now + self.interface(request.length)))
    }

    fn interface(&self, length: u64) -> Duration {
        self.figures.command + transfer(length, self.figures.interface_rate)
    }

    fn accept_write(&mut self, now: Moment, ticket: Ticket, request: Request) {
        let caches = self.figures.dirty_max > 0;
        self.sequence += 1;
        self.destages.insert((request.offset, self.sequence), (request.length, (!caches).then_some(ticket)));
        self.dirty += request.length;
        if caches {
            self.endings.add(now + self.interface(request.length), ticket);
        }
    }

    /// Gives the head something to do, if there is anything and nobody has to be waited for.
    fn begin(&mut self, now: Moment) {
        if self.busy.is_some() {
            return;
        }
        let Some(verb) = self.turn(now) else { return };
        self.in_a_row = if self.in_a_row.0 == verb { (verb, self.in_a_row.1 + 1) } else { (verb, 1) };
        let (offset, end, served) = match verb {
            Verb::Read => self.take_reads(),
            _ => self.take_destages(),
        };
        let rate = self.cylinders.rate(offset);
        let buffered = self.buffered_until(now, &Request::read(offset, end - offset)).filter(|_| verb == Verb::Read);
        let until = match buffered {
            Some(until) => until,
            None => {
                // Commands that waited were understood meanwhile.
                let waited = now == self.head.since || (verb == Verb::Write && self.figures.dirty_max > 0);
                let began = if waited { now } else { now + self.figures.command };
                began + self.positioning(began, offset, verb) + transfer(end - offset, rate)
            }
        };
        let buffer_start = if verb == Verb::Read { offset } else { end };
        self.head = Head { position: end, since: until, buffer_start };
        self.busy = Some(Movement { until, verb, served, bytes: end - offset });
    }

    /// What the head does next.
    fn turn(&self, now: Moment) -> Option<Verb> {
        let (last, count) = self.in_a_row;
        let writes_wait = self.figures.dirty_max == 0 || !self.flushes.is_empty() || !self.held.is_empty();
        // Once at it the head goes on until half of the cache is clean: going there costs more than being there.
        let goes_on = last == Verb::Write && self.dirty * 2 > self.figures.dirty_max;
        let destages_max = if self.figures.dirty_max == 0 { THROUGH_IN_A_ROW } else { DESTAGES_IN_A_ROW };
        match (self.reads.is_empty(), self.destages.is_empty()) {
            (true, true) => None,
            (false, true) => Some(Verb::Read),
            (false, false) => {
                let writes = match last {
                    Verb::Read => writes_wait && count >= READS_IN_A_ROW,
                    _ => (writes_wait || goes_on) && count < destages_max,
                };
                Some(if writes { Verb::Write } else { Verb::Read })
            }
            (true, false) => {
                let is_quiet = now.since(self.quiet_since) >= self.figures.idle;
                (writes_wait || goes_on || is_quiet).then_some(Verb::Write)
            }
        }
    }

    fn take_reads(&mut self) -> (u64, u64, Vec<Ticket>) {
        let from = (self.head.position, Ticket(0), 0);
        let first = self.reads.range(from..).next().or_else(|| self.reads.first());
        let first = *first.expect("the caller has seen a read");
        self.reads.remove(&first);
        let (offset, ticket, length) = first;
        let (mut end, mut served) = (offset + length, vec![ticket]);
        while let Some(&next) = self.reads.range((offset, Ticket(0), 0)..=(end, Ticket(u64::MAX), u64::MAX)).next() {
            if next.0 + next.2 > offset + MERGE_BYTES_MAX {
                break;
            }
            self.reads.remove(&next);
            end = end.max(next.0 + next.2);
            served.push(next.1);
        }
        (offset, end, served)
    }

    fn take_destages(&mut self) -> (u64, u64, Vec<Ticket>) {
        let from = (self.head.position, 0);
        let first = self.destages.range(from..).next().or_else(|| self.destages.iter().next());
        let (&key, &(length, ticket)) = first.expect("the caller has seen a destage");
        self.destages.remove(&key);
        self.dirty -= length;
        let (offset, mut end) = (key.0, key.0 + length);
        let mut served: Vec<Ticket> = ticket.into_iter().collect();
        while let Some((&next, &(length, ticket))) = self.destages.range((offset, 0)..=(end, u64::MAX)).next() {
            if next.0 + length > offset + MERGE_BYTES_MAX {
                break;
            }
            self.destages.remove(&next);
            self.dirty -= length;
            end = end.max(next.0 + length);
            served.extend(ticket);
        }
        (offset, end, served)
    }

    fn end_movement(&mut self, done: &mut Vec<Ticket>) {
        let Some(movement) = self.busy.take() else { return };
        done.extend(movement.served);
        if movement.verb == Verb::Read {
            self.quiet_since = movement.until;
        }
        while let Some((ticket, request)) = self.held.front().copied() {
            if self.dirty + request.length > self.figures.dirty_max && self.dirty > 0 {
                break;
            }
            self.held.pop_front();
            self.accept_write(movement.until, ticket, request);
        }
        self.end_flushes(movement.until);
    }

    fn end_flushes(&mut self, now: Moment) {
        if self.flushes.is_empty() {
            return;
        }
        // A movement under way, or anything older than the flush, keeps it waiting.
        let oldest = self.destages.keys().map(|(_, sequence)| *sequence).min().unwrap_or(u64::MAX);
        let writes = self.busy.as_ref().is_some_and(|movement| movement.verb == Verb::Write && movement.bytes > 0);
        let (endings, command) = (&mut self.endings, self.figures.command);
        self.flushes.retain(|(ticket, sequence)| {
            let waits = writes || oldest <= *sequence;
            if !waits {
                endings.add(now + command, *ticket);
            }
            waits
        });
    }
}

impl Model for HardDisk {
    fn submit(&mut self, now: Moment, ticket: Ticket, request: Request) {
        match request.verb {
            Verb::Read => {
                self.quiet_since = now;
                if let Some(at) = self.buffered_until(now, &request) {
                    let rate = self.cylinders.rate(self.head.position);
                    let gone_on = request.end().max(self.head.position);
                    // The window of what it reads on moves with the reader.
                    let since = self.head.since + transfer(gone_on - self.head.position, rate);
                    self.head = Head { position: gone_on, since, ..self.head };
                    self.head.buffer_start =
                        self.head.buffer_start.max(gone_on.saturating_sub(self.figures.read_ahead));
                    self.in_a_row = (Verb::Read, 0);
                    self.endings.add(at, ticket);
                    return;
                }
                self.reads.insert((request.offset, ticket, request.length));
            }
            Verb::Write => {
                if self.figures.dirty_max > 0 && self.dirty > 0 && self.dirty + request.length > self.figures.dirty_max
                {
                    self.held.push_back((ticket, request));
                } else {
                    self.accept_write(now, ticket, request);
                }
            }
            Verb::Flush => {
                self.flushes.push((ticket, self.sequence));
                self.end_flushes(now);
            }
        }
        self.begin(now);
    }

    fn next(&self) -> Option<Moment> {
        let moved = self.busy.as_ref().map(|movement| movement.until);
        let quiet = (self.busy.is_none() && !self.destages.is_empty()).then(|| self.quiet_since + self.figures.idle);
        [moved, quiet, self.endings.next()].into_iter().flatten().min()
    }

    fn advance(&mut self, now: Moment, done: &mut Vec<Ticket>) {
        loop {
            let moved = self.busy.as_ref().map_or(Moment(Duration::MAX), |movement| movement.until);
            match self.endings.next() {
                Some(at) if at <= moved.min(now) => done.extend(self.endings.take(at).map(|(_, ticket)| ticket)),
                _ if moved <= now => {
                    self.end_movement(done);
                    self.begin(moved);
                }
                _ => break,
            }
        }
        self.begin(now);
    }
}

#[cfg(test)]
mod tests;
