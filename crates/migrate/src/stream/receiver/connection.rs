//! One connection: receives requests in large pieces, carries out every complete one, sends the replies together.
//!
//! ```text
//!   transport ──one large read──▶ inbox ──payload──▶ a buffer of the pool ──▶ whole? expand ──▶ started and polled once
//!                                                    (waits when it is empty)                     │ done     │ pending
//!                                                                                                 ▼          ▼
//!   transport ◀──one writev of all─────────────────────────────────────────────────────── outbox ◀─── in flight
//! ```
//!
//! What is in flight is bounded in requests and bytes, replies that wait for the transport included. At the bound the
//! connection is not read, which slows its sender down. When the connection ends, or is told to stop, what is in flight
//! is finished first.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};

use crate::checksum::checksum_of;
use block::{Buffer, Error, ErrorKind, Result};
use env::{Moment, Task};
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, Stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::execute::{Context, Reply, execute};
use super::session::{Membership, Session};
use super::{Shared, malformed};
use crate::stream::BoxTransport;
use crate::stream::codec::Expander;
use crate::stream::inbox::Inbox;
use crate::stream::outbox::{Body, Outbox};
use crate::stream::protocol::{CONTROL_BYTES_MAX, Coding, HEADER_BYTES, Header, Kind, Malformed, feature};

/// When this much waits to be sent, it is sent before more requests are started.
const BATCH_BYTES: usize = 512 << 10;

/// After so many rounds other tasks of this worker get their turn.
const ROUNDS_MAX: usize = 32;

/// After a payload of this size the next is likely to be large, too.
const LARGE_BYTES: u32 = 32 << 10;

/// What is being received.
enum Inbound<'a> {
    Header,
    /// A frame whose payload waits for memory: for itself, and for what it expands to.
    Memory(Header, BoxFuture<'a, (Buffer, Option<Buffer>)>),
    /// A frame's payload, of which so many bytes are there.
    Payload(Header, Buffer, Option<Buffer>, usize),
}

/// How a connection ended.
enum End {
    /// The sender has closed it, has left, or it was retired.
    Orderly,
    Failed(Error),
}

pub(super) struct Engine<'a> {
    transport: BoxTransport,
    context: Context<'a>,
    features: u64,
    inbox: Inbox,
    inbound: Inbound<'a>,
    outbox: Outbox,
    is_unflushed: bool,
    in_flight: FuturesUnordered<BoxFuture<'a, Reply>>,
    /// Those that only wait for other connections to be finished. They are given up when this one ends: two that waited
    /// for each other would never be.
    waits: FuturesUnordered<BoxFuture<'a, Reply>>,
    requests: usize,
    bytes: usize,
    expander: Expander,
    end: Option<End>,
    /// Nobody receives what is sent.
    is_deaf: bool,
    /// The connection ends when all is sent.
    is_leaving: bool,
    tick: Task,
    heard: Moment,
    spoke: Moment,
    received: u64,
}

impl<'a> Engine<'a> {
    pub(super) fn new(
        transport: BoxTransport,
        shared: &'a Shared,
        session: &'a Session,
        membership: &'a Membership,
        features: u64,
    ) -> Self {
        let now = shared.env.now();
        let mut outbox = Outbox::default();
        let welcome = Header::request(Kind::Open, 0).reply().with_payload(&session.welcome);
        outbox.push(&welcome, Body::Bytes(session.welcome.clone(), session.welcome.len()), 0);
        Self {
            transport,
            context: Context { shared, session, membership },
            features,
            inbox: Inbox::new(),
            inbound: Inbound::Header,
            outbox,
            is_unflushed: false,
            in_flight: FuturesUnordered::new(),
            waits: FuturesUnordered::new(),
            // The welcome.
            requests: 1,
            bytes: 0,
            expander: Expander::default(),
            end: None,
            is_deaf: false,
            is_leaving: false,
            tick: shared.env.sleep(shared.limits.beat / 2),
            heard: now,
            spoke: now,
            received: 0,
        }
    }

    /// Serves the connection until its end and until nothing of it is in flight.
    pub(super) async fn run(mut self) -> Result<()> {
        poll_fn(|task| self.poll(task)).await;
        match self.end {
            Some(End::Failed(error)) => Err(error),
            Some(End::Orderly) | None => Ok(()),
        }
    }

    fn poll(&mut self, task: &mut TaskContext<'_>) -> Poll<()> {
        for _ in 0..ROUNDS_MAX {
            if self.end.is_none() && self.context.membership.is_stopped(task.waker()) {
                self.stop(End::Orderly);
            }
            let mut has_moved = self.poll_in_flight(task);
            has_moved |= self.receive(task);
            has_moved |= self.send(task);
            if self.end.is_some() && self.in_flight.is_empty() {
                return Poll::Ready(());
            }
            if !has_moved && self.tick.poll_unpin(task).is_ready() {
                self.keep_time();
                has_moved = true;
            }
            if !has_moved {
                return Poll::Pending;
            }
        }
        task.waker().wake_by_ref();
        Poll::Pending
    }

    /// Nothing is received any more, and nobody hears the answers.
    fn stop(&mut self, end: End) {
        self.end.get_or_insert(end);
        self.is_deaf = true;
        self.outbox.clear();
        self.waits.clear();
        // Memory that was waited for is not needed.
        self.inbound = Inbound::Header;
    }

    fn fail(&mut self, error: Error) {
        self.stop(End::Failed(error));
    }

    fn has_room(&self) -> bool {
        let limits = &self.context.shared.limits;
        self.requests == 0 || (self.requests < limits.requests_max && self.bytes < limits.bytes_max.as_usize())
    }

    /// Whether the transport is not read for want of memory or of requests being done.
    fn is_busy(&self) -> bool {
        match self.inbound {
            Inbound::Memory(..) => true,
            Inbound::Payload(..) => false,
            Inbound::Header => !self.has_room(),
        }
    }

    /// Whether no further request is begun for now.
    fn is_held(&self) -> bool {
        !self.has_room() || self.outbox.bytes() >= BATCH_BYTES
    }

    fn keep_time(&mut self) {
        let shared = self.context.shared;
        let now = shared.env.now();
        self.tick = shared.env.sleep(shared.limits.beat / 2);
        if self.end.is_some() {
            return;
        }
        if self.is_busy() || self.is_held() {
            // The sender cannot be heard while nothing is received. Whether it takes the answers is checked below.
            self.heard = now;
        }
        let silence = now.since(self.heard);
        if silence > shared.limits.silence_max {
            self.fail(Error::new(ErrorKind::TimedOut, format!("the sender has not been heard for {silence:?}")));
            return;
        }
        let unsent = now.since(self.spoke);
        if unsent > shared.limits.silence_max && !self.outbox.is_empty() {
            self.fail(Error::new(ErrorKind::TimedOut, format!("the sender has taken nothing for {unsent:?}")));
            return;
        }
        if unsent >= shared.limits.beat && self.outbox.is_empty() {
            let beat =
                Header { offset: self.received, length: u64::from(self.is_busy()), ..Header::request(Kind::Beat, 0) };
            self.requests += 1;
            self.outbox.push(&beat, Body::None, 0);
        }
    }

    fn poll_in_flight(&mut self, task: &mut TaskContext<'_>) -> bool {
        let mut has_moved = false;
        while !self.in_flight.is_empty()
            && let Poll::Ready(Some(reply)) = Pin::new(&mut self.in_flight).poll_next(task)
        {
            self.finish(reply);
            has_moved = true;
        }
        while !self.waits.is_empty()
            && let Poll::Ready(Some(reply)) = Pin::new(&mut self.waits).poll_next(task)
        {
            self.finish(reply);
            has_moved = true;
        }
        has_moved
    }

    fn finish(&mut self, reply: Reply) {
        self.is_leaving |= reply.is_last;
        if self.is_deaf {
            self.requests -= 1;
            self.bytes -= reply.cost;
        } else {
            self.outbox.push(&reply.header, reply.body, reply.cost);
        }
    }

    /// Carries a request out, and polls it once: many are done at once.
    fn start(&mut self, header: Header, payload: Option<Buffer>, task: &mut TaskContext<'_>) {
        let cost = cost_of(&header);
        let mut running = execute(self.context, header, payload, cost).boxed();
        match running.poll_unpin(task) {
            Poll::Ready(reply) => self.finish(reply),
            Poll::Pending if matches!(header.kind, Kind::Retire | Kind::Leave) => self.waits.push(running),
            Poll::Pending => self.in_flight.push(running),
        }
    }

    fn send(&mut self, task: &mut TaskContext<'_>) -> bool {
        let mut has_moved = false;
        while !self.outbox.is_empty() {
            let (requests, bytes) = (&mut self.requests, &mut self.bytes);
            let release = |_, cost| {
                *requests -= 1;
                *bytes -= cost;
            };
            match self.outbox.poll_send(&mut *self.transport, task, release) {
                Poll::Ready(Ok(_)) => has_moved = true,
                Poll::Ready(Err(error)) => {
                    self.fail(Error::from_os(error, "sending to the sender"));
                    return true;
                }
                Poll::Pending => break,
            }
        }
        if has_moved {
            self.spoke = self.context.shared.env.now();
            self.is_unflushed = true;
        }
        // A transport that encrypts keeps bytes back while the network takes none, and must be asked again.
        if self.is_unflushed
            && let Poll::Ready(flushed) = Pin::new(&mut self.transport).poll_flush(task)
        {
            self.is_unflushed = false;
            if let Err(error) = flushed {
                self.fail(Error::from_os(error, "sending to the sender"));
            }
        }
        if self.is_leaving && self.outbox.is_empty() && !self.is_unflushed && self.end.is_none() {
            self.stop(End::Orderly);
            has_moved = true;
        }
        has_moved
    }

    fn receive(&mut self, task: &mut TaskContext<'_>) -> bool {
        if self.end.is_some() {
            return false;
        }
        let mut has_moved = match self.understand(task) {
            Ok(has_moved) => has_moved,
            Err(error) => {
                self.fail(error);
                return true;
            }
        };
        let is_held = self.is_held();
        let received = match &mut self.inbound {
            Inbound::Memory(..) => return has_moved,
            Inbound::Header if is_held => return has_moved,
            Inbound::Payload(_, buffer, _, filled) if self.inbox.filled().is_empty() => {
                let mut room = ReadBuf::new(&mut buffer[*filled..]);
                let polled = Pin::new(&mut self.transport).poll_read(task, &mut room);
                let count = room.filled().len();
                *filled += count;
                polled.map_ok(|()| Some(count))
            }
            _ => self.inbox.poll_fill(&mut *self.transport, task),
        };
        match received {
            Poll::Ready(Ok(Some(0))) => self.stop(End::Orderly),
            Poll::Ready(Ok(count)) => {
                self.received += count.unwrap_or_default() as u64;
                self.heard = self.context.shared.env.now();
            }
            Poll::Ready(Err(error)) => self.fail(Error::from_os(error, "hearing the sender")),
            Poll::Pending => return has_moved,
        }
        has_moved = true;
        if self.end.is_none()
            && let Err(error) = self.understand(task)
        {
            self.fail(error);
        }
        has_moved
    }

    /// Takes all that is complete out of the inbox, as far as there is room.
    fn understand(&mut self, task: &mut TaskContext<'_>) -> Result<bool> {
        let mut has_moved = false;
        while self.advance(task)? {
            has_moved = true;
        }
        Ok(has_moved)
    }

    /// One step of receiving; false if it needs more bytes, memory, or room.
    fn advance(&mut self, task: &mut TaskContext<'_>) -> Result<bool> {
        match &mut self.inbound {
            Inbound::Header => {
                if self.is_held() {
                    return Ok(false);
                }
                let Some(bytes) = self.inbox.filled().first_chunk::<HEADER_BYTES>() else { return Ok(false) };
                let header = Header::parse(bytes).map_err(malformed)?;
                self.inbox.consume(HEADER_BYTES);
                self.begin(header, task)?;
                Ok(true)
            }
            Inbound::Memory(header, waiting) => {
                let Poll::Ready((buffer, expanded)) = waiting.poll_unpin(task) else { return Ok(false) };
                self.inbound = Inbound::Payload(*header, buffer, expanded, 0);
                Ok(true)
            }
            Inbound::Payload(_, buffer, _, filled) => {
                let count = self.inbox.take_into(&mut buffer[*filled..]);
                *filled += count;
                if *filled < buffer.len() {
                    return Ok(count > 0);
                }
                let Inbound::Payload(header, buffer, expanded, _) =
                    std::mem::replace(&mut self.inbound, Inbound::Header)
                else {
                    unreachable!("it was a payload a moment ago");
                };
                self.complete(header, buffer, expanded, task);
                Ok(true)
            }
        }
    }

    fn begin(&mut self, header: Header, task: &mut TaskContext<'_>) -> Result<()> {
        if header.is_reply || header.kind == Kind::Open {
            return Err(malformed(Malformed("a sender answers nothing, and opens once")));
        }
        let is_agreed = match header.coding {
            Coding::Raw => true,
            Coding::Lz4 => self.features & feature::LZ4 != 0,
            Coding::Zstd => self.features & feature::ZSTD != 0,
            Coding::Zero => false,
        };
        if !is_agreed {
            return Err(malformed(Malformed("a payload has a coding that was not agreed on")));
        }
        if header.kind == Kind::Beat {
            return Ok(());
        }
        self.requests += 1;
        self.bytes += cost_of(&header);
        if header.payload_bytes == 0 {
            self.start(header, None, task);
            return Ok(());
        }
        self.inbox.expect_large(header.payload_bytes >= LARGE_BYTES);
        let pool = &self.context.session.received;
        let wire = header.payload_bytes as usize;
        if header.coding == Coding::Raw {
            self.inbound = match pool.try_acquire(wire) {
                Some(buffer) => Inbound::Payload(header, buffer, None, 0),
                None => Inbound::Memory(header, Box::pin(async move { (pool.acquire(wire).await, None) })),
            };
            return Ok(());
        }
        let raw = header.length as usize;
        let both = async move {
            // Both buffers are taken at once. Two connections that each hold one and wait for another could deadlock.
            let (mut payload, expanded) = pool.acquire_two(raw).await;
            payload.set_len(wire);
            (payload, Some(expanded))
        };
        self.inbound = Inbound::Memory(header, Box::pin(both));
        Ok(())
    }

    /// A frame's payload is there entirely.
    fn complete(&mut self, header: Header, buffer: Buffer, expanded: Option<Buffer>, task: &mut TaskContext<'_>) {
        let data = match expanded {
            None => Some(buffer),
            Some(mut expanded) => {
                let outcome = self.expander.expand(header.coding, &buffer, &mut expanded);
                outcome.is_ok().then_some(expanded)
            }
        };
        match data.filter(|data| checksum_of(data) == header.payload_check) {
            Some(data) => self.start(header, Some(data), task),
            None => {
                tracing::warn!(?header, "a frame of another host came damaged");
                self.finish(Reply::damaged(&header, cost_of(&header)));
            }
        }
    }
}

/// How many bytes of the connection's allowance a request takes.
const fn cost_of(header: &Header) -> usize {
    match header.kind {
        Kind::Read => header.length as usize,
        Kind::Write => {
            header.length as usize + if matches!(header.coding, Coding::Raw) { 0 } else { header.length as usize }
        }
        Kind::Control | Kind::Extents => CONTROL_BYTES_MAX as usize,
        _ => 0,
    }
}
