//! The libvirt of this host: the one that `virsh` uses.

use std::path::{Path, PathBuf};

use api::v1::{Error, ErrorCode};
use migrate::stream::BoxTransport;
use tokio::net::UnixStream;

use super::rpc;
use crate::problem::{Result, of_vm};

/// How much is on its way between two ends in this process.
const BUFFER_BYTES: usize = 256 << 10;
/// Where libvirt listens, the newer daemon first.
const SOCKETS: [&str; 2] = ["libvirt/virtqemud-sock", "libvirt/libvirt-sock"];

/// A libvirt of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Instance {
    /// `system` or `session`.
    pub(super) name: String,
    /// Where it listens.
    pub(super) socket: PathBuf,
}

impl Instance {
    /// The one that `virsh` uses: `LIBVIRT_DEFAULT_URI` in the daemon's environment selects it.
    ///
    /// # Errors
    /// There is none, or it is another host's.
    pub(super) async fn find() -> Result<Self> {
        let uri = vm::Virsh::default().run(&["uri"]).await.map_err(|error| of_vm(&error))?;
        let runtime = |name: &str| match name {
            "session" => std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from),
            _ => Some(PathBuf::from("/run")),
        };
        Self::parse(uri.trim(), runtime, Path::exists).ok_or_else(|| {
            Error::new(ErrorCode::VmRefused, format!("{} is no libvirt of this host that can be reached", uri.trim()))
                .with_hint("set LIBVIRT_DEFAULT_URI=qemu:///system in the daemon's environment, and see `virsh list`")
        })
    }

    fn parse(uri: &str, runtime: impl Fn(&str) -> Option<PathBuf>, exists: impl Fn(&Path) -> bool) -> Option<Self> {
        let rest = uri.strip_prefix("qemu:///").or_else(|| uri.strip_prefix("qemu+unix:///"))?;
        let (name, options) = rest.split_once('?').unwrap_or((rest, ""));
        if !["system", "session"].contains(&name) {
            return None;
        }
        let given = options.split('&').find_map(|option| option.strip_prefix("socket=")).map(PathBuf::from);
        let found = || {
            let folder = runtime(name)?;
            SOCKETS.iter().map(|socket| folder.join(socket)).find(|socket| exists(socket))
        };
        Some(Self { name: name.to_owned(), socket: given.or_else(found)? })
    }

    /// The URI of the libvirt called so behind `socket`.
    pub(super) fn uri(name: &str, socket: &Path) -> String {
        format!("qemu+unix:///{name}?socket={}", socket.display())
    }

    /// A connection to it.
    pub(super) async fn connect(&self) -> Result<UnixStream> {
        UnixStream::connect(&self.socket).await.map_err(|error| {
            Error::new(ErrorCode::VmRefused, format!("libvirt does not answer at {}: {error}", self.socket.display()))
                .with_hint("see whether `virsh list` answers on that host")
        })
    }

    /// A connection to it that lets through only what a migration asks.
    pub(super) async fn inlet(&self) -> Result<BoxTransport> {
        let libvirt = self.connect().await?;
        let (near, far) = tokio::io::duplex(BUFFER_BYTES);
        tokio::spawn(async move {
            if let Err(error) = rpc::filter(far, libvirt).await {
                tracing::warn!(%error, "a connection of another host to libvirt is closed");
            }
        });
        Ok(Box::new(near))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_of_a_libvirt_is_found_by_its_uri() {
        let parse = |uri: &str| {
            let runtime = |name: &str| Some(PathBuf::from(if name == "session" { "/run/user/7" } else { "/run" }));
            Instance::parse(uri, runtime, |path| !path.ends_with("virtqemud-sock"))
                .map(|found| (found.name, found.socket.display().to_string()))
        };
        let found = |name: &str, socket: &str| Some((name.to_owned(), socket.to_owned()));
        assert_eq!(parse("qemu:///system"), found("system", "/run/libvirt/libvirt-sock"));
        assert_eq!(parse("qemu:///session"), found("session", "/run/user/7/libvirt/libvirt-sock"));
        assert_eq!(parse("qemu+unix:///system?socket=/a/b"), found("system", "/a/b"));
        assert_eq!(parse("qemu+unix:///system?no_tty=1&socket=/a/b"), found("system", "/a/b"));
        assert_eq!((parse("qemu+ssh://host/system"), parse("xen:///system")), (None, None));
    }
}
