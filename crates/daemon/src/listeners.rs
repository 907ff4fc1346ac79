//! The sockets on which volumes are served. Several volumes may share one, under different names; then they are all encrypted,
//! with the same certificates, or none is.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use env::EnvRef;
use futures::future::BoxFuture;
use nbd::server::{ClientSocket, End, Export, Exports, Limits, serve_socket};
use nbd::{NbdUri, TlsServer, Transport, prepare_tcp};
use parking_lot::RwLock;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use vm::AdoptedDisk;

use crate::clients::{Clients, MachineGate};
use crate::descriptors;
use crate::platform::Network;
use crate::problem::{Result, invalid, of_tls};
use crate::sockets::{UnixSocket, listen_tcp, listen_unix, make_folder};
use crate::workers::Workers;

/// How many clients one socket serves at once; further ones are hung up on.
const CONNECTIONS_MAX: usize = 256;

/// How long accepting rests after it failed (no file descriptors are left, most likely).
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// The volumes of one socket.
#[derive(Default)]
struct Offered {
    exports: RwLock<BTreeMap<String, Offer>>,
}

/// A volume of a socket.
#[derive(Clone)]
struct Offer {
    export: Arc<Export>,
    /// The adopted disk that it is: nobody else's QEMU gets it, even if it may connect as the same user.
    disk: Option<Arc<AdoptedDisk>>,
    /// The machine that has brought it: the same of its QEMU.
    machine: Option<MachineGate>,
}

/// What one client sees of the volumes of a socket.
struct Seen {
    offered: Arc<Offered>,
    /// The client's process, where the kernel says.
    pid: Option<u32>,
}

impl Seen {
    /// Waits until it is known whom the volumes are for.
    async fn settle(&self, env: &EnvRef) {
        let gates: Vec<MachineGate> =
            self.offered.exports.read().values().filter_map(|offer| offer.machine.clone()).collect();
        for gate in gates {
            gate.settle(&**env).await;
        }
    }

    fn lets_in(&self, offer: &Offer) -> bool {
        let Some(disk) = &offer.disk else { return self.lets_in_of_machine(offer) };
        let is_its = match self.pid {
            Some(pid) => disk.is_of(pid),
            None => disk.process_id.is_none(),
        };
        if !is_its {
            let (volume, pid) = (&disk.volume, self.pid.unwrap_or_default());
            tracing::warn!(volume, pid, "a process that is not the adopted VM's was refused its disk");
        }
        is_its
    }

    fn lets_in_of_machine(&self, offer: &Offer) -> bool {
        let is_its = offer.machine.as_ref().is_none_or(|gate| gate.lets_in(self.pid));
        if !is_its {
            let (volume, pid) = (offer.export.name(), self.pid.unwrap_or_default());
            tracing::warn!(
                volume,
                pid,
                "a process that is not the QEMU of the VM that has come was refused its disk; if that VM has ended, `transhume vm rm` it"
            );
        }
        is_its
    }
}

impl Exports for Seen {
    /// The empty name means the only export, if there is only one.
    fn find(&self, name: &str) -> Option<Arc<Export>> {
        let exports = self.offered.exports.read();
        let only = exports.values().next().filter(|_| name.is_empty() && exports.len() == 1);
        let found = exports.get(name).or(only).filter(|offer| self.lets_in(offer))?;
        Some(Arc::clone(&found.export))
    }

    fn list(&self) -> Vec<Arc<Export>> {
        let exports = self.offered.exports.read();
        exports.values().filter(|offer| self.lets_in(offer)).map(|offer| Arc::clone(&offer.export)).collect()
    }
}

struct Listener {
    offered: Arc<Offered>,
    /// The certificates, if its connections are encrypted.
    tls: Option<Arc<TlsServer>>,
    accepting: AbortHandle,
    socket: Option<UnixSocket>,
}

/// All sockets.
pub(crate) struct Listeners {
    acceptor: Acceptor,
    listeners: Mutex<BTreeMap<String, Listener>>,
}

/// What accepting a connection takes.
#[derive(Clone)]
struct Acceptor {
    env: EnvRef,
    workers: Arc<Workers>,
    limits: Limits,
}

impl Listeners {
    pub(crate) fn new(env: EnvRef, workers: Arc<Workers>) -> Self {
        let acceptor = Acceptor { env, workers, limits: Limits::default() };
        Self { acceptor, listeners: Mutex::default() }
    }

    async fn add(&self, uri: &NbdUri, export: Arc<Export>, clients: Clients) -> Result<()> {
        let mut listeners = self.listeners.lock().await;
        let listener = match listeners.entry(key(&uri.transport)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let tls = certificates_of(uri)?.map(|folder| TlsServer::new(folder, Arc::clone(&self.acceptor.env)));
                let tls = tls.transpose().map_err(|error| of_tls(&error))?.map(Arc::new);
                entry.insert(self.acceptor.listen(&uri.transport, tls, &clients).await?)
            }
        };
        let there = listener.tls.as_ref().map(|tls| tls.folder());
        if there != certificates_of(uri)? {
            let message = match there {
                Some(folder) => format!("that socket is encrypted, with the certificates in {}", folder.display()),
                None => "that socket is not encrypted".to_owned(),
            };
            return Err(
                Error::new(ErrorCode::SocketTaken, message).with_hint("choose another socket, or write it alike")
            );
        }
        match listener.offered.exports.write().entry(uri.export.clone()) {
            Entry::Occupied(_) => Err(Error::new(ErrorCode::AlreadyExists, format!("{uri} is served already"))
                .with_hint("choose another name or socket")),
            Entry::Vacant(entry) => {
                entry.insert(Offer { export, disk: clients.disk, machine: clients.machine });
                Ok(())
            }
        }
    }

    async fn remove(&self, uri: &NbdUri) {
        let mut listeners = self.listeners.lock().await;
        let key = key(&uri.transport);
        let Some(listener) = listeners.get(&key) else { return };
        let is_last = {
            let mut exports = listener.offered.exports.write();
            exports.remove(&uri.export);
            exports.is_empty()
        };
        if is_last && let Some(listener) = listeners.remove(&key) {
            listener.accepting.abort();
            if let Some(socket) = listener.socket {
                socket.remove();
            }
        }
    }

    async fn close_all(&self) {
        for listener in std::mem::take(&mut *self.listeners.lock().await).into_values() {
            listener.accepting.abort();
        }
    }
}

impl Network for Listeners {
    /// Listens there if nobody of us does yet.
    fn offer<'a>(&'a self, uri: &'a NbdUri, export: Arc<Export>, clients: Clients) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.add(uri, export, clients))
    }

    /// The last one closes the socket. Connections that are there stay.
    fn withdraw<'a>(&'a self, uri: &'a NbdUri) -> BoxFuture<'a, ()> {
        Box::pin(self.remove(uri))
    }

    /// The sockets' files stay.
    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.close_all())
    }
}

impl Acceptor {
    async fn listen(&self, transport: &Transport, tls: Option<Arc<TlsServer>>, clients: &Clients) -> Result<Listener> {
        let offered = Arc::new(Offered::default());
        let acceptor = self.clone();
        match transport {
            Transport::Unix(path) => {
                if clients.disk.is_some() {
                    make_folder(&absolute(path))?;
                }
                let (listener, socket) = listen_unix(&absolute(path), clients.owner, &*self.env).await?;
                let accepting = tokio::spawn(acceptor.accept_unix(listener, tls.clone(), Arc::clone(&offered)));
                Ok(Listener { offered, tls, accepting: accepting.abort_handle(), socket: Some(socket) })
            }
            Transport::Tcp(host, port) => {
                let listener = listen_tcp(host, *port).await?;
                let accepting = tokio::spawn(acceptor.accept_tcp(listener, tls.clone(), Arc::clone(&offered)));
                Ok(Listener { offered, tls, accepting: accepting.abort_handle(), socket: None })
            }
        }
    }

    async fn accept_unix(self, listener: tokio::net::UnixListener, tls: Option<Arc<TlsServer>>, offered: Arc<Offered>) {
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let accepted = listener.accept().await.and_then(|(stream, _)| {
                let pid = stream.peer_cred()?.pid().and_then(|pid| u32::try_from(pid).ok());
                Ok((pid.filter(|pid| *pid != 0), stream.into_std()?))
            });
            let (pid, stream) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a client could not be accepted");
                    self.env.sleep(ACCEPT_REST).await;
                    continue;
                }
            };
            if self.is_short(&stream).await {
                continue;
            }
            let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
            let seen = Arc::new(Seen { offered: Arc::clone(&offered), pid });
            self.serve(place, tls.clone(), seen, move || tokio::net::UnixStream::from_std(stream));
        }
    }

    async fn accept_tcp(self, listener: tokio::net::TcpListener, tls: Option<Arc<TlsServer>>, offered: Arc<Offered>) {
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let accepted = listener.accept().await.and_then(|(stream, _)| {
                prepare_tcp(&stream)?;
                stream.into_std()
            });
            let stream = match accepted {
                Ok(stream) => stream,
                Err(error) => {
                    tracing::warn!(%error, "a client could not be accepted");
                    self.env.sleep(ACCEPT_REST).await;
                    continue;
                }
            };
            if self.is_short(&stream).await {
                continue;
            }
            let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
            let seen = Arc::new(Seen { offered: Arc::clone(&offered), pid: None });
            self.serve(place, tls.clone(), seen, move || tokio::net::TcpStream::from_std(stream));
        }
    }

    /// Whether a client is hung up on because file descriptors are short; the next one waits for a moment then.
    async fn is_short(&self, stream: &impl AsRawFd) -> bool {
        let is_short = descriptors::is_kept_from_clients(stream.as_raw_fd());
        if is_short {
            tracing::error!("a client is hung up on: too few file descriptors are left");
            self.env.sleep(ACCEPT_REST).await;
        }
        is_short
    }

    /// Serves one connection on the worker whose turn it is; `register` makes it that worker's.
    fn serve<S: ClientSocket>(
        &self,
        place: OwnedSemaphorePermit,
        tls: Option<Arc<TlsServer>>,
        seen: Arc<Seen>,
        register: impl FnOnce() -> std::io::Result<S> + Send + 'static,
    ) {
        let (env, limits) = (Arc::clone(&self.env), self.limits);
        if let Some(Err(error)) = tls.as_ref().map(|tls| tls.renew()) {
            tracing::warn!(%error, "the certificates of an export cannot be read any more; those from before are used");
        }
        self.workers.next().spawn(async move {
            let _place = place;
            match register() {
                Ok(stream) => {
                    seen.settle(&env).await;
                    let summary = serve_socket(stream, tls.as_deref(), seen, env, limits).await;
                    match summary.end {
                        End::Tls(error) => tracing::warn!(%error, "a client of an encrypted export was not let in"),
                        _ => tracing::debug!(?summary, "a client has gone"),
                    }
                }
                Err(error) => tracing::warn!(%error, "a client could not be served"),
            }
        });
    }
}

/// Where the certificates of an export of ours are, if it is encrypted.
///
/// # Errors
/// The address says too little, or what only a client can make something of.
pub(crate) fn certificates_of(uri: &NbdUri) -> Result<Option<&Path>> {
    let Some(tls) = &uri.tls else { return Ok(None) };
    if tls.hostname.is_some() {
        return Err(invalid("tls-hostname is for clients", "leave it out: the certificate says who this server is"));
    }
    tls.certificates.as_deref().map(Some).ok_or_else(|| {
        invalid(
            "an encrypted export names the directory of its certificates",
            "add ?tls-certificates=DIR, with ca-cert.pem, server-cert.pem and server-key.pem in DIR",
        )
    })
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn key(transport: &Transport) -> String {
    match transport {
        Transport::Unix(path) => format!("unix:{}", absolute(path).display()),
        Transport::Tcp(host, port) => format!("tcp:{host}:{port}"),
    }
}
