//! A guest whose volume lies on the export of somebody's NBD server, which dies again and again and loses what was not
//! flushed: the real client that connects again, over a modelled disk and link. Whatever the guest was answered stays.

use std::sync::Arc;
use std::time::Duration;

use block::{BufferPool, Bytes, Device, Error, ErrorKind, Result};
use futures::future::BoxFuture;
use nbd::{BackendOptions, Dial, Export, Exports, Limits, NbdBackend, NbdDevice, serve_connection};
use parking_lot::Mutex;
use sim::clock;
use sim::disk::{Disk, Faults, Timing};
use sim::guest::{Guest, Load, Pattern};
use sim::link::{Link, LinkFigures};
use sim::log::Keep;
use sim::pattern::Content;
use sim::port::Port;
use sim::process::Process;
use sim::register_history::RegisterHistory;
use sim::world::World;
use transhume_sim as sim;

const SIZE: Bytes = Bytes::kib(512);

/// Somebody's server: its lives follow each other over one disk.
#[derive(Clone)]
struct Server {
    world: World,
    link: Link,
    disk: Disk,
    living: Arc<Mutex<Option<ServerRun>>>,
    lives: Arc<Mutex<u32>>,
}

#[derive(Clone)]
struct ServerRun {
    process: Process,
    exports: Arc<dyn Exports>,
}

impl Server {
    async fn start(&self) {
        let run = {
            let mut lives = self.lives.lock();
            *lives += 1;
            *lives
        };
        // The one before it is not gone before its requests are: its kernel sees to that.
        let device = self.disk.open(0).await;
        let export = Export::new("volume", BufferPool::new(Bytes::mib(64)), move || device.clone());
        let exports: Arc<dyn Exports> = Arc::new(vec![Arc::new(export)]);
        *self.living.lock() = Some(ServerRun { process: Process::bystander(&self.world, "server", run), exports });
    }

    async fn die(&self, with_power: bool) {
        let dead = self.living.lock().take();
        if let Some(run) = dead {
            run.process.kill().await;
        }
        if with_power {
            self.disk.lose_power();
        }
        self.link.cut();
        self.world.fault("server-death", format_args!("the server dies"));
    }
}

/// The link's server as somebody dials it.
struct Dialled(Server, Process);

impl Dial for Dialled {
    fn dial(&self) -> BoxFuture<'_, Result<NbdDevice>> {
        Box::pin(async move {
            let Some(ServerRun { process, exports }) = self.0.living.lock().clone() else {
                return Err(Error::new(ErrorKind::Disconnected, "nobody is there"));
            };
            let (near, far) = self.0.link.connect();
            let env = process.env();
            process.env().spawn(Box::pin(async move {
                let limits = Limits { busy_poll: Duration::ZERO, ..Limits::default() };
                serve_connection(far, exports, env, limits).await;
            }));
            NbdDevice::over(near, "volume", &*self.1.env()).await
        })
    }
}

async fn play(seed: u64) {
    let world = World::new(seed, Keep::Tail);
    let rng = world.rng("story");
    let timing = rng.pick(&[Timing::FLASH, Timing::SLOW]);
    let disk = Disk::new(&world, "export", SIZE, 1, timing);
    disk.set_faults(Faults { slow: 0.02, ..Faults::default() });
    let server = Server {
        link: Link::new(&world, "link", LinkFigures::GIGABIT),
        world: world.clone(),
        disk: disk.clone(),
        living: Arc::default(),
        lives: Arc::default(),
    };
    server.start().await;
    let daemon = Process::start(&world, 1);
    let options = BackendOptions { reconnect_limit: Duration::from_secs(60), ..BackendOptions::default() };
    let dial = Arc::new(Dialled(server.clone(), daemon.clone()));
    let backend = NbdBackend::connect(dial, daemon.env(), options).await.expect("the server is there");
    backend.serve_guest();
    let port = Port::new(&world);
    port.plug(&daemon, Device::new("backend", backend));
    let load = Load {
        requests: 600,
        outstanding: rng.pick(&[2, 16]),
        reads: 0.4,
        flushes: rng.pick(&[0.01, 0.1]),
        fua: rng.pick(&[0.1, 0.5]),
        sectors_max: rng.pick(&[8, 64]),
        pattern: Pattern::Hot(rng.pick(&[32, 256])),
        think: Duration::from_millis(4),
        ..Load::default()
    };
    let guest = Guest::new(&world, &port, load, RegisterHistory::new(SIZE.0, |_| Content::Zero));
    guest.start();
    for _ in 0..rng.within(2..=5) {
        world.sleep(rng.up_to(Duration::from_millis(300))).await;
        server.die(rng.chance(0.7)).await;
        world.sleep(rng.up_to(Duration::from_secs(2))).await;
        server.start().await;
        // It may die while it is given back what it lost.
        if rng.chance(0.4) {
            world.sleep(rng.up_to(Duration::from_millis(400))).await;
            server.die(true).await;
            world.sleep(rng.up_to(Duration::from_millis(100))).await;
            server.start().await;
        }
    }
    guest.finish().await;
    guest.read_all().await;
    assert!(guest.flush().await, "seed {seed}: nothing that was answered is lost, and a flush says otherwise");
    server.die(true).await;
    server.start().await;
    guest.read_all().await;
    assert_eq!(world.violation(), None, "seed {seed}");
    let report = guest.report();
    assert_eq!(report.errors, 0, "seed {seed}: a death of the server is no error of the guest");
    assert!(report.answered >= 600 && world.count("power-loss") > 0 && world.count("server-death") > 2, "{report:?}");
}

#[test]
fn what_a_guest_was_answered_outlives_a_server_that_forgets() {
    for seed in 0..60 {
        clock::run(play(seed));
    }
}
