//! TCP connections for the wire protocol: packets do not wait to be filled, and a dead peer is noticed.
//!
//! The kernel chooses the sizes of the sockets' buffers. It fits them to the path, up to `net.ipv4.tcp_wmem` and
//! `tcp_rmem`. Setting one switches that off.

use std::io::{Error as OsError, ErrorKind as OsErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use env::Env;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpSocket, TcpStream, lookup_host};

use crate::address::Address;

/// How long a connection may take to come about.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// How long after one attempt the next one begins.
const ATTEMPT_DISTANCE: Duration = Duration::from_millis(200);
/// How long what was sent may stay unanswered before the connection counts as lost.
const UNANSWERED: Duration = Duration::from_secs(20);
/// How long nothing may come before the other side is asked whether it is there, and how often in what distance.
const IDLE: Duration = Duration::from_secs(10);
const PROBES: u32 = 3;
const PROBE_DISTANCE: Duration = Duration::from_secs(3);

/// How much the kernel holds that is not on its way yet. These bytes can go by no other stream, and small requests wait
/// behind them.
const UNSENT_BYTES_MAX: u32 = 256 << 10;

/// Sets up a connection, made or taken.
pub fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    let probes = TcpKeepalive::new().with_time(IDLE).with_interval(PROBE_DISTANCE).with_retries(PROBES);
    socket.set_tcp_keepalive(&probes)?;
    socket.set_tcp_user_timeout(Some(UNANSWERED))?;
    socket.set_tcp_notsent_lowat(UNSENT_BYTES_MAX)
}

/// Connects to `address`, from the address `from` of this machine if one is given.
pub async fn connect(address: &Address, from: Option<IpAddr>, env: &dyn Env) -> std::io::Result<TcpStream> {
    let attempt = async {
        let mut last = OsError::new(OsErrorKind::NotFound, "the name has no address");
        for remote in lookup_host((&*address.host, address.port)).await? {
            match connect_at_last(remote, from, env).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    };
    let late = || Err(OsError::new(OsErrorKind::TimedOut, format!("no answer within {} s", CONNECT_LIMIT.as_secs())));
    let stream = env::timeout(env, CONNECT_LIMIT, attempt).await.unwrap_or_else(late)?;
    prepare(&stream)?;
    Ok(stream)
}

/// Connects with several attempts on their way at once. The kernel doubles the distance between its own repetitions.
/// When a path comes back, they would be late by up to as long as the path was away.
async fn connect_at_last(remote: SocketAddr, from: Option<IpAddr>, env: &dyn Env) -> std::io::Result<TcpStream> {
    let mut attempts = FuturesUnordered::new();
    loop {
        attempts.push(connect_to(remote, from));
        if let Some(Some(outcome)) = env::timeout(env, ATTEMPT_DISTANCE, attempts.next()).await {
            return outcome;
        }
    }
}

async fn connect_to(remote: SocketAddr, from: Option<IpAddr>) -> std::io::Result<TcpStream> {
    let socket = if remote.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    if let Some(from) = from.filter(|from| from.is_ipv4() == remote.is_ipv4()) {
        socket.bind(SocketAddr::new(from, 0))?;
    }
    socket.connect(remote).await
}
