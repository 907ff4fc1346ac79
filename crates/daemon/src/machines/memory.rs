//! QEMU's migration stream, carried between two hosts: each of its connections goes to a socket here, over an encrypted
//! connection between the daemons, and from there into the socket of the target's QEMU.
//!
//! The connections are made one after the other, in the order in which QEMU makes them: QEMU 7.2 takes the first that comes
//! for the main one, whichever it is.

use std::path::Path;

use migrate::stream::BoxTransport;
use tokio::net::{UnixListener, UnixStream};

use crate::clients::SocketOwner;
use crate::problem::{Result, of_state};

/// How much is on its way between the two ends of a connection.
const BUFFER_BYTES: usize = 256 << 10;

/// A socket to which this host's QEMU connects.
pub(super) struct Outlet {
    listener: UnixListener,
    path: std::path::PathBuf,
}

impl Outlet {
    /// A socket at `path` for the user that QEMU runs as.
    pub(super) fn open(path: &Path, owner: Option<SocketOwner>) -> Result<Self> {
        // One that an earlier process has left.
        let _ = std::fs::remove_file(path);
        let failed = |error: std::io::Error| of_state(error, format!("listening on {}", path.display()));
        let listener = UnixListener::bind(path).map_err(failed)?;
        if let Some(owner) = owner {
            std::os::unix::fs::chown(path, Some(owner.uid), Some(owner.gid)).map_err(failed)?;
        }
        Ok(Self { listener, path: path.to_owned() })
    }

    /// QEMU's next connection.
    pub(super) async fn accept(&self) -> std::io::Result<UnixStream> {
        self.listener.accept().await.map(|(stream, _)| stream)
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        // It may be gone with its folder.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Carries one of the connections beside the main one. When the other host is lost QEMU's end stays open, and what it sends is
/// thrown away, until QEMU closes it: QEMU 7.2 can freeze for good with its guest when these are closed at the switchover. The
/// main connection is closed, and that ends the migration.
pub(super) async fn carry_beside(mut qemu: UnixStream, mut other: BoxTransport) -> std::io::Result<()> {
    let carried = tokio::io::copy_bidirectional_with_sizes(&mut qemu, &mut other, BUFFER_BYTES, BUFFER_BYTES).await;
    drop(other);
    if carried.is_err() {
        // QEMU ends this, or whoever ends QEMU.
        tokio::spawn(async move { tokio::io::copy(&mut qemu, &mut tokio::io::sink()).await });
    }
    carried.map(drop)
}

/// Carries bytes both ways until both ends are done, or one fails.
pub(super) async fn carry(mut qemu: UnixStream, mut other: BoxTransport) -> std::io::Result<(u64, u64)> {
    tokio::io::copy_bidirectional_with_sizes(&mut qemu, &mut other, BUFFER_BYTES, BUFFER_BYTES).await
}
