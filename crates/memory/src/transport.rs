//! What carries a stream.

use tokio::io::{AsyncRead, AsyncWrite};

/// A connection in both directions: an encrypted one between two daemons, a simulated link, a unix socket.
pub trait Transport: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Transport for T {}

/// Any connection.
pub type BoxTransport = Box<dyn Transport>;
