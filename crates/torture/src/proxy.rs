//! A proxy between a client and the daemon's socket: connections through it are cut, held and slowed down.
//!
//! A cut ends the daemon's side first. So whatever the client does after it has noticed comes after everything that the
//! daemon can still read. A socket of its own gives the same order.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;

/// Bytes carried at once; a trickle is slow because of the pauses between them.
const PIECE: usize = 64 << 10;
const TRICKLE_PIECE: usize = 2 << 10;
const HELD_POLL: Duration = Duration::from_millis(2);

/// A proxy. Dropping it cuts everything and lets nobody in any more.
pub(crate) struct Proxy {
    shared: Arc<Shared>,
    socket: PathBuf,
}

struct Shared {
    upstream: PathBuf,
    /// The daemon's and the client's side of each connection that was made.
    pairs: Mutex<Vec<(UnixStream, UnixStream)>>,
    is_held: AtomicBool,
    /// 0 for as fast as it goes.
    bytes_per_second: AtomicU64,
    is_over: AtomicBool,
}

impl Proxy {
    /// Listens on `socket` and passes everything on to `upstream`.
    pub(crate) fn start(socket: &Path, upstream: &Path) -> anyhow::Result<Self> {
        let listener = UnixListener::bind(socket).with_context(|| format!("listening on {}", socket.display()))?;
        let shared = Arc::new(Shared {
            upstream: upstream.into(),
            pairs: Mutex::default(),
            is_held: AtomicBool::new(false),
            bytes_per_second: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if accepting.is_over.load(Ordering::SeqCst) {
                    return;
                }
                // Without a daemon the client is hung up on; it tries again.
                let _ = connect(&accepting, client);
            }
        });
        Ok(Self { shared, socket: socket.into() })
    }

    /// Cuts every connection.
    pub(crate) fn cut(&self) {
        for (upstream, client) in self.shared.pairs.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            hang_up(&upstream, &client);
        }
    }

    /// Carries nothing until told otherwise.
    pub(crate) fn hold(&self, is_held: bool) {
        self.shared.is_held.store(is_held, Ordering::SeqCst);
    }

    /// Carries so many bytes a second each way from now on; 0 for as many as go.
    pub(crate) fn slow_down(&self, bytes_per_second: u64) {
        self.shared.bytes_per_second.store(bytes_per_second, Ordering::SeqCst);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::SeqCst);
        self.hold(false);
        self.cut();
        // Wakes the thread that accepts.
        let _ = UnixStream::connect(&self.socket);
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn hang_up(upstream: &UnixStream, client: &UnixStream) {
    // Either may be gone already.
    let _ = upstream.shutdown(Shutdown::Both);
    let _ = client.shutdown(Shutdown::Both);
}

fn connect(shared: &Arc<Shared>, client: UnixStream) -> std::io::Result<()> {
    let upstream = UnixStream::connect(&shared.upstream)?;
    let pair = (upstream.try_clone()?, client.try_clone()?);
    shared.pairs.lock().unwrap_or_else(PoisonError::into_inner).push(pair);
    for (from, to) in [(&client, &upstream), (&upstream, &client)] {
        let (shared, from, to) = (Arc::clone(shared), from.try_clone()?, to.try_clone()?);
        let (end_upstream, end_client) = (upstream.try_clone()?, client.try_clone()?);
        std::thread::spawn(move || {
            carry(&shared, from, to);
            hang_up(&end_upstream, &end_client);
        });
    }
    Ok(())
}

/// Carries bytes one way until either side ends.
fn carry(shared: &Shared, mut from: UnixStream, mut to: UnixStream) {
    let mut bytes = vec![0; PIECE];
    loop {
        let rate = shared.bytes_per_second.load(Ordering::SeqCst);
        let most = if rate > 0 { TRICKLE_PIECE } else { PIECE };
        let count = match from.read(&mut bytes[..most]) {
            Ok(0) | Err(_) => return,
            Ok(count) => count,
        };
        while shared.is_held.load(Ordering::SeqCst) {
            std::thread::sleep(HELD_POLL);
        }
        let pause = (count as u64 * 1_000_000).checked_div(rate);
        std::thread::sleep(Duration::from_micros(pause.unwrap_or_default()));
        if to.write_all(&bytes[..count]).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_carries_both_ways_until_it_cuts() {
        let folder = tempfile::tempdir().unwrap();
        let (front, back) = (folder.path().join("front"), folder.path().join("back"));
        let server = UnixListener::bind(&back).unwrap();
        let proxy = Proxy::start(&front, &back).unwrap();
        let mut client = UnixStream::connect(&front).unwrap();
        let (mut served, _) = server.accept().unwrap();
        client.write_all(b"ask").unwrap();
        let mut heard = [0; 3];
        served.read_exact(&mut heard).unwrap();
        served.write_all(b"answer").unwrap();
        let mut answer = [0; 6];
        client.read_exact(&mut answer).unwrap();
        assert_eq!((&heard, &answer), (b"ask", b"answer"));
        proxy.cut();
        assert_eq!(client.read(&mut answer).unwrap(), 0, "the client does not see the end");
        assert_eq!(served.read(&mut answer).unwrap(), 0, "the server does not see the end");
        let mut again = UnixStream::connect(&front).unwrap();
        again.write_all(b"ask").unwrap();
        server.accept().unwrap().0.read_exact(&mut heard).unwrap();
    }
}
