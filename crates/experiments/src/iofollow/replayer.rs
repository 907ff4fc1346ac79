//! The paper's trace replayer (algorithm 3), on the bare model of a disk: so many requests of the guest's, then one copy.
//!
//! ```text
//!   queue of the guest's requests ──▶ k of them, one after another ──▶ one copy ──▶ k of them ──▶ one copy ...
//!        ▲ closed loop: an answer makes room for the next one              │ the next in order, the nearest to the head,
//!        └ open loop: the trace's own times                                └ or the one asked for least
//! ```
//!
//! Whoever is answered has waited for the whole queue before it. That is where the paper's response times are from: 172 ms for
//! a MiB, and 35 ms for 2 KiB without a migration, are no times of a disk's head. How many requests are outstanding is not
//! stated. It is chosen for each trace by the response without a migration, and for all copies by one number of the standard
//! order.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use block::Result;
use env::Moment;
use sim::model::{HardDisk, HardDiskFigures, Model, PageCache, Request, Ticket, Verb};
use sim::rng::Rng;
use sim::workload::{Step, Workload};

use crate::interference::devices::CacheMode;
use crate::interference::load::{Laid, Load};
use crate::interference::scene::Sums;

/// A move is looked at until so much is copied: a whole image of the usual size, the first part of a larger one or of several.
const COPIED_BYTES_MAX: u64 = 15 << 30;
/// A guest that does not move is looked at for so many requests.
const STILL_REQUESTS: u64 = 30_000;

/// In which order chunks are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CopyOrder {
    /// Nothing is copied.
    None,
    /// The standard: from the first to the last.
    Sequential,
    /// What the guest has asked for least (Zheng and others).
    ColdFirst,
    /// The nearest to the head.
    Follow,
}

impl CopyOrder {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::None => "no migration",
            Self::Sequential => "standard",
            Self::ColdFirst => "cold first",
            Self::Follow => "IOFollow",
        }
    }
}

/// What is replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Replayed {
    pub(super) load: Load,
    pub(super) order: CopyOrder,
    /// So many requests of the guest's come before one copy.
    pub(super) ratio: u64,
    pub(super) chunk_bytes: u64,
    /// How many requests the guest has outstanding.
    pub(super) outstanding: u64,
    /// How many copies are outstanding.
    pub(super) copies: u64,
    /// How many guests move at once, the image of each behind that of the one before.
    pub(super) machines: u64,
    /// Bytes of an image.
    pub(super) image: u64,
    /// The trace's addresses are laid over the whole image.
    pub(super) is_stretched: bool,
    /// At the trace's own times.
    pub(super) is_open_loop: bool,
    /// Through a host's page cache of 5 GB.
    pub(super) is_cached: bool,
}

impl std::fmt::Display for Replayed {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { load, order, ratio, outstanding, copies, machines, .. } = self;
        let (name, kib, gigabytes) = (load.name(), self.chunk_bytes >> 10, self.image / 1_000_000_000);
        write!(out, "{name}, {}, {ratio}:1, {kib} KiB, {outstanding}+{copies} outstanding, ", order.name())?;
        write!(out, "{machines} x {gigabytes} GB{}", if self.is_open_loop { ", open loop" } else { "" })?;
        out.write_str(if self.is_cached { ", through a page cache" } else { "" })
    }
}

/// What came of it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Answered {
    pub(super) guest: Sums,
    pub(super) copy: Sums,
    /// From the beginning to the last copy, or to the trace's end.
    pub(super) seconds: f64,
}

/// A disk that does one thing after another.
struct Server {
    disk: Box<dyn Model>,
    now: Moment,
    count: u64,
    done: Vec<Ticket>,
    /// The byte behind what was served last.
    position: u64,
}

impl Server {
    /// Serves `request`; gives when that was done.
    fn serve(&mut self, request: Request) -> Moment {
        self.count += 1;
        let ticket = Ticket(self.count);
        self.disk.submit(self.now, ticket, request);
        loop {
            self.done.clear();
            self.disk.advance(self.now, &mut self.done);
            if self.done.contains(&ticket) {
                break;
            }
            match self.disk.next() {
                Some(next) => self.now = self.now.max(next),
                None => break,
            }
        }
        if request.verb != Verb::Flush {
            self.position = request.end();
        }
        self.now
    }
}

/// Chunks of an image that are not copied yet.
struct Waiting {
    chunks: BTreeSet<u64>,
    /// By how often the guest has asked for them; only where that is wanted.
    by_count: BTreeSet<(u32, u64)>,
    counts: Vec<u32>,
    chunk_bytes: u64,
}

impl Waiting {
    fn new(replayed: &Replayed) -> Self {
        let count = replayed.image / replayed.chunk_bytes;
        let is_counted = replayed.order == CopyOrder::ColdFirst;
        let chunks = if replayed.order == CopyOrder::None { 0..0 } else { 0..count };
        let by_count = if is_counted { chunks.clone().map(|chunk| (0, chunk)).collect() } else { BTreeSet::new() };
        let counts = if is_counted { vec![0; count as usize] } else { Vec::new() };
        Self { chunks: chunks.collect(), by_count, counts, chunk_bytes: replayed.chunk_bytes }
    }

    /// The guest has asked for a byte of the image.
    fn touch(&mut self, offset: u64) {
        let chunk = offset / self.chunk_bytes;
        if let Some(count) = self.counts.get_mut(chunk as usize) {
            if self.by_count.remove(&(*count, chunk)) {
                self.by_count.insert((*count + 1, chunk));
            }
            *count += 1;
        }
    }

    /// Takes the next one; `position` is where the head is in the image.
    fn take(&mut self, order: CopyOrder, position: u64) -> Option<u64> {
        let chunk = match order {
            CopyOrder::None => None,
            CopyOrder::Sequential => self.chunks.first().copied(),
            CopyOrder::ColdFirst => self.by_count.pop_first().map(|(_, chunk)| chunk),
            CopyOrder::Follow => self.nearest(position),
        }?;
        self.chunks.remove(&chunk);
        Some(chunk)
    }

    /// The chunk whose start is nearest to `position`.
    fn nearest(&self, position: u64) -> Option<u64> {
        let above = self.chunks.range(position.div_ceil(self.chunk_bytes)..).next().copied();
        let below = self.chunks.range(..position.div_ceil(self.chunk_bytes)).next_back().copied();
        let distance = |chunk: &u64| (chunk * self.chunk_bytes).abs_diff(position);
        above.into_iter().chain(below).min_by_key(distance)
    }
}

/// One guest that moves.
struct Machine {
    start: u64,
    load: Box<dyn Workload>,
    /// When each request that waits came, and what it is; none that the closed loop has no answer for yet.
    queue: VecDeque<(Moment, Request)>,
    /// The first request that has not come yet, in an open loop.
    coming: Option<Step>,
    waiting: Waiting,
    /// When each copy that waits was asked for.
    copies: VecDeque<Moment>,
    is_over: bool,
}

impl Machine {
    /// Draws a request that is asked for at `now`.
    fn ask(&mut self, now: Moment, rng: &Rng) {
        match self.load.next(rng) {
            Some(step) => self.queue.push_back((now, step.request)),
            None => self.is_over = true,
        }
    }

    /// Queues what has come by `now` in an open loop.
    fn arrive(&mut self, now: Moment, rng: &Rng) {
        loop {
            if self.coming.is_none() {
                self.coming = self.load.next(rng);
                self.is_over = self.coming.is_none();
            }
            let Some(step) = self.coming.take_if(|step| Moment(step.at) <= now) else { return };
            self.queue.push_back((Moment(step.at), step.request));
        }
    }
}

impl Replayed {
    /// Replays it.
    ///
    /// # Errors
    /// A trace cannot be read.
    pub(super) fn play(&self, seed: u64) -> Result<Answered> {
        let rng = Rng::new(seed, "replayer");
        let disk = HardDisk::new(HardDiskFigures::ST31000524AS);
        let disk: Box<dyn Model> = match self.is_cached.then(|| CacheMode::WriteBack.page_cache(1)).flatten() {
            Some(figures) => Box::new(PageCache::new(figures, disk)),
            None => Box::new(disk),
        };
        let mut server = Server { disk, now: Moment::default(), count: 0, done: Vec::new(), position: 0 };
        let mut machines = (0..self.machines).map(|number| self.machine(number, &rng)).collect::<Result<Vec<_>>>()?;
        let mut seen = Answered::default();
        while seen.copy.bytes < COPIED_BYTES_MAX && !machines.iter().all(|machine| machine.is_over) {
            if self.order == CopyOrder::None && seen.guest.requests >= STILL_REQUESTS {
                break;
            }
            let before = seen.copy.requests + seen.guest.requests;
            for machine in &mut machines {
                self.turn(machine, &mut server, &mut seen, &rng);
            }
            let is_copied = machines.iter().all(|machine| machine.waiting.chunks.is_empty());
            if self.order != CopyOrder::None && is_copied {
                break;
            }
            if seen.copy.requests + seen.guest.requests == before {
                // Nobody has asked for anything: the next request comes later.
                let next = machines.iter().filter_map(|machine| machine.coming).map(|step| Moment(step.at)).min();
                server.now = next.unwrap_or(server.now + Duration::from_millis(1)).max(server.now);
            }
        }
        seen.seconds = server.now.0.as_secs_f64();
        Ok(seen)
    }

    fn machine(&self, number: u64, rng: &Rng) -> Result<Machine> {
        let Self { image, is_stretched, is_open_loop, .. } = *self;
        let laid = Laid { image, is_stretched, is_open_loop, skew: 100, requests_max: None, scale: 1 };
        let (load, _) = laid.start(self.load, rng)?;
        let copies = if self.order == CopyOrder::None { 0 } else { self.copies };
        let mut machine = Machine {
            start: number * image,
            load,
            queue: VecDeque::new(),
            coming: None,
            waiting: Waiting::new(self),
            copies: (0..copies).map(|_| Moment::default()).collect(),
            is_over: false,
        };
        if !is_open_loop {
            (0..self.outstanding).for_each(|_| machine.ask(Moment::default(), rng));
        }
        Ok(machine)
    }

    /// Some requests of one machine's guest, and a copy.
    fn turn(&self, machine: &mut Machine, server: &mut Server, seen: &mut Answered, rng: &Rng) {
        for _ in 0..self.ratio {
            if self.is_open_loop {
                machine.arrive(server.now, rng);
            }
            let Some((asked, request)) = machine.queue.pop_front() else { break };
            if request.verb != Verb::Flush {
                machine.waiting.touch(request.offset);
            }
            let done = server.serve(Request { offset: request.offset + machine.start, ..request });
            note(&mut seen.guest, request.length, done - asked);
            if !self.is_open_loop {
                machine.ask(done, rng);
            }
        }
        let Some(asked) = machine.copies.pop_front() else { return };
        let position = server.position.saturating_sub(machine.start);
        let Some(chunk) = machine.waiting.take(self.order, position) else { return };
        let done = server.serve(Request::read(machine.start + chunk * self.chunk_bytes, self.chunk_bytes));
        note(&mut seen.copy, self.chunk_bytes, done - asked);
        machine.copies.push_back(done);
    }
}

fn note(sums: &mut Sums, bytes: u64, took: Duration) {
    sums.requests += 1;
    sums.bytes += bytes;
    sums.seconds += took.as_secs_f64();
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Replayed = Replayed {
        load: Load::WebSearch1,
        order: CopyOrder::Sequential,
        ratio: 2,
        chunk_bytes: 1 << 20,
        outstanding: 2,
        copies: 1,
        machines: 1,
        image: 500_000_000,
        is_stretched: false,
        is_open_loop: false,
        is_cached: false,
    };

    #[test]
    fn every_chunk_is_copied_once_in_every_order_after_so_many_requests() {
        for order in [CopyOrder::Sequential, CopyOrder::ColdFirst, CopyOrder::Follow] {
            for ratio in [1, 4] {
                let seen = Replayed { order, ratio, ..SMALL }.play(1).expect("a generator plays");
                assert_eq!((seen.copy.requests, seen.guest.requests), (476, 476 * ratio), "{order:?}");
            }
        }
    }

    #[test]
    fn the_nearest_chunk_is_found_both_ways() {
        let mut waiting = Waiting::new(&Replayed { image: 10 << 20, ..SMALL });
        let mut take = |mib: u64| waiting.take(CopyOrder::Follow, mib << 20);
        assert_eq!([take(5), take(5), take(5), take(0), take(9)], [Some(5), Some(6), Some(4), Some(0), Some(9)]);
    }

    #[test]
    fn following_answers_guest_and_copies_sooner_than_the_standard_order() {
        let mean = |order| {
            let large = Replayed { order, image: 4_000_000_000, is_stretched: true, ..SMALL };
            let seen = large.play(1).expect("a generator plays");
            [seen.guest.mean_ms(), seen.copy.mean_ms()]
        };
        let ([guest, copy], follow) = (mean(CopyOrder::Sequential), mean(CopyOrder::Follow));
        assert!(follow[0] < guest && follow[1] < copy, "{follow:?} instead of {guest} and {copy} ms");
    }

    #[test]
    fn responses_grow_with_what_is_outstanding_and_an_open_loop_waits_for_nobody() {
        let mean = |outstanding, order| {
            Replayed { outstanding, order, ..SMALL }.play(1).expect("a generator plays").guest.mean_ms()
        };
        let (one, four) = (mean(1, CopyOrder::None), mean(4, CopyOrder::None));
        assert!((3.5..4.5).contains(&(four / one)), "{one} ms, and {four} with four outstanding");
        let open = Replayed { is_open_loop: true, image: 2_000_000_000, ..SMALL }.play(1).expect("a generator plays");
        // The copy takes all that the guest's 113 requests a second leave.
        let rate = open.guest.requests as f64 / open.seconds;
        assert!((20.0..130.0).contains(&rate) && open.copy.requests == 1907, "{rate} a second, {open:?}");
    }
}
