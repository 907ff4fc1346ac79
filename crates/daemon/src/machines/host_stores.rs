//! Volumes of other hosts as stores of surrogates: `--store HOST:VOLUME` (the dissertation, section 3.1.2).
//!
//! ```text
//!   surrogate ─ NBD ─▶ socket of this daemon ═ machine connection, TLS ═▶ the other daemon ─ NBD ─▶ its volume
//! ```
//!
//! Seen from a surrogate it is the export of any NBD server: lost connections are made again, and every write is durable there before it is
//! answered. The other host gives a volume to one host at a time, and none that somebody else uses. The socket is this daemon's alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::v1::{Error, ErrorCode};
use env::EnvRef;
use migrate::stream::BoxTransport;
use nbd::server::{Export, Limits};
use tokio::net::{UnixListener, UnixStream};

use super::channel::{Answer, Ask, send};
use super::outgoing::call;
use crate::daemon::Daemon;
use crate::document::random_uuid;
use crate::foreign::HostVolume;
use crate::hosts::HostName;
use crate::location::Location;
use crate::platform::Hosts;
use crate::problem::{Result, of_state};
use crate::sockets::listen_unix;

/// How long accepting rests after it has failed.
const ACCEPT_REST: std::time::Duration = std::time::Duration::from_millis(100);

/// What this host has to do with others' stores.
#[derive(Default)]
pub(crate) struct HostStores {
    /// The sockets by which volumes of other hosts are used here.
    reached: parking_lot::Mutex<BTreeMap<HostVolume, PathBuf>>,
    /// Volumes of this host that other hosts use, and which does.
    lent: parking_lot::Mutex<BTreeMap<String, String>>,
}

/// The way to a volume of another host.
struct Way {
    hosts: Arc<dyn Hosts>,
    env: EnvRef,
    host: HostName,
    volume: String,
}

impl Daemon {
    /// The address of the socket by which `volume` is used here, which is listened on from now on.
    ///
    /// # Errors
    /// The host cannot be reached, or does not give it.
    pub(crate) async fn reach_host_store(&self, volume: &HostVolume) -> Result<String> {
        let way = self.way_to(volume)?;
        // What the other host has against it would be lost behind the socket.
        way.connect().await?;
        let known = self.host_stores.reached.lock().get(volume).cloned();
        let path = match known {
            Some(path) => path,
            None => {
                let path = self.layout.host_stores().join(random_uuid(&*self.env).simple().to_string());
                self.listen_for(volume, &path).await?;
                path
            }
        };
        Ok(format!("nbd+unix:///{}?socket={}", volume.volume, path.display()))
    }

    /// Listens for those stores of surrogates that are other hosts' volumes, before anybody needs them.
    pub(crate) async fn reach_host_stores(&self) {
        let folder = self.layout.host_stores();
        // What is left there of stores that are none any more.
        let _ = std::fs::remove_dir_all(&folder);
        let places = self.surrogates.list().iter().flat_map(|surrogate| surrogate.places()).collect::<Vec<_>>();
        for (volume, socket) in places.iter().filter_map(Location::host_volume) {
            if let Err(error) = self.listen_for(&volume, &socket).await {
                tracing::error!(%error, store = %volume, "a store at another host cannot be used");
            }
        }
    }

    async fn listen_for(&self, volume: &HostVolume, socket: &Path) -> Result<()> {
        let folder = self.layout.host_stores();
        std::fs::create_dir_all(&folder).map_err(|error| of_state(error, "the sockets of other hosts' stores"))?;
        let (listener, _) = listen_unix(socket, None, &*self.env).await?;
        self.host_stores.reached.lock().insert(volume.clone(), socket.to_owned());
        self.env.spawn(Box::pin(accept(Arc::new(self.way_to(volume)?), listener)));
        Ok(())
    }

    fn way_to(&self, volume: &HostVolume) -> Result<Way> {
        let (hosts, env) = (Arc::clone(&self.hosts), Arc::clone(&self.env));
        Ok(Way { hosts, env, host: HostName::new(&volume.host)?, volume: volume.volume.clone() })
    }

    /// Serves a volume of this host to `peer`, who uses it as a store, for as long as the connection lasts.
    pub(super) async fn lend_volume(
        &self,
        mut transport: BoxTransport,
        peer: &str,
        volume: &str,
    ) -> std::io::Result<()> {
        let export = match self.lendable(peer, volume) {
            Ok(export) => export,
            Err(error) => return send(&mut transport, &Answer::Refused { error }).await,
        };
        send(&mut transport, &Answer::Done).await?;
        let served = nbd::serve_connection(transport, Arc::new(vec![export]), Arc::clone(&self.env), Limits::default());
        let summary = served.await;
        tracing::debug!(volume, host = peer, end = ?summary.end, "a connection to a store of another host has ended");
        Ok(())
    }

    /// The export of a volume that `peer` may use as a store.
    fn lendable(&self, peer: &str, name: &str) -> Result<Arc<Export>> {
        let volume = self.volume(name)?;
        let document = volume.document();
        let in_use = |what: &str| {
            Err(Error::new(ErrorCode::InUse, format!("{name} {what}"))
                .with_hint("make a volume for it alone there: `transhume volume create`"))
        };
        let is_disk =
            self.machines.list().iter().any(|machine| machine.document().disks.iter().any(|disk| disk.volume == name));
        if is_disk || document.adoption.is_some() {
            return in_use("is the disk of a VM");
        }
        if document.job.is_some() {
            return in_use("is being moved");
        }
        let mut lent = self.host_stores.lent.lock();
        let is_its = lent.get(name).is_some_and(|host| host == peer);
        if volume.connections() > 0 && !is_its {
            return in_use("has clients");
        }
        let export = volume.export().ok_or_else(|| {
            Error::new(ErrorCode::WrongState, format!("{name} is not served there"))
                .with_hint("`transhume volume show` on that host says why")
        })?;
        lent.insert(name.to_owned(), peer.to_owned());
        Ok(export)
    }
}

impl Way {
    /// A connection to the server of the volume.
    async fn connect(&self) -> Result<BoxTransport> {
        let mut transport = self.hosts.machine_connection(&self.host, 0).await?;
        call(&mut transport, &self.host, Ask::Export { volume: self.volume.clone() }).await?;
        Ok(transport)
    }

    async fn carry(&self, mut client: UnixStream) {
        match self.connect().await {
            Ok(mut transport) => _ = tokio::io::copy_bidirectional(&mut client, &mut transport).await,
            Err(error) => {
                tracing::warn!(%error, host = %self.host, volume = self.volume, "a store at another host is not reached");
            }
        }
    }
}

/// Carries every client of the socket to the other host.
async fn accept(way: Arc<Way>, listener: UnixListener) {
    loop {
        match listener.accept().await {
            Ok((client, _)) => {
                let carrying = Arc::clone(&way);
                way.env.spawn(Box::pin(async move { carrying.carry(client).await }));
            }
            Err(error) => {
                tracing::warn!(%error, "a connection to a store at another host was not accepted");
                way.env.sleep(ACCEPT_REST).await;
            }
        }
    }
}
