//! The joint between a guest and the process that serves its disk: connections come and go, requests stay.
//!
//! There are two ways. One is calls of the process's own device, which cost the least. The other is NBD over a `Wire`,
//! as guests have it. A request whose connection has gone without an answer is asked again on the next one, in any
//! order, as QEMU does after a reconnect. What is left of the old connection must not undo that. In the first case the
//! host prevents it ([`Leftover`]), in the second the NBD server. A guest that speaks NBD may have two connections to
//! one export. Each comes and goes by itself, and every request takes one of them.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use block::{Device, ErrorKind, IoFuture, Result};
use futures::future::{Either, select};
use nbd::Export;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::link::{Link, Side};
use crate::process::Process;
use crate::rng::Rng;
use crate::wire::{Wire, WireFigures};
use crate::world::World;

/// A half-open connection is noticed by the guest within this.
const KEEPALIVE_MAX: Duration = Duration::from_millis(20);

/// A guest's network is in trouble for so long at once.
const TROUBLE_MAX: Duration = Duration::from_millis(10);

/// Where a guest's disk is plugged in. Clones are the same port.
#[derive(Clone)]
pub struct Port {
    shared: Arc<Shared>,
}

struct Shared {
    world: World,
    rng: Rng,
    plugged: Mutex<Option<Connection>>,
    /// How many connections there were.
    connections: AtomicUsize,
    changed: Notify,
    wire: Option<Wire>,
    /// Another way to the same export.
    second: Option<Port>,
    /// Whether its guest is stopped, and how many requests it has under way.
    stopped: Mutex<(bool, usize)>,
    stepped: Notify,
}

/// A request of the guest that is not answered.
struct Asked<'a>(&'a Shared);

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.0.stopped.lock().1 -= 1;
        self.0.stepped.notify_waiters();
    }
}

/// One connection of the guest to a process.
#[derive(Clone)]
struct Connection {
    /// Whose device it is, if requests are calls.
    process: Option<Process>,
    device: Device,
    loss: Arc<Loss>,
    requests: Arc<Requests>,
}

/// Whether a connection has gone. (A watch channel would wake its receivers in an order that no seed repeats.)
#[derive(Default)]
struct Loss {
    is_lost: AtomicBool,
    told: Notify,
}

impl Loss {
    fn lose(&self) {
        self.is_lost.store(true, Ordering::Relaxed);
        self.told.notify_waiters();
    }

    fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    async fn lost(&self) {
        let told = self.told.notified();
        if !self.is_lost() {
            told.await;
        }
    }
}

#[derive(Default)]
struct Requests {
    in_flight: AtomicUsize,
    drained: Notify,
}

/// A request that the server works on, whether its connection is still there or not.
struct Working(Arc<Requests>);

impl Drop for Working {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.0.drained.notify_waiters();
    }
}

impl Connection {
    fn new(process: Option<&Process>, device: Device) -> Self {
        Self { process: process.cloned(), device, loss: Arc::default(), requests: Arc::default() }
    }

    /// Carries out `work`, a request to its device; `None` if the connection goes first.
    async fn carry_out<T: Send + 'static>(&self, work: IoFuture<'static, T>) -> Option<Result<T>> {
        let lost = pin!(self.loss.lost());
        let Some(process) = &self.process else {
            return match select(work, lost).await {
                Either::Left((Err(error), _)) if error.kind() == ErrorKind::Disconnected => {
                    self.loss.lose();
                    None
                }
                Either::Left((answer, _)) => Some(answer),
                Either::Right(_) => None,
            };
        };
        self.requests.in_flight.fetch_add(1, Ordering::Relaxed);
        let working = Working(Arc::clone(&self.requests));
        let answer = process.run(async move {
            let outcome = work.await;
            drop(working);
            outcome
        });
        match select(answer, lost).await {
            Either::Left((answer, _)) => answer.ok(),
            Either::Right(_) => None,
        }
    }
}

impl Port {
    /// A port with nothing plugged in, at which requests are calls.
    #[must_use]
    pub fn new(world: &World) -> Self {
        Self::with(world, "port", None, None)
    }

    /// A port with nothing plugged in, whose guest speaks NBD.
    #[must_use]
    pub fn over_wire(world: &World, figures: WireFigures) -> Self {
        Self::wired(world, ("port", "wire"), figures, None)
    }

    /// The same of a guest with two connections to one export.
    #[must_use]
    pub fn over_two_wires(world: &World, figures: WireFigures) -> Self {
        let second = Self::wired(world, ("second-port", "second-wire"), figures, None);
        Self::wired(world, ("port", "wire"), figures, Some(second))
    }

    /// The port of one more guest of a daemon, which is called as `names` say.
    pub(crate) fn beside(world: &World, names: (&'static str, &'static str), figures: Option<WireFigures>) -> Self {
        match figures {
            Some(figures) => Self::wired(world, names, figures, None),
            None => Self::with(world, names.0, None, None),
        }
    }

    fn wired(world: &World, names: (&str, &'static str), figures: WireFigures, second: Option<Self>) -> Self {
        let port = Self::with(world, names.0, Some(Wire::new(world, names.1, figures)), second);
        let kept = port.clone();
        world.spawn(async move { kept.stay_connected().await });
        port
    }

    fn with(world: &World, name: &str, wire: Option<Wire>, second: Option<Self>) -> Self {
        let shared = Shared {
            world: world.clone(),
            rng: world.rng(name),
            plugged: Mutex::default(),
            connections: AtomicUsize::new(0),
            changed: Notify::new(),
            wire,
            second,
            stopped: Mutex::default(),
            stepped: Notify::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Whether its guest speaks NBD.
    #[must_use]
    pub fn is_wire(&self) -> bool {
        self.shared.wire.is_some()
    }

    /// Plugs in `device`, which `process` serves.
    pub fn plug(&self, process: &Process, device: Device) {
        self.connected(Connection::new(Some(process), device));
    }

    /// Offers `export`, which `process` serves, to a guest that speaks NBD.
    pub fn offer(&self, process: &Process, export: Arc<Export>) {
        if let Some(wire) = &self.shared.wire {
            wire.offer(process, Arc::clone(&export));
        }
        if let Some(second) = &self.shared.second {
            second.offer(process, export);
        }
    }

    /// How many connections the guest has had.
    pub(crate) fn connections(&self) -> usize {
        let others = self.shared.second.as_ref().map_or(0, Self::connections);
        self.shared.connections.load(Ordering::Relaxed) + others
    }

    /// One of the guest's connections.
    fn one(&self) -> &Self {
        self.shared.second.as_ref().filter(|_| self.shared.rng.chance(0.5)).unwrap_or(self)
    }

    /// The scenario is over: what was plugged in, which may lead back to here, is let go of.
    pub(crate) fn close(&self) {
        let plugged = self.shared.plugged.lock().take();
        drop(plugged);
        if let Some(wire) = &self.shared.wire {
            wire.close();
        }
    }

    fn connected(&self, connection: Connection) {
        self.shared.world.event(format_args!("the guest is connected to {}", connection.device.name()));
        self.shared.connections.fetch_add(1, Ordering::Relaxed);
        *self.shared.plugged.lock() = Some(connection);
        self.shared.changed.notify_waiters();
    }

    /// What QEMU does: whenever the connection is lost, it makes another.
    async fn stay_connected(&self) {
        let Some(wire) = &self.shared.wire else { return };
        loop {
            let connection = Connection::new(None, wire.connect().await);
            let loss = Arc::clone(&connection.loss);
            self.connected(connection);
            loss.lost().await;
            *self.shared.plugged.lock() = None;
            self.shared.world.event(format_args!("the guest has lost its connection"));
            wire.rest(&self.shared.rng).await;
        }
    }

    /// Cuts the connection. Gives what the server still works on where that is for the host to wait for before the next
    /// one is let in.
    pub fn cut(&self) -> Option<Leftover> {
        if let Some(wire) = &self.one().shared.wire {
            wire.link().cut();
            return None;
        }
        let connection = self.shared.plugged.lock().take()?;
        connection.loss.lose();
        Some(Leftover { requests: connection.requests })
    }

    /// The process that it is connected to has died.
    pub fn hang_up(&self) {
        // The end of a process ends its sockets, and the guest reads what they still hold.
        if !self.is_wire() {
            drop(self.cut());
        }
    }

    /// The guest's host has lost its power.
    pub async fn lose_power(&self) {
        let Some(wire) = &self.shared.wire else { return };
        wire.lose_power().await;
        if let Some(connection) = self.shared.plugged.lock().take() {
            connection.loss.lose();
        }
        if let Some(second) = &self.shared.second {
            Box::pin(second.lose_power()).await;
        }
    }

    /// The connection stays open for the server and is lost for the guest, which notices after a while.
    pub fn half_open(&self) {
        let one = self.one();
        let Some(wire) = &one.shared.wire else { return };
        wire.half_open();
        let connection = one.shared.plugged.lock().clone();
        let (world, span) = (self.shared.world.clone(), self.shared.rng.up_to(KEEPALIVE_MAX));
        self.shared.world.spawn(async move {
            world.sleep(span).await;
            if let Some(connection) = connection {
                connection.loss.lose();
            }
        });
    }

    /// The guest does not read its answers for a while.
    pub fn stop_reading(&self) {
        self.trouble(|link, begins| link.set_reading(Side::Client, !begins));
    }

    /// Nothing moves on the guest's link for a while.
    pub fn interrupt(&self) {
        self.trouble(|link, begins| link.set_up(!begins));
    }

    fn trouble(&self, change: impl Fn(&Link, bool) + Send + 'static) {
        let Some(wire) = &self.one().shared.wire else { return };
        let (link, world, span) = (wire.link().clone(), self.shared.world.clone(), self.shared.rng.up_to(TROUBLE_MAX));
        change(&link, true);
        self.shared.world.spawn(async move {
            world.sleep(span).await;
            change(&link, false);
        });
    }

    async fn connection(&self) -> Connection {
        loop {
            let changed = self.shared.changed.notified();
            let plugged = self.shared.plugged.lock().clone();
            let is_there = |connection: &Connection| {
                !connection.loss.is_lost() && connection.process.as_ref().is_none_or(|process| !process.is_dead())
            };
            if let Some(connection) = plugged.filter(is_there) {
                return connection;
            }
            changed.await;
        }
    }

    /// Stops its guest: waits until what it has asked for is answered, or it goes on.
    pub(crate) async fn stop(&self) {
        self.shared.stopped.lock().0 = true;
        loop {
            let stepped = self.shared.stepped.notified();
            let (is_stopped, asked) = *self.shared.stopped.lock();
            if !is_stopped || asked == 0 {
                return;
            }
            stepped.await;
        }
    }

    /// Lets its guest go on.
    pub(crate) fn go_on(&self) {
        self.shared.stopped.lock().0 = false;
        self.shared.stepped.notify_waiters();
    }

    /// Waits until its guest may ask for something.
    async fn turn(&self) -> Asked<'_> {
        loop {
            let stepped = self.shared.stepped.notified();
            {
                let mut stopped = self.shared.stopped.lock();
                if !stopped.0 {
                    stopped.1 += 1;
                    return Asked(&self.shared);
                }
            }
            stepped.await;
        }
    }

    /// Carries out what `ask` asks of the device, again and again until it is answered.
    pub async fn request<T: Send + 'static>(&self, ask: impl Fn(Device) -> IoFuture<'static, T>) -> Result<T> {
        let _asked = self.turn().await;
        let one = self.one();
        loop {
            let connection = one.connection().await;
            if let Some(answer) = connection.carry_out(ask(connection.device.clone())).await {
                return answer;
            }
            // The connection has gone. Those that were cut off ask again in no particular order.
            self.shared.world.sleep(self.shared.rng.up_to(Duration::from_micros(50))).await;
        }
    }
}

/// Requests of a connection that is gone.
pub struct Leftover {
    requests: Arc<Requests>,
}

impl Leftover {
    /// Waits until the last of them is finished.
    pub async fn finished(&self) {
        loop {
            let drained = self.requests.drained.notified();
            if self.requests.in_flight.load(Ordering::Relaxed) == 0 {
                return;
            }
            drained.await;
        }
    }
}
