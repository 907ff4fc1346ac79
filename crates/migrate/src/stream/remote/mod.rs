//! The sender's end: a device whose bytes are at the other end of several streams.
//!
//! ```text
//!            connect                  all streams are lost
//!   (none) ───────────▶ session live ──────────────────────▶ session lost
//!                         ▲   │ one of several is lost:           │
//!                         │   │ retire it, send again, redial     │ copy: everything fails with Disconnected, until
//!                         │   ▼                                   │       reconnect() is called
//!                      session live                               │ forward: requests wait; it reconnects by itself, and
//!                         ▲                                       │       after `reconnect_limit` they fail with TimedOut
//!                         └───────────────────────────────────────┘
//!                            open: the receiver answers when nothing of the old session is in flight any more
//! ```

mod inflight_window;
mod rate_limit;
mod send_queue;
#[cfg(test)]
mod send_queue_tests;
mod session;
mod stream;

pub use rate_limit::Pace;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use block::{
    BlockDevice, Buffer, BufferPool, Bytes, Error, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture, Mutation,
    MutationKind, RangeLock, Result,
};
use env::{EnvRef, Moment};
use filters::TokenBucket;
use futures::StreamExt;
use futures::future::join_all;
use futures::stream::FuturesUnordered;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use super::protocol::{
    Answer, Ask, LinkCounters, MapSummary, PAYLOAD_BYTES_MAX, Role, SessionRequest, USAGE_ADDRESSES_MAX, decode,
    encode, feature, parse_extents,
};
use super::statistics::Counters;
use super::{Dialer, StreamOptions, StreamPath, StreamStatistics};
use inflight_window::NumberedInflightWindow;
use send_queue::{Answered, Order, Request, SHORT_BYTES_MAX, SendQueue};

/// What reads that are larger than a frame are put together from.
const PIECES_POOL: Bytes = Bytes::mib(16);

/// What the other end said when a session was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// Which of this device's sessions it is, from 1 on.
    pub number: u64,
    /// Of the other end's program: new at each of its starts.
    pub instance: [u8; 16],
    /// Of the other end's machine: new at each of its boots.
    pub boot: [u8; 16],
    /// The version of the wire.
    pub version: u16,
    /// The features that are used, see [`feature`](super::protocol::feature).
    pub features: u64,
    /// The volume there. Its transfers may be larger than a frame: they are cut.
    pub geometry: Geometry,
    /// What the other end has of an earlier session of the job.
    pub earlier: Option<MapSummary>,
}

/// What is known of the other end.
#[derive(Clone, Copy)]
struct Known {
    info: SessionInfo,
    /// At least 1.
    transfer_bytes_max: u32,
}

/// A volume at the other end of several streams. Dropping it ends the session, and the other end is told if it can be;
/// [`close`](Self::close) also waits until it has given the volume up.
pub struct Remote {
    shared: Arc<Shared>,
}

struct Shared {
    env: EnvRef,
    dialer: Arc<dyn Dialer>,
    request: SessionRequest,
    options: StreamOptions,
    /// Says at the other end that two sessions are of one sender.
    sender: [u8; 16],
    send_queue: Mutex<SendQueue>,
    known: Mutex<Option<Known>>,
    counters: Counters,
    /// What each stream's network card has left for it.
    rates: Vec<TokenBucket>,
    /// What is under way on each path. Streams of which nobody says where they run share one.
    flights: Mutex<BTreeMap<Option<StreamPath>, NumberedInflightWindow>>,
    /// When a stream was last found to have died of a silence.
    silence: Mutex<Option<Moment>>,
    /// Two writes of the same bytes are never unanswered at once, so they cannot overtake each other on different streams.
    ranges: RangeLock,
    pieces: BufferPool,
    /// Streams that were ended for want of work are needed, or their session is over.
    more: Notify,
    /// Held while a session is being opened.
    opening: tokio::sync::Mutex<()>,
}

impl Remote {
    /// Opens a session with the other end. Its first stream is there when this returns, the others follow.
    ///
    /// # Errors
    /// The options make no sense, nobody can be reached, the other side speaks another version, or it refuses. The kind
    /// of a refusal is the other side's.
    pub async fn connect(
        env: EnvRef,
        dialer: Arc<dyn Dialer>,
        request: SessionRequest,
        options: StreamOptions,
    ) -> Result<Arc<Self>> {
        options.check()?;
        if request.volume.len().max(request.origin.len()) > 255 {
            return Err(Error::new(ErrorKind::Invalid, "the name of a volume has at most 255 bytes"));
        }
        let mut sender = [0; 16];
        sender[..8].copy_from_slice(&env.random().to_le_bytes());
        sender[8..].copy_from_slice(&env.random().to_le_bytes());
        let shared = Shared {
            send_queue: Mutex::new(SendQueue::new(waits(request.role, &options))),
            counters: Counters::new(options.streams),
            rates: (0..options.streams).map(|_| TokenBucket::new(env.clone(), None)).collect(),
            flights: Mutex::default(),
            silence: Mutex::default(),
            env,
            dialer,
            request,
            options,
            sender,
            known: Mutex::new(None),
            ranges: RangeLock::new(),
            pieces: BufferPool::new(PIECES_POOL),
            more: Notify::new(),
            opening: tokio::sync::Mutex::new(()),
        };
        let remote = Self { shared: Arc::new(shared) };
        remote.shared.open_session().await?;
        Ok(Arc::new(remote))
    }

    /// What the other end said when the newest session was opened.
    ///
    /// # Panics
    /// Never: there is no device without a session.
    #[must_use]
    pub fn session(&self) -> SessionInfo {
        self.shared.known().info
    }

    /// Whether the newest session is open: one of its streams is there or is being dialled.
    #[must_use]
    pub fn is_live(&self) -> bool {
        let send_queue = self.shared.send_queue.lock();
        send_queue.is_live(send_queue.session())
    }

    /// Opens a new session of the same job, after all streams were lost. What the old one has left in flight at the other
    /// end is finished there before this returns. A session that is still live is ended.
    ///
    /// # Errors
    /// Like [`connect`](Self::connect).
    pub async fn reconnect(&self) -> Result<SessionInfo> {
        self.shared.open_session().await
    }

    /// Asks whoever holds the volume at the other end, on any stream.
    ///
    /// # Errors
    /// What the other end says; `Disconnected` if nobody knows whether it was done.
    pub async fn call(&self, ask: Ask) -> Result<Answer> {
        let message = encode(&ask).map_err(|error| Error::new(ErrorKind::TooLarge, error.0))?;
        match self.shared.carry_out(Request::Control(message)).await? {
            Answered::Message(bytes) => decode(&bytes)
                .map_err(|error| Error::new(ErrorKind::Invalid, "the answer of the other host").with_source(error)),
            Answered::Done | Answered::Bytes(_) => Err(wrong_answer()),
        }
    }

    /// Limits what `stream` carries, in bytes a second; `None` lifts that. Requests of up to 32 KiB do not wait for it, as
    /// a guest may wait for them, but count. A stream that does not exist is ignored.
    pub fn set_rate(&self, stream: u16, rate: Option<u64>) {
        if let Some(bucket) = self.shared.rates.get(usize::from(stream)) {
            bucket.set_rate(rate);
        }
    }

    /// What the other end's interfaces have carried that have these addresses; `None` if it cannot say such things.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub async fn usage(&self, addresses: &[IpAddr]) -> Result<Option<Vec<Option<LinkCounters>>>> {
        if self.session().features & feature::USAGE == 0 {
            return Ok(None);
        }
        let addresses = addresses.iter().copied().take(USAGE_ADDRESSES_MAX).collect();
        match self.call(Ask::Usage { addresses }).await? {
            Answer::Usage(usage) => Ok(Some(usage)),
            _ => Err(wrong_answer()),
        }
    }

    /// The BLAKE3 digests of what the other end holds of these extents; `None` if it cannot say such things.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub async fn digests(&self, extents: &[Extent]) -> Result<Option<Vec<[u8; 32]>>> {
        if self.session().features & feature::DIGESTS == 0 {
            return Ok(None);
        }
        let extents = extents.iter().map(|extent| (extent.offset.0, extent.length.0)).collect();
        match self.call(Ask::Digests { extents }).await? {
            Answer::Digests(digests) => Ok(Some(digests)),
            _ => Err(wrong_answer()),
        }
    }

    /// Between which addresses each stream runs, as far as that is known.
    #[must_use]
    pub fn paths(&self) -> Vec<Option<StreamPath>> {
        (0..self.shared.options.streams).map(|stream| self.shared.dialer.path(stream)).collect()
    }

    /// What was sent and received so far.
    #[must_use]
    pub fn statistics(&self) -> StreamStatistics {
        self.shared.counters.read()
    }

    /// Takes leave: when this returns the other end has carried out all that it was asked and has given the volume up. Every
    /// request fails from now on.
    ///
    /// # Errors
    /// The other end could not be told; it finds out by itself.
    pub async fn close(&self) -> Result<()> {
        let left = self.shared.carry_out(Request::Leave).await;
        self.shared.send_queue.lock().close().answer();
        self.shared.more.notify_waiters();
        left.map(|_| ())
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let failed = self.shared.send_queue.lock().close();
        failed.answer();
        self.shared.more.notify_waiters();
    }
}

/// Whether requests wait for a lost session to be opened again.
fn waits(role: Role, options: &StreamOptions) -> bool {
    role == Role::Forward && !options.reconnect_limit.is_zero()
}

fn wrong_answer() -> Error {
    Error::new(ErrorKind::Internal, "a request was given another one's answer")
}

/// An answer that will never come.
fn gone() -> Error {
    Error::new(ErrorKind::Disconnected, "the connection to the other host has ended")
}

impl Shared {
    fn known(&self) -> Known {
        self.known.lock().expect("a device is connected when it is given out")
    }

    /// The largest power of two of bytes that the other end's device and `limit` allow in one frame.
    fn frame_bytes(&self, limit: u32) -> u64 {
        let bytes = self.known().transfer_bytes_max.min(limit);
        1 << bytes.ilog2()
    }

    /// What is under way on the path of `stream`.
    fn inflight_window_of(&self, stream: u16) -> NumberedInflightWindow {
        let mut flights = self.flights.lock();
        let number = flights.len();
        flights.entry(self.dialer.path(stream)).or_insert_with(|| (number, Arc::default())).clone()
    }

    /// The largest frame that no path takes long for while a guest writes.
    fn frame_bytes_now(&self) -> u32 {
        let now = self.now();
        let flights = self.flights.lock();
        let sizes = flights.values().filter_map(|(_, inflight_window)| inflight_window.lock().frame_bytes(now));
        sizes.min().unwrap_or(PAYLOAD_BYTES_MAX)
    }

    /// Into which frames a write of `length` is cut. A short one beside a copy is the guest's: from now on copies leave it room.
    fn frame_bytes_of(&self, length: usize) -> u64 {
        let limit = match self.request.role {
            Role::Copy if length <= SHORT_BYTES_MAX => {
                let now = self.now();
                self.flights.lock().values().for_each(|(_, inflight_window)| inflight_window.lock().guest_writes(now));
                self.options.frame_bytes
            }
            Role::Copy => self.options.frame_bytes.min(self.frame_bytes_now()),
            Role::Forward => self.options.frame_bytes,
        };
        self.frame_bytes(limit)
    }

    fn submit(&self, order: impl Into<Order>) -> Result<oneshot::Receiver<Result<Answered>>> {
        let mut send_queue = self.send_queue.lock();
        let answer = send_queue.submit(order);
        let is_short_of_streams = send_queue.is_short_of_streams();
        drop(send_queue);
        if is_short_of_streams {
            self.more.notify_waiters();
        }
        answer
    }

    async fn carry_out(&self, order: impl Into<Order>) -> Result<Answered> {
        self.submit(order)?.await.map_err(|_| gone())?
    }

    async fn mutate(&self, mutation: Mutation) -> Result<()> {
        let extent = mutation.extent();
        // It stays with the frames until all are answered, whatever becomes of this future.
        let lock = Arc::new(self.ranges.exclusive(extent).await);
        let frames: Vec<Request> = match mutation.kind() {
            MutationKind::Zeroes { may_unmap } => vec![Request::Zeroes(extent, *may_unmap)],
            MutationKind::Discard => vec![Request::Discard(extent)],
            MutationKind::Data(data) => extent
                .split_at_multiples(self.frame_bytes_of(data.len()))
                .map(|piece| {
                    let start = (piece.offset - extent.offset).as_usize();
                    let check = mutation.checks().and_then(|checks| checks.of(piece));
                    Request::Write(piece.offset, data.slice(start..start + piece.length.as_usize()), check)
                })
                .collect(),
        };
        let is_short = frames.iter().map(Request::cost).sum::<usize>() <= SHORT_BYTES_MAX;
        let fua = mutation.fua;
        let orders = frames.into_iter().map(|request| Order { request, is_short, fua, lock: Some(Arc::clone(&lock)) });
        let answers = orders.map(|order| self.submit(order)).collect::<Result<Vec<_>>>()?;
        drop(lock);
        // The first error counts, but it is not told before all of them have ended.
        let outcomes = join_all(answers).await;
        outcomes.into_iter().try_for_each(|outcome| outcome.map_err(|_| gone())?.map(|_| ()))
    }

    async fn fetch(&self, offset: Bytes, buffer: Buffer, is_short: bool) -> Result<Buffer> {
        let order = Order { is_short, ..Request::Read(offset, Some(buffer)).into() };
        match self.carry_out(order).await? {
            Answered::Bytes(buffer) => Ok(buffer),
            Answered::Done | Answered::Message(_) => Err(wrong_answer()),
        }
    }

    async fn read(&self, offset: Bytes, mut buffer: Buffer) -> Result<Buffer> {
        let unit = self.frame_bytes(self.frame_bytes_now());
        if buffer.len() as u64 <= unit {
            let is_short = buffer.len() <= SHORT_BYTES_MAX;
            return self.fetch(offset, buffer, is_short).await;
        }
        let whole = Extent::new(offset, buffer.len().into());
        let mut pieces: FuturesUnordered<_> = whole
            .split_at_multiples(unit)
            .map(|piece| async move {
                // Each holds its own buffer only: nobody waits for one while holding another.
                let room = self.pieces.acquire(piece.length.as_usize()).await;
                self.fetch(piece.offset, room, false).await.map(|read| (piece, read))
            })
            .collect();
        while let Some(outcome) = pieces.next().await {
            let (piece, read) = outcome?;
            let start = (piece.offset - offset).as_usize();
            buffer[start..start + read.len()].copy_from_slice(&read);
        }
        drop(pieces);
        Ok(buffer)
    }
}

impl BlockDevice for Remote {
    fn geometry(&self) -> Geometry {
        self.shared.known().info.geometry
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.shared.read(offset, buffer))
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(self.shared.mutate(mutation))
    }

    /// The other end does, and asks for what came damaged again.
    fn compares_checks(&self) -> bool {
        true
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async { self.shared.carry_out(Request::Flush).await.map(|_| ()) })
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(async move {
            match self.shared.carry_out(Request::Extents(extent)).await? {
                Answered::Message(bytes) => parse_extents(extent, &bytes)
                    .map_err(|error| Error::new(ErrorKind::Invalid, "the answer of the other host").with_source(error)),
                Answered::Done | Answered::Bytes(_) => Err(wrong_answer()),
            }
        })
    }
}
