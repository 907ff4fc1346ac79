//! Any bytes from the other side: nothing panics, nothing spins, no memory is lost.

use std::sync::Arc;
use std::time::Duration;

use block::{Buffer, Bytes, Data, Device, Extent, MemDevice, Mutation, Result};
use env::testing::PausedEnv;
use futures::future::BoxFuture;
use proptest::prelude::*;
use transhume_migrate::stream::protocol::{
    Choice, Coding, Header, Hello, Kind, Opening, Status, VERSION, Welcome, encode, feature, flag,
};
use transhume_migrate::stream::{BoxTransport, Dialer, PeerName, Remote, Role, StreamOptions};

use crate::wire::harness::Pair;

const KINDS: [Kind; 11] = [
    Kind::Read,
    Kind::Write,
    Kind::Zeroes,
    Kind::Discard,
    Kind::Flush,
    Kind::Extents,
    Kind::Retire,
    Kind::Control,
    Kind::Beat,
    Kind::Leave,
    Kind::Open,
];

/// A frame whose header's checksum fits, whatever else does not, or any bytes.
fn frame() -> impl Strategy<Value = Vec<u8>> {
    let numbers = prop_oneof![0_u64..3, 0_u64..2_000_000, any::<u64>()];
    let lengths = prop_oneof![Just(0_u64), 1_u64..9000, 0_u64..1_100_000, any::<u64>()];
    let made = (
        (0_usize..11, any::<bool>(), 0_u8..8, 0_usize..4, 0_u8..20),
        (0_u64..4, numbers, lengths),
        prop::collection::vec(any::<u8>(), 0..200),
        any::<bool>(),
    );
    let made = made.prop_map(|((kind, is_reply, flags, coding, status), (id, offset, length), payload, fits)| {
        let coding = [Coding::Raw, Coding::Lz4, Coding::Zstd, Coding::Zero][coding];
        let mut header = Header::request(KINDS[kind], id).with_payload(&payload);
        header = Header { is_reply, offset, coding, ..header };
        header.flags = if fits { flags & flag::FUA } else { flags };
        header.status = if is_reply && status < 3 { Status::from_code(status) } else { Status::Done };
        if !fits || payload.is_empty() {
            header.length = length;
        }
        let mut bytes = header.to_bytes().to_vec();
        bytes.extend_from_slice(&payload);
        bytes
    });
    prop_oneof![6 => made, 1 => prop::collection::vec(any::<u8>(), 0..100)]
}

fn run<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(async {
        let limited = tokio::time::timeout(Duration::from_secs(36_000), work).await;
        limited.expect("it neither spins nor hangs")
    })
}

fn opening(pair: &Pair) -> Vec<u8> {
    let request = pair.request(Role::Copy);
    let opening = Opening { sender: [2; 16], session: 1, stream: 0, generation: 1, joins: false, request };
    let message = opening.to_bytes(feature::KNOWN).expect("it is short");
    let mut bytes = Hello::default().to_bytes().to_vec();
    bytes.extend(Header::request(Kind::Open, 0).with_payload(&message).to_bytes());
    bytes.extend(message);
    bytes
}

/// A connection whose other side says these bytes, reads nothing, and then hangs up or stays.
fn monologue(said: Vec<u8>, hangs_up: bool) -> BoxTransport {
    let reader: Box<dyn tokio::io::AsyncRead + Send + Unpin> = match hangs_up {
        true => Box::new(std::io::Cursor::new(said)),
        false => {
            let (mut near, far) = tokio::io::duplex(said.len().max(1));
            tokio::spawn(async move {
                // Kept open for longer than any limit.
                let _ = tokio::io::AsyncWriteExt::write_all(&mut near, &said).await;
                tokio::time::sleep(Duration::from_secs(3600)).await;
            });
            Box::new(far)
        }
    };
    Box::new(tokio::io::join(reader, tokio::io::sink()))
}

struct Monologues(parking_lot::Mutex<Vec<Vec<u8>>>, bool);

impl Dialer for Monologues {
    fn dial(&self, _: u16) -> BoxFuture<'_, Result<BoxTransport>> {
        let said = self.0.lock().pop().unwrap_or_default();
        Box::pin(async move { Ok(monologue(said, self.1)) })
    }
}

fn honest_welcome() -> Vec<u8> {
    let mut bytes = Choice { version: VERSION, features: feature::KNOWN, words: String::new() }.to_bytes().to_vec();
    let welcome = Welcome {
        instance: [1; 16],
        boot: [1; 16],
        size: 1 << 20,
        request_alignment: 1,
        preferred_bytes: 4096,
        transfer_bytes_max: 1 << 20,
        read_only: false,
        earlier: None,
    };
    let message = encode(&welcome).expect("it is short");
    bytes.extend(Header::request(Kind::Open, 0).reply().with_payload(&message).to_bytes());
    bytes.extend(message);
    bytes
}

/// What follows it would be read by nobody otherwise.
#[test]
fn the_opening_before_the_garbage_is_let_in() {
    run(async move {
        let pair = Pair::new(1, Device::new("memory", MemDevice::new(Bytes::mib(1))));
        let (receiver, said) = (pair.receiver(), opening(&pair));
        let serving = receiver.serve(monologue(said, false), PeerName("south".to_owned()));
        let _ = tokio::time::timeout(Duration::from_millis(100), serving).await;
        assert_eq!(receiver.sessions(), 1);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_receiver_bears_any_sender(frames in prop::collection::vec(frame(), 1..12), opens in any::<bool>(), hangs_up in any::<bool>()) {
        run(async move {
            let pair = Pair::new(1, Device::new("memory", MemDevice::new(Bytes::mib(1))));
            let mut said = if opens { opening(&pair) } else { Vec::new() };
            said.extend(frames.concat());
            let receiver = pair.receiver();
            // Whether it ends in an error is the frames' affair.
            let _ = receiver.serve(monologue(said, hangs_up), PeerName("south".to_owned())).await;
            tokio::time::sleep(Duration::from_secs(120)).await;
            assert_eq!(receiver.pool_in_use(), Bytes::ZERO, "a buffer is lost");
            assert_eq!(receiver.sessions(), 0, "a session is kept");
        });
    }

    #[test]
    fn a_sender_bears_any_receiver(frames in prop::collection::vec(frame(), 0..12), opens in any::<bool>(), hangs_up in any::<bool>()) {
        run(async move {
            let mut said = if opens { honest_welcome() } else { Vec::new() };
            said.extend(frames.concat());
            let pair = Pair::new(1, Device::new("memory", MemDevice::new(Bytes::mib(1))));
            let dialer = Arc::new(Monologues(parking_lot::Mutex::new(vec![said]), hangs_up));
            let connecting = Remote::connect(PausedEnv::shared(1), dialer, pair.request(Role::Copy), StreamOptions::default());
            let Ok(remote) = connecting.await else { return };
            let device = Device::from_arc("remote", remote);
            // Nobody answers honestly, but everything ends.
            let _ = futures::join!(
                device.read(Bytes(0), Buffer::unpooled(8192)),
                device.write(Mutation::data(Bytes(0), Data::copy_of(&[1; 8192]))),
                device.extents(Extent::new(Bytes(0), Bytes(4096))),
                device.flush(),
            );
        });
    }
}
