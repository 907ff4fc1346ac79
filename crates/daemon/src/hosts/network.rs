//! This host among others: its identity, whom it trusts, where it listens, and what people ask of all that.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::v1::{self, Error, ErrorCode};
use env::{EnvRef, date, unix_seconds};
use futures::future::BoxFuture;
use migrate::stream::{BoxTransport, Dialer};
use parking_lot::{Mutex, RwLock};
use rustls::ServerConfig;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use uuid::Uuid;

use super::dialer::{self, Dialings, HostDialer, Turns};
use super::listener::{self, Counters, HANDSHAKE_LIMIT};
use super::transport::Reception;
use crate::arbiter::{self, Arbiter};
use crate::audit::{Audit, Peer, unix_ms};
use crate::config::HostsConfig;
use crate::platform::{Hosts, Interfaces, MemoryConnection};
use crate::problem::{Result, invalid, of_state};
use crate::rates::{KernelInterfaces, MigrationTraffic};
use crate::sockets::listen_tcp;
use crate::state_dir::Layout;
use crate::workers::Workers;
use hosts::HostName;
use hosts::address::{Address, DEFAULT_PORT};
use hosts::certificate::{self, Fingerprint};
use hosts::identity::Identity;
use hosts::invitation::{Code, Invitations, LIFE, TRIES, Try};
use hosts::message::{About, Purpose, Refusal};
use hosts::pairing::{self, Channel, EXPORTER_LABEL, Failure, Invite};
use hosts::store::{TrustStore, Trusted};
use hosts::tls;

/// How long before its end a certificate is complained about.
const RENEWAL_SECONDS: u64 = 60 * 86_400;
/// How long the first try to listen is waited for.
const FIRST_LISTEN_LIMIT: Duration = Duration::from_secs(2);
/// How long before it is tried again; it doubles.
const LISTEN_REST_MIN: Duration = Duration::from_secs(1);
/// It does not grow beyond this.
const LISTEN_REST_MAX: Duration = Duration::from_secs(10);
/// Clocks that differ by more than this are told of.
const CLOCKS_APART_SECONDS: u64 = 60;

/// This host among others.
pub(crate) struct HostNetwork {
    pub(crate) env: EnvRef,
    pub(crate) workers: Arc<Workers>,
    pub(crate) store: TrustStore,
    pub(crate) invitations: Invitations,
    pub(crate) counters: Counters,
    /// What moves carry over each of its addresses.
    pub(crate) carried: Arc<MigrationTraffic>,
    /// Which of its ways to another host is tried next.
    pub(super) turns: Turns,
    /// The connections that this host has made.
    pub(super) dialled: Dialings,
    name: HostName,
    addresses: Vec<Address>,
    plaintext: bool,
    arbiter: Option<Arc<dyn Arbiter>>,
    /// Where it is to listen.
    listen: Vec<Address>,
    /// Where it listens, by number of those.
    bound: RwLock<BTreeMap<usize, SocketAddr>>,
    /// Why it does not listen at one of them, yet.
    unbound: Mutex<BTreeMap<usize, Error>>,
    /// What the configuration says of network interfaces: how many bytes a second they carry.
    speeds: BTreeMap<String, u64>,
    layout: Layout,
    audit: Audit,
    current: RwLock<(Arc<Identity>, Arc<ServerConfig>)>,
    reception: RwLock<Option<Arc<dyn Reception>>>,
    accepting: Mutex<Vec<AbortHandle>>,
}

impl HostNetwork {
    /// Makes this host's identity if it has none. Nobody comes before it [listens](Self::listen).
    pub(crate) fn open(env: EnvRef, config: &HostsConfig, layout: Layout, worker_count: usize) -> Result<Arc<Self>> {
        let name = config.name.as_deref().map_or_else(HostName::of_this_machine, HostName::new)?;
        let folder = layout.hosts();
        let made = layout.files().create_directory(&folder);
        made.map_err(|error| of_state(error, format!("creating {}", folder.display())))?;
        let identity = Identity::load_or_make(&layout.identity(), &name, &*env)?;
        complain(&identity, unix_seconds(env.wall_clock()));
        let tls = tls::server(&identity, &env)?;

        if config.plaintext {
            tracing::warn!(
                "plaintext is set: what moves between hosts that both have it set can be read and CHANGED by anybody on the \
                 way, and any host there can pass for a trusted one; it is for measurements only"
            );
        }
        tracing::info!(host = %name, fingerprint = %identity.fingerprint, "this host among others");
        Ok(Arc::new(Self {
            workers: Arc::new(Workers::start_yielding("wire", worker_count)?),
            store: TrustStore::open(layout.files_shared(), layout.trusted_hosts())?,
            invitations: Invitations::default(),
            counters: Counters::new(),
            carried: MigrationTraffic::new(&env),
            turns: Turns::default(),
            dialled: Dialings::default(),
            name,
            addresses: Address::parse_all(&config.addresses)?,
            plaintext: config.plaintext,
            arbiter: arbiter::of_config(&env, &config.arbiter)?,
            speeds: config.interface_speeds(),
            listen: Address::parse_all(&config.listen)?,
            bound: RwLock::default(),
            unbound: Mutex::default(),
            audit: Audit::open(layout.clone())?,
            layout,
            current: RwLock::new((Arc::new(identity), tls)),
            reception: RwLock::new(None),
            accepting: Mutex::default(),
            env,
        }))
    }

    /// Listens wherever it is to, and tries again where it cannot yet: an address may come later than this daemon. Waits for the
    /// first try, not for long. Pairing is served at once, streams when there is a reception.
    pub(crate) async fn listen(self: &Arc<Self>) {
        let tries = (0..self.listen.len()).map(|number| {
            let (first, tried) = oneshot::channel();
            let listening = tokio::spawn(Arc::clone(self).listen_at(number, first)).abort_handle();
            self.accepting.lock().push(listening);
            tried
        });
        let tries: Vec<_> = tries.collect();
        // A name that nobody resolves is waited for elsewhere.
        let _ = env::timeout(&*self.env, FIRST_LISTEN_LIMIT, futures::future::join_all(tries)).await;
    }

    async fn listen_at(self: Arc<Self>, number: usize, first: oneshot::Sender<()>) {
        let address = &self.listen[number];
        let mut first = Some(first);
        let mut rest = LISTEN_REST_MIN;
        let listener = loop {
            let listening = listen_tcp(&address.host, address.port).await;
            match listening.and_then(|listener| {
                let own = listener.local_addr().map_err(|error| of_state(error, "asking for an own address"))?;
                Ok((listener, own))
            }) {
                Ok((listener, own)) => {
                    tracing::info!(listen = %own, "other hosts may come");
                    self.unbound.lock().remove(&number);
                    self.bound.write().insert(number, own);
                    break listener;
                }
                Err(error) => {
                    if self.unbound.lock().insert(number, error.clone()).is_none() {
                        tracing::error!(%address, %error, "other hosts cannot come there yet; it is tried again");
                    }
                }
            }
            // Nobody may wait for it any more.
            first.take().map(|first| first.send(()));
            self.env.sleep(rest).await;
            rest = (rest * 2).min(LISTEN_REST_MAX);
        };
        first.take().map(|first| first.send(()));
        listener::accept(Arc::clone(&self), listener).await;
    }

    /// Takes no connections any more.
    pub(crate) fn close(&self) {
        *self.reception.write() = None;
        self.accepting.lock().drain(..).for_each(|accepting| accepting.abort());
    }

    /// Who this host is now.
    pub(crate) fn identity(&self) -> Arc<Identity> {
        Arc::clone(&self.current.read().0)
    }

    /// How it takes connections now.
    pub(crate) fn tls(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.current.read().1)
    }

    /// Whoever serves streams, if there is somebody.
    pub(crate) fn reception(&self) -> Option<Arc<dyn Reception>> {
        self.reception.read().clone()
    }

    pub(crate) const fn is_plaintext(&self) -> bool {
        self.plaintext
    }

    /// The addresses that the configuration names.
    pub(crate) fn own_addresses(&self) -> Vec<Address> {
        self.addresses.clone()
    }

    /// What this host says of itself to one that it is paired with.
    pub(crate) fn about(&self) -> About {
        About {
            name: self.name.to_string(),
            addresses: self.reachable().iter().map(ToString::to_string).collect(),
            port: self.port(),
            unix_seconds: self.now(),
        }
    }

    /// Where others reach this host, as far as that is known here.
    fn reachable(&self) -> Vec<Address> {
        if !self.addresses.is_empty() {
            return self.addresses.clone();
        }
        let bound = self.bound.read();
        bound.values().filter(|address| !address.ip().is_unspecified()).map(|address| (*address).into()).collect()
    }

    fn port(&self) -> u16 {
        let meant = || self.listen.first().map_or(DEFAULT_PORT, |address| address.port);
        self.bound.read().values().next().map_or_else(meant, SocketAddr::port)
    }

    fn now(&self) -> u64 {
        unix_seconds(self.env.wall_clock())
    }

    /// How the API shows this host.
    pub(crate) fn show(&self) -> v1::Host {
        let identity = self.identity();
        v1::Host {
            name: self.name.to_string(),
            fingerprint: identity.fingerprint.to_string(),
            addresses: self.reachable().iter().map(ToString::to_string).collect(),
            listen: self.bound.read().values().map(ToString::to_string).collect(),
            certificate_until_unix_seconds: identity.validity.until,
            certificate_until: date(identity.validity.until),
            plaintext: self.plaintext,
            problem: certificate::check(identity.validity, self.now(), "this host", true)
                .err()
                .or_else(|| self.unbound.lock().values().next().cloned()),
        }
    }

    /// Makes a new identity. Nobody trusts it yet.
    pub(crate) fn renew(&self) -> Result<v1::Host> {
        let identity = Identity::make(&self.layout.identity(), &self.name, &*self.env)?;
        let tls = tls::server(&identity, &self.env)?;
        tracing::warn!(fingerprint = %identity.fingerprint, "this host has a new identity");
        *self.current.write() = (Arc::new(identity), tls);
        Ok(self.show())
    }

    /// Reads this host's identity and whom it trusts again, as both are on disk now. Streams with hosts that are trusted
    /// no more are cut.
    ///
    /// # Errors
    /// One of the two cannot be used. Then it is as before.
    pub(crate) fn reload(&self) -> Result<()> {
        let path = self.layout.identity();
        // A missing one is not made: all others know the one that is used.
        std::fs::metadata(&path).map_err(|error| of_state(error, format!("looking at {}", path.display())))?;
        let identity = Identity::load_or_make(&path, &self.name, &*self.env)?;
        complain(&identity, self.now());
        if identity.fingerprint != self.identity().fingerprint {
            tracing::warn!(fingerprint = %identity.fingerprint, "this host has another identity");
            let tls = tls::server(&identity, &self.env)?;
            *self.current.write() = (Arc::new(identity), tls);
        }
        for gone in self.store.reload()? {
            let cut = self.dialled.sever(gone.fingerprint);
            tracing::warn!(host = %gone.name, cut, "a host is trusted no more");
        }
        Ok(())
    }

    /// Whom it trusts.
    pub(crate) fn trusted(&self) -> Vec<v1::TrustedHost> {
        self.store.list().iter().map(Trusted::show).collect()
    }

    /// Trusts `name` no more; streams from it are cut, and so are those to it.
    pub(crate) fn remove(&self, name: &str) -> Result<v1::TrustedHost> {
        let removed = self.store.remove(name)?;
        let cut = self.dialled.sever(removed.fingerprint);
        if cut > 0 {
            tracing::warn!(host = %removed.name, cut, "streams to a host are cut: it is trusted no more");
        }
        Ok(removed.show())
    }

    /// Gives `name` other addresses.
    pub(crate) fn change(&self, name: &str, request: &v1::HostAddresses) -> Result<v1::TrustedHost> {
        let addresses = Address::parse_all(&request.addresses)?;
        if addresses.is_empty() {
            return Err(invalid(format!("no address is given for {name}"), "give it at least one with --address"));
        }
        Ok(self.store.move_to(name, addresses)?.show())
    }

    /// Gives out a code.
    pub(crate) fn invite(&self, request: &v1::InviteRequest) -> Result<v1::Invitation> {
        certificate::check(self.identity().validity, self.now(), "this host", true)?;
        let name = request.name.as_deref().map(HostName::new).transpose()?;
        let code = self.invitations.open(name, &*self.env);
        Ok(v1::Invitation {
            code: code.shown(),
            seconds: LIFE.as_secs(),
            tries: TRIES,
            name: self.name.to_string(),
            addresses: self.reachable().iter().map(ToString::to_string).collect(),
            port: self.port(),
        })
    }

    /// Joins the host that has given out a code.
    pub(crate) async fn join(&self, request: &v1::PairRequest) -> Result<v1::TrustedHost> {
        let address = Address::parse(&request.address)?;
        let name = request.name.as_deref().map(HostName::new).transpose()?;
        let code = Code::typed(&request.code);
        if !code.is_whole() {
            return Err(Error::new(ErrorCode::CodeWrong, "that cannot be a code: it has the form K7QM-3XWD")
                .with_hint("type it as `transhume trust --invite` on the other host has printed it"));
        }
        let whom = address.to_string();
        let mut stream = dialer::encrypted(self, &address, &whom).await?;
        let connection = stream.get_ref().1;
        let certificate = connection.peer_certificates().and_then(|chain| chain.first());
        let certificate = certificate.map(|certificate| certificate.clone().into_owned());
        let certificate =
            certificate.ok_or_else(|| Error::new(ErrorCode::HostRefused, format!("{whom} shows no certificate")))?;
        let mut exported = [0; 32];
        connection
            .export_keying_material(&mut exported, EXPORTER_LABEL, None)
            .map_err(|error| Error::new(ErrorCode::Internal, format!("TLS gives no keying material: {error}")))?;
        let inviting = Fingerprint::of(&certificate);
        let own = self.identity();
        if inviting == own.fingerprint {
            return Err(invalid(format!("{whom} is this host itself"), "name the other host's address"));
        }
        let validity = certificate::Validity::of(&certificate);
        let validity = validity.ok_or_else(|| Refusal::Malformed.error(&whom))?;
        certificate::check(validity, self.now(), &whom, false)?;

        let channel = Channel { exported, joining: own.fingerprint, inviting };
        let mut trusted = None;
        let keep = |about: &About| {
            let host = self.host_of(about, name.clone(), inviting, &address)?;
            self.store.add(host.clone())?;
            trusted = Some(host);
            Ok(())
        };
        let about = self.about();
        let joining = pairing::join(&mut stream, (channel, &code), &about, keep);
        let outcome = env::timeout(&*self.env, 3 * HANDSHAKE_LIMIT, joining).await;
        let outcome = outcome.unwrap_or_else(|| Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()));
        let about = outcome.map_err(|failure| failure.error(&whom))?;
        let host = trusted.expect("joining ends well only after the host was kept");
        tracing::info!(host = %host.name, fingerprint = %host.fingerprint, "trusts a host from now on");
        let ahead = i64::try_from(i128::from(about.unix_seconds) - i128::from(self.now())).unwrap_or(i64::MAX);
        let apart = Some(ahead).filter(|ahead| ahead.unsigned_abs() > CLOCKS_APART_SECONDS);
        Ok(v1::TrustedHost { clock_ahead_seconds: apart, ..host.show() })
    }

    /// The host that says `about` of itself, and was seen at `seen`.
    fn host_of(
        &self,
        about: &About,
        name: Option<HostName>,
        fingerprint: Fingerprint,
        seen: &Address,
    ) -> Result<Trusted> {
        let name = name.map_or_else(|| HostName::new(&about.name), Ok)?;
        let mut addresses = Address::parse_all(&about.addresses)?;
        if addresses.is_empty() {
            addresses.push(seen.clone());
        }
        Ok(Trusted { name, fingerprint, addresses, since_unix_ms: unix_ms(self.env.wall_clock()) })
    }

    /// What is done with a host that joins from `ip` with a certificate.
    pub(crate) const fn inviting(&self, joining: Fingerprint, ip: IpAddr) -> Inviting<'_> {
        Inviting { network: self, joining, ip }
    }

    /// Notes what came of a host that wanted to join. What needs no code to try leaves no line: it could fill the disk.
    pub(crate) fn note_joined(&self, from: SocketAddr, fingerprint: Fingerprint, outcome: Result<About, Failure>) {
        let details = serde_json::json!({ "from": from.to_string(), "fingerprint": fingerprint.to_string() });
        let (subject, error) = match outcome {
            Ok(about) => {
                let known = self.store.with(fingerprint).map_or(about.name, |host| host.name.to_string());
                tracing::info!(host = known, %fingerprint, %from, "trusts a host from now on");
                (known, None)
            }
            Err(failure) => {
                self.counters.refused.fetch_add(1, Ordering::Relaxed);
                let is_noted = matches!(
                    failure,
                    Failure::Here(
                        Refusal::CodeWrong { .. } | Refusal::OtherFingerprint | Refusal::OtherName | Refusal::NotKept
                    )
                );
                let error = match failure {
                    Failure::Here(why) => why.error("this host"),
                    failure => failure.error("the other host"),
                };
                tracing::warn!(%from, error = error.message, "a host has not joined");
                if !is_noted {
                    return;
                }
                (String::new(), Some(error))
            }
        };
        let now = self.env.wall_clock();
        self.audit.record(now, &Peer::daemon(), ("host.join", &subject), details, error.as_ref());
    }
}

/// The side of a pairing that has given out the code.
pub(crate) struct Inviting<'a> {
    network: &'a HostNetwork,
    joining: Fingerprint,
    ip: IpAddr,
}

impl Inviting<'_> {
    fn host(&self, about: &About, taken: &Try) -> Result<Trusted> {
        let seen = SocketAddr::new(self.ip.to_canonical(), about.port).into();
        self.network.host_of(about, taken.name.clone(), self.joining, &seen)
    }
}

impl Invite for Inviting<'_> {
    fn check(&self, about: &About, taken: &Try) -> Result<(), Refusal> {
        let host = self.host(about, taken).map_err(|_| Refusal::Malformed)?;
        self.network.store.check(&host.name, host.fingerprint).map_err(|conflict| match conflict {
            hosts::store::Conflict::OtherFingerprint => Refusal::OtherFingerprint,
            hosts::store::Conflict::OtherName(_) => Refusal::OtherName,
        })
    }

    fn keep(&self, about: &About, taken: &Try) -> Result<(), Refusal> {
        let kept = self.host(about, taken).and_then(|host| self.network.store.add(host));
        kept.map_err(|error| {
            tracing::error!(%error, "a host that has joined could not be stored");
            Refusal::NotKept
        })
    }
}

fn complain(identity: &Identity, now: u64) {
    if let Err(error) = certificate::check(identity.validity, now, "this host", true) {
        tracing::error!("no other host can be reached: {error}");
    } else if identity.validity.until < now + RENEWAL_SECONDS {
        tracing::warn!(
            "the certificate of this host expires on {}: run `transhume host --renew` before, and pair it anew",
            date(identity.validity.until)
        );
    }
}

/// The machine's way to other hosts.
pub(crate) struct RealHosts(pub(crate) Arc<HostNetwork>);

impl Hosts for RealHosts {
    fn dialer(&self, host: &HostName) -> Result<Arc<dyn Dialer>> {
        self.0.store.named(host.as_str())?;
        Ok(Arc::new(HostDialer::new(Arc::clone(&self.0), host.clone())))
    }

    fn machine_connection<'a>(&'a self, host: &'a HostName, number: u16) -> BoxFuture<'a, Result<BoxTransport>> {
        let dialer = HostDialer::new(Arc::clone(&self.0), host.clone());
        Box::pin(async move { dialer.dial_for(Purpose::Machine, number).await })
    }

    fn memory_connection<'a>(
        &'a self,
        host: &'a HostName,
        number: u16,
        id: Uuid,
    ) -> BoxFuture<'a, Result<MemoryConnection>> {
        let dialer = HostDialer::new(Arc::clone(&self.0), host.clone());
        Box::pin(async move {
            let (transport, carried) = dialer.dial_memory(number, id).await?;
            Ok((transport, Some(carried)))
        })
    }

    fn stream_workers(&self) -> Vec<EnvRef> {
        self.0.workers.environments(&self.0.env)
    }

    fn arbiter(&self) -> Option<Arc<dyn Arbiter>> {
        self.0.arbiter.clone()
    }

    fn interfaces(&self) -> Option<Arc<dyn Interfaces>> {
        let network = &self.0;
        let (env, carried) = (Arc::clone(&network.env), Arc::clone(&network.carried));
        Some(Arc::new(KernelInterfaces::new(env, carried, network.speeds.clone())))
    }

    fn give_way(&self, gives_way: bool) {
        self.0.workers.give_way(gives_way);
    }

    fn listen(&self, reception: Arc<dyn Reception>) -> BoxFuture<'_, Result<()>> {
        *self.0.reception.write() = Some(reception);
        Box::pin(async { Ok(()) })
    }
}
