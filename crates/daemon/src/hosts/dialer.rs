//! Connections to a trusted host. Stream k goes over the k-th pair of a local and a remote address, in turn, so that
//! several network cards are used. The next pair replaces a dead one.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

use api::v1::{Error, ErrorCode};
use block::ErrorKind;
use futures::future::BoxFuture;
use migrate::stream::{BoxTransport, Dialer, SessionRequest, StreamPath};
use parking_lot::Mutex;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use uuid::Uuid;

use super::listener;
use super::network::HostNetwork;
use crate::platform::Carried;
use crate::problem::Result;
use crate::rates::{Counted, Meter};
use hosts::HostName;
use hosts::address::Address;
use hosts::certificate;
use hosts::certificate::Fingerprint;
use hosts::connect::connect;
use hosts::message::{Message, Purpose};
use hosts::sealed::{self, Sealed};
use hosts::store::Trusted;
use hosts::tls::{self, ALPN_TRUST, Expected, SERVER_NAME};

/// Dials one host.
pub(crate) struct HostDialer {
    network: Arc<HostNetwork>,
    name: HostName,
    /// The newest connection of each stream.
    newest: Mutex<BTreeMap<u16, Dialled>>,
}

/// With which pair of addresses each stream to a host begins. Whoever dials may be out of time before the next one is tried:
/// then the next attempt begins there.
#[derive(Default)]
pub(crate) struct Turns(Mutex<BTreeMap<(HostName, u16), usize>>);

impl Turns {
    /// The pair that is tried now, one of `count`: the stream's own, or the one behind that which was tried last in vain.
    fn next(&self, host: &HostName, stream: u16, count: usize) -> usize {
        let mut turns = self.0.lock();
        let turn = turns.entry((host.clone(), stream)).or_default();
        let pair = (usize::from(stream) + *turn) % count;
        *turn += 1;
        pair
    }

    /// The next time it is the stream's own pair again.
    fn answered(&self, host: &HostName, stream: u16) {
        self.0.lock().remove(&(host.clone(), stream));
    }
}

/// The connections to trusted hosts that there are, so that those to one can be cut.
#[derive(Default)]
pub(crate) struct Dialings(Mutex<Vec<(Fingerprint, Weak<Meter>)>>);

impl Dialings {
    fn note(&self, host: &Trusted, meter: &Weak<Meter>) {
        let mut dialings = self.0.lock();
        dialings.retain(|(_, meter)| meter.strong_count() > 0);
        dialings.push((host.fingerprint, Weak::clone(meter)));
    }

    /// Cuts those to the host with this certificate; gives how many there were.
    pub(crate) fn sever(&self, fingerprint: Fingerprint) -> usize {
        let dialings = self.0.lock();
        let meant = dialings.iter().filter(|(host, _)| *host == fingerprint);
        meant.filter_map(|(_, meter)| meter.upgrade()).map(|meter| meter.sever()).count()
    }
}

/// A connection that was made.
struct Dialled {
    path: StreamPath,
    /// What it counts with, as long as it is there.
    meter: Weak<Meter>,
}

impl HostDialer {
    pub(crate) const fn new(network: Arc<HostNetwork>, name: HostName) -> Self {
        Self { network, name, newest: Mutex::new(BTreeMap::new()) }
    }

    /// A connection for `purpose`; the pair of addresses is that of the stream with this number.
    pub(crate) async fn dial_for(&self, purpose: Purpose, stream: u16) -> Result<BoxTransport> {
        let (transport, dialled) = self.dial_counted(purpose, stream).await?;
        if purpose == Purpose::Stream {
            self.newest.lock().insert(stream, dialled);
        }
        Ok(transport)
    }

    /// A connection for memory of the move `id`, and what tells how much it has carried.
    pub(crate) async fn dial_memory(&self, number: u16, id: Uuid) -> Result<(BoxTransport, Arc<dyn Carried>)> {
        let (transport, dialled) = self.dial_counted(Purpose::Machine, number).await?;
        if let Some(meter) = dialled.meter.upgrade() {
            self.network.carried.opened_for(&meter, id);
        }
        Ok((transport, Arc::new(dialled)))
    }

    async fn dial_counted(&self, purpose: Purpose, stream: u16) -> Result<(BoxTransport, Dialled)> {
        // Looked up each time: addresses change, and trust may end.
        let host = self.network.store.named(self.name.as_str())?;
        let pairs = pairs(&self.network.own_addresses(), &host.addresses);
        let turns = &self.network.turns;
        let mut first = None;
        for _ in 0..pairs.len() {
            let (from, to) = &pairs[turns.next(&self.name, stream, pairs.len())];
            match self.dial_one(&host, to, *from, purpose).await {
                Err(error) if error.code == ErrorCode::HostUnreachable => first = first.or(Some(error)),
                // Another way to the same host changes nothing about what it says.
                answered => {
                    turns.answered(&self.name, stream);
                    let (transport, dialled) = answered?;
                    self.network.dialled.note(&host, &dialled.meter);
                    // Trust may have ended since it was looked up: then nobody will cut what came about meanwhile.
                    self.network.store.check_still(&host)?;
                    return Ok((transport, dialled));
                }
            }
        }
        Err(first.unwrap_or_else(|| {
            Error::new(ErrorCode::HostUnreachable, format!("no address of {} is known", self.name))
                .with_hint(format!("`transhume trust --change {} --address HOST:PORT`", self.name))
        }))
    }

    async fn dial_one(
        &self,
        host: &Trusted,
        address: &Address,
        from: Option<IpAddr>,
        purpose: Purpose,
    ) -> Result<(BoxTransport, Dialled)> {
        let network = &self.network;
        if network.is_plaintext() {
            let (mut stream, dialled) = counted(network, address, from, &self.name).await?;
            let (from, to) = (network.identity().fingerprint.to_string(), host.fingerprint.to_string());
            let claim = Message::Claim { from, to, purpose };
            let said = async {
                tokio::io::AsyncWriteExt::write_all(&mut stream, listener::PLAINTEXT_MAGIC).await?;
                claim.send(&mut stream).await
            };
            said.await.map_err(|error| lost(&self.name, address, &error))?;
            welcome(network, &mut stream, (&self.name, address)).await?;
            return Ok((Box::new(stream), dialled));
        }
        let (mut stream, dialled) = sealed(network, host, (address, from), purpose.protocol()).await?;
        welcome(network, &mut stream, (&self.name, address)).await?;
        Ok((Box::new(stream), dialled))
    }
}

impl Dialer for HostDialer {
    fn dial(&self, stream: u16) -> BoxFuture<'_, block::Result<BoxTransport>> {
        Box::pin(async move { self.dial_for(Purpose::Stream, stream).await.map_err(of_dialing) })
    }

    fn opened(&self, stream: u16, request: &SessionRequest) {
        let meter = self.newest.lock().get(&stream).and_then(|dialled| dialled.meter.upgrade());
        if let Some(meter) = meter {
            self.network.carried.opened(&meter, request);
        }
    }

    fn path(&self, stream: u16) -> Option<StreamPath> {
        self.newest.lock().get(&stream).map(|dialled| dialled.path)
    }

    fn pairs(&self) -> usize {
        // A host that is trusted no more is told of when it is dialled.
        let host = self.network.store.named(self.name.as_str());
        host.map_or(1, |host| pairs(&self.network.own_addresses(), &host.addresses).len().max(1))
    }
}

impl Dialled {
    fn of(stream: &Counted) -> std::io::Result<Self> {
        let (here, there) = (stream.inner().local_addr()?, stream.inner().peer_addr()?);
        let path = StreamPath { here: here.ip().to_canonical(), there: there.ip().to_canonical() };
        Ok(Self { path, meter: Arc::downgrade(stream.meter()) })
    }
}

impl Carried for Dialled {
    fn path(&self) -> StreamPath {
        self.path
    }

    fn bytes(&self) -> Option<(u64, u64)> {
        self.meter.upgrade().map(|meter| meter.carried())
    }
}

/// Waits until the other side lets the connection be a stream.
async fn welcome(
    network: &HostNetwork,
    stream: &mut (impl tokio::io::AsyncRead + Unpin),
    (name, to): (&HostName, &Address),
) -> Result<()> {
    match env::timeout(&*network.env, listener::HANDSHAKE_LIMIT, Message::receive(stream)).await {
        Some(Ok(Message::Welcome)) => Ok(()),
        Some(Ok(Message::Refused { why })) => Err(why.error(name.as_str())),
        Some(Ok(_)) => Err(lost(name, to, &"it says something else than it should")),
        Some(Err(error)) => Err(lost(name, to, &error)),
        None => Err(lost(name, to, &"it says nothing")),
    }
}

/// A TCP connection to `whom`.
async fn reach(
    network: &HostNetwork,
    to: &Address,
    from: Option<IpAddr>,
    whom: &impl std::fmt::Display,
) -> Result<TcpStream> {
    let stream = connect(to, from, &*network.env).await;
    stream.map_err(|error| {
        let from = from.map_or_else(String::new, |from| format!(" from {from}"));
        Error::new(ErrorCode::HostUnreachable, format!("{whom} cannot be reached at {to}{from}: {error}")).with_hint(
            format!(
                "see that transhumed runs there with a section [hosts], and that no firewall is in the way of port {}",
                to.port
            ),
        )
    })
}

/// A TCP connection to `whom` that counts what it carries.
async fn counted(
    network: &HostNetwork,
    to: &Address,
    from: Option<IpAddr>,
    whom: &HostName,
) -> Result<(Counted, Dialled)> {
    let stream = reach(network, to, from, whom).await?;
    let counted = network.carried.count(stream);
    let counted = counted.and_then(|stream| Dialled::of(&stream).map(|dialled| (stream, dialled)));
    counted.map_err(|error| lost(whom, to, &error))
}

/// A TLS connection to `host` that speaks `protocol`.
async fn sealed(
    network: &HostNetwork,
    host: &Trusted,
    (to, from): (&Address, Option<IpAddr>),
    protocol: &[u8],
) -> Result<(Sealed<Counted>, Dialled)> {
    let expected = Expected::Host(host.name.to_string(), host.fingerprint);
    let config = config(network, expected, protocol)?;
    let (stream, dialled) = counted(network, to, from, &host.name).await?;
    let handshake = sealed::connect(config, server_name(), stream);
    let shaken = env::timeout(&*network.env, listener::HANDSHAKE_LIMIT, handshake).await;
    let stream = shaken_hands(shaken, &host.name, to)?;
    let speaks = stream.protocol() == Some(protocol);
    if speaks { Ok((stream, dialled)) } else { Err(lost(&host.name, to, &NOBODY_SPEAKS)) }
}

/// A TLS connection to `whom`, whoever that is, for pairing.
pub(crate) async fn encrypted(network: &HostNetwork, to: &Address, whom: &str) -> Result<TlsStream<TcpStream>> {
    let config = config(network, Expected::Anybody, ALPN_TRUST)?;
    let stream = reach(network, to, None, &whom).await?;
    let handshake = TlsConnector::from(config).connect(server_name(), stream);
    let shaken = env::timeout(&*network.env, listener::HANDSHAKE_LIMIT, handshake).await;
    let stream = shaken_hands(shaken, &whom, to)?;
    let speaks = stream.get_ref().1.alpn_protocol() == Some(ALPN_TRUST);
    if speaks { Ok(stream) } else { Err(lost(&whom, to, &NOBODY_SPEAKS)) }
}

const NOBODY_SPEAKS: &str = "no transhumed that speaks to other hosts listens there";

/// How `expected` is connected to, if this host's own certificate is good now.
fn config(network: &HostNetwork, expected: Expected, protocol: &[u8]) -> Result<Arc<ClientConfig>> {
    let identity = network.identity();
    let now = env::unix_seconds(network.env.wall_clock());
    certificate::check(identity.validity, now, "this host", true)?;
    tls::client(&identity, &network.env, expected, protocol)
}

fn server_name() -> ServerName<'static> {
    ServerName::try_from(SERVER_NAME).expect("a constant that is a name")
}

/// What came of a handshake with `whom`, which may have taken too long.
fn shaken_hands<T>(outcome: Option<std::io::Result<T>>, whom: &impl std::fmt::Display, to: &Address) -> Result<T> {
    let late = || format!("no handshake within {} s", listener::HANDSHAKE_LIMIT.as_secs());
    let outcome = outcome.ok_or_else(|| lost(whom, to, &late()))?;
    outcome.map_err(|error| tls::rejection(&error).cloned().unwrap_or_else(|| lost(whom, to, &error)))
}

fn lost(whom: &impl std::fmt::Display, to: &Address, why: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorCode::HostUnreachable, format!("the connection to {whom} at {to} did not come about: {why}"))
        .with_hint(format!("see the log of transhumed on {whom}, and that nothing else listens on that port"))
}

/// Every local address with the remote ones in turn. With one local address the kernel chooses it.
fn pairs(local: &[Address], remote: &[Address]) -> Vec<(Option<IpAddr>, Address)> {
    let local: Vec<IpAddr> = local.iter().filter_map(Address::number).collect();
    if remote.is_empty() {
        return Vec::new();
    }
    let count = local.len().max(remote.len());
    let from = |turn: usize| if local.len() > 1 { Some(local[turn % local.len()]) } else { None };
    (0..count).map(|turn| (from(turn), remote[turn % remote.len()].clone())).collect()
}

/// The error as a sender of streams sees it: its kind says whether to try again, its cause says the rest.
fn of_dialing(error: Error) -> block::Error {
    let kind = match error.code {
        ErrorCode::HostUnreachable => ErrorKind::Disconnected,
        ErrorCode::HostUnknown => ErrorKind::NotFound,
        ErrorCode::Internal => ErrorKind::Internal,
        _ => ErrorKind::PermissionDenied,
    };
    block::Error::new(kind, "connecting").with_source(error)
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn an_attempt_begins_behind_the_pair_that_was_tried_in_vain_and_after_an_answer_with_its_own() {
        let turns = Turns::default();
        let host = HostName::new("b").expect("a name");
        let next = |stream| turns.next(&host, stream, 3);
        assert_eq!([next(0), next(2), next(0), next(2)], [0, 2, 1, 0]);
        // Its time was over there, and nothing has answered.
        assert_eq!([next(0), next(0)], [2, 0]);
        turns.answered(&host, 0);
        assert_eq!([next(0), next(2)], [0, 1]);
    }

    #[test]
    fn streams_go_over_every_pair_of_addresses_in_turn() {
        let addresses = |texts: &[&str]| -> Vec<Address> {
            texts.iter().map(|text| Address::parse(text).expect("an address")).collect()
        };
        let shown = |local: &[&str], remote: &[&str]| -> Vec<String> {
            let pairs = pairs(&addresses(local), &addresses(remote));
            let from = |from: &Option<IpAddr>| from.map_or("any".to_owned(), |from| from.to_string());
            pairs.iter().map(|(local, remote)| format!("{} {remote}", from(local))).collect()
        };
        assert_eq!(shown(&["10.0.0.1"], &["10.0.0.2:7"]), ["any 10.0.0.2:7"]);
        assert_eq!(
            shown(&["10.0.0.1", "10.0.1.1"], &["10.0.0.2:7", "10.0.1.2:7"]),
            ["10.0.0.1 10.0.0.2:7", "10.0.1.1 10.0.1.2:7"]
        );
        assert_eq!(shown(&[], &["b:7", "c:7"]), ["any b:7", "any c:7"]);
        assert_eq!(shown(&["10.0.0.1", "10.0.1.1"], &["b:7"]), ["10.0.0.1 b:7", "10.0.1.1 b:7"]);
        assert!(shown(&["10.0.0.1"], &[]).is_empty());
    }
}
