//! One connection: takes requests, sends them together, receives answers in large pieces.
//!
//! ```text
//!   queue ──take──▶ zero? compress? checksum ──▶ outbox ──one writev of many──▶ transport
//!     ▲                                             │ until it is answered: sent
//!     └──finish── checksum ◀── into the reader's buffer ◀── inbox ◀──one large read── transport
//! ```
//! One task serves a connection in both directions. What is unanswered is bounded in bytes and requests, and what waits
//! for the transport in bytes. So a short request has little ahead of it.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::checksum::checksum_of;
use block::{Buffer, Data, Error, ErrorKind, Extent, Result};
use env::{Moment, Task};
use futures::FutureExt;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};

use super::Shared;
use super::inflight_window::ConnectionShare;
use super::rate_limit::Pace;
use super::send_queue::{Answered, Capacity, ConnectionId, Operation, Request, Taken};
use super::session::Connected;
use crate::stream::BoxTransport;
use crate::stream::codec::Compressor;
use crate::stream::compression_choice::{Decider, Meter, Plan};
use crate::stream::inbox::Inbox;
use crate::stream::outbox::{Body, Outbox};
use crate::stream::protocol::{Coding, HEADER_BYTES, Header, Kind, Status, flag};
use crate::stream::statistics::{OneStream, add};
use crate::zeroes::is_zero;

/// When so much waits for the transport, no more is taken: a short request that comes now has this before it.
const OUTBOX_BYTES: usize = 256 << 10;

/// Why a stream ends that is not needed.
const IDLE: &str = "there was nothing to be done";

/// How long a connection is kept to say that it will not be used any more.
const LEAVE_MAX: Duration = Duration::from_millis(500);

/// After so many rounds other tasks of this worker get their turn.
const ROUNDS_MAX: usize = 32;

/// After an answer of this size the next is likely to be large, too.
const LARGE_BYTES: u32 = 32 << 10;

/// A request that waits for its answer.
struct Sent {
    operation: Operation,
    kind: Kind,
    at: Moment,
    cost: usize,
    /// What it takes of the wire, in one direction or the other.
    wire: usize,
}

/// Where an answer's payload goes.
enum Target {
    Buffer(Buffer),
    Bytes(Vec<u8>),
}

/// An answer whose payload is being received.
struct Inbound {
    header: Header,
    sent: Sent,
    target: Target,
    filled: usize,
}

pub(super) struct Engine {
    shared: Arc<Shared>,
    place: ConnectionId,
    transport: BoxTransport,
    inbox: Inbox,
    /// `None`: a header comes next.
    inbound: Option<Inbound>,
    outbox: Outbox,
    is_unflushed: bool,
    sent: BTreeMap<u64, Sent>,
    load: usize,
    /// What is on its way over the stream's path.
    share: ConnectionShare,
    pace: Pace,
    compressor: Compressor,
    decider: Decider,
    meter: Meter,
    tick: Task,
    /// When there was last something to be done.
    worked: Moment,
    /// When the other side last proved that it lives, or this one began to need the proof.
    heard: Moment,
    spoke: Moment,
    /// Bytes that the transport has taken since the first request, and those that the other side is known to have got.
    given: u64,
    known: u64,
    received: u64,
}

impl Engine {
    pub(super) fn new(shared: Arc<Shared>, place: ConnectionId, connected: Connected) -> Self {
        let now = shared.now();
        let tick = shared.env.sleep(shared.options.beat / 2);
        let decider = Decider::new(shared.options.compression, connected.choice.features);
        let share = ConnectionShare::new(shared.inflight_window_of(place.stream));
        Self {
            shared,
            place,
            transport: connected.transport,
            inbox: Inbox::new(),
            inbound: None,
            outbox: Outbox::default(),
            is_unflushed: false,
            sent: BTreeMap::new(),
            load: 0,
            share,
            pace: Pace::default(),
            compressor: Compressor::default(),
            decider,
            meter: Meter::new(now),
            tick,
            worked: now,
            heard: now,
            spoke: now,
            given: 0,
            known: 0,
            received: 0,
        }
    }

    /// Whether this stream has had nothing to do for so long that it is not needed. The first of a session always is.
    fn is_idle(&self, now: Moment) -> bool {
        let is_quiet = self.sent.is_empty() && self.inbound.is_none() && self.outbox.is_empty();
        let limit = self.shared.options.idle_max.filter(|_| self.place.stream > 0);
        limit.is_some_and(|limit| is_quiet && now.since(self.worked) > limit)
    }

    /// Serves the connection until its end: why it ended, and what was not answered.
    pub(super) async fn run(mut self) -> (Error, Vec<Operation>) {
        let why = poll_fn(|task| self.poll(task)).await;
        if self.shared.send_queue.lock().is_closed() {
            self.take_leave().await;
        } else if why.kind() == ErrorKind::Cancelled {
            // In order: the other side need not wonder.
            let _ = env::timeout(&*Arc::clone(&self.shared.env), LEAVE_MAX, self.transport.shutdown()).await;
        }
        let mut operations: Vec<Operation> = self.sent.into_values().map(|sent| sent.operation).collect();
        if let Some(Inbound { sent, target, .. }) = self.inbound {
            operations.push(restore(sent.operation, target));
        }
        (why, operations)
    }

    /// Tells the other side that nobody will come back, as far as it hears.
    async fn take_leave(&mut self) {
        self.outbox.push(&Header::request(Kind::Leave, u64::MAX), Body::None, 0);
        let env = Arc::clone(&self.shared.env);
        let sending = poll_fn(|task| match self.send(task) {
            Ok(_) if !self.outbox.is_empty() || self.is_unflushed => Poll::Pending,
            _ => Poll::Ready(()),
        });
        let _ = env::timeout(&*env, LEAVE_MAX, sending).await;
        let _ = env::timeout(&*env, LEAVE_MAX, self.transport.shutdown()).await;
    }

    fn poll(&mut self, task: &mut Context<'_>) -> Poll<Error> {
        for _ in 0..ROUNDS_MAX {
            let has_moved = match self.step(task) {
                Ok(has_moved) => has_moved,
                Err(error) => return Poll::Ready(error),
            };
            if !has_moved {
                return Poll::Pending;
            }
        }
        task.waker().wake_by_ref();
        Poll::Pending
    }

    fn step(&mut self, task: &mut Context<'_>) -> Result<bool> {
        let mut has_moved = self.take(task)?;
        has_moved |= self.send(task)?;
        has_moved |= self.receive(task)?;
        if !has_moved && self.tick.poll_unpin(task).is_ready() {
            self.keep_time()?;
            has_moved = true;
        }
        Ok(has_moved)
    }

    fn counts(&self) -> &OneStream {
        &self.shared.counters.streams[usize::from(self.place.stream)]
    }

    /// Whether another stream has failed because of a silence since this one has heard anything. Then this one checks
    /// for silence even if no answer is due. Otherwise the same work would wait for the silence of one stream after
    /// another.
    fn is_doubtful(&self) -> bool {
        self.shared.silence.lock().is_some_and(|found| found > self.heard)
    }

    /// Looks whether the other side is still there, and says that this one is.
    fn keep_time(&mut self) -> Result<()> {
        let (now, options) = (self.shared.now(), &self.shared.options);
        let is_owed = !self.sent.is_empty() || self.inbound.is_some() || self.is_doubtful();
        if is_owed && now.since(self.heard) > options.silence_max {
            let silence = now.since(self.heard);
            *self.shared.silence.lock() = Some(now);
            return Err(Error::new(ErrorKind::TimedOut, format!("the other host has not been heard for {silence:?}")));
        }
        if self.is_idle(now) {
            return Err(Error::new(ErrorKind::Cancelled, IDLE));
        }
        if now.since(self.spoke) >= options.beat && self.outbox.is_empty() {
            let beat = Header { offset: self.received, ..Header::request(Kind::Beat, 0) };
            self.outbox.push(&beat, Body::None, 0);
        }
        self.tick = self.shared.env.sleep(options.beat / 2);
        Ok(())
    }

    /// Takes requests as far as there is room.
    fn take(&mut self, task: &mut Context<'_>) -> Result<bool> {
        let mut has_moved = false;
        let requests_max = self.shared.options.stream_requests_max;
        loop {
            let has_place = self.outbox.bytes() < OUTBOX_BYTES && self.sent.len() < requests_max;
            if has_moved && !has_place {
                return Ok(true);
            }
            let taken = match has_place {
                true => {
                    let room = self.capacity(task);
                    self.shared.send_queue.lock().take(self.place, self.load, room, task.waker())
                }
                false => self.shared.send_queue.lock().look(self.place, self.load, task.waker()),
            };
            match taken {
                Taken::Operation(operation) => self.start(*operation),
                Taken::Nothing => return Ok(has_moved),
                Taken::Over => return Err(Error::new(ErrorKind::Disconnected, "the session is over")),
            }
            has_moved = true;
        }
    }

    /// Whether what this stream has taken is paid.
    fn has_paid(&mut self, task: &mut Context<'_>) -> bool {
        self.pace.is_ready(&self.shared.rates[usize::from(self.place.stream)], &*self.shared.env, task)
    }

    /// What may be taken besides short requests.
    fn capacity(&mut self, task: &mut Context<'_>) -> Capacity {
        let bytes_max = self.shared.options.stream_bytes_max.as_usize();
        if self.load > 0 && self.load >= bytes_max || !self.has_paid(task) {
            return Capacity::Short;
        }
        match self.share.has_room(self.shared.now()) {
            true => Capacity::Anything,
            false => Capacity::ShortOnPath(self.share.path()),
        }
    }

    fn start(&mut self, operation: Operation) {
        let now = self.shared.now();
        self.worked = now;
        if self.sent.is_empty() {
            if !self.is_doubtful() {
                self.heard = now;
            }
            self.meter.busy(now);
        }
        let cost = operation.request.cost();
        let (header, body) = self.frame(&operation);
        let kind = header.kind;
        let reply_bytes = if kind == Kind::Read { cost } else { 0 };
        let wire = HEADER_BYTES + header.payload_bytes as usize + reply_bytes;
        add(&self.counts().requests, 1);
        self.outbox.push(&header, body, 0);
        self.pace.take(&self.shared.rates[usize::from(self.place.stream)], wire);
        self.load += cost;
        self.share.sent(wire);
        self.sent.insert(operation.id, Sent { operation, kind, at: now, cost, wire });
    }

    /// The frame that says what `operation` asks.
    fn frame(&mut self, operation: &Operation) -> (Header, Body) {
        let again = if operation.is_again { flag::AGAIN } else { 0 };
        let fua = if operation.fua { flag::FUA } else { 0 };
        let plain = Header { flags: again, ..Header::request(operation.request.kind(), operation.id) };
        let at = |extent: Extent| Header { offset: extent.offset.0, length: extent.length.0, ..plain };
        match &operation.request {
            Request::Read(offset, buffer) => {
                let length = buffer.as_ref().map_or(0, |buffer| buffer.len());
                (at(Extent::new(*offset, length.into())), Body::None)
            }
            Request::Write(offset, data, check) => {
                let extent = Extent::new(*offset, data.len().into());
                self.write_frame(Header { flags: again | fua, ..at(extent) }, data, *check)
            }
            Request::Zeroes(extent, may_unmap) => {
                let unmap = if *may_unmap { flag::MAY_UNMAP } else { 0 };
                (Header { flags: again | fua | unmap, ..at(*extent) }, Body::None)
            }
            Request::Discard(extent) => (Header { flags: again | fua, ..at(*extent) }, Body::None),
            Request::Extents(extent) => (at(*extent), Body::None),
            Request::Flush | Request::Leave => (plain, Body::None),
            Request::Retire(stream, generation) => {
                (Header { offset: u64::from(*stream), length: u64::from(*generation), ..plain }, Body::None)
            }
            Request::Control(message) => {
                let length = message.len();
                (plain.with_payload(message), Body::Bytes(message.clone(), length))
            }
        }
    }

    fn write_frame(&mut self, header: Header, data: &Data, check: Option<u64>) -> (Header, Body) {
        let counters = &self.shared.counters;
        let raw = data.len() as u64;
        add(&counters.bytes_raw, raw);
        if header.flags & flag::AGAIN != 0 {
            add(&counters.bytes_again, raw);
        }
        if is_zero(data) {
            add(&counters.bytes_zero, raw);
            return (Header { kind: Kind::Zeroes, ..header }, Body::None);
        }
        let header = match check {
            Some(check) => header.with_checked_payload(data.len(), check),
            None => header.with_payload(data),
        };
        let coding = match self.decider.plan(data.len()) {
            Plan::Raw => Coding::Raw,
            Plan::Probe => {
                let sample = self.compressor.probe(data);
                self.decider.code(sample)
            }
        };
        if coding != Coding::Raw {
            let began = self.shared.now();
            let compressed = self.compressor.compress(coding, data);
            let took = self.shared.now().since(began);
            let payload = compressed.as_ref().map_or(data.len(), |(_, length)| *length);
            self.decider.note_coded(coding, data.len(), payload, took);
            if let Some((bytes, length)) = compressed {
                add(&counters.bytes_compressed, raw);
                add(&counters.bytes_payload, length as u64);
                return (Header { coding, payload_bytes: length as u32, ..header }, Body::Bytes(bytes, length));
            }
        }
        add(&counters.bytes_payload, raw);
        (header, Body::Data(data.clone()))
    }

    fn send(&mut self, task: &mut Context<'_>) -> Result<bool> {
        let mut has_moved = false;
        while !self.outbox.is_empty() {
            let compressor = &mut self.compressor;
            let release = |body, _| {
                if let Body::Bytes(bytes, _) = body {
                    compressor.recycle(bytes);
                }
            };
            match self.outbox.poll_send(&mut *self.transport, task, release) {
                Poll::Ready(Ok(count)) => {
                    self.given += count as u64;
                    add(&self.counts().bytes_sent, count as u64);
                    has_moved = true;
                }
                Poll::Ready(Err(error)) => return Err(Error::from_os(error, "sending to the other host")),
                Poll::Pending => break,
            }
        }
        if has_moved {
            self.spoke = self.shared.now();
            self.is_unflushed = true;
        }
        // A transport that encrypts keeps bytes back while the network takes none, and must be asked again.
        if self.is_unflushed
            && let Poll::Ready(flushed) = Pin::new(&mut self.transport).poll_flush(task)
        {
            flushed.map_err(|error| Error::from_os(error, "sending to the other host"))?;
            self.is_unflushed = false;
        }
        Ok(has_moved)
    }

    fn receive(&mut self, task: &mut Context<'_>) -> Result<bool> {
        let mut has_moved = self.understand()?;
        let received = match &mut self.inbound {
            Some(Inbound { target, filled, .. }) if self.inbox.filled().is_empty() => {
                let mut room = ReadBuf::new(&mut target.bytes()[*filled..]);
                let polled = Pin::new(&mut self.transport).poll_read(task, &mut room);
                let count = room.filled().len();
                *filled += count;
                if count > 0 {
                    // A long answer over a slow path takes longer than the limit of silence, and is none.
                    self.heard = self.shared.now();
                }
                polled.map_ok(|()| Some(count))
            }
            _ => self.inbox.poll_fill(&mut *self.transport, task),
        };
        match received {
            Poll::Ready(Ok(Some(0))) => {
                return Err(Error::new(ErrorKind::Disconnected, "the other host has ended the connection"));
            }
            Poll::Ready(Ok(count)) => {
                let count = count.unwrap_or_default() as u64;
                self.received += count;
                add(&self.counts().bytes_received, count);
                has_moved = true;
            }
            Poll::Ready(Err(error)) => return Err(Error::from_os(error, "hearing the other host")),
            Poll::Pending => {}
        }
        Ok(has_moved | self.understand()?)
    }

    /// Takes all that is complete out of the inbox.
    fn understand(&mut self) -> Result<bool> {
        let mut has_moved = false;
        loop {
            let Some(Inbound { target, filled, .. }) = &mut self.inbound else {
                let Some(bytes) = self.inbox.filled().first_chunk::<HEADER_BYTES>() else { return Ok(has_moved) };
                let header = Header::parse(bytes).map_err(|error| broken(error.0))?;
                self.inbox.consume(HEADER_BYTES);
                self.begin(header)?;
                has_moved = true;
                continue;
            };
            let bytes = target.bytes();
            *filled += self.inbox.take_into(&mut bytes[*filled..]);
            if *filled < bytes.len() {
                return Ok(has_moved);
            }
            if let Some(Inbound { header, sent, target, .. }) = self.inbound.take() {
                self.heard = self.shared.now();
                self.complete(header, sent, target);
            }
            has_moved = true;
        }
    }

    fn begin(&mut self, header: Header) -> Result<()> {
        if !header.is_reply {
            return match header.kind {
                Kind::Beat => {
                    self.beat(&header);
                    Ok(())
                }
                _ => Err(broken("a receiver asks nothing")),
            };
        }
        self.heard = self.shared.now();
        self.inbox.expect_large(header.payload_bytes >= LARGE_BYTES);
        let Some(mut sent) = self.sent.remove(&header.id) else { return Err(broken("an answer to nothing")) };
        if sent.kind != header.kind {
            self.sent.insert(header.id, sent);
            return Err(broken("an answer to another request than was asked"));
        }
        let is_read = header.kind == Kind::Read && header.status == Status::Done;
        let buffer = match &mut sent.operation.request {
            Request::Read(_, buffer) if is_read => buffer.take(),
            _ => None,
        };
        let target = match buffer {
            Some(mut buffer) if buffer.len() as u64 == header.length => {
                if header.coding == Coding::Zero {
                    buffer.fill(0);
                    self.complete(header, sent, Target::Buffer(buffer));
                    return Ok(());
                }
                Target::Buffer(buffer)
            }
            Some(buffer) => {
                let sent = Sent { operation: restore(sent.operation, Target::Buffer(buffer)), ..sent };
                self.sent.insert(header.id, sent);
                return Err(broken("a read is answered with another length"));
            }
            None if header.payload_bytes == 0 => {
                self.complete(header, sent, Target::Bytes(Vec::new()));
                return Ok(());
            }
            None => Target::Bytes(vec![0; header.payload_bytes as usize]),
        };
        self.inbound = Some(Inbound { header, sent, target, filled: 0 });
        Ok(())
    }

    /// The other side is there. That counts only if it receives what this side sends. Otherwise one direction of the
    /// connection could be dead without notice.
    fn beat(&mut self, header: &Header) {
        let is_busy = header.length > 0;
        if header.offset > self.known || header.offset >= self.given || is_busy {
            self.heard = self.shared.now();
        }
        self.known = self.known.max(header.offset);
    }

    /// An answer is there entirely.
    fn complete(&mut self, header: Header, sent: Sent, target: Target) {
        let now = self.shared.now();
        self.load -= sent.cost;
        let took =
            (header.kind.is_mutation() || header.kind == Kind::Read).then(|| Duration::from_nanos(header.offset));
        let is_free = self.share.answered(now, sent.at, sent.wire, took);
        // A stream that has nothing because its path is full is not idle.
        if self.sent.is_empty() && is_free {
            self.meter.idle(now);
        }
        if let Some(took) = took
            && let Some(reading) = self.meter.answered(now, sent.at, sent.wire, took)
        {
            self.decider.note_link(reading);
        }
        let is_whole = header.payload_bytes == 0 || checksum_of(target.slice()) == header.payload_check;
        let words = |target: &Target| match is_whole {
            true => String::from_utf8_lossy(target.slice()).into_owned(),
            false => "its words came damaged".to_owned(),
        };
        let outcome = match header.status {
            Status::Done if is_whole => Ok(match target {
                Target::Buffer(buffer) => Answered::Bytes(buffer),
                Target::Bytes(bytes) if bytes.is_empty() => Answered::Done,
                Target::Bytes(bytes) => Answered::Message(bytes),
            }),
            Status::Failed(kind) => {
                let context = format!("the other host answered {:?} with {kind}: {}", sent.kind, words(&target));
                Err(Error::new(kind, context))
            }
            Status::Done | Status::Damaged => {
                let operation = restore(sent.operation, target);
                return self.damaged(operation);
            }
        };
        let mut send_queue = self.shared.send_queue.lock();
        let finished = send_queue.finish(sent.operation, outcome);
        if is_free {
            send_queue.path_is_free(self.share.path());
        }
        drop(send_queue);
        finished.answer();
    }

    /// A payload came damaged, here or there: it is sent again, unless that has been tried often enough.
    fn damaged(&self, mut operation: Operation) {
        add(&self.shared.counters.damaged, 1);
        operation.damages += 1;
        let mut send_queue = self.shared.send_queue.lock();
        if operation.damages <= self.shared.options.damage_max {
            send_queue.retry(operation);
            return;
        }
        let context = format!("a frame came damaged {} times", operation.damages);
        let finished = send_queue.finish(operation, Err(Error::new(ErrorKind::Corrupt, context)));
        drop(send_queue);
        finished.answer();
    }
}

fn broken(what: &'static str) -> Error {
    Error::new(ErrorKind::Invalid, format!("the other host broke the protocol: {what}"))
}

/// The operation with its buffer, to be sent again.
fn restore(mut operation: Operation, target: Target) -> Operation {
    if let (Request::Read(_, place), Target::Buffer(buffer)) = (&mut operation.request, target) {
        *place = Some(buffer);
    }
    operation
}

impl Target {
    fn bytes(&mut self) -> &mut [u8] {
        match self {
            Self::Buffer(buffer) => buffer,
            Self::Bytes(bytes) => bytes,
        }
    }

    fn slice(&self) -> &[u8] {
        match self {
            Self::Buffer(buffer) => buffer,
            Self::Bytes(bytes) => bytes,
        }
    }
}
