//! An export that is not ours as the backend of a volume: several connections, made again when they are lost.
//!
//! ```text
//!               somebody asks                        the dial succeeds, what is kept is written again
//!   [down] ────────────────────▶ [dialling] ───────────────────────────────────────────────▶ [up]
//!     ▲                             │  ▲ rests, longer each time                               │
//!     │                             └──┘ fails                                                 │
//!     └───────────────────────────────────── any connection is lost ───────────────────────────┘
//! ```
//!
//! NBD has no lock, no epoch and no way to tell one server from its successor. So a server that comes back may be another
//! process, without what it had answered and not flushed. What that means depends on who relies on it:
//!
//! - **The target of a copy**: whatever is in flight fails as `Disconnected`, and if something was answered and not
//!   flushed, the next flush fails, too. The copy has the source, and writes again what it must.
//! - **What serves a guest** ([`NbdBackend::serve_guest`]): a guest cannot write again what it was answered. Every
//!   write is kept in memory until a flush has succeeded, and is written again, in order, before a new session is used.
//!   Requests wait for as long as `patience` says, then fail as `TimedOut`; later ones try again.
//!
//! What cannot be helped: a request that a dead connection's server still carries out after its successor has carried
//! out a later one on the same bytes. A session is made [`SETTLE`] after the last one was lost, for a server to finish or
//! drop what it had.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use block::{BlockDevice, Buffer, Bytes, Error, ErrorKind, Extent, ExtentStatus, Geometry, IoFuture, Mutation, Result};
use env::{EnvRef, Moment};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::NbdDevice;
use super::kept::Kept;
use crate::NbdUri;

/// How long a lost server is left alone before it is dialled again: what it had in hand is then done or dropped.
const SETTLE: Duration = Duration::from_millis(250);
/// Between two dials that fail: at first, and at most.
const REST_MIN: Duration = Duration::from_millis(100);
const REST_MAX: Duration = Duration::from_secs(2);
/// How long making a session may take, with all that is written again.
const SESSION_LIMIT: Duration = Duration::from_secs(60);
/// How much is kept before it is flushed.
const KEPT_BYTES_MAX: u64 = 32 << 20;

/// How connections to one export are made.
pub trait Dial: Send + Sync + 'static {
    /// Makes one more.
    fn dial(&self) -> BoxFuture<'_, Result<NbdDevice>>;
}

/// Connects to what a URI names.
pub struct DialUri {
    uri: NbdUri,
    env: EnvRef,
}

impl DialUri {
    /// Connects to `uri`.
    #[must_use]
    pub const fn new(uri: NbdUri, env: EnvRef) -> Self {
        Self { uri, env }
    }
}

impl Dial for DialUri {
    fn dial(&self) -> BoxFuture<'_, Result<NbdDevice>> {
        Box::pin(NbdDevice::connect(&self.uri, &self.env))
    }
}

/// How an export is used.
#[derive(Clone, Copy, Debug)]
pub struct BackendOptions {
    /// How many connections are made, if the server says that several see the same; 1 to 16.
    pub connections: u16,
    /// How long a guest's request waits for a server that is away.
    pub patience: Duration,
    /// Where the volume ends, if the export may be larger, in bytes.
    pub size_limit: Option<Bytes>,
}

impl Default for BackendOptions {
    /// Four connections, half a minute, all of the export.
    fn default() -> Self {
        Self { connections: 4, patience: Duration::from_secs(30), size_limit: None }
    }
}

/// An export that is connected to again whenever it is lost. Dropping it takes leave of the server.
pub struct NbdBackend {
    shared: Arc<Shared>,
}

struct Shared {
    env: EnvRef,
    options: BackendOptions,
    geometry: Geometry,
    /// Whether a guest relies on it.
    serves_guest: AtomicBool,
    state: Mutex<State>,
    /// Somebody needs a session.
    wanted: Notify,
    /// There is a session, or a dial has failed.
    news: Notify,
    /// One flush of what is kept at a time.
    flushing: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    session: Option<Arc<Session>>,
    /// How many sessions there were.
    sessions: u64,
    /// How many dials have failed since the last session, and why the last one did.
    failures: u32,
    failure: Option<(ErrorKind, String)>,
    kept: Kept,
    /// Something that was answered may be lost, and nobody was told.
    has_lost: bool,
    is_closed: bool,
}

/// The connections between two losses.
struct Session {
    number: u64,
    connections: Vec<NbdDevice>,
    turn: AtomicUsize,
}

impl Session {
    fn connection(&self) -> &NbdDevice {
        &self.connections[self.turn.fetch_add(1, Ordering::Relaxed) % self.connections.len()]
    }
}

impl NbdBackend {
    /// Connects to an export now.
    ///
    /// # Errors
    /// What dialling says; an export that is too small for the volume is invalid.
    pub async fn connect(dial: Arc<dyn Dial>, env: EnvRef, options: BackendOptions) -> Result<Self> {
        let first = dial.dial().await?;
        let geometry = limited(first.geometry(), options.size_limit)?;
        drop(first);
        let backend = Self::expecting(geometry, dial, env, options);
        let until = backend.shared.until();
        backend.shared.session(until).await?;
        Ok(backend)
    }

    /// What was connected to before and has `geometry`. Its server need not be there yet.
    #[must_use]
    pub fn expecting(geometry: Geometry, dial: Arc<dyn Dial>, env: EnvRef, options: BackendOptions) -> Self {
        let shared = Arc::new(Shared {
            env: Arc::clone(&env),
            options,
            geometry,
            serves_guest: AtomicBool::new(false),
            state: Mutex::default(),
            wanted: Notify::new(),
            news: Notify::new(),
            flushing: tokio::sync::Mutex::default(),
        });
        env.spawn(Box::pin(dialler(Arc::clone(&shared), dial)));
        Self { shared }
    }

    /// From now on a guest relies on it: writes are kept until they are flushed, and requests wait for a lost server.
    pub fn serve_guest(&self) {
        self.shared.serves_guest.store(true, Ordering::Release);
    }

    /// How many connections there are now; none while the server is away.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.state.lock().session.as_ref().map_or(0, |session| session.connections.len())
    }
}

impl Drop for NbdBackend {
    fn drop(&mut self) {
        let session = {
            let mut state = self.shared.state.lock();
            state.is_closed = true;
            state.session.take()
        };
        drop(session);
        self.shared.wanted.notify_one();
    }
}

/// The part of an export that is the volume.
fn limited(mut geometry: Geometry, limit: Option<Bytes>) -> Result<Geometry> {
    if let Some(limit) = limit {
        if geometry.size < limit {
            let context = format!("the export has {} bytes and the volume {}", geometry.size.get(), limit.get());
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        geometry.size = limit;
    }
    Ok(geometry)
}

/// Makes a session whenever one is wanted and there is none. It runs where the backend was made, whichever worker asks.
async fn dialler(shared: Arc<Shared>, dial: Arc<dyn Dial>) {
    loop {
        shared.wanted.notified().await;
        let rest = {
            let state = shared.state.lock();
            match (&state.session, state.failures, state.sessions) {
                _ if state.is_closed => return,
                (Some(_), ..) => continue,
                (None, 0, 0) => Duration::ZERO,
                (None, 0, _) => SETTLE,
                (None, failures, _) => REST_MAX.min(REST_MIN * 2_u32.pow(failures.min(6) - 1)),
            }
        };
        shared.env.sleep(rest).await;
        let made = env::timeout(&*shared.env, SESSION_LIMIT, shared.make_session(&*dial)).await;
        let late = || Err(Error::new(ErrorKind::TimedOut, "the NBD server did not take back what it may have lost"));
        let mut state = shared.state.lock();
        match made.unwrap_or_else(late) {
            // Whoever wanted it has gone.
            Ok(_) if state.is_closed => return,
            Ok(session) => {
                tracing::info!(connections = session.connections.len(), "connected to the NBD server");
                (state.failures, state.failure) = (0, None);
                state.sessions += 1;
                state.session = Some(Arc::new(session));
            }
            Err(error) => {
                tracing::debug!(error = error.chain(), "no connection to the NBD server");
                state.failures = state.failures.saturating_add(1);
                state.failure = Some((error.kind(), error.chain()));
            }
        }
        drop(state);
        shared.news.notify_waiters();
    }
}

/// Whether a request may succeed on another connection.
fn is_lost(error: &Error) -> bool {
    error.kind() == ErrorKind::Disconnected
}

/// Whether a dial that failed so may succeed later.
const fn may_pass(kind: ErrorKind) -> bool {
    !matches!(kind, ErrorKind::Invalid | ErrorKind::Unsupported | ErrorKind::PermissionDenied | ErrorKind::ReadOnly)
}

impl Shared {
    fn until(&self) -> Moment {
        self.env.now() + self.options.patience
    }

    fn serves_guest(&self) -> bool {
        self.serves_guest.load(Ordering::Acquire)
    }

    /// Dials, and writes again what is kept, before anybody else can write.
    async fn make_session(&self, dial: &dyn Dial) -> Result<Session> {
        let first = dial.dial().await?;
        let found = limited(first.geometry(), Some(self.geometry.size))?;
        if found.request_alignment > self.geometry.request_alignment || (found.read_only && !self.geometry.read_only) {
            return Err(Error::new(ErrorKind::Invalid, "the NBD server has another export there than before"));
        }
        let (number, replay) = {
            let state = self.state.lock();
            (state.sessions, state.kept.to_replay())
        };
        if !replay.is_empty() {
            tracing::info!(writes = replay.len(), "writing again what the NBD server may have lost");
        }
        for mutation in replay {
            first.write(mutation).await?;
        }
        let mut connections = vec![first];
        if connections[0].is_consistent_over_connections() {
            for _ in 1..self.options.connections.clamp(1, 16) {
                match dial.dial().await {
                    Ok(connection) => connections.push(connection),
                    // A server that takes no more of them is used with those that it took.
                    Err(error) => {
                        tracing::debug!(error = error.chain(), "no further connection to the NBD server");
                        break;
                    }
                }
            }
        }
        Ok(Session { number, connections, turn: AtomicUsize::new(0) })
    }

    /// The session, once there is one.
    async fn session(&self, until: Moment) -> Result<Arc<Session>> {
        let mut dialled = None;
        loop {
            let news = self.news.notified();
            {
                let state = self.state.lock();
                if let Some(session) = &state.session {
                    return Ok(Arc::clone(session));
                }
                if let (Some((kind, failure)), Some(before)) = (&state.failure, dialled)
                    && state.failures > before
                    && !(self.serves_guest() && may_pass(*kind))
                {
                    return Err(Error::new(*kind, failure.clone()));
                }
                dialled = Some(state.failures);
            }
            self.wanted.notify_one();
            if env::timeout(&*self.env, until.since(self.env.now()), news).await.is_none() {
                let state = self.state.lock();
                let why = state.failure.as_ref().map_or_else(String::new, |(_, failure)| format!(": {failure}"));
                let waited = self.options.patience;
                let context = format!("the NBD server was away for the {waited:?} that a request waits{why}");
                return Err(Error::new(ErrorKind::TimedOut, context));
            }
        }
    }

    /// `session` is lost with a request in flight. Whoever relies on nothing but answers is told; a guest's request is
    /// to be sent again.
    fn lose(&self, session: &Session, error: Error) -> Result<()> {
        let mut state = self.state.lock();
        if state.session.as_ref().is_some_and(|current| current.number == session.number) {
            tracing::warn!(error = error.chain(), "the NBD server is lost");
            state.session = None;
            state.has_lost |= state.kept.misses_something();
        }
        drop(state);
        if self.serves_guest() { Ok(()) } else { Err(error) }
    }

    /// A write was answered; false if its session is over, so that its successor need not have it.
    fn note_answer(&self, session: &Session, number: Option<u64>, is_durable: bool) -> bool {
        let mut state = self.state.lock();
        let is_current = state.session.as_ref().is_some_and(|current| current.number == session.number);
        match number {
            _ if !is_current => {}
            Some(number) if is_durable => state.kept.forget(number),
            None if is_durable => {}
            number => state.kept.answer(number),
        }
        is_current
    }

    /// Keeps a write before it is sent, if it is for a guest.
    async fn keep(&self, mutation: &Mutation) -> Option<Place<'_>> {
        if !self.serves_guest() {
            return None;
        }
        if self.state.lock().kept.bytes() > KEPT_BYTES_MAX {
            let _turn = self.flushing.lock().await;
            if self.state.lock().kept.bytes() > KEPT_BYTES_MAX
                && let Err(error) = self.sync().await
            {
                // The guest asks for this itself sooner or later, and is told then.
                tracing::warn!(error = error.chain(), "what the NBD server has taken could not be flushed");
                let mut state = self.state.lock();
                state.has_lost = true;
                state.kept.give_up();
            }
        }
        let number = self.state.lock().kept.add(mutation);
        Some(Place { shared: self, number, is_settled: false })
    }

    async fn mutate(&self, mutation: Mutation) -> Result<()> {
        let until = self.until();
        let mut place = self.keep(&mutation).await;
        loop {
            let session = self.session(until).await?;
            let connection = session.connection();
            match connection.write(mutation.clone()).await {
                Ok(()) => {
                    let is_durable = mutation.fua || !connection.can_flush();
                    if self.note_answer(&session, place.as_ref().map(|place| place.number), is_durable) {
                        place.as_mut().into_iter().for_each(|place| place.is_settled = true);
                        return Ok(());
                    }
                    if !self.serves_guest() {
                        return Err(super::pump::disconnected());
                    }
                }
                Err(error) if is_lost(&error) => self.lose(&session, error)?,
                Err(error) => return Err(error),
            }
        }
    }

    async fn sync(&self) -> Result<()> {
        let until = self.until();
        loop {
            let session = self.session(until).await?;
            let mark = {
                let mut state = self.state.lock();
                if std::mem::take(&mut state.has_lost) {
                    let context = "the NBD server was lost with writes that it had answered and not flushed";
                    return Err(Error::new(ErrorKind::Disconnected, context));
                }
                state.kept.mark()
            };
            match session.connection().flush().await {
                Ok(()) => {
                    let mut state = self.state.lock();
                    if state.session.as_ref().is_some_and(|current| current.number == session.number) {
                        state.kept.flushed(mark);
                        return Ok(());
                    }
                    drop(state);
                    if !self.serves_guest() {
                        return Err(super::pump::disconnected());
                    }
                }
                Err(error) if is_lost(&error) => self.lose(&session, error)?,
                Err(error) => return Err(error),
            }
        }
    }

    async fn fetch(&self, offset: Bytes, buffer: Buffer) -> Result<Buffer> {
        let (until, length) = (self.until(), buffer.len());
        let mut given = Some(buffer);
        loop {
            let session = self.session(until).await?;
            // The first went with the connection.
            let buffer = given.take().unwrap_or_else(|| Buffer::unpooled(length));
            match session.connection().read(offset, buffer).await {
                Err(error) if is_lost(&error) => self.lose(&session, error)?,
                answer => return answer,
            }
        }
    }

    async fn describe(&self, extent: Extent) -> Result<Vec<ExtentStatus>> {
        let until = self.until();
        loop {
            let session = self.session(until).await?;
            match session.connection().extents(extent).await {
                Err(error) if is_lost(&error) => self.lose(&session, error)?,
                answer => return answer,
            }
        }
    }
}

/// Where a write that is under way is kept. One that fails or is given up is kept no longer.
struct Place<'a> {
    shared: &'a Shared,
    number: u64,
    is_settled: bool,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.is_settled {
            self.shared.state.lock().kept.forget(self.number);
        }
    }
}

impl BlockDevice for NbdBackend {
    fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    fn read(&self, offset: Bytes, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.shared.fetch(offset, buffer))
    }

    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        Box::pin(self.shared.mutate(mutation))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.shared.sync())
    }

    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        Box::pin(self.shared.describe(extent))
    }
}
