//! The server: one connection at a time, over any stream.
//!
//! ```text
//!             handshake                     gate                          disconnect, end of stream, error
//!  connected ───────────▶ export chosen ───────────▶ transmission ─────────────────────────────────────────▶ draining
//!      │   limited in time      waits for the requests          every request in flight is driven to its end    │
//!      │   and in size          of dead connections                                                             ▼
//!      └──────────────────────────────────────────────────────────────────────────────────────────────────▶ ended
//! ```

mod advertised;
mod busy_poll;
mod connection_fence;
mod deadline;
mod engine;
mod execute;
mod export;
mod handshake;
mod inbox;
mod load;
mod outbox;
mod peer;
mod pieces;
mod quota;
mod request_cell;

use std::sync::Arc;
use std::time::Duration;

use block::Bytes;
use env::{Env, EnvRef};
use peer::AskPeer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::server::TlsStream;

pub use connection_fence::LifeQuestion;
pub use export::{Export, Exports};
use handshake::Outcome;
use inbox::Inbox;
pub use peer::{ClientSocket, Peer};

use crate::tls::TlsServer;

/// How much one read of the socket takes at most.
const INBOX_BYTES: usize = 256 << 10;

/// What one connection may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How long the handshake may take in all.
    pub handshake_timeout: Duration,
    /// How many options a client may send.
    pub options_max: u32,
    /// How many requests are served at once; further ones stay in the socket.
    pub requests_in_flight_max: usize,
    /// How many bytes of payload they may have together. One request is always let in.
    pub bytes_in_flight_max: Bytes,
    /// The largest read or write that clients are told of. Larger ones, of up to the protocol's 32 MiB, are carried out
    /// in pieces of it.
    pub request_bytes_max: u32,
    /// How long a client may leave replies unfetched, or the rest of a payload unsent, before the connection ends; it may
    /// be longer by a quarter. One that moves at least 1 MiB in that time is slow, and goes on.
    pub stall_timeout: Duration,
    /// How long a connection polls for the client's next request before it goes to sleep, as long as such polls find
    /// one. Zero never polls.
    pub busy_poll: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshake_timeout: Duration::from_secs(30),
            options_max: 256,
            requests_in_flight_max: 128,
            bytes_in_flight_max: Bytes::mib(16),
            request_bytes_max: 4 << 20,
            stall_timeout: Duration::from_secs(60),
            busy_poll: Duration::from_micros(40),
        }
    }
}

/// How a connection ended.
#[derive(Debug)]
pub enum End {
    /// The client disconnected, as the protocol has it.
    Disconnected,
    /// The client disconnected during the handshake.
    Aborted,
    /// The stream ended without a word.
    HungUp,
    /// The handshake took too long.
    HandshakeTimedOut,
    /// The client left its replies unfetched, or a payload unsent, for too long.
    Stalled,
    /// The client broke the protocol so that nothing further could be understood.
    Protocol(&'static str),
    /// TLS did not come about, because of the client's certificate for instance.
    Tls(std::io::Error),
    /// The stream failed.
    Stream(std::io::Error),
}

/// What happened on a connection.
#[derive(Debug)]
pub struct Summary {
    /// The export that was served, if the client came that far.
    pub export: Option<String>,
    /// How it ended.
    pub end: End,
    /// How many requests were carried out, well or not.
    pub requests: u64,
    /// How many bytes of payload came.
    pub bytes_received: u64,
    /// How many bytes of payload were asked for by reads.
    pub bytes_read: u64,
}

impl Summary {
    const fn without_export(end: End) -> Self {
        Self { export: None, end, requests: 0, bytes_received: 0, bytes_read: 0 }
    }
}

/// Serves one client from its first byte to its last.
///
/// This never drops a request in flight: when the client goes away, it drives all that was begun to its end before it
/// returns. Dropping this future gives that up.
pub async fn serve_connection<S>(stream: S, exports: Arc<dyn Exports>, env: EnvRef, limits: Limits) -> Summary
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    serve_plain(stream, |_| Peer::Unknown, exports, env, limits).await
}

/// As [`serve_connection`], through TLS only: a client that does not ask for it, or shows no certificate that `tls`
/// takes, is shown nothing.
pub async fn serve_encrypted<S>(
    stream: S,
    tls: &TlsServer,
    exports: Arc<dyn Exports>,
    env: EnvRef,
    limits: Limits,
) -> Summary
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    serve_tls(stream, |_| Peer::Unknown, tls, exports, env, limits).await
}

/// As [`serve_connection`], or as [`serve_encrypted`] with `tls`, over a socket: the kernel is asked whether its client
/// lives, so that a client that is slow, or has much under way, keeps no other one out.
pub async fn serve_socket<S>(
    socket: S,
    tls: Option<&TlsServer>,
    exports: Arc<dyn Exports>,
    env: EnvRef,
    limits: Limits,
) -> Summary
where
    S: ClientSocket,
{
    match tls {
        None => serve_plain(socket, S::peer, exports, env, limits).await,
        Some(tls) => serve_tls(socket, peer::below_tls, tls, exports, env, limits).await,
    }
}

async fn serve_plain<S>(
    mut stream: S,
    ask_peer: AskPeer<S>,
    exports: Arc<dyn Exports>,
    env: EnvRef,
    limits: Limits,
) -> Summary
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let mut inbox = Inbox::new(INBOX_BYTES);
    let handshake = handshake::run(&mut stream, &mut inbox, &*exports, &limits);
    let outcome = env::timeout(&*env, limits.handshake_timeout, handshake).await;
    let outcome = outcome.unwrap_or(Outcome::Ended(End::HandshakeTimedOut));
    transmit((stream, ask_peer), inbox, outcome, &*env, &limits).await
}

async fn serve_tls<S>(
    mut stream: S,
    ask_peer: AskPeer<TlsStream<S>>,
    tls: &TlsServer,
    exports: Arc<dyn Exports>,
    env: EnvRef,
    limits: Limits,
) -> Summary
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let shaking = async {
        let mut inbox = Inbox::new(INBOX_BYTES);
        let flags = handshake::until_tls(&mut stream, &mut inbox, &*exports, &limits).await?;
        let mut stream = tls.accept(stream).await.map_err(End::Tls)?;
        let outcome = handshake::run_encrypted(&mut stream, &mut inbox, flags, &*exports, &limits).await;
        Ok((stream, inbox, outcome))
    };
    match env::timeout(&*env, limits.handshake_timeout, Box::pin(shaking)).await {
        Some(Ok((stream, inbox, outcome))) => transmit((stream, ask_peer), inbox, outcome, &*env, &limits).await,
        Some(Err(end)) => Summary::without_export(end),
        None => Summary::without_export(End::HandshakeTimedOut),
    }
}

async fn transmit<S>(client: (S, AskPeer<S>), inbox: Inbox, outcome: Outcome, env: &dyn Env, limits: &Limits) -> Summary
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let (export, context) = match outcome {
        Outcome::Transmission(export, context) => (export, context),
        Outcome::Ended(end) => return Summary::without_export(end),
    };
    tracing::debug!(export = export.name(), structured = context.is_structured, "client entered transmission");
    let summary = engine::serve(client, inbox, &export, &context, env, limits).await;
    tracing::debug!(export = export.name(), ?summary, "client left");
    summary
}
