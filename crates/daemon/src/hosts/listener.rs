//! Connections from other hosts: who comes, whether that is trusted, and on to whoever serves it.
//!
//! ```text
//!   accept ─▶ worker ─▶ first byte ─┬─ TLS ─▶ ALPN ─▶ handshake ─┬─ transhume-trust/1 ─▶ pairing
//!                                   │                             └─ transhume/1, -machine/1 ─▶ trusted? ─▶ welcome ─▶ served
//!                                   └─ plaintext, if both sides say so ─▶ claim ─▶ trusted? ─▶ welcome ─▶ served
//! ```

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use env::unix_seconds;
use futures::future::BoxFuture;
use migrate::stream::{PeerName, SessionRequest, Transport};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::network::HostNetwork;
use crate::rates::{Counted, Meter};
use hosts::certificate::{Fingerprint, Validity, ValidityState};
use hosts::connect;
use hosts::message::{Message, Purpose, Refusal};
use hosts::pairing::{self, Channel, EXPORTER_LABEL};
use hosts::replay::Replay;
use hosts::sealed::{self, Greeting};
use hosts::store::Trusted;
use hosts::tls::ALPN_TRUST;

/// How long a handshake, or any step before a connection is a stream, may take.
pub(crate) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// How long a pairing may take from its first message to its last.
const PAIRING_LIMIT: Duration = Duration::from_secs(30);
/// How many connections there are at most, and how many of them may not be streams yet. Before there are so many of them
/// streams are refused with words.
const CONNECTIONS_MAX: usize = 640;
const HANDSHAKES_MAX: usize = 64;
/// How long accepting rests after it failed (no file descriptors are left, most likely).
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// How a connection without encryption begins.
pub(crate) const PLAINTEXT_MAGIC: &[u8] = b"transhume plaintext 1\n";
/// The first byte of a TLS handshake.
const TLS_HANDSHAKE: u8 = 0x16;

/// What is counted, and how much there may be of it.
pub(crate) struct Counters {
    connections: Arc<Semaphore>,
    handshakes: Arc<Semaphore>,
    pub(crate) refused: AtomicU64,
    pub(crate) accepted: AtomicU64,
}

impl Counters {
    pub(crate) fn new() -> Self {
        Self {
            connections: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            handshakes: Arc::new(Semaphore::new(HANDSHAKES_MAX)),
            refused: AtomicU64::new(0),
            accepted: AtomicU64::new(0),
        }
    }

    /// Connections that there are.
    pub(crate) fn connections(&self) -> usize {
        CONNECTIONS_MAX - self.connections.available_permits()
    }

    fn refuse(&self, from: SocketAddr, why: &dyn std::fmt::Display) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(%from, "a connection from another host was refused: {why}");
    }
}

/// Takes connections for ever, each to the worker whose turn it is.
pub(crate) async fn accept(network: Arc<HostNetwork>, listener: TcpListener) {
    loop {
        let accepted = listener.accept().await.and_then(|(stream, from)| Ok((stream.into_std()?, from)));
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection from another host could not be accepted");
                network.env.sleep(ACCEPT_REST).await;
                continue;
            }
        };
        let counters = &network.counters;
        let places = Arc::clone(&counters.connections).try_acquire_owned();
        let Ok(place) = places.and_then(|place| Ok((place, Arc::clone(&counters.handshakes).try_acquire_owned()?)))
        else {
            counters.refuse(from, &"there are too many");
            continue;
        };
        let network = Arc::clone(&network);
        let worker = Arc::clone(&network.workers);
        worker.next().spawn(async move {
            match TcpStream::from_std(stream).and_then(|stream| connect::prepare(&stream).map(|()| stream)) {
                Ok(stream) => PendingConnection { network, from, place }.serve(stream).await,
                Err(error) => tracing::warn!(%error, "a connection from another host could not be taken"),
            }
        });
    }
}

/// A connection that is no stream yet, with its places among all and among those that are none.
struct PendingConnection {
    network: Arc<HostNetwork>,
    from: SocketAddr,
    place: (OwnedSemaphorePermit, OwnedSemaphorePermit),
}

impl PendingConnection {
    async fn serve(self, stream: TcpStream) {
        let network = Arc::clone(&self.network);
        let first = async {
            let mut byte = [0];
            stream.peek(&mut byte).await.map(|_| byte[0])
        };
        match env::timeout(&*network.env, HANDSHAKE_LIMIT, first).await {
            Some(Ok(TLS_HANDSHAKE)) => self.serve_encrypted(stream).await,
            Some(Ok(first)) if first == PLAINTEXT_MAGIC[0] => self.serve_plaintext(stream).await,
            _ => network.counters.refuse(self.from, &"it is none of a transhumed"),
        }
    }

    async fn serve_encrypted(self, mut stream: TcpStream) {
        let network = Arc::clone(&self.network);
        match env::timeout(&*network.env, HANDSHAKE_LIMIT, sealed::greeted(&mut stream)).await {
            Some(Ok(greeting)) if greeting.protocols.iter().any(|it| Purpose::of_protocol(it).is_some()) => {
                self.serve_wire(stream, greeting).await;
            }
            // What wants neither is refused by the library.
            Some(Ok(greeting)) => self.serve_trust(Replay::new(stream, greeting.bytes)).await,
            Some(Err(error)) => network.counters.refuse(self.from, &error),
            None => network.counters.refuse(self.from, &"its handshake takes too long"),
        }
    }

    async fn serve_wire(self, stream: TcpStream, greeting: Greeting) {
        let network = Arc::clone(&self.network);
        let Some(stream) = self.counted(stream) else { return };
        let handshake = sealed::accept(network.tls(), stream, greeting.bytes);
        let stream = match env::timeout(&*network.env, HANDSHAKE_LIMIT, handshake).await {
            Some(Ok(stream)) => stream,
            Some(Err(error)) => return network.counters.refuse(self.from, &error),
            None => return network.counters.refuse(self.from, &"its handshake takes too long"),
        };
        let Some(certificate) = stream.certificate() else {
            return network.counters.refuse(self.from, &"it shows no certificate");
        };
        let trusted = self.trusted(Fingerprint::of(certificate), Some(certificate));
        let Some(purpose) = stream.protocol().and_then(Purpose::of_protocol) else {
            return network.counters.refuse(self.from, &"it does not say what it wants");
        };
        let meter = Arc::clone(stream.inner().meter());
        self.admit(stream, (purpose, meter), trusted).await;
    }

    /// The same connection, which counts what it carries.
    fn counted(&self, stream: TcpStream) -> Option<Counted> {
        let counted = self.network.carried.count(stream);
        counted.map_err(|error| self.network.counters.refuse(self.from, &error)).ok()
    }

    async fn serve_trust(self, stream: Replay<TcpStream>) {
        let network = Arc::clone(&self.network);
        let handshake = TlsAcceptor::from(network.tls()).accept(stream);
        let stream = match env::timeout(&*network.env, HANDSHAKE_LIMIT, handshake).await {
            Some(Ok(stream)) => stream,
            Some(Err(error)) => return network.counters.refuse(self.from, &error),
            None => return network.counters.refuse(self.from, &"its handshake takes too long"),
        };
        let connection = stream.get_ref().1;
        let certificate = connection.peer_certificates().and_then(|chain| chain.first());
        let Some(certificate) = certificate.map(|certificate| certificate.clone().into_owned()) else {
            return network.counters.refuse(self.from, &"it shows no certificate");
        };
        match connection.alpn_protocol() {
            Some(ALPN_TRUST) => self.pair(stream, &certificate).await,
            _ => network.counters.refuse(self.from, &"it does not say what it wants"),
        }
    }

    /// Who comes, if that is trusted and its certificate is good now.
    fn trusted(&self, fingerprint: Fingerprint, certificate: Option<&[u8]>) -> Result<Trusted, Refusal> {
        let host = self.network.store.with(fingerprint).ok_or(Refusal::NotTrusted)?;
        if let Some(certificate) = certificate {
            self.check_validity(certificate)?;
        }
        Ok(host)
    }

    fn check_validity(&self, certificate: &[u8]) -> Result<(), Refusal> {
        let now = unix_seconds(self.network.env.wall_clock());
        let validity = Validity::of(certificate).ok_or(Refusal::Malformed)?;
        match validity.at(now) {
            ValidityState::Good => Ok(()),
            ValidityState::Expired => Err(Refusal::Expired { until: validity.until, now }),
            ValidityState::NotYet => Err(Refusal::NotYet { from: validity.from, now }),
        }
    }

    async fn serve_plaintext(self, stream: TcpStream) {
        let network = Arc::clone(&self.network);
        let Some(mut stream) = self.counted(stream) else { return };
        let claim = async {
            let mut magic = [0; PLAINTEXT_MAGIC.len()];
            stream.read_exact(&mut magic).await?;
            match magic == PLAINTEXT_MAGIC {
                true => Message::receive(&mut stream).await,
                false => Err(std::io::ErrorKind::InvalidData.into()),
            }
        };
        let Some(Ok(Message::Claim { from, to, purpose })) = env::timeout(&*network.env, HANDSHAKE_LIMIT, claim).await
        else {
            return network.counters.refuse(self.from, &"it is none of a transhumed");
        };
        let trusted = match () {
            () if !network.is_plaintext() => Err(Refusal::Encrypted),
            () if to != network.identity().fingerprint.to_string() => Err(Refusal::NotMe),
            () => Fingerprint::parse(&from).ok_or(Refusal::Malformed).and_then(|from| self.trusted(from, None)),
        };
        if let Ok(host) = &trusted {
            tracing::warn!(host = %host.name, from = %self.from, "a stream without encryption, from whoever says so");
        }
        let meter = Arc::clone(stream.meter());
        self.admit(stream, (purpose, meter), trusted).await;
    }

    /// Lets the connection be what it is for, or says why not, and serves it for as long as its host is trusted.
    async fn admit(
        self,
        mut stream: impl Transport + 'static,
        (purpose, meter): (Purpose, Arc<Meter>),
        trusted: Result<Trusted, Refusal>,
    ) {
        let Self { network, from, place: (_place, handshake) } = self;
        let admitted = trusted.and_then(|host| Ok((host, network.reception().ok_or(Refusal::NotReady)?)));
        let answer = match &admitted {
            Ok(_) => Message::Welcome,
            Err(why) => Message::Refused { why: *why },
        };
        let sent = env::timeout(&*network.env, HANDSHAKE_LIMIT, answer.send(&mut stream)).await;
        drop(handshake);
        let (host, reception) = match (admitted, sent) {
            (Ok(admitted), Some(Ok(()))) => admitted,
            (Err(why), _) => return network.counters.refuse(from, &why.error("this host").message),
            (Ok(_), _) => return network.counters.refuse(from, &"it went away"),
        };
        network.counters.accepted.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(host = %host.name, %from, "a stream begins");
        let (carried, counting) = (Arc::clone(&network.carried), Arc::clone(&meter));
        let opened = Box::new(move |request: &SessionRequest| carried.opened(&counting, request));
        let (carried, counting) = (Arc::clone(&network.carried), Arc::clone(&meter));
        let memory = Box::new(move |id| carried.opened_for(&counting, id));
        let name = PeerName(host.name.to_string());
        let served = match purpose {
            Purpose::Stream => reception.serve(Box::new(stream), name, opened),
            Purpose::Machine => reception.serve_machine(Box::new(stream), name, memory),
        };
        serve_stream(&network, served, (&host, &meter)).await;
    }

    async fn pair(self, mut stream: TlsStream<Replay<TcpStream>>, certificate: &[u8]) {
        let network = Arc::clone(&self.network);
        let joining = Fingerprint::of(certificate);
        let mut exported = [0; 32];
        let connection = stream.get_ref().1;
        if let Err(error) = connection.export_keying_material(&mut exported, EXPORTER_LABEL, None) {
            return network.counters.refuse(self.from, &error);
        }
        let pairing = async {
            if let Err(why) = self.check_validity(certificate) {
                Message::Refused { why }.send(&mut stream).await?;
                return Err(pairing::Failure::Here(why));
            }
            let channel = Channel { exported, joining, inviting: network.identity().fingerprint };
            let about = network.about();
            let now = network.env.now();
            let side = network.inviting(joining, self.from.ip());
            pairing::invite(&mut stream, (channel, &network.invitations, now), &about, &side).await
        };
        let outcome = env::timeout(&*network.env, PAIRING_LIMIT, pairing).await;
        let outcome = outcome.unwrap_or_else(|| Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()));
        // The last message is read before the connection goes.
        let _ = tokio::io::AsyncWriteExt::shutdown(&mut stream).await;
        network.note_joined(self.from, joining, outcome);
    }
}

/// Serves a stream until it ends or its host is trusted no more. It is not dropped then: what it has in flight ends, and its
/// session is given up as after any other loss.
async fn serve_stream(
    network: &HostNetwork,
    mut served: BoxFuture<'static, block::Result<()>>,
    (host, meter): (&Trusted, &Meter),
) {
    let outcome = tokio::select! {
        outcome = &mut served => outcome,
        () = network.store.distrusted(host.fingerprint) => {
            tracing::warn!(host = %host.name, "a stream is cut: its host is trusted no more");
            meter.sever();
            served.await
        }
    };
    match outcome {
        Ok(()) => tracing::debug!(host = %host.name, "a stream has ended"),
        Err(error) => tracing::info!(host = %host.name, error = error.chain(), "a stream has ended"),
    }
}
