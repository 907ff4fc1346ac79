//! An export that is connected to again: what becomes of requests and of what was answered when the server is lost, over
//! servers of ours that forget what was not flushed, and over nbdkit killed and started again.

mod common;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use block::testing::conformance;
use block::{
    BlockDevice, Buffer, Bytes, Data, Device, Error, ErrorKind, Extent, ExtentState, ExtentStatus, Geometry, IoFuture,
    Mutation, MutationKind, Result, ready,
};
use common::{env, export_of, only, serve};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use transhume_nbd::server::Summary;
use transhume_nbd::{BackendOptions, Dial, DialUri, Limits, NbdBackend, NbdDevice, NbdUri};

/// A disk behind a volatile cache: a crash takes what was not flushed.
struct Forgetful {
    cached: Mutex<Vec<u8>>,
    durable: Mutex<Vec<u8>>,
}

impl Forgetful {
    fn new(size: usize) -> Arc<Self> {
        Arc::new(Self { cached: Mutex::new(vec![0; size]), durable: Mutex::new(vec![0; size]) })
    }

    fn crash(&self) {
        self.cached.lock().clone_from(&self.durable.lock());
    }
}

struct Disk(Arc<Forgetful>);

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
        let (start, length) = (offset.as_usize(), buffer.len());
        buffer.copy_from_slice(&self.0.cached.lock()[start..start + length]);
        ready(Ok(buffer))
    }
    fn write(&self, mutation: Mutation) -> IoFuture<'_, ()> {
        let extent = mutation.extent();
        let mut cached = self.0.cached.lock();
        let place = &mut cached[extent.offset.as_usize()..extent.end().as_usize()];
        match mutation.kind() {
            MutationKind::Data(data) => place.copy_from_slice(data),
            MutationKind::Zeroes { .. } => place.fill(0),
            MutationKind::Discard => {}
        }
        if mutation.fua {
            self.0.durable.lock().clone_from(&cached);
        }
        ready(Ok(()))
    }
    fn flush(&self) -> IoFuture<'_, ()> {
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

    async fn connect(&self, patience: Duration) -> (Arc<NbdBackend>, Device) {
        let options = BackendOptions { patience, ..BackendOptions::default() };
        let backend = NbdBackend::connect(Arc::new(self.clone()), env(), options).await.expect("the server is there");
        let backend = Arc::new(backend);
        (Arc::clone(&backend), Device::from_arc("backend", backend))
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
    backend.serve_guest();
    world.crash().await;
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
            if socket.exists() {
                return server;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("nbdkit does not come up");
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn nbdkit_may_be_killed_and_started_again_under_a_guest() {
    let folder = tempfile::tempdir().expect("a scratch directory");
    let (socket, image) = (folder.path().join("s"), folder.path().join("disk"));
    std::fs::File::create(&image).and_then(|file| file.set_len(1 << 20)).expect("a scratch file");
    let arguments = ["file", image.to_str().expect("a plain path")];
    let mut server = Nbdkit::start(&socket, &arguments);
    let dial = Arc::new(DialUri::new(NbdUri::unix(&socket, ""), env()));
    let options = BackendOptions { patience: Duration::from_secs(60), ..BackendOptions::default() };
    let backend = Arc::new(NbdBackend::connect(dial, env(), options).await.expect("nbdkit agrees"));
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
