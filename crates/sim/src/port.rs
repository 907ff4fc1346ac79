//! The joint between a guest and the process that serves its disk: connections come and go, requests stay.
//!
//! A request whose connection has gone without an answer is asked again on the next one, as QEMU does after a
//! reconnect, in any order.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use block::{Device, IoFuture, Result};
use futures::future::{Either, select};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::dice::Dice;
use crate::process::Process;
use crate::world::World;

/// Where a guest's disk is plugged in. Clones are the same port.
#[derive(Clone)]
pub struct Port {
    shared: Arc<Shared>,
}

struct Shared {
    world: World,
    dice: Dice,
    plugged: Mutex<Option<Connection>>,
    changed: Notify,
}

/// One connection of the guest to a process.
#[derive(Clone)]
struct Connection {
    process: Process,
    device: Device,
    cut: Arc<Notify>,
    requests: Arc<Requests>,
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

impl Port {
    /// A port with nothing plugged in.
    #[must_use]
    pub fn new(world: &World) -> Self {
        let shared = Shared {
            world: world.clone(),
            dice: world.dice("port"),
            plugged: Mutex::default(),
            changed: Notify::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Plugs in `device`, which `process` serves.
    pub fn plug(&self, process: &Process, device: Device) {
        self.shared.world.event(format_args!("the guest is connected to {}", device.name()));
        let connection = Connection { process: process.clone(), device, cut: Arc::default(), requests: Arc::default() };
        *self.shared.plugged.lock() = Some(connection);
        self.shared.changed.notify_waiters();
    }

    /// Cuts the connection. Gives what the server still works on, to be waited for before the next one is let in.
    pub fn cut(&self) -> Option<Leftover> {
        let connection = self.shared.plugged.lock().take()?;
        connection.cut.notify_waiters();
        Some(Leftover { requests: connection.requests })
    }

    async fn connection(&self) -> Connection {
        loop {
            let changed = self.shared.changed.notified();
            let plugged = self.shared.plugged.lock().clone();
            if let Some(connection) = plugged.filter(|connection| !connection.process.is_dead()) {
                return connection;
            }
            changed.await;
        }
    }

    /// Carries out what `ask` asks of the device, again and again until it is answered.
    pub async fn request<T: Send + 'static>(&self, ask: impl Fn(Device) -> IoFuture<'static, T>) -> Result<T> {
        loop {
            let connection = self.connection().await;
            let cut = connection.cut.notified();
            connection.requests.in_flight.fetch_add(1, Ordering::Relaxed);
            let working = Working(Arc::clone(&connection.requests));
            let work = ask(connection.device.clone());
            let answer = connection.process.run(async move {
                let outcome = work.await;
                drop(working);
                outcome
            });
            if let Either::Left((Ok(answer), _)) = select(answer, pin!(cut)).await {
                return answer;
            }
            // The connection has gone. Those that were cut off ask again in no particular order.
            self.shared.world.sleep(self.shared.dice.up_to(Duration::from_micros(50))).await;
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
