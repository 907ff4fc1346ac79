//! Two ends in one runtime, and what lies between them.

use std::collections::VecDeque;
use std::future::pending;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use block::{Buffer, Bytes, Data, Device, Error, ErrorKind, Mutation, Result};
use env::EnvRef;
use env::testing::PausedEnv;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf, ReadHalf, WriteHalf};
use tokio::task::JoinHandle;
use transhume_migrate::stream::{
    Answer, Ask, BoxTransport, Dialer, LinkCounters, MigrationCounters, Opened, PeerName, Receiver, ReceiverLimits,
    Remote, Role, SessionHandler, SessionRequest, StreamOptions, VolumeStatus,
};
use uuid::Uuid;

/// How much a connection holds between its ends.
const PIPE_BYTES: usize = 64 << 10;

/// Holds one volume and remembers what it was asked.
pub(crate) struct OneVolume {
    pub(crate) device: Device,
    pub(crate) boot: Mutex<[u8; 16]>,
    pub(crate) refusal: Mutex<Option<ErrorKind>>,
    pub(crate) opened: Mutex<Vec<SessionRequest>>,
    pub(crate) asked: Mutex<Vec<Ask>>,
}

/// What the interface with `address` is said to have carried.
pub(crate) fn usage(address: &IpAddr) -> LinkCounters {
    LinkCounters {
        interface: format!("of {address}"),
        at_ns: 7,
        received: 1 << 40,
        sent: 3,
        capacity: 125_000_000,
        migrations: MigrationCounters { received: 1 << 39, sent: 2, incoming: 20, outgoing: 1 },
    }
}

impl SessionHandler for OneVolume {
    fn check(&self, _: &PeerName, request: &SessionRequest) -> Result<()> {
        match *self.refusal.lock() {
            Some(kind) => Err(Error::new(kind, format!("{} is not for you", request.volume))),
            None => Ok(()),
        }
    }

    fn open(&self, peer: &PeerName, request: &SessionRequest) -> BoxFuture<'_, Result<Opened>> {
        let (peer, request) = (peer.clone(), request.clone());
        Box::pin(async move {
            self.check(&peer, &request)?;
            self.opened.lock().push(request);
            Ok(Opened { device: self.device.clone(), instance: [7; 16], boot: *self.boot.lock(), earlier: None })
        })
    }

    fn ask(&self, _: &PeerName, _: &SessionRequest, ask: Ask) -> BoxFuture<'_, Result<Answer>> {
        self.asked.lock().push(ask.clone());
        Box::pin(async move {
            match ask {
                Ask::Status => Ok(Answer::Status(VolumeStatus::Prepared { epoch: 4 })),
                Ask::MapDigest { .. } => Ok(Answer::MapDigest(None)),
                Ask::Usage { addresses } => {
                    let counters = |address: &IpAddr| address.is_loopback().then(|| usage(address));
                    Ok(Answer::Usage(addresses.iter().map(counters).collect()))
                }
                Ask::Take { epoch: 99 } => Err(Error::new(ErrorKind::Fenced, "99 was never prepared")),
                _ => Ok(Answer::Done),
            }
        })
    }
}

/// What happens to the bytes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weather {
    Fair,
    /// Nothing gets through any more, and nobody is told.
    Frozen,
    /// Only what the receiver says gets through,
    HalfOpen,
    /// or only what the sender says.
    Unheard,
    /// What the receiver says comes so slowly, in bytes a second.
    Trickles(u64),
    /// What the sender says is so long under way, and arrives although the sender has gone.
    Late(Duration),
}

/// A connection between the two.
struct Line {
    stream: u16,
    pumps: [JoinHandle<()>; 2],
    weather: Arc<Mutex<Weather>>,
}

/// A connection that keeps bytes back until it is flushed, as those that encrypt do.
struct Reluctant {
    inner: DuplexStream,
    held: VecDeque<u8>,
}

impl Reluctant {
    fn boxed(inner: DuplexStream) -> BoxTransport {
        Box::new(Self { inner, held: VecDeque::new() })
    }

    fn poll_drain(&mut self, task: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        while !self.held.is_empty() {
            let count = ready!(Pin::new(&mut self.inner).poll_write(task, self.held.as_slices().0))?;
            self.held.drain(..count);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Reluctant {
    fn poll_read(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(task, room)
    }
}

impl AsyncWrite for Reluctant {
    fn poll_write(mut self: Pin<&mut Self>, task: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        if self.held.len() > PIPE_BYTES {
            ready!(self.poll_drain(task))?;
        }
        let count = bytes.len().min(16 << 10);
        self.held.extend(&bytes[..count]);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        ready!(self.poll_drain(task))?;
        Pin::new(&mut self.inner).poll_flush(task)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        ready!(self.poll_drain(task))?;
        Pin::new(&mut self.inner).poll_shutdown(task)
    }
}

/// Which end was told that a stream is one, and what for.
pub(crate) type Told = (&'static str, u16, Role);

/// Connects to a receiver in the same runtime.
pub(crate) struct Lines {
    pub(crate) receiver: Mutex<Arc<Receiver>>,
    lines: Mutex<Vec<Line>>,
    /// While this is set nobody can be reached.
    pub(crate) is_down: Mutex<bool>,
    /// A bit changes in every so many pieces, towards the receiver and back; 0: never.
    pub(crate) corrupt_every: Arc<[AtomicU64; 2]>,
    /// Whether connections keep bytes back until they are flushed.
    pub(crate) keeps_back: Mutex<bool>,
    pub(crate) ends: Arc<Mutex<Vec<Result<()>>>>,
    pub(crate) dials: Mutex<Vec<u16>>,
    pub(crate) told: Arc<Mutex<Vec<Told>>>,
}

impl Lines {
    /// Ends every connection of `stream`, or all.
    pub(crate) fn cut(&self, stream: Option<u16>) {
        self.lines.lock().retain(|line| {
            let is_meant = stream.is_none_or(|stream| line.stream == stream);
            if is_meant {
                line.pumps.iter().for_each(JoinHandle::abort);
            }
            !is_meant
        });
    }

    pub(crate) fn set_weather(&self, stream: Option<u16>, weather: Weather) {
        for line in self.lines.lock().iter().filter(|line| stream.is_none_or(|stream| line.stream == stream)) {
            *line.weather.lock() = weather;
        }
    }
}

async fn pump(
    mut from: ReadHalf<DuplexStream>,
    mut to: WriteHalf<DuplexStream>,
    weather: Arc<Mutex<Weather>>,
    corrupt: (Arc<[AtomicU64; 2]>, usize),
) {
    let mut bytes = vec![0; 32 << 10];
    let mut pieces = 0_u64;
    loop {
        let Ok(count) = from.read(&mut bytes).await else { return };
        let weather = *weather.lock();
        let is_lost = match weather {
            Weather::Fair | Weather::Trickles(_) | Weather::Late(_) => false,
            Weather::Frozen => true,
            Weather::HalfOpen => corrupt.1 == 0,
            Weather::Unheard => corrupt.1 == 1,
        };
        if is_lost {
            pending::<()>().await;
        }
        if let Weather::Trickles(rate) = weather
            && corrupt.1 == 1
        {
            tokio::time::sleep(Duration::from_secs_f64(count as f64 / rate as f64)).await;
        }
        if let Weather::Late(delay) = weather
            && corrupt.1 == 0
        {
            tokio::time::sleep(delay).await;
        }
        if count == 0 {
            let _ = to.shutdown().await;
            return;
        }
        pieces += 1;
        let every = corrupt.0[corrupt.1].load(Ordering::Relaxed);
        if every > 0 && pieces.is_multiple_of(every) {
            // Somewhere in the midst: in payloads, mostly.
            bytes[count / 2] ^= 4;
        }
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

impl Dialer for Lines {
    fn dial(&self, stream: u16) -> BoxFuture<'_, Result<BoxTransport>> {
        Box::pin(async move {
            self.dials.lock().push(stream);
            if *self.is_down.lock() {
                return Err(Error::new(ErrorKind::Disconnected, "the network is down"));
            }
            let (near, near_end) = tokio::io::duplex(PIPE_BYTES);
            let (far, far_end) = tokio::io::duplex(PIPE_BYTES);
            let (near_read, near_write) = tokio::io::split(near_end);
            let (far_read, far_write) = tokio::io::split(far_end);
            let weather = Arc::new(Mutex::new(Weather::Fair));
            let corrupt = Arc::clone(&self.corrupt_every);
            let pumps = [
                tokio::spawn(pump(near_read, far_write, Arc::clone(&weather), (Arc::clone(&corrupt), 0))),
                tokio::spawn(pump(far_read, near_write, Arc::clone(&weather), (corrupt, 1))),
            ];
            self.lines.lock().push(Line { stream, pumps, weather });
            let (receiver, ends) = (Arc::clone(&self.receiver.lock()), Arc::clone(&self.ends));
            let (near, far) = match *self.keeps_back.lock() {
                true => (Reluctant::boxed(near), Reluctant::boxed(far)),
                false => (Box::new(near) as BoxTransport, Box::new(far) as BoxTransport),
            };
            let told = Arc::clone(&self.told);
            let opened = Box::new(move |request: &SessionRequest| told.lock().push(("receiver", stream, request.role)));
            tokio::spawn(async move {
                let end = receiver.serve_telling(far, PeerName("north".to_owned()), opened).await;
                ends.lock().push(end);
            });
            Ok(near)
        })
    }

    fn opened(&self, stream: u16, request: &SessionRequest) {
        self.told.lock().push(("sender", stream, request.role));
    }
}

/// A sender's and a receiver's world.
pub(crate) struct Pair {
    pub(crate) env: EnvRef,
    pub(crate) handler: Arc<OneVolume>,
    pub(crate) lines: Arc<Lines>,
}

impl Pair {
    pub(crate) fn new(seed: u64, device: Device) -> Self {
        Self::with_limits(seed, device, ReceiverLimits::default())
    }

    pub(crate) fn with_limits(seed: u64, device: Device, limits: ReceiverLimits) -> Self {
        let env = PausedEnv::shared(seed);
        let handler = Arc::new(OneVolume {
            device,
            boot: Mutex::new([1; 16]),
            refusal: Mutex::default(),
            opened: Mutex::default(),
            asked: Mutex::default(),
        });
        let receiver = Receiver::new(Arc::clone(&env), Arc::clone(&handler) as Arc<dyn SessionHandler>, limits);
        let lines = Lines {
            receiver: Mutex::new(receiver),
            lines: Mutex::default(),
            is_down: Mutex::new(false),
            corrupt_every: Arc::default(),
            keeps_back: Mutex::new(false),
            ends: Arc::default(),
            dials: Mutex::default(),
            told: Arc::default(),
        };
        Self { env, handler, lines: Arc::new(lines) }
    }

    pub(crate) fn receiver(&self) -> Arc<Receiver> {
        Arc::clone(&self.lines.receiver.lock())
    }

    /// The receiver's program starts anew.
    pub(crate) fn restart(&self) {
        let handler = Arc::clone(&self.handler) as Arc<dyn SessionHandler>;
        self.lines.cut(None);
        *self.lines.receiver.lock() = Receiver::new(Arc::clone(&self.env), handler, ReceiverLimits::default());
    }

    pub(crate) fn request(&self, role: Role) -> SessionRequest {
        SessionRequest {
            volume: "disk".to_owned(),
            job: Uuid::from_u128(1),
            role,
            epoch: 3,
            size: self.handler.device.size(),
            request_alignment: 512,
            origin: "vm-disk".to_owned(),
            layers: None,
            stays: false,
        }
    }

    pub(crate) async fn connect(&self, role: Role, options: StreamOptions) -> Result<Arc<Remote>> {
        let dialer = Arc::clone(&self.lines) as Arc<dyn Dialer>;
        Remote::connect(Arc::clone(&self.env), dialer, self.request(role), options).await
    }

    /// The same, as a checked device, when all of its streams are there.
    pub(crate) async fn device(&self, role: Role, streams: u16) -> (Arc<Remote>, Device) {
        let options = StreamOptions { streams, ..StreamOptions::default() };
        let remote = self.connect(role, options).await.expect("the receiver lets it in");
        self.settle().await;
        (Arc::clone(&remote), Device::from_arc("remote", remote))
    }

    /// Gives streams the time to connect.
    pub(crate) async fn settle(&self) {
        self.env.sleep(Duration::from_millis(20)).await;
    }
}

/// Bytes that do not compress and differ by `seed`.
pub(crate) fn noise(seed: u64, length: usize) -> Data {
    let mut state = seed;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(state ^ (state >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9).to_le_bytes());
    }
    Data::copy_of(&bytes[..length])
}

pub(crate) fn write(offset: u64, data: &Data) -> Mutation {
    Mutation::data(Bytes(offset), data.clone())
}

pub(crate) async fn read(device: &Device, offset: u64, length: usize) -> Vec<u8> {
    device.read(Bytes(offset), Buffer::unpooled(length)).await.expect("it can be read").to_vec()
}
