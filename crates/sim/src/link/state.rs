//! What is on a link, without anybody awaiting it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::task::Waker;
use std::time::Duration;

use env::Moment;

use super::{LinkFaults, LinkFigures, Side};
use crate::rng::Rng;

/// The largest piece that is sent without asking whose turn it is.
const SEGMENT_BYTES: usize = 64 << 10;

pub(super) struct State {
    pub(super) figures: LinkFigures,
    pub(super) faults: LinkFaults,
    pub(super) is_up: bool,
    /// While it is down nobody hears that the other side has closed.
    pub(super) has_late_resets: bool,
    /// Whether clients, and servers, read what has arrived.
    pub(super) reads: [bool; 2],
    pub(super) arrived: [u64; 2],
    /// Even ones are what clients send, odd ones what servers send.
    flows: Vec<Flow>,
    ways: [Way; 2],
    /// What arrives when. The number keeps the order of equal moments.
    deliveries: BinaryHeap<Reverse<(Moment, u64, Delivery)>>,
    count: u64,
}

/// Something on its way.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Delivery {
    /// The next segment of a flow.
    Segment(usize),
    /// The writer of a flow hears that so many bytes were read.
    Room(usize, usize),
}

/// One direction of a link.
#[derive(Default)]
struct Way {
    /// Flows with something to send, the next first.
    turns: VecDeque<usize>,
    free_at: Moment,
}

/// One direction of a connection.
#[derive(Default)]
pub(super) struct Flow {
    /// Written, not sent.
    queued: VecDeque<u8>,
    /// Sent, not arrived.
    under_way: VecDeque<Vec<u8>>,
    /// Arrived, not read.
    received: VecDeque<u8>,
    /// Written, and not yet known to be read.
    unread: usize,
    /// When the last segment will have arrived: the next one does not before.
    last_arrival: Moment,
    /// The writer has no more; `true` once that has been sent.
    ending: Option<bool>,
    /// The end has arrived.
    ended: bool,
    /// Both ends know that the connection is dead.
    is_reset: bool,
    /// What is sent vanishes.
    is_silent: bool,
    /// Nobody will read any more.
    is_deaf: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Flow {
    fn make_room(&mut self, count: usize) {
        self.unread -= count;
        if let Some(writer) = self.writer.take() {
            writer.wake();
        }
    }

    fn wake(&mut self) {
        [self.reader.take(), self.writer.take()].into_iter().flatten().for_each(Waker::wake);
    }
}

/// What a reader or writer is told.
pub(super) enum Answer {
    Bytes(usize),
    End,
    Reset,
    Wait,
}

impl State {
    pub(super) fn new(figures: LinkFigures) -> Self {
        Self {
            figures,
            faults: LinkFaults::default(),
            is_up: true,
            has_late_resets: false,
            reads: [true; 2],
            arrived: [0; 2],
            flows: Vec::new(),
            ways: Default::default(),
            deliveries: BinaryHeap::new(),
            count: 0,
        }
    }

    pub(super) fn connect(&mut self) -> [usize; 2] {
        let first = self.flows.len();
        self.flows.push(Flow::default());
        self.flows.push(Flow::default());
        [first, first + 1]
    }

    pub(super) fn write(&mut self, flow: usize, bytes: &[u8], waker: &Waker) -> Answer {
        let window = self.figures.window;
        let is_told = self.is_up || !self.has_late_resets;
        let state = &mut self.flows[flow];
        if state.is_reset || state.ending.is_some() {
            return Answer::Reset;
        }
        if state.is_deaf && !state.is_silent && is_told {
            // The other side has closed: TCP answers data with a reset.
            state.is_reset = true;
            state.wake();
            return Answer::Reset;
        }
        let room = window.saturating_sub(state.unread);
        if room == 0 {
            state.writer = Some(waker.clone());
            return Answer::Wait;
        }
        let count = room.min(bytes.len());
        let was_idle = state.queued.is_empty();
        state.queued.extend(&bytes[..count]);
        state.unread += count;
        if was_idle && count > 0 {
            self.ways[flow % 2].turns.push_back(flow);
        }
        Answer::Bytes(count)
    }

    pub(super) fn read(&mut self, now: Moment, flow: usize, place: &mut [u8], waker: &Waker) -> Answer {
        // What clients send servers read.
        let is_reading = self.reads[1 - flow % 2];
        let state = &mut self.flows[flow];
        if !is_reading && !state.is_reset {
            state.reader = Some(waker.clone());
            return Answer::Wait;
        }
        if !state.received.is_empty() {
            let count = place.len().min(state.received.len());
            let (first, second) = state.received.as_slices();
            let cut = count.min(first.len());
            place[..cut].copy_from_slice(&first[..cut]);
            place[cut..count].copy_from_slice(&second[..count - cut]);
            state.received.drain(..count);
            self.count += 1;
            let at = now + self.figures.latency;
            self.deliveries.push(Reverse((at, self.count, Delivery::Room(flow, count))));
            return Answer::Bytes(count);
        }
        if state.is_reset {
            return Answer::Reset;
        }
        if state.ended {
            return Answer::End;
        }
        state.reader = Some(waker.clone());
        Answer::Wait
    }

    /// The writer of `flow` has no more.
    pub(super) fn end(&mut self, flow: usize) {
        let state = &mut self.flows[flow];
        if state.ending.is_none() && !state.is_reset {
            state.ending = Some(false);
            if state.queued.is_empty() {
                self.ways[flow % 2].turns.push_back(flow);
            }
        }
    }

    /// Nobody will read `flow` any more.
    pub(super) fn stop_reading(&mut self, flow: usize) {
        let state = &mut self.flows[flow];
        state.is_deaf = true;
        state.received = VecDeque::new();
        state.wake();
    }

    pub(super) fn cut(&mut self) {
        for flow in &mut self.flows {
            flow.is_reset = true;
            flow.queued = VecDeque::new();
            flow.received = VecDeque::new();
            flow.wake();
        }
    }

    /// Whether `side` of all connections reads.
    pub(super) fn set_reading(&mut self, side: Side, reads: bool) {
        let (way, place) = if side == Side::Client { (1, 0) } else { (0, 1) };
        self.reads[place] = reads;
        let readers = self.flows.iter_mut().skip(way).step_by(2).filter_map(|flow| flow.reader.take());
        readers.for_each(Waker::wake);
    }

    pub(super) fn silence_one(&mut self, side: Side, rng: &Rng) {
        let first = if side == Side::Client { 0 } else { 1 };
        let is_alive = |flow: &Flow| !flow.is_reset && !flow.is_silent && !flow.is_deaf && flow.ending.is_none();
        let alive: Vec<usize> =
            (first..self.flows.len()).step_by(2).filter(|flow| is_alive(&self.flows[*flow])).collect();
        if !alive.is_empty() {
            self.flows[rng.pick(&alive)].is_silent = true;
        }
    }

    pub(super) fn silence(&mut self, side: Side) {
        let first = if side == Side::Client { 0 } else { 1 };
        for flow in self.flows.iter_mut().skip(first).step_by(2) {
            flow.is_silent = true;
        }
    }

    pub(super) fn next(&self) -> Option<Moment> {
        if !self.is_up {
            return None;
        }
        let sends = self.ways.iter().filter(|way| !way.turns.is_empty()).map(|way| way.free_at);
        sends.chain(self.deliveries.peek().map(|Reverse((at, ..))| *at)).min()
    }

    /// Lets everything up to `now` happen; says how many segments were corrupted.
    pub(super) fn advance(&mut self, now: Moment, rng: &Rng) -> u64 {
        let mut corrupted = 0;
        while let Some(next) = self.next().filter(|next| *next <= now) {
            while self.deliveries.peek().is_some_and(|Reverse((at, ..))| *at <= next) {
                match self.deliveries.pop() {
                    Some(Reverse((_, _, Delivery::Segment(flow)))) => corrupted += u64::from(self.arrive(flow, rng)),
                    Some(Reverse((_, _, Delivery::Room(flow, count)))) => self.flows[flow].make_room(count),
                    None => {}
                }
            }
            for way in 0..2 {
                if self.ways[way].free_at <= next {
                    // A way that was idle, or down, begins now.
                    self.send(way, now.max(next), rng);
                }
            }
        }
        corrupted
    }

    fn send(&mut self, way: usize, now: Moment, rng: &Rng) {
        let Some(flow) = self.ways[way].turns.pop_front() else { return };
        let state = &mut self.flows[flow];
        let count = state.queued.len().min(SEGMENT_BYTES);
        let segment: Vec<u8> = state.queued.drain(..count).collect();
        if count == 0 && state.ending != Some(false) {
            return;
        }
        let sent = now + Duration::from_nanos(count as u64 * 1_000_000_000 / self.figures.rate);
        self.ways[way].free_at = sent;
        let late = if self.faults.reorder.is_zero() { Duration::ZERO } else { rng.up_to(self.faults.reorder) };
        let at = (sent + self.figures.latency + late).max(state.last_arrival);
        state.last_arrival = at;
        // An empty segment is the end.
        if count == 0 {
            state.ending = Some(true);
        }
        state.under_way.push_back(segment);
        self.count += 1;
        self.deliveries.push(Reverse((at, self.count, Delivery::Segment(flow))));
        if !state.queued.is_empty() || state.ending == Some(false) {
            self.ways[way].turns.push_back(flow);
        }
    }

    /// True if it came with a wrong bit.
    fn arrive(&mut self, flow: usize, rng: &Rng) -> bool {
        let state = &mut self.flows[flow];
        let Some(mut segment) = state.under_way.pop_front() else { return false };
        if state.is_silent || state.is_reset || state.is_deaf {
            if let Some(writer) = state.writer.take().filter(|_| !state.is_silent) {
                writer.wake();
            }
            return false;
        }
        if segment.is_empty() {
            state.ended = true;
            state.wake();
            return false;
        }
        self.arrived[flow % 2] += segment.len() as u64;
        let corrupts = rng.chance(self.faults.corrupt);
        if corrupts {
            let place = rng.below(segment.len() as u64) as usize;
            segment[place] ^= 1 << rng.below(8);
        }
        state.received.extend(segment);
        if let Some(reader) = state.reader.take() {
            reader.wake();
        }
        corrupts
    }
}
