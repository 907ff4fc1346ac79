//! What the daemon's jobs see of other hosts: something to dial, and something that is served.

use std::sync::Arc;

use futures::future::BoxFuture;
use migrate::stream::{BoxTransport, Dialer, OnOpened, PeerName, Receiver};
use uuid::Uuid;

use super::HostName;
use crate::platform::Hosts;
use crate::problem::{Result, invalid};

/// Told by which move the memory comes that a connection is for.
pub type OnMemory = Box<dyn Fn(Uuid) + Send + Sync>;

/// Whoever serves the connections of trusted hosts.
pub trait Reception: Send + Sync {
    /// Serves one connection of `peer`, who is trusted under that name, to its end, and tells `opened` what it is for.
    fn serve(
        self: Arc<Self>,
        transport: BoxTransport,
        peer: PeerName,
        opened: OnOpened,
    ) -> BoxFuture<'static, block::Result<()>>;

    /// Serves one connection of `peer` that is about a machine, and tells `opened` of which move's memory it is, if it is that.
    fn serve_machine(
        self: Arc<Self>,
        _transport: BoxTransport,
        _peer: PeerName,
        _opened: OnMemory,
    ) -> BoxFuture<'static, block::Result<()>> {
        let refused = block::Error::new(block::ErrorKind::Unsupported, "this host takes no machines");
        Box::pin(std::future::ready(Err(refused)))
    }
}

impl Reception for Receiver {
    fn serve(
        self: Arc<Self>,
        transport: BoxTransport,
        peer: PeerName,
        opened: OnOpened,
    ) -> BoxFuture<'static, block::Result<()>> {
        Box::pin(async move { self.serve_telling(transport, peer, opened).await })
    }
}

/// A daemon that speaks to no others.
pub struct NoHosts;

impl Hosts for NoHosts {
    fn dialer(&self, host: &HostName) -> Result<Arc<dyn Dialer>> {
        Err(no_hosts(format!("{host} cannot be reached: this daemon speaks to no other hosts")))
    }

    fn listen(&self, _: Arc<dyn Reception>) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}

/// The daemon has no section of hosts.
pub(crate) fn no_hosts(message: String) -> api::v1::Error {
    invalid(message, "give its configuration a section [hosts] and restart it; docs/hosts.md shows one")
}
