//! Binding sockets: never over somebody who listens, always over what a dead daemon left.

use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use env::Env;
use rustix::fs::{Gid, Mode, Uid};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::document::SocketOwner;
use crate::problem::{Result, of_state};

/// How many clients may wait to be accepted.
const BACKLOG: i32 = 128;

/// How long somebody who may listen on a socket is given to accept.
const PROBE_LIMIT: Duration = Duration::from_secs(2);

/// A unix socket that we listen on. Its file is removed by [`remove`](Self::remove) only: a daemon that goes away for
/// an upgrade leaves it, so that clients that reconnect wait instead of giving up.
pub(crate) struct UnixSocket {
    path: PathBuf,
    inode: u64,
}

impl UnixSocket {
    /// Removes the file, unless somebody else's socket is there by now.
    pub(crate) fn remove(&self) {
        let ours = std::fs::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode);
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "a socket could not be removed");
        }
    }
}

/// Listens on the unix socket `path`, readable and writable by its owner only.
///
/// The socket is made beside its place and moved there when it already listens, so a client that reconnects at this
/// moment meets the old one (refused, tries again) or the new one, never a gap.
pub(crate) async fn listen_unix(
    path: &Path,
    owner: Option<SocketOwner>,
    env: &dyn Env,
) -> Result<(tokio::net::UnixListener, UnixSocket)> {
    refuse_taken(path, env).await?;
    let new = beside(path, env.random());
    let outcome = bind_and_move(&new, path, owner);
    if outcome.is_err() {
        // Nothing is left behind; if it was not even made there is nothing to remove.
        let _ = std::fs::remove_file(&new);
    }
    let socket = outcome.map_err(|error| cannot_listen(path, &error))?;
    let listener = std::os::unix::net::UnixListener::from(socket);
    let listener = tokio::net::UnixListener::from_std(listener).map_err(|error| cannot_listen(path, &error))?;
    let inode = std::fs::symlink_metadata(path).map_err(|error| cannot_listen(path, &error))?.ino();
    Ok((listener, UnixSocket { path: path.to_owned(), inode }))
}

/// Listens on a TCP port.
pub(crate) async fn listen_tcp(host: &str, port: u16) -> Result<tokio::net::TcpListener> {
    tokio::net::TcpListener::bind((host, port)).await.map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            Error::new(ErrorCode::SocketTaken, format!("somebody listens on {host}:{port} already"))
                .with_hint(format!("stop that program (`ss -lptn sport = :{port}` names it), or choose another port"))
        }
        _ => Error::new(ErrorCode::Invalid, format!("cannot listen on {host}:{port}: {error}"))
            .with_hint("name an address of this machine"),
    })
}

async fn refuse_taken(path: &Path, env: &dyn Env) -> Result<()> {
    let shown = path.display();
    let taken = |message: String, hint: &str| Err(Error::new(ErrorCode::SocketTaken, message).with_hint(hint));
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(cannot_listen(path, &error)),
        Ok(found) if !found.file_type().is_socket() => {
            return taken(format!("{shown} is there and is no socket"), "choose another path for the socket");
        }
        Ok(_) => {}
    }
    match env::timeout(env, PROBE_LIMIT, tokio::net::UnixStream::connect(path)).await {
        Some(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused => Ok(()),
        Some(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Some(Err(error)) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            taken(format!("the socket {shown} belongs to somebody else: {error}"), "choose another path")
        }
        _ => taken(
            format!("somebody listens on the socket {shown} already"),
            "stop that program (`ss -lpx` names it), or choose another path",
        ),
    }
}

fn bind_and_move(new: &Path, path: &Path, owner: Option<SocketOwner>) -> std::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(new)?)?;
    // Nobody can connect before it listens.
    rustix::fs::chmod(new, Mode::from_raw_mode(0o600))?;
    if let Some(owner) = owner {
        rustix::fs::chown(new, Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid)))?;
    }
    rustix::net::listen(&socket, BACKLOG)?;
    std::fs::rename(new, path)?;
    Ok(socket)
}

/// A short name in the same directory: a socket's path has 107 bytes at most.
fn beside(path: &Path, random: u64) -> PathBuf {
    path.with_file_name(format!(".{:04x}", random & 0xffff))
}

fn cannot_listen(path: &Path, error: &std::io::Error) -> Error {
    let shown = path.display();
    match error.kind() {
        std::io::ErrorKind::NotFound => {
            Error::new(ErrorCode::BackendMissing, format!("there is no directory for the socket {shown}"))
                .with_hint("create it, or choose another path")
        }
        std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => {
            Error::new(ErrorCode::PermissionDenied, format!("the socket {shown} cannot be made: {error}"))
                .with_hint("choose a directory that the daemon may write")
        }
        std::io::ErrorKind::InvalidInput => {
            Error::new(ErrorCode::Invalid, format!("the socket's path {shown} is too long"))
                .with_hint("use a path of less than 100 bytes")
        }
        _ => Error::new(ErrorCode::Io, format!("cannot listen on the socket {shown}: {error}")),
    }
}

/// Creates the directory of a socket of our own.
pub(crate) fn make_parent(path: &Path) -> Result<()> {
    let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) else { return Ok(()) };
    std::fs::create_dir_all(parent).map_err(|error| of_state(error, format!("creating {}", parent.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_one_in_use_is_not() {
        let env = env::RealEnv::new();
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("s");
        let (listener, socket) = listen_unix(&path, None, &env).await.expect("free");
        assert_eq!(std::fs::metadata(&path).expect("there").mode() & 0o777, 0o600);
        let error = listen_unix(&path, None, &env).await.err().expect("took a socket in use");
        assert_eq!(error.code, ErrorCode::SocketTaken);

        drop(listener);
        let (_listener, second) = listen_unix(&path, None, &env).await.expect("a stale socket is replaced");
        socket.remove();
        assert!(path.exists(), "the new socket was taken for the old one");
        second.remove();
        assert_eq!(std::fs::read_dir(directory.path()).expect("listed").count(), 0, "something was left behind");
    }

    #[tokio::test]
    async fn what_is_no_socket_is_left_alone() {
        let env = env::RealEnv::new();
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let error = listen_unix(file.path(), None, &env).await.err().expect("replaced a file");
        assert_eq!(error.code, ErrorCode::SocketTaken);
        let missing = listen_unix(Path::new("/nonexistent/s"), None, &env).await.err().expect("made a directory");
        assert_eq!(missing.code, ErrorCode::BackendMissing);
    }
}
