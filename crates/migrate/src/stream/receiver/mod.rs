//! The receiver's end: connections of several hosts, the sessions that they form, and what is asked of volumes over them.
//!
//! ```text
//!                      open, from whoever may
//!   (no session) ─────────────────────────────▶ open ──────────────────────────▶ over ──▶ (no session)
//!                 the session before it of the   │  ▲ streams join, end,         ▲  nothing of it is in flight: its
//!                 same job is over first         └──┘ join again                 │  device is dropped
//!                                                                                │
//!                                     its sender leaves, or opens another, or has had no stream for `idle_limit`
//! ```
//!
//! The earlier session must be over before the volume is opened, and is gone if that fails. So what can be checked
//! without opening anything is checked first. An opening that is refused by that check ends no session.

mod connection;
mod execute;
mod memory_share;
mod session;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use block::{BufferPool, Bytes, Device, Error, ErrorKind, Result};
use env::EnvRef;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use uuid::Uuid;

use super::options::STREAMS_MAX;
use super::protocol::{
    Answer, Ask, HEADER_BYTES, HELLO_BYTES, Header, Hello, Kind, Malformed, MapSummary, Opening, SessionRequest,
    Status, VERSION, Welcome, choose, clip, encode, feature,
};
use super::{BoxTransport, OnOpened, ReceiverLimits};
use connection::Engine;
use memory_share::Share;
use session::{Membership, Session};

/// Errors tell this much of themselves.
const WORDS_BYTES_MAX: usize = 1024;

/// Who is at the other end, as the receiving daemon knows it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerName(pub String);

impl fmt::Display for PeerName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

/// A volume that was opened for a session.
pub struct Opened {
    /// The volume. It is dropped when the session is over and nothing of it is in flight.
    pub device: Device,
    /// Of this program: new at each of its starts.
    pub instance: [u8; 16],
    /// Of this machine: new at each of its boots.
    pub boot: [u8; 16],
    /// What there is of an earlier session of the job, durably.
    pub earlier: Option<MapSummary>,
}

/// What the receiver asks of whoever holds volumes.
pub trait SessionHandler: Send + Sync {
    /// Whether a session may replace the one in use of `peer` and the same job, as far as that is known without a
    /// change. A refusal here leaves the session in use as it is. Otherwise [`open`](Self::open) is called when that
    /// session is over, and may still refuse.
    ///
    /// # Errors
    /// Those of [`open`](Self::open): told to the sender as they are.
    fn check(&self, peer: &PeerName, request: &SessionRequest) -> Result<()>;

    /// Opens the volume for a session of `peer`; with [`Role::Forward`](super::Role::Forward) and an epoch that is
    /// prepared this takes the volume first. When it is called nothing of the job's session before is in flight, and the
    /// device of that one is dropped.
    ///
    /// # Errors
    /// The peer may not, there is no such volume, it does not fit, the epoch is old: told to the sender as it is.
    fn open(&self, peer: &PeerName, request: &SessionRequest) -> BoxFuture<'_, Result<Opened>>;

    /// Answers what the sender asks within a session. The same may be asked again after a reconnect, whether it was done
    /// or not.
    ///
    /// # Errors
    /// Told to the sender as it is.
    fn ask(&self, peer: &PeerName, request: &SessionRequest, ask: Ask) -> BoxFuture<'_, Result<Answer>>;
}

/// Serves the wire. All connections of one process share one.
pub struct Receiver {
    shared: Shared,
}

struct Shared {
    env: EnvRef,
    handler: Arc<dyn SessionHandler>,
    limits: ReceiverLimits,
    /// What is received of all sessions beside their shares,
    pool: BufferPool,
    /// and what is answered. A sender that takes no answers does not delay other senders' requests.
    answers: BufferPool,
    connections: AtomicUsize,
    sessions: Mutex<BTreeMap<Key, Arc<SessionEntry>>>,
}

/// Whose session it is. Moves that an arbiter decides on as one have one job.
type Key = (PeerName, Uuid, String);

fn key_of(peer: &PeerName, request: &SessionRequest) -> Key {
    (peer.clone(), request.job, request.volume.clone())
}

/// Where the session of one job sits. Locked while it is opened or ended.
#[derive(Default)]
struct SessionEntry {
    current: tokio::sync::Mutex<Option<Arc<Session>>>,
}

/// One of the connections that there may be.
struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Receiver {
    /// A receiver without connections.
    ///
    /// # Panics
    /// If a session's share is smaller than 2 MiB.
    #[must_use]
    pub fn new(env: EnvRef, handler: Arc<dyn SessionHandler>, limits: ReceiverLimits) -> Arc<Self> {
        assert!(limits.share >= Bytes::mib(2), "a frame of the largest size and what it expands to need 2 MiB");
        let answers = Bytes(limits.pool.get() / 4);
        let shared = Shared {
            env,
            handler,
            limits,
            pool: BufferPool::new(limits.pool - answers),
            answers: BufferPool::new(answers),
            connections: AtomicUsize::new(0),
            sessions: Mutex::new(BTreeMap::new()),
        };
        Arc::new(Self { shared })
    }

    /// How many bytes of memory for payloads are in use, by sessions that are open.
    #[must_use]
    pub fn pool_in_use(&self) -> Bytes {
        let common = self.shared.pool.in_use() + self.shared.answers.in_use();
        let sessions: Vec<_> = self.shared.sessions.lock().values().cloned().collect();
        // One that is being opened or ended has nothing in flight, or soon.
        let sessions = sessions.iter().filter_map(|entry| entry.current.try_lock().ok()?.clone());
        sessions.fold(common, |sum, session| sum + session.received.own_in_use() + session.answered.own_in_use())
    }

    /// How many connections there are.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// How many sessions there are, those that wait for their sender to come back included.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.shared.sessions.lock().len()
    }

    /// Serves one connection of `peer`, whose identity the caller has made sure of, until its end. When this returns
    /// nothing of it is in flight.
    ///
    /// # Errors
    /// It could not be opened, it broke the protocol, or it was lost. An orderly end is none.
    pub async fn serve(self: &Arc<Self>, transport: BoxTransport, peer: PeerName) -> Result<()> {
        self.serve_telling(transport, peer, Box::new(|_| ())).await
    }

    /// The same, and tells `opened` what the connection is for.
    ///
    /// # Errors
    /// As [`serve`](Self::serve).
    pub async fn serve_telling(
        self: &Arc<Self>,
        mut transport: BoxTransport,
        peer: PeerName,
        opened: OnOpened,
    ) -> Result<()> {
        let shared = &self.shared;
        let limits = &shared.limits;
        let before = shared.connections.fetch_add(1, Ordering::Relaxed);
        let _counted = Counted(&shared.connections);
        let opening = env::timeout(&*shared.env, limits.opening_max, receive_opening(&mut transport)).await;
        let late = || Error::new(ErrorKind::TimedOut, format!("{peer} said nothing for {:?}", limits.opening_max));
        let (opening, features) = opening.ok_or_else(late)??;
        let admitted = match shared.check_place(&opening, before) {
            Ok(()) => shared.admit(&peer, &opening).await,
            Err(error) => Err(error),
        };
        let (session, membership) = match admitted {
            Ok(admitted) => admitted,
            Err(error) => {
                let refusing = refuse(&mut transport, &error);
                // Whether the peer hears it or not, it is refused.
                let _ = env::timeout(&*shared.env, limits.opening_max, refusing).await;
                return Err(error.wrap(format!("{peer} was refused")));
            }
        };
        opened(&session.request);
        tracing::info!(%peer, volume = session.request.volume, stream = opening.stream, "a stream of another host");
        let engine = Engine::new(transport, shared, &session, &membership, features);
        let outcome = engine.run().await;
        drop(membership);
        self.after(&peer, session).await;
        outcome
    }

    /// A connection has ended: if it was the last of its session, that does not stay open for ever.
    async fn after(self: &Arc<Self>, peer: &PeerName, session: Arc<Session>) {
        if !session.is_deserted() {
            return;
        }
        let key = key_of(peer, &session.request);
        if session.is_over() {
            self.shared.forget(&key, &session).await;
            return;
        }
        let receiver = Arc::clone(self);
        let since = session.desertions();
        self.shared.env.spawn(Box::pin(async move {
            receiver.shared.env.sleep(receiver.shared.limits.idle_limit).await;
            // Unless it was used since, nobody comes back.
            if session.is_deserted() && session.desertions() == since {
                receiver.shared.forget(&key, &session).await;
            }
        }));
    }
}

impl Shared {
    /// Whether there is a place for one more connection beside so many. The first one of a session finds one when further
    /// streams of others do not any more.
    fn check_place(&self, opening: &Opening, others: usize) -> Result<()> {
        let limits = &self.limits;
        let most = if opening.joins { limits.connections_max } else { limits.connections_max_first };
        if others < most {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Busy, format!("there are {others} connections of other hosts here already")))
    }

    /// Finds or opens the session that a connection belongs to, and makes it a part of it.
    async fn admit(&self, peer: &PeerName, opening: &Opening) -> Result<(Arc<Session>, Membership)> {
        let key = key_of(peer, &opening.request);
        if opening.request.volume.len().max(opening.request.origin.len()) > 255 || opening.generation == 0 {
            return Err(Error::new(ErrorKind::Invalid, "the first frame makes no sense"));
        }
        if opening.stream >= STREAMS_MAX {
            return Err(Error::new(ErrorKind::Invalid, format!("there is no stream {}", opening.stream)));
        }
        let session = loop {
            let entry = Arc::clone(self.sessions.lock().entry(key.clone()).or_default());
            let mut current = entry.current.lock().await;
            // It may have been given up while this waited.
            if !self.sessions.lock().get(&key).is_some_and(|own| Arc::ptr_eq(own, &entry)) {
                continue;
            }
            let found = match opening.joins {
                true => find(&current, opening),
                false => self.open(&mut current, peer, opening).await,
            };
            if current.is_none() {
                self.sessions.lock().remove(&key);
            }
            break found?;
        };
        let membership = session.join(opening.stream, opening.generation).await?;
        Ok((session, membership))
    }

    /// Ends the session before and opens another.
    async fn open(
        &self,
        current: &mut Option<Arc<Session>>,
        peer: &PeerName,
        opening: &Opening,
    ) -> Result<Arc<Session>> {
        if let Some(old) = current.as_ref() {
            check_successor(old, opening)?;
            self.handler.check(peer, &opening.request)?;
            old.end().await;
            *current = None;
        }
        let opened = self.handler.open(peer, &opening.request).await?;
        let memory = (self.share_of(&self.pool), self.share_of(&self.answers));
        let session = Arc::new(Session::new(peer.clone(), opening, opened, memory)?);
        *current = Some(Arc::clone(&session));
        Ok(session)
    }

    fn share_of(&self, pool: &BufferPool) -> Share {
        Share::new(self.limits.share, pool)
    }

    /// Gives the session up, if it is the one that sits there.
    async fn forget(&self, key: &Key, session: &Arc<Session>) {
        let Some(entry) = self.sessions.lock().get(key).cloned() else { return };
        let mut current = entry.current.lock().await;
        if current.as_ref().is_some_and(|own| Arc::ptr_eq(own, session)) {
            session.end().await;
            *current = None;
            self.sessions.lock().remove(key);
        }
    }
}

/// Whether what is asked for may take the place of a session of the same job.
fn check_successor(old: &Session, opening: &Opening) -> Result<()> {
    let (asked, own) = (&opening.request, &old.request);
    if asked.epoch < own.epoch {
        let context = format!("epoch {} is older than {}, which is in use", asked.epoch, own.epoch);
        return Err(Error::new(ErrorKind::Fenced, context));
    }
    if opening.sender == old.sender && opening.session <= old.number {
        let context = format!("session {} is not newer than {}", opening.session, old.number);
        return Err(Error::new(ErrorKind::Invalid, context));
    }
    Ok(())
}

fn find(current: &Option<Arc<Session>>, opening: &Opening) -> Result<Arc<Session>> {
    let is_it = |session: &&Arc<Session>| {
        session.sender == opening.sender && session.number == opening.session && session.request == opening.request
    };
    let none = || Error::new(ErrorKind::NotFound, "there is no such session: it has ended, or another was opened");
    current.as_ref().filter(is_it).cloned().ok_or_else(none)
}

fn malformed(error: Malformed) -> Error {
    Error::new(ErrorKind::Invalid, format!("the sender broke the protocol: {error}"))
}

fn lost(error: std::io::Error) -> Error {
    Error::from_os(error, "hearing the sender's first messages")
}

/// Agrees on a version and hears what the connection is for.
async fn receive_opening(transport: &mut BoxTransport) -> Result<(Opening, u64)> {
    let mut bytes = [0; HELLO_BYTES];
    transport.read_exact(&mut bytes).await.map_err(lost)?;
    let hello = Hello::parse(&bytes).map_err(malformed)?;
    let choice = choose(&hello, &[VERSION], feature::KNOWN);
    transport.write_all(&choice.to_bytes()).await.map_err(lost)?;
    transport.flush().await.map_err(lost)?;
    if choice.version == 0 {
        // Closing at once could take the words away before they are read.
        let _ = transport.shutdown().await;
        return Err(Error::new(ErrorKind::Unsupported, choice.words));
    }
    let mut bytes = [0; HEADER_BYTES];
    transport.read_exact(&mut bytes).await.map_err(lost)?;
    let header = Header::parse(&bytes).map_err(malformed)?;
    if header.kind != Kind::Open || header.is_reply {
        return Err(malformed(Malformed("the first frame opens nothing")));
    }
    let mut message = vec![0; header.payload_bytes as usize];
    transport.read_exact(&mut message).await.map_err(lost)?;
    if header.with_payload(&message).payload_check != header.payload_check {
        return Err(Error::new(ErrorKind::Corrupt, "the sender's first frame came damaged"));
    }
    Ok((Opening::parse(&message, choice.features).map_err(malformed)?, choice.features))
}

async fn refuse(transport: &mut BoxTransport, error: &Error) -> std::io::Result<()> {
    let words = error.chain();
    let words = clip(&words, WORDS_BYTES_MAX).as_bytes();
    let request = Header::request(Kind::Open, 0);
    let header = Header { status: Status::Failed(error.kind()), ..request.reply() }.with_payload(words);
    let mut frame = header.to_bytes().to_vec();
    frame.extend_from_slice(words);
    transport.write_all(&frame).await?;
    transport.shutdown().await
}

/// The answer to the first frame of every stream of a session.
fn welcome(opened: &Opened) -> Result<Vec<u8>> {
    let geometry = opened.device.geometry();
    let welcome = Welcome {
        instance: opened.instance,
        boot: opened.boot,
        size: geometry.size.0,
        request_alignment: geometry.request_alignment,
        preferred_bytes: geometry.preferred_bytes,
        transfer_bytes_max: geometry.transfer_bytes_max,
        read_only: geometry.read_only,
        earlier: opened.earlier,
    };
    encode(&welcome).map_err(|error| Error::new(ErrorKind::Internal, error.0))
}
