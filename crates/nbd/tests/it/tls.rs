//! NBD through TLS: our client with nbdkit and qemu-nbd, libnbd's and QEMU's clients with our server, and everything
//! that must prevent a connection.

use std::net::TcpListener;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::common::{env, export_of, memory, only};
use block::testing::conformance;
use block::{BlockDevice, Buffer, Bytes, Data, Device, ErrorKind, Mutation, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use transhume_guest::{Authority, GOOD_YEARS};
use transhume_nbd::protocol::{Greeting, OptionReplyWriter, handshake_flag, option, option_reply, write_option};
use transhume_nbd::server::{End, Summary};
use transhume_nbd::{
    BackendOptions, DialUri, Export, Limits, NbdBackend, NbdDevice, NbdUri, TlsError, TlsServer, UriTls,
    serve_encrypted,
};

const HANG: Duration = Duration::from_secs(60);

/// A folder with certificates of both sides, for a server on this machine.
struct Certificates {
    authority: Authority,
    folder: tempfile::TempDir,
}

impl Certificates {
    fn new() -> Self {
        Self::good_in(GOOD_YEARS, &["localhost", "127.0.0.1"])
    }

    /// Of a server whose certificate is good in `years` and for `names`.
    fn good_in(years: Range<i32>, names: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a scratch directory");
        let authority = Authority::new("an authority").expect("made");
        authority.write(folder.path()).expect("written");
        authority.write_server(folder.path(), names, years, 7).expect("written");
        Self { authority, folder }
    }

    fn with_client(self) -> Self {
        self.authority.write_client(self.folder.path(), GOOD_YEARS).expect("written");
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self) -> &str {
        text(self.folder.path())
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("scratch paths are text")
}

/// A server that is not ours.
struct Peer {
    child: Child,
    uri: NbdUri,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Peer {
    fn start(program: &str, arguments: &[&str], uri: NbdUri) -> Self {
        let child = Command::new(program).args(arguments).stdin(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.unwrap_or_else(|error| panic!("{program}: {error}: run `make setup`"));
        let start = Instant::now();
        let listens = || match &uri.transport {
            transhume_nbd::Transport::Unix(path) => std::os::unix::net::UnixStream::connect(path).is_ok(),
            transhume_nbd::Transport::Tcp(host, port) => std::net::TcpStream::connect((host.as_str(), *port)).is_ok(),
        };
        while !listens() {
            assert!(start.elapsed() < HANG, "{program} does not come up");
            std::thread::sleep(Duration::from_millis(10));
        }
        Self { child, uri }
    }

    /// nbdkit with 8 MiB of memory on a unix socket, and what a client with the same certificates connects to.
    fn nbdkit(certificates: &Certificates, more: &[&str]) -> Self {
        let socket = certificates.path("nbdkit.sock");
        let folder = format!("--tls-certificates={}", certificates.text());
        let own = ["--foreground", "--exit-with-parent", "--unix", text(&socket), &folder];
        Self::start("nbdkit", &[&own, more, &["memory", "8M"]].concat(), encrypted(&socket, certificates))
    }

    /// qemu-nbd with a file of 8 MiB.
    fn qemu_nbd(certificates: &Certificates) -> Self {
        let (socket, image) = (certificates.path("qemu.sock"), certificates.path("disk.raw"));
        std::fs::File::create(&image).and_then(|file| file.set_len(8 << 20)).expect("created");
        let object = format!("tls-creds-x509,id=tls0,endpoint=server,dir={}", certificates.text());
        let arguments = ["--persistent", "--shared=8", "--format=raw", "--object", &object, "--tls-creds", "tls0"];
        let place = ["--socket", text(&socket), text(&image)];
        Self::start("qemu-nbd", &[&arguments[..], &place].concat(), encrypted(&socket, certificates))
    }
}

fn encrypted(socket: &Path, certificates: &Certificates) -> NbdUri {
    let tls = UriTls { certificates: Some(certificates.folder.path().into()), hostname: None };
    NbdUri { tls: Some(tls), ..NbdUri::unix(socket, "") }
}

async fn backend(uri: &NbdUri) -> NbdBackend {
    let dial = Arc::new(DialUri::new(uri.clone(), env()));
    NbdBackend::connect(dial, env(), BackendOptions::default()).await.expect("the server is there")
}

async fn refusal(uri: &NbdUri) -> TlsError {
    let error = NbdDevice::connect(uri, &env()).await.err().expect("it was connected to");
    let found = TlsError::of(&error).cloned();
    found.unwrap_or_else(|| panic!("it is not about TLS: {}", error.chain()))
}

async fn check_bytes(device: &Device) -> Result<()> {
    let pattern: Vec<u8> = (0..3 << 20).map(|index: u32| (index * 7 % 253) as u8).collect();
    for (round, length) in [1, 4096, 3 << 20].into_iter().enumerate() {
        let offset = Bytes(4096 * round as u64);
        device.write(Mutation::data(offset, Data::copy_of(&pattern[..length]))).await?;
        let back = device.read(offset, Buffer::unpooled(length)).await?;
        assert_eq!(back[..], pattern[..length], "round {round}");
    }
    device.flush().await
}

#[tokio::test]
async fn bytes_go_to_nbdkit_over_several_encrypted_connections_and_come_back() {
    let certificates = Certificates::new();
    let port = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a port").port().to_string();
    let folder = format!("--tls-certificates={}", certificates.text());
    let own =
        ["--foreground", "--exit-with-parent", "--ipaddr", "127.0.0.1", "--port", &port, "--tls=require", &folder];
    let uri = format!("nbds://127.0.0.1:{port}/?tls-certificates={}", certificates.text());
    let uri: NbdUri = uri.parse().expect("an address");
    let peer = Peer::start("nbdkit", &[&own[..], &["memory", "8M"]].concat(), uri);
    let backend = Arc::new(backend(&peer.uri).await);
    assert_eq!(backend.connections(), 4);
    check_bytes(&Device::from_arc("nbdkit", backend)).await.expect("the server is there");
}

#[tokio::test]
async fn qemu_nbd_wants_to_know_who_its_clients_are() {
    let certificates = Certificates::new();
    let peer = Peer::qemu_nbd(&certificates);
    assert!(matches!(refusal(&peer.uri).await, TlsError::Refused(false, _)));
    let certificates = certificates.with_client();
    let backend = Arc::new(backend(&peer.uri).await);
    assert_eq!(backend.connections(), 4);
    check_bytes(&Device::from_arc("qemu-nbd", backend)).await.expect("the server is there");
    // A client of another authority is refused, even with the name of this one.
    let other = Authority::new("an authority").expect("made");
    other.write_client(certificates.folder.path(), GOOD_YEARS).expect("written");
    assert!(matches!(refusal(&peer.uri).await, TlsError::Refused(true, _)));
}

#[tokio::test]
async fn nbdkit_that_looks_at_its_clients_refuses_one_without_a_certificate() {
    let certificates = Certificates::new();
    let peer = Peer::nbdkit(&certificates, &["--tls=require", "--tls-verify-peer"]);
    assert!(matches!(refusal(&peer.uri).await, TlsError::Refused(false, _)));
    let _certificates = certificates.with_client();
    let device = NbdDevice::connect(&peer.uri, &env()).await.expect("it shows one now");
    assert_eq!(device.geometry().size, Bytes::mib(8));
}

#[tokio::test]
async fn a_server_that_is_not_who_it_should_be_is_refused_for_its_reason() {
    let certificates = Certificates::new();
    let peer = Peer::nbdkit(&certificates, &["--tls=require"]);
    NbdDevice::connect(&peer.uri, &env()).await.expect("all is well");
    let with = |tls: UriTls| NbdUri { tls: Some(tls), ..peer.uri.clone() };
    let own = peer.uri.tls.clone().expect("it is encrypted");

    let wrong = with(UriTls { hostname: Some("far.example".into()), ..own.clone() });
    let TlsError::Name(wanted, names) = refusal(&wrong).await else { panic!("another reason") };
    assert_eq!(wanted, "far.example");
    assert!(names.iter().any(|name| name.contains("localhost")), "{names:?}");

    for name in ["another authority", "an authority"] {
        let others = tempfile::tempdir().expect("a scratch directory");
        Authority::new(name).expect("made").write(others.path()).expect("written");
        let wrong = with(UriTls { certificates: Some(others.path().into()), ..own.clone() });
        assert_eq!(refusal(&wrong).await, TlsError::Authority(others.path().join("ca-cert.pem")), "{name}");
    }

    let nowhere = with(UriTls { certificates: Some("/nonexistent".into()), ..own });
    assert!(
        matches!(refusal(&nowhere).await, TlsError::File(path, _) if path == Path::new("/nonexistent/ca-cert.pem"))
    );

    certificates.authority.write_revoked(certificates.folder.path(), 8).expect("written");
    NbdDevice::connect(&peer.uri, &env()).await.expect("another certificate is revoked");
    certificates.authority.write_revoked(certificates.folder.path(), 7).expect("written");
    assert_eq!(refusal(&peer.uri).await, TlsError::Revoked);
}

#[tokio::test]
async fn a_certificate_out_of_its_time_is_refused_with_the_dates() {
    let expired = Certificates::good_in(2001..2002, &["localhost"]);
    let peer = Peer::nbdkit(&expired, &["--tls=require"]);
    let error = refusal(&peer.uri).await;
    assert!(matches!(error, TlsError::Expired(1_009_843_200, _)), "{error}");
    assert!(error.to_string().contains("has expired on 2002-01-01"), "{error}");
    let early = Certificates::good_in(2190..2200, &["localhost"]);
    let peer = Peer::nbdkit(&early, &["--tls=require"]);
    let error = refusal(&peer.uri).await;
    assert!(error.to_string().contains("is good from 2190-01-01 on only"), "{error}");
}

#[tokio::test]
async fn nothing_is_sent_in_the_clear_to_a_server_without_tls() {
    let certificates = Certificates::new();
    let peer = Peer::nbdkit(&certificates, &["--tls=off"]);
    assert!(matches!(refusal(&peer.uri).await, TlsError::NotSpoken(_)));

    // One that would take anything: what it hears after its refusal is nothing.
    let socket = certificates.path("plain.sock");
    let listener = UnixListener::bind(&socket).expect("the path is free");
    let hearing = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a client comes");
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        stream.write_all(&Greeting { flags }.to_bytes()).await.expect("sent");
        let asked = write_option(option::STARTTLS, &[]);
        let mut heard = vec![0; 4 + asked.len()];
        stream.read_exact(&mut heard).await.expect("it asks for TLS");
        assert_eq!(heard[4..], asked, "something came before TLS");
        let refused = OptionReplyWriter::new(option::STARTTLS).refuse(option_reply::ERR_POLICY, "not today");
        stream.write_all(&refused).await.expect("sent");
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.expect("it leaves");
        rest
    });
    let error = refusal(&encrypted(&socket, &certificates)).await;
    assert_eq!(error, TlsError::NotSpoken("not today".into()));
    assert_eq!(hearing.await.expect("heard"), [] as [u8; 0], "it went on in the clear");
}

#[tokio::test]
async fn a_client_that_asks_for_no_tls_is_told_to_by_servers_that_want_it() {
    let certificates = Certificates::new().with_client();
    for peer in [Peer::nbdkit(&certificates, &["--tls=require"]), Peer::qemu_nbd(&certificates)] {
        let plain = NbdUri { tls: None, ..peer.uri.clone() };
        assert_eq!(refusal(&plain).await, TlsError::Required);
    }
    let server = Server::of(certificates, memory(Bytes::mib(1)));
    assert_eq!(refusal(&NbdUri { tls: None, ..server.uri.clone() }).await, TlsError::Required);
}

/// A server of ours in a thread of its own.
struct Server {
    certificates: Certificates,
    uri: NbdUri,
    /// What became of its connections.
    summaries: Receiver<Summary>,
}

impl Server {
    fn of(certificates: Certificates, device: Device) -> Self {
        let export: Export = export_of(device);
        let socket = certificates.path("own.sock");
        let uri = NbdUri { export: export.name().into(), ..encrypted(&socket, &certificates) };
        let (exports, tls) =
            (only(export), TlsServer::new(certificates.folder.path(), env()).expect("good certificates"));
        let (ready, is_ready) = channel();
        let (over, summaries) = channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            let tls = Arc::new(tls);
            runtime.block_on(async {
                let listener = UnixListener::bind(&socket).expect("the path is free");
                ready.send(()).expect("the test waits");
                loop {
                    let (mut stream, _) = listener.accept().await.expect("the listener lives");
                    tls.renew().expect("good certificates");
                    let (exports, tls, over) = (Arc::clone(&exports), Arc::clone(&tls), over.clone());
                    tokio::spawn(async move {
                        // So narrow that TLS always holds back something.
                        let (near, mut far) = tokio::io::duplex(700);
                        let serving = serve_encrypted(near, &tls, exports, env(), Limits::default());
                        let passing = tokio::io::copy_bidirectional(&mut stream, &mut far);
                        let (summary, _) = tokio::join!(serving, passing);
                        let _ = over.send(summary);
                    });
                }
            });
        });
        is_ready.recv().expect("the server comes up");
        Self { certificates, uri, summaries }
    }

    fn end(&self) -> End {
        self.summaries.recv_timeout(HANG).expect("a connection ends").end
    }
}

#[tokio::test]
async fn our_client_conforms_through_tls_with_our_server() {
    let make = async |size: Bytes| {
        let server = Server::of(Certificates::new().with_client(), memory(size));
        Device::from_arc("encrypted", Arc::new(backend(&server.uri).await))
    };
    conformance(2, make).await;
}

fn run(program: &str, arguments: &[&str]) -> (bool, String) {
    let output = Command::new("timeout").arg("60").arg(program).args(arguments).output().expect("timeout runs");
    assert_ne!(output.status.code(), Some(127), "{program} is missing: run `make setup`");
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

#[tokio::test]
async fn libnbd_and_qemu_read_and_write_an_encrypted_export_of_ours() {
    let device = memory(Bytes::mib(8));
    check_bytes(&device).await.expect("memory takes it");
    let server = Server::of(Certificates::new().with_client(), device.clone());
    let (uri, out) = (server.uri.to_string(), server.certificates.path("out.raw"));
    let (is_well, said) = run("nbdcopy", &["--connections=4", &uri, text(&out)]);
    assert!(is_well, "{said}");
    let expected = device.read(Bytes(0), Buffer::unpooled(8 << 20)).await.expect("memory gives it");
    assert_eq!(std::fs::read(&out).expect("it was copied"), expected[..]);
    let (is_well, said) = run("nbdinfo", &[&uri]);
    assert!(is_well && said.contains("with TLS"), "{said}");

    let object = format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", server.certificates.text());
    let socket = server.uri.socket().map(text).expect("a unix socket");
    let image =
        format!("driver=nbd,server.type=unix,server.path={socket},export=disk,tls-creds=tls0,tls-hostname=localhost");
    let commands = ["-c", "write -P 9 1M 2M", "-c", "flush", "-c", "read -P 9 1M 2M"];
    let (is_well, said) = run("qemu-io", &[&["--object", &object, "--image-opts", &image], &commands[..]].concat());
    assert!(is_well && !said.contains("failed"), "{said}");
    let written = device.read(Bytes::mib(1), Buffer::unpooled(4096)).await.expect("memory gives it");
    assert!(written.iter().all(|byte| *byte == 9));
}

#[tokio::test]
async fn our_server_lets_in_nobody_without_a_certificate_of_its_authority() {
    let server = Server::of(Certificates::new(), memory(Bytes::mib(1)));
    assert!(matches!(refusal(&server.uri).await, TlsError::Refused(false, Some(_))));
    assert!(matches!(server.end(), End::Tls(_)));
    let (is_well, _) = run("nbdinfo", &[&server.uri.to_string()]);
    assert!(!is_well, "libnbd came in without a certificate");
    assert!(matches!(server.end(), End::Tls(_)));
    let folder = server.certificates.folder.path();
    Authority::new("an authority").and_then(|other| other.write_client(folder, GOOD_YEARS)).expect("written");
    assert!(matches!(refusal(&server.uri).await, TlsError::Refused(true, Some(_))));
    server.certificates.authority.write_client(folder, 2001..2002).expect("written");
    assert!(matches!(refusal(&server.uri).await, TlsError::Refused(true, Some(_))));
    server.certificates.authority.write_client(folder, GOOD_YEARS).expect("written");
    NbdDevice::connect(&server.uri, &env()).await.expect("this one is known");
}

#[tokio::test]
async fn a_certificate_of_ours_that_is_renewed_is_shown_to_the_next_client() {
    let server = Server::of(Certificates::good_in(2001..2002, &["localhost"]).with_client(), memory(Bytes::mib(1)));
    assert!(matches!(refusal(&server.uri).await, TlsError::Expired(..)));
    let folder = server.certificates.folder.path();
    server.certificates.authority.write_server(folder, &["localhost"], GOOD_YEARS, 8).expect("written");
    NbdDevice::connect(&server.uri, &env()).await.expect("it is renewed");
}

#[tokio::test]
async fn what_comes_in_one_go_with_the_question_for_tls_is_never_taken_for_encrypted() {
    let server = Server::of(Certificates::new().with_client(), memory(Bytes::mib(1)));
    let mut stream = tokio::net::UnixStream::connect(server.uri.socket().expect("a unix socket")).await.expect("there");
    let mut greeting = [0; Greeting::BYTES];
    stream.read_exact(&mut greeting).await.expect("it greets");
    let said = [&3_u32.to_be_bytes()[..], &write_option(option::STARTTLS, &[]), &write_option(option::LIST, &[])];
    stream.write_all(&said.concat()).await.expect("sent");
    let mut heard = Vec::new();
    stream.read_to_end(&mut heard).await.expect("it ends");
    assert_eq!(heard, OptionReplyWriter::new(option::STARTTLS).acknowledge(), "it went on");
    drop(stream);
    assert!(matches!(server.end(), End::Protocol(_)));
}

#[tokio::test]
async fn a_server_that_is_gone_in_the_middle_of_tls_is_a_lost_server_and_may_come_back() {
    let certificates = Certificates::new();
    let socket = certificates.path("short.sock");
    let listener = UnixListener::bind(&socket).expect("the path is free");
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a client comes");
        stream.write_all(&Greeting { flags: 3 }.to_bytes()).await.expect("sent");
        stream.read_exact(&mut [0; 20]).await.expect("it asks for TLS");
        stream.write_all(&OptionReplyWriter::new(option::STARTTLS).acknowledge()).await.expect("sent");
    });
    let error =
        NbdDevice::connect(&encrypted(&socket, &certificates), &env()).await.err().expect("it was connected to");
    assert_eq!(error.kind(), ErrorKind::Disconnected, "{}", error.chain());
}
