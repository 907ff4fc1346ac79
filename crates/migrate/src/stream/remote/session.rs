//! Sessions and their streams: connecting, opening, joining, dialling again.

use std::sync::Arc;
use std::time::Duration;

use block::{Bytes, Error, ErrorKind, Geometry, Result};
use env::{EnvRef, Moment, Task};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::send_queue::ConnectionId;
use super::stream::Engine;
use super::{Known, SessionInfo, Shared, gone, waits};
use crate::stream::BoxTransport;
use crate::stream::protocol::{
    CHOICE_BYTES, Choice, HEADER_BYTES, Header, Hello, Kind, Malformed, Opening, SessionRequest, Status, VERSION,
    Welcome, decode, feature,
};
use crate::stream::statistics::add;

/// After a connection that has lasted so long the next one is tried soon again.
const GOOD: Duration = Duration::from_secs(10);

/// A connection that is ready for requests.
pub(super) struct Connected {
    pub(super) transport: BoxTransport,
    pub(super) choice: Choice,
    welcome: Welcome,
}

/// Pauses between tries that grow.
struct Backoff {
    next: Duration,
}

impl Backoff {
    const fn new(shared: &Shared) -> Self {
        Self { next: shared.options.backoff_min }
    }

    /// Waits, somewhat differently long each time.
    async fn wait(&mut self, shared: &Shared) {
        let share = 50 + shared.env.random() % 51;
        shared.env.sleep(self.next * share as u32 / 100).await;
        self.next = (self.next * 2).min(shared.options.backoff_max);
    }
}

fn malformed(error: Malformed) -> Error {
    Error::new(ErrorKind::Invalid, "the other host broke the protocol").with_source(error)
}

fn late(what: &str, limit: Duration) -> Error {
    Error::new(ErrorKind::TimedOut, format!("{what} did not end within {limit:?}"))
}

fn lost(error: std::io::Error) -> Error {
    Error::from_os(error, "speaking to the other host")
}

impl Shared {
    /// Opens a session: connects its first stream and starts all of them. One at a time.
    pub(super) async fn open_session(self: &Arc<Self>) -> Result<SessionInfo> {
        let _turn = self.opening.lock().await;
        let (session, failed) = self.send_queue.lock().next_session();
        failed.answer();
        self.more.notify_waiters();
        let place = ConnectionId { session, stream: 0, generation: 1 };
        // A connection belongs to the runtime in which it was made: that of the worker that will use it.
        let opener = Arc::clone(self);
        let opening = env::spawn_with_result(&**self.worker(0), async move { opener.connect(place, false).await });
        let connected = opening.await.map_err(|_| gone())??;
        let info = self.info_of(session, &connected)?;
        let known = Known { info, transfer_bytes_max: connected.welcome.transfer_bytes_max };
        let earlier = self.known.lock().replace(known);
        let has_restarted = earlier.is_some_and(|earlier| earlier.info.boot != info.boot);
        let begun = self.send_queue.lock().begin_session(session, self.options.streams, has_restarted);
        let Some(failed) = begun else {
            return Err(Error::new(ErrorKind::Disconnected, "the connection to the other host was closed"));
        };
        failed.answer();
        add(&self.counters.sessions, 1);
        let mut first = Some(connected);
        for stream in 0..self.options.streams {
            self.worker(stream).spawn(Box::pin(Arc::clone(self).run_stream(session, stream, first.take())));
        }
        Ok(info)
    }

    /// Where a stream runs.
    fn worker(&self, stream: u16) -> &EnvRef {
        let workers = &self.options.workers;
        workers.get(usize::from(stream) % workers.len().max(1)).unwrap_or(&self.env)
    }

    /// Keeps a stream connected for as long as its session lives.
    async fn run_stream(self: Arc<Self>, session: u64, stream: u16, mut first: Option<Connected>) {
        let mut backoff = Backoff::new(&self);
        loop {
            let (place, connected) = match first.take() {
                Some(connected) => (ConnectionId { session, stream, generation: 1 }, Ok(connected)),
                None => {
                    self.until_needed(session, stream).await;
                    let Some(place) = self.send_queue.lock().dials(session, stream) else { return };
                    (place, self.connect(place, true).await)
                }
            };
            let connected = match connected {
                Ok(connected) => connected,
                Err(error) => {
                    tracing::debug!(stream, error = error.chain(), "a stream could not be connected");
                    backoff.wait(&self).await;
                    continue;
                }
            };
            if !self.send_queue.lock().enter(place) {
                return;
            }
            let began = self.env.now();
            let (why, sent) = Engine::new(Arc::clone(&self), place, connected).run().await;
            let (failed, is_over) = self.send_queue.lock().end(place, sent, &why);
            failed.answer();
            if is_over {
                self.more.notify_waiters();
            }
            if why.kind() == ErrorKind::Cancelled && !is_over {
                tracing::debug!(stream, "a stream to another host is not needed for now");
                continue;
            }
            if !self.send_queue.lock().is_leaving() {
                tracing::warn!(stream, error = why.chain(), is_over, "a stream to another host is lost");
                add(&self.counters.streams[usize::from(stream)].deaths, 1);
            }
            if is_over {
                if waits(self.request.role, &self.options) {
                    self.env.spawn(Box::pin(Arc::clone(&self).expire(session)));
                    self.env.spawn(Arc::clone(&self).reopen());
                }
                return;
            }
            if self.env.now().since(began) > GOOD {
                backoff = Backoff::new(&self);
            }
            backoff.wait(&self).await;
        }
    }

    /// Waits until a stream is needed, or its session is over.
    async fn until_needed(&self, session: u64, stream: u16) {
        if self.options.idle_max.is_none() || stream == 0 {
            return;
        }
        loop {
            let more = self.more.notified();
            {
                let send_queue = self.send_queue.lock();
                if send_queue.is_short_of_streams() || !send_queue.is_live(session) {
                    return;
                }
            }
            more.await;
        }
    }

    /// Opens sessions until one is open.
    fn reopen(self: Arc<Self>) -> Task {
        Box::pin(async move { self.open_until_open().await })
    }

    async fn open_until_open(self: Arc<Self>) {
        let mut backoff = Backoff::new(&self);
        loop {
            if self.send_queue.lock().is_closed() {
                return;
            }
            let Err(error) = self.open_session().await else { return };
            tracing::warn!(error = error.chain(), "the other host, which holds the volume, cannot be reached");
            if error.kind() == ErrorKind::Fenced {
                // This is final: it is decided who holds the volume.
                let failed = self.send_queue.lock().expire(ErrorKind::Fenced, &error.chain());
                failed.answer();
                return;
            }
            backoff.wait(&self).await;
        }
    }

    /// Ends the wait of requests when it has lasted too long.
    async fn expire(self: Arc<Self>, lost: u64) {
        self.env.sleep(self.options.reconnect_limit).await;
        let why = format!(
            "the other host, which holds the volume, has not been reached for {:?}",
            self.options.reconnect_limit
        );
        let mut send_queue = self.send_queue.lock();
        let failed = send_queue.is_lost_since(lost).then(|| send_queue.expire(ErrorKind::TimedOut, &why));
        drop(send_queue);
        if let Some(failed) = failed {
            failed.answer();
        }
    }

    async fn connect(&self, place: ConnectionId, joins: bool) -> Result<Connected> {
        let (dial_max, open_max) = (self.options.dial_max, self.options.open_max);
        let dialling = env::timeout(&*self.env, dial_max, self.dialer.dial(place.stream)).await;
        let mut transport = dialling.ok_or_else(|| late("connecting to the other host", dial_max))??;
        let choice = env::timeout(&*self.env, dial_max, greet(&mut transport)).await;
        let choice = choice.ok_or_else(|| late("waiting for the other host's first message", dial_max))??;
        let opening = Opening {
            sender: self.sender,
            session: place.session,
            stream: place.stream,
            generation: place.generation,
            joins,
            request: carried(&self.request, choice.features)?,
        };
        let welcome = env::timeout(&*self.env, open_max, open(&mut transport, &opening, choice.features)).await;
        let welcome = welcome.ok_or_else(|| late("opening the volume at the other host", open_max))??;
        self.dialer.opened(place.stream, &self.request);
        Ok(Connected { transport, choice, welcome })
    }

    fn info_of(&self, number: u64, connected: &Connected) -> Result<SessionInfo> {
        let Connected { choice, welcome, .. } = connected;
        let unit = welcome.request_alignment;
        let makes_sense = unit.is_power_of_two()
            && unit <= 4096
            && welcome.preferred_bytes.is_power_of_two()
            && welcome.preferred_bytes >= unit
            && welcome.transfer_bytes_max >= unit;
        if !makes_sense {
            return Err(Error::new(ErrorKind::Invalid, "the other host describes a volume that cannot be"));
        }
        let geometry = Geometry {
            size: Bytes(welcome.size),
            request_alignment: unit,
            preferred_bytes: welcome.preferred_bytes,
            // Larger ones are cut.
            transfer_bytes_max: Geometry::of_size(Bytes::ZERO).transfer_bytes_max,
            read_only: welcome.read_only,
        };
        Ok(SessionInfo {
            number,
            instance: welcome.instance,
            boot: welcome.boot,
            version: choice.version,
            features: choice.features,
            geometry,
            earlier: welcome.earlier,
        })
    }

    pub(super) fn now(&self) -> Moment {
        self.env.now()
    }
}

/// `request` as a receiver with these features understands it.
///
/// # Errors
/// It does not, and the volume would not be whole there.
fn carried(request: &SessionRequest, features: u64) -> Result<SessionRequest> {
    match &request.layers {
        Some(layers) if features & feature::LAYERS == 0 && layers.hold_bytes() => Err(Error::new(
            ErrorKind::Unsupported,
            "the other host is of a version that takes no volumes with snapshots",
        )),
        Some(_) if features & feature::LAYERS == 0 => Ok(SessionRequest { layers: None, ..request.clone() }),
        Some(_) | None => Ok(request.clone()),
    }
}

/// Offers versions and hears which one it is.
async fn greet(transport: &mut BoxTransport) -> Result<Choice> {
    transport.write_all(&Hello::default().to_bytes()).await.map_err(lost)?;
    transport.flush().await.map_err(lost)?;
    let mut bytes = [0; CHOICE_BYTES];
    transport.read_exact(&mut bytes).await.map_err(lost)?;
    let choice = Choice::parse(&bytes).map_err(malformed)?;
    match choice.version {
        VERSION => Ok(choice),
        0 => Err(Error::new(ErrorKind::Unsupported, format!("the other host refuses: {}", choice.words))),
        other => Err(Error::new(ErrorKind::Unsupported, format!("the other host chose version {other}, not offered"))),
    }
}

/// Says what the connection is for and hears whether it may be.
async fn open(transport: &mut BoxTransport, opening: &Opening, features: u64) -> Result<Welcome> {
    let message = opening.to_bytes(features).map_err(malformed)?;
    let mut frame = Header::request(Kind::Open, 0).with_payload(&message).to_bytes().to_vec();
    frame.extend_from_slice(&message);
    transport.write_all(&frame).await.map_err(lost)?;
    transport.flush().await.map_err(lost)?;
    let mut bytes = [0; HEADER_BYTES];
    transport.read_exact(&mut bytes).await.map_err(lost)?;
    let header = Header::parse(&bytes).map_err(malformed)?;
    if header.kind != Kind::Open || !header.is_reply {
        return Err(malformed(Malformed("the first frame is not the answer to the first frame")));
    }
    let mut payload = vec![0; header.payload_bytes as usize];
    transport.read_exact(&mut payload).await.map_err(lost)?;
    if header.with_payload(&payload).payload_check != header.payload_check {
        return Err(Error::new(ErrorKind::Corrupt, "the other host's first frame came damaged"));
    }
    match header.status {
        Status::Done => decode(&payload).map_err(malformed),
        Status::Failed(kind) => {
            Err(Error::new(kind, format!("the other host refuses: {}", String::from_utf8_lossy(&payload))))
        }
        Status::Damaged => Err(Error::new(ErrorKind::Corrupt, "the first frame came damaged to the other host")),
    }
}
