//! What carries a stream.

use std::net::IpAddr;

use block::Result;
use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};

/// A connection in both directions: TCP with TLS, a simulated link, two pipes.
pub trait Transport: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Transport for T {}

/// Any connection.
pub type BoxTransport = Box<dyn Transport>;

/// How the sender gets its connections.
///
/// Whatever is between the wire and the network makes small requests wait behind what it buffers: TCP wants
/// `TCP_NODELAY`, and a small `TCP_NOTSENT_LOWAT`.
pub trait Dialer: Send + Sync {
    /// A new connection for `stream`, by the pair of addresses whose turn that is.
    ///
    /// # Errors
    /// There is none to be had now.
    fn dial(&self, stream: u16) -> BoxFuture<'_, Result<BoxTransport>>;

    /// How many pairs of addresses there are now, at least 1: so many streams are needed to use all of them.
    fn pairs(&self) -> usize {
        1
    }

    /// Between which addresses the newest connection of `stream` runs, if there are any.
    fn path(&self, _stream: u16) -> Option<StreamPath> {
        None
    }
}

/// Between which addresses a connection runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StreamPath {
    /// This end's address.
    pub here: IpAddr,
    /// The other end's address, as it is reached from here.
    pub there: IpAddr,
}
