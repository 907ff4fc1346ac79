//! The sockets on which volumes are served. Several volumes may share one, under different names; then they are all encrypted,
//! with the same certificates, or none is.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::v1::{Error, ErrorCode};
use env::EnvRef;
use futures::future::BoxFuture;
use nbd::server::{End, Export, Exports, Limits};
use nbd::{NbdUri, TlsServer, Transport, serve_connection, serve_encrypted};
use parking_lot::RwLock;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

use crate::document::SocketOwner;
use crate::ground::Network;
use crate::problem::{Result, invalid, of_tls};
use crate::sockets::{UnixSocket, listen_tcp, listen_unix};
use crate::workers::Workers;

/// How many clients one socket serves at once; further ones are hung up on.
const CONNECTIONS_MAX: usize = 256;

/// How long accepting rests after it failed (no file descriptors are left, most likely).
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// The volumes of one socket.
#[derive(Default)]
struct Offered {
    exports: RwLock<BTreeMap<String, Arc<Export>>>,
}

impl Exports for Offered {
    fn find(&self, name: &str) -> Option<Arc<Export>> {
        self.exports.read().find(name)
    }

    fn list(&self) -> Vec<Arc<Export>> {
        self.exports.read().values().cloned().collect()
    }
}

/// Looking an export up among those of one socket.
trait Find {
    fn find(&self, name: &str) -> Option<Arc<Export>>;
}

impl Find for BTreeMap<String, Arc<Export>> {
    /// The empty name means the only export, if there is only one.
    fn find(&self, name: &str) -> Option<Arc<Export>> {
        let only = self.values().next().filter(|_| name.is_empty() && self.len() == 1);
        self.get(name).or(only).cloned()
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

    async fn add(&self, uri: &NbdUri, export: Arc<Export>, owner: Option<SocketOwner>) -> Result<()> {
        let mut listeners = self.listeners.lock().await;
        let listener = match listeners.entry(key(&uri.transport)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let tls = certificates_of(uri)?.map(|folder| TlsServer::new(folder, Arc::clone(&self.acceptor.env)));
                let tls = tls.transpose().map_err(|error| of_tls(&error))?.map(Arc::new);
                entry.insert(self.acceptor.listen(&uri.transport, tls, owner).await?)
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
                entry.insert(export);
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
    fn offer<'a>(
        &'a self,
        uri: &'a NbdUri,
        export: Arc<Export>,
        owner: Option<SocketOwner>,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.add(uri, export, owner))
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
    async fn listen(
        &self,
        transport: &Transport,
        tls: Option<Arc<TlsServer>>,
        owner: Option<SocketOwner>,
    ) -> Result<Listener> {
        let offered = Arc::new(Offered::default());
        let acceptor = self.clone();
        match transport {
            Transport::Unix(path) => {
                let (listener, socket) = listen_unix(&absolute(path), owner, &*self.env).await?;
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
            let stream = match listener.accept().await.and_then(|(stream, _)| stream.into_std()) {
                Ok(stream) => stream,
                Err(error) => {
                    tracing::warn!(%error, "a client could not be accepted");
                    self.env.sleep(ACCEPT_REST).await;
                    continue;
                }
            };
            let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
            self.serve(place, tls.clone(), Arc::clone(&offered), move || tokio::net::UnixStream::from_std(stream));
        }
    }

    async fn accept_tcp(self, listener: tokio::net::TcpListener, tls: Option<Arc<TlsServer>>, offered: Arc<Offered>) {
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let accepted = listener.accept().await.and_then(|(stream, _)| {
                stream.set_nodelay(true)?;
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
            let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
            self.serve(place, tls.clone(), Arc::clone(&offered), move || tokio::net::TcpStream::from_std(stream));
        }
    }

    /// Serves one connection on the worker whose turn it is; `register` makes it that worker's.
    fn serve<S: AsyncRead + AsyncWrite + Unpin + Send>(
        &self,
        place: OwnedSemaphorePermit,
        tls: Option<Arc<TlsServer>>,
        offered: Arc<Offered>,
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
                    let summary = match tls {
                        Some(tls) => serve_encrypted(stream, &tls, offered, env, limits).await,
                        None => serve_connection(stream, offered, env, limits).await,
                    };
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
