//! What is to be sent, on which stream, and what becomes of it when streams die. It never waits.
//!
//! ```text
//!                      submit
//!                        │
//!                        ▼     take                     finish
//!                     queued ────────▶ sent on a stream ────────▶ answered
//!                      ▲  ▲                  │
//!    nothing can have  │  │                  │ the stream dies, others live
//!    been changed by it│  │                  │
//!                      └──┼──────────────────┤
//!                         │                  ▼
//!                         └───────────── orphaned: the receiver is asked to retire the stream
//!                           it answers: nothing of the stream is in flight any more
//! ```
//! When the last stream of a session dies, all of it fails (copy), or is queued again for the next session (forward).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::task::Waker;

use block::{Buffer, Bytes, Data, Error, ErrorKind, Extent, RangeGuard, Result};
use tokio::sync::oneshot;

use crate::stream::protocol::Kind;

/// Requests up to this size do not wait behind larger ones, nor behind the frames that larger ones were cut into.
pub(super) const SHORT_BYTES_MAX: usize = 32 << 10;

/// After so many short requests a large one has its turn.
const SHORT_STREAK_MAX: u32 = 8;

/// When so many requests wait, streams that were ended for want of work are dialled again.
const WAITING_MIN: usize = 4;

/// Why flushes fail for good after the other machine was started again.
const FORGOTTEN: &str = "the other host was started again and has forgotten writes that were answered, but not flushed";

/// What is asked of the other end.
pub(super) enum Request {
    /// The buffer is away while an answer is being received into it.
    Read(Bytes, Option<Buffer>),
    /// With the data's checksum, if it is known from when the data came to be.
    Write(Bytes, Data, Option<u64>),
    Zeroes(Extent, bool),
    Discard(Extent),
    Flush,
    Extents(Extent),
    Retire(u16, u32),
    Control(Vec<u8>),
    Leave,
}

impl Request {
    pub(super) const fn kind(&self) -> Kind {
        match self {
            Self::Read(..) => Kind::Read,
            Self::Write(..) => Kind::Write,
            Self::Zeroes(..) => Kind::Zeroes,
            Self::Discard(_) => Kind::Discard,
            Self::Flush => Kind::Flush,
            Self::Extents(_) => Kind::Extents,
            Self::Retire(..) => Kind::Retire,
            Self::Control(_) => Kind::Control,
            Self::Leave => Kind::Leave,
        }
    }

    /// How many bytes of a stream's allowance it takes.
    pub(super) fn cost(&self) -> usize {
        match self {
            Self::Read(_, buffer) => buffer.as_ref().map_or(0, |buffer| buffer.len()),
            Self::Write(_, data, _) => data.len(),
            Self::Control(bytes) => bytes.len(),
            _ => 0,
        }
    }

    /// Whether carrying it out twice, even late, is no different from once.
    const fn changes_nothing(&self) -> bool {
        matches!(self, Self::Read(..) | Self::Flush | Self::Extents(_) | Self::Retire(..))
    }
}

/// A request and how it is to be sent.
pub(super) struct Order {
    pub(super) request: Request,
    /// Whether all that was asked is short, and not only this frame of it.
    pub(super) is_short: bool,
    pub(super) fua: bool,
    /// Keeps overlapping writes back until it is answered.
    pub(super) lock: Option<Arc<RangeGuard>>,
}

impl From<Request> for Order {
    fn from(request: Request) -> Self {
        Self { is_short: request.cost() <= SHORT_BYTES_MAX, request, fua: false, lock: None }
    }
}

/// What a request was answered with.
pub(super) enum Answered {
    Done,
    Bytes(Buffer),
    Message(Vec<u8>),
}

/// A request and what belongs to it until it is answered.
pub(super) struct Operation {
    pub(super) id: u64,
    pub(super) request: Request,
    pub(super) fua: bool,
    is_short: bool,
    /// How often it, or its answer, came damaged.
    pub(super) damages: u8,
    /// Whether it has been sent before.
    pub(super) is_again: bool,
    /// Of a flush: the writes that had been answered when it was asked for.
    covers: u64,
    /// Keeps overlapping writes back until this one is answered.
    _lock: Option<Arc<RangeGuard>>,
    answer: Option<oneshot::Sender<Result<Answered>>>,
}

impl Operation {
    fn answer(self, outcome: Result<Answered>) {
        if let Some(answer) = self.answer {
            // Whoever asked may not want to know any more.
            let _ = answer.send(outcome);
        }
    }
}

/// One connection of one stream of one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnectionId {
    pub(super) session: u64,
    pub(super) stream: u16,
    pub(super) generation: u32,
}

/// What a stream would take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Wants {
    Nothing,
    Short,
    Anything,
}

/// What a stream has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Capacity {
    Anything,
    /// Short requests only, by what it has itself.
    Short,
    /// Short requests only, by what all streams of the path with this number have under way.
    ShortOnPath(usize),
}

struct StreamEntry {
    generation: u32,
    is_up: bool,
    waker: Option<Waker>,
    wants: Wants,
    /// It would take a large one if the path with this number were free.
    waits_for_path: Option<usize>,
    load: usize,
}

impl StreamEntry {
    const fn new(generation: u32, is_up: bool) -> Self {
        Self { generation, is_up, waker: None, wants: Wants::Nothing, waits_for_path: None, load: 0 }
    }
}

/// What there is for a stream.
pub(super) enum Taken {
    Operation(Box<Operation>),
    Nothing,
    /// The connection's session is over.
    Over,
}

enum Liveness {
    Live,
    /// Requests fail, or wait for the next session.
    Lost(Lost),
}

struct Lost {
    /// The session that was.
    session: u64,
    kind: ErrorKind,
    why: String,
    waits: bool,
}

/// All that a sending device has to do.
pub(super) struct SendQueue {
    session: u64,
    liveness: Liveness,
    short: VecDeque<Operation>,
    large: VecDeque<Operation>,
    streak: u32,
    entries: Vec<StreamEntry>,
    orphans: BTreeMap<(u16, u32), Vec<Operation>>,
    next_id: u64,
    /// Mutations that were answered without being durable, and those of them that a flush has covered.
    answered: u64,
    flushed: u64,
    /// The other end has forgotten writes that were answered.
    has_forgotten: bool,
    /// Whether requests of a lost session wait for the next.
    waits_when_lost: bool,
    is_leaving: bool,
    is_closed: bool,
    /// Requests wait, and no stream that there is takes them.
    is_short_of_streams: bool,
}

/// Operations that fail, and why. They are answered after the queue is unlocked.
#[must_use]
pub(super) struct Failed {
    operations: Vec<Operation>,
    kind: ErrorKind,
    why: String,
}

impl Failed {
    const fn nothing() -> Self {
        Self { operations: Vec::new(), kind: ErrorKind::Disconnected, why: String::new() }
    }

    pub(super) fn answer(self) {
        for operation in self.operations {
            operation.answer(Err(Error::new(self.kind, self.why.clone())));
        }
    }
}

impl SendQueue {
    pub(super) const fn new(waits_when_lost: bool) -> Self {
        let lost = Lost { session: 0, kind: ErrorKind::Disconnected, why: String::new(), waits: false };
        Self {
            session: 0,
            liveness: Liveness::Lost(lost),
            short: VecDeque::new(),
            large: VecDeque::new(),
            streak: 0,
            entries: Vec::new(),
            orphans: BTreeMap::new(),
            next_id: 1,
            answered: 0,
            flushed: 0,
            has_forgotten: false,
            waits_when_lost,
            is_leaving: false,
            is_closed: false,
            is_short_of_streams: false,
        }
    }

    /// Whether streams that were ended for want of work are to be there again.
    pub(super) const fn is_short_of_streams(&self) -> bool {
        self.is_short_of_streams
    }

    /// Takes an order; the receiver is told how it ended.
    pub(super) fn submit(&mut self, order: impl Into<Order>) -> Result<oneshot::Receiver<Result<Answered>>> {
        let order = order.into();
        if self.is_closed {
            return Err(Error::new(ErrorKind::Disconnected, "the connection to the other host was closed"));
        }
        if let Liveness::Lost(Lost { kind, why, waits: false, .. }) = &self.liveness {
            return Err(Error::new(*kind, why.clone()));
        }
        if matches!(order.request, Request::Flush) && self.has_forgotten {
            return Err(Error::new(ErrorKind::Io, FORGOTTEN));
        }
        self.is_leaving |= matches!(order.request, Request::Leave);
        let (answer, answered) = oneshot::channel();
        self.queue(order, Some(answer));
        Ok(answered)
    }

    fn queue(&mut self, order: Order, answer: Option<oneshot::Sender<Result<Answered>>>) {
        let id = self.next_id;
        self.next_id += 1;
        let Order { request, is_short, fua, lock } = order;
        let covers = self.answered;
        let operation =
            Operation { id, request, is_short, fua, damages: 0, is_again: false, covers, _lock: lock, answer };
        if is_short { &mut self.short } else { &mut self.large }.push_back(operation);
        self.wake_one(is_short);
    }

    /// Puts what was sent before at the front, in its old order.
    fn queue_again(&mut self, mut operations: Vec<Operation>) {
        operations.sort_unstable_by_key(|operation| std::cmp::Reverse(operation.id));
        for mut operation in operations {
            operation.is_again = true;
            let is_short = operation.is_short;
            if is_short { &mut self.short } else { &mut self.large }.push_front(operation);
            self.wake_one(is_short);
        }
    }

    /// An operation that came damaged is tried again.
    pub(super) fn retry(&mut self, operation: Operation) {
        self.queue_again(vec![operation]);
    }

    /// Wakes the least loaded stream that would take such a request.
    fn wake_one(&mut self, is_short: bool) {
        let least = if is_short { Wants::Short } else { Wants::Anything };
        let willing = self.entries.iter_mut().filter(|entry| entry.is_up && entry.wants >= least);
        if let Some(entry) = willing.min_by_key(|entry| entry.load) {
            entry.wants = Wants::Nothing;
            if let Some(waker) = &entry.waker {
                waker.wake_by_ref();
            }
        } else if self.short.len() + self.large.len() >= WAITING_MIN {
            self.is_short_of_streams = true;
        }
    }

    fn wake_all(&mut self) {
        for entry in &mut self.entries {
            if let Some(waker) = entry.waker.take() {
                waker.wake();
            }
        }
    }

    /// The next request for a stream that has `load` bytes unanswered, and room for large ones or not. If there is none,
    /// `waker` is woken when there is.
    pub(super) fn take(&mut self, place: ConnectionId, load: usize, room: Capacity, waker: &Waker) -> Taken {
        if !self.is_here(place) {
            return Taken::Over;
        }
        let has_room = room == Capacity::Anything;
        let large_is_due = self.streak >= SHORT_STREAK_MAX && has_room && !self.large.is_empty();
        let short = if large_is_due { None } else { self.short.pop_front() };
        self.streak = if short.is_some() { self.streak + 1 } else { 0 };
        let operation = short.or_else(|| if has_room { self.large.pop_front() } else { None });
        let entry = &mut self.entries[usize::from(place.stream)];
        entry.load = load;
        if entry.waker.as_ref().is_none_or(|own| !own.will_wake(waker)) {
            entry.waker = Some(waker.clone());
        }
        let Some(operation) = operation else {
            self.is_short_of_streams &= !(self.short.is_empty() && self.large.is_empty());
            entry.wants = if has_room { Wants::Anything } else { Wants::Short };
            entry.waits_for_path = if let Capacity::ShortOnPath(path) = room { Some(path) } else { None };
            return Taken::Nothing;
        };
        (entry.wants, entry.waits_for_path) = (Wants::Nothing, None);
        entry.load += operation.request.cost();
        // Whoever else would take something takes the next.
        if !self.short.is_empty() {
            self.wake_one(true);
        } else if !self.large.is_empty() {
            self.wake_one(false);
        }
        Taken::Operation(Box::new(operation))
    }

    /// A stream without room says how loaded it is. `waker` is woken when its session is over.
    pub(super) fn look(&mut self, place: ConnectionId, load: usize, waker: &Waker) -> Taken {
        if !self.is_here(place) {
            return Taken::Over;
        }
        let entry = &mut self.entries[usize::from(place.stream)];
        entry.load = load;
        (entry.wants, entry.waits_for_path) = (Wants::Nothing, None);
        if entry.waker.as_ref().is_none_or(|own| !own.will_wake(waker)) {
            entry.waker = Some(waker.clone());
        }
        Taken::Nothing
    }

    /// A path has room again: a stream that has waited for that is woken, if there is something for it.
    pub(super) fn path_is_free(&mut self, path: usize) {
        if self.large.is_empty() {
            return;
        }
        let waiting = self.entries.iter_mut().filter(|entry| entry.is_up && entry.waits_for_path == Some(path));
        if let Some(entry) = waiting.min_by_key(|entry| entry.load) {
            entry.waits_for_path = None;
            if let Some(waker) = &entry.waker {
                waker.wake_by_ref();
            }
        }
    }

    /// A request was answered.
    pub(super) fn finish(&mut self, operation: Operation, outcome: Result<Answered>) -> Finished {
        if outcome.is_ok() {
            match &operation.request {
                request if request.kind().is_mutation() && !operation.fua => self.answered += 1,
                Request::Flush => self.flushed = self.flushed.max(operation.covers),
                Request::Retire(stream, generation) => {
                    let orphans = self.orphans.remove(&(*stream, *generation)).unwrap_or_default();
                    self.queue_again(orphans);
                }
                _ => {}
            }
        } else if matches!(operation.request, Request::Retire(..)) && matches!(self.liveness, Liveness::Live) {
            let failed = self.lose("the other host could not end a lost stream");
            return Finished(operation, outcome, failed);
        }
        Finished(operation, outcome, Failed::nothing())
    }

    /// Whether the connection belongs to the session that is live.
    fn is_here(&self, place: ConnectionId) -> bool {
        !self.is_closed
            && matches!(self.liveness, Liveness::Live)
            && self.session == place.session
            && self.entries[usize::from(place.stream)].generation == place.generation
    }

    /// The stream is about to be dialled: the place of its next connection. `None` if its session is over.
    pub(super) fn dials(&mut self, session: u64, stream: u16) -> Option<ConnectionId> {
        if !self.is_live(session) {
            return None;
        }
        let entry = &mut self.entries[usize::from(stream)];
        entry.generation += 1;
        Some(ConnectionId { session, stream, generation: entry.generation })
    }

    /// Whether the session is the one that is live.
    pub(super) fn is_live(&self, session: u64) -> bool {
        !self.is_closed && matches!(self.liveness, Liveness::Live) && self.session == session
    }

    /// The connection works: it takes requests from now on. False if its session is over.
    pub(super) fn enter(&mut self, place: ConnectionId) -> bool {
        let is_here = self.is_here(place);
        if is_here {
            let entry = &mut self.entries[usize::from(place.stream)];
            *entry = StreamEntry::new(place.generation, true);
        }
        is_here
    }

    /// The number of the session that is opened next. The one before it is over.
    pub(super) fn next_session(&mut self) -> (u64, Failed) {
        let failed = match self.is_live(self.session) {
            true => self.lose("another session of this device is opened"),
            false => Failed::nothing(),
        };
        self.session += 1;
        (self.session, failed)
    }

    /// The session is open; its first stream has a connection of generation 1. `has_restarted` says whether the other
    /// machine was started again since the session before: then flushes that should have covered what was answered before
    /// fail. `None` if the device was closed, or another session opened.
    pub(super) fn begin_session(&mut self, session: u64, streams: u16, has_restarted: bool) -> Option<Failed> {
        if self.is_closed || self.session != session {
            return None;
        }
        let mut failed = Failed { operations: Vec::new(), kind: ErrorKind::Io, why: FORGOTTEN.to_owned() };
        if self.waits_when_lost && has_restarted && self.answered > self.flushed {
            self.has_forgotten = true;
            let is_flush = |operation: &Operation| matches!(operation.request, Request::Flush);
            let (flushes, others) = std::mem::take(&mut self.short).into_iter().partition(is_flush);
            self.short = others;
            failed.operations = Vec::from_iter::<VecDeque<_>>(flushes);
        }
        self.entries = (0..streams).map(|stream| StreamEntry::new(u32::from(stream == 0), false)).collect();
        self.liveness = Liveness::Live;
        Some(failed)
    }

    /// A connection has ended with `sent` unanswered. Gives what fails of it, and whether the session is over with it.
    pub(super) fn end(&mut self, place: ConnectionId, sent: Vec<Operation>, why: &Error) -> (Failed, bool) {
        if !self.is_here(place) {
            // The session was over before its streams knew.
            if self.replays() {
                self.queue_again(sent.into_iter().filter(|operation| !operation.is_of_session()).collect());
                return (Failed::nothing(), false);
            }
            return (Failed { operations: sent, kind: self.kind(), why: self.why() }, false);
        }
        self.entries[usize::from(place.stream)] = StreamEntry::new(place.generation, false);
        if self.entries.iter().any(|entry| entry.is_up) {
            let (again, orphans): (Vec<_>, Vec<_>) =
                sent.into_iter().partition(|operation| operation.request.changes_nothing());
            self.queue_again(again);
            if !orphans.is_empty() {
                self.orphans.insert((place.stream, place.generation), orphans);
                self.queue(Request::Retire(place.stream, place.generation).into(), None);
            }
            return (Failed::nothing(), false);
        }
        self.orphans.insert((place.stream, place.generation), sent);
        (self.lose(&format!("all streams to the other host are lost, the last one because: {}", why.chain())), true)
    }

    /// The session is over.
    fn lose(&mut self, why: &str) -> Failed {
        let waits = self.waits_when_lost && !self.is_closed;
        let session = self.session;
        self.liveness = Liveness::Lost(Lost { session, kind: ErrorKind::Disconnected, why: why.to_owned(), waits });
        let orphans: Vec<_> = std::mem::take(&mut self.orphans).into_values().flatten().collect();
        self.wake_all();
        if waits {
            self.queue_again(orphans.into_iter().filter(|operation| !operation.is_of_session()).collect());
            self.short.retain(|operation| !operation.is_of_session());
            return Failed::nothing();
        }
        self.fail(orphans)
    }

    /// Everything that waits fails, with what the loss of the session was.
    fn fail(&mut self, mut operations: Vec<Operation>) -> Failed {
        operations.extend(self.short.drain(..));
        operations.extend(self.large.drain(..));
        operations.sort_unstable_by_key(|operation| operation.id);
        Failed { operations, kind: self.kind(), why: self.why() }
    }

    /// Whether `session` is lost and no other has begun since.
    pub(super) fn is_lost_since(&self, session: u64) -> bool {
        matches!(&self.liveness, Liveness::Lost(lost) if lost.session == session)
    }

    /// Requests do not wait for the next session any longer: those that do fail, and those that come until it begins.
    pub(super) fn expire(&mut self, kind: ErrorKind, why: &str) -> Failed {
        let Liveness::Lost(lost) = &mut self.liveness else { return Failed::nothing() };
        *lost = Lost { session: lost.session, kind, why: why.to_owned(), waits: false };
        self.fail(Vec::new())
    }

    /// The device is not used any more.
    pub(super) fn close(&mut self) -> Failed {
        self.is_closed = true;
        self.lose("the connection to the other host was closed")
    }

    pub(super) const fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Whether streams that end now are meant to.
    pub(super) const fn is_leaving(&self) -> bool {
        self.is_leaving || self.is_closed
    }

    /// The number of the newest session.
    pub(super) const fn session(&self) -> u64 {
        self.session
    }

    /// Whether what a lost session leaves unanswered is sent again in the next.
    const fn replays(&self) -> bool {
        let is_awaited = match &self.liveness {
            Liveness::Live => true,
            Liveness::Lost(lost) => lost.waits,
        };
        self.waits_when_lost && !self.is_closed && is_awaited
    }

    const fn kind(&self) -> ErrorKind {
        match &self.liveness {
            Liveness::Live => ErrorKind::Disconnected,
            Liveness::Lost(lost) => lost.kind,
        }
    }

    fn why(&self) -> String {
        match &self.liveness {
            Liveness::Live => "another session has begun".to_owned(),
            Liveness::Lost(lost) => lost.why.clone(),
        }
    }
}

impl Operation {
    /// Whether it means nothing beyond its session.
    const fn is_of_session(&self) -> bool {
        matches!(self.request, Request::Retire(..) | Request::Leave)
    }
}

/// An operation that is over. It is answered after the queue is unlocked.
#[must_use]
pub(super) struct Finished(Operation, Result<Answered>, Failed);

impl Finished {
    pub(super) fn answer(self) {
        self.0.answer(self.1);
        self.2.answer();
    }
}
