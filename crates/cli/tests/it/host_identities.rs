//! What two daemons say to each other's users when a certificate is over, a clock is wrong, or the other host's daemon is of
//! another version; and what somebody is told who has a host's key and does not know what that host knows.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use crate::support::load::Load;
use crate::support::pair::{Pair, wait_until};
use crate::support::{World, same};
use migrate::stream::protocol::{
    CHOICE_BYTES, Choice, HEADER_BYTES, HELLO_BYTES, Header, Hello, Kind, Opening, Status, choose, feature,
};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, ServerConfig, ServerConnection, SignatureScheme, StreamOwned,
};
use serde_json::Value;

/// The library that shows a program another time.
const CLOCK: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";

/// Starts the daemon of `world` anew with its clock so far ahead: `+2y`, `-3d`, or nothing.
fn start_with_clock(world: &mut World, ahead: &str) {
    assert!(std::path::Path::new(CLOCK).exists(), "libfaketime is missing: run `make setup`");
    world.kill();
    let launcher =
        ["env", &format!("LD_PRELOAD={CLOCK}"), "DONT_FAKE_MONOTONIC=1", "NO_FAKE_STAT=1"].map(str::to_owned);
    world.daemon.launcher = match ahead {
        "" => Vec::new(),
        ahead => launcher.into_iter().chain([format!("FAKETIME={ahead}")]).collect(),
    };
    world.start();
    if !ahead.is_empty() {
        // The library keeps what it has mapped; a process that is killed would leave the names behind for ever.
        for name in ["faketime_shm", "sem.faketime_sem"] {
            let path = format!("/dev/shm/{name}_{}", world.pid());
            std::fs::remove_file(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        }
    }
}

/// A volume `x` of `a` under load, and its image.
fn with_load(pair: &Pair, bytes: u64, number: u64) -> (Load, PathBuf) {
    let image = pair.a.image("disk.img", bytes, 65536);
    let uri = pair.a.attach("x", &image);
    (Load::start(&uri, &image, number), image)
}

fn last_error(job: &Value) -> &str {
    job["progress"]["last_error"].as_str().unwrap_or_default()
}

#[test]
fn a_certificate_that_is_over_is_named_with_its_host_its_date_and_what_to_do_and_a_new_one_is_paired() {
    let (year, ..) = env::civil(env::unix_seconds(SystemTime::now()));
    let end = i32::try_from(year + 1).expect("a year");
    let mut pair = Pair::with_identity_of_b(2000..end);
    let (load, _) = with_load(&pair, 4 << 20, 60);
    let other = pair.b.image("other.img", 1 << 20, 65536);
    pair.b.attach("y", &other);
    start_with_clock(&mut pair.a, "+2y");
    start_with_clock(&mut pair.b, "+2y");
    let over = format!("has expired on {end}-01-01");
    pair.a.refused(&["move", "x", "--to", "b"], 54, &format!("the certificate of b {over}"));
    pair.a.refused(&["move", "x", "--to", "b"], 54, "run `transhume host --renew` on b");
    pair.b.refused(&["move", "y", "--to", "a"], 54, &format!("the certificate of this host {over}"));
    pair.b.refused(&["trust", "--invite"], 54, "run `transhume host --renew`, then pair it anew");
    let shown = pair.b.json(&["host"]);
    assert!(shown["problem"]["message"].as_str().is_some_and(|said| said.contains(&over)), "{shown}");
    load.goes_on();

    let renewed = pair.b.json(&["host", "--renew"]);
    assert_ne!(renewed["fingerprint"], shown["fingerprint"]);
    pair.a.refused(&["move", "x", "--to", "b"], 53, "and not the one that is trusted");
    pair.a.json(&["trust", "--remove", "b"]);
    let code = pair.b.json(&["trust", "--invite"])["code"].as_str().expect("a code").to_owned();
    pair.a.json(&["trust", shown["listen"][0].as_str().expect("an address"), &code]);
    assert_eq!(pair.a.json(&["move", "x", "--to", "b", "--verify", "full"])["equal"], true);
    load.goes_on();
    same(&pair.arrived("x"), &load.finish());
}

#[test]
fn a_clock_that_is_wrong_is_told_of_on_both_hosts_and_a_move_waits_until_it_is_set() {
    let mut pair = Pair::both_ways();
    let (load, _) = with_load(&pair, 12 << 20, 61);
    let other = pair.b.image("other.img", 1 << 20, 65536);
    pair.b.attach("y", &other);
    pair.a.json(&["move", "x", "--to", "b", "--bandwidth", "2MiB/s", "--detach"]);
    pair.wait_for_move("it copies", |job| job["progress"]["bytes_copied"].as_u64() > Some(0));
    start_with_clock(&mut pair.b, "+11y");
    let said = "b says that this host's certificate has expired on";
    let waits = pair.wait_for_move("it is told why", |job| last_error(job).contains(said));
    assert!(last_error(&waits).contains("set the clock of b, which says"), "{waits}");
    load.goes_on();
    pair.b.refused(&["move", "y", "--to", "a"], 54, "set this machine's clock, which says");
    start_with_clock(&mut pair.b, "-3d");
    let said = "b says that this host's certificate is good from";
    let waits = pair.wait_for_move("it is told otherwise", |job| last_error(job).contains(said));
    assert!(last_error(&waits).contains("set the clock that is wrong: that of b says"), "{waits}");
    pair.b.refused(&["move", "y", "--to", "a"], 54, "the certificate of this host is good from");
    load.goes_on();
    start_with_clock(&mut pair.b, "");
    pair.a.json(&["set", "x", "--bandwidth", "0"]);
    let over = pair.wait_for_move("it goes on", |job| job["state"] == "done");
    assert!(over["error"].is_null(), "{over}");
    load.goes_on();
    same(&pair.arrived("x"), &load.finish());
}

#[test]
fn clocks_that_differ_a_little_are_told_of_when_hosts_are_paired() {
    let mut pair = Pair::new();
    start_with_clock(&mut pair.b, "+20m");
    let listens = pair.b.json(&["host"])["listen"][0].as_str().expect("an address").to_owned();
    let invite = || pair.b.json(&["trust", "--invite"])["code"].as_str().expect("a code").to_owned();
    let paired = pair.a.json(&["trust", &listens, &invite()]);
    let ahead = paired["clock_ahead_seconds"].as_i64().unwrap_or_default();
    assert!((1190..1260).contains(&ahead), "{paired}");
    let output = pair.a.run(&["trust", &listens, &invite()]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("20 min"), "{said}");
    assert_eq!(pair.a.json(&["trust", "--list"]).as_array().map(Vec::len), Some(1));
}

/// The key and the certificate of a host.
fn identity(world: &World) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let path = world.daemon.state().join("hosts/identity.pem");
    let certificate = CertificateDer::from_pem_file(&path).expect("there is one");
    (vec![certificate], PrivateKeyDer::from_pem_file(&path).expect("there is one"))
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// A daemon of the future, which speaks only version 9 of the wire: in the place of a host that is trusted, and with its key.
struct Future {
    is_over: Arc<AtomicBool>,
    at: String,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Future {
    fn begin(world: &World, at: &str) -> Self {
        let (chain, key) = identity(world);
        let config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key));
        let mut config = config.expect("good");
        config.alpn_protocols = vec![b"transhume/1".to_vec()];
        let config = Arc::new(config);
        let listener = TcpListener::bind(at).expect("the port is free");
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_over);
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if ends.load(Ordering::SeqCst) {
                    return;
                }
                // Whoever comes may go at any moment.
                let _ = stream.and_then(|stream| answer(stream, &config));
            }
        });
        Self { is_over, at: at.to_owned(), thread: Some(thread) }
    }
}

/// Lets the connection be a stream, and then finds no version.
fn answer(stream: TcpStream, config: &Arc<ServerConfig>) -> std::io::Result<()> {
    let connection = ServerConnection::new(Arc::clone(config)).expect("a good configuration");
    let mut stream = StreamOwned::new(connection, stream);
    let welcome = br#"{"say":"welcome"}"#;
    stream.write_all(&[&[0, welcome.len() as u8], &welcome[..]].concat())?;
    stream.flush()?;
    let mut hello = [0; HELLO_BYTES];
    stream.read_exact(&mut hello)?;
    let hello = Hello::parse(&hello).expect("a hello");
    stream.write_all(&choose(&hello, &[9], feature::KNOWN).to_bytes())?;
    stream.flush()
}

impl Drop for Future {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(&self.at);
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

#[test]
fn a_host_of_another_version_is_told_with_both_versions_and_what_to_do_and_a_move_waits_for_the_right_one() {
    let mut pair = Pair::new();
    let (load, _) = with_load(&pair, 12 << 20, 62);
    let listens = pair.b.json(&["host"])["listen"][0].as_str().expect("an address").to_owned();
    let both = "the sender speaks versions [1] of the wire and this side [9]";
    pair.b.kill();
    {
        let _future = Future::begin(&pair.b, &listens);
        pair.a.refused(&["move", "x", "--to", "b"], 4, both);
        pair.a.refused(&["move", "x", "--to", "b"], 4, "install the same version of transhumed on both hosts");
        let plan = pair.a.json(&["plan", "x", "--to", "b"]);
        assert!(plan["refusal"].to_string().contains(both), "{plan}");
        assert_eq!(pair.at_a("x")["state"], "serving");
        load.goes_on();
    }
    pair.b.start();
    pair.a.json(&["move", "x", "--to", "b", "--bandwidth", "2MiB/s", "--detach"]);
    pair.wait_for_move("it copies", |job| job["progress"]["bytes_copied"].as_u64() > Some(0));
    pair.b.kill();
    {
        let _future = Future::begin(&pair.b, &listens);
        pair.wait_for_move("it is told why", |job| last_error(job).contains(both));
        load.goes_on();
    }
    pair.b.start();
    pair.a.json(&["set", "x", "--bandwidth", "0"]);
    pair.wait_for_move("it goes on", |job| job["state"] == "done");
    load.goes_on();
    same(&pair.arrived("x"), &load.finish());
}

/// A stream to `b` of somebody who has the key of `a`, when it is welcome there.
fn welcome_stream(pair: &Pair) -> StreamOwned<ClientConnection, TcpStream> {
    let listens = pair.b.json(&["host"])["listen"][0].as_str().expect("an address").to_owned();
    let (chain, key) = identity(&pair.a);
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map(|builder| builder.dangerous().with_custom_certificate_verifier(Arc::new(Anybody(provider()))))
        .and_then(|builder| builder.with_client_auth_cert(chain, key));
    let mut config = config.expect("good");
    config.alpn_protocols = vec![b"transhume/1".to_vec()];
    let name = ServerName::try_from("transhume").expect("a name");
    let connection = ClientConnection::new(Arc::new(config), name).expect("a good configuration");
    let mut stream = StreamOwned::new(connection, TcpStream::connect(&listens).expect("b listens"));
    let mut length = [0; 2];
    stream.read_exact(&mut length).expect("an answer");
    let mut welcome = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut welcome).expect("an answer");
    assert_eq!(serde_json::from_slice::<Value>(&welcome).expect("it is JSON")["say"], "welcome");
    stream
}

#[test]
fn a_sender_of_another_version_is_told_which_ones_are_spoken_and_the_log_says_who_it_was() {
    let pair = Pair::new();
    let mut stream = welcome_stream(&pair);
    let hello = Hello { versions: vec![9, 8], required: 0, optional: 0 };
    stream.write_all(&hello.to_bytes()).expect("sent");
    let mut choice = [0; CHOICE_BYTES];
    stream.read_exact(&mut choice).expect("an answer");
    let choice = Choice::parse(&choice).expect("a choice");
    assert_eq!(choice.version, 0);
    let words = "the sender speaks versions [9, 8] of the wire and this side [1]";
    assert_eq!(choice.words, words);
    wait_until("the log says so", || {
        pair.b.log().lines().any(|line| line.contains(words) && line.contains("host=a")).then_some(())
    });
}

#[test]
fn who_asks_under_an_epoch_that_is_none_is_refused_and_the_move_under_way_does_not_notice() {
    let pair = Pair::new();
    let (load, _) = with_load(&pair, 12 << 20, 63);
    pair.a.json(&["move", "x", "--to", "b", "--bandwidth", "2MiB/s", "--detach"]);
    pair.wait_for_move("it copies", |job| job["progress"]["bytes_copied"].as_u64() > Some(0));
    let arrival = pair.at_b("x")["arrival"].clone();
    let own = arrival["epoch"].as_u64().expect("an epoch");
    let size = 12_u64 << 20;
    let asks = [
        ("Forward", own, size, "x was not prepared for epoch"),
        ("Forward", own + 1, size, "x was not prepared for epoch"),
        ("Copy", own + 7, size, "x comes under epoch"),
        ("Copy", own, size / 2, "x has 12582912 bytes here"),
    ];
    for (role, epoch, size, words) in asks {
        let request = serde_json::json!({
            "volume": "x", "job": arrival["job"], "role": role, "epoch": epoch, "size": size, "request_alignment": 512,
            "origin": "x",
        });
        let request = serde_json::from_value(request).expect("a request");
        let opening = Opening { sender: [7; 16], session: 1, stream: 0, generation: 1, joins: false, request };
        let said = refusal_of(welcome_stream(&pair), &opening);
        assert!(said.contains(words), "{said}");
    }
    load.goes_on();
    pair.a.json(&["set", "x", "--bandwidth", "0"]);
    let over = pair.wait_for_move("it goes on", |job| job["state"] == "done");
    // After the switchover a session of its own passes the guest's requests on; it may be counted already.
    let lost = [&over["progress"]["target_losses"], &over["report"]["stream"]["streams_lost"]];
    assert_eq!(lost.map(Value::as_u64), [Some(0); 2], "{over}");
    load.goes_on();
    same(&pair.arrived("x"), &load.finish());
}

/// What `b` says to `opening`, which it refuses.
fn refusal_of(mut stream: impl Read + Write, opening: &Opening) -> String {
    stream.write_all(&Hello::default().to_bytes()).expect("sent");
    stream.read_exact(&mut [0; CHOICE_BYTES]).expect("an answer");
    let message = opening.to_bytes(feature::KNOWN).expect("it is short");
    let header = Header::request(Kind::Open, 0).with_payload(&message);
    stream.write_all(&[&header.to_bytes()[..], &message].concat()).expect("sent");
    let mut bytes = [0; HEADER_BYTES];
    stream.read_exact(&mut bytes).expect("an answer");
    let header = Header::parse(&bytes).expect("a header");
    assert!(matches!(header.status, Status::Failed(_)), "{header:?}");
    let mut words = vec![0; header.payload_bytes as usize];
    stream.read_exact(&mut words).expect("an answer");
    String::from_utf8(words).expect("words")
}

/// Believes whoever answers.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("another version".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
