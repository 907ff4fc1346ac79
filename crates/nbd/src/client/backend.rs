//! An export of another server as the backend of a volume: several connections, made again when they are lost.
//!
//! ```text
//!               somebody asks                        the dial succeeds, what is kept is written again
//!   [down] ────────────────────▶ [dialling] ───────────────────────────────────────────────▶ [up]
//!     ▲                             │  ▲ rests, longer each time                               │
//!     │                             └──┘ fails                                                 │
//!     └───────────────────────────────────── any connection is lost ───────────────────────────┘
//! ```
//!
//! NBD has no lock, no epoch and no way to tell one server from its successor. So a server that comes back may be
//! another process, without what it had answered and not flushed. The consequence depends on the user:
//!
//! - **The target of a copy**: whatever is in flight fails as `Disconnected`. If something was answered and not
//!   flushed, the next flush fails, too. The copy has the source, and writes again what it must.
//! - **What serves a guest** ([`NbdBackend::serve_guest`]): a guest cannot repeat an answered write. Every write is
//!   kept in memory until a flush has succeeded or a newer, forced write has replaced it ([`block::Unflushed`]). It is
//!   written again, in the order of the answers, before a new session is used. For that order a write holds other
//!   requests for its bytes back until it is answered and kept. Requests wait for as long as `reconnect_limit` says,
//!   then fail as `TimedOut`; later ones try again.
//!
//! A server that is connected and answers nothing is not given up: it may still carry out its requests. A guest's
//! request fails as `TimedOut` after four times the patience, and its bytes stay locked until the server has answered
//! or is lost. Over TCP the kernel detects a dead or unreachable machine ([`crate::prepare_tcp`]).
//!
//! A server that answers `ESHUTDOWN` is lost as one that hangs up: another comes back in its place, if any does.
//!
//! A process that begins knows nothing of what its predecessor was answered. So an export that was used before
//! ([`NbdBackend::expecting`]) counts as one with an answered write that is neither kept nor flushed. As soon as a guest
//! relies on it, it is connected to and flushed. If the server is lost before that, the guest's next flush fails.
//!
//! What is kept dies with the process. So a process that ends flushes ([`NbdBackend::flush_answered`]) and puts on
//! record if that was in vain and something is [unflushed](NbdBackend::has_unflushed), or if a
//! [loss is to be told](NbdBackend::has_loss_to_tell) still. The next one begins with that loss
//! ([`NbdBackend::recall_loss`]): the guest's first flush fails.
//!
//! One risk remains: a dead connection's server may carry out a request after its successor has carried out a later one
//! on the same bytes. So a session is made [`SETTLE`] after the last one was lost, for a server to finish or drop its
//! requests.

mod requests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use block::{BlockDevice, Bytes, Error, ErrorKind, Geometry, IoFuture, Mutation, MutationKind, RangeLock, Result};
use env::{EnvRef, Moment};
use futures::future::{BoxFuture, try_join_all};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::NbdDevice;
use super::replay_log::ReplayLog;
use crate::NbdUri;

/// How long to wait before a lost server is dialled again: its requests are then done or dropped.
const SETTLE: Duration = Duration::from_millis(250);
/// Between two dials that fail: at first, and at most.
const REST_MIN: Duration = Duration::from_millis(100);
const REST_MAX: Duration = Duration::from_secs(2);
/// How long making a session may take, with all that is written again.
const SESSION_LIMIT: Duration = Duration::from_secs(60);
/// A guest's request fails when it was not answered for so many times the patience. A slow server may need longer than
/// an absent one, above all for a flush.
const ANSWER_LIMITS: u32 = 4;
/// How much is kept before it is flushed.
const KEPT_BYTES_MAX: Bytes = Bytes::mib(32);
/// How many writes are written again at once.
const REPLAYS_MAX: usize = 16;

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
    pub reconnect_limit: Duration,
    /// Where the volume ends, if the export may be larger, in bytes.
    pub size_limit: Option<Bytes>,
}

impl Default for BackendOptions {
    /// Four connections, half a minute, all of the export.
    fn default() -> Self {
        Self { connections: 4, reconnect_limit: Duration::from_secs(30), size_limit: None }
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
    /// Keeps the order of what is kept.
    ranges: RangeLock,
}

#[derive(Default)]
struct State {
    session: Option<Arc<Session>>,
    /// How many sessions there were.
    sessions: u64,
    /// How many dials have failed since the last session, and why the last one did.
    failures: u32,
    failure: Option<(ErrorKind, String)>,
    replay_log: ReplayLog,
    /// Something that was answered may be lost, and no caller has been told.
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
        let backend = Self::over(geometry, ReplayLog::default(), dial, env, options);
        let until = backend.shared.until();
        backend.shared.session(until).await?;
        Ok(backend)
    }

    /// What was connected to before and has `geometry`. Its server need not be there yet. What an earlier process was
    /// answered may not be durable.
    #[must_use]
    pub fn expecting(geometry: Geometry, dial: Arc<dyn Dial>, env: EnvRef, options: BackendOptions) -> Self {
        Self::over(geometry, ReplayLog::of_used(geometry.read_only), dial, env, options)
    }

    fn over(
        geometry: Geometry,
        replay_log: ReplayLog,
        dial: Arc<dyn Dial>,
        env: EnvRef,
        options: BackendOptions,
    ) -> Self {
        let shared = Arc::new(Shared {
            env: Arc::clone(&env),
            options,
            geometry,
            serves_guest: AtomicBool::new(false),
            state: Mutex::new(State { replay_log, ..State::default() }),
            wanted: Notify::new(),
            news: Notify::new(),
            flushing: tokio::sync::Mutex::default(),
            ranges: RangeLock::new(),
        });
        env.spawn(Box::pin(dialler(Arc::clone(&shared), dial)));
        Self { shared }
    }

    /// From now on a guest relies on it: writes are kept until they are flushed, and requests wait for a lost server.
    /// What was answered before is flushed as soon as the server is there.
    pub fn serve_guest(&self) {
        self.shared.serves_guest.store(true, Ordering::Release);
        if self.shared.owes_flush() {
            self.shared.env.spawn(Box::pin(Arc::clone(&self.shared).flush_what_came_before()));
        }
    }

    /// An earlier process could not have its server make durable what that had answered, and has told no guest: the
    /// next flush fails.
    pub fn recall_loss(&self) {
        self.shared.state.lock().has_lost = true;
    }

    /// The last flush of a process, which no guest hears of: unlike others it tells of no loss.
    ///
    /// # Errors
    /// What the server says, or that it is away.
    pub async fn flush_answered(&self) -> Result<()> {
        self.shared.flush_session().await
    }

    /// Whether something that was answered may be lost, and the next flush fails because of that.
    #[must_use]
    pub fn has_loss_to_tell(&self) -> bool {
        self.shared.state.lock().has_lost
    }

    /// Whether something was answered that is not known to be durable. Nothing is known of a server that was never
    /// reached.
    #[must_use]
    pub fn has_unflushed(&self) -> bool {
        let state = self.shared.state.lock();
        state.sessions > 0 && state.replay_log.is_unflushed()
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

/// Whether a dial that failed so may succeed later.
const fn may_pass(kind: ErrorKind) -> bool {
    !matches!(kind, ErrorKind::Invalid | ErrorKind::Unsupported | ErrorKind::PermissionDenied | ErrorKind::ReadOnly)
}

impl Shared {
    fn until(&self) -> Moment {
        self.env.now() + self.options.reconnect_limit
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
            (state.sessions, state.replay_log.to_replay())
        };
        if !replay.is_empty() {
            tracing::info!(writes = replay.len(), "writing again what the NBD server may have lost");
        }
        write_again(&first, replay).await?;
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
                let waited = self.options.reconnect_limit;
                let context = format!("the NBD server was away for the {waited:?} that a request waits{why}");
                return Err(Error::new(ErrorKind::TimedOut, context));
            }
        }
    }
}

/// Writes `replay` again. Its contents do not overlap; a discard is ordered with what came before and after it.
async fn write_again(connection: &NbdDevice, replay: Vec<Mutation>) -> Result<()> {
    let is_discard = |mutation: &Mutation| matches!(mutation.kind(), MutationKind::Discard);
    for together in replay.chunk_by(|one, next| !is_discard(one) && !is_discard(next)) {
        for group in together.chunks(REPLAYS_MAX) {
            let writes: Vec<IoFuture<'_, ()>> =
                group.iter().map(|mutation| connection.write(mutation.clone())).collect();
            try_join_all(writes).await?;
        }
    }
    Ok(())
}
