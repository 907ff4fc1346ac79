//! A guest's way to its disk over NBD: the real client and the real server at two ends of a simulated link.
//!
//! ```text
//!             link.connect()            handshake                 an answer says that it is lost, or the guest notices
//!  waiting ────────────────▶ connecting ─────────▶ connected ───────────────────────────────────────────────────┐
//!     ▲                          │ fails, or takes too long                                                      │
//!     └──────────────────────────┴────────────────────── rest ◀──────────────────────────────────────────────────┘
//! ```
//!
//! The client runs in the guest's process, as QEMU's does, and the server's connections are tasks of the daemon's: its
//! death ends them. Requests that a lost connection leaves unanswered are asked again by the [`Port`](crate::port::Port)
//! on the next one. The server's gate, not this, keeps what is left of the old connection from undoing that.
//!
//! A half-open connection is lost without its server learning of it. What the guest's side had on its way vanishes, its
//! end included. The guest notices after a while, as the keepalive of TCP does. A client's kernel may still send bytes
//! after the client has connected again by another way. This is not modelled, because unix sockets do not do this.

use std::sync::Arc;
use std::time::Duration;

use block::Device;
use nbd::{Export, Exports, Limits, NbdDevice, serve_connection};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::link::{Link, LinkFigures, Side};
use crate::process::Process;
use crate::rng::Rng;
use crate::world::World;

/// So long may connecting take before the guest begins anew.
const CONNECT_LIMIT: Duration = Duration::from_millis(500);

/// A guest that has lost its connection rests up to this before it connects again.
const REST_MAX: Duration = Duration::from_micros(200);

/// What the guest's connections are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireFigures {
    /// The link.
    pub link: LinkFigures,
    /// How many requests the server takes from one connection at once.
    pub requests_max: usize,
    /// How many bytes of payload they may have together.
    pub bytes_max: block::Bytes,
}

impl WireFigures {
    /// About a unix socket: 2 GB/s, 5 us, and 256 KiB of buffers.
    pub const LOCAL: Self = Self {
        link: LinkFigures { rate: 2_000_000_000, latency: Duration::from_micros(5), window: 256 << 10 },
        requests_max: 128,
        bytes_max: block::Bytes::mib(16),
    };
}

/// Who serves the disk now.
#[derive(Clone)]
struct Offer {
    process: Process,
    export: Arc<Export>,
}

/// A guest's way to its disk. Clones are the same.
#[derive(Clone)]
pub(crate) struct Wire {
    shared: Arc<Shared>,
}

struct Shared {
    world: World,
    rng: Rng,
    name: &'static str,
    link: Link,
    limits: Limits,
    offer: Mutex<Option<Offer>>,
    offered: Notify,
    guest: Mutex<(u32, Process)>,
    /// How many connections there were, and how many of them had become half open.
    connections: Mutex<(u64, u64)>,
}

/// The guest's end of the wire of that name. The first wire keeps the name, and so the random numbers, from when there
/// was only one.
fn client(world: &World, name: &str, life: u32) -> Process {
    match name {
        "wire" => Process::bystander(world, "qemu", life),
        _ => Process::bystander(world, &format!("qemu-{name}"), life),
    }
}

impl Wire {
    pub(crate) fn new(world: &World, name: &'static str, figures: WireFigures) -> Self {
        let limits = Limits {
            requests_in_flight_max: figures.requests_max,
            bytes_in_flight_max: figures.bytes_max,
            // To look for a client's next request costs hundreds of polls on a clock that stands still meanwhile.
            busy_poll: Duration::ZERO,
            ..Limits::default()
        };
        let shared = Shared {
            world: world.clone(),
            rng: world.rng(name),
            name,
            link: Link::new(world, name, figures.link),
            limits,
            offer: Mutex::default(),
            offered: Notify::new(),
            guest: Mutex::new((0, client(world, name, 0))),
            connections: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// What the guest is connected by.
    pub(crate) fn link(&self) -> &Link {
        &self.shared.link
    }

    /// From now on `process` serves the disk as `export`.
    pub(crate) fn offer(&self, process: &Process, export: Arc<Export>) {
        *self.shared.offer.lock() = Some(Offer { process: process.clone(), export });
        self.shared.offered.notify_waiters();
    }

    /// Nobody serves the disk any more.
    pub(crate) fn close(&self) {
        let offer = self.shared.offer.lock().take();
        drop(offer);
    }

    /// The guest's host has lost its power: nothing is left of its side, nor of what was on its way.
    pub(crate) async fn lose_power(&self) {
        let dead = {
            let mut guest = self.shared.guest.lock();
            let life = guest.0 + 1;
            std::mem::replace(&mut *guest, (life, client(&self.shared.world, self.shared.name, life))).1
        };
        dead.kill().await;
        self.shared.link.cut();
    }

    /// One side hears nothing more of the present connections' other.
    pub(crate) fn half_open(&self) {
        self.shared.link.silence(Side::Client);
        let mut connections = self.shared.connections.lock();
        connections.1 = connections.0;
    }

    async fn living(&self) -> Offer {
        loop {
            let offered = self.shared.offered.notified();
            let offer = self.shared.offer.lock().clone();
            if let Some(offer) = offer.filter(|offer| !offer.process.is_dead()) {
                return offer;
            }
            offered.await;
        }
    }

    /// Connects, again and again until that has succeeded.
    pub(crate) async fn connect(&self) -> Device {
        let Shared { world, rng, link, limits, guest, connections, .. } = &*self.shared;
        loop {
            let Offer { process, export } = self.living().await;
            let (near, far) = link.connect();
            let number = {
                let mut connections = connections.lock();
                connections.0 += 1;
                connections.0
            };
            let (env, limits, name) = (process.env(), *limits, export.name().to_owned());
            process.env().spawn(Box::pin(async move {
                let exports: Arc<dyn Exports> = Arc::new(vec![export]);
                serve_connection(far, exports, env, limits).await;
            }));
            let (life, client) = guest.lock().clone();
            let env = client.env();
            let connecting = client.run(async move {
                let connected = env::timeout(&*env, CONNECT_LIMIT, NbdDevice::over(near, &name, &*env)).await;
                connected.and_then(Result::ok)
            });
            if let Ok(Some(device)) = connecting.await
                && guest.lock().0 == life
                && connections.lock().1 < number
            {
                return Device::new("nbd", device);
            }
            world.event(format_args!("the guest could not connect"));
            self.rest(rng).await;
        }
    }

    /// A while between two connections.
    pub(crate) async fn rest(&self, rng: &Rng) {
        self.shared.world.sleep(Duration::from_micros(1) + rng.up_to(REST_MAX)).await;
    }
}
