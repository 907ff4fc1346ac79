//! The API's socket. It takes connections when no file descriptors are left, too: somebody must be able to detach
//! volumes then.

use std::io;
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use env::EnvRef;
use tokio::net::{UnixListener, UnixStream};

use crate::audit::Peer;
use crate::descriptors::{Spare, are_none_left};

/// How long accepting rests after it failed.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// The socket, with descriptors that are kept for it.
pub(crate) struct ApiListener {
    listener: UnixListener,
    spare: Spare,
    env: EnvRef,
}

impl ApiListener {
    /// Takes the connections of `listener`.
    pub(crate) fn new(listener: UnixListener, env: EnvRef) -> Self {
        let mut spare = Spare::default();
        spare.fill();
        Self { listener, spare, env }
    }
}

impl Listener for ApiListener {
    type Io = UnixStream;
    type Addr = tokio::net::unix::SocketAddr;

    async fn accept(&mut self) -> (UnixStream, Self::Addr) {
        loop {
            match self.listener.accept().await {
                Ok(accepted) => {
                    self.spare.fill();
                    return accepted;
                }
                Err(error) if are_none_left(&error) && self.spare.release() => {
                    tracing::error!("no file descriptors are left: the API goes on with the last ones");
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection to the API could not be accepted");
                    self.env.sleep(ACCEPT_REST).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

impl Connected<IncomingStream<'_, ApiListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, ApiListener>) -> Self {
        Self::of(stream.io())
    }
}
