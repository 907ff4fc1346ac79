//! Hosts on the loopback interface: who gets through to whom, and what is said to those who do not.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

use api::v1::{self, Error, ErrorCode};
use block::ErrorKind;
use env::{Env, EnvRef, Moment, RealEnv, RealFiles, Task};
use futures::future::BoxFuture;
use migrate::stream::{BoxTransport, Dialer, OnOpened, PeerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::listener;
use super::network::{HostNetwork, RealHosts};
use super::transport::Reception;
use crate::config::HostsConfig;
use crate::platform::Hosts;
use crate::state_dir::Layout;
use hosts::HostName;
use hosts::identity::Identity;
use hosts::tls::{self, ALPN_TRUST, ALPN_WIRE, Expected};

const DAY: i64 = 86_400;

/// The machine with a wall clock that can be set.
struct SetEnv {
    real: RealEnv,
    ahead_seconds: AtomicI64,
}

impl Env for SetEnv {
    fn now(&self) -> Moment {
        self.real.now()
    }

    fn sleep(&self, span: Duration) -> Task {
        self.real.sleep(span)
    }

    fn spawn(&self, task: Task) {
        self.real.spawn(task);
    }

    fn random(&self) -> u64 {
        self.real.random()
    }

    fn wall_clock(&self) -> SystemTime {
        let ahead = self.ahead_seconds.load(Ordering::Relaxed);
        let span = Duration::from_secs(ahead.unsigned_abs());
        if ahead < 0 { self.real.wall_clock() - span } else { self.real.wall_clock() + span }
    }
}

/// Sends back what it gets, after the name of who has sent it.
struct Echo;

impl Reception for Echo {
    fn serve(
        self: Arc<Self>,
        mut transport: BoxTransport,
        peer: PeerName,
        _: OnOpened,
    ) -> BoxFuture<'static, block::Result<()>> {
        Box::pin(async move {
            let broken = |error| block::Error::from_os(error, "echoing");
            transport.write_all(format!("{peer}:").as_bytes()).await.map_err(broken)?;
            transport.flush().await.map_err(broken)?;
            let mut buffer = vec![0; 65536];
            loop {
                let count = transport.read(&mut buffer).await.map_err(broken)?;
                if count == 0 {
                    return Ok(());
                }
                transport.write_all(&buffer[..count]).await.map_err(broken)?;
                transport.flush().await.map_err(broken)?;
            }
        })
    }
}

struct TestHost {
    network: Arc<HostNetwork>,
    hosts: RealHosts,
    env: Arc<SetEnv>,
    directory: tempfile::TempDir,
}

impl TestHost {
    async fn start(name: &str) -> Self {
        Self::start_with(name, false, &["127.0.0.1"]).await
    }

    async fn start_with(name: &str, plaintext: bool, listen: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let env = Arc::new(SetEnv { real: RealEnv::new(), ahead_seconds: AtomicI64::new(0) });
        let network = begin(name, plaintext, listen, &env, directory.path()).await;
        let hosts = RealHosts(Arc::clone(&network));
        hosts.listen(Arc::new(Echo)).await.expect("listens");
        Self { network, hosts, env, directory }
    }

    fn address(&self) -> String {
        self.network.show().listen[0].clone()
    }

    fn invite(&self) -> String {
        self.network.invite(&v1::InviteRequest::default()).expect("a code").code
    }

    async fn join(&self, other: &Self, code: &str) -> Result<v1::TrustedHost, Error> {
        let request = v1::PairRequest { address: other.address(), code: code.to_owned(), name: None };
        self.network.join(&request).await
    }

    fn dialer(&self, name: &str) -> Arc<dyn Dialer> {
        self.hosts.dialer(&HostName::new(name).expect("a name")).expect("it is trusted")
    }

    async fn refused(&self, name: &str, kind: ErrorKind, part: &str) {
        let error = self.dialer(name).dial(0).await.err().expect("it was let in");
        assert_eq!(error.kind(), kind, "{}", error.chain());
        assert!(error.chain().contains(part), "\"{part}\" is not in: {}", error.chain());
    }

    fn audit(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("audit.jsonl")).expect("there is a log")
    }
}

/// A port that nobody has: 0 is none that could be told to others, so one is looked for.
fn free_port(host: &str) -> u16 {
    let probe = std::net::TcpListener::bind((host, 0)).expect("a port");
    probe.local_addr().expect("bound").port()
}

async fn begin(
    name: &str,
    plaintext: bool,
    listen: &[&str],
    env: &Arc<SetEnv>,
    folder: &std::path::Path,
) -> Arc<HostNetwork> {
    let port = free_port(listen[0]);
    let listen = listen.iter().map(|host| format!("{host}:{port}")).collect();
    let config = HostsConfig { name: Some(name.to_owned()), listen, plaintext, ..HostsConfig::default() };
    let layout = Layout::new(folder, RealFiles::shared());
    let env: EnvRef = Arc::clone(env) as _;
    let network = HostNetwork::open(env, &config, layout, 2).expect("it opens");
    network.listen().await;
    network
}

async fn two_that_trust() -> (TestHost, TestHost) {
    let (a, b) = (TestHost::start("a").await, TestHost::start("b").await);
    b.join(&a, &a.invite()).await.expect("joins");
    (a, b)
}

/// What comes back of some bytes.
async fn echo(transport: &mut BoxTransport, name: &str) {
    let sent: Vec<u8> = (0..200_000_u32).flat_map(|word| word.to_le_bytes()).collect();
    let mut expected = format!("{name}:").into_bytes();
    expected.extend_from_slice(&sent);
    let mut received = vec![0; expected.len()];
    let (mut reader, mut writer) = tokio::io::split(transport);
    let write = async {
        writer.write_all(&sent).await.expect("sent");
        writer.flush().await.expect("sent");
    };
    let read = async { reader.read_exact(&mut received).await.expect("received") };
    tokio::join!(write, read);
    assert!(received == expected, "other bytes have come back");
}

#[tokio::test]
async fn hosts_that_were_paired_reach_each_other_and_remember_it() {
    let (a, b) = two_that_trust().await;
    echo(&mut b.dialer("a").dial(0).await.expect("let in"), "b").await;
    echo(&mut a.dialer("b").dial(3).await.expect("let in"), "a").await;
    assert_eq!(a.network.trusted()[0].fingerprint, b.network.show().fingerprint);
    assert!(a.audit().contains("\"action\":\"host.join\",\"subject\":\"b\""), "{}", a.audit());

    let again = begin("b", false, &["127.0.0.1"], &b.env, b.directory.path()).await;
    assert_eq!(again.show().fingerprint, b.network.show().fingerprint, "the identity was not kept");
    let mut transport = RealHosts(again)
        .dialer(&HostName::new("a").expect("a name"))
        .expect("remembered")
        .dial(0)
        .await
        .expect("let in");
    echo(&mut transport, "b").await;
}

#[tokio::test]
async fn a_wrong_code_is_counted_and_three_are_too_many() {
    let (a, b) = (TestHost::start("a").await, TestHost::start("b").await);
    let said = b.join(&a, "2345-6789").await.expect_err("joined without a code");
    assert_eq!(said.code, ErrorCode::CodeWrong);
    assert!(said.message.contains("has given out no code"), "{said}");

    let code = a.invite();
    let wrong = if code == "2222-2222" { "3333-3333" } else { "2222-2222" };
    for left in ["tries left: 2", "tries left: 1", "good no more"] {
        let said = b.join(&a, wrong).await.expect_err("joined with a wrong code");
        assert_eq!(said.code, ErrorCode::CodeWrong);
        assert!(said.to_string().contains(left), "{said}");
    }
    let said = b.join(&a, &code).await.expect_err("joined after too many tries");
    assert!(said.message.contains("tried too often"), "{said}");
    assert!(a.network.trusted().is_empty() && b.network.trusted().is_empty());
    assert!(a.audit().contains("code-wrong") && !a.audit().contains(&code), "{}", a.audit());

    let said = b.join(&a, "2345").await.expect_err("that is no code");
    assert!(said.message.contains("cannot be a code"), "{said}");
    let said = a.join(&a, &a.invite()).await.expect_err("joined itself");
    assert!(said.message.contains("this host itself"), "{said}");
}

#[tokio::test]
async fn a_host_in_between_gains_nothing() {
    let (a, b) = (TestHost::start("a").await, TestHost::start("b").await);
    let between = TestHost::start("m").await;
    // It speaks TLS with both, and passes on every byte that they say to each other.
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("bound").to_string();
    let (victim, own) = (a.address(), Arc::clone(&between.network));
    let relay = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("somebody comes");
        let mut one = TlsAcceptor::from(own.tls()).accept(stream).await.expect("shaken hands");
        let config = tls::client(&own.identity(), &own.env, Expected::Anybody, ALPN_TRUST).expect("set up");
        let stream = TcpStream::connect(victim).await.expect("connected");
        let name = tls::SERVER_NAME.try_into().expect("a name");
        let mut other = TlsConnector::from(config).connect(name, stream).await.expect("shaken hands");
        // It ends when either does.
        let _ = tokio::io::copy_bidirectional(&mut one, &mut other).await;
    });
    let request = v1::PairRequest { address, code: a.invite(), name: None };
    let said = b.network.join(&request).await.expect_err("joined through a stranger");
    assert_eq!(said.code, ErrorCode::CodeWrong);
    assert!(said.message.contains("somebody is between"), "{said}");
    assert!(a.network.trusted().is_empty() && b.network.trusted().is_empty());
    relay.abort();
}

#[tokio::test]
async fn a_name_that_is_trusted_with_another_fingerprint_is_refused_on_both_sides() {
    let (a, b) = two_that_trust().await;
    let impostor = TestHost::start("b").await;
    let said = impostor.join(&a, &a.invite()).await.expect_err("took the name of another host");
    assert_eq!(said.code, ErrorCode::HostIdentity);
    assert!(said.message.contains("this host's name already, with another fingerprint"), "{said}");
    let said = a.join(&impostor, &impostor.invite()).await.expect_err("took the name of another host");
    assert!(said.message.contains("trusts b already, with another fingerprint"), "{said}");
    assert!(said.to_string().contains("--remove b"), "{said}");
    assert!(impostor.network.trusted().is_empty());

    // Under another name it may join, and the one that is there already may join again.
    let request = v1::InviteRequest { name: Some("c".to_owned()) };
    let code = a.network.invite(&request).expect("a code").code;
    impostor.join(&a, &code).await.expect("another name");
    b.join(&a, &a.invite()).await.expect("the same again");
    let names: Vec<String> = a.network.trusted().into_iter().map(|host| host.name).collect();
    assert_eq!(names, ["b", "c"]);
}

#[tokio::test]
async fn who_is_not_trusted_is_told_so_and_a_removal_cuts_streams() {
    let (a, b) = two_that_trust().await;
    let mut stream = b.dialer("a").dial(0).await.expect("let in");
    let mut name = [0; 2];
    stream.read_exact(&mut name).await.expect("served");
    a.network.remove("b").expect("it was trusted");
    let mut rest = Vec::new();
    // Cut: an end or an error, but no more bytes.
    let _ = stream.read_to_end(&mut rest).await;
    assert!(rest.is_empty());
    b.refused("a", ErrorKind::PermissionDenied, "a does not trust this host").await;
    let error = a.hosts.dialer(&HostName::new("b").expect("a name")).err().expect("it was dialled");
    assert_eq!(error.code, ErrorCode::HostUnknown);
    assert!(error.to_string().contains("transhume trust --invite"), "{error}");
}

#[tokio::test]
async fn a_removal_cuts_what_this_host_has_dialled_and_nothing_else() {
    let (a, _b) = two_that_trust().await;
    let c = TestHost::start("c").await;
    c.join(&a, &a.invite()).await.expect("joins");
    let (mut to_b, mut to_c) =
        (a.dialer("b").dial(0).await.expect("let in"), a.dialer("c").dial(0).await.expect("let in"));
    echo(&mut to_b, "a").await;
    a.network.remove("b").expect("it was trusted");
    // What it had kept for the network does not get through either.
    let written = async { to_b.write_all(&[7; 1000]).await.and(to_b.flush().await) };
    written.await.expect_err("the removed host is still written to");
    let mut rest = Vec::new();
    // Cut: an end or an error, but no more bytes.
    let _ = to_b.read_to_end(&mut rest).await;
    assert!(rest.is_empty(), "{} bytes came back of a removed host", rest.len());
    echo(&mut to_c, "a").await;
}

#[tokio::test]
async fn another_identity_behind_a_known_address_is_refused_and_a_renewed_one_is_paired_anew() {
    let (a, b) = two_that_trust().await;
    a.network.renew().expect("renewed");
    b.refused("a", ErrorKind::PermissionDenied, "and not the one that is trusted").await;
    a.refused("b", ErrorKind::PermissionDenied, "b does not trust this host").await;
    b.network.remove("a").expect("it was trusted");
    b.join(&a, &a.invite()).await.expect("joins anew: a knows b as it was");
    echo(&mut b.dialer("a").dial(0).await.expect("let in"), "b").await;
    echo(&mut a.dialer("b").dial(0).await.expect("let in"), "a").await;
}

#[tokio::test]
async fn an_expired_certificate_and_a_wrong_clock_are_told_apart() {
    let (a, b) = two_that_trust().await;
    b.env.ahead_seconds.store(11 * 365 * DAY, Ordering::Relaxed);
    // Its own certificate is over by its own clock.
    b.refused("a", ErrorKind::PermissionDenied, "the certificate of this host has expired on").await;
    a.refused("b", ErrorKind::PermissionDenied, "b says that this host's certificate has expired on").await;
    b.env.ahead_seconds.store(-2 * DAY, Ordering::Relaxed);
    b.refused("a", ErrorKind::PermissionDenied, "is good from").await;
    a.refused("b", ErrorKind::PermissionDenied, "set the clock that is wrong: that of b says").await;
    let said =
        b.network.invite(&v1::InviteRequest::default()).expect_err("it invites with a certificate that is not good");
    assert_eq!(said.code, ErrorCode::CertificateInvalid);

    // A certificate that was made by a clock that is ahead.
    b.env.ahead_seconds.store(5 * DAY, Ordering::Relaxed);
    b.network.renew().expect("renewed");
    b.network.remove("a").expect("it was trusted");
    let said = b.join(&a, &a.invite()).await.expect_err("joined with a certificate of next week");
    assert_eq!(said.code, ErrorCode::CertificateInvalid);
    assert!(said.message.contains("says that this host's certificate is good from"), "{said}");
    let said = a.join(&b, &b.invite()).await.expect_err("joined a host with a certificate of next week");
    assert!(said.message.contains("is good from") && said.to_string().contains("set the clock"), "{said}");
}

#[tokio::test]
async fn clocks_that_differ_a_little_are_told_of_when_hosts_are_paired() {
    let (a, b) = (TestHost::start("a").await, TestHost::start("b").await);
    a.env.ahead_seconds.store(600, Ordering::Relaxed);
    let paired = b.join(&a, &a.invite()).await.expect("joins");
    assert!(paired.clock_ahead_seconds.is_some_and(|ahead| (590..=610).contains(&ahead)), "{paired:?}");
}

#[tokio::test]
async fn plaintext_needs_both_sides() {
    let (open, closed) = (TestHost::start_with("open", true, &["127.0.0.1"]).await, TestHost::start("closed").await);
    open.join(&closed, &closed.invite()).await.expect("pairing is encrypted in any case");
    open.refused("closed", ErrorKind::PermissionDenied, "takes no connections without encryption").await;
    // The other way round it is encrypted: only who dials can leave that out.
    echo(&mut closed.dialer("open").dial(0).await.expect("let in"), "closed").await;

    let other = TestHost::start_with("other", true, &["127.0.0.1"]).await;
    other.join(&open, &open.invite()).await.expect("joins");
    echo(&mut other.dialer("open").dial(0).await.expect("let in"), "other").await;
    open.network.remove("other").expect("it was trusted");
    other.refused("open", ErrorKind::PermissionDenied, "open does not trust this host").await;
}

#[tokio::test]
async fn streams_take_the_addresses_of_a_host_in_turn_and_a_dead_one_is_passed_over() {
    let a = TestHost::start_with("a", false, &["127.0.0.1", "127.0.0.2"]).await;
    let b = TestHost::start("b").await;
    b.join(&a, &a.invite()).await.expect("joins");
    assert_eq!(b.network.trusted()[0].addresses, a.network.show().listen);
    let dialer = b.dialer("a");
    for stream in 0..4 {
        echo(&mut dialer.dial(stream).await.expect("let in"), "b").await;
    }
    let dead = format!("127.0.0.1:{}", free_port("127.0.0.1"));
    let addresses = vec![dead.clone(), a.address()];
    b.network.change("a", &v1::HostAddresses { addresses }).expect("known");
    for stream in 0..2 {
        echo(&mut dialer.dial(stream).await.expect("let in by the other address"), "b").await;
    }
    b.network.change("a", &v1::HostAddresses { addresses: vec![dead] }).expect("known");
    b.refused("a", ErrorKind::Disconnected, "cannot be reached at 127.0.0.1").await;
}

#[tokio::test]
async fn a_host_that_serves_nothing_yet_says_so() {
    let (a, b) = (TestHost::start("a").await, TestHost::start("b").await);
    b.join(&a, &a.invite()).await.expect("joins");
    a.network.close();
    let again = begin("a", false, &["127.0.0.1"], &a.env, a.directory.path()).await;
    b.network.change("a", &v1::HostAddresses { addresses: again.show().listen }).expect("known");
    b.refused("a", ErrorKind::Disconnected, "takes no volumes at the moment").await;
}

#[tokio::test]
async fn nonsense_and_other_protocols_are_hung_up_on() {
    let a = TestHost::start("a").await;
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\x16\x03\x01\x00\x02\x00\x00", b"transhume plaintext 9\n\x00\x02{}"]
    {
        let mut stream = TcpStream::connect(a.address()).await.expect("connected");
        stream.write_all(bytes).await.expect("sent");
        let mut answer = Vec::new();
        // An end or a reset; at most an alert or a refusal came before it.
        let _ = stream.read_to_end(&mut answer).await;
        assert!(answer.len() < 512, "{answer:?}");
    }
    // TLS, but for neither of the two protocols.
    let config = tls::client(&a.network.identity(), &a.network.env, Expected::Anybody, b"h2").expect("set up");
    let stream = TcpStream::connect(a.address()).await.expect("connected");
    let name = tls::SERVER_NAME.try_into().expect("a name");
    assert!(TlsConnector::from(config).connect(name, stream).await.is_err(), "it speaks h2");
    assert!(a.network.counters.refused.load(Ordering::Relaxed) >= 3);
}

#[tokio::test]
async fn nothing_older_than_tls_1_3_and_aes_first() {
    let (a, b) = two_that_trust().await;
    let expected = Expected::Host("a".to_owned(), a.network.identity().fingerprint);
    let config = tls::client(&b.network.identity(), &b.network.env, expected, ALPN_WIRE).expect("set up");
    let stream = TcpStream::connect(a.address()).await.expect("connected");
    let name = tls::SERVER_NAME.try_into().expect("a name");
    let stream = TlsConnector::from(config).connect(name, stream).await.expect("shaken hands");
    let connection = stream.get_ref().1;
    assert_eq!(connection.protocol_version(), Some(rustls::ProtocolVersion::TLSv1_3));
    let suite = connection.negotiated_cipher_suite().expect("there is one").suite();
    assert_eq!(suite, rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
}

#[tokio::test]
async fn a_certificate_without_its_key_is_worth_nothing() {
    let (a, b) = two_that_trust().await;
    let thief = TestHost::start("t").await;
    let (known, own) = (b.network.identity(), thief.network.identity());
    let stolen = Identity {
        certificate: known.certificate.clone(),
        key: own.key.clone_key(),
        fingerprint: known.fingerprint,
        validity: known.validity,
    };
    // The library itself refuses a key that does not fit; a program that does not would fail at the signature.
    let config = tls::client(&stolen, &thief.network.env, Expected::Anybody, ALPN_WIRE);
    assert!(config.is_err(), "a certificate was used with another key");
    assert_eq!(a.network.trusted().len(), 1);
    assert!(listener::HANDSHAKE_LIMIT <= Duration::from_secs(30));
}
