//! The connections of a machine's memory, as the source makes them: each that leaves the hypervisor is joined to one to the other host.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use futures::future::{Either, select};
use migrate::stream::BoxTransport;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::attempt::{HOLD_LIMIT, MachineMove};
use super::channel::Ask;
use super::ending::no_answer;
use super::memory::{carry, carry_beside, carry_held};
use super::outgoing::call;
use crate::daemon::Daemon;
use crate::hypervisor::{Lane, Outlet};
use crate::problem::Result;

/// A memory of which nothing was sent for so long is on a link that carries nothing, whatever that says of itself.
const SILENCE_LIMIT: Duration = Duration::from_secs(30);
const SILENCE_LOOK: Duration = Duration::from_secs(1);

/// Told that a connection has failed, and why.
#[derive(Default)]
pub(super) struct Lost {
    why: Mutex<Option<String>>,
    told: Notify,
}

impl Lost {
    fn tell(&self, why: String) {
        self.why.lock().get_or_insert(why);
        self.told.notify_one();
    }
}

impl MachineMove {
    /// Carries QEMU's connections to the other host. Ends when one is lost.
    pub(super) async fn carry_memory(&self, daemon: &Arc<Daemon>, outlet: Box<dyn Outlet>) -> Error {
        let lost = |why: String| {
            Error::new(ErrorCode::MoveFailed, format!("the memory of {} could not be sent: {why}", self.name))
                .with_hint("see whether both hosts reach each other, and move it again")
        };
        let accepting = async {
            // One after the other: the target's QEMU must see them in this order.
            let mut number = 0_u16;
            loop {
                let (lane, near) = match outlet.accept().await {
                    Ok(near) => near,
                    Err(error) => return error.to_string(),
                };
                if let Err(error) = self.carry_one(daemon, (lane, near), number).await {
                    return error.to_string();
                }
                number = number.wrapping_add(u16::from(lane == Lane::Memory));
            }
        };
        match select(pin!(accepting), pin!(self.lost.told.notified())).await {
            Either::Left((why, _)) => lost(why),
            Either::Right(_) => lost(self.lost.why.lock().clone().unwrap_or_default()),
        }
    }

    /// Ends when nothing of the memory was sent for long, and some of it is left.
    pub(super) async fn silent(&self, daemon: &Daemon) -> Error {
        let sent = || self.memory_sent();
        let limit = SILENCE_LIMIT.max(self.downtime_limit() * 2);
        let (mut before, mut since) = (sent(), daemon.env.now());
        while self.is_sent.load(Ordering::Acquire) || daemon.env.now().since(since) < limit {
            daemon.env.sleep(SILENCE_LOOK).await;
            let now = sent();
            if now != before {
                (before, since) = (now, daemon.env.now());
            }
        }
        let message = format!("nothing of the memory of {} was sent for {limit:?}", self.name);
        Error::new(ErrorCode::MoveFailed, message)
            .with_hint("see whether both hosts reach each other, and move it again")
    }

    /// Carries one connection of the migration: the first one of the memory is its main one.
    async fn carry_one(&self, daemon: &Arc<Daemon>, (lane, near): (Lane, BoxTransport), number: u16) -> Result<()> {
        let other = self.connection(daemon, lane, number).await?;
        let (lost, env) = (Arc::clone(&self.lost), Arc::clone(&daemon.env));
        let ends = (self.may_close.subscribe(), daemon.machine(&self.name)?.cut.subscribe());
        let is_held = self.request.postcopy;
        daemon.env.spawn(Box::pin(async move {
            let carried = match (lane, number) {
                (Lane::Memory, 0) if is_held => carry_held(&env, (near, other), ends).await,
                (Lane::Memory, 0) | (Lane::Control, _) => carry(near, other).await,
                (Lane::Memory, _) => carry_beside(&*env, near, other).await,
            };
            match carried {
                // Whoever speaks over it says what has failed.
                Err(error) if lane == Lane::Memory => lost.tell(error.to_string()),
                _ => {}
            }
        }));
        Ok(())
    }

    async fn connection(&self, daemon: &Daemon, lane: Lane, number: u16) -> Result<BoxTransport> {
        let id = self.id;
        if lane == Lane::Memory {
            return self.dial(daemon, Ask::Memory { id }, number).await;
        }
        let connecting = async {
            let mut other = daemon.hosts.machine_connection(self.host(), number).await?;
            call(&mut other, self.host(), Ask::Control { id }).await?;
            Ok(other)
        };
        env::timeout(&*daemon.env, HOLD_LIMIT, connecting).await.unwrap_or_else(|| Err(no_answer(self.host())))
    }

    /// A connection to the other host for memory, as `ask` says, within its part of the network.
    pub(super) async fn dial(&self, daemon: &Daemon, ask: Ask, number: u16) -> Result<BoxTransport> {
        let connecting = async {
            let (mut other, carried) = daemon.hosts.memory_connection(self.host(), number, self.id).await?;
            call(&mut other, self.host(), ask).await?;
            Ok(self.rates.admit(other, carried))
        };
        env::timeout(&*daemon.env, HOLD_LIMIT, connecting).await.unwrap_or_else(|| Err(no_answer(self.host())))
    }
}
