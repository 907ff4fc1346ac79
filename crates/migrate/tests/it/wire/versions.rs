//! Old and new versions meet.

use std::sync::Arc;

use block::{Bytes, Device, ErrorKind, MemDevice, Result};
use env::testing::PausedEnv;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use transhume_migrate::stream::protocol::{CHOICE_BYTES, Choice, HELLO_BYTES, Hello, VERSION, choose, feature};
use transhume_migrate::stream::{BoxTransport, Dialer, PeerName, Remote, Role, StreamOptions};

use crate::wire::harness::Pair;

fn pair() -> Pair {
    Pair::new(1, Device::new("memory", MemDevice::new(Bytes::mib(1))))
}

/// What the receiver answers a sender that offers `hello`, and how the connection ends for it.
async fn offer(hello: &Hello) -> (Choice, Result<()>) {
    let pair = pair();
    let (mut near, far) = tokio::io::duplex(4096);
    let receiver = pair.receiver();
    let serving = tokio::spawn(async move { receiver.serve(Box::new(far), PeerName("south".to_owned())).await });
    near.write_all(&hello.to_bytes()).await.expect("it is read");
    let mut bytes = [0; CHOICE_BYTES];
    near.read_exact(&mut bytes).await.expect("every hello is answered");
    drop(near);
    (Choice::parse(&bytes).expect("it is well formed"), serving.await.expect("no panic"))
}

#[tokio::test(start_paused = true)]
async fn a_newer_sender_that_still_speaks_this_version_is_understood() {
    let hello = Hello { versions: vec![VERSION + 2, VERSION + 1, VERSION], required: 0, optional: u64::MAX };
    let (choice, _) = offer(&hello).await;
    assert_eq!((choice.version, choice.features), (VERSION, feature::KNOWN));
}

#[tokio::test(start_paused = true)]
async fn a_sender_that_speaks_no_version_of_ours_is_told_which_there_are() {
    let (choice, end) = offer(&Hello { versions: vec![VERSION + 7], ..Hello::default() }).await;
    assert_eq!(choice.version, 0);
    assert!(choice.words.contains("[1]") && choice.words.contains("[8]"), "{}", choice.words);
    assert_eq!(end.expect_err("it was served").kind(), ErrorKind::Unsupported);
}

#[tokio::test(start_paused = true)]
async fn a_sender_that_needs_what_is_not_known_is_refused_and_one_that_would_like_it_is_not() {
    let (choice, _) = offer(&Hello { required: 1 << 40, ..Hello::default() }).await;
    assert!(choice.version == 0 && choice.words.contains("0x10000000000"), "{}", choice.words);
    let (choice, _) = offer(&Hello { optional: 1 << 40 | feature::ZSTD, ..Hello::default() }).await;
    assert_eq!((choice.version, choice.features), (VERSION, feature::ZSTD));
}

/// A receiver of another version or with fewer features: it changes the first messages between two of ours.
struct Other {
    pair: Pair,
    versions: Vec<u16>,
    features: u64,
    chosen: Mutex<Vec<Choice>>,
}

impl Other {
    async fn negotiate(&self, near: &mut DuplexStream, far: &mut DuplexStream) {
        let mut bytes = [0; HELLO_BYTES];
        near.read_exact(&mut bytes).await.expect("the sender says hello");
        let offered = Hello::parse(&bytes).expect("it is well formed");
        let choice = choose(&offered, &self.versions, self.features);
        self.chosen.lock().push(choice.clone());
        let hello = Hello { optional: offered.optional & self.features, ..offered };
        far.write_all(&hello.to_bytes()).await.expect("it is read");
        let mut own = [0; CHOICE_BYTES];
        far.read_exact(&mut own).await.expect("it is answered");
        near.write_all(&choice.to_bytes()).await.expect("it is read");
    }
}

impl Dialer for Other {
    fn dial(&self, stream: u16) -> BoxFuture<'_, Result<BoxTransport>> {
        Box::pin(async move {
            let (near, mut near_end) = tokio::io::duplex(65536);
            let mut far = self.pair.lines.dial(stream).await?;
            let (mut far_near, mut far_end) = tokio::io::duplex(65536);
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut far_end, &mut far).await });
            // The dialler gives the connection out at once, and the rest goes on beside it.
            let (chosen_end, versions, features) = (Mutex::new(Vec::new()), self.versions.clone(), self.features);
            let middle = Self { pair: pair(), versions, features, chosen: chosen_end };
            tokio::spawn(async move {
                middle.negotiate(&mut near_end, &mut far_near).await;
                tokio::io::copy_bidirectional(&mut near_end, &mut far_near).await
            });
            Ok(Box::new(near) as BoxTransport)
        })
    }
}

async fn connect_to(versions: &[u16], features: u64) -> Result<Arc<Remote>> {
    let other = Other { pair: pair(), versions: versions.to_vec(), features, chosen: Mutex::default() };
    let request = other.pair.request(Role::Copy);
    Remote::connect(PausedEnv::shared(1), Arc::new(other), request, StreamOptions::default()).await
}

#[tokio::test(start_paused = true)]
async fn a_newer_receiver_that_still_speaks_this_version_is_used() {
    let remote = connect_to(&[VERSION + 1, VERSION], u64::MAX).await.expect("both speak version 1");
    assert_eq!((remote.session().version, remote.session().features), (VERSION, feature::KNOWN));
}

#[tokio::test(start_paused = true)]
async fn an_older_receiver_with_fewer_features_is_used_with_those() {
    let remote = connect_to(&[VERSION], feature::LZ4).await.expect("both speak version 1");
    assert_eq!(remote.session().features, feature::LZ4);
    let addresses = ["127.0.0.1".parse().expect("an address")];
    assert_eq!(remote.usage(&addresses).await.expect("nothing is asked"), None, "it would not understand");
    let device = Device::from_arc("remote", remote);
    let text = block::Data::copy_of(&[b'x'; 65536]);
    device.write(block::Mutation::data(Bytes(0), text)).await.expect("it is understood");
}

#[tokio::test(start_paused = true)]
async fn a_receiver_that_would_count_its_interfaces_without_its_migrations_is_not_asked() {
    let remote = connect_to(&[VERSION], feature::DIGESTS | 4).await.expect("both speak version 1");
    assert_eq!(remote.session().features, feature::DIGESTS);
    let addresses = ["127.0.0.1".parse().expect("an address")];
    assert_eq!(remote.usage(&addresses).await.expect("nothing is asked"), None, "its answer would make no sense");
}

#[tokio::test(start_paused = true)]
async fn a_receiver_of_another_age_is_an_error_that_says_so() {
    let error = connect_to(&[VERSION + 1], feature::KNOWN).await.err().expect("there is no common version");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.chain().contains("[1]") && error.chain().contains("[2]"), "{}", error.chain());
}
