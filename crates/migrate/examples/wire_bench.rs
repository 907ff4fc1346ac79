//! How fast the wire is over TCP on this machine's loopback, without encryption, beside a bare copy of the same bytes in
//! pieces of the same size: `cargo run --release --example wire_bench [MIB [ROUNDS]]`.
//!
//! Both ends live in this process: each stream has a thread at either end, as in the daemon a connection has a worker. The
//! volume is in memory and has been written before, so that no page is new.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use block::{Buffer, Bytes, Data, Device, Error, MemDevice, Mutation, Result};
use env::{Env, EnvRef, Moment, RealEnv, Task};
use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::runtime::{Builder, Handle};
use transhume_migrate::stream::{
    Answer, Ask, BoxTransport, Compression, Dialer, Opened, PeerName, Receiver, ReceiverLimits, Remote, Role,
    SessionHandler, SessionRequest, StreamOptions,
};
use uuid::Uuid;

const VOLUME: Bytes = Bytes::mib(256);

/// A thread with a runtime of its own.
struct Worker {
    handle: Handle,
    real: RealEnv,
}

impl Worker {
    fn start(name: &str) -> Arc<Self> {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let handle = runtime.handle().clone();
        let builder = thread::Builder::new().name(name.to_owned());
        builder.spawn(move || runtime.block_on(std::future::pending::<()>())).expect("a thread");
        Arc::new(Self { handle, real: RealEnv::new() })
    }
}

impl Env for Worker {
    fn now(&self) -> Moment {
        self.real.now()
    }
    fn sleep(&self, span: Duration) -> Task {
        self.real.sleep(span)
    }
    fn spawn(&self, task: Task) {
        self.handle.spawn(task);
    }
    fn random(&self) -> u64 {
        self.real.random()
    }
    fn wall_clock(&self) -> SystemTime {
        self.real.wall_clock()
    }
}

struct OneVolume(Device);

impl SessionHandler for OneVolume {
    fn check(&self, _: &PeerName, _: &SessionRequest) -> Result<()> {
        Ok(())
    }
    fn open(&self, _: &PeerName, _: &SessionRequest) -> BoxFuture<'_, Result<Opened>> {
        Box::pin(async { Ok(Opened { device: self.0.clone(), instance: [1; 16], boot: [1; 16], earlier: None }) })
    }
    fn ask(&self, _: &PeerName, _: &SessionRequest, _: Ask) -> BoxFuture<'_, Result<Answer>> {
        Box::pin(async { Ok(Answer::Done) })
    }
}

struct Tcp(SocketAddr);

impl Dialer for Tcp {
    fn dial(&self, _: u16) -> BoxFuture<'_, Result<BoxTransport>> {
        Box::pin(async {
            let failed = |error| Error::from_os(error, "connecting");
            let stream = tokio::net::TcpStream::connect(self.0).await.map_err(failed)?;
            stream.set_nodelay(true).map_err(failed)?;
            Ok(Box::new(stream) as BoxTransport)
        })
    }
}

fn noise(length: usize) -> Data {
    let mut state = 1_u64;
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(state ^ (state >> 31)).to_le_bytes());
    }
    Data::copy_of(&bytes)
}

/// Seconds for `mebibytes` over `streams` bare connections, in pieces of `piece` bytes.
fn bare(mebibytes: u64, streams: u64, piece: usize) -> f64 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("it has one");
    let data = noise(piece);
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..streams {
            let data = &data;
            scope.spawn(move || {
                let mut stream = TcpStream::connect(address).expect("it listens");
                for _ in 0..(mebibytes << 20) / streams / piece as u64 {
                    stream.write_all(data).expect("it is read");
                }
            });
            let (mut stream, _) = listener.accept().expect("somebody connects");
            scope.spawn(move || {
                let mut bytes = vec![0; piece];
                while stream.read(&mut bytes).expect("it is sent") > 0 {}
            });
        }
    });
    began.elapsed().as_secs_f64()
}

/// Listens for `receiver`, one thread a stream.
fn listen(receiver: Arc<Receiver>, workers: Vec<Arc<Worker>>, on: &Arc<Worker>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("it has one");
    on.handle.spawn_blocking(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let stream = stream.expect("somebody connects");
            let receiver = Arc::clone(&receiver);
            workers[number % workers.len()].handle.spawn(async move {
                stream.set_nonblocking(true).expect("it is a socket");
                stream.set_nodelay(true).expect("it is a socket");
                let stream = tokio::net::TcpStream::from_std(stream).expect("it is a socket");
                let _ = receiver.serve(Box::new(stream), PeerName("bench".to_owned())).await;
            });
        }
    });
    address
}

/// Seconds for `mebibytes` in writes of `piece` bytes, `depth` at a time.
async fn write_all(device: &Device, mebibytes: u64, piece: usize, depth: usize) -> f64 {
    let data = noise(piece);
    let began = Instant::now();
    let mut flying: FuturesUnordered<BoxFuture<'_, Result<()>>> = FuturesUnordered::new();
    for number in 0..(mebibytes << 20) / piece as u64 {
        if flying.len() >= depth
            && let Some(outcome) = flying.next().await
        {
            outcome.expect("nothing goes wrong");
        }
        let offset = Bytes(number * piece as u64 % VOLUME.0);
        let (device, data) = (device.clone(), data.clone());
        flying.push(Box::pin(async move { device.write(Mutation::data(offset, data)).await }));
    }
    while let Some(outcome) = flying.next().await {
        outcome.expect("nothing goes wrong");
    }
    device.flush().await.expect("nothing goes wrong");
    began.elapsed().as_secs_f64()
}

/// Requests a second of 4 KiB, one after the other.
async fn latency(device: &Device) -> (f64, f64) {
    let data = noise(4096);
    let began = Instant::now();
    for number in 0..20_000_u64 {
        device.write(Mutation::data(Bytes(number % 4096 * 4096), data.clone())).await.expect("nothing goes wrong");
    }
    let writes = 20_000.0 / began.elapsed().as_secs_f64();
    let began = Instant::now();
    for number in 0..20_000_u64 {
        device.read(Bytes(number % 4096 * 4096), Buffer::unpooled(4096)).await.expect("nothing goes wrong");
    }
    (writes, 20_000.0 / began.elapsed().as_secs_f64())
}

fn main() {
    let arguments: Vec<u64> = std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    let mebibytes = arguments.first().copied().unwrap_or(2048);
    let rounds = arguments.get(1).copied().unwrap_or(3);
    let control = Worker::start("control");
    let device = Device::new("memory", MemDevice::new(VOLUME));
    let env: EnvRef = Arc::clone(&control) as EnvRef;
    let receiver = Receiver::new(Arc::clone(&env), Arc::new(OneVolume(device)), ReceiverLimits::default());
    let workers = |kind: &str, count: u64| (0..count).map(|_| Worker::start(kind)).collect::<Vec<_>>();
    let address = listen(receiver, workers("receiver", 4), &control);
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    println!("| streams | frame | bare copy | wire | of the bare copy |\n|---|---|---|---|---|");
    for streams in [1_u16, 2, 4] {
        for frame_kib in [64_u32, 128, 256, 512, 1024] {
            let request = SessionRequest {
                volume: "disk".to_owned(),
                job: Uuid::from_u128(u128::from(streams) << 32 | u128::from(frame_kib)),
                role: Role::Copy,
                epoch: 1,
                size: VOLUME,
                request_alignment: 512,
                origin: "disk".to_owned(),
                layers: None,
                stays: false,
            };
            let senders = workers("sender", streams.into()).into_iter().map(|worker| worker as EnvRef).collect();
            let options = StreamOptions {
                streams,
                frame_bytes: frame_kib << 10,
                compression: Compression::Auto,
                workers: senders,
                ..StreamOptions::default()
            };
            let (mut bare_best, mut wire_best) = (f64::MAX, f64::MAX);
            runtime.block_on(async {
                let remote = Remote::connect(Arc::clone(&env), Arc::new(Tcp(address)), request, options).await;
                let remote = remote.expect("it is let in");
                let device = Device::from_arc("remote", Arc::clone(&remote) as Arc<_>);
                write_all(&device, VOLUME.0 >> 20, 1 << 20, 16).await;
                for _ in 0..rounds {
                    bare_best = bare_best.min(bare(mebibytes, streams.into(), (frame_kib << 10) as usize));
                    wire_best = wire_best.min(write_all(&device, mebibytes, 1 << 20, 24).await);
                }
                if frame_kib == 256 {
                    let (writes, reads) = latency(&device).await;
                    eprintln!(
                        "{streams} streams: {writes:.0} writes, {reads:.0} reads of 4 KiB a second, one at a time"
                    );
                }
                remote.close().await.expect("it can be told");
            });
            let rate = |seconds: f64| (mebibytes << 20) as f64 / seconds / 1e9;
            let (bare, wire) = (rate(bare_best), rate(wire_best));
            println!("| {streams} | {frame_kib} KiB | {bare:.2} GB/s | {wire:.2} GB/s | {:.2} |", wire / bare);
        }
    }
}
