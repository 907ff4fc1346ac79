//! What carries a stream.

use std::net::IpAddr;

use block::Result;
use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};

use super::SessionRequest;

/// A connection in both directions: TCP with TLS, a simulated link, two pipes.
pub trait Transport: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Transport for T {}

/// Any connection.
pub type BoxTransport = Box<dyn Transport>;

/// Told what a connection is for that the receiver was given, once it is a stream of a session.
pub type OnOpened = Box<dyn FnOnce(&SessionRequest) + Send>;

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

    /// The newest connection of `stream` has become a stream of a session about `request`.
    fn opened(&self, _stream: u16, _request: &SessionRequest) {}

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
