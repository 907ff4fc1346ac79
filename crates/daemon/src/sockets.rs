//! Binding sockets: never over somebody who listens, always over what a dead daemon left.

use std::os::fd::AsRawFd;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use env::Env;
use rustix::fs::{FileType, Gid, Mode, OFlags, Uid};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::clients::SocketOwner;
use crate::descriptors::are_none_left;
use crate::problem::{DESCRIPTORS_HINT, Result, of_state};

/// What the socket of an adopted disk is called in the volume's directory.
pub(crate) const SOCKET_NAME: &str = "nbd.sock";

/// Who may search the directory of an adopted disk's socket: QEMU's user, whoever that is. The socket itself is its alone.
const FOLDER_MODE: u32 = 0o711;

/// How many clients may wait to be accepted.
const BACKLOG: i32 = 128;

/// How long somebody who may listen on a socket is given to accept.
const PROBE_LIMIT: Duration = Duration::from_secs(2);

/// A unix socket that we listen on. Only [`remove`](Self::remove) removes its file. A daemon that stops for an upgrade
/// leaves the file, so that clients that reconnect wait instead of giving up.
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
        if ours && self.path.file_name().is_some_and(|name| name == SOCKET_NAME) {
            // A directory that holds something else is not ours alone.
            let _ = self.path.parent().map(std::fs::remove_dir);
        }
    }
}

/// Listens on the unix socket `path`, readable and writable by its owner only.
///
/// The socket is made beside its place, and moved there when it already listens. So a client that reconnects at this
/// moment meets the old socket or the new one, never a gap. The old one refuses it, and it tries again.
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
        Some(Err(error)) if are_none_left(&error) => Err(cannot_listen(path, &error)),
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
    give(new, owner)?;
    rustix::net::listen(&socket, BACKLOG)?;
    std::fs::rename(new, path)?;
    Ok(socket)
}

/// Gives a new socket to its owner. Whoever may write in its directory may have put a link there by now. The link is
/// not followed: the socket that is changed is the one that was examined.
fn give(path: &Path, owner: Option<SocketOwner>) -> std::io::Result<()> {
    let socket = rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&socket)?.st_mode) != FileType::Socket {
        return Err(std::io::Error::other("somebody has replaced the socket"));
    }
    let opened = format!("/proc/self/fd/{}", socket.as_raw_fd());
    rustix::fs::chmod(&opened, Mode::from_raw_mode(0o600))?;
    if let Some(owner) = owner {
        rustix::fs::chown(&opened, Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid)))?;
    }
    Ok(())
}

/// Makes the directory of an adopted disk's socket. One that belongs to somebody else is refused: its owner could put
/// another socket there, to which QEMU would connect.
pub(crate) fn make_folder(socket: &Path) -> Result<()> {
    let Some(folder) = socket.parent() else { return Ok(()) };
    make_parent(folder)?;
    match std::fs::DirBuilder::new().mode(FOLDER_MODE).create(folder) {
        Ok(()) => {
            // What the process masks out of a mode does not count.
            let mode = std::fs::Permissions::from_mode(FOLDER_MODE);
            std::fs::set_permissions(folder, mode).map_err(|error| cannot_listen(socket, &error))
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            let found = std::fs::symlink_metadata(folder).map_err(|error| cannot_listen(socket, &error))?;
            let is_new = socket.file_name().is_some_and(|name| name == SOCKET_NAME);
            let is_ours = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
            if is_ours || !is_new {
                return Ok(());
            }
            let message = format!("{} is there and is no directory of this daemon's user", folder.display());
            Err(Error::new(ErrorCode::SocketTaken, message)
                .with_hint("remove it, or choose another name or socket-dir"))
        }
        Err(error) => Err(cannot_listen(socket, &error)),
    }
}

/// A short name in the same directory: a socket's path has 107 bytes at most.
fn beside(path: &Path, random: u64) -> PathBuf {
    path.with_file_name(format!(".{:04x}", random & 0xffff))
}

fn cannot_listen(path: &Path, error: &std::io::Error) -> Error {
    let shown = path.display();
    match error.kind() {
        _ if are_none_left(error) => {
            Error::new(ErrorCode::DescriptorsShort, format!("cannot listen on the socket {shown}: {error}"))
                .with_hint(DESCRIPTORS_HINT)
        }
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

    #[test]
    fn a_link_in_the_place_of_a_new_socket_is_not_followed() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let (victim, link) = (directory.path().join("victim"), directory.path().join("link"));
        let _listener = std::os::unix::net::UnixListener::bind(&victim).expect("bound");
        std::fs::set_permissions(&victim, std::fs::Permissions::from_mode(0o644)).expect("set");
        std::os::unix::fs::symlink(&victim, &link).expect("a symlink");
        give(&link, None).expect_err("a link was followed");
        assert_eq!(std::fs::metadata(&victim).expect("there").mode() & 0o777, 0o644);
        give(&victim, None).expect("a socket");
        assert_eq!(std::fs::metadata(&victim).expect("there").mode() & 0o777, 0o600);
    }

    #[test]
    fn the_directory_of_an_adopted_disks_socket_is_this_daemons_and_no_link() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let (socket, other) = (directory.path().join("web1").join(SOCKET_NAME), directory.path().join("other"));
        make_folder(&socket).expect("made");
        make_folder(&socket).expect("there already");
        assert_eq!(std::fs::metadata(directory.path().join("web1")).expect("there").mode() & 0o777, FOLDER_MODE);
        // A disk that an earlier version has adopted has its socket beside the others, in a directory that stays as it is.
        let before = std::fs::metadata(directory.path()).expect("there").mode();
        make_folder(&directory.path().join("web2.sock")).expect("nothing to make");
        assert_eq!(std::fs::metadata(directory.path()).expect("there").mode(), before);
        std::os::unix::fs::symlink(directory.path().join("web1"), &other).expect("a symlink");
        let error = make_folder(&other.join(SOCKET_NAME)).expect_err("a link was taken");
        assert_eq!(error.code, ErrorCode::SocketTaken);
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
