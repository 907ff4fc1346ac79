//! Seeded mutations of honest sessions, fed to the whole server and to the whole client, on any toolchain and in every
//! test run. Coverage-guided fuzzing of the same is in `fuzz/`.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::common::{env, memory};
use block::testing::Random;
use block::{Buffer, BufferPool, Bytes, Data, Device, Extent, Mutation};
use env::{Env, EnvRef, Moment, RealEnv, Task};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use transhume_guest::{Authority, GOOD_YEARS};
use transhume_nbd::protocol::{Command, GoRequest, MetaContextRequest, Request, option, write_option};
use transhume_nbd::server::End;
use transhume_nbd::{Export, Exports, Limits, NbdDevice, TlsServer, serve_connection, serve_encrypted};

/// A peer that says what is written down, in pieces of any size, and then leaves; and a record of what it heard.
struct Script {
    bytes: Vec<u8>,
    next: usize,
    random: Random,
    heard: Arc<Mutex<Vec<u8>>>,
}

impl Script {
    fn new(bytes: Vec<u8>, seed: u64) -> Self {
        Self { bytes, next: 0, random: Random::new(seed), heard: Arc::default() }
    }
}

impl AsyncRead for Script {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, room: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let left = self.bytes.len() - self.next;
        let limit = 1 + self.random.below(5000) as usize;
        let count = left.min(room.remaining()).min(limit);
        room.put_slice(&self.bytes[self.next..self.next + count]);
        self.next += count;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Script {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let limit = 1 + self.random.below(5000) as usize;
        let count = bytes.len().min(limit);
        self.heard.lock().extend_from_slice(&bytes[..count]);
        Poll::Ready(Ok(count))
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// What an honest client says, cut into messages.
fn honest(random: &mut Random) -> Vec<Vec<u8>> {
    let name = "disk";
    let mut messages = vec![
        3_u32.to_be_bytes().to_vec(),
        write_option(option::LIST, &[]),
        write_option(option::STRUCTURED_REPLY, &[]),
        write_option(
            option::SET_META_CONTEXT,
            &MetaContextRequest { name, queries: vec!["base:allocation"] }.to_bytes(),
        ),
        write_option(option::INFO, &GoRequest { name, items: vec![0, 1, 2, 3] }.to_bytes()),
        write_option(option::GO, &GoRequest { name, items: vec![3] }.to_bytes()),
    ];
    let commands = [
        Command::Read,
        Command::Write,
        Command::Flush,
        Command::Trim,
        Command::Cache,
        Command::WriteZeroes,
        Command::BlockStatus,
    ];
    for cookie in 0..1 + random.below(12) {
        let command = commands[random.below(commands.len() as u64) as usize];
        let length = if random.below(8) == 0 { 100_000 } else { random.below(9000) } as u32;
        let request = Request { flags: 0, command, cookie, offset: Bytes(random.below(1 << 20)), length };
        let mut message = request.to_bytes().to_vec();
        if command == Command::Write {
            message.resize(message.len() + length as usize, 0x5a);
        }
        messages.push(message);
    }
    messages
}

/// The messages with a few mutations: bits, numbers, messages left out, repeated, cut, exchanged.
fn mutate(mut messages: Vec<Vec<u8>>, random: &mut Random) -> Vec<u8> {
    for _ in 0..random.below(4) {
        let which = random.below(messages.len() as u64) as usize;
        match random.below(6) {
            0 => {
                messages.remove(which);
            }
            1 => messages.push(messages[which].clone()),
            2 => {
                let other = random.below(messages.len() as u64) as usize;
                messages.swap(which, other);
            }
            3 => {
                let length = random.below(messages[which].len() as u64 + 1) as usize;
                messages[which].truncate(length);
            }
            4 => mutate_number(&mut messages[which], random),
            _ => mutate_byte(&mut messages[which], random),
        }
        if messages.is_empty() {
            break;
        }
    }
    messages.concat()
}

fn mutate_byte(bytes: &mut [u8], random: &mut Random) {
    let header = (bytes.len() as u64).min(64);
    if header > 0 {
        bytes[random.below(header) as usize] ^= 1 << random.below(8);
    }
}

fn mutate_number(bytes: &mut [u8], random: &mut Random) {
    let interesting = [0_u32, 1, 0x7fff_ffff, 0x8000_0000, u32::MAX, 4 << 20, (4 << 20) + 1, (32 << 20) + 1];
    if bytes.len() >= 4 {
        let at = random.below((bytes.len() as u64 - 3).min(40)) as usize;
        let number = interesting[random.below(interesting.len() as u64) as usize];
        bytes[at..at + 4].copy_from_slice(&number.to_be_bytes());
    }
}

#[tokio::test(start_paused = true)]
async fn the_server_survives_every_mutation_of_an_honest_client() {
    let mut entered = 0;
    for seed in 0..6000 {
        let mut random = Random::new(seed);
        let messages = honest(&mut random);
        let bytes = mutate(messages, &mut random);
        let pool = BufferPool::new(Bytes::mib(8));
        let device = memory(Bytes::mib(1));
        let export = Arc::new(Export::new("disk", pool.clone(), move || device.clone()));
        let exports: Arc<dyn Exports> = Arc::new(vec![Arc::clone(&export)]);
        let script = Script::new(bytes, seed);
        let heard = Arc::clone(&script.heard);
        let serving = serve_connection(script, exports, env(), Limits::default());
        let summary = tokio::time::timeout(std::time::Duration::from_secs(600), serving).await;
        let summary = summary.unwrap_or_else(|_| panic!("seed {seed}: the server hangs"));
        entered += u64::from(summary.requests > 0);
        assert_eq!(&heard.lock()[..8], b"NBDMAGIC", "seed {seed}");
        assert_eq!(pool.in_use(), Bytes::ZERO, "seed {seed}: a buffer is lost");
        assert_eq!(export.connections(), 0, "seed {seed}: a connection stays in the gate");
    }
    assert!(entered > 2000, "only {entered} sessions came to a request: the mutations are too wild to test anything");
}

#[tokio::test(start_paused = true)]
async fn the_server_survives_every_mutation_of_what_comes_before_tls_and_shows_nothing() {
    let folder = tempfile::tempdir().expect("a scratch directory");
    let authority = Authority::new("an authority").expect("made");
    authority.write(folder.path()).expect("written");
    authority.write_server(folder.path(), &["localhost"], GOOD_YEARS, 1).expect("written");
    let tls = TlsServer::new(folder.path(), env()).expect("good certificates");
    let mut begun = 0;
    for seed in 0..3000 {
        let mut random = Random::new(seed);
        // A client that asks for this and that, then for TLS, and then leaves, or says what is no TLS.
        let mut messages = honest(&mut random);
        messages.truncate(1 + random.below(4) as usize);
        messages.push(write_option(option::STARTTLS, &[]));
        if random.below(3) == 0 {
            messages.push((0..64).map(|_| random.below(256) as u8).collect());
        }
        let export = Arc::new(crate::common::export_of(memory(Bytes::mib(1))));
        let exports: Arc<dyn Exports> = Arc::new(vec![Arc::clone(&export)]);
        let script = Script::new(mutate(messages, &mut random), seed);
        let serving = serve_encrypted(script, &tls, exports, env(), Limits::default());
        let summary = tokio::time::timeout(std::time::Duration::from_secs(600), serving).await;
        let summary = summary.unwrap_or_else(|_| panic!("seed {seed}: the server hangs"));
        begun += u64::from(matches!(summary.end, End::Tls(_)));
        assert!(
            summary.export.is_none() && summary.requests == 0,
            "seed {seed}: it was served without TLS: {summary:?}"
        );
        assert_eq!(export.connections(), 0, "seed {seed}: a connection stays in the gate");
    }
    assert!(begun > 100, "only {begun} sessions came to TLS: the mutations are too wild to test anything");
}

/// The real environment, which remembers the tasks it started so that a panic in one is seen.
struct Watched {
    real: RealEnv,
    tasks: Mutex<Vec<tokio::task::JoinHandle<()>>>,
}

impl Env for Watched {
    fn now(&self) -> Moment {
        self.real.now()
    }
    fn sleep(&self, span: std::time::Duration) -> Task {
        self.real.sleep(span)
    }
    fn spawn(&self, task: Task) {
        self.tasks.lock().push(tokio::spawn(task));
    }
    fn random(&self) -> u64 {
        self.real.random()
    }
    fn wall_clock(&self) -> std::time::SystemTime {
        self.real.wall_clock()
    }
}

/// What the client under test does: how much of it went well.
async fn use_client(device: &Device) -> usize {
    let size = device.size().get();
    let alignment = u64::from(device.geometry().request_alignment);
    let length = (8 * alignment).min(size).min(device.geometry().transfer_bytes_max.into()).min(65536);
    if length == 0 {
        return 0;
    }
    // All at once: the script's answers do not wait for their requests.
    let data = Mutation::data(Bytes(0), Data::copy_of(&vec![1; length as usize])).with_fua(true);
    let (read, extents, written, flushed, again) = futures::join!(
        device.read(Bytes(0), Buffer::unpooled(length as usize)),
        device.extents(Extent::whole(Bytes(size))),
        device.write(data),
        device.flush(),
        device.read(Bytes(0), Buffer::unpooled(length as usize)),
    );
    [read.is_ok(), extents.is_ok(), written.is_ok(), flushed.is_ok(), again.is_ok()]
        .into_iter()
        .filter(|ok| *ok)
        .count()
}

/// Everything that our server says to the client under test.
async fn recorded() -> Vec<u8> {
    /// A stream that remembers what was read from it.
    struct Tee(tokio::io::DuplexStream, Arc<Mutex<Vec<u8>>>);
    impl AsyncRead for Tee {
        fn poll_read(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            room: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            let before = room.filled().len();
            let polled = Pin::new(&mut self.0).poll_read(context, room);
            self.1.lock().extend_from_slice(&room.filled()[before..]);
            polled
        }
    }
    impl AsyncWrite for Tee {
        fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            Pin::new(&mut self.0).poll_write(context, bytes)
        }
        fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_flush(context)
        }
        fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_shutdown(context)
        }
    }
    let exports = crate::common::only(crate::common::export_of(memory(Bytes::mib(1))));
    let (stream, _server) = crate::common::serve(exports, Limits::default());
    let said = Arc::<Mutex<Vec<u8>>>::default();
    let client = NbdDevice::over(Tee(stream, Arc::clone(&said)), "disk", &*env()).await.expect("the server agrees");
    use_client(&Device::new("client", client)).await;
    said.lock().clone()
}

#[tokio::test(start_paused = true)]
async fn the_client_survives_every_mutation_of_an_honest_server() {
    let honest = recorded().await;
    let client = NbdDevice::over(Script::new(honest.clone(), 0), "disk", &*env()).await.expect("nothing is mutated");
    assert_eq!(use_client(&Device::new("client", client)).await, 5, "the honest session does not repeat");
    let mut agreed = 0;
    for seed in 0..4000 {
        let mut random = Random::new(seed);
        let mut bytes = honest.clone();
        for _ in 0..1 + random.below(3) {
            let at = random.below(bytes.len() as u64) as usize;
            match random.below(5) {
                0 => bytes.truncate(at.max(1)),
                1 => mutate_number(&mut bytes[at..], &mut random),
                _ => mutate_byte(&mut bytes[at..], &mut random),
            }
        }
        let watched = Arc::new(Watched { real: RealEnv::new(), tasks: Mutex::default() });
        let env: EnvRef = Arc::clone(&watched) as _;
        let session = async {
            if let Ok(client) = NbdDevice::over(Script::new(bytes, seed), "disk", &*env).await {
                agreed += 1;
                use_client(&Device::new("client", client)).await;
            }
        };
        let session = tokio::time::timeout(std::time::Duration::from_secs(600), session).await;
        session.unwrap_or_else(|_| panic!("seed {seed}: the client hangs"));
        let tasks = std::mem::take(&mut *watched.tasks.lock());
        for task in tasks {
            task.await.unwrap_or_else(|error| panic!("seed {seed}: a task of the client died: {error}"));
        }
    }
    assert!(agreed > 1000, "only {agreed} handshakes succeeded: the mutations are too wild to test anything");
}
