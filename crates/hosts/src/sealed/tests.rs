//! Encrypted connections of ours with themselves and with the library's.

use std::sync::Arc;
use std::time::Duration;

use env::{EnvRef, RealEnv};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;
use crate::HostName;
use crate::identity::Identity;
use crate::tls::{self, ALPN_WIRE, Expected, SERVER_NAME};

/// Nothing here takes longer, on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) type Configs = (Arc<ClientConfig>, Arc<ServerConfig>);

pub(super) fn configs() -> Configs {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let env: EnvRef = Arc::new(RealEnv::new());
    let name = HostName::new("a").expect("a name");
    let identity = Identity::load_or_make(&directory.path().join("identity.pem"), &name, &*env).expect("made");
    let expected = Expected::Host("a".to_owned(), identity.fingerprint);
    let client = tls::client(&identity, &env, expected, ALPN_WIRE).expect("a client");
    (client, tls::server(&identity, &env).expect("a server"))
}

pub(super) fn name() -> ServerName<'static> {
    ServerName::try_from(SERVER_NAME).expect("a name")
}

async fn pair() -> (Sealed<DuplexStream>, Sealed<DuplexStream>) {
    let (client, server) = configs();
    let (near, mut far) = duplex(100_000);
    let accepting = async {
        let greeting = greeted(&mut far).await.expect("greeted");
        assert_eq!(greeting.protocols, [ALPN_WIRE]);
        accept(server, far, greeting.bytes).await.expect("accepted")
    };
    let (near, far) = tokio::join!(connect(client, name(), near), accepting);
    (near.expect("connected"), far)
}

pub(super) fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..length).map(|_| next()).collect()
}

/// Sends `sent` in pieces of many sizes, several at a time, and ends.
async fn send_all(stream: &mut (impl AsyncWrite + Unpin), sent: &[u8]) {
    let mut rest = sent;
    let mut sizes = [48, 262_144, 48, 4096, 48, 1, 0, 16_384, 16_383, 16_385, 100_000].into_iter().cycle();
    while !rest.is_empty() {
        let mut pieces = Vec::new();
        let mut later = rest;
        for size in sizes.by_ref().take(4) {
            let (piece, others) = later.split_at(size.min(later.len()));
            pieces.push(IoSlice::new(piece));
            later = others;
        }
        let count = stream.write_vectored(&pieces).await.expect("sent");
        assert!(count > 0 || pieces.iter().all(|piece| piece.is_empty()), "nothing was taken");
        rest = &rest[count..];
    }
    stream.shutdown().await.expect("ended");
}

/// All that comes, read in pieces of many sizes.
async fn receive_all(stream: &mut (impl AsyncRead + Unpin)) -> Vec<u8> {
    let mut received = Vec::new();
    for size in [4096, 1, 262_144, 16_384, 17, 100_000, 16_401, 48].into_iter().cycle() {
        let mut piece = vec![0; size];
        match stream.read(&mut piece).await.expect("received") {
            0 => break,
            count => received.extend_from_slice(&piece[..count]),
        }
    }
    received
}

async fn cross(sender: &mut (impl AsyncWrite + Unpin), receiver: &mut (impl AsyncRead + Unpin), sent: &[u8]) {
    let both = async { tokio::join!(send_all(sender, sent), receive_all(receiver)).1 };
    let received = tokio::time::timeout(PATIENCE, both).await.expect("it hangs");
    assert!(received == sent, "{} of {} bytes, or other ones", received.len(), sent.len());
}

#[tokio::test]
async fn bytes_come_in_their_order_whatever_is_sent_and_asked_for_at_once_and_so_does_the_end() {
    let (mut near, mut far) = pair().await;
    assert_eq!((near.protocol(), far.protocol()), (Some(ALPN_WIRE), Some(ALPN_WIRE)));
    assert!(near.certificate().is_some() && near.certificate() == far.certificate());
    let sent = noise(3_000_000);
    cross(&mut near, &mut far, &sent).await;
    cross(&mut far, &mut near, &sent).await;
}

#[tokio::test]
async fn the_library_understands_us_and_we_the_library() {
    let sent = noise(1_500_000);
    let (client, server) = configs();

    let (near, far) = duplex(100_000);
    let (ours, theirs) =
        tokio::join!(connect(client.clone(), name(), near), TlsAcceptor::from(server.clone()).accept(far));
    let (mut ours, mut theirs) = (ours.expect("connected"), theirs.expect("accepted"));
    cross(&mut ours, &mut theirs, &sent).await;
    cross(&mut theirs, &mut ours, &sent).await;

    let (near, far) = duplex(100_000);
    let (theirs, ours) =
        tokio::join!(TlsConnector::from(client).connect(name(), near), accept(server, far, Vec::new()));
    let (mut theirs, mut ours) = (theirs.expect("connected"), ours.expect("accepted"));
    cross(&mut theirs, &mut ours, &sent).await;
    cross(&mut ours, &mut theirs, &sent).await;
}

#[tokio::test]
async fn keys_are_changed_in_time_by_either_side_and_when_the_library_does() {
    let sent = noise(3_000_000);
    let (mut near, mut far) = pair().await;
    (near.records_max, far.records_max) = (3, 5);
    cross(&mut near, &mut far, &sent).await;
    assert!(near.sealing.sequence() <= 4, "a key was used for {} records", near.sealing.sequence());
    cross(&mut far, &mut near, &sent).await;

    let (client, server) = configs();
    let (near, far) = duplex(100_000);
    let (ours, theirs) = tokio::join!(connect(client, name(), near), TlsAcceptor::from(server).accept(far));
    let (mut ours, mut theirs) = (ours.expect("connected"), theirs.expect("accepted"));
    ours.records_max = 2;
    // It changes its key and asks for the same.
    theirs.get_mut().1.refresh_traffic_keys().expect("asked for");
    cross(&mut theirs, &mut ours, &sent).await;
    cross(&mut ours, &mut theirs, &sent).await;
}

#[tokio::test]
async fn who_asks_for_other_keys_again_and_again_is_answered_once_and_before_the_next_data() {
    let (mut near, mut far) = pair().await;
    for _ in 0..1000 {
        near.say(Content::Handshake, &[24, 0, 0, 1, 1]).expect("sealed");
        near.sealing = Key::new(&near.keeper.next_sealing().expect("a secret")).expect("a key");
    }
    let sent = noise(100_000);
    cross(&mut near, &mut far, &sent).await;
    assert_eq!(far.outgoing.memory.len(), 0, "answers wait that nobody may ever take");
    let before = near.opening.sequence();
    far.write_all(b"one").await.expect("sent");
    assert_eq!((before, far.sealing.sequence()), (0, 1), "the data is the first record under its key");
    assert!(!far.is_key_wanted);
    far.write_all(b"two").await.expect("sent");
    assert_eq!(far.sealing.sequence(), 2, "it was answered before");
    far.shutdown().await.expect("ended");
    assert_eq!(receive_all(&mut near).await, b"onetwo");
}

#[tokio::test]
async fn a_connection_that_is_cut_is_not_taken_for_one_that_has_ended() {
    let (near, mut far) = pair().await;
    drop(near);
    let error = far.read(&mut [0; 100]).await.expect_err("the end was not sealed");
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}

#[tokio::test]
async fn whoever_is_not_expected_is_told_so_and_learns_no_more() {
    let ((client, _), (_, server)) = (configs(), configs());
    let (near, far) = duplex(100_000);
    let (connected, accepted) = tokio::join!(connect(client, name(), near), accept(server, far, Vec::new()));
    let error = connected.err().expect("another host was taken for the one that was expected");
    assert!(tls::rejection(&error).is_some(), "{error}");
    let error = accepted.err().expect("it was let in");
    assert!(error.to_string().contains("lert"), "{error}");
}

#[tokio::test]
async fn what_is_changed_or_makes_no_sense_ends_the_connection_and_nothing_of_it_is_read() {
    let (mut near, mut far) = pair().await;
    near.inner.write_all(&[23, 3, 3, 0, 40]).await.expect("sent");
    near.inner.write_all(&[7; 40]).await.expect("sent");
    let mut target = [1; 1000];
    let error = far.read(&mut target).await.expect_err("it was believed");
    assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");

    let (mut near, mut far) = pair().await;
    near.inner.write_all(b"GET / HTTP/1.1\r\n\r\n").await.expect("sent");
    let error = far.read(&mut target).await.expect_err("it was believed");
    assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");

    let (mut near, mut far) = pair().await;
    near.say(Content::Handshake, &[1, 0, 0, 0]).expect("sealed");
    near.flush().await.expect("sent");
    let error = far.read(&mut target).await.expect_err("a handshake in the midst of data was taken");
    assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
}

#[tokio::test]
async fn a_side_that_says_nothing_has_no_memory_for_it_and_one_that_sends_little_not_much() {
    let (mut near, mut far) = pair().await;
    assert_eq!(near.outgoing.memory.len(), 0);
    for _ in 0..100 {
        near.write_all(&[7; 300]).await.expect("sent");
        near.flush().await.expect("sent");
        far.read_exact(&mut [0; 300]).await.expect("received");
    }
    assert!(near.outgoing.memory.len() <= 32 << 10, "{}", near.outgoing.memory.len());
}
