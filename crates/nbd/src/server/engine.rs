//! The transmission: reads requests in large pieces, carries out every complete one, sends the replies together.
//!
//! ```text
//!   socket ──one large read──▶ inbox ──▶ every complete request is started and polled once
//!                                          │ done at once (page cache)          │ pending
//!                                          ▼                                    ▼
//!   socket ◀──one writev of all─────── outbox ◀──────────────────────────── in flight
//! ```
//!
//! One task serves a connection. What is in flight is bounded in requests and bytes, payloads that wait for the socket
//! included. At the bound the socket is not read, so only that client is slowed. Futures live in reused boxes, so a
//! request that is done at once costs no allocation here.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use block::Buffer;
use env::{Env, Task};
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, Stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::busy_poll::BusyPoll;
use super::connection_fence::Member;
use super::deadline::Deadline;
use super::execute::{Context, PAYLOAD_BYTES_MAX, execute};
use super::inbox::Inbox;
use super::load::Load;
use super::outbox::{Outbox, Reply};
use super::peer::{AskPeer, Peer};
use super::request_cell::{RequestCell, Running};
use super::{End, Export, Limits, Summary};
use crate::protocol::{Command, REQUEST_BYTES, Request};

/// Writes up to this size are taken from the inbox; the payload of larger ones is read straight into its buffer.
const INBOX_WRITE_BYTES_MAX: usize = 64 << 10;

/// When so many replies wait to be sent, they are sent before more requests are started. A client that handles the
/// first replies while the next are made is never idle.
const BATCH_REPLIES: usize = 4;

/// When this much waits to be sent, it is sent before more requests are started.
const BATCH_BYTES: usize = 512 << 10;

/// After so many rounds other tasks of this worker get their turn.
const ROUNDS_MAX: usize = 64;

/// Before a connection proves itself alive it gives its runtime this time to learn of the socket's end.
const PROOF_DELAY: Duration = Duration::from_millis(1);

/// Serves the transmission until the connection's end and until nothing of it is in flight.
pub(super) async fn serve<S>(
    (stream, ask_peer): (S, AskPeer<S>),
    inbox: Inbox,
    export: &Export,
    context: &Context,
    env: &dyn Env,
    limits: &Limits,
) -> Summary
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let (member, admission) = export.fence.join();
    let received = inbox.filled().len() as u64;
    let mut engine = Engine {
        stream,
        ask_peer,
        inbox,
        inbound: Inbound::Request,
        outbox: Outbox::default(),
        in_flight: FuturesUnordered::new(),
        idle: Vec::new(),
        load: Load::new(&context.quota),
        context,
        env,
        limits,
        member: Some(member),
        admission: Some(Box::pin(admission)),
        proof: Proof::NotOwed,
        turn: 0,
        end: None,
        is_deaf: false,
        is_unflushed: false,
        is_failure_sent: false,
        received,
        begun: 0,
        counts: Counts::default(),
        busy_poll: BusyPoll::default(),
        deadline: Deadline::default(),
        begin: |request, payload| execute(context, request, payload),
    };
    // The engine has a budget of its own. Tokio's would make reads pretend that the socket is empty, and a connection
    // proves its life by a socket that is.
    tokio::task::unconstrained(poll_fn(|task| engine.poll(task))).await;
    let end = engine.end.take().expect("the engine stops when the connection has ended");
    let Counts { requests, bytes_received, bytes_read } = engine.counts;
    Summary { export: Some(export.name().to_owned()), end, requests, bytes_received, bytes_read }
}

/// What is being received.
enum Inbound<'a> {
    /// The next request.
    Request,
    /// A write whose payload waits for a buffer.
    Buffer(Request, BoxFuture<'a, Buffer>),
    /// A write's payload, of which so many bytes are there.
    Payload(Request, Buffer, usize),
    /// The rest of a refused write's payload.
    Skip(usize),
}

/// Whether a later connection waits for this one to prove itself alive, and the kernel does not know.
enum Proof {
    NotOwed,
    /// The runtime gets its time.
    Delayed(u64, Task),
    /// The next read that finds the socket empty, but not at its end, is one half of the proof. So is that all has been
    /// begun which had been received up to this byte: what follows came later.
    Due(u64, u64),
    /// So many requests that were in flight then are the other.
    Draining(u64, usize),
}

#[derive(Default)]
struct Counts {
    requests: u64,
    bytes_received: u64,
    bytes_read: u64,
}

struct Engine<'a, S, B, F> {
    stream: S,
    /// Tells what the kernel knows of the client.
    ask_peer: AskPeer<S>,
    inbox: Inbox,
    inbound: Inbound<'a>,
    outbox: Outbox,
    in_flight: FuturesUnordered<Running<F>>,
    idle: Vec<RequestCell<F>>,
    load: Load<'a>,
    context: &'a Context,
    env: &'a dyn Env,
    limits: &'a Limits,
    /// Dropped when nothing is in flight after the end, which lets a successor in.
    member: Option<Member>,
    /// No request is started before this is done.
    admission: Option<BoxFuture<'a, ()>>,
    proof: Proof,
    /// Grows when a proof begins to wait for requests: it does not wait for those that are begun afterwards.
    turn: u32,
    /// Nothing is received any more.
    end: Option<End>,
    /// Nobody receives what is sent.
    is_deaf: bool,
    /// The stream may hold back what it was given, as TLS does.
    is_unflushed: bool,
    /// That a flush failed is among what the stream was given and may hold back.
    is_failure_sent: bool,
    /// How many bytes of the stream were received, and up to which of them all requests have been begun.
    received: u64,
    begun: u64,
    counts: Counts,
    busy_poll: BusyPoll,
    deadline: Deadline,
    begin: B,
}

impl<'a, S, B, F> Engine<'a, S, B, F>
where
    S: AsyncRead + AsyncWrite + Unpin,
    B: Fn(Request, Option<Buffer>) -> F,
    F: Future<Output = Reply>,
{
    fn poll(&mut self, task: &mut TaskContext<'_>) -> Poll<()> {
        for _ in 0..ROUNDS_MAX {
            self.poll_proof(task);
            let mut has_moved = self.poll_in_flight(task);
            has_moved |= self.start_requests(task);
            has_moved |= self.send(task);
            has_moved |= self.receive(task);
            if self.end.is_some() && self.in_flight.is_empty() {
                // Even if the client still fetches replies, its requests are finished: a successor may enter.
                self.member = None;
                if self.outbox.is_empty() && !self.is_unflushed {
                    return Poll::Ready(());
                }
            }
            if !has_moved && !self.has_stalled(task) {
                self.busy_poll(task);
                return Poll::Pending;
            }
            self.busy_poll.moved(self.env);
        }
        task.waker().wake_by_ref();
        Poll::Pending
    }

    /// Polls again at once, for a while, if the client is likely to ask again soon. Going to sleep and being woken
    /// takes longer than most clients need.
    fn busy_poll(&mut self, task: &mut TaskContext<'_>) {
        let awaits_client = self.end.is_none() && self.in_flight.is_empty() && self.outbox.is_empty();
        if awaits_client && self.busy_poll.polls_again(self.env, self.limits.busy_poll) {
            // Unlike a plain wake this has the runtime look at its sockets before it comes back.
            let _ = std::pin::pin!(tokio::task::yield_now()).poll(task);
        }
    }

    /// Ends the connection of a client that keeps buffers for too long.
    fn has_stalled(&mut self, task: &mut TaskContext<'_>) -> bool {
        let awaits_payload = self.end.is_none() && matches!(self.inbound, Inbound::Payload(..));
        if self.outbox.is_empty() && !self.is_unflushed && !awaits_payload {
            self.deadline.clear();
            return false;
        }
        let is_over = self.deadline.is_over(self.env, self.limits.stall_timeout, task);
        if is_over {
            self.end.get_or_insert(End::Stalled);
            self.deafen();
        }
        is_over
    }

    fn poll_proof(&mut self, task: &mut TaskContext<'_>) {
        let Some(question) = self.member.as_ref().and_then(|member| member.question(task.waker())) else { return };
        let peer = (self.ask_peer)(&self.stream);
        if self.end.is_some() || peer == Peer::Closed {
            self.member.as_ref().inspect(|member| member.leave());
        }
        // A client that reconnects has closed its old socket before.
        if self.end.is_none() && peer == Peer::Open {
            self.proof = Proof::NotOwed;
            self.member.as_ref().inspect(|member| member.prove(question));
            return;
        }
        if let Proof::NotOwed = self.proof {
            self.proof = Proof::Delayed(question, self.env.sleep(PROOF_DELAY));
        }
        if let Proof::Delayed(question, delay) = &mut self.proof
            && delay.poll_unpin(task).is_ready()
        {
            let unread = match (self.ask_peer)(&self.stream) {
                Peer::Unread(bytes) => bytes,
                Peer::Open | Peer::Closed | Peer::Unknown => u64::MAX,
            };
            self.proof = Proof::Due(*question, self.received.saturating_add(unread));
        }
        if let Proof::Due(question, last) = self.proof
            && self.begun >= last
        {
            self.await_begun(question);
        }
        if let Proof::Draining(question, 0) = self.proof {
            self.proof = Proof::NotOwed;
            self.member.as_ref().inspect(|member| member.prove(question));
            // Another question may have come meanwhile.
            self.poll_proof(task);
        }
    }

    /// One half of the proof is there: what is in flight now is the other.
    fn await_begun(&mut self, question: u64) {
        self.proof = Proof::Draining(question, self.in_flight.len());
        self.turn = self.turn.wrapping_add(1);
    }

    /// Whether all that was received has been begun, or cannot be without more bytes.
    fn awaits_bytes(&self) -> bool {
        let received = self.inbox.filled();
        match &self.inbound {
            Inbound::Request => received.first_chunk::<REQUEST_BYTES>().is_none_or(|header| {
                Request::parse(header).is_ok_and(|request| {
                    request.command == Command::Write && received.len() < REQUEST_BYTES + request.length as usize
                })
            }),
            Inbound::Buffer(..) => false,
            Inbound::Payload(_, buffer, filled) => received.len() < buffer.len() - filled,
            Inbound::Skip(_) => received.is_empty(),
        }
    }

    /// Collects the replies of requests that were not done at once.
    fn poll_in_flight(&mut self, task: &mut TaskContext<'_>) -> bool {
        let mut has_moved = false;
        while !self.in_flight.is_empty()
            && let Poll::Ready(Some((reply, cell, cost, turn))) = Pin::new(&mut self.in_flight).poll_next(task)
        {
            self.idle.push(cell);
            if let Proof::Draining(_, left) = &mut self.proof
                && turn != self.turn
            {
                *left -= 1;
            }
            self.finish(reply, cost);
            has_moved = true;
        }
        has_moved
    }

    /// Starts what is complete in the inbox, as far as the limits allow.
    fn start_requests(&mut self, task: &mut TaskContext<'_>) -> bool {
        if let Some(admission) = &mut self.admission {
            if self.end.is_some() || admission.poll_unpin(task).is_pending() {
                return false;
            }
            self.admission = None;
        }
        let mut has_moved = false;
        while self.end.is_none()
            && self.outbox.bytes() < BATCH_BYTES
            && self.outbox.len() < BATCH_REPLIES
            && self.advance(task)
        {
            has_moved = true;
        }
        has_moved
    }

    /// One step of receiving; false if it needs more bytes, a buffer, or room.
    fn advance(&mut self, task: &mut TaskContext<'_>) -> bool {
        match &mut self.inbound {
            Inbound::Request => self.begin_request(task),
            Inbound::Skip(left) => {
                let count = (*left).min(self.inbox.filled().len());
                self.inbox.consume(count);
                *left -= count;
                if *left == 0 {
                    self.inbound = Inbound::Request;
                }
                count > 0
            }
            Inbound::Buffer(request, waiting) => {
                let Poll::Ready(buffer) = waiting.poll_unpin(task) else { return false };
                self.inbound = Inbound::Payload(*request, buffer, 0);
                true
            }
            Inbound::Payload(_, buffer, filled) => {
                let count = self.inbox.take_into(&mut buffer[*filled..]);
                *filled += count;
                if *filled < buffer.len() {
                    return count > 0;
                }
                let Inbound::Payload(request, buffer, _) = std::mem::replace(&mut self.inbound, Inbound::Request)
                else {
                    unreachable!("it was a payload a moment ago");
                };
                self.start(request, Some(buffer), task);
                true
            }
        }
    }

    fn begin_request(&mut self, task: &mut TaskContext<'_>) -> bool {
        if !self.load.has_room(self.limits) {
            return false;
        }
        let Some(header) = self.inbox.filled().first_chunk::<REQUEST_BYTES>() else { return false };
        let Ok(request) = Request::parse(header) else {
            self.end = Some(End::Protocol("a request does not begin with its magic number"));
            return true;
        };
        if request.command == Command::Disconnect {
            self.end = Some(End::Disconnected);
            return true;
        }
        if let Err((errno, message)) = self.context.validate(&request) {
            return self.refuse(&request, Reply::error(self.context.is_structured, request.cookie, errno, message));
        }
        if request.command != Command::Write {
            self.inbox.consume(REQUEST_BYTES);
            self.start(request, None, task);
            return true;
        }
        self.begin_write(request, task)
    }

    fn begin_write(&mut self, request: Request, task: &mut TaskContext<'_>) -> bool {
        let length = request.length as usize;
        let is_small = length <= INBOX_WRITE_BYTES_MAX;
        if is_small && self.inbox.filled().len() < REQUEST_BYTES + length {
            return false;
        }
        self.inbox.consume(REQUEST_BYTES);
        let Some(mut buffer) = self.context.quota.try_acquire(length) else {
            self.inbound = Inbound::Buffer(request, Box::pin(self.context.quota.acquire(length)));
            return true;
        };
        if is_small {
            self.inbox.take_into(&mut buffer);
            self.start(request, Some(buffer), task);
        } else {
            self.inbound = Inbound::Payload(request, buffer, 0);
        }
        true
    }

    /// Answers a request that is not carried out, and skips its payload.
    fn refuse(&mut self, request: &Request, reply: Reply) -> bool {
        if request.command == Command::Write {
            if request.length > PAYLOAD_BYTES_MAX {
                self.end = Some(End::Protocol("a write is so large that skipping it would be an attack"));
                return true;
            }
            self.inbound = Inbound::Skip(request.length as usize);
            if request.length == 0 {
                self.inbound = Inbound::Request;
            }
        }
        self.inbox.consume(REQUEST_BYTES);
        self.counts.requests += 1;
        self.load.take(0);
        self.finish(reply, 0);
        true
    }

    fn start(&mut self, request: Request, payload: Option<Buffer>, task: &mut TaskContext<'_>) {
        self.counts.requests += 1;
        self.begun = self.received - self.inbox.filled().len() as u64;
        let cost = match request.command {
            Command::Read => {
                self.counts.bytes_read += u64::from(request.length);
                request.length as usize
            }
            Command::Write => {
                self.counts.bytes_received += u64::from(request.length);
                request.length as usize
            }
            _ => 0,
        };
        self.load.take(cost);
        let mut cell = self.idle.pop().unwrap_or_else(|| Box::pin(None));
        cell.set(Some((self.begin)(request, payload)));
        match cell.as_mut().as_pin_mut().expect("it was just seated").poll(task) {
            Poll::Ready(reply) => {
                cell.set(None);
                self.idle.push(cell);
                self.finish(reply, cost);
            }
            Poll::Pending => self.in_flight.push(Running::new(cell, cost, self.turn)),
        }
    }

    fn finish(&mut self, reply: Reply, cost: usize) {
        if self.is_deaf {
            self.load.release(cost);
        } else {
            self.outbox.push(reply, cost);
        }
    }

    fn send(&mut self, task: &mut TaskContext<'_>) -> bool {
        let mut has_moved = false;
        while !self.outbox.is_empty() {
            let (load, failure, waiting) = (&mut self.load, &mut self.is_failure_sent, self.outbox.bytes());
            let release = |cost, is_failed_flush| {
                load.release(cost);
                *failure |= is_failed_flush;
            };
            match self.outbox.poll_send(Pin::new(&mut self.stream), task, release) {
                Poll::Ready(Ok(())) => {
                    self.deadline.moved(waiting - self.outbox.bytes());
                    has_moved = true;
                }
                Poll::Ready(Err(error)) => {
                    self.fail(error);
                    return true;
                }
                Poll::Pending => {
                    self.is_unflushed |= has_moved;
                    return has_moved;
                }
            }
        }
        // What a full socket does not take now is sent only by a later poll of it.
        if has_moved || self.is_unflushed {
            match Pin::new(&mut self.stream).poll_flush(task) {
                Poll::Ready(Ok(())) => {
                    self.is_unflushed = false;
                    if std::mem::take(&mut self.is_failure_sent)
                        && let Some(sent) = &self.context.failed_flush_sent
                    {
                        sent();
                    }
                }
                Poll::Ready(Err(error)) => self.fail(error),
                Poll::Pending => self.is_unflushed = true,
            }
        }
        has_moved
    }

    fn receive(&mut self, task: &mut TaskContext<'_>) -> bool {
        if self.end.is_some() {
            return false;
        }
        let received = match &mut self.inbound {
            // It is all here, and begins once the replies before it are on their way: a read without room would look like the end.
            Inbound::Payload(_, buffer, filled) if *filled == buffer.len() => return false,
            Inbound::Payload(_, buffer, filled) if self.inbox.filled().is_empty() => {
                let mut room = ReadBuf::new(&mut buffer[*filled..]);
                let polled = Pin::new(&mut self.stream).poll_read(task, &mut room);
                let count = room.filled().len();
                *filled += count;
                self.deadline.moved(count);
                polled.map_ok(|()| count)
            }
            Inbound::Request if self.admission.is_none() && !self.load.has_room(self.limits) => return false,
            _ if self.inbox.is_full() => return false,
            _ => self.inbox.poll_fill(Pin::new(&mut self.stream), task),
        };
        match received {
            Poll::Ready(Ok(0)) => {
                self.end = Some(End::HungUp);
                self.deafen();
                true
            }
            Poll::Ready(Ok(count)) => {
                self.received += count as u64;
                true
            }
            Poll::Ready(Err(error)) => {
                self.fail(error);
                true
            }
            Poll::Pending => {
                let Proof::Due(question, _) = self.proof else { return false };
                if !self.awaits_bytes() {
                    return false;
                }
                self.await_begun(question);
                true
            }
        }
    }

    fn fail(&mut self, error: io::Error) {
        self.end.get_or_insert_with(|| End::from(error));
        self.deafen();
    }

    fn deafen(&mut self) {
        self.is_deaf = true;
        (self.is_unflushed, self.is_failure_sent) = (false, false);
        self.outbox.clear();
    }
}
