//! TCP as NBD needs it: no waiting to fill packets, and a dead or unreachable peer is detected.
//!
//! ```text
//!   nothing comes for 10 s ──▶ probe ──5 s──▶ probe ──5 s──▶ probe ──5 s──▶ lost        25 s after the last sign of life
//!   what was sent is not acknowledged for 25 s ───────────────────────────▶ lost
//! ```
//!
//! It is the peer's kernel that answers. A server whose process hangs is alive: its kernel delivers what it was sent
//! when it goes on. So giving the connection up and asking again elsewhere could have an old write overwrite a newer
//! one.

use std::io;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// After this time without data the peer is probed.
const IDLE: Duration = Duration::from_secs(10);
/// Between two probes.
const PROBE_DISTANCE: Duration = Duration::from_secs(5);
/// So many unanswered probes mean a dead peer.
const PROBES: u32 = 3;

/// Within this a dead peer is detected, whether anything was sent to it or not.
pub const DEAD_PEER_LIMIT: Duration = Duration::from_secs(25);

/// Sets up a connection, made or accepted.
///
/// # Errors
/// What the kernel says.
pub fn prepare_tcp(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    let probes = TcpKeepalive::new().with_time(IDLE).with_interval(PROBE_DISTANCE).with_retries(PROBES);
    socket.set_tcp_keepalive(&probes)?;
    socket.set_tcp_user_timeout(Some(DEAD_PEER_LIMIT))
}

/// Connects, and sets the connection up.
pub(crate) async fn connect_tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let stream = TcpStream::connect((host, port)).await?;
    prepare_tcp(&stream)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notices_death(stream: &TcpStream) {
        let socket = SockRef::from(stream);
        assert!(socket.keepalive().expect("a TCP socket"));
        let idle = socket.tcp_keepalive_time().expect("a TCP socket");
        let distance = socket.tcp_keepalive_interval().expect("a TCP socket");
        let probes = socket.tcp_keepalive_retries().expect("a TCP socket");
        assert!(idle + distance * probes <= DEAD_PEER_LIMIT, "{idle:?} and {probes} times {distance:?}");
        assert_eq!(socket.tcp_user_timeout().expect("a TCP socket"), Some(DEAD_PEER_LIMIT));
        assert!(stream.nodelay().expect("a TCP socket"));
    }

    #[tokio::test]
    async fn both_ends_notice_within_the_limit_that_the_other_is_dead() {
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let port = listener.local_addr().expect("it is bound").port();
        let (near, far) = tokio::join!(connect_tcp("127.0.0.1", port), listener.accept());
        notices_death(&near.expect("somebody listens"));
        let (far, _) = far.expect("somebody connects");
        prepare_tcp(&far).expect("a TCP socket");
        notices_death(&far);
    }
}
