//! An export with reconnects: what becomes of requests and answers when the server is lost. It runs over servers of
//! ours that forget what was not flushed, and over nbdkit killed and started again.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{env, export_of, only, serve};
use block::testing::conformance;
use block::{
    BlockDevice, Buffer, Bytes, Data, Device, Error, ErrorKind, Extent, ExtentState, ExtentStatus, Geometry, IoFuture,
    Mutation, MutationKind, Result, ready,
};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use transhume_nbd::server::Summary;
use transhume_nbd::{BackendOptions, Dial, DialUri, Limits, NbdBackend, NbdDevice, NbdUri};

/// A disk behind a volatile cache: a crash takes what was not flushed.
struct Forgetful {
    cached: Mutex<Vec<u8>>,
    durable: Mutex<Vec<u8>>,
    /// Answers the next write there so late.
    slow: Mutex<Option<(Bytes, Duration)>>,
    /// Carries out such a write at once, and only its answer is late.
    is_only_answer_late: AtomicBool,
    /// Refuses everything as servers do that shut down.
    shuts_down: AtomicBool,
    /// Leaves flushes without an answer.
    hangs_at_flush: AtomicBool,
}

impl Forgetful {
    fn new(size: usize) -> Arc<Self> {
        let (cached, durable) = (Mutex::new(vec![0; size]), Mutex::new(vec![0; size]));
        Arc::new(Self {
            cached,
            durable,
            slow: Mutex::default(),
            is_only_answer_late: AtomicBool::default(),
            shuts_down: AtomicBool::default(),
            hangs_at_flush: AtomicBool::default(),
        })
    }

    fn carry_out(&self, mutation: &Mutation) {
        let range = mutation.extent().offset.as_usize()..mutation.extent().end().as_usize();
        let mut cached = self.cached.lock();
        let place = &mut cached[range.clone()];
        match mutation.kind() {
            MutationKind::Data(data) => place.copy_from_slice(data),
            MutationKind::Zeroes { .. } => place.fill(0),
            MutationKind::Discard => {}
        }
        if mutation.fua {
            self.durable.lock()[range.clone()].copy_from_slice(&cached[range]);
        }
    }

    fn crash(&self) {
        self.cached.lock().clone_from(&self.durable.lock());
    }
}

struct Disk(Arc<Forgetful>);

impl Disk {
    fn refuse(&self) -> Result<()> {
        match self.0.shuts_down.load(Ordering::Relaxed) {
            // This is what the server answers with ESHUTDOWN.
            true => Err(Error::new(ErrorKind::Cancelled, "the server shuts down")),
            false => Ok(()),
        }
    }
}

impl BlockDevice for Disk {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.0.cached.lock().len().into(),
            request_alignment: 1,
            preferred_bytes: 4096,
            transfer_bytes_max: 1 << 20,
            read_only: false,
        }
    }
    fn read(&self, offset: Bytes, mut buffer: Buffer) -> IoFuture<'_, Buffer> {
        if let Err(error) = self.refuse() {
            return ready(Err(error));
        }
        let (start, length) = (offset.as_usize(), buffer.len());
        buffer.copy_from_slice(&self.0.cached.lock()[start..start + length]);
        ready(Ok(buffer))
    }
    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        if let Err(error) = self.refuse() {
            return ready(Err(error));
        }
        let slow = self.0.slow.lock().take_if(|(offset, _)| *offset == mutation.extent().offset);
        match slow {
            Some((_, late)) => Box::pin(async move {
                let is_only_answer_late = self.0.is_only_answer_late.load(Ordering::Relaxed);
                if is_only_answer_late {
                    self.0.carry_out(&mutation);
                }
                tokio::time::sleep(late).await;
                if !is_only_answer_late {
                    self.0.carry_out(&mutation);
                }
                Ok(())
            }),
            None => {
                self.0.carry_out(&mutation);
                ready(Ok(()))
            }
        }
    }
    fn flush(&self) -> IoFuture<'_, ()> {
        if let Err(error) = self.refuse() {
            return ready(Err(error));
        }
        if self.0.hangs_at_flush.load(Ordering::Relaxed) {
            return Box::pin(std::future::pending());
        }
        self.0.durable.lock().clone_from(&self.0.cached.lock());
        ready(Ok(()))
    }
    fn extents(&self, extent: Extent) -> IoFuture<'_, Vec<ExtentStatus>> {
        ready(Ok(vec![ExtentStatus { extent, state: ExtentState::Data }]))
    }
}

/// A server that can be killed with all its connections, and be away for a while.
#[derive(Clone)]
struct World {
    disk: Arc<Forgetful>,
    servers: Arc<Mutex<Vec<JoinHandle<Summary>>>>,
    is_away: Arc<AtomicBool>,
}

impl World {
    fn new(size: usize) -> Self {
        Self { disk: Forgetful::new(size), servers: Arc::default(), is_away: Arc::default() }
    }

    /// The power of the server's machine fails.
    async fn crash(&self) {
        let servers = std::mem::take(&mut *self.servers.lock());
        for server in servers {
            server.abort();
            let _ = server.await;
        }
        self.disk.crash();
    }

    async fn connect(&self, reconnect_limit: Duration) -> (Arc<NbdBackend>, Device) {
        let options = BackendOptions { reconnect_limit, ..BackendOptions::default() };
        let backend = NbdBackend::connect(Arc::new(self.clone()), env(), options).await.expect("the server is there");
        let backend = Arc::new(backend);
        (Arc::clone(&backend), Device::from_arc("backend", backend))
    }

    /// What a process uses that begins after another which has used the same export.
    fn use_again(&self) -> Device {
        let backend = self.expect();
        backend.serve_guest();
        Device::from_arc("backend", backend)
    }

    /// The same, before a guest relies on it.
    fn expect(&self) -> Arc<NbdBackend> {
        let geometry = Disk(Arc::clone(&self.disk)).geometry();
        let options = BackendOptions { reconnect_limit: PATIENCE, ..BackendOptions::default() };
        Arc::new(NbdBackend::expecting(geometry, Arc::new(self.clone()), env(), options))
    }

    /// Whether what was written at `offset` is durable.
    fn has_kept(&self, offset: usize, value: u8) -> bool {
        self.disk.durable.lock()[offset] == value
    }
}

impl Dial for World {
    fn dial(&self) -> BoxFuture<'_, Result<NbdDevice>> {
        Box::pin(async {
            if self.is_away.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::Disconnected, "nobody is there"));
            }
            let export = export_of(Device::new("disk", Disk(Arc::clone(&self.disk))));
            let (stream, server) = serve(only(export), Limits::default());
            self.servers.lock().push(server);
            NbdDevice::over(stream, "disk", &*env()).await
        })
    }
}

const PATIENCE: Duration = Duration::from_secs(20);

fn data(offset: u64, value: u8) -> Mutation {
    Mutation::data(Bytes(offset), Data::copy_of(&[value; 4096]))
}

async fn read(device: &Device, offset: u64) -> Result<u8> {
    let buffer = device.read(Bytes(offset), Buffer::unpooled(4096)).await?;
    assert!(buffer.iter().all(|byte| *byte == buffer[0]), "half of a write");
    Ok(buffer[0])
}

#[tokio::test]
async fn several_connections_conform_for_a_copy_and_for_a_guest() {
    for serves_guest in [false, true] {
        let make = async |size: Bytes| {
            let (backend, device) = World::new(size.as_usize()).connect(PATIENCE).await;
            assert_eq!(backend.connections(), 4);
            if serves_guest {
                backend.serve_guest();
            }
            device
        };
        conformance(3, make).await;
    }
}

#[tokio::test]
async fn a_guest_loses_nothing_that_was_answered_when_the_server_forgets_what_was_not_flushed() {
    let world = World::new(1 << 20);
    let (backend, device) = world.connect(PATIENCE).await;
    backend.serve_guest();
    device.write(data(0, 1)).await.expect("the server is there");
    device.flush().await.expect("the server is there");
    device.write(data(4096, 2)).await.expect("the server is there");
    device.write(data(4096, 3)).await.expect("the server is there");
    device.write(Mutation::zeroes(Extent::new(Bytes(0), Bytes(4096)), true)).await.expect("the server is there");
    world.crash().await;
    assert_eq!(read(&device, 4096).await.expect("the server is back"), 3);
    assert_eq!(read(&device, 0).await.expect("the server is back"), 0);
    device.flush().await.expect("nothing is lost");
    world.crash().await;
    assert_eq!(read(&device, 4096).await.expect("the server is back"), 3);
}

/// A guest's process and server as they are when the daemon begins: a write was answered and is not durable.
async fn answered_before_a_start() -> World {
    let world = World::new(1 << 20);
    let (backend, device) = world.connect(PATIENCE).await;
    backend.serve_guest();
    device.write(data(0, 1)).await.expect("the server is there");
    assert!(!world.has_kept(0, 1));
    world
}

#[tokio::test]
async fn a_loss_of_what_an_earlier_process_was_answered_is_told_to_the_guest() {
    let world = answered_before_a_start().await;
    world.disk.hangs_at_flush.store(true, Ordering::Relaxed);
    let device = world.use_again();
    assert_eq!(read(&device, 0).await.expect("the server is there"), 1);
    world.crash().await;
    world.disk.hangs_at_flush.store(false, Ordering::Relaxed);
    let error = device.flush().await.expect_err("the write is lost");
    assert_eq!(error.kind(), ErrorKind::Disconnected, "{}", error.chain());
    device.flush().await.expect("the guest was told");
}

#[tokio::test]
async fn a_loss_that_an_earlier_process_has_put_on_record_fails_the_first_flush_and_no_further_one() {
    let world = World::new(1 << 20);
    let (backend, device) = world.connect(PATIENCE).await;
    backend.serve_guest();
    device.flush().await.expect("the server is there");
    assert!(!backend.has_unflushed() && !backend.has_loss_to_tell());
    device.write(data(0, 1)).await.expect("the server is there");
    world.is_away.store(true, Ordering::Relaxed);
    world.crash().await;
    let last = tokio::time::timeout(Duration::from_millis(300), backend.flush_answered()).await;
    assert!(last.is_err(), "a server that is away has flushed");
    assert!(backend.has_unflushed(), "what is kept dies with the process");
    drop((device, backend));
    let unreached = world.expect();
    assert!(!unreached.has_unflushed() && !unreached.has_loss_to_tell(), "nothing is known of it");
    unreached.recall_loss();
    assert!(unreached.has_loss_to_tell(), "a process that reaches no server hands the loss on");
    world.is_away.store(false, Ordering::Relaxed);
    unreached.serve_guest();
    unreached.flush_answered().await.expect("the server is back");
    assert!(unreached.has_loss_to_tell(), "no guest was told");
    let error = unreached.flush().await.expect_err("the write is lost");
    assert_eq!(error.kind(), ErrorKind::Disconnected, "{}", error.chain());
    unreached.flush().await.expect("the guest was told");
    assert!(!unreached.has_unflushed() && !unreached.has_loss_to_tell());
}

#[tokio::test]
async fn what_an_earlier_process_was_answered_is_flushed_as_soon_as_the_server_is_there() {
    let world = answered_before_a_start().await;
    world.is_away.store(true, Ordering::Relaxed);
    let device = world.use_again();
    tokio::time::sleep(Duration::from_millis(300)).await;
    world.is_away.store(false, Ordering::Relaxed);
    let flushed = async {
        while !world.has_kept(0, 1) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), flushed).await.expect("nobody has to ask for it");
    world.crash().await;
    assert_eq!(read(&device, 0).await.expect("the server is back"), 1);
    device.flush().await.expect("nothing is lost");
}

#[tokio::test]
async fn a_forced_write_is_not_undone_by_the_older_ones_that_are_written_again() {
    let world = World::new(1 << 20);
    let (backend, device) = world.connect(PATIENCE).await;
    backend.serve_guest();
    let half = Mutation::data(Bytes(6144), Data::copy_of(&[7; 2048]));
    device.write(data(0, 1)).await.expect("the server is there");
    device.write(data(4096, 2)).await.expect("the server is there");
    device.write(data(0, 3).with_fua(true)).await.expect("the server is there");
    device.write(half.with_fua(true)).await.expect("the server is there");
    world.crash().await;
    assert_eq!(read(&device, 0).await.expect("the server is back"), 3);
    let mixed = device.read(Bytes(4096), Buffer::unpooled(4096)).await.expect("the server is back");
    assert!(mixed[..2048].iter().all(|byte| *byte == 2) && mixed[2048..].iter().all(|byte| *byte == 7));
}

#[tokio::test]
async fn what_is_written_again_is_in_the_order_of_the_answers() {
    // The server takes its time with the first, or with its answer, and would carry out the second, or answer it,
    // before.
    for is_only_answer_late in [false, true] {
        let world = World::new(1 << 20);
        let (backend, device) = world.connect(PATIENCE).await;
        backend.serve_guest();
        world.disk.is_only_answer_late.store(is_only_answer_late, Ordering::Relaxed);
        *world.disk.slow.lock() = Some((Bytes(0), Duration::from_millis(100)));
        let (first, second) = tokio::join!(device.write(data(0, 1)), async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            device.write(data(0, 2)).await
        });
        first.and(second).expect("the server is there");
        let before = read(&device, 0).await.expect("the server is there");
        world.crash().await;
        assert_eq!(read(&device, 0).await.expect("the server is back"), before, "the order has changed");
    }
}

#[tokio::test]
async fn a_server_that_says_that_it_shuts_down_is_waited_for_like_one_that_is_killed() {
    let world = World::new(1 << 20);
    let (backend, device) = world.connect(PATIENCE).await;
    backend.serve_guest();
    device.write(data(0, 1)).await.expect("the server is there");
    world.disk.shuts_down.store(true, Ordering::Relaxed);
    let asking = tokio::spawn({
        let device = device.clone();
        async move {
            device.write(data(4096, 2)).await?;
            device.flush().await?;
            read(&device, 0).await
        }
    });
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert!(!asking.is_finished(), "the guest was told");
    world.crash().await;
    world.disk.shuts_down.store(false, Ordering::Relaxed);
    assert_eq!(asking.await.expect("no panic").expect("the server is back"), 1);
    assert_eq!(read(&device, 4096).await.expect("the server is back"), 2);
}

#[tokio::test]
async fn a_server_that_shuts_down_and_does_not_come_back_fails_requests_after_the_limit() {
    let world = World::new(1 << 20);
    let (backend, device) = world.connect(Duration::from_millis(900)).await;
    backend.serve_guest();
    world.disk.shuts_down.store(true, Ordering::Relaxed);
    let waiting = tokio::time::timeout(Duration::from_secs(20), device.write(data(0, 1)));
    let error = waiting.await.expect("there is a limit").expect_err("the server takes nothing");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{}", error.chain());
}

#[tokio::test]
async fn a_request_that_a_server_leaves_unanswered_fails_after_the_limit_and_never_lands_on_a_newer_one() {
    let world = World::new(1 << 20);
    let (backend, device) = world.connect(Duration::from_millis(100)).await;
    backend.serve_guest();
    *world.disk.slow.lock() = Some((Bytes(0), Duration::from_millis(900)));
    let error = device.write(data(0, 1)).await.expect_err("there is a limit");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{}", error.chain());
    device.write(data(4096, 3)).await.expect("other bytes are nobody's");
    // The second is not sent before the first has landed, so that either it is there or nothing was sent.
    while let Err(error) = device.write(data(0, 2)).await {
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{}", error.chain());
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(read(&device, 0).await.expect("the server is there"), 2, "the first has landed on the second");
}

#[tokio::test]
async fn a_copy_loses_a_server_that_shuts_down_and_may_go_on_with_the_next() {
    let world = World::new(1 << 20);
    let (_backend, device) = world.connect(PATIENCE).await;
    world.disk.shuts_down.store(true, Ordering::Relaxed);
    let error = device.write(data(0, 1)).await.expect_err("it shuts down");
    assert_eq!(error.kind(), ErrorKind::Disconnected, "{}", error.chain());
    world.disk.shuts_down.store(false, Ordering::Relaxed);
    device.write(data(0, 1)).await.expect("the next is there");
}

#[tokio::test]
async fn a_copy_is_told_of_what_was_in_flight_and_once_of_what_was_not_flushed() {
    let world = World::new(1 << 20);
    let (_backend, device) = world.connect(PATIENCE).await;
    device.write(data(0, 1)).await.expect("the server is there");
    world.crash().await;
    assert_eq!(device.write(data(4096, 2)).await.expect_err("it was in flight").kind(), ErrorKind::Disconnected);
    device.write(data(4096, 2)).await.expect("the server is back");
    let error = device.flush().await.expect_err("the first write may be lost");
    assert_eq!(error.kind(), ErrorKind::Disconnected, "{}", error.chain());
    device.write(data(0, 1)).await.expect("the server is there");
    device.flush().await.expect("everything was written again");
    world.crash().await;
    device.read(Bytes(0), Buffer::unpooled(1)).await.expect_err("it was in flight");
    device.flush().await.expect("nothing was written since the last flush");
}

#[tokio::test]
async fn a_write_before_the_switchover_that_a_server_forgets_after_it_fails_the_guests_flush() {
    let world = World::new(1 << 20);
    let (backend, device) = world.connect(PATIENCE).await;
    device.write(data(0, 1)).await.expect("the server is there");
    // Otherwise it would be flushed at once.
    world.disk.hangs_at_flush.store(true, Ordering::Relaxed);
    backend.serve_guest();
    world.crash().await;
    world.disk.hangs_at_flush.store(false, Ordering::Relaxed);
    assert_eq!(read(&device, 0).await.expect("the server is back"), 0, "nobody could write it again");
    assert_eq!(device.flush().await.expect_err("it is lost").kind(), ErrorKind::Disconnected);
    device.flush().await.expect("it was told");
}

#[tokio::test]
async fn a_guest_waits_for_a_server_that_is_away_up_to_its_limit_and_later_requests_try_again() {
    let world = World::new(1 << 20);
    let (backend, device) = world.connect(Duration::from_millis(600)).await;
    backend.serve_guest();
    device.write(data(0, 5)).await.expect("the server is there");
    world.is_away.store(true, Ordering::Relaxed);
    world.crash().await;
    let error = read(&device, 0).await.expect_err("nobody is there");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.chain().contains("nobody is there"), "{}", error.chain());
    device.write(data(4096, 6)).await.expect_err("nobody is there");
    world.is_away.store(false, Ordering::Relaxed);
    // The rest between two dials may be longer than the limit of one request.
    for _ in 0..100 {
        match read(&device, 0).await {
            Ok(value) => return assert_eq!(value, 5, "what was answered is lost"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::TimedOut),
        }
    }
    panic!("the server is back and nobody connects");
}

#[tokio::test]
async fn an_export_that_is_another_after_the_loss_is_refused_at_once() {
    let world = World::new(1 << 20);
    let (backend, device) = world.connect(PATIENCE).await;
    backend.serve_guest();
    world.crash().await;
    world.disk.cached.lock().truncate(4096);
    let waiting = tokio::time::timeout(Duration::from_secs(10), read(&device, 0));
    let error = waiting.await.expect("no waiting helps").expect_err("it is too small");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{}", error.chain());
}

/// Eight guests with a block each write, read and flush while the server's power fails again and again.
#[tokio::test]
async fn under_crash_after_crash_a_guest_reads_what_it_wrote_last() {
    let world = World::new(1 << 20);
    let (backend, device) = world.connect(Duration::from_secs(60)).await;
    backend.serve_guest();
    let guests: Vec<_> = (0..8_u64)
        .map(|guest| {
            let device = device.clone();
            tokio::spawn(async move {
                for round in 1..=120_u8 {
                    device.write(data(guest * 4096, round)).await.expect("the server comes back");
                    if round % 7 == guest as u8 % 7 {
                        device.flush().await.expect("nothing that was answered is lost");
                    }
                    assert_eq!(read(&device, guest * 4096).await.expect("the server comes back"), round);
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            })
        })
        .collect();
    let crashes = async {
        loop {
            tokio::time::sleep(Duration::from_millis(350)).await;
            world.crash().await;
        }
    };
    let all = futures::future::join_all(guests);
    tokio::select! {
        _ = crashes => unreachable!("they go on for ever"),
        done = all => done.into_iter().for_each(|guest| guest.expect("a guest saw something old")),
    }
}

struct Nbdkit(Child);

impl Nbdkit {
    fn start(socket: &Path, arguments: &[&str]) -> Self {
        let _ = std::fs::remove_file(socket);
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(socket).args(arguments);
        let server = Self(command.stdin(Stdio::null()).spawn().expect("nbdkit is missing: run `make setup`"));
        for _ in 0..1000 {
            // The file is there before anybody listens.
            if std::os::unix::net::UnixStream::connect(socket).is_ok() {
                return server;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("nbdkit does not come up");
    }
}

impl Nbdkit {
    /// Asks it to end, as systemd does, and waits until it has.
    fn stop(mut self) {
        let id = self.0.id().to_string();
        let told = Command::new("kill").args(["-TERM", &id]).status().expect("kill is there");
        assert!(told.success(), "nbdkit has gone by itself");
        let _ = self.0.wait();
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The backend of a guest that waits for its server for a minute.
async fn patient_backend(socket: &Path) -> Arc<NbdBackend> {
    let dial = Arc::new(DialUri::new(NbdUri::unix(socket, ""), env()));
    let options = BackendOptions { reconnect_limit: Duration::from_secs(60), ..BackendOptions::default() };
    Arc::new(NbdBackend::connect(dial, env(), options).await.expect("nbdkit agrees"))
}

#[tokio::test]
async fn nbdkit_may_be_killed_and_started_again_under_a_guest() {
    let folder = tempfile::tempdir().expect("a scratch directory");
    let (socket, image) = (folder.path().join("s"), folder.path().join("disk"));
    std::fs::File::create(&image).and_then(|file| file.set_len(1 << 20)).expect("a scratch file");
    let arguments = ["file", image.to_str().expect("a plain path")];
    let mut server = Nbdkit::start(&socket, &arguments);
    let backend = patient_backend(&socket).await;
    assert_eq!(backend.connections(), 4, "nbdkit's file plugin takes several");
    backend.serve_guest();
    let device = Device::from_arc("backend", Arc::clone(&backend) as _);
    for round in 1..=5_u8 {
        for block in 0..64 {
            device.write(data(block * 4096, round)).await.expect("nbdkit comes back");
        }
        drop(server);
        let reading = tokio::spawn({
            let device = device.clone();
            async move { read(&device, 0).await }
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        server = Nbdkit::start(&socket, &arguments);
        assert_eq!(reading.await.expect("no panic").expect("nbdkit is back"), round);
    }
    device.flush().await.expect("nbdkit is there");
    let file = std::fs::read(&image).expect("the image");
    assert!(file[..64 * 4096].iter().all(|byte| *byte == 5));
}

/// What is in memory is lost with the process, as with a server whose machine loses its power.
const FORGETS: [&str; 2] = ["memory", "1M"];

#[tokio::test]
async fn nbdkit_that_forgets_everything_gets_back_what_is_newest() {
    let folder = tempfile::tempdir().expect("a scratch directory");
    let socket = folder.path().join("s");
    let server = Nbdkit::start(&socket, &FORGETS);
    let backend = patient_backend(&socket).await;
    backend.serve_guest();
    let device = Device::from_arc("backend", Arc::clone(&backend) as _);
    for block in 0..64 {
        device.write(data(block * 4096, 1)).await.expect("nbdkit is there");
    }
    // These are durable where durability exists, so they are forgotten here and in the kept list alike. What they
    // replaced does not come back either.
    device.write(data(0, 2).with_fua(true)).await.expect("nbdkit is there");
    device.write(data(4096, 3)).await.expect("nbdkit is there");
    drop(server);
    let _server = Nbdkit::start(&socket, &FORGETS);
    assert_ne!(read(&device, 0).await.expect("nbdkit is back"), 1, "an older write came back over a forced one");
    assert_eq!(read(&device, 4096).await.expect("nbdkit is back"), 3);
    assert_eq!(read(&device, 8192).await.expect("nbdkit is back"), 1);
}

#[tokio::test]
async fn nbdkit_may_be_restarted_politely_under_a_guest_that_goes_on_writing() {
    let folder = tempfile::tempdir().expect("a scratch directory");
    let (socket, image) = (folder.path().join("s"), folder.path().join("disk"));
    std::fs::File::create(&image).and_then(|file| file.set_len(1 << 20)).expect("a scratch file");
    let arguments = ["file", image.to_str().expect("a plain path")];
    let mut server = Nbdkit::start(&socket, &arguments);
    let backend = patient_backend(&socket).await;
    backend.serve_guest();
    let device = Device::from_arc("backend", Arc::clone(&backend) as _);
    let is_over = Arc::new(AtomicBool::new(false));
    let guests: Vec<_> = (0..16_u64)
        .map(|guest| {
            let (device, is_over) = (device.clone(), Arc::clone(&is_over));
            tokio::spawn(async move {
                let mut round = 0_u8;
                while !is_over.load(Ordering::Relaxed) {
                    round = round.wrapping_add(1);
                    device.write(data(guest * 4096, round)).await.expect("a restart is no error");
                    assert_eq!(read(&device, guest * 4096).await.expect("a restart is no error"), round);
                }
            })
        })
        .collect();
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        tokio::task::spawn_blocking(move || server.stop()).await.expect("no panic");
        tokio::time::sleep(Duration::from_millis(100)).await;
        server = Nbdkit::start(&socket, &arguments);
        read(&device, 0).await.expect("nbdkit is back");
    }
    is_over.store(true, Ordering::Relaxed);
    futures::future::join_all(guests).await.into_iter().for_each(|guest| guest.expect("a guest saw an error"));
}
